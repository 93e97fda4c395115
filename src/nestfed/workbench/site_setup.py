"""A site's part of a run: features, splits and tasks as they would be if all rows lay in one table.

A site has its own rows, a schema that all agree on, and the sums of all sites' numbers. Before the first round there
are three exchanges of sums: of values; of squared distances from the means, with the cells of histograms where a recipe
has bins; and of what the methods of a task must know of all rows, such as their numbers by part, group and label. All
of it is vectors of whole numbers, added modulo 2^64, so the sums are exact, in any order, with masks or without.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.data import TRAIN, Encoder, Federated, Table
from nestfed.data.features import Spreads, Totals
from nestfed.data.federated import ALL_ROWS, Dealt
from nestfed.data.schema import CATEGORY, LEFT_OUT, ColumnRule, Schema
from nestfed.data.sums import Sums
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios.fairness import LIMITED
from nestfed.workbench.scenarios.tabular import Seat, Tabular, TabularSetup


class Preparation:
    """One party before the first round of a seed: what it tells, and what it makes of the sums of all.

    `sums` is always the list of the sums so far, in their order, each a vector of uint64.
    """

    EXCHANGES: ClassVar[int] = 3  # of sums, before the first round

    def __init__(self, scenario: Tabular[Any], dealt: Dealt, seat: Seat, seed: int):
        self.scenario, self.dealt, self.seat, self.seed = scenario, dealt, seat, seed

    @functools.cached_property
    def _own_totals(self) -> Totals:
        counted = self.dealt.counted & (self.seat.number is not None)
        return Totals.of(self.dealt.frame, self.dealt.recipe, counted, self.dealt.schema)

    def tell(self, sums: Sequence[np.ndarray]) -> np.ndarray:
        """What this site adds to the next sum."""
        if not sums:
            return self._own_totals.pack()
        if len(sums) == 1:
            return self._spread(sums).pack()
        measured = self._set_up(sums, None).measures().values()
        return Sums.each(np.concatenate([np.ravel(measure()) for measure in measured])).pack()

    def prepare(self, sums: Sequence[np.ndarray]) -> "Prepared":
        """All that a run needs, once the sums are known."""
        if len(sums) != self.EXCHANGES:
            raise UserError(f"{len(sums)} sums were given; {self.EXCHANGES} of them make a task.")
        values, named, start = Sums.unpack(sums[2]).values, {}, 0
        for name, measure in self._set_up(sums, None).measures().items():
            shape = np.shape(measure())
            named[name] = values[start : (start := start + int(np.prod(shape)))].reshape(shape)
        return Prepared(self.scenario, self._set_up(sums, named))

    def _spread(self, sums: Sequence[np.ndarray]) -> Spreads:
        counted = self.dealt.counted & (self.seat.number is not None)
        return Spreads.of(self.dealt.frame, self._own_totals.with_sums(sums[0]), counted)

    def _set_up(self, sums: Sequence[np.ndarray], measured: Mapping[str, np.ndarray] | None) -> TabularSetup:
        encoder = Encoder.from_sums(self._own_totals.with_sums(sums[0]), self._spread(sums).with_sums(sums[1]))
        data: Federated = self.dealt.encode(encoder)
        return self.scenario.make_setup(data, self.seed, dataclasses.replace(self.seat, sums=measured))


class SiteSetup(Preparation):
    """A site, with its own rows."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        schema: str | Path,
        data: str | Path,
        *,
        site: int,
        sites: int,
        seed: int,
    ):
        """`settings` are those of `nestfed run`; where these name rows and who holds them, `data` takes their place:
        a file of this site's rows. Sites are numbered from 0 in an order that all know."""
        scenario = _pose(settings, schema, str(data))
        super().__init__(scenario, scenario.deal(seed, only=site), Seat(site, sites), seed)


class ServerSetup(Preparation):
    """The server, without any. Its tasks have the shapes of the sites' and their weights: one row of nothing each."""

    def __init__(self, settings: Mapping[str, Any], schema: str | Path, *, sites: int, seed: int):
        agreed = Schema.read(schema)
        posed = _pose(settings, schema, ".")
        grouped = posed.needs_group or posed.options.group is not None
        names = "" if agreed.group is None else agreed.group
        frame = pd.DataFrame({name: _make_blank(rule, sites) for name, rule in agreed.columns.items()})
        table = Table("the schema", frame, agreed.label, groups=(names,) if grouped else (), schema=agreed)
        left_out = table.group_columns() if grouped and not posed.options.keep_group else ()
        number, nobody = np.arange(sites, dtype=np.int32), np.zeros(sites, np.int32)
        dealt = Dealt(
            frame=frame.reindex(columns=[name for name in _list_feature_names(agreed) if name not in left_out]),
            recipe=posed.options.recipe,
            label=nobody,
            group=nobody,
            client=number,
            part=np.full(sites, TRAIN, np.int8),
            group_names=agreed.groups if grouped else (ALL_ROWS,),
            client_names=tuple(f"site {i + 1}" for i in range(sites)),
            schema=agreed,
        )
        super().__init__(posed.on_table(table), dealt, Seat(None, sites), seed)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A site's tasks, or their server's."""

    scenario: Tabular[Any]
    setup: TabularSetup

    def make_algorithms(self, method: str, changes: Mapping[str, Any]) -> list[Algorithm]:
        """Of every stage; the same at all parties."""
        return self.scenario.make_algorithms(method, self.setup, changes)

    def task(self, method: str, stage: int = 0, before: Any = None) -> Task:
        """Of a stage, given what the stage before has left."""
        return self.scenario.method(method).stages[stage].task(self.scenario, self.setup, before)

    def leave(self, task: Task, server: Any, clients: Any = None) -> Any:
        """What a stage leaves to the next one."""
        return self.scenario.leave(task, server, clients)


def _pose(settings: Mapping[str, Any], schema: str | Path, data: str) -> Tabular[Any]:
    """The task of these settings on rows that lie somewhere else than they say."""
    elsewhere = {name: value for name, value in settings.items() if name not in ("clients", "partition")}
    request = Request.of({**elsewhere, "data": str(Path(data).resolve()), "schema": str(schema)})
    scenario: Any = request.scenario
    if LIMITED in request.methods:
        raise UserError(
            "a limit on the gap is judged by all rows of all sites, and no site gives its rows away; leave limit out."
        )
    return scenario


def _list_feature_names(schema: Schema) -> list[str]:
    return [name for name, rule in schema.columns.items() if rule.kind != LEFT_OUT]


def _make_blank(rule: ColumnRule, rows: int) -> list[Any]:
    """A column of nothing."""
    return [rule.levels[0] if rule.kind == CATEGORY else 0.0] * rows
