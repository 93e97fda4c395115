"""SCAFFOLD: local steps corrected by control variates.

Problem   min_x mean_k loss_k(x).

Step t at client k, with batch xi:
    x_k  <- x_k - lr (grad loss_k(x_k; xi) - c_k + c)
Last step of the round, I local steps, from the broadcast x:
    c_k+  = c_k - c + (x - x_k) / (I lr)                          option II
    x    <- x + server_lr mean_k(x_k - x)
    c    <- c + mean_k share_k (c_k+ - c_k),   c_k <- c_k+        one exchange of 2 d numbers

Why    c_k - c estimates how far client k's gradient is from the average: without noise the fixed point is the
       minimiser, for any number of local steps. share_k, the weight of client k in the problem / its weight in this
       round's means, makes c the weighted mean of all c_k at any time, whoever takes part: with equal weights it is
       clients taking part / all clients, as printed.
Ref.   Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: stochastic controlled averaging for federated
       learning", ICML 2020, arXiv:1910.06378, Algorithm 1.
Departures  Only option II is here. Clients may have weights. I counts local steps (mini-batches), not epochs. lr must
       be constant within a round.
"""

from typing import NamedTuple

import jax.numpy as jnp

from nestfed.core.algorithm import Algorithm, Local, Shared
from nestfed.core.settings import setting, struct


@struct
class Scaffold(Algorithm):
    """Corrects local steps by control variates, so that they do not drift."""

    lr: float = setting("eta: local step size", above=0)
    server_lr: float = setting("eta_g: server step size", default=1.0, above=0)

    family = "single level"

    class State(NamedTuple):
        x: Shared
        c: Shared  # server control variate
        c_k: Local  # client control variate

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, jnp.zeros_like(x), jnp.zeros_like(x))

    def step(self, problem, s, draw, fed):
        x, c, c_k = s
        x = problem.feasible_x(x - self.lr * (problem.gradient(x, draw(0)) - c_k + c))
        if fed.sync:
            c_k = s.c_k - c + (fed.server.x - x) / (self.local_steps * self.lr)
            dx, dc = fed.mean((x - fed.server.x, fed.share.astype(c.dtype) * (c_k - s.c_k)))
            x = problem.feasible_x(fed.server.x + self.server_lr * dx)
            c = c + dc
        return self.State(x, c, c_k)
