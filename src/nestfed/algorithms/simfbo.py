"""SimFBO and ShroFBO: bilevel problems with one lower problem, in a single loop and a single exchange per round.

Problem   min_x mean_k f_k(x, y(x)),   y(x) = argmin_y mean_k g_k(x, y);   z estimates (d2g/dy2)^-1 df/dy.

Step at client k, with local rates (lr, lower_lr, z_lr); all three use the old values:
    h_y = grad_y g_k(x, y);   h_z = (d2g_k/dy2) z - df_k/dy;   h_x = df_k/dx - (d2g_k/dxdy) z
    y <- y - lower_lr h_y;    z <- z - z_lr h_z;               x <- x - lr h_x
Last step of the round, with q the sum of the round's h and server rates (server_lr, server_lower_lr, server_z_lr):
    x <- x - server_lr mean_k q_x,   y likewise,   z <- Proj_{|z| <= radius}(z - server_z_lr mean_k q_z)
                                                                  one exchange of d + 2 d_y numbers
ShroFBO uploads q / tau_k and multiplies the server steps by rho = mean_k tau_k, where client k does tau_k steps: a
client with more steps then does not weigh more.

Why    A round has one exchange instead of a Neumann series of exchanges. Local steps that are comparable with the
       server's shift the limit, so keep the local rates small.
Ref.   Yang, Xiao and Ji, "SimFBO: towards simple, flexible and communication-efficient federated bilevel learning",
       NeurIPS 2023, arXiv:2305.19442, Algorithms 1 and 2.
Departures  Aggregation coefficients are 1. Clients' own numbers of steps come from `Task.local_steps` (at most
       `local_steps`); with them ShroFBO sends one more number, tau_k. With few clients the paper draws them uniformly
       and weighs them by w_k K / |S|; here a client is drawn as often as its weight says, and all who are there count
       alike: both means are right on average, this one with less spread. Any optax optimiser can take the server's
       step of x (`optimizer=`); server_lr is then not used.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from nestfed.algorithms.server_step import OPTIMIZER, Optimizer, descend, start_memory
from nestfed.core.algorithm import Algorithm, Scratch, Server, Shared
from nestfed.core.settings import setting, struct


@struct
class SimFBO(Algorithm):
    """Moves x, y and z of one global lower problem in a single loop, with one exchange per round."""

    lr: float = setting("eta_x: local step size of x", above=0)
    lower_lr: float = setting("eta_y: local step size of y", above=0)
    z_lr: float = setting("eta_z: local step size of z", above=0)
    server_lr: float = setting("gamma_x: server step size of x", above=0)
    server_lower_lr: float = setting("gamma_y: server step size of y", above=0)
    server_z_lr: float = setting("gamma_z: server step size of z", above=0)
    radius: float = setting("r: z is projected onto this ball", default=float("inf"), above=0)

    optimizer: Optimizer | None = setting(**OPTIMIZER)

    family = "bilevel"
    scope = "global"
    uneven_steps = True

    class State(NamedTuple):
        x: Shared
        y: Shared
        z: Shared
        memory: Server  # of the server's optimiser
        q: Scratch  # sums of the round's directions (q_x, q_y, q_z)

    def init(self, problem, params, draw, fed):
        x, y = params
        return self.State(x, y, jnp.zeros_like(y), start_memory(self.optimizer, x), None)

    def begin(self, server, client):
        s = super().begin(server, client)
        return s._replace(q=tuple(jnp.zeros_like(v) for v in s[:3]))

    def step(self, problem, s, draw, fed):
        x, y, z, memory = s.x, s.y, s.z, s.memory
        fx, fy = problem.grad_upper(x, y, draw(1))
        h_x = fx - problem.mixed_vector(x, y, draw(2), z)
        h_y = problem.grad_lower(x, y, draw(0))
        h_z = problem.hessian_vector(x, y, draw(3), z) - fy
        if fed.own_steps is not None:  # a client that has done its steps waits for the others
            h_x, h_y, h_z = (jnp.where(fed.step < fed.own_steps, h, 0) for h in (h_x, h_y, h_z))
        q = tuple(total + h for total, h in zip(s.q, (h_x, h_y, h_z), strict=True))
        if fed.sync:
            (q_x, q_y, q_z), rho = self.average(q, fed)
            x, memory = descend(self.optimizer, self.server_lr, fed.server.x, rho * q_x, memory)
            x = problem.feasible_x(x)
            y = problem.feasible_y(fed.server.y - self.server_lower_lr * rho * q_y)
            z = self.project(fed.server.z - self.server_z_lr * rho * q_z)
        else:
            x = problem.feasible_x(x - self.lr * h_x)
            y = problem.feasible_y(y - self.lower_lr * h_y)
            z = z - self.z_lr * h_z
        return self.State(x, y, z, memory, q)

    def average(self, q, fed) -> tuple[Any, Any]:
        """Return (averaged directions, factor of the server steps)."""
        return fed.mean(q), 1

    def project(self, z):
        norm = jnp.sqrt(jnp.sum(z**2))
        return jnp.where(norm > self.radius, z * (self.radius / jnp.where(norm > 0, norm, 1)), z)


@struct
class ShroFBO(SimFBO):
    """Runs SimFBO with directions normalised by each client's number of steps."""

    def average(self, q, fed):
        if fed.own_steps is None:
            return fed.mean(tuple(h / self.local_steps for h in q)), self.local_steps
        tau = jnp.minimum(fed.own_steps, self.local_steps).astype(q[0].dtype)
        return fed.mean((tuple(h / tau for h in q), tau))
