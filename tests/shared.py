"""What some tests need and a user's machine may lack: such a test is skipped there and says why.

`.ci/run` installs a browser and sets NESTFED_REQUIRE_BROWSER; where the data files lie beside the repository it sets
NESTFED_REQUIRE_DATA. A test that misses what is said to be there fails.
"""

import contextlib
import functools
import os
import runpy
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest

from nestfed.data import Images


def missing(what: str, message: str) -> NoReturn:
    """Skip the test, or fail where the data ("DATA") or the browser ("BROWSER") are said to be there."""
    if os.environ.get(f"NESTFED_REQUIRE_{what}"):
        pytest.fail(message)
    pytest.skip(message)


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Until the process has written this file; one that ends before it fails the test."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no file {path} appeared"
        try:
            process.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            continue
        assert path.exists(), f"the process ended before it wrote {path}"


def free_port(among: Iterable[int] = (0,)) -> int:
    """One that nobody listens at, any or the first among these."""
    for port in among:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return free.getsockname()[1]
    raise AssertionError("no port is free")


def shared_data() -> Path:
    """`../shared/data`, the official data files, which a user's clone does not have."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        missing("DATA", f"the official data files are not at {folder}: nothing to compare with")
    return folder


@functools.cache
def cifar10_subset() -> Images:
    """Every class's first 1,100 and last 100 training images, and its first 200 test images."""
    tool = Path(__file__).resolve().parent.parent / "tools" / "fetch_cifar10.py"
    return runpy.run_path(str(tool))["read_subset"]((shared_data() / "cifar10_subset_14000.npz").read_bytes())
