"""How a run looks in a notebook: its metrics at the start and at the end, and their curves."""

import html
import io
from collections.abc import Mapping

import numpy as np
import pandas as pd

MOST_CURVES = 6


def show_history(title: str, history: Mapping[str, np.ndarray], remarks: tuple[str, ...]) -> str:
    """HTML of the metrics that are numbers; the first few of them are drawn."""
    numbers = {name: values for name, values in history.items() if values.ndim == 1 and name != "round"}
    rounds = history["round"]
    columns = {
        f"round {rounds[i]:,}": [float(values[i]) for values in numbers.values()] for i in sorted({0, len(rounds) - 1})
    }
    table = pd.DataFrame(columns, index=pd.Index(numbers, name="metric"))
    parts = [f"<b>{html.escape(title)}</b>", table.to_html(float_format="{:.4g}".format, border=0)]
    parts += [f"<p>{html.escape(remark)}</p>" for remark in remarks]
    if len(rounds) > 1:
        parts.append(_draw(rounds, dict(list(numbers.items())[:MOST_CURVES])))
    return "\n".join(parts)


def _draw(rounds: np.ndarray, curves: Mapping[str, np.ndarray]) -> str:
    """Small curves side by side, as SVG."""
    from matplotlib.figure import Figure  # slow to import, and few runs are looked at in a notebook

    figure = Figure(figsize=(2.6 * len(curves), 1.9), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        axes.plot(rounds, values)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]
