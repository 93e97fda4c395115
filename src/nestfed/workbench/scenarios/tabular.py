"""What tasks on a table have in common: rows dealt to clients, a model of a binary label, how it is used and judged.

Every client holds rows with inputs, a binary label s and a group a, in three parts: training rows, a validation set and
test rows. A named task (`fairness`, `robust`) adds its problems, its methods and its metrics.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax import lax

from nestfed.algorithms import ALGORITHMS
from nestfed.core.algorithm import Fed
from nestfed.core.randomness import fold
from nestfed.core.rows import ClientRows, Rows
from nestfed.core.settings import UserError, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.data import TRAIN, VALIDATION, Federated, Table, describe_columns, describe_groups, load, read_table
from nestfed.data.federated import Dealt, deal_table
from nestfed.data.files import read_by_schema
from nestfed.data.schema import Schema
from nestfed.data.table import apply_schema, check_column, list_values
from nestfed.models import RowModel, find_model
from nestfed.problems.base import Problem
from nestfed.problems.robust import MeanLoss
from nestfed.workbench.scenario import Method, Scenario, Stage
from nestfed.workbench.task_options import TabularOptions
from nestfed.workbench.trained import TabularModel

PARTS = ("train", "validation", "test")
ROWS_AT_ONCE = 1024  # of a client, in an evaluation
# Models of which the mean of all iterates counts. It costs nothing, and it is what keeps the network on embeddings from
# fitting single rows. Validation rows of one seed, FedAvg, 2000 steps, penalty 0.003: average precision on Default with
# step 0.1 is 0.552 and that of the last iterate 0.526; on Adult with step 0.3 it is 0.811 and 0.807, on Bank 0.413 and
# 0.412. The step sizes of the other models suit it as they are: 0.03, 0.1 and 0.3 were tried on the same rows.
AVERAGED = ("tabular",)
STATISTICS = ("rows", "positives", "correct", "true_positives", "false_positives", "loss")


# ------------------------------------------------------------------------------------------------- the task


def compute_losses(model: RowModel, theta: PyTree, rows: PyTree) -> Array:
    """The logistic loss of every row."""
    return optax.sigmoid_binary_cross_entropy(model(theta, rows["inputs"]), rows["label"])


@dataclasses.dataclass(frozen=True)
class RowLosses:
    """The losses of a batch's training rows. A plain value: problems with equal ones share their programs."""

    model: RowModel

    def __call__(self, theta: PyTree, batch: PyTree, key: Array) -> Array:
        return compute_losses(self.model, theta, batch["train"])


@struct
class TabularTask(Task):
    """Rows of three parts per client. A batch has training rows, validation rows and the client's shares of groups;
    what a problem does not look at is not drawn."""

    groups: int = static(default=1)
    objective: str | None = static(default="train_loss")  # the metric that training makes small, if there is one

    @property
    def minimised(self):
        return self.objective

    def sample(self, data, key):
        drawn = lambda part: self.with_weight(
            select_part(data, part).draw_rows(fold(key, part), self.batch_size), jnp.ones(self.batch_size)
        )
        return {"train": drawn(TRAIN), "validation": drawn(VALIDATION), "shares": data.constants["shares"]}

    def with_weight(self, rows: PyTree, weight: Array) -> PyTree:
        return rows | {"weight": weight.astype(rows["label"].dtype)}


def select_part(data: ClientRows, part: int) -> ClientRows:
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

    model: RowModel = static()
    total: int = static()  # rows of all clients

    def mean_metrics(self, server, client, data, fed):
        """Means over clients, where nobody gives outputs of rows away."""
        theta = self.problem.params_of(server, client)

        def add_up(batch: PyTree) -> Array:
            rows, _ = batch
            correct = (self.model(theta, rows["inputs"]) > 0) == (rows["label"] == 1)
            values = jnp.stack([jnp.ones_like(rows["label"]), compute_losses(self.model, theta, rows), correct], 1)
            return jax.nn.one_hot(rows["part"], len(PARTS)).T @ values / len(values)

        sums = data.average(add_up, rows_at_once=ROWS_AT_ONCE)  # [parts, (rows, loss, correct)]
        there = sums[:, :1] > 0
        sums = fed.mean(jnp.where(there, sums / jnp.where(there, sums[:, :1], 1), 0))
        held = jnp.where(sums[:, 0] > 0, sums[:, 0], jnp.nan)  # by how many a part has rows
        named = {"loss": sums[:, 1] / held, "accuracy": sums[:, 2] / held}
        return {f"{part}_{name}": values[i] for i, part in enumerate(PARTS) for name, values in named.items()}

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
class Seat:
    """The place of a site among others, whose rows are elsewhere; or that of their server, which has no rows."""

    number: int | None  # None: the server's
    sites: int
    sums: Mapping[str, np.ndarray] | None = None  # of all sites' measures; None: not known yet

    @property
    def here(self) -> slice:
        """Of all clients, those that its tasks are about."""
        return slice(None) if self.number is None else slice(self.number, self.number + 1)


@dataclasses.dataclass(frozen=True)
class TabularSetup:
    """One seed: rows dealt, split and encoded, a model and where it starts."""

    data: Federated
    rows: Rows
    model: RowModel
    theta: PyTree  # where the model starts
    batch_size: int
    seat: Seat | None = None  # None: all rows are here

    @property
    def groups(self) -> int:
        return len(self.data.group_names)

    @property
    def clients(self) -> int:
        return self.rows.clients if self.seat is None else self.seat.sites

    @property
    def here(self) -> slice:
        """Of all clients, those that tasks are about."""
        return slice(None) if self.seat is None else self.seat.here

    def measures(self) -> dict[str, Callable[[], np.ndarray]]:
        """What methods must know of all rows together: sums over rows, or over clients, by name."""
        return {
            "sizes": lambda: self.per_client(np.asarray(self.rows.constants["sizes"])),
            "cells": self._count_cells,
        }

    def sum_of(self, name: str) -> np.ndarray:
        """One of the measures, of all rows of all clients."""
        if self.seat is not None and self.seat.sums is not None:
            return self.seat.sums[name]
        return self.measures()[name]()

    def per_client(self, values: np.ndarray) -> np.ndarray:
        """An entry for every client; where only one's rows are here, zeros stand for the others."""
        of_all = np.zeros((self.clients, *np.shape(values)[1:]))
        of_all[self.here] = values
        return of_all

    def _count_cells(self) -> np.ndarray:
        """Rows by [part, group, label]."""
        counts = np.zeros((len(PARTS), self.groups, 2))
        np.add.at(counts, (self.data.part, self.data.group, self.data.label), 1)
        return counts

    @property
    def total(self) -> int:
        """Rows of all clients."""
        return int(self.sum_of("cells").sum())

    @property
    def own_sizes(self) -> np.ndarray:
        """Training rows of the clients here."""
        return np.asarray(self.rows.constants["sizes"])[:, TRAIN].astype(float)

    @property
    def train_sizes(self) -> np.ndarray:
        """Training rows of every client."""
        return self.sum_of("sizes")[:, TRAIN]

    def own_weights(self, weights: np.ndarray) -> np.ndarray:
        """Those of the clients here. A site's task has only itself; what it counts among others is not its business."""
        return weights if self.seat is None or self.seat.number is None else np.ones(1)

    def weigh_clients(self, averaging: str) -> np.ndarray:
        sizes = self.train_sizes
        return np.full(sizes.size, 1 / sizes.size) if averaging == "uniform" else sizes / sizes.sum()


def make_rows(data: Federated, *, positives_last: bool = False) -> Rows:
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


def make_mean_loss(scenario: "Tabular", setup: TabularSetup, before: Any) -> TabularTask:
    """The mean logistic loss of the training rows."""
    problem = MeanLoss(losses=RowLosses(setup.model), weight_decay=scenario.options.penalty)
    return scenario.pose(setup, problem, setup.theta)


def make_single_level_method(name: str, task: Callable[[Any, Any, Any], TabularTask], lr: float) -> Method:
    """Any algorithm for averages of losses, as a method of one stage."""
    settings = lambda scenario, setup: {"lr": lr, "local_steps": LOCAL_STEPS}
    doc = (ALGORITHMS[name].__doc__ or "").splitlines()[0]
    return Method(ALGORITHMS[name].__name__, doc, (Stage("model", name, task, settings),))


class StageEnd(NamedTuple):
    """What a stage leaves: the server's state, and the problem, which finds the model in it."""

    problem: Problem
    server: Any

    @property
    def theta(self) -> PyTree:
        """The parameters of the model."""
        return self.problem.params_of(self.server, None)


# ------------------------------------------------------------------------------------------------- how it is judged


def compute_area_under_roc(scores: np.ndarray, label: np.ndarray) -> float:
    """The probability that a positive row scores higher than a negative one, ties counting half; NaN without both, or
    where a score is NaN."""
    positives = int(label.sum())
    pairs = positives * (label.size - positives)
    if pairs == 0 or np.isnan(scores).any():
        return np.nan
    return float((pd.Series(scores).rank()[label == 1].sum() - positives * (positives + 1) / 2) / pairs)


def compute_masked_area_under_roc(scores: Array, positive: Array, inside: Array) -> Array:
    """As `compute_area_under_roc`, of the rows inside and within a program."""
    negatives = jnp.sort(jnp.where(inside & ~positive, scores, jnp.inf))
    beaten = [jnp.searchsorted(negatives, scores, side=side) for side in ("left", "right")]
    wins = (beaten[0] + beaten[1]).astype(scores.dtype) / 2  # a tie counts half
    number = lambda mask: mask.sum().astype(scores.dtype)
    pairs = number(inside & positive) * number(inside & ~positive)
    return jnp.where(pairs > 0, jnp.sum(jnp.where(inside & positive, wins, 0)) / jnp.maximum(pairs, 1), jnp.nan)


# ------------------------------------------------------------------------------------------------- the scenario


Setup = TypeVar("Setup", bound=TabularSetup)


@dataclasses.dataclass(frozen=True)
class Tabular(Scenario[Setup]):
    """A task on a table."""

    options: TabularOptions

    setup_class: ClassVar[type[TabularSetup]] = TabularSetup
    task_class: ClassVar[type[TabularTask]]
    needs_group: ClassVar[bool]  # is the task about groups? Otherwise a table may have none, and splits ignore them
    needs_positives: ClassVar[bool]  # must every client have a positive training row?
    rates: ClassVar[tuple[str, ...]] = ("accuracy", "true positive rate", "false positive rate", "loss")  # of slices

    @property
    def validation_fraction(self) -> float | None:
        """Share of the rows to validate on; None: a few, as many of every group."""
        return None

    @functools.cached_property
    def table(self) -> Table:
        """The data, read once."""
        chosen, path = self.options, self.options.path
        if self.given is not None:
            return self.given
        if chosen.schema is not None:
            return self._read_by_schema(Schema.read(chosen.schema))
        if path is None:
            return self._assign_roles(load(chosen.data))
        if chosen.label is None:
            raise UserError(f"{path} was given without a label; name the column to predict with label=.")
        if chosen.group is None and self.needs_group:
            raise UserError(f"{path} was given without a group; name the column of the sensitive groups with group=.")
        return read_table(
            path,
            label=chosen.label,
            group=chosen.group,
            clients=chosen.client_column,
            positive=chosen.positive,
            threshold=chosen.threshold,
            drop=chosen.drop,
        )

    def _read_by_schema(self, schema: Schema) -> Table:
        """The table as the schema reads it; options that it decides are not asked."""
        chosen = self.options
        for name in ("label", "positive", "threshold", "group"):
            given, agreed = getattr(chosen, name), getattr(schema, name)
            if given is not None and str(given) != str(agreed):
                raise UserError(f"{name}={given!r} was given, but the schema says {agreed!r}; leave {name} out.")
        if chosen.drop:
            raise UserError(
                f"drop={list_values(chosen.drop)} was given together with a schema, which says what is left out."
            )
        if schema.group is None and self.needs_group:
            raise UserError(f"the task {self.name} is about groups, but {chosen.schema} names none; give it a group=.")
        if chosen.path is not None:
            table = read_by_schema(chosen.path, schema, clients=chosen.client_column)
        else:
            known = self._assign_roles(load(chosen.data))
            table = apply_schema(known, schema)
        return table if self.needs_group or chosen.group is not None else dataclasses.replace(table, groups=())

    def _assign_roles(self, known: Table) -> Table:
        """A data set by name, with the roles that the user gave its columns."""
        chosen, client = self.options, self.options.client_column
        roles = [("label", chosen.label), ("client", client), *(("drop", column) for column in chosen.drop)]
        for role, column in roles:
            if column is not None:
                check_column(known.frame.columns, column, role, known.name)
        changes: dict[str, Any] = {"drop": (*known.drop, *chosen.drop)}
        if chosen.label is not None or chosen.positive is not None or chosen.threshold is not None:
            changes |= {"positive": chosen.positive, "threshold": chosen.threshold}
            changes["label"] = chosen.label or known.label
        if client is not None:
            changes["client"] = client
        # Only the chosen group is one: the others may be features.
        group = known.groups[0] if chosen.group is None and self.needs_group else chosen.group
        changes["groups"] = () if group is None else (group,)
        return dataclasses.replace(known, **changes)

    def set_up(self, seed: int) -> Setup:
        dealt = self.deal(seed)
        return self.make_setup(dealt.encode(dealt.fit()), seed)

    def deal(self, seed: int, only: int | None = None) -> Dealt:
        """The table split and dealt, `only` to the client of this number where others hold their rows elsewhere."""
        chosen = self.options
        if chosen.client_column is not None and chosen.partition not in (None, "column"):
            raise UserError(
                f"clients={chosen.clients!r} names a column and partition={chosen.partition!r} deals rows otherwise; "
                "give a number of clients, or leave the partition out."
            )
        by_column = self.table.client is not None and chosen.client_number is None
        return deal_table(
            self.table,
            group=chosen.group,
            clients=chosen.client_number,
            only=only,
            test_fraction=chosen.test_fraction if self.given is None else 0.0,
            partition=chosen.partition or ("column" if by_column else chosen.usual_partition),
            recipe=chosen.recipe,
            keep_group=chosen.keep_group,
            seed=seed,
            validation_fraction=self.validation_fraction,
            by_group=self.needs_group,
            positives=self.needs_positives,
        )

    def make_setup(self, data: Federated, seed: int, seat: Seat | None = None) -> Setup:
        """Of encoded rows; with a seat they are those of one site."""
        model = find_model(self.options.model)
        start = model.init(jax.random.key(seed), data.inputs.shape[1])
        schema, rows = self.table.schema, self.make_rows(data)
        agreed = None if schema is None else self.options.batch_size or schema.batch_size
        if seat is not None:
            largest = rows.largest if seat.sums is None else int(seat.sums["sizes"].sum(1).max())
            rows = dataclasses.replace(rows, ids=np.arange(seat.sites, dtype=np.int32)[seat.here], largest=largest)
        batch_size = agreed or self.options.batch_rows(len(data.label))
        setup: Any = self.setup_class(data, rows, model, start, batch_size, seat)
        return setup

    def pose(
        self,
        setup: Setup,
        problem: Problem,
        params: PyTree,
        *,
        task_class: type[TabularTask] | None = None,
        averaging: str | None = None,
        **fields: Any,
    ) -> TabularTask:
        """The task of solving this problem on a seed's rows from this start."""
        usual = setup.weigh_clients(self.options.client_weights)
        weights = usual if averaging is None else setup.weigh_clients(averaging)
        # Metrics must not depend on a method's own weights of fed.mean: `scale` makes a total of the mean, `vote` a
        # mean with the usual weights.
        constants = setup.rows.constants | {
            "scale": (1 / weights)[setup.here].astype(np.float32),
            "vote": (usual / weights)[setup.here].astype(np.float32),
        }
        return (task_class or self.task_class).create(
            problem,
            dataclasses.replace(setup.rows, constants=constants),
            params,
            batch_size=setup.batch_size,
            weights=setup.own_weights(weights),
            groups=setup.groups,
            **fields,
        )

    def choose_output(self, stage: Stage) -> str:
        averaged = self.any_output and self.options.model in AVERAGED and stage.output == "last"
        return "average" if averaged else stage.output

    def make_rows(self, data: Federated) -> Rows:
        return make_rows(data)

    def count_batch_work(self, setup: Setup) -> tuple[int, int]:
        return setup.batch_size, sum(leaf.size for leaf in jax.tree.leaves(setup.theta))

    def summarise(self) -> list[tuple[str, pd.DataFrame]]:
        table = self.table
        rule = f"= {table.positive}" if table.threshold is None else f"> {table.threshold:g}"
        what = "Groups" if table.groups else "Rows"
        return [
            ("Columns", describe_columns(table)),
            (f"{what}; positive means {table.label} {rule}", describe_groups(table)),
        ]

    def list_notes(self, setup: Setup) -> list[str]:
        return list(self.table.notes)

    def count_holdings(self, setup: Setup) -> pd.DataFrame:
        return setup.data.count_holdings()

    def list_entries(self, metric: str, setup: Setup) -> list[str]:
        return []  # no metric is a vector

    def leave(self, task: Task, server: Any, clients: Any) -> Any:
        return StageEnd(task.problem, server)

    def make_model(self, setup: Setup, left: Any) -> Any:
        return TabularModel(setup.model, jax.tree.map(np.asarray, left.theta), setup.data.encoder)

    def logits(self, setup: Setup, left: Any) -> np.ndarray:
        """Of every row."""
        theta = self.make_model(setup, left).theta
        return np.asarray(setup.model(theta, jnp.asarray(setup.data.inputs)), np.float64)

    def tabulate_outcomes(self, setup: Setup, left: Any) -> tuple[np.ndarray, Any]:
        """(logits, a table of what became of every row: its part, group and client, and STATISTICS)."""
        data, logits = setup.data, self.logits(setup, left)
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

    @property
    def slice_kinds(self) -> tuple[str, ...]:
        """Whose rows are judged one by one."""
        return ("group", "client") if self.needs_group or self.options.group is not None else ("client",)

    def tabulate_slices(self, outcomes: Any) -> pd.DataFrame:
        """Rates of every group and client in every part: kind, slice, split, metric, value."""
        return pd.concat([self._tabulate_rates(outcomes, kind) for kind in self.slice_kinds], ignore_index=True)

    def _tabulate_rates(self, outcomes: Any, by: str) -> pd.DataFrame:
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
