"""A run without end, as one of several processes or as the process that watches them: for tests of what ends it.

`endless.py CHECKPOINT OPTION=NUMBER...` watches; its members save every hundred rounds.
"""

import sys

import conftest  # noqa: F401  the settings of all tests

from nestfed.core.settings import UserError
from nestfed.workbench import cluster
from nestfed.workbench.task_options import ClusterOptions

HEARTBEAT = 5  # seconds; a user's is longer


def run() -> None:
    from cases import regression

    from nestfed import Interrupted, make, simulate

    algorithm, path = make("scaffold", lr=0.001, local_steps=2), sys.argv[1]
    how = {"evaluate_every": None, "checkpoint_every": 100, "progress": False}
    try:
        simulate(algorithm, regression((5, 9, 7)), rounds=10**8, checkpoint=path, resume=True, **how)
    except Interrupted as error:
        print(f"nestfed: {error}", file=sys.stderr)
        raise SystemExit(130) from None
    except UserError as error:
        print(f"nestfed: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def main() -> None:
    from nestfed.engine import processes

    processes.HEARTBEAT = HEARTBEAT
    cluster.run_member(run)


if __name__ == "__main__":
    cluster.PROGRAM = "import endless; endless.main()"
    words = dict(word.split("=") for word in sys.argv[2:])
    options = {name: value if name == "coordinator" else int(value) for name, value in words.items()}
    sys.exit(cluster.lead(ClusterOptions(**options)))
