"""Images of two kinds: scores of a network, exact average precision.

Clients hold training images; validation and test images are nobody's and lie with the task.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from nestfed.core.settings import static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.data.images import FederatedImages, normalise
from nestfed.experiments.image_tasks import map_blocks
from nestfed.models import ImageModel
from nestfed.problems.ranking import find_precisions
from nestfed.problems.robust import MeanLoss


@dataclasses.dataclass(frozen=True)
class ImageScores:
    """The network's output for every image. A plain value: problems with equal ones share their programs."""

    model: ImageModel
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, params: PyTree, rows: PyTree, key: Array | None = None) -> Array:
        prepared = normalise(rows["image"], np.asarray(self.mean, np.float32), np.asarray(self.deviation, np.float32))
        return self.model(params, prepared)


@dataclasses.dataclass(frozen=True)
class BinaryLosses:
    """The logistic loss of every image, for methods that minimise means of losses."""

    scores: ImageScores

    def __call__(self, params: PyTree, rows: PyTree, key: Array) -> Array:
        scores = self.scores(params, rows)
        return optax.sigmoid_binary_cross_entropy(scores, rows["label"].astype(scores.dtype))


@struct
class ImageLoss(MeanLoss):
    """The mean loss of images, which has no interest in how many positives a client has."""

    def sample(self, data, key, size):
        return data.draw_rows(key, size)


@struct
class RankedImages(Task):
    """Records the average precision on the images put aside, exactly."""

    scores: ImageScores = static()
    aside: PyTree  # name ("validation", "test") -> {"image": ..., "label": ...}

    def metrics(self, server, client, data, fed):
        params = self.problem.params_of(server, client)
        recorded = {}
        for name, images in self.aside.items():
            scores = map_blocks(lambda batch: self.scores(params, batch), images).reshape(-1)
            together = jnp.zeros_like(images["label"])
            precision, _ = find_precisions(scores, images["label"] == 1, together, 1, 1.0)
            recorded[f"{name}_average_precision"] = precision[0]
        return recorded


def make_ranked_task(
    problem: Any, images: FederatedImages, params: PyTree, *, scores: ImageScores, batch_size: int
) -> Task:
    return RankedImages.create(problem, images.rows, params, batch_size=batch_size, scores=scores, aside=images.aside)
