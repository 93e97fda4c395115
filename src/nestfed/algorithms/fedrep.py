"""FedRep and FedBABU: one extractor for all clients, and a head for each.

Problem   FedRep: min over u and (v_k) of mean_k loss_k(u, v_k).  FedBABU: min over u of mean_k loss_k(u, v), v the head
that all start with.

Round at client k, from the u received:
    head_steps times   v_k  <- v_k - head_lr grad_v loss_k(u, v_k)         FedRep only: FedBABU never moves the head
    local_steps times  u_k  <- u_k - lr grad_u loss_k(u_k, v_k)
    u    <- mean_k u_k                                                     d_u numbers

Why    Heads absorb what differs between clients, so that the extractors that are averaged mean the same. FedBABU gets
       there with a random head that is the same for all: nothing that is specific to a client enters u before the end,
       when each client fine-tunes its head (or the whole model) on its own rows (`nestfed.personalise`).
Ref.   Collins, Hassani, Mokhtari and Shakkottai, "Exploiting shared representations for personalized federated
       learning", ICML 2021, arXiv:2102.07078; Oh, Kim and Yun, "FedBABU: toward enhanced representation for federated
       image classification", ICLR 2022, arXiv:2106.06042.
Departures  Local work is counted in steps, not in epochs. A client that joins late has the common start as its head.
"""

from typing import NamedTuple

from nestfed.algorithms.personal_method import HeadThenBody, PersonalMethod
from nestfed.core.algorithm import Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import struct


@struct
class FedRep(HeadThenBody):
    """Trains a common extractor, and heads that stay with their clients."""

    class State(NamedTuple):
        u: Shared
        v: Local

    def init(self, problem, params, draw, fed):
        u, v = params
        return self.State(u, v)

    def synchronise(self, problem, s, draw, fed):
        return s._replace(u=fed.mean(s.u, around=fed.server.u))


@struct
class FedBABU(PersonalMethod):
    """Trains a common extractor with a head that never moves; heads are fine-tuned afterwards."""

    class State(NamedTuple):
        u: Shared
        v: Shared  # as it was at the start

    def init(self, problem, params, draw, fed):
        u, v = params
        return self.State(u, v)

    def step(self, problem, s, draw, fed):
        s = self.descend(s, at(self.lr, fed.t), fed, u=problem.grad_extractor(s.u, s.v, draw(0)))
        return s._replace(u=fed.mean(s.u, around=fed.server.u)) if fed.sync else s
