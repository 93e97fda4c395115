"""The counterexample: from the cells to the page."""

import functools
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from nestfed.experiments.claims import Claim, above, below, exactly, within
from nestfed.experiments.counterexample.limits import SHIFTS, SLOPES
from nestfed.experiments.counterexample.plan import QUICK, REACHED, Plan, Trainings
from nestfed.experiments.frame import Experiment, Page
from nestfed.report.figures import INK, MUTED, STYLE
from nestfed.report.style import BASELINE, COLOURS


def make_page(trainings: Trainings) -> Page:
    found = {name: trainings.table(name) for name in trainings.names()}
    judging = ("fedavg-co", "small-steps", "feddro", "ds-feddro", "schedules")
    shown = {name: format_digits(table) for name, table in found.items() if name not in ("figure7", "paths")}
    return Page(
        tables=found,
        figures={
            "figure7": functools.partial(draw_figure_seven, found["figure7"]),
            "counterexample": functools.partial(draw_landscape, found["paths"]),
        },
        claims=check_claims(*(found[name] for name in judging)),
        words={"resolution": REACHED},
        shown=shown,
        typeset=tuple(shown),
    )


def format_digits(table: pd.DataFrame) -> pd.DataFrame:
    """Places with seven decimals, as people read them; what came out below the resolution is zero."""
    place = lambda value: "–" if np.isnan(value) else f"{value if abs(value) >= 5e-8 else 0.0:.7f}"
    settings = ("step size", "beta", "6 beta (I - 1)", "eta = beta")
    columns = {
        str(name): [f"{value:g}" if name in settings else place(value) for value in column]
        for name, column in table.select_dtypes("float").items()
    }
    return table.assign(**columns)


# ------------------------------------------------------------------------------------------------- claims


def check_claims(averaging: Any, small_steps: Any, feddro: Any, ds: Any, schedules: Any) -> list[Claim]:
    """The paper's claims; nothing is random, so a case is a number and no interval."""
    several = small_steps[small_steps["local steps"] > 1]
    each = {f"{row['method']}, step size {row['step size']:g}": row for _, row in averaging.iterrows()}
    vanishing = {f"{row['method']}, vanishing steps, I = {row['local steps']}": row for _, row in several.iterrows()}
    settles = {case: exactly(row["limit"] - 1) for case, row in (each | vanishing).items()}
    ordered = lambda order: {
        f"β = {row['beta']:g}": exactly(row["limit"]) for _, row in feddro[feddro.order == order].iterrows()
    }
    place = lambda row: f"η = {row['step size']:g}, β = {row['beta']:g}, I = {int(row['local steps'])}"
    ends = lambda column, own: {
        place(row): exactly(row[column] if np.isfinite(row[column]) else np.inf, remark=_describe_swings(row[column]))
        for _, row in own.iterrows()
    }
    arrives = within(REACHED)
    trend = {}
    for steps, own in schedules.groupby("local steps"):
        limits = own.drop_duplicates("T")["limit"].to_numpy(float)
        trend[f"I = {steps}"] = exactly(float(np.log(limits[-1] / limits[0])))
    return [
        Claim(
            "1a",
            "FedAvg-CO fails in both cases: x never comes below its start.",
            "the lowest x minus the start, 0.5",
            above(-REACHED),
            {case: exactly(row["lowest"] - 0.5) for case, row in each.items()},
        ),
        Claim("1b", "It settles farther away than it began, above 1.", "the limit of x minus 1", above(0), settles),
        Claim(
            "2",
            "FedDRO, as printed, reaches the stationary point 0.",
            f"the limit of x; step size {0.04:g}, two local steps",
            arrives,
            ordered("printed"),
        ),
        Claim(
            "2b",
            "So does FedDRO with y formed after the average of x.",
            f"the limit of x; step size {0.04:g}, two local steps",
            arrives,
            ordered("consistent"),
            ours=True,
        ),
        Claim(
            "3",
            "DS-FedDRO, as analysed, reaches the stationary point 0.",
            "the limit of x with the local y and several local steps",
            arrives,
            ends("limit, local y", ds[ds["local steps"] > 1]),
            reading="Read here for step sizes that do not fall; the theorem's fall with the length of the run (3c).",
        ),
        Claim(
            "3b",
            "With the y that the server sent it does.",
            "the limit of x with the broadcast y",
            arrives,
            ends("limit, broadcast y", ds),
            ours=True,
        ),
        Claim(
            "3c",
            "With the theorem's step sizes the place where DS-FedDRO would settle comes nearer to 0 as T grows.",
            f"logarithm of the limit, at T = {schedules['T'].max():,} minus at T = {schedules['T'].min():,}",
            below(0),
            trend,
            ours=True,
        ),
    ]


def _describe_swings(limit: float) -> str:
    return "" if np.isfinite(limit) else "it goes on swinging"


# ------------------------------------------------------------------------------------------------- figures

BLUE, ORANGE, GREEN, YELLOW, SKY, PINK = COLOURS
SPAN = (-0.78, 2.32)  # of x
# Colour and dash of a path; where its label stands (x and round), on which side, its title, what it says of the end.
LOOKS: dict[str, tuple[str, Any, tuple[float, float], str, str, str]] = {
    "FedAvg-CO, case I": (
        ORANGE,
        "-",
        (1.23, 30),
        "left",
        "FedAvg-CO, case I",
        "every client composes with\nits own inner value:\nsettles at {:.3f}",
    ),
    "FedAvg-CO, case II": (
        YELLOW,
        "-",
        (1.085, 50),
        "right",
        "FedAvg-CO, case II",
        "the mean inner value,\nbut once a round only:\nsettles at {:.3f}",
    ),
    "FedDRO": (BLUE, "-", (-0.04, 90), "right", "FedDRO", "one estimate of the mean for\nall, renewed in every step"),
    "DS-FedDRO, broadcast y": (
        GREEN,
        (0, (4, 3)),
        (-0.04, 370),
        "right",
        "DS-FedDRO, broadcast y",
        "the estimate that the\nserver sent",
    ),
    "FedDRO as printed, β = 0": (PINK, "-", (0.425, 420), "right", "FedDRO as\nprinted, β = 0", "stops at {:.3f}"),
    "DS-FedDRO, local y": (
        SKY,
        "-",
        (0.505, 370),
        "left",
        "DS-FedDRO, local y",
        "estimates part within\na round: stops at {:.3f}",
    ),
}


def compute_outer(y: Any) -> Any:
    return np.sqrt(y**2 + 4)


def draw_landscape(paths: pd.DataFrame) -> Figure:
    """Above: the objective, and what the clients see of it. Below, on the same axis and with time downwards: where the
    methods go. The marbles above are the ends of the paths below."""
    by_method = {str(title): path for title, path in paths.groupby("method", sort=False)}
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(10, 9.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
        _draw_landscape(above, {title: float(path["x"].iloc[-1]) for title, path in by_method.items()})
        _draw_paths(below, by_method)
        for axes in (above, below):
            axes.axvline(0, color=INK, linewidth=1, linestyle=(0, (1, 2.5)), zorder=0)
            axes.set_xlim(*SPAN)
        figure.suptitle(
            "Averaging models climbs away from the solution;\naveraging what is inside the composition finds it",
            x=0.012,
            ha="left",
            fontsize=15,
            fontweight="bold",
            color=INK,
        )
        figure.supxlabel(
            "Two clients with inner functions 4x − 4 and −2x + 4, whose mean is x, inside f(y) = √(y² + 4). Nothing is "
            "random.\nStep size 0.04, two local steps per round; β is the rate at which an estimate of the inner value "
            "is renewed (0.1 if not said).",
            x=0.012,
            ha="left",
            fontsize=8.5,
            color=MUTED,
            linespacing=1.4,
        )
    return figure


def _draw_landscape(axes: Any, ends: Mapping[str, float]) -> None:
    x = np.linspace(*SPAN, 400)
    first, second = (compute_outer(a * x + b) for a, b in zip(SLOPES, SHIFTS, strict=True))
    axes.plot(x, first, x, second, color="#B9C0C7", linewidth=1.5)
    axes.plot(x, (first + second) / 2, color=BASELINE, linewidth=2.2, linestyle=(0, (5, 2.5)))
    axes.plot(x, compute_outer(x), color=INK, linewidth=3.2, zorder=3)
    say = lambda text, at, colour, **more: axes.text(
        *at, text, color=colour, **{"fontsize": 9.5, "linespacing": 1.3, "va": "center"} | more
    )
    say("client 1's own:\nleast at 1", (1.77, 3.52), BASELINE)
    say("client 2's own:\nleast at 2", (2.0, 1.96), BASELINE, ha="center", va="top")
    axes.annotate(
        "mean of the two, which\nFedAvg descends: least at 1.17",
        (1.1687, 2.38),
        (1.1687, 3.3),
        color=MUTED,
        fontsize=9.5,
        linespacing=1.3,
        ha="center",
        va="center",
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.9, "shrinkB": 4},
    )
    say("the objective, f of the mean:\nleast at 0", (SPAN[0] + 0.02, 1.88), INK, fontweight="bold")
    say("start", (0.5, compute_outer(0.5) + 0.19), INK, ha="center", va="bottom", fontstyle="italic")
    axes.plot(0.5, compute_outer(0.5) + 0.13, "v", markersize=7, color=INK, zorder=4)
    for name, (colour, *_) in LOOKS.items():
        axes.plot(ends[name], compute_outer(ends[name]), "o", color=colour, **_describe_marble(name))
    axes.set(ylim=(1.75, 3.75), yticks=[2, 2.5, 3, 3.5], ylabel="value")


def _describe_marble(name: str) -> dict[str, Any]:
    """Two methods end at 0: the one is seen around the other."""
    return {"markersize": 14 if name == "FedDRO" else 9.5, "markeredgecolor": "white", "zorder": 6}


def _draw_paths(axes: Any, paths: Mapping[str, pd.DataFrame]) -> None:
    axes.set_yscale("function", functions=(np.log1p, np.expm1))
    for name, (colour, dash, at, side, title, words) in LOOKS.items():
        path = paths[name]
        end = float(path["x"].iloc[-1])
        axes.plot(path["x"], path["round"], color=colour, linestyle=dash, linewidth=2.8, solid_capstyle="butt")
        axes.plot(end, path["round"].iloc[-1], "o", color=colour, clip_on=False, **_describe_marble(name))
        darker = tuple(0.78 * part for part in to_rgb(colour))
        place = {"ha": side, "fontsize": 10, "linespacing": 1.35}
        axes.text(*at, title, color=darker, fontweight="bold", va="bottom", **place)
        axes.text(*at, words.format(end), color=MUTED, va="top", **place)
    axes.set(ylim=(1000, 0), yticks=[0, 1, 3, 10, 30, 100, 300, 1000], ylabel="communication rounds", xlabel="x")
    axes.tick_params(axis="x", labelcolor=INK)


def draw_figure_seven(paths: pd.DataFrame) -> Figure:
    """Figure 7: case II over rounds, for several step sizes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 4.4), layout="constrained")
        axes: Any = figure.subplots()
        axes.set_xscale("log")
        for i, lr in enumerate(paths["step size"].unique()):
            when, x = paths.loc[(paths["step size"] == lr) & (paths["round"] > 0), ["round", "x"]].to_numpy().T
            axes.plot(when, x, color=matplotlib.colormaps["cividis"](0.1 + 0.22 * i), linewidth=2.2)
            half = int(np.argmax(x >= 0.85))
            axes.text(
                when[half],
                x[half],
                f"η = {lr:g}" if i == 0 else f"{lr:g}",
                ha="center",
                va="center",
                fontsize=9.5,
                color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
        for level, words in ((0.5, "start"), (0.0, "solution")):
            axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (1, 2.5)))
            axes.text(
                paths["round"].max(), level + 0.02, words, ha="right", va="bottom", fontsize=9.5, fontstyle="italic"
            )
        axes.set(
            ylim=(-0.05, 1.22), xlim=(1, paths["round"].max()), xlabel="communication rounds", ylabel="x on the server"
        )
        axes.set_title("FedAvg-CO, case II: never below its start, and settled above 1")
        figure.supxlabel(
            "Two local steps per round, no noise. The proof asks for a step size η below 1/22.",
            x=0.01,
            ha="left",
            fontsize=8,
            color=MUTED,
        )
    return figure


EXPERIMENT = Experiment("counterexample", "FedDRO", Trainings, Plan(), QUICK, make_page)
