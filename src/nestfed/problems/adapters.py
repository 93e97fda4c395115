"""Problems of one class seen as problems of a wider class, without touching the user's code.

A solver of the wider class then serves them. Each adapter holds the problem it wraps and forwards its projections.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import PyTree
from nestfed.problems import Bilevel, Compositional, Conditional, Minimax, SingleLevel


class Adapter:
    """Takes over the projections of the wrapped problem, which cost nothing where it has none."""

    problem: Any
    forwards: ClassVar[dict[str, str]] = {"project_x": "project_x"}

    def project_x(self, x: PyTree) -> PyTree:
        return self.problem.project_x(x)

    def defines(self, method: str) -> bool:
        return method in self.forwards and self.problem.defines(self.forwards[method])


@struct
class SingleAsConditional(Adapter, Conditional):
    """Shows P1 as P4: the inner function is x itself, and the outer one is the loss."""

    problem: SingleLevel

    def sample_outer(self, data, key, count):
        return data.draw_each(key, count)

    def sample_inner(self, data, xi, key, count):
        return jnp.zeros(count)

    def inner(self, x, xi, eta, key):
        return self.layouts[0].flatten(x)

    def outer(self, y, xi, key):
        return self.problem.loss(self.layouts[0].unflatten(y), xi, key)


@struct
class LocalCompositionAsConditional(Adapter, Conditional):
    """Shows P3-local as P4: there is one outer sample, and inner samples are drawn independently of it."""

    problem: Compositional

    def check(self, task):
        _need_scope(self.problem, "local")
        super().check(task)

    def sample_outer(self, data, key, count):
        return data.draw_each(key, count)

    def sample_inner(self, data, xi, key, count):
        return data.draw_each(key, count)

    def inner(self, x, xi, eta, key):
        return self.problem.inner(x, eta, key)

    def outer(self, y, xi, key):
        return self.problem.outer(y, xi, key)

    def composite(self, x, xi, etas, key):
        return super().composite(x, xi, etas, key) + self.problem.extra(x, xi, key)


@struct
class CompositionAsBilevel(Adapter, Bilevel):
    """Shows P3-global as P2-global: the averaged inner value solves the lower problem min_y 1/2 ||y - inner(x)||^2."""

    problem: Compositional
    scope: str = setting("one lower problem for all", default="global", choices=("global",), static=True)
    forwards: ClassVar[dict[str, str]] = {"project_x": "project_x", "project_y": "project_y"}

    def check(self, task):
        _need_scope(self.problem, "global")
        x, key = self.tree(0, task.params[0]), jax.random.key(0)
        inner = jax.eval_shape(lambda: self.problem.inner(x, task.sample(task.data.client(0), key), key))
        if self.layouts[1].shapes != (inner.shape,):
            raise UserError(
                f"{type(self.problem).__name__}.inner returns shape {inner.shape}, but the starting point of y has the "
                f"shapes {self.layouts[1].shapes}; give y the shape of the inner value."
            )
        super().check(task)

    def upper(self, x, y, batch, key):
        return self.problem.extra(x, batch, key) + self.problem.outer(y, batch, key)

    def lower(self, x, y, batch, key):
        return 0.5 * jnp.sum((y - self.problem.inner(x, batch, key)) ** 2)

    def project_y(self, y):
        return self.problem.project_y(y)


@struct
class MinimaxAsBilevel(Adapter, Bilevel):
    """Shows P6 with a strongly concave inner maximum as P2-global: the lower objective is minus the value."""

    problem: Minimax
    scope: str = setting("one lower problem for all", default="global", choices=("global",), static=True)
    forwards: ClassVar[dict[str, str]] = {"project_x": "project_x", "project_y": "project_alpha"}

    def upper(self, x, y, batch, key):
        return self.problem.value(x, y, batch, key)

    def lower(self, x, y, batch, key):
        return -self.problem.value(x, y, batch, key)

    def project_y(self, y):
        return self.problem.project_alpha(y)


@struct
class NaiveComposition(Adapter, SingleLevel):
    """Makes the usual mistake, which is no inclusion: a client composes the outer function with its *own* inner one.

    This is what plain averaging of losses does to a composition, kept as the negative control of the demonstrations.
    """

    problem: Compositional

    def loss(self, x, batch, key):
        return self.problem.extra(x, batch, key) + self.problem.outer(self.problem.inner(x, batch, key), batch, key)


def _need_scope(problem: Compositional, scope: str) -> None:
    if problem.scope != scope:
        raise UserError(
            f"{type(problem).__name__} has scope {problem.scope!r}; this adapter is for scope {scope!r}, whose "
            "solution is another one. Give the problem that scope, or use another algorithm."
        )
