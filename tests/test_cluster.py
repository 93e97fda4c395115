"""One run in several processes: how they are started and watched, and what ends them all."""

import functools
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from shared import free_port, wait_for

from nestfed import UserError
from nestfed.report.record import Record
from nestfed.workbench import cluster
from nestfed.workbench.task_options import ClusterOptions

pytestmark = pytest.mark.usefixtures("nothing_left_running")
HERE = Path(__file__).parent


# ------------------------------------------------------------------------------------------------- who ends whom


def members(folder: Path) -> dict[int, int]:
    """Process ids of the members by their numbers."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(e.split(b"=", 1) for e in (process / "environ").read_bytes().split(b"\0") if b"=" in e)
        except OSError:
            continue
        if environment.get(b"NESTFED_TEST_MARK") == str(folder).encode() and b"NESTFED_JOIN" in environment:
            found[int(environment[b"NESTFED_JOIN"].split(b",")[0])] = int(process.name)
    return found


def watch(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "endless.py"), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)


def watch_by_hand(folder: Path) -> list[subprocess.Popen[str]]:
    """Two members at work, each watched by a process of its own, as on two machines."""
    path, address = folder / "run.npz", f"127.0.0.1:{free_port()}"
    watchers = [watch(str(path), f"coordinator={address}", "processes=2", f"process_id={i}") for i in range(2)]
    wait_for(path, watchers[0])
    return watchers


def ends_of(watchers: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """(exit code, what it said) of each, within these seconds."""
    end = time.monotonic() + seconds
    told = [(w.communicate(timeout=max(0.1, end - time.monotonic())), w.returncode) for w in watchers]
    return [(code, error) for (_, error), code in told]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others_with_one_line_each(tmp_path, victim):
    watchers = watch_by_hand(tmp_path)
    os.kill(members(tmp_path)[victim], signal.SIGKILL)
    ends = ends_of(watchers, 10 * 2)  # two seconds on an idle machine
    assert [code for code, _ in ends] == [1, 1]
    assert ends[victim][1].startswith(f"nestfed: process {victim} was ended by SIGKILL. The run has ended; --resume")
    assert ends[1 - victim][1].startswith(f"nestfed: process {1 - victim} lost the others: a process has ended"), ends
    assert all(error.count("\n") == 1 for _, error in ends)


@pytest.mark.slow
def test_whoever_loses_its_watcher_ends(tmp_path):
    watchers = watch_by_hand(tmp_path)
    watchers[1].kill()
    (code, error), _ = ends_of(watchers, 20)
    assert code == 1 and "lost the others" in error


def test_a_process_that_does_not_answer_ends_the_others_after_the_heartbeat(tmp_path):
    path = tmp_path / "run.npz"
    watcher = watch(str(path), "processes=2")
    wait_for(path, watcher)
    os.kill(members(tmp_path)[1], signal.SIGSTOP)
    ((code, error),) = ends_of([watcher], 60)
    assert code == 1 and error.startswith("nestfed: process 1 did not answer.") and error.count("\n") == 1


def test_ctrl_c_at_one_machine_stops_all_after_the_same_round(tmp_path):
    watchers = watch_by_hand(tmp_path)
    watchers[1].send_signal(signal.SIGINT)
    ends = ends_of(watchers, 60)
    assert [code for code, _ in ends] == [130, 130]
    done = np.load(tmp_path / "run.npz")["history/participants"].size
    assert f"interrupted after round {done} of" in ends[0][1]


# ------------------------------------------------------------------------------------------------- the command line


def nestfed(*words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from nestfed.cli import main; main()", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment)


SMALL = ("-a", "fedavg", "--data", "german", "--steps", "10", "--evaluations", "1", "--partition", "iid")
PAGE = (HERE.parent / "docs" / "cluster.md").read_text(encoding="utf-8")


def job_of_a_free_port() -> int:
    """JAX makes the coordinator's port of the job's number."""
    return free_port(random.sample(range(61440, 65536), 50)) - 61440


def under_srun(job: int, own: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(own), "SLURM_LOCALID": "0"}  # fmt: skip


def under_mpirun(job: int, own: int) -> dict[str, str]:
    return {"OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(own), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # fmt: skip


def commands_of_page(start: str) -> list[list[str]]:
    """The words after `nestfed` of the lines of the page that begin so."""
    lines = [
        line.partition("   #")[0] for line in PAGE.splitlines() if line.startswith(start) and "--resume" not in line
    ]
    return [shlex.split(line)[shlex.split(line).index("nestfed") + 1 :] for line in lines]


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory):
    """The folder that one process leaves, made once for all that are compared with it."""

    @functools.cache
    def run(tuned: str) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "alone"
        words = ("run", "robust", "--clients", "12", *SMALL, tuned, "--quiet", "--out", str(folder))
        assert nestfed(*words).communicate(timeout=500)[0] == f"{folder / 'report.html'}\n"
        return folder

    return run


@pytest.mark.parametrize(
    "how",
    [
        "here",
        pytest.param("srun", marks=pytest.mark.slow),
        pytest.param("by hand", marks=pytest.mark.slow),
        pytest.param("mpirun", marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_page_leave_the_files_of_one_process(tmp_path, how, run_alone):
    if how == "here":
        commands = [line for line in commands_of_page("nestfed") if line[-2:] == ["--processes", "2"]]
        environments = [{}]
    elif how == "by hand":
        address = f"127.0.0.1:{free_port()}"
        lines = [line for line in commands_of_page("nestfed") if "--coordinator" in line]
        commands = [[address if word == "node1:9955" else word for word in line] for line in lines]
        environments = [{}, {}]
    else:
        job, of = job_of_a_free_port(), {"srun": under_srun, "mpirun": under_mpirun}[how]
        commands, environments = commands_of_page(how) * 2, [of(job, own) for own in range(2)]
    assert len(commands) == len(environments)
    tuned = "--tune" if how == "mpirun" else "--no-tune"
    several = tmp_path / "several"
    to = (*SMALL, tuned, "--quiet", "--out", str(several))
    together = [nestfed(*words, *to, **e) for words, e in zip(commands, environments, strict=True)]
    told = [run.communicate(timeout=500) for run in together]
    assert [out for out, _ in told if out] == [f"{several / 'report.html'}\n"], told
    alone = run_alone(tuned)
    numbers = lambda folder: Record.load(folder).history.select_dtypes("number")
    pd.testing.assert_frame_equal(numbers(alone), numbers(several), rtol=1e-4)
    files = lambda folder: sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert files(alone) == files(several)


def test_a_differing_setting_is_refused_with_one_line(tmp_path):
    job, out = job_of_a_free_port(), ("--out", str(tmp_path / "run"))
    words = lambda lr: ("run", "fairness", *SMALL, *out, "--set", f"lr={lr}")
    runs = [nestfed(*words(lr), **under_mpirun(job, own)) for own, lr in enumerate(("0.1", "0.2"))]
    told = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    line = "nestfed: process 1 does not run what process 0 runs (set: {'lr': 0.2} there, {'lr': 0.1} in process 0); "
    assert told[0] == ("", line + "start all alike.\n")
    assert told[1][1].startswith("nestfed: process 1 ") and told[1][1].count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coordinator": "node1:99"}, "give --processes .* and --process-id"),
        ({"coordinator": "node1", "processes": 2, "process_id": 0}, "write host:port"),
        ({"coordinator": "node1:99", "processes": 2, "process_id": 2}, "numbered from 0"),
        ({"process_id": 1}, "without --coordinator"),
        ({"processes": 0}, "at least 1"),
    ],
)
def test_processes_that_make_no_sense_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        cluster.lead(ClusterOptions(**options))
