"""Ranking positives above negatives: average precision as a conditional problem, the area under ROC as a saddle.

`scores(x, rows, key)` gives one raw output per row; x is the model's parameter tree, rows are what clients hold.

    AveragePrecision   a smooth surrogate of the area under the precision-recall curve, over pairs of rows
    AreaUnderRoc       the square surrogate of the area under the ROC curve, which a dual variable makes a sum over rows
    ranked             the exact average precision of given scores

A client's rows lie negatives first, then positives; `constants["positives"]` counts the latter.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nestfed.core.algorithm import Sample
from nestfed.core.randomness import fold
from nestfed.core.rows import ClientRows
from nestfed.core.settings import UserError, setting, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.problems import Conditional, Minimax, oracle
from nestfed.problems.base import Functions
from nestfed.problems.robust import half_square

_DECAY = "mu: (mu / 2) |model|^2 is added"
ROWS_AT_ONCE = 256  # this bounds the memory of the objective over all rows


@struct
class RankingBatch:
    """Holds rows of one client, positives first; every positive is paired with all rows, itself included."""

    rows: PyTree  # every leaf [m, ...]
    positive: Array  # [m]
    places: Array  # [b]: which of the client's positives the first rows are, 0 .. positives - 1
    largest: int = static()  # rows of the largest client: bounds all places


@struct
class AveragePrecision(Conditional):
    """min_x -mean over positives z+ of y_1 / y_2, y = the mean over rows z of (1[z positive] l(z+, z), l(z+, z)).

    l(z+, z) = max(margin - h(z+) + h(z), 0)^2 with h the sigmoid of the score: an upper bound of margin^2 1[h(z) >=
    h(z+)], so y_1 / y_2 stands for the precision at the threshold h(z+), and its mean for average precision.

    A batch has `positives` positives and then negatives, `inner_samples` rows in all. Each row is scored once, and each
    positive is paired with the whole batch: itself included, so y_2 is never below margin^2 / m. The mean in y is thus
    over such batches: 1 / m on the positive itself, (b - 1) / m on all positives and (m - b) / m on all negatives,
    whatever the share of positives in the data. That reweighs the precision; average precision itself is for
    evaluation.

    A client without positives, or without negatives, has nothing to rank: the other rows take the missing ones' places
    in its batches, its objective is the constant 0, or -1, and its gradient is the regulariser's.
    """

    scores: Callable[[PyTree, PyTree, Array], Array] = static()
    margin: float = setting("s: how far a positive should lie above a negative", default=0.1, above=0)
    minimised: ClassVar[str | None] = "objective"

    positives: int = setting("b: positives per batch", default=1, at_least=1, static=True)
    inner_samples: int = setting("m: rows per batch, positives included", default=2, at_least=2, static=True)
    weight_decay: float = setting(_DECAY, default=0.0, at_least=0)

    def sample(self, data, key, size):
        positives, negatives = _split_halves(data)
        # Rows know their number in the pool, for methods that remember something of every positive.
        numbered = dataclasses.replace(
            positives, columns=(data.columns, jnp.arange(jax.tree.leaves(data.columns)[0].shape[0]))
        )
        first, numbers = numbered.draw_rows(fold(key, 0), self.positives)
        others = negatives.draw_rows(fold(key, 1), self.inner_samples - self.positives)
        present, total = data.constants["positives"], jnp.arange(self.inner_samples)
        return RankingBatch(
            rows=jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, others),
            positive=((total < self.positives) | (present == data.size)) & (present > 0),
            places=numbers - positives.offset,
            largest=data.largest,
        )

    def inner_values(self, x: Array, sample: Sample) -> Array:
        """Return y of the batch's first rows, [b, 2]."""
        batch = sample.batch
        h = jax.nn.sigmoid(self.scores(self.tree(0, x), batch.rows, sample.key))
        losses = self.pair_losses(h[: self.positives], h)
        return jnp.stack([losses @ batch.positive.astype(h.dtype), losses.sum(1)], 1) / self.inner_samples

    def pair_losses(self, above: Array, below: Array) -> Array:
        """Return l of every pair, [len(above), len(below)]."""
        return jnp.maximum(self.margin - above[:, None] + below[None, :], 0) ** 2

    def outer(self, y, xi=None, key=None):
        """Return f(y) = -y_1 / y_2."""
        return -y[..., 0] / y[..., 1]

    def regulariser(self, x):
        return self.weight_decay * half_square(x)

    def plug_in(self, x: Array, sample: Sample) -> Array:
        values = self.outer(self.inner_values(x, sample))
        # Without positives or without negatives the values are constant; rounding must not make them a direction.
        mean = jnp.mean(jnp.where(_is_rankable(sample.batch), values, lax.stop_gradient(values)))
        return mean + self.regulariser(self.tree(0, x))

    @oracle("VJP")
    def inner_vjp(self, x: Array, sample: Sample) -> tuple[Array, Callable[..., Any]]:
        """Return (y of the batch's positives [b, 2], pull-back), for methods with an estimate of y of their own."""
        return jax.vjp(lambda x: self.inner_values(x, sample), x)

    def composed_gradient(self, x: Array, pull: Callable[..., Any], ys: Array, sample: Sample) -> Array:
        """Return mean_i J_i^T grad f(y_i) plus grad regulariser, on the batch of `_, pull = inner_vjp(x, sample)`."""
        slope = jax.grad(lambda y: jnp.mean(self.outer(y)))(ys)
        (gradient,) = pull(jnp.where(_is_rankable(sample.batch), slope, 0))
        return gradient + self.weight_decay * x

    def outer_rows(self, sample: Sample) -> tuple[Array, int]:
        """Return (which of the client's positives the batch's outer samples are, a bound on these numbers)."""
        return sample.batch.places, sample.batch.largest

    def objective(self, x: Array, data: ClientRows, key: Array) -> Array:
        """Return the exact objective of the client: y of every positive is its mean over all batches that hold it."""
        tree, numbers = self.tree(0, x), jnp.arange(data.largest)
        score = lambda i: self.scores(tree, data.take(i[None]), key)[0]
        h = jax.nn.sigmoid(lax.map(score, jnp.minimum(numbers, data.size - 1), batch_size=ROWS_AT_ONCE))
        present = data.constants["positives"]
        positive = (numbers >= data.size - present) & (numbers < data.size)
        negative = numbers < data.size - present
        drawn = jnp.where(present < data.size, self.positives, self.inner_samples) - 1  # positives besides this one
        spread = lambda which, number: number * which.astype(h.dtype) / jnp.maximum(which.sum(), 1).astype(h.dtype)
        first, others = spread(positive, drawn), spread(negative, self.inner_samples - 1 - drawn)
        weights = jnp.stack([first, first + others], 1)
        inner = lambda i: (self.margin**2 + self.pair_losses(h[i][None], h)[0] @ weights) / self.inner_samples
        values = lax.map(lambda i: self.outer(inner(i)), numbers, batch_size=ROWS_AT_ONCE)
        mean = jnp.sum(jnp.where(positive, values, 0)) / jnp.maximum(present, 1).astype(h.dtype)
        return mean + self.regulariser(tree)

    def metrics(self, server, client, data, fed):
        return {"objective": fed.mean(self.objective(server.x, data, fed.key))}

    def functions(self, params, key) -> Functions:
        x = self.tree(0, params[0])
        yield "scores", 1, lambda batch: self.scores(x, batch.rows, key)

    def check(self, task):
        if self.positives >= self.inner_samples:
            raise UserError(
                f"a batch of inner_samples={self.inner_samples} rows with positives={self.positives} was asked for; it "
                "needs a negative too: choose fewer positives, or more rows."
            )
        if task.batch_size != self.inner_samples:
            raise UserError(
                f"batch_size={task.batch_size} was given, but AveragePrecision has batches of inner_samples="
                f"{self.inner_samples} rows; make the two numbers equal."
            )
        _check_counts(task)
        super().check(task)


@struct
class AreaUnderRoc(Minimax):
    """min over (model, a, b) max over alpha of the mean over rows, p the share of positives, of

    (1 - p) (h - a)^2 1+  +  p (h - b)^2 1-  +  2 (1 + alpha) (p h 1- - (1 - p) h 1+)  -  p (1 - p) alpha^2,

    which is p (1 - p) (mean over pairs of (1 - h+ + h-)^2 - 1) once a, b and alpha are solved for: they are then the
    mean h of positives, that of negatives, and b - a. Rows have a column "label", 1 for positives and 0 for negatives;
    batches are uniform draws. h is the sigmoid of the score, or the score.

    With p the share among all clients' rows, and clients weighed by their rows, the problem is that of the pooled rows,
    however the positives are spread.
    """

    scores: Callable[[PyTree, PyTree, Array], Array] = static()
    positive_share: float = setting("p: share of positives among all rows", above=0, at_most=1)
    link: str = setting("h as a function of the score", default="sigmoid", choices=("sigmoid", "identity"), static=True)
    weight_decay: float = setting(_DECAY, default=0.0, at_least=0)

    def start(self, model: PyTree) -> tuple[PyTree, Array]:
        """Return the starting point for Task.create: x = {"model", "a", "b"} with a = 1 and b = 0, and alpha = 0."""
        dtype = jnp.result_type(*jax.tree.leaves(model))
        return {"model": model, "a": jnp.ones((), dtype), "b": jnp.zeros((), dtype)}, jnp.zeros((), dtype)

    def params_of(self, server, client):
        return super().params_of(server, client)["model"]

    def sample(self, data, key, size):
        return data.draw_rows(key, size)

    def value(self, x, alpha, batch, key):
        p, score = self.positive_share, self.scores(x["model"], batch, key)
        h = jax.nn.sigmoid(score) if self.link == "sigmoid" else score
        positive = (batch["label"] > 0).astype(h.dtype)
        own = (1 - p) * (h - x["a"]) ** 2 * positive + p * (h - x["b"]) ** 2 * (1 - positive)
        gap = p * h * (1 - positive) - (1 - p) * h * positive
        regulariser = self.weight_decay * half_square(x["model"])
        return jnp.mean(own + 2 * (1 + alpha) * gap) - p * (1 - p) * alpha**2 + regulariser

    def metrics(self, server, client, data, fed):
        return super().metrics(server, client, dataclasses.replace(data, constants=None), fed)


def find_precisions(
    scores: Array, positive: Array, segment: Array, segments: int, recall: float
) -> tuple[Array, Array]:
    """Return (average precision, best precision at this recall or a larger one) of every segment of rows, exactly; both
    are NaN for a segment without positives. Rows of equal score come together."""
    place = jnp.arange(scores.size)
    owner, falling, positive = lax.sort((segment, -scores, positive.astype(place.dtype)), num_keys=2)
    new = jnp.concatenate([jnp.ones(1, bool), (owner[1:] != owner[:-1]) | (falling[1:] != falling[:-1])])
    tie = jnp.cumsum(new) - 1
    last = jax.ops.segment_max(place, tie, scores.size)[tie]  # the last row of the same score
    first = jnp.searchsorted(owner, owner)  # the first row of the segment
    seen = jnp.cumsum(positive)
    hits, shown = seen[last] - (seen - positive)[first], last - first + 1
    number = jax.ops.segment_sum(positive, owner, segments)
    as_float = lambda a: a.astype(scores.dtype)
    precision, reached = as_float(hits) / as_float(shown), as_float(hits) / as_float(jnp.maximum(number, 1))[owner]
    total = jax.ops.segment_sum(as_float(positive) * precision, owner, segments)
    # Precision is largest where a positive was the last to come: the rows after it only lower it.
    enough = (positive == 1) & (reached >= jnp.asarray(recall, scores.dtype))
    best = jax.ops.segment_max(jnp.where(enough, precision, -jnp.inf), owner, segments)
    some = number > 0
    return jnp.where(some, total / as_float(jnp.maximum(number, 1)), jnp.nan), jnp.where(some, best, jnp.nan)


def _split_halves(data: ClientRows) -> tuple[ClientRows, ClientRows]:
    """Return (positives, negatives) of a client, or all its rows where there are none: a draw is always its own."""
    positives = data.constants["positives"].astype(data.size.dtype)
    negatives = data.size - positives
    both = (positives > 0) & (negatives > 0)
    view = lambda offset, size: dataclasses.replace(
        data, offset=jnp.where(both, offset, data.offset), size=jnp.where(both, size, data.size)
    )
    return view(data.offset + negatives, positives), view(data.offset, negatives)


def _is_rankable(batch: RankingBatch) -> Array:
    return batch.positive.any() & ~batch.positive.all()


def _check_counts(task: Task) -> None:
    constants = task.data.constants
    if task.data.columns is None or not isinstance(constants, dict) or "positives" not in constants:
        raise UserError(
            "AveragePrecision draws from data with rows and a constant 'positives', the number of positives of every "
            "client; lay every client's rows negatives first and give Rows constants={'positives': [...]}."
        )
    counts, sizes = np.asarray(constants["positives"]), np.asarray(task.data.sizes)
    if not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any() or (counts > sizes).any():
        raise UserError(
            f"constants['positives']={counts.tolist()} was given for clients with {sizes.tolist()} rows; give each "
            "client a whole number of positives, from 0 to its number of rows."
        )
