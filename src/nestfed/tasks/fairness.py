"""Fair classification: a model whose errors do not fall on one group.

Every client holds rows with inputs, a binary label s and a group a, in three parts: training rows, a validation set
balanced between groups (equally many rows of each; of a group too small for that, half), and test rows. The problems
on these rows are in `fair_problems.py`; here are the task and its metrics, the set-up of a seed, methods and kind.

FedBiO and FedBiOAcc find group weights; a second stage trains the final model with them by FedAvg.
"""

import dataclasses
import functools
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from scipy import stats

from nestfed.algorithms import ALGORITHMS
from nestfed.core import Array, ClientRows, Layout, PyTree, Rows, Task, UserError, setting, static, struct
from nestfed.data import TRAIN, VALIDATION, Encoder, Federated, Table, federate, load, overview, read_table, summary
from nestfed.data.table import check_column
from nestfed.methods import Kind, Method, Stage
from nestfed.models import MODELS, Perceptron, model_named
from nestfed.randomness import fold
from nestfed.record import Metric
from nestfed.tasks.fair_problems import DisparityLimit, GroupMinimax, GroupWeights, RegularisedRisk, WeightedRisk

PARTS = ("train", "validation", "test")
STATISTICS = ("rows", "positives", "correct", "true_positives", "false_positives", "loss")


# ------------------------------------------------------------------------------------------------- the task


@struct
class FairnessTask(Task):
    """Rows of three parts per client; metrics pooled over the clients, by group."""

    groups: int = static(default=1)
    full_batch: bool = static(default=False)  # a batch is all of the client's training rows

    def sample(self, data, key):
        drawn = lambda part: self._with_weight(
            part_of(data, part).draw_rows(fold(key, part), self.batch_size), jnp.ones(self.batch_size)
        )
        train = self._all_rows(data) if self.full_batch else drawn(TRAIN)
        return {"train": train, "validation": drawn(VALIDATION), "shares": data.constants["shares"]}

    def _all_rows(self, data: ClientRows) -> PyTree:
        train = part_of(data, TRAIN)
        rows, inside = train.all_rows(data.largest)
        return self._with_weight(rows, jnp.where(inside, data.largest / train.size, 0))

    def _with_weight(self, rows: PyTree, weight: Array) -> PyTree:
        return rows | {"weight": weight.astype(rows["label"].dtype)}

    def metrics(self, server, client, data, fed):
        theta = self.problem.theta(server, client)  # computed once, not for every block of rows
        own = data.average(functools.partial(self._statistics, theta), rows_at_once=1024) * data.size
        # The outer objective is a mean over clients; everything else is pooled: totals over all clients' rows.
        objective = own[VALIDATION, :, -1].sum() / own[VALIDATION, :, 0].sum()
        constants = data.constants
        objective, counts = fed.mean((objective * constants["vote"], own * constants["scale"]))
        recorded = {"outer_loss": objective}
        for number, part in enumerate(PARTS):
            recorded |= {f"{part}_{name}": value for name, value in rates(counts[number]).items()}
        if isinstance(self.problem, GroupWeights):
            recorded["weights"] = self.problem.weights(self.problem.tree(0, server.x))
        return recorded

    def _statistics(self, theta: PyTree, batch: PyTree) -> Array:
        """Means over the batch of the statistics of every part and group: [parts, groups, statistics]."""
        rows, _ = batch
        logits, label = self.problem.model(theta, rows["inputs"]), rows["label"]
        predicted = (logits > 0).astype(logits.dtype)
        values = [
            jnp.ones_like(logits), label, predicted == label, predicted * label, predicted * (1 - label),
            optax.sigmoid_binary_cross_entropy(logits, label),
        ]  # fmt: skip
        member = jax.nn.one_hot(rows["part"] * self.groups + rows["group"], len(PARTS) * self.groups)
        means = member.astype(logits.dtype).T @ jnp.stack(values, 1) / logits.size
        return means.reshape(len(PARTS), self.groups, len(STATISTICS))


def part_of(data: ClientRows, part: int) -> ClientRows:
    """The view of one part of a client's rows: training rows lie first, then validation, then test."""
    sizes = data.constants["sizes"]
    return dataclasses.replace(data, offset=data.offset + sizes[:part].sum(dtype=sizes.dtype), size=sizes[part])


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
class FairnessSetup:
    """One seed: rows dealt, split and encoded, a model and where it starts."""

    data: Federated
    rows: Rows
    model: Perceptron
    theta: PyTree  # where the model starts
    batch_size: int
    kind: "Fairness"

    @property
    def groups(self) -> int:
        return len(self.data.group_names)

    def task(self, problem: Any, params: PyTree, *, averaging: str | None = None, **fields: Any) -> FairnessTask:
        usual = self.client_weights(self.kind.averaging)
        weights = usual if averaging is None else self.client_weights(averaging)
        # Metrics must not depend on a method's own weights of fed.mean: `scale` makes a total of the mean, `vote` a
        # mean with the usual weights.
        constants = self.rows.constants | {
            "scale": (1 / weights).astype(np.float32), "vote": (usual / weights).astype(np.float32),
        }  # fmt: skip
        return FairnessTask.create(
            problem, dataclasses.replace(self.rows, constants=constants), params, batch_size=self.batch_size,
            weights=weights, groups=self.groups, **fields,
        )  # fmt: skip

    def client_weights(self, averaging: str) -> np.ndarray:
        sizes = np.asarray(self.rows.constants["sizes"])[:, TRAIN].astype(float)
        return np.full(sizes.size, 1 / sizes.size) if averaging == "uniform" else sizes / sizes.sum()

    @property
    def group_problem(self) -> GroupWeights:
        kind = self.kind
        return GroupWeights(
            groups=self.groups, penalty=kind.penalty, gap=kind.gap, model=self.model, form=kind.weight_form
        )

    @functools.cached_property
    def curvature(self) -> float:
        """An estimate of the largest eigenvalue of the lower problem's Hessian: lambda_max(X'X / n) / 4 for weights of
        2. (Batches may be steeper, and for a network it is only the first layer's order of magnitude.)"""
        inputs = self.data.inputs[self.data.part == TRAIN]
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1), inputs.dtype)], 1)
        return float(np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1]) / 4 * 2 + self.kind.penalty


def fairness_rows(data: Federated) -> Rows:
    """The pool: client after client, each with its training, validation and test rows in this order."""
    clients, groups = len(data.client_names), len(data.group_names)
    order = np.argsort(data.part, kind="stable")
    columns = {
        "inputs": data.inputs[order],
        "label": data.label[order].astype(np.float32),
        "group": data.group[order].astype(np.int32),
        "part": data.part[order].astype(np.int32),
    }
    cells = np.zeros((clients, len(PARTS), groups), np.int64)
    np.add.at(cells, (data.client, data.part, data.group), 1)
    train = cells[:, TRAIN]
    constants = {
        "sizes": cells.sum(2).astype(np.int32),
        "shares": (train / train.sum(1, keepdims=True)).astype(np.float32),
    }
    return Rows.from_table(columns, data.client[order], constants=constants)


# ------------------------------------------------------------------------------------------------- methods


def weighted_risk(setup: FairnessSetup, before: Any) -> FairnessTask:
    """The model's own stage: group weights of 1, or those that the stage before found."""
    weights = jnp.ones(setup.groups) if before is None else setup.group_problem.weights(before.x)
    problem = WeightedRisk(weights=weights, groups=setup.groups, penalty=setup.kind.penalty, model=setup.model)
    return setup.task(problem, setup.theta)


def regularised_risk(setup: FairnessSetup, before: Any) -> FairnessTask:
    problem = RegularisedRisk(
        groups=setup.groups, coefficient=setup.kind.regulariser, penalty=setup.kind.penalty, model=setup.model
    )
    return setup.task(problem, setup.theta)


def group_weights(setup: FairnessSetup, before: Any) -> FairnessTask:
    number = setup.groups * (2 if setup.kind.weigh == "group+label" else 1)
    start = jnp.ones(number) if setup.kind.weight_form == "projected" else jnp.zeros(number)
    return setup.task(setup.group_problem, (start, setup.theta))


def group_minimax(setup: FairnessSetup, before: Any) -> FairnessTask:
    """Risks of the pooled groups need every row to count the same: clients are weighed by their rows."""
    problem = GroupMinimax(groups=setup.groups, penalty=setup.kind.penalty, model=setup.model)
    start = (setup.theta, jnp.ones(setup.groups) / setup.groups)
    return setup.task(problem, start, averaging="samples", full_batch=setup.kind.full_batch)


def disparity_limit(setup: FairnessSetup, before: Any) -> FairnessTask:
    problem = DisparityLimit(groups=setup.groups, penalty=setup.kind.penalty, model=setup.model)
    return setup.task(problem, setup.theta)


LOCAL_STEPS = 5


def _single_level(name: str) -> Method:
    """Any algorithm for averages of losses trains the model without regard to groups."""
    settings = lambda setup: {"lr": 0.1, "local_steps": LOCAL_STEPS}
    doc = (ALGORITHMS[name].__doc__ or "").splitlines()[0]
    return Method(ALGORITHMS[name].__name__, doc, (Stage("model", name, weighted_risk, settings),))


def _two_stages(name: str, settings: dict[str, Any]) -> Method:
    weights = lambda setup: settings | {"local_steps": LOCAL_STEPS, "hypergradient.lr": _neumann_step(setup)}
    model = lambda setup: {"lr": 0.1, "local_steps": LOCAL_STEPS}
    doc = f"{ALGORITHMS[name].__name__} learns group weights on balanced validation data; FedAvg then trains with them."
    stages = (Stage("weights", name, group_weights, weights), Stage("model", "fedavg", weighted_risk, model))
    return Method(ALGORITHMS[name].__name__, doc, stages)


def _neumann_step(setup: FairnessSetup) -> float:
    return float(f"{1 / setup.curvature:.2g}")


METHODS: dict[str, Method] = {
    "fedavg": _single_level("fedavg"),
    "fedreg": Method(
        "FedReg", "FedAvg with a penalty on the gap of true positive rates in a batch.",
        (Stage("model", "fedavg", regularised_risk, lambda setup: {"lr": 0.1, "local_steps": LOCAL_STEPS}),),
    ),
    "fedminmax": Method(
        "FedMinMax", "Minimise the loss of the worst group; an exchange every step.",
        (Stage("model", "fedminmax", group_minimax, lambda setup: {"lr": 0.1, "weight_lr": 0.1}, "average"),),
    ),
    "fcfl": Method(
        "FCFL", "Multi-objective descent under a limit on every client's disparity; an exchange every step.",
        (
            Stage(
                "model", "fcfl", disparity_limit,
                lambda setup: {"lr": 0.1, "tolerance": 0.05, "stage_one_steps": max(1, setup.kind.steps * 2 // 5)},
            ),
        ),
    ),
    "fedbio": _two_stages("fedbio", {"lr": 0.1, "lower_lr": 0.1}),
    # With the paper's c = 1 the momentum keeps most of the noise of its first batch (see the algorithm's page).
    "fedbioacc": _two_stages("fedbioacc", {"lr": 1.0, "lower_lr": 10.0, "c_nu": 50.0, "c_omega": 50.0}),
    **{name: _single_level(name) for name in ("fedprox", "scaffold", "fedadagrad", "fedadam", "fedyogi")},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- the kind


@dataclasses.dataclass(frozen=True)
class FairModel:
    """A trained model with what it takes to use it on new rows."""

    model: Perceptron
    theta: PyTree
    encoder: Encoder

    def probability(self, frame: pd.DataFrame) -> np.ndarray:
        """The probability of the positive label for every row of a table with the columns of the training data."""
        self.encoder.check(frame)
        return np.asarray(jax.nn.sigmoid(self.model(self.theta, jnp.asarray(self.encoder.transform(frame)))))

    def save(self, path: Path) -> None:
        """One file of plain arrays and text: nothing in it can run code."""
        path.parent.mkdir(parents=True, exist_ok=True)
        leaves = {f"theta/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.theta))}
        about = {"hidden": list(self.model.hidden), "encoder": self.encoder.to_dict()}
        np.savez(path, allow_pickle=False, about=np.array(json.dumps(about)), **leaves)

    @classmethod
    def load(cls, path: str | Path) -> "FairModel":
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                leaves = [file[f"theta/{i}"] for i in range(len(file.files) - 1)]
            model, encoder = Perceptron(tuple(about["hidden"])), Encoder.from_dict(about["encoder"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is not a model of a fairness run ({type(error).__name__}: {error}).") from error
        structure = jax.tree.structure(jax.eval_shape(lambda: model.init(jax.random.key(0), len(encoder.names))))
        return cls(model, jax.tree.unflatten(structure, leaves), encoder)


def area_under_roc(scores: np.ndarray, label: np.ndarray) -> float:
    """The probability that a positive row scores higher than a negative one, ties counting half; NaN without both."""
    positives = int(label.sum())
    pairs = positives * (label.size - positives)
    if pairs == 0:
        return np.nan
    return float((stats.rankdata(scores)[label == 1].sum() - positives * (positives + 1) / 2) / pairs)


@dataclasses.dataclass(frozen=True)
class Fairness(Kind):
    """Options of the task "fairness"."""

    data: str = "adult"
    label: str | None = None
    positive: str | None = None
    threshold: float | None = None
    group: str | None = None
    clients: str | int | None = None
    partition: str | None = None
    features: str = "standard"
    keep_group: bool = False
    drop: tuple[str, ...] = ()
    test_fraction: float = setting("share of test rows", default=0.3, above=0, at_most=0.9)
    model: str = setting("the model", default="logistic", choices=tuple(MODELS), static=True)
    penalty: float = setting("mu: strength of (mu / 2) |theta|^2", default=1e-3, at_least=0)
    batch_size: int | None = setting("rows per batch", default=None, at_least=1, static=True)
    averaging: str = setting("weights of the clients", default="uniform", choices=("uniform", "samples"), static=True)
    weigh: str = setting("what FedBiO weighs", default="group", choices=("group", "group+label"), static=True)
    weight_form: str = setting(
        "how FedBiO's variable gives weights", default="projected", choices=("projected", "softmax"), static=True
    )
    gap: float = setting("weight of the true positive rate gap in FedBiO's upper loss", default=0.0, at_least=0)
    regulariser: float = setting("coefficient of FedReg", default=0.1, at_least=0)
    full_batch: bool = setting("FedMinMax sees all rows in a step", default=True, static=True)
    steps: int = setting("local steps of every stage", default=2000, at_least=1, static=True)

    name: ClassVar[str] = "fairness"
    title: ClassVar[str] = "Fair classification"
    description: ClassVar[str] = "a classifier with equal true positive rates in all groups (bilevel group weights)"
    baseline: ClassVar[str] = "fedavg"
    usual: ClassVar[tuple[str, ...]] = ("fedavg", "fedbio")
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

    @functools.cached_property
    def table(self) -> Table:
        """The data, read once."""
        path = self._path
        if path is None:
            return self._changed(load(self.data))
        if self.label is None:
            raise UserError(f"{path} was given without a label; name the column to predict with label=.")
        if self.group is None:
            raise UserError(f"{path} was given without a group; name the column of the sensitive groups with group=.")
        return read_table(
            path, label=self.label, group=self.group, clients=self.client_column, positive=self.positive,
            threshold=self.threshold, drop=self.drop,
        )  # fmt: skip

    def _changed(self, known: Table) -> Table:
        """A data set by name, with the roles that the user gave its columns."""
        roles = [("label", self.label), ("client", self.client_column), *(("drop", column) for column in self.drop)]
        for role, column in roles:
            if column is not None:
                check_column(known.frame.columns, column, role, known.name)
        changes: dict[str, Any] = {"drop": (*known.drop, *self.drop)}
        if self.label is not None or self.positive is not None or self.threshold is not None:
            changes |= {"positive": self.positive, "threshold": self.threshold, "label": self.label or known.label}
        if self.client_column is not None:
            changes["client"] = self.client_column
        # Only the chosen group is one: the others may be features.
        changes["groups"] = (self.group or known.groups[0],)
        return dataclasses.replace(known, **changes)

    @property
    def _path(self) -> str | None:
        """The user's own file, or None for a data set by name."""
        return self.data if any(mark in self.data for mark in "./\\") else None

    @property
    def client_column(self) -> str | None:
        return None if self.clients is None or str(self.clients).isdecimal() else str(self.clients)

    def set_up(self, seed: int) -> FairnessSetup:
        if self.client_column is not None and self.partition not in (None, "column"):
            raise UserError(
                f"clients={self.clients!r} names a column and partition={self.partition!r} deals rows otherwise; "
                "give a number of clients, or leave the partition out."
            )
        number = None if self.clients is None or self.client_column else int(self.clients)
        data = federate(
            self.table, group=self.group, partition=self.partition, clients=number, test_fraction=self.test_fraction,
            recipe=self.features, keep_group=self.keep_group, seed=seed,
        )  # fmt: skip
        model = model_named(self.model)
        start = model.init(jax.random.key(seed), data.inputs.shape[1])
        batch_size = self.batch_size or (128 if len(data.label) > 5000 else 32)
        return FairnessSetup(data, fairness_rows(data), model, start, batch_size, self)

    def score(self, final: Mapping[str, float]) -> float:
        """The loss on the balanced validation sets, plus the gap there as far as the upper loss counts it."""
        return final["outer_loss"] + self.gap * final["validation_eqopp"]

    def summary(self) -> list[tuple[str, pd.DataFrame]]:
        table = self.table
        rule = f"= {table.positive}" if table.threshold is None else f"> {table.threshold:g}"
        return [("Columns", summary(table)), (f"Groups; positive means {table.label} {rule}", overview(table))]

    def notes(self, setup: FairnessSetup) -> list[str]:
        return list(self.table.notes)

    def holdings(self, setup: FairnessSetup) -> pd.DataFrame:
        return setup.data.holdings()

    def trained(self, setup: FairnessSetup, server: Any) -> FairModel:
        layout = Layout.of(setup.theta, "theta")
        return FairModel(setup.model, jax.tree.map(np.asarray, layout.unflatten(server.x)), setup.data.encoder)

    def evaluate(self, setup: FairnessSetup, server: Any) -> tuple[dict[str, float], pd.DataFrame]:
        data, theta = setup.data, self.trained(setup, server).theta
        logits = np.asarray(setup.model(theta, jnp.asarray(data.inputs)), np.float64)
        predicted = logits > 0
        rows: Any = pd.DataFrame(
            {
                "split": np.asarray(PARTS)[data.part],
                "group": np.asarray(data.group_names)[data.group],
                "client": np.asarray(data.client_names)[data.client],
                "rows": 1,
                "positives": data.label,
                "correct": predicted == data.label,
                "true_positives": predicted & (data.label == 1),
                "false_positives": predicted & (data.label == 0),
                "loss": np.logaddexp(0, logits) - logits * data.label,
            }
        )
        parts = [self._slice_rates(rows, by) for by in ("group", "client")]
        by_group = rows.groupby(["split", "group"])[list(STATISTICS)].sum()
        final = {"outer_loss": self._outer_loss(setup, rows)}
        for part in by_group.index.get_level_values("split").unique():
            counts = by_group.loc[part].to_numpy(float)
            final |= {f"{part}_{name}": float(value) for name, value in rates(counts).items()}
            final[f"{part}_worst_group_accuracy"] = float((counts[:, 2] / counts[:, 0]).min())
            inside = data.part == PARTS.index(part)
            final[f"{part}_auroc"] = area_under_roc(logits[inside], data.label[inside])
            final[f"{part}_predicted_positive"] = float(predicted[inside].mean())
        return final, pd.concat(parts, ignore_index=True)

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
        return float(setup.client_weights(setup.kind.averaging) @ validation[list(setup.data.client_names)].to_numpy())

    def entries(self, metric: str, setup: FairnessSetup) -> list[str]:
        names = setup.data.group_names
        if self.weigh == "group+label":
            return [f"weight of {name}, label {label}" for name in names for label in (0, 1)]
        return [f"weight of {name}" for name in names]

    def _slice_rates(self, rows: Any, by: str) -> pd.DataFrame:
        sums = rows.groupby(["split", by])[list(STATISTICS)].sum().astype(float)
        share = lambda hits, cases: (hits / cases).where(cases > 0)
        values: Any = pd.DataFrame(
            {
                "accuracy": sums.correct / sums.rows,
                "true positive rate": share(sums.true_positives, sums.positives),
                "false positive rate": share(sums.false_positives, sums.rows - sums.positives),
                "loss": sums.loss / sums.rows,
            }
        )
        long = values.rename_axis(columns="metric").stack().rename("value").reset_index()
        return long.rename(columns={by: "slice"}).assign(kind=by)[["kind", "slice", "split", "metric", "value"]]
