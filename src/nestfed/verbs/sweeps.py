"""Sweeps: many settings x many seeds side by side in one program per structure."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.noise import make_noise_key
from nestfed.core.settings import UserError, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree, Seed
from nestfed.engine import rounds
from nestfed.engine.options import Changes, Options, make_key, make_options
from nestfed.engine.planning import make_plan
from nestfed.engine.rounds import CAPACITY, Plan, Run
from nestfed.engine.steps import Inputs
from nestfed.uploads import privacy
from nestfed.uploads.privacy import Spending, list_transforms
from nestfed.uploads.transforms import Transform
from nestfed.verbs import cost
from nestfed.verbs.history import average_notes, check_select
from nestfed.verbs.progress import Progress


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Many runs: the history of every setting and seed, and where each ended."""

    settings: list[Any]
    seeds: list[Seed]
    history: dict[str, np.ndarray]  # "round": [evaluations]; every metric: [settings, seeds, evaluations, ...]
    diverged: np.ndarray  # [settings, seeds]: the round in which a value became non-finite, or -1
    participants: np.ndarray  # [settings, seeds, rounds]: clients that took part
    noted: dict[str, np.ndarray]  # what all settings note: [settings, seeds, rounds, (sum, number of notes)]
    runs: list[Run]  # one per setting, every leaf [seeds, ...]
    spending: list[Spending | None]  # of privacy, one per setting; all of them end where the first budget is spent

    def best(self, metric: str) -> int:
        """The setting with the smallest final value of a metric (use one of validation data), averaged over seeds;
        a setting of which any seed diverged is passed over."""
        if metric not in self.history:
            raise UserError(f"there is no metric {metric!r}; recorded are {', '.join(self.history)}.")
        final = self.history[metric][:, :, -1].mean(1)
        final = np.where((self.diverged >= 0).any(1) | ~np.isfinite(final), np.inf, final)
        if np.isinf(final).all():
            raise UserError("every setting diverged or has no finite value of the metric; use smaller step sizes.")
        return int(final.argmin())


def sweep(
    settings: Sequence[Any],
    task: Task | Sequence[Task],
    seeds: Sequence[Seed] = (0,),
    options: Options | None = None,
    **changes: Unpack[Changes],
) -> Sweep:
    """Run every setting with every seed, side by side, in one program per structure.

    A setting is an algorithm, or a pair (algorithm, problem) to vary the problem's numbers too. Settings that differ in
    floats only share a program; each whole-number setting (local_steps, terms) means another one. A setting that
    diverges is marked and keeps its last finite state; the others go on. Options are those of `nestfed.Options`, except
    checkpoints: a sweep keeps none. It runs on one device; of several processes, each runs all of it for itself.

    `task` may also be one task per seed, alike but for their numbers: another split of the data, another start.

    Noise of uploads is drawn afresh for every setting and seed. With a `noise_seed` every one of them has the noise
    that it has in a run of its own with this noise_seed: for tests.
    """
    chosen = make_options(options, changes)
    if chosen.checkpoint is not None or chosen.resume:
        raise UserError("checkpoint or resume was given, but a sweep keeps no checkpoint; simulate keeps one.")
    for name, value in (("settings", settings), ("seeds", seeds)):
        if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
            raise UserError(f"{name}={value!r} was given to a sweep; give a list of them.")
    if not len(settings) or not len(seeds):
        raise UserError("a sweep needs at least one setting and one seed.")
    tasks = [task] if isinstance(task, Task) else list(task)
    batch = _TaskBatch.share(tasks[0]) if isinstance(task, Task) else _TaskBatch.join(tasks, len(seeds))
    groups = _group(settings, tasks, chosen)
    rounds = min(group.count_rounds(chosen.need_rounds()) for group in groups)

    batch = jax.device_put(batch)  # once, not for every piece of every sweep
    keys = jnp.stack([make_key(seed) for seed in seeds])
    parts: list[_Part] = []
    with Progress(chosen.title or "sweep", rounds * len(groups), 0, chosen.progress) as bar:
        for g, group in enumerate(groups):
            parts.append(group.run(batch, keys, rounds, chosen, bar, done=g * rounds))
    order = np.argsort([i for group in groups for i in group.members])
    join = lambda leaves: np.concatenate(leaves)[order]
    names = dict.fromkeys(name for part in parts for name in part.history)
    return Sweep(
        settings=list(settings),
        seeds=list(seeds),
        history={"round": parts[0].when} | {name: join([part.history[name] for part in parts]) for name in names},
        diverged=join([np.asarray(part.run.diverged) for part in parts]),
        participants=join([part.participants for part in parts]),
        noted={name: join([part.noted[name] for part in parts]) for name in _list_common_names(parts)},
        runs=[jax.tree.map(lambda a, row=row: a[row], parts[g].run) for g, row in _find_rows(groups, len(settings))],
        spending=[groups[g].spending for g, _ in _find_rows(groups, len(settings))],
    )


def _list_common_names(parts: Sequence["_Part"]) -> list[str]:
    return [name for name in parts[0].noted if all(name in part.noted for part in parts)]


def _find_rows(groups: Sequence["_Group"], settings: int) -> list[tuple[int, int]]:
    """(group, row in it) of every setting."""
    where = {i: (g, row) for g, group in enumerate(groups) for row, i in enumerate(group.members)}
    return [where[i] for i in range(settings)]


class _Part(NamedTuple):
    """What the settings of one structure left; leaves [settings, seeds, ...]."""

    run: Run
    when: np.ndarray  # evaluated rounds
    history: dict[str, np.ndarray]
    participants: np.ndarray
    noted: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Settings of one structure, which share their programs."""

    members: list[int]  # places in the user's list
    pairs: list[tuple[Algorithm, Any]]  # (algorithm, problem or None)
    plan: Plan
    spending: Spending | None

    def count_rounds(self, most: int) -> int:
        """As many as the privacy budget allows."""
        return most if self.spending is None else self.spending.rounds_within(most)

    def run(
        self, batch: "_TaskBatch", keys: Array, rounds: int, options: Options, bar: Progress, *, done: int
    ) -> _Part:
        number = lambda a: jnp.asarray(a, jnp.result_type(float) if isinstance(a, float) else None)
        stacked = jax.tree.map(lambda *a: jnp.stack([number(v) for v in a]), *self.pairs)
        noise = jnp.stack([jnp.stack([make_noise_key(options.noise_seed, key) for key in keys]) for _ in self.members])
        inputs = _Stack(
            stacked, batch, keys, noise, jnp.asarray(float(options.dropout)), list_transforms(options.uploads)
        )
        plan = self.plan
        run = _start(inputs, plan)
        history = _SweepHistory()
        history.add([0], {name: v[:, :, None] for name, v in _evaluate(inputs, run, plan).items()})
        check_select(plan.select, history.names)
        first, piece = 0, 1
        while first < rounds:
            length = min(piece, CAPACITY, rounds - first)
            began = time.monotonic()
            run, rows = jax.block_until_ready(_advance(inputs, run, first, length, plan))
            speed = length / max(time.monotonic() - began, 1e-9)
            piece = max(1, min(4 * piece, int(speed)))
            history.extend(rows, first, length, plan.evaluate_every)
            first += length
            spent = {} if self.spending is None else {privacy.EPSILON: self.spending.epsilon(first)}
            bar.update(done + first, speed, spent)
        if history.when[-1] != rounds:
            history.add([rounds], {name: v[:, :, None] for name, v in _evaluate(inputs, run, plan).items()})
        columns = history.columns(np.asarray(run.diverged))
        if self.spending is not None:
            epsilons = np.asarray([self.spending.epsilon(round) for round in history.when])
            columns[privacy.EPSILON] = np.broadcast_to(epsilons, (*noise.shape, len(epsilons)))
        return _Part(run, np.asarray(history.when), columns, history.participants(), history.noted())


def _group(settings: Sequence[Any], tasks: Sequence[Task], options: Options) -> list[_Group]:
    """The settings by structure, each checked."""
    first, weights = tasks[0], np.stack([np.asarray(task.weights) for task in tasks])
    pairs = [setting if isinstance(setting, tuple) else (setting, None) for setting in settings]
    layouts = first.problem.layouts
    pairs = [(a, p if p is None else dataclasses.replace(p, layouts=layouts)) for a, p in pairs]
    plans = [make_plan(a, _replace_problem(first, p), options, weights=weights) for a, p in pairs]
    found: dict[Any, list[int]] = {}
    for i, pair in enumerate(pairs):
        found.setdefault(jax.tree.structure(pair), []).append(i)
    groups = []
    for members in found.values():
        algorithm, problem = pairs[members[0]]
        plan = plans[members[0]]
        spending = cost.find_spending(algorithm, _replace_problem(first, problem), options, weights=weights)
        groups.append(_Group(members, [pairs[i] for i in members], plan, spending))
    return groups


class _SweepHistory:
    """Evaluations, participants and notes of many runs; leaves [settings, seeds, rounds, ...]."""

    def __init__(self):
        self.when: list[int] = []
        self._values: list[dict[str, np.ndarray]] = []
        self._participants: list[np.ndarray] = []
        self._noted: dict[str, list[np.ndarray]] = {}

    @property
    def names(self) -> list[str]:
        return [*self._values[0], *self._noted]

    def add(self, rounds: Sequence[int], values: dict[str, Any]) -> None:
        self.when += rounds
        self._values.append({name: np.asarray(v) for name, v in values.items()})

    def extend(self, rows: dict[str, Any], first: int, length: int, every: int | None) -> None:
        self._participants.append(np.asarray(rows["participants"])[:, :, :length])
        for name, values in rows["notes"].items():
            self._noted.setdefault(name, []).append(np.asarray(values)[:, :, :length])
        due = [i for i in range(length) if every and (first + i + 1) % every == 0]
        if due:
            self.add([first + 1 + i for i in due], {n: np.asarray(v)[:, :, due] for n, v in rows["metrics"].items()})

    def participants(self) -> np.ndarray:
        return np.concatenate(self._participants, 2)

    def noted(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts, 2) for name, parts in self._noted.items()}

    def columns(self, diverged: np.ndarray) -> dict[str, np.ndarray]:
        """A diverged setting keeps its last finite state; what was measured on it afterwards says nothing."""
        columns = {name: np.concatenate([v[name] for v in self._values], axis=2) for name in self._values[0]}
        columns |= {name: average_notes(noted, self.when) for name, noted in self.noted().items()}
        stale = (diverged[:, :, None] >= 0) & (np.asarray(self.when) > diverged[:, :, None])
        for name, column in columns.items():
            if np.issubdtype(column.dtype, np.floating):
                columns[name] = np.where(stale.reshape(stale.shape + (1,) * (column.ndim - 3)), np.nan, column)
        return columns


@struct
class _TaskBatch:
    """The task of every seed: what differs is stacked, the rows of all of them are one pool.

    Pooling the rows costs no copy per seed and setting: a seed's clients just start at other offsets.
    """

    columns: PyTree
    tasks: Task  # without columns; every leaf [seeds, ...] if own
    own: bool = static()  # does every seed have a task of its own?

    @classmethod
    def share(cls, task: Task) -> "_TaskBatch":
        """One task for all seeds."""
        return cls(columns=task.data.columns, tasks=_remove_columns(task), own=False)

    @classmethod
    def join(cls, tasks: Sequence[Task], seeds: int) -> "_TaskBatch":
        """One task per seed."""
        if len(tasks) != seeds:
            raise UserError(f"{len(tasks)} tasks were given for {seeds} seeds; give one task, or one per seed.")
        tasks = share_shapes(tasks)
        pools = {id(t.data.columns): t.data.columns for t in tasks}
        sizes = [jax.tree.leaves(pool)[0].shape[0] if jax.tree.leaves(pool) else 0 for pool in pools.values()]
        starts = dict(zip(pools, np.cumsum(sizes) - sizes, strict=True))

        def shift(task: Task) -> Task:
            offsets = np.asarray(task.data.offsets + starts[id(task.data.columns)], np.int32)
            return dataclasses.replace(
                _remove_columns(task), data=dataclasses.replace(task.data, columns=None, offsets=offsets)
            )

        return cls(
            columns=jax.tree.map(lambda *parts: np.concatenate(parts), *pools.values()),
            tasks=jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(shift, tasks)),
            own=True,
        )

    def complete(self, task: Task, problem: Any) -> Task:
        """One seed's task with the common pool, and with a setting's own problem if it has one."""
        return _replace_problem(
            dataclasses.replace(task, data=dataclasses.replace(task.data, columns=self.columns)), problem
        )


def share_shapes(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with a common bound on clients' sizes, so that they share their programs; refused if they differ in
    more than numbers."""
    largest = max(task.data.largest for task in tasks)
    tasks = [dataclasses.replace(t, data=dataclasses.replace(t.data, largest=largest)) for t in tasks]
    shapes = lambda task: [(np.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(_remove_columns(task))]
    for i, task in enumerate(tasks):
        if shapes(task) != shapes(tasks[0]) or jax.tree.structure(task) != jax.tree.structure(tasks[0]):
            raise UserError(
                f"the tasks of seeds 0 and {i} differ in more than numbers; give tasks with the same problem, "
                "model and number of clients."
            )
    return tasks


def _remove_columns(task: Task) -> Task:
    return dataclasses.replace(task, data=dataclasses.replace(task.data, columns=None))


def _replace_problem(task: Task, problem: Any) -> Task:
    return task if problem is None else dataclasses.replace(task, problem=problem)


class _Stack(NamedTuple):
    """The inputs of all runs."""

    settings: Any  # pairs (algorithm, problem or None), leaves [settings, ...]
    batch: _TaskBatch
    keys: Array  # [seeds]
    noise: Array  # [settings, seeds]
    dropout: Array
    uploads: tuple[Transform, ...]

    def each(self, function: Callable[..., Any], *own: Any) -> Any:
        """function(inputs, *own) for every setting and seed; `own` has leaves [settings, seeds, ...]."""

        def one(pair: tuple[Algorithm, Any], task: Task, key: Array, noise: Array, *own: Any) -> Any:
            algorithm, problem = pair
            task = self.batch.complete(task, problem)
            return function(Inputs(algorithm, task, key, noise, self.dropout, self.uploads), *own)

        more = (0,) * (1 + len(own))
        over_seeds = _map_along(len(self.keys), one, (None, 0 if self.batch.own else None, 0, *more))
        over_settings = _map_along(len(self.noise), over_seeds, (0, None, None, *more))
        return over_settings(self.settings, self.batch.tasks, self.keys, self.noise, *own)


def _map_along(length: int, function: Callable, axes: tuple[int | None, ...]) -> Callable:
    """jax.vmap, but over a single value the function itself: a batch axis of length one takes its time in tracing,
    compiling and running."""
    if length > 1:
        return jax.vmap(function, axes)

    def alone(*arguments: Any) -> Any:
        own = [a if axis is None else jax.tree.map(lambda v: v[0], a) for a, axis in zip(arguments, axes, strict=True)]
        return jax.tree.map(lambda v: v[None], function(*own))

    return alone


@functools.partial(jax.jit, static_argnames=("plan",))
def _start(inputs: _Stack, plan: Plan) -> Run:
    return inputs.each(lambda one: rounds.start(one, plan))


@functools.partial(jax.jit, static_argnames=("plan",))
def _evaluate(inputs: _Stack, run: Run, plan: Plan) -> dict[str, Array]:
    return inputs.each(lambda one, run: rounds.evaluate(one, run, plan), run)


@functools.partial(jax.jit, static_argnames=("plan",))
def _advance(inputs: _Stack, run: Run, first: Any, length: Any, plan: Plan) -> tuple[Run, dict[str, Any]]:
    return inputs.each(lambda one, run: rounds.advance(one, run, first, length, plan), run)
