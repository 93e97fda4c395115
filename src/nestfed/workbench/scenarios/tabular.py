"""What tasks on a table have in common: rows dealt to clients, a model of a binary label, how it is used and judged.

Every client holds rows with inputs, a binary label s and a group a, in three parts: training rows, a validation set and
test rows. A named task (`fairness`, `robust`) adds its problems, its methods and its metrics.
"""

import dataclasses
import functools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax import lax

from nestfed.algorithms import ALGORITHMS
from nestfed.core.algorithm import Fed
from nestfed.core.randomness import fold
from nestfed.core.rows import ClientRows, Layout, Rows
from nestfed.core.settings import UserError, setting, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.data import TRAIN, VALIDATION, Encoder, Federated, Table, federate, load, overview, read_table, summary
from nestfed.data.table import check_column
from nestfed.models import MODELS, Perceptron, model_named
from nestfed.problems.robust import MeanLoss
from nestfed.workbench.scenario import Kind, Method, Stage

PARTS = ("train", "validation", "test")
ROWS_AT_ONCE = 1024  # of a client, in an evaluation
STATISTICS = ("rows", "positives", "correct", "true_positives", "false_positives", "loss")


# ------------------------------------------------------------------------------------------------- the task


def losses(model: Perceptron, theta: PyTree, rows: PyTree) -> Array:
    """The logistic loss of every row."""
    return optax.sigmoid_binary_cross_entropy(model(theta, rows["inputs"]), rows["label"])


@dataclasses.dataclass(frozen=True)
class RowLosses:
    """The losses of a batch's training rows. A plain value: problems with equal ones share their programs."""

    model: Perceptron

    def __call__(self, theta: PyTree, batch: PyTree, key: Array) -> Array:
        return losses(self.model, theta, batch["train"])


@struct
class TabularTask(Task):
    """Rows of three parts per client. A batch has training rows, validation rows and the client's shares of groups;
    what a problem does not look at is not drawn."""

    groups: int = static(default=1)

    def sample(self, data, key):
        drawn = lambda part: self.with_weight(
            part_of(data, part).draw_rows(fold(key, part), self.batch_size), jnp.ones(self.batch_size)
        )
        return {"train": drawn(TRAIN), "validation": drawn(VALIDATION), "shares": data.constants["shares"]}

    def with_weight(self, rows: PyTree, weight: Array) -> PyTree:
        return rows | {"weight": weight.astype(rows["label"].dtype)}


def part_of(data: ClientRows, part: int) -> ClientRows:
    """The view of one part of a client's rows: training rows lie first, then validation, then test."""
    sizes = data.constants["sizes"]
    return dataclasses.replace(data, offset=data.offset + sizes[:part].sum(dtype=sizes.dtype), size=sizes[part])


class Pool(NamedTuple):
    """All rows of all clients, every field [rows]."""

    logit: Array
    label: Array
    part: Array
    group: Array
    client: Array


@struct
class PooledTask(TabularTask):
    """Metrics of the rows of all clients together, where means do not tell: everybody's outputs are gathered to
    evaluate."""

    model: Perceptron = static()
    total: int = static()  # rows of all clients

    def pool(self, theta: PyTree, data: ClientRows, fed: Fed) -> Pool:
        place = jnp.arange(data.largest, dtype=data.size.dtype)
        mine = data.take(jnp.minimum(place, data.size - 1))
        own = Pool(self._logits(theta, data), mine["label"], mine["part"], mine["group"], jnp.zeros_like(mine["group"]))
        theirs, sizes = fed.gather((own, data.size))
        theirs = theirs._replace(client=theirs.client + jnp.arange(self.clients, dtype=theirs.client.dtype)[:, None])
        start = jnp.cumsum(sizes) - sizes
        inside = place[None] < sizes[:, None]
        to = jnp.where(inside, start[:, None] + place[None], self.total)  # beyond the end: left out
        return jax.tree.map(lambda a: jnp.zeros(self.total, a.dtype).at[to].set(a, mode="drop"), theirs)

    def _logits(self, theta: PyTree, data: ClientRows) -> Array:
        """Of all of a client's rows, block by block; what lies behind them repeats the last one."""
        block = min(ROWS_AT_ONCE, data.largest)
        within = jnp.arange(block, dtype=data.size.dtype)
        rows = lambda b: data.take(jnp.minimum(b * block + within, data.size - 1))["inputs"]
        blocks = jnp.arange(-(-data.largest // block), dtype=data.size.dtype)
        return lax.map(lambda b: self.model(theta, rows(b)), blocks).reshape(-1)[: data.largest]


# ------------------------------------------------------------------------------------------------- set-up of a seed


@dataclasses.dataclass(frozen=True)
class TabularSetup:
    """One seed: rows dealt, split and encoded, a model and where it starts."""

    data: Federated
    rows: Rows
    model: Perceptron
    theta: PyTree  # where the model starts
    batch_size: int
    kind: Any  # the kind that made it

    task_class: ClassVar[type[TabularTask]]

    @property
    def groups(self) -> int:
        return len(self.data.group_names)

    def task(self, problem: Any, params: PyTree, *, averaging: str | None = None, **fields: Any) -> TabularTask:
        usual = self.client_weights(self.kind.averaging)
        weights = usual if averaging is None else self.client_weights(averaging)
        # Metrics must not depend on a method's own weights of fed.mean: `scale` makes a total of the mean, `vote` a
        # mean with the usual weights.
        constants = self.rows.constants | {
            "scale": (1 / weights).astype(np.float32), "vote": (usual / weights).astype(np.float32),
        }  # fmt: skip
        return self.task_class.create(
            problem, dataclasses.replace(self.rows, constants=constants), params, batch_size=self.batch_size,
            weights=weights, groups=self.groups, **fields,
        )  # fmt: skip

    @property
    def pooled(self) -> dict[str, Any]:
        """What a `PooledTask` needs beside."""
        return {"model": self.model, "total": len(self.data.label)}

    @property
    def train_sizes(self) -> np.ndarray:
        """Training rows of every client."""
        return np.asarray(self.rows.constants["sizes"])[:, TRAIN].astype(float)

    def client_weights(self, averaging: str) -> np.ndarray:
        sizes = self.train_sizes
        return np.full(sizes.size, 1 / sizes.size) if averaging == "uniform" else sizes / sizes.sum()


def table_rows(data: Federated, *, positives_last: bool = False) -> Rows:
    """The pool: client after client, each with its training, validation and test rows in this order; within each of
    these parts the positive rows may lie last."""
    clients, groups = len(data.client_names), len(data.group_names)
    order = np.lexsort((data.label, data.part)) if positives_last else np.argsort(data.part, kind="stable")
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

LOCAL_STEPS = 5
AVERAGE_LOSS = ("fedprox", "scaffold", "fedadagrad", "fedadam", "fedyogi")  # beside FedAvg, everybody's baseline


def mean_loss(setup: TabularSetup, before: Any) -> TabularTask:
    """The mean logistic loss of the training rows."""
    problem = MeanLoss(losses=RowLosses(setup.model), weight_decay=setup.kind.penalty)
    return setup.task(problem, setup.theta)


def single_level(name: str, task: Callable[[Any, Any], TabularTask], lr: float) -> Method:
    """Any algorithm for averages of losses, as a method of one stage."""
    settings = lambda setup: {"lr": lr, "local_steps": LOCAL_STEPS}
    doc = (ALGORITHMS[name].__doc__ or "").splitlines()[0]
    return Method(ALGORITHMS[name].__name__, doc, (Stage("model", name, task, settings),))


# ------------------------------------------------------------------------------------------------- the trained model


@dataclasses.dataclass(frozen=True)
class TabularModel:
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
        save_model(path, self.model, self.theta, self.encoder)

    @classmethod
    def load(cls, path: str | Path) -> "TabularModel":
        model, theta, encoder, about = read_model(path)
        if "clients" in about:
            raise UserError(
                f"{path} holds models of {len(about['clients'])} clients; load it by nestfed.ClientModels.load "
                "and take that of one client: .of(name)."
            )
        return cls(model, theta, encoder)


def save_model(path: Path, model: Perceptron, theta: PyTree, encoder: Encoder, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = {f"theta/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(theta))}
    about = {"hidden": list(model.hidden), "encoder": encoder.to_dict(), **more}
    np.savez(path, allow_pickle=False, about=np.array(json.dumps(about)), **leaves)


def read_model(path: str | Path) -> tuple[Perceptron, PyTree, Encoder, dict[str, Any]]:
    """What `save_model` wrote: (model, parameters, encoder, all that the file says)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            leaves = [file[f"theta/{i}"] for i in range(len(file.files) - 1)]
        model, encoder = Perceptron(tuple(about["hidden"])), Encoder.from_dict(about["encoder"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a model that a run saved ({type(error).__name__}: {error}).") from error
    structure = jax.tree.structure(jax.eval_shape(lambda: model.init(jax.random.key(0), len(encoder.names))))
    return model, jax.tree.unflatten(structure, leaves), encoder, about


def area_under_roc(scores: np.ndarray, label: np.ndarray) -> float:
    """The probability that a positive row scores higher than a negative one, ties counting half; NaN without both, or
    where a score is NaN."""
    positives = int(label.sum())
    pairs = positives * (label.size - positives)
    if pairs == 0 or np.isnan(scores).any():
        return np.nan
    return float((pd.Series(scores).rank()[label == 1].sum() - positives * (positives + 1) / 2) / pairs)


def masked_area_under_roc(scores: Array, positive: Array, inside: Array) -> Array:
    """As `area_under_roc`, of the rows inside and within a program."""
    negatives = jnp.sort(jnp.where(inside & ~positive, scores, jnp.inf))
    beaten = [jnp.searchsorted(negatives, scores, side=side) for side in ("left", "right")]
    wins = (beaten[0] + beaten[1]).astype(scores.dtype) / 2  # a tie counts half
    number = lambda mask: mask.sum().astype(scores.dtype)
    pairs = number(inside & positive) * number(inside & ~positive)
    return jnp.where(pairs > 0, jnp.sum(jnp.where(inside & positive, wins, 0)) / jnp.maximum(pairs, 1), jnp.nan)


# ------------------------------------------------------------------------------------------------- the kind


@dataclasses.dataclass(frozen=True)
class Tabular(Kind):
    """Options of every task on a table."""

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
    steps: int = setting("local steps of every stage", default=2000, at_least=1, static=True)

    setup_class: ClassVar[type[TabularSetup]]
    needs_group: ClassVar[bool]  # is the task about groups? Otherwise a table may have none, and splits ignore them
    needs_positives: ClassVar[bool]  # must every client have a positive training row?
    usual_partition: ClassVar[str] = "iid"  # of a table whose rows have no clients yet
    rates: ClassVar[tuple[str, ...]] = ("accuracy", "true positive rate", "false positive rate", "loss")  # of slices

    @functools.cached_property
    def table(self) -> Table:
        """The data, read once."""
        path = self._path
        if path is None:
            return self._changed(load(self.data))
        if self.label is None:
            raise UserError(f"{path} was given without a label; name the column to predict with label=.")
        if self.group is None and self.needs_group:
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
        group = known.groups[0] if self.group is None and self.needs_group else self.group
        changes["groups"] = () if group is None else (group,)
        return dataclasses.replace(known, **changes)

    @property
    def _path(self) -> str | None:
        """The user's own file, or None for a data set by name."""
        return self.data if any(mark in self.data for mark in "./\\") else None

    @property
    def client_column(self) -> str | None:
        return None if self.clients is None or str(self.clients).isdecimal() else str(self.clients)

    def set_up(self, seed: int) -> TabularSetup:
        if self.client_column is not None and self.partition not in (None, "column"):
            raise UserError(
                f"clients={self.clients!r} names a column and partition={self.partition!r} deals rows otherwise; "
                "give a number of clients, or leave the partition out."
            )
        number = None if self.clients is None or self.client_column else int(self.clients)
        data = federate(
            self.table, group=self.group, clients=number, test_fraction=self.test_fraction, recipe=self.features,
            partition=self.partition or ("column" if self.table.client is not None else self.usual_partition),
            keep_group=self.keep_group, seed=seed, by_group=self.needs_group, positives=self.needs_positives,
        )  # fmt: skip
        model = model_named(self.model)
        start = model.init(jax.random.key(seed), data.inputs.shape[1])
        batch_size = self.batch_size or (128 if len(data.label) > 5000 else 32)
        return self.setup_class(data, self.rows_of(data), model, start, batch_size, self)

    def rows_of(self, data: Federated) -> Rows:
        return table_rows(data)

    def summary(self) -> list[tuple[str, pd.DataFrame]]:
        table = self.table
        rule = f"= {table.positive}" if table.threshold is None else f"> {table.threshold:g}"
        what = "Groups" if table.groups else "Rows"
        return [("Columns", summary(table)), (f"{what}; positive means {table.label} {rule}", overview(table))]

    def notes(self, setup: TabularSetup) -> list[str]:
        return list(self.table.notes)

    def holdings(self, setup: TabularSetup) -> pd.DataFrame:
        return setup.data.holdings()

    def theta(self, setup: TabularSetup, server: Any) -> PyTree:
        """The model's parameters in a final state."""
        return Layout.of(setup.theta, "theta").unflatten(server.x)

    def trained(self, setup: TabularSetup, server: Any) -> TabularModel:
        theta = jax.tree.map(np.asarray, self.theta(setup, server))
        return TabularModel(setup.model, theta, setup.data.encoder)

    def logits(self, setup: TabularSetup, server: Any) -> np.ndarray:
        """Of every row."""
        theta = self.trained(setup, server).theta
        return np.asarray(setup.model(theta, jnp.asarray(setup.data.inputs)), np.float64)

    def outcomes(self, setup: TabularSetup, server: Any) -> tuple[np.ndarray, Any]:
        """(logits, a table of what became of every row: its part, group and client, and STATISTICS)."""
        data, logits = setup.data, self.logits(setup, server)
        predicted = logits > 0
        return logits, pd.DataFrame(
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

    def slices(self, outcomes: Any, by: str) -> pd.DataFrame:
        """Rates of every group or client in every part: kind, slice, split, metric, value."""
        sums = outcomes.groupby(["split", by])[list(STATISTICS)].sum().astype(float)
        share = lambda hits, cases: (hits / cases).where(cases > 0)
        values: Any = pd.DataFrame(
            {
                "accuracy": sums.correct / sums.rows,
                "true positive rate": share(sums.true_positives, sums.positives),
                "false positive rate": share(sums.false_positives, sums.rows - sums.positives),
                "loss": sums.loss / sums.rows,
            }
        )
        long = values[list(self.rates)].rename_axis(columns="metric").stack().rename("value").reset_index()
        return long.rename(columns={by: "slice"}).assign(kind=by)[["kind", "slice", "split", "metric", "value"]]
