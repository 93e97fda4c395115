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
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Fed
from nestfed.core.rows import ClientRows, Layout, Rows
from nestfed.core.settings import UserError, check_registered, static, struct, summarise_error
from nestfed.core.types import Array, PyTree

Functions = Iterable[tuple[str, int | None, Callable]]  # (name, axes of the result or None, batch -> result)
ORACLE_KINDS = ("GRAD", "VAL", "VJP", "HVP", "MIX", "SOLVE")


def oracle(kind: str) -> Callable[[Callable], Callable]:
    """Mark a method as one unit of work of this kind (see `ORACLE_KINDS`)."""

    def wrap(method: Callable) -> Callable:
        @functools.wraps(method)
        def named(*args: Any) -> Any:
            return method(*args)

        named.__name__ = f"oracle_{kind}_{method.__name__}"
        return jax.jit(named)

    return wrap


@struct
class Problem:
    """Has what all classes share: variables as flat vectors, projections, sampling and default metrics."""

    layouts: tuple[Layout, ...] = static(default=())  # set by Task.create: the user's trees inside the flat vectors

    family: ClassVar[str]
    variables: ClassVar[tuple[str, ...]] = ("x",)
    minimised: ClassVar[str | None] = None  # the one of `metrics` that training makes small, where there is one

    def bind(self, params: PyTree) -> tuple[Self, tuple[Array, ...]]:
        """Return (this problem, which now knows the user's parameter trees, the starting point as flat vectors)."""
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

    def fit_to(self, data: Rows, weights: Array) -> "Problem":
        """Return this problem with what it takes from the clients' data and weights; by default it takes nothing."""
        return self

    def tree(self, variable: int, vector: Array) -> PyTree:
        """Return the user's parameter tree of a flat vector."""
        return self.layouts[variable].unflatten(vector)

    def params_of(self, server: Any, client: Any) -> PyTree:
        """The model's parameters, from the server's part of a State and the client's: the user's tree of the first
        variable, unless a problem adds numbers of its own to it."""
        return self.tree(0, server.x)

    def project_x(self, x: PyTree) -> PyTree:
        """Project the (first) shared variable, as the user's tree, onto its feasible set; by default do nothing."""
        return x

    def feasible_x(self, x: Array) -> Array:
        """Apply `project_x` to the flat vector; this costs nothing unless the user defined a projection."""
        return self._project(0, "project_x", x)

    def missing(self, signature: str) -> UserError:
        return UserError(f"{type(self).__name__} is {self.family}: it must define {signature}.")

    @classmethod
    def problem_class(cls) -> type["Problem"]:
        """Return the class of this kind of problem, which has the defaults."""
        return next(kind for kind in cls.__mro__ if "family" in vars(kind))

    def defines(self, method: str) -> bool:
        """Tell whether the user defined this method, or the class has its default."""
        return getattr(type(self), method) is not getattr(self.problem_class(), method)

    def _project(self, variable: int, method: str, vector: Array) -> Array:
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
            raise UserError(f"{type(self).__name__}: drawing a batch failed: {summarise_error(error)}") from error
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

    def functions(self, params: Sequence[Array], key: Array) -> Functions:
        """Yield (name, number of axes of its result or None, batch -> result) for every function the user wrote."""
        return ()

    def _advice(self, name: str, batch: PyTree, error: Exception) -> str:
        """Say what went wrong in a function of the user's, and what to do."""
        if isinstance(error, TypeError) and "positional argument" in str(error):
            declared = inspect.signature(getattr(self.problem_class(), name))
            arguments = ", ".join(list(declared.parameters)[1:])
            return f"is called as {name}({arguments}): {summarise_error(error)}."
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
        met = f"a batch of shapes {shapes} and parameters of shapes {[layout.shapes for layout in self.layouts]}"
        if isinstance(error, (TypeError, ValueError, LookupError)):
            said = summarise_error(error)
            return f"failed on {met}: {said}. Do the starting point and the columns of the data fit together?"
        return f"failed on {met}: {type(error).__name__}: {summarise_error(error)}."
