"""The frame of all experiments: trainings, each kept as a cell when it is done, and a page written from the cells.

An experiment has a folder with the name of its command (with _ for -): `data.py` and `task.py` where it has data or a
task of its own, `plan.py` (how much is done, and the trainings), `page.py` (from cells to tables, figures and claims)
and `page.md.jinja`, the page. `page.EXPERIMENT` puts them together.
"""

import abc
import concurrent.futures
import dataclasses
import datetime
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jinja2
import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from nestfed.core.settings import UserError
from nestfed.experiments import plots
from nestfed.experiments.cells import Cell, Table, load, save
from nestfed.experiments.claims import Claim, Judged, format_claims, judge, tabulate_claims
from nestfed.models import ImageModel
from nestfed.report import figures, tables

NAMES = ("data", "dealing", "setting", "reading", "chosen", "tried", "claim", "compared", "case")  # columns of words

Plan = TypeVar("Plan")


@dataclasses.dataclass(frozen=True)
class Trainings(abc.ABC, Generic[Plan]):
    """The cells of an experiment, by name: each is trained when it is first asked for, and kept as a file."""

    folder: Path
    plan: Plan
    command: str = ""  # that repeats the trainings
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
        return self.folder / "cells" / f"{name.replace(':', '-')}.parquet"  # no colon: not all file systems have it

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

    def best(
        self, name: str, metric: str, *, smallest: bool = False, at: int = -1, among: Collection[int] | None = None
    ) -> int:
        """Which setting of a cell validation data prefer, as `Cell.best` has it."""
        try:
            return self.cell(name).best(metric, smallest=smallest, at=at, among=among)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None

    def chosen(self, name: str, metric: str, *, smallest: bool = False) -> dict[str, Any]:
        """That setting, in words and numbers."""
        return self.cell(name).settings[self.best(name, metric, smallest=smallest)]

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

    @functools.cached_property
    def judged(self) -> list[Judged]:
        return judge(self.claims)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A paper's experiment: what is trained, how much of it, and the page that comes of it."""

    name: str  # as the command line has it
    paper: str  # the title, for short
    trainings: type[Trainings[Any]]
    full: Any  # the plan
    quick: Any  # a small one that shows that it works
    make_page: Callable[[Any], Page]  # from the trainings

    @property
    def template(self) -> Path:
        return Path(__file__).with_name(self.name.replace("-", "_")) / "page.md.jinja"

    def begin(self, folder: Path, *, quick: bool = False, progress: bool | None = None) -> Trainings[Any]:
        """The trainings that are kept in a folder."""
        command = f"nestfed reproduce {self.name}{' --quick' if quick else ''}"
        return self.trainings(folder, self.quick if quick else self.full, command, progress)

    def run(self, folder: Path, *, quick: bool, progress: bool | None) -> Path:
        """Train what is not there yet; returns the path of the page."""
        trainings = self.begin(folder, quick=quick, progress=progress)
        trainings.train_all()
        page = self.make_page(trainings)
        settings = {"experiment": self.name, "plan": convert_to_plain(trainings.plan)} | dict(page.settings)
        (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        return self.write(trainings, page)

    def write_again(self, folder: Path, *, quick: bool) -> Path:
        """The page from the cells that are there: nothing is trained, no data are read."""
        trainings = self.begin(folder, quick=quick)
        missing = [name for name in trainings.names() if not trainings.done(name)]
        if missing:
            raise UserError(
                f"{folder / 'cells'} lacks {len(missing)} of {len(trainings.names())} cells ({missing[0]}, say). "
                "Without --from-cells, and with --resume, they are trained."
            )
        return self.write(trainings, self.make_page(trainings))

    def write(self, trainings: Trainings[Any], page: Page) -> Path:
        """The page with its tables and figures; the settings stay those of the trainings."""
        folder = trainings.folder
        self.write_tables(trainings, page, folder / "tables")
        for name, draw in self.figures(page).items():
            figures.write(draw(), folder / "figures", name)
        path = folder / "README.md"
        path.write_text(self.render(trainings, page), encoding="utf-8")
        return path

    def figures(self, page: Page) -> dict[str, Callable[[], Figure]]:
        """All of a page, and one of its verdicts."""
        return {
            **page.figures,
            **({"claims": functools.partial(plots.draw_verdicts, page.judged)} if page.claims else {}),
        }

    def write_tables(self, trainings: Trainings[Any], page: Page, folder: Path) -> None:
        """As CSV, and as Markdown and LaTeX where the page says so; also where every cell comes from."""
        folder.mkdir(parents=True, exist_ok=True)
        digits = None if page.digits is None else f"%.{page.digits}g"
        common = {"claims": tabulate_claims(page.judged), "cells": tabulate_origins(trainings)}
        for name, table in (common | dict(page.tables)).items():
            if name in page.typeset:
                tables.write(table, folder, name, shown=page.shown.get(name), names=NAMES)
            elif not table.empty:
                table.to_csv(folder / f"{name}.csv", index=False, float_format=digits, lineterminator="\n")

    def render(self, trainings: Trainings[Any], page: Page) -> str:
        """The text of the page."""
        environment = jinja2.Environment(keep_trailing_newline=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
        environment.filters["markdown"] = format_markdown
        template = environment.from_string(self.template.read_text(encoding="utf-8"))
        return template.render(
            plan=trainings.plan,
            made=self.tell_making(trainings),
            quick=trainings.plan == self.quick,
            tables={**page.tables, **page.shown},
            claims=JUDGING.format(claims=len(page.claims)) + format_claims(page.judged),
            **page.words,
        )

    def tell_making(self, trainings: Trainings[Any]) -> str:
        """How the page came about: the commands, the time, and what is known of the code and the machines."""
        table = tabulate_origins(trainings)
        unknown = list(table["commit"]).count(UNKNOWN)
        told = [
            f"    {trainings.command}                 # the trainings, and this page",
            f"    nestfed reproduce {self.name} --from-cells    # this page from the kept trainings (cells/)",
            "",
            f"Trainings: {table['seconds'].sum() / 60:.1f} minutes, compiling included, on "
            f"{' and '.join(sorted(table['device'].unique()))}. Every number on this page follows from them, or is "
            "exact.",
        ]
        known = table[table["commit"] != UNKNOWN]
        for keys, own in known.groupby(["commit", "python", "jax", "host"], sort=False):
            made, python, jax, host = (str(key) for key in keys)  # pyright: ignore[reportGeneralTypeIssues]
            told.append(f"{len(own)} cells were made at commit {made[:10]} ({host}; Python {python}, jax {jax}).")
        if unknown:
            told.append(
                f"When {unknown if unknown < len(table) else 'its'} cells were trained, commit, versions and the sum "
                "of the data were not recorded; they are not invented here."
            )
        told.append("Cell by cell: [cells.csv](tables/cells.csv).")
        return "\n".join(told)


UNKNOWN = "not recorded"
JUDGING = """\
A case is judged by the 95 % interval of its paired differences over seeds: it *holds* where the interval lies where the
claim says, is *refuted* where it lies elsewhere, and is *undecided* otherwise. Where a curve still moves, so that the
slope of its last tenth, kept up for as long again while the other curve stops, could carry the difference to the
bound, the case is undecided: not converged. A case with a seed that diverged is undecided too. A claim holds where all
of its cases do and is refuted where one is, if that survives Holm's correction for the {claims} claims of this page
(and, for a refutation, the number of cases).

"""


def tabulate_origins(trainings: Trainings[Any]) -> pd.DataFrame:
    """One row per cell: what it took, and of what code, data and machine it came."""
    rows = []
    for name in trainings.names():
        if not trainings.done(name):
            continue
        cell = trainings.result(name)
        versions = cell.origin.get("versions", {})
        rows.append(
            {"cell": name, "device": cell.machine, "seconds": round(cell.seconds, 1)}
            | {"seeds": len(cell.seeds) if isinstance(cell, Cell) else "", "settings": _count(cell)}
            | {key: cell.origin.get(key, UNKNOWN) for key in ("commit", "host", "data")}
            | {key: versions.get(key, UNKNOWN) for key in ("python", "nestfed", "jax", "jaxlib", "numpy", "optax")}
        )
    return pd.DataFrame(rows)


def _count(cell: Cell | Table) -> Any:
    return len(cell.settings) if isinstance(cell, Cell) else ""


def format_markdown(table: pd.DataFrame) -> str:
    return tables.format_markdown(table, names=NAMES)


def convert_to_plain(value: Any) -> Any:
    """As a settings file has it: records as tables, pairs with names as tables, networks in words, nothing for None."""
    if isinstance(value, ImageModel):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: convert_to_plain(own) for name, own in value.items() if own is not None}
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(own, tuple) and isinstance(own[0], str) for own in value)
        return (
            {name: convert_to_plain(own) for name, own in value} if pairs else [convert_to_plain(own) for own in value]
        )
    return value
