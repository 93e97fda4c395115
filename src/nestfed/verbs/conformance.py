"""The conformance suite: `check_algorithm(algorithm, task)` for every algorithm, ours and yours.

Give it a small task of the algorithm's family (a few clients, float64 for sharp comparisons). Each check either passes
or raises `NonConforming` with what is wrong and what to do.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.jax_internals import count_programs
from nestfed.core.settings import UserError, struct
from nestfed.core.task import Task
from nestfed.core.types import PyTree
from nestfed.engine import rounds
from nestfed.engine.contract import check_contract, check_match
from nestfed.engine.options import Options
from nestfed.engine.planning import make_inputs, make_plan
from nestfed.engine.rounds import Plan, Run
from nestfed.engine.steps import Call, make_client, make_draws, make_only_participant
from nestfed.uploads.transforms import Transform
from nestfed.verbs.cost import measure
from nestfed.verbs.messages import deploy
from nestfed.verbs.sweeps import sweep

ROUNDS = 3

# Clients that are left out or get lost, in every check: with all of them present less could go wrong, and one program
# serves several checks (compiling is what a check costs).
DROPOUT = 0.3


def _choose_options(task: Task) -> Options:
    return Options(rounds=ROUNDS, cohort=max(1, task.clients - 1), dropout=DROPOUT, evaluate_every=None, progress=False)


class NonConforming(AssertionError):
    """An algorithm broke a rule that every algorithm must keep."""


def check_algorithm(algorithm: Algorithm, task: Task) -> list[str]:
    """Run the whole suite; returns the names of the checks that passed, or raises NonConforming."""
    passed = []
    for check in CHECKS:
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        try:
            check(algorithm, task)
        except NonConforming as error:
            raise NonConforming(f"{type(algorithm).__name__}: {name}: {error}") from error
        except UserError as error:
            raise NonConforming(f"{name}: {error}") from error
        passed.append(name)
    return passed


def _run(
    algorithm: Algorithm,
    task: Task,
    seed: int = 0,
    *,
    plan: Plan | None = None,
    begin: Task | None = None,
    pieces: Sequence[int] = (ROUNDS,),
) -> tuple[Run, dict[str, np.ndarray]]:
    """(the run after these pieces of it, what its steps noted); it starts from the task `begin`, or from this one, and
    its plan is the one given, or that of this task."""
    options = _choose_options(task)
    plan = make_plan(algorithm, task, options) if plan is None else plan
    inputs = make_inputs(algorithm, task, seed, options)
    run = rounds.start(inputs if begin is None else inputs._replace(task=begin), plan)
    noted, first = [], 0
    for length in pieces:
        run, rows = rounds.advance(inputs, run, first, length, plan)
        noted.append({name: np.asarray(values)[:length] for name, values in rows["notes"].items()})
        first += length
    return run, {name: np.concatenate([notes[name] for notes in noted]) for name in noted[0]}


def _take_states(found: tuple[Run, Any]) -> tuple[Any, Any]:
    return found[0].server, found[0].clients


def _check_same(one: PyTree, other: PyTree, what: str) -> None:
    """Equal up to rounding; vmapped and single products may differ in the last bits."""
    named = jax.tree_util.tree_leaves_with_path(one)
    others = jax.tree.leaves(other)
    if len(named) != len(others):
        raise NonConforming(f"{what}: the states have different structures")
    for (path, a), b in zip(named, others, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        tolerance = 1e-9 if a.dtype == np.float64 else 2e-4
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance):
            gap = np.abs(a - b).max() if a.shape == b.shape else f"shapes {a.shape} and {b.shape}"
            raise NonConforming(f"{what}: the field {_name_field(path)} differs (largest gap {gap})")


def _name_field(path: Any) -> str:
    return jax.tree_util.keystr(path[1:]).lstrip(".") or "of the state"


# ------------------------------------------------------------------------------------------------- the checks


def _check_settings_and_family_fit(algorithm: Algorithm, task: Task) -> None:
    check_match(algorithm, task)


def _check_shared_fields_come_from_exchanges_and_types_stay(algorithm: Algorithm, task: Task) -> None:
    check_contract(algorithm, task)


@struct
class _Untouched(Transform):
    """Uploads go on their way as they are."""


def _check_uploads_lie_around_what_everybody_knows(algorithm: Algorithm, task: Task) -> None:
    check_contract(algorithm, task, (_Untouched(),))


def _check_cost_is_static(algorithm: Algorithm, task: Task) -> None:
    measure(algorithm, task)


def _check_one_trace_serves_all_seeds_and_settings(algorithm: Algorithm, task: Task) -> None:
    _run(algorithm, task, 0)
    before = count_programs(rounds.advance)
    nudged = jax.tree.map(lambda a: a * 1.01 if isinstance(a, float) else a, algorithm)
    _run(algorithm, task, 1)
    _run(nudged, task, 1)
    if count_programs(rounds.advance) != before:
        raise NonConforming(
            "a new seed or a new float setting compiled again; floats must be plain fields of the record"
        )


def _check_simulation_equals_message_passing(algorithm: Algorithm, task: Task) -> None:
    deployed, simulated = deploy(algorithm, task, 0, _choose_options(task)), _run(algorithm, task)
    _check_same(_take_states(simulated), (deployed.server, deployed.clients), "message passing and simulation")
    for name, values in simulated[1].items():
        told = deployed.noted.get(name, np.zeros_like(values))
        if not np.allclose(values, told, rtol=1e-4, atol=1e-6):
            raise NonConforming(f"message passing and simulation: the note {name!r} differs; note numbers of the step")


def _check_a_row_of_a_sweep_with_clients_in_turn_is_a_run(algorithm: Algorithm, task: Task) -> None:
    found = sweep([algorithm], task, [5, 0], _choose_options(task), client_axis="map")
    row, alone = jax.tree.map(lambda a: a[1], found.runs[0]), _run(algorithm, task)
    what = "a run with clients side by side and a row of a sweep with clients in turn"
    _check_same(_take_states(alone), (row.server, row.clients), what)
    _check_same(alone[1], {name: values[0, 1] for name, values in found.noted.items()}, f"the notes of {what}")


def _check_a_run_may_be_cut_into_pieces(algorithm: Algorithm, task: Task) -> None:
    whole, cut = _run(algorithm, task), _run(algorithm, task, pieces=(1, ROUNDS - 1))
    _check_same(_take_states(whole), _take_states(cut), "a run in one piece and in two")


def _check_the_order_of_clients_does_not_matter(algorithm: Algorithm, task: Task) -> None:
    order = np.roll(np.arange(task.clients), 1).tolist()
    mine = lambda a: None if a is None else np.asarray(a)[order]
    turned = dataclasses.replace(
        task, data=task.data.reorder(order), weights=mine(task.weights), local_steps=mine(task.local_steps)
    )
    server, clients = _take_states(_run(algorithm, task))
    other_server, other_clients = _take_states(_run(algorithm, turned))
    hint = "the numbers depend on the order of the clients; use what a reply gets by ids, not by position"
    _check_same(server, other_server, hint)
    _check_same(jax.tree.map(lambda a: np.asarray(a)[order], clients), other_clients, hint)


def _check_an_absent_client_does_not_spread_its_values(algorithm: Algorithm, task: Task) -> None:
    if task.clients < 2:
        return
    present = np.asarray(task.weights).copy()
    present[0] = 0.0
    quiet = dataclasses.replace(task, weights=present)
    spoilt = dataclasses.replace(quiet, data=_spoil(task))
    # Cohorts are drawn as for the task itself: the client without weight is asked like the others.
    plan = make_plan(algorithm, task, _choose_options(task))
    without = _run(algorithm, quiet, plan=plan)
    # The start is everybody's: only rounds are compared, from one and the same start.
    spoiled = _run(algorithm, spoilt, plan=plan, begin=quiet)
    if int(spoiled[0].diverged) >= 0:
        raise NonConforming("a NaN of a client of weight zero stopped the run; only means may carry its values")
    _check_same(
        _take_states(without), _take_states(spoiled), "runs with and without a NaN at a client that takes no part"
    )


def _check_an_absent_client_keeps_what_belongs_to_its_own_point(algorithm: Algorithm, task: Task) -> None:
    """An estimate that is corrected by differences must start from the point where it was made, not from where the
    others have gone meanwhile: `Algorithm.estimates` says what belongs together."""
    if type(algorithm).estimates is Algorithm.estimates:
        return
    algorithm = dataclasses.replace(algorithm, local_steps=1)
    task = dataclasses.replace(task, data=_make_alike(task), local_steps=None)
    run, _ = _run(algorithm, task, pieces=(3 * ROUNDS,))
    key = jax.random.key(0)

    def gap(client: Any, position: Any) -> Any:
        at_work = make_client(task, make_only_participant()._replace(position=position), Call(key, 0, run.server, 1.0))
        found = algorithm.estimates(task.problem, algorithm.begin(run.server, client), make_draws(task, at_work, 0))
        relative = lambda a, b: jnp.max(jnp.abs(a - b)) / (1e-3 + jnp.max(jnp.abs(b)))
        return jnp.stack([jnp.where(there, relative(a, b), 0) for a, b, there in found]).max()

    gaps = np.asarray(jax.vmap(gap)(run.clients, jnp.arange(task.clients)))
    if not (gaps <= (1e-9 if gaps.dtype == np.float64 else 1e-3)).all():
        raise NonConforming(
            f"after {3 * ROUNDS} rounds, from which clients were absent now and then, an estimate of client "
            f"{int(np.nanargmax(gaps))} is not what it should be at its own point (gap {np.nanmax(gaps):.2g}). "
            "A Local estimate needs the point that it belongs to as a Local field, as FedBiOAcc has it."
        )


def _make_alike(task: Task) -> Any:
    """The data with every client's first row in place of all its rows."""
    order = np.argsort(task.data.offsets, kind="stable")  # as rows lie in the pool
    first = np.repeat(np.asarray(task.data.offsets)[order], np.asarray(task.data.sizes)[order])
    return dataclasses.replace(task.data, columns=jax.tree.map(lambda a: np.asarray(a)[first], task.data.columns))


def _spoil(task: Task) -> Any:
    """The data with NaN in everything that client 0 holds."""
    start, size = int(task.data.offsets[0]), int(task.data.sizes[0])

    def spoil(a: Any, rows: slice) -> Any:
        a = np.array(a)
        if np.issubdtype(a.dtype, np.floating):
            a[rows] = np.nan
        return a

    columns = jax.tree.map(lambda a: spoil(a, slice(start, start + size)), task.data.columns)
    constants = jax.tree.map(lambda a: spoil(a, slice(0, 1)), task.data.constants)
    return dataclasses.replace(task.data, columns=columns, constants=constants)


CHECKS: tuple[Callable[[Algorithm, Task], None], ...] = (
    _check_settings_and_family_fit,
    _check_shared_fields_come_from_exchanges_and_types_stay,
    _check_uploads_lie_around_what_everybody_knows,
    _check_cost_is_static,
    _check_one_trace_serves_all_seeds_and_settings,
    _check_the_order_of_clients_does_not_matter,
    _check_simulation_equals_message_passing,
    _check_a_row_of_a_sweep_with_clients_in_turn_is_a_run,
    _check_a_run_may_be_cut_into_pieces,
    _check_an_absent_client_does_not_spread_its_values,
    _check_an_absent_client_keeps_what_belongs_to_its_own_point,
)
