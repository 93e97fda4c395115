"""The border of simulation: everything a user gives is checked here, once, before anything is compiled."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from nestfed.core.algorithm import Algorithm
from nestfed.core.noise import fresh_key
from nestfed.core.settings import UserError, check_registered, validate
from nestfed.core.task import Task
from nestfed.core.types import Array
from nestfed.engine.cohorts import cohort_rule, everybody
from nestfed.engine.rounds import Plan, collective, start_all
from nestfed.engine.steps import INITIALISE, Call, Step, run_round, seated, step_alone, steps_per_round, take_step
from nestfed.uploads.privacy import CentralDP, Uploads, guarantee_of, transforms_of
from nestfed.uploads.transforms import Transform

LARGE_MODEL = 20_000  # parameters
CACHED_BATCHES = 2**20  # bytes
_KEPT_CONTRACTS: set[Any] = set()
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


def check_select(select: str | None, recorded: Any) -> None:
    if select is not None and select not in recorded:
        raise UserError(f"select={select!r}: there is no metric {select!r}; recorded are {', '.join(recorded)}.")


def make_plan(
    algorithm: Algorithm,
    task: Task,
    *,
    cohort: int | float | None = None,
    sampling: str = "weights",
    dropout: float = 0.0,
    evaluate_every: int | None = 1,
    metrics: Callable | None = None,
    output: str = "last",
    select: str | None = None,
    unsynced: bool = False,
    client_axis: str = "auto",
    client_chunk: int | None = None,
    uploads: Uploads = (),
    weights: Any = None,
) -> tuple[Plan, Array]:
    """Check everything that the user gave at the border, and fix the static part of the run: (plan, dropout).

    `weights` are those of several tasks that will share the plan, [tasks, clients]; None: the task's own.
    """
    check_match(algorithm, task)
    transforms = transforms_of(uploads)
    if evaluate_every is not None:
        check_positive("evaluate_every", evaluate_every)
    if not 0.0 <= float(dropout) < 1.0:
        raise UserError(f"dropout={dropout!r} was given; it is a probability, at least 0 and below 1.")
    if output not in OUTPUTS:
        raise UserError(f"output={output!r} was given; use one of {', '.join(OUTPUTS)}.")
    if (output == "best") != (select is not None):
        raise UserError("output='best' goes with select=<name of a metric on validation data>, and only with it.")
    if output == "best" and evaluate_every is None:
        raise UserError("output='best' needs evaluations to choose by; give evaluate_every a number.")
    if client_axis not in ("auto", "vmap", "map"):
        raise UserError(f"client_axis={client_axis!r} was given; use 'auto', 'vmap' or 'map'.")
    if client_chunk is not None:
        check_positive("client_chunk", client_chunk)
    rule = cohort_rule(cohort, sampling, np.asarray(task.weights if weights is None else weights))
    seats = task.clients if rule is None else rule.seats
    guarantee = guarantee_of(uploads)
    if guarantee is not None:
        guarantee.check_cohort(rule is not None and rule.random_size)
    plan = Plan(
        cohort=rule,
        dropout=dropout > 0,
        hidden=isinstance(guarantee, CentralDP),
        evaluate_every=evaluate_every,
        metrics=metrics,
        output=output,
        select=select,
        unsynced=unsynced,
        chunk=_chunk(client_axis, client_chunk, algorithm, task, seats),
        mesh=None,
    )
    if plan.chunk is None:
        plan = plan._replace(mesh=_mesh(seats))
    check_contract(algorithm, task, transforms)
    return plan, jnp.asarray(float(dropout))


def kind_of(algorithm: Algorithm, task: Task, uploads: tuple[Transform, ...]) -> Any:
    """Everything about them but numbers: what is traced with one of a kind holds for all."""
    given = algorithm, task, uploads
    return jax.tree.structure(given), tuple((np.shape(a), str(jnp.result_type(a))) for a in jax.tree.leaves(given))


def check_match(algorithm: Algorithm, task: Task) -> None:
    """Does this algorithm solve this kind of problem, with settings in range?"""
    name, problem = type(algorithm).__name__, task.problem
    if isinstance(algorithm, type) or not isinstance(algorithm, Algorithm):
        given = f"the class {algorithm.__name__}" if isinstance(algorithm, type) else repr(algorithm)
        raise UserError(f"{given} was given as the algorithm; give an object, such as nestfed.make('fedavg', lr=0.1).")
    check_registered(algorithm)
    validate(algorithm)
    if algorithm.family != problem.family:
        raise UserError(
            f"{name} solves {algorithm.family} problems; the task's {type(problem).__name__} is "
            f"{problem.family}. Choose "
            "an algorithm of that family, or an adapter of nestfed.adapters."
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


def _chunk(client_axis: str, client_chunk: int | None, algorithm: Algorithm, task: Task, seats: int) -> int | None:
    """How many clients at a time: None for all side by side.

    Side by side is best on accelerators. On a CPU, measured: clients of large models one after the other, and
    otherwise as many at a time as have batches that fit the cache, where the cohort's do not; unless most steps
    exchange, because these are replayed.
    """
    if client_axis == "vmap":
        return None
    if client_axis == "map":
        return client_chunk or 1
    if client_chunk:
        return client_chunk if client_chunk < seats else None
    if jax.default_backend() != "cpu" or len(jax.local_devices()) > 1:
        return None
    if sum(p.size for p in task.params) > LARGE_MODEL:
        return 1
    batch = jax.eval_shape(lambda: task.sample(task.data.client(0), jax.random.key(0)))
    one = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(batch)) or 1
    blocks = -(-seats // max(1, CACHED_BATCHES // 4 // one))
    chunk = -(-seats // blocks)  # blocks of equal size: the last one is computed whole
    if task.data.columns is None or seats * one <= CACHED_BATCHES or chunk >= seats:
        return None
    return chunk if 2 * _exchanging_steps(algorithm, task) <= steps_per_round(algorithm) else None


def _exchanging_steps(algorithm: Algorithm, task: Task) -> int:
    """How many steps of a round exchange."""
    key, number = jax.random.key(0), 0
    first = jax.eval_shape(lambda: step_alone(algorithm, task, Step(INITIALISE, 0, True), _call(key, None), None))
    server, client = algorithm.split(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first))
    state = algorithm.begin(server, client)
    for phase, (_, repeats, sync) in enumerate(algorithm.schedule()):
        spoken: list[bool] = []
        if repeats:
            step = lambda s, phase=phase, sync=sync, spoken=spoken: step_alone(
                algorithm, task, Step(phase, 0, sync), _call(key, server), s, lambda: spoken.append(True)
            )
            state = jax.eval_shape(step, state)
        number += repeats * bool(spoken)
    return number


def _mesh(seats: int) -> Mesh | None:
    """As many devices as divide the cohort evenly."""
    devices = jax.local_devices()
    number = math.gcd(len(devices), seats)
    if number == 1:
        return None
    return jax.make_mesh((number,), ("clients",), axis_types=(AxisType.Auto,), devices=devices[:number])


def check_contract(algorithm: Algorithm, task: Task, uploads: tuple[Transform, ...] = ()) -> None:
    """Trace a round without running it: a Shared field must depend on private values through exchanges only, exchanges
    must not sit in loops, and a step must keep the shapes and types of the State."""
    kind = kind_of(algorithm, task, uploads)
    if kind not in _KEPT_CONTRACTS:  # tracing takes a while
        _check_contract(algorithm, task, uploads)
        _KEPT_CONTRACTS.add(kind)


def _check_contract(algorithm: Algorithm, task: Task, uploads: tuple[Transform, ...]) -> None:
    key = jax.random.key(0)
    call = lambda server: _call(key, server)._replace(uploads=uploads)
    state = jax.eval_shape(lambda: step_alone(algorithm, task, Step(INITIALISE, 0, True), call(None), None))
    server, client = algorithm.split(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state))
    state = algorithm.begin(server, client)
    for phase, (method, repeats, sync) in enumerate(algorithm.schedule()):
        step = lambda s, phase=phase, sync=sync: step_alone(algorithm, task, Step(phase, 0, sync), call(server), s)
        for _ in range(min(repeats, 2)):  # the second turn of a loop must find what the first one found
            before, state = jax.eval_shape(lambda s: s, state), jax.eval_shape(step, state)
            _check_types(before, state, f"{type(algorithm).__name__}.{method.__name__}")
            if before == state:
                break

    # JAX refuses an output of the collective program that should be common to all clients and is not.
    seats = everybody(task)
    try:
        _, clients = jax.eval_shape(lambda: start_all(algorithm, task, key, Plan(), uploads, fresh_key()))
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        initial, begun = Step(INITIALISE, 0, True), call(None)
        start = lambda seat: take_step(
            algorithm, task, initial, None, seated(task, seat, begun), begun, collective(seat)
        )
        leak = _leaking_field(algorithm, start, seats)
    else:
        round_of = lambda client, seat: run_round(algorithm, task, client, seat, call(server), collective(seat))[0]
        leak = _leaking_field(algorithm, lambda pair: round_of(*pair), (clients, seats))
    if leak is not None:
        raise UserError(
            f"{type(algorithm).__name__}: the Shared field {leak} of its State depends on one client's private "
            "values. Pass "
            "it through fed.mean in the last step of the round, or declare it Local."
        )


def _leaking_field(algorithm: Algorithm, program: Callable, arguments: Any) -> str | None:
    """The first Shared field of program's State that is not the same on all clients, as far as JAX can prove."""
    pick = lambda state, names: [getattr(state, name) for name in names]
    proven = lambda names: jax.vmap(lambda a: pick(program(a), names), out_axes=None, axis_name="clients")
    shared = [name for name, kind in algorithm.kinds().items() if kind in ("shared", "server")]
    for names in (shared, *([name] for name in shared)):
        try:
            jax.eval_shape(proven(names), arguments)
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            if len(names) == 1:
                return names[0]
        else:
            if names is shared:
                return None
    return None


def _call(key: Array, server: Any) -> Call:
    # Nothing runs: any key of noise will do.
    return Call(key, jnp.asarray(-1 if server is None else 0), server, jnp.ones(()), (), fresh_key())


def _check_types(before: Any, after: Any, where: str) -> None:
    for name, old, new in zip(before._fields, before, after, strict=True):
        if old is None:
            continue
        same = jax.tree.structure(old) == jax.tree.structure(new)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=same):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise UserError(
                    f"{where} changes the State field {name} from {a.dtype}{list(a.shape)} to "
                    f"{b.dtype}{list(b.shape)}; a "
                    "step must keep shapes and types (create values with zeros_like, never with 0.0 or a fixed dtype)."
                )
        if not same:
            raise UserError(f"{where} changes the structure of the State field {name}; a step must keep it.")
