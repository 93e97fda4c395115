"""Local-SCGD and Local-SCGDM: every client composes its own functions, with a running estimate of the inner one.

Problem   min_x mean_k [h_k(x) + f_k(g_k(x))].

Step at client k, with a batch B and another one C:
    u_k  <- (1 - inner_lr) u_k + inner_lr g_k(x_k; B)
    z_k   = grad h_k(x_k; C) + J g_k(x_k; B)^T grad f_k(u_k; C)
    Local-SCGD    x_k <- x_k - lr z_k
    Local-SCGDM   m_k <- (1 - momentum_lr) m_k + momentum_lr z_k;   x_k <- x_k - lr m_k
    x_k, u_k (, m_k)  <- their means                                last step of the round: d + m numbers (2 d + m)

On conditional problems (`local-scgd-conditional`, `local-scgdm-conditional`), where g depends on the outer sample, one
estimate is carried for all outer samples together. Every outer sample i of the batch, such as a task of
meta-learning, blends it with an inner value of its own:
    u_i   = (1 - inner_lr) u_k + inner_lr g_i(x_k);   z_k = mean_i J g_i(x_k)^T grad f_i(u_i);   u_k <- mean_i u_i

Why    u_k averages over batches, which may be small; m_k smooths the gradient too. There is one estimate for all outer
       samples: where g depends on the outer sample, it tracks the wrong mean, and the limit is another point for every
       inner_lr below 1. The conditional forms are here to be compared with (`fcsg` solves these problems).
Ref.   Gao, Li and Huang, "On the convergence of local stochastic compositional gradient descent with momentum", ICML
       2022 (PMLR 162, pages 7017-7035). No DOI or arXiv number is known to us for certain. Its steps are alpha eta,
       beta eta and gamma eta with a common factor eta; here inner_lr = alpha eta, momentum_lr = beta eta and
       lr = gamma eta.
Departures
  * The means of u mix inner functions that the problem keeps apart. With one local step and a full batch the limit
    solves mean_k J_k^T grad f(u_k) = 0 at u_k = (1 - inner_lr) g + inner_lr g_k: the problem's solution for
    inner_lr = 1, and for small inner_lr that of the other problem, with the mean g inside f. `local-scgd-own` and
    `local-scgdm-own` keep u at its client, as the problem wants it, and save m numbers.
  * An ordinary average loss h is allowed beside the composition.
  * The conditional forms are those of the program released with "Federated conditional stochastic optimization"
    (arXiv:2310.02524, see `fcsg`); the paper of Local-SCGDM has no such problem. One batch serves both levels, because
    f_i belongs to g_i.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Algorithm, Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class OwnCompositions(Algorithm):
    """Holds what all forms have in common: a running estimate of the inner value, and the gradient with it."""

    lr: float = setting("gamma: step size of x", above=0)
    inner_lr: float = setting(
        "a: step of the estimate towards the batch value; 1 is the batch value", default=0.5, above=0, at_most=1
    )

    family = "compositional"
    scope = "local"

    def track(self, problem, s, draw, fed):
        """Return (the new estimate of the inner value, the gradient with it)."""
        rate = at(self.inner_lr, fed.t)
        return self.compose(problem, s.x, draw, lambda value: (1 - rate) * s.u + rate * value)

    def compose(self, problem, x, draw, blend):
        """Return (what `blend` makes of the batch's inner value, the gradient with it)."""
        value, pull = problem.inner_vjp(x, draw(0))
        u = blend(value)
        return u, problem.composed_gradient(x, pull, u, draw(1))

    def descend(self, problem, x, direction, fed):
        return problem.feasible_x(x - at(self.lr, fed.t) * direction)


@struct
class WithMomentum(OwnCompositions):
    """Adds a running estimate of the gradient."""

    momentum_lr: float = setting(
        "b: step of the momentum towards the gradient; 1 is the gradient", default=0.5, above=0, at_most=1
    )

    def smooth(self, m, gradient, fed):
        rate = at(self.momentum_lr, fed.t)
        return (1 - rate) * m + rate * gradient


@struct
class LocalSCGD(OwnCompositions):
    """Follows every client's own composition with running estimates of the inner functions, averaged with x."""

    class State(NamedTuple):
        x: Shared
        u: Shared  # estimate of g_k(x_k)

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, fed.mean(problem.inner_value(x, draw(0))))

    def step(self, problem, s, draw, fed):
        u, gradient = self.track(problem, s, draw, fed)
        s = self.State(self.descend(problem, s.x, gradient, fed), u)
        if fed.sync:
            s = fed.mean(s, around=fed.server)
            s = s._replace(x=problem.feasible_x(s.x))
        return s


@struct
class LocalSCGDM(WithMomentum):
    """Runs Local-SCGD with a running estimate of the gradient as well."""

    class State(NamedTuple):
        x: Shared
        u: Shared  # estimate of g_k(x_k)
        m: Shared  # estimate of the gradient

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, *fed.mean(self.compose(problem, x, draw, lambda value: value)))

    def step(self, problem, s, draw, fed):
        u, gradient = self.track(problem, s, draw, fed)
        m = self.smooth(s.m, gradient, fed)
        s = self.State(self.descend(problem, s.x, m, fed), u, m)
        if fed.sync:
            s = fed.mean(s, around=fed.server)
            s = s._replace(x=problem.feasible_x(s.x))
        return s


@struct
class LocalSCGDOwn(OwnCompositions):
    """Runs Local-SCGD with estimates that stay at their clients."""

    class State(NamedTuple):
        x: Shared
        u: Local  # estimate of g_k(x_k)

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, problem.inner_value(x, draw(0)))

    def step(self, problem, s, draw, fed):
        u, gradient = self.track(problem, s, draw, fed)
        x = self.descend(problem, s.x, gradient, fed)
        if fed.sync:
            x = problem.feasible_x(fed.mean(x, around=fed.server.x))
        return self.State(x, u)


@struct
class LocalSCGDMOwn(WithMomentum):
    """Runs Local-SCGDM with inner estimates that stay at their clients."""

    class State(NamedTuple):
        x: Shared
        u: Local  # estimate of g_k(x_k)
        m: Shared  # estimate of the gradient

    def init(self, problem, params, draw, fed):
        (x,) = params
        u, m = self.compose(problem, x, draw, lambda value: value)
        return self.State(x, u, fed.mean(m))

    def step(self, problem, s, draw, fed):
        u, gradient = self.track(problem, s, draw, fed)
        m = self.smooth(s.m, gradient, fed)
        x = self.descend(problem, s.x, m, fed)
        if fed.sync:
            x, m = fed.mean((x, m), around=(fed.server.x, fed.server.m))
            x = problem.feasible_x(x)
        return self.State(x, u, m)


@struct
class ManyOuterSamples(OwnCompositions):
    """Serves conditional problems with one estimate of the inner value for all outer samples."""

    family = "conditional"
    scope = None

    def compose(self, problem, x, draw, blend):
        values, pull = problem.inner_vjp(x, draw(0))
        u = jax.vmap(blend)(values)
        return jnp.mean(u, 0), problem.composed_gradient(x, pull, u, draw(0))


@struct
class LocalSCGDConditional(ManyOuterSamples, LocalSCGD):
    """Runs Local-SCGD with one estimate for all outer samples: it is biased and there to be compared with."""


@struct
class LocalSCGDMConditional(ManyOuterSamples, LocalSCGDM):
    """Runs Local-SCGDM on conditional problems in the same way."""
