"""Personalised methods against closed forms, clients' own models, and clients that come after training."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CASES, PlainSorting, RandomSorting, regression, sorted_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from nestfed import Rows, Sample, Task, UserError, advance, make, simulate, start, struct
from nestfed.algorithms.clipping import clip_together
from nestfed.algorithms.fedcr import compare_class_to_encoder, compare_encoder_to_class, compute_divergence
from nestfed.problems import GaussianEncoder, Personalised
from nestfed.verbs.personalise import PersonalTask, adapt, find_model, fine_tune, measure_spread, predict

KEY = jax.random.key(0)
PRESENT = lambda number: st.lists(st.booleans(), min_size=number, max_size=number).filter(any)


@struct
class Scalar(Personalised):
    """Representation u o, output v u o, half the squared error."""

    def split(self, params):
        return params

    def features(self, u, inputs, key):
        return u * inputs[:, None]

    def head(self, v, z):
        return v * z[:, 0]

    def loss(self, outputs, labels):
        return 0.5 * jnp.mean((outputs - labels) ** 2)


@struct
class Headless(Scalar):
    """The output is the representation."""

    def head(self, v, z):
        return z[:, 0] + 0 * v


def scalar_task(moments=(1.0, 3.0), targets=(1.0, 3.0), *, kind=Scalar, first=(0.0, 1.0), repeat=1, **options):
    """Clients with mean o^2 = moment and labels target o: the loss is moment (u v - target)^2 / 2."""
    inputs = [np.full(repeat, np.sqrt(m)) for m in moments]
    clients = [(o, t * o) for o, t in zip(inputs, targets, strict=True)]
    return Task.create(kind(), Rows.from_clients(clients), tuple(map(jnp.asarray, first)), **options)


def own_numbers(task, server, client, data, fed):
    """What every client keeps, and what is common, as curves."""
    parts = {name: fed.gather(getattr(client, name))[:, 0] for name in "uv" if getattr(client, name) is not None}
    common = {name: value[0] for name in ("u", "u0") if (value := getattr(server, name, None)) is not None}
    return parts | {f"common {name}": value for name, value in common.items()}


# ------------------------------------------------------------------------------------------------- FedReCo

RECO = {"lr": 0.05, "coupling": 1.0, "server_lr": 0.1, "head_steps": 0, "local_steps": 2}


@pytest.mark.parametrize("name, more", [("fedreco", {}), ("fedreco", {"server_grad": "full"}), ("fedreco-pvr", {})])
def test_fedreco_has_the_known_trace_and_limit(name, more):
    """With full batches all variants are one. (Two equal rows per client: their mean is not their sum.)"""
    curve = simulate(make(name, **RECO, **more), scalar_task(repeat=2), rounds=400, metrics=own_numbers).history
    u = [(0.095, 0.765), (0.194655, 1.200795), (0.30236543, 1.48678107)]
    assert_allclose(curve["u"][1:4], u, atol=5e-9)
    assert_allclose(curve["common u0"][1:4], (0.239, 0.523104, 0.79013326), atol=5e-9)
    assert_allclose(curve["u"][-1], (1.75, 2.75), atol=1e-6)
    assert_allclose(curve["common u0"][-1], 2.5, atol=1e-6)


def test_the_scale_of_the_server_step_and_its_optimiser_are_choices():
    def first(**more):
        algorithm, task = make("fedreco", **RECO | more), scalar_task()
        run, _ = advance(algorithm, task, 0, start(algorithm, task, evaluate_every=None), rounds=1, evaluate_every=None)
        return float(run.server.u0[0])

    assert first(server_scale_lambda=True) == pytest.approx(0.239 / 2)
    assert first(optimizer=optax.sgd(0.3)) == pytest.approx(3 * 0.239)


def test_the_sum_over_rows_is_so_many_means_on_batches_and_on_all_rows():
    mean, total = (
        Task.create(PlainSorting(reduction=r), data, start) for r in ("mean", "sum") for data, start in [ragged_start()]
    )
    u, center = jnp.asarray(mean.params[0]), jnp.asarray(mean.params[0]) * 0.5
    rows = mean.data.client(1)
    sample = Sample(rows.draw(KEY, 3), KEY)
    assert_allclose(total.problem.distance(u, center, sample), 3 * mean.problem.distance(u, center, sample))
    gradient = lambda task: rows.pass_over(
        lambda batch, weights: task.problem.grad_center(u, center, Sample(batch, KEY), weights), rows_at_once=2
    )
    assert_allclose(gradient(total), 5 * gradient(mean))
    exact = rows.average(lambda batch: mean.problem.grad_center(u, center, Sample(batch, KEY)))
    assert_allclose(gradient(mean), exact, rtol=1e-12)


def ragged_start():
    task = sorted_rows(PlainSorting(), (4, 5, 7))
    body, head = (layout.unflatten(p) for layout, p in zip(task.problem.layouts, task.params, strict=True))
    return task.data, {"body": body, "head": head}


def test_pvr_remembers_exact_gradients_whoever_was_absent_and_the_center_moves_by_the_clip():
    """g_k is the gradient of H over all rows at the pair that the client remembers, so corrections have mean zero. And
    u_0 moves: in the released code collected gradients were zero."""
    rounds, clip, server_lr = 4, 0.01, 0.1
    settings = {"lr": 2.0, "clip": clip, "server_lr": server_lr}
    algorithm = make("fedreco-pvr", **CASES["fedreco-pvr"].settings | settings)
    task = sorted_rows(PlainSorting(), (4, 5, 7))
    first = start(algorithm, task, evaluate_every=None, cohort=2)
    run, noted = advance(algorithm, task, 0, first, rounds=1, evaluate_every=None, cohort=2)
    assert noted["noted/clipped_share"].shape == (1, 2) and noted["noted/clipped_share"][0, 1] == 2 * 4
    present = (np.asarray(run.clients.u) != np.asarray(first.clients.u)).any(1)
    assert present.sum() == 2
    for before, after in zip(jax.tree.leaves(first.clients), jax.tree.leaves(run.clients), strict=True):
        assert_array_equal(np.asarray(before)[~present], np.asarray(after)[~present])  # who was absent kept all
    assert_allclose(np.linalg.norm(run.server.u0 - first.server.u0), clip * server_lr)

    run, noted = advance(algorithm, task, 0, run, rounds=rounds - 1, evaluate_every=None, cohort=2)
    assert_array_equal(noted["noted/clipped_share"][:, 1], [2 * 4] * (rounds - 1))
    assert_array_equal(noted["noted/server_clipped_share"], [(2, 2)] * (rounds - 1))  # every mean, as both clients say
    for k in range(3):
        u, before, g = (np.asarray(value[k]) for value in (run.clients.u, run.clients.u0_prev, run.clients.g))
        exact = task.data.client(k).average(
            lambda batch, u=u, before=before: task.problem.grad_distance(
                jnp.asarray(u), jnp.asarray(before), Sample(batch, KEY)
            )
        )
        assert_allclose(g, exact, rtol=1e-10, atol=1e-14)


def test_gradients_are_shortened_together_and_nought_stays_nought():
    (a, b), over = clip_together((jnp.array([3.0]), jnp.array([0.0, 4.0])), 2.5)
    assert_allclose((a[0], b[1], over), (1.5, 2.0, 1.0))
    for limit in (5.0, np.inf):
        (a, b), over = clip_together((jnp.array([3.0]), jnp.array([0.0, 4.0])), limit)
        assert_array_equal((a[0], b[1], over), (3.0, 4.0, 0.0))
    (zero,), over = clip_together((jnp.zeros(2),), 1.0)
    assert_array_equal((*zero, over), (0.0, 0.0, 0.0))


# ------------------------------------------------------------------------------------------------- the other methods


def test_ditto_finds_the_point_between_the_client_and_the_common_model():
    task = scalar_task((1.0, 4.0), (0.0, 1.0), kind=Headless)
    algorithm = make("ditto", lr=0.1, coupling=0.5, local_steps=5)
    curve = simulate(algorithm, task, rounds=100, metrics=own_numbers).history
    assert_allclose(curve["u"][-1], (0.2308341, 0.9658336), atol=5e-8)


def test_fedrep_fits_every_client_with_one_extractor():
    curve = simulate(
        make("fedrep", lr=0.05, head_steps=5), scalar_task(first=(1.0, 1.0)), rounds=300, metrics=own_numbers
    ).history
    assert_allclose(curve["common u"][-1] * curve["v"][-1], (1.0, 3.0), atol=1e-9)
    assert_allclose(curve["common u"][-1], 1.1772748, atol=5e-8)


def test_fedbabu_averages_extractors_under_the_head_of_the_start():
    run = simulate(make("fedbabu", lr=0.05, local_steps=5), scalar_task(), rounds=100, evaluate_every=None)
    assert_allclose(run.server.u, 2.4218145, atol=5e-8)
    assert_array_equal(run.server.v, run.task.params[1])


def test_whole_models_are_averaged_or_stay_alone():
    common = simulate(make("fedavg-whole", lr=0.05, local_steps=5), scalar_task(kind=Headless), rounds=100)
    assert_allclose(common.server.u, 2.4218145, atol=5e-8)
    alone = simulate(make("local-only", lr=0.05, local_steps=5), scalar_task(kind=Headless), rounds=100)
    assert_allclose(alone.clients.u[:, 0], (1.0, 3.0), atol=1e-9)
    assert alone.server.u is None


def test_fedpac_weighs_variance_against_difference():
    sums = jnp.array([[[0.0, 0.0]], [[1.0, 1.0]], [[9.0, 9.0]]])  # the third is not there
    weights = lambda variances, **more: make("fedpac", lr=0.1, **more).find_head_weights(
        jnp.asarray(variances), sums, jnp.array([True, True, False]), 0
    )
    assert_allclose(weights([1.0, 1.0, 0.0]), (0.75, 0.25, 0.0), atol=1e-9)
    assert_allclose(weights([1.0, 1.0, 0.0], smallest_weight=0.3), (1.0, 0.0, 0.0), atol=1e-9)
    # Below the smallest eigenvalue the own statistics cost nothing, so that only the other's count.
    assert_allclose(weights([0.009, 1.0, 0.0])[0], 1.0, atol=1e-5)
    assert_allclose(weights([np.nan, 1.0, 0.0]), (1.0, 0.0, 0.0))  # no answer: the own head


def test_fedpac_counts_the_rows_that_are_constants():
    """A client's variance is divided by the number of its rows, wherever they lie."""
    rows = sorted_rows(PlainSorting(), (5, 5, 5))
    inputs, labels = (np.asarray(column).reshape(3, 5, *column.shape[1:]) for column in rows.data.columns)
    body, head = (rows.problem.tree(i, part) for i, part in enumerate(rows.params))
    constants = Task.create(PlainSorting(), Rows.from_clients(constants=(inputs, labels)), {"body": body, "head": head})
    algorithm = make("fedpac", lr=0.1)
    found = []
    for task in (rows, constants):
        run = start(algorithm, task)
        state = algorithm.begin(run.server, jax.tree.map(lambda a: a[0], run.clients))
        found.append(algorithm.statistics(task.problem, state, SimpleNamespace(rows=task.data.client(0), key=KEY)))
    assert found[0].rows == found[1].rows == 5
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-12), *found)


def test_fedpac_has_the_prototypes_of_all_rows_and_pulls_towards_them():
    task = sorted_rows(PlainSorting(), (4, 5, 7), weights="samples")
    algorithm = make("fedpac", lr=1e-12, coupling=3.0)
    run, _ = advance(algorithm, task, 0, start(algorithm, task), rounds=1, evaluate_every=None)
    inputs, labels = task.data.columns
    u, v = task.params
    z = np.asarray(task.problem.features(task.problem.tree(0, u), inputs, KEY))
    assert_allclose(run.server.prototypes, [z[labels == y].mean(0) for y in range(3)], atol=1e-9)
    assert_array_equal(run.server.known, np.ones(3))

    # The direction of a step is the gradient of the loss plus the mean squared gap to these.
    state = algorithm.begin(run.server, jax.tree.map(lambda a: a[0], run.clients))
    sample = Sample(jax.tree.map(lambda a: a[:6], (inputs, labels)), KEY)
    objective = lambda u: (
        task.problem.local_loss(u, v, sample)
        + 3.0 * jnp.mean((task.problem.representations(u, sample) - run.server.prototypes[labels[:6]]) ** 2)
    )
    state = state._replace(v=v, own=FewStatistics)
    assert_allclose(algorithm.direction(task.problem, state, lambda j: sample, None), jax.grad(objective)(u), rtol=1e-7)


class FewStatistics:
    sums, shares = jnp.ones((3, 2)), jnp.ones(3)


@struct
class Experts(GaussianEncoder):
    """N(u o, 1), whatever the class."""

    def split(self, params):
        return params

    def features(self, u, inputs, key):
        return jnp.concatenate([u * inputs, jnp.full_like(inputs, np.log(np.e - 1))], axis=1)  # softplus: 1

    def head(self, v, z):
        return z * v[None]

    def loss(self, outputs, labels):
        return jnp.mean(outputs**2)


def test_fedcr_multiplies_experts_with_a_standard_normal():
    clients = [(np.array([[0.0]]), np.array([1], np.int32)), (np.array([[2.0]]), np.array([1], np.int32))]
    task = Task.create(Experts(draws=2), Rows.from_clients(clients), (jnp.asarray(1.0), jnp.ones(2)))
    run = simulate(make("fedcr", lr=1e-12, memory=1.0), task, rounds=1, evaluate_every=None)
    assert_allclose(run.server.mean[:, 0], (0.0, 2 / 3), atol=1e-9)
    assert_allclose(run.server.deviation[:, 0], (1.0, 0.5773503), atol=5e-8)
    half = simulate(make("fedcr", lr=1e-12, memory=0.5), task, rounds=1, evaluate_every=None)
    assert_allclose(half.server.mean[:, 0], (0.0, 1 / 3), atol=1e-9)


def test_divergence_of_gaussians_and_its_two_directions():
    one, other = (jnp.zeros((1, 1)), jnp.ones((1, 1))), (jnp.ones((1, 1)), jnp.full((1, 1), 2.0))
    forward, backward = np.log(2) + 2 / 8 - 0.5, -np.log(2) + 5 / 2 - 0.5
    assert_allclose(compute_divergence(*one, *other), [forward])
    features = jnp.array([[0.0, np.log(np.e - 1)]])
    labels = jnp.array([0])
    assert_allclose(compare_encoder_to_class(*other, 0.1, features, labels), 0.1 * forward)
    assert_allclose(compare_class_to_encoder(*other, 0.1, features, labels), 0.1 * backward)


def test_a_class_of_many_experts_is_near_in_one_direction_only():
    """Why the released code's direction is the default: n equal experts make a class sqrt(n) times as narrow."""
    n, features, labels = 5000, jnp.array([[0.0, np.log(np.e - 1)]]), jnp.array([0])
    common = jnp.zeros((1, 1)), jnp.full((1, 1), n**-0.5)
    assert_allclose(compare_class_to_encoder(*common, 1.0, features, labels), (1 / n - 1 + np.log(n)) / 2, rtol=1e-6)
    assert_allclose(compare_encoder_to_class(*common, 1.0, features, labels), (n - 1 - np.log(n)) / 2, rtol=1e-6)
    assert make("fedcr", lr=0.1).divergence == "code"


def test_a_representation_without_deviation_is_its_mean():
    problem, head, label = RandomSorting(draws=4), jnp.arange(6.0).reshape(2, 3), jnp.array([1])

    @jax.jit
    def outcome(z, key):
        return problem.answers(head, z, key), problem.fit(head, z, label, key)

    z = jnp.array([[0.3, -0.7, -800.0, -800.0]])
    answers, loss = outcome(z, KEY)
    assert_allclose(answers, z[:, :2] @ head)
    assert_allclose(loss, PlainSorting().fit(head, z[:, :2], label, KEY))
    drawn = [outcome(jnp.zeros((1, 4)), key)[0] for key in (KEY, jax.random.key(1))]
    assert np.abs(drawn[0] - drawn[1]).min() > 0


# ------------------------------------------------------------------------------------------------- clients' own models


def test_every_clients_model_is_judged_on_its_own_rows():
    (data, params), other = ragged_start(), sorted_rows(PlainSorting(), (6, 6, 3))
    weights = [1.0, 0.0, 2.0]  # the second takes no part and is not counted
    task = PersonalTask.create(
        PlainSorting(), data, params, test=other.data, weights=weights, batch_size=4, fine_tune_steps=3, rows_at_once=4
    )
    result = simulate(make("fedreco", **CASES["fedreco"].settings), task, rounds=2, evaluate_every=None)
    last = {name: values[-1] for name, values in result.history.items()}
    for part, rows in {"train": data, "test": other.data}.items():
        accuracies, losses = [], []
        for k in (0, 2):
            inputs, labels = jax.tree.map(
                lambda a, k=k, rows=rows: a[rows.offsets[k] : rows.offsets[k] + rows.sizes[k]], rows.columns
            )
            outputs = predict(result, k, inputs)
            accuracies.append(np.mean(np.argmax(outputs, 1) == labels))
            losses.append(task.problem.loss(outputs, labels))
        assert_allclose(last[f"{part}_accuracy"], np.average(accuracies, weights=[1, 2]), err_msg=part)
        assert_allclose(last[f"{part}_loss"], np.average(losses, weights=[1, 2]), err_msg=part)
        assert_allclose(last[f"{part}_accuracy_worst_decile"], np.quantile(accuracies, 0.1), err_msg=part)
        assert_allclose(last[f"{part}_accuracy_deviation"], np.std(accuracies), atol=1e-9, err_msg=part)
    gaps = np.linalg.norm(np.asarray(result.clients.u) - np.asarray(result.server.u0), axis=1)
    assert_allclose(last["center_distance"], np.average(gaps, weights=weights))
    clipped, gradients = result.noted["clipped_share"].sum(0)
    assert_allclose(last["clipped_share"], clipped / gradients)
    assert 0 < last["clipped_share"] < 1 and last["server_clipped_share"] in (0, 0.5, 1)
    assert last["representation_distance"] > 0 and last["representation_norm"] > 0
    assert last["tuned_train_loss"] < last["train_loss"]


@given(st.lists(st.integers(-3, 3), min_size=4, max_size=4), PRESENT(4))
@settings(max_examples=30, deadline=None)
def test_spread_is_that_of_the_values_that_count(values, present):
    values, present = np.array(values, float), np.array(present)
    found = SPREAD(values, present)
    kept = values[present]
    expected = {"deviation": kept.std(), "lowest": kept.min(), "worst_decile": np.quantile(kept, 0.1)}
    for name, value in (expected | {"median": np.median(kept)}).items():
        assert_allclose(found[name], value, atol=1e-12, err_msg=name)


SPREAD = jax.jit(measure_spread)


def test_fine_tuning_takes_the_steps_it_was_given():
    task = scalar_task(first=(2.0, 0.0), repeat=2)
    (u, v), rows = task.params, task.data.client(1)
    tune = lambda **more: fine_tune(task.problem, u, v, rows, KEY, lr=0.05, batch_size=2, clip=100.0, **more)
    _, head = tune(steps=3)
    assert_allclose(head, 1.5 * (1 - (1 - 0.05 * 3 * 4) ** 3))  # towards target / u, curvature moment u^2
    body, head = tune(steps=1, what="all")
    assert_allclose((*body, *head), (2.0, 0.05 * 3 * 3 * 2))  # at v = 0 the extractor has no gradient
    with pytest.raises(UserError, match="what='tail' was given; fine-tune the 'head' or 'all'"):
        tune(steps=1, what="tail")


def test_a_new_client_learns_its_part_and_the_server_stays():
    """FedRep: the head descends on moment (u v - target)^2 / 2 at the server's u; FedReCo: to (target + u_0) / 2."""
    algorithm = make("fedrep", lr=0.05, head_steps=2)
    run = simulate(algorithm, scalar_task(first=(1.0, 1.0)), rounds=20, evaluate_every=None)
    newcomer = scalar_task((2.0,), (5.0,), first=(1.0, 1.0))
    own, u = adapt(algorithm, newcomer, run.server, rounds=3), float(run.server.u[0])
    assert_allclose(own.v[0], 5 / u + (1 - 0.05 * 2 * u**2) ** 6 * (1 - 5 / u))
    model = newcomer.problem.model_of(run.server, own)
    assert_array_equal(model[0], run.server.u)

    algorithm = make("fedreco", **RECO)
    run = simulate(algorithm, scalar_task(), rounds=5, evaluate_every=None)
    own = adapt(algorithm, scalar_task((2.0,), (5.0,)), run.server, rounds=100)
    assert_allclose(own.u[0], (5 + run.server.u0[0]) / 2)

    with pytest.raises(UserError, match="task of 2 clients was given; give one with the new client's rows alone"):
        adapt(algorithm, scalar_task(), run.server, rounds=1)
    with pytest.raises(UserError, match="server's state does not fit FedReCo.* of the same algorithm, problem and st"):
        adapt(algorithm, newcomer, run.server._replace(u0=jnp.zeros(2)), rounds=1)


def test_a_chosen_clients_model_in_the_users_own_trees():
    task = sorted_rows(PlainSorting())
    result = simulate(make("fedrep", **CASES["fedrep"].settings), task, rounds=1, evaluate_every=None)
    body, head = find_model(result, 2)
    assert_array_equal(np.concatenate([body["bias"], body["matrix"].ravel()]), result.server.u)
    assert_array_equal(head.ravel(), result.clients.v[2])
    with pytest.raises(UserError, match="client 7 was given; the run has the clients 0, 1, 2. A new one learns"):
        find_model(result, 7)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="FedCR needs a random representation, which PlainSorting does not have; make"):
        start(make("fedcr", lr=0.1), sorted_rows(PlainSorting()))
    with pytest.raises(UserError, match=r"needs classes: Scalar gives outputs of shape \(1,\) for labels of type flo"):
        start(make("fedpac", lr=0.1), scalar_task())
    with pytest.raises(UserError, match="FedRep solves personalised problems; the task's Regression is single level"):
        start(make("fedrep", lr=0.1), regression())
    data, params = ragged_start()
    with pytest.raises(UserError, match=r"test rows are of the clients \[0, 1\].*same clients in the same order"):
        PersonalTask.create(PlainSorting(), data, params, test=sorted_rows(PlainSorting(), (4, 4)).data)
