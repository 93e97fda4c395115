"""FedAvg on a composition, cases I and II: negative controls that show what plain averaging does, and must fail.

Problem   min_x h(x) + f(g(x)),   h = mean_k h_k,  g = mean_k g_k.

Step at client k, with y_k = g_k(x_k) on the step's batch:
    x_k  <- x_k - lr (grad h_k(x_k) + J g_k(x_k)^T grad f(y_k))
    x_k  <- mean_k x_k                                              last step of the round: d numbers
Case II, first step of a round:  y_k <- mean_k g_k(x)               m numbers, an exchange of its own

Why    Case I solves min_x mean_k f(g_k(x)), which is another problem. Case II starts every round with the right inner
       value and loses it in the second step; with one local step it is exact gradient descent. On inner functions
       4x - 4 and -2x + 4, whose mean is x, with f(y) = sqrt(y^2 + 4) the solution is 0, and both cases settle above 1
       (`nestfed.problems.toys.counterexample`).
Ref.   "Federated compositional optimization: the impact of two-sided learning rates on communication efficiency",
       an anonymous, undated submission (openreview.net/forum?id=Ob0UafH2YI), Algorithm 1 and Theorem D.1. No DOI or
       arXiv number is known to us for certain; `feddro` names a related paper with its authors.
Departures
  * Case I's listing keeps y_k of the old point after an average; the proof refreshes it, and so do we.
  * With few clients case II knows only the cohort's mean: with one local step it is then MBSGD and has its limit.
  * The paper's method is deterministic and has no h. Here h and mini-batches are allowed; one batch per step serves
    both g and J g.
"""

from typing import NamedTuple

from nestfed.algorithms.clipping import MayClip
from nestfed.core.algorithm import Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class FedAvgCO1(MayClip):
    """Lets every client compose with its own inner function; a negative control, which must fail."""

    lr: float = setting("eta: step size", above=0)

    family = "compositional"
    scope = "global"

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        y, pull = problem.inner_vjp(s.x, draw(0))
        return self.descend(problem, s, pull, y, draw(0), fed)

    def descend(self, problem, s, pull, y, batch, fed):
        gradient = self.shorten(problem.composed_gradient(s.x, pull, y, batch), fed)
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * gradient)
        return self.State(problem.feasible_x(fed.mean(x, around=fed.server.x)) if fed.sync else x)


@struct
class FedAvgCO2(FedAvgCO1):
    """Averages inner values only once a round, at its start; a negative control, which must fail."""

    few_clients = (
        "an inner value knows only the cohort's clients: what is minimised is the mean over cohorts of f of their "
        "mean, not f of the mean of all. FedDRO keeps an estimate of that."
    )

    def schedule(self):
        if self.local_steps == 1:
            return ((self.first_step, 1, True),)
        return ((self.first_step, 1, False), (self.step, self.local_steps - 2, False), (self.step, 1, True))

    def first_step(self, problem, s, draw, fed):
        y, pull = problem.inner_vjp(s.x, draw(0))
        return self.descend(problem, s, pull, fed.mean(y), draw(0), fed)
