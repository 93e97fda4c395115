"""NVIDIA FLARE as the way between coordinator and sites: its server, and a job that carries letters.

The coordinator runs FLARE's server and submits a job with the sites that are connected. A job may end, a server may be
killed, a site may be away and come back: then a new job is submitted, and letters without an answer go out again (a
worker answers the same letter twice with the same bytes). Every wait has an end.
"""

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestfed.sites.flare_job import NOT_REACHED, WORKER
from nestfed.sites.keeper import Kept, keep
from nestfed.sites.kits import Deployment
from nestfed.sites.link import Answers, LostSite, relay, serve_letters

ALIVE = 25.0  # seconds: a connected site is heard of every 10
GATHER = 60.0  # seconds that a job waits for the sites which are expected in it
START = 60.0  # seconds for a submitted job to begin
LOOK = 2.0  # seconds between looks for sites that have come back
AGAIN = 30.0  # seconds that a job lasts at least, before it is ended for the sake of a site that came back
TALK = 30.0  # seconds for an answer of FLARE's server to the coordinator


def start_server(kit: Path, jobs: Path) -> Kept:
    """FLARE's server, which keeps its jobs in a folder that is ours: the default is one for all of a machine."""
    settings = kit / "local" / "resources.json"
    resources = json.loads(settings.read_text())
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(jobs)
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(jobs / "snapshots")
    settings.write_text(json.dumps(resources, indent=2))
    return _start_kit(kit, {})


def start_site(kit: Path, worker: Path) -> Kept:
    """FLARE's process of a site, whose jobs hand letters to the worker at this socket."""
    return _start_kit(kit, {WORKER: str(worker)})


def _start_kit(kit: Path, environment: Mapping[str, str]) -> Kept:
    # The kit's script calls python3, which must be the one that has nestfed.
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return keep(["bash", kit / "startup" / "sub_start.sh", "--once"], kit / "flare.log", {**environment, "PATH": path})


class FlareLink:
    """Letters by NVIDIA FLARE, from the folder of a deployment that `kits.make_kits` has made."""

    def __init__(self, folder: Path, deployment: Deployment):
        self._folder, self._sites = folder.absolute(), set(deployment.sites)
        self._work = Path(tempfile.mkdtemp(prefix="nestfed-"))  # short, for the paths of sockets
        self._letters = serve_letters(self._work / "letters")
        self._job, self._began, self._looked = "", 0.0, 0.0
        self._problem = "FLARE's server has not started yet"
        self._missing: dict[str, float] = {}  # sites that the job does not reach, and since when
        self._back: set[str] = set()  # those of them that have been heard of since
        self._closing = threading.Event()
        self._server = start_server(self._folder / "server", self._work / "jobs")
        words = [sys.executable, "-m", "nestfed.sites.flare_admin", self._work / "admin"]
        kit = self._folder / "coordinator"
        self._admin = keep([*words, kit, self._work / "letters"], kit / "admin.log")
        self._thread = threading.Thread(target=self._keep_a_job, daemon=True)
        self._thread.start()

    def ask(self, letters: Mapping[str, bytes], timeout: float) -> Answers:
        if self._back & letters.keys() and time.monotonic() - self._began > AGAIN:
            self._back.clear()
            self._letters.drop_job()  # the next one has them in it
        for site, answer in self._letters.ask(letters, timeout):
            if not isinstance(answer, LostSite):
                self._missing.pop(site, None)
            elif answer.reason.startswith(NOT_REACHED):
                self._missing.setdefault(site, time.time())
            elif not self._letters.wait_for_job(0):
                answer = LostSite(f"{answer.reason}: {self._problem}")
            yield site, answer

    def close(self) -> None:
        """End the job (at the sites too), then the server."""
        self._closing.set()
        self._letters.close()
        self._thread.join(TALK)
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + 10
            while self._job and not self._has_ended() and time.monotonic() < deadline:
                time.sleep(0.2)
        self._admin.stop()
        self._server.stop()
        shutil.rmtree(self._work, ignore_errors=True)

    def _keep_a_job(self) -> None:
        while not self._closing.wait(0.1):
            try:
                if not self._letters.wait_for_job(0):
                    self._start_job()
                elif self._missing and time.monotonic() - self._looked > LOOK:
                    self._looked = time.monotonic()
                    heard = self._tell("list_connected")
                    self._back = {site for site, since in self._missing.items() if heard.get(site, 0.0) > since}
            except OSError as error:
                self._problem = str(error)
                self._closing.wait(1.0)

    def _start_job(self) -> None:
        if self._job:
            with contextlib.suppress(OSError):  # it has ended, or a server that was killed knows nothing of it
                self._tell("abort", job=self._job)
            self._job = ""
        sites = self._gather()
        self._missing = dict.fromkeys(self._sites - sites, time.time())
        self._job = self._tell("submit", sites=sorted(sites))
        self._began, self._back = time.monotonic(), set()
        while not self._letters.wait_for_job(0.2):
            if self._closing.is_set():
                return
            if self._has_ended() or time.monotonic() - self._began > START:
                raise OSError(f"FLARE's job did not begin; see {self._folder / 'server' / 'flare.log'}")

    def _gather(self) -> set[str]:
        """The sites that are connected: all that are not known to be away, or whoever is there after some time."""
        deadline = time.monotonic() + GATHER
        while True:
            heard = self._tell("list_connected")
            sites = {site for site in self._sites if heard.get(site, 0.0) > time.time() - ALIVE}
            if sites and (sites >= self._sites - self._missing.keys() or time.monotonic() > deadline):
                return sites
            self._problem = f"not connected to FLARE's server: {', '.join(sorted(self._sites - sites))}"
            if self._closing.wait(0.3):
                raise OSError("closed")

    def _has_ended(self) -> bool:
        return self._tell("find_status", job=self._job).startswith("FINISHED")

    def _tell(self, what: str, **arguments: Any) -> Any:
        question = json.dumps({"do": what, **arguments}).encode()
        said = json.loads(relay(self._work / "admin", question, TALK))
        if "error" in said:
            raise OSError(said["error"])
        return said["answer"]
