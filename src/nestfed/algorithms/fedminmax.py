"""FedMinMax: the largest risk of any demographic group is made as small as possible.

Problem   min_x max_mu sum_a mu_a r_a(x), mu on the simplex; r_a is the mean loss of group a's rows, whoever holds them.
rho_a is group a's share of all rows, and alpha = mu / rho the weight of a row of group a: in the notation of `Minimax`,
value_k(x, alpha) = sum_a alpha_a q_{a,k}(x), where q_{a,k} = (n_{a,k} / n_k) r_{a,k} counts absent groups as zero.

Start     rho = mu = mean_k (n_{a,k} / n_k)                                                         A numbers
Step at client k (a round is one step), all of it at the x received and on one batch:
    x_k   <- x - lr grad_x value_k(x, alpha)
    x, q  <- mean_k x_k, mean_k q_k(x)                                                              d + A numbers
Server    mu <- the nearest point of the simplex to mu + weight_lr r,  r_a = q_a / rho_a

Why    With weights n_k / n the mean of q_k is rho_a r_a, so gradients and risks are those of the pooled groups: how the
       groups are spread over clients does not matter. Both are unbiased on mini-batches, and where a group is absent
       from a batch or a client.
Ref.   Papadaki, Martinez, Bertran, Sapiro and Rodrigues, "Minimax demographic group fairness in federated learning",
       FAccT 2022, arXiv:2201.08304. It returns the average of x over the rounds: `simulate(..., output="average")`.
Departures
  * rho is the weighted mean of the clients' shares. Make the task with weights="samples" for the shares of all rows;
    with uniform weights a row of a small client counts for more, in rho and in the risks alike.
  * Mini-batches are allowed; the shares come from `group_shares`, the number of groups from the start of alpha.
  * Groups without a row (rho_a = 0) keep the weight zero. `floor` optionally keeps mu_a away from zero.
"""

from typing import NamedTuple

import jax.numpy as jnp
from optax.projections import projection_simplex

from nestfed.core.algorithm import Algorithm, Server, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array, ArrayLike


@struct
class FedMinMax(Algorithm):
    """Lowers the largest risk of any group by steps on reweighed rows and projected ascent on the group weights."""

    lr: float = setting("eta_theta: step size of x", above=0)
    weight_lr: float = setting("eta_mu: step size of the group weights", default=0.1, at_least=0)
    floor: float = setting("smallest group weight; from 1 / A on all are equal", default=0.0, at_least=0)
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "minimax"

    class State(NamedTuple):
        x: Shared
        alpha: Shared  # mu / rho: the weight of a row, by group
        mu: Server  # the weight of a group, on the simplex
        rho: Server  # the share of a group among all rows

    def init(self, problem, params, draw, fed):
        x, alpha = params
        shares = problem.group_shares(*draw(0))
        if shares.shape != alpha.shape:
            raise UserError(
                f"{type(problem).__name__} has {shares.size} groups, but the starting point of alpha has {alpha.size} "
                "numbers; give alpha one number per group."
            )
        rho = fed.mean(shares.astype(alpha.dtype))
        return self.State(x=x, alpha=divide(rho, rho), mu=rho, rho=rho)

    def step(self, problem, s, draw, fed):
        gradient, _ = problem.gradients(s.x, s.alpha, draw(0))
        risks, counts = problem.risks(s.x, draw(0))
        q = (jnp.where(counts > 0, risks * counts, 0) / counts.sum()).astype(s.mu.dtype)
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * gradient)
        x, q = fed.mean((x, q), around=(s.x, None))
        mu = find_nearest_weights(s.mu + at(self.weight_lr, fed.t) * divide(q, s.rho), s.rho > 0, self.floor)
        return s._replace(x=problem.feasible_x(x), alpha=divide(mu, s.rho), mu=mu)


def divide(numerator: Array, rho: Array) -> Array:
    """Return numerator / rho, and zero for groups without a row."""
    return jnp.where(rho > 0, numerator / jnp.where(rho > 0, rho, 1), 0)


def find_nearest_weights(point: Array, known: Array, floor: ArrayLike) -> Array:
    """Return the nearest point of the simplex whose known entries are at least `floor` and whose others are zero."""
    number = known.sum().astype(point.dtype)
    floor = jnp.minimum(floor, 0.999 / number).astype(point.dtype)  # so that the projection has something to divide
    excess = point - floor
    # The projection gives nothing to an entry that lies 1 or more below the largest.
    outside = jnp.max(jnp.where(known, excess, -jnp.inf)) - 2
    shares = projection_simplex(jnp.where(known, excess, outside), 1 - floor * number)
    return jnp.where(known, floor, 0) + shares.astype(point.dtype)
