"""What a user writes and what an algorithm gets: layouts, rows, tasks, oracles, hypergradients, adapters, errors."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax import lax
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose, assert_array_equal

from nestfed import Rows, Sample, Task, UserError, make, simulate, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.core.rows import Layout
from nestfed.problems import Bilevel, Compositional, Conditional, Constrained, Minimax, Personalised, SingleLevel
from nestfed.problems.adapters import (
    CompositionAsBilevel,
    LocalCompositionAsConditional,
    MinimaxAsBilevel,
    NaiveComposition,
    SingleAsConditional,
)
from nestfed.problems.hypergradients import ConjugateGradient, Dense, LinearSystem, Neumann, RandomTruncation
from nestfed.problems.toys import Line, counterexample, scalar_bilevel

KEY, OTHER_KEY = jax.random.split(jax.random.key(0))

# ------------------------------------------------------------------------------------------------- a user's problems

# One small data set, parameter trees, and one problem of every class. Their functions are smooth and neither linear nor
# quadratic, so that a wrong derivative shows; they use batch and key; and they refuse trees of other shapes than the
# user's. Functions of a batch are means over its rows.

RANDOM = np.random.default_rng(0)
PEOPLE = [(RANDOM.normal(size=(n, 2)), RANDOM.normal(size=n)) for n in (3, 4)]
LINE = {"bias": np.array(0.3), "weight": np.array([0.5, -1.0])}


def seen(tree, **shapes):
    """The tree, provided that it has exactly these shapes."""
    assert {name: leaf.shape for name, leaf in tree.items()} == shapes
    return tree


def noise(key):
    """Two numbers in [0, 1) that depend on the key; cheaper to compile than jax.random.uniform."""
    return jax.random.key_data(key) / 2.0**32


def predict(line, inputs, key):
    """A linear model with noise on its weights: the key matters, as with dropout."""
    line = seen(line, bias=(), weight=(2,))
    return inputs @ (line["weight"] * noise(key)) + line["bias"]


@struct
class Fit(SingleLevel):
    def loss(self, x, batch, key):
        inputs, labels = batch
        return jnp.mean(jnp.cosh(predict(x, inputs, key) - labels))


@struct
class Tuning(Bilevel):
    def upper(self, x, y, batch, key):
        inputs, labels = batch
        x, p = seen(x, decay=(2,), shift=()), predict(y, inputs, key)
        return jnp.mean(jnp.tanh(p - labels) ** 2 + x["shift"] * p) + jnp.sum(jnp.sin(x["decay"]))

    def lower(self, x, y, batch, key):
        inputs, labels = batch
        x, p = seen(x, decay=(2,), shift=()), predict(y, inputs, key)
        return jnp.mean(jnp.log(jnp.cosh(p - labels - x["shift"]))) + jnp.sum(jnp.exp(x["decay"]) * y["weight"] ** 2)


@struct
class Blend(Compositional):
    def inner(self, x, batch, key):
        inputs, labels = batch
        r = predict(x, inputs, key) - labels
        return jnp.stack([jnp.mean(r), jnp.mean(r**2), jnp.mean(jnp.sin(r)), jnp.mean(r * labels)]).reshape(2, 2)

    def outer(self, y, batch, key):
        assert y.shape == (2, 2)
        return jnp.mean(batch[1] ** 2) * jnp.sum(jnp.log1p(y**2) @ noise(key))

    def extra(self, x, batch, key):
        return jnp.mean(jnp.sin(predict(x, batch[0], key)))


@struct
class Noisy(Conditional):
    def sample_inner(self, data, xi, key, count):
        return xi[0][None] + jax.random.normal(key, (count, 2))

    def inner(self, x, xi, eta, key):
        r = predict(x, eta[None], key) - xi[1]
        return jnp.concatenate([r, jnp.sin(r)])

    def outer(self, y, xi, key):
        return jnp.sum(jnp.cosh(y)) * xi[1]

    def regulariser(self, x):
        return jnp.sum(x["weight"] ** 3)


@struct
class TwoLayers(Personalised):
    def split(self, params):
        return params["body"], params["head"]

    def features(self, u, inputs, key):
        u = seen(u, matrix=(2, 2), scale=())
        return jnp.tanh(u["scale"] * inputs @ (u["matrix"] * noise(key)[:, None]))

    def head(self, v, z):
        v = seen(v, bias=(), weight=(2,))
        return z @ v["weight"] + v["bias"]

    def loss(self, outputs, labels):
        return jnp.mean(jnp.cosh(outputs - labels))

    def reg(self, z_local, z_global):
        return jnp.mean((z_local - z_global) ** 2 * jnp.exp(z_global))


@struct
class Game(Minimax):
    """Strongly concave and quadratic in alpha."""

    def value(self, x, alpha, batch, key):
        inputs, labels = batch
        alpha = seen(alpha, level=(), tilt=(2,))
        stake = jnp.tanh(predict(x, inputs, key)) * (alpha["level"] + inputs @ alpha["tilt"])
        return jnp.mean(stake + labels * jnp.cos(x["bias"])) - alpha["level"] ** 2 - jnp.sum(alpha["tilt"] ** 2)

    def group_risks(self, x, batch, key):
        inputs, labels = batch
        member = jnp.stack([labels > 0, labels <= 0]).astype(labels.dtype)
        counts = member.sum(1)
        return member @ (predict(x, inputs, key) - labels) ** 2 / jnp.maximum(counts, 1), counts


@struct
class Limits(Constrained):
    def objective(self, x, batch, key):
        return jnp.mean(jnp.cosh(predict(x, batch[0], key) - batch[1]))

    def constraints(self, x, batch, key):
        p = predict(x, batch[0], key)
        return jnp.stack([jnp.mean(jnp.sin(p)) + 2.0, jnp.sum(x["weight"] ** 2) - 1.0, jnp.mean(p**3) - 4.0])


PROBLEMS = {  # name: (problem, starting point)
    "single level": (Fit(), LINE),
    "bilevel": (Tuning(), ({"decay": np.array([0.2, -0.4]), "shift": np.array(0.5)}, LINE)),
    "compositional": (Blend(), LINE),
    "conditional": (Noisy(inner_samples=3), LINE),
    "personalised": (
        TwoLayers(),
        {"body": {"matrix": np.array([[1.0, -0.5], [0.3, 0.8]]), "scale": np.array(0.9)}, "head": LINE},
    ),
    "minimax": (Game(), (LINE, {"level": np.array(0.4), "tilt": np.array([0.6, -0.7])})),
    "constrained": (Limits(), LINE),
}


@functools.cache
def example(name: str) -> Task:
    problem, start = PROBLEMS[name]
    return Task.create(problem, Rows.from_clients(PEOPLE), start, batch_size=4)


def trees_of(name: str) -> tuple[Any, ...]:
    """The starting point as one tree per variable."""
    problem, start = PROBLEMS[name]
    if isinstance(problem, Personalised):
        return problem.split(start)
    return start if len(problem.variables) > 1 else (start,)


def sample_of(task: Task, key=KEY) -> Sample:
    """A batch of the second client."""
    return Sample(task.sample(task.data.client(1), KEY), key)


def label(value: Any) -> str | None:
    """A test's name: records by their settings, or by their class if they hold a problem; others as pytest likes."""
    if not dataclasses.is_dataclass(value):
        return None
    return type(value).__name__ if hasattr(value, "layouts") else repr(value)


def finite_differences(function: Callable, x, step: float = 1e-5) -> np.ndarray:
    """The gradient of a scalar function by central differences."""
    x, steps = jnp.asarray(x), step * jnp.eye(np.size(x))
    values = jax.jit(jax.vmap(function))(jnp.concatenate([x[None] + steps, x[None] - steps]))
    return np.asarray(values[: x.size] - values[x.size :]) / (2 * step)


# ------------------------------------------------------------------------------------------------- flat vectors


@pytest.mark.parametrize("name", PROBLEMS)
def test_create_flattens_every_variable_of_the_starting_point(name):
    task = example(name)
    assert len(task.params) == len(task.problem.variables) == len(task.problem.layouts)
    for i, (tree, vector) in enumerate(zip(trees_of(name), task.params, strict=True)):
        assert_array_equal(vector, ravel_pytree(tree)[0])
        back = task.problem.tree(i, vector)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        jax.tree.map(assert_array_equal, back, tree)


@pytest.mark.parametrize(
    "tree",
    [
        np.array(2.0),
        (np.ones((2, 3)), [np.zeros(1), {"a": np.array(5.0)}]),
        {"empty": np.zeros((0, 3)), "full": np.arange(4.0).reshape(2, 1, 2)},
        {"half": np.ones(2, np.float32), "whole": np.array([1 / 3])},
    ],
    ids=["scalar", "nested", "with an empty leaf", "of two precisions"],
)
def test_a_layout_is_the_way_to_a_vector_and_back(tree):
    layout = Layout.of(tree, "x")
    vector = layout.flatten(tree)
    assert_array_equal(vector, np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]))
    assert vector.shape == (layout.size,) and vector.dtype == layout.dtype == "float64"
    jax.tree.map(assert_array_equal, layout.unflatten(vector), tree)
    assert hash(layout) == hash(Layout.of(tree, "another name for it"))


# ------------------------------------------------------------------------------------------------- oracles


class Case(NamedTuple):
    """An oracle and the function of the user's own trees that it differentiates or evaluates."""

    name: str  # of the example
    label: str
    oracle: Callable  # (problem, *vectors, sample) -> array
    function: Callable  # (problem, *trees, batch, key) -> array
    wrt: int = 0  # which variable it is differentiated in

    def __str__(self):
        return f"{self.name}: {self.label}"


V = np.array([0.7, -1.1, 0.4])  # a direction in the space of LINE
W = np.array([0.2, -0.9, 1.3, 0.5])  # one in the space of Blend's inner value
CENTER = {"matrix": np.array([[0.2, 0.9], [-0.6, 0.1]]), "scale": np.array(1.2)}  # another extractor, and as a vector
CENTER_VECTOR = np.array([0.2, 0.9, -0.6, 0.1, 1.2])


def along(function, line, direction):
    """The derivative of a function of LINE along a direction: its own gradients are second derivatives."""
    vector, unravel = ravel_pytree(line)
    return jax.jvp(lambda v: function(unravel(v)), (vector,), (jnp.asarray(direction),))[1]


def plug_in(p, x, batch, key):
    """The conditional objective on one batch, sample by sample."""
    one = lambda xi, etas: p.outer(sum(p.inner(x, xi, eta, key) for eta in etas) / len(etas), xi, key)
    (inputs, labels), etas = batch
    return sum(one((inputs[i], labels[i]), etas[i]) for i in range(4)) / 4 + p.regulariser(x)


def local_loss(p, u, v, batch, key):
    inputs, labels = batch
    return p.loss(p.head(v, p.features(u, inputs, key)), labels)


def distance(p, u, center, batch, key):
    return p.reg(p.features(u, batch[0], key), p.features(center, batch[0], key))


def distance_to_center(p, u, v, *a):
    return distance(p, u, CENTER, *a)


def distance_from_center(p, u, v, *a):
    return distance(p, CENTER, u, *a)


def lower_along_v(p, x, y, batch, key):
    return along(lambda y: p.lower(x, y, batch, key), y, V)


GRADIENTS = [
    Case("single level", "gradient", lambda p, x, s: p.gradient(x, s), lambda p, *a: p.loss(*a)),
    Case("bilevel", "df/dx", lambda p, x, y, s: p.grad_upper(x, y, s)[0], lambda p, *a: p.upper(*a)),
    Case("bilevel", "df/dy", lambda p, x, y, s: p.grad_upper(x, y, s)[1], lambda p, *a: p.upper(*a), 1),
    Case("bilevel", "dg/dy", lambda p, x, y, s: p.grad_lower(x, y, s), lambda p, *a: p.lower(*a), 1),
    Case("bilevel", "d2g/dy2 v", lambda p, x, y, s: p.hessian_vector(x, y, s, V), lower_along_v, 1),
    Case("bilevel", "d2g/dxdy v", lambda p, x, y, s: p.mixed_vector(x, y, s, V), lower_along_v),
    Case(
        "compositional", "inner' w", lambda p, x, s: p.inner_vjp(x, s)[1](W)[0], lambda p, *a: p.inner(*a).ravel() @ W
    ),
    Case("compositional", "extra", lambda p, x, s: p.grad_extra(x, s), lambda p, *a: p.extra(*a)),
    Case("conditional", "gradient", lambda p, x, s: p.gradient(x, s), plug_in),
    Case("personalised", "dloss/du", lambda p, u, v, s: p.grad_extractor(u, v, s), local_loss),
    Case("personalised", "dloss/dv", lambda p, u, v, s: p.grad_head(u, v, s), local_loss, 1),
    Case("personalised", "dH/du", lambda p, u, v, s: p.grad_distance(u, CENTER_VECTOR, s), distance_to_center),
    Case("personalised", "dH/du0", lambda p, u, v, s: p.grad_center(CENTER_VECTOR, u, s), distance_from_center),
    Case("minimax", "dF/dx", lambda p, x, a, s: p.gradients(x, a, s)[0], lambda p, *a: p.value(*a)),
    Case("minimax", "dF/dalpha", lambda p, x, a, s: p.gradients(x, a, s)[1], lambda p, *a: p.value(*a), 1),
    Case("constrained", "objective", lambda p, x, s: p.grad_objective(x, s)[1], lambda p, *a: p.objective(*a)),
    Case("constrained", "first", lambda p, x, s: p.grad_constraint(x, 0, s)[1], lambda p, *a: p.constraints(*a)[0]),
    Case("constrained", "last", lambda p, x, s: p.grad_constraint(x, 2, s)[1], lambda p, *a: p.constraints(*a)[2]),
]

VALUES = [
    Case("single level", "value", lambda p, x, s: p.value(x, s), lambda p, *a: p.loss(*a)),
    Case("compositional", "inner", lambda p, x, s: p.inner_value(x, s), lambda p, *a: p.inner(*a).ravel()),
    Case("compositional", "inner of vjp", lambda p, x, s: p.inner_vjp(x, s)[0], lambda p, *a: p.inner(*a).ravel()),
    Case("conditional", "value", lambda p, x, s: p.value(x, s), plug_in),
    Case("personalised", "loss", lambda p, u, v, s: p.local_loss(u, v, s), local_loss),
    Case("personalised", "H", lambda p, u, v, s: p.distance(u, CENTER_VECTOR, s), distance_to_center),
    Case("minimax", "risks", lambda p, x, a, s: p.risks(x, s)[0], lambda p, x, a, *rest: p.group_risks(x, *rest)[0]),
    Case("constrained", "objective", lambda p, x, s: p.grad_objective(x, s)[0], lambda p, *a: p.objective(*a)),
    Case("constrained", "all", lambda p, x, s: p.constraint_values(x, s), lambda p, *a: p.constraints(*a)),
    Case("constrained", "one", lambda p, x, s: p.grad_constraint(x, 2, s)[0], lambda p, *a: p.constraints(*a)[2]),
]


def evaluated(case: Case, scale: float):
    """(oracle, function of one flat vector, that vector) of a case, at scale times the starting point.

    Trees are made by JAX's own ravel_pytree: what the problem does with vectors is under test.
    """
    task = example(case.name)
    vectors = [scale * v for v in task.params]
    unravel = [ravel_pytree(tree)[1] for tree in trees_of(case.name)]

    def function(v, sample):
        point = [v if i == case.wrt else vector for i, vector in enumerate(vectors)]
        return case.function(task.problem, *(u(w) for u, w in zip(unravel, point, strict=True)), *sample)

    return lambda sample: case.oracle(task.problem, *vectors, sample), function, vectors[case.wrt]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_are_those_of_the_users_functions_at_two_points_of_one_sample(case):
    sample = sample_of(example(case.name))
    for scale in (1.0, 0.6):
        oracle, function, x = evaluated(case, scale)
        assert_allclose(oracle(sample), finite_differences(lambda v: function(v, sample), x), rtol=1e-6, atol=1e-8)
    assert not np.allclose(oracle(sample), oracle(sample._replace(key=OTHER_KEY)))


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_values_are_those_of_the_users_functions_at_two_points_of_one_sample(case):
    sample = sample_of(example(case.name))
    for scale in (1.0, 0.6):
        oracle, function, x = evaluated(case, scale)
        assert_allclose(oracle(sample), jax.jit(function)(x, sample), rtol=1e-12)
    assert not np.allclose(oracle(sample), oracle(sample._replace(key=OTHER_KEY)))


@pytest.mark.parametrize("case", [*GRADIENTS, *VALUES], ids=str)
def test_oracles_never_flatten(case, monkeypatch):
    task = example(case.name)

    def refuse(layout, tree):
        raise AssertionError("flattened again")

    def traced(*vectors):
        batch = task.problem.sample(task.data.client(1), KEY, 5)  # a size of its own, so nothing comes from a cache
        return case.oracle(task.problem, *vectors, Sample(batch, KEY))

    monkeypatch.setattr(Layout, "flatten", refuse)
    jax.eval_shape(traced, *task.params)


def test_the_outer_gradient_takes_and_gives_flat_vectors_of_the_users_shape():
    task = example("compositional")
    sample = sample_of(task)
    expected = finite_differences(lambda y: task.problem.outer(y.reshape(2, 2), *sample), W)
    assert_allclose(task.problem.grad_outer(W, sample), expected, rtol=1e-6)


def test_the_dense_solve_inverts_the_hessian():
    task = example("bilevel")
    sample = sample_of(task)
    z = task.problem.hessian_solve(*task.params, sample, V)
    assert_allclose(task.problem.hessian_vector(*task.params, sample, z), V, rtol=1e-10)


@struct
class Dropout(SingleLevel):
    """loss = <mask of the key, x>, whose gradient is the mask itself."""

    def loss(self, x, batch, key):
        return jnp.vdot(jax.random.bernoulli(key, 0.5, (64,)).astype(x["w"].dtype), x["w"])


def test_one_sample_gives_one_dropout_mask_whatever_the_point():
    task = Task.create(Dropout(), Rows.from_clients(PEOPLE), {"w": np.zeros(64)})
    mask = lambda x, key: task.problem.gradient(x, Sample(None, key))
    first = mask(jnp.zeros(64), KEY)
    assert set(np.unique(first)) == {0.0, 1.0}
    assert_array_equal(first, mask(jnp.full(64, 7.0), KEY))
    assert (first != mask(jnp.zeros(64), OTHER_KEY)).any()


def test_representations_are_compared_by_mean_squared_distance_unless_the_user_says_otherwise():
    z_local, z_global = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 0.0], [0.0, 0.0]])
    assert Personalised().reg(z_local, z_global) == (4 + 25) / 2


def test_a_composition_without_extra_says_so():
    assert Blend().has_extra and not Line().has_extra


def test_methods_that_reweigh_groups_are_told_when_there_are_none():
    problem, params = Saddle().bind((np.zeros(()), np.zeros(())))
    with pytest.raises(UserError, match="Saddle has no group_risks"):
        problem.risks(params[0], Sample(np.ones(2), KEY))


@struct
class Saddle(Minimax):
    def value(self, x, alpha, batch, key):
        return x * alpha + jnp.mean(batch)


def test_a_conditional_batch_pairs_every_outer_sample_with_its_own_inner_samples():
    @struct
    class Echo(Noisy):
        def sample_inner(self, data, xi, key, count):
            return xi[0][None] + jnp.arange(count)[:, None] + 1e-3 * noise(key)[None]

    task = Task.create(Echo(inner_samples=3), Rows.from_clients(PEOPLE), LINE, batch_size=4)
    (inputs, labels), etas = task.sample(task.data.client(1), KEY)
    assert inputs.shape == (4, 2) and labels.shape == (4,) and etas.shape == (4, 3, 2)
    offset = etas - inputs[:, None] - np.arange(3.0)[None, :, None]
    assert ((offset > 0) & (offset < 1e-3)).all(), "inner samples belong to their outer sample"
    assert np.unique(offset[:, 0, 0]).size == 4, "every outer sample has a key of its own"


# ------------------------------------------------------------------------------------------------- metrics


def metrics_of(name: str, problem, state: dict, kept: dict) -> dict[str, float]:
    """A problem's metrics at its starting point, with two clients of equal weight side by side."""
    task = example(name)
    fed = SimpleNamespace(mean=lambda tree: lax.pmean(tree, "clients"), key=KEY)
    server, client = SimpleNamespace(**state), SimpleNamespace(**kept)
    one = lambda data, i: problem.metrics(server, client, data.client(i), fed)
    values = jax.jit(jax.vmap(one, (None, 0), axis_name="clients"))(task.data, jnp.arange(2))
    return jax.tree.map(lambda a: a[0], values)


def over_clients(function: Callable) -> Any:
    """The mean over the two clients of a function of all their rows."""
    return sum(function(batch) for batch in PEOPLE) / 2


def bilevel_values(p, x, y):
    return {level: over_clients(lambda b: getattr(p, level)(x, y, b, KEY)) for level in ("upper", "lower")}


def composed(p, x):
    inner = over_clients(lambda b: p.inner(x, b, KEY))
    return {"objective": over_clients(lambda b: p.extra(x, b, KEY) + p.outer(inner, b, KEY))}


def composed_locally(p, x):
    return {"objective": over_clients(lambda b: p.extra(x, b, KEY) + p.outer(p.inner(x, b, KEY), b, KEY))}


def violation(p, x):
    worst = jnp.max(over_clients(lambda b: p.constraints(x, b, KEY)))
    return {"objective": over_clients(lambda b: p.objective(x, b, KEY)), "violation": jnp.maximum(worst, 0)}


def mean_loss(p, x):
    return {"loss": over_clients(lambda b: p.loss(x, b, KEY))}


def mean_local_loss(p, u, v):
    return {"loss": over_clients(lambda b: local_loss(p, u, v, b, KEY))}


def mean_value(p, x, alpha):
    return {"value": over_clients(lambda b: p.value(x, alpha, b, KEY))}


LOCAL = {"scope": "local"}
NOUGHT = {"bias": np.zeros(()), "weight": np.zeros(2)}
METRICS = {  # (example, changes to it, names of the server's variables, what the clients keep, expected metrics)
    "single level": ("single level", {}, "x", {}, mean_loss),
    "bilevel": ("bilevel", {}, "xy", {"y": None}, bilevel_values),
    "bilevel, own y": ("bilevel", {}, "xy", {"y": np.zeros(3)}, lambda p, x, y: bilevel_values(p, x, NOUGHT)),
    "compositional": ("compositional", {}, "x", {}, composed),
    "compositional, local": ("compositional", LOCAL, "x", {}, composed_locally),
    "personalised": ("personalised", {}, "uv", {"u": None, "v": None}, mean_local_loss),
    "personalised, own v": (
        "personalised",
        {},
        "uv",
        {"u": None, "v": np.zeros(3)},
        lambda p, u, v: mean_local_loss(p, u, NOUGHT),
    ),
    "minimax": ("minimax", {}, ("x", "alpha"), {}, mean_value),
    "constrained": ("constrained", {}, "x", {}, violation),
}


@pytest.mark.parametrize("case", METRICS)
def test_default_metrics_are_the_objective_over_all_rows(case):
    name, changes, shared, kept, expected = METRICS[case]
    problem = dataclasses.replace(example(name).problem, **changes)
    got = metrics_of(name, problem, dict(zip(shared, example(name).params, strict=True)), kept)
    wanted = jax.jit(lambda trees: expected(problem, *trees))(trees_of(name))
    assert got.keys() == wanted.keys()
    for metric, value in wanted.items():
        assert_allclose(got[metric], value, rtol=1e-10, err_msg=metric)


# ------------------------------------------------------------------------------------------------- hypergradients


def joined(tree):
    """A vector of the two-leaf trees of `Quadratics`."""
    return jnp.concatenate([seen(tree, first=(1,), rest=tree["rest"].shape)["first"], tree["rest"]])


def parted(vector):
    vector = np.asarray(vector)
    return {"first": vector[:1], "rest": vector[1:]}


@struct
class Quadratics(Bilevel):
    """lower = y'Ay / 2 - y'(Bx + c), upper = |y - t|^2 / 2 + 0.1 |x|^2 / 2, with (A, B, c, t) as the batch."""

    def lower(self, x, y, batch, key):
        x, y = joined(x), joined(y)
        return 0.5 * y @ batch["A"] @ y - y @ (batch["B"] @ x + batch["c"])

    def upper(self, x, y, batch, key):
        x, y = joined(x), joined(y)
        return 0.5 * jnp.sum((y - batch["t"]) ** 2) + 0.05 * jnp.sum(x**2)


T4 = {
    "A": np.array([[2.0, 0.5], [0.5, 1.0]]),
    "B": np.array([[1.0, 0.0], [1.0, -1.0]]),
    "c": np.array([1.0, 0.0]),
    "t": np.array([0.0, 1.0]),
}
T4_POINT = (np.array([1.0, -1.0]), np.array([4.0, 12.0]) / 7)


def quadratics(x, y):
    return Quadratics().bind((parted(x), parted(y)))[0]


def stacked(*batches):
    return jax.tree.map(lambda *parts: np.stack(parts), *batches)


@jax.jit
def estimate(estimator, problem, points, batches, key=KEY):
    """The estimates at all the points, where draw(j) is the j-th of the batches; a single one is every draw."""
    draw = lambda j: Sample(jax.tree.map(lambda a: a[j % a.shape[0]], batches), jax.random.fold_in(key, j))
    return estimator(problem, points, draw)


EXACT = [0.8755102, -0.75306122]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Neumann(terms=0, lr=0.4), [0.61428571, -0.38571429]),
        (Neumann(terms=5, lr=0.4), [0.84497829, -0.70094171]),
        (Neumann(terms=20, lr=0.4), [0.87541031, -0.75289069]),
        (Neumann(terms=80, lr=0.4), EXACT),
        (LinearSystem(steps=6, lr=0.4), [0.84497829, -0.70094171]),
        (Dense(), EXACT),
        (Dense(share_batch=True), EXACT),
        (ConjugateGradient(steps=2), EXACT),
        (ConjugateGradient(steps=9), EXACT),
    ],
    ids=label,
)
def test_the_vector_quadratic_of_the_specification(estimator, expected):
    (phi,) = estimate(estimator, quadratics(*T4_POINT), [T4_POINT], stacked(T4))
    assert_allclose(phi, expected, atol=5.1e-9)


@pytest.mark.parametrize(("terms", "expected"), [(0, 0.2), (1, 0.28), (3, 0.3248), (10, 0.3333193523)])
def test_the_neumann_series_of_a_scalar(terms, expected):
    # Client 1 of the toy has A = 3; where df/dx = 0 and df/dy = 1 the hypergradient is the series itself.
    task = scalar_bilevel()
    batch = task.sample(task.data.client(1), KEY)
    point = (np.zeros(1), np.array([4.0]))
    (phi,) = estimate(Neumann(terms=terms, lr=0.2), task.problem, [point], stacked(batch))
    assert_allclose(phi, [expected], atol=5e-11)
    assert_allclose(phi, [(1 - 0.4 ** (terms + 1)) / 3], rtol=1e-12)


@pytest.mark.parametrize(
    ("scope", "x", "expected"),
    [
        ("local", 0.0, -8 / 9),
        ("local", 80 / 59, 0.0),
        ("global", 0.0, -0.75),
        ("global", 15 / 7, 0.0),
    ],
)
def test_own_and_common_lower_problems_have_their_own_hypergradients(scope, x, expected):
    task = scalar_bilevel(scope)
    clients = [task.sample(task.data.client(k), KEY) for k in range(2)]
    # The lower problems are quadratic: averaging them is averaging their coefficients.
    batches = clients if scope == "local" else [jax.tree.map(lambda *a: sum(a) / 2, *clients)]
    solution = lambda A, B, c, t: (B * x + c) / A
    each = [
        estimate(Dense(), task.problem, [(np.array([x]), solution(*batch)[None])], stacked(batch))[0]
        for batch in batches
    ]
    assert_allclose(np.mean(each), expected, atol=1e-12)


SMALL = arrays(np.int64, 21, elements=st.integers(-8, 8)).map(lambda a: a / 8)


def random_quadratic(numbers):
    """A three-dimensional positive definite lower problem of two-dimensional x, of condition at most 10."""
    M, B, c, t = numbers[:9].reshape(3, 3), numbers[9:15].reshape(3, 2), numbers[15:18], numbers[18:]
    return {"A": M @ M.T + np.eye(3), "B": B, "c": c, "t": t}


@given(numbers=SMALL, x=arrays(np.int64, 2, elements=st.integers(-8, 8)).map(lambda a: a / 4))
@settings(max_examples=15, deadline=None)
def test_all_estimators_find_the_gradient_of_the_value_function(numbers, x):
    batch = random_quadratic(numbers)
    solution = lambda x: np.linalg.solve(batch["A"], batch["B"] @ x + batch["c"])
    value = lambda x: 0.5 * np.sum((solution(x) - batch["t"]) ** 2) + 0.05 * np.sum(x**2)
    slope = lambda e: (value(x + 1e-3 * e) - value(x - 1e-3 * e)) / 2e-3  # exact for a quadratic, but for rounding
    expected = [slope(e) for e in np.eye(2)]
    point = (x, solution(x))
    for estimator in (Dense(), ConjugateGradient(steps=3), Neumann(terms=400, lr=0.1), LinearSystem(steps=401, lr=0.1)):
        (phi,) = estimate(estimator, quadratics(*point), [point], stacked(batch))
        assert_allclose(phi, expected, rtol=1e-7, atol=1e-7, err_msg=repr(estimator))


STOCHASTIC = [random_quadratic(RANDOM.uniform(-1, 1, 21)) for _ in range(7)]
POINT = (np.array([0.5, -1.0]), np.array([1.0, 0.5, -0.8]))
POINTS = [POINT, (np.array([-0.3, 0.4]), np.array([0.2, -1.5, 0.6]))]


def formula(inverse: Callable) -> np.ndarray:
    """df/dx(B_1) - d2g/dxdy(B_2) z with z = inverse(Hessians, df/dy(B_1)), by NumPy."""
    x, y = POINT
    return 0.1 * x + STOCHASTIC[2]["B"].T @ inverse([b["A"] for b in STOCHASTIC], y - STOCHASTIC[1]["t"])


def neumann_sum(A, v):
    """Three terms of step 0.1: B_2, which is draw(4), acts first."""
    first = v - 0.1 * A[4] @ v
    return 0.1 * (v + first + (first - 0.1 * A[3] @ first))


def three_steps(A, v):
    z = np.zeros(3)
    for hessian in A[3:6]:
        z = z - 0.1 * (hessian @ z - v)
    return z


ESTIMATORS = [  # (estimator, the inverse it stands for, the draws it uses)
    (Dense(), lambda A, v: np.linalg.solve(A[3], v), {1, 2, 3}),
    (ConjugateGradient(steps=3), lambda A, v: np.linalg.solve(A[3], v), {1, 2, 3}),
    (Neumann(terms=2, lr=0.1), neumann_sum, {1, 2, 3, 4}),
    (LinearSystem(steps=3, lr=0.1), three_steps, {1, 2, 3, 4, 5}),
]
SHARED = [Dense(share_batch=True), ConjugateGradient(steps=3, share_batch=True), Neumann(terms=2, share_batch=True)]


@pytest.mark.parametrize(("estimator", "inverse"), [case[:2] for case in ESTIMATORS], ids=label)
def test_every_factor_has_its_own_batch_in_the_order_of_the_paper(estimator, inverse):
    (phi,) = estimate(estimator, quadratics(*POINT), [POINT], stacked(*STOCHASTIC))
    assert_allclose(phi, formula(inverse), rtol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        *((e, used) for e, _, used in ESTIMATORS),
        *((e, {1}) for e in SHARED),
        (RandomTruncation(terms=4), {1, 2, 3, 4, 5}),
    ],
    ids=label,
)
def test_estimators_use_these_draws_and_leave_draw_0_to_the_lower_gradient(estimator, expected):
    problem, used = quadratics(*POINT), set()

    def draw(j):
        jax.debug.callback(lambda j: used.add(int(j)), j)
        return Sample(STOCHASTIC[0], KEY)

    jax.block_until_ready(jax.jit(lambda: estimator(problem, POINTS, draw))())
    jax.effects_barrier()
    assert used == expected


@pytest.mark.parametrize(
    "estimator", [*(case[0] for case in ESTIMATORS), *SHARED, RandomTruncation(terms=4)], ids=label
)
def test_two_points_share_their_samples(estimator):
    problem, batches = quadratics(*POINT), stacked(*STOCHASTIC)
    together = estimate(estimator, problem, POINTS, batches)
    for phi, point in zip(together, POINTS, strict=True):
        assert_allclose(phi, estimate(estimator, problem, [point], batches)[0], rtol=1e-12)
    assert not np.allclose(*together)


@pytest.mark.parametrize("estimator", SHARED, ids=label)
def test_share_batch_is_drawing_one_batch_for_all_the_factors(estimator):
    problem = quadratics(*POINT)
    alone = estimate(dataclasses.replace(estimator, share_batch=False), problem, [POINT], stacked(STOCHASTIC[1]))
    assert_allclose(estimate(estimator, problem, [POINT], stacked(*STOCHASTIC)), alone, rtol=1e-12)


@pytest.mark.parametrize("terms", [0, 4])
def test_linear_system_steps_add_up_to_the_neumann_series(terms):
    problem, batches = quadratics(*POINT), stacked(STOCHASTIC[0])
    (series,) = estimate(Neumann(terms=terms, lr=0.13), problem, [POINT], batches)
    (steps,) = estimate(LinearSystem(steps=terms + 1, lr=0.13), problem, [POINT], batches)
    assert_allclose(series, steps, rtol=1e-12)


@jax.jit
def many_truncations(problem, batches):
    """RandomTruncation of five terms with 3000 keys."""
    one = lambda key: estimate(RandomTruncation(terms=5, lr=0.13), problem, [POINT], batches, key)[0]
    return jax.vmap(one)(jax.random.split(KEY, 3000))


def test_random_truncation_is_the_neumann_series_on_average():
    draws = np.asarray(many_truncations(quadratics(*POINT), stacked(*[STOCHASTIC[0]] * 7)))
    (series,) = estimate(Neumann(terms=4, lr=0.13), quadratics(*POINT), [POINT], stacked(STOCHASTIC[0]))
    assert (np.abs(draws.mean(0) - series) < 3 * draws.std(0) / np.sqrt(len(draws))).all()


def test_random_truncation_is_a_product_of_0_to_all_but_one_factors_with_batches_of_their_own():
    def product(A, v, length):
        for hessian in A[3 : 3 + length]:
            v = v - 0.13 * hessian @ v
        return 5 * 0.13 * v

    expected = np.array([formula(lambda A, v: product(A, v, length)) for length in range(5)])
    draws = np.asarray(many_truncations(quadratics(*POINT), stacked(*STOCHASTIC)))
    gaps = np.abs(draws[:, None] - expected[None]).max(-1)  # [draws, lengths]
    assert gaps.min(1).max() < 1e-12
    assert set(gaps.argmin(1)) == set(range(5))


def test_conjugate_gradient_stays_put_once_it_has_arrived():
    zero = {**T4, "t": T4_POINT[1]}  # df/dy = 0: nothing to solve
    (phi,) = estimate(ConjugateGradient(steps=9), quadratics(*T4_POINT), [T4_POINT], stacked(zero))
    assert_allclose(phi, 0.1 * T4_POINT[0], rtol=1e-12)


# ------------------------------------------------------------------------------------------------- adapters


def adapted(adapter, name: str, *more, **options) -> Task:
    """The example's problem behind an adapter, with its starting point and perhaps another variable's."""
    problem, start = PROBLEMS[name]
    return Task.create(
        adapter(problem=problem, **options), Rows.from_clients(PEOPLE), (start, *more) if more else start
    )


def test_a_single_level_problem_is_a_conditional_one():
    task, own = adapted(SingleAsConditional, "single level", inner_samples=2), example("single level").problem
    (x,) = task.params
    rows, etas = task.problem.sample(task.data.client(1), KEY, 4)
    conditional, single = Sample((rows, etas), OTHER_KEY), Sample(rows, OTHER_KEY)
    assert_allclose(task.problem.value(x, conditional), own.value(x, single), rtol=1e-12)
    assert_allclose(task.problem.gradient(x, conditional), own.gradient(x, single), rtol=1e-10)


def own_composition(problem, batch, key):
    """extra + outer(inner) on one batch, of the flat vector of LINE."""
    unravel = ravel_pytree(LINE)[1]

    def value(vector):
        x = unravel(vector)
        return problem.extra(x, batch, key) + problem.outer(problem.inner(x, batch, key), batch, key)

    return value


def test_a_local_composition_is_a_conditional_problem():
    problem, start = PROBLEMS["compositional"]
    task = people(LocalCompositionAsConditional(problem=dataclasses.replace(problem, scope="local")), start)
    (x,) = task.params
    inputs, labels = rows = PEOPLE[1]
    # Every outer sample sees all the rows as its inner samples: the plug-in estimate is the composition itself. Both
    # kinds of sample are batches of one row.
    etas = (np.broadcast_to(inputs[:, None], (4, 4, 1, 2)), np.broadcast_to(labels[:, None], (4, 4, 1)))
    sample = Sample(((inputs[:, None], labels[:, None]), etas), KEY)
    value = own_composition(PROBLEMS["compositional"][0], rows, KEY)
    assert_allclose(task.problem.value(x, sample), value(x), rtol=1e-12)
    assert_allclose(task.problem.gradient(x, sample), finite_differences(value, x), rtol=1e-6)


def test_a_composition_is_a_bilevel_problem():
    task = adapted(CompositionAsBilevel, "compositional", np.zeros((2, 2)))
    own = example("compositional").problem
    (x, _), sample = task.params, Sample(PEOPLE[1], KEY)
    y = own.inner_value(x, sample)
    assert_allclose(task.problem.grad_lower(x, y, sample), np.zeros(4), atol=1e-15)
    (phi,) = Dense(share_batch=True)(task.problem, [(x, y)], lambda j: sample)
    value = own_composition(PROBLEMS["compositional"][0], *sample)
    assert_allclose(phi, finite_differences(value, x), rtol=1e-6)
    assert_allclose(phi, own.inner_vjp(x, sample)[1](own.grad_outer(y, sample))[0] + own.grad_extra(x, sample))
    assert_allclose(task.problem.upper_flat(x, y, sample), value(x), rtol=1e-12)


def test_a_strongly_concave_minimax_problem_is_a_bilevel_problem():
    (x, alpha), sample = example("minimax").params, Sample(PEOPLE[1], KEY)
    start, other = PROBLEMS["minimax"][1]
    own = example("minimax").problem
    problem = Task.create(
        MinimaxAsBilevel(problem=PROBLEMS["minimax"][0]), Rows.from_clients(PEOPLE), (start, other)
    ).problem
    unravel = [ravel_pytree(tree)[1] for tree in (start, other)]
    value = lambda x, alpha: own.value(unravel[0](x), unravel[1](alpha), *sample)

    @jax.jit
    def best(x):  # a Newton step solves a quadratic
        return alpha - jnp.linalg.solve(jax.hessian(value, 1)(x, alpha), jax.grad(value, 1)(x, alpha))

    assert_allclose(problem.upper_flat(x, alpha, sample), value(x, alpha))
    assert_allclose(problem.grad_lower(x, alpha, sample), -own.gradients(x, alpha, sample)[1])
    assert_allclose(problem.grad_lower(x, best(x), sample), np.zeros(3), atol=1e-14)
    (phi,) = Dense(share_batch=True)(problem, [(x, best(x))], lambda j: sample)
    assert_allclose(phi, finite_differences(lambda x: value(x, best(x)), x), rtol=1e-6)
    assert_allclose(phi, own.gradients(x, best(x), sample)[0], rtol=1e-10)


def test_the_naive_composition_is_every_clients_own():
    problem = adapted(NaiveComposition, "compositional").problem
    x, sample = example("compositional").params[0], Sample(PEOPLE[1], KEY)
    value = own_composition(PROBLEMS["compositional"][0], *sample)
    assert_allclose(problem.value(x, sample), value(x), rtol=1e-12)
    assert_allclose(problem.gradient(x, sample), finite_differences(value, x), rtol=1e-6)


def test_the_naive_composition_climbs_where_the_composition_descends():
    naive, true = counterexample("naive"), counterexample()
    x = true.params[0]
    samples = [Sample(true.sample(true.data.client(k), KEY), KEY) for k in range(2)]
    gradients = [naive.problem.gradient(x, sample) for sample in samples]
    assert_allclose(gradients, [[-8 / np.sqrt(8)], [-6 / np.sqrt(13)]], rtol=1e-12)
    inner = sum(true.problem.inner_value(x, sample) for sample in samples) / 2
    slope = sum(true.problem.inner_vjp(x, s)[1](true.problem.grad_outer(inner, s))[0] for s in samples) / 2
    assert_allclose(slope, [0.5 / np.sqrt(4.25)], rtol=1e-12)


@struct
class Scaled(SingleLevel):
    """A problem with rows and constants: its batches are (rows, constants)."""

    def loss(self, x, batch, key):
        rows, scale = batch
        return scale * jnp.mean((rows - x["m"]) ** 2)


@struct
class ScaledComposition(Compositional):
    def inner(self, x, batch, key):
        rows, scale = batch
        return scale * jnp.mean(rows) * x["m"]

    def outer(self, y, batch, key):
        return batch[1] * jnp.cosh(y)


@pytest.mark.parametrize(
    ("adapter", "problem", "expected"),
    [
        (SingleAsConditional, Scaled(), 2 * 0.7**2),
        (LocalCompositionAsConditional, ScaledComposition(scope="local"), 2 * np.cosh(2 * 0.3)),
    ],
)
def test_conditional_views_keep_a_clients_constants(adapter, problem, expected):
    rows = Rows.from_clients([np.full(3, 5.0), np.ones(4)], constants=np.array([9.0, 2.0]))
    task = Task.create(adapter(problem=problem), rows, {"m": np.array(0.3)}, batch_size=2)
    sample = Sample(task.sample(rows.client(1), KEY), KEY)
    assert_allclose(task.problem.value(task.params[0], sample), expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------------- projections


def clipped(tree):
    """Onto weights of at least zero; the other leaves are free."""
    return {**tree, "weight": jnp.maximum(tree["weight"], 0)}


@struct
class ProjectedFit(Fit):
    def project_x(self, x):
        return clipped(x)


@struct
class ProjectedTuning(Tuning):
    def project_x(self, x):
        return {"decay": jnp.minimum(x["decay"], 0), "shift": x["shift"]}

    def project_y(self, y):
        return clipped(y)


@struct
class ProjectedBlend(Blend):
    def project_x(self, x):
        return clipped(x)

    def project_y(self, y):
        assert y.shape == (2, 2)
        return jnp.maximum(y, 0)


@struct
class ProjectedGame(Game):
    def project_x(self, x):
        return clipped(x)

    def project_alpha(self, alpha):
        return {"level": jnp.clip(alpha["level"], 0, 1), "tilt": alpha["tilt"]}


def bound(problem, start):
    return problem.bind(start)[0]


X_POINT, X_FEASIBLE = np.array([-1.0, 2.0, -3.0]), np.array([-1.0, 2.0, 0.0])
GAME_START, TUNING_START = PROBLEMS["minimax"][1], PROBLEMS["bilevel"][1]
BLEND_START = (LINE, np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("problem", "start", "method", "point", "expected"),
    [
        (ProjectedFit(), LINE, "feasible_x", X_POINT, X_FEASIBLE),
        (ProjectedTuning(), TUNING_START, "feasible_x", [2.0, -3.0, 4.0], [0.0, -3.0, 4.0]),
        (ProjectedTuning(), TUNING_START, "feasible_y", X_POINT, X_FEASIBLE),
        (ProjectedGame(), GAME_START, "feasible_x", X_POINT, X_FEASIBLE),
        (ProjectedGame(), GAME_START, "feasible_alpha", [3.0, 5.0, -7.0], [1.0, 5.0, -7.0]),
        (SingleAsConditional(problem=ProjectedFit()), LINE, "feasible_x", X_POINT, X_FEASIBLE),
        (LocalCompositionAsConditional(problem=ProjectedBlend()), LINE, "feasible_x", X_POINT, X_FEASIBLE),
        (NaiveComposition(problem=ProjectedBlend()), LINE, "feasible_x", X_POINT, X_FEASIBLE),
        (CompositionAsBilevel(problem=ProjectedBlend()), BLEND_START, "feasible_x", X_POINT, X_FEASIBLE),
        (CompositionAsBilevel(problem=ProjectedBlend()), BLEND_START, "feasible_y", [1, -1.0, 2, -2], [1, 0.0, 2, 0]),
        (MinimaxAsBilevel(problem=ProjectedGame()), GAME_START, "feasible_x", X_POINT, X_FEASIBLE),
        (MinimaxAsBilevel(problem=ProjectedGame()), GAME_START, "feasible_y", [3.0, 5.0, -7.0], [1.0, 5.0, -7.0]),
    ],
    ids=label,
)
def test_feasible_points_are_the_users_projections_of_trees(problem, start, method, point, expected):
    assert_array_equal(getattr(bound(problem, start), method)(jnp.asarray(point)), expected)


@pytest.mark.parametrize(
    ("problem", "start", "method"),
    [
        *((problem, start, "feasible_x") for problem, start in PROBLEMS.values()),
        (*PROBLEMS["bilevel"], "feasible_y"),
        (*PROBLEMS["minimax"], "feasible_alpha"),
        (SingleAsConditional(problem=Fit()), LINE, "feasible_x"),
        (CompositionAsBilevel(problem=Blend()), BLEND_START, "feasible_x"),
        (CompositionAsBilevel(problem=Blend()), BLEND_START, "feasible_y"),
        (MinimaxAsBilevel(problem=Game()), GAME_START, "feasible_x"),
        (MinimaxAsBilevel(problem=Game()), GAME_START, "feasible_y"),
    ],
    ids=label,
)
def test_no_projection_costs_nothing(problem, start, method):
    problem = bound(problem, start)
    variable = 0 if method == "feasible_x" else 1
    vector = jnp.ones(problem.layouts[variable].size)
    assert_array_equal(getattr(problem, method)(vector), vector)
    assert jax.make_jaxpr(getattr(problem, method))(vector).eqns == []


# ------------------------------------------------------------------------------------------------- rows of data

SIZES = (5, 1, 300)
POOL = Rows.from_clients(
    [{"owner": np.full(n, k), "row": np.arange(n), "wide": np.full((n, 2), k / 2)} for k, n in enumerate(SIZES)],
    ids=[7, 3, 11],
)


def test_ragged_clients_side_by_side_draw_their_own_rows_only():
    keys = jax.random.split(KEY, len(SIZES))
    batch = jax.vmap(lambda i, key: POOL.client(i).draw(key, 512))(jnp.arange(len(SIZES)), keys)
    own = np.arange(len(SIZES))
    assert_array_equal(batch["owner"], np.broadcast_to(own[:, None], (3, 512)))
    assert_array_equal(batch["wide"], np.broadcast_to(own[:, None, None] / 2, (3, 512, 2)))


@pytest.mark.parametrize("client", range(3))
def test_draws_are_uniform_over_all_rows_of_a_client(client):
    number, size = 100 * SIZES[client], SIZES[client]
    counts = np.bincount(POOL.client(client).draw(KEY, number)["row"], minlength=size)
    assert counts.shape == (size,) and counts.min() > 0
    # The chi-square statistic has size - 1 degrees of freedom: mean size - 1, variance 2 (size - 1).
    assert ((counts - 100) ** 2 / 100).sum() <= size - 1 + 4 * np.sqrt(2 * (size - 1))


def test_draws_are_decided_by_the_key():
    draw = lambda key: POOL.client(2).draw(key, 32)["row"]
    assert_array_equal(draw(KEY), draw(KEY))
    assert (draw(KEY) != draw(OTHER_KEY)).any()


@pytest.mark.parametrize(
    ("rows", "constants", "expected"),
    [
        ([np.full(2, 4.0)], None, np.full(3, 4.0)),
        (None, {"prior": np.array([0.25])}, {"prior": 0.25}),
        ([np.full(2, 4.0)], {"prior": np.array([0.25])}, (np.full(3, 4.0), {"prior": 0.25})),
    ],
    ids=["rows", "constants", "rows and constants"],
)
def test_a_batch_is_rows_or_constants_or_both(rows, constants, expected):
    client = Rows.from_clients(rows, constants=constants).client(0)
    batch = client.draw(KEY, 3)
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    jax.tree.map(assert_array_equal, batch, expected)
    means = jax.jit(lambda client: client.average(lambda batch: jax.tree.map(jnp.mean, batch)))(client)
    jax.tree.map(assert_array_equal, means, jax.tree.map(np.mean, expected))


def test_averages_need_no_compiled_program_around_them():
    assert Rows.from_clients([np.zeros(2), np.arange(3.0)]).client(1).average(jnp.mean) == 1.0


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9], ids=lambda n: f"{n} rows in blocks of 4")
def test_averages_are_exact_and_read_each_row_of_the_client_and_no_other(size):
    neighbours = [{"owner": np.full(n, k), "value": np.full(n, 1e6)} for k, n in ((0, 2), (2, 9))]
    mine = {"owner": np.full(size, 1), "value": np.arange(size) ** 2.0}
    client = Rows.from_clients([neighbours[0], mine, neighbours[1]]).client(1)
    owners, values = set(), set()

    def record(batch):
        owners.update(np.ravel(batch["owner"]).tolist())
        values.update(np.ravel(batch["value"]).tolist())

    def moments(batch):
        jax.debug.callback(record, batch)
        return {"mean": jnp.mean(batch["value"]), "powers": jnp.mean(batch["value"][:, None] ** np.arange(3)[None], 0)}

    average = jax.jit(lambda client: client.average(moments, rows_at_once=4))(client)
    jax.effects_barrier()
    assert owners == {1} and values == set(mine["value"].tolist())
    assert_allclose(average["mean"], mine["value"].mean(), rtol=1e-14)
    assert_allclose(average["powers"], (mine["value"][:, None] ** np.arange(3)).mean(0), rtol=1e-14)


@given(cuts=st.sets(st.integers(1, 11), max_size=5), rows_at_once=st.sampled_from([1, 4, 20]))
@settings(max_examples=10, deadline=None)
def test_averages_are_exact_for_ragged_clients_side_by_side(cuts, rows_at_once):
    values = np.split(RANDOM_VALUES, sorted(cuts))
    data = Rows.from_clients(values)

    def moments(data, i):
        return data.client(i).average(lambda b: (jnp.mean(b), jnp.mean(b**2)), rows_at_once=rows_at_once)

    mean, square = jax.jit(jax.vmap(moments, (None, 0)))(data, jnp.arange(data.clients))
    assert_allclose(mean, [v.mean() for v in values], rtol=1e-12)
    assert_allclose(square, [(v**2).mean() for v in values], rtol=1e-12)


RANDOM_VALUES = RANDOM.normal(size=12) + 3.0


def test_a_table_is_sorted_by_client_and_keeps_the_order_of_rows():
    client = np.array([1, 0, 2, 1, 1, 0])
    columns = {"a": np.arange(6), "b": np.arange(12.0).reshape(6, 2)}
    table = Rows.from_table(columns, client, constants=np.array([5.0, 6.0, 7.0]))
    parts = [jax.tree.map(lambda c: c[client == k], columns) for k in range(3)]
    expected = Rows.from_clients(parts, constants=np.array([5.0, 6.0, 7.0]))
    assert jax.tree.structure(table) == jax.tree.structure(expected)
    jax.tree.map(assert_array_equal, table, expected)
    assert_array_equal(table.sizes, [2, 3, 1])


def test_a_site_holds_its_own_rows_and_draws_what_it_draws_in_the_pool():
    pool = dataclasses.replace(POOL, constants={"prior": np.array([0.1, 0.2, 0.3])})
    for position, size in enumerate(SIZES):
        site = pool.only(position)
        assert site.clients == 1 and site.largest == size
        assert_array_equal(site.columns["owner"], np.full(size, position))
        assert_array_equal(site.ids, pool.ids[position : position + 1])
        here, there = site.client(0).draw(KEY, 16), pool.client(position).draw(KEY, 16)
        jax.tree.map(assert_array_equal, here, there)
        assert here[1]["prior"] == pool.constants["prior"][position]


def test_a_site_with_constants_only_holds_its_own():
    site = Rows.from_clients(constants=np.array([1.0, 2.0, 3.0])).only(2)
    assert site.clients == 1 and site.client(0).draw(KEY, 4) == 3.0


def test_clients_keep_ids_rows_and_draws_at_other_positions():
    order = [2, 0, 1]
    moved = POOL.reorder(order)
    assert_array_equal(moved.ids, [11, 7, 3])
    assert_array_equal(moved.sizes, [300, 5, 1])
    for new, old in enumerate(order):
        jax.tree.map(assert_array_equal, moved.client(new).draw(KEY, 16), POOL.client(old).draw(KEY, 16))


# ------------------------------------------------------------------------------------------------- tasks


@struct
class Mean(SingleLevel):
    def loss(self, x, batch, key):
        return jnp.mean((batch - x) ** 2)


MEAN, TWO = Mean(), Rows.from_clients([np.ones(3), np.zeros(1)])


def create(problem=MEAN, data=TWO, params=0.0, **options):
    return Task.create(problem, data, params, **options)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("uniform", [0.5, 0.5]), ("samples", [0.75, 0.25]), ([3, 1], [0.75, 0.25]), ([0, 2], [0, 1])],
)
def test_weights_are_normalised(weights, expected):
    assert_array_equal(create(weights=weights).weights, expected)


def test_a_task_keeps_what_it_was_given():
    task = create(batch_size=2, local_steps=[1, 3])
    assert task.clients == 2 and task.batch_size == 2
    assert_array_equal(task.local_steps, [1, 3])
    assert task.start(task.data.client(0)) is task.params
    assert task.sample(task.data.client(0), KEY).shape == (2,)


def test_numpy_integers_are_whole_numbers():
    assert create(batch_size=np.int64(4)).batch_size == 4


# ------------------------------------------------------------------------------------------------- errors


@struct
class Vector(SingleLevel):
    def loss(self, x, batch, key):
        return (batch - x) ** 2


@struct
class Count(SingleLevel):
    def loss(self, x, batch, key):
        return jnp.sum(batch > x)


@struct
class WithAux(SingleLevel):
    def loss(self, x, batch, key):
        return jnp.mean((batch - x) ** 2), {"aux": x}


class Unregistered(SingleLevel):
    def loss(self, x, batch, key):
        return jnp.mean((batch - x) ** 2)


@struct
class Pair(Compositional):
    def inner(self, x, batch, key):
        return jnp.stack([jnp.mean(batch), x])

    def outer(self, y, batch, key):
        return jnp.sum(y**2)


@struct
class ScalarConstraint(Limits):
    def constraints(self, x, batch, key):
        return jnp.sum(x["weight"])


@struct
class NoPair(TwoLayers):
    def split(self, params):
        return params["body"], params["tail"]


def people(problem, start, **options):
    return Task.create(problem, Rows.from_clients(PEOPLE), start, **options)


def two_columns(**changes):
    columns = {"a": np.ones(3), "b": np.ones((3, 2))}
    columns["b"][1, 1] = changes.get("b", 1.0)
    return columns


@struct
class TwoArguments(SingleLevel):
    def loss(self, x, batch):
        return jnp.sum(x["weight"])


@struct
class Branching(SingleLevel):
    def loss(self, x, batch, key):
        total = sum(jnp.sum(a) for a in jax.tree.leaves((x, batch)))
        return total if total > 0 else -total


@struct
class InNumpy(SingleLevel):
    def loss(self, x, batch, key):
        return jnp.asarray(float(sum(jnp.sum(a) for a in jax.tree.leaves((x, batch)))))


@struct
class Fields(SingleLevel):
    value: Any = 1.0

    def loss(self, x, batch, key):
        return sum(jnp.sum(a) for a in jax.tree.leaves((x, batch)))


@struct
class Sized(SingleLevel):
    count: int = 2

    def loss(self, x, batch, key):
        return sum(jnp.sum(a) for a in jax.tree.leaves((x, batch)))


ERRORS = {
    # data
    "no data": (lambda: Rows.from_clients(), "no data were given: pass one tree of arrays per client, or constants="),
    "empty list": (lambda: Rows.from_clients([]), "empty list of clients .* at least one client"),
    "no clients in constants": (lambda: Rows.from_clients(constants=np.zeros(0)), "at least one client"),
    "empty client": (lambda: Rows.from_clients([np.ones(2), np.ones(0)]), "client 1 has no rows; leave it out"),
    "other columns": (
        lambda: Rows.from_clients([{"a": np.ones(2)}, {"b": np.ones(2)}]),
        r"client 1 has the columns .*'b'.*, client 0 has .*'a'.*; all clients must have the same columns",
    ),
    "other row shapes": (
        lambda: Rows.from_clients([np.ones((2, 3)), np.ones((2, 4))]),
        r"client 1 has rows of shape \(4,\), client 0 of shape \(3,\)",
    ),
    "unequal columns": (
        lambda: Rows.from_clients([(np.ones(2), np.ones(3))]),
        r"columns of client 0 have the shapes \(2,\), \(3,\); they must have equally many rows",
    ),
    "no leading axis": (lambda: Rows.from_clients([1.0]), r"columns of client 0 have the shapes \(\)"),
    "NaN": (
        lambda: Rows.from_clients([two_columns(), two_columns(b=np.nan)]),
        r"NaN or infinite value in column \['b'\], client 1, row 1; fill in or remove such rows",
    ),
    "infinity in a table": (
        lambda: Rows.from_table(np.array([1.0, np.inf, 2.0]), [0, 1, 0]),
        "NaN or infinite value in column .the only one., client 1, row 0",
    ),
    "NaN in constants": (lambda: Rows.from_clients(constants=np.array([0.0, np.nan])), "NaN or infinite .* client 1"),
    "constants for other clients": (
        lambda: Rows.from_clients([np.ones(2), np.ones(3)], constants=np.ones(3)),
        "constants must have one entry for each of the 2 clients",
    ),
    "duplicate ids": (
        lambda: Rows.from_clients([np.ones(2), np.ones(3)], ids=[4, 4]),
        r"ids=\[4, 4\] must be 2 different whole numbers",
    ),
    "too few ids": (lambda: Rows.from_clients(constants=np.ones(2), ids=[4]), r"ids=\[4\] must be 2 different whole"),
    "fractional ids": (
        lambda: Rows.from_clients([np.ones(2), np.ones(3)], ids=[0.5, 1.5]),
        r"ids=\[0.5, 1.5\] must be 2 different whole numbers",
    ),
    "empty table": (lambda: Rows.from_table(np.ones(0), np.zeros(0, int)), "the table has no rows"),
    "gap in a table": (
        lambda: Rows.from_table(np.ones(3), [0, 2, 2]),
        "client 1 has no rows; number the clients 0 .. 2",
    ),
    "short client column": (lambda: Rows.from_table(np.ones(3), [0, 1]), r"shapes \(3,\), \(2,\)"),
    "negative client in a table": (lambda: Rows.from_table(np.ones(3), [-1, 0, 1]), "-1.*number the clients 0"),
    "named clients in a table": (lambda: Rows.from_table(np.ones(2), ["ann", "bob"]), "number the clients 0"),
    "rows of a client without rows": (
        lambda: Rows.from_clients(constants=np.ones(2)).client(0).draw_rows(KEY, 1),
        "constants and no rows to draw from",
    ),
    "data that are not Rows": (lambda: create(data=[np.ones(3), np.ones(2)]), "list .*Rows"),
    # starting points
    "integer parameters": (
        lambda: create(params=0),
        "starting point of x holds an array of type int64; .*write 0.0 for 0",
    ),
    "NaN start": (
        lambda: create(params=np.nan),
        "starting point of x holds a NaN or infinite value; give finite numbers",
    ),
    "infinite lower start": (
        lambda: people(Tuning(), (TUNING_START[0], {**LINE, "bias": np.inf})),
        "starting point of y holds a NaN or infinite value",
    ),
    "empty start": (lambda: create(params={}), "starting point of x is empty; give an array or a tree"),
    "one start for two variables": (
        lambda: people(Tuning(), LINE),
        "Tuning has the variables x, y: params must be a tuple of 2 starting points, in this order; a dict was given",
    ),
    "three starts for two variables": (lambda: people(Game(), (LINE,) * 3), r"x, alpha: .*tuple of 2 starting .*\b3\b"),
    "parameters that cannot be split": (
        lambda: people(NoPair(), PROBLEMS["personalised"][1]),
        r"NoPair.split must return \(extractor, head\) of the parameters: 'tail'",
    ),
    # functions
    "vector loss": (
        lambda: create(Vector(), batch_size=2),
        r"Vector.loss must return one number \(the mean over the batch\).*; it returned shape \(2,\)",
    ),
    "no loss": (lambda: create(SingleLevel()), r"SingleLevel is single level: it must define loss\(x, batch, key\)"),
    "loss and more": (lambda: create(WithAux()), "WithAux.loss must return one number"),
    "integer loss": (lambda: create(Count()), "Count.loss must return"),
    "scalar constraints": (
        lambda: people(ScalarConstraint(), LINE),
        r"constraints must return a vector.*; .*shape \(\)",
    ),
    "parameters that do not fit the columns": (
        lambda: people(Fit(), {**LINE, "weight": np.ones(3)}),
        r"Fit.loss failed on a batch of shapes \(\(1, 2\), \(1,\)\) and parameters of shapes \[\(\(\), \(3,\)\)\]: "
        "AssertionError",
    ),
    "columns that do not fit the problem": (
        lambda: create(Fit(), params=LINE),
        r"Fit.loss failed on a batch of shapes \(1,\)",
    ),
    "no rows to draw outer samples from": (
        lambda: Task.create(Noisy(), Rows.from_clients(constants=np.ones(2)), LINE),
        "Noisy: drawing a batch failed: this client has constants and no rows",
    ),
    "lower variable of another shape than the inner value": (
        lambda: create(CompositionAsBilevel(problem=Pair()), params=(0.0, 0.0)),
        r"\(2,\)",
    ),
    "a problem without @struct": (lambda: create(Unregistered()), "Unregistered.*struct"),
    "a class in place of a problem": (
        lambda: create(Fit),
        r"the class Fit was given as the problem; .*such as Fit\(\)",
    ),
    "something else in place of a problem": (lambda: create("fit"), "a str was given as the problem; give an object"),
    "a loss with other arguments": (
        lambda: create(TwoArguments()),
        r"is called as loss\(x, batch, key\): .*positional",
    ),
    "a loss that branches": (lambda: create(Branching()), r"Branching.loss decides by a Python `if` .*jnp.where"),
    "a loss in NumPy": (lambda: create(InNumpy()), r"InNumpy.loss makes a plain number .*use jax.numpy"),
    "a switch that is not static": (lambda: create(Fields(value=True)), r"value=True holds True.*nestfed.static"),
    "a text that is not static": (lambda: create(Fields(value="sum")), r"value='sum' holds 'sum', which is no number"),
    "a function that is not static": (lambda: create(Fields(value=np.sin)), r"Fields: the field value=.*is no number"),
    "a size that is not static": (
        lambda: create(Sized(count=3)),
        r"count=3 is a whole number .*static\(default=3\).*3.0",
    ),
    # settings
    "unknown scope": (lambda: people(Blend(scope="both"), LINE), "scope='both' .*must be one of 'global', 'local'"),
    "unknown scope behind an adapter": (
        lambda: people(NaiveComposition(problem=Blend(scope="both")), LINE),
        "Blend: scope='both' was given",
    ),
    "local lower problem of a minimax view": (
        lambda: people(MinimaxAsBilevel(problem=Game(), scope="local"), GAME_START),
        "scope='local' .*must be one of 'global'",
    ),
    "no inner samples": (lambda: people(Noisy(inner_samples=0), LINE), "inner_samples=0 .*must be at least 1"),
    "unknown weights": (
        lambda: create(weights="rows"),
        "weights='rows' was given; use 'uniform', 'samples' or one number",
    ),
    "too many weights": (lambda: create(weights=[1, 1, 1]), r"weights of shape \(3,\) were given for 2 clients"),
    "negative weights": (lambda: create(weights=[2, -1]), r"weights=\[2.0, -1.0\] must be finite, not negative"),
    "NaN weights": (lambda: create(weights=[1, np.nan]), r"weights=\[1.0, nan\] must be finite"),
    "zero weights": (lambda: create(weights=[0, 0]), "not all zero"),
    "empty batches": (lambda: create(batch_size=0), "batch_size=0 was given; it must be a whole number, 1 or more"),
    "fractional batches": (lambda: create(batch_size=2.0), "batch_size=2.0 was given; it must be a whole number"),
    "too few local steps": (
        lambda: create(local_steps=[1, 0]),
        r"local_steps=\[1, 0\] must be one whole number, 1 or more",
    ),
    "local steps of other clients": (lambda: create(local_steps=[1]), "for each of 2 clients"),
    "one number of local steps": (lambda: create(local_steps=3), "local_steps=3 must be one whole number"),
    "fractional local steps": (lambda: create(local_steps=[1.5, 2]), "must be one whole number"),
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: make("fedavg", lr="0.1"), r"lr='0.1' was given, but lr .* must be a number or a schedule, not text"),
        (lambda: make("fedbio", lr=0.1, lower_lr=0.1, hypergradient="dense"),
         r"hypergradient='dense' was given, .*must be a Hypergradient: Dense\(...\) or ConjugateGradient"),
        (lambda: simulate("fedavg", create(), rounds=1), r"'fedavg' was given as the algorithm; .*nestfed.make"),
        (lambda: simulate(FedAvg, create(), rounds=1), "the class FedAvg was given as the algorithm"),
    ],
    ids=["text for a number", "text for an estimator", "a name for an algorithm", "a class for an algorithm"],
)  # fmt: skip
def test_a_wrong_setting_is_refused_before_anything_is_compiled(given, message):
    with pytest.raises(UserError, match=message) as caught:
        given()
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_welcome_where_a_number_is_meant():
    one, other = (simulate(make("fedavg", lr=lr), create(), rounds=2, progress=False) for lr in (1, 1.0))
    assert np.array_equal(one.server.x, other.server.x)


def test_precision_that_is_lost_is_told():
    """Seconds since 1970 in single precision are seconds no more."""
    code = """
import warnings
import numpy as np
from nestfed import Rows
from nestfed import UserError
def said(*columns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Rows.from_clients([columns])
    return [str(w.message) for w in caught if "nestfed" in str(w.filename) or "precision" in str(w.message)]
assert said(np.random.default_rng(0).normal(size=100)) == []
assert said(np.random.default_rng(0).normal(size=100).astype("float32")) == []
(told,) = said(1.6e9 + np.arange(100.0))
assert "column [0] of the data" in told and "rounds them" in told and "Subtract a common value" in told, told
try:
    Rows.from_clients([np.array([1, 2**40])])
except UserError as error:
    assert "no number of 32 bits" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mistake", ERRORS)
def test_a_mistake_is_refused_with_what_was_given_and_what_to_do(mistake):
    call, message = ERRORS[mistake]
    with pytest.raises(UserError, match=message):
        call()
