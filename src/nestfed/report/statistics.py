"""Means, spreads and paired differences over seeds.

Spreads are standard deviations with ddof 0. A difference to the baseline is taken seed by seed, because both methods
then see the same data, start and noise: its interval is the 95 % t-interval of the differences, its p-value that of the
two-sided paired t-test. Neither is corrected for the number of comparisons.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes a second to import

from nestfed.core.settings import UserError
from nestfed.report.metrics import Metric
from nestfed.report.record import Record
from nestfed.report.style import format_numbers

CONFIDENCE = 0.95
STATISTICS = ("mean", "std", "n", "difference", "low", "high", "p", "pairs")
HISTORY_KEYS = ("method", "seed", "stage", "round", "bytes", "oracle_calls", "samples")


class Paired(NamedTuple):
    """The mean of the differences over common seeds, its interval and p-value; NaN where there are too few seeds."""

    mean: float
    low: float
    high: float
    p: float
    n: int

    @property
    def clear(self) -> bool:
        """The interval leaves out zero. (Never with fewer than two seeds: there is no interval.)"""
        return self.low > 0 or self.high < 0


NO_PAIRS = Paired(np.nan, np.nan, np.nan, np.nan, 0)


def pair(a: pd.Series, b: pd.Series) -> Paired:
    """a - b, both indexed by seed, on the seeds for which both are finite."""
    for series in (a, b):
        if not series.index.is_unique:
            twice = series.index[series.index.duplicated()][0]
            raise UserError(f"seed {twice} was given twice; a paired difference needs one value per seed.")
    a, b = _select_finite(a), _select_finite(b)
    seeds = a.index.intersection(b.index)
    first, second = a.loc[seeds].to_numpy(float), b.loc[seeds].to_numpy(float)
    differences, n = first - second, len(seeds)
    if n == 0:
        return NO_PAIRS
    mean = float(differences.mean())
    if n == 1:
        return Paired(mean, np.nan, np.nan, np.nan, 1)
    # Subtracting leaves rounding errors of the size of the operands: smaller spreads are none.
    rounding = 8 * np.finfo(float).eps * max(np.abs(first).max(), np.abs(second).max())
    if np.ptp(differences) <= rounding:
        same = abs(mean) <= rounding
        mean = 0.0 if same else mean
        return Paired(mean, mean, mean, 1.0 if same else 0.0, n)
    error = float(differences.std(ddof=1)) / n**0.5
    reach = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
    return Paired(mean, mean - reach, mean + reach, float(2 * stdtr(n - 1, -abs(mean) / error)), n)


def _select_finite(series: pd.Series) -> pd.Series:
    return series.take(np.flatnonzero(np.isfinite(series.to_numpy(float))))


def select_rows(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The rows with these values in these columns."""
    keep = np.ones(len(frame), bool)
    for column, value in values.items():
        keep &= (frame[column] == value).to_numpy(bool)
    return frame.take(np.flatnonzero(keep))


def select_rows_with(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows in which a column of numbers is finite."""
    return frame.take(np.flatnonzero(np.isfinite(frame[column].to_numpy(float))))


def select_finished(record: Record) -> pd.DataFrame:
    """The rows of `final` that count: runs that diverged or were cut short say nothing about a finished one."""
    return select_rows(record.final, status="finished")


def select_sound_history(record: Record) -> pd.DataFrame:
    """The history without the runs that diverged: they end early, and the mean would jump where they do."""
    diverged = select_rows(record.final, status="diverged")
    gone = set(zip(diverged["method"], diverged["seed"], strict=True))
    runs = zip(record.history["method"], record.history["seed"], strict=True)
    return record.history.take([i for i, run in enumerate(runs) if run not in gone])


def make_headline(record: Record) -> pd.DataFrame:
    """One row per method: "failed" (runs that did not finish), "above start" (runs whose training objective ended above
    where it began) and for every metric the columns "<name> mean", "std", "n", "difference" (to the baseline), "low",
    "high", "p" and "pairs" (common seeds). The baseline has no difference to itself.
    """
    good = select_finished(record)
    values = {method: select_rows(good, method=method).set_index("seed") for method in record.methods}
    baseline = find_baseline(record)
    lines = []
    for method in record.methods:
        line: dict[str, Any] = {"failed": len(select_rows(record.final, method=method)) - len(values[method])}
        risen = values[method]["above_start"].to_numpy(bool) if "above_start" in record.final else np.zeros(0, bool)
        line["above start"] = int(risen.sum())
        for metric in record.metrics:
            other = None if baseline in (None, method) else _describe_column(values[baseline], metric)
            line |= _compare(_describe_column(values[method], metric), other, metric)
        lines.append(line)
    return pd.DataFrame(lines, index=pd.Index(record.methods, name="method"))


def find_baseline(record: Record) -> str | None:
    baseline = record.about.get("baseline")
    return baseline if baseline in record.methods else None


def _describe_column(values: pd.DataFrame, metric: Metric) -> pd.Series:
    return pd.Series(values[metric.name] if metric.name in values else np.nan, values.index, float)


def _compare(own: pd.Series, reference: pd.Series | None, metric: Metric) -> dict[str, Any]:
    good = _select_finite(own)
    mean, std = (good.mean(), good.std(ddof=0)) if len(good) else (np.nan, np.nan)
    numbers = (mean, std, len(good), *(NO_PAIRS if reference is None else pair(own, reference)))
    return {f"{metric.name} {name}": value for name, value in zip(STATISTICS, numbers, strict=True)}


def find_gains(record: Record) -> dict[str, str]:
    """A plain sentence for every method: what it gained over the methods that one would take anyhow (`references` of
    the record: FedAvg, local training), in the first metric."""
    metric, good = record.metrics[0], select_finished(record)
    values = {
        method: _describe_column(select_rows(good, method=method).set_index("seed"), metric)
        for method in record.methods
    }
    baseline = find_baseline(record)
    references = record.about.get("references", [] if baseline is None else [baseline])
    said = {}
    for method in record.methods:
        others = [other for other in references if other != method and other in record.methods]
        if not len(_select_finite(values[method])):
            said[method] = f"{record.title(method)}: no seed has a result."
        elif others:
            compared = lambda other: pair(values[method], values[other])
            parts = [_describe_gain(compared(other), record.title(other), metric) for other in others]
            said[method] = f"{record.title(method)}, {metric.title}: {'; '.join(parts)}."
    return said


def _describe_gain(found: Paired, other: str, metric: Metric) -> str:
    if found.n == 0:
        return f"no seed in common with {other}"
    size, mean, low, high = format_numbers([abs(found.mean), found.mean, found.low, found.high], metric.digits)
    if found.n == 1:
        return f"no clear gain over {other} ({mean} in one seed; an interval needs several: --seeds 3)"
    interval = f"95 % interval {low} to {high}, {found.n} seeds"
    if not found.clear:
        return f"no clear gain over {other} ({mean}, {interval})"
    better = (found.mean > 0) == (metric.better == "higher")
    return f"{'better' if better else 'worse'} than {other} by {size} ({interval})"


class Entry(NamedTuple):
    """One method and one metric of a headline table."""

    mean: float
    std: float
    n: int
    paired: Paired  # with the baseline


def find_entry(table: pd.DataFrame, method: str, metric: Metric) -> Entry:
    mean, std, n, *others = (table.at[method, f"{metric.name} {name}"] for name in STATISTICS)
    return Entry(mean, std, int(n), Paired(*others[:-1], n=int(others[-1])))


def find_best(table: pd.DataFrame, metric: Metric) -> str | None:
    """The method of a headline table with the best mean of a metric; None where no method has one."""
    means = table[f"{metric.name} mean"].dropna()
    if means.empty:
        return None
    return str(means.idxmax() if metric.better == "higher" else means.idxmin())


def list_metrics(history: pd.DataFrame) -> list[str]:
    """The metrics that were recorded over time and have a finite value somewhere."""
    numeric = history.drop(columns=[key for key in HISTORY_KEYS if key in history]).select_dtypes("number")
    return [name for name in numeric if np.isfinite(numeric[name].to_numpy(float)).any()]


def average_curve(history: pd.DataFrame, method: str, metric: str) -> pd.DataFrame:
    """Mean and standard deviation over seeds of one method, by evaluation.

    Columns: stage (a count from 0), name (of the stage), round, bytes, oracle_calls, mean, std, n. Evaluations without
    the metric are left out.
    """
    # A report has hundreds of curves: arrays are three times faster here than groups of a frame.
    own = select_rows(history.filter(["method", "stage", "round", "bytes", "oracle_calls", metric]), method=method)
    own = own.take(np.argsort(own["round"].to_numpy(), kind="stable"))
    stage, names = pd.factorize(own["stage"])  # in the order in which they were run
    round, values = own["round"].to_numpy(), own[metric].to_numpy(float)
    order = np.lexsort((round, stage))
    order = order[np.isfinite(values[order])]
    stage, round, values = stage[order], round[order], values[order]
    first = np.flatnonzero(np.append(True, (np.diff(stage) != 0) | (np.diff(round) != 0))[: len(order)])
    n = np.diff(np.append(first, len(order)))
    mean = lambda column: np.add.reduceat(column, first) / n if len(n) else np.zeros(0)
    center = mean(values)
    return pd.DataFrame(
        {
            "stage": stage[first],
            "name": names.take(stage[first]),
            "round": round[first],
            "mean": center,
            "std": np.sqrt(mean((values - np.repeat(center, n)) ** 2)),
            "n": n,
        }
        | {axis: mean(own[axis].to_numpy(float)[order]) for axis in ("bytes", "oracle_calls")}
    )


def compute_half_width(std: Any, n: Any) -> Any:
    """Of the 95 % t-interval of a mean of n values with this standard deviation (ddof 0); NaN where n is 1."""
    std, n = np.asarray(std, float), np.asarray(n, float)
    freedom = np.where(n > 1, n - 1, np.nan)
    return stdtrit(freedom, (1 + CONFIDENCE) / 2) * std / np.sqrt(freedom)


def _compute_moments(values: Any) -> pd.DataFrame:
    """Mean, std and n of grouped values."""
    return pd.DataFrame({"mean": values.mean(), "std": values.std(ddof=0), "n": values.size()})


def find_stage_changes(curve: pd.DataFrame, against: str) -> list[tuple[float, str]]:
    """Where (on an axis) a later stage begins, and its name: at the last evaluation of the stage before, or at its own
    first where the stage before lacks the metric.
    """
    begins = np.flatnonzero(np.diff(curve["stage"].to_numpy(int), prepend=0) > 0)
    return [(float(curve[against].iloc[max(i - 1, 0)]), str(curve["name"].iloc[i])) for i in begins]


def average_lines(record: Record) -> pd.DataFrame:
    """Mean, std and n over finished seeds of the lines of the chart, for every method, slice and x."""
    good = record.lines.merge(select_finished(record)[["method", "seed"]], on=["method", "seed"])
    return _compute_moments(good.groupby(["method", "slice", "x"], sort=False)["y"]).reset_index()


def average_slices(record: Record) -> pd.DataFrame:
    """Mean, std and n over finished seeds for every method, kind, slice, split and metric, in the order of the data."""
    good = record.slices.merge(select_finished(record)[["method", "seed"]], on=["method", "seed"])
    good = select_rows_with(good, "value")
    keys = ["method", "kind", "slice", "split", "metric"]
    return _compute_moments(good.groupby(keys, sort=False)["value"]).reset_index()
