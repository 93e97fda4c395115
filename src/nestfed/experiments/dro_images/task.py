"""Classes of images, robustly: the losses of a network on images, limits on every class, accuracies per class.

Clients hold training images; validation and test images are nobody's and lie with the task. Images stay bytes in the
pool and are normalised (and varied, in training) where a loss is computed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nestfed.core.settings import setting, static, struct
from nestfed.core.task import Task
from nestfed.core.types import AnyArray, Array, PyTree
from nestfed.data.images import FederatedImages, crop_and_flip, normalise
from nestfed.experiments.image_tasks import AT_ONCE, convert_to_numbers, map_blocks
from nestfed.models import ImageModel
from nestfed.problems import Constrained
from nestfed.problems.robust import half_square


@dataclasses.dataclass(frozen=True)
class ImageLosses:
    """The cross-entropy of every image. A plain value: problems with equal ones share their programs."""

    model: ImageModel
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    vary: bool = True  # images are moved and mirrored at random before a loss is computed

    def __call__(self, params: PyTree, batch: PyTree, key: Array) -> Array:
        images = self.prepare(batch["image"])
        if self.vary:
            images = crop_and_flip(images, key)
        return optax.softmax_cross_entropy_with_integer_labels(self.model(params, images), batch["label"])

    def prepare(self, images: Array) -> Array:
        return normalise(images, np.asarray(self.mean, np.float32), np.asarray(self.deviation, np.float32))


@struct
class ClassLimits(Constrained):
    """min mean loss, such that no class has a mean loss above that of all images by more than `margin`.

    Every limit is multiplied by the class's share of all training images, which changes nothing about it: a batch then
    gives mean_i [image i is of the class] loss_i - share (mean_i loss_i + margin), right on average also where it holds
    no such image, and of the same size for rare classes as for frequent ones.
    """

    losses: Any = static()
    shares: AnyArray  # [classes]: of all training images
    margin: float = setting("how much worse than the average a class may be", default=0.05, at_least=0)
    weight_decay: float = setting("mu: (mu / 2) |x|^2 is added", default=0.0, at_least=0)

    def objective(self, x, batch, key):
        return jnp.mean(self.losses(x, batch, key)) + self.weight_decay * half_square(x)

    def constraints(self, x, batch, key):
        losses = self.losses(x, batch, key)
        member = jax.nn.one_hot(batch["label"], len(self.shares), axis=0, dtype=losses.dtype)
        return member @ losses / losses.size - self.shares * (jnp.mean(losses) + self.margin)


@struct
class ImageTask(Task):
    """Records loss, accuracy and the accuracy of the worst class, on training images and on those put aside."""

    losses: ImageLosses = static()
    aside: PyTree  # name ("validation", "test") -> {"image": ..., "label": ...}

    def metrics(self, server, client, data, fed):
        params = self.problem.tree(0, server.x)
        counts = lambda batch: self._count_predictions(params, batch) / batch["label"].size
        recorded = self._compute_rates("train", fed.mean(data.average(counts, rows_at_once=AT_ONCE)))
        for name, images in self.aside.items():
            recorded |= self._compute_rates(
                name, map_blocks(lambda batch: self._count_predictions(params, batch), images).sum(0)
            )
        return recorded

    def _count_predictions(self, params: PyTree, batch: PyTree) -> Array:
        """[3, classes]: images, those classified rightly, and the sum of losses, by class."""
        logits = self.losses.model(params, self.losses.prepare(batch["image"]))
        label = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        values = jnp.stack([jnp.ones_like(loss), (logits.argmax(1) == label).astype(loss.dtype), loss])
        return values @ jax.nn.one_hot(label, logits.shape[1], dtype=loss.dtype)

    def _compute_rates(self, part: str, counts: Array) -> dict[str, Array]:
        images, correct, loss = counts
        by_class = jnp.where(images > 0, correct / jnp.where(images > 0, images, 1), 1.0)
        return {
            f"{part}_accuracy": correct.sum() / images.sum(),
            f"{part}_worst_class_accuracy": by_class.min(),
            # The mean over classes: on an imbalanced part, what a balanced one would show.
            f"{part}_balanced_accuracy": by_class.mean(),
            f"{part}_loss": loss.sum() / images.sum(),
        }


def make_image_losses(images: FederatedImages, model: ImageModel, *, vary: bool = True) -> ImageLosses:
    return ImageLosses(model, convert_to_numbers(images.mean), convert_to_numbers(images.deviation), vary)


def make_image_task(
    problem: Any, images: FederatedImages, params: PyTree, *, losses: ImageLosses, batch_size: int
) -> Task:
    """The task of a problem on these images; validation and test images are evaluated as far as there are any."""
    return ImageTask.create(problem, images.rows, params, batch_size=batch_size, losses=losses, aside=images.aside)
