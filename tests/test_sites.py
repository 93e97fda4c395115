"""Sites as real processes: one worker each, a coordinator in this one or in another, and everything that can happen."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import CASES, TASKS
from numpy.testing import assert_allclose
from site_worker import SIZES, Case

from nestfed import simulate
from nestfed.engine.options import Options
from nestfed.sites.coordinator import Coordinator, Roll, Run
from nestfed.sites.link import LoopbackLink
from nestfed.sites.wire import unpack
from nestfed.sites.worker import Leg

NAMES = ["north", "south", "west"]


class Site:
    """A worker as a process."""

    def __init__(self, folder: Path, name: str, precision="64", **environment):
        self.folder, self.socket = folder / name, folder / f"{name}.sock"
        self.folder.mkdir(exist_ok=True)
        self.precision, self.environment = precision, environment
        self.start()

    def start(self):
        words = [sys.executable, Path(__file__).parent / "site_worker.py", self.folder, self.socket, self.precision]
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, env=environment)

    def wait(self):
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


class Federation:
    def __init__(self, folder: Path):
        self.folder = folder
        self.sites = {name: Site(folder, name) for name in NAMES}
        for site in self.sites.values():
            site.wait()
        self.number = 0

    @property
    def link(self):
        return LoopbackLink({name: site.socket for name, site in self.sites.items()})

    def stop(self):
        for site in self.sites.values():
            site.kill()

    def fresh(self):
        self.number += 1
        return f"run{self.number}"


@pytest.fixture(scope="module")
def federation():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders have paths too long for a socket
        made = Federation(Path(folder))
        yield made
        made.stop()


def coordinator(federation, name, run=None, link=None, rounds=2, say=None, settings=None, **more):
    options = {"patience": 30.0, "hello": 5.0, "answer": 120.0} | more.pop("times", {})
    roll = Roll(link or federation.link, NAMES, say=say or (lambda text: None), **options)
    run = Run(run or federation.fresh(), settings or {}, None, 0, tuple(NAMES))
    leg = Leg(method=name, seed=0, stage=0, changes={})
    case = Case(settings or {})
    chosen = Options(rounds=rounds, evaluate_every=rounds, **more)
    file = federation.folder / f"{run.id}.run"
    return Coordinator(roll, run, leg, case.make_algorithms(name, {})[0], case.task(name), chosen, file=file)


def assert_equal_trees(one, other):
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-9, atol=1e-11), one, other)


QUICK = ("fedavg", "scaffold", "feddro", "fedbioacc", "fednest", "fedmbo", "fedreco", "fedadam")
NAMED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", NAMED)
def test_every_algorithm_equals_its_simulation(federation, name):
    case = CASES[name]
    simulated = simulate(case.algorithm(name), TASKS[case.task](SIZES), rounds=2, evaluate_every=2, progress=False)
    result = coordinator(federation, name).train(progress=False)
    assert_equal_trees(simulated.server, result.position.server)
    assert result.participants.tolist() == [3, 3]
    for metric, values in result.history.items():
        assert_allclose(values, simulated.history[metric], rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------------------- faults


class Meddling:
    """The link, with somebody between who may act before, during and after a letter."""

    def __init__(self, link, act):
        self.link, self.act, self.count = link, act, 0

    def ask(self, letters, timeout):
        letters = dict(letters)
        opened = {name: unpack(letter).header for name, letter in letters.items()}
        for name, answer in self.link.ask(letters, timeout):
            yield name, self.act(name, opened[name], answer)

    def close(self):
        self.link.close()


def simulate_without(name, rounds, absent):
    """As the compiled engine has it: `absent` maps rounds to the client that drops out."""
    import dataclasses

    from nestfed.engine import rounds as engine
    from nestfed.engine.planning import make_inputs, make_plan

    case = CASES[name]
    algorithm, task = case.algorithm(name), TASKS[case.task](SIZES)
    options = Options(rounds=1, evaluate_every=None, dropout=0.5)
    plan, inputs = make_plan(algorithm, task, options), make_inputs(algorithm, task, 0, options)
    inputs = inputs._replace(dropout=jax.numpy.asarray(0.0))
    run = engine.start(inputs, plan)
    for r in range(rounds):
        weights = np.asarray(task.weights) * (np.arange(3) != absent.get(r, -1))
        run, _ = engine.advance(inputs._replace(task=dataclasses.replace(task, weights=weights)), run, r, 1, plan)
    return run


@contextlib.contextmanager
def restored(federation):
    """All workers are there again at the end."""
    try:
        yield
    finally:
        for site in federation.sites.values():
            if site.process.poll() is not None:
                site.start()
                site.wait()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["scaffold", "fednest"])
def test_killed_worker_costs_its_site_rounds_and_rejoins_from_its_store(federation, name, when):
    """It is killed in round 1 and is back, from its disk, when round 2 is asked."""
    south, said, done = federation.sites["south"], [], []

    def kill(site, header, answer):
        if header["kind"] == "ticket" and header["round"] == 1 and not done:
            if site == "south" and when == "after":  # its answer is on its way, and counts: the next one is missing
                south.kill()
                done.append(header["exchange"])
            elif site != "south" and when == "before":
                return answer
        if header["kind"] == "ticket" and header["round"] == 2 and south.process.poll() is not None:
            pass
        return answer

    def restart_before_round_2(letters_round):
        if south.process.poll() is not None:
            south.start()
            south.wait()

    class Guarded(Meddling):
        def ask(self, letters, timeout):
            headers = [unpack(letter).header for letter in letters.values()]
            rounds = {header.get("round") for header in headers if header["kind"] == "ticket"}
            if when == "before" and rounds == {1} and not done:
                south.kill()
                done.append(0)
            return super().ask(letters, timeout)

    with restored(federation):
        central = coordinator(federation, name, link=Guarded(federation.link, kill), rounds=4, say=said.append)
        original = central._do_round

        def round_of(books):
            if books.round == 2:
                restart_before_round_2(books.round)
                for absence in central.roll.absent.values():
                    absence.next = 0.0
            original(books)

        central._do_round = round_of
        result = central.train(progress=False)
    alone = name == "scaffold" and when == "after"  # one exchange a round: it was over, and the kill shows in the next
    assert result.participants.tolist() == ([3, 3, 3, 3] if alone else [3, 2, 3, 3])
    expected = simulate_without(name, 4, {} if alone else {1: 1})
    assert_equal_trees(expected.server, result.position.server)
    assert alone or [line.split()[0] for line in said] == ["south", "south"]
