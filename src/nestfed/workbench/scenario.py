"""Named tasks and the methods that solve them: what the command line, the sweeps and the reports have in common.

A *scenario* is a named task ("fairness") with its options; it makes a *set-up* of data for every seed. A *method*
("FedBiO") is one or several *stages*; a stage is an algorithm on a task that the scenario makes of a set-up, knowing
what the stage before left.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

import pandas as pd

from nestfed.algorithms import make
from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError, suggest
from nestfed.core.task import Task
from nestfed.data import Table
from nestfed.report.metrics import Chart, Metric
from nestfed.workbench.task_options import TabularOptions

Setup = TypeVar("Setup")  # one seed's data, as a scenario makes it

STEP_SIZE = {"lr": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One algorithm of a method."""

    name: str
    algorithm: str
    task: Callable[[Any, Any, Any], Task]  # (scenario, set-up, what the stage before left or None)
    settings: Callable[[Any, Any], dict[str, Any]]  # (scenario, set-up): what is recommended
    output: str = "last"
    alone: bool = False  # clients exchange nothing: it needs no part of a privacy budget
    # Settings that a run may choose for itself, one after the other: factors of what is recommended.
    tuned: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=lambda: STEP_SIZE)


@dataclasses.dataclass(frozen=True)
class Method:
    """Stages in order. Settings of the first stage need no prefix; those of a later one do: `model.lr`."""

    title: str
    description: str
    stages: tuple[Stage, ...]

    def find_stage(self, key: str) -> int:
        """Which stage a setting belongs to."""
        head = key.partition(".")[0]
        names = [stage.name for stage in self.stages]
        return names.index(head) if head in names else 0

    def full(self, number: int, key: str) -> str:
        """A setting of a stage as the user names it."""
        return key if number == 0 else f"{self.stages[number].name}.{key}"

    def plain(self, key: str) -> str:
        """The setting's name within its stage."""
        head, _, tail = key.partition(".")
        return tail if head in [stage.name for stage in self.stages] else key


@dataclasses.dataclass(frozen=True)
class Scenario(abc.ABC, Generic[Setup]):
    """A named task: its options, its methods and its metrics."""

    options: TabularOptions
    given: Table | None = None  # rows in memory, none of them kept to test; None: the data that the options name

    title: ClassVar[str]
    baseline: ClassVar[str]  # the method that others are compared with
    select: ClassVar[str]  # the metric on validation data that tells most of `score`
    metrics: ClassVar[tuple[Metric, ...]]  # the headline, the most telling first
    chart: ClassVar[Chart | None] = None  # of what `compute_lines` gives
    any_output: ClassVar[bool] = True  # can another iterate than the last be chosen?
    aims: ClassVar[tuple[str, ...]] = ()  # options that change what `score` measures: it cannot choose among them
    methods: ClassVar[dict[str, Method]]

    @property
    def name(self) -> str:
        return self.options.name

    def change(self, **changes: Any) -> Self:
        """The same scenario with other options."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))

    def on_table(self, table: Table) -> Self:
        """The same scenario on rows in memory."""
        return dataclasses.replace(self, given=table)

    def method(self, name: str) -> Method:
        if name not in self.methods:
            hint = f"{suggest(name, self.methods)} Known are {', '.join(self.methods)}."
            raise UserError(f"{name!r} is no method for the task {self.name}{hint}")
        return self.methods[name]

    def make_algorithms(self, name: str, setup: Setup, changes: Mapping[str, Any]) -> list[Algorithm]:
        """The algorithm of every stage of a method, with the user's changes of its settings."""
        method = self.method(name)
        own = [stage.settings(self, setup) for stage in method.stages]
        for key, value in changes.items():
            own[method.find_stage(key)][method.plain(key)] = value
        return [make(stage.algorithm, **settings) for stage, settings in zip(method.stages, own, strict=True)]

    def choose_output(self, stage: Stage) -> str:
        """Which iterate of a stage counts where the user does not say."""
        return stage.output

    def choose_methods(self, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        """The methods of a run, from those that it names."""
        return self.options.usual if asked is None else asked

    def check_private(self) -> None:
        """Refuse what cannot be done under a guarantee of privacy; by default all can."""

    @property
    def headline(self) -> tuple[Metric, ...]:
        """The metrics that this run has."""
        return self.metrics

    def score(self, final: Mapping[str, float]) -> float:
        """What settings are chosen by, from the last values of metrics on validation data: the smaller the better."""
        return final[self.select]

    def score_step_sizes(self, final: Mapping[str, float]) -> float:
        """The same for step sizes alone, which tuning chooses before a run."""
        return self.score(final)

    def improves(self, setup: Setup, before: Any, left: Any) -> bool:
        """Is what a stage left, its best iterate on validation rows, better there than what the stage before left?"""
        return self.evaluate(setup, left)[0][self.select] < self.evaluate(setup, before)[0][self.select]

    def leave(self, task: Task, server: Any, clients: Any) -> Any:
        """What is known of a stage's end to the next one, to evaluations and to models: usually the server's state."""
        return server

    @abc.abstractmethod
    def set_up(self, seed: int) -> Setup:
        """One seed's data: read, split, dealt to clients and encoded."""

    @abc.abstractmethod
    def count_batch_work(self, setup: Setup) -> tuple[int, int]:
        """(rows of a batch, numbers of the model): what a local step of a client handles."""

    @abc.abstractmethod
    def summarise(self) -> list[tuple[str, pd.DataFrame]]:
        """What a person should see of the columns before training: (title, table)."""

    @abc.abstractmethod
    def count_holdings(self, setup: Setup) -> pd.DataFrame:
        """Who holds what: client, group, label, part, rows."""

    def list_notes(self, setup: Setup) -> list[str]:
        """Remarks on the data that the report repeats."""
        return []

    def list_warnings(self, final: pd.DataFrame) -> list[str]:
        """What a reader of the final numbers must know, by method (in its column `method`)."""
        return []

    @abc.abstractmethod
    def list_entries(self, metric: str, setup: Setup) -> list[str]:
        """Names of the entries of a metric that is a vector, for columns of the history."""

    @abc.abstractmethod
    def evaluate(self, setup: Setup, left: Any) -> tuple[dict[str, float], pd.DataFrame]:
        """(headline metrics of what is left, metrics of slices of the data: kind, slice, split, metric, value)."""

    def compute_lines(self, setup: Setup, left: Any) -> pd.DataFrame:
        """The lines of the chart for what is left: slice, x, y. Only of scenarios that have a chart."""
        return pd.DataFrame()

    def list_candidates(self, setup: Setup, left: Any) -> pd.DataFrame:
        """The models among which a method chose, as `Record.candidates` has them. Only of methods that choose."""
        return pd.DataFrame()

    @abc.abstractmethod
    def make_model(self, setup: Setup, left: Any) -> Any:
        """The final model, to be used on new data."""
