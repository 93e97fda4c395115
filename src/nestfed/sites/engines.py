"""What carries letters between the coordinator and its sites: a framework, or nothing where all is one machine."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from nestfed.core.settings import UserError
from nestfed.sites.keeper import Kept, keep
from nestfed.sites.kits import find_free_port, make_kits, read_deployment, read_kit
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
    from nestfed.sites.flower import FlowerLink

    return FlowerLink(folder, deployment)


def start_relay(folder: Path, engine: str, worker: Path) -> Kept:
    """At a site: the framework's process that hands letters to the worker."""
    if engine == "flare":
        from nestfed.sites import flare

        return flare.start_site(folder, worker)
    from nestfed.sites import flower

    return flower.start_site(folder, worker)


def start_worker(
    folder: Path, data: Path, store: Path | None = None, environment: Mapping[str, str] | None = None
) -> Kept:
    """At a site: the worker, restarted when it ends; its state is in `store`, or in the site's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "nestfed.sites.worker", "--folder", folder, "--data", data.resolve()]
    where = ["--socket", find_socket(folder), "--store", (store or folder / "store").resolve()]
    return keep([*words, *where], folder / "worker.log", environment)


def find_socket(folder: Path) -> Path:
    return folder / SOCKET


def run_site(folder: Path, data: Path, say: Callable[[str], None]) -> None:
    """One site, until it is told to end: its worker and the framework's process, each restarted when it ends."""
    kit = read_kit(folder)
    if not data.exists():
        raise UserError(f"there is no file {data}; give this site's rows with --data.")
    with contextlib.ExitStack() as stack:
        worker = start_worker(folder, data)
        stack.callback(worker.stop)
        relay = start_relay(folder, kit.engine, find_socket(folder))
        stack.callback(relay.stop)
        say(f"site {kit.site}: {data} stays here; {kit.engine} reaches {kit.server}:{kit.port}")
        say(f"what happens is in {worker.log} and {relay.log}; Ctrl-C ends both")
        while worker.running and relay.running:
            time.sleep(1.0)
        raise UserError(f"a process of this site has ended for good; see {worker.log} and {relay.log}.")


@contextlib.contextmanager
def open_local(
    engine: str,
    folder: Path,
    data: Mapping[str, Path],
    stores: Path,
    say: Callable[[str], None],
    port: int | None = None,
) -> Iterator[Link]:
    """All of a deployment on this machine, for these sites and their files: nothing of it runs on at the end. The state
    of every site stays in `stores`."""
    with contextlib.ExitStack() as stack:
        if engine != "direct":
            deployment = make_kits(folder, list(data), engine, port=port or find_free_port())
            say(f"made keys and certificates for {deployment.server}:{deployment.port}")
        precision = {"JAX_ENABLE_X64": "1" if jax.config.read("jax_enable_x64") else "0"}
        for site, file in data.items():
            worker = start_worker(folder / site, file, stores / site, precision)
            stack.callback(worker.stop)
            if engine != "direct":
                stack.callback(start_relay(folder / site, engine, find_socket(folder / site)).stop)
        if engine == "direct":
            link: Link = LoopbackLink({site: find_socket(folder / site) for site in data})
        else:
            link = open_link(folder)
        stack.callback(link.close)
        yield link
