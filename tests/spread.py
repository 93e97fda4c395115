"""What the tests of several devices and of several processes run: the same cases there and on one device.

As a program, `spread.py FOLDER CASE...` runs cases on all devices of its process, or of all the processes that
NESTFED_TEST_JOIN=host:port,number,own names, and the first process leaves what it has in FOLDER.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  the settings of all tests
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, TASKS, PlainSorting, sorted_rows

from nestfed import (
    CentralDP,
    Diverged,
    LocalDP,
    Rows,
    Task,
    UserError,
    advance,
    make,
    personalise,
    simulate,
    start,
    struct,
)
from nestfed.engine import processes, rounds
from nestfed.engine.devices import find_blocks
from nestfed.engine.options import Options
from nestfed.problems import SingleLevel
from nestfed.uploads import Clip, GaussianNoise, Sparsify
from nestfed.verbs.simulation import Programs

SIZES = (5, 9, 7, 6, 8)  # blocks are unequal on 2 and on 3 devices
Found = dict[str, np.ndarray]


def name_leaves(tree: Any, prefix: str) -> Found:
    return {f"{prefix}{jax.tree_util.keystr(p)}": np.asarray(a) for p, a in jax.tree_util.tree_leaves_with_path(tree)}


def all_of(name: str, task: Task | None = None, **options: Any) -> Found:
    """Everything that a whole run of an algorithm leaves."""
    algorithm = CASES[name].algorithm(name)
    task = TASKS[CASES[name].task](SIZES) if task is None else task
    result = simulate(algorithm, task, 1, **{"rounds": 3, "progress": False} | options)
    found = name_leaves(result.run, "run") | {f"history {key}": value for key, value in result.history.items()}
    return found | {f"noted {key}": value for key, value in result.noted.items()} | {"asked": result.participants}


def few_rounds(name: str) -> Found:
    """Three rounds of an algorithm of the registry, as the conformance suite runs it: it shares its programs."""
    algorithm, task = CASES[name].algorithm(name), TASKS[CASES[name].task]()
    options: Any = {"cohort": 2, "dropout": 0.3, "evaluate_every": None}
    run, _ = advance(algorithm, task, 0, start(algorithm, task, 0, **options), rounds=3, **options)
    return name_leaves(run, "run")


@struct
class Extremes(Task):
    """What clients have is gathered to evaluate, and weighed by all of the task's weights."""

    def metrics(self, server, client, data, fed):
        each = data.average(lambda batch: jnp.stack([jnp.mean(batch[1]), jnp.mean(batch[1] ** 2)]))
        together = fed.gather({"each": each, "id": data.id, "size": data.size})
        return together | {"weighted": jnp.asarray(self.weights) @ together["each"], "clients": fed.mean(self.clients)}


@struct
class Blowing(SingleLevel):
    """The second client's loss overflows."""

    def loss(self, x, batch, key):
        return jnp.mean(jnp.exp(batch * x[0]))


def diverges() -> Found:
    rows = Rows.from_clients([np.ones(4), np.full(5, 1e3), np.ones(3)], ids=[7, 8, 9])
    try:
        simulate(make("fedavg", lr=10.0), Task.create(Blowing(), rows, jnp.ones(1)), rounds=9, progress=False)
    except Diverged as error:
        return {"message": np.asarray(str(error))} | name_leaves(error.result.run, "run")
    raise AssertionError("it was to diverge")


def personal_task() -> Task:
    """Rows to test on are a second pool of the same clients."""
    train, test = (sorted_rows(PlainSorting(), sizes) for sizes in (SIZES, (3, 1, 4, 2, 5)))
    begin = tuple(layout.unflatten(p) for layout, p in zip(train.problem.layouts, train.params, strict=True))
    begin = {"body": begin[0], "head": begin[1]}
    return personalise.PersonalTask.create(PlainSorting(), train.data, begin, test=test.data, batch_size=4)


def extremes() -> Task:
    plain = TASKS["single level"](SIZES)
    begin = plain.problem.tree(0, plain.params[0])
    return Extremes.create(type(plain.problem)(), plain.data, begin, batch_size=4, weights="samples")


def weighted(name: str, **more: Any) -> Task:
    return TASKS[CASES[name].task](SIZES, weights="samples", **more)


def single_precision() -> Found:
    with jax.enable_x64(False):
        return all_of("scaffold", rounds=1, client_axis="vmap")


def resumed(folder: Path, rounds: int) -> Found:
    """A run up to so many rounds, from where the folder has it."""
    options = {"cohort": 3, "dropout": 0.2, "output": "average", "checkpoint_every": 1}
    return all_of("fedbio", rounds=rounds, checkpoint=folder / "run.npz", resume=True, **options)


NOISY = {"uploads": (Clip(norm=0.5), Sparsify(fraction=0.5), GaussianNoise(sigma=0.01)), "noise_seed": 0}
CENTRAL = {"uploads": CentralDP(clip=1.0, noise_multiplier=0.1, delta=1e-5), "noise_seed": 0}
THOROUGH: dict[str, Callable[[], Found]] = {
    "everything, side by side": lambda: all_of(
        "fedbio", cohort=3, dropout=0.3, output="random", unsynced=True, evaluate_every=2, client_axis="vmap", **NOISY
    ),
    "everything, in turn": lambda: all_of(
        "scaffold", cohort=3, dropout=0.3, output="average", unsynced=True, client_axis="map", **NOISY
    ),
    "by weight, in chunks": lambda: all_of(
        "fedavg", weighted("fedavg"), cohort=3, client_axis="map", client_chunk=2, output="best", select="loss"
    ),
    "poisson and a trusted server": lambda: all_of(
        "fedavg", cohort=3, sampling="poisson", rounds=6, client_axis="vmap", **CENTRAL
    ),
    "local privacy": lambda: all_of(
        "fastdro", uploads=LocalDP(clip=3.0, noise_multiplier=0.01, delta=1e-5), noise_seed=1
    ),
    "uneven steps": lambda: all_of("simfbo", weighted("simfbo", local_steps=(1, 2, 2, 1, 2)), cohort=4),
    "scaled": lambda: all_of("feddro", TASKS["KL"](SIZES), cohort=3, client_axis="vmap"),
    "scaled, in turn": lambda: all_of("feddro", TASKS["KL"](SIZES), cohort=3, client_axis="map"),
    "gathers": lambda: all_of("fedmbo", cohort=4, dropout=0.3, client_axis="vmap"),
    "gathers, in turn": lambda: all_of("fedpac", cohort=4, dropout=0.3, client_axis="map"),
    "two pools": lambda: all_of("fedrep", personal_task(), cohort=3),
    "metrics of all": lambda: all_of("fedavg", extremes(), evaluate_every=1),
    "constants alone": lambda: name_leaves(simulate(*quadratics(), rounds=3, progress=False).run, "run"),
    "few clients": lambda: all_of("fedavg", TASKS["single level"]((4,))),
    "diverges": diverges,
    "single precision": single_precision,
}


def quadratics() -> tuple[Any, Task]:
    from nestfed.problems import toys

    return make("fedavg", lr=0.1), toys.quadratics((1.0, 2.0, 3.0, 4.0), (0.0, 1.0, 2.0, 3.0))


def find(folder: Path, name: str) -> Found:
    """What a case leaves; those that are no thorough ones are algorithms."""
    return resumed(folder, int(name.removeprefix("round "))) if name.startswith("round ") else find_from_start(name)


@functools.cache  # several tests compare with it
def find_from_start(name: str) -> Found:
    return THOROUGH[name]() if name in THOROUGH else few_rounds(name)


def find_gaps(name: str, found: Found, expected: Found) -> list[str]:
    """What differs by more than rounding."""
    assert found.keys() == expected.keys(), name
    most = 1e-6 if name == "single precision" else 1e-12

    def same(a, b):
        if a.dtype.kind not in "fiub" or a.shape != b.shape:
            return np.array_equal(a, b)
        return np.allclose(a, b, rtol=most, atol=most, equal_nan=True)

    return [f"{name}: {key}" for key in found if not same(found[key], expected[key])]


def check_layout() -> None:
    """A device has the rows of its clients, and nobody else's."""
    task, blocks = TASKS["single level"](SIZES), find_blocks(TASKS["single level"](SIZES))
    assert blocks is not None
    laid, (_, targets) = blocks.lay_task(task), task.data.columns
    starts = [0, *np.cumsum(SIZES)]
    room = laid.data.columns[1].shape[0] // len(jax.devices())
    for shard in laid.data.columns[1].addressable_shards:
        first, last = blocks.bounds(shard.index[0].start // room)
        own = targets[starts[first] : starts[last]]
        assert np.array_equal(shard.data[: len(own)], own) and np.isin(shard.data, own).all()


def check_messages() -> None:
    """A round has an all-reduce for each exchange, and one."""
    for name, exchanges in {"fedavg": 1, "fedavg-co-2": 2}.items():
        algorithm, task = CASES[name].algorithm(name), TASKS[CASES[name].task](SIZES)
        programs = Programs(algorithm, task, 0, Options(evaluate_every=None, cohort=3))
        lowered = rounds.advance.lower(programs.laid, jax.eval_shape(programs.start), 0, 1, programs.plan)
        assert lowered.as_text().count("stablehlo.all_reduce") == exchanges + 1, name


def check_metrics_of_all_rows() -> None:
    """A metric that wants everybody's rows is told where they are."""
    task = TASKS["single level"](SIZES)
    for read in (lambda columns: columns[0], lambda columns: list(columns), lambda columns: columns.mean()):
        metrics = lambda task, server, client, data, fed: {"found": read(task.data.columns)}  # noqa: B023
        with pytest.raises(UserError, match="its own clients' alone"):
            simulate(make("fedavg", lr=0.1), task, rounds=1, metrics=metrics)


def main(folder: str, *names: str) -> None:
    if "NESTFED_TEST_JOIN" in os.environ:
        coordinator, number, own = os.environ["NESTFED_TEST_JOIN"].split(",")
        processes.join(coordinator, int(number), int(own))
    check_layout()
    check_messages()
    check_metrics_of_all_rows()
    for name in names:
        found = find(Path(folder), name)
        if processes.is_first():
            np.savez(Path(folder) / f"{name}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
