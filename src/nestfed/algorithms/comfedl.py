"""ComFedL: every client composes its own functions, on a large batch; x is averaged.

Problem   min_x mean_k [h_k(x) + f_k(g_k(x))].

Step at client k, with a large batch B and another one C:
    x_k  <- x_k - lr (grad h_k(x_k; C) + J g_k(x_k; B)^T grad f_k(g_k(x_k; B); C))
    x_k  <- mean_k x_k                                              last step of the round: d numbers

Why    No estimate is kept: a batch that is large enough makes the bias of f(batch mean) small. It is FedAvg on a
       composition, and drifts as FedAvg does. It does not solve problems in which the clients share one inner function.
Ref.   Huang, Li and Huang, "Compositional federated learning: applications in distributionally robust averaging and
       meta learning", preprint, 2021, arXiv:2106.11264.
Departures
  * Both batches have the task's batch size: make it large, because the bias is of the order of its inverse.
  * An ordinary average loss h is allowed beside the composition.
"""

from typing import NamedTuple

from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class ComFedL(Algorithm):
    """Takes local steps on large batches, every client along its own composition, and averages x."""

    lr: float = setting("eta: step size", above=0)

    family = "compositional"
    scope = "local"

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        y, pull = problem.inner_vjp(s.x, draw(0))
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * problem.composed_gradient(s.x, pull, y, draw(1)))
        return self.State(problem.feasible_x(fed.mean(x, around=fed.server.x)) if fed.sync else x)
