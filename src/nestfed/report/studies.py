"""Figures of studies that span several runs: panels side by side, ours against published numbers, grids of settings."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.report import statistics
from nestfed.report.figures import MUTED, STYLE
from nestfed.report.style import looks, title_of

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
            for method, look in drawn.items():
                curve = statistics.curve(history, method, metric)
                x, mean, std = (curve[column].to_numpy(float) for column in ("round", "mean", "std"))
                axes.plot(x, mean, color=look.colour, linewidth=2, label=look.title)
                axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.16, linewidth=0)
            axes.set(title=title, xlabel="communication rounds")
            axes.margins(x=0.01)
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
            for method, look in drawn.items():
                curve = statistics.curve(history, method, metric)
                x, mean, std = (curve[column].to_numpy(float) for column in ("round", "mean", "std"))
                axes.plot(x, mean, color=look.colour, linewidth=2, label=look.title)
                axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.16, linewidth=0)
            axes.set_title(title[:1].upper() + title[1:])
            axes.margins(x=0.01)
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
                    own[across], own[metric], yerr=own[f"{metric}, std"], color=look.colour, marker=look.marker,
                    linewidth=2, elinewidth=1.2, label=look.title,
                )  # fmt: skip
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


def against_published(table: Any) -> Figure:
    """A row per setting, a column per metric, a line per method: ours with its spread, the published value as a ring.

    `table` is a DataFrame with the columns data, dealing, method, metric, ours, ours std, paper, paper std.
    """
    settings = list(table[["data", "dealing"]].drop_duplicates().itertuples(index=False, name=None))
    metrics, methods = list(table["metric"].unique()), list(table["method"].unique())
    drawn = looks({method: method for method in methods}, methods[0])
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(
            figsize=(4.0 * len(metrics) + 1, 0.32 * len(methods) * len(settings) + 2.4), layout="constrained"
        )
        grid = np.reshape(figure.subplots(len(settings), len(metrics), sharex="col"), (len(settings), len(metrics)))
        for row, (data, dealing) in enumerate(settings):
            for column, metric in enumerate(metrics):
                axes, chosen = grid[row, column], table[(table.data == data) & (table.dealing == dealing)]
                chosen = chosen[chosen.metric == metric].set_index("method").loc[methods]
                for place, (method, line) in enumerate(chosen.iterrows()):
                    look = drawn[str(method)]
                    axes.errorbar(
                        line["ours"], -place, xerr=line["ours std"], fmt="o", color=look.colour, markersize=6,
                        elinewidth=1.6, capsize=0, zorder=3,
                    )  # fmt: skip
                    axes.errorbar(
                        line["paper"], -place, xerr=line["paper std"], fmt="o", markerfacecolor="none",
                        color=MUTED, markersize=6, elinewidth=1, capsize=0, zorder=2,
                    )  # fmt: skip
                axes.set_yticks(
                    [-place for place in range(len(methods))], methods if column == 0 else [""] * len(methods)
                )
                axes.set_title(f"{data}, {dealing}: {metric}" if column == 0 else metric, fontsize=10)
        figure.supxlabel(
            "Filled: ours, mean and standard deviation over seeds. Rings: the paper's.", x=0.01, ha="left", fontsize=8,
            color=MUTED,
        )  # fmt: skip
    return figure


def sweep_figure(table: Any, keys: Sequence[str], metric: str, title: str) -> Figure:
    """The metric that decides against one setting (a line), two (a map), or all of them in order (bars); `table` is a
    DataFrame with a row per setting."""
    usable = table[np.isfinite(table[metric].to_numpy(float)) & (table["diverged"] == 0)]
    numeric = [key for key in keys if pd.api.types.is_numeric_dtype(table[key])]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.set_title(f"{title}: {title_of(metric)} of every setting")
        if len(keys) == 1 and numeric:
            line = usable.sort_values(keys[0])
            axes.plot(line[keys[0]], line[metric], "o-", color="#0072B2")
            _scale(axes.set_xscale, table[keys[0]])
            axes.set(xlabel=keys[0], ylabel=title_of(metric))
        elif len(keys) == 2:
            _map(figure, axes, table, usable, keys, metric)
        else:
            names = [", ".join(f"{key} = {row[key]}" for key in keys) for row in usable.to_dict("records")]
            axes.barh(names[::-1], usable[metric].to_numpy(float)[::-1], color="#0072B2")
            axes.set_xlabel(title_of(metric))
        left_out = len(table) - len(usable)
        more = f" {left_out} settings diverged and are left out." if left_out else ""
        figure.supxlabel(f"Mean over seeds; smaller is better.{more}", x=0.01, ha="left", fontsize=8, color=MUTED)
    return figure


def _map(figure: Figure, axes: Any, table: Any, usable: Any, keys: Sequence[str], metric: str) -> None:
    values = usable.pivot(index=keys[1], columns=keys[0], values=metric)
    values = values.reindex(index=sorted(table[keys[1]].unique()), columns=sorted(table[keys[0]].unique()))
    image = axes.imshow(values.to_numpy(float), origin="lower", aspect="auto", cmap="viridis_r")
    axes.grid(False)
    axes.set_xticks(range(values.shape[1]), [str(value) for value in values.columns])
    axes.set_yticks(range(values.shape[0]), [str(value) for value in values.index])
    axes.set(xlabel=keys[0], ylabel=keys[1])
    for i, j in np.ndindex(values.shape):
        number = values.iat[i, j]
        axes.text(j, i, f"{number:.4g}" if np.isfinite(number) else "diverged", ha="center", va="center", fontsize=9,
                  bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 2})  # fmt: skip
    figure.colorbar(image, ax=axes, label=title_of(metric))


def _scale(set_scale: Any, values: pd.Series) -> None:
    if (values > 0).all() and values.max() / values.min() >= 20:
        set_scale("log")
