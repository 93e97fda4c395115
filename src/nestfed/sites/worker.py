"""A site's worker: one warm process with JAX, the compiled program, the site's rows and its state on disk.

It answers letters at a Unix socket of its owner, one after the other. Whatever it is asked, its rows stay here: what it
sends are the sums before a run, the questions of an algorithm's exchanges, and those of metrics.

    python -m nestfed.sites.worker --folder SITE --data my.csv --store SITE/store --socket PATH
"""

import argparse
import contextlib
import json
import re
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.sites.link import listen_at, receive_bytes, send_bytes
from nestfed.sites.masks import LIST_FILE, PREPARING, SiteMask
from nestfed.sites.wire import VERSION, Letter, WireError, pack, unpack
from nestfed.verbs.checkpoints import write_durably
from nestfed.verbs.messages import Leaves, Node, Occasion, Standing, Ticket, read_leaves

PATIENCE = 600.0  # seconds for a letter to come in or to go out whole
SOCKET = "worker.sock"


class Tasks(Protocol):
    """One party's tasks of a seed: what a site has, or its server."""

    def make_algorithms(self, method: str, changes: Mapping[str, Any]) -> list[Algorithm]: ...

    def task(self, method: str, stage: int = 0, before: Any = None) -> Task: ...

    def leave(self, task: Task, server: Any, clients: Any = None) -> Any: ...


class Party(Protocol):
    """A site before a run: what it adds to the sums of all, and what it makes of them."""

    def tell(self, sums: Sequence[np.ndarray]) -> np.ndarray: ...

    def prepare(self, sums: Sequence[np.ndarray]) -> Tasks: ...


class Refused(UserError):
    """A letter that this site does not answer."""


class Leg(dict[str, Any]):
    """Which part of a run: settings, seed, method, its changes, and the number of its stage. As JSON has it."""

    @property
    def name(self) -> str:
        return f"{self['method']}-seed{self['seed']}-{self['stage']}"


def describe_party(algorithm: Algorithm, task: Task) -> dict[str, str]:
    """What site and server must have in common for a leg; what it is about, by name."""
    start = [[a.shape, np.dtype(a.dtype).name, float(np.sum(np.asarray(a, float)))] for a in task.params]
    numbers = [np.asarray(a).tolist() for a in jax.tree.leaves(task.problem) if np.ndim(a) == 0]
    return {
        "version of nestfed": version("nestfed"),
        "precision": str(jax.numpy.result_type(float)),
        "algorithm and its settings": repr(algorithm).split(" at 0x")[0],
        "problem": f"{type(task.problem).__name__} {numbers}",
        "batch size": str(task.batch_size),
        "starting point": json.dumps(start),
    }


def check_name(name: str) -> str:
    """A name that came in a letter and becomes that of a file: it must lead nowhere else."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise Refused(f"the name {name!r} came in a letter; names have letters, digits, -, _ and dots.")
    return name


def keep_file(path: Path, content: bytes) -> None:
    """Written beside, flushed to the disk, renamed: a kill, or a full disk, leaves the old file."""
    try:
        write_durably(path, content, mode=0o600)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(f".{path.name}.part").unlink()
        raise Refused(
            f"{path} cannot be written ({error.strerror}); make room on that disk: what it held before is still there."
        ) from error


class DiskStore:
    """A node's record in one file."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def load(self) -> dict[str, Leaves]:
        if not self.path.exists():
            return {}
        try:
            header, arrays = unpack(self.path.read_bytes())
        except WireError as error:
            raise Refused(
                f"{self.path} is no whole record of this site ({error}) It was left as it is; restore it from a "
                "backup, or move it away and start the run anew."
            ) from None
        rest = iter(arrays)
        return {name: [next(rest) for _ in range(number)] for name, number in header["names"]}

    def save(self, record: Mapping[str, Leaves]) -> None:
        names = [(name, len(leaves)) for name, leaves in record.items()]
        keep_file(self.path, pack(Letter({"names": names}, [a for leaves in record.values() for a in leaves])))


class Worker:
    """Answers letters about one site's rows.

    `make_preparation(settings, schema, number, sites, seed)` reads the rows. `folder` is the site's own, and its state
    is in `store`; `find_mask` gives the mask of a run where uploads must be hidden from the server.
    """

    def __init__(
        self,
        make_preparation: Callable[[Mapping[str, Any], str | None, int, int, int], Party],
        folder: Path,
        store: Path,
        find_mask: Callable[[str, Sequence[str], int], SiteMask] | None = None,
        uploads: Callable[[Mapping[str, Any], int], Any] = lambda settings, stage: (),
    ):
        self.make_preparation, self.folder, self.store = make_preparation, folder, store
        self.find_mask, self.uploads = find_mask, uploads
        self._preparation: tuple[str, Party] | None = None
        self._open: tuple[str, str] | None = None  # (run, leg)
        self._node: Node | None = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a letter; one that says why, where there is none."""
        try:
            letter = unpack(data)
            handlers = {
                "hello": self.say_hello,
                "tell": self.tell_sums,
                "open": self.open_leg,
                "ticket": self.answer_ticket,
                "metrics": self.answer_ticket,
            }
            kind = letter.header.get("kind")
            if kind not in handlers:
                raise Refused(f"a letter of the kind {kind!r} came, which this version of nestfed does not know.")
            return pack(handlers[kind](letter))
        except UserError as error:
            return pack(Letter({"refused": " ".join(str(error).split())}))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            traceback.print_exc()  # for the site's own log
            return pack(Letter({"refused": f"a letter that does not fit came ({type(error).__name__}: {error})."}))

    def say_hello(self, letter: Letter) -> Letter:
        here = {"wire": VERSION, "nestfed": version("nestfed"), "precision": str(jax.numpy.result_type(float))}
        return Letter({**here, "open": None if self._open is None else list(self._open)})

    def tell_sums(self, letter: Letter) -> Letter:
        """What this site adds to the next sum of all sites."""
        header = letter.header
        self._check_masked(header)
        mine = np.asarray(self._prepare(header).tell(letter.arrays))
        if header["masked"]:
            asked = tuple(range(len(header["names"])))
            occasion = Occasion(PREPARING, int(header["attempt"]), len(letter.arrays), asked)
            mine = self._find_mask(header).hide(mine, occasion)
        return Letter({}, [mine])

    def open_leg(self, letter: Letter) -> Letter:
        """Be ready for a part of a run: the task is built, and the state of this site is read from its disk."""
        header = letter.header
        leg, run = Leg(header["leg"]), str(header["run"])
        self._check_masked(header)
        number = int(header["sums"])
        prepared = self._prepare(header).prepare(letter.arrays[:number])
        rest, before = list(letter.arrays[number:]), None
        algorithms = prepared.make_algorithms(leg["method"], leg["changes"])
        task = prepared.task(leg["method"], 0, None)
        for stage in range(leg["stage"]):  # what the stages before have left
            like = Node(algorithms[stage], task, leg["seed"]).server_shapes()
            count = len(jax.tree.leaves(like))
            server, rest = read_leaves(like, rest[:count]), rest[count:]
            before = prepared.leave(task, server, None)
            task = prepared.task(leg["method"], stage + 1, before)
        algorithm = algorithms[leg["stage"]]
        store = self.store / check_name(run)
        mask = self._find_mask(header) if header["masked"] else None
        self._open = self._node = None
        self._node = Node(
            algorithm,
            task,
            leg["seed"],
            DiskStore(store / f"{check_name(leg.name)}.state"),
            uploads=self.uploads(header["settings"], leg["stage"]),
            secret=self._find_secret(store),
            mask=mask,
            gathers=False,
        )
        self._open = run, leg.name
        return Letter({"party": describe_party(algorithm, task)})

    def answer_ticket(self, letter: Letter) -> Letter:
        """The next question of a round, or of metrics."""
        header = letter.header
        if self._node is None or self._open != (header["run"], header["leg"]):
            raise Refused("this site was restarted, or is in another run; it takes part again in the next round.")
        ticket = read_ticket(header, letter.arrays, self._node)
        began = time.process_time()
        act = self._node.inspect if header["kind"] == "metrics" else self._node.receive
        question = act(ticket)
        self._node.take_notes()
        used = time.process_time() - began
        return Letter({"asks": question is not None, "seconds": used}, question or [])

    def _prepare(self, header: Mapping[str, Any]) -> Party:
        name = json.dumps([header[key] for key in ("settings", "schema", "number", "names", "seed")], sort_keys=True)
        if self._preparation is None or self._preparation[0] != name:
            made = self.make_preparation(
                header["settings"], header["schema"], int(header["number"]), len(header["names"]), int(header["seed"])
            )
            self._preparation = name, made
        return self._preparation[1]

    def _find_secret(self, store: Path) -> bytes:
        """Of this site's noise, made once for a run."""
        path = store / "secret"
        if not path.exists():
            keep_file(path, secrets.token_bytes(32))
        return path.read_bytes()

    def _check_masked(self, header: Mapping[str, Any]) -> None:
        """A site that has a list of keys does not leave it to others whether it is used."""
        if not header["masked"] and (self.folder / LIST_FILE).exists():
            raise Refused(
                f"this site has a list of keys ({LIST_FILE}) and tells nothing that is not masked; run it with "
                "--secure-aggregation."
            )

    def _find_mask(self, header: Mapping[str, Any]) -> SiteMask:
        if self.find_mask is None:
            raise Refused("masked uploads were asked for, and this site has no key for them.")
        return self.find_mask(str(header["run"]), list(map(str, header["names"])), int(header["number"]))


def write_ticket(ticket: Ticket, server: Leaves | None) -> tuple[dict[str, Any], Leaves]:
    """(header, arrays) of a ticket; `server` are the leaves of its Shared fields."""
    parts: list[Leaves | None] = [server, ticket.answer, None if ticket.since is None else ticket.since.answer]
    header = {
        "round": ticket.round,
        "attempt": ticket.attempt,
        "exchange": ticket.exchange,
        "share": ticket.share,
        "part": ticket.part,
        "asked": list(ticket.asked),
        "since": None if ticket.since is None else [ticket.since.round, ticket.since.attempt],
        "counts": [None if part is None else len(part) for part in parts],
    }
    return header, [a for part in parts for a in part or []]


def read_ticket(header: Mapping[str, Any], arrays: Sequence[np.ndarray], node: Node) -> Ticket:
    rest = list(arrays)
    take = lambda number: None if number is None else [rest.pop(0) for _ in range(number)]
    server, answer, ending = (take(number) for number in header["counts"])
    since = None
    if header["since"] is not None:
        round, attempt = map(int, header["since"])
        since = Standing(round, attempt, ending)
    return Ticket(
        int(header["round"]),
        int(header["attempt"]),
        int(header["exchange"]),
        answer,
        None if server is None else node.read_broadcast(server),
        float(header["share"]),
        since,
        float(header["part"]),
        tuple(map(int, header["asked"])),
    )


def serve(worker: Worker, path: Path) -> None:
    """Answer letters at this socket, one after the other, until the process ends."""
    listener = listen_at(path)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # who asked may be gone by now: it asks again
            _answer_one(worker, connection)


def _answer_one(worker: Worker, connection: socket.socket) -> None:
    letter = receive_bytes(connection, time.monotonic() + PATIENCE)
    send_bytes(connection, worker.answer(letter), time.monotonic() + PATIENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description="The worker of a site; `nestfed site start` starts it.")
    parser.add_argument("--folder", type=Path, required=True, help="the site's own folder")
    parser.add_argument("--data", type=Path, required=True, help="its rows")
    parser.add_argument("--store", type=Path, required=True, help="where its state is kept")
    parser.add_argument("--socket", type=Path, required=True)
    chosen = parser.parse_args()
    from nestfed.sites.problem import make_worker  # it knows tables, which a test's worker need not

    try:
        serve(make_worker(chosen.folder, chosen.data, chosen.store), chosen.socket)
    except UserError as error:
        sys.exit(f"nestfed: {error}")


if __name__ == "__main__":
    main()
