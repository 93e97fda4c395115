"""Diagnostics from Python: at a point of your choice, by finite differences, and of a random estimate."""

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nestfed.core.algorithm import Algorithm, Sample
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree, Seed
from nestfed.engine import rounds
from nestfed.engine.options import check_positive, make_key
from nestfed.engine.steps import Call, Inputs, make_client, make_draws, make_only_participant
from nestfed.verbs.diagnostics.programs import gradients


def evaluate_at(task: Task, program: Callable, *, seed: Seed = 0, **point: PyTree) -> dict[str, np.ndarray]:
    """A diagnostic (and the task's own metrics) at a point of your choice, without an algorithm.

    The point is given by the problem's variables, as trees or flat vectors; those left out are the task's start.
    """
    problem = task.problem
    unknown = set(point) - set(problem.variables)
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))} was given; the variables are {', '.join(problem.variables)}.")
    start = zip(problem.variables, problem.layouts, task.params, strict=True)
    server = {name: layout.flatten(point[name]) if name in point else v for name, layout, v in start}
    state = _make_state_class(problem.variables)
    run = rounds.Run(
        server=state(**server),
        clients=state(*(None for _ in server)),
        output=None,
        unsynced=None,
        round=jnp.asarray(0, jnp.int32),
        diverged=jnp.asarray(-1, jnp.int32),
    )
    nothing = jnp.zeros(())
    inputs = Inputs(Algorithm(), task, make_key(seed), make_key(0), nothing)  # a point has no noise and no dropout
    values = rounds.evaluate(inputs, run, rounds.Plan(metrics=program))
    return {name: np.asarray(value) for name, value in values.items()}


@functools.cache
def _make_state_class(variables: tuple[str, ...]) -> Any:
    return namedtuple("Point", variables)  # one type per set of variables: another type would compile again


def compute_finite_differences(task: Task, *, step: float = 1e-5, **point: PyTree) -> np.ndarray:
    """The gradient of the exact objective by central differences: 2 d values, lower problems solved anew at each."""
    x = np.asarray(task.problem.layouts[0].flatten(point.pop("x")) if "x" in point else task.params[0])
    value = lambda x: evaluate_at(task, gradients, x=x, **point)["objective"]  # compiled already if compared with
    return np.array([(value(x + e) - value(x - e)) / (2 * step) for e in step * np.eye(x.size, dtype=x.dtype)])


@dataclasses.dataclass(frozen=True)
class EstimatorError:
    """How far a random estimate is from the truth."""

    bias: float  # ||mean of the estimates - exact||
    bias_error: float  # standard error of that mean, as a length: a bias below two of these is no evidence of one
    variance: float  # mean squared distance of the estimates from their mean


def measure_estimator_error(
    task: Task,
    estimate: Callable[[Any, Callable[[Any], Sample]], Array],
    exact: Array,
    *,
    client: int = 0,
    repeats: int = 1000,
    seed: Seed = 0,
) -> EstimatorError:
    """Bias and variance of `estimate(problem, draw)` at the client of this position, from independent repetitions.

    `draw(0)`, `draw(1)`, ... are independent batches, as in an algorithm's step. For a stochastic gradient and for a
    truncated series, with the exact values from `gradients` or `hypergradients` by `evaluate_at`, and for the value
    of a composition on one batch, whose bias falls like 1 / batch_size:

        measure_estimator_error(task, lambda problem, draw: problem.gradient(x, draw(0)), exact)
        measure_estimator_error(task, lambda problem, draw: Neumann(terms=5)(problem, [(x, y)], draw)[0], exact)
        measure_estimator_error(
            task, lambda problem, draw: problem.outer_flat(problem.inner_value(x, draw(0)), draw(0)), exact
        )
    """
    check_positive("repeats", repeats)

    @jax.jit
    def sample(task: Task, key: Array) -> Array:
        place = make_only_participant(task.data.ids[client])._replace(position=client)
        at_work = make_client(task, place, Call(key, 0, (), 1.0))
        one = lambda repeat: estimate(task.problem, make_draws(task, at_work, repeat))  # one step after the other
        return lax.map(one, jnp.arange(repeats), batch_size=min(repeats, 64))

    estimates = np.asarray(sample(task, make_key(seed)), np.float64)
    mean = estimates.mean(0)
    variance = float(np.sum((estimates - mean) ** 2) / max(repeats - 1, 1))
    return EstimatorError(float(np.linalg.norm(mean - np.asarray(exact))), float(np.sqrt(variance / repeats)), variance)
