"""Equal opportunity for noisy groups: the penalty, its two forms, what is measured, and the experiment on Adult."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from nestfed import Sample, Task, UserError, make, simulate
from nestfed.experiments import reproduce
from nestfed.experiments.cells import Cell
from nestfed.experiments.dro_fairness import plan as dro_fairness
from nestfed.experiments.dro_fairness.data import NoisyGroups, draw_proxies
from nestfed.experiments.dro_fairness.page import EXPERIMENT
from nestfed.experiments.dro_fairness.plan import QUICK, Plan, Training, Trainings
from nestfed.experiments.dro_fairness.task import EqualOpportunity, make_noisy_groups_task
from nestfed.models import Perceptron

MODEL, FEATURES, GROUPS = Perceptron(), 4, 3
KEY = jax.random.key(0)


def made_up(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows as a problem sees them, every proxy with positives and negatives."""
    rng = np.random.default_rng(seed)
    return {
        "inputs": rng.normal(size=(rows, FEATURES)),
        "label": (np.arange(rows) // GROUPS % 2).astype(float),
        "proxy": np.arange(rows) % GROUPS,
    }


def shares_of(batch) -> np.ndarray:
    return np.bincount(batch["proxy"], batch["label"], minlength=GROUPS) / len(batch["label"])


def bound(batch, **changes):
    """(the problem, a flat point) for these rows."""
    problem = EqualOpportunity(**{"model": MODEL, "shares": shares_of(batch)} | changes)
    problem, (x,) = problem.bind(MODEL.init(KEY, FEATURES))
    return problem, x + 0.3


def by_hand(x, batch, *, margin=0.05, sharpness=1.0, reference="rows") -> tuple[float, float]:
    """(mean loss, penalty) from conditional means."""
    *weight, bias = np.asarray(x)[: FEATURES + 1] if len(x) == FEATURES + 1 else x
    z = batch["inputs"] @ np.array(weight) + bias
    loss, positive = np.logaddexp(0, z) - batch["label"] * z, batch["label"] == 1
    levels = np.array([loss[positive & (batch["proxy"] == j)].mean() for j in range(GROUPS)])
    excess = levels - (loss if reference == "rows" else loss[positive]).mean() - margin
    return loss.mean(), np.log((1 + np.exp(sharpness * excess).sum()) / (GROUPS + 1)) / sharpness


def flat_of(problem, x):
    """Weights, then the bias: as `by_hand` takes them."""
    (layer,) = problem.tree(0, x)
    return np.append(np.ravel(layer["weight"]), np.ravel(layer["bias"]))


# ------------------------------------------------------------------------------------------------- the problem


def test_a_model_that_knows_nothing():
    batch = made_up(24)
    for form in ("vector", "scalar"):
        for sharpness, margin in ((1.0, 0.05), (4.0, 0.2)):
            problem, x = bound(batch, form=form, sharpness=sharpness, margin=margin)
            zero = problem.tree(0, 0 * x)
            value = problem.outer(problem.inner(zero, batch, KEY), batch, KEY)
            assert_allclose(problem.levels(zero, batch), np.log(2), rtol=1e-12)
            assert_allclose(value, np.log((1 + 3 * np.exp(-sharpness * margin)) / 4) / sharpness, rtol=1e-10)


def test_two_groups_by_hand():
    # Logits are the inputs. Losses: log 2, log(1 + e^-1), log(1 + e^2), log 2; the last row is negative.
    problem = EqualOpportunity(model=MODEL, shares=np.array([0.5, 0.25]), reference="positives")
    batch = {
        "inputs": np.array([[0.0], [1.0], [-2.0], [0.0]]),
        "label": np.array([1.0, 1.0, 1.0, 0.0]),
        "proxy": np.array([0, 0, 1, 1]),
    }
    x = [{"weight": np.ones((1, 1)), "bias": np.zeros(1)}]
    losses = np.log([2, 1 + np.exp(-1), 1 + np.exp(2), 2])
    one, other = losses[:2].mean(), losses[2]
    assert_allclose(problem.levels(x, batch), [losses[:3].mean(), one, other], rtol=1e-12)
    assert_allclose(dataclasses.replace(problem, reference="rows").levels(x, batch)[0], losses.mean(), rtol=1e-12)
    excess = np.array([one, other]) - losses[:3].mean() - 0.05
    assert_allclose(problem.penalty(problem.levels(x, batch)), np.log((1 + np.exp(excess).sum()) / 3), rtol=1e-12)
    assert_allclose(problem.extra(x, batch, KEY), losses.mean(), rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(30)), st.sampled_from(["rows", "positives"]))
def test_the_vector_form_is_exact_however_rows_are_dealt(order, reference):
    batch = made_up(30)
    problem, x = bound(batch, reference=reference)
    held = [{name: column[list(order[a:b])] for name, column in batch.items()} for a, b in ((0, 5), (5, 15), (15, 30))]
    inner = sum(len(rows["label"]) * problem.inner_value(x, Sample(rows, KEY)) for rows in held) / 30
    loss, penalty = by_hand(flat_of(problem, x), batch, reference=reference)
    assert_allclose(problem.penalty(inner), penalty, rtol=1e-10)
    assert_allclose(problem.extra(problem.tree(0, x), batch, KEY), loss, rtol=1e-10)


def test_the_scalar_form_depends_on_the_dealing():
    batch, client = made_up(30), np.arange(30) // 10
    held = [{name: column[client == k] for name, column in batch.items()} for k in range(3)]
    scalar, x = bound(batch, form="scalar")
    vector, _ = bound(batch)
    _, penalty = by_hand(flat_of(scalar, x), batch)

    def value(problem, clients):
        first, *others = (problem.inner(problem.tree(0, x), rows, KEY) for rows in clients)
        return problem.outer(sum(others, first) / len(clients), batch, KEY)

    assert_allclose(value(scalar, [batch]), penalty, rtol=1e-10)  # one client: no difference
    assert_allclose(value(vector, held), penalty, rtol=1e-10)
    assert value(scalar, held) > penalty + 1e-3  # the mean of exponentials is above the exponential of the mean


@pytest.mark.parametrize("form", ["vector", "scalar"])
@pytest.mark.parametrize("reference", ["rows", "positives"])
def test_gradients_are_those_of_the_objective(form, reference):
    batch = made_up(36)
    problem, x = bound(batch, form=form, reference=reference, sharpness=2.0)
    sample = Sample(batch, KEY)
    y, pull = problem.inner_vjp(x, sample)
    gradient = problem.composed_gradient(x, pull, y, sample)
    objective = lambda x: sum(by_hand(flat_of(problem, x), batch, sharpness=2.0, reference=reference))
    for i in range(x.size):
        step = np.zeros(x.size)
        step[i] = 1e-5
        assert_allclose(gradient[i], (objective(x + step) - objective(x - step)) / 2e-5, rtol=1e-6, atol=1e-8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=4, max_size=4), st.floats(0.1, 10))
def test_the_penalty_follows_the_largest_excess(levels, sharpness):
    problem = EqualOpportunity(model=MODEL, shares=np.full(3, 0.1), sharpness=sharpness)
    levels = np.array(levels)
    largest = max(0.0, (levels[1:] - levels[0] - 0.05).max())
    slack = 1e-9 * (1 + levels.max())
    assert largest - np.log(4) / sharpness - slack <= problem.penalty(jnp.asarray(levels)) <= largest + slack


def test_estimates_return_to_the_range_of_the_inner_function():
    batch = made_up(12)
    vector, _ = bound(batch)
    sample = Sample(batch, KEY)
    y, moved = vector.into_domain(jnp.array([0.5, -0.1, 0.2, 0.0]), sample)
    assert_array_equal(y, [0.5, 0, 0.2, 0])
    assert moved == 1
    scalar, x = bound(batch, form="scalar")
    y, moved = scalar.into_domain(scalar.inner_value(x, sample) * 0.01, sample)
    assert_allclose(y.plain(), [0.25], rtol=1e-12)
    assert moved == 1
    assert scalar.into_domain(scalar.inner_value(x, sample), sample)[1] == 0


# ------------------------------------------------------------------------------------------------- the task


def few(rows: int = 900, clients: int = 3, seed: int = 0) -> NoisyGroups:
    """A small table of 0/1 features in three parts."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 2, (rows, FEATURES)).astype(np.float32)
    return NoisyGroups(
        inputs=inputs,
        true_group=rng.choice(GROUPS, rows, p=[0.6, 0.25, 0.15]).astype(np.int32),
        label=(rng.random(rows) < 0.2 + 0.15 * inputs.sum(1)).astype(np.int32),
        part=rng.choice(3, rows, p=[0.6, 0.2, 0.2]).astype(np.int8),
        client=(np.arange(rows) % clients).astype(np.int32),
        group_names=("a", "b", "c"),
        client_names=tuple(map(str, range(clients))),
        feature_names=tuple(map(str, range(FEATURES))),
    )


def measured(task, x, data=None) -> dict[str, float]:
    """The task's metrics at a point, of a client that is alone."""
    fed = SimpleNamespace(mean=lambda tree: tree, key=KEY)
    values = jax.jit(lambda x: task.metrics(SimpleNamespace(x=x), None, data, fed))(x)
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("reference", ["rows", "positives"])
def test_metrics_are_the_rates_of_pooled_rows(reference):
    data = few()
    task = make_noisy_groups_task(data, reference=reference, margin=0.03, seed=5)
    x = jnp.asarray(np.random.default_rng(1).normal(size=task.params[0].size))
    found = measured(task, x)
    proxy = np.asarray(draw_proxies(data.true_group, 0.3, 5))
    inputs = np.concatenate([data.inputs, np.eye(GROUPS)[proxy]], 1)
    (layer,) = task.problem.tree(0, x)
    logit = inputs @ np.asarray(layer["weight"])[:, 0] + np.asarray(layer["bias"])[0]
    loss, yes = np.logaddexp(0, logit) - data.label * logit, logit > 0
    for i, part in enumerate(("train", "validation", "test")):
        inside, positive = data.part == i, (data.part == i) & (data.label == 1)
        tpr = yes[positive].mean()
        of = lambda group: np.array([yes[positive & (group == j)].mean() for j in range(GROUPS)])
        expected = {
            "accuracy": (yes == data.label)[inside].mean(), "loss": loss[inside].mean(), "tpr": tpr,
            "violation": (tpr - of(data.true_group)).max() - 0.03, "proxy_violation": (tpr - of(proxy)).max() - 0.03,
            **dict(zip(("tpr_a", "tpr_b", "tpr_c"), of(data.true_group), strict=True)),
        }  # fmt: skip
        levels = np.array([loss[positive & (proxy == j)].mean() for j in range(GROUPS)])
        excess = levels - loss[inside if reference == "rows" else positive].mean() - 0.03
        expected["objective"] = loss[inside].mean() + np.log((1 + np.exp(excess).sum()) / 4)
        for name, value in expected.items():
            assert found[f"{part}_{name}"] == pytest.approx(value, abs=1e-6), (part, name)


def test_the_objective_recorded_is_the_one_that_is_minimised():
    task = make_noisy_groups_task(few(clients=1), resample=False)
    x = jnp.asarray(np.random.default_rng(2).normal(size=task.params[0].size))
    columns = dict(task.data.columns)
    columns["inputs"] = np.concatenate([columns["inputs"], np.eye(GROUPS)[columns["proxy"]]], 1)
    rows = dataclasses.replace(task.data, columns=columns)
    plain = Task.create(task.problem, rows, task.problem.tree(0, x))
    recorded = measured(task, x)["train_objective"]
    assert measured(plain, x, rows.client(0))["objective"] == pytest.approx(recorded, abs=1e-6)


def test_a_group_without_positives_violates_nothing():
    data = few()
    alone = dataclasses.replace(data, label=np.where((data.true_group == 2) & (data.part == 2), 0, data.label))
    task = make_noisy_groups_task(alone)
    found = measured(task, task.params[0])
    rates = [found["test_tpr_a"], found["test_tpr_b"]]
    assert np.isnan(found["test_tpr_c"])
    assert found["test_violation"] == pytest.approx(found["test_tpr"] - min(rates) - 0.05)


def batches(task, number: int):
    keys = jax.random.split(jax.random.key(1), number)
    return jax.jit(jax.vmap(lambda key: task.sample(task.data.client(0), key)))(keys)


def test_batches_have_fresh_proxies_and_no_true_group():
    data = few()
    number = np.arange(len(data.label), dtype=np.float32)
    # A feature that names the row: what happened to it can be traced.
    task = make_noisy_groups_task(dataclasses.replace(data, inputs=number[:, None]), batch_size=8)
    drawn = batches(task, 500)
    assert set(drawn) == {"inputs", "label", "proxy"}
    rows = np.asarray(drawn["inputs"])[..., 0].astype(int)
    assert (data.client[rows] == 0).all() and (data.part[rows] == 0).all()
    assert_array_equal(drawn["label"], data.label[rows])
    assert_array_equal(np.asarray(drawn["inputs"])[..., 1:], np.eye(GROUPS)[drawn["proxy"]])
    wrong = np.asarray(drawn["proxy"]) != data.true_group[rows]
    assert abs(wrong.mean() - 0.3) < 4 * np.sqrt(0.21 / wrong.size)
    times = np.bincount(rows.ravel())
    share = np.bincount(rows.ravel(), wrong.ravel())[times > 0] / times[times > 0]
    assert ((share > 0) & (share < 1)).mean() > 0.9  # about 22 draws of each row: nearly all were right and wrong
    kept = batches(dataclasses.replace(task, resample=False), 500)
    assert_array_equal(kept["inputs"][..., 0], drawn["inputs"][..., 0])
    assert_array_equal(kept["proxy"], np.asarray(draw_proxies(data.true_group, 0.3, 0))[rows])


def test_shares_are_those_of_training_rows():
    data = few()
    task = make_noisy_groups_task(data, seed=3)
    proxy = np.asarray(draw_proxies(data.true_group, 0.3, 3))
    training = data.part == 0
    expected = np.bincount(proxy[training], data.label[training]) / training.sum()
    assert_allclose(task.problem.shares, expected, rtol=1e-6)
    assert_allclose(task.weights, np.bincount(data.client[training]) / training.sum())


def test_a_proxy_without_positives_is_refused():
    data = dataclasses.replace(few(), label=np.zeros(900, np.int32))
    with pytest.raises(UserError, match="no positive training row has the proxy 'a'"):
        make_noisy_groups_task(data)


def test_training_lowers_the_objective():
    task = make_noisy_groups_task(few(), batch_size=32)
    history = simulate(make("feddro", lr=0.3), task, rounds=60, evaluate_every=60).history
    assert history["train_objective"][-1] < history["train_objective"][0] - 0.02


# ------------------------------------------------------------------------------------------------- the experiment


def test_clients_of_weight_zero_change_nothing():
    task = make_noisy_groups_task(few(clients=2))
    algorithm = make("mbsgd", lr=0.1)
    tasks = task, dro_fairness._add_empty_clients(task, 4)
    alone, among_empty = (simulate(algorithm, one, rounds=3, evaluate_every=None) for one in tasks)
    assert_allclose(alone.server.x, among_empty.server.x, rtol=1e-12)


def test_what_is_chosen():
    cell = Cell(
        settings=[{"lr": lr} for lr in (0.01, 0.1, 1.0, 3.0)],
        seeds=[0, 1],
        round=np.array([0, 200, 3200]),
        metrics={
            "validation_objective": np.array(
                [
                    [[9, 0.5, 0.3], [9, 0.5, 0.3]],
                    [[9, 0.4, 0.2], [9, 0.4, 0.3]],
                    [[9, 0.2, 0.1], [9, 0.3, np.nan]],  # diverged in round 1000
                    [[9, np.nan, np.nan], [9, 0.1, 0.1]],  # diverged in round 100
                ]
            )
        },
        diverged=np.array([[-1, -1], [-1, -1], [-1, 1000], [100, -1]]),
        cost={}, seconds=0.0, machine="",
    )  # fmt: skip
    training = Training("feddro", 8)
    found = Trainings(Path("."), Plan(), known={training.name: cell})
    assert found.choose(training, "rounds") == 2
    assert found.choose(training, "steps") == 1
    assert found.choose(training, "rounds", (0.01, 0.1)) == 1
    with pytest.raises(UserError, match="every setting diverged"):
        found.choose(training, "rounds", (3.0,))


def test_the_trainings_of_the_plan():
    all_of = Trainings(Path("."), Plan())
    assert len(set(all_of.all_trainings)) == len(all_of.all_trainings) == 4 + 3 + 2 + 2 * 6 + 8
    # After 3200 steps, whatever the method and the number of local steps.
    assert {all_of._last(t, "steps") * t.steps_per_round for t in all_of.compared + all_of.local_steps} == {3200}


def test_the_quick_version(tmp_path, monkeypatch):
    folder = tmp_path / "quick"
    text = reproduce("dro-fairness", out=folder, quick=True, progress=False).read_text(encoding="utf-8")
    assert "nestfed reproduce dro-fairness --quick" in text and "{{" not in text
    read = lambda name: pd.read_csv(folder / "tables" / f"{name}.csv", dtype={"claim": str})
    of = lambda table, method, steps, after: table[
        (table.method == method) & (table["local steps"] == steps) & (table.after == after) & (table.clients == 2)
    ]
    seeds = read("seeds")
    first, row = (of(table, "FedDRO", 2, "20 rounds") for table in (seeds, read("final")))
    assert len(first) == QUICK.seeds
    assert_allclose(row["test accuracy"], first["test_accuracy"].mean(), rtol=1e-5)
    assert_allclose(row["test violation, std"], first["test_violation"].std(ddof=1), rtol=1e-4, atol=1e-6)
    ours, theirs = (of(seeds, method, 1, "40 steps")["test_accuracy"].mean() for method in ("DS-FedDRO", "GCIVR"))
    claims = read("claims").set_index(["claim", "case"])["difference"]
    assert_allclose(claims["4", "DS-FedDRO, test, 40 steps"], ours - theirs, atol=1e-5)
    for figure in text.split("](figures/")[1:]:
        assert (folder / "figures" / figure.split(")")[0]).stat().st_size > 10_000
    # A second time everything is read, nothing trained.
    monkeypatch.setattr(dro_fairness, "train", lambda *_, **__: pytest.fail("trained again"))
    page = EXPERIMENT.run(folder, quick=True, progress=False)
    assert page.read_text(encoding="utf-8") == text
