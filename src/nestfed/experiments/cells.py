"""Trainings of an experiment, each kept as a file when it is done: an interrupted reproduction goes on where it was.

A cell is a sweep of settings x seeds of one algorithm. What it leaves is plain numbers: the settings, the recorded
metrics, what diverged, how long it took and where.
"""

import abc
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from nestfed.core.settings import UserError
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

    def final(self, metric: str, setting: int = 0) -> pd.Series:
        """The last value by seed; NaN of a run that diverged."""
        return pd.Series(self.metrics[metric][setting, :, -1], self.seeds)

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

    def best(self, metric: str) -> int:
        """The setting with the largest final value, averaged over seeds; one that diverged anywhere is passed over."""
        final = self.metrics[metric][:, :, -1].mean(1)
        final = np.where((self.diverged >= 0).any(1) | ~np.isfinite(final), -np.inf, final)
        if np.isinf(final).all():
            raise UserError("every setting diverged; the grid needs smaller step sizes.")
        return int(final.argmax())


def train(settings: Sequence[tuple[Mapping[str, Any], Any]], tasks: Any, seeds: Sequence[int], **options: Any) -> Cell:
    """Sweep over (description, algorithm or (algorithm, problem)) and all seeds; options are those of `sweep`."""
    began = time.monotonic()
    found = sweep([setting for _, setting in settings], tasks, list(seeds), **options)
    return _cell(settings, tasks, seeds, found.history, found.diverged, began)


def train_in_turn(
    settings: Sequence[tuple[Mapping[str, Any], Any]],
    tasks: Any,
    seeds: Sequence[int],
    *,
    after: Callable[[Any, Any, Any, int], Mapping[str, float]] | None = None,
    **options: Any,
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
            "exchanges": ledger.exchanges, "bytes_up": ledger.bytes_up, "bytes_down": ledger.bytes_down,
            "oracles": ledger.oracles,
        },
        seconds=time.monotonic() - began,
        machine=jax.devices()[0].device_kind,
    )  # fmt: skip


def kept(path: Path, make: Callable[[], Cell]) -> Cell:
    """The cell in this file, or a new one that is written there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        cell = make()
        plain = cell._asdict() | {
            "round": cell.round.tolist(),
            "metrics": {name: values.tolist() for name, values in cell.metrics.items()},
            "diverged": cell.diverged.tolist(),
        }
        replace_file(path, json.dumps(plain).encode())
    return load(path)


@dataclasses.dataclass(frozen=True)
class Trainings(abc.ABC):
    """The cells of an experiment, by name; each can be trained alone."""

    folder: Path
    plan: Any  # how much is done
    progress: bool | None = None

    @abc.abstractmethod
    def names(self) -> list[str]:
        """All cells, in an order in which each finds what it needs."""

    @abc.abstractmethod
    def _train(self, name: str) -> Cell:
        """The cell of this name, anew."""

    def path(self, name: str) -> Path:
        return self.folder / "cells" / f"{name.replace(':', '-')}.json"  # no colon: not all file systems have it

    def cell(self, name: str) -> Cell:
        return kept(self.path(name), functools.partial(self._train, name))

    def train_all(self) -> None:
        for name in self.names():
            self.cell(name)


def load(path: Path) -> Cell:
    plain = json.loads(path.read_text(encoding="utf-8"))
    metrics = {name: np.array(values, float) for name, values in plain["metrics"].items()}
    arrays = {"round": np.array(plain["round"]), "metrics": metrics, "diverged": np.array(plain["diverged"])}
    return Cell(**(plain | arrays))
