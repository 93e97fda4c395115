"""Fair classification: a model whose errors do not fall on one group.

Every client's validation set is balanced between groups (equally many rows of each; of a group too small for that,
half). The problems on the rows are in `fair_problems.py`, what all tasks on a table share in `tabular.py`; here are the
task and its metrics, its methods and the scenario.

FedBiO and FedBiOAcc find group weights; a second stage trains the final model with them by FedAvg.
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
from nestfed.core.rows import ClientRows
from nestfed.core.settings import static, struct
from nestfed.core.types import Array, PyTree
from nestfed.data import TRAIN, VALIDATION
from nestfed.report.metrics import Metric
from nestfed.workbench.scenario import Method, Stage
from nestfed.workbench.scenarios.fair_problems import (
    DisparityLimit,
    GroupMinimax,
    GroupWeights,
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
    area_under_roc,
    part_of,
    single_level,
)
from nestfed.workbench.task_options import FairnessOptions

# ------------------------------------------------------------------------------------------------- the task


@struct
class FairnessTask(TabularTask):
    """Metrics pooled over the clients, by group."""

    full_batch: bool = static(default=False)  # a batch is all of the client's training rows

    def sample(self, data, key):
        batch = super().sample(data, key)
        return batch | {"train": self._all_rows(data)} if self.full_batch else batch

    def _all_rows(self, data: ClientRows) -> PyTree:
        train = part_of(data, TRAIN)
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
            recorded |= {f"{part}_{name}": value for name, value in rates(counts[number]).items()}
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

    def metrics(self, server, client, data, fed):
        weights = self.problem.weights(self.problem.tree(0, server.x))
        return super().metrics(server, client, data, fed) | {"weights": weights}


def rates(counts: Array) -> dict[str, Array]:
    """Loss, accuracy and gaps between groups from the statistics [groups, statistics] of one part.

    EqOpp: largest difference of true positive rates between two groups. Equalised odds: the larger one of that and of
    the largest difference of false positive rates. Groups without positives (negatives) are left out.
    """
    rows, positives, correct, true_positives, false_positives, loss = counts.T
    per_row = lambda total: total.sum() / jnp.maximum(rows.sum(), 1)
    gap = lambda hits, cases: _spread(hits / jnp.maximum(cases, 1), cases > 0)
    equal_opportunity = gap(true_positives, positives)
    return {
        "loss": per_row(loss),
        "accuracy": per_row(correct),
        "eqopp": equal_opportunity,
        "eqodds": jnp.maximum(equal_opportunity, gap(false_positives, rows - positives)),
    }


def _spread(values: Array, present: Array) -> Array:
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
        inputs = self.data.inputs[self.data.part == TRAIN]
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1), inputs.dtype)], 1)
        return float(np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1]) / 4 * 2


# ------------------------------------------------------------------------------------------------- methods


def weighted_risk(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    """The model's own stage: group weights of 1, or those that the stage before found."""
    weights, by_label = jnp.ones(setup.groups), False
    if before is not None:
        weights, by_label = before.problem.weights(before.server.x), before.problem.by_label
    penalty = scenario.options.penalty
    problem = WeightedRisk(weights=weights, by_label=by_label, penalty=penalty, model=setup.model)
    return scenario.pose(setup, problem, setup.theta)


def regularised_risk(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    chosen = scenario.options
    problem = RegularisedRisk(
        groups=setup.groups, coefficient=chosen.regulariser, penalty=chosen.penalty, model=setup.model
    )
    return scenario.pose(setup, problem, setup.theta)


def group_weights(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    chosen = scenario.options
    problem = GroupWeights(
        groups=setup.groups,
        penalty=chosen.penalty,
        gap=chosen.gap,
        model=setup.model,
        form=chosen.weight_form,
        by_label=scenario.weighs_labels,
    )
    return scenario.pose(setup, problem, (problem.start(), setup.theta), task_class=GroupWeightsTask)


def group_minimax(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    """Risks of the pooled groups need every row to count the same: clients are weighed by their rows."""
    chosen = scenario.options
    problem = GroupMinimax(groups=setup.groups, penalty=chosen.penalty, model=setup.model)
    start = (setup.theta, jnp.ones(setup.groups) / setup.groups)
    return scenario.pose(setup, problem, start, averaging="samples", full_batch=chosen.full_batch)


def disparity_limit(scenario: "Fairness", setup: FairnessSetup, before: Any) -> TabularTask:
    problem = DisparityLimit(groups=setup.groups, penalty=scenario.options.penalty, model=setup.model)
    return scenario.pose(setup, problem, setup.theta)


def _two_stages(name: str, settings: dict[str, Any]) -> Method:
    def weights(scenario: "Fairness", setup: FairnessSetup) -> dict[str, Any]:
        neumann_step = 1 / (setup.curvature + scenario.options.penalty)
        return settings | {"local_steps": LOCAL_STEPS, "hypergradient.lr": float(f"{neumann_step:.2g}")}

    model = lambda scenario, setup: {"lr": 0.1, "local_steps": LOCAL_STEPS}
    doc = f"{ALGORITHMS[name].__name__} learns group weights on balanced validation data; FedAvg then trains with them."
    stages = (Stage("weights", name, group_weights, weights), Stage("model", "fedavg", weighted_risk, model))
    return Method(ALGORITHMS[name].__name__, doc, stages)


def _fcfl(scenario: "Fairness", setup: FairnessSetup) -> dict[str, Any]:
    return {"lr": 0.1, "tolerance": 0.05, "stage_one_steps": max(1, scenario.options.steps * 2 // 5)}


METHODS: dict[str, Method] = {
    "fedavg": single_level("fedavg", weighted_risk, lr=0.1),
    "fedreg": Method(
        "FedReg",
        "FedAvg with a penalty on the gap of true positive rates in a batch.",
        (Stage("model", "fedavg", regularised_risk, lambda *_: {"lr": 0.1, "local_steps": LOCAL_STEPS}),),
    ),
    "fedminmax": Method(
        "FedMinMax",
        "Minimise the loss of the worst group; an exchange every step.",
        (Stage("model", "fedminmax", group_minimax, lambda *_: {"lr": 0.1, "weight_lr": 0.1}, "average"),),
    ),
    "fcfl": Method(
        "FCFL",
        "Multi-objective descent under a limit on every client's disparity; an exchange every step.",
        (Stage("model", "fcfl", disparity_limit, _fcfl),),
    ),
    "fedbio": _two_stages("fedbio", {"lr": 0.1, "lower_lr": 0.1}),
    # With the paper's c = 1 the momentum keeps most of the noise of its first batch (see the algorithm's page).
    "fedbioacc": _two_stages("fedbioacc", {"lr": 1.0, "lower_lr": 10.0, "c_nu": 50.0, "c_omega": 50.0}),
    **{name: single_level(name, weighted_risk, lr=0.1) for name in AVERAGE_LOSS},
}


# ------------------------------------------------------------------------------------------------- the scenario


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
        return self.options.weigh == "group+label"

    def score(self, final: Mapping[str, float]) -> float:
        """The loss on the balanced validation sets, plus the gap there as far as the upper loss counts it."""
        return final["outer_loss"] + self.options.gap * final["validation_eqopp"]

    def evaluate(self, setup: FairnessSetup, left: Any) -> tuple[dict[str, float], pd.DataFrame]:
        data = setup.data
        logits, rows = self.outcomes(setup, left)
        predicted = logits > 0
        by_group = rows.groupby(["split", "group"])[list(STATISTICS)].sum()
        final = {"outer_loss": self._outer_loss(setup, rows)}
        for part in by_group.index.get_level_values("split").unique():
            counts = by_group.loc[part].to_numpy(float)
            final |= {f"{part}_{name}": float(value) for name, value in rates(counts).items()}
            final[f"{part}_worst_group_accuracy"] = float((counts[:, 2] / counts[:, 0]).min())
            inside = data.part == PARTS.index(part)
            final[f"{part}_auroc"] = area_under_roc(logits[inside], data.label[inside])
            final[f"{part}_predicted_positive"] = float(predicted[inside].mean())
        return final, self.slices(rows)

    def warnings(self, final: pd.DataFrame) -> list[str]:
        if "test_predicted_positive" not in final:
            return []
        blind = final.loc[final["test_predicted_positive"] == 0, "method"]
        return [
            f"{self.methods[name].title}: a seed's model predicts the positive label for no test row at all, so its "
            "gaps of zero say nothing. Train longer, or give the positives more weight (--weigh group+label --gap 1)."
            for name in dict.fromkeys(map(str, blind))
        ]

    def _outer_loss(self, setup: FairnessSetup, rows: Any) -> float:
        """The mean over clients of the loss on their validation sets."""
        validation = rows[rows.split == "validation"].groupby("client").loss.mean()
        return float(
            setup.client_weights(self.options.averaging) @ validation[list(setup.data.client_names)].to_numpy()
        )

    def entries(self, metric: str, setup: FairnessSetup) -> list[str]:
        names = setup.data.group_names
        if self.weighs_labels:
            return [f"weight of {name}, label {label}" for name in names for label in (0, 1)]
        return [f"weight of {name}" for name in names]
