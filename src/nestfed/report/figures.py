"""The figures of a report. Each function returns a matplotlib Figure; no window system is touched."""

import contextlib
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from nestfed.core.settings import UserError
from nestfed.report import statistics
from nestfed.report.metrics import Metric
from nestfed.report.record import Record
from nestfed.report.style import GROUP_COLOURS, Look, choose_looks, make_file_name, make_title

INK, MUTED, FAINT, LINE = "#1D2329", "#5C6670", "#8C959F", "#E3E6E9"
AXES = {
    "round": "communication rounds",
    "bytes": "bytes sent and received, all clients",
    "oracle_calls": "oracle calls, all clients",
}
WAY_COLOURS = ("#0072B2", "#5C6670", "#D55E00", "#009E73")  # of ways to make a candidate
MANY = 24  # slices: more are drawn as a cloud of dots
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titley": 1.0,  # where it would be anyhow; looking for a better place takes a tenth of drawing
    "axes.edgecolor": "#AAB2BA",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "nestfed",
}


def draw_curves(
    history: pd.DataFrame,
    metric: str,
    against: str = "round",
    *,
    title: str | None = None,
    methods: Mapping[str, Look] | None = None,
) -> Figure:
    """Mean and band over seeds of every method against rounds, bytes or oracle calls; dashes where a stage begins."""
    if against not in AXES:
        raise UserError(f"curves against {against!r} were asked for; known are {', '.join(AXES)}.")
    if metric not in statistics.list_metrics(history):
        known = ", ".join(statistics.list_metrics(history)) or "none"
        raise UserError(f"the metric {metric!r} was not recorded over time; recorded are: {known}.")
    methods = methods or choose_looks({method: method for method in history["method"].unique()})
    with _set_style():
        figure, axes = _make_canvas(7.6, 4.3)
        several = False
        for method, look in methods.items():
            curve = statistics.average_curve(history, method, metric)
            if curve.empty:
                continue
            several |= max(curve["n"]) > 1
            _draw_curve(axes, curve, against, look)
        axes.set_xlabel(AXES[against])
        axes.set_title(_capitalise(title or make_title(metric)))
        axes.margins(x=0.01)
        if against == "round":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
        else:
            axes.xaxis.set_major_formatter(EngFormatter(unit="B" if against == "bytes" else "", sep="\N{THIN SPACE}"))
        figure.legend(loc="outside right upper", handlelength=1.6)
        text = "Mean over seeds; the band is one standard deviation." if several else "One seed."
        _write_caption(figure, text)
    return figure


def _draw_curve(axes: Any, curve: pd.DataFrame, against: str, look: Look) -> None:
    label: str | None = _escape(look.title)
    # A stage without the metric leaves a gap: no line is drawn over what was not measured.
    for _, piece in curve.groupby((curve["stage"].diff() > 1).cumsum()):
        x, mean, std = (piece[column].to_numpy(float) for column in (against, "mean", "std"))
        style = (0, look.dash) if look.dash else "-"
        axes.plot(
            x,
            mean,
            color=look.colour,
            linestyle=style,
            linewidth=1.9,
            label=label,
            zorder=3,
            marker="o" if len(x) == 1 else None,
        )
        label = None
        if max(piece["n"]) > 1:
            axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.16, linewidth=0)
    for begin, name in statistics.find_stage_changes(curve, against):
        axes.axvline(begin, color=look.colour, linewidth=1, linestyle=(0, (3, 3)), alpha=0.8)
        axes.annotate(
            _escape(str(name)),
            (begin, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=look.colour,
        )


def draw_slice_bars(record: Record, metric: str | None = None, *, kind: str = "group", split: str = "test") -> Figure:
    """One bar per method for every group (or client), with a standard deviation over seeds; many slices as dots."""
    table = statistics.average_slices(record)
    table = statistics.select_rows(table, kind=kind, split=split)
    metric = metric or (str(table["metric"].iloc[0]) if len(table) else "metric")
    table = statistics.select_rows(table, metric=metric)
    if table.empty:
        known = record.slices[["metric", "kind", "split"]].drop_duplicates().itertuples(index=False)
        raise UserError(
            f"there is no {metric!r} by {kind!r} on the {split!r} rows; there is: "
            + ("; ".join(" ".join(map(str, row)) for row in known) or "nothing")
        )
    means, stds = (
        table.pivot(index="slice", columns="method", values=value).reindex(table["slice"].unique())
        for value in ("mean", "std")
    )
    several, drawn = max(table["n"]) > 1, find_looks(record)
    drawn = {method: look for method, look in drawn.items() if method in means}
    with _set_style():
        if len(means) > MANY:
            figure = _draw_slice_dots(means, drawn)
            text = f"One dot per {kind}, its mean over seeds; the stroke is the mean of all."
        else:
            figure = _draw_slice_bars(means, stds if several else None, drawn)
            text = "Mean over seeds; the whisker is one standard deviation." if several else "One seed."
        figure.axes[0].set_title(_capitalise(f"{make_metric_title(record, metric)} by {kind}, {split} rows"))
        _write_caption(figure, text)
    return figure


def _draw_slice_bars(means: pd.DataFrame, stds: pd.DataFrame | None, drawn: dict[str, Look]) -> Figure:
    names = [_escape(textwrap.fill(str(name), 14, break_long_words=False)) for name in means.index]
    longest = max(len(line) for name in names for line in name.split("\n"))
    wanted = 2.6 + len(names) * max(0.24 * len(drawn), 0.1 * longest)
    figure, axes = _make_canvas(min(max(wanted, 6.4), 14), 4.0)
    width = 0.8 / len(drawn)
    places = np.arange(len(means))
    for i, (method, look) in enumerate(drawn.items()):
        error = None if stds is None else stds[method].to_numpy(float)
        axes.bar(
            places + (i - (len(drawn) - 1) / 2) * width,
            means[method].to_numpy(float),
            0.9 * width,
            yerr=error,
            color=look.colour,
            label=_escape(look.title),
            hatch="///" if look.dash else None,
            edgecolor="white",
            linewidth=0,
            error_kw={"ecolor": INK, "elinewidth": 1, "alpha": 0.75},
        )
    crowded = wanted > 14
    axes.set_xticks(places, names, rotation=25 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    figure.legend(loc="outside right upper", handlelength=1, handleheight=1)
    return figure


def _draw_slice_dots(means: pd.DataFrame, drawn: dict[str, Look]) -> Figure:
    figure, axes = _make_canvas(7.6, 1.4 + 0.55 * len(drawn))
    jitter = 0.5 * (np.arange(len(means)) * 0.618034 % 1 - 0.5)  # even in every stretch, and the same every time
    for i, (method, look) in enumerate(drawn.items()):
        values = means[method].to_numpy(float)
        axes.scatter(values, i + jitter, s=14, color=look.colour, alpha=0.5, linewidths=0)
        axes.plot([np.nanmean(values)] * 2, [i - 0.34, i + 0.34], color=look.colour, linewidth=2.4)
    axes.set_yticks(range(len(drawn)), [_escape(look.title) for look in drawn.values()])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    return figure


def draw_trade_off(record: Record, x: str | None = None, y: str | None = None) -> Figure:
    """Two metrics of the headline against each other (by default the second and the first), with error crosses."""
    metrics = {metric.name: metric for metric in record.metrics}
    names = list(metrics)
    if len(names) < 2 and (x is None or y is None):
        raise UserError(f"a trade-off needs two metrics, and the record has {len(names)}: {', '.join(names)}.")
    x, y = x or names[1], y or names[0]
    for name in (x, y):
        if name not in metrics:
            raise UserError(f"the metric {name!r} is not in the headline; there are: {', '.join(names)}.")
    table, drawn = statistics.make_headline(record), find_looks(record)
    with _set_style():
        figure, axes = _make_canvas(6.4, 4.6)
        for method, look in drawn.items():
            across, up = (statistics.find_entry(table, method, metrics[name]) for name in (x, y))
            if not (across.n and up.n):
                continue
            axes.errorbar(
                across.mean,
                up.mean,
                xerr=across.std,
                yerr=up.std,
                fmt=look.marker,
                color=look.colour,
                markersize=8,
                elinewidth=1.3,
                markeredgewidth=0,
            )
            axes.annotate(
                _escape(look.title),
                (across.mean, up.mean),
                xytext=(8, 6),
                textcoords="offset points",
                color=look.colour,
                fontweight="bold",
                fontsize=9,
            )
        axes.set_xlabel(_describe_direction(metrics[x]))
        axes.set_ylabel(_describe_direction(metrics[y]))
        axes.set_title(_capitalise(f"{metrics[y].title} against {metrics[x].title}"))
        axes.grid(visible=True, axis="both")
        axes.margins(0.18)
        right, up = (metrics[name].better == "higher" for name in (x, y))
        arrow = {(True, True): "↗", (True, False): "↘", (False, True): "↖", (False, False): "↙"}[right, up]
        axes.text(
            0.98 if right else 0.02,
            0.97 if up else 0.03,
            f"better {arrow}" if right else f"{arrow} better",
            transform=axes.transAxes,
            ha="right" if right else "left",
            va="top" if up else "bottom",
            color=MUTED,
            style="italic",
            fontsize=9,
        )
        _write_caption(figure, "Mean over seeds; the cross is one standard deviation.")
    return figure


def draw_chart(record: Record) -> Figure:
    """The lines of the task's chart, a panel for every slice; mean and band over seeds."""
    about = record.chart
    if about is None:
        raise UserError(f"the task {record.about['task']} draws no lines of its models.")
    table, drawn = statistics.average_lines(record), find_looks(record)
    names = list(table["slice"].unique())
    columns = min(len(names), 3)
    stroke = lambda look: (0, look.dash) if look.dash else "-"
    with _set_style():
        down = -(-len(names) // columns)
        figure = Figure(figsize=(max(5.2, 3.4 * columns), 1.0 + 2.75 * down), layout="constrained")
        panels = figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False)
        for axes, name in zip(panels.flat, names, strict=False):
            for method, look in drawn.items():
                line = statistics.select_rows(table, method=method, slice=name)
                x, mean, std = (line[column].to_numpy(float) for column in ("x", "mean", "std"))
                axes.plot(x, mean, color=look.colour, linestyle=stroke(look), linewidth=1.8)
                axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.14, linewidth=0)
            axes.set_title(_escape(textwrap.shorten(str(name), 34)), fontsize=10, pad=6)
            axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for axes in panels[-1]:
            axes.set_xlabel(_escape(about.x))
        for axes in panels[:, 0]:
            axes.set_ylabel(_escape(about.y))
        figure.legend(
            [Line2D([], [], color=look.colour, linestyle=stroke(look)) for look in drawn.values()],
            [_escape(look.title) for look in drawn.values()],
            loc="outside right upper",
        )
        figure.suptitle(_capitalise(about.title), x=0.01, ha="left", fontsize=12, fontweight="bold")
        several = len(record.about["seeds"]) > 1
        spread = "Mean over seeds; the band is one standard deviation. " if several else "One seed. "
        _write_caption(figure, _escape(spread + about.caption))
    return figure


def draw_candidates(record: Record) -> Figure:
    """Accuracy against gap of the models among which methods chose, on validation rows (they decide) and test rows."""
    table, limit = record.candidates, record.settings.get("limit")
    with _set_style():
        figure = Figure(figsize=(9.2, 4.2), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, part in zip(panels, ("validation", "test"), strict=True):
            across, up = f"{part}_gap", f"{part}_accuracy"
            for way, colour, marker in zip(table["way"].unique(), WAY_COLOURS, "osD^", strict=False):
                own: Any = table[table["way"] == way]
                means = own.groupby("number")[[across, up]].mean()
                axes.plot(means[across], means[up], marker=marker, color=colour, linewidth=1.2, markersize=6, label=way)
            chosen = table[table["chosen"]]
            star = {"color": INK, "markersize": 15, "markerfacecolor": "none"}
            axes.plot(chosen[across], chosen[up], "*", label="chosen, by seed", **star)
            if limit is not None:
                axes.axvline(limit, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="limit")
            axes.set_title(f"{part} rows")
            axes.set_xlabel("gap between groups (lower is better)")
            axes.grid(visible=True, axis="both")
        panels[0].set_ylabel("accuracy (higher is better)")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return figure


def draw_holdings(holdings: pd.DataFrame) -> Figure:
    """Who holds what: rows per client and group, and each client's share of positive labels if there are labels.

    Up to 30 clients as stacked bars, more as a map of the share of each group. Of several seeds the first is drawn.
    """
    if "seed" in holdings:
        holdings = holdings.query(f"seed == {holdings['seed'].iloc[0]}")
    clients, groups = list(dict.fromkeys(holdings["client"])), list(dict.fromkeys(holdings["group"]))
    table = holdings.pivot_table(index="client", columns="group", values="rows", aggfunc="sum", fill_value=0)
    rows = table.reindex(index=clients, columns=groups).to_numpy(float)
    rates = []  # of positive labels: one panel, or none
    if "label" in holdings:
        positives = holdings.assign(positive=holdings["rows"] * holdings["label"])
        table = positives.pivot_table(index="client", values="positive", aggfunc="sum")
        rates = [table.loc[clients, "positive"].to_numpy(float) / rows.sum(1)]
    draw = _draw_bars if len(clients) <= 30 else _draw_map
    return draw(rows, rates, clients, groups)


def _draw_bars(rows: np.ndarray, rates: list[np.ndarray], clients: Sequence[str], groups: Sequence[str]) -> Figure:
    """Left: stacked bars of rows by group. Right: the share of positive labels, with that of all rows as a line."""
    titles = [f"{_shorten(group)}  {number:,.0f}" for group, number in zip(groups, rows.sum(0), strict=True)]
    titles_per_line = int(105 // (max(map(len, titles)) + 5))  # as many letters as a line has
    height = 1.2 + 0.42 * len(clients) + 0.23 * -(-len(titles) // titles_per_line)
    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(1, 1 + len(rates), sharey=True, width_ratios=[4] + len(rates) * [1], squeeze=False)
    bars, *more = panels[0]
    place, left = np.arange(len(clients)), np.zeros(len(clients))
    colours = (
        GROUP_COLOURS if len(groups) <= len(GROUP_COLOURS) else colormaps["turbo"](np.linspace(0.05, 0.95, len(groups)))
    )
    for i in range(len(groups)):
        bars.barh(place, rows[:, i], left=left, height=0.68, color=colours[i], edgecolor="white", linewidth=0.3)
        left += rows[:, i]
    total = rows.sum(1)
    for y, number in zip(place, total, strict=True):
        bars.annotate(f"{number:,.0f}", (number, y), (4, 0), textcoords="offset points", va="center", color=FAINT)
    bars.set_xlim(0, total.max() * 1.12)
    bars.set_yticks(place, [_shorten(client) for client in clients])
    bars.invert_yaxis()
    bars.set_xlabel("rows")
    bars.xaxis.set_major_formatter("{x:,.0f}")
    for shares, rate in zip(more, rates, strict=True):
        overall = float((rate * total).sum() / total.sum())
        shares.axvline(100 * overall, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        shares.hlines(place, 0, 100 * rate, color="#d0d7de", linewidth=2)
        shares.plot(100 * rate, place, "o", color=INK, markersize=7)
        for y, value in zip(place, rate, strict=True):
            shares.annotate(f"{100 * value:.1f}", (100 * value, y), (8, 0), textcoords="offset points", va="center")
        shares.set_xlim(0, max(1.0, 145 * rate.max()))
        shares.set_xlabel("positive labels, %\n(dashed: all rows)")
    for axes in (bars, *more):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False, colors=INK)
        axes.grid(axis="x", color="#eaeef2")
        axes.set_axisbelow(True)
    handles = [Patch(color=colours[i]) for i in range(len(groups))]
    figure.legend(handles, titles, loc="outside upper left", ncols=titles_per_line, frameon=False, handlelength=1)
    return figure


def _draw_map(rows: np.ndarray, rates: list[np.ndarray], clients: Sequence[str], groups: Sequence[str]) -> Figure:
    """One column per client: its rows, its share of positive labels, and how its rows are divided among the groups."""
    figure = Figure(figsize=(10, 3.4 + 0.32 * len(groups)), layout="constrained")
    heights = [1.1, *(0.9 for _ in rates), 0.32 * len(groups) + 0.4]
    bars, *more, cells = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    place, total = np.arange(len(clients)), rows.sum(1)
    bars.bar(place, total, width=0.9, color=GROUP_COLOURS[0])
    bars.set_ylabel("rows")
    bars.yaxis.set_major_formatter("{x:,.0f}")
    for shares, rate in zip(more, rates, strict=True):
        overall = float((rate * total).sum() / total.sum())
        shares.axhline(100 * overall, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        shares.plot(place, 100 * rate, "o", color=INK, markersize=3)
        shares.set_ylabel("positive, %")
        shares.set_ylim(bottom=0)
    for axes in (bars, *more):
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(bottom=False, colors=INK)
        axes.grid(axis="y", color="#eaeef2")
        axes.set_axisbelow(True)
    # Relative to the group's share of all rows: otherwise a small group is pale everywhere and shows nothing.
    expected = np.outer(total, rows.sum(0)) / rows.sum()
    with np.errstate(divide="ignore"):
        ratio = np.log2(rows / expected)
    image = cells.imshow(ratio.T.clip(-3, 3), aspect="auto", cmap="PuOr", vmin=-3, vmax=3, interpolation="nearest")
    names = [f"{_shorten(group)}  {number:,.0f}" for group, number in zip(groups, rows.sum(0), strict=True)]
    cells.set_yticks(range(len(groups)), names)
    cells.set_xlabel(f"{len(clients)} clients")
    cells.set_xticks([])
    cells.spines[:].set_visible(False)
    cells.tick_params(left=False, colors=INK)
    bar = figure.colorbar(image, ax=cells, ticks=[-3, 0, 3], pad=0.01, aspect=10)
    bar.ax.set_yticklabels(["⅛ or less", "even share", "8 × or more"])
    bar.outline.set_visible(False)
    return figure


def _shorten(name: str) -> str:
    return _escape(name if len(name) <= 28 else name[:27] + "…")


def write_all(record: Record, folder: Path) -> list[Path]:
    """The figures that a paper or a talk would take, as PNG and SVG; the page can show all the others."""
    made: dict[str, Figure] = {}
    history, drawn = statistics.select_sound_history(record), find_looks(record)
    known = statistics.list_metrics(history)
    telling = [name for name in (m.name for m in record.metrics) if name in known]
    chosen = [name for name in (record.about.get("select"),) if name in known and name not in telling]
    for metric in (*telling, *chosen):
        for against in AXES if metric in telling[:2] else ("round",):
            name = make_file_name("curves", metric, against)
            made[name] = draw_curves(history, metric, against, title=make_metric_title(record, metric), methods=drawn)
    table = statistics.select_rows(statistics.average_slices(record), split="test")
    for metric in table["metric"].unique()[:3]:
        for kind in statistics.select_rows(table, metric=metric)["kind"].unique():
            made[make_file_name("bars", metric, kind)] = draw_slice_bars(record, metric, kind=kind)
    if len(record.metrics) > 1 and len(statistics.select_finished(record)):
        made["trade-off"] = draw_trade_off(record)
    if record.chart is not None:
        made[record.chart.name] = draw_chart(record)
    if len(record.candidates):
        made["candidates"] = draw_candidates(record)
    if len(record.holdings):
        made["holdings"] = draw_holdings(record.holdings)
    return [path for stem, figure in made.items() for path in write(figure, folder, stem)]


def write(figure: Figure, folder: Path, stem: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
    with _set_style():
        # Once for both files: laying out takes as long as drawing, and with an engine every file is drawn twice.
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
            figure.set_layout_engine(None)
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})  # the same record gives the same file
    return paths


def find_looks(record: Record) -> dict[str, Look]:
    return choose_looks(record.about["methods"], statistics.find_baseline(record))


def make_metric_title(record: Record, name: str) -> str:
    return next((metric.title for metric in record.metrics if metric.name == name), make_title(name))


@contextlib.contextmanager
def _set_style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Names of groups may have letters that the font lacks; a box in the figure is no reason to alarm anybody.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support .* natively")
        yield


def _make_canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _write_caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=MUTED)


def _describe_direction(metric: Metric) -> str:
    return _escape(f"{metric.title} ({metric.better} is better)")


def _capitalise(text: str) -> str:
    return _escape(text[:1].upper() + text[1:])


def _escape(text: str) -> str:
    """Text in which a dollar is a dollar, not the beginning of a formula."""
    return text.replace("$", r"\$")
