"""The counterexample: a composition on which averaging models goes the wrong way. Theorem D.1 and Figure 7 of
"Federated compositional optimization: the impact of two-sided learning rates on communication efficiency".

Two clients with inner functions 4x - 4 and -2x + 4, whose mean is x, inside sqrt(y^2 + 4): the solution is 0. Nothing
is random. Beside every limit that a run reached stands the one it must reach: the root of an equation, found by SciPy
from the method's update and without this library.
"""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jinja2
import matplotlib
import numpy as np
import pandas as pd
import tomli_w
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from scipy.optimize import brentq, root

from nestfed.algorithms import make
from nestfed.problems.toys import counterexample
from nestfed.report import figures, tables
from nestfed.report.figures import INK, MUTED, STYLE
from nestfed.report.style import BASELINE, COLOURS
from nestfed.verbs.sweeps import Sweep, sweep
from nestfed.workbench.results import versions

SLOPES, SHIFTS = np.array([4.0, -2.0]), np.array([-4.0, 4.0])
TITLES = {"fedavg-co-1": "FedAvg-CO, case I", "fedavg-co-2": "FedAvg-CO, case II"}
NEAR = {"fedavg-co-1": 0.1249, "fedavg-co-2": 0.0454}  # step sizes just below the bounds of the proof, 1/8 and 1/22
REACHED = 1e-5  # a limit this close to another number is that number


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    rates: tuple[float, ...] = (0.04, 0.02, 0.01, 0.001)
    local_steps: tuple[int, ...] = (1, 2, 4, 8)
    betas: tuple[float, ...] = (0.0, 0.01, 0.1, 0.5, 1.0)
    ds: tuple[tuple[float, float, int], ...] = (  # step size, beta, local steps
        (0.001, 0.001, 2), (0.001, 0.01, 2), (0.001, 0.001, 4), (0.001, 0.001, 8), (0.04, 0.1, 1), (0.04, 0.1, 2),
        (0.04, 0.5, 2), (0.04, 0.5, 8),
    )  # fmt: skip
    others: bool = True
    rounds: int = 80_000


FULL = Plan()
QUICK = Plan(
    rates=(0.04, 0.01), local_steps=(1, 2), betas=(0.0, 0.1), ds=((0.04, 0.1, 1), (0.04, 0.1, 2)), others=False
)
SHOWN = {  # the memorable figure: one step size, two local steps, six methods
    "FedAvg-CO, case I": ("fedavg-co-1", {}),
    "FedAvg-CO, case II": ("fedavg-co-2", {}),
    "FedDRO": ("feddro", {"beta": 0.1}),
    "DS-FedDRO, broadcast y": ("ds-feddro", {"beta": 0.1, "inner_eval": "broadcast"}),
    "FedDRO as printed, β = 0": ("feddro", {"beta": 0.0, "order": "printed"}),
    "DS-FedDRO, local y": ("ds-feddro", {"beta": 0.1}),
}


def run(folder: Path, command: str, *, quick: bool = False, progress: bool | None = None) -> Path:
    """The whole experiment; returns the path of its page."""
    began, plan = time.monotonic(), QUICK if quick else FULL
    with jax.enable_x64(True):  # limits to seven digits
        averaging, small_steps = fedavg_co_table(plan, progress), small_steps_table(plan, progress)
        feddro, ds = feddro_table(plan, progress), ds_table(plan, progress)
        others = others_table(plan, progress) if plan.others else None
        seven = figure_seven_paths(plan, progress)
        shown = shown_paths(progress)
    claims = check_claims(averaging, small_steps, feddro, ds)
    written = {
        "fedavg-co": averaging, "small-steps": small_steps, "feddro": feddro, "ds-feddro": ds, "others": others,
        "claims": claims,
    }  # fmt: skip
    for name, table in written.items():
        if table is not None:
            tables.write(table, folder / "tables", name, shown=digits(table))
    seven.to_csv(folder / "tables" / "figure7.csv", index=False)
    shown.to_csv(folder / "tables" / "paths.csv", index=False)
    figures.write(figure_seven(seven), folder / "figures", "figure7")
    figures.write(landscape(shown), folder / "figures", "counterexample")
    settings = {"experiment": "counterexample", "plan": dataclasses.asdict(plan)}
    (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    template = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    page = folder / "README.md"
    page.write_text(
        template.render(
            command=command, plan=plan, seconds=round(time.monotonic() - began), versions=versions(),
            machine=f"{platform.machine()}, {os.cpu_count()} cores, JAX on {jax.default_backend()}",
            verdicts=claims.to_dict("records"),
            **{name.replace("-", "_"): tables.markdown(digits(t)) for name, t in written.items() if t is not None},
        ),
        encoding="utf-8",
    )  # fmt: skip
    return page


def digits(table: pd.DataFrame) -> pd.DataFrame:
    """Places with seven decimals, as people read them; what came out below the resolution is zero."""
    place = lambda value: "–" if np.isnan(value) else f"{value if abs(value) >= 5e-8 else 0.0:.7f}"
    settings = ("step size", "beta", "6 beta (I - 1)")
    columns = {
        str(name): [f"{value:g}" if name in settings else place(value) for value in column]
        for name, column in table.select_dtypes("float").items()
    }
    return table.assign(**columns)


# ------------------------------------------------------------------------------------------------- runs


def runs(
    name: str, changes: Sequence[dict[str, Any]], rounds: int, progress: bool | None, *, every: int | None = None,
    scope: str = "global", **settings: Any,
) -> Sweep:  # fmt: skip
    """One run per change of settings, side by side."""
    algorithms = [make(name, **{"local_steps": 2} | settings | change) for change in changes]
    task = counterexample(scope=scope)
    return sweep(algorithms, task, rounds=rounds, evaluate_every=every, progress=progress, title=name)


def places(done: Sweep) -> np.ndarray:
    """x by setting and evaluation."""
    return done.history["x"][:, 0]


def ends(done: Sweep) -> list[tuple[float, float]]:
    """(x, y) at the end of every setting."""
    return [(float(one.server.x[0, 0]), float(one.server.y[0, 0])) for one in done.runs]


def fedavg_co_table(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1a and T1b: the first rounds, the lowest point and the limit for several step sizes, two local steps."""
    rows = []
    for name, title in TITLES.items():
        changes = [{"lr": lr} for lr in (NEAR[name], *plan.rates)]
        first = places(runs(name, changes, 3, progress, every=1))
        whole = places(runs(name, changes, plan.rounds, progress, every=20))
        for change, start, x in zip(changes, first, whole, strict=True):
            rows.append(
                {"method": title, "step size": change["lr"]}
                | {f"round {r}": start[r] for r in (1, 2, 3)}
                | {"lowest": min(x.min(), start.min()), "limit": x[-1], "expected": averaging_limit(name, 2, **change)}
            )
    return pd.DataFrame(rows)


def small_steps_table(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """Limits for vanishing step sizes, extrapolated from two small ones: what is wrong is not the step size."""
    rows = []
    for name, title in TITLES.items():
        for steps in plan.local_steps:
            rates = (0.001, 0.0005)
            coarse, fine = places(
                runs(name, [{"lr": lr} for lr in rates], plan.rounds, progress, local_steps=steps)
            )[:, -1]  # fmt: skip
            rows.append(
                {
                    "method": title, "local steps": steps, "limit": 2 * fine - coarse,
                    "expected": averaging_limit(name, steps, lr=0.0),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def feddro_table(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1c: x and y after some rounds in both orders, step size 0.04, two local steps."""
    rows = []
    for order in ("consistent", "printed"):
        changes = [{"beta": beta} for beta in plan.betas]
        reached = {
            r: ends(runs("feddro", changes, r, progress, lr=0.04, order=order)) for r in (1, 2, 100, plan.rounds)
        }
        for i, beta in enumerate(plan.betas):
            wrong = order == "printed" and beta == 0
            rows.append(
                {"order": order, "beta": beta}
                | {f"{v}, round {r}": reached[r][i][j] for r in (1, 2, 100) for j, v in enumerate("xy")}
                | {"limit": reached[plan.rounds][i][0], "expected": printed_limit() if wrong else 0.0}
            )
    return pd.DataFrame(rows)


def ds_table(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1d: limits of DS-FedDRO with the local and with the broadcast y, and with server rates of 1.3."""
    rows = []
    for lr, beta, steps in plan.ds:
        settings = {"lr": lr, "beta": beta, "local_steps": steps}
        last = plan.rounds - 1  # and after it the end: a run that swings differs in the two
        end = lambda **more: places(runs("ds-feddro", [settings | more], plan.rounds, progress, every=last))[0, -2:]
        local, broadcast = end(), end(inner_eval="broadcast")
        rates = end(server_lr=1.3, server_inner_lr=1.3)
        settled = lambda x: x[-1] if abs(x[1] - x[0]) < REACHED else np.nan
        rows.append(
            {
                "step size": lr, "beta": beta, "local steps": steps, "limit, local y": settled(local),
                "expected": ds_limit(lr, beta, steps), "6 beta (I - 1)": 6 * beta * (steps - 1),
                "limit, local y, server rates 1.3": settled(rates), "limit, broadcast y": settled(broadcast),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def others_table(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1e: what the other methods for compositions solve."""
    one = {"local_steps": 1}
    local = averaging_limit("fedavg-co-1", 1, lr=0.0)
    cases: list[tuple[str, str, str, dict[str, Any], float]] = [
        ("ComFedL", "comfedl", "local", {"lr": 0.04} | one, local),
        ("Local-SCGD, own estimates", "local-scgd-own", "local", {"lr": 0.04} | one, local),
        ("Local-SCGD, averaged estimates", "local-scgd", "local", {"lr": 0.04} | one, mixed_limit(0.5)),
        ("MBSGD, local plug-in", "mbsgd", "global", {"lr": 0.04, "plugin": "local"} | one, local),
        ("MBSGD", "mbsgd", "global", {"lr": 0.04} | one, 0.0),
        ("SCGD, beta = 0.5", "scgd", "global", {"lr": 0.04, "beta": 0.5} | one, 0.0),
        ("GCIVR", "gcivr", "global", {"lr": 0.04, "refresh_batches": 1}, 0.0),
    ]
    rows = []
    for title, name, scope, settings, expected in cases:
        x = places(runs(name, [settings], plan.rounds, progress, scope=scope))[0, -1]
        rows.append({"method": title, "limit": x, "expected": expected})
    return pd.DataFrame(rows)


def figure_seven_paths(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """x over rounds of case II for several step sizes."""
    rounds = min(plan.rounds, 10_000)
    done = runs("fedavg-co-2", [{"lr": lr} for lr in plan.rates], rounds, progress, every=1)
    keep = np.unique(np.concatenate([np.arange(10), np.geomspace(10, rounds, 200).astype(int)]))
    paths = zip(plan.rates, places(done), strict=True)
    return pd.concat([pd.DataFrame({"step size": lr, "round": keep, "x": x[keep]}) for lr, x in paths])


def shown_paths(progress: bool | None, rounds: int = 1000) -> pd.DataFrame:
    """x over rounds of the methods of the figure, all with the same step size and local steps."""
    keep = np.unique(np.concatenate([np.arange(20), np.geomspace(20, rounds, 120).astype(int)]))
    parts = []
    for title, (name, settings) in SHOWN.items():
        x = places(runs(name, [settings], rounds, progress, every=1, lr=0.04))[0]
        parts.append(pd.DataFrame({"method": title, "round": keep, "x": x[keep]}))
    return pd.concat(parts)


# ------------------------------------------------------------------------------------------------- what must come out


def slope(y: Any) -> Any:
    """f'(y)."""
    return y / np.sqrt(y**2 + 4)


def _root(moved: Callable[[float], float]) -> float:
    return brentq(moved, 0.5, 2, xtol=1e-14)  # pyright: ignore[reportReturnType]


def averaging_limit(name: str, local_steps: int, lr: float) -> float:
    """Where a round of FedAvg-CO does not move x; lr = 0 is the limit of small steps."""

    def moved(x: float) -> float:
        own, total = np.full(2, x), np.zeros(2)
        for step in range(local_steps):
            inner = np.full(2, x) if name == "fedavg-co-2" and step == 0 else SLOPES * own + SHIFTS
            pull = SLOPES * slope(inner)
            own, total = own - lr * pull, total + pull
        return float(total.mean())

    return 0.0 if moved(0.0) == 0 else _root(moved)


def printed_limit() -> float:
    """FedDRO in the printed order with beta = 0: a local step moves y by lr f'(y) mean a^2, and x only by
    lr f'(y) mean a. So y is used up before x has arrived."""
    return 0.5 * (1 - SLOPES.mean() / np.mean(SLOPES**2))


def mixed_limit(rate: float) -> float:
    """Local-SCGD that averages its estimates: composed with a mixture of all clients' inner values and the own ones."""
    moved = lambda x: np.mean(SLOPES * slope((1 - rate) * x + rate * (SLOPES * x + SHIFTS)))
    return _root(moved)


def ds_limit(lr: float, beta: float, local_steps: int) -> float:
    """Where a round of DS-FedDRO with the local y moves neither x nor y."""

    def moved(state: np.ndarray) -> np.ndarray:
        x, y = (np.full(2, value) for value in state)
        for _ in range(local_steps):
            x = x - lr * SLOPES * slope(y)
            y = (1 - beta) * y + beta * (SLOPES * x + SHIFTS)
        return np.array([x.mean(), y.mean()]) - state

    first_order = min(6 * beta * (local_steps - 1), 1.0)
    found = root(lambda state: moved(state) / lr, np.full(2, first_order), tol=1e-13)
    return float(found.x[0]) if found.success else np.nan


# ------------------------------------------------------------------------------------------------- claims


def check_claims(averaging: Any, small_steps: Any, feddro: Any, ds: Any) -> pd.DataFrame:
    """The paper's claims, each with what decides it."""
    several = small_steps[small_steps["local steps"] > 1]
    fails = bool((averaging["lowest"] >= 0.5).all() and (averaging["limit"] > 1).all() and (several["limit"] > 1).all())
    arrives = feddro.limit.abs() < REACHED
    consistent, printed = (arrives[feddro.order == order] for order in ("consistent", "printed"))
    stuck = feddro[(feddro.order == "printed") & ~arrives]
    many = ds[ds["local steps"] > 1]
    local = many["limit, local y"].abs() < REACHED
    broadcast = ds["limit, broadcast y"].abs() < REACHED
    bias = lambda row: f"{row['limit, local y']:.4f} (β = {row['beta']:g}, I = {int(row['local steps'])})"
    right = "holds" if arrives.all() else "holds with a correction" if consistent.all() else "does not hold"
    return pd.DataFrame(
        [
            {
                "claim": "FedAvg-CO fails in both cases: x never comes below its start and settles above 1",
                "verdict": "holds" if fails else "does not hold",
                "what decides it": f"all {len(averaging)} step sizes, and vanishing ones with two and more local steps",
            },
            {
                "claim": "FedDRO reaches the stationary point 0",
                "verdict": right,
                "what decides it": f"y formed after the average of x: {consistent.sum()} of {len(consistent)} values "
                f"of β arrive; before it, as printed: {printed.sum()} of {len(printed)}"
                + "".join(f"; with β = {row.beta:g} it stops at {row.limit:.4f}" for row in stuck.itertuples()),
            },
            {
                "claim": "DS-FedDRO reaches the stationary point 0",
                "verdict": "holds" if local.all() else "holds up to a bias of its local estimates",
                "what decides it": f"with the broadcast y {broadcast.sum()} of {len(broadcast)} settings arrive (a run "
                "that does not swings); with the local y, as analysed, and more than one local step "
                f"{local.sum()} of {len(local)}; they end at " + ", ".join(bias(row) for _, row in many.iterrows()),
            },
        ]
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- figures

BLUE, ORANGE, GREEN, YELLOW, SKY, PINK = COLOURS
SPAN = (-0.78, 2.32)  # of x
# Colour and dash of a path; where its label stands (x and round), on which side, its title, what it says of the end.
LOOKS: dict[str, tuple[str, Any, tuple[float, float], str, str, str]] = {
    "FedAvg-CO, case I": (
        ORANGE, "-", (1.23, 30), "left", "FedAvg-CO, case I",
        "every client composes with\nits own inner value:\nsettles at {:.3f}",
    ),
    "FedAvg-CO, case II": (
        YELLOW, "-", (1.085, 50), "right", "FedAvg-CO, case II",
        "the mean inner value,\nbut once a round only:\nsettles at {:.3f}",
    ),
    "FedDRO": (BLUE, "-", (-0.04, 90), "right", "FedDRO", "one estimate of the mean for\nall, renewed in every step"),
    "DS-FedDRO, broadcast y": (
        GREEN, (0, (4, 3)), (-0.04, 370), "right", "DS-FedDRO, broadcast y", "the estimate that the\nserver sent"
    ),
    "FedDRO as printed, β = 0": (PINK, "-", (0.425, 420), "right", "FedDRO as\nprinted, β = 0", "stops at {:.3f}"),
    "DS-FedDRO, local y": (
        SKY, "-", (0.505, 370), "left", "DS-FedDRO, local y", "estimates part within\na round: stops at {:.3f}"
    ),
}  # fmt: skip


def outer(y: Any) -> Any:
    return np.sqrt(y**2 + 4)


def landscape(paths: pd.DataFrame) -> Figure:
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
            x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK,
        )  # fmt: skip
        figure.supxlabel(
            "Two clients with inner functions 4x − 4 and −2x + 4, whose mean is x, inside f(y) = √(y² + 4). Nothing is "
            "random.\nStep size 0.04, two local steps per round; β is the rate at which an estimate of the inner value "
            "is renewed (0.1 if not said).",
            x=0.012, ha="left", fontsize=8.5, color=MUTED, linespacing=1.4,
        )  # fmt: skip
    return figure


def _draw_landscape(axes: Any, ends: Mapping[str, float]) -> None:
    x = np.linspace(*SPAN, 400)
    first, second = (outer(a * x + b) for a, b in zip(SLOPES, SHIFTS, strict=True))
    axes.plot(x, first, x, second, color="#B9C0C7", linewidth=1.5)
    axes.plot(x, (first + second) / 2, color=BASELINE, linewidth=2.2, linestyle=(0, (5, 2.5)))
    axes.plot(x, outer(x), color=INK, linewidth=3.2, zorder=3)
    say = lambda text, at, colour, **more: axes.text(
        *at, text, color=colour, **{"fontsize": 9.5, "linespacing": 1.3, "va": "center"} | more
    )
    say("client 1's own:\nleast at 1", (1.77, 3.52), BASELINE)
    say("client 2's own:\nleast at 2", (2.0, 1.96), BASELINE, ha="center", va="top")
    axes.annotate(
        "mean of the two, which\nFedAvg descends: least at 1.17", (1.1687, 2.38), (1.1687, 3.3), color=MUTED,
        fontsize=9.5, linespacing=1.3, ha="center", va="center",
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.9, "shrinkB": 4},
    )  # fmt: skip
    say("the objective, f of the mean:\nleast at 0", (SPAN[0] + 0.02, 1.88), INK, fontweight="bold")
    say("start", (0.5, outer(0.5) + 0.19), INK, ha="center", va="bottom", fontstyle="italic")
    axes.plot(0.5, outer(0.5) + 0.13, "v", markersize=7, color=INK, zorder=4)
    for name, (colour, *_) in LOOKS.items():
        axes.plot(ends[name], outer(ends[name]), "o", color=colour, **_marble(name))
    axes.set(ylim=(1.75, 3.75), yticks=[2, 2.5, 3, 3.5], ylabel="value")


def _marble(name: str) -> dict[str, Any]:
    """Two methods end at 0: the one is seen around the other."""
    return {"markersize": 14 if name == "FedDRO" else 9.5, "markeredgecolor": "white", "zorder": 6}


def _draw_paths(axes: Any, paths: Mapping[str, pd.DataFrame]) -> None:
    axes.set_yscale("function", functions=(np.log1p, np.expm1))
    for name, (colour, dash, at, side, title, words) in LOOKS.items():
        path = paths[name]
        end = float(path["x"].iloc[-1])
        axes.plot(path["x"], path["round"], color=colour, linestyle=dash, linewidth=2.8, solid_capstyle="butt")
        axes.plot(end, path["round"].iloc[-1], "o", color=colour, clip_on=False, **_marble(name))
        darker = tuple(0.78 * part for part in to_rgb(colour))
        place = {"ha": side, "fontsize": 10, "linespacing": 1.35}
        axes.text(*at, title, color=darker, fontweight="bold", va="bottom", **place)
        axes.text(*at, words.format(end), color=MUTED, va="top", **place)
    axes.set(ylim=(1000, 0), yticks=[0, 1, 3, 10, 30, 100, 300, 1000], ylabel="communication rounds", xlabel="x")
    axes.tick_params(axis="x", labelcolor=INK)


def figure_seven(paths: pd.DataFrame) -> Figure:
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
                when[half], x[half], f"η = {lr:g}" if i == 0 else f"{lr:g}", ha="center", va="center", fontsize=9.5,
                color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
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
            "Two local steps per round, no noise. The proof asks for a step size η below 1/22.", x=0.01, ha="left",
            fontsize=8, color=MUTED,
        )  # fmt: skip
    return figure
