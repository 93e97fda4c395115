"""FedBiO and FedBiOAcc: bilevel problems in which every client has a lower problem of its own.

Problem   min_x mean_k f_k(x, y_k(x)),   y_k(x) = argmin_y g_k(x, y).
Phi_k(x, y) = df/dx - (d2g/dxdy) (d2g/dy2)^-1 df/dy is the hypergradient; `problems.hypergradients` estimates it.

FedBiO, step t at client k; both lines use the old pair (x_k, y_k):
    y_k  <- y_k - lower_lr grad_y g_k(x_k, y_k)
    x_k  <- x_k - lr Phi_k(x_k, y_k)
    x    <- mean_k x_k                                            last step of the round: d numbers

FedBiOAcc, step t at client k, with alpha_t = delta / (u + sigma2 (t + 1))^(1/3) and one set of batches at both points:
    omega_k <- grad_y g_k(x_k, y_k)  + (1 - c_omega alpha_{t-1}^2) (omega_k - grad_y g_k(x_k'', y_k'))
    nu_k    <- Phi_k(x_k, y_k)       + (1 - c_nu alpha_{t-1}^2)    (nu_k    - Phi_k(x_k', y_k'))
    (x_k, nu_k) <- mean_k (x_k, nu_k)                             last step of the round: 2 d numbers
    x_k', x_k'', y_k' = x_k, x_k, y_k;   y_k <- y_k - lower_lr alpha_t omega_k;   x_k <- x_k - lr alpha_t nu_k

Why    y_k and omega_k never leave the client; averaging the hypergradients of local lower solutions is exact here,
       while averaging losses ignores how y_k(x) moves. The recursion cancels the noise of two evaluations of one batch.
       The stepped point is linear in x_k and nu_k, so averaging these two gives the listing's third average for free.
Ref.   Li, Huang and Huang, "Local stochastic bilevel optimization with momentum-based variance reduction", preprint,
       2022, arXiv:2205.01608: Algorithms 1 and 2, Equations 3 and 4, Theorem 10.1, as numbered in the version under
       anonymous review.
Departures
  * Every round has local_steps steps, the first included (the proof's indices; the listing's give a shorter first
    round).
  * `average_prev=False` keeps each client's own x' at a synchronisation instead of the average, which the listing and
    the proof have.
  * With `first_batch_multiplier` M the first estimates use M batches: M - 1 are drawn at the start (with one extra
    exchange of d numbers), and one is the first step's own. With the published constants the recursion keeps 71 % of
    its first error after 2000 steps, so the first batch matters. Everybody takes part in the start, so M also decides
    how much of nu's first error comes from the first cohort: 1 / M of it.
  * The paper has all clients in every round. Here a client that was absent resumes with its own y, y', omega and the
    broadcast x, x', nu. Its omega belongs to a point x'' of its own, which is x' unless it was absent. The first
    estimate of omega is made when the client first takes part, that of nu in the first round in which anybody does.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Local, Shared
from nestfed.core.schedules import PowerDecay, at
from nestfed.core.settings import setting, struct
from nestfed.problems.hypergradients import Hypergradient, Neumann


@struct
class FedBiO(Algorithm):
    """Takes steps on every client's own lower problem and along its hypergradient, and averages x."""

    lr: float = setting("eta: step size of x", above=0)
    lower_lr: float = setting("gamma: step size of y", above=0)
    hypergradient: Hypergradient = setting("estimator of Phi", default=Neumann(), part=Hypergradient)

    family = "bilevel"
    scope = "local"

    class State(NamedTuple):
        x: Shared
        y: Local

    @classmethod
    def theory(cls, *, total_steps, delta, lower_lr, local_steps, hypergradient=None):
        """Take the step size eta = delta T^(-1/3) from the convergence theorem; it is constant over the run."""
        return cls(
            lr=delta * total_steps ** (-1 / 3),
            lower_lr=lower_lr,
            local_steps=local_steps,
            hypergradient=hypergradient or Neumann(),
        )

    def init(self, problem, params, draw, fed):
        return self.State(*params)

    def step(self, problem, s, draw, fed):
        omega = problem.grad_lower(s.x, s.y, draw(0))
        (nu,) = self.hypergradient(problem, [(s.x, s.y)], draw)
        y = problem.feasible_y(s.y - at(self.lower_lr, fed.t) * omega)
        x = problem.feasible_x(s.x - at(self.lr, fed.t) * nu)
        if fed.sync:
            x = problem.feasible_x(fed.mean(x, around=fed.server.x))
        return self.State(x, y)


@struct
class FedBiOAcc(Algorithm):
    """Runs FedBiO with momentum-based variance reduction on both levels."""

    lr: float = setting("eta: step size of x, before the factor alpha_t", default=1.0, above=0)
    lower_lr: float = setting("gamma: step size of y, before the factor alpha_t", default=1.0, above=0)
    delta: float = setting("delta of the schedule alpha_t", default=0.1, above=0)
    u: float = setting("u of the schedule alpha_t", default=1.0, at_least=0)
    sigma2: float = setting("sigma^2 of the schedule alpha_t", default=1.0, at_least=0)
    c_nu: float = setting("c_nu: forgetting of nu", default=1.0, at_least=0)
    c_omega: float = setting("c_omega: forgetting of omega", default=1.0, at_least=0)
    hypergradient: Hypergradient = setting("estimator of Phi", default=Neumann(), part=Hypergradient)
    average_prev: bool = setting("average the previous point too at a synchronisation", default=True, static=True)
    first_batch_multiplier: int = setting("M: batches of the first estimates", default=1, at_least=1, static=True)

    family = "bilevel"
    scope = "local"

    class State(NamedTuple):
        x: Shared
        x_prev: Shared  # x': the average point of the step before
        nu: Shared  # momentum of x
        estimated: Shared  # is there a first estimate of nu?
        y: Local
        y_prev: Local
        omega: Local  # momentum of y, which belongs to (x'', y_prev)
        x_omega: Local  # x'': the point at which omega was evaluated last
        own_estimated: Local  # is there a first estimate of omega?

    @classmethod
    def theory(cls, *, clients, local_steps, sigma, L, L_h, mu, rho, hypergradient=None):
        """Take Theorem 10.1's constants: smoothness L of g, L_h of h, strong convexity mu, Lipschitz rho of y(x)."""
        delta = clients ** (2 / 3) * sigma ** (2 / 3) / L_h
        rest = sigma**2 / (24 * delta**3 * L_h * local_steps)
        c_nu, c_omega = 160 * L_h**2 + rest, 160 * L**2 + rest
        u = max(
            2 * sigma**2,
            delta**3,
            c_nu**1.5 * delta**3,
            c_omega**1.5 * delta**3,
            16**3 * local_steps**3 * clients**2 * sigma**2,
        )
        gamma = 0.99 / max(1 / mu, 6 * L_h)
        inverse_eta = max(
            4 * gamma / mu + 1 / (4 * local_steps),
            12 * (1 + rho**2) / local_steps**2
            + 97 / 256
            + gamma**2 / (2 * mu**2)
            + (1 + 16 / (mu * gamma)) * local_steps,
            240 * L_h**2 / (mu * gamma),
            mu / gamma,
        )
        return cls(
            lr=0.99 / inverse_eta,
            lower_lr=gamma,
            delta=delta,
            u=u,
            sigma2=sigma**2,
            c_nu=c_nu,
            c_omega=c_omega,
            local_steps=local_steps,
            hypergradient=hypergradient or Neumann(),
        )

    def estimates(self, problem, s, draw):
        return [(s.omega, problem.grad_lower(s.x_omega, s.y_prev, draw(0)), s.own_estimated)]

    def alpha(self, t):
        return PowerDecay(scale=self.delta, offset=self.u, slope=self.sigma2)(t + 1)

    def forgetting_rate(self, c, t, estimated):
        """Return 1 - momentum, clipped to [0, 1]; at first 1/M: the step's batch is one of M of the first estimate."""
        factor = jnp.clip(c * self.alpha(t - 1) ** 2, 0, 1)
        return jnp.where(estimated, factor, 1 / self.first_batch_multiplier)

    def init(self, problem, params, draw, fed):
        x, y = params
        omega, nu = jnp.zeros_like(y), jnp.zeros_like(x)
        extra = self.first_batch_multiplier - 1
        if extra:
            batches = 1 + self.hypergradient.batches

            def add(i, total):
                own = lambda j: draw(i * batches + j)
                (phi,) = self.hypergradient(problem, [(x, y)], own)
                return total[0] + problem.grad_lower(x, y, own(0)), total[1] + phi

            omega, nu = lax.fori_loop(0, extra, add, (omega, nu))
            omega, nu = omega / extra, fed.mean(nu / extra)
        no = jnp.zeros((), bool)
        return self.State(x=x, x_prev=x, nu=nu, estimated=no, y=y, y_prev=y, omega=omega, x_omega=x, own_estimated=no)

    def step(self, problem, s, draw, fed):
        now, before = (s.x, s.y), (s.x_prev if self.average_prev else s.x_omega, s.y_prev)
        a_omega = self.forgetting_rate(self.c_omega, fed.t, s.own_estimated).astype(s.x.dtype)
        a_nu = self.forgetting_rate(self.c_nu, fed.t, s.estimated).astype(s.x.dtype)
        psi = lambda x, y: problem.grad_lower(x, y, draw(0))
        phi_now, phi_before = self.hypergradient(problem, [now, before], draw)
        omega = psi(*now) + (1 - a_omega) * (s.omega - psi(s.x_omega, s.y_prev))
        nu = phi_now + (1 - a_nu) * (s.nu - phi_before)

        x = s.x
        if fed.sync:
            x, nu = fed.mean((x, nu), around=(fed.server.x, fed.server.nu))
        alpha, yes = self.alpha(fed.t).astype(x.dtype), jnp.ones((), bool)
        return self.State(
            x=problem.feasible_x(x - self.lr * alpha * nu),
            x_prev=x,
            nu=nu,
            estimated=yes,
            y=problem.feasible_y(s.y - self.lower_lr * alpha * omega),
            y_prev=s.y,
            omega=omega,
            x_omega=x if self.average_prev else s.x,
            own_estimated=yes,
        )
