"""A worker whose tasks are those of the table of algorithms: FOLDER SOCKET PRECISION, for tests of real processes."""

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import conftest  # noqa: E402, F401  (the same flags and precision as the tests)
import jax  # noqa: E402
from cases import CASES, TASKS  # noqa: E402

from nestfed.sites.worker import Worker, serve  # noqa: E402
from nestfed.uploads import LocalDP  # noqa: E402
from nestfed.verbs.messages import select_client  # noqa: E402

SIZES = (8, 8, 8)
NOISE = LocalDP(clip=1.0, noise_multiplier=0.5, delta=1e-5)


class Case:
    """What a site, or the server where `number` is None, makes of a case."""

    def __init__(self, settings, number=None):
        self.settings, self.number = settings, number

    def tell(self, sums):
        raise AssertionError("a case needs no sums")

    def prepare(self, sums):
        return self

    def make_algorithms(self, method, changes):
        case = CASES[method]
        settings = case.settings | {"lr": self.settings["lr"]} if "lr" in self.settings else case.settings
        return [type(case)(**{**vars(case), "settings": settings}).algorithm(method)]

    def task(self, method, stage=0, before=None):
        task = TASKS[CASES[method].task](SIZES)
        return task if self.number is None else select_client(task, self.number)


def find_uploads(settings, stage):
    return NOISE if settings.get("noise") else ()


if __name__ == "__main__":
    folder, path, precision = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_enable_x64", precision == "64")
    if "SITE_DISK" in os.environ:  # a disk that is full after so many bytes of a file
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        room = int(os.environ["SITE_DISK"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    make = lambda settings, schema, number, sites, seed: Case(settings, number)
    serve(Worker(make, folder, folder / "store", uploads=find_uploads), path)
