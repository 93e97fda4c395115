"""What every algorithm must keep, shown by tracing it without running it.

A Shared field must depend on clients' private values through exchanges only, exchanges must not sit in loops, and a
step must keep the shapes and types of its State.
"""

import collections
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.jax_internals import NotCommonError, prove_common
from nestfed.core.noise import draw_fresh_key
from nestfed.core.settings import UserError, check_registered, validate
from nestfed.core.task import Task
from nestfed.engine.cohorts import Participant, list_participants
from nestfed.engine.rounds import Plan, make_collective, start_all
from nestfed.engine.steps import (
    START,
    Call,
    Inputs,
    Phase,
    list_phases,
    make_client,
    make_no_notes,
    run_round,
    step_alone,
    take_step,
)
from nestfed.uploads.transforms import Transform

Found = TypeVar("Found")


class Remembered(collections.OrderedDict[Hashable, Any]):
    """What was found out by tracing, for the last few kinds of algorithm and task: tracing takes a while."""

    MOST = 64  # an entry may keep a user's functions alive, and what they close over

    def find(self, kind: Hashable, compute: Callable[[], Found]) -> Found:
        if kind not in self:
            self[kind] = compute()
            while len(self) > self.MOST:
                self.popitem(last=False)
        self.move_to_end(kind)
        return self[kind]


_CONTRACTS = Remembered()


def find_kind(algorithm: Algorithm, task: Task, uploads: tuple[Transform, ...]) -> Hashable:
    """Everything about them but numbers: what is traced with one of a kind holds for all."""
    given = algorithm, task, uploads
    return jax.tree.structure(given), tuple((np.shape(a), str(jnp.result_type(a))) for a in jax.tree.leaves(given))


def check_match(algorithm: Algorithm, task: Task) -> None:
    """Does this algorithm solve this kind of problem, with settings in range?"""
    if isinstance(algorithm, type) or not isinstance(algorithm, Algorithm):
        given = f"the class {algorithm.__name__}" if isinstance(algorithm, type) else repr(algorithm)
        raise UserError(f"{given} was given as the algorithm; give an object, such as nestfed.make('fedavg', lr=0.1).")
    if not isinstance(task, Task):
        given = f"the class {task.__name__}" if isinstance(task, type) else f"a {type(task).__name__}"
        raise UserError(f"{given} was given as the task; make one with nestfed.Task.create(problem, data, params).")
    check_registered(algorithm)
    validate(algorithm)
    name, problem = type(algorithm).__name__, task.problem
    if algorithm.family != problem.family:
        raise UserError(
            f"{name} solves {algorithm.family} problems; the task's {type(problem).__name__} is {problem.family}. "
            "Choose an algorithm of that family, or an adapter of nestfed.problems.adapters."
        )
    if algorithm.scope is not None and algorithm.scope != problem.scope:
        raise UserError(
            f"{name} solves {algorithm.family} problems of scope {algorithm.scope!r}; the task's problem has scope "
            f"{problem.scope!r}, which has another solution. Change the problem's scope, or the algorithm."
        )
    if task.local_steps is None:
        return
    if not algorithm.uneven_steps:
        raise UserError(
            f"{name} needs the same number of local steps on all clients; make the task without local_steps."
        )
    most = int(np.max(np.asarray(task.local_steps)))
    if most > algorithm.local_steps:
        raise UserError(
            f"the task's clients do up to {most} local steps, but {name} has local_steps={algorithm.local_steps}; it "
            "must be at least as large."
        )


def check_contract(algorithm: Algorithm, task: Task, uploads: tuple[Transform, ...] = ()) -> tuple[str, ...]:
    """Refuse an algorithm that breaks the contract; the names of what its steps note."""
    return _CONTRACTS.find(find_kind(algorithm, task, uploads), lambda: _check(algorithm, task, uploads))


def _check(algorithm: Algorithm, task: Task, uploads: tuple[Transform, ...]) -> tuple[str, ...]:
    key, noise = jax.random.key(0), draw_fresh_key()  # nothing runs: any key of noise will do
    inputs = Inputs(algorithm, task, key, noise, jnp.zeros(()), uploads)
    call = lambda server: call_for_tracing(inputs, server)
    state, _ = jax.eval_shape(lambda: step_alone(algorithm, task, START, call(None), None))
    server, client = algorithm.split(make_zeros(state))
    state, names = algorithm.begin(server, client), set()
    for phase in list_phases(algorithm):
        step = lambda s, phase=phase: step_alone(algorithm, task, phase.step(0), call(server), s)
        for _ in range(min(phase.repeats, 2)):  # the second turn of a loop must find what the first one found
            before = jax.eval_shape(lambda s: s, state)
            state, noted = jax.eval_shape(step, state)
            names |= set(noted)
            _check_types(before, state, f"{type(algorithm).__name__}.{phase.method.__name__}")
            if before == state:
                break

    leak = _find_leak(inputs, call(None), call(server), tuple(sorted(names)))
    if leak is not None:
        raise UserError(
            f"{type(algorithm).__name__}: the Shared field {leak} of its State depends on one client's private "
            "values. Pass it through fed.mean in the last step of the round, or declare it Local."
        )
    return tuple(sorted(names))


def call_for_tracing(inputs: Inputs, server: Any) -> Call:
    """The call of a round (or of the start) that is traced and never run."""
    round = jnp.asarray(-1 if server is None else 0)
    return Call(inputs.key, round, server, jnp.ones(()), inputs.uploads, inputs.noise)


def make_zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def count_exchanging_steps(algorithm: Algorithm, task: Task) -> int:
    """How many steps of a round exchange."""
    inputs = Inputs(algorithm, task, jax.random.key(0), draw_fresh_key(), jnp.zeros(()))
    start = call_for_tracing(inputs, None)
    server, client = algorithm.split(
        make_zeros(jax.eval_shape(lambda: step_alone(algorithm, task, START, start, None)[0]))
    )
    state, number = algorithm.begin(server, client), 0
    for phase in list_phases(algorithm):
        spoken: list[bool] = []
        state = jax.eval_shape(_make_step(inputs, phase, server, spoken), state)
        number += phase.repeats * bool(spoken)
    return number


def _make_step(inputs: Inputs, phase: Phase, server: Any, spoken: list[bool]) -> Callable[[Any], Any]:
    call = call_for_tracing(inputs, server)
    algorithm, task = inputs.algorithm, inputs.task
    return lambda s: step_alone(algorithm, task, phase.step(0), call, s, lambda: spoken.append(True))[0]


def _find_leak(inputs: Inputs, start: Call, round: Call, notes: tuple[str, ...]) -> str | None:
    """JAX refuses an output of the collective program that should be common to all clients and is not."""
    algorithm, task = inputs.algorithm, inputs.task
    everybody = list_participants(task)

    def begin(place: Participant) -> Any:
        return take_step(algorithm, task, START, None, make_client(task, place, start), start, make_collective(place))[
            0
        ]

    def one_round(pair: tuple[Any, Participant]) -> Any:
        client, place = pair
        return run_round(algorithm, task, client, place, round, make_collective(place), make_no_notes(notes))[0]

    try:
        with prove_common():
            _, clients = jax.eval_shape(lambda: start_all(inputs, Plan()))
    except NotCommonError:
        return _find_private_field(algorithm, begin, everybody)
    return _find_private_field(algorithm, one_round, (clients, everybody))


def _find_private_field(algorithm: Algorithm, program: Callable[[Any], Any], arguments: Any) -> str | None:
    """The first Shared field of program's State that is not the same on all clients, as far as JAX can prove."""
    pick = lambda state, names: [getattr(state, name) for name in names]
    mapped = lambda names: jax.vmap(lambda a: pick(program(a), names), out_axes=None, axis_name="clients")
    shared = [name for name, kind in algorithm.kinds().items() if kind in ("shared", "server")]
    for names in (shared, *([name] for name in shared)):
        try:
            with prove_common():
                jax.eval_shape(mapped(names), arguments)
        except NotCommonError:
            if len(names) == 1:
                return names[0]
        else:
            if names is shared:
                return None
    return None


def _check_types(before: Any, after: Any, where: str) -> None:
    for name, old, new in zip(before._fields, before, after, strict=True):
        if old is None:
            continue
        same = jax.tree.structure(old) == jax.tree.structure(new)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=same):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise UserError(
                    f"{where} changes the State field {name} from {a.dtype}{list(a.shape)} to "
                    f"{b.dtype}{list(b.shape)}; a step must keep shapes and types (create values with zeros_like, "
                    "never with 0.0 or a fixed dtype)."
                )
        if not same:
            raise UserError(f"{where} changes the structure of the State field {name}; a step must keep it.")
