"""The page of a report: one HTML file that fetches nothing.

Tables, marks and holdings are written here and need no script. Curves, bars and the trade-off are drawn by page.js from
the numbers embedded as JSON: means and spreads over seeds, thinned out, never the single runs.
"""

import base64
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import tomli_w
from markupsafe import Markup

from nestfed.report import statistics, tables
from nestfed.report.figures import AXES, draw_candidates, find_looks, make_metric_title
from nestfed.report.metrics import Metric
from nestfed.report.record import Record
from nestfed.report.style import GROUP_COLOURS, format_duration, format_numbers, format_spread, make_title

POINTS = 400  # of a line, at most
NUMBERS = 60_000  # of all lines, at most: a page stays below a megabyte
MANY_CLIENTS = 30  # more are drawn as one picture instead of a bar each
SHOWN_ELSEWHERE = set(
    """
    title command methods baseline metrics notes versions format chart gains references tuned
    """.split()
)
TITLES = {"name": "run", "seconds": "wall time", "started": "started"}


def render(record: Record) -> str:
    """The page as one string."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nestfed.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    here = Path(__file__).parent
    table = statistics.make_headline(record)
    return environment.get_template("page.html.jinja").render(
        css=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
        data=Markup(embed(_collect_numbers(record, table))),
        about=record.about,
        title=record.about.get("title") or record.about["name"],
        sentence=write_sentence(record, table),
        facts=_list_facts(record),
        methods=find_looks(record),
        metrics=record.metrics,
        baseline=statistics.find_baseline(record),
        rows=_make_headline_rows(record, table),
        gains=statistics.find_gains(record),
        undrawn=_list_undrawn(record),
        chart=_collect_chart(record),
        candidates=_collect_candidates(record),
        slice_tables={kind: tables.tabulate_slices(record, kind)[1] for kind in record.slices["kind"].unique()},
        holdings=_collect_holdings(record.holdings),
        cost=tables.tabulate_cost(record)[1] if record.cost else None,
        settings=tomli_w.dumps(record.settings),
        details=_list_details(record),
    )


def embed(value: Any) -> str:
    """JSON that may stand in a script element of a page: nothing in it can end the element, and NaN is null."""
    text = json.dumps(_replace_by_nulls(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _replace_by_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _replace_by_nulls(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_by_nulls(entry) for entry in value]
    if isinstance(value, (float, np.floating)):
        value = float(f"{value:.5g}")
        return None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < 1e15 else value
    return value.item() if isinstance(value, np.generic) else value


# ------------------------------------------------------------------------------------------------- words


def write_sentence(record: Record, table: pd.DataFrame) -> str:
    """The result in one sentence: who is best in the first metric, and how clearly it differs from the baseline."""
    metric, baseline = record.metrics[0], statistics.find_baseline(record)
    winner = statistics.find_best(table, metric)
    if winner is None:
        return f"No run finished with a {metric.title}: there is nothing to compare."
    own = statistics.find_entry(table, winner, metric)
    seeds = "with one seed" if own.n == 1 else f"over {own.n} seeds"
    first = f"has the best {metric.title}: {format_spread(own.mean, own.std, own.n, metric.digits)} {seeds}"
    if baseline is None:
        return f"{record.title(winner)} {first}."
    if winner != baseline:
        second = _describe_gap(f"the baseline {record.title(baseline)}", own.paired, metric)
        return f"{record.title(winner)} {first}{second}."
    others = [method for method in record.methods if method != baseline]
    nearest = statistics.find_best(table.loc[others], metric) if others else None
    if nearest is None:
        return f"{record.title(winner)} {first}."
    second = _describe_gap("it", statistics.find_entry(table, nearest, metric).paired, metric)
    return f"The baseline {record.title(winner)} {first}; next is {record.title(nearest)}{second}."


def _describe_gap(name: str, difference: statistics.Paired, metric: Metric) -> str:
    """How far above or below the baseline, called by this name."""
    if difference.n == 0:
        return f", without a seed in common with {name}"
    size, low, high = format_numbers([abs(difference.mean), difference.low, difference.high], metric.digits)
    position = f"{size} {'above' if difference.mean > 0 else 'below'} {name}"
    if difference.n == 1:
        return f", {position} (one common seed: no interval)"
    interval = f"95 % interval {low} to {high}"
    return f", {position} ({interval})" if difference.clear else f", no clear difference to {name} ({interval})"


def _list_facts(record: Record) -> list[tuple[str, str]]:
    about = record.about
    rounds = max(record.history["round"], default=0)
    clients = len(set(record.holdings["client"]))
    facts = [
        ("task", str(about["task"])),
        ("methods", str(len(record.methods))),
        ("seeds", str(len(about["seeds"]))),
        ("clients", str(clients) if clients else ""),
        ("rounds", f"{rounds:,}"),
        ("wall time", format_duration(about["seconds"])),
        ("privacy", _describe_spending(about.get("privacy", {}))),
    ]
    return [(name, value) for name, value in facts if value]


def _describe_spending(privacy: dict[str, Any]) -> str:
    """The most that any method has spent."""
    most = max(privacy.values(), key=lambda spent: spent["epsilon"], default=None)
    return f"epsilon {most['epsilon']:.3g}, delta {most['delta']:g}" if most else ""


def _list_details(record: Record) -> dict[str, dict[str, str]]:
    """What else is known about the run: everything in `about` that no other section shows."""
    run = {TITLES.get(key, make_title(key)): value for key, value in record.about.items() if key not in SHOWN_ELSEWHERE}
    texts = {name: _format_value(name, value) for name, value in run.items()}
    return {"run": texts, "versions": {name: str(value) for name, value in record.about.get("versions", {}).items()}}


def _format_value(name: str, value: Any) -> str:
    if name == "wall time":
        return format_duration(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(str(key), entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_format_value(name, entry) for entry in value)
    return str(value)


# ------------------------------------------------------------------------------------------------- headline


COUNTS = {"failed": "failed", "above_start": "above start"}  # of runs that give no result


def _make_headline_rows(record: Record, table: pd.DataFrame) -> list[dict[str, Any]]:
    winners = {metric.name: statistics.find_best(table, metric) for metric in record.metrics}
    reach = {}
    for metric in record.metrics:
        ends = table[[f"{metric.name} {name}" for name in ("difference", "low", "high")]].abs().to_numpy(float)
        reach[metric.name] = float(np.nanmax(ends, initial=0)) or 1.0
    rows = []
    for method in table.index:
        cells = [
            _make_cell(
                statistics.find_entry(table, method, m),
                m,
                winners[m.name] == method,
                reach[m.name],
                len(record.methods),
            )
            for m in record.metrics
        ]
        counts = {name: int(table.at[method, column]) for name, column in COUNTS.items()}
        rows.append({"method": method, "cells": cells} | counts)
    return rows


def _make_cell(own: statistics.Entry, metric: Metric, best: bool, reach: float, methods: int) -> dict[str, Any]:
    place = lambda value: 50 + 46 * value / reach  # percent of the width, zero in the middle
    result = own.paired
    mean, std = format_numbers([own.mean, own.std], metric.digits)
    cell: dict[str, Any] = {
        "mean": mean,
        "std": std if own.n > 1 else "",
        "n": own.n,
        "best": best and methods > 1,
        "difference": tables.format_difference(result, metric.digits).replace(", ", ",\N{NO-BREAK SPACE}")
        if result.n
        else "",
        "mark": None,
    }
    if result.n:
        cell["dot"] = place(result.mean)
    if result.n > 1:
        good = (result.mean > 0) == (metric.better == "higher")
        cell["mark"] = ("better" if good else "worse") if result.clear else "unclear"
        cell["low"], cell["high"] = place(result.low), place(result.high)
        cell["p"] = "p < 0.001" if result.p < 0.001 else f"p = {result.p:.3f}"
    return cell


# ------------------------------------------------------------------------------------------------- numbers to draw


def _collect_numbers(record: Record, table: pd.DataFrame) -> dict[str, Any]:
    """What page.js draws."""
    history = statistics.select_sound_history(record)
    recorded = statistics.list_metrics(history)
    first = [metric.name for metric in record.metrics if metric.name in recorded]
    names = first + [name for name in recorded if name not in first]
    digits = {metric.name: metric.digits for metric in record.metrics}
    points = int(np.clip(NUMBERS / max(1, 2 * len(names) * len(record.methods)), 50, POINTS))
    return {
        "methods": [
            {"key": method, "title": look.title, "colour": look.colour, "dash": look.dash}
            for method, look in find_looks(record).items()
        ],
        "axes": AXES,
        "metrics": [{"name": n, "title": make_metric_title(record, n), "digits": digits.get(n, 4)} for n in names],
        "curves": {method: _collect_lines(history, method, names, points) for method in record.methods},
        "slices": _collect_slices(record, digits),
        "headline": [
            {"name": m.name, "title": m.title, "better": m.better, "digits": m.digits}
            | {
                "values": {
                    method: {"mean": own.mean, "std": own.std if own.n > 1 else None}
                    for method in record.methods
                    if (own := statistics.find_entry(table, method, m)).n
                }
            }
            for m in record.metrics
        ],
    }


def _collect_lines(history: pd.DataFrame, method: str, names: Iterable[str], points: int) -> dict[str, Any]:
    """The lines of a method. Metrics evaluated at the same rounds share one grid of x values."""
    grids: list[dict[str, Any]] = []
    lines: dict[str, Any] = {}
    for name in names:
        curve = statistics.average_curve(history, method, name)
        if curve.empty:
            continue
        changes = {axis: statistics.find_stage_changes(curve, axis) for axis in AXES}
        curve = curve.iloc[_thin(curve["stage"].to_numpy(), points)]
        grid = {axis: curve[axis].tolist() for axis in AXES} | {"stage": curve["stage"].tolist(), "changes": changes}
        if grid not in grids:
            grids.append(grid)
        band = curve["std"].tolist() if max(curve["n"]) > 1 else None
        lines[name] = {"grid": grids.index(grid), "mean": curve["mean"].tolist(), "std": band}
    return {"grids": grids, "lines": lines}


def _thin(stage: np.ndarray, points: int) -> np.ndarray:
    """At most about so many places, evenly spread, with the first and the last of every stage."""
    last = len(stage) - 1
    even = np.linspace(0, last, min(points, len(stage))).round().astype(int)
    ends = np.flatnonzero(np.diff(stage))
    return np.unique(np.concatenate([even, ends, ends + 1]))


def _collect_slices(record: Record, digits: dict[str, int]) -> list[dict[str, Any]]:
    result = []
    table = statistics.average_slices(record)
    for metric, kind, split in dict.fromkeys(zip(table["metric"], table["kind"], table["split"], strict=True)):
        part = statistics.select_rows(table, metric=metric, kind=kind, split=split)
        means, stds = (
            part.pivot(index="slice", columns="method", values=value).reindex(part["slice"].unique())
            for value in ("mean", "std")
        )
        several = max(part["n"]) > 1
        result.append(
            {"metric": metric, "title": make_metric_title(record, metric), "kind": kind, "split": split}
            | {"digits": digits.get(metric, 4), "names": [str(name) for name in means.index]}
            | {"mean": {method: means[method].tolist() for method in means}}
            | {"std": {method: stds[method].tolist() for method in stds} if several else None}
        )
    return result


def _list_undrawn(record: Record) -> list[str]:
    """Titles of methods that have no curve because every run diverged."""
    runs = record.final.groupby("method")["status"].agg(lambda status: bool((status == "diverged").all()))
    return [record.title(method) for method in record.methods if runs.get(method, False)]


# ------------------------------------------------------------------------------------------------- lines of models


def _collect_chart(record: Record) -> dict[str, Any] | None:
    """The lines of the task's chart as outlines in boxes of 100 x 100, one box per slice; means over seeds."""
    if record.chart is None:
        return None
    table = statistics.average_lines(record)
    points = lambda line: " ".join(
        f"{100 * x:.1f},{100 - 100 * y:.1f}" for x, y in zip(line["x"], line["mean"], strict=True)
    )
    panels = [
        {"name": str(name)}
        | {
            "lines": [
                {"look": look, "points": points(line)}
                for method, look in find_looks(record).items()
                if len(line := statistics.select_rows(table, slice=name, method=method))
            ]
        }
        for name in table["slice"].unique()
    ]
    return {"about": record.chart, "panels": panels}


# ------------------------------------------------------------------------------------------------- candidates


def _collect_candidates(record: Record) -> dict[str, Any] | None:
    """The figure, as an address that holds it, and the table."""
    if record.candidates.empty:
        return None
    content = io.BytesIO()
    draw_candidates(record).savefig(content, format="svg", metadata={"Date": None})
    return {
        "figure": f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}",
        "table": tables.tabulate_candidates(record)[1],
    }


# ------------------------------------------------------------------------------------------------- who holds what


def _collect_holdings(frame: pd.DataFrame) -> dict[str, Any] | None:
    """Bars of the first seed: rows of every client by group, by label and by part."""
    if frame.empty:
        return None
    seed = frame["seed"].iloc[0]
    first = frame[frame["seed"] == seed]
    by = lambda column: first.pivot_table(
        index="client", columns=column, values="rows", aggfunc="sum", fill_value=0, sort=False
    )
    groups, labels, parts = by("group"), by("label"), by("part")
    labels = labels[sorted(labels.columns, key=str)]
    totals = groups.sum(axis=1)
    fills = {str(group): GROUP_COLOURS[i % len(GROUP_COLOURS)] for i, group in enumerate(groups.columns)}
    greys = np.linspace(0.16, 0.75, len(labels.columns)).round(2)
    result: dict[str, Any] = {
        "seed": seed,
        "seeds": frame["seed"].nunique(),
        "groups": fills,
        "labels": dict(zip(map(str, labels.columns), greys.tolist(), strict=True)),
        "many": len(totals) > MANY_CLIENTS,
        "clients": len(totals),
        "rows": f"{int(totals.sum()):,}",
    }
    if result["many"]:
        return result | _draw_skyline(groups.loc[totals.sort_values(ascending=False, kind="stable").index], fills)
    result["bars"] = [
        {
            "client": str(client),
            "rows": f"{int(totals.loc[client]):,}",
            "width": 100 * totals.loc[client] / totals.max(),
            "groups": _collect_shares(groups.loc[client], fills),
            "labels": _collect_shares(labels.loc[client], result["labels"]),
            "parts": ", ".join(f"{int(rows):,} {part}" for part, rows in parts.loc[client].items() if rows),
        }
        for client in totals.index
    ]
    return result


def _collect_shares(rows: pd.Series, looks: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": str(name), "rows": f"{int(count):,}", "width": 100 * count / rows.sum(), "look": looks[str(name)]}
        for name, count in rows.items()
        if count
    ]


def _draw_skyline(groups: pd.DataFrame, fills: dict[str, str]) -> dict[str, Any]:
    """One step per client, the largest first, in layers by group: outlines in a box of 1000 x 300."""
    tops = groups.cumsum(axis=1)
    highest, step = float(tops.iloc[:, -1].max()), 1000 / len(groups)
    floor, layers = np.zeros(len(groups)), []
    for group in groups.columns:
        top = tops[group].to_numpy(float)
        edge = lambda heights: [
            f"{x:.1f},{300 - 300 * h / highest:.1f}" for i, h in enumerate(heights) for x in (i * step, (i + 1) * step)
        ]
        layers.append({"name": str(group), "look": fills[str(group)], "path": " ".join(edge(top) + edge(floor)[::-1])})
        floor = top
    return {"layers": layers, "highest": f"{int(highest):,}", "lowest": f"{int(tops.iloc[-1, -1]):,}"}
