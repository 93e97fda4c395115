"""The compiled engine of simulation: the same client program for everybody, over rounds, in one XLA program.

A round is a vmap over the cohort in which `fed.mean` is a collective; JAX itself refuses a Shared field that depends on
a client's private values. Where the model is large, phases run client after client instead (`Plan.chunk`), and steps
that exchange are replayed once per answer: the numbers are the same, and the memory is bounded by the chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.random import bernoulli

from nestfed.core.algorithm import Algorithm, Cohort, Fed, Reply, reply_with_all
from nestfed.core.jax_internals import NotCommonError, prove_common
from nestfed.core.randomness import METRICS, OUTPUT, fold
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, ArrayLike, PyTree
from nestfed.engine.cohorts import (
    CohortRule,
    Participant,
    choose_cohort,
    find_chances,
    find_expected_weight,
    list_participants,
    show_cohort,
)
from nestfed.engine.devices import AXIS, COMMON, OWN, Blocks, RowsElsewhere, SpreadCohort
from nestfed.engine.steps import (
    NUMBERS,
    SQUARES,
    START,
    Ask,
    Call,
    Client,
    Exchange,
    Expected,
    Inputs,
    Notes,
    Phase,
    Treatment,
    add_notes,
    average_by_weight,
    average_over_clients,
    compute_shares,
    find_largest_share,
    list_phases,
    make_client,
    make_no_notes,
    make_shared_key,
    make_treatment,
    make_words,
    repeat,
    replay,
    run_round,
    take_step,
)
from nestfed.uploads.transforms import SIGNAL, measure_signal


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
    blocks: Blocks | None = None  # which device owns which clients; None: there is one device
    room: int = 0  # for so many of a cohort on each of several devices; beyond it a round takes a longer program
    notes: tuple[str, ...] = ()  # names of what steps note

    @property
    def columns(self) -> tuple[str, ...]:
        """What the history has of notes."""
        raw = tuple(name for name in self.notes if name not in (SQUARES, NUMBERS))
        return raw + (SIGNAL,) * (SQUARES in self.notes)


# ------------------------------------------------------------------------------------------------- all clients at once


def make_collective(
    place: Participant, expected: Expected | None = None, spread: SpreadCohort | None = None
) -> Exchange:
    """The exchange of clients that run side by side under vmap(axis_name="clients")."""
    side_by_side = lambda a: lax.all_gather(a, "clients")

    def mean(tree: PyTree, treatment: Treatment | None) -> PyTree:
        answer = average_over_clients(tree, place.weight, expected, spread)
        if treatment is None:
            return answer
        weights = side_by_side(place.weight) if spread is None else spread.participants.weight
        return treatment(answer, find_largest_share(weights, expected))

    def gather(tree: PyTree, reply: Reply, key: Array) -> PyTree:
        values = jax.tree.map(lambda a: side_by_side(jnp.asarray(a)), tree)
        if spread is not None:
            return reply(spread.gather(values), show_cohort(spread.participants), place.slot, key)
        return reply(values, Cohort(side_by_side(place.id), side_by_side(place.weight)), place.slot, key)

    return Exchange(mean, gather)


def _run_in_chunks(
    program: Callable, arguments: PyTree, chunk: int | None, order: Array | None = None, count: Array | None = None
) -> PyTree:
    """A program of several clients for all along the leading axis of the arguments: side by side, or `chunk` at a time
    to bound memory. It is called as program(each, block): each(function, block) is function for every client there.

    `order` says who shares a chunk (neighbours in it); results come back in the order of the arguments. With `count`,
    only the first ones are run, so that the time follows their number: the other results are zeros.
    """
    number = jax.tree.leaves(arguments)[0].shape[0]
    side_by_side = lambda block: program(lambda function, *blocks: jax.vmap(function)(*blocks), block)
    if chunk is None or chunk >= number:
        return side_by_side(arguments)
    if chunk == 1:  # not a vmap over one: products with a batch axis are slower on a CPU, even of length one
        return _run_one_after_another(program, arguments, count)
    order = jnp.arange(number) if order is None else jnp.asarray(order)
    blocks = -(-number // chunk)
    index = order[jnp.minimum(jnp.arange(blocks * chunk), number - 1)].reshape(blocks, chunk)
    take_turn = lambda _, turn: (None, side_by_side(jax.tree.map(lambda a: a[index[turn]], arguments)))
    if count is None:
        results = lax.map(lambda i: side_by_side(jax.tree.map(lambda a: a[i], arguments)), index)
    else:
        results = _take_first_turns(take_turn, None, blocks, -(-count // chunk))
    back = jnp.argsort(order)
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:number][back], results)


def _run_one_after_another(program: Callable, arguments: PyTree, count: Array | None = None) -> PyTree:
    """lax.map, with the next clients' arguments fetched a turn ahead: as the loop's carry they are whole arrays. Slices
    of all clients' would be read element by element wherever they are used, which doubled the time of a step."""
    number = jax.tree.leaves(arguments)[0].shape[0]
    # Two clients' operations in one loop: on a CPU one's fill the pauses between the other's. Not for a few clients,
    # who are done before the longer program is compiled.
    abreast = 2 if number >= 8 else 1
    each = lambda function, *blocks: tuple(function(*one) for one in zip(*blocks, strict=True))
    one = lambda i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), arguments)
    fetch = lambda turn: tuple(one(jnp.minimum(turn * abreast + i, number - 1)) for i in range(abreast))
    stack = lambda block: jax.tree.map(lambda *a: jnp.stack(a), *block)
    take_turn = lambda mine, turn: (fetch(turn + 1), stack(program(each, mine)))
    turns = -(-number // abreast)
    if count is None:
        _, results = lax.scan(take_turn, fetch(0), jnp.arange(turns))
    else:
        results = _take_first_turns(take_turn, fetch(0), turns, -(-count // abreast))
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:number], results)


def _take_first_turns(take_turn: Callable, carry: PyTree, turns: int, count: Array) -> PyTree:
    """What lax.scan stacks in so many turns; those after the first `count`, a traced number, leave zeros."""
    shapes = jax.eval_shape(take_turn, carry, jnp.asarray(0))[1]
    blank = jax.tree.map(lambda a: jnp.zeros((turns, *a.shape), a.dtype), shapes)

    def body(turn: Array, both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        carry, results = both
        carry, mine = take_turn(carry, turn)
        return carry, jax.tree.map(lambda a, b: a.at[turn].set(b), results, mine)

    return lax.fori_loop(0, count, body, (carry, blank))[1]


class _Replays(NamedTuple):
    """How a program that exchanges is run for all participants, in passes: each pass knows the answers of the passes
    before it."""

    participants: Participant
    key: Array  # the step's shared one, for the replies of a gather
    chunk: int | None
    order: Array | None = None
    treatments: Callable[[int], Treatment | None] = lambda number: (
        None
    )  # what the server does to the mean of each exchange
    expected: Expected | None = None  # what it divides sums by
    spread: SpreadCohort | None = None  # where these are some of all participants
    taken: Array | None = None  # so many of the places must be run, the first ones

    def run(self, program: Callable[[PyTree, Exchange], PyTree], arguments: PyTree, *, common: bool = False) -> PyTree:
        """`common` says that the result is the same on all clients: it is then computed once, and JAX refuses a result
        that depends on a client's private values."""
        answers: list[tuple[bool, PyTree]] = []  # (one answer per client?, answer)
        while True:
            asked: list[Ask] = []
            mapped = [answer for own, answer in answers if own]

            @jax.jit  # traced once for both its uses
            def one_client(inputs: tuple[PyTree, list[PyTree]]) -> PyTree:
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
            result = _run_in_chunks(
                lambda each, block: each(one_client, block), inputs, self.chunk, self.order, self.taken
            )
            if not asked:
                return result
            answers.append(self.answer(asked[0], result, self.treatments(len(answers))))

    def answer(self, ask: Ask, values: PyTree, treatment: Treatment | None) -> tuple[bool, PyTree]:
        weights = self.participants.weight
        if ask.reply is None:
            return False, average_by_weight(values, weights, treatment, self.expected, self.spread)
        if self.spread is not None:
            values = self.spread.gather(values)
        if ask.reply is reply_with_all:
            return False, values
        reply, cohort = ask.reply, show_cohort(self.participants if self.spread is None else self.spread.participants)
        return True, jax.vmap(lambda slot: reply(values, cohort, slot, self.key))(self.participants.slot)


def start_all(inputs: Inputs, plan: Plan) -> tuple[Any, Any]:
    """(server, clients) after init, in which all clients take part."""
    algorithm, task = inputs.algorithm, inputs.task
    call = Call(inputs.key, jnp.asarray(-1), None, jnp.ones(()), inputs.uploads, inputs.noise)

    def init(place: Participant, exchange: Exchange) -> tuple[Any, Any]:
        client = make_client(task, place, call)
        return algorithm.split(take_step(algorithm, task, START, None, client, call, exchange)[0])

    everybody, spread = _list_everybody(task, plan)
    if plan.chunk is None:
        collective = lambda p: make_collective(p, spread=spread)
        together = jax.vmap(lambda p: init(p, collective(p)), out_axes=(None, 0), axis_name="clients")
        return together(everybody)
    treatments = functools.partial(make_treatment, call, 0)
    replays = _Replays(everybody, make_shared_key(call, 0), plan.chunk, treatments=treatments, spread=spread)
    server, clients = replays.run(init, everybody)
    return jax.tree.map(lambda a: a[0], server), clients


def _list_everybody(task: Task, plan: Plan) -> tuple[Participant, SpreadCohort | None]:
    """(all clients, or all of this device; all of them, where devices are several)."""
    everybody = list_participants(task)
    if plan.blocks is None:
        return everybody, None
    return plan.blocks.take_all_own(everybody), SpreadCohort(plan.blocks, everybody, plan.blocks.size)


def _run_together(
    algorithm: Algorithm,
    task: Task,
    clients: Any,
    participants: Participant,
    call: Call,
    notes: Notes,
    spread: SpreadCohort | None,
) -> tuple[Any, Any, Any, Notes]:
    """A round with the cohort side by side: (server, clients' Local parts, states before the last step, notes)."""

    def one_client(client: Any, place: Participant) -> tuple[Any, Any, Any, Notes]:
        exchange = make_collective(place, call.expected, spread)
        state, before, noted = run_round(algorithm, task, client, place, call, exchange, notes)
        return *algorithm.split(state), before, noted

    return jax.vmap(one_client, out_axes=(None, 0, 0, 0), axis_name="clients")(clients, participants)


def _run_in_turn(
    algorithm: Algorithm,
    task: Task,
    clients: Any,
    participants: Participant,
    call: Call,
    notes: Notes,
    spread: SpreadCohort | None,
    chunk: int,
    count: Array | None,
) -> tuple[Any, Any, Any, Notes]:
    """The same round client after client: phases without an exchange in one go, the others in passes."""
    number = participants.slot.size
    everyone_s = jax.tree.map(lambda a: jnp.broadcast_to(a, (number, *a.shape)), notes)
    carry: tuple[Any, Notes] = begin_all(algorithm, call.server, clients, number), everyone_s
    before = carry[0]
    keys = jax.vmap(lambda place: make_client(task, place, call).key)(participants)
    for phase in list_phases(algorithm):
        before = carry[0]

        def take(index: ArrayLike, mine: PyTree, exchange: Exchange, phase: Phase = phase) -> tuple[Any, Notes]:
            (state, notes), place, key = mine
            client = Client(task.data.client(place.position), place, key)
            state, noted = take_step(algorithm, task, phase.step(index), state, client, call, exchange)
            return state, add_notes(notes, noted)

        with_places = lambda carry: (carry, participants, keys)
        if _does_exchange(lambda: take(phase.first, jax.tree.map(lambda a: a[0], with_places(carry)), replay([]))):

            def step(index: ArrayLike, carry: tuple[Any, Notes], take: Callable = take) -> tuple[Any, Notes]:
                treatments = functools.partial(make_treatment, call, index)
                key = make_shared_key(call, index)
                replays = _Replays(
                    participants, key, chunk, None, treatments, call.expected, spread=spread, taken=count
                )
                return replays.run(functools.partial(take, index), with_places(carry))

            carry = repeat(phase, step, carry)
        else:

            def whole_phase(each: Callable, block: PyTree, phase: Phase = phase, take: Callable = take) -> PyTree:
                step = lambda index, carry: each(
                    lambda own, mine: take(index, (own, *mine[1:]), replay([])), carry, block
                )
                return repeat(phase, step, each(lambda mine: mine[0], block))

            carry = _run_in_chunks(whole_phase, with_places(carry), chunk, count=count)
    server, clients = algorithm.split(carry[0])
    return jax.tree.map(lambda a: a[0], server), clients, before, carry[1]


def begin_all(algorithm: Algorithm, server: Any, clients: Any, number: int) -> Any:
    """The States with which `number` clients start a round, every leaf [number, ...]."""
    return jax.vmap(lambda client, _: algorithm.begin(server, client))(clients, jnp.arange(number))


def _does_exchange(step: Callable) -> bool:
    try:
        jax.eval_shape(step)
    except Ask:
        return True
    return False


# ------------------------------------------------------------------------------------------------- one round, metrics


def _run_one_round(inputs: Inputs, run: Run, round: Array, chances: Array, plan: Plan) -> tuple[Run, dict[str, Any]]:
    """(the run after this round, what it records: how many clients took part, their notes)."""
    participants, call = call_up(inputs, run.server, round, chances, plan)
    all_there, blocks = plan.cohort is None, plan.blocks
    if blocks is None:
        index = None if all_there else participants.position
        return _run_participants(inputs, run, round, plan, call, participants, index)
    if all_there:
        everybody = SpreadCohort(blocks, participants, blocks.size)
        return _run_participants(inputs, run, round, plan, call, blocks.take_all_own(participants), None, everybody)

    def with_room(room: int) -> tuple[Run, dict[str, Any]]:
        own, index, count = blocks.take_some_own(participants, room)
        spread = SpreadCohort(blocks, participants, room)
        return _run_participants(inputs, run, round, plan, call, own, index, spread, count)

    most = min(participants.slot.size, blocks.size)
    if plan.chunk is not None or plan.room >= most:
        return with_room(most)
    usual = jnp.max(blocks.count(participants.position)) <= plan.room
    return lax.cond(usual, lambda: with_room(plan.room), lambda: with_room(most))


def _run_participants(
    inputs: Inputs,
    run: Run,
    round: Array,
    plan: Plan,
    call: Call,
    participants: Participant,
    index: Array | None,
    spread: SpreadCohort | None = None,
    count: Array | None = None,
) -> tuple[Run, dict[str, Any]]:
    """A round of these participants, whose Local fields are at `index` (None: everybody's in order); `spread` are all
    of them, where these are those of one device, and `count` tells how many of them must be run."""
    algorithm, task = inputs.algorithm, inputs.task
    beyond_end = ("clip", "drop") if spread is not None else (None, None)  # fillers' get is of no use, their set undone
    get = lambda a: a.at[index].get(mode=beyond_end[0])
    pick = lambda tree: tree if index is None else jax.tree.map(get, tree)
    set = lambda a, b: b if index is None else a.at[index].set(b, mode=beyond_end[1])
    put = lambda old, new: jax.tree.map(set, old, new)
    old = pick(run.clients)
    present = participants.weight > 0
    of_all = present if spread is None else spread.participants.weight > 0
    notes = make_no_notes(plan.notes)
    if plan.chunk is None:
        server, clients, before, noted = _run_together(algorithm, task, old, participants, call, notes, spread)
    else:
        server, clients, before, noted = _run_in_turn(
            algorithm, task, old, participants, call, notes, spread, plan.chunk, count
        )

    rows = lambda a: present.reshape((-1,) + (1,) * (a.ndim - 1))
    keep_absent = lambda new, old: jax.tree.map(lambda b, a: jnp.where(rows(b), b, a), new, old)
    clients = keep_absent(clients, old)
    # Where nobody may learn who took part, an empty round is one like the others.
    answered = of_all.any() | (call.expected is not None)
    server = jax.tree.map(lambda b, a: jnp.where(answered, b, a), server, run.server)
    finite, total = is_finite((server, clients)), _add_up(noted, present)
    if spread is not None:
        broken, total = spread.add((1.0 - finite.astype(float), total))
        finite = broken == 0
    healthy = (run.diverged < 0) & finite
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
    weights = participants.weight if spread is None else spread.participants.weight
    recorded = {"participants": of_all.sum().astype(jnp.int32), "notes": _summarise(total, weights, call, plan)}
    return new, recorded


def call_up(inputs: Inputs, server: Any, round: Array, chances: Array, plan: Plan) -> tuple[Participant, Call]:
    """Who takes part in a round, and what they are told."""
    task, uploads = inputs.task, inputs.uploads
    participants = choose_cohort(
        task,
        inputs.key,
        round,
        plan.cohort,
        inputs.dropout if plan.dropout else None,
        chances=chances,
        secret=inputs.noise if plan.hidden else None,
    )
    whole, expected = participants.weight.sum(), None
    if plan.cohort is not None and plan.cohort.random_size and any(t.hides_in_mean for t in uploads):
        expected = Expected(*find_expected_weight(task.weights, chances))
        whole = expected.whole
    return participants, Call(inputs.key, round, server, whole, uploads, inputs.noise, expected)


def _add_up(noted: Notes, present: Array) -> Notes:
    return {name: jnp.where(present[:, None], values, 0).sum(0) for name, values in noted.items()}


def _summarise(total: Notes, weights: Array, call: Call, plan: Plan) -> Notes:
    """The notes of all who took part, as the history has them; `weights` are those in means."""
    kept = {name: total[name] for name in plan.columns if name in total}
    if SIGNAL not in plan.columns:
        return kept
    squares, numbers = (total[name][0] / jnp.maximum(total[name][1], 1) for name in (SQUARES, NUMBERS))
    shares, largest = compute_shares(weights, call.expected), find_largest_share(weights, call.expected)
    ratio = measure_signal(call.uploads, squares, numbers, shares, largest)
    return kept | {SIGNAL: jnp.where(jnp.isfinite(ratio), jnp.stack([ratio, jnp.ones(())]), 0)}


def is_finite(tree: PyTree) -> Array:
    floats = [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(a).all() for a in floats], jnp.asarray(True))


# Where a run's parts lie, if devices are several.
_PLACES = Run._make(OWN if name in ("clients", "unsynced") else COMMON for name in Run._fields)


def _run_on_devices(program: Callable, results: Any, inputs: Inputs, *rest: Any, plan: Plan) -> Any:
    """A program of the clients of one device, on every device; `results` says where what it returns lies."""
    if plan.blocks is None:
        return program(inputs, *rest, plan)
    of_task = plan.blocks.list_task_places(inputs.task)
    of_inputs = Inputs._make(of_task if name == "task" else COMMON for name in Inputs._fields)
    of_rest = tuple(_PLACES if isinstance(one, Run) else COMMON for one in rest)
    return plan.blocks.run(lambda *all: program(*all, plan), (inputs, *rest), (of_inputs, *of_rest), results)


@functools.partial(jax.jit, static_argnames=("plan",))
def evaluate(inputs: Inputs, run: Run, plan: Plan) -> dict[str, Array]:
    """The task's metrics over all clients, and the extra ones of the plan."""
    return _run_on_devices(_evaluate, COMMON, inputs, run, plan=plan)


@functools.partial(jax.jit, static_argnames=("plan",))  # traced once for all its uses
def _evaluate(inputs: Inputs, run: Run, plan: Plan) -> dict[str, Array]:
    """Clients run in chunks of similar size, smallest first, each over exactly its own rows: the cost follows the
    number of rows, not clients x largest client.
    """
    task = inputs.task
    everybody, spread = _list_everybody(task, plan)
    sizes = jnp.asarray(task.data.sizes)
    by_size = jnp.argsort(sizes if spread is None else sizes[everybody.position])
    # On several devices the pool is that of one: a metric that reaches for it, past its own rows, must not get it.
    elsewhere = dataclasses.replace(task.data, columns=RowsElsewhere())
    seen = task if spread is None else dataclasses.replace(task, data=elsewhere)
    common_key = fold(inputs.key, METRICS)

    def program(argument: tuple[Participant, Any, Any], exchange: Exchange) -> dict[str, Array]:
        place, client, before = argument
        fed = Fed(
            **make_words(exchange, common_key),
            sync=True,
            t=run.round,
            step=jnp.zeros_like(run.round),
            server=run.server,
            key=fold(inputs.key, METRICS, place.id),
            shared_key=common_key,
            share=jnp.ones(()),
            unsynced=before,
        )
        data = task.data.client(place.position)
        values = dict(seen.metrics(run.server, client, data, fed))
        if plan.metrics is not None:
            values |= plan.metrics(seen, run.server, client, data, fed)
        return jax.tree.map(jnp.asarray, values)

    try:
        with prove_common():
            replays = _Replays(everybody, common_key, plan.chunk or 64, by_size, spread=spread)
            return replays.run(program, (everybody, run.clients, run.unsynced), common=True)
    except NotCommonError as error:
        raise UserError(
            "a metric depends on one client's values (in sweeps and deployments nobody sees these): pass it through "
            "fed.mean, or through fed.gather if everybody's value is wanted."
        ) from error


# ------------------------------------------------------------------------------------------------- output rules


class Output(NamedTuple):
    """The server state that the output rule would return now."""

    server: Any
    score: Array  # of "best": the smallest value so far


def _make_first_output(server: Any, plan: Plan) -> Output | None:
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
def start(inputs: Inputs, plan: Plan) -> Run:
    """The run before its first round."""
    return _run_on_devices(_start, _PLACES, inputs, plan=plan)


def _start(inputs: Inputs, plan: Plan) -> Run:
    algorithm, task, blocks = inputs.algorithm, inputs.task, plan.blocks
    server, clients = start_all(inputs, plan)
    # A weak type (from a Python number) would change in the first round and break the loop's types.
    server, clients = jax.tree.map(lambda a: lax.convert_element_type(a, jnp.asarray(a).dtype), (server, clients))
    if blocks is not None:  # ghosts hold nothing that could go wrong
        real = lambda a: blocks.real.reshape((-1,) + (1,) * (a.ndim - 1))
        clients = jax.tree.map(lambda a: jnp.where(real(a), a, jnp.zeros_like(a)), clients)
    unsynced = None
    if plan.unsynced:
        number = task.clients if blocks is None else blocks.size
        unsynced = algorithm.part(begin_all(algorithm, server, clients, number), *KEPT)
    minus_one, finite = jnp.asarray(-1, jnp.int32), is_finite((server, clients))
    if blocks is not None:
        finite = lax.psum(1 - finite.astype(jnp.int32), AXIS) == 0
    diverged = jnp.where(finite, minus_one, 0)
    return Run(server, clients, _make_first_output(server, plan), unsynced, jnp.asarray(0, jnp.int32), diverged)


CAPACITY = 256  # rounds in one call; fixed, so that runs of all lengths share one program


@functools.partial(jax.jit, static_argnames=("plan",))
def advance(inputs: Inputs, run: Run, first: Array, rounds: Array, plan: Plan) -> tuple[Run, dict[str, Any]]:
    """`rounds` rounds (at most CAPACITY) from round `first` on: (run, rows of history, the first `rounds` filled).

    The number of rounds is an input of the program: a run can be cut into pieces of any lengths without compiling again
    and without changing a number. `first` comes from outside so that it stays one number when runs are stacked.
    """
    return _run_on_devices(_advance, (_PLACES, COMMON), inputs, run, first, rounds, plan=plan)


def _advance(inputs: Inputs, run: Run, first: Array, rounds: Array, plan: Plan) -> tuple[Run, dict[str, Any]]:
    every, chances = plan.evaluate_every, find_chances(inputs.task.weights, plan.cohort)
    shapes = jax.eval_shape(lambda: _evaluate(inputs, run, plan)) if every else {}
    nothing = lambda v: jnp.full(v.shape, jnp.nan if jnp.issubdtype(v.dtype, jnp.floating) else 0, v.dtype)
    blank = jax.tree.map(nothing, shapes)
    rows: dict[str, Any] = {
        "metrics": jax.tree.map(lambda v: jnp.broadcast_to(v, (CAPACITY, *v.shape)), blank),
        "participants": jnp.zeros(CAPACITY, jnp.int32),
        "notes": {name: jnp.zeros((CAPACITY, 2)) for name in plan.columns},
    }

    def body(i: Array, carry: tuple[Run, dict[str, Any]]) -> tuple[Run, dict[str, Any]]:
        run, rows = carry
        round = first + i
        run, recorded = _run_one_round(inputs, run, round, chances, plan)
        due, values = jnp.asarray(False), blank
        if every:
            due = (round + 1) % every == 0
            values = lax.cond(due, lambda: _evaluate(inputs, run, plan), lambda: blank)
        run = _update_output(run, inputs.key, round, values, due, plan)
        return run, jax.tree.map(lambda column, v: column.at[i].set(v), rows, {"metrics": values} | recorded)

    return lax.fori_loop(0, rounds, body, (run, rows))
