"""Numbers with a common exponent: e^shift times value, so that exponentials of large losses stay finite.

Estimates of an inner function are sums, differences and means of its values. Where the function is a mean of
exponentials, such values overflow float32 from 88 on. A `Scaled` keeps the exponent apart, and all of that arithmetic,
the mean over clients included, only ever exponentiates differences of exponents.
"""

import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.types import Array

LOWEST = -1e30  # the exponent of zero: finite, and below every other one


@jax.tree_util.register_pytree_node_class
class Scaled:
    """e^shift * value: an array of numbers with one exponent, made so that the largest of them is about 1 in size.

    Add, subtract and multiply it as the numbers that it stands for.
    """

    __array_ufunc__ = None  # numpy's numbers leave products with it to __rmul__

    def __init__(self, shift: Array, value: Array):
        self.shift, self.value = shift, value

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Array], ...], None]:
        key = jax.tree_util.GetAttrKey
        return ((key("shift"), self.shift), (key("value"), self.value)), None

    def tree_flatten(self) -> tuple[tuple[Array, Array], None]:
        return (self.shift, self.value), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Array, Array]) -> "Scaled":
        return cls(*children)

    @classmethod
    def of(cls, value: Array) -> "Scaled":
        """Plain numbers as scaled ones."""
        value = jnp.asarray(value)
        return cls(jnp.zeros((), value.dtype), value).normal()

    @classmethod
    def zeros(cls, like: "Scaled") -> "Scaled":
        return cls(jnp.full(like.shift.shape, LOWEST, like.shift.dtype), jnp.zeros(like.value.shape, like.value.dtype))

    @classmethod
    def mean_exp(cls, exponents: Array) -> "Scaled":
        """The mean of e^z over the leading axis. The shift is a constant to derivatives, so these are exact."""
        shift = lax.stop_gradient(jnp.max(exponents))
        return cls(shift, jnp.mean(jnp.exp(exponents - shift), 0))

    def plain(self) -> Array:
        """As ordinary numbers, which may overflow."""
        return jnp.exp(self.shift) * self.value

    def log(self) -> Array:
        return self.shift + jnp.log(self.value)

    def normal(self) -> "Scaled":
        """The same numbers with the largest one of size 1. Without it a shift never falls with the numbers, and an
        estimate that came down from e^1000 would be lost to underflow."""
        size = jnp.max(jnp.abs(self.value))
        most = 0.999 * math.log(
            jnp.finfo(jnp.promote_types(size.dtype, "float32")).max
        )  # that an exponent falls at once: e^most is finite
        fall = jnp.maximum(jnp.log(jnp.where(size > 0, size, 1)), -most)
        shift = jnp.where(size > 0, self.shift + fall, LOWEST)
        # The factor is that of the rounded shift: no error adds up from step to step. Without a bound on it there are
        # NaN: a compiler may compute `size` twice, once as a rounding error and once as zero, and e^1e30 x 0 is none.
        factor = jnp.exp(jnp.minimum(self.shift - shift, most))
        return Scaled(shift, self.value * jnp.where(size > 0, factor, 1))

    def at_least(self, bound: float) -> "Scaled":
        """The larger one of each number and the bound, which is not negative."""
        largest = jnp.max(self.value)
        top = jnp.where(largest > 0, self.shift + jnp.log(jnp.where(largest > 0, largest, 1)), LOWEST)
        shift = jnp.maximum(top, 0)  # fits what comes out: where nothing is positive, the bound
        value = jnp.where(self.value > 0, self.value * jnp.exp(self.shift - shift), 0)
        raised = Scaled(shift, jnp.maximum(value, bound * jnp.exp(-shift))).normal()
        # Where nothing is below, nothing changes, not even a last digit: projections are counted.
        below = jnp.any(self.value < bound * jnp.exp(-self.shift))
        return Scaled(jnp.where(below, raised.shift, self.shift), jnp.where(below, raised.value, self.value))

    def reshape(self, shape: Any) -> "Scaled":
        return Scaled(self.shift, self.value.reshape(shape))

    def __add__(self, other: Any) -> "Scaled":
        other = other if isinstance(other, Scaled) else Scaled.of(other)
        shift = jnp.maximum(self.shift, other.shift)
        value = self.value * jnp.exp(self.shift - shift) + other.value * jnp.exp(other.shift - shift)
        return Scaled(shift, value).normal()

    __radd__ = __add__

    def __neg__(self) -> "Scaled":
        return Scaled(self.shift, -self.value)

    def __sub__(self, other: Any) -> "Scaled":
        return self + (-other)

    def __rsub__(self, other: Any) -> "Scaled":
        return (-self) + other

    def __mul__(self, factor: Any) -> "Scaled":
        return Scaled(self.shift, self.value * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Scaled":
        return Scaled(self.shift, self.value / divisor)

    def __repr__(self) -> str:
        return f"Scaled(shift={self.shift}, value={self.value})"


def is_scaled(node: Any) -> TypeGuard[Scaled]:
    return isinstance(node, Scaled)


def sum_masked(values: Any, inside: Array) -> Any:
    """The sum over the leading axis of those entries that are inside; `values` is an array or a batch of Scaled."""
    column = lambda a: inside.reshape((-1,) + (1,) * (a.ndim - 1))
    if not is_scaled(values):
        return jnp.where(column(values), values, 0).sum(0)
    shift = jnp.max(jnp.where(inside, values.shift, LOWEST))
    factor = jnp.where(inside, jnp.exp(jnp.minimum(values.shift - shift, 0)), 0)
    value = jnp.where(column(values.value), values.value * factor.reshape(column(values.value).shape), 0)
    return Scaled(shift, value.sum(0)).normal()
