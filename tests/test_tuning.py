"""Tuning: step sizes chosen before a run by validation rows, on tables of any scale, and what a run keeps of it."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w

from nestfed.report.record import Record
from nestfed.workbench import commands, tuning
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.stages import Budget, run_method, set_up
from nestfed.workbench.task_options import FairnessOptions
from nestfed.workbench.tuning import estimate_seconds, tune

pytestmark = pytest.mark.usefixtures("undrawn")
FLAGS = ["--steps", "60", "--evaluations", "2", "--clients", "2", "-a", "fedavg", "--batch-size", "16"]


def make_table(scale: float) -> pd.DataFrame:
    random = np.random.default_rng(0)
    inputs, group = random.normal(size=(300, 2)), random.choice(["a", "b"], 300)
    label = inputs @ [2.0, -1.0] + random.normal(size=300) > 0
    return pd.DataFrame({"x": inputs[:, 0] * scale, "z": inputs[:, 1] * scale, "group": group, "label": label})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tuning") / "table.csv"
    make_table(1.0).to_csv(path, index=False)
    return str(path)


def prepare(path: str, seeds: int = 2, **options):
    chosen = FairnessOptions(
        data=path, label="label", group="group", clients="2", steps=60, batch_size=16, penalty=0.0, **options
    )
    return set_up(Fairness(chosen), range(seeds))


@pytest.fixture(scope="module")
def trials(path):
    return prepare(path)


def test_what_is_chosen_is_better_than_what_is_recommended_where_that_is_bad(trials):
    """A step size a thousand times too small is found out, by the score on validation rows of full runs."""
    scenario = trials.scenario
    score = lambda lr: np.mean(
        [
            scenario.score(scenario.evaluate(trials.setups[seed], trace.left)[0])
            for seed in trials.setups
            for made in [scenario.make_algorithms("fedavg", trials.first, {"lr": lr})]
            for trace in [run_method(trials, "fedavg", made, seed, Budget(evaluations=1), progress=False)]
        ]
    )
    said = []
    found = tune(trials, {"fedavg": {}}, Budget(), progress=False, say=said.append)["fedavg"]["lr"]
    assert found["recommended"] == 0.1 and found["chosen"] in found["tried"] and len(found["tried"]) >= 6
    assert score(found["chosen"]) < score(0.001)
    assert said == [f"tuned FedAvg: {tuning.describe({'lr': found})}"]


def test_a_table_of_any_scale_needs_no_flag(tmp_path):
    """Columns in millions, not standardised: the recommended step size is far too large."""
    make_table(1e6).to_csv(tmp_path / "large.csv", index=False)
    trials = prepare(str(tmp_path / "large.csv"), features="minimax-fair-raw")
    scenario, budget = trials.scenario, Budget(evaluations=1)
    run = lambda changes: run_method(
        trials, "fedavg", scenario.make_algorithms("fedavg", trials.first, changes), 0, budget, progress=False
    )
    assert run({}).rise is not None
    found = tune(trials, {"fedavg": {}}, budget, progress=False)["fedavg"]["lr"]
    assert found["chosen"] < 1e-4 * found["recommended"]
    tuned = run({"lr": found["chosen"]})
    assert tuned.rise is None and scenario.evaluate(trials.first, tuned.left)[0]["test_accuracy"] > 0.8


def test_what_is_given_is_not_tuned_and_a_larger_run_is_estimated_to_take_longer(trials):
    assert tune(trials, {"fedavg": {"lr": 0.2}}, Budget(), progress=False) == {}
    estimate = lambda given, rounds=None: estimate_seconds(trials, given, Budget(rounds=rounds))
    assert estimate({"fedavg": {"lr": 0.2}}) == 0 < estimate({"fedavg": {}}) < estimate({"fedavg": {}}, 10_000)
    # Two methods whose first stages are one search: it is paid once.
    personal = Request.of({"task": "personal", "data": "german", "clients": "2"})
    own = set_up(personal.scenario, [0])
    alone, both = (
        estimate_seconds(own, {name: {} for name in names}, Budget())
        for names in (["fedavg-tuned"], ["fedavg", "fedavg-tuned"])
    )
    assert alone == both


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "not tuned: it would take about"),
        (["--tune", "--privacy", "local", "--clip", "1", "--noise-multiplier", "1"], "would spend privacy"),
    ],
)
def test_a_run_says_why_it_does_not_tune(call, path, words, message):
    code, out, err = call("run", "fairness", "--data", path, "--label", "label", "--group", "group", *FLAGS, *words)
    assert code == 0, err
    assert message in out.replace("\n", " ")
    (folder,) = Path("runs").iterdir()
    assert "tuned" not in Record.load(folder).about


def test_a_choice_is_kept_with_the_run_and_never_made_again(call, path, monkeypatch):
    table = ["--data", path, "--label", "label", "--group", "group"]
    words = ["run", "fairness", *table, *FLAGS, "--seeds", "2", "--tune", "--out", "a"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "tuning first, by outer_loss: about" in out and "tuned FedAvg: lr" in out and "chosen settings" in out
    record = Record.load(Path("a"))
    lr = record.about["tuned"]["fedavg"]["lr"]["chosen"]
    assert record.settings["set"] == {"fedavg.lr": lr} and record.settings["tune"] is False
    assert f"lr {lr:g} (" in Path("a/report.html").read_text()

    monkeypatch.setattr(commands, "tune", lambda *_, **__: pytest.fail("tuned again"))
    # A kill after the choice and before its settings were written: the words of before go on.
    before = Request.of({"task": "fairness", **record.settings, "set": None, "tune": True})
    for settings in (tomllib.loads(Path("a/settings.toml").read_text()), before.settings()):
        Path("a/settings.toml").write_text(tomli_w.dumps(settings))
        code, out, err = call(*words, "--resume", "--json")
        assert code == 0, err
        assert json.loads(out)["tuned"] == record.about["tuned"]
        pd.testing.assert_frame_equal(Record.load(Path("a")).final, record.final)
    # The settings alone repeat the run elsewhere.
    code, out, err = call("run", "a/settings.toml", "--quiet", "--out", "b")
    assert code == 0, err
    pd.testing.assert_frame_equal(Record.load(Path("b")).final, record.final)


def test_a_sweep_does_not_tune(call, path):
    code, _, err = call("sweep", "fairness", "-a", "fedavg", "--grid", "lr=0.1,1", "--tune", "--data", path)
    assert code == 1 and "a sweep is a search itself" in err


@pytest.mark.parametrize(
    "gains, chosen",
    [
        ([0.05, 0.04, 0.06], 0.3),  # clear, and worth it
        ([0.009, 0.010, 0.011], 0.1),  # clear, but 1 % alone
        ([0.15, 0.01, 0.02], 0.1),  # large in the mean, but by one seed
    ],
)
def test_a_value_replaces_what_is_recommended_where_it_is_clearly_and_much_better(gains, chosen):
    scores = {0.1: np.ones(3), 0.3: 1 - np.array(gains), 1.0: np.full(3, np.inf)}
    assert tuning._prefer(scores, 0.1) == chosen
