"""The keeper: what it runs is started again when it ends, and nothing of its tree is left when it stops."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nestfed.sites.keeper import keep

# A process with a child in a session of its own that ignores everything but a kill: both write who they are.
STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path

CHILD = "import signal as s, time; [s.signal(n, s.SIG_IGN) for n in (s.SIGTERM, s.SIGHUP, s.SIGINT)]; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
if len(sys.argv) > 2:
    sys.exit(7)
time.sleep(600)
"""


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def read_starts(path: Path) -> list[list[int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(word) for word in line.split()] for line in lines]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def command(tmp_path):
    return [sys.executable, "-c", STUBBORN, str(tmp_path / "starts")]


def test_stopping_ends_the_whole_tree(tmp_path, command):
    kept = keep(command, tmp_path / "log")
    wait_until(lambda: read_starts(tmp_path / "starts"))
    [pids] = read_starts(tmp_path / "starts")
    assert alive(pids) == pids
    kept.stop()
    assert not alive(pids) and not kept.running


def test_what_is_killed_is_started_again_without_its_leftovers(tmp_path, command):
    kept = keep(command, tmp_path / "log")
    try:
        wait_until(lambda: read_starts(tmp_path / "starts"))
        [first] = read_starts(tmp_path / "starts")
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: len(read_starts(tmp_path / "starts")) == 2)
        assert not alive(first)
        assert "ended with -9; it is started again" in kept.read_end_of_log()
    finally:
        kept.stop()


def test_without_again_the_exit_code_is_that_of_the_command(tmp_path, command):
    kept = keep([*command, "end"], tmp_path / "log", again=False)
    assert kept.process.wait(20) == 7
    kept.stop()
    [pids] = read_starts(tmp_path / "starts")
    assert not alive(pids)


@pytest.mark.parametrize("how", ["the keeper is asked to end", "its parent is killed"])
def test_nothing_is_left(tmp_path, command, how):
    parent = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from nestfed.sites.keeper import keep
        kept = keep({command!r}, Path({str(tmp_path / "log")!r}))
        print(kept.process.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        keeper = int(process.stdout.readline())
        wait_until(lambda: read_starts(tmp_path / "starts"))
        [pids] = read_starts(tmp_path / "starts")
        os.kill(process.pid if "parent" in how else keeper, signal.SIGKILL if "parent" in how else signal.SIGTERM)
        wait_until(lambda: not alive([*pids, keeper]))
        process.kill()
