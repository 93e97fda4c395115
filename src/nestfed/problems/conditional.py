"""P4, conditional: a function of a conditional mean."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.random import fold_in

from nestfed.core.algorithm import Sample
from nestfed.core.rows import ClientRows
from nestfed.core.settings import setting, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems.base import Functions, Problem, oracle


@struct
class Conditional(Problem):
    """min_x mean_k E_xi outer( E_{eta | xi} inner(x, xi, eta); xi ) + regulariser(x).

    Subclasses define sample_outer(data, key, count) -> xi with leading axis `count`, sample_inner(data, xi, key, count)
    for one xi, inner(x, xi, eta, key) -> vector for one pair, and outer(y, xi, key). The inner mean is per outer
    sample; the same inner samples enter value and derivative, in one reverse pass: no Jacobian is formed.
    """

    inner_samples: int = setting("m: inner samples per outer sample", default=1, at_least=1, static=True)

    family: ClassVar[str] = "conditional"

    def sample_outer(self, data: ClientRows, key: Array, count: int) -> PyTree:
        return data.draw_rows(key, count)

    def sample_inner(self, data: ClientRows, xi: PyTree, key: Array, count: int) -> PyTree:
        raise self.missing("sample_inner(data, xi, key, count)")

    def inner(self, x: PyTree, xi: PyTree, eta: PyTree, key: Array) -> Array:
        raise self.missing("inner(x, xi, eta, key)")

    def outer(self, y: Array, xi: PyTree, key: Array) -> Array:
        raise self.missing("outer(y, xi, key)")

    def regulariser(self, x: PyTree) -> Array:
        return jnp.zeros(())

    def composite(self, x: PyTree, xi: PyTree, etas: PyTree, key: Array) -> Array:
        """Return outer(mean_j inner(x, xi, eta_j)) for one xi; override it where a fused form is cheaper."""
        values = jax.vmap(lambda eta: self.inner(x, xi, eta, key))(etas)
        return self.outer(jnp.mean(values, 0), xi, key)

    def sample(self, data, key, size) -> PyTree:
        outer_key, inner_key = fold_in(key, 0), fold_in(key, 1)
        xi = self.sample_outer(data, outer_key, size)
        keys = jax.vmap(lambda i: fold_in(inner_key, i))(jnp.arange(size))
        return xi, jax.vmap(lambda one, k: self.sample_inner(data, one, k, self.inner_samples))(xi, keys)

    def plug_in(self, x: Array, sample: Sample) -> Array:
        """Return the mean over outer samples of the composition with their inner samples, plus the regulariser."""
        x = self.tree(0, x)
        xis, etas = sample.batch
        values = jax.vmap(lambda xi, eta: self.composite(x, xi, eta, sample.key))(xis, etas)
        return jnp.mean(values) + self.regulariser(x)

    @oracle("VAL")
    def value(self, x: Array, sample: Sample) -> Array:
        return self.plug_in(x, sample)

    @oracle("GRAD")
    def gradient(self, x: Array, sample: Sample) -> Array:
        return jax.grad(self.plug_in)(x, sample)

    def inner_values(self, x: Array, sample: Sample) -> Array:
        """Return [outer samples, entries]: the inner mean of every outer sample of the batch."""
        x = self.tree(0, x)
        pair = lambda xi, eta: self.inner(x, xi, eta, sample.key)
        return jax.vmap(lambda xi, etas: jnp.mean(jax.vmap(lambda eta: pair(xi, eta))(etas), 0))(*sample.batch)

    @oracle("VAL")
    def inner_value(self, x: Array, sample: Sample) -> Array:
        """Return the inner value averaged over outer samples too; methods for compositions keep an estimate of it."""
        return jnp.mean(self.inner_values(x, sample), 0)

    @oracle("VJP")
    def inner_vjp(self, x: Array, sample: Sample) -> tuple[Array, Callable[..., Any]]:
        """Return (the batch's inner values [outer samples, entries], the pull-back of a derivative for each)."""
        return jax.vjp(lambda x: self.inner_values(x, sample), x)

    def composed_gradient(self, x: Array, pull: Callable[..., Any], ys: Array, sample: Sample) -> Array:
        """Return the mean over outer samples of J inner_i^T grad outer_i(y_i), on the batch of `values, pull =
        inner_vjp(x, sample)`, plus the regulariser's gradient; this is exactly `gradient` if ys are the values."""
        xis, _ = sample.batch
        slopes = jax.vmap(jax.grad(lambda y, xi: self.outer(y, xi, sample.key)))(ys, xis)
        (gradient,) = pull(slopes / len(ys))
        if not self.defines("regulariser"):
            return gradient
        return gradient + jax.grad(lambda x: self.regulariser(self.tree(0, x)))(x)

    def functions(self, params, key) -> Functions:
        x = self.tree(0, params[0])
        first = lambda batch: jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), batch)
        yield "composite", 0, lambda batch: self.composite(x, first(batch[0]), first(batch[1]), key)
        yield "regulariser", 0, lambda batch: self.regulariser(x)
