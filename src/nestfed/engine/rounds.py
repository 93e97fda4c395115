"""The compiled engine of simulation: the same client program for everybody, over rounds, in one XLA program.

A round is a vmap over the cohort in which `fed.mean` is a collective; JAX itself refuses a Shared field that depends on
a client's private values. Where the model is large, phases run client after client instead (`Plan.chunk`), and steps
that exchange are replayed once per answer: the numbers are the same, and the memory is bounded by the chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.random import bernoulli
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nestfed.core.algorithm import Algorithm, Cohort, Fed, everything
from nestfed.core.randomness import METRICS, OUTPUT, fold
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.engine.cohorts import CohortRule, Seat, chances_of, choose_cohort, cohort_of, everybody, expected_weight
from nestfed.engine.steps import (
    INITIALISE,
    Ask,
    Call,
    Client,
    Exchange,
    Expected,
    Step,
    Tally,
    Treatment,
    largest_share,
    mean_over_clients,
    replay,
    run_round,
    seated,
    shared_key,
    shares,
    speaking,
    take_step,
    take_tallied_step,
    treatment_of,
    weighted_mean,
)
from nestfed.uploads.transforms import Transform, columns, statistics


class Run(NamedTuple):
    """All that a run is at the end of a round, and all that a checkpoint holds besides the history."""

    server: Any  # State with the Shared fields
    clients: Any  # State with the Local fields, every leaf [clients, ...]
    output: Any  # the server state that the output rule would return now, and what it needs to go on; None for "last"
    unsynced: Any  # State of every client before the last step of its last round; None unless asked for
    round: Array  # rounds done
    diverged: Array  # the round in which a value became non-finite, or -1; the state is the last finite one


KEPT = ("shared", "server", "local")  # Scratch fields come and go within a round


class Plan(NamedTuple):
    """The static part of a run: what decides which program is compiled."""

    cohort: CohortRule | None = None  # None: everybody
    dropout: bool = False
    hidden: bool = False  # does a guarantee count on nobody knowing who takes part?
    evaluate_every: int | None = 1  # None: never within the program
    metrics: Callable | None = None
    output: str = "last"
    select: str | None = None
    unsynced: bool = False
    chunk: int | None = None  # None: side by side
    mesh: Mesh | None = None


# ------------------------------------------------------------------------------------------------- all clients at once


def collective(seat: Seat, expected: Expected | None = None) -> Exchange:
    """The exchange of clients that run side by side under vmap(axis_name="clients")."""

    def mean(tree, treatment):
        answer = mean_over_clients(tree, seat.weight, expected)
        if treatment is None:
            return answer
        return treatment(answer, largest_share(lax.all_gather(seat.weight, "clients"), expected))

    def gather(tree, reply, key):
        side_by_side = lambda a: lax.all_gather(a, "clients")
        values = jax.tree.map(lambda a: side_by_side(jnp.asarray(a)), tree)
        return reply(values, Cohort(side_by_side(seat.id), side_by_side(seat.weight)), seat.slot, key)

    return Exchange(mean, gather)


def _in_chunks(program: Callable, arguments: PyTree, chunk: int | None, order: Array | None = None) -> PyTree:
    """A program of several clients for all along the leading axis of the arguments: side by side, or `chunk` at a time
    to bound memory. It is called as program(each, block): each(function, block) is function for every client there.

    `order` says who shares a chunk (neighbours in it); results come back in the order of the arguments.
    """
    number = jax.tree.leaves(arguments)[0].shape[0]
    side_by_side = lambda block: program(lambda function, *blocks: jax.vmap(function)(*blocks), block)
    if chunk is None or chunk >= number:
        return side_by_side(arguments)
    if chunk == 1:  # not a vmap over one: products with a batch axis are slower on a CPU, even of length one
        return _one_after_another(program, arguments)
    order = jnp.arange(number) if order is None else jnp.asarray(order)
    blocks = -(-number // chunk)
    index = order[jnp.minimum(jnp.arange(blocks * chunk), number - 1)].reshape(blocks, chunk)
    results = lax.map(lambda i: side_by_side(jax.tree.map(lambda a: a[i], arguments)), index)
    back = jnp.argsort(order)
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:number][back], results)


def _one_after_another(program: Callable, arguments: PyTree) -> PyTree:
    """lax.map, with the next clients' arguments fetched a turn ahead: as the loop's carry they are whole arrays. Slices
    of all clients' would be read element by element wherever they are used, which doubled the time of a step."""
    number = jax.tree.leaves(arguments)[0].shape[0]
    # Two clients' operations in one loop: on a CPU one's fill the pauses between the other's. Not for a few clients,
    # who are done before the longer program is compiled.
    abreast = 2 if number >= 8 else 1
    each = lambda function, *blocks: tuple(function(*one) for one in zip(*blocks, strict=True))
    one = lambda i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), arguments)
    fetch = lambda turn: tuple(one(jnp.minimum(turn * abreast + i, number - 1)) for i in range(abreast))
    stacked = lambda block: jax.tree.map(lambda *a: jnp.stack(a), *block)
    take_turn = lambda mine, turn: (fetch(turn + 1), stacked(program(each, mine)))
    _, results = lax.scan(take_turn, fetch(0), jnp.arange(-(-number // abreast)))
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:number], results)


def _with_replays(
    program: Callable[[PyTree, Exchange], PyTree],
    arguments: PyTree,
    seats: Seat,
    key: Array,
    chunk: int | None,
    order: Array | None = None,
    common: bool = False,
    treatments: Callable[[int], Treatment | None] = lambda number: None,
    expected: Expected | None = None,
) -> PyTree:
    """Run a program that exchanges for all seats, in passes: each pass knows the answers of the passes before it.

    `key` is the step's shared key, for the replies of a gather. `common` says that the result is the same on all
    clients: it is then computed once, and JAX refuses a result that depends on a client's private values.
    `treatments` says what the server does to the mean of each exchange, `expected` what it divides sums by.
    """
    answers: list[tuple[bool, PyTree]] = []  # (one answer per client?, answer)
    while True:
        asked: list[Ask] = []
        mapped = [answer for own, answer in answers if own]

        @jax.jit  # traced once for both its uses
        def one_client(inputs):
            argument, mine = inputs
            mine = iter(mine)
            try:
                return program(argument, replay([next(mine) if own else answer for own, answer in answers]))
            except Ask as ask:
                asked.append(ask)
                return jax.tree.map(jnp.asarray, ask.tree)

        inputs = arguments, mapped
        if common:
            jax.eval_shape(one_client, jax.tree.map(lambda a: a[0], inputs))
            if not asked:
                return jax.vmap(one_client, out_axes=None)(inputs)
        result = _in_chunks(lambda each, block: each(one_client, block), inputs, chunk, order)
        if not asked:
            return result
        reply = asked[0].reply
        if reply is None:
            answers.append((False, weighted_mean(result, seats.weight, treatments(len(answers)), expected)))
        elif reply is everything:
            answers.append((False, result))
        else:
            own_reply = functools.partial(reply, result, cohort_of(seats), key=key)
            answers.append((True, jax.vmap(lambda slot: own_reply(slot=slot))(seats.slot)))


def start_all(
    algorithm: Algorithm,
    task: Task,
    key: Array,
    plan: Plan,
    uploads: tuple[Transform, ...] = (),
    noise: Array | None = None,
):
    """(server, clients) after init, in which all clients take part."""
    call = Call(key, jnp.asarray(-1), None, jnp.ones(()), uploads, noise)
    step = Step(INITIALISE, 0, True)

    def init(seat, exchange):
        return algorithm.split(take_step(algorithm, task, step, None, seated(task, seat, call), call, exchange))

    seats = everybody(task)
    if plan.chunk is None:
        together = jax.vmap(lambda seat: init(seat, collective(seat)), out_axes=(None, 0), axis_name="clients")
        return together(seats)
    server, clients = _with_replays(
        init, seats, seats, shared_key(call, 0), plan.chunk, treatments=functools.partial(treatment_of, call, 0)
    )
    return jax.tree.map(lambda a: a[0], server), clients


def round_together(algorithm: Algorithm, task: Task, clients: Any, seats: Seat, call: Call):
    """A round with the cohort side by side: (server, clients' Local parts, states before the last step, tallies)."""

    def one_client(client, seat):
        state, before, tally = run_round(algorithm, task, client, seat, call, collective(seat, call.expected))
        return *algorithm.split(state), before, tally

    return jax.vmap(one_client, out_axes=(None, 0, 0, 0), axis_name="clients")(clients, seats)


def _round_in_chunks(algorithm: Algorithm, task: Task, clients: Any, seats: Seat, call: Call, chunk: int):
    """The same round client after client: phases without an exchange in one go, the others in passes."""
    number = seats.slot.size
    tallies = jax.tree.map(lambda a: jnp.broadcast_to(a, (number,)), Tally.zero()) if call.uploads else None
    states = begin_all(algorithm, call.server, clients, number), tallies
    before, index = states[0], 0
    keys = jax.vmap(lambda seat: seated(task, seat, call).key)(seats)
    for phase, (_, repeats, sync) in enumerate(algorithm.schedule()):
        if repeats == 0:
            continue
        before = states[0]

        def take(j, mine, exchange):
            state, seat, key = mine
            client = Client(task.data.client(seat.position), seat, key)
            return take_tallied_step(algorithm, task, Step(phase, j, sync), state, client, call, exchange)

        everyone = lambda s: (s, seats, keys)
        if _exchanges(lambda: take(index, jax.tree.map(lambda a: a[0], everyone(states)), replay([]))):
            step = lambda j, s: _with_replays(
                functools.partial(take, j),
                everyone(s),
                seats,
                shared_key(call, j),
                chunk,
                treatments=functools.partial(treatment_of, call, j),
                expected=call.expected,
            )
            states = step(index, states) if repeats == 1 else lax.fori_loop(index, index + repeats, step, states)
        else:

            def whole_phase(each, block):
                step = lambda j, s: each(lambda state, mine: take(j, (state, *mine[1:]), replay([])), s, block)
                start = each(lambda mine: mine[0], block)
                # Not a loop of one turn: such a step may fill fields that are None before it.
                return step(index, start) if repeats == 1 else lax.fori_loop(index, index + repeats, step, start)

            states = _in_chunks(whole_phase, everyone(states), chunk)
        index += repeats
    server, clients = algorithm.split(states[0])
    return jax.tree.map(lambda a: a[0], server), clients, before, states[1]


def begin_all(algorithm: Algorithm, server: Any, clients: Any, number: int) -> Any:
    """The States with which `number` clients start a round, every leaf [number, ...]."""
    return jax.vmap(lambda client, _: algorithm.begin(server, client))(clients, jnp.arange(number))


def _exchanges(step: Callable) -> bool:
    try:
        jax.eval_shape(step)
    except Ask:
        return True
    return False


def _shard(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Lay the leading (client) axis over the devices; without this a gather by ids would put all work on each."""
    if mesh is None:
        return tree
    spread = NamedSharding(mesh, PartitionSpec("clients"))
    return jax.tree.map(lambda a: lax.with_sharding_constraint(a, spread), tree)


# ------------------------------------------------------------------------------------------------- one round, metrics


def _one_round(
    algorithm: Algorithm,
    task: Task,
    key: Array,
    run: Run,
    round: Array,
    chances: Array,
    dropout: Array,
    plan: Plan,
    uploads: tuple[Transform, ...],
    noise: Array | None,
):
    """(run after this round, what it records: clients that took part, what happened to uploads)."""
    seats, call = call_up(task, key, run.server, round, chances, dropout, plan, uploads, noise)
    all_there = plan.cohort is None
    pick = (lambda tree: tree) if all_there else (lambda tree: jax.tree.map(lambda a: a[seats.position], tree))
    put = lambda old, new: jax.tree.map(lambda a, b: b if all_there else a.at[seats.position].set(b), old, new)
    old, seats = _shard((pick(run.clients), seats), plan.mesh)
    present = seats.weight > 0
    if plan.chunk is None:
        server, clients, before, tallies = round_together(algorithm, task, old, seats, call)
    else:
        server, clients, before, tallies = _round_in_chunks(algorithm, task, old, seats, call, plan.chunk)

    rows = lambda a: present.reshape((-1,) + (1,) * (a.ndim - 1))
    keep_absent = lambda new, old: jax.tree.map(lambda b, a: jnp.where(rows(b), b, a), new, old)
    clients = keep_absent(clients, old)
    # Where nobody may learn who took part, an empty round is one like the others.
    answered = present.any() | (call.expected is not None)
    server = jax.tree.map(lambda b, a: jnp.where(answered, b, a), server, run.server)
    healthy = (run.diverged < 0) & finite((server, clients))
    choose = lambda new, old: jax.tree.map(lambda b, a: jnp.where(healthy, b, a), new, old)
    unsynced = run.unsynced
    if plan.unsynced:
        before = algorithm.part(before, *KEPT)
        unsynced = put(unsynced, choose(keep_absent(before, pick(unsynced)), pick(unsynced)))
    new = Run(
        server=choose(server, run.server),
        clients=put(run.clients, choose(clients, old)),
        output=run.output,
        unsynced=unsynced,
        round=jnp.where(healthy, run.round + 1, run.round),
        diverged=jnp.where((run.diverged < 0) & ~healthy, round, run.diverged).astype(run.diverged.dtype),
    )
    return new, {"participants": present.sum().astype(jnp.int32)} | _about_uploads(call, tallies, seats.weight)


def call_up(
    task: Task,
    key: Array,
    server: Any,
    round: Array,
    chances: Array,
    dropout: Array,
    plan: Plan,
    uploads: tuple[Transform, ...],
    noise: Array | None,
) -> tuple[Seat, Call]:
    """Who takes part in a round, and what they are told."""
    drawn_by = noise if plan.hidden else None
    seats = choose_cohort(
        task, key, round, plan.cohort, dropout if plan.dropout else None, chances=chances, secret=drawn_by
    )
    whole, expected = seats.weight.sum(), None
    if plan.cohort is not None and plan.cohort.random_size and any(t.hides_in_mean for t in uploads):
        expected = Expected(*expected_weight(task.weights, chances))
        whole = expected.whole
    return seats, Call(key, round, server, whole, uploads, noise, expected)


def _about_uploads(call: Call, tallies: Tally | None, weights: Array) -> dict[str, Array]:
    if tallies is None:
        return {}
    here = lambda a: jnp.sum(jnp.where(weights > 0, a, 0))
    clipped = here(tallies.clipped) / jnp.maximum(here(tallies.uploads), 1)
    of_mean = shares(weights, call.expected)
    # Answers are common: any client's tally tells of them.
    return statistics(
        call.uploads, tallies.squared[0], tallies.numbers[0], clipped, of_mean, largest_share(weights, call.expected)
    )


def finite(tree: PyTree) -> Array:
    floats = [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(a).all() for a in floats], jnp.asarray(True))


@functools.partial(jax.jit, static_argnames=("plan",))  # traced once for all its uses
def evaluate(algorithm: Algorithm, task: Task, key: Array, run: Run, plan: Plan) -> dict[str, Array]:
    """The task's metrics over all clients, and the extra ones of the plan.

    Clients run in chunks of similar size, smallest first, each over exactly its own rows: the cost follows the number
    of rows, not clients x largest client.
    """
    seats, by_size = everybody(task), jnp.argsort(task.data.sizes)
    common_key = fold(key, METRICS)

    def program(argument, exchange):
        seat, client, before = argument
        fed = Fed(
            **speaking(exchange, common_key),
            sync=True,
            t=run.round,
            step=jnp.zeros_like(run.round),
            server=run.server,
            key=fold(key, METRICS, seat.id),
            shared_key=common_key,
            share=jnp.ones(()),
            unsynced=before,
        )
        data = task.data.client(seat.position)
        values = dict(task.metrics(run.server, client, data, fed))
        if plan.metrics is not None:
            values |= plan.metrics(task, run.server, client, data, fed)
        return jax.tree.map(jnp.asarray, values)

    try:
        arguments = seats, run.clients, run.unsynced
        return _with_replays(program, arguments, seats, common_key, plan.chunk or 64, by_size, common=True)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UserError(
            "a metric depends on one client's values (in sweeps and deployments nobody sees these): pass it through "
            "fed.mean, or through fed.gather if everybody's value is wanted."
        ) from error


# ------------------------------------------------------------------------------------------------- output rules


class Output(NamedTuple):
    """The server state that the output rule would return now."""

    server: Any
    score: Array  # of "best": the smallest value so far


def _first_output(server: Any, plan: Plan) -> Output | None:
    return None if plan.output == "last" else Output(server, jnp.asarray(jnp.inf))


def _update_output(run: Run, key: Array, round: Array, values: dict[str, Array], due: Array, plan: Plan) -> Run:
    """Take the state after this round into account. Rules are over synchronised iterates, the start left out."""
    if run.output is None:
        return run
    old, server, done = run.output, run.server, round + 1
    score = old.score
    if plan.output == "average":
        moving = lambda a, b: a + (b - a) / done if jnp.issubdtype(b.dtype, jnp.floating) else b
        new = jax.tree.map(moving, old.server, server)
        new = jax.tree.map(lambda a, b: jnp.where(done == 1, a, b).astype(a.dtype), server, new)
        take = run.diverged < 0
    elif plan.output == "random":
        take = bernoulli(fold(key, OUTPUT, round), 1.0 / done) & (run.diverged < 0)  # reservoir of size one
        new = server
    else:
        value = values[plan.select or ""]
        take = due & (value < score) & (run.diverged < 0)
        score, new = jnp.where(take, value, score).astype(score.dtype), server
    chosen = jax.tree.map(lambda b, a: jnp.where(take, b, a), new, old.server)
    return run._replace(output=Output(chosen, score))


# ------------------------------------------------------------------------------------------------- many rounds


@functools.partial(jax.jit, static_argnames=("plan",))
def start(
    algorithm: Algorithm,
    task: Task,
    key: Array,
    plan: Plan,
    uploads: tuple[Transform, ...] = (),
    noise: Array | None = None,
) -> Run:
    server, clients = start_all(algorithm, task, key, plan, uploads, noise)
    # A weak type (from a Python number) would change in the first round and break the loop's types.
    server, clients = jax.tree.map(lambda a: lax.convert_element_type(a, jnp.asarray(a).dtype), (server, clients))
    unsynced = None
    if plan.unsynced:
        unsynced = algorithm.part(begin_all(algorithm, server, clients, task.clients), *KEPT)
    minus_one = jnp.asarray(-1, jnp.int32)
    diverged = jnp.where(finite((server, clients)), minus_one, 0)
    return Run(server, clients, _first_output(server, plan), unsynced, jnp.asarray(0, jnp.int32), diverged)


CAPACITY = 256  # rounds in one call; fixed, so that runs of all lengths share one program


@functools.partial(jax.jit, static_argnames=("plan",))
def advance(
    algorithm: Algorithm,
    task: Task,
    key: Array,
    run: Run,
    first: Array,
    rounds: Array,
    dropout: Array,
    plan: Plan,
    uploads: tuple[Transform, ...] = (),
    noise: Array | None = None,
) -> tuple[Run, dict[str, Array]]:
    """`rounds` rounds (at most CAPACITY) from round `first` on: (run, rows of history, the first `rounds` filled).

    The number of rounds is an input of the program: a run can be cut into pieces of any lengths without compiling again
    and without changing a number. `first` comes from outside so that it stays one number when runs are stacked.
    """
    every, chances = plan.evaluate_every, chances_of(task.weights, plan.cohort)
    shapes = jax.eval_shape(lambda: evaluate(algorithm, task, key, run, plan)) if every else {}
    nothing = lambda v: jnp.full(v.shape, jnp.nan if jnp.issubdtype(v.dtype, jnp.floating) else 0, v.dtype)
    blank = jax.tree.map(nothing, shapes)
    rows = jax.tree.map(lambda v: jnp.broadcast_to(v, (CAPACITY, *v.shape)), blank)
    rows |= {"participants": jnp.zeros(CAPACITY, jnp.int32)}
    rows |= {name: jnp.zeros(CAPACITY) for name in columns(uploads)}

    def body(i, carry):
        run, rows = carry
        round = first + i
        run, recorded = _one_round(algorithm, task, key, run, round, chances, dropout, plan, uploads, noise)
        due, values = jnp.asarray(False), blank
        if every:
            due = (round + 1) % every == 0
            values = lax.cond(due, lambda: evaluate(algorithm, task, key, run, plan), lambda: blank)
        run = _update_output(run, key, round, values, due, plan)
        return run, jax.tree.map(lambda column, v: column.at[i].set(v), rows, values | recorded)

    return lax.fori_loop(0, rounds, body, (run, rows))
