"""FCSG, FCSG-M and Acc-FCSG-M: a function of a conditional mean, such as average precision or a loss after adaptation.

Problem   min_x mean_k E_xi f_k( E_{eta | xi} g_k(x; xi, eta); xi ).   A batch is b outer samples xi, each with m inner
samples eta of its own; G_k(x) is the gradient of the mean over the batch of f_k( mean_j g_k(x; xi, eta_j); xi ).

Step at client k, on one batch:
    u_k  <- G_k(x_k)                                                FCSG
    u_k  <- (1 - beta) u_k + beta G_k(x_k)                          FCSG-M
    u_k  <- G_k(x_k) + (1 - beta) (u_k - G_k(x_k'))                 Acc-FCSG-M, x_k' the point of the step before
    x_k  <- x_k - lr u_k
    x_k  <- mean_k x_k  (and u_k <- mean_k u_k)                     last step of the round: d numbers (2 d)

Why    The same inner samples enter the value and the derivative, in one reverse pass, and the inner mean is taken per
       outer sample. Averaging inner values over outer samples, as methods for compositions do, solves another problem.
       What is left is a bias of order 1 / m, which no step size and no momentum removes.
Ref.   Wu, Sun, Hu, Li, Zhang and Huang, "Federated conditional stochastic optimization", NeurIPS 2023,
       arXiv:2310.02524, Algorithms 1 and 2.
Departures
  * The paper counts a step from the update of x to the next estimate; here a step begins with the estimate. The
    sequence of x is the same, and everything that is carried over a synchronisation is an average.
  * The first estimate is over `first_batches` batches (the paper's B / b), all but one of them averaged over clients.
  * prev="local" keeps a client's own point of the step before across a synchronisation, as printed; prev="mean" takes
    the average one, which costs no traffic: it follows from the averages of x and u.
  * The paper has all clients in every round. Here the first estimate is made in the first round in which anybody takes
    part, and a client that was absent goes on from the average point of the step before, because u does not belong to
    its own.
  * Lines 5 to 9 of Algorithm 2 are taken to be those of Algorithm 1. beta is c lr^2 as in Corollary 4.8.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class FCSG(Algorithm):
    """Takes local steps along the plug-in gradient, then averages the models."""

    lr: float = setting("alpha: step size", above=0)

    family = "conditional"

    class State(NamedTuple):
        x: Shared

    @classmethod
    def theory(cls, *, clients: int, steps: int, smoothness: float):
        """Take step size and local steps from Corollary 4.2; smoothness is S_F = S_g L_f + S_f L_g^2."""
        return cls(lr=(clients / steps) ** 0.5 / (6 * smoothness), local_steps=_round((steps / clients**3) ** 0.25))

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * problem.gradient(s.x, draw(0)))
        return self.State(problem.feasible_x(fed.mean(x, around=fed.server.x)) if fed.sync else x)


@struct
class Momentum(Algorithm):
    """Holds what the two methods with momentum have in common."""

    lr: float = setting("alpha: step size", above=0)
    beta: float = setting("weight of the new gradient", default=0.1, above=0, at_most=1)
    first_batches: int = setting("B / b: batches of the first estimate", default=1, at_least=1, static=True)

    family = "conditional"

    def first_estimate(self, problem, x, draw, fed):
        """Return the mean gradient over all but one of the first batches; the first step adds that of its own batch."""
        others = self.first_batches - 1
        if others == 0:
            return jnp.zeros_like(x)
        add = lambda j, total: total + problem.gradient(x, draw(j))
        return fed.mean(lax.fori_loop(0, others, add, jnp.zeros_like(x)) / others)

    def forgetting_rate(self, u, estimated, fed):
        """Return beta, or where nothing is estimated yet the share of the step's batch in the first estimate."""
        return jnp.where(estimated, at(self.beta, fed.t), 1 / self.first_batches).astype(u.dtype)


@struct
class FCSGM(Momentum):
    """Runs FCSG with momentum, which is averaged too."""

    class State(NamedTuple):
        x: Shared
        u: Shared  # momentum
        estimated: Shared  # is there a first estimate of u?

    @classmethod
    def theory(cls, *, clients: int, steps: int, smoothness: float):
        """Take the constants from Corollary 4.5, with beta = 5 S_F lr."""
        plain = FCSG.theory(clients=clients, steps=steps, smoothness=smoothness)
        return cls(lr=plain.lr, beta=min(1.0, 5 * smoothness * plain.lr), local_steps=plain.local_steps)

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, self.first_estimate(problem, x, draw, fed), jnp.zeros((), bool))

    def step(self, problem, s, draw, fed):
        beta = self.forgetting_rate(s.u, s.estimated, fed)
        u = (1 - beta) * s.u + beta * problem.gradient(s.x, draw(0))
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * u)
        if fed.sync:
            x, u = fed.mean((x, u), around=(fed.server.x, fed.server.u))
            x = problem.feasible_x(x)
        return self.State(x, u, jnp.ones((), bool))


@struct
class AccFCSGM(Momentum):
    """Runs FCSG with a variance-reduced momentum, which takes one batch at two points."""

    prev: str = setting(
        "whose point of the step before is kept over a synchronisation",
        default="local",
        choices=("local", "mean"),
        static=True,
    )

    class State(NamedTuple):
        x: Shared
        u: Shared  # momentum
        x_prev: Shared  # the average point of the step before
        rounds: Shared  # the number of rounds in which anybody took part
        own_x_prev: Local  # the client's own point of the step before
        own_rounds: Local  # `rounds` at the end of the last round in which this client took part

    @classmethod
    def theory(cls, *, clients: int, steps: int, smoothness: float, batch: int = 1):
        """Take the constants from Corollary 4.8: beta = c lr^2 with c = 30 S_F^2 / (batch clients)."""
        local_steps = _round((steps / clients**2) ** (1 / 3))
        lr = 1 / (12 * local_steps * smoothness)
        first = _round(steps ** (1 / 3) / clients ** (2 / 3) / batch)
        beta = min(1.0, 30 * smoothness**2 / (batch * clients) * lr**2)
        return cls(lr=lr, beta=beta, local_steps=local_steps, first_batches=first)

    def init(self, problem, params, draw, fed):
        (x,) = params
        none = jnp.zeros((), jnp.int32)
        return self.State(x, self.first_estimate(problem, x, draw, fed), x, none, x, none)

    def begin(self, server, client):
        s = super().begin(server, client)
        absent = (s.own_rounds != s.rounds) | (self.prev == "mean")
        return s._replace(own_x_prev=jnp.where(absent, s.x_prev, s.own_x_prev))

    def step(self, problem, s, draw, fed):
        beta = self.forgetting_rate(s.u, (s.rounds > 0) | (fed.step > 0), fed)
        u = problem.gradient(s.x, draw(0)) + (1 - beta) * (s.u - problem.gradient(s.own_x_prev, draw(0)))
        lr = at(self.lr, fed.t)
        x = problem.feasible_x(s.x - lr * u)
        if not fed.sync:
            return s._replace(x=x, u=u, own_x_prev=s.x)
        x, u = fed.mean((x, u), around=(fed.server.x, fed.server.u))
        rounds = s.rounds + 1
        return self.State(problem.feasible_x(x), u, x + lr * u, rounds, s.x, rounds)


def _round(number: float) -> int:
    return max(1, round(number))
