"""Several devices, and several processes: the numbers of one device, whoever owns a client."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import CASES
from shared import free_port
from spread import THOROUGH, find, find_gaps

pytestmark = pytest.mark.usefixtures("nothing_left_running")
HERE = Path(__file__).parent
DEVICES = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count="


def launch(folder: Path, *names: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "spread.py"), str(folder), *names]
    with (folder / f"{environment.get('NESTFED_TEST_JOIN', 'alone')}.log").open("wb") as log:
        return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)


def launch_processes(folder: Path, number: int, *names: str) -> list[subprocess.Popen[bytes]]:
    address = f"127.0.0.1:{free_port()}"
    return [launch(folder, *names, NESTFED_TEST_JOIN=f"{address},{number},{own}") for own in range(number)]


def check(folder: Path, running: list[subprocess.Popen[bytes]], *names: str) -> None:
    """What they leave is what this process finds meanwhile, on one device."""
    try:
        (folder / "alone").mkdir(exist_ok=True)
        expected = {name: find(folder / "alone", name) for name in names}
        codes = [process.wait(timeout=1500) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    logs = "\n".join(log.read_text(errors="replace")[-3000:] for log in folder.glob("*.log"))
    assert codes == [0] * len(running), logs
    gaps = [gap for name in names for gap in find_gaps(name, dict(np.load(folder / f"{name}.npz")), expected[name])]
    assert not gaps


def test_two_devices_have_the_numbers_of_one(tmp_path):
    names = ["scaffold", "fedmbo", "fedpac"]  # a mean and Local fields, a gather, both; all the others in two processes
    check(tmp_path, [launch(tmp_path, *names, XLA_FLAGS=f"{DEVICES}2")], *names)


def test_processes_go_on_with_each_others_checkpoints(tmp_path):
    find(tmp_path, "round 1")  # in this process alone
    for number in (2, 3):
        check(tmp_path, launch_processes(tmp_path, number, f"round {number}"), f"round {number}")
    assert not find_gaps("round 4", find(tmp_path, "round 4"), find(tmp_path / "alone", "round 4"))


@pytest.mark.slow
def test_every_algorithm_has_the_numbers_of_one_process_in_two(tmp_path):
    check(tmp_path, launch_processes(tmp_path, 2, *CASES), *CASES)


@pytest.mark.slow
def test_whatever_a_run_has_is_the_same_in_three_processes(tmp_path):
    check(tmp_path, launch_processes(tmp_path, 3, *THOROUGH), *THOROUGH)
