"""Invariant logistic regression: the label of a point from noisy views of it, which are averaged before the loss.

Client k draws points a ~ N(center_k, spread^2 I) with labels b = sign(a^T truth); views of a point are
eta ~ N(a, noise^2 I). The objective is

    F(x) = mean_k E_a softplus(-b E[eta^T x | a]) + penalty sum_j shape x_j^2 / (1 + shape x_j^2),

and everything about it is known: E[eta^T x | a] = a^T x, and a^T x, a^T truth are jointly normal. Since
softplus(-b y) = softplus(-y) + [b < 0] y, F is the mean of a softplus of one normal number, which a sum over a fine
grid gives to rounding error, plus E[a^T x; a^T truth < 0], which has a closed form.

Data are drawn online: a client has no rows, its constants are its center.

Ref.   Wu et al., "Federated conditional stochastic optimization", NeurIPS 2023, section 5.1; Hu et al., "Biased
       stochastic first-order methods for conditional stochastic optimization and applications in meta learning",
       NeurIPS 2020.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.stats import norm

from nestfed.core.randomness import draw_words
from nestfed.core.rows import Rows
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, ArrayLike
from nestfed.problems import Conditional

GRID = np.linspace(-9.0, 9.0, 513)  # standard deviations; exact to 1e-8 up to deviations of about 20


@struct
class InvariantLogistic(Conditional):
    """The composition: softplus(-b mean_j eta_j^T x), with `inner_samples` views eta_j of every point."""

    truth: Array  # [d]: the model that gives the labels
    noise: float = setting("sigma_2: standard deviation of a view around its point", default=1.0, at_least=0)
    spread: float = setting("sigma_1: standard deviation of points around the client's center", default=1.0, above=0)
    penalty: float = setting("lambda: weight of the penalty", default=0.001, at_least=0)
    shape: float = setting("gamma: how fast the penalty saturates", default=10.0, at_least=0)

    def sample_outer(self, data, key, count):
        deviations = draw_normal(key, (count, self.truth.size), self.truth.dtype)
        points = data.constants[None] + self.spread * deviations
        return points, label_points(points, self.truth)

    def sample_inner(self, data, xi, key, count):
        """(view - point) / noise: a sweep over the noise then shares its draws."""
        return draw_normal(key, (count, self.truth.size), self.truth.dtype)

    def inner(self, x, xi, eta, key):
        return (xi[0] @ x + self.noise * (eta @ x))[None]

    def outer(self, y, xi, key):
        return jax.nn.softplus(-xi[1] * y[0])

    def regulariser(self, x):
        square = self.shape * x**2
        return self.penalty * jnp.sum(square / (1 + square))

    def objective(self, x: Array, center: Array) -> Array:
        """F of a client, exactly."""
        return self._expected(x, center, 0.0)

    def plug_in_objective(self, x: Array, center: Array) -> Array:
        """What the estimates of methods average to, exactly: F with the noise that the mean of the views has left."""
        return self._expected(x, center, self.noise**2 / self.inner_samples)

    def _expected(self, x: Array, center: Array, noise_variance: ArrayLike) -> Array:
        mean, deviation = center @ x, jnp.sqrt((self.spread**2 + noise_variance) * (x @ x))
        length = jnp.sqrt(self.truth @ self.truth)
        place = center @ self.truth / (self.spread * length)
        of_negatives = mean * norm.cdf(-place) - self.spread * (x @ self.truth) / length * norm.pdf(place)
        return compute_expected_softplus(-mean, deviation) + of_negatives + self.regulariser(x)

    def metrics(self, server, client, data, fed):
        return {"objective": fed.mean(self.objective(server.x, data.constants))}


@struct
class InnerMeanDrawn(InvariantLogistic):
    """The same in law with `views` for `inner_samples`, for the price of one view: eta^T x is linear in eta, so only
    the mean of the views enters value and gradient, and that is N(a, noise^2 / views I). A number that can be swept."""

    inner_samples: int = setting("the mean of all views is one sample", default=1, choices=(1,), static=True)
    views: float = setting("m: inner samples per outer sample", default=1.0, at_least=1)

    def sample_inner(self, data, xi, key, count):
        return super().sample_inner(data, xi, key, count) / self.views**0.5

    def plug_in_objective(self, x, center):
        return self._expected(x, center, self.noise**2 / self.views)


@struct
class MeanOfLosses(InvariantLogistic):
    """A contrast, not the composition: mean_j softplus(-b eta_j^T x). More views reduce its variance and leave its bias
    at that of one view. The program that was released with the 2023 paper computes this."""

    def composite(self, x, xi, etas, key):
        return jnp.mean(jax.vmap(lambda eta: self.outer(self.inner(x, xi, eta, key), xi, key))(etas))

    def plug_in_objective(self, x, center):
        return self._expected(x, center, self.noise**2)


@struct
class InvariantTask(Task):
    """Records F, the length of x, and accuracies on points put aside, which are seen without noise."""

    aside: Mapping[str, Array]  # name -> points [count, d]

    def metrics(self, server, client, data, fed):
        truth = self.problem.truth
        right = lambda points: jnp.mean(
            label_points(points, server.x) == label_points(points, truth), dtype=truth.dtype
        )
        accuracies = {f"{name}_accuracy": right(points) for name, points in self.aside.items()}
        recorded = super().metrics(server, client, data, fed) | {"norm": jnp.sqrt(server.x @ server.x)}
        return recorded | accuracies


def draw_normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal numbers by inversion of 32-bit words: on a CPU a seventh of the time of jax.random.normal, and runs spend
    most of theirs here. As there, float32 takes 23 bits of a word."""
    bits = 23 if dtype == jnp.float32 else 32
    words = draw_words(key, math.prod(shape)) >> (32 - bits)
    uniform = (words.astype(dtype) + 0.5) * 2.0 ** (1 - bits) - 1  # in (-1, 1), neither end
    return (2**0.5 * lax.erf_inv(uniform)).reshape(shape)


def label_points(points: Array, model: Array) -> Array:
    """+1 or -1 for every point."""
    return jnp.where(points @ model >= 0, 1.0, -1.0).astype(points.dtype)


def compute_expected_softplus(mean: Array, deviation: Array) -> Array:
    """E softplus(mean + deviation z) of a standard normal z. The trapezoidal rule: for a function that is analytic near
    the real line it converges exponentially, where Gauss-Hermite nodes are too far apart for large deviations."""
    weights = np.exp(-(GRID**2) / 2)
    weights = jnp.asarray(weights / weights.sum(), jnp.result_type(mean))
    return jnp.dot(jax.nn.softplus(mean + deviation * jnp.asarray(GRID, weights.dtype)), weights)


def draw_true_model(dimension: int = 10, *, seed: int = 0) -> Array:
    """A model drawn from N(0, I), the same in every precision."""
    return jax.random.normal(jax.random.key(seed), (dimension,), jnp.float32).astype(jnp.result_type(float))


def make_invariant_task(
    problem: InvariantLogistic,
    *,
    clients: int = 16,
    shift: float = 0.0,
    aside: Mapping[str, int] | None = None,
    batch_size: int = 1,
    seed: int = 0,
) -> InvariantTask:
    """A federation that starts at x = 0.

    shift   standard deviation of the clients' centers; 0: all clients draw from one distribution
    aside   how many points to put aside under which name, equally many of every client; {"test": 50,000} if not given
    seed    of centers and of the points put aside
    """
    aside = {"test": 50_000} if aside is None else aside
    if shift < 0:
        raise UserError(f"shift={shift!r} was given; a standard deviation is 0 or more.")
    for name, count in aside.items():
        if count < clients or count % clients:
            raise UserError(f"{count} points of {name!r} cannot come equally from {clients} clients; give a multiple.")
    keys = jax.random.split(jax.random.key(seed), 1 + len(aside))
    normal = lambda key, count: jax.random.normal(key, (count, *problem.truth.shape), problem.truth.dtype)
    centers = shift * normal(keys[0], clients)
    points = lambda key, count: jnp.tile(centers, (count // clients, 1)) + problem.spread * normal(key, count)
    put: dict[str, Any] = {name: points(key, n) for key, (name, n) in zip(keys[1:], aside.items(), strict=True)}
    start = jnp.zeros_like(problem.truth)
    return InvariantTask.create(problem, Rows.from_clients(constants=centers), start, batch_size=batch_size, aside=put)
