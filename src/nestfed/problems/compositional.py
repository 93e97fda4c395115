"""P3, compositional: a function of an average."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Sample
from nestfed.core.scaled import Scaled, is_scaled
from nestfed.core.settings import setting, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems.base import Functions, Problem, oracle


@struct
class Compositional(Problem):
    """Subclasses define inner(x, batch, key) -> vector, outer(y, batch, key) and perhaps extra(x, batch, key).

    scope "global":  min_x mean_k extra_k(x) + outer(mean_k inner_k(x))
    scope "local":   min_x mean_k [ extra_k(x) + outer_k(inner_k(x)) ]       (another minimiser, in general)

    Where inner values can overflow (exponentials of losses), `inner` returns a `Scaled` and `outer` gets one; the
    algorithms do not notice.
    """

    scope: str = setting(
        "is the inner function the average over clients, or every client's own?",
        default="global",
        choices=("global", "local"),
        static=True,
    )

    family: ClassVar[str] = "compositional"
    minimised: ClassVar[str | None] = "objective"

    def inner(self, x: PyTree, batch: PyTree, key: Array) -> Any:
        raise self.missing("inner(x, batch, key)")

    def outer(self, y: Any, batch: PyTree, key: Array) -> Array:
        raise self.missing("outer(y, batch, key)")

    def extra(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        """Return h, an ordinary average loss added to the composition; it is zero by default and then costs nothing."""
        return jnp.zeros(())

    def project_y(self, y: Any) -> Any:
        """Project an estimate of the inner value onto the domain of `outer`; by default do nothing."""
        return y

    def bound_slope(self, slope: Array) -> Array:
        """Bound e^shift times the outer derivative, where inner values are Scaled; by default there is no bound.

        An estimate of the inner value that is far too small makes a batch weigh e^20 times what it should; a problem
        that knows the largest weight possible can say so here.
        """
        return slope

    @property
    def has_extra(self) -> bool:
        return self.defines("extra")

    def inner_flat(self, x: Array, sample: Sample) -> Any:
        value = self.inner(self.tree(0, x), sample.batch, sample.key)
        return value.reshape(-1) if is_scaled(value) else jnp.ravel(value)

    def reshape(self, y: Any, sample: Sample) -> Any:
        """Return a flat inner value in the shape that the user's `inner` gives it."""
        params = self.tree(0, jnp.zeros(self.layouts[0].size, jax.tree.leaves(y)[0].dtype))
        value: Any = jax.eval_shape(lambda: self.inner(params, sample.batch, sample.key))
        return y.reshape(value.value.shape if is_scaled(value) else value.shape)

    def outer_flat(self, y: Any, sample: Sample) -> Array:
        return self.outer(self.reshape(y, sample), sample.batch, sample.key)

    def into_domain(self, y: Any, sample: Sample) -> tuple[Any, Array]:
        """(the nearest value in the domain of `outer`, 1.0 if that is another one): note what you project."""
        if not self.defines("project_y"):
            return y, jnp.zeros(())
        projected: Any = self.project_y(self.reshape(y, sample))
        projected = projected.reshape(-1)
        moved = (projected - y).value if is_scaled(y) else projected - y
        return projected, jnp.any(moved != 0).astype(float)

    @oracle("VAL")
    def inner_value(self, x: Array, sample: Sample) -> Any:
        return self.inner_flat(x, sample)

    def first_estimate(self, x: Array, draw: Callable[[Any], Sample], batches: int) -> Any:
        """Return the inner value at x on several batches together, as a start for running estimates."""
        add = lambda j, total: total + self.inner_value(x, draw(j))
        return lax.fori_loop(1, batches, add, self.inner_value(x, draw(0)) * 1.0) / batches

    @oracle("VJP")
    def inner_vjp(self, x: Array, sample: Sample) -> tuple[Any, Callable[..., Any]]:
        """Return (value, pull-back): use the value in an exchange, then pull the outer derivative back."""
        kind = jax.eval_shape(lambda x: self.inner_flat(x, sample), x)
        if not is_scaled(kind):
            return jax.vjp(lambda x: self.inner_flat(x, sample), x)

        def parts(x: Array) -> tuple[Array, Array]:
            y: Any = self.inner_flat(x, sample)
            return y.value, y.shift

        value, pull, shift = jax.vjp(parts, x, has_aux=True)
        return Scaled(shift, value), jax.tree_util.Partial(Compositional._pull_scaled, self, pull, shift)

    def _pull_scaled(self, pull: Callable[..., Any], shift: Array, slope: Scaled) -> tuple[Array]:
        # d(e^shift value) applied to a derivative e^-s v: only the difference of the exponents is exponentiated.
        return pull(self.bound_slope(slope.value * jnp.exp(slope.shift + shift)))

    @oracle("VJP")
    def inner_row(self, x: Array, row: Any, sample: Sample) -> tuple[Any, Any]:
        """Return (value, one row of the Jacobian)."""

        def entry(x: Array) -> tuple[Array, Any]:
            y: Any = self.inner_flat(x, sample)
            return (y.value if is_scaled(y) else y)[row], y

        gradient, y = jax.grad(entry, has_aux=True)(x)
        return y, Scaled(y.shift, gradient) if is_scaled(y) else gradient

    def inner_jacobian(self, x: Array, sample: Sample) -> tuple[Any, Any]:
        """Return (value, Jacobian [m, d]), by one pass per entry of the value, so m must be small."""
        kind: Any = jax.eval_shape(self.inner_flat, x, sample)
        number = (kind.value if is_scaled(kind) else kind).size
        value, jacobian = lax.map(lambda row: self.inner_row(x, row, sample), jnp.arange(number))
        value = jax.tree.map(lambda a: a[0], value)
        return value, Scaled(value.shift, jacobian.value).normal() if is_scaled(kind) else jacobian

    def grad_outer(self, y: Any, sample: Sample) -> Any:
        if not is_scaled(y):
            return jax.grad(self.outer_flat)(y, sample)
        return Scaled(-y.shift, jax.grad(lambda value: self.outer_flat(Scaled(y.shift, value), sample))(y.value))

    @oracle("GRAD")
    def grad_extra(self, x: Array, sample: Sample) -> Array:
        return jax.grad(lambda x: self.extra(self.tree(0, x), sample.batch, sample.key))(x)

    def composed_gradient(self, x: Array, pull: Callable[..., Any], y: Any, sample: Sample) -> Array:
        """Return grad extra + J inner^T grad outer(y), on the batch of `value, pull = inner_vjp(x, sample)`. Every
        method descends along it, each with a y of its own."""
        (gradient,) = pull(self.grad_outer(y, sample))
        return gradient + self.grad_extra(x, sample) if self.has_extra else gradient

    def functions(self, params, key) -> Functions:
        x = self.tree(0, params[0])
        plain = lambda y: y.value if is_scaled(y) else y
        yield "inner", None, lambda batch: plain(self.inner(x, batch, key))
        yield "outer", 0, lambda batch: self.outer(self.inner(x, batch, key), batch, key)
        yield "extra", 0, lambda batch: self.extra(x, batch, key)

    def metrics(self, server, client, data, fed):
        pair = lambda batch: (
            self.inner_flat(server.x, Sample(batch, fed.key)),
            self.extra(self.tree(0, server.x), batch, fed.key),
        )
        inner, extra = data.average(pair)
        compose = lambda y: data.average(lambda batch: self.outer_flat(y, Sample(batch, fed.key)))
        if self.scope == "local":
            return {"objective": fed.mean(extra + compose(inner))}
        inner, extra = fed.mean((inner, extra))
        return {"objective": extra + fed.mean(compose(inner))}
