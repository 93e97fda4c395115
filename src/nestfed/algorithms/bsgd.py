"""BSGD and BSpiderBoost: conditional stochastic optimisation as if all data lay on one machine.

Problem   min_x mean_k E_xi f_k( E_{eta | xi} g_k(x; xi, eta); xi );   G_k is the plug-in gradient of a batch (`fcsg`).

BSGD, every step:           x  <- x - lr mean_k G_k(x)                                   d numbers
BSpiderBoost, a round of local_steps steps, each with an exchange of d numbers:
    first step              v  <- mean_k G_k(x) on `refresh_batches` batches
    other steps             v  <- v + mean_k (G_k(x) - G_k(x')), one batch at both points, x' the point before
    every step              x  <- x - lr v

Why    The federated methods are compared with these two: here no client drifts, but every step needs an exchange.
Ref.   Hu, Zhang, Chen and He, "Biased stochastic first-order methods for conditional stochastic optimization and
       applications in meta learning", NeurIPS 2020, arXiv:2002.10790, Algorithms 1 and 2.
Departures  In a federation the batch of a step is that of all clients together. With one client it is the paper's.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class BSGD(Algorithm):
    """Descends the plug-in gradient of everybody's batch in every step, as one machine with all data would."""

    lr: float = setting("alpha: step size", above=0)
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "conditional"

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        return self.State(problem.feasible_x(s.x - at(self.lr, fed.t) * fed.mean(problem.gradient(s.x, draw(0)))))


@struct
class BSpiderBoost(Algorithm):
    """Keeps a gradient up to date by differences and refreshes it once a round, as one machine with all data would."""

    lr: float = setting("alpha: step size", above=0)
    refresh_batches: int = setting("B / b: batches of a refresh", default=10, at_least=1, static=True)
    local_steps: int = setting("q: steps from refresh to refresh", default=10, at_least=1, static=True)

    family = "conditional"

    class State(NamedTuple):
        x: Shared
        x_prev: Shared
        v: Shared  # estimate of the gradient

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, x, jnp.zeros_like(x))

    def schedule(self):
        if self.local_steps == 1:
            return ((self.refresh, 1, True),)
        return ((self.refresh, 1, False), (self.step, self.local_steps - 2, False), (self.step, 1, True))

    def refresh(self, problem, s, draw, fed):
        add = lambda j, total: total + problem.gradient(s.x, draw(j))
        total = lax.fori_loop(0, self.refresh_batches, add, jnp.zeros_like(s.x))
        return self.descend(problem, s, fed.mean(total / self.refresh_batches), fed)

    def step(self, problem, s, draw, fed):
        change = problem.gradient(s.x, draw(0)) - problem.gradient(s.x_prev, draw(0))
        return self.descend(problem, s, s.v + fed.mean(change), fed)

    def descend(self, problem, s, v, fed):
        return self.State(problem.feasible_x(s.x - at(self.lr, fed.t) * v), s.x, v)
