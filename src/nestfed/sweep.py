"""Sweeps: many settings x many seeds side by side in one program per structure."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed import engine
from nestfed.border import as_key, check_positive, make_plan
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
    settings: Sequence[Any], task: Task, seeds: Sequence[Any] = (0,), *, rounds: int, dropout: float = 0.0,
    progress: bool | None = None, **options: Any,
) -> Sweep:  # fmt: skip
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

    runs: list[Any] = [None] * len(pairs)
    histories: list[Any] = [None] * len(pairs)
    with Progress("sweep", rounds * len(groups), 0, progress) as bar:
        for g, members in enumerate(groups.values()):
            plan, rate = make_plan(pairs[members[0]][0], task, dropout=dropout, **options)
            number = lambda a: jnp.asarray(a, jnp.result_type(float) if isinstance(a, float) else None)
            stacked = jax.tree.map(lambda *a: jnp.stack([number(v) for v in a]), *[pairs[i] for i in members])
            run, history = _sweep_group(stacked, task, keys, rounds, rate, plan, bar, offset=g * rounds)
            for row, i in enumerate(members):
                runs[i] = jax.tree.map(lambda a: a[row], run)
                histories[i] = {name: column[row] for name, column in history.items()}
    columns = {name: np.stack([h[name] for h in histories]) for name in histories[0] if name != "round"}
    return Sweep(
        settings=list(settings), seeds=list(seeds), history={"round": histories[0]["round"][0]} | columns,
        diverged=np.stack([np.asarray(run.diverged) for run in runs]), runs=runs,
    )  # fmt: skip


def _sweep_group(
    stacked: Any, task: Task, keys: Array, rounds: int, rate: Array, plan: Plan, bar: Progress, offset: int
):
    """All settings of one structure x all seeds: (runs, history), every leaf [settings, seeds, ...]."""
    over = lambda function: jax.vmap(jax.vmap(function, (None, 0, 0)), (0, None, 0))
    with_problem = lambda pair: (pair[0], dataclasses.replace(task, problem=pair[1]))
    settings = jax.tree.leaves(stacked)[0].shape[0] if jax.tree.leaves(stacked) else 1
    blank = jnp.zeros((settings, keys.shape[0]))
    begin = jax.jit(over(lambda pair, key, _: engine.start(*with_problem(pair), key, plan)))
    evaluate = jax.jit(over(lambda pair, key, run: engine.evaluate(*with_problem(pair), key, run, plan)))
    capacity = min(rounds, 1024)

    @jax.jit
    def go_on(stacked, keys, run, first, length):
        one = lambda pair, key, run: engine.advance(
            *with_problem(pair), key, run, first, length, rate, plan, capacity=capacity
        )
        return over(one)(stacked, keys, run)

    run = begin(stacked, keys, blank)
    pieces = [({name: np.asarray(v)[:, :, None] for name, v in evaluate(stacked, keys, run).items()}, np.array([0]))]
    first, piece = 0, 1
    while first < rounds:
        length = min(piece, capacity, rounds - first)
        began = time.monotonic()
        run, rows = jax.block_until_ready(go_on(stacked, keys, run, first, length))
        speed = length / max(time.monotonic() - began, 1e-9)
        piece = max(1, min(4 * piece, int(speed)))
        due = [i for i in range(length) if (first + i + 1) % plan.evaluate_every == 0]
        pieces.append(
            ({name: np.asarray(v)[:, :, due] for name, v in rows.items() if name != "participants"},
             first + 1 + np.asarray(due, int))
        )  # fmt: skip
        first += length
        bar.update(offset + first, speed, {})
    if rounds % plan.evaluate_every:
        last = evaluate(stacked, keys, run)
        pieces.append(({name: np.asarray(v)[:, :, None] for name, v in last.items()}, np.array([rounds])))
    history = {name: np.concatenate([p[name] for p, _ in pieces], axis=2) for name in pieces[0][0]}
    # A diverged setting keeps its last finite state; what was measured on it afterwards says nothing.
    when = np.concatenate([r for _, r in pieces])
    stale = (np.asarray(run.diverged)[:, :, None] >= 0) & (when > np.asarray(run.diverged)[:, :, None])
    for name, column in history.items():
        if np.issubdtype(column.dtype, np.floating):
            history[name] = np.where(stale.reshape(stale.shape + (1,) * (column.ndim - 3)), np.nan, column)
    return run, history | {"round": np.broadcast_to(when, (settings, when.size))}
