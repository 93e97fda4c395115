"""Rounds between sites: what a framework costs, on this machine with real processes, keys and TLS.

For each engine (NVIDIA FLARE, Flower, and no framework: Unix sockets alone) three sites, one after the other:

start    from nothing to the first letters answered
empty    a letter of 100 bytes to every site, answered by a process without JAX; before and after the rounds
feddro   rounds of FedDRO (an exchange for each step), fedavg of FedAvg (one exchange): five features, a few rows
million  rounds of FedAvg with a million float32 parameters

and, with --sites 20, ten rounds of FedAvg at twenty sites with the memory of all processes. Medians after the first
round, which compiles. "x empty" is the ratio to an empty exchange of the same run: machines are shared.

    python benchmarks/deployment.py --engine flare            # minutes; flower takes ten
    python benchmarks/deployment.py --engine flare --sites 20
"""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import nestfed
from nestfed.engine.options import Options
from nestfed.problems import Compositional, SingleLevel
from nestfed.sites.coordinator import Coordinator, Roll, Run
from nestfed.sites.engines import open_link, start_relay
from nestfed.sites.kits import find_free_port, make_kits
from nestfed.sites.link import LoopbackLink, listen_at, receive_bytes, send_bytes
from nestfed.sites.wire import unpack
from nestfed.sites.worker import Leg, Worker, serve
from nestfed.verbs.messages import select_client

ROWS, FEATURES, MILLION = 40, 5, 1_000_000
RESULTS = Path(__file__).parent / "results" / "deployment.json"


@nestfed.struct
class Logistic(SingleLevel):
    def loss(self, x, batch, key):
        inputs, labels = batch
        return jnp.mean(jnp.logaddexp(0.0, -labels * (inputs @ x)))


@nestfed.struct
class Robust(Compositional):
    """The logarithm of the mean over all clients of exponentials of losses."""

    def inner(self, x, batch, key):
        inputs, labels = batch
        return jnp.mean(jnp.exp(jnp.logaddexp(0.0, -labels * (inputs @ x))))[None]

    def outer(self, y, batch, key):
        return jnp.log(y[0])


class Party:
    """The tasks of a site, or those of the server where `number` is None."""

    def __init__(self, sites, number=None):
        self.sites, self.number = sites, number

    def tell(self, sums):
        raise AssertionError("these tasks need no sums")

    def prepare(self, sums):
        return self

    def make_algorithms(self, method, changes):
        settings = {"feddro": {"lr": 0.1, "beta": 0.5, "local_steps": 4}}.get(method, {"lr": 0.1, "local_steps": 2})
        return [nestfed.make("feddro" if method == "feddro" else "fedavg", **settings)]

    def task(self, method, stage=0, before=None):
        columns, rows = (MILLION, 8) if method == "million" else (FEATURES, ROWS)
        random = np.random.default_rng(0)
        inputs = random.standard_normal((self.sites, rows, columns), np.float32)
        if self.number is not None:  # a million columns of other sites would only take memory
            inputs = inputs[self.number : self.number + 1]
        labels = np.sign(inputs[..., 0]).astype(np.float32)
        owners = np.repeat(np.arange(len(inputs)), rows)
        data = nestfed.Rows.from_table((inputs.reshape(-1, columns), labels.reshape(-1)), owners)
        problem = Robust() if method == "feddro" else Logistic()
        task = nestfed.Task.create(problem, data, np.zeros(columns, np.float32), batch_size=4)
        if self.number is None:
            return task
        ids = np.asarray([self.number], np.int32)
        return select_client(dataclasses.replace(task, data=dataclasses.replace(task.data, ids=ids)), 0)

    def leave(self, task, server, client=None):
        return None


def echo(path: Path) -> socket.socket:
    """Answers letters with themselves, in this process."""
    listener = listen_at(path)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    send_bytes(connection, receive_bytes(connection, time.monotonic() + 60), time.monotonic() + 60)

    threading.Thread(target=answer, daemon=True).start()
    return listener


@contextlib.contextmanager
def run_echoes(paths: dict[str, Path]) -> Iterator[None]:
    listeners = [echo(path) for path in paths.values()]
    try:
        yield
    finally:
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@contextlib.contextmanager
def run_workers(folder: Path, paths: dict[str, Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    words = lambda number, name: ["--worker", folder / f"{name}-store", paths[name], number, len(paths)]
    processes = [
        subprocess.Popen([sys.executable, __file__, *map(str, words(number, name))], stdout=subprocess.PIPE)
        for number, name in enumerate(paths)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Watch:
    """A link that keeps the times of its tickets."""

    def __init__(self, link):
        self.link, self.tickets = link, []

    def ask(self, letters, timeout):
        head = unpack(next(iter(letters.values()))).header
        began = time.perf_counter()
        yield from self.link.ask(letters, timeout)
        if head["kind"] == "ticket":
            self.tickets.append((int(head["round"]), began, time.perf_counter()))

    def close(self):
        self.link.close()


def measure_empty(link, sites, number: int) -> float:
    times = []
    for _ in range(number):
        began = time.perf_counter()
        answers = dict(link.ask({site: os.urandom(100) for site in sites}, 300.0))
        assert all(isinstance(answer, bytes) for answer in answers.values()), answers
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_rounds(link, sites, method: str, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of a round and of an exchange, and how far the end is from the simulation's."""
    watch, party = Watch(link), Party(len(sites))
    algorithm, task = party.make_algorithms(method, {})[0], party.task(method)
    options = Options(rounds=rounds, evaluate_every=None)
    run, leg = Run(f"run-{method}", {}, None, 0, tuple(sites)), Leg(method=method, seed=0, stage=0, changes={})
    central = Coordinator(Roll(watch, sites), run, leg, algorithm, task, options, file=folder / f"{method}.run")
    result = central.train(progress=False)
    simulated = nestfed.simulate(algorithm, task, 0, options, progress=False).server
    pairs = zip(jax.tree.leaves(simulated), jax.tree.leaves(result.position.server), strict=True)
    gap = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    begins = {}
    for number, began, _ in watch.tickets:
        begins.setdefault(number, began)
    marks = [begins[number] for number in sorted(begins) if number >= 1]
    exchanges = [end - began for number, began, end in watch.tickets if number >= 1]
    return {
        "round_s": statistics.median(b - a for a, b in zip(marks, marks[1:], strict=False)),
        "exchange_s": statistics.median(exchanges),
        "exchanges_per_round": len(exchanges) / len(marks),
        "gap_to_simulate": gap,
    }


def add_up_memory(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / 2**20


def list_tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def measure(engine: str, number: int, rounds: int) -> dict[str, float | str | dict]:
    sites = [f"site-{k + 1}" for k in range(number)]
    with tempfile.TemporaryDirectory(prefix="nestfed-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        paths = {site: folder / f"{site}.sock" for site in sites}
        relays = {}
        began = time.perf_counter()
        with run_echoes(paths):
            if engine == "direct":
                link = LoopbackLink(paths)
            else:
                make_kits(folder / "kits", sites, engine, port=find_free_port())
                for site in sites:
                    relays[site] = start_relay(folder / "kits" / site, engine, paths[site])
                    stack.callback(relays[site].stop)
                link = open_link(folder / "kits")
            stack.callback(link.close)
            measure_empty(link, sites, 1)
            said = {"engine": engine, "sites": number, "start_s": time.perf_counter() - began}
            repetitions = 3 if engine == "flower" else 30  # seconds each there
            before = measure_empty(link, sites, repetitions)
            print(f"{engine}: start {said['start_s']:.1f} s, empty {before:.4f} s", flush=True)
        with run_workers(folder, paths) as workers:
            few = 2 if engine == "flower" else rounds
            methods = {"fedavg": few + 1} if number > 3 else {"fedavg": few + 1, "feddro": few + 1, "million": few + 1}
            parts = {}
            for method, count in methods.items():
                began = time.perf_counter()
                parts[method] = measure_rounds(link, sites, method, count, folder)
                parts[method] |= {"rounds": count, "all_s": time.perf_counter() - began}
                print(f"{engine}: {method} {parts[method]}", flush=True)
            memory = {"worker_mb": add_up_memory([psutil.Process(worker.pid) for worker in workers]) / number}
            if relays:
                kept = [psutil.Process(relay.process.pid) for relay in relays.values()]
                memory["relay_mb"] = sum(add_up_memory(list_tree(process)) for process in kept) / number
                known = {process.pid for process in [*kept, *(psutil.Process(worker.pid) for worker in workers)]}
                rest = [child for child in psutil.Process().children() if child.pid not in known]
                memory["server_mb"] = sum(add_up_memory(list_tree(process)) for process in rest)
        with run_echoes(paths):
            after = measure_empty(link, sites, repetitions)
        empty = (before + after) / 2
        for part in parts.values():
            part["exchange_x_empty"] = part["exchange_s"] / empty
        return said | {"empty_before_s": before, "empty_after_s": after, "parts": parts, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("direct", "flare", "flower"), default="flare")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        folder, path, number, sites = chosen.worker
        Path(folder).mkdir(exist_ok=True)
        make = lambda *_: Party(int(sites), int(number))
        serve(Worker(make, Path(folder), Path(folder) / "store"), Path(path))
    said = measure(chosen.engine, chosen.sites, chosen.rounds)
    said |= {"load": os.getloadavg()[0], "cores": os.cpu_count(), "jax": jax.__version__}
    said |= {package: version(package) for package in ("nvflare", "flwr")}
    print(json.dumps(said, indent=1))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | {f"{chosen.engine}-{chosen.sites}": said}, indent=1) + "\n")


if __name__ == "__main__":
    main()
