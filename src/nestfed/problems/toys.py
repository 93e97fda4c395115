"""Small tasks with known answers: the closed-form cases that every family is tested and demonstrated on.

All of them have constants only (no rows), so a batch is always a client's whole data and runs are deterministic.
"""

from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.rows import Rows
from nestfed.core.settings import struct
from nestfed.core.task import Task, TaskFields
from nestfed.problems import Bilevel, Compositional, SingleLevel
from nestfed.problems.adapters import CompositionAsBilevel, NaiveComposition


@struct
class Quadratic(SingleLevel):
    """Has loss = a (x - c)^2 / 2 with the client's own (a, c)."""

    def loss(self, x, batch, key):
        a, c = batch
        return 0.5 * a * jnp.sum((x - c) ** 2)


def quadratics(
    curvatures: Sequence[float] = (1.0, 4.0), centers: Sequence[float] = (0.0, 1.0), **fields: Unpack[TaskFields]
) -> Task:
    """Clients pull towards different centers with different curvatures; the minimiser is sum a c / sum a."""
    constants = (jnp.asarray(curvatures), jnp.asarray(centers))
    return Task.create(Quadratic(), Rows.from_clients(constants=constants), jnp.asarray(0.0), **fields)


@struct
class ScalarBilevel(Bilevel):
    """Has g = A y^2 / 2 - y (B x + c) and f = (y - t)^2 / 2 + rho x^2 / 2, with the client's own (A, B, c, t)."""

    rho: float = 0.1

    def lower(self, x, y, batch, key):
        A, B, c, _ = batch
        return 0.5 * A * y**2 - y * (B * x + c)

    def upper(self, x, y, batch, key):
        return 0.5 * (y - batch[3]) ** 2 + 0.5 * self.rho * x**2


@struct
class ShowX(Task):
    """Reports x besides the objective, so that a run shows where it goes."""

    def metrics(self, server, client, data, fed):
        return super().metrics(server, client, data, fed) | {"x": server.x[0]}


def scalar_bilevel(scope: str = "local", **fields: Unpack[TaskFields]) -> Task:
    """Make a task of two clients. It is solved by x = 80/59 with local lower problems, by x = 15/7 with a global one.

    scope "naive" is what plain averaging makes of it.
    """
    constants = tuple(jnp.asarray(v) for v in ((1.0, 3.0), (1.0, 1.0), (0.0, 2.0), (1.0, 3.0)))
    x, y = jnp.asarray(0.0), jnp.asarray(0.0)
    if scope == "naive":
        return ShowX.create(
            NaiveBilevel(problem=ScalarBilevel()), Rows.from_clients(constants=constants), {"x": x, "y": y}, **fields
        )
    return ShowX.create(ScalarBilevel(scope=scope), Rows.from_clients(constants=constants), (x, y), **fields)


@struct
class NaiveBilevel(SingleLevel):
    """Shows what plain averaging sees of a bilevel problem: x is trained on the upper loss as if y did not depend on
    it, y on the lower loss, and both are averaged. It is the negative control of the demonstrations."""

    problem: Bilevel

    def loss(self, x, batch, key):
        frozen = jax.tree.map(lax.stop_gradient, x)
        upper = self.problem.upper(x["x"], frozen["y"], batch, key)
        return upper + self.problem.lower(frozen["x"], x["y"], batch, key)


@struct
class Line(Compositional):
    """Has inner = slope x + shift with the client's own numbers, and outer = sqrt(y^2 + 4)."""

    def inner(self, x, batch, key):
        slope, shift = batch
        return slope * x + shift

    def outer(self, y, batch, key):
        return jnp.sqrt(y**2 + 4.0)


@struct
class CounterexampleTask(Task):
    """Reports x and the true objective sqrt(x^2 + 4)."""

    def metrics(self, server, client, data, fed):
        return {"x": server.x[0], "objective": jnp.sqrt(server.x[0] ** 2 + 4.0)}


def counterexample(view: str = "compositional", *, scope: str = "global", **fields: Unpack[TaskFields]) -> Task:
    """Inner functions 4x - 4 and -2x + 4 average to x: the objective sqrt(x^2 + 4) is least at x = 0.

    scope "local" asks for the mean of the clients' own compositions instead, least at x = 1.1686673.
    view  is "compositional", "bilevel" (for solvers of one global lower problem) or "naive" (what plain averaging sees:
          each client composes the outer function with its own inner one).
    """
    problem, start = Line(scope=scope), jnp.asarray(0.5)
    if view == "bilevel":
        problem, start = CompositionAsBilevel(problem=problem), (start, jnp.asarray(0.5))
    elif view == "naive":
        problem = NaiveComposition(problem=problem)
    constants = (jnp.array([4.0, -2.0]), jnp.array([-4.0, 4.0]))
    return CounterexampleTask.create(problem, Rows.from_clients(constants=constants), start, **fields)
