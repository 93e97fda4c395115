"""Average precision and AUROC as problems (T11, T14), and the methods for them: CODA+, CODASCA, SOAP."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TASKS

from nestfed import Rows, Task, UserError, make, simulate, struct
from nestfed.core.algorithm import Fed, Sample
from nestfed.problems.ranking import AreaUnderRoc, AveragePrecision, RankingBatch

KEY = jax.random.key(0)


def own_scores(x, rows, key):
    """The parameters are the scores of the rows, which are known by their number."""
    return x[rows]


def linear(x, rows, key):
    return rows["inputs"] @ x


def positives_last(counts):
    """Numbered rows of clients with so many (negatives, positives)."""
    sizes = [n + p for n, p in counts]
    ends = np.cumsum(sizes)
    clients = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return Rows.from_clients(clients, constants={"positives": np.array([p for _, p in counts])})


def precision_task(counts, start, **options):
    problem = AveragePrecision(scores=own_scores, **options)
    return Task.create(problem, positives_last(counts), jnp.asarray(start), batch_size=problem.inner_samples)


def t11():
    """(task, parameters whose sigmoids are the scores of T11, the batch of all three rows)."""
    h = jnp.array([0.9, 0.2, 0.5])
    x = jnp.log(h / (1 - h))
    task = precision_task([(1, 2)], x, positives=2, inner_samples=3, margin=0.5)
    batch = RankingBatch(rows=jnp.arange(3), positive=jnp.array([True, True, False]), places=jnp.arange(2), largest=3)
    return task.problem, x, h, batch


# ------------------------------------------------------------------------------------------------- average precision


def test_t11_values_and_gradient():
    problem, x, h, batch = t11()
    y = problem.inner_values(x, Sample(batch, KEY))
    np.testing.assert_allclose(3 * y, [[0.25, 0.26], [1.69, 2.33]], rtol=1e-12)
    np.testing.assert_allclose(-problem.outer(y), [0.9615385, 0.7253219], atol=1e-7)
    assert problem.value(x, Sample(batch, KEY)) == pytest.approx(-0.8434302, abs=1e-7)
    gradient = problem.gradient(x, Sample(batch, KEY)) / (h * (1 - h))
    np.testing.assert_allclose(gradient, [-0.51128761, -0.10757244, 0.61886004], atol=1e-8)


def test_gradient_is_the_frozen_weights_times_the_gradients_of_the_pairs():
    problem, x, h, batch = t11()
    y = problem.inner_values(x, Sample(batch, KEY))
    weights = (y[:, :1] - y[:, 1:] * batch.positive[None, :]) / y[:, 1:] ** 2
    weighted = jax.grad(lambda h: jnp.mean(weights * problem.pair_losses(h[:2], h)))(h)
    np.testing.assert_allclose(problem.gradient(x, Sample(batch, KEY)), weighted * h * (1 - h), rtol=1e-12)
    value, pull = problem.inner_vjp(x, Sample(batch, KEY))
    composed = problem.composed_gradient(x, pull, value, Sample(batch, KEY))
    np.testing.assert_allclose(composed, problem.gradient(x, Sample(batch, KEY)), rtol=1e-12)


def test_batch_is_stratified_and_knows_its_positives():
    task = precision_task([(5, 3), (2, 6)], np.zeros(16), positives=4, inner_samples=7)
    batches = jax.vmap(lambda key: task.sample(task.data.client(1), key))(jax.random.split(KEY, 200))
    first, others = np.asarray(batches.rows[:, :4]), np.asarray(batches.rows[:, 4:])
    assert set(first.ravel()) == set(range(10, 16)) and set(others.ravel()) == {8, 9}
    np.testing.assert_array_equal(batches.places, first - 10)
    np.testing.assert_array_equal(batches.positive, np.broadcast_to([True] * 4 + [False] * 3, (200, 7)))
    assert batches.largest == 8


@pytest.mark.parametrize(("counts", "value"), [((4, 0), 0.0), ((0, 4), -1.0)], ids=["no positives", "no negatives"])
def test_client_with_one_kind_of_rows_has_a_constant_objective(counts, value):
    x = jnp.asarray(np.random.default_rng(0).normal(size=8))
    task = precision_task([(1, 1), counts, (1, 1)], x, positives=2, inner_samples=5)
    data = task.data.client(1)
    draw = jax.jit(lambda key: task.sample(data, key))
    for key in jax.random.split(KEY, 3):
        sample = Sample(draw(key), KEY)
        assert set(np.asarray(sample.batch.rows)) <= {2, 3, 4, 5}  # its own, not a neighbour's
        assert task.problem.value(x, sample) == value
        y, pull = task.problem.inner_vjp(x, sample)
        assert np.isfinite(y).all() and (y[:, 1] >= 0.1**2 / 5).all()
        np.testing.assert_array_equal(task.problem.gradient(x, sample), np.zeros(8))
        np.testing.assert_array_equal(task.problem.composed_gradient(x, pull, 0.5 * y, sample), np.zeros(8))
    assert task.problem.objective(x, data, KEY) == pytest.approx(value, abs=1e-15)


def test_objective_has_the_mean_inner_values_of_batches():
    """By brute force, and against draws: batches so large that the mean of their values is the value of the mean."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=11))
    brute = {}
    for m, b in [(5, 3), (500, 300)]:
        task = precision_task([(6, 3), (1, 1)], x, positives=b, inner_samples=m, margin=0.3, weight_decay=0.1)
        h = 1 / (1 + np.exp(-np.asarray(x)))
        ratios = []
        for i in (6, 7, 8):
            losses = np.maximum(0.3 - h[i] + h, 0) ** 2
            first, others = (0.09 + (b - 1) * losses[6:9].mean()) / m, (m - b) / m * losses[:6].mean()
            ratios.append(first / (first + others))
        brute[m] = float(-np.mean(ratios) + 0.05 * np.sum(x**2))
        assert task.problem.objective(x, task.data.client(0), KEY) == pytest.approx(brute[m], rel=1e-12)
    draw = lambda key: task.problem.value(x, Sample(task.sample(task.data.client(0), key), KEY))
    assert jnp.mean(jax.vmap(draw)(jax.random.split(KEY, 100))) == pytest.approx(brute[500], abs=2e-3)


@pytest.mark.parametrize(
    ("options", "constants", "words"),
    [
        ({"positives": 3, "inner_samples": 3}, {"positives": np.array([1])}, "needs a negative too"),
        ({"inner_samples": 4}, {"positives": np.array([1])}, "batch_size=3 .* inner_samples=4"),
        ({"inner_samples": 3}, None, "negatives first"),
        ({"inner_samples": 3}, {"positives": np.array([5])}, r"\[5\] was given .* \[4\] rows"),
    ],
)
def test_wrong_batches_and_counts_are_refused(options, constants, words):
    data = Rows.from_clients([np.arange(4)], constants=constants)
    with pytest.raises(UserError, match=words):
        Task.create(AveragePrecision(scores=own_scores, **options), data, jnp.zeros(4), batch_size=3)


# ------------------------------------------------------------------------------------------------- area under ROC


def saddle(problem, batches):
    """(x, alpha) where the mean gradient over these batches is zero: it is affine here, so by one linear system."""
    sizes = [layout.size for layout in problem.layouts]
    split = lambda z: (z[: sizes[0]], z[sizes[0] :])
    gradient = lambda z: sum(jnp.concatenate(problem.gradients(*split(z), Sample(b, KEY))) for b in batches)
    zero = jnp.zeros(sum(sizes))
    return split(np.linalg.solve(jax.jacobian(gradient)(zero), -gradient(zero)))


def test_t14_saddle():
    rows = {"h": np.array([0.9, 0.7, 0.4, 0.1, 0.3]), "label": np.array([1, 1, 0, 0, 0])}
    # The model shifts all scores, which no pair notices; the decay keeps it at zero.
    shifted = lambda x, rows, key: rows["h"] + x
    problem = AreaUnderRoc(scores=shifted, positive_share=0.4, link="identity", weight_decay=1.0)
    task = Task.create(problem, Rows.from_clients([rows]), problem.start(jnp.zeros(())), batch_size=5)
    x, alpha = saddle(task.problem, [rows])
    found = task.problem.tree(0, x)
    assert (found["a"], found["b"], found["model"]) == pytest.approx((0.8, 0.8 / 3, 0), abs=1e-12)
    assert alpha == pytest.approx([-0.8 + 0.8 / 3], abs=1e-12)
    value = float(task.problem.value_flat(x, alpha, Sample(rows, KEY)))
    pairs = (1 - rows["h"][:2, None] + rows["h"][None, 2:]) ** 2
    assert value == pytest.approx(-0.1816, abs=1e-12) and value == pytest.approx(0.24 * (pairs.mean() - 1), abs=1e-12)


def test_sigmoid_link_squashes_scores():
    rows = {"inputs": np.array([[0.3], [-1.2]]), "label": np.array([1, 0])}
    squash = lambda score: 1 / (1 + np.exp(-score))
    plain = AreaUnderRoc(scores=lambda x, rows, key: squash(linear(x, rows, key)), positive_share=0.5, link="identity")
    squashed = AreaUnderRoc(scores=linear, positive_share=0.5)
    x, alpha = squashed.start(jnp.array([2.0]))
    assert float(squashed.value(x, alpha, rows, KEY)) == pytest.approx(float(plain.value(x, alpha, rows, KEY)))


# ------------------------------------------------------------------------------------------------- CODA+ and CODASCA


@struct
class AllRows(Task):
    """Every batch is all of a client's rows: no noise."""

    def sample(self, data, key):
        return data.take(jnp.arange(data.largest))


def uneven_clients():
    """Two clients of 6 rows with 1 and 4 positives, around other means."""
    random = np.random.default_rng(0)
    label = lambda positives: (np.arange(6) < positives).astype(int)
    inputs = lambda y, shift: random.normal(size=(6, 2)) + shift + y[:, None] * np.array([0.7, -0.4])
    return [{"inputs": inputs(y, shift), "label": y} for y, shift in ((label(1), 0.8), (label(4), -0.5))]


def linear_roc():
    problem = AreaUnderRoc(scores=linear, positive_share=5 / 12, link="identity", weight_decay=0.2)
    return AllRows.create(problem, Rows.from_clients(uneven_clients()), problem.start(jnp.zeros(2)), batch_size=6)


def run(algorithm, task, rounds):
    return simulate(algorithm, task, rounds=rounds, evaluate_every=None, progress=False)


def test_coda_plus_follows_its_stages():
    """Against the algorithm written out: stages of 3 and 6 steps, rounded up to rounds of 2; averages at their ends."""
    task, problem = linear_roc(), linear_roc().problem
    batches = [{name: jnp.asarray(a) for name, a in client.items()} for client in uneven_clients()]
    gradients = jax.jit(lambda x, alpha, batch: problem.gradients(x, alpha, Sample(batch, KEY)))
    points = [task.params, task.params]
    for steps, factor in ((4, 1), (6, 0.5)):
        reference, visited = points[0][0], []
        for step in range(steps):
            for k, (x, alpha) in enumerate(points):
                by_x, by_alpha = gradients(x, alpha, batches[k])
                x_next = x - 0.1 * factor * (by_x + (x - reference) / 2.0)
                points[k] = (x_next, alpha + 0.3 * factor * by_alpha)
                visited.append(points[k])
            if step % 2 == 1:
                points = [tuple(sum(part) / 2 for part in zip(*points, strict=True))] * 2
        points = [tuple(sum(part) / len(visited) for part in zip(*visited, strict=True))] * 2
    settings = {"lr": 0.1, "dual_lr": 0.3, "gamma": 2.0, "stage_steps": 3, "growth": 2.0, "shrink": 2.0}
    found = run(make("coda-plus", **settings, local_steps=2), task, 5).server
    np.testing.assert_allclose(found.x, points[0][0], rtol=1e-10)
    np.testing.assert_allclose(found.alpha, points[0][1], rtol=1e-10)
    np.testing.assert_allclose(found.reference, found.x, rtol=0)
    assert (int(found.stage), int(found.began)) == (2, 10)


def test_saddle_is_reached_by_stages_or_control_variates_and_missed_by_long_local_work():
    task = linear_roc()
    x, alpha = saddle(task.problem, uneven_clients())
    distance = lambda server: float(np.linalg.norm(server.x - x) + np.linalg.norm(server.alpha - alpha))
    long = {"lr": 0.2, "local_steps": 10, "gamma": float("inf"), "stage_steps": 10**9}
    drifted = distance(run(make("coda-plus", **long), task, 600).server)
    assert drifted > 0.02
    assert distance(run(make("codasca", **long), task, 600).server) < 1e-9
    # Stages with smaller and smaller steps leave less and less of the drift.
    staged = make("coda-plus", lr=0.2, local_steps=10, gamma=50.0, stage_steps=400, growth=2.0, shrink=2.0)
    assert distance(run(staged, task, 40 * 63).server) < drifted / 10
    assert distance(run(make("coda-plus", **long | {"local_steps": 1}), task, 3000).server) < 1e-9


# ------------------------------------------------------------------------------------------------- SOAP


def two_clients():
    random = np.random.default_rng(3)
    client = lambda: np.concatenate([random.normal(size=(6, 2)), random.normal(size=(6, 2)) + np.array([0.8, 0.0])])
    return Rows.from_clients([client(), client()], constants={"positives": np.array([6, 6])})


def test_soap_reaches_the_minimiser_that_small_batches_hide_from_fcsg():
    data = two_clients()
    problem = AveragePrecision(
        scores=lambda x, rows, key: rows @ x, positives=1, inner_samples=2, margin=0.3, weight_decay=0.02
    )
    task = Task.create(problem, data, jnp.zeros(2), batch_size=2)
    exact = lambda x: sum(task.problem.objective(x, data.client(k), KEY) for k in range(2)) / 2
    descend = jax.jit(lambda x: jax.lax.fori_loop(0, 500, lambda _, x: x - jax.grad(exact)(x), x))
    solution = descend(jnp.zeros(2))
    assert np.linalg.norm(jax.grad(exact)(solution)) < 1e-9

    def distance(algorithm):
        near = dataclasses.replace(task, params=(solution,))
        found = simulate(
            algorithm, near, rounds=1000, evaluate_every=5, progress=False,
            metrics=lambda task, server, client, data, fed: {"first": server.x[0], "second": server.x[1]},
        )  # fmt: skip
        late = np.stack([found.history["first"], found.history["second"]], 1)[50:]
        return found, np.linalg.norm(late.mean(0) - solution)

    found, remembered = distance(make("soap", lr=0.05, beta=0.05, local_steps=2))
    _, forgotten = distance(make("fcsg", lr=0.05, local_steps=2))
    assert remembered < 0.1 and forgotten > 0.5
    # The memory: two numbers for every row of the largest client; only those of positives are in use.
    assert found.clients.u.shape == (2, 12, 2)
    used = np.asarray(found.clients.u != 0).all(2)
    np.testing.assert_array_equal(used, np.broadcast_to(np.arange(12) < 6, (2, 12)))


def test_soap_keeps_one_estimate_per_positive():
    """The first value, then the moving average; a positive drawn twice counts once, one not drawn stays."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=5))
    task = precision_task([(2, 3)], x, positives=3, inner_samples=4, margin=0.5)
    algorithm = make("soap", lr=0.1, beta=0.25)
    sample = lambda first: Sample(
        RankingBatch(
            rows=jnp.array([*first, 0]),
            positive=jnp.array([True] * 3 + [False]),
            places=jnp.array(first) - 2,
            largest=5,
        ),
        KEY,
    )
    unused: Any = None
    words = {"mean": unused, "gather": unused, "note": unused}
    fed = Fed(**words, sync=False, t=0, step=0, server=None, key=KEY, shared_key=KEY, share=1.0)
    step = jax.jit(lambda state, sample: algorithm.step(task.problem, state, lambda j: sample, fed))
    once = step(algorithm.init(task.problem, (x,), lambda j: sample([2, 2, 3]), fed), sample([2, 2, 3]))
    seen = task.problem.inner_values(x, sample([2, 2, 3]))
    np.testing.assert_allclose(once.u, jnp.stack([seen[0], seen[2], *jnp.zeros((3, 2))]), rtol=1e-12)
    np.testing.assert_allclose(once.x, x - 0.1 * task.problem.gradient(x, sample([2, 2, 3])), rtol=1e-12)
    twice = step(once, sample([2, 4, 4]))
    new = task.problem.inner_values(once.x, sample([2, 4, 4]))
    expected = jnp.stack([0.75 * seen[0] + 0.25 * new[0], seen[2], new[1], *jnp.zeros((2, 2))])
    np.testing.assert_allclose(twice.u, expected, rtol=1e-12)


def test_soap_needs_numbered_outer_samples():
    with pytest.raises(UserError, match="SOAP remembers .* Blurred does not say"):
        run(make("soap", lr=0.1), TASKS["conditional"](), 1)
