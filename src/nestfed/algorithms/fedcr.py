"""FedCR: own heads on a common random representation near one Gaussian per class, which all clients make together.

Problem   min over u and (v_k) of mean_k E [ loss(v_k; z) + beta KL(r(. | y) || N(m(o), s(o)^2)) ], z ~ N(m(o), s(o)^2);
the extractor u gives means m and deviations s, d_z numbers each, for an input o of class y (`GaussianEncoder`).

Step at client k, with L draws of z per row:
    (u_k, v_k)  <- (u_k, v_k) - lr grad [mean loss + beta mean KL]           r as broadcast, constant
Last step of the round:
    p_k(y) = sum 1 / s(o)^2,  q_k(y) = sum m(o) / s(o)^2                     over the client's rows of class y
    u  <- mean_k u_k                                                         d_u numbers
    precision = 1 + sum_k p_k(y),  mean = sum_k q_k(y) / precision           2 C d_z numbers, C classes
    r(. | y)  <- (1 - memory) r + memory N(mean, 1 / precision)

Why    The sum over what clients say about a class is a product of experts with N(0, 1): the clients agree on where a
       class lies without showing representations of rows, and beta limits what a representation tells of its input.
Ref.   Zhang, Li, Dai, Zou and Xiong, "FedCR: personalized federated learning based on across-client common
       representation with conditional mutual information regularization", ICML 2023 (PMLR 202, pages 41314-41330), and
       its authors' code (haozzh/FedCR). No DOI or arXiv number is known to us for certain.
Departures
  * The divergence is the code's, KL(r || encoder); divergence="bound" is that of the bound, KL(encoder || r). A
    product of n experts is sqrt(n) times as narrow as each of them, so the bound's divergence is near n d_z / 2 and the
    code's near d_z ln(n) / 2. With n in the thousands and the published beta, the bound drives a classifier to chance.
  * The common Gaussians are formed from all rows at the round's end, not from the batches of a last epoch.
  * Deviations are at least 1e-4. A class that nobody has is N(0, 1), and r starts there.
  * A sum over clients is not a mean, so it is a gather with one answer for all, and a round has two exchanges.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from nestfed.algorithms.personal_method import PersonalMethod, count_classes
from nestfed.core.algorithm import Cohort, Local, Sample, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems import GaussianEncoder

SMALLEST_DEVIATION = 1e-4


@struct
class FedCR(PersonalMethod):
    """Trains own heads on a common random representation near class Gaussians that clients make together."""

    beta: float = setting("weight of the divergence from the class Gaussians", default=0.001, at_least=0)
    memory: float = setting("beta_2: weight of the new class Gaussians", default=1.0, at_least=0, at_most=1)
    divergence: str = setting(
        "KL(class || encoder) as in the released code, or KL(encoder || class) as in the bound",
        default="code",
        choices=("code", "bound"),
        static=True,
    )

    class State(NamedTuple):
        u: Shared
        v: Local
        mean: Shared  # the means of r [C, d_z]
        deviation: Shared

    def init(self, problem, params, draw, fed):
        if not isinstance(problem, GaussianEncoder):
            raise UserError(
                f"FedCR needs a random representation, which {type(problem).__name__} does not have; make it a "
                "nestfed.problems.GaussianEncoder, whose features are means and deviations."
            )
        u, v = params
        classes = count_classes(problem, u, v, draw(0))
        z = jax.eval_shape(lambda: problem.representations(u, draw(0)))
        mean = jnp.zeros((classes, z.shape[1] // 2), z.dtype)
        return self.State(u, v, mean, jnp.ones_like(mean))

    def step(self, problem, s, draw, fed):
        penalty = Partial(PENALTIES[self.divergence], s.mean, s.deviation, self.beta)
        gradient_u, gradient_v = problem.gradients(s.u, s.v, draw(0), penalty)
        s = self.descend(s, at(self.lr, fed.t), fed, u=gradient_u, v=gradient_v)
        return self.synchronise(problem, s, fed) if fed.sync else s

    def synchronise(self, problem, s, fed):
        experts = fed.rows.pass_over(lambda batch, weights: sum_class_experts(problem, s, batch, weights, fed.key))
        u = fed.mean(s.u, around=fed.server.u)
        precision, weighted = fed.gather(widen(*experts), reply=add_up)
        precision = 1 + precision
        blend = lambda old, new: (1 - self.memory) * old + self.memory * new
        deviation = jnp.maximum(precision**-0.5, SMALLEST_DEVIATION)
        return s._replace(
            u=u, mean=blend(fed.server.mean, weighted / precision), deviation=blend(fed.server.deviation, deviation)
        )


def sum_class_experts(
    problem: GaussianEncoder, s: Any, batch: PyTree, weights: Array | None, key: Array
) -> tuple[Array, Array]:
    """Return (sum of precisions, sum of means times precisions) [C, d_z] over the rows that count, by class."""
    mean, deviation = problem.gaussians(problem.representations(s.u, Sample(batch, key)))
    members = jax.nn.one_hot(batch[1], len(s.mean), axis=0, dtype=mean.dtype)
    if weights is not None:
        members = members * jnp.sign(weights).astype(mean.dtype)[None]
    precision = jnp.maximum(deviation, SMALLEST_DEVIATION) ** -2
    return members @ precision, members @ (precision * mean)


def widen(precision: Array, weighted: Array) -> tuple[Array, Array]:
    """Return the same Gaussians with deviations of at least SMALLEST_DEVIATION."""
    factor = jnp.minimum(1, SMALLEST_DEVIATION**-2 / jnp.where(precision > 0, precision, 1))
    return precision * factor, weighted * factor


def add_up(values: PyTree, cohort: Cohort, slot: Array, key: Array) -> PyTree:
    """Return the sum over those who take part."""
    add = lambda a: jnp.sum(jnp.where(cohort.present.reshape((-1,) + (1,) * (a.ndim - 1)), a, 0), 0)
    return jax.tree.map(add, values)


def compute_divergence(mean: Array, deviation: Array, other_mean: Array, other_deviation: Array) -> Array:
    """Return KL(N(mean, deviation^2) || N(other)) of each row, summed over entries."""
    ratio = (deviation / other_deviation) ** 2
    return 0.5 * jnp.sum(ratio + ((mean - other_mean) / other_deviation) ** 2 - 1 - jnp.log(ratio), axis=-1)


def compare_encoder_to_class(mean: Array, deviation: Array, beta: Array, features: Array, labels: Array) -> Array:
    ours = GaussianEncoder.gaussians(features)
    return beta * jnp.mean(compute_divergence(*ours, mean[labels], deviation[labels]))


def compare_class_to_encoder(mean: Array, deviation: Array, beta: Array, features: Array, labels: Array) -> Array:
    ours = GaussianEncoder.gaussians(features)
    return beta * jnp.mean(compute_divergence(mean[labels], deviation[labels], *ours))


PENALTIES = {"code": compare_class_to_encoder, "bound": compare_encoder_to_class}
