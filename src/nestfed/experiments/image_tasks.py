"""What tasks on images share: evaluations in blocks, and numbers of channels as plain values."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax import lax

from nestfed.core.types import Array, PyTree

AT_ONCE = 100  # images per block of an evaluation, at every client: bounds the memory of sweeps


def in_blocks(function: Callable[[PyTree], Array], images: PyTree) -> Array:
    """function of one block of images after the other, which bounds the memory; its values side by side."""
    number = images["label"].shape[0]
    block = np.gcd(number, AT_ONCE)  # equal blocks: no image is left over
    return lax.map(function, jax.tree.map(lambda a: a.reshape(number // block, block, *a.shape[1:]), images))


def numbers(values: Iterable[float]) -> tuple[float, ...]:
    """Of every channel, as a plain value: problems with equal ones share their programs."""
    return tuple(float(value) for value in values)
