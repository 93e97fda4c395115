"""The frame of all experiments: trainings, each kept as a cell when it is done, and a page written from the cells.

An experiment has a folder with the name of its command (with _ for -): `data.py` and `task.py` where it has data or a
task of its own, `plan.py` (how much is done, and the trainings), `page.py` (from cells to tables, figures and claims)
and `page.md.jinja`, the page. `page.EXPERIMENT` puts them together.
"""

import abc
import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jinja2
import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from nestfed.core.settings import UserError
from nestfed.experiments.cells import Cell, Table, load, save
from nestfed.experiments.claims import Claim, claims_table, markdown_claims
from nestfed.models import ImageModel
from nestfed.report import figures, tables

NAMES = ("data", "dealing", "setting", "reading", "chosen", "tried", "claim", "compared", "case")  # columns of words

Plan = TypeVar("Plan")


@dataclasses.dataclass(frozen=True)
class Trainings(abc.ABC, Generic[Plan]):
    """The cells of an experiment, by name: each is trained when it is first asked for, and kept as a file."""

    folder: Path
    plan: Plan
    command: str = ""  # that repeats the experiment
    progress: bool | None = None
    known: dict[str, Cell | Table] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # files read

    processes: ClassVar[int] = 1  # that train side by side

    @abc.abstractmethod
    def names(self) -> list[str]:
        """All cells, in an order in which each finds what it needs."""

    @abc.abstractmethod
    def train(self, name: str) -> Cell | Table:
        """The cell of this name, anew."""

    def groups(self) -> list[list[str]]:
        """All cells again; those of a group are trained one after the other by one process."""
        return [self.names()]

    def path(self, name: str) -> Path:
        return self.folder / "cells" / f"{name.replace(':', '-')}.json"  # no colon: not all file systems have it

    def done(self, name: str) -> bool:
        return name in self.known or self.path(name).exists()

    def cell(self, name: str) -> Cell:
        found = self.result(name)
        assert isinstance(found, Cell)
        return found

    def table(self, name: str) -> pd.DataFrame:
        found = self.result(name)
        assert isinstance(found, Table)
        return pd.DataFrame(found.rows)

    def result(self, name: str) -> Cell | Table:
        """The cell of this name, of whatever kind."""
        if name not in self.known:
            if not self.path(name).exists():
                save(self.path(name), self.train(name))
            self.known[name] = load(self.path(name))
        return self.known[name]

    def best(self, name: str, metric: str, **options: Any) -> int:
        """Which setting of a cell validation data prefer; options are those of `Cell.best`."""
        try:
            return self.cell(name).best(metric, **options)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None

    def chosen(self, name: str, metric: str, **options: Any) -> dict[str, Any]:
        """That setting, in words and numbers."""
        return self.cell(name).settings[self.best(name, metric, **options)]

    def train_all(self) -> None:
        """What is not there yet."""
        groups = [missing for group in self.groups() if (missing := [name for name in group if not self.done(name)])]
        if self.processes == 1:
            for group in groups:
                self.train_group(group)
            return
        context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
        pool = concurrent.futures.ProcessPoolExecutor(min(self.processes, os.cpu_count() or 1), mp_context=context)
        try:
            for future in [pool.submit(self.train_group, group) for group in groups]:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def train_group(self, names: Sequence[str]) -> None:
        for name in names:
            self.result(name)

    def say(self, text: str) -> None:
        """Where bars of several processes would draw over each other."""
        if self.progress is not False:
            print(f"{datetime.datetime.now():%H:%M:%S}  {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Page:
    """What the cells say, for people."""

    tables: Mapping[str, pd.DataFrame]  # by the names of their files; those without rows are left out
    figures: Mapping[str, Callable[[], Figure]]  # likewise; drawn when they are written
    claims: Sequence[Claim] = ()
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what else the template takes
    shown: Mapping[str, pd.DataFrame] = dataclasses.field(default_factory=dict)  # tables that people read otherwise
    typeset: Collection[str] = ()  # tables that are also written as Markdown and LaTeX
    digits: int | None = None  # of the numbers in CSV files; None: all
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # that decide the numbers, beside the plan


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A paper's experiment: what is trained, how much of it, and the page that comes of it."""

    name: str  # as the command line has it
    trainings: type[Trainings[Any]]
    full: Any  # the plan
    quick: Any  # a small one that shows that it works
    make_page: Callable[[Any], Page]  # from the trainings

    @property
    def template(self) -> Path:
        return Path(__file__).with_name(self.name.replace("-", "_")) / "page.md.jinja"

    def run(self, folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
        """Train what is not there yet; returns the path of the page."""
        trainings = self.trainings(folder, self.quick if quick else self.full, command, progress)
        trainings.train_all()
        return self.write(trainings)

    def write(self, trainings: Trainings[Any]) -> Path:
        """The page with its tables, figures and settings."""
        page, folder = self.make_page(trainings), trainings.folder
        self.write_tables(page, folder / "tables")
        for name, draw in page.figures.items():
            figures.write(draw(), folder / "figures", name)
        settings = {"experiment": self.name, "plan": plain(trainings.plan)} | dict(page.settings)
        (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        path = folder / "README.md"
        path.write_text(self.render(trainings, page), encoding="utf-8")
        return path

    def write_tables(self, page: Page, folder: Path) -> None:
        """As CSV, and as Markdown and LaTeX where the page says so."""
        folder.mkdir(parents=True, exist_ok=True)
        digits = None if page.digits is None else f"%.{page.digits}g"
        for name, table in ({"claims": claims_table(page.claims)} | dict(page.tables)).items():
            if name in page.typeset:
                tables.write(table, folder, name, shown=page.shown.get(name), names=NAMES)
            elif not table.empty:
                table.to_csv(folder / f"{name}.csv", index=False, float_format=digits, lineterminator="\n")

    def render(self, trainings: Trainings[Any], page: Page) -> str:
        """The text of the page."""
        cells = [trainings.result(name) for name in trainings.names() if trainings.done(name)]
        environment = jinja2.Environment(keep_trailing_newline=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
        environment.filters["markdown"] = markdown
        template = environment.from_string(self.template.read_text(encoding="utf-8"))
        return template.render(
            plan=trainings.plan,
            command=trainings.command,
            quick=trainings.plan == self.quick,
            tables={**page.tables, **page.shown},
            claims=markdown_claims(page.claims),
            seconds=sum(cell.seconds for cell in cells),
            machines=", ".join(sorted({cell.machine for cell in cells})),
            host=f"{platform.machine()}, {os.cpu_count()} cores",
            python=platform.python_version(),
            jax=importlib.metadata.version("jax"),
            **page.words,
        )


def markdown(table: pd.DataFrame) -> str:
    return tables.markdown(table, names=NAMES)


def plain(value: Any) -> Any:
    """As a settings file has it: records as tables, pairs with names as tables, networks in words, nothing for None."""
    if isinstance(value, ImageModel):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items() if own is not None}
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(own, tuple) and isinstance(own[0], str) for own in value)
        return {name: plain(own) for name, own in value} if pairs else [plain(own) for own in value]
    return value
