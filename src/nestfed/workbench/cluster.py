"""One run in several processes, here or on several machines: who starts them, and who watches them.

The process that a user starts does no work: it starts its share of the members of the run and watches them, without
JAX, because JAX ends a process whose peers are gone in a way that Python cannot catch. A member joins the others
(`nestfed.engine.processes`) and does what the command line says; the first one alone writes files and speaks.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from nestfed.core.settings import UserError
from nestfed.workbench.task_options import ClusterOptions

JOIN, SCREEN = "NESTFED_JOIN", "NESTFED_SCREEN"  # how a member is told where it belongs, and where it may write
THREADS = "PJRT_NPROC"  # where XLA on a CPU reads how many threads it may have
FOUND = "found"  # by JAX, where srun or mpirun has started us
LAUNCHERS = {  # the numbers of processes and their own number, as launchers say them
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri"),
}
PROGRAM = "from nestfed.cli import main; main()"  # of a member: the command line again
GRACE = 1.0  # seconds for members to end by themselves, after the first that did not end well
LOST = 70  # exit code of a member whose peers are gone
ORDERLY = (0, 3)  # exit codes at which all members arrive together: done, diverged
SAID = (*ORDERLY, 130)  # exit codes of which the first member has told the user


@dataclasses.dataclass
class Member:
    """A process of the run that this machine has."""

    number: int
    child: subprocess.Popen[bytes]
    log: IO[bytes]  # what it wrote where nobody looks, JAX's own messages included
    given_up: bool = False  # it had to be ended

    @property
    def said(self) -> str:
        """The last words of it that are meant for a user."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        ours = [line for line in lines if line.startswith("nestfed: ")]
        begun = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), None)
        return ours[-1] if ours else "" if begun is None else "\n".join(lines[begun:])


def lead(options: ClusterOptions) -> int | None:
    """Start and watch the processes that were asked for, and give the run's exit code; None: this process runs alone,
    or is one of them."""
    if JOIN in os.environ or (places := _find_places(options)) is None:
        return None
    with contextlib.ExitStack() as stack:
        screen = os.dup(1), os.dup(2)
        for one in screen:
            stack.callback(os.close, one)
        # As many threads as cores in every process of a machine would stand in each other's way: each has its share.
        share = {} if len(places) == 1 else {THREADS: str(max(1, (os.cpu_count() or 1) // len(places)))}
        members = [_start(number, place, share, screen, stack) for number, place in places]
        with _pass_signals_to(members):
            return _watch(members)


def _find_places(options: ClusterOptions) -> list[tuple[int, str]] | None:
    """(number, where to join) of every process to start here."""
    number, own = options.processes, options.process_id
    if options.coordinator is not None:
        if number is None or own is None:
            raise UserError("--coordinator was given; give --processes (how many) and --process-id (0, 1, ...) too.")
        host, colon, port = options.coordinator.rpartition(":")
        if not colon or not host or not port.isdecimal():
            raise UserError(f"--coordinator {options.coordinator} was given; write host:port, such as node1:9955.")
        if own >= number:
            raise UserError(f"--process-id {own} of --processes {number} was given; they are numbered from 0.")
        return [(own, f"{options.coordinator},{number},{own}")]
    if own is not None:
        raise UserError("--process-id was given without --coordinator; name host:port of process 0.")
    if number == 1:
        return None
    if number is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        return [(i, f"{address},{number},{i}") for i in range(number)]
    for of_all, of_own, mark in LAUNCHERS.values():
        if mark in os.environ and int(os.environ.get(of_all, "1")) > 1:
            return [(int(os.environ[of_own]), FOUND)]
    return None


def _start(
    number: int, place: str, share: Mapping[str, str], screen: tuple[int, int], stack: contextlib.ExitStack
) -> Member:
    log = stack.enter_context(tempfile.TemporaryFile())
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *sys.argv[1:]],
        env={**share, **os.environ} | {JOIN: f"{number},{place}", SCREEN: f"{screen[0]},{screen[1]}"},
        stdin=subprocess.PIPE,  # nothing is written to it: it ends when this process does
        stdout=log,
        stderr=log,
        pass_fds=screen,
        start_new_session=True,  # Ctrl-C is this process's to pass on
    )
    stack.enter_context(child)
    stack.callback(child.kill)
    return Member(number, child, log)


@contextlib.contextmanager
def _pass_signals_to(members: list[Member]) -> Iterator[None]:
    def pass_on(number: int, frame: Any) -> None:
        for member in members:
            member.child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(members: list[Member]) -> int:
    """Until all have ended: the exit code of the run, after a line where no member could say what went wrong."""
    deadline = None
    while any(member.child.poll() is None for member in members):
        if deadline is None and any(member.child.poll() for member in members):
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            for member in members:
                if member.child.poll() is None:
                    member.given_up = True
                    member.child.kill()
        time.sleep(0.02)
    speaks = lambda member: member.number == members[0].number or member.child.returncode not in SAID
    for member in members:
        code = member.child.returncode
        if not member.given_up and 0 <= code != LOST and speaks(member):
            if code and member.number and member.said:
                print(member.said, file=sys.stderr)
            return code
    print(f"nestfed: {_tell_what_happened(members)} The run has ended; --resume goes on with it.", file=sys.stderr)
    return 1


def _tell_what_happened(members: list[Member]) -> str:
    for member in members:
        code = member.child.returncode
        if not member.given_up and code < 0 and -code != signal.SIGABRT:
            return f"process {member.number} was ended by {signal.Signals(-code).name}."
    for member in members:
        if member.given_up:
            return f"process {member.number} did not answer."
    told = members[0].said.splitlines()
    why = f" ({told[-1]})" if told else ""
    return f"process {members[0].number} lost the others: a process has ended, or does not answer{why}."


# ------------------------------------------------------------------------------------------------- a member


def is_member() -> bool:
    """Was this process started by one that watches it?"""
    return JOIN in os.environ


def run_member(main: Callable[[], None]) -> None:
    """Join the others and do what the command line says. Where this fails here alone the others wait for an answer, so
    the process ends at once."""
    number, place = os.environ[JOIN].split(",", 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if number == "0":  # what JAX itself says is left in the log, and so is all that the others say
        sys.stdout, sys.stderr = (open(int(one), "w", buffering=1) for one in os.environ[SCREEN].split(","))
    try:
        _join(place)
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code in ORDERLY:
            raise
    except BaseException as error:
        code = LOST if _has_lost_others(error) else 1
        traceback.print_exc(file=sys.__stderr__ if code == LOST else None)  # for whoever watches, or for the user
    else:
        return
    print(end="", flush=True)
    print(end="", flush=True, file=sys.stderr)
    if number == "0" and code != LOST:
        time.sleep(GRACE / 2)  # JAX ends the others with it: where all end, they say first what they have to say
    os._exit(code)


def _has_lost_others(error: BaseException) -> bool:
    """Does JAX say that a message did not come through? Its class of errors, or the same words as a ValueError."""
    from jax.errors import JaxRuntimeError

    words = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "FAILED_PRECONDITION")
    return isinstance(error, JaxRuntimeError) or isinstance(error, ValueError) and str(error).startswith(words)


def _join(place: str) -> None:
    from nestfed.engine import processes

    if place == FOUND:
        return processes.join()
    coordinator, number, own = place.split(",")
    processes.join(coordinator, int(number), int(own))


def _end_with_parent() -> None:
    """Whoever watched this process is gone when its standard input ends."""
    os.read(0, 1)
    os._exit(LOST)
