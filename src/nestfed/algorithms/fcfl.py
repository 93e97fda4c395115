"""FCFL: no client with a large loss, no client with a disparity above a tolerance, then better losses for all.

Problem   l_k = objective_k, g_k = the only constraint of client k (its disparity):
    stage 1   min_x max_k l_k(x)  s.t.  max_k g_k(x) <= tolerance
    stage 2   from there to a point where no l_k can fall without another l_k, or the disparity, rising.

Step (a round is one step), at client k: (l_k, g_k, grad l_k, grad g_k) on one batch                2 d + 2 numbers up
Server    l^, g^ = smooth maxima sum_k p_k v_k, p = softmax(v / width), a width for each; gradients sum_k p_k grad v_k
    stage 1   direction = a_1 grad l^ + a_2 grad g^, a on the simplex
                g^ <= tolerance:  maximise <direction, grad l^>
                otherwise:        maximise <direction, grad g^>  s.t.  <direction, grad l^> >= 0
    stage 2   direction = sum_k a_k grad l_k + a_{K+1} grad g^, a on the simplex, a_{K+1} = 0 if max_k g_k < tolerance
                maximise <direction, mean_k grad l_k>  s.t.  <direction, each gradient that takes part> >= 0
    width <- max(shrink width, floor) where 0.1 ||gradient of the maximum|| <= width, for the next step
    x <- x - lr (direction + weight_decay x)                                                        d + 2 numbers down

Why    To first order, a step x - lr direction does not raise a function whose gradient has a nonnegative product with
       the direction. The point of least norm in the hull of the gradients has such a product with each of them, so
       stage 2 always has an answer.
Ref.   Cui, Pan, Liang, Zhang and Wang, "Addressing algorithmic disparity and performance inconsistency in federated
       learning", NeurIPS 2021, arXiv:2108.08435, and the authors' code (cuis15/FCFL).
Departures
  * The worst client counts here, while the class `Constrained` limits the mean.
  * The linear program of stage 2 is solved to rounding by a fixed number of interior-point steps (a static cost), with
    an allowance of 1e-11 (float32: 1e-5) of the gradients' size in its constraints: thus there is always an interior.
  * The two widths travel with the direction, because only the reply to the gather sees the gradients they depend on:
    d + 2 numbers down in place of d.
  * Stages are counted in steps in which somebody took part; maxima and the mean are over those who took part. With few
    clients a step knows only the cohort's worst: the limit is where the pull of a cohort's worst is zero on average.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.algorithms.interior_point import maximise_on_simplex
from nestfed.core.algorithm import Algorithm, Server, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array


class Upload(NamedTuple):
    """Holds what a client sends; at the server every field has a leading axis of clients."""

    loss: Array
    disparity: Array
    loss_gradient: Array
    disparity_gradient: Array


@struct
class FCFL(Algorithm):
    """Lowers the worst loss under a limit on every client's disparity, then all losses; linear programs say how."""

    lr: float = setting("eta: step size of x", above=0)
    stage_one_steps: int = setting("steps of stage 1", default=800, at_least=0, static=True)
    tolerance: float = setting("epsilon_g: largest disparity allowed", default=0.1, at_least=0)
    delta: float = setting("first width of the smooth maxima", default=0.5, above=0)
    shrink: float = setting("factor by which a width falls", default=0.01, above=0, at_most=1)
    floor: float = setting("smallest width", default=1e-4, above=0)
    weight_decay: float = setting("weight decay", default=1e-4, at_least=0)
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "constrained"
    few_clients = (
        "a step knows only the cohort's worst client: what is minimised is the mean over cohorts of their largest "
        "losses, not the largest of all."
    )

    class State(NamedTuple):
        x: Shared
        widths: Server  # the widths of the smooth maxima of loss and disparity
        steps: Server  # the number of steps done so far

    def init(self, problem, params, draw, fed):
        (x,) = params
        number = jax.eval_shape(lambda: problem.constraint_values(x, draw(0))).size
        if number != 1:
            raise UserError(
                f"FCFL takes one constraint, the client's disparity; {type(problem).__name__} has {number}. Return "
                "their maximum as a vector of length 1, or choose another algorithm."
            )
        return self.State(x=x, widths=jnp.full_like(x, self.delta, shape=(2,)), steps=jnp.zeros((), jnp.int32))

    def step(self, problem, s, draw, fed):
        loss, loss_gradient = problem.grad_objective(s.x, draw(0))
        disparity, disparity_gradient = problem.grad_constraint(s.x, 0, draw(0))
        direction, widths = fed.gather(
            Upload(loss, disparity, loss_gradient, disparity_gradient),
            reply=lambda values, cohort, slot, key: self.answer(values, cohort.present, fed.server),
        )
        x = s.x - at(self.lr, fed.t) * (direction + self.weight_decay * s.x)
        return self.State(problem.feasible_x(x), widths, s.steps + 1)

    def answer(self, uploads, present, server):
        """Return (common direction, widths of the next step)."""
        clean = lambda a: jnp.where(present.reshape((-1,) + (1,) * (a.ndim - 1)), a, 0)  # an absent client may send NaN
        uploads = Upload(*map(clean, uploads))
        smooth = lambda values, width: jax.nn.softmax(jnp.where(present, values, -jnp.inf) / width)
        with jax.default_matmul_precision("highest"):  # short floats on accelerators would spoil the products
            of_loss, of_disparity = (smooth(v, w) for v, w in zip(uploads[:2], server.widths, strict=True))
            worst_loss_gradient = of_loss @ uploads.loss_gradient
            worst_disparity_gradient = of_disparity @ uploads.disparity_gradient

            def stage_one():
                excess = of_disparity @ uploads.disparity > self.tolerance
                share = find_disparity_share(worst_loss_gradient, worst_disparity_gradient, excess)
                return (1 - share) * worst_loss_gradient + share * worst_disparity_gradient

            def stage_two():
                gradients = jnp.concatenate([uploads.loss_gradient, worst_disparity_gradient[None]])
                limit = jnp.max(jnp.where(present, uploads.disparity, -jnp.inf)) >= self.tolerance
                target = uploads.loss_gradient.sum(0) / present.sum()
                return find_pareto_weights(gradients, target, jnp.append(present, limit)) @ gradients

            direction = lax.cond(server.steps < self.stage_one_steps, stage_one, stage_two)
        norms = jnp.stack([jnp.linalg.norm(g) for g in (worst_loss_gradient, worst_disparity_gradient)])
        narrower = jnp.maximum(self.shrink * server.widths, self.floor)
        return direction, jnp.where(0.1 * norms <= server.widths, narrower, server.widths)


def find_disparity_share(loss_gradient: Array, disparity_gradient: Array, excess: Array) -> Array:
    """Return a_2 of stage 1, a_1 being 1 - a_2; as the objective is linear, an end of the feasible interval is best."""
    ll, ld, dd = (
        loss_gradient @ loss_gradient,
        loss_gradient @ disparity_gradient,
        disparity_gradient @ disparity_gradient,
    )
    largest = jnp.where(ld < 0, ll / jnp.where(ld < 0, ll - ld, 1), 1)  # where <direction, loss_gradient> reaches 0
    return jnp.where(excess, jnp.where(dd >= ld, largest, 0), jnp.where(ll >= ld, 0, 1)).astype(ll.dtype)


def find_pareto_weights(gradients: Array, target: Array, present: Array) -> Array:
    """Return the a on the simplex that maximises <a @ gradients, target>  s.t.  <a @ gradients, each gradient> >= 0.

    Rows of `gradients` that are not present get weight zero and impose no condition.
    """
    norms = jnp.linalg.norm(gradients, axis=1)
    unit = gradients / jnp.where(norms > 0, norms, 1)[:, None]
    size = jnp.max(jnp.where(present, norms, 0))
    size, target_size = (jnp.where(v > 0, v, 1) for v in (size, jnp.linalg.norm(target)))
    return maximise_on_simplex(gradients @ target / (size * target_size), unit @ gradients.T / size, present)
