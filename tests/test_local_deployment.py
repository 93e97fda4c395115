"""`nestfed deploy local` on NVIDIA FLARE, as a user types it: what it leaves, and that it leaves nothing running."""

import json
import signal
import subprocess
import time

import numpy as np
import pandas as pd
import pytest
import tomli_w
from numpy.testing import assert_allclose

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left_running")]


@pytest.fixture
def settings(tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"age": random.normal(50, 10, 240), "sex": random.choice(["f", "m"], 240)})
    frame["ill"] = np.where(frame.age + random.normal(0, 5, 240) > 50, "yes", "no")
    frame["clinic"] = random.choice(["a", "b", "c"], 240)
    frame.to_csv(tmp_path / "all.csv", index=False)
    table = {"data": str(tmp_path / "all.csv"), "label": "ill", "positive": "yes", "group": "sex", "clients": "clinic"}
    how = {"task": "fairness", "algorithm": "fedavg", "seeds": 1, "tune": False}
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(table | how))
    return tmp_path / "settings.toml"


def start(tmp_path, settings, *more):
    words = ["nestfed", "deploy", "local", str(settings), "--engine", "flare", "--out", str(tmp_path / "run"), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_interrupted_it_leaves_nothing_running_and_goes_on(tmp_path, settings):
    process = start(tmp_path, settings, "--rounds", "400")
    deadline = time.monotonic() + 200
    while not list((tmp_path / "run" / "checkpoints").glob("*.run")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in said and "Traceback" not in said


def test_it_ends_where_the_simulation_ends(tmp_path, settings):
    said, _ = start(tmp_path, settings, "--rounds", "3", "--quiet").communicate(timeout=300)
    run = tmp_path / "run"
    assert (run / "report.html").exists(), said
    schema = run / "schema.toml"
    subprocess.run(
        [
            "nestfed",
            "run",
            str(settings),
            "--rounds",
            "3",
            "--schema",
            str(schema),
            "--out",
            str(tmp_path / "simulated"),
        ],
        check=True,
        capture_output=True,
    )
    deployed, simulated = (
        {**np.load(folder / "models" / "fedavg-seed0.npz")} for folder in (run, tmp_path / "simulated")
    )
    assert json.dumps(sorted(deployed)) == json.dumps(sorted(simulated))
    for name, value in simulated.items():
        if np.issubdtype(value.dtype, np.floating):
            assert_allclose(deployed[name], value, rtol=1e-5, atol=1e-6)
