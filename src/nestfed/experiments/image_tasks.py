"""What tasks on images share: evaluations in blocks, numbers of channels as plain values, and images that are made up,
for quick versions that anybody can run."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax import lax

from nestfed.core.types import Array, PyTree
from nestfed.data.images import Images, load_images

MADE_UP = "patterns"  # the name of images of MNIST's shape that no file holds
AT_ONCE = 100  # images per block of an evaluation, at every client: bounds the memory of sweeps


def map_blocks(function: Callable[[PyTree], Array], images: PyTree) -> Array:
    """function of one block of images after the other, which bounds the memory; its values side by side."""
    number = images["label"].shape[0]
    block = np.gcd(number, AT_ONCE)  # equal blocks: no image is left over
    return lax.map(function, jax.tree.map(lambda a: a.reshape(number // block, block, *a.shape[1:]), images))


def convert_to_numbers(values: Iterable[float]) -> tuple[float, ...]:
    """Of every channel, as a plain value: problems with equal ones share their programs."""
    return tuple(float(value) for value in values)


def find_images(name: str) -> Images:
    """Those of `load_images`, or made-up ones."""
    return make_up_images() if name == MADE_UP else load_images(name)


def make_up_images(train: int = 120, test: int = 40, classes: int = 10) -> Images:
    """So many images of every class: a coarse pattern of the class under noise. They mean nothing."""
    random = np.random.default_rng(0)
    patterns = blow_up(random.integers(0, 256, (classes, 7, 7)))

    def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(classes, dtype=np.int32), number)
        noise = random.integers(0, 256, (len(labels), 28, 28))
        return ((patterns[labels] + noise) // 2).astype(np.uint8)[..., None], labels

    return Images(*draw(train), *draw(test), tuple(f"pattern {i}" for i in range(classes)))


def blow_up(coarse: np.ndarray) -> np.ndarray:
    """[..., 28, 28] of [..., 7, 7]."""
    return coarse.repeat(4, axis=-2).repeat(4, axis=-1)
