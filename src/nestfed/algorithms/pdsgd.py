"""PDSGD: many constraints, of which every step looks at two.

Problem   min_x F(x)  s.t.  f_j(x) <= 0, j = 1 .. J,   F = mean_k F_k,  f_j = mean_k f_{j,k}.

Step at client k (a round is one step); j and j' are random, independent and the same at all clients:
    x_k    = x - lr (grad F_k(x) + max(penalty f_{j,k}(x) + z_j, 0) grad f_{j,k}(x))
    x, u   = mean_k x_k, mean_k f_{j',k}(x)                         d + 1 numbers; u at the old x
    z_j'  <- z_j' + dual_lr max(-z_j' / penalty, u)

Why    A step on the augmented Lagrangian of one constraint costs two gradients, however many constraints there are. The
       maximum keeps multipliers nonnegative, provided that dual_lr <= penalty. Uniform j make z_j / J the multiplier.
Ref.   Xu, "Primal-dual stochastic gradient method for convex programs with many functional constraints", SIAM Journal
       on Optimization 30(2), 2020, arXiv:1802.02724. It returns the average of x over the steps:
       `simulate(..., output="average")`; lr, penalty and dual_lr fall as 1 / sqrt(t) in its theory:
       `PowerDecay(scale=..., power=0.5)`.
Departures
  * The paper is centralised with exact constraints. Here the client's own value of a constraint, on its batch, stands
    within the maximum: exact while every penalty f_{j,k} + z_j is positive and the clients' gradients agree, or as
    penalty goes to zero. The multipliers follow the mean.
  * u comes back to the clients, who keep z up to date themselves, so d + 1 numbers come down in place of d.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.randomness import draw_indices
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class PDSGD(Algorithm):
    """Takes primal-dual steps on one random constraint at a time."""

    lr: float = setting("alpha: step size of x", above=0)
    penalty: float = setting("rho: of the augmented Lagrangian", default=0.1, above=0)
    dual_lr: float = setting("rho_z: step size of the multipliers, at most the penalty", default=0.1, above=0)
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "constrained"

    class State(NamedTuple):
        x: Shared
        z: Shared  # multipliers

    def init(self, problem, params, draw, fed):
        (x,) = params
        number = jax.eval_shape(lambda: problem.constraint_values(x, draw(0))).size
        return self.State(x, jnp.zeros_like(x, shape=(number,)))

    def step(self, problem, s, draw, fed):
        j, other = draw_indices(fed.shared_key, 2, jnp.asarray(s.z.size))
        penalty = at(self.penalty, fed.t)
        _, gradient = problem.grad_objective(s.x, draw(0))
        value, slope = problem.grad_constraint(s.x, j, draw(0))
        pressure = jnp.maximum(penalty * value + s.z[j], 0)
        x = s.x - at(self.lr, fed.t) * (gradient + pressure * slope)
        x, excess = fed.mean((x, problem.constraint_value(s.x, other, draw(0))), around=(s.x, None))
        rise = at(self.dual_lr, fed.t) * jnp.maximum(-s.z[other] / penalty, excess)
        return self.State(problem.feasible_x(x), s.z.at[other].add(rise))
