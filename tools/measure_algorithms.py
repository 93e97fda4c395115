"""Measure what the pages of the algorithms say of each, and write docs/measured/algorithms.json.

    python tools/measure_algorithms.py [fedavg feddro ...]

The cost of a round is read off the traced program of the setting in tests/cases.py; the limit is that of a run of
tests/test_limits.py: unequal weights, few clients asked, some of them lost. With names, only these are measured again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "measured" / "algorithms.json"
sys.path.insert(0, str(ROOT / "tests"))
jax.config.update("jax_enable_x64", True)

from cases import BATCH, CASES, TASKS  # noqa: E402
from test_limits import LIMITS, run  # noqa: E402

from nestfed import ALGORITHMS, make, measure  # noqa: E402

NUMBER = 8  # bytes


def main(names: list[str]) -> None:
    kept = json.loads(OUT.read_text())["algorithms"] if OUT.exists() else {}
    found = {}
    for name in ALGORITHMS:
        found[name] = kept[name] if names and name not in names else measured(name)
        print(name, flush=True)
    document = {"command": "python tools/measure_algorithms.py", "jax": jax.__version__, "algorithms": found}
    OUT.write_text(json.dumps(document, indent=1) + "\n")


def measured(name: str) -> dict[str, Any]:
    return {"cost": cost_of(name), "limit": limit_of(name)}


def cost_of(name: str) -> dict[str, Any]:
    """What a round costs one client, in numbers sent, oracle calls and rows."""
    case = CASES[name]
    task = TASKS[case.task]()
    ledger = measure(make(name, **case.settings), task).round
    return {
        "settings": shown(case.settings),
        "sizes": [int(param.size) for param in task.params],
        "batch": BATCH,
        "exchanges": ledger.exchanges,
        "up": ledger.bytes_up // NUMBER,
        "down": ledger.bytes_down // NUMBER,
        "oracles": dict(ledger.oracles),
        "samples": ledger.samples,
    }


def limit_of(name: str) -> dict[str, Any]:
    """Where it should end up and where it does."""
    limit = LIMITS[name]()
    found = run(name, limit)
    listed = lambda values: [float(v) for v in np.ravel(values)]
    values = {
        key: {"expected": listed(expected), "found": summary(found[key], expected)}
        for key, expected in limit.solution.items()
    }
    return {"settings": shown(limit.settings), "rounds": limit.rounds, "other": bool(limit.says), "values": values}


def summary(found: np.ndarray, expected: Any) -> list[float]:
    """A value that all clients share is shown once."""
    found = np.asarray(found, float)
    same = np.ndim(expected) == 0 and np.ptp(found) < 1e-9
    return [float(found.ravel()[0])] if same else [float(v) for v in found.ravel()]


def shown(settings: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in settings.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
