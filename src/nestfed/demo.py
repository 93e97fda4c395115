"""The demonstration: two problems with known answers on which plain averaging settles at the wrong point."""

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd

from nestfed.algorithms import make
from nestfed.hypergradients import Dense
from nestfed.simulate import simulate
from nestfed.tasks import toys


class Curve(NamedTuple):
    """One method on one problem: where x was after each evaluated round, and where it should go."""

    problem: str
    method: str
    rounds: np.ndarray
    x: np.ndarray
    solution: float


COMPOSITION, BILEVEL = "composition", "bilevel"
SOLUTIONS = {COMPOSITION: 0.0, BILEVEL: 80 / 59}
COLOURS = {
    "FedAvg": "#c2410c", "FedNest": "#1d4ed8", "SimFBO": "#0891b2", "FedBiO": "#1d4ed8", "FedBiOAcc": "#0891b2"
}  # fmt: skip


def methods() -> list[tuple[str, str, Any, Any]]:
    """(problem, name, algorithm, task) of every curve, with comparable step sizes."""
    small = {"lr": 1e-3, "lower_lr": 1e-2, "z_lr": 1e-2}
    return [
        (COMPOSITION, "FedAvg", make("fedavg", lr=0.01, local_steps=2), toys.counterexample("naive")),
        (
            COMPOSITION, "FedNest", make("fednest", lr=0.02, lower_lr=1.0, neumann_lr=1.0, terms=1, local_steps=2),
            toys.counterexample("bilevel"),
        ),
        (
            COMPOSITION, "SimFBO",
            make("simfbo", **small, server_lr=0.01, server_lower_lr=0.3, server_z_lr=0.3, local_steps=2),
            toys.counterexample("bilevel"),
        ),
        (BILEVEL, "FedAvg", make("fedavg", lr=0.05, local_steps=2), toys.scalar_bilevel("naive")),
        (
            BILEVEL, "FedBiO", make("fedbio", lr=0.01, lower_lr=0.2, local_steps=2, hypergradient=Dense()),
            toys.scalar_bilevel(),
        ),
        (
            BILEVEL, "FedBiOAcc",
            make("fedbioacc", lr=1.0, lower_lr=4.0, u=8.0, sigma2=0.05, local_steps=2, hypergradient=Dense()),
            toys.scalar_bilevel(),
        ),
    ]  # fmt: skip


def run(rounds: int = 1000, progress: bool | None = None) -> list[Curve]:
    """All curves of the demonstration."""
    curves = []
    for problem, name, algorithm, task in methods():
        history = simulate(algorithm, task, rounds=rounds, evaluate_every=5, progress=progress).history
        curves.append(Curve(problem, name, history["round"], history["x"], SOLUTIONS[problem]))
    return curves


def table(curves: list[Curve]) -> pd.DataFrame:
    """Where each method ended, and how far from the solution."""
    return pd.DataFrame(
        {
            "problem": [c.problem for c in curves],
            "method": [c.method for c in curves],
            "solution": [c.solution for c in curves],
            "ends at": [float(c.x[-1]) for c in curves],
            "error": [abs(float(c.x[-1]) - c.solution) for c in curves],
        }
    )


def save(curves: list[Curve], folder: Path) -> dict[str, Path]:
    """Write figure (PNG and SVG), the curves and the table; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / name for name in ("demo.png", "demo.svg", "curves.csv", "table.csv")}
    figure = draw(curves)
    figure.savefig(paths["demo.png"], dpi=160)
    figure.savefig(paths["demo.svg"])
    frames = [pd.DataFrame({"problem": c.problem, "method": c.method, "round": c.rounds, "x": c.x}) for c in curves]
    pd.concat(frames).to_csv(paths["curves.csv"], index=False)
    table(curves).to_csv(paths["table.csv"], index=False)
    return paths


def draw(curves: list[Curve]) -> Any:
    """Left: the landscape that explains it. Middle and right: where the methods go."""
    from matplotlib.figure import Figure  # no window system is touched

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        landscape, composition, bilevel = figure.subplots(1, 3)
        _draw_landscape(landscape, [c for c in curves if c.problem == COMPOSITION])
        _draw_paths(composition, curves, COMPOSITION, "A function of an average over clients")
        _draw_paths(bilevel, curves, BILEVEL, "Bilevel: the lower solution moves with x")
        figure.suptitle("Averaging losses settles at the wrong point; nested methods do not", fontweight="bold")
    return figure


def _draw_landscape(axes: Any, curves: list[Curve]) -> None:
    x = np.linspace(-0.6, 2.1, 300)
    outer = lambda y: np.sqrt(y**2 + 4)
    objective, averaged = outer(x), (outer(4 * x - 4) + outer(4 - 2 * x)) / 2
    axes.plot(x, objective, color="black", label="objective: $f$ of the average")
    axes.plot(x, averaged, color="black", linestyle=":", label="what FedAvg descends: average of $f$")
    for curve in curves:
        height = np.interp(curve.x[-1], x, averaged if curve.method == "FedAvg" else objective)
        axes.plot(
            curve.x[-1], height, "o", color=COLOURS[curve.method], markersize=9 if curve.method != "SimFBO" else 5
        )
        axes.annotate(
            curve.method, (curve.x[-1], height), xytext=(8, 8 if curve.method == "FedNest" else -16),
            textcoords="offset points", color=COLOURS[curve.method],
        )  # fmt: skip
    axes.set(xlabel="x", ylabel="value", ylim=(1.6, 4.6), title="The problem of the middle panel")
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def _draw_paths(axes: Any, curves: list[Curve], problem: str, title: str) -> None:
    chosen = [c for c in curves if c.problem == problem]
    solution = SOLUTIONS[problem]
    axes.axhline(solution, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        "solution", (0.99, solution), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points",
        ha="right",
    )  # fmt: skip
    for curve in chosen:
        axes.plot(
            curve.rounds, curve.x, color=COLOURS[curve.method], label=f"{curve.method}  → {curve.x[-1]:.4f}", lw=2
        )
    axes.set(xlabel="communication rounds", ylabel="x on the server", title=title)
    axes.legend(frameon=False, loc="center right", fontsize=9)
