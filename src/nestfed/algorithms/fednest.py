"""FedNest, LFedNest and FedNest-SGD: bilevel problems with one lower problem over all clients.

Problem   min_x mean_k f_k(x, y(x)),   y(x) = argmin_y mean_k g_k(x, y).

Round (one outer iteration):
  FedInn    lower_rounds times:  q = mean_k grad_y g_k(x, y);  from y_k = y, inner_steps times
                y_k <- y_k - (lower_lr / inner_steps) [grad_y g_k(x, y_k) - grad_y g_k(x, y) + q];   y = mean_k y_k
  FedIHGP   p = (1/l) sum_{i=0}^{N} (mean_k(I - H_k / l))^i mean_k df_k/dy                  N + 1 exchanges
  FedOut    h = mean_k [df_k/dx - (d2g_k/dxdy) p];  from x_k = x, local_steps times
                x_k <- x_k - (lr / local_steps) [df_k/dx(x_k, y) - df_k/dx(x, y) + h];   x = mean_k x_k

Why    The inverse of an averaged Hessian is not the average of inverses: the products must be averaged one by one.
       LFedNest does all products locally (T_in + 1 exchanges) and is biased when clients differ; FedNest-SGD drops the
       anchor corrections. A step 1/l above 1/L diverges.
Ref.   Tarzanagh, Li, Thrampoulidis and Oymak, "FedNest: federated bilevel, minimax and compositional optimization",
       ICML 2022, arXiv:2205.02215, Algorithms 1-4.
Departures  `truncation` is "sum" (the series of the released code, the default) or "random" (the paper's single random
       term, in which N' <= N - 1 factors apply). All clients of the round's cohort serve every exchange of the
       round, where the paper draws some afresh for every exchange: with few clients the series knows only the cohort's
       clients, and the limit is where the mean over cohorts of their own hypergradients is zero.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.random import randint

from nestfed.core.algorithm import Algorithm, Phase, Scratch, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct
from nestfed.problems.hypergradients import Neumann, RandomTruncation


@struct
class FedNest(Algorithm):
    """Averages every factor of the inverse-Hessian product of one global lower problem."""

    lr: float = setting("alpha: step size of x", above=0)
    lower_lr: float = setting("beta: step size of y", above=0)
    neumann_lr: float = setting("1 / l: step of the series, at most 1 / L", default=0.1, above=0)
    terms: int = setting("N: Hessian-vector products", default=5, at_least=1, static=True)
    lower_rounds: int = setting("T_in: repetitions of FedInn", default=1, at_least=1, static=True)
    inner_steps: int = setting("tau of FedInn: local steps of y", default=1, at_least=1, static=True)
    truncation: str = setting(
        "sum of the series, or one random term", default="sum", choices=("sum", "random"), static=True
    )

    family = "bilevel"
    few_clients = (
        "the series knows only the cohort's clients: the mean over cohorts of their hypergradients is not the "
        "hypergradient of all, where clients differ. SimFBO, which keeps z from round to round, has no such bias."
    )
    scope = "global"

    class State(NamedTuple):
        x: Shared
        y: Shared
        fx: Scratch  # this client's df/dx, from the pass that gave df/dy
        r: Scratch  # the current term of the series
        p: Scratch  # the series so far, which estimates H^-1 df/dy
        last: Scratch  # N': the random number of factors

    def schedule(self) -> tuple[Phase, ...]:
        factors = self.terms if self.truncation == "sum" else self.terms - 1
        return (
            (self.lower, self.lower_rounds, False),
            (self.start_series, 1, False),
            (self.factor, factors, False),
            (self.upper, 1, True),
        )

    def init(self, problem, params, draw, fed):
        return self.State(*params, fx=None, r=None, p=None, last=None)

    # FedInn ------------------------------------------------------------------------------------

    def lower(self, problem, s, draw, fed):
        q = fed.mean(problem.grad_lower(s.x, s.y, draw(0)))
        anchored = lambda y_k, sample: problem.grad_lower(s.x, y_k, sample) - problem.grad_lower(s.x, s.y, sample) + q
        return s._replace(y=self.local_lower(problem, s.y, anchored, draw, fed))

    def local_lower(self, problem, y, direction, draw, fed):
        def local(i, y_k):
            return problem.feasible_y(y_k - at(self.lower_lr, fed.t) / self.inner_steps * direction(y_k, draw(1 + i)))

        return problem.feasible_y(fed.mean(lax.fori_loop(0, self.inner_steps, local, y), around=y))

    # FedIHGP -----------------------------------------------------------------------------------

    def start_series(self, problem, s, draw, fed):
        fx, fy = problem.grad_upper(s.x, s.y, draw(0))
        fy = fed.mean(fy)
        scale = self.neumann_lr * (1 if self.truncation == "sum" else self.terms)
        return s._replace(fx=fx, r=scale * fy, p=scale * fy, last=randint(fed.shared_key, (), 0, self.terms))

    def factor(self, problem, s, draw, fed):
        r = fed.mean(s.r - self.neumann_lr * problem.hessian_vector(s.x, s.y, draw(0), s.r), around=s.r)
        if self.truncation == "sum":
            return s._replace(r=r, p=s.p + r)
        n = fed.step - self.lower_rounds  # 1, 2, ..., N - 1
        return s._replace(r=r, p=jnp.where(n <= s.last, r, s.p))

    # FedOut ------------------------------------------------------------------------------------

    def upper(self, problem, s, draw, fed):
        h = fed.mean(s.fx - problem.mixed_vector(s.x, s.y, draw(0), s.p))
        anchored = lambda x_k, sample: (
            problem.grad_upper(x_k, s.y, sample)[0] - problem.grad_upper(s.x, s.y, sample)[0] + h
        )
        return s._replace(x=self.local_upper(problem, s.x, anchored, draw, fed))

    def local_upper(self, problem, x, direction, draw, fed):
        def local(i, x_k):
            return problem.feasible_x(x_k - at(self.lr, fed.t) / self.local_steps * direction(x_k, draw(1 + i)))

        return problem.feasible_x(fed.mean(lax.fori_loop(0, self.local_steps, local, x), around=x))


@struct
class FedNestSGD(FedNest):
    """Runs FedNest without the anchor corrections: local steps are plain on both levels, the series stays averaged."""

    def lower(self, problem, s, draw, fed):
        plain = lambda y_k, sample: problem.grad_lower(s.x, y_k, sample)
        return s._replace(y=self.local_lower(problem, s.y, plain, draw, fed))

    def upper(self, problem, s, draw, fed):
        plain = lambda x_k, sample: (
            problem.grad_upper(x_k, s.y, sample)[0] - problem.mixed_vector(x_k, s.y, sample, s.p)
        )
        return s._replace(x=self.local_upper(problem, s.x, plain, draw, fed))


@struct
class LFedNest(FedNestSGD):
    """Runs FedNest with all products local: there is one exchange per level, and a bias when clients differ."""

    few_clients = None

    def schedule(self) -> tuple[Phase, ...]:
        return ((self.lower, self.lower_rounds, False), (self.upper, 1, True))

    def upper(self, problem, s, draw, fed):
        series = Neumann(terms=self.terms, lr=self.neumann_lr)
        if self.truncation == "random":
            series = RandomTruncation(terms=self.terms, lr=self.neumann_lr)
        first = self.local_steps  # batches 1 .. local_steps are those of the local steps
        (h,) = series(problem, [(s.x, s.y)], lambda j: draw(first + j))
        anchored = lambda x_k, sample: (
            problem.grad_upper(x_k, s.y, sample)[0] - problem.grad_upper(s.x, s.y, sample)[0] + h
        )
        return s._replace(x=self.local_upper(problem, s.x, anchored, draw, fed))
