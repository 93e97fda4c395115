"""FedAvg of a whole model, and training of every client alone: personalised methods are measured against both.

Problem   min over (u, v) of mean_k loss_k(u, v), and min over each (u_k, v_k) of loss_k(u_k, v_k).

Step at client k:
    (u_k, v_k)  <- (u_k, v_k) - lr grad loss_k(u_k, v_k)      LocalOnly with trains="head": v_k alone
    (u, v)      <- mean_k (u_k, v_k)                          FedAvgWhole, last step of the round: d_u + d_v numbers

Why    The common model is what all could have without personal parts; a model trained alone is what each client could
       have without the others. FedAvg with fine-tuning, a strong rival of personalised methods, is the common model
       after some steps on the client's own rows: run LocalOnly from there, or fine-tune in a metric
       (`nestfed.personalise`).
Ref.   McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-efficient learning of deep networks from
       decentralized data", AISTATS 2017, arXiv:1602.05629.
Departures  There are none but those of `fedavg`.
"""

from typing import NamedTuple

from nestfed.algorithms.personal_method import PersonalMethod
from nestfed.core.algorithm import Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class WholeModel(PersonalMethod):
    """Trains extractor and head together, from the common start."""

    def init(self, problem, params, draw, fed):
        u, v = params
        return self.State(u, v)

    def step(self, problem, s, draw, fed):
        gradient_u, gradient_v = problem.gradients(s.u, s.v, draw(0))
        return self.descend(s, at(self.lr, fed.t), fed, u=gradient_u, v=gradient_v)


@struct
class LocalOnly(WholeModel):
    """Trains every client alone, from the common start; nothing is exchanged."""

    trains: str = setting(
        "what is trained: all, or the head alone", default="all", choices=("all", "head"), static=True
    )

    class State(NamedTuple):
        u: Local
        v: Local

    def step(self, problem, s, draw, fed):
        if self.trains == "all":
            return super().step(problem, s, draw, fed)
        return self.descend(s, at(self.lr, fed.t), fed, v=problem.grad_head(s.u, s.v, draw(0)))


@struct
class FedAvgWhole(WholeModel):
    """Trains one model for all by FedAvg, extractor and head alike."""

    class State(NamedTuple):
        u: Shared
        v: Shared

    def step(self, problem, s, draw, fed):
        s = super().step(problem, s, draw, fed)
        if fed.sync:
            u, v = fed.mean((s.u, s.v), around=(fed.server.u, fed.server.v))
            s = s._replace(u=u, v=v)
        return s
