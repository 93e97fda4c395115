"""What it costs to begin: processor seconds of imports and of help, each in fresh processes, against `import jax`.

    python benchmarks/imports.py [--repeats 9]

Systems take turns, so that what else the machine does hits all of them alike; the median of each counts. "first use" is
the import with the names that every run needs, which loads JAX and the core of nestfed.
"""

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

SYSTEMS = {
    "import jax": ["-c", "import jax"],
    "import jax, optax": ["-c", "import jax, optax"],
    "import nestfed": ["-c", "import nestfed"],
    "first use": ["-c", "from nestfed import Rows, Task, make, simulate, sweep"],
    "nestfed --help": [str(Path(sys.executable).with_name("nestfed")), "--help"],
    "nestfed run fairness --help": [str(Path(sys.executable).with_name("nestfed")), "run", "fairness", "--help"],
}


def cpu_seconds(words: list[str]) -> float:
    """Processor time of a process and its threads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="processes of each system (default 9)")
    repeats = parser.parse_args().repeats
    for words in SYSTEMS.values():
        cpu_seconds(words)  # files are compiled and in the cache of the operating system
    seconds = {name: [] for name in SYSTEMS}
    for _ in range(repeats):
        for name, words in SYSTEMS.items():
            seconds[name].append(cpu_seconds(words))
    first = statistics.median(seconds["import jax"])
    print(f"{'':<30}{'cpu s':>8}{'min':>8}{'max':>8}{'x import jax':>14}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<30}{median:>8.2f}{min(values):>8.2f}{max(values):>8.2f}{median / first:>14.2f}")


if __name__ == "__main__":
    main()
