"""From options to the static part of a run: which program is compiled, and how clients are laid out in it."""

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.noise import make_noise_key
from nestfed.core.task import Task
from nestfed.core.types import Seed
from nestfed.engine.cohorts import CohortRule, find_chances, make_cohort_rule
from nestfed.engine.contract import check_contract, check_match, count_exchanging_steps
from nestfed.engine.devices import Blocks
from nestfed.engine.options import Options, make_key
from nestfed.engine.processes import share_key
from nestfed.engine.rounds import Plan
from nestfed.engine.steps import Inputs, count_steps
from nestfed.uploads.privacy import CentralDP, find_guarantee, list_transforms

LARGE_MODEL = 20_000  # parameters
CACHED_BATCHES = 2**20  # bytes


def make_plan(
    algorithm: Algorithm,
    task: Task,
    options: Options,
    *,
    weights: np.ndarray | None = None,
    blocks: Blocks | None = None,
) -> Plan:
    """The static part of a run, after everything that can be wrong with it has been looked for.

    `weights` are those of several tasks that will share the plan, [tasks, clients]; None: the task's own. `blocks` lay
    the clients over several devices.
    """
    check_match(algorithm, task)
    rule = make_cohort_rule(options.cohort, options.sampling, np.asarray(task.weights if weights is None else weights))
    places = task.clients if rule is None else rule.room
    if blocks is not None:
        places = _find_room(blocks, rule, np.asarray(task.weights))
    guarantee = find_guarantee(options.uploads)
    if guarantee is not None:
        guarantee.check_cohort(rule is not None and rule.random_size)
    chunk = _choose_chunk(options, algorithm, task, places)
    return Plan(
        cohort=rule,
        dropout=options.dropout > 0,
        hidden=isinstance(guarantee, CentralDP),
        evaluate_every=options.evaluate_every,
        metrics=options.metrics,
        output=options.output,
        select=options.select,
        unsynced=options.unsynced,
        chunk=chunk,
        blocks=blocks,
        room=0 if blocks is None else places,
        notes=check_contract(algorithm, task, list_transforms(options.uploads)),
    )


def make_inputs(algorithm: Algorithm, task: Task, seed: Seed, options: Options) -> Inputs:
    """What the programs of a run take; noise is drawn anew by every call."""
    key = make_key(seed)
    noise = share_key(make_noise_key(options.noise_seed, key))
    return Inputs(algorithm, task, key, noise, jnp.asarray(float(options.dropout)), list_transforms(options.uploads))


def _choose_chunk(options: Options, algorithm: Algorithm, task: Task, places: int) -> int | None:
    """How many clients at a time: None for all side by side.

    Side by side is best on accelerators. On a CPU, measured: clients of large models one after the other, and
    otherwise as many at a time as have batches that fit the cache, where the cohort's do not; unless most steps
    exchange, because these are replayed.
    """
    if options.client_axis == "vmap":
        return None
    if options.client_axis == "map":
        return options.client_chunk or 1
    if options.client_chunk:
        return options.client_chunk if options.client_chunk < places else None
    if jax.default_backend() != "cpu":
        return None
    if sum(p.size for p in task.params) > LARGE_MODEL:
        return 1
    batch = jax.eval_shape(lambda: task.sample(task.data.client(0), jax.random.key(0)))
    one = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(batch)) or 1
    blocks = -(-places // max(1, CACHED_BATCHES // 4 // one))
    chunk = -(-places // blocks)  # blocks of equal size: the last one is computed whole
    if task.data.columns is None or places * one <= CACHED_BATCHES or chunk >= places:
        return None
    return chunk if 2 * count_exchanging_steps(algorithm, task) <= count_steps(algorithm) else None


def _find_room(blocks: Blocks, rule: CohortRule | None, weights: np.ndarray) -> int:
    """For how many of a cohort a device has places in the usual round: as many as it expects, and three standard
    deviations more."""
    if rule is None:
        return blocks.size
    chances = np.asarray(find_chances(weights, rule))
    bounds = [blocks.bounds(device) for device in range(blocks.mesh.size)]
    usual = rule.room * max(float(chances[first:last].sum()) for first, last in bounds) / float(chances.sum())
    return min(int(usual + 3 * usual**0.5) + 1, rule.room, blocks.size)
