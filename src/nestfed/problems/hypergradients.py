"""Estimators of the hypergradient of a bilevel problem,

    Phi(x, y) = df/dx - (d2g/dxdy) (d2g/dy2)^-1 df/dy.

Each maps points [(x, y), ...] to one estimate per point, with the same samples at all the points, as recursive methods
need. `draw(j)` is the j-th independent batch of the step; the estimators use j = 1, 2, ..., `batches` and leave 0 to
the lower gradient.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.random import fold_in, randint

from nestfed.core.algorithm import Sample
from nestfed.core.settings import setting, struct
from nestfed.core.types import Array
from nestfed.problems import Bilevel

Points = Sequence[tuple[Array, Array]]
Draw = Callable[[Any], Sample]
Solver = Callable[[list[Array]], list[Array]]


def _estimate_hypergradients(
    problem: Bilevel, points: Points, upper: Sample, mixed: Sample, inverse_vector: Solver
) -> list[Array]:
    """Return df/dx - (d2g/dxdy) z at each point, where inverse_vector(df/dy of all the points) gives the z."""
    gradients = [problem.grad_upper(x, y, upper) for x, y in points]
    solutions = inverse_vector([fy for _, fy in gradients])
    return [
        fx - problem.mixed_vector(x, y, mixed, z)
        for (x, y), (fx, _), z in zip(points, gradients, solutions, strict=True)
    ]


@struct
class Hypergradient(abc.ABC):
    """Estimates hypergradients; subclass it for an estimator of your own."""

    @property
    @abc.abstractmethod
    def batches(self) -> int:
        """Return the largest number j of a batch that it draws."""

    @abc.abstractmethod
    def __call__(self, problem: Bilevel, points: Points, draw: Draw) -> list[Array]:
        """Return one estimate per point."""


@struct
class Dense(Hypergradient):
    """Solves directly with the dense Hessian, which is exact on its batches."""

    share_batch: bool = setting("use one batch for all the factors", default=False, static=True)

    @property
    def batches(self):
        return 3

    def __call__(self, problem: Bilevel, points: Points, draw: Draw) -> list[Array]:
        upper, mixed, hessian = _draw_batches(draw, self.share_batch)
        solve = lambda vs: [problem.hessian_solve(x, y, hessian, v) for (x, y), v in zip(points, vs, strict=True)]
        return _estimate_hypergradients(problem, points, upper, mixed, solve)


@struct
class ConjugateGradient(Hypergradient):
    """Solves the linear system on one batch by a fixed number of conjugate gradient steps, which form no Hessian."""

    steps: int = setting("conjugate gradient steps", default=10, at_least=1, static=True)
    share_batch: bool = setting("use one batch for all the factors", default=False, static=True)

    @property
    def batches(self):
        return 3

    def __call__(self, problem: Bilevel, points: Points, draw: Draw) -> list[Array]:
        upper, mixed, hessian = _draw_batches(draw, self.share_batch)

        def solve(vs: list[Array]) -> list[Array]:
            return [
                solve_by_conjugate_gradient(lambda p: problem.hessian_vector(x, y, hessian, p), v, self.steps)
                for (x, y), v in zip(points, vs, strict=True)
            ]

        return _estimate_hypergradients(problem, points, upper, mixed, solve)


def solve_by_conjugate_gradient(product: Callable[[Array], Array], b: Array, steps: int) -> Array:
    """Solve product(z) = b from z = 0 in a fixed number of steps, whose cost is static, unlike that of a tolerance."""

    def step(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        z, r, p, rr = carry
        hp = product(p)
        curvature = jnp.vdot(p, hp)
        # Once solved exactly, r = p = 0: stop moving instead of dividing by zero.
        alpha = jnp.where(curvature > 0, rr / jnp.where(curvature > 0, curvature, 1), 0)
        z, r = z + alpha * p, r - alpha * hp
        new = jnp.vdot(r, r)
        return z, r, r + jnp.where(rr > 0, new / jnp.where(rr > 0, rr, 1), 0) * p, new

    return lax.fori_loop(0, steps, step, (jnp.zeros_like(b), b, b, jnp.vdot(b, b)))[0]


@struct
class Neumann(Hypergradient):
    """Takes lr * sum_{q=0}^{Q} prod_{j=Q-q+1}^{Q} (I - lr d2g/dy2(B_j)) for the inverse: Q + 1 terms in one pass.

    The relative bias is (1 - lr A)^{Q+1} for curvature A without noise; lr <= 1 / L is needed. With `share_batch` one
    batch serves all the factors, which is cheap and biased.
    """

    terms: int = setting("Q: Hessian-vector products", default=10, at_least=0, static=True)
    lr: float = setting("step of the series, at most 1 / L", default=0.1, above=0)
    share_batch: bool = setting("use one batch for all the factors", default=False, static=True)

    @property
    def batches(self):
        return max(3, 2 + self.terms)

    def __call__(self, problem: Bilevel, points: Points, draw: Draw) -> list[Array]:
        upper, mixed, _ = _draw_batches(draw, self.share_batch)

        def series(vs: list[Array]) -> list[Array]:
            def factor(j: Array, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
                remainders, sums = carry
                sample = upper if self.share_batch else draw(2 + self.terms - j)  # B_Q first, B_1 last
                remainders = [
                    r - self.lr * problem.hessian_vector(x, y, sample, r)
                    for (x, y), r in zip(points, remainders, strict=True)
                ]
                return remainders, [s + r for s, r in zip(sums, remainders, strict=True)]

            return [self.lr * s for s in lax.fori_loop(0, self.terms, factor, (vs, vs))[1]]

        return _estimate_hypergradients(problem, points, upper, mixed, series)


_LENGTH_KEY = 2**31 - 2  # far from any number that a user's function may fold in


@struct
class RandomTruncation(Hypergradient):
    """Takes (N / l) prod_{n=1}^{N'} (I - H / l) with N' uniform in 0 .. N - 1: its expectation is the N-term sum.

    All N - 1 factors are computed and those beyond N' are passed over, so that the cost is static.
    """

    terms: int = setting("N: terms of the sum it estimates", default=10, at_least=1, static=True)
    lr: float = setting("1 / l: step of the series, at most 1 / L", default=0.1, above=0)

    @property
    def batches(self):
        return max(3, 1 + self.terms)

    def __call__(self, problem: Bilevel, points: Points, draw: Draw) -> list[Array]:
        upper, mixed, _ = _draw_batches(draw, False)
        last = randint(fold_in(upper.key, _LENGTH_KEY), (), 0, self.terms)

        def chain(vs: list[Array]) -> list[Array]:
            def factor(n: Array, vectors: list[Array]) -> list[Array]:
                sample = draw(2 + n)
                return [
                    jnp.where(n <= last, v - self.lr * problem.hessian_vector(x, y, sample, v), v)
                    for (x, y), v in zip(points, vectors, strict=True)
                ]

            return [self.terms * self.lr * v for v in lax.fori_loop(1, self.terms, factor, vs)]

        return _estimate_hypergradients(problem, points, upper, mixed, chain)


@struct
class LinearSystem(Hypergradient):
    """Solves (d2g/dy2) z = df/dy by stochastic gradient steps z <- z - lr (H z - df/dy) from z = 0."""

    steps: int = setting("stochastic gradient steps", default=10, at_least=1, static=True)
    lr: float = setting("step size, at most 1 / L", default=0.1, above=0)

    @property
    def batches(self):
        return 2 + self.steps

    def __call__(self, problem: Bilevel, points: Points, draw: Draw) -> list[Array]:
        upper, mixed, _ = _draw_batches(draw, False)

        def solve(vs: list[Array]) -> list[Array]:
            def step(j: Array, zs: list[Array]) -> list[Array]:
                sample = draw(3 + j)
                return [
                    z - self.lr * (problem.hessian_vector(x, y, sample, z) - v)
                    for (x, y), z, v in zip(points, zs, vs, strict=True)
                ]

            return lax.fori_loop(0, self.steps, step, [jnp.zeros_like(v) for v in vs])

        return _estimate_hypergradients(problem, points, upper, mixed, solve)


def _draw_batches(draw: Draw, share: bool) -> tuple[Sample, Sample, Sample]:
    """Return batches of the upper gradient, of the mixed derivative and (first) of the Hessian."""
    upper = draw(1)
    return (upper, upper, upper) if share else (upper, draw(2), draw(3))
