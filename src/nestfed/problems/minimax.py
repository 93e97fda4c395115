"""P6, minimax: descent in one variable, ascent in the other."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Sample
from nestfed.core.settings import UserError, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems.base import Functions, Problem, oracle


@struct
class Minimax(Problem):
    """min_x max_alpha mean_k value_k(x, alpha).  Subclasses define value(x, alpha, batch, key)
    and perhaps project_alpha.

    Methods that reweigh groups of rows also need `group_risks(x, batch, key) -> (risks [A], counts [A])`: the mean loss
    and the number of the batch's rows, group by group. Their alpha has one number per group, and
    value(x, alpha) = sum_a alpha_a risks_a counts_a / sum(counts). Every row belongs to one group.
    """

    family: ClassVar[str] = "minimax"
    variables: ClassVar[tuple[str, ...]] = ("x", "alpha")

    def value(self, x: PyTree, alpha: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("value(x, alpha, batch, key)")

    def project_alpha(self, alpha: PyTree) -> PyTree:
        return alpha

    def group_risks(self, x: PyTree, batch: PyTree, key: Array) -> tuple[Array, Array]:
        raise UserError(f"{type(self).__name__} has no group_risks; methods that reweigh groups need it.")

    def group_shares(self, batch: PyTree, key: Array) -> Array:
        """Return the groups' shares of the client's rows: exact if the batch is all of them; else override it."""
        anywhere = self.tree(0, jnp.zeros(self.layouts[0].size, self.layouts[0].dtype))
        _, counts = self.group_risks(anywhere, batch, key)
        return counts / counts.sum()

    def feasible_alpha(self, alpha: Array) -> Array:
        return self._project(1, "project_alpha", alpha)

    def value_flat(self, x: Array, alpha: Array, sample: Sample) -> Array:
        return self.value(self.tree(0, x), self.tree(1, alpha), sample.batch, sample.key)

    @oracle("GRAD")
    def gradients(self, x: Array, alpha: Array, sample: Sample) -> tuple[Array, Array]:
        """Return (dF/dx, dF/dalpha), from one reverse pass."""
        return jax.grad(self.value_flat, (0, 1))(x, alpha, sample)

    @oracle("VAL")
    def risks(self, x: Array, sample: Sample) -> tuple[Array, Array]:
        return self.group_risks(self.tree(0, x), sample.batch, sample.key)

    def functions(self, params, key) -> Functions:
        x, alpha = (self.tree(i, v) for i, v in enumerate(params))
        yield "value", 0, lambda batch: self.value(x, alpha, batch, key)
        if self.defines("group_risks"):
            yield "group_risks", 1, lambda batch: self._risks_alone(x, batch, key)
            yield "group_shares", 1, lambda batch: self.group_shares(batch, key)

    def _risks_alone(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        risks, _ = self.group_risks(x, batch, key)
        return risks

    def metrics(self, server, client, data, fed):
        value = lambda batch: self.value_flat(server.x, server.alpha, Sample(batch, fed.key))
        return {"value": fed.mean(data.average(value))}
