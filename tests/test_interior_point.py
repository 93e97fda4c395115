"""The programs over the simplex: against HiGHS, and against all supports."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import linprog

from nestfed.algorithms.fcfl import find_pareto_weights
from nestfed.algorithms.interior_point import minimise_form_on_simplex

PRESENT = lambda number: st.lists(st.booleans(), min_size=number, max_size=number).filter(any)

# ------------------------------------------------------------------------------------------------- linear

KINDS = (
    "generic",
    "agreeing",
    "one zero",
    "parallel",
    "repeated",
    "many sizes",
    "balanced",
    "whole numbers",
    "all zero",
)
MOST, DIMENSIONS = 21, 6


def gradients_of(kind: str, number: int, random: np.random.Generator) -> np.ndarray:
    dimensions = int(random.integers(1, DIMENSIONS + 1))
    g = random.normal(size=(number, dimensions))
    if kind == "agreeing":
        g += 3 * random.normal(size=dimensions)
    elif kind == "one zero":
        g[random.integers(number)] = 0
    elif kind == "parallel":
        g = g[:1] * random.normal(size=(number, 1))
    elif kind == "repeated":
        g = np.repeat(g, 2, 0)[:number]
    elif kind == "many sizes":
        g *= 10 ** random.uniform(-4, 4, size=(number, 1))
    elif kind == "balanced":
        g -= g.mean(0)
    elif kind == "whole numbers":
        g = np.round(g)
    elif kind == "all zero":
        g *= 0
    return np.pad(g, ((0, 0), (0, DIMENSIONS - dimensions)))


@given(
    kind=st.sampled_from(KINDS),
    number=st.integers(1, MOST),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.float32, np.float64]),
)
@settings(max_examples=150, deadline=None)
def test_pareto_weights_solve_the_linear_program(kind, number, seed, dtype):
    """Feasible, and as good as the answer of HiGHS, in units of the largest gradient."""
    random = np.random.default_rng(seed)
    g = gradients_of(kind, number, random).astype(dtype)
    target = g[: max(1, number - 1)].mean(0)
    present = np.zeros(MOST, bool)
    present[np.sort(random.choice(MOST, number, replace=False))] = True
    everyone = np.full((MOST, DIMENSIONS), 1e6, dtype)  # what is absent must not even set the scale
    everyone[present] = g
    weights = np.asarray(jax.jit(find_pareto_weights)(everyone, target, present), float)
    assert not weights[~present].any()
    a, g, target = weights[present], g.astype(float), target.astype(float)

    norms = np.linalg.norm(g, axis=1)
    size, target_size = norms.max() or 1.0, np.linalg.norm(target) or 1.0
    gain = g @ target / (size * target_size)
    matrix = (g / np.where(norms > 0, norms, 1)[:, None]) @ g.T / size
    best = linprog(-gain, -matrix, np.zeros(number), np.ones((1, number)), [1.0], method="highs")
    tolerance = 5e-5 if dtype == np.float32 else 1e-7
    assert a.min() >= 0 and a.sum() == pytest.approx(1, abs=1e-6)
    assert (matrix @ a).min() >= -tolerance
    if best.status == 0:  # with balanced gradients HiGHS may find nothing within its tolerance
        assert gain @ a >= -best.fun - tolerance
    else:
        assert kind in ("balanced", "whole numbers", "parallel")


@given(number=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_pareto_direction_ignores_order_and_absent_rows(number, seed):
    random = np.random.default_rng(seed)
    g = random.normal(size=(number, 8)) + random.normal(size=8)
    target, order = g.mean(0), random.permutation(number)
    here = np.ones(number, bool)
    direction = lambda g, present: np.asarray(jax.jit(find_pareto_weights)(g, target, present)) @ g
    expected = direction(g, here)
    assert direction(g[order], here) == pytest.approx(expected, abs=1e-9)
    assert direction(np.concatenate([g, 3 * g]), np.append(here, ~here)) == pytest.approx(expected, abs=1e-9)


# ------------------------------------------------------------------------------------------------- quadratic


@given(st.integers(0, 2**32 - 1), PRESENT(5), st.sampled_from([0, 3, 6]))
@settings(max_examples=60, deadline=None)
def test_weights_of_heads_are_the_best_on_the_simplex(seed, present, digits):
    """Against all choices of the weights that are not zero; forms of condition up to 10^digits."""
    random, present = np.random.default_rng(seed), np.asarray(present)
    basis, _ = np.linalg.qr(random.normal(size=(5, 5)))
    form = basis * 10 ** (-digits * random.uniform(size=5)) @ basis.T
    form = (form + form.T) / 2
    found = np.asarray(LEAST(form, present))
    assert found.min() >= 0 and (found[~present] == 0).all()
    assert_allclose(found.sum(), 1, rtol=1e-12)
    slope = form @ found
    price = found @ slope
    scale = np.diag(form)[present].max()
    assert (slope[present] >= price - 1e-8 * scale).all()  # no entry is better than the mean: a minimum, convex
    assert price <= best_value(form[np.ix_(present, present)]) + 1e-8 * scale


LEAST = jax.jit(minimise_form_on_simplex)


def best_value(form):
    """The least value over all supports whose solution is feasible."""
    values = []
    for size in range(1, len(form) + 1):
        for support in itertools.combinations(range(len(form)), size):
            part = form[np.ix_(support, support)]
            a = np.linalg.solve(part, np.ones(size))
            if (a >= 0).all():
                values.append(1 / a.sum())
    return min(values)
