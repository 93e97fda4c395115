"""P1, single level: an average of losses."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Sample
from nestfed.core.settings import struct
from nestfed.core.types import Array, PyTree
from nestfed.problems.base import Functions, Problem, oracle


@struct
class SingleLevel(Problem):
    """min_x mean_k E loss(x; batch of client k).

    Subclasses define loss(x, batch, key); or, for methods that weigh the rows of a batch themselves,
    per_row(x, batch, key) -> [rows] and perhaps regulariser(x): the mean of the one plus the other is then the loss.
    """

    family: ClassVar[str] = "single level"
    minimised: ClassVar[str | None] = "loss"

    def per_row(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("loss(x, batch, key), or per_row(x, batch, key) for methods that weigh the rows of a batch")

    def regulariser(self, x: PyTree) -> Array:
        """Return what is added to the mean of `per_row`; it is zero by default."""
        return jnp.zeros(())

    def loss(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        return jnp.mean(self.per_row(x, batch, key)) + self.regulariser(x)

    @oracle("VAL")
    def value(self, x: Array, sample: Sample) -> Array:
        return self.loss(self.tree(0, x), sample.batch, sample.key)

    @oracle("GRAD")
    def gradient(self, x: Array, sample: Sample) -> Array:
        return jax.grad(lambda x: self.loss(self.tree(0, x), sample.batch, sample.key))(x)

    @oracle("VAL")
    def row_values(self, x: Array, sample: Sample) -> Array:
        """Return the losses of the batch's rows."""
        return self.per_row(self.tree(0, x), sample.batch, sample.key)

    @oracle("GRAD")
    def weighted_gradient(self, x: Array, weights: Array, sample: Sample) -> Array:
        """Return the gradient of sum_i weights_i loss_i, plus the regulariser's."""
        weighted = lambda x: jnp.vdot(weights, self.per_row(x, sample.batch, sample.key)) + self.regulariser(x)
        return jax.grad(lambda x: weighted(self.tree(0, x)))(x)

    def functions(self, params, key) -> Functions:
        yield "loss", 0, lambda batch: self.loss(self.tree(0, params[0]), batch, key)

    def metrics(self, server, client, data, fed):
        return {"loss": fed.mean(data.average(lambda batch: self.loss(self.tree(0, server.x), batch, fed.key)))}
