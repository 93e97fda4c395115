"""Letters by Flower between real processes: its SuperLink and stock SuperNodes, with TLS and registered keys."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from site_runs import Echo, check_equal_to_simulation, find_processes, run_workers

from nestfed.sites.flower import FlowerLink, start_site
from nestfed.sites.kits import find_free_port, make_kits
from nestfed.sites.link import LostSite

pytestmark = pytest.mark.slow
SITES = ["a", "b", "c"]


class Federation:
    """Sites a and b; in place of c somebody whose keys are of another authority, and nowhere registered."""

    def __init__(self, folder: Path):
        self.folder, port = folder, find_free_port()
        deployment = make_kits(folder / "kits", SITES, engine="flower", port=port)
        make_kits(folder / "others", SITES, engine="flower", port=port)
        # Who has the right certificate of the authority, yet a key that nobody registered:
        (folder / "others" / "b" / "keys" / "ca.crt").write_bytes(
            (folder / "kits" / "b" / "keys" / "ca.crt").read_bytes()
        )
        self.workers = {name: Echo(folder / name, name) for name in SITES}
        self.nodes = {name: start_site(folder / "kits" / name, folder / name) for name in "ab"}
        self.strangers = [start_site(folder / "others" / name, folder / "c") for name in "bc"]
        self.link = FlowerLink(folder / "kits", deployment)

    def ask(self, letter=b"hello", sites="ab", timeout=120.0):
        return dict(self.link.ask({name: letter for name in sites}, timeout))

    def stop(self):
        self.link.close()
        for kept in [*self.nodes.values(), *self.strangers]:
            kept.stop()


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders have paths too long for a socket
        made = Federation(Path(folder))
        yield made
        made.stop()
    assert find_processes(psutil.Process(), "flower-") == find_processes(psutil.Process(), "flwr-") == []


def test_every_site_gets_its_own_letter(federation):
    letters = {name: f" gets {name}".encode() for name in "ab"}
    assert dict(federation.link.ask(letters, 400.0)) == {name: f"{name} gets {name}".encode() for name in "ab"}
    large = os.urandom(8_000_000)
    assert federation.ask(large) == {name: name.encode() + large for name in "ab"}


def test_keys_that_are_not_registered_get_nowhere(federation):
    answer = federation.ask(sites="ac", timeout=60.0)
    assert answer["a"] == b"ahello"
    assert isinstance(answer["c"], LostSite) and "not connected" in answer["c"].reason
    unregistered, of_others = (kept.log.read_text() for kept in federation.strangers)
    assert "CERTIFICATE_VERIFY_FAILED" in of_others
    assert "ended with" in unregistered and "it is started again" in unregistered


def test_a_worker_that_is_gone_is_lost(federation):
    federation.workers["b"].close()
    answers = federation.ask()
    assert answers["a"] == b"ahello"
    assert isinstance(answers["b"], LostSite) and "nobody answers at" in answers["b"].reason
    federation.workers["b"] = Echo(federation.folder / "b", "b")


def test_a_superlink_that_is_killed_costs_time_and_no_answer(federation):
    for process in find_processes(psutil.Process(), "flower-superlink"):
        process.send_signal(signal.SIGKILL)
    assert federation.ask(timeout=240.0) == {"a": b"ahello", "b": b"bhello"}


def test_algorithms_equal_their_simulations(federation):
    federation.nodes["c"] = start_site(federation.folder / "kits" / "c", federation.folder / "c")
    for worker in federation.workers.values():
        worker.close()
    for stranger in federation.strangers:
        stranger.stop()
    with run_workers(federation.folder, {name: federation.folder / name for name in SITES}):
        for name in ("fedavg", "scaffold", "fedreco"):
            check_equal_to_simulation(federation.link, SITES, name, federation.folder / f"{name}.run", rounds=1)
