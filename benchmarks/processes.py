"""What the benchmarks share: a system under measurement in a process of its own, which gives its peak memory."""

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


class Process:
    """A system in its own process, started once and asked many times."""

    def __init__(self, *words: str, **environment: str):
        """This script again, with these words on its command line."""
        everything = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        self.child = subprocess.Popen(
            [sys.executable, sys.argv[0], *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=everything | environment,
        )

    def answer(self) -> dict[str, float]:
        assert self.child.stdout
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.child.args} ended with status {self.child.wait()}; its message is above.")
        return json.loads(line)

    def ask(self, rounds: int) -> dict[str, float]:
        assert self.child.stdin
        self.child.stdin.write(f"{rounds}\n")
        self.child.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        self.child.wait()


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """(result, seconds on the clock, processor seconds of all threads, peak memory so far)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "peak_mb": peak_mb()}


def peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def print_table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, int]], widths: tuple[int, int]) -> None:
    """`columns`: heading -> (field, decimals); `widths` of the first column and of the others."""
    print("system".ljust(widths[0]), *(heading.rjust(widths[1]) for heading in columns))
    for row in rows:
        cells = ("-" if row[field] is None else f"{row[field]:.{digits}f}" for field, digits in columns.values())
        print(row["system"].ljust(widths[0]), *(cell.rjust(widths[1]) for cell in cells))


def header() -> dict[str, Any]:
    """Versions and machine."""
    versions = {}
    for package in ("nestfed", "jax", "jaxlib", "numpy", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # In a process of its own: this one stays small, since a child's peak memory is never below its parent's.
    ask = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind)"
    devices = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    return versions | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
