"""Named tasks and the methods that solve them: what the command line, the sweeps and the reports have in common.

A *kind* of task ("fairness") makes a *set-up* of data for every seed. A *method* ("FedBiO") is one or several
*stages*; a stage is an algorithm on a task that the set-up makes, knowing what the stage before left.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pandas as pd

from nestfed.algorithms import make
from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError, closest, validate
from nestfed.core.task import Task
from nestfed.report.record import Chart, Metric

Setup = Any  # one seed's data, as a kind makes it


@dataclasses.dataclass(frozen=True)
class Stage:
    """One algorithm of a method."""

    name: str
    algorithm: str
    task: Callable[[Setup, Any], Task]  # (set-up, what the stage before left or None)
    settings: Callable[[Setup], dict[str, Any]]  # what the kind recommends for this set-up
    output: str = "last"
    alone: bool = False  # clients exchange nothing: it needs no part of a privacy budget


@dataclasses.dataclass(frozen=True)
class Method:
    """Stages in order. Settings of the first stage need no prefix; those of a later one do: `model.lr`."""

    title: str
    description: str
    stages: tuple[Stage, ...]

    def algorithms(self, setup: Setup, changes: Mapping[str, Any]) -> list[Algorithm]:
        """The algorithm of every stage, with the user's changes of its settings."""
        own: list[dict[str, Any]] = [stage.settings(setup) for stage in self.stages]
        for key, value in changes.items():
            own[self.stage_of(key)][self.plain(key)] = value
        return [make(stage.algorithm, **settings) for stage, settings in zip(self.stages, own, strict=True)]

    def stage_of(self, key: str) -> int:
        """Which stage a setting belongs to."""
        head = key.partition(".")[0]
        names = [stage.name for stage in self.stages]
        return names.index(head) if head in names else 0

    def plain(self, key: str) -> str:
        """The setting's name within its stage."""
        head, _, tail = key.partition(".")
        return tail if head in [stage.name for stage in self.stages] else key


@dataclasses.dataclass(frozen=True)
class Kind(abc.ABC):
    """A named task."""

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    baseline: ClassVar[str]  # the method that others are compared with
    usual: ClassVar[tuple[str, ...]]  # the methods of a run that names none
    select: ClassVar[str]  # the metric on validation data that tells most of `score`
    metrics: ClassVar[tuple[Metric, ...]]  # the headline, the most telling first
    chart: ClassVar[Chart | None] = None  # what `lines` draw
    any_output: ClassVar[bool] = True  # can another iterate than the last be chosen?
    aims: ClassVar[tuple[str, ...]] = ()  # options that change what `score` measures: it cannot choose among them
    steps: int  # local steps of every stage, an option of every kind
    methods: ClassVar[dict[str, Method]]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Kind":
        """The kind with the user's options; an unknown one is refused with the nearest known name."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in options:
            if key not in known:
                raise UserError(f"the task {cls.name} has no option {key!r}{nearest(key, known)}")
        kind = cls(**options)
        validate(kind)
        return kind

    def method(self, name: str) -> Method:
        if name not in self.methods:
            raise UserError(f"{name!r} is no method for the task {self.name}{nearest(name, self.methods)}")
        return self.methods[name]

    @property
    def headline(self) -> tuple[Metric, ...]:
        """The metrics that this run has."""
        return self.metrics

    def score(self, final: Mapping[str, float]) -> float:
        """What settings are chosen by, from the last values of metrics on validation data: the smaller the better."""
        return final[self.select]

    def left(self, server: Any, clients: Any, number: int) -> Any:
        """What is known of a stage's end to the next one, to evaluations and to models: usually the server's state."""
        return server

    @abc.abstractmethod
    def set_up(self, seed: int) -> Setup:
        """One seed's data: read, split, dealt to clients and encoded."""

    @abc.abstractmethod
    def summary(self) -> list[tuple[str, pd.DataFrame]]:
        """What a person should see of the columns before training: (title, table)."""

    @abc.abstractmethod
    def holdings(self, setup: Setup) -> pd.DataFrame:
        """Who holds what: client, group, label, part, rows."""

    def notes(self, setup: Setup) -> list[str]:
        """Remarks on the data that the report repeats."""
        return []

    def warnings(self, final: pd.DataFrame) -> list[str]:
        """What a reader of the final numbers must know, by method (in its column `method`)."""
        return []

    @abc.abstractmethod
    def entries(self, metric: str, setup: Setup) -> list[str]:
        """Names of the entries of a metric that is a vector, for columns of the history."""

    @abc.abstractmethod
    def evaluate(self, setup: Setup, left: Any) -> tuple[dict[str, float], pd.DataFrame]:
        """(headline metrics of what is left, metrics of slices of the data: kind, slice, split, metric, value)."""

    def lines(self, setup: Setup, left: Any) -> pd.DataFrame:
        """The lines of the chart for what is left: slice, x, y. Only of kinds that have a chart."""
        return pd.DataFrame()

    @abc.abstractmethod
    def trained(self, setup: Setup, left: Any) -> Any:
        """The final model, to be used on new data."""


def nearest(name: str, known: Any) -> str:
    meant = closest(name, known)
    hint = f"; did you mean {meant!r}?" if meant else "."
    return f"{hint} Known are {', '.join(known)}."
