"""Figures that several experiments have: curves, their differences, metrics against a setting, verdicts. Bands and bars
are 95 % t-intervals of a mean over seeds."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nestfed.experiments.claims import HOLDS, REFUTED, UNDECIDED, Judged
from nestfed.report import statistics
from nestfed.report.figures import INK, MUTED, STYLE
from nestfed.report.style import BASELINE, COLOURS, Look, choose_looks

LEVELS = ("dotted", "dashed", "dashdot")  # how lines to compare with are drawn
LONGEST_LABEL = 6  # characters; values of a setting that need more get the axis's own labels
BAND = "Mean over seeds; the band is its 95 % interval."
VERDICTS = {HOLDS: COLOURS[2], REFUTED: COLOURS[1], UNDECIDED: BASELINE}
WIDEST = 4  # panels side by side


def draw_panels(
    parts: Sequence[tuple[str, pd.DataFrame]],
    metric: str,
    methods: Mapping[str, str],
    *,
    ylabel: str,
    logarithmic: bool = False,
) -> Figure:
    """One panel per history, on a common axis: means and intervals against communication rounds."""
    drawn = choose_looks(methods)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(parts) + 1.2, 3.9), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(parts), sharey=True))
        for axes, (title, history) in zip(grid, parts, strict=True):
            for method, look in drawn.items():
                _draw_curve(axes, history, method, metric, look)
            axes.set(title=title, xlabel="communication rounds")
            axes.set_yscale("log" if logarithmic else "linear")
            axes.margins(x=0.01)
        grid[0].set_ylabel(ylabel)
        grid[-1].legend()
        _write_note(figure, BAND)
    return figure


def draw_differences(
    parts: Sequence[tuple[str, pd.DataFrame]], metric: str, methods: Mapping[str, str], reference: str, *, ylabel: str
) -> Figure:
    """One panel per history and method, where curves would coincide: the paired difference to the reference over
    rounds, on a common axis."""
    others = {method: title for method, title in methods.items() if method != reference}
    drawn = choose_looks(others)
    with matplotlib.rc_context(STYLE):
        shape = (len(parts), len(others))
        figure = Figure(figsize=(2.5 * shape[1] + 1.2, 2.4 * shape[0] + 0.7), layout="constrained")
        grid = np.reshape(figure.subplots(*shape, sharex="row", sharey="row"), shape)
        for (title, history), row in zip(parts, grid, strict=True):
            values = history.pivot(index="round", columns=["method", "seed"], values=metric)
            for axes, (method, look) in zip(row, drawn.items(), strict=True):
                found = (values[method] - values[reference]).dropna(axis="columns", how="all")
                when, n = found.index.to_numpy(float), found.notna().sum(axis=1)
                mean, reach = found.mean(axis=1), statistics.compute_half_width(found.std(axis=1, ddof=0), n)
                axes.axhline(0, color=INK, linewidth=1, linestyle=(0, (1, 2.5)))
                axes.plot(when, mean, color=look.colour, linewidth=2)
                axes.fill_between(when, mean - reach, mean + reach, color=look.colour, alpha=0.2, linewidth=0)
                axes.set_title(f"{title}\n{look.title}" if axes is row[0] else f"\n{look.title}", fontsize=10)
                axes.margins(x=0.01)
            row[0].set_ylabel(ylabel)
        for axes in grid[-1]:
            axes.set_xlabel("communication rounds")
        _write_note(figure, f"Paired differences to {methods[reference]}: mean over seeds and its 95 % interval.")
    return figure


def draw_single_seeds(
    parts: Sequence[tuple[str, pd.DataFrame]],
    metric: str,
    methods: Mapping[str, str],
    *,
    ylabel: str,
    published: Mapping[str, Mapping[str, float]],
) -> Figure:
    """A row per history, a panel per method: every seed by itself, where some collapse and a band would hide it. The
    paper's value, part -> method -> value, is a broken line."""
    drawn = choose_looks(methods)
    with matplotlib.rc_context(STYLE):
        shape = (len(parts), len(methods))
        figure = Figure(figsize=(2.2 * shape[1] + 1.2, 2.5 * shape[0] + 0.6), layout="constrained")
        grid = np.reshape(figure.subplots(*shape, sharex="row", sharey="row"), shape)
        for (title, history), row in zip(parts, grid, strict=True):
            values = history.pivot(index="round", columns=["method", "seed"], values=metric)
            for axes, (method, look) in zip(row, drawn.items(), strict=True):
                own = values[method]
                axes.plot(own.index, own, color=look.colour, linewidth=1, alpha=0.6)
                axes.plot(own.index, own.median(axis=1), color=look.colour, linewidth=2.4)
                value = published.get(title, {}).get(method)
                if value is not None:
                    axes.axhline(value, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
                axes.set_title(look.title, fontsize=10)
                axes.margins(x=0.01)
            row[0].set_ylabel(f"{title}\n{ylabel}")
        for axes in grid[-1]:
            axes.set_xlabel("rounds")
        _write_note(figure, "Thin: every seed. Thick: their median. Broken: the paper's value.")
    return figure


def draw_metric_panels(
    history: pd.DataFrame,
    metrics: Mapping[str, str],
    methods: Mapping[str, str],
    xlabel: str,
    *,
    against: str = "round",
) -> Figure:
    """One panel per metric (its column and title): means and intervals of every method."""
    drawn = choose_looks(methods)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(metrics) + 1.4, 3.9), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(metrics)))
        for axes, (metric, title) in zip(grid, metrics.items(), strict=True):
            for method, look in drawn.items():
                _draw_curve(axes, history, method, metric, look, against=against)
            axes.set_ylabel(title)
            axes.margins(x=0.01)
        figure.supxlabel(xlabel, fontsize=10, color=MUTED)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def draw_lines_over(
    table: Any,
    across: str,
    metrics: Mapping[str, str],
    *,
    levels: Mapping[str, Mapping[str, float]] | None = None,
    logarithmic: bool = False,
) -> Figure:
    """One panel per metric (its column, and the name of its axis) against a setting such as the number of local steps,
    on a logarithmic scale.

    `table` is a DataFrame with the columns method, `across`, seeds, and for every metric its mean and "METRIC, std" (of
    the sample). Methods with one row are left out. `levels`, title -> metric -> value, are lines to compare with, three
    at most.
    """
    counts = table.groupby("method", sort=False).size()
    several = [str(method) for method in counts.index[counts > 1]]
    drawn = choose_looks({method: method for method in several})
    with matplotlib.rc_context(STYLE):
        columns = min(len(metrics), WIDEST)
        rows = math.ceil(len(metrics) / columns)
        figure = Figure(figsize=(4.2 * columns + 2.2, 3.4 * rows + 0.3), layout="constrained")
        grid = np.ravel(figure.subplots(rows, columns))
        for axes in grid[len(metrics) :]:
            axes.set_visible(False)
        for axes, (metric, title) in zip(grid, metrics.items(), strict=False):
            for method, look in drawn.items():
                own = table[table.method == method].sort_values(across)
                n = own["seeds"].to_numpy(float)
                reach = statistics.compute_half_width(own[f"{metric}, std"].to_numpy(float) * np.sqrt((n - 1) / n), n)
                axes.errorbar(
                    own[across],
                    own[metric],
                    yerr=reach,
                    color=look.colour,
                    marker=look.marker,
                    linewidth=2,
                    elinewidth=1.2,
                    label=look.title,
                )
            for (name, values), dash in zip((levels or {}).items(), LEVELS, strict=False):
                axes.axhline(values[metric], color=MUTED, linestyle=dash, linewidth=1.4, label=name)
            axes.set_xscale("log")
            labels = {value: f"{value:g}" for value in sorted(table[across].unique())}
            if max(map(len, labels.values())) <= LONGEST_LABEL:
                axes.set_xticks(list(labels), list(labels.values()))
            axes.minorticks_off()
            axes.set_yscale("log" if logarithmic else "linear")
            axes.set_ylabel(title)
        figure.supxlabel(f"{across}; mean over seeds, the bar is its 95 % interval", fontsize=10, color=MUTED)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def draw_verdicts(judged: Sequence[Judged]) -> Figure:
    """A panel per claim, a line per case: the paired difference with its interval, coloured by the verdict; shaded
    where the claim says that it lies, and the paper's figure as a ring."""
    told = [one for one in judged if one.cases]
    heights = [len(one.cases) + 1.4 for one in told]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(9.6, 0.24 * sum(heights) + 0.5 * len(told) + 0.6), layout="constrained")
        grid = np.ravel(figure.subplots(len(told), 1, height_ratios=heights))
        for axes, one in zip(grid, told, strict=True):
            _draw_claim(axes, one)
        handles = [Line2D([], [], color=colour, marker="o", label=verdict) for verdict, colour in VERDICTS.items()]
        if any(case.published is not None for one in told for case in one.claim.cases.values()):
            handles.append(
                Line2D(
                    [], [], label="the paper's figure", color=INK, marker="o", markerfacecolor="none", linestyle="none"
                )
            )
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _draw_claim(axes: Any, one: Judged) -> None:
    says = one.claim.says
    for place, (name, judgement) in enumerate(one.cases.items()):
        case = one.claim.cases[name]
        mean, low, high = case.found[:3]
        colour = VERDICTS[judgement.verdict]
        if math.isfinite(mean):
            axes.plot(mean, -place, "o", color=colour, markersize=5, zorder=3)
        if math.isfinite(low):
            axes.plot([low, high], [-place, -place], color=colour, linewidth=1.8, zorder=2)
        if case.published is not None:
            axes.plot(case.published, -place, "o", color=INK, markerfacecolor="none", markersize=7, zorder=4)
    for bound in says.bounds:
        axes.axvline(bound, color=INK, linewidth=1, linestyle=(0, (1, 2.5)), zorder=1)
    left, right = axes.get_xlim()
    axes.axvspan(max(left, says.low), min(right, says.high), color=COLOURS[2], alpha=0.07, linewidth=0, zorder=0)
    axes.set_xlim(left, right)
    axes.set_ylim(0.7 - len(one.cases), 0.7)
    axes.set_yticks([-place for place in range(len(one.cases))], list(one.cases), fontsize=8)
    mine = "(ours) " if one.claim.ours else ""
    text = textwrap.shorten(f"{one.claim.number}. {mine}{one.claim.text}", 110, placeholder=" …")
    axes.set_title(text, fontsize=9, loc="left", fontweight="bold")


def _write_note(figure: Figure, text: str) -> None:
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=MUTED)


def _draw_curve(
    axes: Any, history: pd.DataFrame, method: str, metric: str, look: Look, *, against: str = "round"
) -> None:
    curve = statistics.average_curve(history, method, metric)
    x, mean, std, n = (curve[column].to_numpy(float) for column in (against, "mean", "std", "n"))
    reach = statistics.compute_half_width(std, n)
    axes.plot(x, mean, color=look.colour, linewidth=2, label=look.title, dashes=look.dash)
    axes.fill_between(x, mean - reach, mean + reach, color=look.colour, alpha=0.16, linewidth=0)
