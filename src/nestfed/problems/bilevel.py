"""P2, bilevel: an upper problem whose losses depend on the solution of a lower one."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Sample
from nestfed.core.settings import setting, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems.base import Functions, Problem, oracle


@struct
class Bilevel(Problem):
    """Subclasses define upper(x, y, batch, key) and lower(x, y, batch, key), lower strongly convex in y.

    scope "local":   min_x mean_k upper_k(x, y_k(x)),  y_k(x) = argmin_y lower_k(x, y)
    scope "global":  min_x mean_k upper_k(x, y(x)),    y(x) = argmin_y mean_k lower_k(x, y)
    """

    scope: str = setting(
        "whose lower problem: every client's own, or one for all",
        default="local",
        choices=("local", "global"),
        static=True,
    )

    family: ClassVar[str] = "bilevel"
    variables: ClassVar[tuple[str, ...]] = ("x", "y")

    def upper(self, x: PyTree, y: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("upper(x, y, batch, key)")

    def lower(self, x: PyTree, y: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("lower(x, y, batch, key)")

    def project_y(self, y: PyTree) -> PyTree:
        """Project the lower variable, as the user's tree, onto its feasible set; by default do nothing."""
        return y

    def feasible_y(self, y: Array) -> Array:
        return self._project(1, "project_y", y)

    def upper_flat(self, x: Array, y: Array, sample: Sample) -> Array:
        return self.upper(self.tree(0, x), self.tree(1, y), sample.batch, sample.key)

    def lower_flat(self, x: Array, y: Array, sample: Sample) -> Array:
        return self.lower(self.tree(0, x), self.tree(1, y), sample.batch, sample.key)

    @oracle("GRAD")
    def grad_upper(self, x: Array, y: Array, sample: Sample) -> tuple[Array, Array]:
        """Return (df/dx, df/dy)."""
        return jax.grad(self.upper_flat, (0, 1))(x, y, sample)

    @oracle("GRAD")
    def grad_lower(self, x: Array, y: Array, sample: Sample) -> Array:
        """Return dg/dy."""
        return jax.grad(self.lower_flat, 1)(x, y, sample)

    @oracle("HVP")
    def hessian_vector(self, x: Array, y: Array, sample: Sample, v: Array) -> Array:
        """Return (d2g/dy2) v, by forward over reverse mode."""
        return jax.jvp(lambda y: jax.grad(self.lower_flat, 1)(x, y, sample), (y,), (v,))[1]

    @oracle("MIX")
    def mixed_vector(self, x: Array, y: Array, sample: Sample, v: Array) -> Array:
        """Return (d2g/dxdy) v, as the gradient in x of <dg/dy, v>."""
        return jax.grad(lambda x: jnp.vdot(jax.grad(self.lower_flat, 1)(x, y, sample), v))(x)

    @oracle("SOLVE")
    def hessian_solve(self, x: Array, y: Array, sample: Sample, v: Array) -> Array:
        """Return (d2g/dy2)^-1 v by the dense matrix, for small lower dimensions."""
        return jnp.linalg.solve(jax.hessian(self.lower_flat, 1)(x, y, sample), v)

    def functions(self, params, key) -> Functions:
        x, y = (self.tree(i, v) for i, v in enumerate(params))
        yield "upper", 0, lambda batch: self.upper(x, y, batch, key)
        yield "lower", 0, lambda batch: self.lower(x, y, batch, key)

    def metrics(self, server, client, data, fed):
        y = server.y if client.y is None else client.y
        level = lambda function: data.average(lambda batch: function(server.x, y, Sample(batch, fed.key)))
        upper, lower = fed.mean((level(self.upper_flat), level(self.lower_flat)))
        return {"upper": upper, "lower": lower}
