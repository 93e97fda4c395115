"""How a client's round is laid out, for all engines alike: keys by meaning, independent draws, steps in order.

A step is pure, so *to resume it is to run it again with the answers known so far*: `replay` is for that. The message
engine lives on it, and so does the simulator where it runs clients one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Cohort, Fed, Sample, everything
from nestfed.core.randomness import ANSWER, BATCH, INIT, SHARED, UPLOAD, fold, fold_pair
from nestfed.core.rows import ClientRows
from nestfed.core.scaled import LOWEST, Scaled, is_scaled
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.engine.cohorts import Seat
from nestfed.uploads.transforms import Transform, finished, minus, plus, transformed, treated

_FED_KEY = 2**31 - 1  # a client's own key of a step; draw j takes the numbers 2 j and 2 j + 1


class Exchange(NamedTuple):
    """The two words by which a client reaches the others; every engine supplies its own."""

    mean: Callable[[PyTree, "Treatment | None"], PyTree]  # the treatment is the server's, where uploads have one
    gather: Callable[[PyTree, Callable, Array], PyTree]  # the last argument is the step's shared key, for `reply`


Treatment = Callable[[PyTree, Array], PyTree]  # (mean, largest share of a client in it) -> what the server answers


class Client(NamedTuple):
    """A client at work in a round."""

    data: ClientRows
    seat: Seat
    key: Array  # its key of the round, made once (hashing is not free); steps and draws are folded into it


class Call(NamedTuple):
    """What a client needs to run a step of a round; the same for all clients of the cohort."""

    key: Array  # of the run
    round: Array  # counted from 0; -1 is the start
    server: Any
    whole: Array  # what weights in means are divided by: the sum of those who take part, or `Expected.whole`
    uploads: tuple[Transform, ...] = ()  # what happens to uploads on their way
    noise: Array | None = None  # the key of their noise, which is not the run's: everybody knows that
    expected: "Expected | None" = None  # means are divided by this, whoever takes part


class Expected(NamedTuple):
    """Of the weights in means of a Poisson cohort. A mean that hides who took part is a sum divided by a constant."""

    whole: Array  # their sum on average
    largest: Array  # the largest of any client


class Tally(NamedTuple):
    """What one client saw of transforms of uploads, summed over exchanges."""

    squared: Array  # of the norms of the means that were answered
    numbers: Array  # in these means
    clipped: Array  # uploads that were clipped ...
    uploads: Array  # ... of so many

    @classmethod
    def zero(cls) -> "Tally":
        return cls(*jnp.zeros(4))


class Step(NamedTuple):
    """One entry of a round's program."""

    phase: int  # index in schedule(), or INITIALISE
    index: Array  # within the round
    sync: bool


INITIALISE = -1


class Ask(Exception):
    """Raised inside a step when the answer to a question has not arrived yet."""

    def __init__(self, tree: PyTree, reply: Callable | None):
        self.tree, self.reply = tree, reply  # reply: None for a mean


def alone(id: Array | int = 0, chance: Array | float = 1.0) -> Seat:
    """The seat of a client that has nobody beside it."""
    zero = jnp.asarray(0)
    return Seat(zero, jnp.asarray(id), zero, jnp.ones(()), jnp.asarray(chance, float))


def steps_per_round(algorithm: Algorithm) -> int:
    return sum(repeats for _, repeats, _ in algorithm.schedule())


def seated(task: Task, seat: Seat, call: Call) -> Client:
    """The client at this seat, ready for a round."""
    stream = INIT if call.server is None else BATCH
    return Client(task.data.client(seat.position), seat, fold(call.key, stream, call.round + 1, seat.id))


def take_step(
    algorithm: Algorithm,
    task: Task,
    step: Step,
    state: Any,
    client: Client,
    call: Call,
    exchange: Exchange,
    seen: list[Tally] | None = None,
) -> Any:
    """One step of one client (or its init), with the engine's words for reaching the others. `seen` collects what
    transforms of uploads did, an entry per exchange."""
    common_key = shared_key(call, step.index)
    transit = Transit(call, step.index, client.seat.id, [] if seen is None else seen) if call.uploads else None
    fed = Fed(
        **speaking(exchange, common_key, transit),
        sync=step.sync,
        t=jnp.maximum(call.round, 0) * steps_per_round(algorithm) + step.index,
        step=step.index,
        server=call.server,
        key=fold_pair(client.key, step.index, _FED_KEY),
        shared_key=common_key,
        share=client.seat.chance * call.whole,
        rows=task.training(client.data),
        own_steps=None if task.local_steps is None else jnp.asarray(task.local_steps)[client.seat.position],
    )
    draw = draws(task, client, step.index)
    if step.phase == INITIALISE:
        return algorithm.init(task.problem, task.start(client.data), draw, fed)
    return algorithm.schedule()[step.phase][0](task.problem, state, draw, fed)


def take_tallied_step(
    algorithm: Algorithm, task: Task, step: Step, pair: Any, client: Client, call: Call, exchange: Exchange
) -> tuple[Any, Tally | None]:
    """The same for (State, Tally so far or None)."""
    state, tally = pair
    seen: list[Tally] = []
    state = take_step(algorithm, task, step, state, client, call, exchange, seen)
    return state, None if tally is None else jax.tree.map(lambda *numbers: sum(numbers), tally, *seen)


def run_round(
    algorithm: Algorithm, task: Task, local: Any, seat: Seat, call: Call, exchange: Exchange
) -> tuple[Any, Any, Tally | None]:
    """(State after the round, State before its last step, what transforms of uploads did or None), where the exchange
    can answer within the program."""
    client = seated(task, seat, call)
    pair, index = (algorithm.begin(call.server, local), Tally.zero() if call.uploads else None), 0
    before = pair[0]
    for phase, (_, repeats, sync) in enumerate(algorithm.schedule()):
        take = lambda j, s: take_tallied_step(algorithm, task, Step(phase, j, sync), s, client, call, exchange)
        before = pair[0]
        if repeats == 1:
            pair = take(index, pair)
        elif repeats > 1:
            pair = lax.fori_loop(index, index + repeats, take, pair)
        index += repeats
    return pair[0], before, pair[1]


def draws(task: Task, client: Client, step: Array) -> Callable[[Any], Sample]:
    """draw(0), draw(1), ... are the independent batches of one step; the same index is the same batch."""
    known: dict[int, Sample] = {}
    level = _trace_level()

    def draw(j) -> Sample:
        if j in known if isinstance(j, int) else False:
            return known[j]
        key = lambda number: fold_pair(client.key, step, number)
        sample = Sample(task.sample(client.data, key(2 * j)), key(2 * j + 1))
        if isinstance(j, int) and _trace_level() == level:  # a value made inside a loop may not leave it
            known[j] = sample
        return sample

    return draw


def _trace_level():
    return jax.extend.core.get_opaque_trace_state(convention="flax")


def shared_key(call: Call, index: Array) -> Array:
    """The key of a step that all clients know."""
    return fold(call.key, SHARED, call.round + 1, index)


class Transit:
    """What happens to one client's uploads in one step, exchange after exchange: the same in all engines."""

    def __init__(self, call: Call, index: Array, id: Array, seen: list[Tally]):
        self.call, self.index, self.seen, self.number = call, index, seen, 0
        # The run's seed draws what may be known, such as which numbers of an upload are sent.
        self.keys = [
            None if key is None else fold(key, UPLOAD, call.round + 1, id, index) for key in (call.key, call.noise)
        ]

    def mean(self, exchange: Exchange, tree: PyTree, around: PyTree) -> PyTree:
        treatment = treatment_of(self.call, self.index, self.number)
        sent, clipped = self._sent(minus(jax.tree.map(as_float, tree), around))
        answer = exchange.mean(sent, treatment)
        leaves = [a.astype(float) for a in jax.tree.leaves(answer)]
        self._note(sum(jnp.sum(a**2) for a in leaves), sum(a.size for a in leaves), clipped)
        return plus(finished(self.call.uploads, answer), around)

    def gather(self, exchange: Exchange, tree: PyTree, reply: Callable, key: Array) -> PyTree:
        if any(transform.hides_in_mean for transform in self.call.uploads):
            raise UserError(
                "CentralDP was given to an algorithm that calls fed.gather: its server answers from single clients' "
                "values, which noise in a mean does not protect. Use LocalDP, or an algorithm that only takes means."
            )
        if not all(jnp.issubdtype(jnp.result_type(a), jnp.floating) for a in jax.tree.leaves(tree)):
            raise UserError("uploads= was given to an algorithm that gathers whole numbers; let it gather floats.")
        sent, clipped = self._sent(jax.tree.map(jnp.asarray, tree))
        answer = exchange.gather(sent, reply, key)
        self._note(0, 0, clipped)
        return answer

    def _sent(self, tree: PyTree) -> tuple[PyTree, Array]:
        key, noise = (None if key is None else fold(key, self.number) for key in self.keys)
        self.number += 1
        return transformed(self.call.uploads, tree, key, noise)

    def _note(self, squared: Any, numbers: int, clipped: Array) -> None:
        self.seen.append(Tally(*(jnp.asarray(v, float) for v in (squared, numbers, clipped, 1))))


def treatment_of(call: Call, index: Array, number: int) -> Treatment | None:
    """What the server does to the mean of exchange `number` of a step."""
    if not call.uploads:
        return None
    key, noise = (
        None if key is None else fold(key, ANSWER, call.round + 1, index, number) for key in (call.key, call.noise)
    )
    return lambda mean, largest: treated(call.uploads, mean, largest, key, noise)


def speaking(exchange: Exchange, key: Array, transit: Transit | None = None) -> dict[str, Callable]:
    """The words of an exchange as the fields of Fed, refused inside a loop: there they could not be deployed."""
    level = _trace_level()

    def check():
        if _trace_level() != level:
            raise UserError(
                "fed.mean or fed.gather was called inside a loop or transformation of a step; such an exchange "
                "cannot be "
                "deployed. Give the loop its own entry in schedule() instead."
            )

    def mean(tree, around=None):
        check()
        return exchange.mean(tree, None) if transit is None else transit.mean(exchange, tree, around)

    def gather(tree, reply=everything):
        check()
        return exchange.gather(tree, reply, key) if transit is None else transit.gather(exchange, tree, reply, key)

    return {"mean": mean, "gather": gather}


# ------------------------------------------------------------------------------------------------- replay


def replay(answers: Sequence[PyTree]) -> Exchange:
    """An exchange that knows the first answers of a step and raises Ask for the next one."""
    remaining = iter(answers)

    def mean(tree, treatment):
        for answer in remaining:
            return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(answer))
        raise Ask(tree, None)

    def gather(tree, reply, key):
        for answer in remaining:
            structure = jax.tree.structure(jax.eval_shape(lambda: _ALONE.gather(tree, reply, key)))
            return jax.tree.unflatten(structure, jax.tree.leaves(answer))
        raise Ask(tree, reply)

    return Exchange(mean, gather)


def _gather_alone(tree, reply, key):
    values = jax.tree.map(lambda a: jnp.asarray(a)[None], tree)
    return reply(values, Cohort(jnp.zeros(1, jnp.int32), jnp.ones(1)), 0, key)


_ALONE = Exchange(mean=lambda tree, treatment: jax.tree.map(as_float, tree), gather=_gather_alone)


def step_alone(
    algorithm: Algorithm, task: Task, step: Step, call: Call, state: Any, on_exchange: Callable = lambda: None
) -> Any:
    """A step of the task's first client as if it were the whole federation: for the shapes of what comes out."""
    seat = alone()
    noted = lambda word: lambda *args: (on_exchange(), word(*args))[1]
    exchange = Exchange(*(noted(word) for word in _ALONE))
    return take_step(algorithm, task, step, state, seated(task, seat, call), call, exchange)


def as_float(a: Array) -> Array:
    """Means are of numbers: whole numbers and switches are averaged as floats."""
    a = jnp.asarray(a)
    return a if jnp.issubdtype(a.dtype, jnp.inexact) else a.astype(float)


def mean_over_clients(tree: PyTree, weight: Array, expected: Expected | None = None) -> PyTree:
    """The weighted mean over the axis "clients" of a vmap. Clients of weight zero are left out: even a NaN of theirs
    does not spread. Scaled numbers are brought to the largest exponent among the clients."""
    total = lax.psum(weight, "clients") if expected is None else expected.whole

    def plain(a):
        a = as_float(a)
        weighted = jnp.where(weight > 0, weight.astype(a.dtype) * a, 0)
        return lax.psum(weighted, "clients") / jnp.where(total > 0, total, 1).astype(a.dtype)

    def scaled(y):
        shift = lax.pmax(jnp.where(weight > 0, y.shift, LOWEST), "clients")
        return Scaled(shift, plain(y.value * jnp.exp(jnp.minimum(y.shift - shift, 0)))).normal()

    return jax.tree.map(lambda a: scaled(a) if is_scaled(a) else plain(a), tree, is_leaf=is_scaled)


def weighted_mean(
    values: PyTree, weights: Array, treatment: Treatment | None = None, expected: Expected | None = None
) -> PyTree:
    """The same mean over the leading axis, as the server answers it."""
    mean = lambda a, weight: mean_over_clients(a, weight, expected)
    answer = jax.vmap(mean, out_axes=None, axis_name="clients")(values, weights)
    return answer if treatment is None else treatment(answer, largest_share(weights, expected))


def shares(weights: Array, expected: Expected | None = None) -> Array:
    """What part of a mean each client has."""
    total = weights.sum() if expected is None else expected.whole
    return weights / jnp.where(total > 0, total, 1)


def largest_share(weights: Array, expected: Expected | None = None) -> Array:
    """The largest part of a mean that a client can have."""
    return jnp.max(shares(weights)) if expected is None else expected.largest / expected.whole
