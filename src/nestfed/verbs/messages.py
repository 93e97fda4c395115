"""Message passing: the same algorithm object with clients that only answer messages. Independent of any framework.

    Node     one client: holds its own rows and its Local fields, works until it needs an answer, returns the question
    Server   answers questions with means, and derives the new Shared fields from the answers alone
    deploy   both in one process: the reference that `simulate` is tested against

A client can speak only when spoken to, never in the middle of a step. A step is pure, so to resume it is to run it
again with the answers known so far; XLA drops the work whose result has been superseded. The server replays the round
with NaN in place of every private value: what it knows of a client is what came in the answers, and this proves it.
"""

import dataclasses
import functools
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm, Cohort, reply_with_all
from nestfed.core.identity import identify
from nestfed.core.jax_internals import NotCommonError, prove_common
from nestfed.core.noise import check_secret, convert_to_key, draw_fresh_key, make_noise_key, make_repeatable_key
from nestfed.core.rows import Rows
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, ArrayLike, PyTree, Seed
from nestfed.engine.cohorts import find_chances
from nestfed.engine.contract import check_match
from nestfed.engine.options import Changes, Options, make_key, make_options
from nestfed.engine.planning import make_inputs, make_plan
from nestfed.engine.rounds import call_up
from nestfed.engine.steps import START as FIRST_STEP
from nestfed.engine.steps import (
    Ask,
    Call,
    Expected,
    Notes,
    Step,
    add_notes,
    average_by_weight,
    list_steps,
    make_client,
    make_only_participant,
    make_shared_key,
    make_treatment,
    replay,
    step_alone,
    take_step,
)
from nestfed.uploads.privacy import Uploads, list_transforms

START = -1  # the round in which clients initialise

Leaves = list[np.ndarray]


class Ticket(NamedTuple):
    """What the server sends: which exchange of which round this is, and the answer to the client's last question."""

    round: int
    exchange: int  # 0 calls the client up; e > 0 brings the answer to its question e - 1
    server: Any  # Shared fields at the start of the round (not the server's own)
    share: float  # the client's weight in the problem / its weight in this round's means
    answer: Leaves | None


class ProtocolError(UserError):
    """A message that does not fit what the receiver has seen so far."""


def list_steps_at(algorithm: Algorithm, round: int) -> list[Step]:
    """The steps of a round in order, or that of the start."""
    return [FIRST_STEP] if round == START else list_steps(algorithm)


@functools.partial(jax.jit, static_argnames=("step",))
def _attempt(
    algorithm: Algorithm, task: Task, step: Step, index: ArrayLike, state: Any, call: Call, answers: Sequence[PyTree]
) -> dict[str, Any]:
    """Run one step of the task's only client as far as the known answers allow: {"ask": leaves}, or {"done": State,
    "notes": what it noted}. `step` is static and has no index: that is a number."""
    client = make_client(task, make_only_participant(jnp.asarray(task.data.ids)[0]), call)
    try:
        own = step._replace(index=index)
        state, notes = take_step(algorithm, task, own, state, client, call, replay(answers))
        return {"done": state, "notes": notes}
    except Ask as ask:
        return {"ask": [jnp.asarray(leaf) for leaf in jax.tree.leaves(ask.tree)]}


def _find_shapes(algorithm: Algorithm, task: Task, key: Array) -> Any:
    """The shapes of State after init."""
    start = Call(key, jnp.asarray(START), None, jnp.ones(()))  # uploads change no shape
    return jax.eval_shape(lambda: step_alone(algorithm, task, FIRST_STEP, start, None)[0])


def _hide(tree: Any) -> Any:
    """NaN in place of every number: for what this party must not know, or need."""
    nothing = lambda a: jnp.full(a.shape, jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0, a.dtype)
    return jax.tree.map(nothing, tree)


def _move_to_host(leaves: Any) -> Leaves:
    return [np.asarray(leaf) for leaf in leaves]


class Node:
    """One client. `store` keeps lists of arrays by name; it never leaves the node, and may be backed by its disk.

    Delivery may be repeated: the same exchange of the same round asked twice gives the same answer.

    `uploads` are transforms of what it sends, as in `simulate`. Noise comes from `secret`: random bytes that only this
    node knows, made once by secrets.token_bytes(32) and the same until the run is over. What it has answered with noise
    it does not answer again to anybody who asks with other values: the difference would show what the noise hides.
    `noise_seed` draws the noise as `simulate` does with it, for tests.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        seed: Seed,
        store: MutableMapping[str, Leaves] | None = None,
        *,
        uploads: Uploads = (),
        secret: bytes | None = None,
        noise_seed: int | None = None,
    ):
        if task.clients != 1:
            raise UserError(f"a node holds one client's rows; the task has {task.clients} clients.")
        check_match(algorithm, task)
        self.algorithm, self.task, self.key = algorithm, task, make_key(seed)
        self.uploads = list_transforms(uploads)
        self.store: MutableMapping[str, Leaves] = {} if store is None else store
        self._noise = self._test_noise = None
        if any(transform.noisy and transform.changes("apply") for transform in self.uploads):
            if noise_seed is not None:
                self._test_noise = make_repeatable_key(noise_seed, self.key)
            elif secret is None:
                raise UserError(
                    "uploads= was given with noise and without secret=: the run's seed is no secret, whoever knows it "
                    "could take the noise off again. Give secret=secrets.token_bytes(32), made once for this node."
                )
            else:
                self._noise = _NoiseBook(
                    check_secret(secret), self.store, identify((algorithm, task), "the algorithm and its task")
                )
        self._first = _find_shapes(algorithm, task, self.key)
        self._structures: dict[bool, list[Any]] = {}

    def receive(self, ticket: Ticket) -> Leaves | None:
        """Work until an answer is needed (return the question) or the round is over (return None)."""
        told = None if self._noise is None else self._noise.hear(ticket)
        if "asked" in self.store and self._numbers("asked")[:2] == [ticket.round, ticket.exchange]:
            return None if self._numbers("asked")[2] else self.store["question"]
        ticket = ticket._replace(server=self._complete(ticket.server))
        reached, state, answers = self._begin(ticket) if ticket.exchange == 0 else self._go_on(ticket)
        program = list_steps_at(self.algorithm, ticket.round)
        noise = self._test_noise
        if self._noise is not None and told is not None:
            noise = self._noise.key(told, state)
        call = self._call(ticket, noise)
        for index in range(reached, len(program)):
            step = program[index]._replace(index=None)
            out = _attempt(self.algorithm, self.task, step, index, state, call, answers)
            if "ask" in out:
                frame = [ticket.round, ticket.exchange + 1, index, len(answers)]
                self.store["frame"] = [np.asarray(frame), *_move_to_host(jax.tree.leaves(state))]
                for number, answer in enumerate(answers):
                    self.store[f"answer {number}"] = _move_to_host(answer)
                return self._remember(ticket, _move_to_host(out["ask"]))
            state, answers = out["done"], []
            self._note(ticket, index, out["notes"])
        _, client = self.algorithm.split(state)
        if "client" in self.store and self._numbers("client")[0] < ticket.round:
            self.store["client before"] = self.store["client"]
        self.store["client"] = [np.asarray([ticket.round]), *_move_to_host(jax.tree.leaves(client))]
        return self._remember(ticket, None)

    def client(self) -> Any:
        """The Local fields as they are now."""
        return self._local("client")

    def noted(self) -> Notes:
        """What the steps of the last round noted so far: [sum, number of notes] by name. It is sent to nobody."""
        names = [name for name in self.store if name.startswith("noted ")]
        return {name.removeprefix("noted "): jnp.asarray(self.store[name][0]) for name in names}

    def _note(self, ticket: Ticket, index: int, notes: Notes) -> None:
        if ticket.round == START:
            return
        if index == 0:
            for name in self.noted():
                del self.store[f"noted {name}"]
        for name, value in add_notes(self.noted(), notes).items():
            self.store[f"noted {name}"] = [np.asarray(value)]

    def _call(self, ticket: Ticket, noise: Array | None) -> Call:
        share = jnp.asarray(ticket.share, float)
        return Call(self.key, jnp.asarray(ticket.round), ticket.server, share, self.uploads, noise)

    def _begin(self, ticket: Ticket) -> tuple[int, Any, list[PyTree]]:
        if ticket.round == START:
            return 0, None, []
        if "client" not in self.store:
            raise ProtocolError(
                f"round {ticket.round} was asked of a node that has not started; send round {START} first."
            )
        # A round asked again (the server went back to its checkpoint) starts from the state before it.
        again = self._numbers("client")[0] >= ticket.round
        if again and ("client before" not in self.store or self._numbers("client before")[0] >= ticket.round):
            raise ProtocolError(
                f"round {ticket.round} was asked, but this node has done round {self._numbers('client')[0]} and "
                "keeps only the one before it; restart the federation from a later checkpoint, or this node's store "
                "from a backup."
            )
        return 0, self.algorithm.begin(ticket.server, self._local("client before" if again else "client")), []

    def _go_on(self, ticket: Ticket) -> tuple[int, Any, list[PyTree]]:
        frame = self._numbers("frame") if "frame" in self.store else []
        if frame[:2] != [ticket.round, ticket.exchange]:
            raise ProtocolError(
                f"the answer for exchange {ticket.exchange} of round {ticket.round} came, but this node waits for "
                f"{f'exchange {frame[1]} of round {frame[0]}' if frame else 'a call'}."
            )
        structure = self._structure(ticket, frame[2])
        state = jax.tree.unflatten(structure, self.store["frame"][1:])
        answers = [self.store[f"answer {number}"] for number in range(frame[3])]
        return frame[2], state, [*answers, ticket.answer]

    def _structure(self, ticket: Ticket, index: int) -> Any:
        """The structure of State at the start of this step (Scratch fields come and go within a round)."""
        initial = ticket.round == START
        if initial not in self._structures:
            call, state, structures = self._call(ticket, draw_fresh_key()), None, []
            if not initial:
                state = jax.eval_shape(lambda: self.algorithm.begin(ticket.server, self._local("client")))
            for step in list_steps_at(self.algorithm, ticket.round):
                structures.append(jax.tree.structure(state))
                alone = functools.partial(step_alone, self.algorithm, self.task, step, call)
                state, _ = jax.eval_shape(alone, state)
            self._structures[initial] = structures
        return self._structures[initial][index]

    def _local(self, name: str) -> Any:
        structure = jax.tree.structure(self.algorithm.split(self._first)[1])
        return jax.tree.unflatten(structure, self.store[name][1:])

    def _complete(self, server: Any) -> Any:
        """The broadcast with NaN for the server's own fields: they may enter nothing that a client keeps or sends."""
        if server is None:
            return None
        own = self.algorithm.part(self._first, "server")
        return self.algorithm.State(*(_hide(b) if a is None else a for a, b in zip(server, own, strict=True)))

    def _remember(self, ticket: Ticket, question: Leaves | None) -> Leaves | None:
        self.store["asked"] = [np.asarray([ticket.round, ticket.exchange, int(question is None)])]
        self.store["question"] = question or []
        return question

    def _numbers(self, name: str) -> list[int]:
        return self.store[name][0].tolist()


class _NoiseBook:
    """A node's keys of noise, one for everything that a question can depend on, and what it has answered so far.

    A key is hashed from the secret and from all that the node was told in this round, what it holds and what it is
    asked: the same question has the same noise, and any other question has another. So nobody who sends the same round
    twice, to this run or to another one with the same secret, can subtract anything. And because a second answer would
    spend privacy that nobody counts, one that differs is refused.
    """

    def __init__(self, secret: bytes, store: MutableMapping[str, Leaves], about: str):
        self.secret, self.store, self.about = secret, store, about.encode()
        mark = np.frombuffer(self._hash(b"which secret"), np.uint8)
        if "secret" in store and not np.array_equal(store["secret"][0], mark):
            raise UserError(
                "secret= is another one than this node's store was written with; the same question with another noise "
                "would give away a part of what is hidden. Give the secret that the run began with."
            )
        store["secret"] = [mark]

    def hear(self, ticket: Ticket) -> bytes:
        """What this node has been told in this round, as a hash; refused if it was told something else before."""
        # The start and the last two rounds: a node does not go back further.
        name = "heard at the start" if ticket.round == START else f"heard {ticket.round % 2}"
        heard = self.store.get(name, [np.asarray([ticket.round])])
        if int(heard[0][0]) > ticket.round:
            raise ProtocolError(
                f"round {ticket.round} was asked, and this node has answered round {int(heard[0][0])} with noise; go "
                "on with the next round."
            )
        if int(heard[0][0]) < ticket.round:
            heard = [np.asarray([ticket.round])]
        told = self._hash(
            heard[ticket.exchange].tobytes(), *_convert_to_bytes((ticket.share, ticket.server, ticket.answer))
        )
        if len(heard) > ticket.exchange + 1 and heard[ticket.exchange + 1].tobytes() != told:
            raise ProtocolError(
                f"exchange {ticket.exchange} of round {ticket.round} was asked again with other values, after this "
                "node had answered it with noise: the difference of two answers would show what the noise hides. Go on "
                "with the next round."
            )
        if len(heard) <= ticket.exchange + 1:
            self.store[name] = [*heard, np.frombuffer(told, np.uint8)]
        return told

    def key(self, told: bytes, state: Any) -> Array:
        """The key for the answer to what was told, given what the node holds."""
        return convert_to_key(self._hash(b"noise", told, *_convert_to_bytes(state)))

    def _hash(self, *parts: bytes) -> bytes:
        code = hmac.new(self.secret, self.about, hashlib.sha256)
        for part in parts:
            code.update(len(part).to_bytes(8, "big") + part)
        return code.digest()


def _convert_to_bytes(tree: Any) -> list[bytes]:
    return [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def remove_rows(task: Task) -> Task:
    """The task as the server knows it: problem, starting point and shapes, with NaN in place of everybody's data."""
    hide = lambda a: np.full_like(a, np.nan) if np.issubdtype(a.dtype, np.floating) else np.zeros_like(a)
    one_row = lambda tree: jax.tree.map(lambda a: hide(np.asarray(a)[:1]), tree)
    number = np.zeros(1, np.int32)
    data = Rows(
        columns=one_row(task.data.columns),
        offsets=number,
        sizes=number + 1,
        ids=number,
        constants=one_row(task.data.constants),
        largest=1,
    )
    steps = None if task.local_steps is None else np.ones(1, np.int32)
    return dataclasses.replace(task, data=data, weights=np.ones(1), local_steps=steps)


Send = Callable[[Mapping[int, Ticket]], Mapping[int, "Leaves | None"]]


class Server:
    """The server's side. `send` delivers tickets by client id and returns the answers of those who answered.

    `uploads` are as for a Node. The noise of a trusted server is drawn afresh for every round, also for one that is
    repeated; `noise_seed` draws it as `simulate` does with it, for tests.
    """

    def __init__(
        self, algorithm: Algorithm, task: Task, seed: Seed, *, uploads: Uploads = (), noise_seed: int | None = None
    ):
        self.algorithm, self.task, self.key = algorithm, remove_rows(task), make_key(seed)
        self.uploads, self.noise_seed = list_transforms(uploads), noise_seed

    def serve(
        self,
        round: int,
        server: Any,
        weights: Mapping[int, float],
        shares: Mapping[int, float] | float,
        send: Send,
        expected: Expected | None = None,
    ) -> Any:
        """One round (or the start) with these clients, given their weights in means and their shares (`Ticket.share`;
        one number for all where they are alike): the new Shared fields.

        A client that stops answering is left out of the rest of the round; if nobody is left, nothing changes. With
        `expected` (see `steps.Expected`) a mean is divided by what it says, and that of nobody is noise.
        """
        broadcast = None if server is None else self.algorithm.part(server, "shared")
        share = shares.__getitem__ if isinstance(shares, Mapping) else lambda _: shares
        ticket = lambda i, exchange, answer: Ticket(round, exchange, broadcast, share(i), answer)
        unknown = jnp.full((), jnp.nan)  # a client's share is its own
        noise = make_noise_key(self.noise_seed, self.key)
        call = Call(self.key, jnp.asarray(round), server, unknown, self.uploads, noise, expected)
        state = None if round == START else self.algorithm.begin(server, self._hidden_client())
        answering = dict(send({i: ticket(i, 0, None) for i in weights}))
        log: list[list[Leaves]] = []
        exchange, all_finite = 0, True
        for step in list_steps_at(self.algorithm, round):
            known: list[Leaves] = []
            while "ask" in self._try_step(step, state, call, known):
                if not answering and expected is None:
                    return server
                exchange += 1
                all_finite &= all(np.isfinite(a).all() for answer in answering.values() for a in answer or [])
                common, replies = self._answer(step, state, call, known, answering, weights)
                known.append(common)
                answering = dict(send({i: ticket(i, exchange, reply) for i, reply in replies.items()}))
            log.append(known)
            state = self._try_step(step, state, call, known)["done"]
        return self._find_shared(round, server, call, log, all_finite)

    def _try_step(self, step: Step, state: Any, call: Call, known: list[Leaves]) -> Any:
        """The shapes of what comes out of a step with these answers."""
        attempt = functools.partial(_attempt, step=step._replace(index=None))
        return jax.eval_shape(
            lambda *args: attempt(args[0], args[1], index=args[2], state=args[3], call=args[4], answers=args[5]),
            self.algorithm,
            self.task,
            jnp.asarray(step.index),
            state,
            call,
            known,
        )

    def _answer(
        self,
        step: Step,
        state: Any,
        call: Call,
        known: list[Leaves],
        answering: Mapping[int, PyTree],
        weights: Mapping[int, float],
    ) -> tuple[Leaves, dict[int, Leaves]]:
        """(what the server itself learns from an exchange, the answer to each client)."""
        present = sorted(answering)
        values = [np.stack(leaves) for leaves in zip(*(answering[i] for i in present), strict=True)]
        ids, of_means = present, [weights[i] for i in present]
        if not present:  # somebody of weight zero in place of nobody: arrays have a length
            asked = self._try_step(step, state, call, known)["ask"]
            values, ids, of_means = [np.zeros((1, *a.shape), a.dtype) for a in asked], [0], [0.0]
        common, replies = _answer_clients(
            self.algorithm,
            self.task,
            step._replace(index=None),
            jnp.asarray(step.index),
            _hide(state),
            call,
            known,
            values,
            jnp.asarray(ids, jnp.int32),
            jnp.asarray(of_means, float),
        )
        common = _move_to_host(common)
        if replies is None:
            return common, dict.fromkeys(present, common)
        return common, {i: _move_to_host(leaf[slot] for leaf in replies) for slot, i in enumerate(present)}

    def _hidden_client(self) -> Any:
        return _hide(self.algorithm.split(_find_shapes(self.algorithm, self.task, self.key))[1])

    def _find_shared(self, round: int, server: Any, call: Call, log: list[list[Leaves]], all_finite: bool) -> Any:
        steps = tuple(list_steps_at(self.algorithm, round))
        new = _replay_round(self.algorithm, self.task, steps, server, self._hidden_client(), call, log)
        spoilt = [
            name
            for name, value in zip(new._fields, new, strict=True)
            if value is not None and not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(value))
        ]
        if spoilt and all_finite:
            raise UserError(
                f"{type(self.algorithm).__name__}: the Shared field {spoilt[0]} cannot be derived from the answers "
                "alone; it depends on a client's private values."
            )
        return new


@functools.partial(jax.jit, static_argnames=("step",))
def _answer_clients(
    algorithm: Algorithm,
    task: Task,
    step: Step,
    index: ArrayLike,
    state: Any,
    call: Call,
    known: list[Leaves],
    values: Leaves,
    ids: Array,
    weights: Array,
) -> tuple[Leaves, Leaves | None]:
    """(common answer, one answer per client or None) to the question that this step asks next."""
    client = make_client(task, make_only_participant(), call)
    try:
        take_step(algorithm, task, step._replace(index=index), state, client, call, replay(known))
    except Ask as ask:
        reply, tree = ask.reply, jax.tree.unflatten(jax.tree.structure(ask.tree), values)
        if reply is None:
            treatment = make_treatment(call, index, len(known))
            return jax.tree.leaves(average_by_weight(tree, weights, treatment, call.expected)), None
        if reply is reply_with_all:
            return values, None
        key, cohort = make_shared_key(call, index), Cohort(ids, weights)
        one, slots = lambda slot: reply(tree, cohort, slot, key), jnp.arange(ids.size)
        try:  # JAX proves that the reply is the same for everybody: then the server knows it too
            with prove_common():
                return jax.tree.leaves(jax.vmap(one, out_axes=None)(slots)), None
        except NotCommonError:
            replies = jax.vmap(one)(slots)
        # Each reply is one client's own: the server's replay must do without it.
        unknown = jax.tree.map(lambda a: jnp.full(a.shape[1:], jnp.nan, a.dtype), replies)
        return jax.tree.leaves(unknown), jax.tree.leaves(replies)
    raise AssertionError("a step was asked for a question that it does not have")


@functools.partial(jax.jit, static_argnames=("steps",))
def _replay_round(
    algorithm: Algorithm,
    task: Task,
    steps: tuple[Step, ...],
    server: Any,
    client: Any,
    call: Call,
    log: list[list[Leaves]],
) -> Any:
    """The Shared fields after a round, from the answers alone. XLA drops the gradients: nobody asks for them."""
    state = None if server is None else algorithm.begin(server, client)
    for step, answers in zip(steps, log, strict=True):
        state = _attempt(algorithm, task, step._replace(index=None), step.index, state, call, answers)["done"]
    return algorithm.split(state)[0]


class Deployment(NamedTuple):
    """Where a deployment in one process ended."""

    server: Any
    clients: Any
    noted: dict[str, np.ndarray]  # [rounds, (sum, number of notes)] by name, of those who took part


def deploy(
    algorithm: Algorithm, task: Task, seed: Seed = 0, options: Options | None = None, **changes: Unpack[Changes]
) -> Deployment:
    """All nodes and the server in this process; server and clients as `simulate` has them.

    Of the options, those of a round matter: rounds, cohort, sampling, dropout, uploads, noise_seed.
    """
    chosen = make_options(options, changes)
    plan, inputs = make_plan(algorithm, task, chosen), make_inputs(algorithm, task, seed, chosen)
    ids, weight_of = np.asarray(task.data.ids).tolist(), np.asarray(task.weights).tolist()
    own = lambda position, a: None if a is None else np.asarray(a)[position : position + 1]
    nodes = {
        client: Node(
            algorithm,
            dataclasses.replace(task, data=task.data.only(p), weights=np.ones(1), local_steps=own(p, task.local_steps)),
            seed,
            uploads=chosen.uploads,
            secret=secrets.token_bytes(32),
            noise_seed=chosen.noise_seed,
        )
        for p, client in enumerate(ids)
    }
    send = lambda tickets: {client: nodes[client].receive(ticket) for client, ticket in tickets.items()}
    central = Server(algorithm, task, seed, uploads=chosen.uploads, noise_seed=chosen.noise_seed)
    server = central.serve(START, None, dict(zip(ids, weight_of, strict=True)), 1.0, send)
    chances, noted = find_chances(task.weights, plan.cohort), []
    for round in range(chosen.need_rounds()):
        participants, call = call_up(inputs, server, jnp.asarray(round), chances, plan)
        columns = zip(participants.id, participants.weight, participants.chance, strict=True)
        present = [(int(i), float(weight), float(chance)) for i, weight, chance in columns if weight > 0]
        weights = {i: weight for i, weight, _ in present}
        whole = float(jnp.asarray(call.whole))
        shares = {i: chance * whole for i, _, chance in present}
        if weights or call.expected is not None:
            server = central.serve(round, server, weights, shares, send, call.expected)
        noted.append(functools.reduce(add_notes, [nodes[i].noted() for i in weights], {}))
    clients = jax.tree.map(lambda *a: jnp.stack(a), *(nodes[client].client() for client in ids))
    names = sorted({name for notes in noted for name in notes})
    kept = {name: np.stack([np.asarray(notes.get(name, np.zeros(2))) for notes in noted]) for name in names}
    return Deployment(server, clients, kept)
