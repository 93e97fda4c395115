"""Flower as the way between coordinator and sites: its SuperLink, a SuperNode at each site, and an app that carries.

For consortia that run Flower: stock processes, public interfaces, and a loop of our own over `Grid`. A message takes
seconds (a new process for each, and fixed pauses), so algorithms with one exchange per round belong here.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from nestfed.sites.keeper import Kept, keep
from nestfed.sites.kits import Deployment, find_free_port, read_kit
from nestfed.sites.link import Answers, LostSite, serve_letters

LISTENS = 60.0  # seconds for the SuperLink to listen
LEAST = 60.0  # seconds in which a site may answer, however short the question
COMMAND = 120.0  # seconds for a command of Flower's
START = 60.0  # seconds for a submitted app to begin
CODE = """from nestfed.sites import flower_job

client = flower_job.client
server = flower_job.server
"""


def start_server(kit: Path, deployment: Deployment, work: Path) -> Kept:
    """Flower's SuperLink, which knows only sites whose keys were registered."""
    host = "127.0.0.1" if deployment.server == "localhost" else "0.0.0.0"
    words = [_find("flower-superlink"), "--host", host, "--port", str(deployment.port), "--database", work / "state"]
    tls = [
        "--ssl-ca-certfile",
        kit / "ca.crt",
        "--ssl-certfile",
        kit / "server.pem",
        "--ssl-keyfile",
        kit / "server.key",
    ]
    safe = [*tls, "--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    return keep([*words, *safe], kit / "flower.log", _make_environment(work / "home"))


def start_site(kit: Path, worker: Path) -> Kept:
    """A site's SuperNode, whose apps hand letters to the worker at this socket."""
    about = read_kit(kit)
    keys = ["--root-certificates", kit / "keys" / "ca.crt", "--auth-supernode-private-key", kit / "keys" / "node"]
    words = [_find("flower-supernode"), "--superlink", f"{about.server}:{about.port}", *keys]
    own = ["--port", str(find_free_port()), "--node-config", f'worker="{worker}"']
    return keep([*words, *own], kit / "flower.log", _make_environment(kit / "flower"))


def _find(command: str) -> Path:
    return Path(sys.executable).parent / command


def _make_environment(home: Path) -> dict[str, str]:
    return {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",  # it starts its own commands by name
    }


class FlowerLink:
    """Letters by Flower, from the folder of a deployment that `kits.make_kits` has made."""

    def __init__(self, folder: Path, deployment: Deployment):
        self._kit, self._deployment = folder.absolute() / "server", deployment
        self._work = Path(tempfile.mkdtemp(prefix="nestfed-"))  # short, for the paths of sockets
        self._letters = serve_letters(self._work / "letters")
        self._nodes: dict[str, str] = {}
        self._run = ""
        self._problem = "Flower's SuperLink has not started yet"
        self._closing = threading.Event()
        self._write_home()
        self._server = start_server(self._kit, deployment, self._work)
        self._thread = threading.Thread(target=self._keep_a_run, daemon=True)
        self._thread.start()

    def ask(self, letters: Mapping[str, bytes], timeout: float) -> Answers:
        timeout = max(timeout, LEAST)  # even a hello takes seconds here
        for site, answer in self._letters.ask(letters, timeout):
            if isinstance(answer, LostSite) and not self._letters.wait_for_job(0):
                answer = LostSite(f"{answer.reason}: {self._problem}")
            yield site, answer

    def close(self) -> None:
        self._closing.set()
        self._letters.close()
        self._thread.join(COMMAND)
        self._server.stop()
        shutil.rmtree(self._work, ignore_errors=True)

    def _write_home(self) -> None:
        """How Flower's commands find the SuperLink."""
        home = self._work / "home"
        home.mkdir()
        address = f"{self._deployment.server}:{self._deployment.port}"
        own = {"address": address, "root-certificates": str(self._kit / "ca.crt")}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "nestfed", "nestfed": own}}))

    def _register(self, site: str) -> str:
        """The number of the node with this site's key."""
        public = self._kit / "sites" / f"{site}.pub"
        try:
            return self._call("supernode", "register", public, "nestfed", "--name", site)["node-id"]
        except (OSError, subprocess.SubprocessError):
            # A command that took too long may have done its work: then one node is there that we do not know yet.
            known = {node["node-id"] for node in self._call("supernode", "list", "nestfed")["nodes"]}
            if len(new := known - set(self._nodes.values())) != 1:
                raise
            return new.pop()

    def _write_app(self) -> Path:
        app = self._work / "app"
        app.mkdir(exist_ok=True)
        (app / "nestfed_relay.py").write_text(CODE)
        about = {"name": "nestfed-relay", "version": "0.1.0", "description": "letters", "license": "Apache-2.0"}
        parts = {"serverapp": "nestfed_relay:server", "clientapp": "nestfed_relay:client"}
        config = {"letters": str(self._work / "letters"), "nodes": json.dumps(self._nodes)}
        flower = {"app": {"publisher": "nestfed", "components": parts, "config": config}}
        project = {"project": {**about, "dependencies": []}, "tool": {"flwr": flower}}
        (app / "pyproject.toml").write_text(tomli_w.dumps(project))
        return app

    def _keep_a_run(self) -> None:
        while not self._closing.wait(0.1):
            try:
                if not self._letters.wait_for_job(0):
                    self._start_run()
            except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                self._problem = " ".join(str(error).split())
                self._closing.wait(1.0)

    def _start_run(self) -> None:
        deadline = time.monotonic() + LISTENS
        while not self._is_listening():
            if time.monotonic() > deadline:
                raise OSError(f"Flower's SuperLink does not listen; see {self._server.log}")
            if self._closing.wait(0.2):
                return
        for site in self._deployment.sites:
            if site not in self._nodes:
                self._nodes[site] = self._register(site)
        if self._run:
            with contextlib.suppress(OSError):  # it has ended
                self._call("stop", self._run, "nestfed")
        self._run = self._call("run", self._write_app(), "nestfed")["run-id"]
        deadline = time.monotonic() + START
        while not self._letters.wait_for_job(0.2):
            if self._closing.is_set():
                return
            if time.monotonic() > deadline:
                raise OSError(f"Flower's app did not begin; see {self._server.log}")

    def _is_listening(self) -> bool:
        try:
            with socket.create_connection((self._deployment.server, self._deployment.port), timeout=2):
                return True
        except OSError:
            return False

    def _call(self, *words: str | Path) -> dict[str, Any]:
        """A command of Flower's, which answers in JSON."""
        environment = {**os.environ, **_make_environment(self._work / "home")}
        command = [_find("flwr"), *words, "--format", "json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND)
        try:
            said = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            said = {"success": False, "error-message": done.stderr or done.stdout}
        if not said.get("success"):
            raise OSError(f"flwr {words[0]}: {said.get('error-message', said)}")
        return said
