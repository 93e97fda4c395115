"""Fair classification: a model whose errors do not fall on one group.

Every client's validation set is balanced between groups (equally many rows of each; of a group too small for that,
half). The problems on the rows are in `fair_problems.py`, what all tasks on a table share in `tabular.py`; here are the
task and its metrics, its methods and the scenario.

FedBiO and FedBiOAcc find group weights; a second stage trains the final model with them by FedAvg. With a limit on the
gap, `limited` trains models for several limits side by side and chooses among them (`fair_limit.py`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from nestfed.algorithms import ALGORITHMS
from nestfed.core.randomness import fold
from nestfed.core.rows import ClientRows
from nestfed.core.settings import UserError, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.data import TEST, TRAIN, VALIDATION
from nestfed.report.metrics import Metric
from nestfed.workbench.scenario import Method, Stage
from nestfed.workbench.scenarios.fair_limit import Choice, choose, count, describe
from nestfed.workbench.scenarios.fair_problems import (
    METRIC_LABELS,
    DisparityLimit,
    GapWeights,
    GroupMinimax,
    GroupWeights,
    LimitedGaps,
    RegularisedRisk,
    WeightedRisk,
)
from nestfed.workbench.scenarios.tabular import (
    AVERAGE_LOSS,
    LOCAL_STEPS,
    PARTS,
    STATISTICS,
    Tabular,
    TabularSetup,
    TabularTask,
    compute_area_under_roc,
    make_single_level_method,
    select_part,
)
from nestfed.workbench.task_options import FairnessOptions
from nestfed.workbench.trained import GroupThresholds, TabularModel

# ------------------------------------------------------------------------------------------------- the task


@struct
class FairnessTask(TabularTask):
    """Metrics pooled over the clients, by group."""

    full_batch: bool = static(default=False)  # a batch is all of the client's training rows

    def sample(self, data, key):
        batch = super().sample(data, key)
        return batch | {"train": self._all_rows(data)} if self.full_batch else batch

    def _all_rows(self, data: ClientRows) -> PyTree:
        train = select_part(data, TRAIN)
        rows, inside = train.all_rows(data.largest)
        return self.with_weight(rows, jnp.where(inside, data.largest / train.size, 0))

    def metrics(self, server, client, data, fed):
        theta = self.problem.params_of(server, client)  # computed once, not for every block of rows
        own = data.average(functools.partial(self._statistics, theta), rows_at_once=1024) * data.size
        # The outer objective is a mean over clients; everything else is pooled: totals over all clients' rows.
        objective = own[VALIDATION, :, -1].sum() / own[VALIDATION, :, 0].sum()
        constants = data.constants
        objective, counts = fed.mean((objective * constants["vote"], own * constants["scale"]))
        recorded = {"outer_loss": objective}
        for number, part in enumerate(PARTS):
            recorded |= {f"{part}_{name}": value for name, value in compute_rates(counts[number]).items()}
        return recorded

    def _statistics(self, theta: PyTree, batch: PyTree) -> Array:
        """Means over the batch of the statistics of every part and group: [parts, groups, statistics]."""
        rows, _ = batch
        logits, label = self.problem.model(theta, rows["inputs"]), rows["label"]
        predicted = (logits > 0).astype(logits.dtype)
        values = [
            jnp.ones_like(logits),
            label,
            predicted == label,
            predicted * label,
            predicted * (1 - label),
            optax.sigmoid_binary_cross_entropy(logits, label),
        ]
        member = jax.nn.one_hot(rows["part"] * self.groups + rows["group"], len(PARTS) * self.groups)
        means = member.astype(logits.dtype).T @ jnp.stack(values, 1) / logits.size
        return means.reshape(len(PARTS), self.groups, len(STATISTICS))


@struct
class GroupWeightsTask(FairnessTask):
    """Records the group weights too."""

    objective: str = static(default="outer_loss")

    def sample(self, data, key):
        sizes = data.constants["sizes"]
        known = dataclasses.replace(data, size=sizes[TRAIN] + sizes[VALIDATION])  # test rows lie last
        rows = known.draw_rows(fold(key, len(PARTS)), self.batch_size)
        return super().sample(data, key) | {"known": self.with_weight(rows, jnp.ones(self.batch_size))}

    def metrics(self, server, client, data, fed):
        weights = self.problem.weights(self.problem.tree(0, server.x))
        return super().metrics(server, client, data, fed) | {"weights": weights}


@struct
class ModelsTask(FairnessTask):
    """Metrics of the strictest of several models. Their losses rise while their gaps fall: none is to be made small."""

    objective: str | None = static(default=None)


def compute_rates(counts: Array) -> dict[str, Array]:
    """Loss, accuracy and gaps between groups from the statistics [groups, statistics] of one part.

    EqOpp: largest difference of true positive rates between two groups. Equalised odds: the larger one of that and of
    the largest difference of false positive rates. Parity: largest difference of shares of positive decisions. Groups
    without positives (negatives) are left out.
    """
    rows, positives, correct, true_positives, false_positives, loss = counts.T
    per_row = lambda total: total.sum() / jnp.maximum(rows.sum(), 1)
    gap = lambda hits, cases: _measure_spread(hits / jnp.maximum(cases, 1), cases > 0)
    equal_opportunity = gap(true_positives, positives)
    predicted = true_positives + false_positives
    return {
        "loss": per_row(loss),
        "accuracy": per_row(correct),
        "eqopp": equal_opportunity,
        "eqodds": jnp.maximum(equal_opportunity, gap(false_positives, rows - positives)),
        "parity": gap(predicted, rows),
    }


def find_gap_by_chance(positives: np.ndarray, found: np.ndarray) -> float:
    """How large a gap of true positive rates may be (in 19 of 20 draws at most this) if which positives were found had
    nothing to do with the groups [groups]."""
    some = positives > 0
    draws = np.random.default_rng(0).multivariate_hypergeometric(
        positives[some].astype(int), int(found.sum()), CHANCES, method="marginals"
    )
    return float(np.quantile(np.ptp(draws / positives[some], axis=1), 0.95))


def _measure_spread(values: Array, present: Array) -> Array:
    highest = jnp.max(jnp.where(present, values, -jnp.inf))
    return jnp.where(present.any(), highest - jnp.min(jnp.where(present, values, jnp.inf)), 0.0)


# ------------------------------------------------------------------------------------------------- set-up of a seed


@dataclasses.dataclass(frozen=True)
class FairnessSetup(TabularSetup):
    """One seed, and what FedBiO needs to know of it."""

    @functools.cached_property
    def curvature(self) -> float:
        """An estimate of the largest eigenvalue of the lower problem's Hessian without its penalty: lambda_max(X'X / n)
        / 4 for weights of 2. (Batches may be steeper, and for a network it is only the first layer's order of
        magnitude.)"""
        return float(np.linalg.eigvalsh(self.sum_of("moments") / self.train_sizes.sum())[-1]) / 4 * 2

    def measures(self):
        return super().measures() | {"moments": self._sum_moments}

    def _sum_moments(self) -> np.ndarray:
        """X'X of the training rows, whose last column is one."""
        inputs = self.data.inputs[self.data.part == TRAIN].astype(np.float64)
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
        return inputs.T @ inputs

    def compute_shares(self, metric: str, *parts: int) -> np.ndarray:
        """[kinds of rows, groups]: what share of all clients' rows of these parts a rate of this metric is about."""
        counts = self.sum_of("cells")[list(parts)].sum(0)  # [groups, label]
        labels = METRIC_LABELS[metric]
        inside = np.stack([counts.sum(1) if wanted is None else counts[:, wanted] for wanted in labels])
        return (np.maximum(inside, 0.5) / counts.sum()).astype(np.float32)  # an empty one is divided by


# ------------------------------------------------------------------------------------------------- methods


def make_weighted_risk(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    """The model's own stage: group weights of 1, or those that the stage before found, with its weights of clients."""
    weights, by_label, averaging = jnp.ones(setup.groups), False, None
    if before is not None:
        weights = before.problem.weights(before.problem.tree(0, before.server.x))
        by_label = before.problem.by_label
        averaging = choose_averaging(before.problem)
    penalty = scenario.options.penalty
    problem = WeightedRisk(weights=weights, by_label=by_label, penalty=penalty, model=setup.model)
    return scenario.pose(setup, problem, setup.theta, averaging=averaging)


def choose_averaging(problem: GroupWeights) -> str | None:
    """The gap of all clients' rows needs every row to count the same; None: as the user says."""
    return "samples" if isinstance(problem, GapWeights) else None


def make_regularised_risk(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    chosen = scenario.options
    problem = RegularisedRisk(
        groups=setup.groups, coefficient=chosen.regulariser, penalty=chosen.penalty, model=setup.model
    )
    return scenario.pose(setup, problem, setup.theta)


def make_group_weights(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    chosen = scenario.options
    settings = {
        "groups": setup.groups,
        "penalty": chosen.penalty,
        "gap": scenario.gap_weight,
        "model": setup.model,
        "form": chosen.weight_form,
        "by_label": scenario.weighs_labels,
    }
    if scenario.follows_paper:
        problem = GroupWeights(**settings)
    else:
        problem = GapWeights(shares=setup.compute_shares("eqopp", TRAIN, VALIDATION)[0], **settings)
    start, averaging = (problem.start(), setup.theta), choose_averaging(problem)
    return scenario.pose(setup, problem, start, task_class=GroupWeightsTask, averaging=averaging)


def make_limited_gaps(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    """Models for limits from nothing up to the gap that the plain model has, and one without a limit."""
    chosen, data = scenario.options, setup.data
    train = data.part == TRAIN
    plain = np.asarray(setup.model(before.theta, jnp.asarray(data.inputs[train])))[None] > 0
    (gap,) = count(plain, data.label[train], data.group[train], setup.groups, chosen.metric).gaps
    problem = LimitedGaps(
        shares=setup.compute_shares(chosen.metric, TRAIN),
        limits=np.append(gap * np.linspace(0, 1, LIMITS), 1.0).astype(np.float32),
        groups=setup.groups,
        metric=chosen.metric,
        penalty=chosen.penalty,
        model=setup.model,
    )
    larger = dataclasses.replace(setup, batch_size=LARGER_BATCH * setup.batch_size)
    return scenario.pose(larger, problem, problem.start(before.theta), task_class=ModelsTask, averaging="samples")


def make_group_minimax(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    """Risks of the pooled groups need every row to count the same: clients are weighed by their rows."""
    chosen = scenario.options
    problem = GroupMinimax(groups=setup.groups, penalty=chosen.penalty, model=setup.model)
    start = (setup.theta, jnp.ones(setup.groups) / setup.groups)
    return scenario.pose(setup, problem, start, averaging="samples", full_batch=chosen.full_batch)


def make_disparity_limit(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    problem = DisparityLimit(groups=setup.groups, penalty=scenario.options.penalty, model=setup.model)
    return scenario.pose(setup, problem, setup.theta)


def _make_two_stages(name: str, paper: dict[str, Any], gap: dict[str, Any]) -> Method:
    """Settings for either objective; with the gap `lower_lr` is in units of what the curvature allows."""

    def weights(scenario: "Fairness", setup: FairnessSetup) -> dict[str, Any]:
        step = 1 / (setup.curvature + scenario.options.penalty)
        own = paper if scenario.follows_paper else gap | {"lower_lr": _round(gap["lower_lr"] * step)}
        return own | {"local_steps": LOCAL_STEPS, "hypergradient.lr": _round(step)}

    model = lambda scenario, setup: {"lr": 0.1, "local_steps": LOCAL_STEPS}
    doc = f"{ALGORITHMS[name].__name__} learns group weights on balanced validation data; FedAvg then trains with them."
    stages = (Stage("weights", name, make_group_weights, weights), Stage("model", "fedavg", make_weighted_risk, model))
    return Method(ALGORITHMS[name].__name__, doc, stages)


def _choose_limited_settings(scenario: "Fairness", setup: FairnessSetup) -> dict[str, Any]:
    """Two stages of half the steps each: what a stage returns is the average of its points."""
    half, step = max(1, scenario.options.steps // 2), _round(1 / (setup.curvature + scenario.options.penalty))
    return {"lr": step, "dual_lr": 0.1, "gamma": np.inf, "stage_steps": half, "growth": 1.0, "shrink": 1.0} | {
        "local_steps": LOCAL_STEPS
    }


def _round(step: float) -> float:
    return float(f"{step:.2g}")


def _choose_fcfl_settings(scenario: "Fairness", setup: FairnessSetup) -> dict[str, Any]:
    return {"lr": 0.1, "tolerance": 0.05, "stage_one_steps": max(1, scenario.options.steps * 2 // 5)}


CHANCES = 1000  # draws by which the gap is known that chance gives
LIMITED = "limited"  # the method that a limit asks for
LIMITS = 8  # for which it trains models
LARGER_BATCH = 4  # times that of other methods: the rate of a small group is seen in few rows

METHODS: dict[str, Method] = {
    "fedavg": make_single_level_method("fedavg", make_weighted_risk, lr=0.1),
    "fedreg": Method(
        "FedReg",
        "FedAvg with a penalty on the gap of true positive rates in a batch.",
        (Stage("model", "fedavg", make_regularised_risk, lambda *_: {"lr": 0.1, "local_steps": LOCAL_STEPS}),),
    ),
    "fedminmax": Method(
        "FedMinMax",
        "Minimise the loss of the worst group; an exchange every step.",
        (
            # All rows in a step: too slow to try many.
            Stage(
                "model", "fedminmax", make_group_minimax, lambda *_: {"lr": 0.1, "weight_lr": 0.1}, "average", tuned={}
            ),
        ),
    ),
    "fcfl": Method(
        "FCFL",
        "Multi-objective descent under a limit on every client's disparity; an exchange every step.",
        (Stage("model", "fcfl", make_disparity_limit, _choose_fcfl_settings),),
    ),
    "fedbio": _make_two_stages("fedbio", {"lr": 0.1, "lower_lr": 0.1}, {"lr": 0.1, "lower_lr": 1.0}),
    # With the paper's c = 1 the momentum keeps most of the noise of its first batch (see the algorithm's page).
    "fedbioacc": _make_two_stages(
        "fedbioacc",
        {"lr": 1.0, "lower_lr": 10.0, "c_nu": 50.0, "c_omega": 50.0},
        # Weights and prices circle where the momentum lags behind: with c = 50 the gap ends above FedAvg's.
        {"lr": 10.0, "lower_lr": 30.0, "c_nu": 5000.0, "c_omega": 5000.0},
    ),
    **{name: make_single_level_method(name, make_weighted_risk, lr=0.1) for name in AVERAGE_LOSS},
    LIMITED: Method(
        "Limited",
        "Primal-dual training for several limits on the gap; chooses the most accurate model within the one given.",
        (
            Stage("model", "fedavg", make_weighted_risk, lambda *_: {"lr": 0.1, "local_steps": LOCAL_STEPS}),
            Stage("models", "coda-plus", make_limited_gaps, _choose_limited_settings, tuned={}),
        ),
    ),
}


# ------------------------------------------------------------------------------------------------- the scenario

JUDGED = 0.4  # of the rows that are no test rows: by them a limit is judged
PARITY = Metric("test_parity", "test gap of positive decisions", "lower")


@dataclasses.dataclass(frozen=True)
class Fairness(Tabular[FairnessSetup]):
    """The task "fairness"."""

    options: FairnessOptions = FairnessOptions()

    title: ClassVar[str] = "Fair classification"
    baseline: ClassVar[str] = "fedavg"
    select: ClassVar[str] = "outer_loss"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("test_eqopp", "test EqOpp gap", "lower"),
        Metric("test_accuracy", "test accuracy", "higher"),
        Metric("train_eqopp", "train EqOpp gap", "lower"),
        Metric("test_eqodds", "test equalised odds gap", "lower"),
        Metric("test_worst_group_accuracy", "test accuracy of the worst group", "higher"),
        Metric("test_auroc", "test AUROC", "higher"),
    )
    methods: ClassVar[dict[str, Method]] = METHODS
    setup_class: ClassVar[type[TabularSetup]] = FairnessSetup
    task_class: ClassVar[type[TabularTask]] = FairnessTask
    needs_group: ClassVar[bool] = True
    needs_positives: ClassVar[bool] = True

    @property
    def weighs_labels(self) -> bool:
        """Does FedBiO weigh the two labels of a group apart?"""
        return (self.options.weigh or ("group" if self.follows_paper else "group+label")) == "group+label"

    def method(self, name: str) -> Method:
        """With the gap in the upper loss the weights circle around a saddle point: their average counts."""
        method = super().method(name)
        weights, *later = method.stages
        if self.follows_paper or weights.task is not make_group_weights:
            return method
        return dataclasses.replace(method, stages=(dataclasses.replace(weights, output="average", tuned={}), *later))

    @property
    def follows_paper(self) -> bool:
        return self.options.objective == "paper"

    @property
    def gap_weight(self) -> float:
        """Of the gap in FedBiO's upper loss."""
        if self.options.gap is not None:
            return self.options.gap
        return 0.0 if self.follows_paper else 1.0

    @property
    def validation_fraction(self) -> float | None:
        return None if self.options.limit is None else JUDGED

    @property
    def headline(self) -> tuple[Metric, ...]:
        """The gap that a limit is about comes first."""
        asked = f"test_{self.options.metric}"
        first = [metric for metric in (*self.metrics, PARITY) if metric.name == asked]
        return (*first, *(metric for metric in self.metrics if metric.name != asked))

    def choose_methods(self, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        if self.options.limit is None:
            if asked is not None and LIMITED in asked:
                raise UserError(f"{LIMITED} was asked for without a limit; say how large the gap may be with limit=.")
            return super().choose_methods(asked)
        names = (Fairness.baseline,) if asked is None else asked
        return names if LIMITED in names else (*names, LIMITED)

    def check_private(self) -> None:
        if self.options.limit is not None:
            raise UserError(
                "a limit was given together with privacy, but the counts by group that it is judged by carry no noise; "
                "leave one of them out."
            )

    def leave(self, task: Task, server: Any, clients: Any) -> Any:
        if not isinstance(task.problem, LimitedGaps):
            return super().leave(task, server, clients)
        chosen = self.options
        limit = 1.0 if chosen.limit is None else chosen.limit
        return choose(
            task.problem, server, task.data.columns, limit, chosen.confidence, by_group=chosen.group_at_prediction
        )

    def list_candidates(self, setup: FairnessSetup, left: Any) -> pd.DataFrame:
        return left.table if isinstance(left, Choice) else super().list_candidates(setup, left)

    def make_model(self, setup: FairnessSetup, left: Any) -> TabularModel:
        model = super().make_model(setup, left)
        if not isinstance(left, Choice) or left.chosen.thresholds is None:
            return model
        of_groups = dict(zip(setup.data.group_names, map(float, left.chosen.thresholds), strict=True))
        columns = self.table.group_columns(self.options.group)
        return dataclasses.replace(model, thresholds=GroupThresholds(columns, of_groups))

    def logits(self, setup: FairnessSetup, left: Any) -> np.ndarray:
        logits = super().logits(setup, left)
        if not isinstance(left, Choice) or left.chosen.thresholds is None:
            return logits
        return logits - left.chosen.thresholds[setup.data.group]

    def score(self, final: Mapping[str, float]) -> float:
        """The loss on the validation sets, plus the gap there as far as the upper loss counts it."""
        return final["outer_loss"] + self.gap_weight * final["validation_eqopp"]

    def score_step_sizes(self, final: Mapping[str, float]) -> float:
        """The loss alone. The gap of few validation rows is mostly chance, and a model that is hardly trained has a
        small one: with it in the score, a step 13 times as large was chosen for FedAvg on Adult, and one a 25th as
        large for FedBiO on German Credit, which cost 2.5 points of accuracy."""
        return final["outer_loss"]

    def evaluate(self, setup: FairnessSetup, left: Any) -> tuple[dict[str, float], pd.DataFrame]:
        data = setup.data
        logits, rows = self.tabulate_outcomes(setup, left)
        predicted = logits > 0
        by_group = rows.groupby(["split", "group"])[list(STATISTICS)].sum()
        final = {"outer_loss": self._compute_outer_loss(setup, rows)}
        for part in by_group.index.get_level_values("split").unique():
            counts = by_group.loc[part].to_numpy(float)
            final |= {f"{part}_{name}": float(value) for name, value in compute_rates(counts).items()}
            final[f"{part}_worst_group_accuracy"] = float((counts[:, 2] / counts[:, 0]).min())
            inside = data.part == PARTS.index(part)
            final[f"{part}_auroc"] = compute_area_under_roc(logits[inside], data.label[inside])
            final[f"{part}_predicted_positive"] = float(predicted[inside].mean())
            if part == PARTS[TEST]:
                final["test_eqopp_by_chance"] = find_gap_by_chance(counts[:, 1], counts[:, 3])
        if isinstance(left, Choice):
            final |= {"within_limit": float(left.within), "gap_bound": left.bound}
        return final, self.tabulate_slices(rows)

    def list_warnings(self, final: pd.DataFrame) -> list[str]:
        if "test_predicted_positive" not in final:
            return []
        blind = final.loc[final["test_predicted_positive"] == 0, "method"]
        limited: Any = final[final["within_limit"].notna()] if "within_limit" in final else final.iloc[:0]
        said = [
            describe(self.methods[LIMITED].title, row["seed"], row, self.options) for row in limited.to_dict("records")
        ]
        said += self._warn_of_chance(final.loc[final["method"] == self.baseline])
        return said + [
            f"{self.methods[name].title}: a seed's model predicts the positive label for no test row at all, so its "
            "gaps of zero say nothing. Train longer, or give the positives more weight (the objective gap)."
            for name in dict.fromkeys(map(str, blind))
        ]

    def _warn_of_chance(self, final: pd.DataFrame) -> list[str]:
        """Of a gap, in these seeds of a method, that chance alone may give."""
        if "test_eqopp_by_chance" not in final or final.empty:
            return []
        gap, by_chance = (float(np.mean(final[name])) for name in ("test_eqopp", "test_eqopp_by_chance"))
        if not 0 < gap <= by_chance:
            return []
        return [
            f"the test EqOpp gap of {self.methods[self.baseline].title}, {gap:.3f}, may be chance: with so few "
            f"positive test rows in some groups, a model that treats all groups alike has gaps up to {by_chance:.3f}. "
            "Differences between methods say little here; give more rows, or other groups."
        ]

    def _compute_outer_loss(self, setup: FairnessSetup, rows: Any) -> float:
        """The mean over clients of the loss on their validation sets."""
        validation = rows[rows.split == "validation"].groupby("client").loss.mean()
        return float(
            setup.weigh_clients(self.options.client_weights) @ validation[list(setup.data.client_names)].to_numpy()
        )

    def list_entries(self, metric: str, setup: FairnessSetup) -> list[str]:
        names = setup.data.group_names
        if self.weighs_labels:
            return [f"weight of {name}, label {label}" for name in names for label in (0, 1)]
        return [f"weight of {name}" for name in names]
