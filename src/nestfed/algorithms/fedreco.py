"""FedReCo and FedReCo-PVR: every client has a model of its own, and its representation is pulled towards a common one.

Problem   min over (u_k, v_k) and u_0 of mean_k [ f_k(u_k, v_k) + (coupling / 2) H_k(u_k, u_0) ],  f the loss and H the
squared distance of the two extractors' representations, over the client's inputs.

Round at client k, which receives u_0 and goes on from its own (u_k, v_k):
    head_steps times   v_k  <- v_k - head_lr grad_v f_k(u_k, v_k)
    local_steps times  u_k  <- u_k - lr [grad_u f_k(u_k, v_k) + (coupling / 2) c_k]
        c_k  = grad_u H_k(u_k, u_0)                                                                 FedReCo
        c_k  = grad_u H_k(u_k, u_0) - grad_u H_k(u_k', u_0') + g_k,  both on one batch              FedReCo-PVR
    g_k, (u_k', u_0')  <- grad_u H_k(u_k, u_0) over all rows, (u_k, u_0)                            FedReCo-PVR
Server    u_0  <- u_0 - server_lr mean_k grad_{u_0} H_k(u_k, u_0)                                   d_u numbers

Why    What is exchanged is the gradient of a distance: no client gives away a model, and none is overwritten by an
       average. (u_k', u_0') is the pair at which g_k was computed, so the correction has mean zero also for clients
       that were absent; with full batches it vanishes and FedReCo-PVR is FedReCo.
Ref.   The title and the authors of the paper are not known to us, because its main text was not available: what we had
       is its appendix (Algorithm 2, appendices A.3 and C) and its authors' code (oyhah/FedReCo). No DOI or arXiv number
       is known to us for certain.
Departures
  * H is the mean over a batch by default; the authors' code has the sum, which the problem's `reduction` can choose.
  * FedReCo sends a gradient on one batch, as appendix A.3 says; server_grad="full" is over all rows, as the code does.
    FedReCo-PVR needs all rows anyhow.
  * The proof's server step has a factor coupling / 2, which the listing and the code lack; server_scale_lambda adds it.
  * The server's mean is shortened to `clip` too. Any optax optimiser can take the server's step (`optimizer=`);
    server_lr is then not used.
  * The first correction is not defined in print. Here all start from one (u, v), u_0 is that u, and g_k = 0 is exact
    there. A client that joins late starts from the same point.
  * One reverse pass gives the gradients of f and H together, so FedReCo-PVR makes two passes per step and not three.
  * The code ends with a round of head steps alone; `nestfed.personalise` can do that in an evaluation.
"""

from typing import NamedTuple

import jax.numpy as jnp

from nestfed.algorithms.clipping import clip_together
from nestfed.algorithms.personal_method import HeadThenBody
from nestfed.algorithms.server_step import OPTIMIZER, Optimizer, descend, start_memory
from nestfed.core.algorithm import Local, Sample, Scratch, Server, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class CommonRepresentation(HeadThenBody):
    """Holds what the two methods have in common: the server's step of the common extractor."""

    coupling: float = setting("lambda: strength of the pull is lambda / 2", default=0.01, at_least=0)
    server_lr: float = setting("eta_0: step size of the common extractor", default=0.001, above=0)
    server_scale_lambda: bool = setting("multiply the server's step by lambda / 2", default=False, static=True)
    optimizer: Optimizer | None = setting(**OPTIMIZER)

    def direction(self, problem, s, draw, fed):
        return problem.grad_coupled(s.u, s.v, s.u0, self.coupling, draw(0))

    def server_step(self, s, gradient, fed):
        (mean,), over = clip_together((fed.mean(gradient),), self.clip)
        fed.note("server_clipped_share", over)
        mean = mean * (self.coupling / 2 if self.server_scale_lambda else 1)
        u0, memory = descend(self.optimizer, at(self.server_lr, fed.t), s.u0, mean, s.memory)
        return s._replace(u0=u0, memory=memory)


@struct
class FedReCo(CommonRepresentation):
    """Pulls the representations of the clients' own models towards a common one that only the server moves."""

    server_grad: str = setting(
        "what a client sends: a gradient on one batch, or on all its rows",
        default="stochastic",
        choices=("stochastic", "full"),
        static=True,
    )

    class State(NamedTuple):
        u0: Shared  # the common extractor
        u: Local
        v: Local
        memory: Server  # of the server's optimiser

    def init(self, problem, params, draw, fed):
        u, v = params
        return self.State(u, u, v, start_memory(self.optimizer, u))

    def synchronise(self, problem, s, draw, fed):
        if self.server_grad == "stochastic":
            gradient = problem.grad_center(s.u, s.u0, draw(1))
        else:
            gradient = fed.rows.pass_over(
                lambda batch, weights: problem.grad_center(s.u, s.u0, Sample(batch, fed.key), weights)
            )
        return self.server_step(s, gradient, fed)


@struct
class FedReCoPVR(CommonRepresentation):
    """Runs FedReCo with less variance in the pull, by one batch at two points and a pass over all rows."""

    class State(NamedTuple):
        u0: Shared  # the common extractor
        u: Local
        v: Local
        memory: Server  # of the server's optimiser
        g: Local  # grad_u H over all rows, at (u_start, u0_prev)
        u0_prev: Local  # the common extractor of the last round in which this client took part
        u_start: Scratch  # the client's extractor at the start of the round

    def init(self, problem, params, draw, fed):
        u, v = params
        return self.State(u, u, v, start_memory(self.optimizer, u), g=jnp.zeros_like(u), u0_prev=u, u_start=None)

    def begin(self, server, client):
        s = super().begin(server, client)
        return s._replace(u_start=s.u)

    def estimates(self, problem, s, draw):
        return [(s.g, problem.grad_distance(s.u, s.u0_prev, draw(0)), True)]

    def direction(self, problem, s, draw, fed):
        correction = s.g - problem.grad_distance(s.u_start, s.u0_prev, draw(0))
        return super().direction(problem, s, draw, fed) + self.coupling / 2 * correction

    def synchronise(self, problem, s, draw, fed):
        def gradients(batch, weights):
            sample = Sample(batch, fed.key)
            return problem.grad_distance(s.u, s.u0, sample, weights), problem.grad_center(s.u, s.u0, sample, weights)

        g, gradient = fed.rows.pass_over(gradients)
        return self.server_step(s._replace(g=g, u0_prev=s.u0), gradient, fed)
