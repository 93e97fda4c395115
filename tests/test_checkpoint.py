"""Long runs: killed, interrupted, resumed, diverged. A resumed run ends bit-identical to one that was left alone."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TASKS, regression
from shared import wait_for

from nestfed import Diverged, Interrupted, make, simulate, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.algorithms.fedbio import FedBiO
from nestfed.report.record import Record
from nestfed.verbs import simulation
from nestfed.verbs.checkpoints import CheckpointError

HERE = Path(__file__).parent
ALGORITHM = make("scaffold", lr=0.02, local_steps=2)

# A run of its own process, slow enough to be caught in the middle: `evaluate_every` has it look up often.
PROGRAM = """
import sys, time, jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from cases import regression
from nestfed import make, simulate
simulate(make("scaffold", lr=0.02, local_steps=2), regression((5, 9, 7)), 4, rounds=int(sys.argv[2]), cohort=2,
         dropout=0.1, evaluate_every=10, output="average", checkpoint=sys.argv[1], checkpoint_every=50, resume=True,
         progress=False)
"""
ROUNDS = 30_000
OPTIONS = {"rounds": ROUNDS, "cohort": 2, "dropout": 0.1, "evaluate_every": 10, "output": "average"}


def launch(path, rounds=ROUNDS):
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        PROGRAM,
        str(path),
        str(rounds),
        jax.config.jax_compilation_cache_dir,
    ]
    return subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True, env=os.environ)


def assert_identical(one, other):
    for a, b in zip(jax.tree.leaves(one.run), jax.tree.leaves(other.run), strict=True):
        assert np.array_equal(a, b)
    assert one.history.keys() == other.history.keys()
    for name in one.history:
        assert np.array_equal(one.history[name], other.history[name])
    assert np.array_equal(one.participants, other.participants)


@pytest.fixture(scope="module")
def undisturbed():
    return simulate(ALGORITHM, regression((5, 9, 7)), 4, **OPTIONS)


def test_killed_run_resumes_bit_identical(tmp_path, undisturbed):
    path = tmp_path / "run.npz"
    process = launch(path)
    wait_for(path, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = np.load(path)["history/participants"].size
    assert 0 < done < ROUNDS, "the run was over before it was killed"
    resumed = simulate(ALGORITHM, regression((5, 9, 7)), 4, **OPTIONS, checkpoint=path, resume=True)
    assert_identical(resumed, undisturbed)
    assert not list(tmp_path.glob(".*")), "nothing else is left behind"


def test_interrupt_leaves_a_valid_checkpoint(tmp_path, undisturbed):
    path = tmp_path / "run.npz"
    process = launch(path)
    wait_for(path, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "interrupted after round" in errors and "resume=True" in errors
    resumed = simulate(ALGORITHM, regression((5, 9, 7)), 4, **OPTIONS, checkpoint=path, resume=True)
    assert_identical(resumed, undisturbed)


def test_interrupt_without_a_checkpoint_gives_the_result_so_far():
    once = []

    def interrupt(task, server, client, data, fed):
        if not once:  # while the program is traced
            once.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    with pytest.raises(Interrupted, match="interrupted after round") as caught:
        simulate(ALGORITHM, regression((5, 5)), rounds=10_000, metrics=interrupt)
    assert 0 < int(caught.value.result.run.round) < 10_000


@pytest.fixture
def finished(tmp_path):
    path = tmp_path / "run.npz"
    simulate(ALGORITHM, regression((5, 5)), rounds=3, checkpoint=path)
    return path


def test_finished_run_is_not_run_again(finished):
    before = finished.stat().st_mtime_ns
    with pytest.raises(CheckpointError, match="exists.*resume=True"):
        simulate(ALGORITHM, regression((5, 5)), rounds=3, checkpoint=finished)
    again = simulate(ALGORITHM, regression((5, 5)), rounds=3, checkpoint=finished, resume=True)
    assert again.history["round"].tolist() == [0, 1, 2, 3]
    assert finished.stat().st_mtime_ns >= before
    longer = simulate(ALGORITHM, regression((5, 5)), rounds=5, checkpoint=finished, resume=True)
    assert_identical(longer, simulate(ALGORITHM, regression((5, 5)), rounds=5))


@pytest.mark.parametrize("damage", ["truncated", "not ours", "empty"])
def test_damaged_checkpoint_is_one_clear_error_and_left_alone(finished, damage):
    whole = finished.read_bytes()
    if damage == "truncated":
        finished.write_bytes(whole[: len(whole) // 2])
    elif damage == "not ours":
        with finished.open("wb") as file:
            np.savez(file, weights=np.zeros(3))
    else:
        finished.write_bytes(b"")
    damaged = finished.read_bytes()
    with pytest.raises(CheckpointError, match="not a complete nestfed checkpoint.*left as it is"):
        simulate(ALGORITHM, regression((5, 5)), rounds=3, checkpoint=finished, resume=True)
    assert finished.read_bytes() == damaged


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"algorithm": make("scaffold", lr=0.03, local_steps=2)}, "another run.*algorithm.*lr=0.02.*lr=0.03"),
        ({"task": regression((5, 6))}, "another run.*the task .*differs"),
        ({"seed": 1}, "another run.*seed"),
        ({"cohort": 1}, "another run.*cohort"),
        ({"rounds": 2}, "3 rounds already"),
    ],
)
def test_foreign_checkpoint_is_one_clear_error_and_left_alone(finished, other, words):
    given = {"algorithm": ALGORITHM, "task": regression((5, 5)), "seed": 0, "rounds": 3} | other
    before = finished.read_bytes()
    with pytest.raises(CheckpointError, match=words):
        simulate(
            given.pop("algorithm"), given.pop("task"), given.pop("seed"), **given, checkpoint=finished, resume=True
        )
    assert finished.read_bytes() == before


# ------------------------------------------------------------------------------------------------- divergence


def test_divergence_names_round_field_and_client_and_saves_the_last_finite_state(tmp_path):
    """Client 1 has inputs so large that its gradient overflows first."""
    task = regression((6, 6, 6))
    inputs, targets = (np.array(c) for c in task.data.columns)
    inputs[6:12] *= 1e100
    task = dataclasses.replace(task, data=dataclasses.replace(task.data, columns=(inputs, targets)))
    path = tmp_path / "run.npz"
    with pytest.raises(
        Diverged, match="diverged in round .*x became non-finite, first at client 1.*smaller step"
    ) as caught:
        simulate(make("fedavg", lr=0.1, local_steps=2), task, rounds=50, checkpoint=path)
    error = caught.value
    assert (error.field, error.client) == ("x", 1)
    assert int(error.result.run.round) == error.round
    assert np.all(np.isfinite(error.result.server.x))
    assert str(path) in str(error)
    last_finite = (
        simulate(make("fedavg", lr=0.1, local_steps=2), task, rounds=max(error.round, 1)) if error.round else None
    )
    if last_finite is not None:
        assert np.array_equal(last_finite.server.x, error.result.server.x)


def test_divergence_of_a_local_field_is_told():
    @struct
    class Spoils(FedBiO):
        def step(self, problem, s, draw, fed):
            s = super().step(problem, s, draw, fed)
            return s._replace(y=jnp.where(fed.t >= 3, jnp.nan, s.y))

    algorithm = Spoils(lr=0.05, lower_lr=0.1, local_steps=2)
    with pytest.raises(Diverged, match="round 1, local step 1: y became non-finite") as caught:
        simulate(algorithm, TASKS["local bilevel"](), rounds=5)
    assert (caught.value.round, caught.value.field, caught.value.client) == (1, "y", None)  # all clients alike
    assert np.all(np.isfinite(caught.value.result.clients.y))


def test_non_finite_start_is_told():
    @struct
    class Bad(FedAvg):
        def init(self, problem, params, draw, fed):
            return self.State(params[0] / 0.0)

    with pytest.raises(Diverged, match="starts from a non-finite x"):
        simulate(Bad(lr=0.1), regression((5, 5)), rounds=1)


def test_a_divergence_that_does_not_show_again_is_reported_and_stops_nobody_else(monkeypatch, call, tmp_path):
    """Another program adds up in another order: what overflowed by a hair may stay finite when it is repeated."""
    repeated = lambda inputs, step, call, index, states, cohort: (states, jnp.ones(cohort.slot.size, bool))
    monkeypatch.setattr(simulation, "_watch_step", repeated)
    words = "diverged in round 0: .* did not show again when the round was repeated"
    with pytest.raises(Diverged, match=words) as caught:
        simulate(make("fedavg", lr=1e200, local_steps=3), regression(), rounds=5, progress=False)
    assert (caught.value.round, caught.value.client) == (0, None) and np.isfinite(caught.value.result.server.x).all()
    words = ["run", "fairness", "--data", "german", "-a", "fedavg", "-a", "fedprox", "--set", "fedprox.lr=1e30"]
    code, _, err = call(*words, "--steps", "20", "--seeds", "2", "--out", "run", "--quiet")
    assert code == 3 and "FedProx diverged in every seed" in err
    final = Record.load(tmp_path / "run").final
    assert (final[final.method == "fedavg"].status == "finished").all() and len(final) == 4
