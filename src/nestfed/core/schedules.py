"""Step sizes that change with the step index, in place of numbers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from nestfed.core.settings import UserError, static, struct
from nestfed.core.types import Array, ArrayLike


@struct
class PowerDecay:
    """Step size scale / (offset + slope t)^power; use it in place of a number."""

    scale: float
    power: float = 1 / 3
    offset: float = 1.0
    slope: float = 1.0

    def __call__(self, t: Array) -> Array:
        return self.scale / (self.offset + self.slope * t) ** self.power


@struct
class StepDecay:
    """Step size `scale`, and factor times that from step `at` on."""

    scale: float
    at: float
    factor: float = 0.1

    def __call__(self, t: Array) -> Array:
        return self.scale * jnp.where(t < self.at, 1.0, self.factor)


@struct
class Schedule:
    """Any function of the step index (an optax schedule, say) in place of a number: `lr=Schedule(function=...)`."""

    function: Callable[[Array], Array] = static()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UserError(f"Schedule: function={self.function!r} was given; give a function of the step index.")

    def __call__(self, t: Array) -> Array:
        return self.function(t)


def at(rate: Any, t: ArrayLike) -> Any:
    """The value of a step size at step t, whether it is a number or a schedule."""
    return rate(t) if callable(rate) else rate
