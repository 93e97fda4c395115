"""What carries letters between the coordinator and its sites: a framework, or nothing where all is one machine."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nestfed.core.settings import UserError
from nestfed.sites.keeper import Kept, keep
from nestfed.sites.kits import make_kits, read_deployment
from nestfed.sites.link import Link, LoopbackLink
from nestfed.sites.worker import SOCKET

ENGINES = ("flare", "flower", "direct")


def choose_engine(asked: str | None) -> str:
    """The engine of a deployment on this machine: NVIDIA FLARE where it is installed."""
    if asked is None:
        return "flare" if importlib.util.find_spec("nvflare") else "direct"
    if asked not in ENGINES:
        raise UserError(f"--engine {asked} was given; there are: {', '.join(ENGINES)}.")
    package = {"flare": "nvflare", "flower": "flwr"}.get(asked)
    if package is not None and not importlib.util.find_spec(package):
        raise UserError(
            f"--engine {asked} needs the package {package}; install it with: pip install 'nestfed[{asked}]'"
        )
    return asked


def open_link(folder: Path) -> Link:
    """The coordinator's way to the sites of the deployment in this folder."""
    deployment = read_deployment(folder)
    if deployment.engine == "flare":
        from nestfed.sites.flare import FlareLink

        return FlareLink(folder, deployment)
    raise UserError(f"{folder} is a deployment on {deployment.engine}, which this nestfed cannot run.")


def start_relay(folder: Path, engine: str, worker: Path) -> Kept:
    """At a site: the framework's process that hands letters to the worker."""
    if engine == "flare":
        from nestfed.sites.flare import start_site

        return start_site(folder, worker)
    raise UserError(f"{folder} is the kit of a site on {engine}, which this nestfed cannot run.")


def start_worker(folder: Path, data: Path, environment: Mapping[str, str] | None = None) -> Kept:
    """At a site: the worker, restarted when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "nestfed.sites.worker", "--folder", folder, "--data", data.resolve()]
    return keep([*words, "--socket", find_socket(folder)], folder / "worker.log", environment)


def find_socket(folder: Path) -> Path:
    return folder / SOCKET


@contextlib.contextmanager
def open_local(
    engine: str, folder: Path, data: Mapping[str, Path], say: Callable[[str], None], port: int | None = None
) -> Iterator[Link]:
    """All of a deployment on this machine, for these sites and their files: nothing of it is left at the end."""
    with contextlib.ExitStack() as stack:
        if engine != "direct":
            deployment = make_kits(folder, list(data), engine=engine, server="localhost", port=port)  # type: ignore
            say(f"made keys and certificates for {deployment.server}:{deployment.port}")
        for site, file in data.items():
            worker = start_worker(folder / site, file)
            stack.callback(worker.stop)
            if engine != "direct":
                stack.callback(start_relay(folder / site, engine, find_socket(folder / site)).stop)
        if engine == "direct":
            link: Link = LoopbackLink({site: find_socket(folder / site) for site in data})
        else:
            link = open_link(folder)
        stack.callback(link.close)
        yield link
