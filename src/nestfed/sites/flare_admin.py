"""A session with NVIDIA FLARE's server in a process of its own: to see which sites are connected, and to submit jobs.

FLARE's client has threads, prints and tracebacks of its own, which do not belong into the coordinator's process. It is
asked in JSON at a Unix socket, one question at a time: python -m nestfed.sites.flare_admin SOCKET KIT LETTERS
"""

import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from nestfed.sites.flare_job import Post, Relay
from nestfed.sites.kits import USER
from nestfed.sites.link import listen_at, receive_bytes, send_bytes

LOGIN = 5.0  # seconds to reach the server
TALK = 10.0  # seconds for a question or an answer


class Admin:
    """What may be asked: each method is a question."""

    def __init__(self, kit: Path, letters: Path):
        self._kit, self._letters = kit, letters
        self._session: Session | None = None

    def answer(self, question: dict) -> dict:
        """{"answer": ...}, or {"error": why not}."""
        try:
            if self._session is None:
                self._session = new_secure_session(USER, str(self._kit), timeout=LOGIN)
            return {"answer": getattr(self, question.pop("do"))(**question)}
        except Exception as error:  # FLARE's are of many kinds, without a common one; the next question logs in anew
            print(f"{question}: {type(error).__name__}: {error}", flush=True)
            with contextlib.suppress(Exception):
                if self._session is not None:
                    self._session.close()
            self._session = None
            return {"error": f"FLARE: {' '.join(str(error).split()) or type(error).__name__}"}

    def list_connected(self) -> dict[str, float]:
        """When each site was heard of last."""
        assert self._session is not None
        return {site.name: float(site.last_connect_time) for site in self._session.get_system_info().client_info}

    def submit(self, sites: list[str]) -> str:
        """A new job with these sites."""
        assert self._session is not None
        with tempfile.TemporaryDirectory() as folder:
            return self._session.submit_job(str(self._write_job(Path(folder), sites)))

    def find_status(self, job: str) -> str:
        assert self._session is not None
        return str(self._session.get_job_status(job))

    def abort(self, job: str) -> None:
        assert self._session is not None
        self._session.abort_job(job)

    def _write_job(self, folder: Path, sites: list[str]) -> Path:
        """The job's files: configuration only. The recipe would send the sources of our classes along, which sites
        refuse, for they have them."""
        recipe = CollabRecipe("nestfed", server=Post(str(self._letters)), client=Relay(), min_clients=1)
        recipe.export(str(folder))
        job = folder / "nestfed"
        for sources in job.rglob("custom"):
            shutil.rmtree(sources)
        meta = json.loads((job / "meta.json").read_text())
        (job / "meta.json").write_text(json.dumps({**meta, "deploy_map": {"app": ["server", *sites]}}))
        return job


def main() -> None:
    socket, kit, letters = map(Path, sys.argv[1:])
    admin, listener = Admin(kit, letters), listen_at(socket)
    while True:
        asker, _ = listener.accept()
        with asker, contextlib.suppress(OSError):
            question = json.loads(receive_bytes(asker, time.monotonic() + TALK))
            send_bytes(asker, json.dumps(admin.answer(question)).encode(), time.monotonic() + TALK)


if __name__ == "__main__":
    main()
