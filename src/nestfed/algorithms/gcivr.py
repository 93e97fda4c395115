"""GCIVR: recursive estimates of the inner value, its Jacobian and the ordinary gradient, renewed every epoch.

Problem   min_x h(x) + f(g(x)),   h = mean_k h_k,  g = mean_k g_k,  f the same for all.

Round (an epoch); every step has one exchange of d + m (d + 1) numbers (2 more for Scaled values):
  first step   Y, Z, W = means over clients and `refresh_batches` batches of  g_k(x), J g_k(x), grad h_k(x)
  other steps  Y  <- Y + mean_k [g_k(x) - g_k(x')],  and likewise Z and W;  one batch at both points, x' the last x
  all steps    Y into the domain of f;   x' = x;   x <- x - lr (W + Z^T grad f(Y))

Why    Two evaluations of one batch have nearly the same noise, so their difference has hardly any: the estimates stay
       as good as the large batch made them, at the price of small batches. All clients hold the same numbers, so
       nothing drifts. In return there is a Jacobian in every exchange.
Ref.   Zhang and Xiao, "A stochastic composite gradient method with incremental variance reduction", NeurIPS 2019,
       arXiv:1906.10186. The released code never renews the estimates; its Z is the change of the Jacobian since the
       start.
Departures
  * The paper is centralised, with large batches of n rows and small ones of sqrt(n), and returns a random iterate:
    `simulate(..., output="random")`. Here the large batch is refresh_batches times the small one.
  * With few clients a renewed estimate knows only the cohort's clients: the limit is where the mean over cohorts S of
    Z_S^T grad f(Y_S) is zero, which is another point than the solution.
  * The recursion can leave the domain of f; it is projected then, and that is noted. For the mean of exponentials
    with small batches that happens often, and the bound of `bound_slope` does not apply to a sum of Jacobians. Take
    many batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Sample, Scratch, Shared
from nestfed.core.jax_internals import depends_on
from nestfed.core.scaled import is_scaled
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems import Compositional


@struct
class GCIVR(Algorithm):
    """Keeps recursive estimates of inner value, Jacobian and gradient, which are exchanged in every step."""

    lr: float = setting("eta: step size", above=0)
    refresh_batches: int = setting("batches of the epoch's first step", default=10, at_least=1, static=True)
    local_steps: int = setting("steps of an epoch; every one exchanges", default=10, at_least=1, static=True)

    family = "compositional"
    few_clients = (
        "an inner value knows only the cohort's clients: what is minimised is the mean over cohorts of f of their "
        "mean, not f of the mean of all. FedDRO keeps an estimate of that."
    )
    scope = "global"

    class State(NamedTuple):
        x: Shared
        x_prev: Scratch  # x': the point to which the estimates belong
        y: Scratch  # Y: estimate of g(x')
        jacobian: Scratch  # Z: estimate of its Jacobian [m, d]
        w: Scratch  # W: of grad h(x')

    def init(self, problem, params, draw, fed):
        (x,) = params
        first = draw(0)
        if depends_on(lambda sample: problem.grad_outer(problem.inner_value(x, first), sample), first):
            raise UserError(
                f"GCIVR needs an outer function that is the same for all clients, and {type(problem).__name__}.outer "
                "uses the batch or the key. Choose FedDRO, DS-FedDRO or MBSGD."
            )
        return self.State(x, None, None, None, None)

    def schedule(self):
        if self.local_steps == 1:
            return ((self.refresh, 1, True),)
        return ((self.refresh, 1, False), (self.step, self.local_steps - 2, False), (self.step, 1, True))

    def refresh(self, problem, s, draw, fed):
        add = lambda j, total: add_trees(total, estimate(problem, s.x, draw(j)))
        total = lax.fori_loop(1, self.refresh_batches, add, estimate(problem, s.x, draw(0)))
        return self.descend(problem, s, fed.mean(apply_to_each(lambda a: a / self.refresh_batches, total)), draw, fed)

    def step(self, problem, s, draw, fed):
        now, before = (estimate(problem, x, draw(0)) for x in (s.x, s.x_prev))
        change = fed.mean(apply_to_each(lambda a, b: a - b, now, before))
        return self.descend(problem, s, add_trees((s.y, s.jacobian, s.w), change), draw, fed)

    def descend(self, problem, s, estimate, draw, fed):
        y, jacobian, w = estimate
        y, outside = problem.into_domain(y, draw(0))
        direction = pull_back(jacobian, problem.grad_outer(y, draw(0)))
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * (direction if w is None else direction + w))
        fed.note("projected_share", outside)
        return self.State(x, s.x, y, jacobian, w)


def estimate(problem: Compositional, x: Array, sample: Sample) -> tuple[Any, Any, Array | None]:
    """Return (inner value, its Jacobian, gradient of `extra` or None) on one batch."""
    return *problem.inner_jacobian(x, sample), problem.grad_extra(x, sample) if problem.has_extra else None


def apply_to_each(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Apply a function to the numbers of trees; Scaled ones know their own arithmetic."""
    return jax.tree.map(function, *trees, is_leaf=is_scaled)


def add_trees(one: PyTree, other: PyTree) -> PyTree:
    return apply_to_each(lambda a, b: a + b, one, other)


def pull_back(jacobian: Any, slope: Any) -> Array:
    """Return Jacobian^T slope; of Scaled numbers only the sum of the exponents is exponentiated."""
    if not is_scaled(slope):
        return jnp.dot(slope, jacobian, precision="highest")
    return jnp.dot(slope.value, jacobian.value, precision="highest") * jnp.exp(slope.shift + jacobian.shift)
