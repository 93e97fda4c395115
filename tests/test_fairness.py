"""The fairness task: problems against closed forms, metrics against a count by hand, stages, sweeps over seeds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax.flatten_util import ravel_pytree

import nestfed
from nestfed.core.algorithm import Sample
from nestfed.core.rows import Rows
from nestfed.core.task import Task
from nestfed.data import TRAIN
from nestfed.models import Perceptron
from nestfed.problems.hypergradients import Dense
from nestfed.workbench.scenarios import fairness
from nestfed.workbench.scenarios.fair_problems import GroupWeights, WeightedRisk, compute_soft_gap
from nestfed.workbench.scenarios.fairness import Fairness, compute_rates
from nestfed.workbench.stages import Budget, find_best_changes, run_method, set_up, sweep_method
from nestfed.workbench.task_options import FairnessOptions

STEPS = 20


@pytest.fixture(scope="module")
def scenario():
    return Fairness(FairnessOptions(data="german", partition="ratios:2:2:6", steps=STEPS, objective="paper"))


@pytest.fixture(scope="module")
def trials(scenario):
    return set_up(scenario, range(2))


def linear(theta, inputs):
    return inputs @ theta


def rows(inputs, label, group):
    return {
        "inputs": jnp.asarray(inputs, float), "label": jnp.asarray(label, float), "group": jnp.asarray(group),
        "weight": jnp.ones(len(label)),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- problems


TINY = {
    "train": rows([(1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, -1)], [1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1]),
    "validation": rows([(1, 0.5), (-0.5, 1)], [1, 0], [0, 1]),
}


def test_t5_tiny_fair_logistic_bilevel():
    problem = GroupWeights(groups=2, penalty=0.1, model=linear)
    task = Task.create(
        problem, Rows.from_clients(constants=jax.tree.map(lambda a: a[None], TINY)), (jnp.ones(2), jnp.zeros(2))
    )
    problem, sample = task.problem, Sample(TINY, jax.random.key(0))
    theta, weights = jnp.zeros(2), jnp.ones(2)
    lower = lambda theta: problem.lower(weights, theta, TINY, None)
    for _ in range(20):
        theta = theta - jnp.linalg.solve(jax.hessian(lower)(theta), jax.grad(lower)(theta))
    np.testing.assert_allclose(theta, [1.48372127, -0.43905367], atol=1e-8)
    np.testing.assert_allclose(problem.upper(weights, theta, TINY, None), 0.25825911, atol=1e-8)
    (hypergradient,) = Dense()(problem, [(weights, theta)], lambda j: sample)
    np.testing.assert_allclose(hypergradient, [-0.07667569, -0.08460982], atol=1e-8)


def test_fedreg_sees_no_gap_at_zero_logits_and_the_right_gap_elsewhere():
    model, batch = linear, TINY["train"]
    assert float(compute_soft_gap(model, jnp.zeros(2), batch, 2)) == 0
    theta = jnp.array([0.1, -0.3])
    soft = 1 / (1 + np.exp(-10 * np.asarray(linear(theta, batch["inputs"]))))
    label, group = np.asarray(batch["label"]), np.asarray(batch["group"])
    taus = [soft[(label == 1) & (group == a)].mean() for a in (0, 1)]
    np.testing.assert_allclose(compute_soft_gap(model, theta, batch, 2), max(taus) - min(taus), rtol=1e-12)
    one_group = batch | {"label": batch["label"] * (batch["group"] == 0)}
    assert float(compute_soft_gap(model, theta, one_group, 2)) == 0
    assert np.isfinite(jax.grad(lambda t: compute_soft_gap(model, t, one_group, 2))(theta)).all()
    three = compute_soft_gap(model, theta, batch, 3)  # a group that nobody has is left out
    np.testing.assert_allclose(three, max(taus) - min(taus), rtol=1e-12)


def test_weights_stay_feasible():
    problem = GroupWeights(groups=3)
    np.testing.assert_allclose(problem.project_x(jnp.array([3.0, -1.0, 1.0])), [2.25, 0, 0.75])
    np.testing.assert_allclose(problem.project_x(jnp.array([-3.0, -1.0])), [1, 1])
    soft = GroupWeights(groups=4, form="softmax")
    np.testing.assert_allclose(soft.weights(jnp.zeros(4)), jnp.ones(4))
    np.testing.assert_allclose(soft.project_x(jnp.array([-3.0, 5.0])), [-3, 5])


def test_perceptron_is_logistic_regression_without_hidden_layers():
    logistic, network = Perceptron(), Perceptron((7, 3))
    params = logistic.init(jax.random.key(0), 4)
    inputs = jax.random.normal(jax.random.key(1), (5, 4))
    by_hand = inputs @ params[0]["weight"][:, 0] + params[0]["bias"]
    np.testing.assert_allclose(logistic(params, inputs), by_hand)
    deep = network.init(jax.random.key(0), 4)
    assert ravel_pytree(deep)[0].size == 4 * 7 + 7 + 7 * 3 + 3 + 3 + 1
    assert network(deep, inputs).shape == (5,)


def test_rates_leave_out_empty_groups():
    #                  rows positives correct tp fp loss
    counts = jnp.array([[10, 4, 8, 3, 1, 2.0], [5, 0, 5, 0, 0, 1.0], [4, 2, 2, 1, 1, 3.0], [0, 0, 0, 0, 0, 0]])
    values = compute_rates(counts)
    assert float(values["eqopp"]) == pytest.approx(0.75 - 0.5)
    assert float(values["eqodds"]) == pytest.approx(0.5)  # false positive rates 1/6, 0, 1/2
    assert float(values["accuracy"]) == pytest.approx(15 / 19)
    assert float(values["loss"]) == pytest.approx(6 / 19)
    assert float(compute_rates(jnp.zeros((2, 6)))["eqopp"]) == 0


# ------------------------------------------------------------------------------------------------- the task


def test_batches_come_from_the_right_part_of_the_right_client(scenario, trials):
    setup = trials.first
    task = fairness.make_weighted_risk(scenario, setup, None)
    data = setup.data
    for number in range(task.clients):
        batch = task.sample(task.data.client(jnp.asarray(number)), jax.random.key(number))
        for name, part in (("train", TRAIN), ("validation", 1)):
            own = {row.tobytes() for row in data.inputs[(data.client == number) & (data.part == part)]}
            drawn = np.asarray(batch[name]["inputs"], np.float32)
            assert len(drawn) == 32 and all(row.tobytes() in own for row in drawn)
        members = data.group[(data.client == number) & (data.part == TRAIN)]
        np.testing.assert_allclose(batch["shares"], np.bincount(members, minlength=4) / len(members), rtol=1e-6)


def test_full_batch_gives_the_gradient_over_all_rows(scenario, trials):
    setup = trials.first
    task = fairness.make_group_minimax(scenario, setup, None)
    alpha = jnp.array([1.0, 2.0, 0.5, 3.0])
    for number in range(task.clients):
        batch = task.sample(task.data.client(jnp.asarray(number)), jax.random.key(0))
        mine = (setup.data.client == number) & (setup.data.part == TRAIN)
        plain = rows(setup.data.inputs[mine], setup.data.label[mine], setup.data.group[mine])
        value = lambda rows: task.problem.value(setup.theta, alpha, {"train": rows}, None)
        np.testing.assert_allclose(value(batch["train"]), value(plain), rtol=1e-5)
        risks, counts = task.problem.group_risks(setup.theta, batch, None)
        exact = task.problem.group_risks(setup.theta, {"train": plain}, None)
        np.testing.assert_allclose(risks, exact[0], rtol=1e-5)
        np.testing.assert_allclose(counts / counts.sum(), exact[1] / exact[1].sum(), rtol=1e-5)


@pytest.mark.parametrize("averaging", ["uniform", "samples"])
def test_metrics_of_a_run_are_those_counted_on_the_host(scenario, trials, averaging):
    setup, scenario = trials.first, scenario.change(averaging=averaging)
    task = fairness.make_weighted_risk(scenario, setup, None)
    result = nestfed.simulate(nestfed.make("fedavg", lr=0.5, local_steps=5), task, rounds=2, evaluate_every=None)
    by_hand, slices = scenario.evaluate(setup, scenario.leave(task, result.server, result.clients))
    for name, value in by_hand.items():
        if name in result.history:
            assert float(result.history[name][-1]) == pytest.approx(value, abs=1e-6), name
    groups = slices[(slices.kind == "group") & (slices.split == "test") & (slices.metric == "true positive rate")]
    assert groups.value.max() - groups.value.min() == pytest.approx(by_hand["test_eqopp"])
    clients = slices[(slices.kind == "client") & (slices.split == "test") & (slices.metric == "accuracy")]
    names, sizes = np.unique(
        np.asarray(setup.data.client_names)[setup.data.client[setup.data.part == 2]], return_counts=True
    )
    accuracy = clients.set_index("slice").value[names].to_numpy()
    assert accuracy @ sizes / sizes.sum() == pytest.approx(by_hand["test_accuracy"])


def test_two_stages_hand_the_weights_over(scenario, trials):
    setup = trials.first
    algorithms = scenario.make_algorithms("fedbio", setup, {"lr": 1.0})
    trace = run_method(trials, "fedbio", algorithms, 0, Budget(evaluations=4), progress=False)
    weights, model = trace.stages
    assert (weights.name, model.name) == ("weights", "model")
    found = weights.history["weights"][-1]
    assert found.mean() == pytest.approx(1) and np.abs(found - 1).max() > 1e-3
    problem = WeightedRisk(weights=jnp.asarray(found), penalty=scenario.options.penalty)
    again = nestfed.simulate(
        nestfed.make("fedavg", lr=0.1, local_steps=5), scenario.pose(setup, problem, setup.theta),
        seed=0, rounds=STEPS // 5,
    )  # fmt: skip
    np.testing.assert_allclose(trace.left.server.x, again.server.x, rtol=1e-5, atol=1e-7)


# A method of one stage, one with an answer of its own for every client, and one of two stages.
@pytest.mark.parametrize("name", ["fedavg", "fcfl", "fedbio"])
def test_a_row_of_a_sweep_over_seeds_is_the_run_of_that_seed(scenario, trials, name):
    """Seeds differ in split, start and batches, and run side by side on one pool of rows."""
    grid = {"lr": [0.05, 0.5]}
    swept = sweep_method(trials, name, {}, grid, Budget(evaluations=2), progress=False)
    traces = swept.traces
    assert [(t.changes["lr"], t.seed) for t in traces] == [(0.05, 0), (0.05, 1), (0.5, 0), (0.5, 1)]
    chosen = traces[3]
    algorithms = scenario.make_algorithms(name, trials.first, {"lr": 0.5})
    alone = run_method(trials, name, algorithms, 1, Budget(evaluations=2), progress=False)
    np.testing.assert_allclose(chosen.left.server.x, alone.left.server.x, rtol=1e-6, atol=1e-9)
    for mine, other in zip(chosen.stages, alone.stages, strict=True):
        assert set(mine.history) == set(other.history) and mine.participants.tolist() == other.participants.tolist()
        for key, values in mine.history.items():
            np.testing.assert_allclose(values, other.history[key], rtol=1e-6, atol=1e-7, err_msg=key)
    best = find_best_changes(swept)
    final = lambda lr: np.mean(
        [scenario.evaluate(trials.setups[t.seed], t.left)[0]["outer_loss"] for t in traces if t.changes["lr"] == lr]
    )
    assert best["lr"] == min((0.05, 0.5), key=final)  # of the state that counts: FedMinMax returns the average


def test_a_sweep_refuses_tasks_that_do_not_fit_together(scenario, trials):
    first, second = trials.setups.values()
    tasks = [fairness.make_weighted_risk(scenario, first, None), fairness.make_regularised_risk(scenario, second, None)]
    algorithm = nestfed.make("fedavg", lr=0.1)
    with pytest.raises(nestfed.UserError, match="differ in more than numbers"):
        nestfed.sweep([algorithm], tasks, seeds=[0, 1], rounds=1)
    with pytest.raises(nestfed.UserError, match="2 tasks were given for 3 seeds"):
        nestfed.sweep([algorithm], tasks, seeds=[0, 1, 2], rounds=1)


def test_diverging_settings_are_passed_over(trials):
    swept = sweep_method(trials, "fedavg", {}, {"lr": [1e30, 0.1]}, Budget(evaluations=1), progress=False)
    assert [t.status for t in swept.traces] == ["diverged"] * 2 + ["finished"] * 2
    assert find_best_changes(swept) == {"lr": 0.1}
    with pytest.raises(nestfed.UserError, match="every setting of fedavg diverged"):
        find_best_changes(dataclasses.replace(swept, traces=swept.traces[:2]))


def test_neumann_step_is_below_the_inverse_curvature(scenario, trials):
    setup = trials.first
    inputs = setup.data.inputs[setup.data.part == TRAIN]
    theta, weights = setup.theta, jnp.full(4, 2.0)
    batch = {
        "train": rows(inputs, setup.data.label[setup.data.part == TRAIN], setup.data.group[setup.data.part == TRAIN])
    }
    flat, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, theta))
    problem = fairness.make_group_weights(scenario, setup, None).problem
    hessian = jax.hessian(lambda v: problem.lower(weights, unravel(v), batch, None))(flat)
    top = np.linalg.eigvalsh(hessian)[-1]
    assert setup.curvature + scenario.options.penalty == pytest.approx(
        top, rel=1e-4
    )  # attained at zero logits with weights of 2
    (weights_stage, _) = scenario.make_algorithms("fedbio", setup, {})
    assert weights_stage.hypergradient.lr == pytest.approx(1 / top, rel=0.05)


@pytest.mark.parametrize("sizes, found", [((400, 300), 350), ((500, 6, 40), 200), ((30, 0, 20), 10)])
def test_the_gap_by_chance_is_that_of_permuted_groups(sizes, found):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    hits = np.arange(groups.size) < found
    generator = np.random.default_rng(1)
    counted = lambda owner: (
        np.bincount(owner, hits, len(sizes))[np.array(sizes) > 0] / np.array(sizes)[np.array(sizes) > 0]
    )
    gaps = [np.ptp(counted(generator.permutation(groups))) for _ in range(2000)]
    counts = np.bincount(groups, hits, len(sizes))
    expected = np.quantile(gaps, 0.95)
    assert fairness.find_gap_by_chance(np.array(sizes), counts) == pytest.approx(expected, rel=0.1)


def test_a_run_says_where_a_gap_may_be_chance(scenario):
    frame = pd.DataFrame({"method": ["fedavg", "fedavg"], "test_predicted_positive": 0.2, "test_eqopp": [0.1, 0.2]})
    said = lambda by_chance: scenario.list_warnings(frame.assign(test_eqopp_by_chance=by_chance))
    assert said(0.1) == []
    (warning,) = said(0.2)
    assert "0.150, may be chance" in warning and "up to 0.200" in warning
