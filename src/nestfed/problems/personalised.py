"""P5, personalised: every client has a model of its own beside what all of them share."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Sample
from nestfed.core.settings import UserError, setting, struct, summarise_error
from nestfed.core.types import Array, ArrayLike, PyTree
from nestfed.problems.base import Functions, Problem, oracle

Penalty = Callable[[Array, Array], Array]  # (representations, labels) -> what is added to the loss of a batch


@struct
class Personalised(Problem):
    """min over clients' (u_k, v_k) and a common u_0 of mean_k [ loss_k(u_k, v_k) + (coupling / 2) H_k(u_k, u_0) ].

    Subclasses define split(params) -> (u, v), features(u, inputs, key) -> [rows, width], head(v, z) -> outputs and
    loss(outputs, labels); a batch is (inputs, labels). H compares the representations of the client's extractor and of
    the common one on the same inputs: reg(z_local, z_global), by default the mean squared distance. What varies inputs
    at random belongs in `sample`: both extractors then see the same variation, and passes over all rows see none.

    States of algorithms name the parts of the model with which a client predicts `u` and `v`; where a client has one of
    its own, it is that one, otherwise the server's (`model_of`). A common model beside it is `u0`, `v0`.
    """

    reduction: str = setting(
        "H over a batch: the mean over its rows, or their sum", default="mean", choices=("mean", "sum"), static=True
    )

    family: ClassVar[str] = "personalised"
    variables: ClassVar[tuple[str, ...]] = ("u", "v")
    minimised: ClassVar[str | None] = "loss"

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        raise self.missing("split(params)")

    def features(self, u: PyTree, inputs: PyTree, key: Array) -> Array:
        raise self.missing("features(u, inputs, key)")

    def head(self, v: PyTree, z: Array) -> Array:
        raise self.missing("head(v, z)")

    def loss(self, outputs: Array, labels: Array) -> Array:
        raise self.missing("loss(outputs, labels)")

    def reg(self, z_local: Array, z_global: Array) -> Array:
        return jnp.mean(jnp.sum((z_local - z_global) ** 2, axis=-1))

    def bind(self, params: PyTree) -> tuple[Self, tuple[Array, ...]]:
        try:
            u, v = self.split(params)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(self).__name__}.split must return (extractor, head) of the parameters: {summarise_error(error)}"
            ) from error
        return super().bind((u, v))

    @staticmethod
    def model_of(server: Any, client: Any) -> tuple[Array, Array]:
        """Return (u, v) with which this client predicts, from the server's part of a State and the client's."""
        own = lambda name: getattr(server, name) if getattr(client, name, None) is None else getattr(client, name)
        return own("u"), own("v")

    def answers(self, v: PyTree, z: Array, key: Array) -> Array:
        """Return the outputs for what `features` gave."""
        return self.head(v, z)

    def fit(self, v: PyTree, z: Array, labels: Array, key: Array) -> Array:
        """Return the loss for what `features` gave."""
        return self.loss(self.head(v, z), labels)

    def outputs(self, u: Array, v: Array, inputs: PyTree, key: Array) -> Array:
        """Return what the model (u, v) answers."""
        return self.answers(self.tree(1, v), self.features(self.tree(0, u), inputs, key), key)

    def local_loss(self, u: Array, v: Array, sample: Sample, penalty: Penalty | None = None) -> Array:
        inputs, labels = sample.batch
        z = self.features(self.tree(0, u), inputs, sample.key)
        loss = self.fit(self.tree(1, v), z, labels, sample.key)
        return loss if penalty is None else loss + penalty(z, labels)

    def distance(self, u: Array, center: Array, sample: Sample, weights: Array | None = None) -> Array:
        """Return H on a batch; with weights (of `ClientRows.pass_over`) it is the batch's part of H on all rows."""
        inputs, _ = sample.batch
        ours, common = (self.features(self.tree(0, vector), inputs, sample.key) for vector in (u, center))
        return self._measure_gap(ours, common, weights)

    def _measure_gap(self, ours: Array, common: Array, weights: Array | None = None) -> Array:
        """Return H of two representations of a batch."""
        if weights is None:
            return self.reg(ours, common) * (len(ours) if self.reduction == "sum" else 1)
        each = jax.vmap(lambda a, b: self.reg(a[None], b[None]))(ours, common)
        return jnp.vdot((jnp.sign(weights) if self.reduction == "sum" else weights).astype(each.dtype), each)

    @oracle("VAL")
    def representations(self, u: Array, sample: Sample) -> Array:
        """Return what `features` gives, [rows, width]."""
        return self.features(self.tree(0, u), sample.batch[0], sample.key)

    @oracle("GRAD")
    def grad_head(self, u: Array, v: Array, sample: Sample) -> Array:
        return jax.grad(self.local_loss, 1)(u, v, sample)

    @oracle("GRAD")
    def grad_extractor(self, u: Array, v: Array, sample: Sample) -> Array:
        return jax.grad(self.local_loss, 0)(u, v, sample)

    @oracle("GRAD")
    def gradients(self, u: Array, v: Array, sample: Sample, penalty: Penalty | None = None) -> tuple[Array, Array]:
        """Return (d/du, d/dv) of the loss, from one reverse pass. `penalty(z, labels)`, a jax.tree_util.Partial whose
        own arguments are constants, is added to the loss."""
        return jax.grad(self.local_loss, (0, 1))(u, v, sample, penalty)

    @oracle("GRAD")
    def grad_coupled(self, u: Array, v: Array, center: Array, coupling: ArrayLike, sample: Sample) -> Array:
        """Return d/du of loss + (coupling / 2) H, from one reverse pass."""
        common = self.features(self.tree(0, center), sample.batch[0], sample.key)
        pull = lambda z, labels: coupling / 2 * self._measure_gap(z, common)
        return jax.grad(self.local_loss)(u, v, sample, pull)

    @oracle("GRAD")
    def grad_distance(self, u: Array, center: Array, sample: Sample, weights: Array | None = None) -> Array:
        """Return dH/du_k, with the common representation as a constant."""
        return jax.grad(self.distance, 0)(u, center, sample, weights)

    @oracle("GRAD")
    def grad_center(self, u: Array, center: Array, sample: Sample, weights: Array | None = None) -> Array:
        """Return dH/du_0, with the client's representation as a constant: a client uploads this."""
        return jax.grad(self.distance, 1)(u, center, sample, weights)

    def functions(self, params, key) -> Functions:
        u, v = (self.tree(i, p) for i, p in enumerate(params))
        z = lambda batch: self.features(u, batch[0], key)
        yield "features", 2, z
        yield "loss", 0, lambda batch: self.fit(v, z(batch), batch[1], key)
        yield "reg", 0, lambda batch: self.reg(z(batch), z(batch))

    def metrics(self, server, client, data, fed):
        u, v = self.model_of(server, client)
        return {"loss": fed.mean(data.average(lambda batch: self.local_loss(u, v, Sample(batch, fed.key))))}


@struct
class GaussianEncoder(Personalised):
    """A personalised problem whose representation is random: z ~ N(mean, deviation^2), entry by entry.

    `features` gives [rows, 2 width], the means and then what softplus turns into deviations; `head` gets [rows, width].
    The loss is the mean over `draws` draws of z, outputs are averaged over them. Draws depend on the key alone.
    """

    draws: int = setting("L: draws of a representation", default=15, at_least=1, static=True)

    @staticmethod
    def gaussians(features: Array) -> tuple[Array, Array]:
        """Return (means, deviations), [rows, width] each."""
        mean, raw = jnp.split(features, 2, axis=-1)
        return mean, jax.nn.softplus(raw)

    def average_draws(self, function: Callable[[Array], Array], features: Array, key: Array) -> Array:
        """Return the mean of function(z) over draws of z."""
        mean, deviation = self.gaussians(features)
        noise = jax.random.normal(key, (self.draws, *mean.shape), mean.dtype)
        return jnp.mean(jax.vmap(lambda e: function(mean + deviation * e))(noise), 0)

    def answers(self, v, z, key):
        return self.average_draws(lambda z: self.head(v, z), z, key)

    def fit(self, v, z, labels, key):
        return self.average_draws(lambda z: self.loss(self.head(v, z), labels), z, key)
