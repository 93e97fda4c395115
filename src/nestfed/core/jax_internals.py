"""Everything that leans on how JAX works inside, in one place; tests/test_jax_internals.py holds each trick.

prove_common        JAX refuses a mapped output that should be the same everywhere and may not be: a proof
find_trace_level    tells whether code runs at the top level of a step, or inside a loop or transformation of it
drop_unused         a program without the operations whose results nobody uses
depends_on          does any number of an argument enter a result?
count_programs      how often a jitted function was compiled
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr


class NotCommonError(Exception):
    """An output that should be the same for all clients depends on one client's values, as far as JAX can tell."""


@contextlib.contextmanager
def prove_common() -> Iterator[None]:
    """Turn JAX's refusal of `out_axes=None` under a named vmap into NotCommonError; other errors pass."""
    try:
        yield
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise NotCommonError from error


def find_trace_level() -> Any:
    """A value that is equal for all code of one level of tracing."""
    from jax.extend.core import get_opaque_trace_state  # slow to import

    return get_opaque_trace_state(convention="flax")


def drop_unused(jaxpr: Any) -> tuple[Any, list[bool]]:
    """(the program without what none of its outputs needs, which of its inputs are used)."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))


def depends_on(function: Callable[[Any], Any], argument: Any) -> bool:
    """Does any number of the argument enter the function's result?"""
    _, used = drop_unused(jax.make_jaxpr(function)(argument).jaxpr)
    return any(used)


def count_programs(function: Any) -> int:
    """How many programs a jitted function has been compiled to."""
    return function._cache_size()
