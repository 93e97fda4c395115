"""SOAP, in a federation: average precision with a running estimate of the inner value of every positive.

Problem   min_x mean_k mean_i f(g_{k,i}(x)), with an inner value (2 numbers in `AveragePrecision`) for each positive i
of client k.

Step at client k, on one batch, for the positives i in it:
    u_{k,i}  <- (1 - beta) u_{k,i} + beta y_i(x_k)                  y_i: the inner value on the batch
    x_k      <- x_k - lr mean_i J y_i(x_k)^T grad f(u_{k,i})
Last step of the round:
    x        <- mean_k x_k                                          d numbers

Why    f of a mean over few rows is not the mean of f, so methods without memory have a bias of order 1 / m. Averages
       over time have it only while x moves, so small steps lead to the solution, whatever the size of the batch. The
       price is a state per positive: 2 numbers for every row of the largest client, at every client, and none of it is
       of use to anybody else. A positive that is seldom drawn has an old estimate.
Ref.   Qi, Luo, Xu, Ji and Yang, "Stochastic optimization of areas under precision-recall curves with provable
       convergence", NeurIPS 2021, arXiv:2104.08736. The step of x is that of SGD.
Departures
  * The paper has one machine. Here clients do local steps and x is averaged; estimates stay where their rows are.
  * A positive's first estimate is its first inner value; an average started at zero would make first steps 1 / beta
    times too large.
  * A positive that is twice in a batch has one estimate, updated once.
"""

from typing import NamedTuple

import jax.numpy as jnp

from nestfed.core.algorithm import Algorithm, Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct


@struct
class SOAP(Algorithm):
    """Takes local steps with a running inner estimate for each outer sample, which it knows by number."""

    lr: float = setting("eta: step size", above=0)
    beta: float = setting("gamma: weight of the new inner value", default=0.1, above=0, at_most=1)

    family = "conditional"

    class State(NamedTuple):
        x: Shared
        u: Local  # [most outer samples, size of an inner value]: the estimates; zero where there is none yet

    def init(self, problem, params, draw, fed):
        (x,) = params
        if not hasattr(problem, "outer_rows"):
            raise UserError(
                f"SOAP remembers an estimate for every outer sample, but {type(problem).__name__} does not say which "
                "one a sample is; use AveragePrecision, or give it outer_rows, inner_vjp and composed_gradient."
            )
        sample = draw(0)
        _, most = problem.outer_rows(sample)
        y, _ = problem.inner_vjp(x, sample)
        return self.State(x, jnp.zeros((most, *y.shape[1:]), y.dtype))

    def step(self, problem, s, draw, fed):
        sample = draw(0)
        y, pull = problem.inner_vjp(s.x, sample)
        places, _ = problem.outer_rows(sample)
        twins = (places[:, None] == places[None, :]).astype(y.dtype)
        y = twins @ y / twins.sum(1, keepdims=True)
        known = s.u[places]
        met = jnp.any(known != 0, axis=1, keepdims=True)
        beta = at(self.beta, fed.t)
        estimates = jnp.where(met, (1 - beta) * known + beta * y, y).astype(y.dtype)
        gradient = problem.composed_gradient(s.x, pull, estimates, sample)
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * gradient)
        if fed.sync:
            x = problem.feasible_x(fed.mean(x, around=fed.server.x))
        return self.State(x, s.u.at[places].set(estimates))
