"""Sets of images in which the classes of the first half are rare: CIFAR10-ST and CIFAR100-ST."""

import dataclasses
import functools

import numpy as np

from nestfed.core.settings import UserError
from nestfed.data.images import Images
from nestfed.experiments.image_tasks import find_images


@functools.lru_cache(maxsize=4)
def load_short(name: str, keep: int) -> Images:
    """A set by its name, shortened."""
    return shorten_first_half(find_images(name), keep)


def shorten_first_half(images: Images, keep: int = 100) -> Images:
    """Of each class in the first half only the last `keep` training images; all else unchanged, in the same order.

    With 100 images this makes CIFAR10-ST and CIFAR100-ST of the full sets.
    """
    rows = mark_last_of_first_half(images.train_labels, len(images.class_names), keep)
    return dataclasses.replace(images, train_images=images.train_images[rows], train_labels=images.train_labels[rows])


def mark_last_of_first_half(labels: np.ndarray, classes: int, keep: int = 100) -> np.ndarray:
    """Mask of the rows to keep: the last `keep` of each class below classes / 2, and all of the others."""
    if not isinstance(keep, int | np.integer) or keep < 1:
        raise UserError(f"keep={keep!r} was given; give the whole number, from 1, of images kept of a class.")
    mask = labels >= classes // 2
    for label in range(classes // 2):
        mask[np.flatnonzero(labels == label)[-keep:]] = True
    return mask
