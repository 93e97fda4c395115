"""`nestfed deploy local`: all of a deployment on one machine, by the command line and in Python."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from nestfed import workbench
from nestfed.core.settings import UserError
from nestfed.report.record import Record
from nestfed.sites.deployment import run_local
from nestfed.sites.wire import unpack
from nestfed.workbench.schemas import write_draft

SITES = ("north", "south", "west")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Settings of a small table whose rows have an owner, with its schema."""
    folder, random, rows = tmp_path_factory.mktemp("table"), np.random.default_rng(0), 90
    frame = pd.DataFrame(
        {
            "age": random.integers(20, 80, rows),
            "dose": random.normal(size=rows).round(2),
            "ward": random.choice(["a", "b", "c"], rows),
            "sex": random.choice(["f", "m"], rows),
            "hospital": np.repeat(SITES, rows // 3),
        }
    )
    frame["ill"] = np.where(frame.age + 10 * frame.dose + 10 * random.normal(size=rows) > 50, "yes", "no")
    frame.to_csv(folder / "all.csv", index=False)
    write_draft(folder / "all.csv", folder / "schema.toml", label="ill", group="sex", positive="yes", drop=["hospital"])
    return {
        "task": "fairness",
        "data": str(folder / "all.csv"),
        "schema": str(folder / "schema.toml"),
        "clients": "hospital",
    }


def assert_same_study(pooled, sites):
    columns = [name for name in sites.final if name in pooled.final and name not in ("method", "status")]
    assert len(columns) > 10
    assert_allclose(pooled.final[columns].to_numpy(float), sites.final[columns].to_numpy(float), atol=2e-6)
    for key, model in pooled.models.items():
        jax.tree.map(lambda a, b: assert_allclose(a, b, atol=2e-6), model.theta, sites.models[key].theta)


def test_sites_end_where_a_run_on_their_joined_rows_ends(table, tmp_path):
    settings = {**table, "algorithm": ["fedbio"], "rounds": 2, "evaluations": 2}  # a method of two stages
    pooled = workbench.run(**settings, out=tmp_path / "pooled", progress=False, tune=False)
    said = []
    sites = run_local(settings, engine="direct", out=tmp_path / "sites", progress=False, say=said.append)
    assert said[0] == "3 sites on this machine, letters carried by direct"
    assert_same_study(pooled, sites)
    record = Record.load(tmp_path / "sites")
    assert record.methods == ["fedbio"] and (tmp_path / "sites" / "report.html").stat().st_size > 10_000
    assert len(record.slices) == len(record.holdings) == 0  # nothing is told of a single site
    with pytest.raises(UserError, match="holds a run already"):
        run_local(settings, engine="direct", out=tmp_path / "sites", progress=False)


def test_what_cannot_be_deployed_is_refused(table, tmp_path):
    with pytest.raises(UserError, match="a model for each client"):
        run_local({**table, "task": "personal"}, engine="direct", out=tmp_path / "a")
    with pytest.raises(UserError, match="--engine post was given"):
        run_local(table, engine="post", out=tmp_path / "b")


def read_round(folder):
    files = list(folder.glob("checkpoints/*.run"))
    return max((unpack(file.read_bytes()).header["round"] for file in files), default=0)


def start_command(table, out, *more):
    words = [sys.executable, "-c", "from nestfed.cli import main; main()"]
    options = [f"--{name}={table[name]}" for name in ("data", "schema", "clients")]
    how = ["--algorithm=scaffold", "--rounds=150", "--evaluations=1", "--engine=direct", f"--out={out}"]
    return subprocess.Popen(
        [*words, "deploy", "local", "fairness", *options, *how, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
    )


def wait_for_round(process, out, number):
    deadline = time.monotonic() + 120
    while read_round(out) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_running")
def test_interrupted_and_killed_coordinators_leave_nothing_running_and_lose_no_round(table, tmp_path):
    """Ctrl-C says how to go on. After a kill nobody can, and the sites' processes end by themselves all the same."""
    out = tmp_path / "sites"
    process = start_command(table, out)
    wait_for_round(process, out, 3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted. Go on with: nestfed deploy local fairness" in error and "--resume" in error
    assert list_marked(tmp_path) == []
    done = read_round(out)
    process = start_command(table, out, "--resume")
    wait_for_round(process, out, done + 3)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while list_marked(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert read_round(out) >= done + 3
    settings = {**table, "algorithm": ["scaffold"], "rounds": 150, "evaluations": 1}
    sites = run_local(settings, engine="direct", out=out, resume=True, progress=False)
    pooled = workbench.run(**settings, out=tmp_path / "pooled", progress=False, tune=False)
    assert_same_study(pooled, sites)


def list_marked(tmp_path):
    """Processes that descend from this test."""
    mark, found = f"NESTFED_TEST_MARK={tmp_path}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):  # Linux only
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return [name for name in found if int(name) != os.getpid()]


def test_masks_of_two_sites_are_refused_before_anything_starts(tmp_path):
    settings = {"task": "fairness", "algorithm": ["fedavg"], "rounds": 1}
    said: list[str] = []
    with pytest.raises(UserError, match="with 2 sites; a sum of two gives each away"):
        run_local(
            settings, sites=2, engine="direct", masked=True, out=tmp_path / "sites", progress=False, say=said.append
        )
    assert said == []
