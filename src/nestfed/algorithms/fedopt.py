"""FedAdagrad, FedAdam, FedYogi, and any optax optimiser on the server.

Problem   min_x mean_k loss_k(x).

Round     clients run FedAvg's local steps from x;  Delta = mean_k(x_k) - x                 one exchange of d numbers
Server    m  <- beta1 m + (1 - beta1) Delta
          v  <- v + Delta^2                                       FedAdagrad
          v  <- beta2 v + (1 - beta2) Delta^2                     FedAdam
          v  <- v - (1 - beta2) Delta^2 sign(v - Delta^2)         FedYogi
          x  <- x + server_lr m / (sqrt(v) + tau)

Why    -Delta is used as a gradient; the optimiser's state lives on the server and does not touch the traffic.
Ref.   Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive federated optimization", ICLR 2021,
       arXiv:2003.00295, Algorithm 2.
Departures  There are none: as in the paper there is no bias correction, and v_0 = tau^2 (`v0` sets another start).
       optax's own Adam and Yogi correct the bias, so the three rules are written here as optax transformations;
       `FedOpt` takes any other.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from nestfed.algorithms.fedavg import LocalSteps
from nestfed.algorithms.server_step import OPTIMIZER, Optimizer, descend, start_memory
from nestfed.core.algorithm import Server, Shared
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array


@struct
class FedOpt(LocalSteps):
    """Runs FedAvg with any optax optimiser on the server: `FedOpt(lr=0.1, optimizer=optax.sgd(1.0, momentum=0.9))`."""

    optimizer: Optimizer | None = setting(**OPTIMIZER)

    class State(NamedTuple):
        x: Shared
        memory: Server  # the server optimiser's state

    def server_optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(1.0) if self.optimizer is None else self.optimizer

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, start_memory(self.server_optimizer(), x))

    def step(self, problem, s, draw, fed):
        x, memory = self.descend(problem, s, draw, fed), s.memory
        if fed.sync:
            x, memory = descend(self.server_optimizer(), 1, fed.server.x, fed.server.x - x, memory)
            x = problem.feasible_x(x)
        return self.State(x, memory)


class Moments(NamedTuple):
    m: Array
    v: Array


@struct
class Adaptive(FedOpt):
    """Holds what the three adaptive rules have in common."""

    server_lr: float = setting("eta: server step size", default=0.1, above=0)
    beta1: float = setting("beta_1: decay of the first moment", default=0.9, at_least=0, at_most=1)
    beta2: float = setting("beta_2: decay of the second moment", default=0.99, at_least=0, at_most=1)
    tau: float = setting("tau: degree of adaptivity", default=1e-3, above=0)
    v0: float | None = setting("v_0: start of the second moment; None means tau^2", default=None)

    def second_moment(self, v: Array, squared: Array) -> Array:
        """Return the new v, given Delta^2: this tells the three rules apart."""
        raise UserError(f"{type(self).__name__} must define second_moment(v, squared).")

    def server_optimizer(self):
        def init(params):
            start = self.tau**2 if self.v0 is None else self.v0
            return Moments(jnp.zeros_like(params), jnp.zeros_like(params) + start)

        def update(updates, state, params=None):
            m = self.beta1 * state.m - (1 - self.beta1) * updates
            v = self.second_moment(state.v, updates**2)
            return self.server_lr * m / (jnp.sqrt(v) + self.tau), Moments(m, v)

        return optax.GradientTransformation(init, update)


@struct
class FedAdagrad(Adaptive):
    """Runs FedAvg's local steps with Adagrad on the server."""

    def second_moment(self, v, squared):
        return v + squared


@struct
class FedAdam(Adaptive):
    """Runs FedAvg's local steps with Adam on the server."""

    def second_moment(self, v, squared):
        return self.beta2 * v + (1 - self.beta2) * squared


@struct
class FedYogi(Adaptive):
    """Runs FedAvg's local steps with Yogi on the server."""

    def second_moment(self, v, squared):
        return v - (1 - self.beta2) * squared * jnp.sign(v - squared)
