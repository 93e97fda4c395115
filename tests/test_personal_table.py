"""Models of clients' own on a table: the problem, what a client may train on, a user's own hospitals in one command."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from nestfed import UserError, make, simulate
from nestfed.core.algorithm import Sample
from nestfed.data import TEST, TRAIN
from nestfed.report.record import Record
from nestfed.uploads.privacy import LocalDP
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios import ClientModels, TabularModel
from nestfed.workbench.scenarios.personal import METHODS, BinaryClasses, Personal, make_task_from_the_start
from nestfed.workbench.stages import Budget, run_method, set_up, sweep_method
from nestfed.workbench.task_options import MODELS, PersonalOptions

NAMES = ("north", "south", "harbour")
KEY = jax.random.key(0)


def hospitals() -> pd.DataFrame:
    """At the harbour what is healthy elsewhere is ill: one model for all cannot be right."""
    random = np.random.default_rng(0)
    hospital = np.repeat(NAMES, (160, 130, 110))
    age, dose = random.normal(size=(2, 400)).round(3)
    sign = np.where(hospital == "harbour", -1, 1)
    ill = sign * (2 * age + dose) + 0.3 * random.normal(size=400) > 0
    frame = pd.DataFrame({"age": age, "dose": dose, "hospital": hospital, "ill": np.where(ill, "yes", "no")})
    return frame.sample(frac=1, random_state=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "hospitals.csv"
    hospitals().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def scenario(path):
    return Personal(
        PersonalOptions(data=str(path), label="ill", positive="yes", clients="hospital", batch_size=16, steps=10)
    )


@pytest.fixture(scope="module")
def trials(scenario):
    return set_up(scenario, range(2))


# ------------------------------------------------------------------------------------------------- the problem


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_is_the_logistic_loss_of_the_model(scenario, model):
    setup = scenario.change(model=model).set_up(0)
    problem, (u, v) = BinaryClasses(model=setup.model, weight_decay=0.4).bind(setup.theta)
    inputs, labels = setup.data.inputs[:7], setup.data.label[:7]
    logits = setup.model(setup.theta, jnp.asarray(inputs))
    decay = 0.2 * sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(setup.theta))
    expected = np.mean(np.logaddexp(0, -np.where(labels == 1, 1, -1) * np.asarray(logits))) + decay
    sample = Sample((jnp.asarray(inputs), jnp.asarray(labels)), KEY)
    assert float(problem.local_loss(u, v, sample)) == pytest.approx(expected, rel=1e-5)
    assert_allclose(problem.outputs(u, v, jnp.asarray(inputs), KEY)[:, 1], logits, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- what is trained on


def with_other_rows(setup):
    """The same training rows, and nonsense in all others."""
    data, rows = setup.data, setup.rows
    inside = np.concatenate(
        [np.arange(size) < own[TRAIN] for size, own in zip(rows.sizes, rows.constants["sizes"], strict=True)]
    )
    assert inside.sum() == (data.part == TRAIN).sum() < len(inside)
    inputs, label = rows.columns
    spoilt = np.where(inside[:, None], inputs, 1e3).astype(inputs.dtype), np.where(inside, label, 1 - label)
    return dataclasses.replace(setup, rows=dataclasses.replace(rows, columns=spoilt))


# These pass over all rows of a client in a round.
@pytest.mark.parametrize("name", ["fedreco-pvr", "fedpac"])
def test_only_training_rows_are_trained_on(name, scenario, trials):
    algorithm = make(name, lr=0.1, local_steps=2, head_steps=2)
    one, other = (
        simulate(
            algorithm, make_task_from_the_start(scenario, setup, None), rounds=2, evaluate_every=None, progress=False
        )
        for setup in (trials.first, with_other_rows(trials.first))
    )
    for ours, theirs in zip(
        jax.tree.leaves((one.server, one.clients)), jax.tree.leaves((other.server, other.clients)), strict=True
    ):
        assert_array_equal(ours, theirs)


# ------------------------------------------------------------------------------------------------- methods


def test_a_row_of_a_sweep_is_a_run_and_its_metrics_are_those_of_its_models(scenario, trials):
    name, grid = "fedreco", {"lr": [0.05, 0.2]}
    swept = sweep_method(trials, name, {}, grid, Budget(evaluations=1), progress=False)
    trace = next(t for t in swept.traces if t.seed == 1 and t.changes["lr"] == 0.2)
    algorithms = scenario.make_algorithms(name, trials.setups[1], {"lr": 0.2})
    alone = run_method(trials, name, algorithms, 1, Budget(evaluations=1), progress=False)
    for ours, theirs in zip(trace.left, alone.left, strict=True):
        assert ours.shape[0] == len(NAMES)
        assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    final, _ = scenario.evaluate(trials.setups[1], trace.left)
    recorded = {metric: values[-1] for metric, values in trace.stages[-1].history.items() if metric in final}
    assert set(recorded) == set(final) and len(final) == 18
    for metric, value in recorded.items():
        assert value == pytest.approx(final[metric], rel=1e-5, abs=2e-6), metric  # a deviation is a difference


def test_a_stage_of_tuning_goes_on_from_the_common_model(scenario, trials):
    """FedBABU's head is the start's until clients train it; with a step size near zero it stays there."""
    algorithms = scenario.make_algorithms("fedbabu", trials.first, {"tuning.lr": 1e-12})
    left = run_method(trials, "fedbabu", algorithms, 0, Budget(evaluations=1), progress=False).left
    problem, (u, v) = BinaryClasses(model=trials.first.model).bind(trials.first.theta)
    assert_allclose(left.v, np.broadcast_to(v, left.v.shape), atol=1e-9)
    assert_allclose(left.u, np.broadcast_to(left.u[0], left.u.shape), atol=1e-12)
    assert np.abs(left.u[0] - u).max() > 1e-3
    algorithms = scenario.make_algorithms("fedbabu", trials.first, {"tuning.lr": 0.3})
    tuned = run_method(trials, "fedbabu", algorithms, 0, Budget(evaluations=1), progress=False).left
    assert_allclose(tuned.u, np.broadcast_to(tuned.u[0], tuned.u.shape), atol=1e-12)  # the head alone
    assert np.abs(tuned.v - v[None]).max() > 1e-3 and np.abs(tuned.v[0] - tuned.v[1]).max() > 1e-4


def test_a_stage_without_exchanges_takes_no_part_of_a_privacy_budget(scenario, trials):
    privacy = LocalDP(clip=1.0, noise_multiplier=2.0, delta=1e-5, budget=4.2)
    budget = Budget(rounds=8, evaluations=1, privacy=privacy)
    done = lambda name: [
        (stage.done, stage.spending.epsilon(stage.done))
        for stage in run_method(
            trials, name, scenario.make_algorithms(name, trials.first, {}), 0, budget, progress=False
        ).stages
    ]
    (alone,), (first, second) = done("fedavg"), done("fedavg-tuned")
    assert first == alone and 0 < first[0] < 8 and second[0] == 8
    assert second[1] == pytest.approx(first[1]) and 3 < first[1] <= 4.2


# ------------------------------------------------------------------------------------------------- the command line


def test_own_hospitals_in_one_command(call, path):
    words = ["--data", path, "--label", "ill", "--positive", "yes", "--clients", "hospital", "--batch-size", "16"]
    methods = ["-a", "fedrep", "-a", "fedavg", "--set", "lr=0.3"]
    code, out, err = call("run", "personal", *methods, *words, "--steps", "300", "--evaluations", "2", "--out", "a")
    assert code == 0, err
    record = Record.load(Path("a"))
    assert "more frequent label" in out.replace("\n", " ")
    final = record.final.set_index("method")
    # Who differs from all others is badly off with a model for all, and not with its own.
    by_client = record.slices.query("split == 'test' and metric == 'accuracy' and kind == 'client'")
    accuracy = by_client.pivot(index="slice", columns="method", values="value")
    assert accuracy.loc["harbour", "fedavg"] < 0.4 < 0.8 < accuracy.loc["harbour", "fedrep"]
    assert final.loc["fedavg", "test_accuracy_lowest"] == pytest.approx(accuracy["fedavg"].min())

    # The saved models, used as a stranger would, give the numbers of the report.
    data, frame = Request.of({"task": "personal", **record.settings}).scenario.set_up(0).data, pd.read_csv(path)
    for method in record.methods:
        models = ClientModels.load(f"a/models/{method}-seed0.npz")
        assert models.clients == data.client_names
        own = []
        for k, name in enumerate(models.clients):
            mine = (data.client == k) & (data.part == TEST)
            own.append(np.mean((models.of(name).probability(frame)[mine] > 0.5) == data.label[mine]))
        assert final.loc[method, "test_accuracy"] == pytest.approx(np.mean(own), abs=1e-6)
    with pytest.raises(UserError, match="'harbor'; did you mean 'harbour'"):
        models.of("harbor")
    with pytest.raises(UserError, match="models of 3 clients; load it by nestfed.ClientModels"):
        TabularModel.load("a/models/fedrep-seed0.npz")
    assert "ill" in (Path("a") / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tree"], "model='tree' was given"),
        (["--output", "best"], "clients keep models of their own"),
        (["--algorithm", "fedcr"], "no method for the task personal; did you mean"),
        (["--set", "fedreco.coupling=-1"], "coupling"),
    ],
)
def test_mistakes_are_told_in_one_line(call, path, words, message):
    code, _, err = call("run", "personal", "--data", path, "--label", "ill", "--clients", "hospital", *words)
    assert code == 1 and message in err.replace("\n", " ") and "Traceback" not in err
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["fedrep", "fedreco", "ditto"])
def test_in_logistic_regression_the_head_is_the_intercept(name, scenario):
    own = scenario.change(model="logistic")
    trials = set_up(own, [0])
    trace = run_method(
        trials, name, own.make_algorithms(name, trials.first, {}), 0, Budget(evaluations=1), progress=False
    )
    ((layer,),) = (own.thetas(trials.first, trace.left),)
    slopes, intercepts = (np.asarray(layer[name])[..., 0] for name in ("weight", "bias"))
    assert slopes.shape == (len(NAMES), trials.first.data.inputs.shape[1]) and len(set(intercepts.tolist())) == 3
    alike = np.abs(slopes - slopes[0]).max() < 1e-12
    assert alike == (name == "fedrep")  # the others have bodies of their own


def test_all_methods_have_a_price(call, path):
    code, out, err = call("cost", "personal", "--data", path, "--label", "ill", "--clients", "hospital", "--json")
    assert code == 0, err
    table = pd.DataFrame(json.loads(out))
    assert set(table["method"]) == {method.title for method in METHODS.values()}
    assert (table.query("stage == 'tuning' or method == 'Local only'")["bytes up"] == 0).all()
    assert table.set_index("method").loc["FedRep", "bytes up"] < table.set_index("method").loc["FedAvg", "bytes up"]
