"""Meta-learning tasks: sine waves, and characters of Omniglot from one or a few drawings of each.

A batch is a number of tasks, drawn anew in every step from what a client holds. The network standardises with the
statistics of the rows at hand, support and query apart, in training and in use: answers for query rows depend on the
other query rows ("transductive", as in the papers).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from nestfed.core.randomness import draw_words, fold
from nestfed.core.rows import Rows
from nestfed.core.settings import UserError, setting, static, struct
from nestfed.core.types import Array, PyTree
from nestfed.experiments.maml.data import SIDE, FederatedCharacters
from nestfed.models import CNN, Convolution, ImageModel, Perceptron
from nestfed.problems.maml import MAML, MetaTask

# Four convolutions of 64 channels without pooling, each followed by ReLU and then batch norm: 91,781 parameters.
CONV4 = CNN(
    outputs=5,
    norm="batch",
    layers=(*[Convolution(64, stride=2, padding="VALID")] * 3, Convolution(64, 2, padding="VALID")),
)

# ------------------------------------------------------------------------------------------------- sine waves

AMPLITUDES, PHASES, INPUTS = (0.1, 5.0), (0.0, float(np.pi)), (-5.0, 5.0)


@struct
class SineWaves(MAML):
    """A task is a wave a sin(x - p), seen at a few points; the loss is the mean squared error.

    A client's constants are the range of its phases.
    """

    model: Perceptron = static(default=Perceptron((40, 40)))
    shots: int = setting("points to adapt on", default=10, at_least=1, static=True)
    queries: int = setting("points to judge the adapted model by", default=10, at_least=1, static=True)

    def sample_task(self, data, key):
        amplitude = jax.random.uniform(fold(key, 0), minval=AMPLITUDES[0], maxval=AMPLITUDES[1])
        low, high = data.constants
        phase = low + (high - low) * jax.random.uniform(fold(key, 1))
        return self._draw_points((amplitude, phase), fold(key, 2), self.queries), (amplitude, phase)

    def sample_support(self, source, key):
        return self._draw_points(source, key, self.shots)

    def _draw_points(self, wave: tuple[Array, Array], key: Array, count: int) -> tuple[Array, Array]:
        amplitude, phase = wave
        x = jax.random.uniform(key, (count,), minval=INPUTS[0], maxval=INPUTS[1])
        return x, amplitude * jnp.sin(x - phase)

    def loss(self, params, rows, key):
        x, y = rows
        scaled = x / INPUTS[1]  # otherwise the first gradients are so large that step sizes must be tiny
        return jnp.mean((self.model(params, scaled[:, None]) - y) ** 2)


def make_sine_task(
    *,
    clients: int = 16,
    own_phases: bool = False,
    shots: int = 10,
    inner_lr: float = 0.03,
    batch_size: int = 5,
    seed: int = 0,
    tasks: int = 600,
    steps: int = 3,
    first_order: bool = False,
) -> MetaTask:
    """Waves of amplitudes 0.1 to 5 and phases 0 to pi, and a network of two hidden layers of 40.

    own_phases   every client has a range of phases to itself; otherwise they all have the whole range
    tasks        in an evaluation, for validation and for the test each, from the whole range of phases
    steps        of adaptation in an evaluation
    """
    problem = SineWaves(inner_lr=inner_lr, shots=shots, queries=shots, first_order=first_order)
    ends = np.linspace(*PHASES, clients + 1)
    low, high = (ends[:-1], ends[1:]) if own_phases else (np.full(clients, PHASES[0]), np.full(clients, PHASES[1]))
    whole = Rows.from_clients(constants=tuple(np.full(2, end) for end in PHASES))  # for validation and for the test
    return MetaTask.create(
        problem,
        Rows.from_clients(constants=(low, high)),
        problem.model.init(jax.random.key(seed), 1),
        batch_size=batch_size,
        aside=whole,
        task_seed=np.int32(seed),
        tasks=tasks,
        steps=steps,
    )


# ------------------------------------------------------------------------------------------------- Omniglot


@struct
class Characters(MAML):
    """A task is a number of different characters, a few drawings of each to adapt on and others to recognise.

    A row is a character with all its drawings. Turned by 90, 180 and 270 degrees it makes three more classes, which
    therefore lie with the same client.
    """

    model: ImageModel = static(default=CONV4)
    ways: int = setting("N: characters of a task", default=5, at_least=2, static=True)
    shots: int = setting("K: drawings of each to adapt on", default=1, at_least=1, static=True)
    queries: int = setting("other drawings of each to recognise", default=15, at_least=1, static=True)

    def sample_task(self, data, key):
        chosen = _draw_different(fold(key, 0), 4 * data.size, 4 * data.largest, self.ways)
        drawings = jax.vmap(_turn)(data.take(chosen // 4)["image"], chosen % 4)
        shuffled = jax.vmap(_shuffle)(drawings, self._make_keys(fold(key, 1)))
        return self._make_rows(shuffled[:, : self.queries]), shuffled[:, self.queries :]

    def sample_support(self, source, key):
        return self._make_rows(jax.vmap(_shuffle)(source, self._make_keys(key))[:, : self.shots])

    def _make_keys(self, key: Array) -> Array:
        return jax.vmap(lambda way: fold(key, way))(jnp.arange(self.ways))

    def _make_rows(self, drawings: Array) -> dict[str, Array]:
        ways, count, *side = drawings.shape
        return {"image": drawings.reshape(ways * count, *side, 1), "label": jnp.repeat(jnp.arange(ways), count)}

    def check(self, task):
        drawings = task.data.columns["image"].shape[1]
        if self.shots + self.queries > drawings:
            raise UserError(
                f"shots={self.shots} and queries={self.queries} were given, but there are {drawings} drawings of a "
                "character; their sum must not be larger."
            )
        if 4 * int(np.min(task.data.sizes)) < self.ways:
            raise UserError(
                f"a client has {int(np.min(task.data.sizes))} characters, 4 times as many classes with the turned "
                f"ones: not enough for tasks of ways={self.ways}; use fewer clients or ways."
            )
        super().check(task)

    def logits(self, params: PyTree, rows: dict[str, Array]) -> Array:
        return self.model(params, rows["image"].astype(jnp.float32) / 255)

    def loss(self, params, rows, key):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self.logits(params, rows), rows["label"]))

    def scores(self, params, rows, key):
        logits = self.logits(params, rows)
        right = logits.argmax(1) == rows["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
        return {"accuracy": jnp.mean(right.astype(loss.dtype)), "loss": jnp.mean(loss)}


def _draw_different(key: Array, size: Array, bound: int, count: int) -> Array:
    """`count` different whole numbers below `size`, which is at most `bound`."""
    priority = (draw_words(key, bound) >> 1).astype(jnp.int32)
    _, chosen = lax.top_k(jnp.where(jnp.arange(bound) < size, priority, -1), count)
    return chosen


def _shuffle(drawings: Array, key: Array) -> Array:
    return drawings[jnp.argsort(draw_words(key, len(drawings)))]


def _turn(drawings: Array, quarters: Array) -> Array:
    """All drawings of a character turned by so many quarters of a circle."""
    return jnp.stack([jnp.rot90(drawings, k, (1, 2)) for k in range(4)])[quarters]


def make_character_task(
    characters: FederatedCharacters,
    *,
    model: ImageModel = CONV4,
    shots: int = 1,
    queries: int = 15,
    inner_lr: float = 0.4,
    batch_size: int = 5,
    seed: int = 0,
    tasks: int = 600,
    at_once: int = 100,
    steps: int = 3,
) -> MetaTask:
    """Tasks of as many characters as the model has outputs.

    tasks     in an evaluation, for validation and for the test each; `at_once` of them side by side
    steps     of adaptation in an evaluation
    """
    problem = Characters(inner_lr=inner_lr, model=model, ways=model.outputs, shots=shots, queries=queries)
    return MetaTask.create(
        problem,
        characters.rows,
        model.init(jax.random.key(seed), (SIDE, SIDE, 1)),
        batch_size=batch_size,
        aside=characters.aside,
        task_seed=np.int32(seed),
        tasks=tasks,
        at_once=at_once,
        steps=steps,
    )
