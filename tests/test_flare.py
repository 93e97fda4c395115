"""Letters by NVIDIA FLARE between real processes: its server, its sites with TLS and keys, its jobs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from site_runs import Echo, check_equal_to_simulation, find_processes, run_workers

from nestfed.sites import flare
from nestfed.sites.flare import FlareLink, start_site
from nestfed.sites.kits import find_free_port, make_kits
from nestfed.sites.link import LostSite

SITES = ["a", "b", "c", "d"]


def allow_code_at(kit: Path) -> None:
    """As a server may do that its sites cannot trust."""
    file = kit / "local" / "authorization.json"
    rights = json.loads(file.read_text())
    rights["permissions"]["lead"]["byoc"] = "any"
    file.write_text(json.dumps(rights))


class Federation:
    """Sites a, b and c; in place of d somebody who has keys of another authority."""

    def __init__(self, folder: Path):
        self.folder, port = folder, find_free_port()
        self.deployment = make_kits(folder / "kits", SITES, port=port)
        make_kits(folder / "others", SITES, port=port)
        allow_code_at(folder / "kits" / "server")
        self.workers = {name: Echo(folder / name, name) for name in SITES}
        self.relays = {name: self.start(name) for name in "abc"}
        self.stranger = start_site(folder / "others" / "d", folder / "d")
        self.link = FlareLink(folder / "kits", self.deployment)

    def start(self, name):
        return start_site(self.folder / "kits" / name, self.folder / name)

    def ask(self, letter=b"hello", sites="abc", timeout=60.0):
        return dict(self.link.ask({name: letter for name in sites}, timeout))

    def stop(self):
        self.link.close()
        for kept in [*self.relays.values(), self.stranger]:
            kept.stop()


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    before = flare.GATHER, flare.AGAIN
    flare.GATHER, flare.AGAIN = 15.0, 0.0  # d will not come, and sites that come back are taken in at once
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders have paths too long for a socket
        made = Federation(Path(folder))
        yield made
        made.stop()
    flare.GATHER, flare.AGAIN = before
    assert find_processes(psutil.Process(), "nvflare") == []


def test_every_site_gets_its_own_letter(federation):
    letters = {name: f" gets {name}".encode() for name in "abc"}
    answers = dict(federation.link.ask(letters, 120.0))
    assert answers == {name: f"{name} gets {name}".encode() for name in "abc"}
    large = os.urandom(8_000_000)
    assert federation.ask(large) == {name: name.encode() + large for name in "abc"}


def test_a_worker_that_is_gone_is_lost_at_once(federation):
    federation.workers["b"].close()
    began = time.monotonic()
    answers = federation.ask()
    assert time.monotonic() - began < 30
    assert isinstance(answers["b"], LostSite) and "nobody answers at" in answers["b"].reason
    assert answers["a"] == b"ahello" and answers["c"] == b"chello"
    federation.workers["b"] = Echo(federation.folder / "b", "b")
    assert isinstance(federation.ask(b"die")["b"], LostSite)
    assert federation.ask()["b"] == b"bhello"


def test_keys_of_another_authority_get_nowhere_and_a_site_that_comes_later_is_taken_in(federation):
    assert federation.stranger.running
    assert isinstance(federation.ask(sites="ad")["d"], LostSite)
    assert "CERTIFICATE_VERIFY_FAILED" in federation.stranger.log.read_text()
    federation.stranger.stop()
    federation.relays["d"] = federation.start("d")
    deadline = time.monotonic() + 60
    while isinstance(federation.ask(sites="abcd")["d"], LostSite):
        assert time.monotonic() < deadline, "d was not taken in"
    assert federation.ask(sites="abcd") == {name: f"{name}hello".encode() for name in "abcd"}


KILLED = [
    "the server",
    pytest.param("the job beside the server", marks=pytest.mark.slow),
    pytest.param("a relay at a site", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("what", KILLED)
def test_what_is_killed_costs_time_and_no_answer(federation, what):
    assert federation.ask(timeout=120.0)["a"] == b"ahello"
    command = {"a relay at a site": "worker_process", "the server": "server_train"}.get(what, "runner_process")
    root = psutil.Process(federation.relays["a"].process.pid if "relay" in what else os.getpid())
    for process in find_processes(root, command):
        process.send_signal(signal.SIGKILL)
    assert federation.ask(timeout=120.0) == {name: f"{name}hello".encode() for name in "abc"}


SMUGGLE = """
import os, sys, time
from pathlib import Path
from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nestfed.sites.flare_job import Post, Relay
from nestfed.sites.kits import USER

CollabRecipe("nestfed", server=Post("nowhere"), client=Relay(), min_clients=1).export(sys.argv[2])  # with its sources
session = new_secure_session(USER, sys.argv[1], timeout=20)
job = session.submit_job(sys.argv[2] + "/nestfed")
while not session.get_job_status(job).startswith("FINISHED"):
    time.sleep(0.5)
print(session.get_job_meta(job), flush=True)
session.close()
os._exit(0)  # threads of FLARE's client live on
"""


@pytest.mark.slow
def test_a_site_refuses_a_job_that_brings_code(federation, tmp_path):
    assert federation.ask(timeout=120.0)["a"] == b"ahello"
    words = [sys.executable, "-c", SMUGGLE, str(federation.folder / "kits" / "coordinator"), str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    assert all(f"{name}: NVFLARE_ERROR: BYOC not permitted" in said for name in "abc"), said
    assert federation.ask()["a"] == b"ahello"


@pytest.fixture(scope="module")
def with_jax(federation) -> Iterator[Federation]:
    """With workers as `nestfed site start` runs them."""
    for name in "abc":
        federation.workers[name].close()
    with run_workers(federation.folder, {name: federation.folder / name for name in "abc"}):
        yield federation


ALWAYS = ("fedavg", "feddro", "fedmbo")
SLOW = ("fedbioacc", "scaffold", "fednest", "fedreco")


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_an_algorithm_equals_its_simulation(with_jax, name):
    check_equal_to_simulation(with_jax.link, ["a", "b", "c"], name, with_jax.folder / f"{name}.run")
