"""Sites as real processes: one worker each, a coordinator in this one or in another, and everything that can happen."""

import dataclasses
import os
import resource
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
from site_worker import NOISE, SIZES, Case

from nestfed import simulate
from nestfed.core.settings import UserError
from nestfed.engine import rounds as engine
from nestfed.engine.options import Options
from nestfed.engine.planning import make_inputs, make_plan
from nestfed.sites.coordinator import AGAIN, Coordinator, Roll, Run, Unanswered
from nestfed.sites.link import LoopbackLink, LostSite
from nestfed.sites.wire import Letter, pack, unpack
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
    more.setdefault("progress", False)
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
    """The link, with somebody who may act before letters go out and change what comes back."""

    def __init__(self, link, before=lambda headers: None, after=lambda site, header, answer: answer):
        self.link, self.before, self.after = link, before, after

    def ask(self, letters, timeout):
        headers = {name: unpack(letter).header for name, letter in letters.items()}
        self.before(headers)
        for name, answer in self.link.ask(letters, timeout):
            yield name, self.after(name, headers[name], answer)

    def close(self):
        self.link.close()


def is_round(header, round, exchange=0):
    return header["kind"] == "ticket" and (header["round"], header["exchange"]) == (round, exchange)


def simulate_without(name, rounds, absent):
    """As the compiled engine has it: `absent` maps rounds to the client that drops out of them."""
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


def train_with_absences(federation, name, link, rounds, back=None, **more):
    """(the result, what was said); before round `back[0]` the function `back[1]` brings a site back."""
    said = []
    central = coordinator(federation, name, link=link, rounds=rounds, say=said.append, **more)
    do_round = central._do_round

    def step(books):
        if back is not None and books.round == back[0]:
            back[1]()
            for absence in central.roll.absent.values():
                absence.next = 0.0  # it is asked at once, however slow this machine is
        do_round(books)

    central._do_round = step
    return central.train(progress=False), said


def find_absences(result):
    return {r: 1 for r, number in enumerate(result.participants) if number == 2}


@pytest.mark.parametrize(
    ("name", "when"), [("scaffold", "before"), ("scaffold", "after"), ("fednest", "after"), ("fednest", "before")]
)
def test_killed_worker_costs_its_site_a_round_and_rejoins_from_its_store(federation, name, when):
    """Killed before it answers, or when its answer is on its way and the next letter finds it gone."""
    south, done = federation.sites["south"], []

    def kill(headers):
        if when == "before" and not done and "south" in headers and is_round(headers["south"], 1):
            done.append(south.kill())

    def kill_after(site, header, answer):
        if when == "after" and not done and site == "south" and is_round(header, 1):
            done.append(south.kill())
        return answer

    def restart():
        if south.process.poll() is not None:
            south.start()
            south.wait()

    link = Meddling(federation.link, kill, kill_after)
    result, said = train_with_absences(federation, name, link, 4, (3, restart))
    missed = find_absences(result)
    # Where a round has one exchange the answer was its last: that round counts, and the next one misses the site.
    assert missed == ({2: 1} if (name, when) == ("scaffold", "after") else {1: 1, 2: 1})
    assert_equal_trees(simulate_without(name, 4, missed).server, result.position.server)
    assert said[0].startswith("south is left out: nobody answers") and said[-1] == "south is there again"


def test_late_site_is_left_out_for_no_longer_than_it_is_late(federation):
    """It is stopped and goes on later: its late answer reaches nobody."""
    south = federation.sites["south"]

    def stop(headers):
        if "south" in headers and is_round(headers["south"], 1):
            south.process.send_signal(signal.SIGSTOP)

    name, link = "scaffold", Meddling(federation.link, stop)
    coordinator(federation, name).train(progress=False)  # compiles, so that nobody is late for that
    back = 2, lambda: south.process.send_signal(signal.SIGCONT)
    result, said = train_with_absences(federation, name, link, 4, back, times={"answer": 3.0, "hello": 3.0})
    assert result.participants.tolist() == [3, 2, 3, 3]
    assert_equal_trees(simulate_without(name, 4, {1: 1}).server, result.position.server)
    assert said == ["south is left out: no answer in time", "south is there again"] or "within" in said[0]


def change(answer, how):
    letter = unpack(answer)
    arrays = {
        "shape": lambda a: a[..., None],
        "type": lambda a: a.astype(np.float32),
        "nan": lambda a: a * np.nan,
    }
    if how in arrays:
        return pack(Letter(letter.header, [arrays[how](np.array(a)) for a in letter.arrays]))
    return {"cut": answer[:-3], "noise": b"\x00\x00\x00\x05hello", "other": pack(Letter({"asks": False}))}[how]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", "shapes and types"),
        ("type", "float32"),
        ("nan", "not finite"),
        ("cut", "cut off"),
        ("noise", "cannot be read"),
        ("other", "another place of the round"),
    ],
)
def test_answer_that_does_not_fit_leaves_its_site_out_of_the_round(federation, how, words):
    bad = lambda site, header, answer: change(answer, how) if site == "south" and is_round(header, 1) else answer
    result, said = train_with_absences(federation, "feddro", Meddling(federation.link, after=bad), 3, (2, lambda: None))
    assert result.participants.tolist() == [3, 2, 3]
    assert_equal_trees(simulate_without("feddro", 3, {1: 1}).server, result.position.server)
    assert words in said[0] and said[0].startswith("south is left out")


def test_letters_delivered_twice_change_nothing(federation):
    class Twice(Meddling):
        def ask(self, letters, timeout):
            first = dict(self.link.ask(letters, timeout))
            for name, answer in self.link.ask(letters, timeout):
                same = unpack(answer), unpack(first[name])
                assert all(np.array_equal(a, b) for a, b in zip(same[0].arrays, same[1].arrays, strict=True))
                yield name, answer
                yield name, answer

    result = coordinator(federation, "fednest", link=Twice(federation.link)).train(progress=False)
    assert_equal_trees(simulate_without("fednest", 2, {}).server, result.position.server)


class Killed(BaseException):
    """The coordinator is gone, in the middle of whatever it did."""


@pytest.mark.parametrize("name", ["scaffold", "fednest"])
@pytest.mark.parametrize("when", ["before", "during", "after", "writing"])
def test_killed_coordinator_loses_no_round(federation, name, when):
    run = federation.fresh()

    def die(headers):
        if when == "before" and any(is_round(header, 2) for header in headers.values()):
            raise Killed

    def die_after(site, header, answer):
        if is_round(header, 2) and (when == "during" or (when == "after" and site == "west")):
            raise Killed
        return answer

    central = coordinator(federation, name, run, Meddling(federation.link, die, die_after), rounds=4)
    if when == "writing":
        write = central._write_books
        central._write_books = lambda books: (_ for _ in ()).throw(Killed) if books.round == 3 else write(books)
    with pytest.raises(Killed):
        central.train(progress=False)
    again = coordinator(federation, name, run, rounds=4)
    assert again._read_books().round == 2
    result = again.train(progress=False)
    assert result.participants.tolist() == [3, 3, 3, 3]
    assert_equal_trees(simulate_without(name, 4, {}).server, result.position.server)


def test_full_disk_of_a_site_is_named_and_costs_its_site_rounds(federation):
    """A worker that may write no file longer than so many bytes; what its disk held before is still there."""
    south = federation.sites["south"]
    plain = dict(south.environment)

    def fill_up():
        south.kill()
        south.environment = plain | {"SITE_DISK": "64"}
        south.start()
        south.wait()

    def make_room():
        south.kill()
        south.environment = plain
        south.start()
        south.wait()

    def step_in(headers):
        rounds = {header["round"] for header in headers.values() if header["kind"] == "ticket"}
        if rounds == {1} and "SITE_DISK" not in south.environment and not done:
            done.append(fill_up())

    done = []
    link = Meddling(federation.link, step_in)
    result, said = train_with_absences(federation, "scaffold", link, 5, (4, make_room))
    missed = find_absences(result)
    assert 1 in missed and 4 not in missed
    assert any("cannot be written (File too large); make room on that disk" in line for line in said)
    assert_equal_trees(simulate_without("scaffold", 5, missed).server, result.position.server)


def test_full_disk_of_the_coordinator_is_one_clear_error_and_the_run_goes_on_from_there(federation):
    run = federation.fresh()
    central = coordinator(federation, "fedavg", run, rounds=3)
    write, limits = central._write_books, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up(books):
        if books.round == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            write(books)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    central._write_books = fill_up
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(UserError, match=r"run cannot be written \(File too large\); make room"):
            central.train(progress=False)
    finally:
        signal.signal(signal.SIGXFSZ, before)
    again = coordinator(federation, "fedavg", run, rounds=3)
    assert again._read_books().round == 1
    assert_equal_trees(simulate_without("fedavg", 3, {}).server, again.train(progress=False).position.server)


def test_checkpoint_that_is_cut_off_or_of_another_run_is_refused(federation):
    run = federation.fresh()
    central = coordinator(federation, "fedavg", run, rounds=1)
    central.train(progress=False)
    whole = central.file.read_bytes()
    central.file.write_bytes(whole[:-5])
    with pytest.raises(UserError, match="is no whole checkpoint of this run"):
        coordinator(federation, "fedavg", run, rounds=2).train(progress=False)
    central.file.write_bytes(whole)
    with pytest.raises(UserError, match="belongs to another run"):
        other = coordinator(federation, "fedavg", "another", rounds=2)
        other.file = central.file
        other.train(progress=False)


SOON = {"patience": 0.5, "hello": 5.0}


def test_sites_of_another_precision_version_or_settings_are_named_before_the_start(federation):
    with tempfile.TemporaryDirectory() as folder:
        single = Site(Path(folder), "single", precision="32")
        single.wait()
        sockets = {name: site.socket for name, site in federation.sites.items()} | {"south": single.socket}
        try:
            with pytest.raises(Unanswered, match="south .*numbers of the type float32, and the coordinator float64"):
                coordinator(federation, "fedavg", link=LoopbackLink(sockets), times=SOON).train(progress=False)
        finally:
            single.kill()

    def older(site, header, answer):
        if header["kind"] != "hello" or site != "west":
            return answer
        letter = unpack(answer)
        return pack(Letter({**letter.header, "nestfed": "0.0.1"}))

    with pytest.raises(Unanswered, match=r"west \(it has nestfed 0.0.1, and the coordinator"):
        link = Meddling(federation.link, after=older)
        coordinator(federation, "fedavg", link=link, times=SOON).train(progress=False)
    central = coordinator(federation, "fedavg", settings={"lr": 0.3}, times=SOON)
    central.run = dataclasses.replace(central.run, settings={})  # the sites hear of other settings
    central.roll.say = (said := []).append
    with pytest.raises(Unanswered, match="its algorithm and its settings is"):
        central.train(progress=False)
    # A person hears of it before the waiting ends, and once of each site.
    assert sorted(line.split(":")[0] for line in said) == [f"{name} cannot take part" for name in NAMES]


def open_elsewhere(federation):
    """A letter whose run would put a site's state where it does not belong."""
    run, leg = Run("../../elsewhere", {}, None, 0, tuple(NAMES)), Leg(method="fedavg", seed=0, stage=0, changes={})
    return pack(Letter({"kind": "open", **run.header(0), "leg": leg, "sums": 0}))


def test_letters_of_another_kind_are_refused_in_one_line(federation):
    refusals = {}
    for name, letter in {
        "version": b"\x00\x00\x00\x20" + b'{"wire": 99, "places": [] }     ',
        "kind": pack(Letter({"kind": "dance"})),
        "nothing": b"",
        "ticket": pack(Letter({"kind": "ticket", "run": "never", "leg": "opened"})),
        "field": pack(Letter({"kind": "open", "leg": {}})),
        "path": open_elsewhere(federation),
    }.items():
        (answer,) = dict(federation.link.ask({"north": letter}, 30.0)).values()
        refusals[name] = unpack(answer).header["refused"]
    words = {
        "version": "version 99 came, and this nestfed reads version 1",
        "kind": "the kind 'dance'",
        "nothing": "cut off",
        "ticket": "restarted, or is in another run",
        "field": "does not fit",
        "path": "names have letters, digits",
    }
    assert all(word in refusals[name] and "\n" not in refusals[name] for name, word in words.items())


def test_diverged_run_says_so(federation):
    nan = lambda site, header, answer: change(answer, "nan") if is_round(header, 1) else answer
    with pytest.raises(UserError, match="FedAvg diverged in round 1: no site's numbers are finite any more"):
        coordinator(federation, "fedavg", link=Meddling(federation.link, after=nan)).train(progress=False)


def test_noisy_round_that_loses_a_site_does_not_count(federation):
    """A second answer with noise would tell what the first one hides: the next round begins where this one did."""
    gone = []

    def lose(site, header, answer):
        if site == "south" and is_round(header, 1) and not gone:
            gone.append(header["exchange"])
            return LostSite("a cable is cut")
        return answer

    link = Meddling(federation.link, after=lose)
    more = {"settings": {"noise": True}, "uploads": NOISE}
    result, said = train_with_absences(federation, "fedavg", link, 3, **more)
    assert result.participants.tolist() == [3, 0, 3]
    assert result.history["epsilon"][-1] > 0 and "a cable is cut" in said[0]


def test_sites_that_have_compiled_are_not_waited_for_as_long_as_at_first(federation):
    """Else a site that is gone, where nobody says so, would cost the time of a compilation."""

    class Clock(Meddling):
        def ask(self, letters, timeout):
            header = unpack(next(iter(letters.values()))).header
            if header["kind"] == "ticket":
                waits.append((header["round"], timeout))
            return super().ask(letters, timeout)

    waits = []
    coordinator(federation, "fedavg", link=Clock(federation.link), rounds=3).train(progress=False)
    assert waits == [(-1, 120.0), (0, 120.0), (1, AGAIN), (2, AGAIN)]
