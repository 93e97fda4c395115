"""Problem classes: what a user writes (pure functions on parameter trees) and what an algorithm calls (named oracles).

A problem's functions see one client's batch and nothing else: heterogeneity enters through the data. Functions return
the *mean* over the batch they are given. Every oracle is a method under a named jit: it costs nothing after inlining,
and its name survives in the traced program, where `cost.measure` counts it. Differentiate inside an oracle, never
through one.

Rule: algorithms never call jax.grad; problems never know about clients.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.random import fold_in

from nestfed.core import (
    Array,
    ClientRows,
    Fed,
    Layout,
    PyTree,
    Rows,
    Sample,
    UserError,
    check_registered,
    setting,
    static,
    struct,
)
from nestfed.scaled import Scaled, is_scaled

ORACLE_KINDS = ("GRAD", "VAL", "VJP", "HVP", "MIX", "SOLVE")


def oracle(kind: str) -> Callable[[Callable], Callable]:
    """Mark a method as one unit of work of this kind (see `ORACLE_KINDS`)."""

    def wrap(method):
        @functools.wraps(method)
        def named(*args):
            return method(*args)

        named.__name__ = f"oracle_{kind}_{method.__name__}"
        return jax.jit(named)

    return wrap


@struct
class Problem:
    """What all classes have in common: variables as flat vectors, projections, sampling, default metrics."""

    layouts: tuple[Layout, ...] = static(default=())  # set by Task.create: the user's trees inside the flat vectors

    family: ClassVar[str]
    variables: ClassVar[tuple[str, ...]] = ("x",)
    minimised: ClassVar[str | None] = None  # the one of `metrics` that training makes small, where there is one

    def bind(self, params: PyTree):
        """(this problem knowing the user's parameter trees, the starting point as flat vectors)."""
        trees = (params,) if len(self.variables) == 1 else params
        if len(self.variables) > 1 and not (isinstance(params, tuple) and len(params) == len(self.variables)):
            raise UserError(
                f"{type(self).__name__} has the variables {', '.join(self.variables)}: params must be a tuple of "
                f"{len(self.variables)} starting points, in this order; "
                f"{f'{len(params)} were' if isinstance(params, tuple) else f'a {type(params).__name__} was'} given."
            )
        layouts = tuple(Layout.of(tree, name) for tree, name in zip(trees, self.variables, strict=True))
        flat = tuple(layout.flatten(tree) for layout, tree in zip(layouts, trees, strict=True))
        return dataclasses.replace(self, layouts=layouts), flat

    def fitted(self, data: Rows, weights: Array) -> "Problem":
        """This problem with what it takes from the clients' data and weights; itself by default."""
        return self

    def tree(self, variable: int, vector: Array) -> PyTree:
        """The user's parameter tree of a flat vector."""
        return self.layouts[variable].unflatten(vector)

    def project_x(self, x: PyTree) -> PyTree:
        """Projection of the (first) shared variable onto its feasible set, on the user's tree; identity by default."""
        return x

    def feasible_x(self, x: Array) -> Array:
        """`project_x` on the flat vector; costs nothing unless the user defined a projection."""
        return self._projected(0, "project_x", x)

    def missing(self, signature: str) -> UserError:
        return UserError(f"{type(self).__name__} is {self.family}: it must define {signature}.")

    def defines(self, method: str) -> bool:
        """Did the user define this method, or does the class have its default?"""
        return getattr(type(self), method).__module__ != __name__

    def _projected(self, variable: int, method: str, vector: Array) -> Array:
        if not self.defines(method):
            return vector
        return self.layouts[variable].flatten(getattr(self, method)(self.tree(variable, vector)))

    def sample(self, data: ClientRows, key: Array, size: int) -> PyTree:
        return data.draw(key, size)

    def metrics(self, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
        return {}

    def check(self, task: Any) -> None:
        """Try every function on the shapes of a batch, so that a mismatch shows at construction."""
        check_registered(self)
        key = jax.random.key(0)
        data = task.data.client(0)
        try:
            batch = jax.eval_shape(lambda: task.sample(data, key))
        except Exception as error:
            raise UserError(f"{type(self).__name__}: drawing a batch failed: {first_line(error)}") from error
        for name, expected, call in self.functions(task.params, key):
            try:
                result = jax.eval_shape(call, batch)
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"{type(self).__name__}.{name} {self._advice(name, batch, error)}") from error
            is_array = isinstance(result, jax.ShapeDtypeStruct)
            fits = is_array and (expected is None or len(result.shape) == expected)
            if not fits or not jnp.issubdtype(result.dtype, jnp.floating):
                wanted = {0: "one number (the mean over the batch)", 1: "a vector"}.get(
                    -1 if expected is None else expected, "an array"
                )
                given = f"shape {result.shape} of type {result.dtype}" if is_array else f"a {type(result).__name__}"
                raise UserError(
                    f"{type(self).__name__}.{name} must return {wanted}, in floating point; it returned {given}."
                )

    def functions(self, params: Sequence[Array], key: Array) -> Iterable[tuple[str, int | None, Callable]]:
        """(name, number of axes of its result or None, batch -> result) of every function the user wrote."""
        return ()

    def _advice(self, name: str, batch: PyTree, error: Exception) -> str:
        """What went wrong in a function of the user's, and what to do."""
        if isinstance(error, TypeError) and "positional argument" in str(error):
            declared = next(k for k in type(self).__mro__ if k.__module__ == __name__ and name in vars(k))
            arguments = ", ".join(list(inspect.signature(getattr(declared, name)).parameters)[1:])
            return f"is called as {name}({arguments}): {first_line(error)}."
        if isinstance(error, jax.errors.TracerBoolConversionError):
            return (
                "decides by a Python `if` (or `and`, `or`, `while`) on a number that is known only when the program "
                "runs; write jnp.where(condition, a, b)."
            )
        if isinstance(error, (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)):
            return (
                "makes a plain number or a NumPy array of a value that is known only when the program runs (float(), "
                "int(), numpy); use jax.numpy throughout."
            )
        shapes = jax.tree.map(lambda a: a.shape, batch)
        return (
            f"failed on a batch of shapes {shapes} and parameters of shapes "
            f"{[layout.shapes for layout in self.layouts]}: {first_line(error)}. Do the starting point and the columns "
            "of the data fit together?"
        )


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------------------------- P1 single level


@struct
class SingleLevel(Problem):
    """min_x mean_k E loss(x; batch of client k).

    Subclasses define loss(x, batch, key); or, for methods that weigh the rows of a batch themselves,
    per_row(x, batch, key) -> [rows] and perhaps regulariser(x), whose mean and sum is then the loss.
    """

    family: ClassVar[str] = "single level"
    minimised: ClassVar[str | None] = "loss"

    def per_row(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("loss(x, batch, key), or per_row(x, batch, key) for methods that weigh the rows of a batch")

    def regulariser(self, x: PyTree) -> Array:
        """What is added to the mean of `per_row`; zero by default."""
        return jnp.zeros(())

    def loss(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        return jnp.mean(self.per_row(x, batch, key)) + self.regulariser(x)

    @oracle("VAL")
    def value(self, x, sample: Sample):
        return self.loss(self.tree(0, x), sample.batch, sample.key)

    @oracle("GRAD")
    def gradient(self, x, sample: Sample):
        return jax.grad(lambda x: self.loss(self.tree(0, x), sample.batch, sample.key))(x)

    @oracle("VAL")
    def row_values(self, x, sample: Sample):
        """The losses of the batch's rows."""
        return self.per_row(self.tree(0, x), sample.batch, sample.key)

    @oracle("GRAD")
    def weighted_gradient(self, x, weights, sample: Sample):
        """The gradient of sum_i weights_i loss_i, plus the regulariser's."""
        weighted = lambda x: jnp.vdot(weights, self.per_row(x, sample.batch, sample.key)) + self.regulariser(x)
        return jax.grad(lambda x: weighted(self.tree(0, x)))(x)

    def functions(self, params, key):
        yield "loss", 0, lambda batch: self.loss(self.tree(0, params[0]), batch, key)

    def metrics(self, server, client, data, fed):
        return {"loss": fed.mean(data.average(lambda batch: self.loss(self.tree(0, server.x), batch, fed.key)))}


# ------------------------------------------------------------------------------------------------- P2 bilevel


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
        """Projection of the lower variable onto its feasible set, on the user's tree; identity by default."""
        return y

    def feasible_y(self, y: Array) -> Array:
        return self._projected(1, "project_y", y)

    def upper_flat(self, x, y, sample: Sample):
        return self.upper(self.tree(0, x), self.tree(1, y), sample.batch, sample.key)

    def lower_flat(self, x, y, sample: Sample):
        return self.lower(self.tree(0, x), self.tree(1, y), sample.batch, sample.key)

    @oracle("GRAD")
    def grad_upper(self, x, y, sample: Sample):
        """(df/dx, df/dy)."""
        return jax.grad(self.upper_flat, (0, 1))(x, y, sample)

    @oracle("GRAD")
    def grad_lower(self, x, y, sample: Sample):
        """dg/dy."""
        return jax.grad(self.lower_flat, 1)(x, y, sample)

    @oracle("HVP")
    def hessian_vector(self, x, y, sample: Sample, v):
        """(d2g/dy2) v, forward over reverse."""
        return jax.jvp(lambda y: jax.grad(self.lower_flat, 1)(x, y, sample), (y,), (v,))[1]

    @oracle("MIX")
    def mixed_vector(self, x, y, sample: Sample, v):
        """(d2g/dxdy) v, as the gradient in x of <dg/dy, v>."""
        return jax.grad(lambda x: jnp.vdot(jax.grad(self.lower_flat, 1)(x, y, sample), v))(x)

    @oracle("SOLVE")
    def hessian_solve(self, x, y, sample: Sample, v):
        """(d2g/dy2)^-1 v with the dense matrix: for small lower dimensions."""
        return jnp.linalg.solve(jax.hessian(self.lower_flat, 1)(x, y, sample), v)

    def functions(self, params, key):
        x, y = (self.tree(i, v) for i, v in enumerate(params))
        yield "upper", 0, lambda batch: self.upper(x, y, batch, key)
        yield "lower", 0, lambda batch: self.lower(x, y, batch, key)

    def metrics(self, server, client, data, fed):
        y = server.y if client.y is None else client.y
        level = lambda function: data.average(lambda batch: function(server.x, y, Sample(batch, fed.key)))
        upper, lower = fed.mean((level(self.upper_flat), level(self.lower_flat)))
        return {"upper": upper, "lower": lower}


# ------------------------------------------------------------------------------------------------- P3 compositional


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

    def inner(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("inner(x, batch, key)")

    def outer(self, y: Array, batch: PyTree, key: Array) -> Array:
        raise self.missing("outer(y, batch, key)")

    def extra(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        """h, an ordinary average loss added to the composition; zero by default, and then it costs nothing."""
        return jnp.zeros(())

    def project_y(self, y: Array) -> Array:
        """Projection of an estimate of the inner value onto the domain of `outer`; identity by default."""
        return y

    def bound_slope(self, slope: Array) -> Array:
        """A bound on e^shift times the outer derivative, where inner values are Scaled; none by default.

        An estimate of the inner value that is far too small makes a batch weigh e^20 times what it should; a problem
        that knows the largest weight possible can say so here.
        """
        return slope

    @property
    def has_extra(self) -> bool:
        return self.defines("extra")

    def inner_flat(self, x, sample: Sample):
        value = self.inner(self.tree(0, x), sample.batch, sample.key)
        return value.reshape(-1) if is_scaled(value) else jnp.ravel(value)

    def shaped(self, y, sample: Sample):
        """A flat inner value in the shape that the user's `inner` gives it."""
        params = self.tree(0, jnp.zeros(self.layouts[0].size, jax.tree.leaves(y)[0].dtype))
        value: Any = jax.eval_shape(lambda: self.inner(params, sample.batch, sample.key))
        return y.reshape(value.value.shape if is_scaled(value) else value.shape)

    def outer_flat(self, y, sample: Sample):
        return self.outer(self.shaped(y, sample), sample.batch, sample.key)

    def into_domain(self, y, sample: Sample):
        """(the nearest value in the domain of `outer`, 1.0 if that is another one): count what you project."""
        if not self.defines("project_y"):
            return y, jnp.zeros(())
        projected: Any = self.project_y(self.shaped(y, sample))
        projected = projected.reshape(-1)
        moved = (projected - y).value if is_scaled(y) else projected - y
        return projected, jnp.any(moved != 0).astype(float)

    @oracle("VAL")
    def inner_value(self, x, sample: Sample):
        return self.inner_flat(x, sample)

    def first_estimate(self, x, draw: Callable[[Any], Sample], batches: int):
        """The inner value at x on several batches together: a start for running estimates."""
        add = lambda j, total: total + self.inner_value(x, draw(j))
        return lax.fori_loop(1, batches, add, self.inner_value(x, draw(0)) * 1.0) / batches

    @oracle("VJP")
    def inner_vjp(self, x, sample: Sample):
        """(value, pull-back): use the value in an exchange, then pull the outer derivative back."""
        kind = jax.eval_shape(lambda x: self.inner_flat(x, sample), x)
        if not is_scaled(kind):
            return jax.vjp(lambda x: self.inner_flat(x, sample), x)

        def parts(x):
            y: Any = self.inner_flat(x, sample)
            return y.value, y.shift

        value, pull, shift = jax.vjp(parts, x, has_aux=True)
        return Scaled(shift, value), jax.tree_util.Partial(Compositional._pull_scaled, self, pull, shift)

    def _pull_scaled(self, pull, shift, slope: Scaled):
        # d(e^shift value) applied to a derivative e^-s v: only the difference of the exponents is exponentiated.
        return pull(self.bound_slope(slope.value * jnp.exp(slope.shift + shift)))

    @oracle("VJP")
    def inner_row(self, x, row, sample: Sample):
        """(value, one row of the Jacobian)."""

        def entry(x):
            y: Any = self.inner_flat(x, sample)
            return (y.value if is_scaled(y) else y)[row], y

        gradient, y = jax.grad(entry, has_aux=True)(x)
        return y, Scaled(y.shift, gradient) if is_scaled(y) else gradient

    def inner_jacobian(self, x, sample: Sample):
        """(value, Jacobian [m, d]): one pass per entry of the value, so m must be small."""
        kind: Any = jax.eval_shape(self.inner_flat, x, sample)
        number = (kind.value if is_scaled(kind) else kind).size
        value, jacobian = lax.map(lambda row: self.inner_row(x, row, sample), jnp.arange(number))
        value = jax.tree.map(lambda a: a[0], value)
        return value, Scaled(value.shift, jacobian.value).normal() if is_scaled(kind) else jacobian

    def grad_outer(self, y, sample: Sample):
        if not is_scaled(y):
            return jax.grad(self.outer_flat)(y, sample)
        return Scaled(-y.shift, jax.grad(lambda value: self.outer_flat(Scaled(y.shift, value), sample))(y.value))

    @oracle("GRAD")
    def grad_extra(self, x, sample: Sample):
        return jax.grad(lambda x: self.extra(self.tree(0, x), sample.batch, sample.key))(x)

    def composed_gradient(self, x, pull, y, sample: Sample):
        """grad extra + J inner^T grad outer(y), on the batch of `value, pull = inner_vjp(x, sample)`: what every method
        descends along, each with a y of its own."""
        (gradient,) = pull(self.grad_outer(y, sample))
        return gradient + self.grad_extra(x, sample) if self.has_extra else gradient

    def functions(self, params, key):
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
        return {"objective": extra + fed.mean(compose(inner))} | self.projections(server, client, fed)

    def projections(self, server, client, fed):
        """How often estimates of the inner value left the domain of `outer` so far, if the algorithm counts it."""
        if getattr(server, "projections", None) is None:
            return {}
        own = getattr(client, "own_projections", None)
        return {"projections": server.projections + (0 if own is None else fed.mean(own))}


# ------------------------------------------------------------------------------------------------- P4 conditional


@struct
class Conditional(Problem):
    """min_x mean_k E_xi outer( E_{eta | xi} inner(x, xi, eta); xi ) + regulariser(x).

    Subclasses define sample_outer(data, key, count) -> xi with leading axis `count`, sample_inner(data, xi, key, count)
    for one xi, inner(x, xi, eta, key) -> vector for one pair, and outer(y, xi, key). The inner mean is per outer
    sample; the same inner samples enter value and derivative, in one reverse pass: no Jacobian is formed.
    """

    inner_samples: int = setting("m: inner samples per outer sample", default=1, at_least=1, static=True)

    family: ClassVar[str] = "conditional"

    def sample_outer(self, data: ClientRows, key: Array, count: int) -> PyTree:
        return data.draw_rows(key, count)

    def sample_inner(self, data: ClientRows, xi: PyTree, key: Array, count: int) -> PyTree:
        raise self.missing("sample_inner(data, xi, key, count)")

    def inner(self, x: PyTree, xi: PyTree, eta: PyTree, key: Array) -> Array:
        raise self.missing("inner(x, xi, eta, key)")

    def outer(self, y: Array, xi: PyTree, key: Array) -> Array:
        raise self.missing("outer(y, xi, key)")

    def regulariser(self, x: PyTree) -> Array:
        return jnp.zeros(())

    def composite(self, x: PyTree, xi: PyTree, etas: PyTree, key: Array) -> Array:
        """outer(mean_j inner(x, xi, eta_j)) for one xi; override it where a fused form is cheaper."""
        values = jax.vmap(lambda eta: self.inner(x, xi, eta, key))(etas)
        return self.outer(jnp.mean(values, 0), xi, key)

    def sample(self, data, key, size):
        outer_key, inner_key = fold_in(key, 0), fold_in(key, 1)
        xi = self.sample_outer(data, outer_key, size)
        keys = jax.vmap(lambda i: fold_in(inner_key, i))(jnp.arange(size))
        return xi, jax.vmap(lambda one, k: self.sample_inner(data, one, k, self.inner_samples))(xi, keys)

    def plug_in(self, x, sample: Sample):
        """The mean over the batch's outer samples of the composition with its inner samples, plus the regulariser."""
        x = self.tree(0, x)
        xis, etas = sample.batch
        values = jax.vmap(lambda xi, eta: self.composite(x, xi, eta, sample.key))(xis, etas)
        return jnp.mean(values) + self.regulariser(x)

    @oracle("VAL")
    def value(self, x, sample: Sample):
        return self.plug_in(x, sample)

    @oracle("GRAD")
    def gradient(self, x, sample: Sample):
        return jax.grad(self.plug_in)(x, sample)

    def inner_values(self, x, sample: Sample):
        """[outer samples, entries]: the inner mean of every outer sample of the batch."""
        x = self.tree(0, x)
        pair = lambda xi, eta: self.inner(x, xi, eta, sample.key)
        return jax.vmap(lambda xi, etas: jnp.mean(jax.vmap(lambda eta: pair(xi, eta))(etas), 0))(*sample.batch)

    @oracle("VAL")
    def inner_value(self, x, sample: Sample):
        """The inner value averaged over outer samples as well: what methods for compositions keep an estimate of."""
        return jnp.mean(self.inner_values(x, sample), 0)

    @oracle("VJP")
    def inner_vjp(self, x, sample: Sample):
        """(the batch's inner values [outer samples, entries], pull-back of a derivative for each of them)."""
        return jax.vjp(lambda x: self.inner_values(x, sample), x)

    def composed_gradient(self, x, pull, ys, sample: Sample):
        """The mean over outer samples of J inner_i^T grad outer_i(y_i), on the batch of `values, pull = inner_vjp(x,
        sample)`, plus the regulariser's gradient: exactly `gradient` if ys are the values."""
        xis, _ = sample.batch
        slopes = jax.vmap(jax.grad(lambda y, xi: self.outer(y, xi, sample.key)))(ys, xis)
        (gradient,) = pull(slopes / len(ys))
        if not self.defines("regulariser"):
            return gradient
        return gradient + jax.grad(lambda x: self.regulariser(self.tree(0, x)))(x)

    def functions(self, params, key):
        x = self.tree(0, params[0])
        first = lambda batch: jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), batch)
        yield "composite", 0, lambda batch: self.composite(x, first(batch[0]), first(batch[1]), key)
        yield "regulariser", 0, lambda batch: self.regulariser(x)


# ------------------------------------------------------------------------------------------------- P5 personalised


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

    def bind(self, params):
        try:
            u, v = self.split(params)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(self).__name__}.split must return (extractor, head) of the parameters: {first_line(error)}"
            ) from error
        return super().bind((u, v))

    @staticmethod
    def model_of(server: Any, client: Any) -> tuple[Array, Array]:
        """(u, v) with which this client predicts, from the server's part of a State and the client's."""
        own = lambda name: getattr(server, name) if getattr(client, name, None) is None else getattr(client, name)
        return own("u"), own("v")

    def answers(self, v: PyTree, z: Array, key: Array) -> Array:
        """Outputs from what `features` gave."""
        return self.head(v, z)

    def fit(self, v: PyTree, z: Array, labels: Array, key: Array) -> Array:
        """The loss from what `features` gave."""
        return self.loss(self.head(v, z), labels)

    def outputs(self, u, v, inputs: PyTree, key: Array) -> Array:
        """What the model (u, v) answers."""
        return self.answers(self.tree(1, v), self.features(self.tree(0, u), inputs, key), key)

    def local_loss(self, u, v, sample: Sample, penalty: Callable[[Array, Array], Array] | None = None):
        inputs, labels = sample.batch
        z = self.features(self.tree(0, u), inputs, sample.key)
        loss = self.fit(self.tree(1, v), z, labels, sample.key)
        return loss if penalty is None else loss + penalty(z, labels)

    def distance(self, u, center, sample: Sample, weights: Array | None = None):
        """H on a batch; with weights (of `ClientRows.pass_over`) the batch's part of H on all rows."""
        inputs, _ = sample.batch
        ours, common = (self.features(self.tree(0, vector), inputs, sample.key) for vector in (u, center))
        return self._apart(ours, common, weights)

    def _apart(self, ours: Array, common: Array, weights: Array | None = None) -> Array:
        """H of two representations of a batch."""
        if weights is None:
            return self.reg(ours, common) * (len(ours) if self.reduction == "sum" else 1)
        each = jax.vmap(lambda a, b: self.reg(a[None], b[None]))(ours, common)
        return jnp.vdot((jnp.sign(weights) if self.reduction == "sum" else weights).astype(each.dtype), each)

    @oracle("VAL")
    def representations(self, u, sample: Sample):
        """What `features` gives, [rows, width]."""
        return self.features(self.tree(0, u), sample.batch[0], sample.key)

    @oracle("GRAD")
    def grad_head(self, u, v, sample: Sample):
        return jax.grad(self.local_loss, 1)(u, v, sample)

    @oracle("GRAD")
    def grad_extractor(self, u, v, sample: Sample):
        return jax.grad(self.local_loss, 0)(u, v, sample)

    @oracle("GRAD")
    def gradients(self, u, v, sample: Sample, penalty=None):
        """(d/du, d/dv) of the loss, one reverse pass. `penalty(z, labels)`, a jax.tree_util.Partial whose own arguments
        are constants, is added to it."""
        return jax.grad(self.local_loss, (0, 1))(u, v, sample, penalty)

    @oracle("GRAD")
    def grad_coupled(self, u, v, center, coupling, sample: Sample):
        """d/du of loss + (coupling / 2) H: one reverse pass."""
        common = self.features(self.tree(0, center), sample.batch[0], sample.key)
        pull = lambda z, labels: coupling / 2 * self._apart(z, common)
        return jax.grad(self.local_loss)(u, v, sample, pull)

    @oracle("GRAD")
    def grad_distance(self, u, center, sample: Sample, weights=None):
        """dH/du_k, with the common representation as a constant."""
        return jax.grad(self.distance, 0)(u, center, sample, weights)

    @oracle("GRAD")
    def grad_center(self, u, center, sample: Sample, weights=None):
        """dH/du_0, with the client's representation as a constant: what a client uploads."""
        return jax.grad(self.distance, 1)(u, center, sample, weights)

    def functions(self, params, key):
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
        """(means, deviations), [rows, width] each."""
        mean, raw = jnp.split(features, 2, axis=-1)
        return mean, jax.nn.softplus(raw)

    def drawn(self, function: Callable[[Array], Array], features: Array, key: Array) -> Array:
        """The mean of function(z) over draws of z."""
        mean, deviation = self.gaussians(features)
        noise = jax.random.normal(key, (self.draws, *mean.shape), mean.dtype)
        return jnp.mean(jax.vmap(lambda e: function(mean + deviation * e))(noise), 0)

    def answers(self, v, z, key):
        return self.drawn(lambda z: self.head(v, z), z, key)

    def fit(self, v, z, labels, key):
        return self.drawn(lambda z: self.loss(self.head(v, z), labels), z, key)


# ------------------------------------------------------------------------------------------------- P6 minimax


@struct
class Minimax(Problem):
    """min_x max_alpha mean_k value_k(x, alpha).  Subclasses define value(x, alpha, batch, key), perhaps project_alpha.

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
        """Shares of the groups among the client's rows: exact if the batch is all of them; override it if it is not."""
        anywhere = self.tree(0, jnp.zeros(self.layouts[0].size, self.layouts[0].dtype))
        _, counts = self.group_risks(anywhere, batch, key)
        return counts / counts.sum()

    def feasible_alpha(self, alpha: Array) -> Array:
        return self._projected(1, "project_alpha", alpha)

    def value_flat(self, x, alpha, sample: Sample):
        return self.value(self.tree(0, x), self.tree(1, alpha), sample.batch, sample.key)

    @oracle("GRAD")
    def gradients(self, x, alpha, sample: Sample):
        """(dF/dx, dF/dalpha): one reverse pass."""
        return jax.grad(self.value_flat, (0, 1))(x, alpha, sample)

    @oracle("VAL")
    def risks(self, x, sample: Sample):
        return self.group_risks(self.tree(0, x), sample.batch, sample.key)

    def functions(self, params, key):
        x, alpha = (self.tree(i, v) for i, v in enumerate(params))
        yield "value", 0, lambda batch: self.value(x, alpha, batch, key)
        if self.defines("group_risks"):
            yield "group_risks", 1, lambda batch: self._risks_alone(x, batch, key)
            yield "group_shares", 1, lambda batch: self.group_shares(batch, key)

    def _risks_alone(self, x, batch, key):
        risks, _ = self.group_risks(x, batch, key)
        return risks

    def metrics(self, server, client, data, fed):
        value = lambda batch: self.value_flat(server.x, server.alpha, Sample(batch, fed.key))
        return {"value": fed.mean(data.average(value))}


# ------------------------------------------------------------------------------------------------- P7 constrained


@struct
class Constrained(Problem):
    """min_x mean_k objective_k(x)  s.t.  mean_k constraints_k(x) <= 0.

    Subclasses define objective(x, batch, key) and constraints(x, batch, key) -> vector; `constraint(x, j, batch, key)`
    may be overridden where one entry is cheaper than all.
    """

    family: ClassVar[str] = "constrained"

    def objective(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("objective(x, batch, key)")

    def constraints(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("constraints(x, batch, key)")

    def constraint(self, x: PyTree, j: Array, batch: PyTree, key: Array) -> Array:
        return self.constraints(x, batch, key)[j]

    @oracle("GRAD")
    def grad_objective(self, x, sample: Sample):
        """(value, gradient) of the objective."""
        return jax.value_and_grad(lambda x: self.objective(self.tree(0, x), sample.batch, sample.key))(x)

    @oracle("VAL")
    def constraint_values(self, x, sample: Sample):
        return self.constraints(self.tree(0, x), sample.batch, sample.key)

    @oracle("VAL")
    def constraint_value(self, x, j, sample: Sample):
        return self.constraint(self.tree(0, x), j, sample.batch, sample.key)

    @oracle("GRAD")
    def grad_constraint(self, x, j, sample: Sample):
        """(value, gradient) of constraint j."""
        return jax.value_and_grad(lambda x: self.constraint(self.tree(0, x), j, sample.batch, sample.key))(x)

    def functions(self, params, key):
        x = self.tree(0, params[0])
        yield "objective", 0, lambda batch: self.objective(x, batch, key)
        yield "constraints", 1, lambda batch: self.constraints(x, batch, key)

    def metrics(self, server, client, data, fed):
        x = self.tree(0, server.x)
        both = lambda batch: (self.objective(x, batch, fed.key), self.constraints(x, batch, fed.key))
        objective, constraints = fed.mean(data.average(both))
        return {"objective": objective, "violation": jnp.maximum(constraints, 0).max()}
