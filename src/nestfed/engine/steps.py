"""How a client's round is laid out, for all engines alike: phases and steps, keys by meaning, independent draws.

A step is pure, so *to resume it is to run it again with the answers known so far*: `replay` is for that. The message
engine lives on it, and so does the simulator where it runs clients one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Cohort, Fed, Reply, Sample, reply_with_all
from nestfed.core.jax_internals import find_trace_level
from nestfed.core.randomness import ANSWER, BATCH, INIT, SHARED, UPLOAD, fold, fold_pair
from nestfed.core.rows import ClientRows
from nestfed.core.scaled import LOWEST, Scaled, is_scaled
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, ArrayLike, PyTree
from nestfed.engine.cohorts import Participant
from nestfed.engine.devices import SpreadCohort
from nestfed.uploads.transforms import (
    CLIPPED,
    Transform,
    add_reference,
    answer_all,
    apply_all,
    finish_all,
    subtract_reference,
)

_FED_KEY = 2**31 - 1  # a client's own key of a step; draw j takes the numbers 2 j and 2 j + 1

SQUARES, NUMBERS = "squares of answered means", "numbers in answered means"  # notes that transforms are judged by

Notes = dict[str, Any]  # by name: [sum of the values that were noted, how many there were]


class Exchange(NamedTuple):
    """The two words by which a client reaches the others; every engine supplies its own."""

    mean: Callable[[PyTree, "Treatment | None"], PyTree]  # the treatment is the server's, where uploads have one
    gather: Callable[[PyTree, Reply, Array], PyTree]  # the last argument is the step's shared key, for the reply


Treatment = Callable[[PyTree, Array], PyTree]  # (mean, largest share of a client in it) -> what the server answers


class Inputs(NamedTuple):
    """Everything that a run's programs take besides its state."""

    algorithm: Algorithm
    task: Task
    key: Array  # of the run: known to everybody
    noise: Array  # the key of noise, known to nobody
    dropout: Array  # probability that a client fails to answer
    uploads: tuple[Transform, ...] = ()


class Client(NamedTuple):
    """A client at work in a round."""

    data: ClientRows
    place: Participant
    key: Array  # its key of the round, made once (hashing is not free); steps and draws are folded into it


class Call(NamedTuple):
    """What a client needs to run a step of a round; the same for all clients of the cohort."""

    key: Array  # of the run
    round: ArrayLike  # counted from 0; -1 is the start
    server: Any
    whole: ArrayLike  # what weights in means are divided by: the sum of those who take part, or `Expected.whole`
    uploads: tuple[Transform, ...] = ()  # what happens to uploads on their way
    noise: Array | None = None  # the key of their noise, which is not the run's: everybody knows that
    expected: "Expected | None" = None  # means are divided by this, whoever takes part


class Expected(NamedTuple):
    """Of the weights in means of a Poisson cohort. A mean that hides who took part is a sum divided by a constant."""

    whole: Array  # their sum on average
    largest: Array  # the largest of any client


# ------------------------------------------------------------------------------------------------- the plan of a round


class Phase(NamedTuple):
    """A stretch of a round in which the same method is called again and again."""

    number: int  # its place in `Algorithm.schedule`, or INITIALISE
    method: Callable[..., Any]
    first: int  # index of its first step within the round
    repeats: int
    sync: bool  # does its last step end the round?

    def step(self, index: ArrayLike) -> "Step":
        return Step(self.number, index, self.sync)


class Step(NamedTuple):
    """One entry of a round's program."""

    phase: int
    index: Any  # within the round; it may be traced
    sync: bool


INITIALISE = -1
START = Step(INITIALISE, 0, True)


def list_phases(algorithm: Algorithm) -> list[Phase]:
    """The phases of a round, in order: the one place that says how a round goes."""
    phases, first = [], 0
    for number, (method, repeats, sync) in enumerate(algorithm.schedule()):
        if repeats:
            phases.append(Phase(number, method, first, repeats, sync))
        first += repeats
    return phases


def list_steps(algorithm: Algorithm) -> list[Step]:
    """The single steps of a round, in order."""
    return [
        phase.step(index)
        for phase in list_phases(algorithm)
        for index in range(phase.first, phase.first + phase.repeats)
    ]


def count_steps(algorithm: Algorithm) -> int:
    return sum(phase.repeats for phase in list_phases(algorithm))


# ------------------------------------------------------------------------------------------------- one step


def make_client(task: Task, place: Participant, call: Call) -> Client:
    """The client at this place, ready for a round."""
    stream = INIT if call.server is None else BATCH
    return Client(task.data.client(place.position), place, fold(call.key, stream, call.round + 1, place.id))


def make_only_participant(id: ArrayLike = 0, share: ArrayLike = 1.0) -> Participant:
    """The place of a client that has nobody beside it."""
    zero = jnp.asarray(0)
    return Participant(zero, jnp.asarray(id), zero, jnp.ones(()), jnp.asarray(share, float))


def take_step(
    algorithm: Algorithm, task: Task, step: Step, state: Any, client: Client, call: Call, exchange: Exchange
) -> tuple[Any, Notes]:
    """One step of one client (or its init), with the engine's words for reaching the others: (state, what it noted)."""
    notes = _NoteBook()
    common_key = make_shared_key(call, step.index)
    transit = Transit(call, step.index, client.place.id, notes) if call.uploads else None
    fed = Fed(
        **make_words(exchange, common_key, notes, transit),
        sync=step.sync,
        t=jnp.maximum(call.round, 0) * count_steps(algorithm) + step.index,
        step=step.index,
        server=call.server,
        key=fold_pair(client.key, step.index, _FED_KEY),
        shared_key=common_key,
        share=client.place.chance * call.whole,
        rows=task.training_rows(client.data),
        own_steps=None if task.local_steps is None else jnp.asarray(task.local_steps)[client.place.position],
    )
    draw = make_draws(task, client, step.index)
    if step.phase == INITIALISE:
        return algorithm.init(task.problem, task.start(client.data), draw, fed), notes.values
    return algorithm.schedule()[step.phase][0](task.problem, state, draw, fed), notes.values


def add_notes(total: Notes, notes: Notes) -> Notes:
    """The sum; names that only one of the two has keep their values."""
    return {name: total.get(name, 0) + notes.get(name, 0) for name in total | notes}


def make_no_notes(names: Sequence[str]) -> Notes:
    return {name: jnp.zeros(2) for name in names}


def run_round(
    algorithm: Algorithm, task: Task, local: Any, place: Participant, call: Call, exchange: Exchange, notes: Notes
) -> tuple[Any, Any, Notes]:
    """(State after the round, State before its last step, `notes` and what was noted), where the exchange can answer
    within the program."""
    client = make_client(task, place, call)
    state, before = algorithm.begin(call.server, local), None
    for phase in list_phases(algorithm):

        def take(index: ArrayLike, pair: tuple[Any, Notes], phase: Phase = phase) -> tuple[Any, Notes]:
            state, noted = take_step(algorithm, task, phase.step(index), pair[0], client, call, exchange)
            return state, add_notes(pair[1], noted)

        before = state
        state, notes = repeat(phase, take, (state, notes))
    return state, before, notes


def repeat(phase: Phase, take: Callable[[Any, Any], Any], carry: Any) -> Any:
    """take(index, carry) for the steps of a phase. A single step is no loop: it may fill fields that were None."""
    if phase.repeats == 1:
        return take(phase.first, carry)
    return lax.fori_loop(phase.first, phase.first + phase.repeats, take, carry)


def make_draws(task: Task, client: Client, step: ArrayLike) -> Callable[[Any], Sample]:
    """draw(0), draw(1), ... are the independent batches of one step; the same index is the same batch."""
    known: dict[int, Sample] = {}
    level = find_trace_level()

    def draw(j: ArrayLike) -> Sample:
        if isinstance(j, int) and j in known:
            return known[j]
        key = lambda number: fold_pair(client.key, step, number)
        sample = Sample(task.sample(client.data, key(2 * j)), key(2 * j + 1))
        if isinstance(j, int) and find_trace_level() == level:  # a value made inside a loop may not leave it
            known[j] = sample
        return sample

    return draw


def make_shared_key(call: Call, index: ArrayLike) -> Array:
    """The key of a step that all clients know."""
    return fold(call.key, SHARED, call.round + 1, index)


# ------------------------------------------------------------------------------------------------- the words of Fed


class _NoteBook:
    """What is only reported: added up by the engines, sent to nobody."""

    def __init__(self):
        self.values: Notes = {}
        self.level = find_trace_level()

    def note(self, name: str, value: ArrayLike) -> None:
        if find_trace_level() != self.level:
            raise UserError(
                f"fed.note({name!r}, ...) was called inside a loop or transformation of a step; return the value from "
                "the loop and note it after."
            )
        value = jnp.asarray(value, float)
        if value.ndim:
            raise UserError(f"fed.note({name!r}, ...) got an array of shape {value.shape}; note one number.")
        self.values = add_notes(self.values, {name: jnp.stack([value, jnp.ones(())])})


class Transit:
    """What happens to one client's uploads in one step, exchange after exchange: the same in all engines."""

    def __init__(self, call: Call, index: ArrayLike, id: Array, notes: _NoteBook):
        self.call, self.index, self.notes, self.number = call, index, notes, 0
        # The run's seed draws what may be known, such as which numbers of an upload are sent.
        own = lambda key: fold(key, UPLOAD, call.round + 1, id, index)
        self.keys = own(call.key), None if call.noise is None else own(call.noise)

    def mean(self, exchange: Exchange, tree: PyTree, around: PyTree) -> PyTree:
        treatment = make_treatment(self.call, self.index, self.number)
        sent = self._send(subtract_reference(jax.tree.map(convert_to_float, tree), around))
        answer = exchange.mean(sent, treatment)
        leaves = [a.astype(float) for a in jax.tree.leaves(answer)]
        if any(transform.noisy for transform in self.call.uploads):
            self.notes.note(SQUARES, sum(jnp.sum(a**2) for a in leaves))
            self.notes.note(NUMBERS, sum(a.size for a in leaves))
        return add_reference(finish_all(self.call.uploads, answer), around)

    def gather(self, exchange: Exchange, tree: PyTree, reply: Reply, key: Array) -> PyTree:
        if any(transform.hides_in_mean for transform in self.call.uploads):
            raise UserError(
                "CentralDP was given to an algorithm that calls fed.gather: its server answers from single clients' "
                "values, which noise in a mean does not protect. Use LocalDP, or an algorithm that only takes means."
            )
        if not all(jnp.issubdtype(jnp.result_type(a), jnp.floating) for a in jax.tree.leaves(tree)):
            raise UserError("uploads= was given to an algorithm that gathers whole numbers; let it gather floats.")
        return exchange.gather(self._send(jax.tree.map(jnp.asarray, tree)), reply, key)

    def _send(self, tree: PyTree) -> PyTree:
        """The upload as it leaves the client."""
        of_run, of_noise = self.keys
        key, noise = fold(of_run, self.number), None if of_noise is None else fold(of_noise, self.number)
        self.number += 1
        sent, clipped = apply_all(self.call.uploads, tree, key, noise)
        if any(transform.clipping for transform in self.call.uploads):
            self.notes.note(CLIPPED, clipped)
        return sent


def make_treatment(call: Call, index: ArrayLike, number: int) -> Treatment | None:
    """What the server does to the mean of exchange `number` of a step."""
    if not call.uploads:
        return None
    folded = lambda key: fold(key, ANSWER, call.round + 1, index, number)
    key, noise = folded(call.key), None if call.noise is None else folded(call.noise)
    return lambda mean, largest: answer_all(call.uploads, mean, largest, key, noise)


def make_words(
    exchange: Exchange, key: Array, notes: _NoteBook | None = None, transit: Transit | None = None
) -> dict[str, Any]:
    """The words of an exchange as the fields of Fed, refused inside a loop: there they could not be deployed."""
    level = find_trace_level()
    book = _NoteBook() if notes is None else notes

    def check() -> None:
        if find_trace_level() != level:
            raise UserError(
                "fed.mean or fed.gather was called inside a loop or transformation of a step; such an exchange cannot "
                "be deployed. Give the loop its own entry in schedule() instead."
            )

    def mean(tree: PyTree, around: PyTree = None) -> PyTree:
        check()
        return exchange.mean(tree, None) if transit is None else transit.mean(exchange, tree, around)

    def gather(tree: PyTree, reply: Reply = reply_with_all) -> PyTree:
        check()
        return exchange.gather(tree, reply, key) if transit is None else transit.gather(exchange, tree, reply, key)

    return {"mean": mean, "gather": gather, "note": book.note}


# ------------------------------------------------------------------------------------------------- replay


class Ask(Exception):
    """Raised inside a step when the answer to a question has not arrived yet."""

    def __init__(self, tree: PyTree, reply: Reply | None):
        self.tree, self.reply = tree, reply  # reply: None for a mean


def replay(answers: Sequence[PyTree]) -> Exchange:
    """An exchange that knows the first answers of a step and raises Ask for the next one."""
    remaining = iter(answers)

    def mean(tree: PyTree, treatment: Treatment | None) -> PyTree:
        for answer in remaining:
            return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(answer))
        raise Ask(tree, None)

    def gather(tree: PyTree, reply: Reply, key: Array) -> PyTree:
        for answer in remaining:
            structure = jax.tree.structure(jax.eval_shape(lambda: _ALONE.gather(tree, reply, key)))
            return jax.tree.unflatten(structure, jax.tree.leaves(answer))
        raise Ask(tree, reply)

    return Exchange(mean, gather)


def _gather_alone(tree: PyTree, reply: Reply, key: Array) -> PyTree:
    values = jax.tree.map(lambda a: jnp.asarray(a)[None], tree)
    return reply(values, Cohort(jnp.zeros(1, jnp.int32), jnp.ones(1)), jnp.asarray(0), key)


_ALONE = Exchange(mean=lambda tree, treatment: jax.tree.map(convert_to_float, tree), gather=_gather_alone)


def step_alone(
    algorithm: Algorithm, task: Task, step: Step, call: Call, state: Any, on_exchange: Callable = lambda: None
) -> tuple[Any, Notes]:
    """A step of the task's first client as if it were the whole federation: for the shapes of what comes out."""
    announced = lambda word: lambda *args: (on_exchange(), word(*args))[1]
    exchange = Exchange(*(announced(word) for word in _ALONE))
    return take_step(algorithm, task, step, state, make_client(task, make_only_participant(), call), call, exchange)


# ------------------------------------------------------------------------------------------------- means


def convert_to_float(a: ArrayLike) -> Array:
    """Means are of numbers: whole numbers and switches are averaged as floats."""
    a = jnp.asarray(a)
    return a if jnp.issubdtype(a.dtype, jnp.inexact) else a.astype(float)


def average_over_clients(
    tree: PyTree, weight: Array, expected: Expected | None = None, spread: SpreadCohort | None = None
) -> PyTree:
    """The weighted mean over the axis "clients" of a vmap, and over devices where the cohort is spread. Clients of
    weight zero are left out: even a NaN of theirs does not spread. Scaled numbers are brought to the largest exponent
    among the clients."""
    if expected is not None:
        total = expected.whole
    else:
        total = lax.psum(weight, "clients") if spread is None else spread.participants.weight.sum()

    def add_plain(a: ArrayLike) -> Array:
        a = convert_to_float(a)
        return lax.psum(jnp.where(weight > 0, weight.astype(a.dtype) * a, 0), "clients")

    def add_scaled(y: Scaled) -> Scaled:
        shift = lax.pmax(jnp.where(weight > 0, y.shift, LOWEST), "clients")
        return Scaled(shift, add_plain(y.value * jnp.exp(jnp.minimum(y.shift - shift, 0))))

    def divide(sum: Any) -> Any:
        if is_scaled(sum):
            return Scaled(sum.shift, divide(sum.value)).normal()
        return sum / jnp.where(total > 0, total, 1).astype(sum.dtype)

    sums = jax.tree.map(lambda a: add_scaled(a) if is_scaled(a) else add_plain(a), tree, is_leaf=is_scaled)
    return jax.tree.map(divide, sums if spread is None else spread.add(sums), is_leaf=is_scaled)


def average_by_weight(
    values: PyTree,
    weights: Array,
    treatment: Treatment | None = None,
    expected: Expected | None = None,
    spread: SpreadCohort | None = None,
) -> PyTree:
    """The same mean over the leading axis, as the server answers it."""
    mean = lambda a, weight: average_over_clients(a, weight, expected, spread)
    answer = jax.vmap(mean, out_axes=None, axis_name="clients")(values, weights)
    if treatment is None:
        return answer
    return treatment(answer, find_largest_share(weights if spread is None else spread.participants.weight, expected))


def compute_shares(weights: Array, expected: Expected | None = None) -> Array:
    """What part of a mean each client has."""
    total = weights.sum() if expected is None else expected.whole
    return weights / jnp.where(total > 0, total, 1)


def find_largest_share(weights: Array, expected: Expected | None = None) -> Array:
    """The largest part of a mean that a client can have."""
    return jnp.max(compute_shares(weights)) if expected is None else expected.largest / expected.whole
