"""The robust task: metrics against numpy and scipy, methods against the optimum, the user's own hospitals."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.special import logsumexp
from sklearn.metrics import roc_auc_score

import nestfed
from nestfed import make, simulate
from nestfed.core.settings import UserError
from nestfed.data import TEST, TRAIN, VALIDATION, federate, read_table
from nestfed.problems.toys import quadratics
from nestfed.report.record import Record
from nestfed.verbs.history import find_rise
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios import TabularModel
from nestfed.workbench.scenarios.robustness import ADVERSARIES, Pool, Robust, make_robust_loss, measure_parts
from nestfed.workbench.stages import Budget, find_best_changes, set_up, sweep_method
from nestfed.workbench.task_options import RobustOptions

PENALTY = 1e-3


def hospitals(seed=0) -> pd.DataFrame:
    """Where the dose helps in two hospitals and harms in the third."""
    random = np.random.default_rng(seed)
    home = np.repeat(["north", "south", "harbour"], (230, 150, 120))
    dose, age = random.normal(size=500).round(4), random.normal(size=500).round(4)
    slope = np.where(home == "harbour", -3.0, 3.0)
    ill = random.random(500) < 1 / (1 + np.exp(-(slope * dose + 0.5 * age)))
    frame = pd.DataFrame(
        {"dose": dose, "age": age, "sex": random.choice(["f", "m"], 500), "hospital": home,
         "ill": np.where(ill, "yes", "no")}
    )  # fmt: skip
    return frame.sample(frac=1, random_state=seed)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "hospitals.csv"
    hospitals().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def scenario(path):
    return Robust(
        RobustOptions(data=str(path), label="ill", clients="hospital", drop=("sex",), batch_size=64, steps=600)
    )


@pytest.fixture(scope="module")
def study(path, tmp_path_factory):
    return nestfed.run(
        "robust", data=str(path), label="ill", clients="hospital", drop=("sex",), batch_size=64, steps=600,
        algorithm=["fedavg", "feddro", "fedavg-co-1", "fedavg-co-2"], evaluations=2, progress=False,
        out=tmp_path_factory.mktemp("runs") / "four",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- metrics


def objective(losses: np.ndarray, divergence: str, strength: float) -> float:
    """The robust objective by its dual: one number to minimise over."""
    bounds = (losses.min() - 2 * max(1, 1 / strength), losses.max())
    dual = {
        "chi-square": lambda c: c + np.mean(np.maximum(losses - c, 0) ** 2) * strength / 2 + 0.5 / strength,
        "cvar": lambda c: c + np.mean(np.maximum(losses - c, 0)) * (1 + strength),
    }
    if divergence == "kl":
        return float(logsumexp(strength * losses) - np.log(losses.size)) / strength
    found: Any = minimize_scalar(dual[divergence], bounds=bounds, method="bounded", options={"xatol": 1e-12})
    return float(found.fun)


def worst_share(losses: np.ndarray, share: float) -> float:
    """The mean of the worst rows; the row at the edge counts in part."""
    number = share * losses.size
    whole = int(number + 1e-9)
    ordered = np.sort(losses)[::-1]
    return float(ordered[:whole].sum() + (number - whole) * ordered[min(whole, losses.size - 1)]) / number


@pytest.mark.parametrize("divergence", ["kl", "chi-square", "cvar"])
@given(seed=st.integers(0, 2**32 - 1), strength=st.sampled_from([0.1, 1.0, 3.0, 9.0]))
@settings(max_examples=25, deadline=None)
def test_metrics_are_those_of_numpy(divergence, seed, strength):
    random = np.random.default_rng(seed)
    rows, clients, groups = 90, 4, 3
    client = np.r_[random.integers(0, clients, rows - 1), 3]
    part = np.where(client == 3, TRAIN, random.integers(0, 3, rows))  # the last client has training rows alone
    group, label = random.integers(0, groups, rows), random.integers(0, 2, rows)
    logit = random.normal(scale=3, size=rows).round(1)  # with ties
    pool = Pool(*map(jnp.asarray, (logit, label, part, group, client)))
    found = measure_parts(pool, ADVERSARIES[divergence](strength=strength), clients, groups)
    loss = np.logaddexp(0, logit) - label * logit
    frame = pd.DataFrame({"loss": loss, "right": (logit > 0) == label, "client": client, "group": group})
    for number, name in enumerate(("train", "validation", "test")):
        inside = part == number
        own: Any = frame[inside]
        expected = {
            "loss": own.loss.mean(),
            "accuracy": own.right.mean(),
            "robust_objective": objective(loss[inside], divergence, strength),
            "worst_decile_loss": worst_share(loss[inside], 0.1),
            "worst_client_loss": own.groupby("client").loss.mean().max(),
            "worst_client_accuracy": own.groupby("client").right.mean().min(),
            "worst_group_loss": own.groupby("group").loss.mean().max(),
            "auroc": roc_auc_score(label[inside], logit[inside]) if label[inside].std() else np.nan,
        }
        for metric, value in expected.items():
            np.testing.assert_allclose(found[f"{name}_{metric}"], value, rtol=1e-7, err_msg=f"{name} {metric}")


def test_the_worst_decile_is_a_cvar_and_strength_nine_is_the_worst_decile():
    losses = np.random.default_rng(0).exponential(size=1000)
    by_dual: Any = minimize_scalar(
        lambda c: c + np.mean(np.maximum(losses - c, 0)) / 0.1, bounds=(0, 20), method="bounded"
    )
    assert worst_share(losses, 0.1) == pytest.approx(by_dual.fun, rel=1e-6)
    adversary = ADVERSARIES["cvar"](strength=9.0)
    assert float(adversary.value(jnp.asarray(losses), jnp.ones(1000))) == pytest.approx(worst_share(losses, 0.1))


def test_the_stronger_the_more_cautious():
    losses = jnp.asarray(np.random.default_rng(0).exponential(size=200))
    for name in ("kl", "chi-square", "cvar"):
        value = jax.jit(lambda strength: ADVERSARIES[name](strength=strength).value(losses, jnp.ones(200)))
        values = [float(value(strength)) for strength in (1e-4, 0.1, 1.0, 10.0, 1e3)]
        assert values[0] == pytest.approx(float(losses.mean()), rel=1e-3)  # hardly any: the mean
        assert values == sorted(values)
        assert values[-1] == pytest.approx(float(losses.max()), rel=0.02)  # all: the worst row


def test_a_part_without_rows_has_no_metrics():
    pool = Pool(jnp.array([1.0, -1.0]), jnp.array([1, 0]), jnp.array([0, 0]), jnp.zeros(2, int), jnp.zeros(2, int))
    found = measure_parts(pool, ADVERSARIES["kl"](strength=1.0), 1, 1)
    assert np.isnan(found["test_worst_decile_loss"]) and np.isfinite(found["train_worst_decile_loss"])
    assert "train_worst_group_loss" not in found


# ------------------------------------------------------------------------------------------------- methods


def training_rows(setup) -> tuple[np.ndarray, np.ndarray]:
    inside = setup.data.part == TRAIN
    inputs = setup.data.inputs[inside].astype(float)
    return np.concatenate([inputs, np.ones((len(inputs), 1))], 1), setup.data.label[inside]


def test_a_run_ends_at_the_robust_optimum_and_the_controls_do_not(scenario, study):
    """The problem is convex: scipy finds the best robust objective there is."""
    inputs, label = training_rows(scenario.set_up(0))

    def value(theta, mean):
        loss = np.logaddexp(0, inputs @ theta) - label * (inputs @ theta)
        return mean(loss) + PENALTY / 2 * theta @ theta

    kl = lambda loss: objective(loss, "kl", 1.0)
    theta = minimize(value, np.zeros(inputs.shape[1]), args=(kl,)).x
    best = kl(np.logaddexp(0, inputs @ theta) - label * (inputs @ theta))
    excess = study.final.set_index("method").train_robust_objective - best
    assert -PENALTY < excess["feddro"] < 0.002
    assert excess["fedavg"] > 20 * excess["feddro"]
    assert excess["fedavg-co-1"] > 4 * excess["feddro"]
    assert excess["fedavg-co-2"] > 2 * excess["feddro"]


def test_metrics_in_training_are_those_of_the_final_state(study):
    last = study.history.groupby("method").last()
    final = study.final.set_index("method")
    shared = [name for name in final if name in last.columns and name not in ("seed", "status")]
    assert {f"test_{name}" for name in ("loss", "robust_objective", "worst_decile_loss", "auroc")} <= set(shared)
    for name in shared:
        np.testing.assert_allclose(last[name], final.loc[last.index, name], rtol=1e-6, err_msg=name)
    assert study.history.projected_share.notna().groupby(study.history.method).any().to_dict() == {
        "fedavg": False, "feddro": True, "fedavg-co-1": False, "fedavg-co-2": False,
    }  # fmt: skip


def test_the_report_shows_the_worst_rows_and_says_what_strength_means(study):
    assert [metric.name for metric in study.record.metrics] == [
        "test_worst_decile_loss", "test_worst_client_loss", "test_loss", "test_accuracy",
    ]  # fmt: skip
    notes = " ".join(study.record.about["notes"])
    assert "the price is 1 / strength = 1." in notes and "the more cautious" in notes
    worth = study.final.set_index("method").train_effective_sample_size
    assert f"FedAvg {100 * worth['fedavg']:.3g} %, FedDRO {100 * worth['feddro']:.3g} %" in notes
    assert worth["feddro"] > worth["fedavg"]  # fewer rows are much worse than the rest
    assert set(study.record.slices.kind) == {"client"}
    page = study.report.read_text()
    assert (
        "FedAvg-CO I (control)" in page and "test loss of the worst decile" in page and "rows of all rows" not in page
    )


def test_seeds_of_a_sweep_have_their_own_rows_and_the_robust_objective_chooses(scenario):
    """Seeds lie in one pool, their clients at other places of it: everybody's rows come back in order."""
    short = scenario.change(steps=10, divergence="cvar")
    trials = sweep_method(
        set_up(short, range(2)), "ds-feddro", {}, {"lr": [0.01, 0.3]}, Budget(evaluations=1), progress=False
    )
    scores = {0.01: 0.0, 0.3: 0.0}
    for trace in trials.traces:
        final, _ = short.evaluate(trials.setups[trace.seed], trace.left)
        for name, values in trace.stages[0].history.items():
            if name in final:
                assert values[-1] == pytest.approx(final[name], rel=1e-6), name
        scores[trace.changes["lr"]] += final["validation_robust_objective"]
    assert find_best_changes(trials) == {"lr": min(scores, key=scores.__getitem__)}
    # The threshold of CVaR is a variable of the problem, and no parameter of the model.
    left = trials.traces[0].left
    theta = short.make_model(trials.first, left).theta
    assert left.server.x.size == sum(leaf.size for leaf in theta[0].values()) + 1


def test_no_row_can_weigh_more_than_the_bound(scenario):
    setup = scenario.set_up(0)
    rows = int((setup.data.part == TRAIN).sum())
    assert make_robust_loss(scenario, setup, None).problem.largest_weight == pytest.approx(rows)
    uniform = scenario.change(averaging="uniform")
    assert make_robust_loss(uniform, setup, None).problem.largest_weight == pytest.approx(
        3 * np.bincount(setup.data.client[setup.data.part == 0]).max()
    )


def test_the_usual_run_needs_no_option():
    request = Request.of({"task": "robust"})
    assert request.methods == ["fedavg", "feddro", "ds-feddro"]
    tuned = {name: list(request.scenario.method(name).stages[0].tuned) for name in request.methods}
    assert tuned == {"fedavg": [], "feddro": ["lr"], "ds-feddro": ["lr"]}  # the score is not what FedAvg minimises
    for seed in range(3):
        setup = request.scenario.set_up(seed)
        rates = [setup.data.label[setup.data.client == k].mean() for k in range(3)]
        assert max(rates) - min(rates) > 0.1  # clients differ
        assert setup.data.group_names == ("all rows",) and "sex=Male" in setup.data.feature_names


@pytest.mark.parametrize("name", ["mbsgd", "fastdro"])
@pytest.mark.parametrize("divergence", ["kl", "chi-square", "cvar"])
def test_baselines_face_the_same_adversary(scenario, name, divergence):
    changed = scenario.change(divergence=divergence, strength=4.0)
    setup = changed.set_up(0)
    (algorithm,) = changed.make_algorithms(name, setup, {})
    assert algorithm.lr == pytest.approx(0.025)
    if name == "fastdro":
        losses = jnp.asarray(np.random.default_rng(0).exponential(size=3 * 64))
        alike = jnp.ones(losses.size)
        np.testing.assert_allclose(
            algorithm.response(losses, alike), changed.adversary.response(losses, alike), atol=1e-9
        )


# ------------------------------------------------------------------------------------------------- the user's table


def test_a_table_without_groups_is_split_at_random(path):
    table = read_table(path, label="ill", clients="hospital")
    plain = federate(table, by_group=False)
    assert plain.group_names == ("all rows",) and set(plain.count_holdings().group) == {"all rows"}
    assert "sex=m" in plain.feature_names
    named = federate(table, group="sex", by_group=False)
    assert set(named.group_names) == {"f", "m"} and "sex=m" not in named.feature_names
    np.testing.assert_array_equal(named.part, plain.part)  # groups are named, and change nothing else
    training = plain.part != TEST
    for client in range(3):
        mine = plain.client == client
        assert (mine & (plain.part == VALIDATION)).sum() == int(0.2 * (mine & training).sum())
    with pytest.raises(UserError, match="no group column is named"):
        federate(table)


def test_own_hospitals_in_one_command(call):
    """One hospital saw no ill patient: no reason to stop. A group column may be given."""
    frame = hospitals()
    frame.loc[frame.hospital == "harbour", "ill"] = "no"
    frame.to_csv("my.csv", index=False)
    Path("my.toml").write_text(
        'task = "robust"\ndata = "my.csv"\nlabel = "ill"\nclients = "hospital"\ndivergence = "cvar"\nstrength = 3\n'
        "steps = 20\nevaluations = 2\n"
    )
    code, out, err = call("run", "my.toml", "--group", "sex", "-a", "fedavg", "-a", "ds-feddro", "--out", "mine")
    assert code == 0, err
    assert "harbour" in out and "test loss of the worst group" in out
    assert "note: The robust objective is the largest mean loss" in out.replace("\n", " ")
    record = Record.load(Path("mine"))
    assert record.settings["strength"] == 3.0 and record.about["baseline"] == "fedavg"
    assert "the worst 25 % of rows: the share is 1 / (1 + strength)" in " ".join(record.about["notes"])
    assert set(record.slices.kind) == {"group", "client"} and set(record.holdings.group) == {"f", "m"}
    assert (record.final.test_worst_decile_loss >= record.final.test_robust_objective).all()  # a tenth, a quarter
    assert (record.final.test_robust_objective >= record.final.test_loss).all()
    model = TabularModel.load("mine/models/ds-feddro-seed0.npz")
    assert np.isfinite(model.probability(frame)).all()


def test_cost_and_lists_know_the_task(call, path):
    methods = [word for name in ("fedavg", "feddro", "ds-feddro", "mbsgd") for word in ("-a", name)]
    code, out, err = call(
        "cost", "robust", "--data", path, "--label", "ill", "--clients", "hospital", "--json", *methods
    )
    assert code == 0, err
    rows = pd.DataFrame(json.loads(out)).set_index("method")
    assert rows.loc["FedDRO", "exchanges"] == 6 and rows.loc["DS-FedDRO", "exchanges"] == 1
    number = jnp.zeros(()).dtype.itemsize
    assert rows.loc["DS-FedDRO", "bytes up"] == rows.loc["FedAvg", "bytes up"] + 2 * number  # a value, an exponent
    assert rows.loc["FedDRO", "bytes up"] == rows.loc["FedAvg", "bytes up"] + 5 * 2 * number
    assert rows.loc["MBSGD", "rounds"] == 2000 and rows.loc["FedDRO", "rounds"] == 400
    assert "robust" in call("list", "tasks")[1]
    described = {row["method"]: row["what it does"] for row in json.loads(call("list", "robust", "--json")[1])}
    assert described["fedavg-co-1"].startswith("Negative control") and described["fedavg-co-2"].startswith("Negative")
    shown = " ".join(call("run", "robust", "--help")[1].replace("│", " ").split())
    assert "Moving weight to bad rows costs 1 / strength; cvar counts the worst 1 / (1 + strength) of rows." in shown


OWN = ["--data", "my.csv", "--label", "ill", "--clients", "hospital"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data", "my.csv", "--label", "il"], "there is no column 'il' for the label (nearest: 'ill')"),
        (["--data", "my.csv"], "without a label"),
        (["--data", "my.csv", "--label", "constant"], "the label 'constant' is 1 in every row"),
        ([*OWN, "--group", "sx"], "there is no column 'sx' for the group (nearest: 'sex')"),
        ([*OWN, "--partition", "iid"], "names a column and partition='iid'"),
        ([*OWN, "--strength", "0"], "strength=0.0 was given"),
        ([*OWN, "--divergence", "chi"], "must be one of 'kl', 'chi-square', 'cvar'"),
        ([*OWN, "-a", "fedbio"], "'fedbio' is no method for the task robust"),
        ([*OWN, "--gap", "1"], "there is no setting 'gap' for the task robust"),
        (["--data", "my.csv", "--label", "ill", "--clients", "room"], "'17' has too few rows for a validation set"),
    ],
)
def test_mistakes_are_one_line(call, words, message):
    room = np.where(np.arange(500) < 1, 17, 1)
    hospitals().assign(constant=1, room=room).to_csv("my.csv", index=False)
    code, _, err = call("run", "robust", *words)
    assert code == 1 and message in err and err.startswith("nestfed: "), (code, err)
    assert len(err.strip().splitlines()) == 1 and not Path("runs").exists()


def test_strengths_are_not_chosen_by_a_score_that_depends_on_them(call, path):
    words = ["--data", path, "--label", "ill", "--clients", "hospital", "-a", "feddro"]
    code, _, err = call("sweep", "robust", *words, "--grid", "strength=1,2")
    assert code == 1 and "strength decides what the score measures" in err and not Path("runs").exists()


def test_an_objective_that_ends_above_its_start_is_no_result(call, tmp_path):
    """Finite, and worse than no training: said in the table, on the page, in JSON and at the exit."""
    words = ["run", "robust", "--data", "german", "-a", "fedavg", "-a", "ds-feddro", "--set", "ds-feddro.lr=3.0",
             "--steps", "200", "--seeds", "2", "--evaluations", "5"]  # fmt: skip
    code, out, err = call(*words, "--out", "astray", "--json")
    assert code == 0, err
    astray = r"DS-FedDRO ended above its start in . of 2 seeds \(training objective\): this is not a result"
    assert re.search(astray, err) and "FedAvg" not in err
    said = json.loads(out)
    counts = {row["method"]: row["above start"] for row in said["headline"]}
    assert counts["fedavg"] == 0 and counts["ds-feddro"] > 0
    note = r"DS-FedDRO, seed .: the training objective \(train_robust_objective\) ended at .* above 0.*not a result"
    assert any(re.search(note, line) for line in said["notes"])
    table = (tmp_path / "astray" / "tables" / "headline.md").read_text()
    assert "above start" in table
    assert "above their start" in (tmp_path / "astray" / "report.html").read_text()


def test_gradients_are_bounded_by_the_clients_mean_lengths(scenario):
    setup = scenario.set_up(0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(setup.theta))  # at the start no row has more weight
    inputs, _ = training_rows(setup)
    client = setup.data.client[setup.data.part == TRAIN]
    lengths = np.linalg.norm(inputs, axis=1)  # of the logit's gradient, (inputs, 1)
    by_client = np.array([lengths[client == k].mean() for k in range(3)])
    np.testing.assert_allclose(setup.gradient_lengths, by_client, rtol=1e-5)
    for averaging, weights in (("samples", np.bincount(client) / client.size), ("uniform", np.full(3, 1 / 3))):
        (algorithm,) = scenario.change(averaging=averaging).make_algorithms("ds-feddro", setup, {})
        assert algorithm.clip == pytest.approx(weights @ by_client, rel=5e-3)  # three digits of it
    (paper,) = scenario.make_algorithms("ds-feddro", setup, {"clip": float("inf")})
    assert paper.clip == float("inf")


def test_what_rises_and_what_does_not():
    rises = lambda *values, **options: find_rise({"loss": np.array(values)}, "loss", **options) is not None
    assert rises(1.0, 0.5, 9.0) and rises(-1.0, -2.0, -0.5) and not rises(1.0, 9.0, 0.5)
    assert not rises(1.0, 1.001) and not rises(1.0) and not rises(1.0, 9.0, output="best")
    assert find_rise({"loss": np.ones(3)}, "other") is None and find_rise({"loss": np.ones(3)}, None) is None
    wild = simulate(make("fedavg", lr=0.6), quadratics(), rounds=20, progress=False)  # (1 - 0.6 x 2.5)^2 > 0: it swings
    tame = simulate(make("fedavg", lr=0.1), quadratics(), rounds=20, progress=False)
    grows = simulate(make("fedavg", lr=1.2), quadratics(), rounds=20, progress=False)
    assert not wild.remarks and not tame.remarks
    assert len(grows.remarks) == 1 and "above" in grows.remarks[0] and "where it began" in grows.remarks[0]
