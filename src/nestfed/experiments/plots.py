"""Figures that several experiments have: panels of curves, and metrics against a setting."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.report import statistics
from nestfed.report.figures import MUTED, STYLE
from nestfed.report.style import Look, looks

LEVELS = ("dotted", "dashed", "dashdot")  # how lines to compare with are drawn
LONGEST_LABEL = 6  # characters; values of a setting that need more get the axis's own labels


def panels(
    parts: Sequence[tuple[str, pd.DataFrame]], metric: str, methods: Mapping[str, str], *, ylabel: str
) -> Figure:
    """One panel per history, on a common axis: mean and band over seeds against communication rounds."""
    drawn = looks(methods)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(parts) + 1.2, 3.9), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(parts), sharey=True))
        for axes, (title, history) in zip(grid, parts, strict=True):
            _draw_curves(axes, history, metric, drawn)
            axes.set(title=title, xlabel="communication rounds")
        grid[0].set_ylabel(ylabel)
        grid[-1].legend()
        figure.supxlabel(
            "Mean over seeds; the band is one standard deviation.", x=0.01, ha="left", fontsize=8, color=MUTED
        )
    return figure


def metric_panels(history: pd.DataFrame, metrics: Mapping[str, str], methods: Mapping[str, str], xlabel: str) -> Figure:
    """One panel per metric (its column and title): mean and band over seeds of every method."""
    drawn = looks(methods)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(metrics) + 1.4, 3.9), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(metrics)))
        for axes, (metric, title) in zip(grid, metrics.items(), strict=True):
            _draw_curves(axes, history, metric, drawn)
            axes.set_title(title[:1].upper() + title[1:])
        figure.supxlabel(xlabel, fontsize=10, color=MUTED)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def lines_over(
    table: Any, across: str, metrics: Sequence[str], levels: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """One panel per metric against a setting such as the number of local steps, on a logarithmic scale.

    `table` is a DataFrame with the columns method, `across`, and for every metric its mean and "METRIC, std". Methods
    with one row are left out. `levels`, title -> metric -> value, are lines to compare with, three at most.
    """
    counts = table.groupby("method", sort=False).size()
    several = [str(method) for method in counts.index[counts > 1]]
    drawn = looks({method: method for method in several})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(metrics) + 1.4, 3.6), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(metrics)))
        for axes, metric in zip(grid, metrics, strict=True):
            for method, look in drawn.items():
                own = table[table.method == method].sort_values(across)
                axes.errorbar(
                    own[across],
                    own[metric],
                    yerr=own[f"{metric}, std"],
                    color=look.colour,
                    marker=look.marker,
                    linewidth=2,
                    elinewidth=1.2,
                    label=look.title,
                )
            for (title, values), dash in zip((levels or {}).items(), LEVELS, strict=False):
                axes.axhline(values[metric], color=MUTED, linestyle=dash, linewidth=1.4, label=title)
            axes.set_xscale("log")
            labels = {value: f"{value:g}" for value in sorted(table[across].unique())}
            if max(map(len, labels.values())) <= LONGEST_LABEL:
                axes.set_xticks(list(labels), list(labels.values()))
            axes.minorticks_off()
            axes.set_title(metric[:1].upper() + metric[1:])
        figure.supxlabel(f"{across}; mean over seeds, the bar is one standard deviation", fontsize=10, color=MUTED)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _draw_curves(axes: Any, history: pd.DataFrame, metric: str, drawn: Mapping[str, Look]) -> None:
    """Mean and band over seeds of every method."""
    for method, look in drawn.items():
        curve = statistics.curve(history, method, metric)
        x, mean, std = (curve[column].to_numpy(float) for column in ("round", "mean", "std"))
        axes.plot(x, mean, color=look.colour, linewidth=2, label=look.title)
        axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.16, linewidth=0)
    axes.margins(x=0.01)
