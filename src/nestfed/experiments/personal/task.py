"""Classes of images with a model of each client's own: the problem, the networks, and clients that come later.

A network is an extractor, whose last activations are the representation, and a linear head over all classes. Images
stay bytes in the pool; they are normalised (and varied, in training) where a network sees them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nestfed.core.algorithm import Algorithm
from nestfed.core.randomness import fold
from nestfed.core.rows import Rows
from nestfed.core.settings import static, struct
from nestfed.core.types import Array, PyTree
from nestfed.data.images import crop_and_flip, normalise
from nestfed.experiments.personal.data import PersonalImages
from nestfed.models import CNN, Convolution, ImageModel, dense, init_dense
from nestfed.problems import GaussianEncoder, Personalised
from nestfed.verbs.personalise import PersonalTask, adapt, fine_tune


def make_five_layers(*channels: int, outputs: int = 10) -> CNN:
    """Two 5 x 5 convolutions, each with 2 x 2 pooling, two layers of 1024 and a linear head."""
    layers = tuple(Convolution(number, 5, padding="VALID", pool=2) for number in channels)
    return CNN(layers=layers, hidden=(1024, 1024), outputs=outputs)


GREY, COLOUR = make_five_layers(4, 12), make_five_layers(64, 64)  # extractors of 1,248,548 and 2,796,352 numbers


@struct
class ImageClasses(Personalised):
    """Cross-entropy over all classes; the representation is what the head of the network sees."""

    model: ImageModel = static()
    mean: tuple[float, ...] = static(default=(0.5,))  # of pixels from 0 to 1, by channel
    deviation: tuple[float, ...] = static(default=(0.5,))
    vary: bool = static(default=False)  # images of a batch are moved and mirrored at random

    def init(self, key: Array, shape: tuple[int, int, int]) -> PyTree:
        """A starting point for images of this shape."""
        return self.model.init(key, shape)

    def split(self, params):
        return params["extractor"], params["head"]

    def sample(self, data, key, size):
        images, labels = data.draw(key, size)
        return (crop_and_flip(self.prepare(images), fold(key, 1)) if self.vary else images), labels

    def prepare(self, images: Array) -> Array:
        """Bytes are normalised; what is not bytes was varied, and normalised before that."""
        if jnp.issubdtype(images.dtype, jnp.floating):
            return images
        return normalise(images, np.asarray(self.mean, np.float32), np.asarray(self.deviation, np.float32))

    def features(self, u, inputs, key):
        return self.model.features(u, self.prepare(inputs))

    def head(self, v, z):
        return dense(v, z.astype(v["weight"].dtype))

    def loss(self, outputs, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, labels))


@struct
class RandomImageClasses(GaussianEncoder, ImageClasses):
    """The same with a random representation, as FedCR needs it: the network's last hidden layer is replaced by a linear
    one that gives `width` means and as many deviations."""

    width: int = static(default=256)

    @property
    def body(self) -> ImageModel:
        model = self.model
        return dataclasses.replace(model, hidden=model.hidden[:-1]) if isinstance(model, CNN) else model

    def init(self, key, shape):
        below = self.body.init(fold(key, 0), shape)
        inside = below["head"]["weight"].shape[0]
        extractor = {"body": below["extractor"], "encoder": init_dense(fold(key, 1), inside, 2 * self.width)}
        return {"extractor": extractor, "head": init_dense(fold(key, 2), self.width, self.model.outputs)}

    def features(self, u, inputs, key):
        return dense(u["encoder"], self.body.features(u["body"], self.prepare(inputs)))


def make_personal_task(
    images: PersonalImages,
    problem: ImageClasses,
    *,
    seed: int = 0,
    batch_size: int = 48,
    fine_tune_steps: int = 0,
    fine_tune_lr: float = 0.01,
) -> PersonalTask:
    """The task of these clients, judged by their own test images; all start from one point."""
    return PersonalTask.create(
        problem,
        images.train,
        problem.init(jax.random.key(seed), images.shape),
        test=images.test,
        batch_size=batch_size,
        fine_tune_steps=fine_tune_steps,
        fine_tune_lr=fine_tune_lr,
    )


def measure_newcomer(
    algorithm: Algorithm, task: PersonalTask, server: Any, newcomer: tuple[Rows, Rows], *, rounds: int, seed: int = 0
) -> tuple[float, float]:
    """Test accuracy of a client that was not there in training, after so many rounds against a server that does not
    change, and after fine-tuning (as the task says) on top of that."""
    train, test = newcomer
    alone = dataclasses.replace(task, data=train, test=test, weights=np.ones(1, np.asarray(task.weights).dtype))
    own = adapt(algorithm, alone, server, rounds=rounds, seed=seed)
    before, after = _measure_accuracies(alone, server, own, jax.random.key(seed))
    return float(before), float(after)


@jax.jit
def _measure_accuracies(task: PersonalTask, server: Any, client: Any, key: Array) -> tuple[Array, Array]:
    problem, test = task.problem, task.test
    assert test is not None
    u, v = problem.model_of(server, client)
    tuned = fine_tune(
        problem,
        u,
        v,
        task.data.client(0),
        key,
        steps=task.fine_tune_steps,
        lr=task.fine_tune_lr,
        what=task.fine_tune,
        batch_size=task.batch_size,
    )
    inputs, labels = test.columns
    right = lambda u, v: jnp.mean(problem.outputs(u, v, inputs, key).argmax(1) == labels)
    return right(u, v), right(*tuned)
