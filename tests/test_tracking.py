"""What a run tells trackers: to objects of one's own, MLflow's file store, TensorBoard's event files, W&B offline."""

import json
import struct
import sys

import numpy as np
import pytest

import nestfed
from nestfed.core.settings import UserError
from nestfed.problems import toys

SMALL = {"data": "german", "algorithm": ["fedavg", "fedbio"], "steps": 20, "evaluations": 2, "progress": False}
pytestmark = pytest.mark.usefixtures("undrawn")


class Notebook(nestfed.Tracker):
    """Writes down all that it hears."""

    def __init__(self):
        self.heard = []

    def begin(self, name, folder, settings):
        self.heard.append(("begin", name, settings))

    def evaluate(self, evaluation):
        self.heard.append(("evaluate", evaluation))

    def finish(self, study):
        self.heard.append(("finish", study))

    def close(self, status):
        self.heard.append(("close", status))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run that tells everybody at once: (what was heard, the study)."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("told")
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder / 'mlruns'}")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        listener = Notebook()
        track = [listener, "mlflow", "tensorboard", "wandb"]
        study = nestfed.run("fairness", out=folder / "run", track=track, set={"model.lr": 0.2}, **SMALL)
    return listener.heard, study, folder


def test_a_tracker_of_ones_own_hears_everything(told):
    heard, study, _ = told
    kinds = [kind for kind, *_ in heard]
    assert kinds == ["begin", *["evaluate"] * (len(heard) - 3), "finish", "close"]
    assert heard[0][1] == "run" and heard[0][2]["set.model.lr"] == 0.2 and heard[0][2]["data"] == "german"
    assert heard[-1][1] == "finished" and heard[-2][1] is study
    rows = {(one.method, one.stage, one.round): one for kind, one in heard[1:-2]}
    for row in study.history.to_dict("records"):
        metrics = rows.pop((row["method"], row["stage"], row["round"])).metrics
        shared = [name for name in metrics if name in row]
        assert len(shared) > 10
        np.testing.assert_array_equal([metrics[name] for name in shared], [row[name] for name in shared])
    assert not rows


def test_a_simulation_that_goes_on_tells_everything_again(tmp_path):
    heard = []
    options = nestfed.Options(checkpoint=tmp_path / "run.npz", resume=True, progress=False)
    watch = lambda round, metrics: heard.append((round, float(metrics["loss"])))
    run = lambda rounds: nestfed.simulate(
        nestfed.make("fedavg", lr=0.1, local_steps=2), toys.quadratics(), 0, options, rounds=rounds, watch=watch
    )
    run(2)
    before = heard.copy()
    history = run(4).history
    assert [round for round, _ in before] == [0, 1, 2]
    assert heard == [*before, *zip(range(5), history["loss"].tolist(), strict=True)]


def test_mlflow_has_curves_settings_results_and_files(told, monkeypatch):
    import mlflow

    _, study, folder = told
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file:{folder / 'mlruns'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "nestfed"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"run", "run fedavg-seed0", "run fedbio-seed0"}
    assert all(run.info.status == "FINISHED" for run in runs.values())
    assert runs["run"].data.params["set.model.lr"] == "0.2"
    own = study.history[(study.history.method == "fedbio") & study.history.train_eqopp.notna()]
    curve = client.get_metric_history(runs["run fedbio-seed0"].info.run_id, "train_eqopp")
    assert [(m.step, m.value) for m in curve] == list(zip(own["round"], own["train_eqopp"], strict=True))
    final = study.final.set_index("method").test_accuracy
    assert runs["run fedavg-seed0"].data.metrics["final/test_accuracy"] == final["fedavg"]
    assert runs["run"].data.metrics["fedbio/test_accuracy"] == final["fedbio"]
    assert {file.path for file in client.list_artifacts(runs["run"].info.run_id)} >= {"report.html", "models"}


def test_tensorboard_reads_the_event_files(told):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, study, _ = told
    events = EventAccumulator(str(study.folder / "tensorboard" / "fedbio-seed0")).Reload()
    own = study.history[(study.history.method == "fedbio") & study.history.train_eqopp.notna()]
    assert [event.step for event in events.Scalars("train_eqopp")] == own["round"].tolist()
    np.testing.assert_allclose([event.value for event in events.Scalars("train_eqopp")], own.train_eqopp, rtol=1e-6)
    whole = EventAccumulator(str(study.folder / "tensorboard" / "run")).Reload()
    texts = [whole.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in whole.Tags()["tensors"]]
    assert any("| set.model.lr | 0.2 |" in text for text in texts) and any("FedBiO" in text for text in texts)


def records_of(path):
    """The records of a file that W&B writes offline: blocks of 32 KiB, pieces with their length and place."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, place = struct.unpack("<HB", data[at + 4 : at + 7])
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if place in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


def values_of(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_writes_a_group_of_runs_offline(told):
    _, study, _ = told
    runs = {}
    for path in (study.folder / "wandb").glob("offline-run-*/*.wandb"):
        records = list(records_of(path))
        (name,) = {one.run.display_name for one in records if one.HasField("run")}
        runs[name] = records
    assert set(runs) == {"run report", "run fedavg-seed0", "run fedbio-seed0"}
    rows = [values_of(one.history.item) for one in runs["run fedbio-seed0"] if one.HasField("history")]
    own = study.history[(study.history.method == "fedbio") & study.history.train_eqopp.notna()]
    assert [(row["round"], row["train_eqopp"]) for row in rows] == list(zip(own["round"], own.train_eqopp, strict=True))
    said = {key: value for one in runs["run report"] for key, value in values_of(one.summary.update).items()}
    assert said["fedavg/test_accuracy"] == study.final.set_index("method").test_accuracy["fedavg"]


@pytest.mark.parametrize(
    "word, package", {"mlflow": "mlflow-skinny", "tensorboard": "tensorboardX", "wandb": "wandb"}.items()
)
def test_a_missing_package_is_one_line_before_training(word, package, call, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(word, word), None)  # as if not installed
    code, _, problem = call("run", "fairness", "--data", "german", "--track", word, "--out", "runs/a")
    assert code == 1 and f"needs the package {package}" in problem and len(problem.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_store_that_cannot_be_used_is_one_line_before_training(call, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at/all")
    code, _, problem = call("run", "fairness", "--data", "german", "--track", "mlflow", "--out", "runs/a")
    assert code == 1 and "nowhere://at/all cannot be used" in problem and len(problem.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_unknown_trackers_and_those_that_fail(call, tmp_path):
    code, _, problem = call("run", "fairness", "--data", "german", "--track", "mlfow")
    assert code == 1 and "use 'mlflow', 'tensorboard', 'wandb'" in problem
    (tmp_path / "my.toml").write_text('data = "german"\ntrack = "mlfow"\n')
    assert call("run", "my.toml") == (code, "", problem)

    class Refusing(Notebook):
        def evaluate(self, evaluation):
            raise UserError("no more.")

    refusing = Refusing()
    with pytest.raises(UserError, match="no more"):
        nestfed.run("fairness", out=tmp_path / "run", track=refusing, **{**SMALL, "algorithm": "fedavg"})
    assert refusing.heard[-1] == ("close", "failed")
