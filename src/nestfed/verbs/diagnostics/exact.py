"""The exact problem at a point: every client's part of the objective and of its gradient, over all of its rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.random import fold_in

from nestfed.core.algorithm import Fed, Sample
from nestfed.core.rows import ClientRows
from nestfed.core.scaled import is_scaled
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.problems.hypergradients import Dense

TOLERANCE = 1e-13  # of a lower gradient's norm, where the rounding allows it
NEWTON_EXCHANGES = 10  # an exchange cannot sit in a loop: one global lower problem gets a fixed number of trial points
MATRICES_AT_ONCE = 16  # rows whose second derivatives are held in memory together
EXACT = Dense()


def square_norm(v: Array) -> Array:
    return jnp.vdot(v, v)


class Part(NamedTuple):
    """A client's part of the exact problem at x: means over the clients are the objective and its gradient."""

    value: Array
    gradient: Array
    lower: Any = None  # bilevel: the lower problem solved, a Lower
    inner: Any = None  # compositional: the inner values, an Inner


class Lower(NamedTuple):
    """A solved lower problem: the client's own, or the common one."""

    y: Array  # y(x)
    z: Array  # (d2g/dy2)^-1 df_k/dy
    residual: Array  # norm of dg/dy: says whether Newton's method got there


class Inner(NamedTuple):
    """Exact inner values at x, plain or Scaled."""

    own: Any  # g_k(x)
    y: Any  # what the outer function gets: the mean of all, or the client's own


def _compute_single_level_part(problem: Any, x: Array, server: Any, client: Any, data: ClientRows, fed: Fed) -> Part:
    value_and_gradient = lambda sample: (problem.value(x, sample), problem.gradient(x, sample))
    return Part(*data.average(lambda batch: value_and_gradient(Sample(batch, fed.key))))


def compute_bilevel_part(
    problem: Any, x: Array, server: Any, client: Any, data: ClientRows, fed: Fed, estimator: Any = EXACT
) -> Part:
    common = fed.mean if problem.scope == "global" else lambda tree: tree
    look = lambda search: search.after(*common(_compute_lower_derivatives(problem, x, search.trial, data, fed.key)))
    search = _Search.start(find_lower_variable(server, client))
    if problem.scope == "global":
        for _ in range(NEWTON_EXCHANGES):
            search = look(search)
    else:
        search = lax.while_loop(_Search.is_unfinished, look, search)
    y = search.y

    value, gradients, mixed = _compute_upper_derivatives(problem, x, y, data, fed.key)
    solved = _Solved(gradients, search.hessian, common(mixed))
    (gradient,) = estimator(solved, [(x, y)], lambda j: Sample(None, fold_in(fed.shared_key, j)))
    z = solved.hessian_solve(x, y, None, gradients[1])
    return Part(value, gradient, Lower(y, z, search.size))


# Under jit only to be traced once: the engine traces a program anew for each of its exchanges.


@jax.jit
def _compute_lower_derivatives(problem: Any, x: Array, y: Array, data: ClientRows, key: Array) -> tuple[Array, Array]:
    """(dg/dy, d2g/dy2) over all rows."""
    hessian = jax.hessian(problem.lower_flat, 1)
    both = lambda sample: (problem.grad_lower(x, y, sample), hessian(x, y, sample))
    return data.average(lambda batch: both(Sample(batch, key)), rows_at_once=MATRICES_AT_ONCE)


@jax.jit
def _compute_upper_derivatives(
    problem: Any, x: Array, y: Array, data: ClientRows, key: Array
) -> tuple[Array, tuple[Array, Array], Array]:
    """(f, (df/dx, df/dy), d2g/dxdy) over all rows."""
    mixed = jax.jacfwd(jax.grad(problem.lower_flat, 0), 1)
    all_of_it = lambda s: (problem.upper_flat(x, y, s), problem.grad_upper(x, y, s), mixed(x, y, s))
    return data.average(lambda batch: all_of_it(Sample(batch, key)), rows_at_once=MATRICES_AT_ONCE)


def _compute_compositional_part(problem: Any, x: Array, server: Any, client: Any, data: ClientRows, fed: Fed) -> Part:
    common = fed.mean if problem.scope == "global" else lambda tree: tree
    own = compute_inner_values(problem, x, data, fed.key)
    y = common(own)
    slope = common(_compute_outer_slope(problem, y, data, fed.key))
    value, gradient = _compose(problem, x, y, slope, data, fed.key)
    return Part(value, gradient, inner=Inner(own, y))


@jax.jit
def compute_inner_values(problem: Any, x: Array, data: ClientRows, key: Array) -> Any:
    """g_k(x) over all rows, plain or Scaled."""
    return data.average(lambda batch: problem.inner_flat(x, Sample(batch, key)))


@jax.jit
def _compute_outer_slope(problem: Any, y: Any, data: ClientRows, key: Array) -> Any:
    return data.average(lambda batch: problem.grad_outer(y, Sample(batch, key)))


@jax.jit
def _compose(problem: Any, x: Array, y: Any, slope: Any, data: ClientRows, key: Array) -> tuple[Array, Array]:
    """(h + f(y), grad h + J g^T slope) over all rows."""
    extra = lambda x, batch: problem.extra(problem.tree(0, x), batch, key)

    def linear(x: Array, batch: PyTree) -> Array:
        # Not through the problem's pull-back, which may bound weights: an exact gradient is that of the objective.
        return extra(x, batch) + _multiply(slope, problem.inner_flat(x, Sample(batch, key)))

    value = lambda batch: extra(x, batch) + problem.outer_flat(y, Sample(batch, key))
    return data.average(lambda batch: (value(batch), jax.grad(linear)(x, batch)))


def _multiply(slope: Any, y: Any) -> Array:
    """slope^T y; of Scaled ones only the sum of the exponents is exponentiated."""
    if not is_scaled(y):
        return jnp.vdot(slope, y)
    return jnp.vdot(slope.value * jnp.exp(slope.shift + lax.stop_gradient(y.shift)), y.value)


# To add a family: a function that gives a client's Part at x, exchanging as it needs. Everything else follows.
PARTS: dict[str, Callable[..., Part]] = {
    "single level": _compute_single_level_part,
    "bilevel": compute_bilevel_part,
    "compositional": _compute_compositional_part,
}


def compute_part(task: Task, x: Array, server: Any, client: Any, data: ClientRows, fed: Fed) -> Part:
    family = task.problem.family
    if family not in PARTS:
        raise UserError(f"there is no exact objective for {family} problems yet; there is for {', '.join(PARTS)}.")
    return PARTS[family](task.problem, x, server, client, data, fed)


def find_lower_variable(server: Any, client: Any) -> Array:
    return server.y if client.y is None else client.y


@dataclasses.dataclass(frozen=True)
class _Solved:
    """Stands in for the problem in a hypergradient estimator: every batch is the whole data, the point is (x, y(x))."""

    gradients: tuple[Array, Array]  # (df/dx, df/dy)
    hessian: Array
    mixed: Array  # d2g/dxdy

    def grad_upper(self, x: Array, y: Array, sample: Any) -> tuple[Array, Array]:
        return self.gradients

    def hessian_vector(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        return self.hessian @ v

    def hessian_solve(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        return jnp.linalg.solve(self.hessian, v)

    def mixed_vector(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        return self.mixed @ v


class _Search(NamedTuple):
    """Newton's method with backtracking on the gradient's norm, told the derivatives at one trial point after another.

    It asks for nothing itself, so that the derivatives may come from a loop or from exchanges, and it keeps the best
    point seen, with its Hessian.
    """

    y: Array
    size: Array  # of the gradient
    hessian: Array
    direction: Array
    step: Array

    @classmethod
    def start(cls, y: Array) -> "_Search":
        one = jnp.ones((), y.dtype)
        return cls(y, one * jnp.inf, jnp.zeros((y.size, y.size), y.dtype), jnp.zeros_like(y), one)

    @property
    def trial(self) -> Array:
        return self.y - self.step * self.direction

    @jax.jit
    def after(self, gradient: Array, hessian: Array) -> "_Search":
        size = jnp.sqrt(square_norm(gradient))
        direction = jnp.linalg.solve(hessian, gradient)
        accepted = _Search(self.trial, size, hessian, direction, jnp.minimum(4 * self.step, 1))
        refused = self._replace(step=self.step / 4)
        return jax.tree.map(lambda a, b: jnp.where(size < self.size, a, b), accepted, refused)

    def is_unfinished(self) -> Array:
        return (self.size > TOLERANCE) & (self.step > 1e-6)  # a step this short: rounding, or no minimum
