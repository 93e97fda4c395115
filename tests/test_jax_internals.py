"""Every trick that leans on JAX's inside does what the library needs, in the JAX that is installed."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from nestfed.core.jax_internals import (
    NotCommonError,
    count_programs,
    depends_on,
    drop_unused,
    find_trace_level,
    prove_common,
)


def mapped(function):
    """Over clients, with an output that must be common to all."""
    return jax.vmap(function, out_axes=None, axis_name="clients")


def test_a_mean_is_proven_to_be_common_and_a_private_value_is_not():
    values = jnp.arange(3.0)
    with prove_common():
        assert float(mapped(lambda a: lax.psum(a, "clients"))(values)) == 3
        assert mapped(lambda a: lax.all_gather(a, "clients"))(values).shape == (3,)
    for private in (lambda a: a, lambda a: a + lax.psum(a, "clients"), lambda a: 0 * a):
        with pytest.raises(NotCommonError), prove_common():
            jax.eval_shape(mapped(private), values)


def test_other_mistakes_pass_through_the_proof():
    with pytest.raises(ValueError, match="invalid literal"), prove_common():
        int("x")
    with pytest.raises(KeyError), prove_common():
        raise KeyError("out_axes")


def test_the_level_of_tracing_changes_in_loops_and_transformations():
    seen = []

    def look(value):
        seen.append(find_trace_level())
        return value

    @jax.jit
    def step(x):
        look(x)
        look(x)
        lax.fori_loop(0, 3, lambda _, v: look(v), x)
        lax.cond(x > 0, lambda v: look(v), lambda v: -look(v), x)
        jax.vmap(look)(jnp.ones(2) * x)
        return look(x)

    step(1.0)
    first, second, *inside, last = seen
    assert first == second == last
    assert len(inside) >= 4 and all(level != first for level in inside)


def test_what_nobody_uses_is_dropped():
    def program(x, y):
        jnp.sin(x)
        return y * 2

    live, used = drop_unused(jax.make_jaxpr(program)(1.0, 2.0).jaxpr)
    assert used == [False, True]
    assert [equation.primitive.name for equation in live.eqns] == ["mul"]


def test_dependence_is_on_numbers_not_on_shapes():
    assert depends_on(lambda a: a.sum(), jnp.ones(3))
    assert not depends_on(lambda a: jnp.zeros(a.shape), jnp.ones(3))
    assert not depends_on(lambda a: a.sum() * 0 if False else jnp.ones(()), jnp.ones(3))
    assert depends_on(lambda pair: pair[1], (jnp.ones(3), jnp.ones(2)))


def test_programs_are_counted():
    function = jax.jit(lambda x: x + 1)
    assert count_programs(function) == 0
    for value in (jnp.ones(2), jnp.zeros(2), jnp.ones(3)):
        function(value)
    assert count_programs(function) == 2
