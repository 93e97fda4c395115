"""Ditto: FedAvg trains a common model, and every client has a model of its own that is pulled towards it.

Problem   x = (u_0, v_0) minimises mean_k loss_k(x), and each client's w_k = (u_k, v_k) minimises
          loss_k(w) + (coupling / 2) |w - x|^2.

Step at client k, with independent batches S and Z; x is the model as broadcast, x_k the client's copy of it:
    x_k  <- x_k - lr grad loss_k(x_k; S)
    w_k  <- w_k - lr [grad loss_k(w_k; Z) + coupling (w_k - x)]
    x    <- mean_k x_k                                              last step of the round: d_u + d_v numbers

Why    The pull needs the parameters of one common model and no common representation. With coupling = 0 a client trains
       alone; a large coupling gives it the common model, whose training does not depend on the personal models.
Ref.   Li, Hu, Beirami and Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021,
       arXiv:2012.04221, Algorithm 1.
Departures  A step of the common model and one of the personal model are taken in turns: the pull is towards the
       broadcast, so the order makes no difference. The pull is part of what is clipped. All models start from one
       point; a client that joins late starts its w_k there.
"""

from typing import NamedTuple

from nestfed.algorithms.personal_method import PersonalMethod
from nestfed.core.algorithm import Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class Ditto(PersonalMethod):
    """Trains a common model by FedAvg and, near it, a model of each client's own."""

    coupling: float = setting("lambda: strength of the pull towards the common model", default=0.01, at_least=0)

    class State(NamedTuple):
        u0: Shared  # the common model
        v0: Shared
        u: Local  # the client's own
        v: Local

    def init(self, problem, params, draw, fed):
        u, v = params
        return self.State(u, v, u, v)

    def step(self, problem, s, draw, fed):
        lr = at(self.lr, fed.t)
        common, own = problem.gradients(s.u0, s.v0, draw(0)), problem.gradients(s.u, s.v, draw(1))
        s = self.descend(s, lr, fed, u0=common[0], v0=common[1])
        pull_u, pull_v = self.coupling * (s.u - fed.server.u0), self.coupling * (s.v - fed.server.v0)
        s = self.descend(s, lr, fed, u=own[0] + pull_u, v=own[1] + pull_v)
        if fed.sync:
            u0, v0 = fed.mean((s.u0, s.v0), around=(fed.server.u0, fed.server.v0))
            s = s._replace(u0=u0, v0=v0)
        return s
