"""Runs from a name to a folder: what is written, resumed, compared, refused; from Python and from the command line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from shared import wait_for
from sklearn.metrics import roc_auc_score

import nestfed
from nestfed import cli, workbench
from nestfed.report.record import Record
from nestfed.workbench.request import Request
from nestfed.workbench.scenario import Scenario
from nestfed.workbench.scenarios import tabular
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.scenarios.tabular import TabularModel, compute_area_under_roc
from nestfed.workbench.task_options import FairnessOptions

BYTES = jnp.zeros(()).dtype.itemsize  # of a number
SMALL = {"data": "german", "steps": 20, "evaluations": 4}
FLAGS = ["--data", "german", "--steps", "20", "--evaluations", "4"]
pytestmark = pytest.mark.usefixtures("undrawn")  # but the fixture `study` draws: it is made before


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "two"
    return nestfed.run(
        "fairness", algorithm=["fedavg", "fedbio"], seeds=2, out=folder, progress=False, set={"model.lr": 0.2}, **SMALL
    )


# ------------------------------------------------------------------------------------------------- run


def test_a_run_leaves_everything(study):
    files = {path.name for path in study.folder.iterdir()}
    assert files >= {
        "settings.toml", "about.json", "cost.json", "history.parquet", "final.parquet", "slices.parquet",
        "holdings.parquet", "report.html", "figures", "tables", "models", "checkpoints",
    }  # fmt: skip
    about = json.loads((study.folder / "about.json").read_text())
    assert about["seeds"] == [0, 1] and about["status"] == "finished"
    assert set(about["versions"]) >= {"python", "nestfed", "jax", "numpy"}
    assert {p.suffix for p in (study.folder / "figures").iterdir()} == {".png", ".svg"}
    assert all(p.stat().st_size > 1000 for p in (study.folder / "figures").iterdir())
    assert {p.suffix for p in (study.folder / "tables").iterdir()} == {".csv", ".md", ".tex"}
    assert study.figures and study.report.exists()


def test_history_counts_rounds_bytes_and_work_through_the_stages(study):
    one = study.history[(study.history.method == "fedbio") & (study.history.seed == 0)]
    assert one.stage.tolist() == ["weights"] * 5 + ["model"] * 5
    assert one["round"].tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    # German Credit: 4 groups with two weights and a price each; features and a bias. Three clients, up and down.
    features = study.model("fedavg").theta[0]["weight"].size + 1
    each = 3 * 2 * BYTES
    expected = [each * 12 * r for r in range(5)] + [each * (4 * 12 + features * r) for r in range(5)]
    assert one.bytes.tolist() == expected
    assert (np.diff(one.oracle_calls) >= 0).all() and one.oracle_calls.iloc[-1] > one.oracle_calls.iloc[4] > 0


def test_final_numbers_are_those_of_the_models(study):
    final = study.final.set_index(["method", "seed"])
    assert len(final) == 4 and (final.status == "finished").all()
    table = nestfed.data.load("german")
    model = study.model("fedbio", 1)
    federated = nestfed.data.federate(table, seed=1)
    test = federated.part == 2
    predicted = model.probability(table.frame)[test] > 0.5
    assert (predicted == federated.label[test]).mean() == pytest.approx(final.loc[("fedbio", 1), "test_accuracy"])
    loaded = TabularModel.load(study.folder / "models" / "fedbio-seed1.npz")
    np.testing.assert_array_equal(loaded.probability(table.frame), model.probability(table.frame))
    with pytest.raises(nestfed.UserError, match="no final model of 'fedbio' and seed 7"):
        study.model("fedbio", 7)


def test_a_record_comes_back_from_its_folder(study):
    record = Record.load(study.folder)
    pd.testing.assert_frame_equal(record.history, study.history)
    assert record.settings["set"] == {"model.lr": 0.2} and record.methods == ["fedavg", "fedbio"]
    again = Request.of(record.settings)
    assert again.settings() == record.settings
    assert again.command() == record.about["command"]


def test_the_command_of_a_record_repeats_its_settings(study, monkeypatch):
    seen = {}
    monkeypatch.setattr(cli, "_run", lambda settings, **_: seen.update(settings))
    monkeypatch.setattr(sys, "argv", study.record.about["command"].split())
    with pytest.raises(SystemExit):
        cli.main()
    assert Request.of(seen).settings() == study.record.settings


def test_resume_changes_nothing_and_other_settings_are_refused(study):
    with pytest.raises(nestfed.UserError, match="holds a run already"):
        nestfed.run("fairness", out=study.folder, **SMALL)
    settings = tomllib.loads((study.folder / "settings.toml").read_text())
    with pytest.raises(nestfed.UserError, match="other settings .*steps"):
        nestfed.run(**(settings | {"steps": 30}), out=study.folder, resume=True)
    again = nestfed.run(**settings, out=study.folder, resume=True, progress=False)
    pd.testing.assert_frame_equal(again.final, study.final)
    pd.testing.assert_frame_equal(again.history, study.history)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    """A real process, a real Ctrl-C: exit code 130, a line that says how to go on, and the same numbers in the end."""
    program = Path(sys.executable).with_name("nestfed")
    words = "run fairness -a fedavg --data german --seeds 4 --steps 20000 --evaluations 5 --no-tune --quiet".split()
    process = subprocess.Popen(
        [program, *words, "--out", "cut"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    wait_for(tmp_path / "cut" / "checkpoints" / "fedavg-seed1-model.npz", process)  # two more seeds are to come
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, (process.returncode, err)
    assert "nestfed run cut/settings.toml --resume" in err and "Traceback" not in err
    done = subprocess.run(
        [program, "run", "cut/settings.toml", "--resume", "--quiet"], cwd=tmp_path, capture_output=True, text=True,
        timeout=300, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cut/report.html"
    cut = Record.load(tmp_path / "cut")
    assert cut.final.seed.tolist() == [0, 1, 2, 3] and (cut.final.status == "finished").all()
    whole = subprocess.run([program, *words, "--out", "whole"], cwd=tmp_path, timeout=300, env=os.environ)
    assert whole.returncode == 0
    pd.testing.assert_frame_equal(cut.history, Record.load(tmp_path / "whole").history)


def test_divergence_is_reported_and_has_an_exit_code(call):
    code, out, err = call("run", *FLAGS, "-a", "fedavg", "--set", "lr=1e30", "--out", "wild")
    assert code == 3 and "FedAvg diverged in every seed" in err
    record = Record.load(Path("wild"))
    assert record.about["status"] == "diverged" and record.final.status.tolist() == ["diverged"]
    assert "diverged" in Path("wild/report.html").read_text()


# ------------------------------------------------------------------------------------------------- other verbs


def test_sweep_chooses_by_validation_and_says_how_to_run_the_choice(call):
    code, out, err = call(
        "sweep", *FLAGS, "-a", "fedavg", "--grid", "lr=0.001,0.5,1e30", "--seeds", "2", "--json", "--out", "s"
    )
    assert code == 0, err
    result = json.loads(out)
    table = pd.DataFrame(result["settings"])
    usable = table[table.diverged == 0]
    assert result["best"] == {"lr": float(usable.loc[usable.score.idxmin(), "lr"])}
    assert table.diverged.tolist()[-1] == 2 and table.lr.tolist()[-1] == 1e30
    assert tomllib.loads(Path("s/best.toml").read_text())["set"] == result["best"]
    assert Path("s/sweep.png").exists() and Path("s/sweep.csv").exists()
    code, out, err = call("run", "s/best.toml", "--quiet", "--out", "best")
    assert code == 0 and out.strip() == "best/report.html", err


def test_sweep_over_two_stages(call):
    code, out, err = call(
        "sweep", *FLAGS, "-a", "fedbio", "--grid", "lower_lr=0.1,1", "--grid", "model.lr=0.1,1", "--out", "s"
    )
    assert code == 0, err
    assert "run the best one: nestfed run fairness --algorithm fedbio" in out
    assert len(pd.read_csv("s/sweep.csv")) == 4


def test_compare_pairs_runs_by_seed(study, call):
    code, _, err = call("run", *FLAGS, "-a", "fedreg", "-a", "fedavg", "--seeds", "2", "--quiet", "--out", "other")
    assert code == 0, err
    code, out, err = call("compare", study.folder, "other", "--json", "--out", "both")
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out)["headline"]}
    assert set(rows) == {"fedavg (two)", "fedbio", "fedreg", "fedavg (other)"}
    assert rows["fedavg (other)"]["test_accuracy pairs"] == rows["fedreg"]["test_accuracy pairs"] == 2
    mine, other = (
        Record.load(Path(f)).final.query("method == 'fedavg'").set_index("seed") for f in (study.folder, "other")
    )
    difference = (other.test_accuracy - mine.test_accuracy).mean()
    assert rows["fedavg (other)"]["test_accuracy difference"] == pytest.approx(difference)
    assert Path("both/report.html").exists()
    code, _, err = call("compare", study.folder)
    assert code == 1 and "at least two folders" in err


def test_report_is_written_again(study, call):
    study.report.unlink()
    code, out, _ = call("report", study.folder)
    assert code == 0 and Path(out.strip()) == study.report and study.report.exists()
    code, _, err = call("report", "nowhere")
    assert code == 1 and err.startswith("nestfed: there is no folder nowhere")


def test_cost_shows_every_method(call):
    code, out, _ = call("cost", "fairness", "--data", "german", "--objective", "paper", "--json")
    assert code == 0
    rows = pd.DataFrame(json.loads(out)).set_index(["method", "stage"])
    assert rows.loc[("FedBiO", "weights"), "bytes up"] == 4 * BYTES  # four groups
    assert rows.loc[("FedBiOAcc", "weights"), "bytes up"] == 8 * BYTES
    assert rows.loc[("FCFL", "model"), "bytes up"] == 2 * rows.loc[("FedAvg", "model"), "bytes up"] + 2 * BYTES
    assert rows.loc[("FedMinMax", "model"), "samples"] > 200  # all rows of a client, not a batch
    assert rows.loc[("FedMinMax", "model"), "rounds"] == 2000


def test_lists(call):
    assert "fedbioacc" in call("list")[1]
    assert "fairness" in call("list", "tasks")[1]
    assert "adult" in call("list", "data")[1]
    assert {row["setting"] for row in json.loads(call("list", "fcfl", "--json")[1])} >= {"lr", "tolerance"}


# ------------------------------------------------------------------------------------------------- own data, mistakes


def table(rows=240, seed=0):
    random = np.random.default_rng(seed)
    sex = random.choice(["f", "m"], rows)
    age = random.integers(18, 90, rows).astype(float)
    age[::17] = np.nan
    income = np.where(random.normal(size=rows) + (age > 45) + (sex == "m") > 1, "high", "low")
    region = random.choice(["north", "south", "east"], rows)
    return pd.DataFrame(
        {"age": age, "job": random.choice(list("abc"), rows), "sex": sex, "region": region, "income": income}
    )


@pytest.mark.parametrize("data", ["my.csv", "sites/*.parquet"])
def test_own_data_in_one_command(call, data, tmp_path):
    Path("sites").mkdir()
    table().to_csv("my.csv", index=False)
    for region, rows in table().groupby("region"):
        rows.drop(columns="region").to_parquet(f"sites/{region}.parquet", index=False)
    clients, column = (["--clients", "region"], "region") if data == "my.csv" else ([], "file")
    code, out, err = call(
        "run", "--data", data, "--label", "income", "--positive", "high", "--group", "sex", *clients,
        "--steps", "20", "--evaluations", "4", "--out", "mine",
    )  # fmt: skip
    assert code == 0, err
    assert column in out and "client" in out and "mine/report.html" in out  # the summary comes first
    holdings = Record.load(Path("mine")).holdings
    assert set(holdings.client) == {"north", "south", "east"} and set(holdings.group) == {"f", "m"}
    assert holdings.rows.sum() == 240
    model = TabularModel.load("mine/models/fedavg-seed0.npz")
    new = pd.DataFrame({"age": [50, None], "job": ["a", "never seen"]})
    assert np.isfinite(model.probability(new)).all()
    with pytest.raises(nestfed.UserError, match="column 'age' holds '80y'"):
        model.probability(new.assign(age=["80y", 50]))
    assert "positive means income = high" in out
    os.chdir("/")  # the settings name the file for good
    assert call("run", tmp_path / "mine" / "settings.toml", "--resume", "--quiet")[0] == 0


def test_a_folder_of_files_can_be_dealt_anew_and_a_pattern_belongs_in_quotes(call):
    Path("sites").mkdir()
    for region, rows in table().groupby("region"):
        rows.drop(columns="region").to_csv(f"sites/{region}.csv", index=False)
    roles = {"label": "income", "positive": "high", "group": "sex"}
    _, held = workbench.describe_data(data="sites/", clients="4", **roles)[-1]
    assert held["client"].tolist() == ["client 1", "client 2", "client 3", "client 4"]
    assert "/sites/*.csv' --label" in Request.of({"data": "sites/*.csv", **roles}).command()
    code, _, err = call("run", "--data", "sites/east.csv", "sites/north.csv", "sites/south.csv", "--label", "income")
    assert code == 1 and err.startswith("nestfed: 3 files were given") and "--data 'sites/*.csv'" in err
    code, _, err = call("run", "--data", "sites")
    assert code == 1 and "unknown data 'sites'" in err and "your folder is sites/" in err


def test_a_run_reads_its_data_and_its_settings_once(call, monkeypatch):
    """Though the data are shown before training begins."""
    table().to_csv("my.csv", index=False)
    read, asked = tabular.read_table, Request.of
    seen = []
    monkeypatch.setattr(tabular, "read_table", lambda *given, **roles: [seen.append("data"), read(*given, **roles)][1])
    monkeypatch.setattr(Request, "of", lambda settings: [seen.append("settings"), asked(settings)][1])
    words = "--label income --positive high --group sex --clients region -a fedavg -a fedreg --seeds 2 --steps 5"
    code, out, err = call("run", "fairness", "--data", "my.csv", *words.split(), "--out", "mine")
    assert code == 0 and "positive means income = high" in out, err
    assert seen == ["settings", "data"]


MISTAKES = {
    "no such column": (["--label", "incme", "--group", "sex"], "there is no column 'incme'"),
    "no label": ([], "without a label"),
    "one group": (["--label", "income", "--group", "constant"], "one group only"),
    "constant label": (["--label", "constant", "--group", "sex"], "constant"),
    "no group": (["--label", "income"], "without a group"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_own_data_are_one_line(call, name):
    words, message = MISTAKES[name]
    table().assign(constant=1).to_csv("my.csv", index=False)
    code, out, err = call("run", "--data", "my.csv", *words)
    assert code == 1 and message in err and len(err.strip().splitlines()) == 1, err
    assert not Path("runs").exists()  # nothing is left behind
    assert call("run", "--data", "my.csv", *words, "--quiet")[0] == 1 and not Path("runs").exists()


def test_a_client_without_positives_is_named(call):
    frame = table()
    frame.loc[frame.region == "east", "income"] = "low"
    frame.to_csv("my.csv", index=False)
    code, _, err = call(
        "run", "--data", "my.csv", "--label", "income", "--positive", "high", "--group", "sex", "--clients", "region"
    )
    assert code == 1 and "'east'" in err and "positive" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "fairnes"], "there is no task 'fairnes'; did you mean 'fairness'?"),
        (["run", "-a", "fedbyo"], "'fedbyo' is no method for the task fairness; did you mean 'fedbio'?"),
        (["run", *FLAGS, "--set", "lrr=1"], "fedavg has no setting 'lrr'; did you mean 'lr'?"),
        (["run", *FLAGS, "--set", "lr"], "write key=value"),
        (["run", *FLAGS, "--set", "lr=-1"], "lr=-1 was given"),
        (["run", *FLAGS, "--set", "fcfl.lr=1"], "'fcfl' is not among"),
        (["run", "--data", "adlt"], "adult"),
        (["run", "--data", "nowhere.csv", "--label", "a", "--group", "b"], "nowhere.csv"),
        (["run", *FLAGS, "--partition", "fair"], "fair"),
        (["run", *FLAGS, "--model", "transformer"], "model='transformer' was given"),
        (["run", *FLAGS, "--features", "raw"], "raw"),
        (["run", *FLAGS, "--cohort", "7"], "cohort=7, but the task has 3 clients"),
        (["run", *FLAGS, "--rounds", "0"], "rounds=0 was given"),
        (["run", *FLAGS, "--seeds", "few"], "--seeds few was given"),
        (["run", "missing.toml"], "there is no file missing.toml"),
        (["run", "--resume"], "--resume was given without --out"),
        (["run", *FLAGS, "--clients", "hosing"], "there is no column 'hosing'"),
        (["run", *FLAGS, "--clients", "housing", "--partition", "iid"], "names a column and partition='iid'"),
        (["run", *FLAGS, "--drop", "agee"], "there is no column 'agee'"),
        (["run", *FLAGS, "--label", "clas"], "there is no column 'clas'"),
        (["run", *FLAGS, "--output", "first"], "output='first' was given"),
        (["sweep", *FLAGS, "--grid", "lr=1"], "a sweep is of one method"),
        (["sweep", *FLAGS, "-a", "fedavg"], "a sweep needs a grid"),
        (["sweep", *FLAGS, "--grid", "lr"], "write key=value"),
        (["reproduce", "fairnes"], "there is no experiment 'fairnes'; did you mean 'fairness'?"),
    ],
)
def test_mistakes_are_one_line(call, words, message):
    code, out, err = call(*words)
    assert code == 1 and message in err and err.startswith("nestfed: "), (code, err)
    assert len(err.strip().splitlines()) == 1


def test_toml_says_all_that_flags_say_and_flags_win(call, monkeypatch):
    Path("my.toml").write_text(
        'task = "fairness"\nalgorithm = ["fedbio"]\ndata = "german"\nclients = 4\nbatch_size = 16\n[set]\nlr = 0.3\n'
        "[set.model]\nlr = 0.7\n"
    )
    seen = {}
    monkeypatch.setattr(cli, "_run", lambda settings, **_: seen.update(settings))
    assert call("run", "my.toml", "--set", "lower_lr=0.9", "--clients", "5", "--no-keep-group")[0] == 0
    request = Request.of(seen)
    assert request.changes("fedbio") == {"lr": 0.3, "model.lr": 0.7, "lower_lr": 0.9}
    assert request.options == {"data": "german", "clients": "5", "batch_size": 16, "keep_group": False}
    monkeypatch.undo()


@pytest.mark.parametrize(
    "content, message",
    [
        ('algoritm = "fedavg"', "there is no setting 'algoritm' for the task fairness; did you mean 'algorithm'?"),
        ("seeds = ", "is not a readable TOML file"),
        ("batch_sise = 3", "did you mean 'batch_size'?"),
        ("seeds = 2.5", "seeds=2.5 was given; it must be a whole number or a list"),
        ("algorithm = 3", "'3' is no method"),
        ('set = ["lr=0.1"]', "it must be a table"),
        ("task = 3", "there is no task '3'"),
        ('threshold = "50"', "it must be a number"),
    ],
)
def test_wrong_toml_is_one_line(call, content, message):
    Path("my.toml").write_text(content)
    code, _, err = call("run", "my.toml")
    assert code == 1 and message in err


def test_what_is_said_of_one_method_wins():
    request = Request.of({"algorithm": ["FedAvg", "FedBiO"], "set": {"fedbio": {"lr": 1.0}, "lr": 0.1}, "seeds": [7]})
    assert request.methods == ["fedavg", "fedbio"]
    assert request.changes("fedbio") == {"lr": 1.0} and request.changes("fedavg") == {"lr": 0.1}
    assert "--seeds 7, " in request.command()


def test_output_rules_and_rounds_reach_the_last_stage(tmp_path):
    study = nestfed.run(
        "fairness", algorithm="fedavg", rounds=4, output="best", out=tmp_path / "best", progress=False, data="german"
    )
    seen = study.history.outer_loss
    assert study.final.outer_loss[0] == pytest.approx(seen.min(), rel=1e-5)
    scenario = Request.of({"rounds": 50, "data": "german"}).scenario
    (fcfl,) = scenario.method("fcfl").stages
    assert fcfl.settings(scenario, scenario.set_up(0))["stage_one_steps"] == 20


def test_a_model_that_never_says_yes_is_not_called_fair(tmp_path):
    study = nestfed.run(
        "fairness", data="german", algorithm="fedavg", steps=5, out=tmp_path / "no", progress=False,
        set={"lr": 1e-6}, penalty=0.0, features="minimax-fair-raw", seeds=[1],
    )  # fmt: skip
    blind = study.final.test_predicted_positive[0] == 0
    assert blind == any("for no test row at all" in note for note in study.record.about["notes"])
    frame = study.final.assign(test_predicted_positive=0.0)
    assert "FedAvg: a seed's model predicts" in Fairness().list_warnings(frame)[0]
    assert repr(study).startswith("Study(")


def test_area_under_roc_against_scikit_learn():
    random = np.random.default_rng(0)
    label, scores = random.integers(0, 2, 200), random.integers(0, 20, 200)  # with ties
    assert compute_area_under_roc(scores, label) == pytest.approx(roc_auc_score(label, scores))
    assert np.isnan(compute_area_under_roc(scores, np.zeros(200, int)))


def test_clients_by_a_column_of_known_data_and_the_weights_found(tmp_path):
    study = nestfed.run(
        "fairness", data="german", clients="housing", algorithm="fedbio", objective="paper", steps=10, evaluations=2,
        progress=False, out=tmp_path / "housing",
    )  # fmt: skip
    assert set(study.record.holdings.client) == {"A151", "A152", "A153"}
    weights = study.history[[name for name in study.history if name.startswith("weight of ")]].dropna()
    assert weights.shape[1] == 4 and np.allclose(weights.mean(axis=1), 1)


def test_sweep_reaches_numbers_of_the_task(tmp_path):
    search = workbench.sweep(
        "fairness",
        algorithm="fedavg",
        grid={"penalty": [0.0, 10.0], "lr": [0.1]},
        out=tmp_path / "s",
        progress=False,
        **SMALL,
    )
    losses = search.table.set_index("penalty").train_loss
    assert losses[0.0] != losses[10.0] and search.best["penalty"] == search.table.penalty[0]
    assert f"--penalty {search.best['penalty']}" in search.command


def test_the_shell_completes_commands():
    program = Path(sys.executable).with_name("nestfed")
    asked = {"_NESTFED_COMPLETE": "complete_bash", "COMP_WORDS": "nestfed re", "COMP_CWORD": "1"}
    shown = subprocess.run([program], capture_output=True, text=True, timeout=60, env=os.environ | asked)
    assert shown.stdout.split() == ["report", "reproduce"]


def test_a_scenario_that_lacks_a_part_cannot_be_made():
    @dataclasses.dataclass(frozen=True)
    class Half(Scenario):
        def set_up(self, seed):
            return None

    with pytest.raises(TypeError, match="abstract methods? .*count_holdings.*evaluate.*make_model.*summarise"):
        Half(FairnessOptions())
