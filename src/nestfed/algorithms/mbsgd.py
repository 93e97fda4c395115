"""MBSGD, mini-batch descent on the plug-in estimate of a composition; and parallel descent that ignores it.

Problem   min_x h(x) + f(g(x)),   h = mean_k h_k,  g = mean_k g_k.

MBSGD, step at client k (a round is one step), with one batch for everything:
    y_k  = g_k(x)
    y    = mean_k y_k                                               m numbers
    x    <- mean_k [x - lr (grad h_k(x) + J g_k(x)^T grad f(y))]    d numbers, an exchange of its own
Unconstrained:
    x    <- mean_k [x - lr grad h_k(x)]                             d numbers

Why    This is the plainest method that is right: no estimate is kept, so nothing can drift, but every step pays two
       exchanges. f of a batch's mean is not the mean of f: the gradient has a bias of order 1 / (rows of all batches),
       which no step size removes. Descent on h alone shows what the composition (a constraint, say) costs and achieves.
Ref.   Baselines of "Federated compositional optimization: the impact of two-sided learning rates on communication
       efficiency", an anonymous, undated submission (openreview.net/forum?id=Ob0UafH2YI). No DOI or arXiv number is
       known to us for certain; `feddro` names a related paper with its authors.
Departures
  * With few clients the inner value knows only the cohort's clients: the limit is where the mean over cohorts S of
    J g_S^T grad f(g_S) is zero, which is another point than the solution.
  * plugin="local" puts a client's own y_k in place of the mean: a step has one exchange and solves another problem,
    min_x mean_k [h_k(x) + f(g_k(x))]; this control shows what the exchange of m numbers is good for.
"""

from typing import NamedTuple

from nestfed.algorithms.clipping import MayClip
from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct


@struct
class MBSGD(MayClip):
    """Averages the clients' inner values and gradients in every step."""

    lr: float = setting("eta: step size", above=0)
    plugin: str = setting(
        "whose inner value enters the gradient: the mean, or the client's own",
        default="global",
        choices=("global", "local"),
        static=True,
    )
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "compositional"
    few_clients = (
        "an inner value knows only the cohort's clients: what is minimised is the mean over cohorts of f of their "
        "mean, not f of the mean of all. FedDRO keeps an estimate of that."
    )
    scope = "global"

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        y, pull = problem.inner_vjp(s.x, draw(0))
        if self.plugin == "global":
            y = fed.mean(y)
        gradient = self.shorten(problem.composed_gradient(s.x, pull, y, draw(0)), fed)
        x = s.x - at(self.lr, fed.t) * gradient
        return self.State(problem.feasible_x(fed.mean(x, around=s.x)))


@struct
class Unconstrained(Algorithm):
    """Descends the ordinary average loss (`extra`) and ignores the composition; a baseline."""

    lr: float = setting("eta: step size", above=0)
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "compositional"

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        if not problem.has_extra:
            raise UserError(
                f"Unconstrained descends the function `extra` alone, and {type(problem).__name__} has none; define "
                "extra(x, batch, key), or choose another algorithm."
            )
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        x = s.x - at(self.lr, fed.t) * problem.grad_extra(s.x, draw(0))
        return self.State(problem.feasible_x(fed.mean(x, around=s.x)))
