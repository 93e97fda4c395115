"""The tables of a report, as CSV (full precision), Markdown and LaTeX (as people read them)."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from nestfed.report import statistics
from nestfed.report.record import Record
from nestfed.report.style import format_amount, format_number, format_numbers, format_spread, make_file_name, make_title

NAMES = ("method", "way", "stage", "part", "metric", "group", "client", "split", "slice", "kind")  # columns of words
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|&!~$])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",
    "]": "{]}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
}


def write(
    frame: pd.DataFrame, folder: Path, stem: str, *, shown: pd.DataFrame | None = None, names: Collection[str] = ()
) -> list[Path]:
    """Write stem.csv of `frame`, and stem.md and stem.tex of `shown` (of `frame` where none is given); `names` are
    further columns of words."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = frame if shown is None else shown
    contents = {
        "csv": frame.to_csv(index=False),
        "md": format_markdown(shown, names=names),
        "tex": format_latex(shown, names=names),
    }
    for suffix, content in contents.items():
        (folder / f"{stem}.{suffix}").write_text(content, encoding="utf-8", newline="\n")
    return [folder / f"{stem}.{suffix}" for suffix in contents]


def format_markdown(frame: pd.DataFrame, *, names: Collection[str] = ()) -> str:
    escape = lambda value: _MARKDOWN.sub(r"\\\1", _format_text(value))
    line = lambda cells: f"| {' | '.join(cells)} |"
    rule = ["---:" if right else "---" for right in _align_right(frame, names)]
    rows = [[escape(value) for value in row] for row in frame.itertuples(index=False)]
    return "\n".join([line(map(escape, frame.columns)), line(rule), *map(line, rows)]) + "\n"


def format_latex(frame: pd.DataFrame, *, names: Collection[str] = ()) -> str:
    r"""A tabular with the rules of booktabs (\usepackage{booktabs})."""
    escape = lambda value: "".join(_LATEX.get(character, character) for character in _format_text(value))
    line = lambda cells: " & ".join(cells) + r" \\"
    rows = [line(map(escape, row)) for row in frame.itertuples(index=False)]
    columns = "".join("r" if right else "l" for right in _align_right(frame, names))
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(map(escape, frame.columns)),
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _format_text(value: Any) -> str:
    return " ".join((format_number(value) if isinstance(value, float) else str(value)).split())


def _align_right(frame: pd.DataFrame, names: Collection[str]) -> list[bool]:
    """Numbers are aligned to the right, whether they are formatted already or not: all but the columns of words."""
    return [str(column) not in {*NAMES, *names} for column in frame.columns]


# ------------------------------------------------------------------------------------------------- the tables


def tabulate_headline(record: Record) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The headline table: all its numbers, and the same for readers."""
    table = statistics.make_headline(record)
    titles = pd.Index([record.title(method) for method in table.index])
    baseline = statistics.find_baseline(record)
    columns: dict[str, list[str]] = {"method": list(titles)}
    for metric in record.metrics:
        rows = [statistics.find_entry(table, method, metric) for method in table.index]
        columns[metric.title] = [format_spread(row.mean, row.std, row.n, metric.digits) for row in rows]
        if baseline:
            column = f"{metric.title}: difference to {record.title(baseline)}"
            columns[column] = [format_difference(row.paired, metric.digits) for row in rows]
    tuned = record.about.get("tuned", {})
    if tuned:
        chosen = lambda method: ", ".join(f"{key} {one['chosen']:g}" for key, one in tuned.get(method, {}).items())
        columns["chosen settings"] = [chosen(method) or "–" for method in table.index]
    for column in ("failed", "above start"):
        if any(table[column]):
            columns[column] = [str(count) for count in table[column]]
    return table.reset_index(), pd.DataFrame(columns)


def format_difference(result: statistics.Paired, digits: int) -> str:
    """A signed difference with its interval, or a dash where there is none."""
    if result.n == 0:
        return "–"
    mean, low, high = format_numbers([result.mean, result.low, result.high], digits)
    mean = ("+" if result.mean > 0 else "") + mean
    return f"{mean} [{low}, {high}]" if result.n > 1 else f"{mean} (one seed: no interval)"


def tabulate_cost(record: Record) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What one client sends, receives and computes: a line for each round of a stage, and for its start if it costs."""
    rows = []
    for method in record.methods:
        for stage, parts in record.cost.get(method, {}).items():
            for part, times in (("start", 1), ("round", parts["rounds"])):
                ledger = parts[part]
                if part == "round" or any(ledger[key] for key in ("exchanges", "oracles", "samples")):
                    rows.append(
                        {"method": record.title(method), "stage": stage, "part": part, "times": times}
                        | {key: ledger[key] for key in ("exchanges", "gathers", "bytes_up", "bytes_down")}
                        | ledger["oracles"]
                        | {"samples": ledger["samples"]}
                    )
    kinds = list(dict.fromkeys(kind for row in rows for kind in row if kind.isupper()))
    order = ["method", "stage", "part", "times", "exchanges", "gathers", "bytes_up", "bytes_down", *kinds, "samples"]
    frame = pd.DataFrame(rows, columns=pd.Index(order))
    frame[order[3:]] = frame[order[3:]].fillna(0).astype("int64")
    shown = frame.assign(
        bytes_up=[format_amount(size, "B") for size in frame["bytes_up"]],
        bytes_down=[format_amount(size, "B") for size in frame["bytes_down"]],
        times=[f"{count:,}" for count in frame["times"]],
    )
    unused = [] if any(frame["gathers"]) else ["gathers"]
    return frame, shown.drop(columns=unused).rename(columns=make_title)


def tabulate_slices(record: Record, kind: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The metrics on groups or clients; for readers a column per method, and only the test rows where there are any."""
    frame = statistics.select_rows(statistics.average_slices(record), kind=kind).drop(columns="kind")
    chosen = statistics.select_rows(frame, split="test")
    digits = {metric.name: metric.digits for metric in record.metrics}
    # A part of the data without a value (no positive row, say) keeps its line, with dashes.
    asked = statistics.select_rows(record.slices, kind=kind, **({} if chosen.empty else {"split": "test"}))
    shown = {(make_title(row["metric"]), row["slice"], row["split"]): {} for row in asked.to_dict("records")}
    for row in (frame if chosen.empty else chosen).to_dict("records"):
        text = format_spread(row["mean"], row["std"], row["n"], digits.get(row["metric"], 4))
        shown[make_title(row["metric"]), row["slice"], row["split"]][row["method"]] = text
    return frame, pd.DataFrame(
        [
            {"metric": metric, kind: name, "split": split}
            | {record.title(method): texts.get(method, "–") for method in record.methods}
            for (metric, name, split), texts in shown.items()
        ]
    )


def tabulate_holdings(record: Record) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Who holds what; for readers the rows per client and group of the first seed."""
    frame = record.holdings
    first = frame[frame["seed"] == frame["seed"].iloc[0]]
    shown = first.pivot_table(index="client", columns="group", values="rows", aggfunc="sum", fill_value=0, sort=False)
    shown.columns = pd.Index([f"rows of {group}" for group in shown.columns])  # a group may be called "client"
    by_group = shown if shown.shape[1] > 1 else shown.iloc[:, :0]
    return frame, by_group.assign(rows=shown.sum(axis=1)).reset_index()


def tabulate_candidates(record: Record) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The models among which methods chose; for readers means over seeds, and how often each was chosen."""
    frame = record.candidates
    grouped: Any = frame.groupby(["method", "number", "way"], sort=False)
    means = grouped.mean(numeric_only=True).drop(columns="seed").reset_index()
    text = lambda column: [format_number(value) for value in means[column]]
    columns = ("validation_gap", "bound", "validation_accuracy", "test_gap", "test_accuracy")
    shown = pd.DataFrame(
        {
            "method": [record.title(method) for method in means["method"]],
            "way": means["way"],
            "trained for a gap of": text("aim"),
        }
        | {make_title(column): text(column) for column in columns}
        | {"chosen": grouped["chosen"].sum().to_numpy()}
    )
    return frame, shown


def write_all(record: Record, folder: Path) -> list[Path]:
    made = {"headline": tabulate_headline(record)}
    if record.cost:
        made["cost"] = tabulate_cost(record)
    for kind in record.slices["kind"].unique():
        made[make_file_name("slices", kind)] = tabulate_slices(record, kind)
    if len(record.candidates):
        made["candidates"] = tabulate_candidates(record)
    if len(record.holdings):
        made["holdings"] = tabulate_holdings(record)
    return [path for stem, (frame, shown) in made.items() for path in write(frame, folder, stem, shown=shown)]
