"""Cells: what an experiment keeps of its trainings, as files of plain numbers.

A `Cell` is a sweep of settings x seeds of one algorithm: the settings in words, the recorded metrics, what diverged,
how long it took and where. A `Table` is any other result.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
import pandas as pd

from nestfed.core.settings import UserError
from nestfed.engine.options import Changes
from nestfed.report.record import replace_file
from nestfed.verbs.cost import measure
from nestfed.verbs.sweeps import sweep


class Cell(NamedTuple):
    """What is known of a sweep afterwards."""

    settings: list[dict[str, Any]]  # in words and numbers, one per setting of the sweep
    seeds: list[int]
    round: np.ndarray  # [evaluations]
    metrics: dict[str, np.ndarray]  # [settings, seeds, evaluations]
    diverged: np.ndarray  # [settings, seeds]: the round, or -1
    cost: dict[str, Any]  # of one round, per client: exchanges, bytes up and down, oracle calls
    seconds: float
    machine: str

    @property
    def rounds(self) -> int:
        return int(self.round[-1])

    @property
    def megabytes_up(self) -> float:
        """What a client sends in all rounds."""
        return self.cost["bytes_up"] * self.rounds / 1e6

    def final(self, metric: str, setting: int = 0) -> pd.Series:
        """The last value by seed; NaN of a run that diverged."""
        return pd.Series(self.metrics[metric][setting, :, -1], self.seeds)

    def moments(self, metric: str, title: str) -> dict[str, float]:
        """Mean and standard deviation over seeds of the last values, as two columns of a table."""
        values: Any = self.final(metric)
        return {title: values.mean(), f"{title}, std": values.std(ddof=0)}

    def history(self, name: str, local_steps: int = 1, setting: int = 0) -> pd.DataFrame:
        """One row per seed and evaluation, as the figures of reports take it."""
        rounds = self.round.astype(int)
        sent = (self.cost["bytes_up"] + self.cost["bytes_down"]) * rounds
        frame = lambda i: pd.DataFrame(
            {"method": name, "seed": self.seeds[i], "stage": "training", "round": rounds, "step": rounds * local_steps}
            | {"bytes": sent, "oracle_calls": sum(self.cost["oracles"].values()) * rounds}
            | {metric: values[setting, i] for metric, values in self.metrics.items()}
        )
        return pd.concat([frame(i) for i in range(len(self.seeds))], ignore_index=True)

    def best(self, metric: str, *, smallest: bool = False, at: int = -1, among: Collection[int] | None = None) -> int:
        """The setting with the largest (or smallest) mean over seeds at an evaluation, the last one if nothing is said,
        perhaps among some settings only. One that diverged for any seed until then is passed over."""
        value = self.metrics[metric][:, :, at].mean(1) * (-1 if smallest else 1)
        diverged = ((self.diverged >= 0) & (self.diverged <= self.round[at])).any(1)
        allowed = [among is None or i in among for i in range(len(self.settings))]
        usable = np.isfinite(value) & ~diverged & allowed
        if not usable.any():
            raise UserError("every setting diverged; the grid needs smaller step sizes.")
        return int(np.where(usable, value, -np.inf).argmax())


class Table(NamedTuple):
    """A result that is a table, row by row."""

    rows: list[dict[str, Any]]
    seconds: float
    machine: str


def in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in settings.items())


# ------------------------------------------------------------------------------------------------- making them


Settings = Sequence[tuple[Mapping[str, Any], Any]]  # (description, algorithm or (algorithm, problem))


def train(settings: Settings, tasks: Any, seeds: Sequence[int], **options: Unpack[Changes]) -> Cell:
    """Sweep over all settings and seeds; options are those of `sweep`."""
    began = time.monotonic()
    found = sweep([setting for _, setting in settings], tasks, list(seeds), **options)
    return _cell(settings, tasks, seeds, found.history, found.diverged, began)


def train_in_turn(
    settings: Settings,
    tasks: Any,
    seeds: Sequence[int],
    *,
    after: Callable[[Any, Any, Any, int], Mapping[str, float]] | None = None,
    **options: Unpack[Changes],
) -> Cell:
    """The same, one run after the other in one program: for work that fills the machine, and where compiling another
    program for every number of runs would take longer than they do.

    after(setting, task, run, seed) may measure more on the Run that a training ends with; such metrics are recorded at
    the last evaluation.
    """
    began = time.monotonic()

    def one(setting: Any, task: Any, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        found = sweep([setting], [task], [seed], **options)
        history = {name: values if name == "round" else values[0, 0] for name, values in found.history.items()}
        if after is not None:
            more = after(setting, task, jax.tree.map(lambda a: a[0], found.runs[0]), seed)
            earlier = np.full(len(history["round"]) - 1, np.nan)
            history |= {name: np.append(earlier, value) for name, value in more.items()}
        return history, found.diverged[0, 0]

    # Nothing else of a run is kept: the states of many clients would fill a memory.
    found = [[one(setting, task, seed) for seed, task in zip(seeds, tasks, strict=True)] for _, setting in settings]
    joined = lambda value: np.stack([np.stack([value(*run) for run in row]) for row in found])
    first = found[0][0][0]
    history = {name: joined(lambda history, _: history[name]) for name in first if name != "round"}
    diverged = joined(lambda _, when: when)
    return _cell(settings, tasks, seeds, history | {"round": first["round"]}, diverged, began)


def _cell(settings: Any, tasks: Any, seeds: Sequence[int], history: Any, diverged: np.ndarray, began: float) -> Cell:
    first = settings[0][1][0] if isinstance(settings[0][1], tuple) else settings[0][1]
    ledger = measure(first, tasks if not isinstance(tasks, Sequence) else tasks[0]).round
    return Cell(
        settings=[dict(words) for words, _ in settings],
        seeds=list(seeds),
        round=history["round"],
        metrics={name: values for name, values in history.items() if name != "round"},
        diverged=diverged,
        cost={
            "exchanges": ledger.exchanges,
            "bytes_up": ledger.bytes_up,
            "bytes_down": ledger.bytes_down,
            "oracles": ledger.oracles,
        },
        seconds=time.monotonic() - began,
        machine=jax.devices()[0].device_kind,
    )


def tabulate(make: Callable[[], pd.DataFrame]) -> Table:
    """The table that a function makes, with the time that it takes."""
    began = time.monotonic()
    frame = make()
    return Table(frame.to_dict("records"), time.monotonic() - began, jax.devices()[0].device_kind)


# ------------------------------------------------------------------------------------------------- files


def save(path: Path, cell: Cell | Table) -> None:
    plain = cell._asdict()
    if isinstance(cell, Cell):
        plain |= {
            "round": cell.round.tolist(),
            "metrics": {name: values.tolist() for name, values in cell.metrics.items()},
            "diverged": cell.diverged.tolist(),
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(plain).encode())


def load(path: Path) -> Cell | Table:
    plain = json.loads(path.read_text(encoding="utf-8"))
    if "rows" in plain:
        return Table(**plain)
    metrics = {name: np.array(values, float) for name, values in plain["metrics"].items()}
    arrays = {"round": np.array(plain["round"]), "metrics": metrics, "diverged": np.array(plain["diverged"])}
    return Cell(**(plain | arrays))
