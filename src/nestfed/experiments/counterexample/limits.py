"""Where the methods must end on the counterexample: roots of equations, found from their updates
without this library."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import brentq, root

SLOPES, SHIFTS = np.array([4.0, -2.0]), np.array([-4.0, 4.0])


def compute_slope(y: Any) -> Any:
    """f'(y)."""
    return y / np.sqrt(y**2 + 4)


def _find_root(move: Callable[[float], float]) -> float:
    return brentq(move, 0.5, 2, xtol=1e-14)  # pyright: ignore[reportReturnType]


def find_averaging_limit(name: str, local_steps: int, lr: float) -> float:
    """Where a round of FedAvg-CO does not move x; lr = 0 is the limit of small steps."""

    def move(x: float) -> float:
        own, total = np.full(2, x), np.zeros(2)
        for step in range(local_steps):
            inner = np.full(2, x) if name == "fedavg-co-2" and step == 0 else SLOPES * own + SHIFTS
            pull = SLOPES * compute_slope(inner)
            own, total = own - lr * pull, total + pull
        return float(total.mean())

    return 0.0 if move(0.0) == 0 else _find_root(move)


def find_printed_limit() -> float:
    """FedDRO in the printed order with beta = 0: a local step moves y by lr f'(y) mean a^2, and x only by
    lr f'(y) mean a. So y is used up before x has arrived."""
    return 0.5 * (1 - SLOPES.mean() / np.mean(SLOPES**2))


def find_mixed_limit(rate: float) -> float:
    """Local-SCGD that averages its estimates: composed with a mixture of all clients' inner values and the own ones."""
    move = lambda x: np.mean(SLOPES * compute_slope((1 - rate) * x + rate * (SLOPES * x + SHIFTS)))
    return _find_root(move)


def find_ds_limit(lr: float, beta: float, local_steps: int) -> float:
    """Where a round of DS-FedDRO with the local y moves neither x nor y."""

    def move(state: np.ndarray) -> np.ndarray:
        x, y = (np.full(2, value) for value in state)
        for _ in range(local_steps):
            x = x - lr * SLOPES * compute_slope(y)
            y = (1 - beta) * y + beta * (SLOPES * x + SHIFTS)
        return np.array([x.mean(), y.mean()]) - state

    first_order = min(6 * beta * (local_steps - 1), 1.0)
    for start in (1.0, 0.95, 1.05):  # from one of them the steps of the root finder do not get stuck
        found = root(lambda state: move(state) / lr, np.full(2, start * first_order), tol=1e-13)
        if found.success:
            return float(found.x[0])
    return np.nan
