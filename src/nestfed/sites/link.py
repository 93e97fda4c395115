"""How letters get from the coordinator to the sites' workers and back: bytes on their way, nothing else.

A framework (NVIDIA FLARE, Flower) is a `Link`. Its own processes hold no JAX, no arrays and no state. At the site they
hand a letter to the worker (`relay`); beside the server they fetch letters from the coordinator (`fetch_letters`),
whose end of it is a `JobLink`. This module needs the standard library only, so it can be loaded there.
"""

import contextlib
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

LARGEST = 1 << 33  # bytes of a letter that anybody accepts
LONGEST_PATH = 100  # bytes of the path of a Unix socket: systems have room for 104 or 108
GRACE = 5.0  # seconds that a job may need beyond the time in which sites must answer
_SIZE = struct.Struct("!Q")


class LostSite(NamedTuple):
    """In place of an answer: why there is none."""

    reason: str


Answers = Iterator[tuple[str, bytes | LostSite]]


class Link(Protocol):
    """What a framework must do."""

    def ask(self, letters: Mapping[str, bytes], timeout: float) -> Answers:
        """Send each named site its letter; yield (site, answer) as answers come, each site once. A site that failed or
        was late yields LostSite. It ends in little more than `timeout` seconds, whatever happens."""
        ...

    def close(self) -> None: ...


class LinkError(OSError):
    """A connection that does not work, in one line."""


# ------------------------------------------------------------------------------------------------- bytes on a socket


def send_bytes(connection: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    """The length, then the bytes."""
    connection.settimeout(_measure_time_left(deadline))
    connection.sendall(_SIZE.pack(len(data)))
    connection.settimeout(_measure_time_left(deadline))
    connection.sendall(data)


def receive_bytes(connection: socket.socket, deadline: float) -> bytes:
    """What `send_bytes` has sent; ConnectionError where the other side closed."""
    (size,) = _SIZE.unpack(_receive_exactly(connection, _SIZE.size, deadline))
    if size > LARGEST:
        raise LinkError(f"a letter of {size} bytes was announced; at most {LARGEST} are accepted.")
    return _receive_exactly(connection, size, deadline)


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    # Room grows with what arrives: who only announces much takes no memory here.
    data = bytearray()
    while len(data) < size:
        connection.settimeout(_measure_time_left(deadline))
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return bytes(data)


def _measure_time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def listen_at(path: Path) -> socket.socket:
    """A Unix socket that only its owner can use."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise LinkError(f"the path of a socket may have {LONGEST_PATH} bytes; give a shorter folder than {path}.")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen()
    return listener


def _connect(path: Path, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_measure_time_left(deadline))
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise LinkError(f"nobody answers at {path} ({error.strerror or error})") from error
    return connection


# ------------------------------------------------------------------------------------------------- at a site


def relay(path: Path, letter: bytes, timeout: float) -> bytes:
    """Hand a letter to the worker whose socket this is, and return its answer. OSError says why there is none."""
    deadline = time.monotonic() + timeout
    with _connect(path, deadline) as connection:
        send_bytes(connection, letter, deadline)
        return receive_bytes(connection, deadline)


class LoopbackLink:
    """Straight to workers of this machine, with no framework between."""

    def __init__(self, sockets: Mapping[str, Path]):
        self.sockets = dict(sockets)

    def ask(self, letters: Mapping[str, bytes], timeout: float) -> Answers:
        return ask_each(lambda site, letter: relay(self.sockets[site], letter, timeout), letters, timeout)

    def close(self) -> None:
        """There is nothing to close: a connection lasts for one letter."""


def ask_each(ask: Callable[[str, bytes], bytes], letters: Mapping[str, bytes], timeout: float) -> Answers:
    """ask(site, letter) for all at once, a thread for each: for links that can ask one site at a time. An OSError of it
    is a lost site, and so is one that takes longer than `timeout`."""
    answers: queue.Queue[tuple[str, bytes | LostSite]] = queue.Queue()

    def carry(site: str, letter: bytes) -> None:
        try:
            answers.put((site, ask(site, letter)))
        except TimeoutError:  # whose own words depend on where the time was spent
            answers.put((site, LostSite("no answer in time")))
        except OSError as error:
            answers.put((site, LostSite(str(error) or type(error).__name__)))

    for site, letter in letters.items():
        threading.Thread(target=carry, args=(site, letter), daemon=True).start()
    waiting, deadline = set(letters), time.monotonic() + timeout
    while waiting:
        try:
            site, answer = answers.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            break
        waiting.discard(site)
        yield site, answer
    for site in sorted(waiting):
        yield site, LostSite(f"no answer within {timeout:g} s")


# ------------------------------------------------------------------------------------------------- at the server


class JobLink:
    """The coordinator's end of a framework's job, which fetches letters at a Unix socket and brings the answers back.

    The job may be restarted: who connects last is the job, and it is asked again for the answers that are missing.
    """

    def __init__(self, path: Path):
        self.path, self._number = path, 0
        self._job: socket.socket | None = None
        self._changed = threading.Condition()
        self._listener = listen_at(path)
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for_job(self, timeout: float) -> bool:
        """Is a job there, or does one come within this time? A job that has ended shows when it is asked."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is not None, timeout)

    def ask(self, letters: Mapping[str, bytes], timeout: float) -> Answers:
        waiting, deadline = dict(letters), time.monotonic() + timeout
        while waiting:
            if not self.wait_for_job(max(deadline - time.monotonic(), 0)):
                break
            with self._changed:
                job = self._job
            if job is None:
                continue
            self._number += 1
            try:
                _send_letters(job, self._number, waiting, deadline)
                while waiting:
                    number, site, answer = _receive_answer(job, deadline + GRACE)
                    if number == self._number and waiting.pop(site, None) is not None:
                        yield site, answer
            except (OSError, ValueError, KeyError):  # it has ended, hangs, or says what no job of ours says
                self._drop(job)
        for site in sorted(waiting):
            yield site, LostSite(f"no answer within {timeout:g} s")

    def drop_job(self) -> None:
        """The loop of the present job ends, and the letters that come are for the next one."""
        with self._changed:
            job = self._job
        if job is not None:
            self._drop(job)

    def close(self) -> None:
        """The job's loop ends."""
        _hang_up(self._listener)
        with self._changed:
            job, self._job = self._job, None
        if job is not None:
            _hang_up(job)
        self.path.unlink(missing_ok=True)

    def _drop(self, job: socket.socket) -> None:
        _hang_up(job)
        with self._changed:
            if self._job is job:
                self._job = None

    def _accept(self) -> None:
        while True:
            try:
                job, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._changed:
                before, self._job = self._job, job
                self._changed.notify_all()
            if before is not None:
                _hang_up(before)


def _hang_up(connection: socket.socket) -> None:
    """Closed, also for a thread that waits at it: merely to close it would let that thread wait on."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def serve_letters(path: Path) -> JobLink:
    """At the coordinator: letters for a job wait at this socket."""
    return JobLink(path)


def fetch_letters(path: Path, carry: Callable[[Mapping[str, bytes], float], Answers], patience: float = 60.0) -> None:
    """In a framework's job: fetch letters at the coordinator's socket, let carry(letters, timeout) deliver them, and
    bring back its answers, until the coordinator closes or is gone. It must come within `patience` seconds."""
    with _connect(path, time.monotonic() + patience) as coordinator:
        while True:
            try:
                number, letters, timeout = _receive_letters(coordinator)
                for site, answer in carry(letters, timeout):
                    _send_answer(coordinator, number, site, answer)
            except (ConnectionError, TimeoutError):
                return


_DAY = 86400.0  # seconds; a coordinator that is alive may have nothing to ask for long


def _send_letters(job: socket.socket, number: int, letters: Mapping[str, bytes], deadline: float) -> None:
    head = {"number": number, "timeout": _measure_time_left(deadline), "sites": list(letters)}
    send_bytes(job, json.dumps(head).encode(), deadline)
    for letter in letters.values():
        send_bytes(job, letter, deadline)


def _receive_letters(coordinator: socket.socket) -> tuple[int, dict[str, bytes], float]:
    head = json.loads(receive_bytes(coordinator, time.monotonic() + _DAY))
    deadline = time.monotonic() + head["timeout"] + GRACE
    letters = {site: receive_bytes(coordinator, deadline) for site in head["sites"]}
    return head["number"], letters, head["timeout"]


def _send_answer(coordinator: socket.socket, number: int, site: str, answer: bytes | LostSite) -> None:
    lost = answer.reason if isinstance(answer, LostSite) else None
    head = {"number": number, "site": site, "lost": lost}
    deadline = time.monotonic() + _DAY
    send_bytes(coordinator, json.dumps(head).encode(), deadline)
    send_bytes(coordinator, b"" if isinstance(answer, LostSite) else answer, deadline)


def _receive_answer(job: socket.socket, deadline: float) -> tuple[int, str, bytes | LostSite]:
    head = json.loads(receive_bytes(job, deadline))
    answer = receive_bytes(job, deadline)
    return head["number"], str(head["site"]), answer if head["lost"] is None else LostSite(str(head["lost"]))
