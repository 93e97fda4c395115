"""The counterexample: a composition on which averaging models goes the wrong way. Theorem D.1 and Figure 7 of
"Federated compositional optimization: the impact of two-sided learning rates on communication efficiency".

Two clients with inner functions 4x - 4 and -2x + 4, whose mean is x, inside sqrt(y^2 + 4): the solution is 0. Nothing
is random. Beside every limit that a run reached stands the one it must reach: the root of an equation, found by SciPy
from the method's update and without this library.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd

from nestfed.algorithms import make
from nestfed.experiments import frame
from nestfed.experiments.cells import Table, tabulate
from nestfed.experiments.counterexample.limits import (
    find_averaging_limit,
    find_ds_limit,
    find_mixed_limit,
    find_printed_limit,
)
from nestfed.problems.toys import counterexample
from nestfed.verbs.sweeps import Sweep, sweep

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
    totals: tuple[int, ...] = (1000, 10_000, 100_000, 400_000)  # T, local steps, of the theorem's step sizes
    schedule_steps: tuple[int, ...] = (2, 8)  # local steps per round there


QUICK = Plan(
    rates=(0.04, 0.01),
    local_steps=(1, 2),
    betas=(0.0, 0.1),
    ds=((0.04, 0.1, 1), (0.04, 0.1, 2)),
    others=False,
    totals=(1000, 4000),
    schedule_steps=(2,),
)
SHOWN = {  # the memorable figure: one step size, two local steps, six methods
    "FedAvg-CO, case I": ("fedavg-co-1", {}),
    "FedAvg-CO, case II": ("fedavg-co-2", {}),
    "FedDRO": ("feddro", {"beta": 0.1}),
    "DS-FedDRO, broadcast y": ("ds-feddro", {"beta": 0.1, "inner_eval": "broadcast"}),
    "FedDRO as printed, β = 0": ("feddro", {"beta": 0.0, "order": "printed"}),
    "DS-FedDRO, local y": ("ds-feddro", {"beta": 0.1}),
}


# ------------------------------------------------------------------------------------------------- trainings


class Trainings(frame.Trainings[Plan]):
    """The cells: the tables of the page, and the paths of its figures. Nothing else is kept of a run."""

    def names(self) -> list[str]:
        return [name for name in TABLES if name != "others" or self.plan.others]

    def train(self, name: str) -> Table:
        with jax.enable_x64(True):  # limits to seven digits
            return tabulate(functools.partial(TABLES[name], self.plan, self.progress))


def run_settings(
    name: str, changes: Sequence[dict[str, Any]], rounds: int, progress: bool | None, *, every: int | None = None,
    scope: str = "global", **settings: Any,
) -> Sweep:  # fmt: skip
    """One run per change of settings, side by side."""
    algorithms = [make(name, **{"local_steps": 2} | settings | change) for change in changes]
    task = counterexample(scope=scope)
    return sweep(algorithms, task, rounds=rounds, evaluate_every=every, progress=progress, title=name)


def read_places(done: Sweep) -> np.ndarray:
    """x by setting and evaluation."""
    return done.history["x"][:, 0]


def read_ends(done: Sweep) -> list[tuple[float, float]]:
    """(x, y) at the end of every setting."""
    return [(float(one.server.x[0, 0]), float(one.server.y[0, 0])) for one in done.runs]


def tabulate_fedavg_co(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1a and T1b: the first rounds, the lowest point and the limit for several step sizes, two local steps."""
    rows = []
    for name, title in TITLES.items():
        changes = [{"lr": lr} for lr in (NEAR[name], *plan.rates)]
        first = read_places(run_settings(name, changes, 3, progress, every=1))
        whole = read_places(run_settings(name, changes, plan.rounds, progress, every=20))
        for change, start, x in zip(changes, first, whole, strict=True):
            rows.append(
                {"method": title, "step size": change["lr"]}
                | {f"round {r}": start[r] for r in (1, 2, 3)}
                | {
                    "lowest": min(x.min(), start.min()),
                    "limit": x[-1],
                    "expected": find_averaging_limit(name, 2, **change),
                }
            )
    return pd.DataFrame(rows)


def tabulate_small_steps(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """Limits for vanishing step sizes, extrapolated from two small ones: what is wrong is not the step size."""
    rows = []
    for name, title in TITLES.items():
        for steps in plan.local_steps:
            rates = (0.001, 0.0005)
            coarse, fine = read_places(
                run_settings(name, [{"lr": lr} for lr in rates], plan.rounds, progress, local_steps=steps)
            )[:, -1]
            rows.append(
                {
                    "method": title, "local steps": steps, "limit": 2 * fine - coarse,
                    "expected": find_averaging_limit(name, steps, lr=0.0),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def tabulate_feddro(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1c: x and y after some rounds in both orders, step size 0.04, two local steps."""
    rows = []
    for order in ("consistent", "printed"):
        changes = [{"beta": beta} for beta in plan.betas]
        reached = {
            r: read_ends(run_settings("feddro", changes, r, progress, lr=0.04, order=order))
            for r in (1, 2, 100, plan.rounds)
        }
        for i, beta in enumerate(plan.betas):
            wrong = order == "printed" and beta == 0
            rows.append(
                {"order": order, "beta": beta}
                | {f"{v}, round {r}": reached[r][i][j] for r in (1, 2, 100) for j, v in enumerate("xy")}
                | {"limit": reached[plan.rounds][i][0], "expected": find_printed_limit() if wrong else 0.0}
            )
    return pd.DataFrame(rows)


def tabulate_ds(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1d: limits of DS-FedDRO with the local and with the broadcast y, and with server rates of 1.3."""
    rows = []
    for lr, beta, steps in plan.ds:
        settings = {"lr": lr, "beta": beta, "local_steps": steps}
        last = plan.rounds - 1  # and after it the end: a run that swings differs in the two
        end = lambda **more: read_places(
            run_settings("ds-feddro", [settings | more], plan.rounds, progress, every=last)
        )[0, -2:]
        local, broadcast = end(), end(inner_eval="broadcast")
        rates = end(server_lr=1.3, server_inner_lr=1.3)
        settled = lambda x: x[-1] if abs(x[1] - x[0]) < REACHED else np.nan
        rows.append(
            {
                "step size": lr, "beta": beta, "local steps": steps, "limit, local y": settled(local),
                "expected": find_ds_limit(lr, beta, steps), "6 beta (I - 1)": 6 * beta * (steps - 1),
                "limit, local y, server rates 1.3": settled(rates), "limit, broadcast y": settled(broadcast),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def tabulate_schedules(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """DS-FedDRO, local y, with step sizes that fall with the number T of local steps as in Theorem 5.2: eta =
    sqrt(I / T), beta = eta, and server rates 1 or sqrt(K / T). Where it is after T steps, and where these would
    lead."""
    rows = []
    clients = 2
    for steps, total in itertools.product(plan.schedule_steps, plan.totals):
        lr = math.sqrt(steps / total)
        rates = {"1": 1.0, "sqrt(K / T)": math.sqrt(clients / total)}
        changes = [{"server_lr": rate, "server_inner_lr": rate} for rate in rates.values()]
        done = run_settings("ds-feddro", changes, total // steps, progress, local_steps=steps, lr=lr, beta=lr)
        for name, x in zip(rates, read_places(done)[:, -1], strict=True):
            rows.append(
                {"local steps": steps, "T": total, "eta = beta": lr, "server rates": name}
                | {"x after T steps": x, "limit": find_ds_limit(lr, lr, steps), "6 beta (I - 1)": 6 * lr * (steps - 1)}
            )
    return pd.DataFrame(rows)


def tabulate_others(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """T1e: what the other methods for compositions solve."""
    one = {"local_steps": 1}
    local = find_averaging_limit("fedavg-co-1", 1, lr=0.0)
    cases: list[tuple[str, str, str, dict[str, Any], float]] = [
        ("ComFedL", "comfedl", "local", {"lr": 0.04} | one, local),
        ("Local-SCGD, own estimates", "local-scgd-own", "local", {"lr": 0.04} | one, local),
        ("Local-SCGD, averaged estimates", "local-scgd", "local", {"lr": 0.04} | one, find_mixed_limit(0.5)),
        ("MBSGD, local plug-in", "mbsgd", "global", {"lr": 0.04, "plugin": "local"} | one, local),
        ("MBSGD", "mbsgd", "global", {"lr": 0.04} | one, 0.0),
        ("SCGD, beta = 0.5", "scgd", "global", {"lr": 0.04, "beta": 0.5} | one, 0.0),
        ("GCIVR", "gcivr", "global", {"lr": 0.04, "refresh_batches": 1}, 0.0),
    ]
    rows = []
    for title, name, scope, settings, expected in cases:
        x = read_places(run_settings(name, [settings], plan.rounds, progress, scope=scope))[0, -1]
        rows.append({"method": title, "limit": x, "expected": expected})
    return pd.DataFrame(rows)


def tabulate_figure_seven(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """x over rounds of case II for several step sizes."""
    rounds = min(plan.rounds, 10_000)
    done = run_settings("fedavg-co-2", [{"lr": lr} for lr in plan.rates], rounds, progress, every=1)
    keep = np.unique(np.concatenate([np.arange(10), np.geomspace(10, rounds, 200).astype(int)]))
    paths = zip(plan.rates, read_places(done), strict=True)
    return pd.concat([pd.DataFrame({"step size": lr, "round": keep, "x": x[keep]}) for lr, x in paths])


def tabulate_shown_paths(plan: Plan, progress: bool | None) -> pd.DataFrame:
    """x over rounds of the methods of the figure, all with the same step size and local steps."""
    rounds = min(plan.rounds, 1000)
    keep = np.unique(np.concatenate([np.arange(20), np.geomspace(20, rounds, 120).astype(int)]))
    parts = []
    for title, (name, settings) in SHOWN.items():
        x = read_places(run_settings(name, [settings], rounds, progress, every=1, lr=0.04))[0]
        parts.append(pd.DataFrame({"method": title, "round": keep, "x": x[keep]}))
    return pd.concat(parts)


TABLES: dict[str, Callable[[Plan, bool | None], pd.DataFrame]] = {
    "fedavg-co": tabulate_fedavg_co,
    "small-steps": tabulate_small_steps,
    "feddro": tabulate_feddro,
    "ds-feddro": tabulate_ds,
    "schedules": tabulate_schedules,
    "others": tabulate_others,
    "figure7": tabulate_figure_seven,
    "paths": tabulate_shown_paths,
}
