"""Cells: what an experiment keeps of its trainings, as files of plain numbers.

A `Cell` is a sweep of settings x seeds of one algorithm: the settings in words, the recorded metrics, what diverged,
how long it took, where, and of what code and data it came. A `Table` is any other result. On disk both are Parquet: one
row per setting, seed and evaluation (or per row of the table), and all else in its metadata, where pandas shows it as
`pd.read_parquet(path).attrs`.
"""

import functools
import hashlib
import importlib.metadata
import io
import os
import platform
import subprocess
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
    origin: dict[str, Any] = {}  # see `describe_origin`; what an older program did not record is missing

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

    def near(self, metric: str, rounds: int, setting: int = 0) -> pd.Series:
        """The values by seed at the evaluation nearest to so many rounds; NaN if it is farther than a tenth of them."""
        place = np.abs(self.round - rounds).argmin()
        found = pd.Series(self.metrics[metric][setting, :, place], self.seeds)
        return found if abs(self.round[place] - rounds) <= rounds / 10 else found * np.nan

    def edges(self, setting: int) -> str:
        """In which of the numbers that were tried a setting lies at an end of their grid."""
        numbers = {key: {words[key] for words in self.settings} for key in self.settings[setting]}
        own = self.settings[setting]
        return ", ".join(
            f"{key} {'largest' if own[key] == max(values) else 'smallest'}"
            for key, values in numbers.items()
            if len(values) > 1 and own[key] in (min(values), max(values))
        )

    def moments(self, metric: str, title: str) -> dict[str, float]:
        """Mean and standard deviation over seeds of the last values, as two columns of a table."""
        values: Any = self.final(metric)
        return {title: values.mean(), f"{title}, std": values.std(ddof=1)}

    def motion(self, metric: str, setting: int = 0) -> float:
        """How far a curve could still go: the slope over its last tenth (three evaluations at least) of the mean over
        seeds, kept up for as long again as the run was; 0 if it does not go on in the direction in which it came."""
        values = self.metrics[metric][setting, self.diverged[setting] < 0]
        curve = values.mean(0) if len(values) else np.full(len(self.round), np.nan)
        known = np.isfinite(curve)
        when, curve = self.round[known].astype(float), curve[known]
        if len(curve) < MOVING_POINTS:
            return 0.0
        last = max(MOVING_POINTS, int((when >= 0.9 * when[-1]).sum()))
        centered = when[-last:] - when[-last:].mean()
        further = float(centered @ curve[-last:] / (centered @ centered) * when[-1])
        return abs(further) if further * (curve[-1] - curve[0]) > 0 else 0.0

    def collapsed(self, metric: str, setting: int = 0) -> list[int]:
        """The seeds whose run stood still in its second half, far below the others: it moved there by less than a
        hundredth of what the median run gained in all, and ended more than a tenth of that below it."""
        values = self.metrics[metric][setting]
        end, middle = values[:, -1], values[:, values.shape[1] // 2]
        gain = np.nanmedian(end) - np.nanmedian(values[:, 0])
        fallen = (np.abs(end - middle) < 0.01 * gain) & (end < np.nanmedian(end) - 0.1 * gain)
        return [seed for seed, own in zip(self.seeds, fallen, strict=True) if own]

    def history(self, name: str, local_steps: int = 1, setting: int = 0) -> pd.DataFrame:
        """One row per seed and evaluation, as the figures of reports take it."""
        rounds = self.round.astype(int)
        sent = (self.cost["bytes_up"] + self.cost["bytes_down"]) * rounds
        common = {"method": name, "stage": "training", "round": rounds, "step": rounds * local_steps, "bytes": sent}
        common["oracle_calls"] = sum(self.cost["oracles"].values()) * rounds
        own = lambda i: {metric: values[setting, i] for metric, values in self.metrics.items()}
        frames = [pd.DataFrame(common | {"seed": seed} | own(i)) for i, seed in enumerate(self.seeds)]
        return pd.concat(frames, ignore_index=True)

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


MOVING_POINTS = 3  # evaluations that a slope is taken of


class Table(NamedTuple):
    """A result that is a table, row by row."""

    rows: list[dict[str, Any]]
    seconds: float
    machine: str
    origin: dict[str, Any] = {}


def describe_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in settings.items())


# ------------------------------------------------------------------------------------------------- making them


Settings = Sequence[tuple[Mapping[str, Any], Any]]  # (description, algorithm or (algorithm, problem))


def train(settings: Settings, tasks: Any, seeds: Sequence[int], **options: Unpack[Changes]) -> Cell:
    """Sweep over all settings and seeds; options are those of `sweep`."""
    began = time.monotonic()
    found = sweep([setting for _, setting in settings], tasks, list(seeds), **options)
    return _make_cell(settings, tasks, seeds, found.history, found.diverged, began)


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
    return _make_cell(settings, tasks, seeds, history | {"round": first["round"]}, diverged, began)


def _make_cell(
    settings: Any, tasks: Any, seeds: Sequence[int], history: Any, diverged: np.ndarray, began: float
) -> Cell:
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
        origin=describe_origin(tasks),
    )


def tabulate(make: Callable[[], pd.DataFrame], data: Any = ()) -> Table:
    """The table that a function makes, with the time that it takes; `data` are the arrays that it takes."""
    began = time.monotonic()
    frame = make()
    rows: Any = frame.to_dict("records")
    return Table(rows, time.monotonic() - began, jax.devices()[0].device_kind, describe_origin(data))


def describe_origin(data: Any) -> dict[str, Any]:
    """Of what a cell comes: the commit of the code, the versions of what it uses, the machine, and the sha256 sum of
    all arrays in `data`, a task or several: rows, those put aside, starting points."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(data):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.data)
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    host = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"commit": find_commit(), "versions": versions, "host": host, "data": digest.hexdigest()}


PACKAGES = ("nestfed", "jax", "jaxlib", "numpy", "optax")


@functools.cache
def find_commit() -> str:
    """That of the checkout that this file lies in, with a + where its source has changed since."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "--", "../..") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


# ------------------------------------------------------------------------------------------------- files


def save(path: Path, cell: Cell | Table) -> None:
    about = cell._asdict()
    if isinstance(cell, Cell):
        about = {key: value for key, value in about.items() if key not in ("round", "metrics")}
        about["diverged"] = cell.diverged.tolist()
        frame = pd.MultiIndex.from_product([range(len(cell.settings)), cell.seeds, cell.round.tolist()])
        frame = frame.to_frame(index=False, name=["setting", "seed", "round"])
        frame = frame.assign(**{name: _shorten(values.ravel()) for name, values in cell.metrics.items()})
    else:
        frame = pd.DataFrame(about.pop("rows"))
    frame.attrs.update(about)
    content = io.BytesIO()
    frame.to_parquet(content, index=False, compression="zstd")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue())


def _shorten(values: np.ndarray) -> np.ndarray:
    """In half the bytes where that loses nothing."""
    values = np.asarray(values, float)
    with np.errstate(over="ignore"):  # what is too large for it stays as it is
        short = values.astype(np.float32)
    return short if np.array_equal(short.astype(float), values, equal_nan=True) else values


def load(path: Path) -> Cell | Table:
    frame = pd.read_parquet(path)
    about = {str(key): value for key, value in frame.attrs.items()}
    if "diverged" not in about:
        rows: Any = frame.to_dict("records")
        return Table(rows, **about)
    settings, seeds = len(about["settings"]), len(about["seeds"])
    shape = (settings, seeds, len(frame) // (settings * seeds))
    metrics = {
        name: frame[name].to_numpy(float).reshape(shape) for name in frame if name not in ("setting", "seed", "round")
    }
    arrays = {"round": frame["round"].to_numpy()[: shape[-1]], "metrics": metrics}
    known: dict[str, Any] = about | arrays | {"diverged": np.array(about["diverged"])}
    return Cell(**known)
