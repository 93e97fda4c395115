"""Keys by meaning: the hash is JAX's own, numbers are uniform, and nobody's numbers depend on the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestfed.core.randomness import _multiply_high, draw_indices, draw_priorities, draw_words, fold, fold_pair

KEY = jax.random.key(7)
words = st.integers(0, 2**32 - 1)


@settings(max_examples=30, deadline=None)
@given(number=st.integers(0, 2**31 - 1), seed=st.integers(0, 2**31 - 1))
def test_fold_is_the_fold_in_of_jax(number, seed):
    key = jax.random.key(seed)
    assert jnp.array_equal(jax.random.key_data(fold(key, number)), jax.random.key_data(jax.random.fold_in(key, number)))


@settings(max_examples=50, deadline=None)
@given(a=words, b=words)
def test_high_product_is_the_upper_half(a, b):
    assert int(_multiply_high(jnp.uint32(a), jnp.uint32(b))) == (a * b) >> 32


def test_keys_of_different_meaning_differ():
    keys = [fold(KEY, i) for i in range(20)] + [fold_pair(KEY, i, j) for i in range(20) for j in range(20)]
    data = np.stack([np.asarray(jax.random.key_data(key)) for key in keys])
    assert len(np.unique(data, axis=0)) == len(keys)


@pytest.mark.parametrize("size", [1, 2, 7, 600, 65_537, 2_000_003])
def test_indices_are_uniform_and_within_bounds(size):
    drawn = np.asarray(draw_indices(KEY, 20_001, jnp.asarray(size)))
    assert drawn.min() >= 0 and drawn.max() < size
    bins = min(size, 50)
    counts = np.bincount(drawn * bins // size, minlength=bins)
    expected = drawn.size / bins
    assert ((counts - expected) ** 2 / expected).sum() < bins + 6 * np.sqrt(2 * bins)  # chi-square, far out


def test_words_have_balanced_and_independent_bits():
    bits = np.unpackbits(np.asarray(draw_words(KEY, 4096)).view(np.uint8)).reshape(4096, 32)
    assert np.all(np.abs(bits.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(4096))
    correlation = np.corrcoef(bits.T) - np.eye(32)
    assert np.abs(correlation).max() < 6 / np.sqrt(4096)


def test_priority_depends_on_the_id_alone():
    everyone, some = draw_priorities(KEY, jnp.arange(100)), draw_priorities(KEY, jnp.array([3, 50]))
    assert jnp.array_equal(everyone[jnp.array([3, 50])], some)


def test_other_generators_work_through_jax():
    key = jax.random.key(0, impl="rbg")
    drawn = np.asarray(draw_indices(fold_pair(fold(key, 3), 1, 2), 1000, jnp.asarray(10)))
    assert sorted(set(drawn)) == list(range(10))
