"""Processes that must not outlive us: a keeper runs a command, starts it again when it ends, and ends its whole tree.

A framework's processes start others in sessions of their own, which neither Ctrl-C nor the death of their parent
reaches. The keeper is the next of kin of all that descends from it (Linux: a "subreaper"), so it finds them. It ends
when it is told to, and when the process that started it is gone, however that came: its standard input then ends.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PAUSE = 1.0  # seconds before what has ended is started again
LONGEST_PAUSE = 15.0  # ... doubled up to this as long as it ends within these seconds
PATIENCE = 10.0  # seconds for a keeper to end its tree
_BECOME_SUBREAPER = 36  # of prctl(2)


class Kept:
    """A command that runs under a keeper."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self.process, self.log = process, log

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the command and everything that descends from it; only then does this return."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # stopped by a debugger, or the like
            _end_tree(psutil.Process(self.process.pid))
            self.process.kill()
            self.process.wait()

    def read_end_of_log(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def keep(
    words: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None, again: bool = True
) -> Kept:
    """Run this command under a keeper, its output appended to `log`; `again`: start it again whenever it ends."""
    command = [sys.executable, "-m", __name__, *(["--again"] if again else []), "--", *map(str, words)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C is for us; we then say what ends, and in which order
        )
    return Kept(process, log)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true")
    parser.add_argument("words", nargs="+")
    chosen = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1)
    # A signal while we wait becomes an exception, and the tree is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(_run(chosen.words, chosen.again))
    finally:
        _end_tree(psutil.Process())


def _run(words: Sequence[str], again: bool) -> int:
    """The exit code of the command, or 0 when our parent is gone or closes our standard input."""
    pause = PAUSE
    while True:
        began = time.monotonic()
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        ended = os.pidfd_open(child.pid) if hasattr(os, "pidfd_open") else None
        try:
            code = _wait(child, ended)
        finally:
            if ended is not None:
                os.close(ended)
        if code is None:
            return 0
        _end_tree(psutil.Process())  # what it has left behind would be in the way of the next
        if not again:
            return code
        if time.monotonic() - began > LONGEST_PAUSE:
            pause = PAUSE
        print(f"keeper: {words[0]} ended with {code}; it is started again in {pause:g} s", flush=True)
        if _has_parent_left(pause):
            return 0
        pause = min(2 * pause, LONGEST_PAUSE)


def _wait(child: subprocess.Popen[bytes], ended: int | None) -> int | None:
    """The exit code of the child; None where our standard input ended first."""
    while (code := child.poll()) is None:
        if ended is None:
            left = _has_parent_left(0.2)
        else:
            ready, _, _ = select.select([sys.stdin, ended], [], [])
            left = sys.stdin in ready
        if left:
            return None
    return code


def _has_parent_left(seconds: float) -> bool:
    """Does our standard input end within this time? Nobody ever writes to it."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _end_tree(root: psutil.Process) -> None:
    """Kill all that descends from this process, and collect it, until nothing is left."""
    while children := root.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, PATIENCE)


if __name__ == "__main__":
    main()
