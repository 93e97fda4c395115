"""What a task's methods gain on tables that nobody prepared: four tables, clients by a real column, default settings.

    NESTFED_DATA=folder python benchmarks/tables.py robust [--seeds 5] [--tables bank,credit] [--out FOLDER]

Every method that the task runs by itself is trained with no setting but the task, the table and the columns of its
clients and groups. The script writes FOLDER/tables-TASK.json (every number, seed by seed) and FOLDER/tables-TASK.md: a
table per data set with the 95 % intervals of differences to the baseline, paired by seed, and what became of every bar.
Tables that are in the JSON file already are kept, so that an interrupted benchmark goes on, unless --again is given.
"""

import argparse
import dataclasses
import json
import operator
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nestfed import workbench
from nestfed.report import tables as report_tables
from nestfed.report.statistics import pair
from nestfed.report.style import format_numbers

TABLES: dict[str, dict[str, Any]] = {
    "bank": {"data": "bank", "clients": "job"},
    "default": {"data": "default-credit", "clients": "EDUCATION"},
    "adult": {"data": "adult", "clients": "workclass"},
    "credit": {"data": "german", "clients": "employment_since"},
}
KEPT = ("method", "seed", "status", "above_start")  # of the record, beside its metrics
CHOSEN = "tuned"  # of what a run says about itself: settings that it chose, if it chose any


# ------------------------------------------------------------------------------------------------- bars


@dataclasses.dataclass(frozen=True)
class Bar:
    """A promise about a method beside others, which holds on a table or does not.

    against      the best of these methods, by their mean, is what it is compared with
    ratio        compared by the ratio of values in place of their difference
    at_most, at_least      the bound on the mean over seeds; one of them also says which values are the good ones
    clear        must the whole 95 % interval lie beyond the bound?
    where_above  asked only where the other method's mean is above this
    tables       on how many tables it must hold; None: on all that are asked
    """

    method: str
    metric: str
    against: tuple[str, ...] = ("fedavg",)
    ratio: bool = False
    at_most: float | None = None
    at_least: float | None = None
    clear: bool = False
    where_above: float | None = None
    tables: int | None = None

    def judge(self, final: pd.DataFrame) -> dict[str, Any]:
        """What one table says of it; `holds` is None where nothing is asked of the table."""
        values = lambda method: final[final["method"] == method].set_index("seed")[self.metric].astype(float)
        own, others = values(self.method), {method: values(method) for method in self.against}
        best = (min if self.at_least is None else max)(others, key=lambda method: others[method].mean())
        other = others[best]
        found = pair(own / other, 0 * own) if self.ratio else pair(own, other)
        asked = self.where_above is None or other.mean() > self.where_above
        low, high = (found.low, found.high) if self.clear else (found.mean, found.mean)
        # A whole interval lies beyond its bound; that of methods which are the same everywhere does not.
        above, below = (operator.gt, operator.lt) if self.clear else (operator.ge, operator.le)
        kept = (self.at_most is None or below(high, self.at_most)) and (
            self.at_least is None or above(low, self.at_least)
        )
        return {
            "against": best,
            "mean": found.mean,
            "low": found.low,
            "high": found.high,
            "holds": bool(kept) if asked else None,
        }

    def decide(self, verdicts: Sequence[Mapping[str, Any]]) -> bool:
        """Over all tables."""
        asked = [verdict["holds"] for verdict in verdicts if verdict["holds"] is not None]
        return all(asked) if self.tables is None else sum(asked) >= self.tables

    @property
    def words(self) -> str:
        other = self.against[0] if len(self.against) == 1 else f"the best of {', '.join(self.against)}"
        bound = f"at most {self.at_most:g}" if self.at_least is None else f"at least {self.at_least:g}"
        what = f"{self.metric} / that of {other}" if self.ratio else f"{self.metric} − that of {other}"
        more = [
            "the whole interval" if self.clear else "",
            "" if self.where_above is None else f"where {other} is above {self.where_above:g}",
            "" if self.tables is None else f"on {self.tables} tables",
        ]
        return ", ".join([f"{self.method}: {what} {bound}", *filter(None, more)])


@dataclasses.dataclass(frozen=True)
class Entry:
    """A task of this benchmark."""

    bars: tuple[Bar, ...]
    columns: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )  # what a table needs beyond clients
    methods: tuple[str, ...] | None = None  # None: those that the task runs by itself


def robust_bars(method: str) -> tuple[Bar, ...]:
    return (
        Bar(method, "test_worst_decile_loss", ratio=True, at_most=0.8),
        Bar(method, "test_accuracy", at_least=-0.02),
    )


TASKS: dict[str, Entry] = {
    "robust": Entry(bars=(*robust_bars("feddro"), *robust_bars("ds-feddro"))),
    "fairness": Entry(
        bars=(
            Bar("fedbio", "test_eqopp", at_most=0.0, clear=True, where_above=0.05),
            Bar("fedbio", "test_accuracy", at_least=-0.01),
        ),
        columns={
            "bank": {"group": "marital"},
            # The task needs a positive row of every client; in the smallest workclass and level of education none is.
            "default": {"group": "SEX", "clients": "MARRIAGE"},
            "adult": {"group": "sex", "clients": "race"},
            "credit": {"group": "personal_status_sex"},
        },
    ),
    "auprc": Entry(
        bars=(
            Bar("fcsg-m", "test_average_precision", at_least=0.0),
            Bar("fcsg-m", "test_average_precision", at_least=0.0, clear=True, tables=2),
        ),
    ),
    # FedAvg with fine-tuning is what the pages recommend: FedReCo stays near training alone.
    "personal": Entry(bars=(Bar("fedavg-tuned", "test_accuracy", against=("fedavg", "local-only"), at_least=0.0),)),
}


# ------------------------------------------------------------------------------------------------- running


def run_table(task: str, entry: Entry, name: str, seeds: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """One table's numbers, as plain values."""
    settings = {**TABLES[name], **entry.columns.get(name, {}), **changes, "seeds": seeds}
    settings |= {} if entry.methods is None else {"algorithm": entry.methods}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        study = workbench.run(task, out=Path(folder) / "run", progress=False, **settings)
        record = study.record
    metrics = [metric.name for metric in record.metrics]
    _, shown = report_tables.tabulate_headline(record)
    return {
        "command": record.about["command"],
        "seconds": round(time.monotonic() - began, 1),
        "final": json.loads(record.final[[*KEPT, *metrics]].to_json(orient="records")),
        "headline": shown.to_dict("records"),
        "warnings": study.warnings,
        CHOSEN: record.about.get(CHOSEN),
    }


def frame_of(run: Mapping[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(run["final"])


# ------------------------------------------------------------------------------------------------- writing


def judge_all(entry: Entry, runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every bar with its verdict on every table."""
    judged = []
    for bar in entry.bars:
        by_table = {name: bar.judge(frame_of(run)) for name, run in runs.items()}
        judged.append({"bar": bar.words, "holds": bar.decide(list(by_table.values())), "tables": by_table})
    return judged


def write_page(task: str, runs: Mapping[str, Mapping[str, Any]], judged: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"# {task}: four tables, default settings", ""]
    for name, run in runs.items():
        frame = pd.DataFrame(run["headline"])
        lines += [f"## {name}", "", f"`{run['command']}` ({run['seconds']:g} s)", "", _markdown(frame), ""]
        above = frame_of(run).groupby("method", sort=False)["above_start"].sum()
        bad = [f"{method} in {int(often)} seeds" for method, often in above.items() if often]
        lines += [f"Training objective above its start: {', '.join(bad) or 'nowhere'}.", ""]
    verdict = {True: "holds", False: "missed", None: "not asked"}

    def cell(found: Mapping[str, Any]) -> str:
        mean, low, high = format_numbers([found["mean"], found["low"], found["high"]], 3)
        return f"{mean} [{low}, {high}] {verdict[found['holds']]}"

    rows = [
        {"bar": one["bar"], "in all": verdict[one["holds"]]}
        | {name: cell(found) for name, found in one["tables"].items()}
        for one in judged
    ]
    return "\n".join([*lines, "## Bars", "", _markdown(pd.DataFrame(rows)), ""])


def _markdown(frame: pd.DataFrame) -> str:
    row = lambda cells: "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
    return "\n".join([row(frame.columns), row("---" for _ in frame.columns), *map(row, frame.itertuples(index=False))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="seeds of every method (default 5)")
    parser.add_argument("--tables", default=",".join(TABLES), help="which tables, separated by commas (default all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of what is written")
    parser.add_argument("--again", action="store_true", help="run tables that are there already")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help='more settings of `run`, as JSON: {"steps": 200}'
    )
    given = parser.parse_args()
    entry, target = TASKS[given.task], given.out / f"tables-{given.task}"
    file, page = target.with_suffix(".json"), target.with_suffix(".md")
    kept = {} if not file.exists() else json.loads(file.read_text(encoding="utf-8"))["runs"]
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.tables.split(","):
        if name not in kept or given.again:
            kept[name] = run_table(given.task, entry, name, given.seeds, given.settings)
        runs = {name: kept[name] for name in TABLES if name in kept}  # in one order
        judged = judge_all(entry, runs)
        file.write_text(json.dumps({"runs": runs, "bars": judged}, indent=1) + "\n", encoding="utf-8")
        page.write_text(write_page(given.task, runs, judged), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
