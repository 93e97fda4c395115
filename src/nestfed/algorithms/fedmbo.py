"""FedMBO: bilevel problems with one lower problem, and a linear speed-up under partial participation.

Problem   min_x mean_k f_k(x, y(x)),   y(x) = argmin_y mean_k g_k(x, y).

Round (one outer iteration), N' uniform in 0 .. N - 1:
  lower   lower_rounds times:  y <- y - lower_lr mean_k grad_y g_k(x, y)                    an exchange per step
  chains  every client i owns one: p_i = (N/l) (I - H_{j_N'} / l) ... (I - H_{j_1} / l) df_{j_0}/dy, the clients j_n
          random and fresh at every link, as likely as their weights in means               N + 1 exchanges
  upper   h = mean_i [df_i/dx - (d2g_i/dxdy) p_i];  from x_i = x, local_steps times
              x_i <- x_i - (lr / local_steps) [df_i/dx(x_i, y) - df_i/dx(x, y) + h];   x = mean_i x_i

Why    y does not drift, and there is one chain per client instead of one for all, so the variance falls with the number
       of clients.
Ref.   Huang, Zhang and Ji, "Achieving linear speedup in non-IID federated bilevel learning", ICML 2023,
       arXiv:2302.05412, Algorithm 1.
Departures  The clients of a link are dealt by systematic sampling instead of independently. Each chain still meets a
       client with the probability of its weight at each link, and each client does exactly one product per link; where
       clients weigh the same, what is dealt is a permutation, and where they do not, chains may have links in common.
       As in FedNest, a round has one cohort for all its links: with few clients a chain knows only the cohort's
       clients.
       Links beyond N' pass the vector on, so that the cost is static; after the last exchange every client holds one
       finished chain.
"""

import jax
import jax.numpy as jnp
from jax.random import fold_in, randint, uniform

from nestfed.algorithms.fednest import FedNest
from nestfed.core.algorithm import Cohort, Fed
from nestfed.core.schedules import at
from nestfed.core.settings import struct
from nestfed.core.types import Array


@struct
class FedMBO(FedNest):
    """Takes mini-batch steps on one global lower problem and makes one random chain of products per client."""

    def schedule(self):
        return (
            (self.lower, self.lower_rounds, False),
            (self.start_chains, 1, False),
            (self.link, self.terms, False),
            (self.upper, 1, True),
        )

    def lower(self, problem, s, draw, fed):
        q = fed.mean(problem.grad_lower(s.x, s.y, draw(0)))
        return s._replace(y=problem.feasible_y(s.y - at(self.lower_lr, fed.t) * q))

    def start_chains(self, problem, s, draw, fed):
        fx, fy = problem.grad_upper(s.x, s.y, draw(0))
        p = deal(self.terms * self.neumann_lr * fy, fed)
        return s._replace(fx=fx, p=p, last=randint(fed.shared_key, (), 0, self.terms))

    def link(self, problem, s, draw, fed):
        n = fed.step - self.lower_rounds  # 1, 2, ..., N
        product = s.p - self.neumann_lr * problem.hessian_vector(s.x, s.y, draw(0), s.p)
        return s._replace(p=deal(jnp.where(n <= s.last, product, s.p), fed))


def deal(vector: Array, fed: Fed) -> Array:
    """Hand vectors on among the clients taking part: each gets that of a random one, in proportion to the weights. Who
    gets whose depends on their ids alone."""

    def reply(values: Array, cohort: Cohort, slot: Array, key: Array) -> Array:
        number = cohort.present.sum()
        lots = jax.vmap(lambda i: uniform(fold_in(key, i)))(cohort.ids)
        by_id = jnp.argsort(jnp.where(cohort.present, cohort.ids, jnp.iinfo(cohort.ids.dtype).max))
        by_lot = jnp.argsort(jnp.where(cohort.present, lots, 2.0))
        # The weights lie around a circle in the order of the lots; receivers stand evenly spaced on it, in the order
        # of their ids, from a random point on. The chance to stand at a client is in proportion to its weight.
        ends = jnp.cumsum(cohort.weights[by_lot]) / cohort.weights.sum()
        points = (jnp.arange(by_id.size) / number + uniform(fold_in(key, jnp.uint32(2**32 - 1)))) % 1
        stands_at = jnp.minimum(jnp.searchsorted(ends, points, side="right"), number - 1)
        giver = jnp.zeros_like(by_lot).at[by_id].set(by_lot[stands_at])
        return values[giver[slot]]

    return fed.gather(vector, reply=reply)
