"""The border of simulation: everything a user gives is checked here, once, before anything is compiled."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from nestfed.core import Algorithm, Array, Task, UserError, validate
from nestfed.engine import Plan, round_together, start_all
from nestfed.program import Call, all_seats

OUTPUTS = ("last", "average", "random", "best")


def as_key(seed: Any) -> Array:
    """A JAX key from a whole number, or the key itself."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0:
        return seed
    raise UserError(f"seed={seed!r} was given; it must be a whole number or a key made by jax.random.key.")


def check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r} was given; it must be a whole number, 1 or more.")


def make_plan(
    algorithm: Algorithm, task: Task, *, cohort: int | float | None = None, dropout: float = 0.0, evaluate_every: int = 1,
    metrics: Callable | None = None, output: str = "last", select: str | None = None, unsynced: bool = False,
    client_axis: str = "auto", client_chunk: int | None = None,
) -> tuple[Plan, Array]:  # fmt: skip
    """Check everything that the user gave at the border, and fix the static part of the run: (plan, dropout)."""
    check_match(algorithm, task)
    check_positive("evaluate_every", evaluate_every)
    if not 0.0 <= float(dropout) < 1.0:
        raise UserError(f"dropout={dropout!r} was given; it is a probability, at least 0 and below 1.")
    if output not in OUTPUTS:
        raise UserError(f"output={output!r} was given; use one of {', '.join(OUTPUTS)}.")
    if (output == "best") != (select is not None):
        raise UserError("output='best' goes with select=<name of a metric on validation data>, and only with it.")
    if client_axis not in ("auto", "vmap", "map"):
        raise UserError(f"client_axis={client_axis!r} was given; use 'auto', 'vmap' or 'map'.")
    if client_chunk is not None:
        check_positive("client_chunk", client_chunk)
    size = cohort_size(cohort, task.clients)
    seats = task.clients if size is None else size
    plan = Plan(
        cohort=size, dropout=dropout > 0, evaluate_every=int(evaluate_every), metrics=metrics, output=output, select=select,
        unsynced=unsynced, chunk=_chunk(client_axis, client_chunk, task, seats), mesh=None,
    )  # fmt: skip
    if plan.chunk is None:
        plan = plan._replace(mesh=_mesh(seats))
    _check_contract(algorithm, task, plan)
    return plan, jnp.asarray(float(dropout))


def cohort_size(cohort: int | float | None, clients: int) -> int | None:
    """The number of clients per round from a number, a fraction or None."""
    if cohort is None:
        return None
    if isinstance(cohort, bool) or not isinstance(cohort, (int, float, np.integer, np.floating)):
        raise UserError(f"cohort={cohort!r} was given; use a number of clients, a fraction, or None for all of them.")
    if isinstance(cohort, (float, np.floating)):
        if not 0 < cohort <= 1:
            raise UserError(f"cohort={cohort} was given; a fraction of the clients lies between 0 and 1.")
        return max(1, round(cohort * clients))
    if cohort < 1:
        raise UserError(f"cohort={cohort} was given; a round needs at least one client.")
    if cohort > clients:
        raise UserError(f"cohort={cohort}, but the task has {clients} clients; use cohort=None for all of them.")
    return int(cohort)


def check_match(algorithm: Algorithm, task: Task) -> None:
    """Does this algorithm solve this kind of problem, with settings in range?"""
    name, problem = type(algorithm).__name__, task.problem
    validate(algorithm)
    if algorithm.family != problem.family:
        raise UserError(
            f"{name} solves {algorithm.family} problems; the task's {type(problem).__name__} is {problem.family}. Choose "
            "an algorithm of that family, or an adapter of nestfed.problems."
        )
    if algorithm.scope is not None and algorithm.scope != problem.scope:
        raise UserError(
            f"{name} solves {algorithm.family} problems of scope {algorithm.scope!r}; the task's problem has scope "
            f"{problem.scope!r}, which has another solution. Change the problem's scope, or the algorithm."
        )
    if task.local_steps is not None and not algorithm.uneven_steps:
        raise UserError(
            f"{name} needs the same number of local steps on all clients; make the task without local_steps."
        )
    if task.local_steps is not None and int(np.max(task.local_steps)) > algorithm.local_steps:
        raise UserError(
            f"the task's clients do up to {int(np.max(task.local_steps))} local steps, but {name} has "
            f"local_steps={algorithm.local_steps}; it must be at least as large."
        )


def _chunk(client_axis: str, client_chunk: int | None, task: Task, seats: int) -> int | None:
    """How many clients at a time: None for all side by side.

    Small models gain from running side by side everywhere. Large ones gain on accelerators only; on a CPU, clients one
    after the other use the caches better and take less memory.
    """
    if client_axis == "vmap":
        return None
    if client_axis == "map":
        return client_chunk or 1
    parameters = sum(p.size for p in task.params)
    if jax.default_backend() == "cpu" and parameters > 20_000:
        return client_chunk or 1
    return client_chunk if client_chunk and client_chunk < seats else None


def _mesh(seats: int) -> Mesh | None:
    """As many devices as divide the cohort evenly."""
    devices = jax.local_devices()
    number = math.gcd(len(devices), seats)
    if number == 1:
        return None
    return jax.make_mesh((number,), ("clients",), axis_types=(AxisType.Auto,), devices=devices[:number])


def _check_contract(algorithm: Algorithm, task: Task, plan: Plan) -> None:
    """Trace one round without running it: a Shared field must depend on private values through exchanges only, and the
    State must keep its structure, shapes and types."""
    name = type(algorithm).__name__
    key, side_by_side = jax.random.key(0), plan._replace(chunk=None, mesh=None)

    def begin():
        server, clients = start_all(algorithm, task, key, side_by_side)
        return jax.tree.map(lambda a: lax.convert_element_type(a, jnp.asarray(a).dtype), (server, clients))

    def one_round(server, clients):
        call = Call(key, jnp.asarray(0), server, jnp.ones(()))
        return round_together(algorithm, task, clients, all_seats(task), call)[:2]

    try:
        before = jax.eval_shape(begin)
        after = jax.eval_shape(one_round, *before)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UserError(
            f"{name}: a Shared field of its State depends on one client's private values. Pass it through fed.mean in the "
            "last step of the round, or declare the field Local."
        ) from error
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=False):
        if old.shape != new.shape or old.dtype != new.dtype:
            field = jax.tree_util.keystr(path[1:])
            raise UserError(
                f"{name}: a round changes the State field {field} from {old.dtype}{list(old.shape)} to "
                f"{new.dtype}{list(new.shape)}; a step must keep shapes and types (create with zeros_like)."
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UserError(f"{name}: a round changes the structure of State; fields that come and go must be Scratch.")
