"""The figure of a search: every setting that was tried, by the metric that decides."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.report.figures import MUTED, STYLE
from nestfed.report.style import make_title


def draw_sweep(table: Any, keys: Sequence[str], metric: str, title: str) -> Figure:
    """The metric that decides against one setting (a line), two (a map), or all of them in order (bars); `table` is a
    DataFrame with a row per setting."""
    usable = table[np.isfinite(table[metric].to_numpy(float)) & (table["diverged"] == 0)]
    numeric = [key for key in keys if pd.api.types.is_numeric_dtype(table[key])]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.set_title(f"{title}: {make_title(metric)} of every setting")
        if len(keys) == 1 and numeric:
            line = usable.sort_values(keys[0])
            axes.plot(line[keys[0]], line[metric], "o-", color="#0072B2")
            _scale(axes.set_xscale, table[keys[0]])
            axes.set(xlabel=keys[0], ylabel=make_title(metric))
        elif len(keys) == 2:
            _draw_map(figure, axes, table, usable, keys, metric)
        else:
            names = [", ".join(f"{key} = {row[key]}" for key in keys) for row in usable.to_dict("records")]
            axes.barh(names[::-1], usable[metric].to_numpy(float)[::-1], color="#0072B2")
            axes.set_xlabel(make_title(metric))
        left_out = len(table) - len(usable)
        more = f" {left_out} settings diverged and are left out." if left_out else ""
        figure.supxlabel(f"Mean over seeds; smaller is better.{more}", x=0.01, ha="left", fontsize=8, color=MUTED)
    return figure


def _draw_map(figure: Figure, axes: Any, table: Any, usable: Any, keys: Sequence[str], metric: str) -> None:
    values = usable.pivot(index=keys[1], columns=keys[0], values=metric)
    values = values.reindex(index=sorted(table[keys[1]].unique()), columns=sorted(table[keys[0]].unique()))
    image = axes.imshow(values.to_numpy(float), origin="lower", aspect="auto", cmap="viridis_r")
    axes.grid(False)
    axes.set_xticks(range(values.shape[1]), [str(value) for value in values.columns])
    axes.set_yticks(range(values.shape[0]), [str(value) for value in values.index])
    axes.set(xlabel=keys[0], ylabel=keys[1])
    for i, j in np.ndindex(values.shape):
        number = values.iat[i, j]
        axes.text(
            j,
            i,
            f"{number:.4g}" if np.isfinite(number) else "diverged",
            ha="center",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 2},
        )
    figure.colorbar(image, ax=axes, label=make_title(metric))


def _scale(set_scale: Any, values: pd.Series) -> None:
    if (values > 0).all() and values.max() / values.min() >= 20:
        set_scale("log")
