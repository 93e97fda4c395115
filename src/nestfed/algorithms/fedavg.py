"""FedAvg and FedProx: local gradient steps, then the average of the models.

Problem   min_x mean_k loss_k(x).

Step t at client k, with batch xi, from the broadcast x:
    x_k  <- x_k - lr (grad loss_k(x_k; xi) + mu (x_k - x))        FedAvg: mu = 0
    x    <- mean_k x_k                                            last step of the round: d numbers

Why    One exchange per round. With local_steps > 1 and a constant step the limit is not the minimiser when clients
       differ: on a_k (x - c_k)^2 / 2 it is the mean of c_k with weights 1 - (1 - lr a_k)^local_steps. FedProx pulls
       clients towards the broadcast and lessens the drift; it does not remove it, and mu lr >= 1 overshoots.
Ref.   McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-efficient learning of deep networks from
       decentralized data", AISTATS 2017, arXiv:1602.05629; Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated
       optimization in heterogeneous networks", MLSys 2020, arXiv:1812.06127, Algorithm 2.
Departures  Local work is counted in steps, not in epochs; these steps are FedProx's inexact solve.
"""

from typing import NamedTuple

from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class LocalSteps(Algorithm):
    """Holds what methods with plain local steps and a mean at their end have in common."""

    lr: float = setting("eta: local step size", above=0)

    family = "single level"

    def direction(self, problem, s, draw, fed):
        return problem.gradient(s.x, draw(0))

    def descend(self, problem, s, draw, fed):
        """Return x after a local step, and after the last one of the round the mean over clients."""
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * self.direction(problem, s, draw, fed))
        return problem.feasible_x(fed.mean(x, around=fed.server.x)) if fed.sync else x


@struct
class FedAvg(LocalSteps):
    """Takes local steps, then averages the models."""

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        return s._replace(x=self.descend(problem, s, draw, fed))


@struct
class FedProx(FedAvg):
    """Runs FedAvg with a pull of strength mu towards the broadcast model."""

    mu: float = setting("mu: strength of the proximal term", default=0.01, at_least=0)

    def direction(self, problem, s, draw, fed):
        return problem.gradient(s.x, draw(0)) + self.mu * (s.x - fed.server.x)
