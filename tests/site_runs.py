"""For tests of frameworks: what answers letters at sockets, and runs of the table of algorithms over a link."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import psutil
from cases import CASES, TASKS
from numpy.testing import assert_allclose
from site_worker import SIZES, Case

from nestfed import simulate
from nestfed.engine.options import Options
from nestfed.sites.coordinator import Coordinator, Roll, Run
from nestfed.sites.link import Link, listen_at, receive_bytes, send_bytes
from nestfed.sites.worker import Leg


class Echo:
    """In place of a worker: answers with its name and the letter; hangs up at the letter b"die"."""

    def __init__(self, path: Path, name: str):
        self.name, self.listener = name.encode(), listen_at(path)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        deadline = time.monotonic() + 60
        with connection, contextlib.suppress(OSError):
            letter = receive_bytes(connection, deadline)
            if letter != b"die":
                send_bytes(connection, self.name + letter, deadline)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@contextlib.contextmanager
def run_workers(folder: Path, sockets: Mapping[str, Path]) -> Iterator[None]:
    """A worker with JAX at each of these sockets."""
    processes = []
    for name, path in sockets.items():
        (folder / f"{name}-store").mkdir(exist_ok=True)
        words = [sys.executable, Path(__file__).parent / "site_worker.py", folder / f"{name}-store", path, "64"]
        processes.append(subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, env=dict(os.environ)))
    try:
        for process in processes:
            assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()


def check_equal_to_simulation(link: Link, sites: list[str], name: str, file: Path, rounds: int = 2) -> None:
    """Some rounds over the link end where `simulate` does."""
    case, options, built = CASES[name], Options(rounds=rounds, evaluate_every=rounds), Case({})
    simulated = simulate(case.algorithm(name), TASKS[case.task](SIZES), 0, options, progress=False)
    run, leg = Run(f"run-{name}", {}, None, 0, tuple(sites)), Leg(method=name, seed=0, stage=0, changes={})
    algorithm = built.make_algorithms(name, {})[0]
    central = Coordinator(Roll(link, sites), run, leg, algorithm, built.task(name), options, file=file)
    result = central.train(progress=False)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-9, atol=1e-11), simulated.server, result.position.server)
    assert result.participants.tolist() == [len(sites)] * rounds


def find_processes(root: psutil.Process, what: str) -> list[psutil.Process]:
    """Descendants whose command line has this, keepers excepted."""
    found = []
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if what in " ".join(process.cmdline()) and "nestfed.sites.keeper" not in process.cmdline():
                found.append(process)
    return found
