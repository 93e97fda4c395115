"""Sweeps: many settings x many seeds side by side in one program per structure."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.noise import noise_key
from nestfed.core.settings import UserError, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.engine import rounds as engine
from nestfed.engine.options import as_key, check_positive, check_select, make_plan
from nestfed.engine.rounds import Plan, Run
from nestfed.uploads import privacy
from nestfed.uploads.privacy import Spending
from nestfed.uploads.transforms import Transform, columns
from nestfed.verbs import cost
from nestfed.verbs.progress import Progress


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Many runs: the history of every setting and seed, and where each ended."""

    settings: list[Any]
    seeds: list[Any]
    history: dict[str, np.ndarray]  # "round": [evaluations]; every metric: [settings, seeds, evaluations, ...]
    diverged: np.ndarray  # [settings, seeds]: the round in which a value became non-finite, or -1
    participants: np.ndarray  # [settings, seeds, rounds]: clients that took part
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
    seeds: Sequence[Any] = (0,),
    *,
    rounds: int,
    dropout: float = 0.0,
    noise_seed: int | None = None,
    progress: bool | None = None,
    title: str = "sweep",
    **options: Any,
) -> Sweep:
    """Run every setting with every seed, side by side, in one program per structure.

    A setting is an algorithm, or a pair (algorithm, problem) to vary the problem's numbers too. Settings that differ in
    floats only share a program; each whole-number setting (local_steps, terms) means another one. A setting that
    diverges is marked and keeps its last finite state; the others go on. Options are those of `simulate`.

    `task` may also be one task per seed, alike but for their numbers: another split of the data, another start.

    Noise of uploads is drawn afresh for every setting and seed. With a `noise_seed` every one of them has the noise
    that it has in a run of its own with this noise_seed: for tests.
    """
    if not settings or not seeds:
        raise UserError("a sweep needs at least one setting and one seed.")
    check_positive("rounds", rounds)
    if isinstance(task, Task):
        first, batch = task, _TaskBatch(columns=task.data.columns, tasks=_without_columns(task), own=False)
    else:
        first, batch = task[0], _TaskBatch.of(task, len(seeds))
    pairs = [s if isinstance(s, tuple) else (s, None) for s in settings]
    layouts = first.problem.layouts
    pairs = [(a, p if p is None else dataclasses.replace(p, layouts=layouts)) for a, p in pairs]
    keys = jnp.stack([as_key(seed) for seed in seeds])
    options["weights"] = np.stack([np.asarray(t.weights) for t in ([task] if isinstance(task, Task) else task)])
    groups: dict[Any, list[int]] = {}
    for i, pair in enumerate(pairs):
        make_plan(pair[0], _with_problem(first, pair[1]), dropout=dropout, **options)
        groups.setdefault(jax.tree.structure(pair), []).append(i)

    uploads = privacy.transforms_of(options.get("uploads", ()))
    spendings: list[Spending | None] = [None] * len(pairs)
    for members in groups.values():
        algorithm, problem = pairs[members[0]]
        plan, _ = make_plan(algorithm, _with_problem(first, problem), dropout=dropout, **options)
        spending = cost.spending(
            algorithm, _with_problem(first, problem), options.get("uploads", ()), cohort=plan.cohort,
            repeatable=noise_seed is not None,
        )  # fmt: skip
        for i in members:
            spendings[i] = spending
    rounds = min([rounds, *(s.rounds_within(rounds) for s in spendings if s is not None)])

    batch = jax.device_put(batch)  # once, not for every piece of every sweep
    runs: list[Any] = [None] * len(pairs)
    histories: list[Any] = [None] * len(pairs)
    participants: list[Any] = [None] * len(pairs)
    when = np.zeros(0, int)
    with Progress(title, rounds * len(groups), 0, progress) as bar:
        for g, members in enumerate(groups.values()):
            algorithm, problem = pairs[members[0]]
            plan, rate = make_plan(algorithm, _with_problem(first, problem), dropout=dropout, **options)
            number = lambda a: jnp.asarray(a, jnp.result_type(float) if isinstance(a, float) else None)
            stacked = jax.tree.map(lambda *a: jnp.stack([number(v) for v in a]), *[pairs[i] for i in members])
            noise = jnp.stack([jnp.stack([noise_key(noise_seed, key) for key in keys]) for _ in members])
            spending = spendings[members[0]]
            spent = lambda round: {} if spending is None else {privacy.EPSILON: spending.epsilon(round)}
            told = lambda round, speed: bar.update(g * rounds + round, speed, spent(round))
            run, when, history, present = _sweep_group(stacked, batch, keys, noise, rounds, rate, plan, uploads, told)
            for row, i in enumerate(members):
                runs[i] = jax.tree.map(lambda a: a[row], run)
                histories[i] = {name: column[row] for name, column in history.items()}
                if spending is not None:
                    epsilons = np.asarray([spending.epsilon(round) for round in when])
                    histories[i][privacy.EPSILON] = np.broadcast_to(epsilons, (len(seeds), len(when)))
                participants[i] = present[row]
    columns = {name: np.stack([h[name] for h in histories]) for name in histories[0]}
    return Sweep(
        settings=list(settings),
        seeds=list(seeds),
        history={"round": when} | columns,
        diverged=np.stack([np.asarray(run.diverged) for run in runs]),
        participants=np.stack(participants),
        runs=runs,
        spending=spendings,
    )


def _sweep_group(
    stacked: Any,
    batch: "_TaskBatch",
    keys: Array,
    noise: Array,
    rounds: int,
    rate: Array,
    plan: Plan,
    uploads: tuple[Transform, ...],
    told: Callable[[int, float], None],
) -> tuple[Run, np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """All settings of one structure x all seeds: (runs, evaluated rounds, history, clients that took part), leaves
    [settings, seeds, ...]. told(rounds done, rounds per second) hears of progress."""
    run = _start(stacked, batch, keys, noise, plan, uploads)
    evaluated: list[tuple[list[int], dict[str, Any]]] = []  # (rounds, values [settings, seeds, rounds, ...])
    shape = jax.tree.leaves(run)[0].shape[:2]
    about_uploads = {name: np.full((*shape, 1), np.nan) for name in columns(uploads)}  # of the last round
    now = lambda: (
        {name: v[:, :, None] for name, v in _evaluate(stacked, batch, keys, run, plan).items()} | about_uploads
    )
    evaluated.append(([0], now()))
    check_select(plan.select, evaluated[0][1])
    participants = []
    first, piece = 0, 1
    while first < rounds:
        length = min(piece, engine.CAPACITY, rounds - first)
        began = time.monotonic()
        run, rows = jax.block_until_ready(
            _advance(stacked, batch, keys, noise, run, first, length, rate, plan, uploads)
        )
        speed = length / max(time.monotonic() - began, 1e-9)
        piece = max(1, min(4 * piece, int(speed)))
        participants.append(np.asarray(rows.pop("participants"))[:, :, :length])
        about_uploads = {name: np.asarray(rows[name])[:, :, [length - 1]] for name in about_uploads}
        due = [i for i in range(length) if plan.evaluate_every and (first + i + 1) % plan.evaluate_every == 0]
        if due:
            rows = {name: np.asarray(v)[:, :, due] for name, v in rows.items()}
            evaluated.append(([first + 1 + i for i in due], rows))
        first += length
        told(first, speed)
    if evaluated[-1][0][-1] != rounds:
        evaluated.append(([rounds], now()))
    when = np.concatenate([r for r, _ in evaluated])
    history = {
        name: np.concatenate([np.asarray(values[name]) for _, values in evaluated], axis=2) for name in evaluated[0][1]
    }
    # A diverged setting keeps its last finite state; what was measured on it afterwards says nothing.
    diverged = np.asarray(run.diverged)[:, :, None]
    stale = (diverged >= 0) & (when > diverged)
    for name, column in history.items():
        if np.issubdtype(column.dtype, np.floating):
            history[name] = np.where(stale.reshape(stale.shape + (1,) * (column.ndim - 3)), np.nan, column)
    return run, when, history, np.concatenate(participants, 2)


@struct
class _TaskBatch:
    """The task of every seed: what differs is stacked, the rows of all of them are one pool.

    Pooling the rows costs no copy per seed and setting: a seed's clients just start at other offsets.
    """

    columns: PyTree
    tasks: Task  # without columns; every leaf [seeds, ...] if own
    own: bool = static()  # does every seed have a task of its own?

    @classmethod
    def of(cls, tasks: Sequence[Task], seeds: int) -> "_TaskBatch":
        if len(tasks) != seeds:
            raise UserError(f"{len(tasks)} tasks were given for {seeds} seeds; give one task, or one per seed.")
        tasks = same_shapes(tasks)
        pools = {id(t.data.columns): t.data.columns for t in tasks}
        sizes = [jax.tree.leaves(pool)[0].shape[0] if jax.tree.leaves(pool) else 0 for pool in pools.values()]
        starts = dict(zip(pools, np.cumsum(sizes) - sizes, strict=True))
        shifted = lambda t: dataclasses.replace(
            _without_columns(t),
            data=dataclasses.replace(
                t.data, columns=None, offsets=np.asarray(t.data.offsets + starts[id(t.data.columns)], np.int32)
            ),
        )
        return cls(
            columns=jax.tree.map(lambda *parts: np.concatenate(parts), *pools.values()),
            tasks=jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(shifted, tasks)),
            own=True,
        )

    def joined(self, task: Task, problem: Any) -> Task:
        """One seed's task with the common pool, and with a setting's own problem if it has one."""
        return _with_problem(
            dataclasses.replace(task, data=dataclasses.replace(task.data, columns=self.columns)), problem
        )


def same_shapes(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with a common bound on clients' sizes, so that they share their programs; refused if they differ in
    more than numbers."""
    largest = max(task.data.largest for task in tasks)
    tasks = [dataclasses.replace(t, data=dataclasses.replace(t.data, largest=largest)) for t in tasks]
    shapes = lambda task: [(np.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(_without_columns(task))]
    for i, task in enumerate(tasks):
        if shapes(task) != shapes(tasks[0]) or jax.tree.structure(task) != jax.tree.structure(tasks[0]):
            raise UserError(
                f"the tasks of seeds 0 and {i} differ in more than numbers; give tasks with the same problem, "
                "model and number of clients."
            )
    return tasks


def _without_columns(task: Task) -> Task:
    return dataclasses.replace(task, data=dataclasses.replace(task.data, columns=None))


def _with_problem(task: Task, problem: Any) -> Task:
    return task if problem is None else dataclasses.replace(task, problem=problem)


def _side_by_side(function, stacked, batch, keys, *own):
    """function(algorithm, task, key, *own) for every setting and seed; `own` has leaves [settings, seeds, ...]."""
    one = lambda pair, task, key, *own: function(pair[0], batch.joined(task, pair[1]), key, *own)
    over_seeds = _along(len(keys), one, (None, 0 if batch.own else None, 0) + (0,) * len(own))
    settings = jax.tree.leaves(stacked)[0].shape[0]
    over_settings = _along(settings, over_seeds, (0, None, None) + (0,) * len(own))
    return over_settings(stacked, batch.tasks, keys, *own)


def _along(length: int, function: Callable, axes: tuple[int | None, ...]) -> Callable:
    """jax.vmap, but over a single value the function itself: a batch axis of length one takes its time in tracing,
    compiling and running."""
    if length > 1:
        return jax.vmap(function, axes)

    def alone(*arguments):
        own = [a if axis is None else jax.tree.map(lambda v: v[0], a) for a, axis in zip(arguments, axes, strict=True)]
        return jax.tree.map(lambda v: v[None], function(*own))

    return alone


@functools.partial(jax.jit, static_argnames=("plan",))
def _start(stacked, batch, keys, noise, plan, uploads):
    start = lambda a, t, key, noise: engine.start(a, t, key, plan, uploads, noise)
    return _side_by_side(start, stacked, batch, keys, noise)


@functools.partial(jax.jit, static_argnames=("plan",))
def _evaluate(stacked, batch, keys, run, plan):
    return _side_by_side(lambda a, t, key, run: engine.evaluate(a, t, key, run, plan), stacked, batch, keys, run)


@functools.partial(jax.jit, static_argnames=("plan",))
def _advance(stacked, batch, keys, noise, run, first, length, rate, plan, uploads):
    go_on = lambda a, t, key, noise, run: engine.advance(a, t, key, run, first, length, rate, plan, uploads, noise)
    return _side_by_side(go_on, stacked, batch, keys, noise, run)
