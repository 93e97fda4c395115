"""Sweeps: many settings x many seeds side by side in one program per structure."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed import engine
from nestfed.border import as_key, check_positive, check_select, make_plan
from nestfed.core import Array, Task, UserError
from nestfed.engine import Plan, Run
from nestfed.progress import Progress


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Many runs: the history of every setting and seed, and where each ended."""

    settings: list[Any]
    seeds: list[Any]
    history: dict[str, np.ndarray]  # "round": [evaluations]; every metric: [settings, seeds, evaluations, ...]
    diverged: np.ndarray  # [settings, seeds]: the round in which a value became non-finite, or -1
    runs: list[Run]  # one per setting, every leaf [seeds, ...]

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
    task: Task,
    seeds: Sequence[Any] = (0,),
    *,
    rounds: int,
    dropout: float = 0.0,
    progress: bool | None = None,
    **options: Any,
) -> Sweep:
    """Run every setting with every seed, side by side, in one program per structure.

    A setting is an algorithm, or a pair (algorithm, problem) to vary the problem's numbers too. Settings that differ in
    floats only share a program; each whole-number setting (local_steps, terms) means another one. A setting that
    diverges is marked and keeps its last finite state; the others go on. Options are those of `simulate`.
    """
    if not settings or not seeds:
        raise UserError("a sweep needs at least one setting and one seed.")
    check_positive("rounds", rounds)
    pairs = [s if isinstance(s, tuple) else (s, task.problem) for s in settings]
    pairs = [(a, dataclasses.replace(p, layouts=task.problem.layouts)) for a, p in pairs]
    keys = jnp.stack([as_key(seed) for seed in seeds])
    groups: dict[Any, list[int]] = {}
    for i, pair in enumerate(pairs):
        make_plan(pair[0], dataclasses.replace(task, problem=pair[1]), dropout=dropout, **options)
        groups.setdefault(jax.tree.structure(pair), []).append(i)

    task = jax.device_put(task)  # once, not for every piece of every sweep
    runs: list[Any] = [None] * len(pairs)
    histories: list[Any] = [None] * len(pairs)
    when = np.zeros(0, int)
    with Progress("sweep", rounds * len(groups), 0, progress) as bar:
        for g, members in enumerate(groups.values()):
            plan, rate = make_plan(pairs[members[0]][0], task, dropout=dropout, **options)
            number = lambda a: jnp.asarray(a, jnp.result_type(float) if isinstance(a, float) else None)
            stacked = jax.tree.map(lambda *a: jnp.stack([number(v) for v in a]), *[pairs[i] for i in members])
            run, when, history = _sweep_group(stacked, task, keys, rounds, rate, plan, bar, offset=g * rounds)
            for row, i in enumerate(members):
                runs[i] = jax.tree.map(lambda a: a[row], run)
                histories[i] = {name: column[row] for name, column in history.items()}
    columns = {name: np.stack([h[name] for h in histories]) for name in histories[0]}
    return Sweep(
        settings=list(settings),
        seeds=list(seeds),
        history={"round": when} | columns,
        diverged=np.stack([np.asarray(run.diverged) for run in runs]),
        runs=runs,
    )


def _sweep_group(
    stacked: Any, task: Task, keys: Array, rounds: int, rate: Array, plan: Plan, bar: Progress, offset: int
) -> tuple[Run, np.ndarray, dict[str, np.ndarray]]:
    """All settings of one structure x all seeds: (runs, evaluated rounds, history), leaves [settings, seeds, ...]."""
    run = _start(stacked, task, keys, plan)
    evaluated: list[tuple[list[int], dict[str, Any]]] = []  # (rounds, values [settings, seeds, rounds, ...])
    now = lambda: {name: v[:, :, None] for name, v in _evaluate(stacked, task, keys, run, plan).items()}
    evaluated.append(([0], now()))
    check_select(plan.select, evaluated[0][1])
    first, piece = 0, 1
    while first < rounds:
        length = min(piece, engine.CAPACITY, rounds - first)
        began = time.monotonic()
        run, rows = jax.block_until_ready(_advance(stacked, task, keys, run, first, length, rate, plan))
        speed = length / max(time.monotonic() - began, 1e-9)
        piece = max(1, min(4 * piece, int(speed)))
        due = [i for i in range(length) if plan.evaluate_every and (first + i + 1) % plan.evaluate_every == 0]
        if due:
            rows = {name: np.asarray(v)[:, :, due] for name, v in rows.items() if name != "participants"}
            evaluated.append(([first + 1 + i for i in due], rows))
        first += length
        bar.update(offset + first, speed, {})
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
    return run, when, history


def _side_by_side(function, stacked, task, keys, *runs):
    """function(algorithm, task, key, *run) for every setting and seed."""
    one = lambda pair, key, *run: function(pair[0], dataclasses.replace(task, problem=pair[1]), key, *run)
    over_seeds = jax.vmap(one, (None, 0) + (0,) * len(runs))
    return jax.vmap(over_seeds, (0, None) + (0,) * len(runs))(stacked, keys, *runs)


@functools.partial(jax.jit, static_argnames=("plan",))
def _start(stacked, task, keys, plan):
    return _side_by_side(lambda a, t, key: engine.start(a, t, key, plan), stacked, task, keys)


@functools.partial(jax.jit, static_argnames=("plan",))
def _evaluate(stacked, task, keys, run, plan):
    return _side_by_side(lambda a, t, key, run: engine.evaluate(a, t, key, run, plan), stacked, task, keys, run)


@functools.partial(jax.jit, static_argnames=("plan",))
def _advance(stacked, task, keys, run, first, length, rate, plan):
    go_on = lambda a, t, key, run: engine.advance(a, t, key, run, first, length, rate, plan)
    return _side_by_side(go_on, stacked, task, keys, run)
