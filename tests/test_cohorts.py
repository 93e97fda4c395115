"""Who takes part: cohorts drawn with the right chances, of a fixed size or of any, the same in every engine."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, TASKS, regression
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats

from nestfed import make, simulate, sweep
from nestfed.core.settings import UserError
from nestfed.engine.cohorts import choose_cohort, find_chances, find_expected_weight, make_cohort_rule
from nestfed.problems.toys import quadratics
from nestfed.uploads.privacy import CentralDP
from nestfed.verbs.cost import measure
from nestfed.verbs.messages import deploy

weights_and_size = st.lists(st.floats(0.01, 100), min_size=3, max_size=9).flatmap(
    lambda weights: st.tuples(st.just(np.asarray(weights)), st.integers(1, len(weights) - 1))
)


def many_rounds(task, rule, rounds, key=0):
    """The participants of many rounds, side by side."""
    key, chances = jax.random.key(key), find_chances(task.weights, rule)
    return jax.jit(jax.vmap(lambda r: choose_cohort(task, key, r, rule, chances=chances)))(jnp.arange(rounds))


def how_often(participants, clients):
    present = np.asarray(participants.weight) > 0
    return np.bincount(np.asarray(participants.position)[present], minlength=clients) / len(present)


@settings(max_examples=30, deadline=None)
@given(weights_and_size)
def test_chances_are_in_proportion_to_weights_and_at_most_one(drawn):
    weights, size = drawn
    weights = weights / weights.sum()
    rule = make_cohort_rule(size, "weights", weights)
    chances = np.asarray(find_chances(weights, rule)) * (size / len(weights) if rule.sampling == "uniform" else 1)
    assert_allclose(chances.sum(), size, rtol=1e-9)
    assert (chances <= 1 + 1e-12).all()
    below = chances < 1 - 1e-9
    if below.any():
        rate = (chances[below] / weights[below]).max()
        assert_allclose(chances[below] / weights[below], rate, rtol=1e-6)
        assert (rate * weights[~below] >= 1 - 1e-6).all()  # whoever is always asked has a weight that asks for it


@pytest.mark.parametrize("weights", [(0.5, 0.2, 0.15, 0.1, 0.05), (0.3, 0.25, 0.2, 0.15, 0.1), (4, 3, 2, 1, 0)])
@pytest.mark.parametrize(("size", "precision"), [(1, float), (2, float), (2, np.float32), (3, np.float32)])
def test_cohorts_by_weight_have_these_chances_and_weights_in_means_that_add_up_to_one(weights, size, precision):
    task = regression((4,) * 5, weights=weights)
    task = dataclasses.replace(task, weights=np.asarray(task.weights, precision))
    rule = make_cohort_rule(size, "weights", task.weights)
    participants, chances, rounds = many_rounds(task, rule, 4000), np.asarray(find_chances(task.weights, rule)), 4000
    often = how_often(participants, 5)
    error = np.sqrt(chances * (1 - chances) / rounds)
    assert (np.abs(often - chances) <= 4.5 * error + 1e-6).all(), (often, chances)
    assert (np.sort(participants.position, axis=1) == participants.position).all()
    assert all(len(set(row)) == size for row in np.asarray(participants.position).tolist())
    assert_allclose(np.asarray(participants.weight).sum(1), 1, rtol=1e-6)
    assert_allclose(
        participants.weight * participants.chance, np.asarray(task.weights)[participants.position], rtol=1e-6
    )


def test_every_pair_of_clients_meets():
    task = regression((4,) * 6, weights=(0.3, 0.25, 0.2, 0.1, 0.1, 0.05))
    participants = many_rounds(task, make_cohort_rule(2, "weights", task.weights), 4000)
    assert set(map(tuple, participants.position.tolist())) == set(itertools.combinations(range(6), 2))


def test_equal_weights_are_drawn_uniformly_under_either_name():
    task = regression((4,) * 6)
    by_weight, uniform = (make_cohort_rule(2, name, task.weights) for name in ("weights", "uniform"))
    assert by_weight == uniform
    participants = many_rounds(task, uniform, 3000)
    pairs = [tuple(row) for row in participants.position.tolist()]
    counts = [pairs.count(pair) for pair in itertools.combinations(range(6), 2)]
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("weights", ["uniform", (0.5, 0.2, 0.1, 0.1, 0.05, 0.05)])
def test_poisson_cohorts_are_independent_coins(weights):
    task, rounds = regression((4,) * 6, weights=weights), 4000
    rule = make_cohort_rule(2, "poisson", task.weights)
    participants, chances = many_rounds(task, rule, rounds), np.asarray(find_chances(task.weights, rule))
    assert_allclose(chances.sum(), 2)
    present = np.zeros((rounds, 6))
    np.put_along_axis(present, np.asarray(participants.position), np.asarray(participants.weight) > 0, axis=1)
    error = np.sqrt(chances * (1 - chances) / rounds)
    assert (np.abs(present.mean(0) - chances) <= 4.5 * error + 1e-9).all()
    varying = chances < 1
    related = np.corrcoef(present.T[varying]) - np.eye(varying.sum())
    assert np.abs(related).max() < 5 / np.sqrt(rounds)
    assert set(present.sum(1)) >= {1, 2, 3, 4}  # any size ...
    assert (present.sum(1) == 0).any() or not varying.all()  # ... an empty one included


def test_room_for_poisson_cohorts_is_made_for_any_that_can_be_expected():
    room = make_cohort_rule(50, "poisson", np.ones(100_000)).room
    assert 100 < room < 250
    assert stats.binom.sf(room, 100_000, 50 / 100_000) < 1e-19
    assert make_cohort_rule(3, "poisson", np.ones(5)).room == 5
    whole, largest = find_expected_weight(
        np.full(10, 0.1), find_chances(np.full(10, 0.1), make_cohort_rule(2, "poisson", np.ones(10)))
    )
    assert_allclose([whole, largest], [1, 0.5])


@pytest.mark.parametrize(
    ("cohort", "sampling", "words"),
    [
        (2, "guess", "sampling='guess' .*'weights', 'uniform', 'poisson'"),
        (None, "poisson", "expected number"),
        (7, "weights", "the task has 5 clients"),
        (1.5, "weights", "between 0 and 1"),
        (0, "poisson", "at least one"),
        (4, "weights", "only 3 clients have a weight above 0"),
    ],
)
def test_wrong_cohorts_are_refused(cohort, sampling, words):
    task = regression((4,) * 5, weights=(1, 1, 2, 0, 0))
    with pytest.raises(UserError, match=words):
        simulate(make("fedavg", lr=0.1), task, rounds=1, cohort=cohort, sampling=sampling)


# ------------------------------------------------------------------------------------------------- what is solved


def test_the_default_solves_the_stated_problem_and_uniform_cohorts_another_one():
    """Three lines: client k wants c_k = k, with weights (.8, .1, .1), one client a round. The optimum is 0.3."""
    task = quadratics((1.0, 1.0, 1.0), (0.0, 1.0, 2.0), weights=(0.8, 0.1, 0.1))
    mean = {}
    for sampling in ("weights", "uniform", "poisson"):
        options = {"cohort": 1, "sampling": sampling, "output": "average", "evaluate_every": None, "progress": False}
        runs = sweep([make("fedavg", lr=0.02)], task, range(16), rounds=6000, **options)
        mean[sampling] = float(np.mean(runs.runs[0].output.server.x))
    # A Poisson cohort of one on average is often two or three, whose mean is a ratio of sums: by hand, over all.
    alone, pairs, all_three = 0.018 * (1 + 2), 0.072 * (0.5 + 1) + 0.002 * 1.5, 0.008 * 1
    ratio = (alone + pairs + all_three) / (1 - 0.2 * 0.9 * 0.9)
    expected = {"weights": 0.3, "uniform": 1.0, "poisson": ratio}
    assert_allclose([mean[name] for name in expected], list(expected.values()), atol=0.03)


# ------------------------------------------------------------------------------------------------- every engine


POISSON = {"cohort": 1, "sampling": "poisson", "dropout": 0.2}


@pytest.mark.parametrize("weights", ["uniform", (0.7, 0.2, 0.1)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["scaffold", "fedmbo", "fastdro", "fedbioacc"])
def test_cohorts_of_any_size_are_the_same_in_every_engine(name, weights):
    case = CASES[name]
    algorithm, task = case.algorithm(name), TASKS[case.task]((5, 9, 7), weights=weights)
    options = {"rounds": 8, "evaluate_every": None, "progress": False}
    one = simulate(algorithm, task, 2, **options, **POISSON)
    assert 0 in one.participants and max(one.participants) > 1
    same = lambda other: jax.tree.map(
        lambda a, b: assert_allclose(a, b, rtol=1e-9, atol=1e-11), (one.server, one.clients), other
    )
    in_turn = simulate(algorithm, task, 2, **options, **POISSON, client_axis="map")
    same((in_turn.server, in_turn.clients))
    same(deploy(algorithm, task, 2, rounds=8, **POISSON)[:2])
    rows = sweep([algorithm], task, [5, 2], **options, **POISSON)
    same(jax.tree.map(lambda a: a[1], (rows.runs[0].server, rows.runs[0].clients)))


@pytest.mark.parametrize("weights", ["uniform", (0.6, 0.2, 0.2)], ids=["equal", "unequal"])
def test_means_that_hide_who_took_part_are_the_same_in_every_engine(weights):
    """Central privacy with Poisson cohorts: sums divided by what is expected, noise where nobody is."""
    algorithm, task = make("scaffold", lr=0.05, local_steps=2), regression((5, 9, 7), weights=weights)
    central = CentralDP(clip=1.0, noise_multiplier=0.5, delta=1e-5, neighbours="add-or-remove")
    options = {"rounds": 6, "uploads": central, "noise_seed": 4, "cohort": 1, "sampling": "poisson"}
    quiet = {"evaluate_every": 1, "progress": False}
    one = simulate(algorithm, task, 1, **options, **quiet)
    assert 0 in one.participants
    same = lambda other: jax.tree.map(
        lambda a, b: assert_allclose(a, b, rtol=1e-9, atol=1e-11), (one.server, one.clients), other
    )
    in_turn = simulate(algorithm, task, 1, **options, **quiet, client_axis="map")
    same((in_turn.server, in_turn.clients))
    same(deploy(algorithm, task, 1, **options)[:2])
    rows = sweep([algorithm], task, [1], **options, **quiet)
    same(jax.tree.map(lambda a: a[0], (rows.runs[0].server, rows.runs[0].clients)))
    assert_allclose(rows.history["epsilon"][0, 0], one.history["epsilon"])


def test_an_empty_round_is_noise_of_the_promised_size():
    task = quadratics((1.0,) * 4, (0.0,) * 4)
    central = CentralDP(clip=2.0, noise_multiplier=1.5, delta=1e-5, neighbours="add-or-remove")
    options = {"cohort": 0.01, "sampling": "poisson", "uploads": central, "progress": False}
    runs = sweep([make("fedavg", lr=1e-9)], task, range(2000), rounds=1, **options)
    nobody = runs.participants[0, :, 0] == 0
    assert nobody.mean() > 0.9
    moved = np.asarray(runs.runs[0].server.x)[nobody, 0] - float(task.params[0][0])
    # sigma = multiplier x clip x the largest weight in a mean, which is (1/4) / 0.01
    assert stats.kstest(moved / (1.5 * 2.0 * 25), "norm").pvalue > 1e-4


def test_a_resumed_run_draws_the_same_cohorts(tmp_path):
    algorithm, task = make("scaffold", lr=0.05, local_steps=2), regression((5, 9, 7, 4), weights=(0.4, 0.3, 0.2, 0.1))
    for sampling in ("weights", "poisson"):
        options = {"cohort": 2, "sampling": sampling, "progress": False}
        whole = simulate(algorithm, task, 3, rounds=9, **options)
        path = tmp_path / f"{sampling}.npz"
        simulate(algorithm, task, 3, rounds=4, checkpoint=path, **options)
        rest = simulate(algorithm, task, 3, rounds=9, checkpoint=path, resume=True, **options)
        assert np.array_equal(whole.server.x, rest.server.x)
        assert np.array_equal(whole.participants, rest.participants)
        with pytest.raises(UserError, match="belongs to another run.*sampling: .* in the file, 'uniform' now"):
            simulate(algorithm, task, 3, rounds=9, checkpoint=path, resume=True, cohort=2, sampling="uniform")


def test_the_ledger_counts_gathers_of_cohorts_of_any_size():
    """FastDRO answers everybody with its own weights, FCFL's reply does not grow; a gather of everything does."""
    from nestfed.algorithms.fedavg import FedAvg
    from nestfed.core.algorithm import reply_with_all
    from nestfed.core.settings import struct

    @struct
    class Gathering(FedAvg):
        def step(self, problem, s, draw, fed):
            x = s.x - self.lr * problem.gradient(s.x, draw(0))
            if not fed.sync:
                return s._replace(x=x)
            values = fed.gather(x, reply=reply_with_all)
            return s._replace(x=jnp.mean(values, 0))

    task = regression((4,) * 10)
    cost, d = measure(Gathering(lr=0.1), task, cohort=3), 8 * task.params[0].size
    assert (cost.cohort, cost.round.bytes_down, cost.down_per_client) == (3, 3 * d, d)
    assert cost.totals([0, 1, 5], 10)["bytes"].tolist() == [0, 0, 2 * d, 2 * d + 5 * 6 * d]
    assert measure(make("fedavg", lr=0.1), task, cohort=3).down_per_client == 0


def test_cohorts_follow_ids_not_positions():
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    task = regression((5, 9, 7, 4), weights=weights)
    order = [2, 0, 3, 1]
    turned = dataclasses.replace(task, data=task.data.reorder(order), weights=weights[order])
    for sampling in ("weights", "poisson"):
        rule = make_cohort_rule(2, sampling, weights)
        for round in range(20):
            one, other = (choose_cohort(t, jax.random.key(1), jnp.asarray(round), rule) for t in (task, turned))
            who = lambda participants: {
                int(i) for i, w in zip(participants.id, participants.weight, strict=True) if w > 0
            }
            assert who(one) == who(other)
