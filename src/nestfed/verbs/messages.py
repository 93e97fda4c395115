"""Message passing: the same algorithm object with clients that only answer messages. Independent of any framework.

    Node     one client: holds its own rows and its Local fields, works until it needs an answer, returns the question
    Server   answers questions with means, and derives the new Shared fields from the answers alone
    deploy   both in one process: the reference that `simulate` is tested against

A client can speak only when spoken to, never in the middle of a step. A step is pure, so to resume it is to run it
again with the answers known so far; XLA drops the work whose result has been superseded. The server replays the round
with NaN in place of every private value: what it knows of a client is what came in the answers, and this proves it.

There is one trip per exchange. The Shared fields go out once a round, and the last answer of a round waits at the
server until the client is called up again: with it the client finishes that round before it begins the new one. A round
that loses a client does not count, and is asked again without it as another attempt; every call says which attempt of
which round was the client's last one that counts, so that it begins from what it kept then.
"""

import dataclasses
import functools
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm, Cohort, Fed, reply_with_all
from nestfed.core.identity import identify
from nestfed.core.jax_internals import NotCommonError, drop_unused, prove_common
from nestfed.core.noise import check_secret, convert_to_key, draw_fresh_key, make_noise_key, make_repeatable_key
from nestfed.core.randomness import METRICS, fold
from nestfed.core.rows import Rows
from nestfed.core.scaled import LOWEST, Scaled, is_scaled
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, ArrayLike, Seed
from nestfed.engine.cohorts import Participant, find_chances
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
    convert_to_float,
    find_largest_share,
    list_steps,
    make_client,
    make_only_participant,
    make_shared_key,
    make_treatment,
    make_words,
    replay,
    step_alone,
    take_step,
)
from nestfed.uploads.privacy import Uploads, list_transforms

START = -1  # the round in which clients initialise
MEASURING = -1000  # ... and, less the number of rounds so far, that of metrics: no mask serves twice

Leaves = list[np.ndarray]


class Standing(NamedTuple):
    """Where a client stands: its last round that counts, and the answer with which it finishes that round."""

    round: int
    attempt: int
    answer: Leaves | None  # to its last question; None: what it keeps does not depend on it


class Ticket(NamedTuple):
    """What the server sends: which exchange of which attempt at which round this is."""

    round: int
    attempt: int  # drawn anew whenever a round is begun: who takes part, and so shares and answers, may differ
    exchange: int  # 0 calls the client up; e > 0 brings the answer to its question e - 1
    answer: Leaves | None = None
    # Of exchange 0 alone:
    server: Any = None  # Shared fields at the start of the round (not the server's own)
    share: float = 1.0  # the client's weight in the problem / its weight in this round's means
    since: Standing | None = None  # None: before the start
    part: float = 0.0  # what the client counts for in this round's means, of 1
    asked: tuple[int, ...] = ()  # ids of all who are asked


class Lost(NamedTuple):
    """In place of an answer: why there is none."""

    reason: str


Answers = tuple[Any, list[Array] | None]  # of a gather: (what all get, or what each client gets)
Answer = Leaves | Lost | None  # None: the client needs no answer any more
Send = Callable[[Mapping[int, Ticket]], Iterable[tuple[int, Answer]]]


class ProtocolError(UserError):
    """A message that does not fit what the receiver has seen so far."""


class LostClients(UserError):
    """Clients that did not answer, or not with what was asked for: the round does not count."""

    def __init__(self, round: int, reasons: Mapping[int, str]):
        named = "; ".join(f"client {i}: {reason}" for i, reason in sorted(reasons.items()))
        super().__init__(f"{'the start' if round == START else f'round {round}'} was not finished: {named}.")
        self.round, self.reasons = round, dict(reasons)


class Occasion(NamedTuple):
    """Which exchange an upload belongs to, and with whom: what a mask is made of."""

    round: int
    attempt: int
    exchange: int
    asked: tuple[int, ...]


class Mask(Protocol):
    """How a client hides what it sends, where the server must see sums only."""

    def __call__(self, leaves: Leaves, part: float, occasion: Occasion) -> Leaves:
        """What is sent in place of part x these numbers; the sum of that over clients is their mean."""
        ...


class Sums(Protocol):
    """The server's side of `Mask`: it adds up what was sent, and reads the sum of the numbers behind it."""

    def shape(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """Of what a client sends in place of arrays of these shapes."""
        ...

    def add(self, total: Leaves | None, sent: Leaves) -> Leaves: ...

    def reveal(self, total: Leaves, shapes: Sequence[jax.ShapeDtypeStruct]) -> Leaves: ...


class Store(Protocol):
    """Where a node keeps what it must not lose: one record, written as a whole or not at all."""

    def load(self) -> dict[str, Leaves]: ...

    def save(self, record: Mapping[str, Leaves]) -> None: ...


class Memory:
    """A store that lasts as long as its process."""

    def __init__(self):
        self.record: dict[str, Leaves] = {}

    def load(self) -> dict[str, Leaves]:
        return dict(self.record)

    def save(self, record: Mapping[str, Leaves]) -> None:
        self.record = dict(record)


# ------------------------------------------------------------------------------------------------- what will be asked


class Question(NamedTuple):
    """One exchange of a round, as it is known before anybody is asked."""

    step: Step
    number: int  # within the step
    gathers: bool
    structure: Any  # of the tree that is sent
    shapes: list[jax.ShapeDtypeStruct]  # of its leaves
    answers: list[jax.ShapeDtypeStruct]  # of the answer to one client
    state: Any  # shapes of State at the start of the step

    @property
    def plain(self) -> bool:
        """Is it a mean of plain numbers, so that a server may add them up without looking at them?"""
        return not self.gathers and not any(map(is_scaled, jax.tree.leaves(self.tree(self.shapes), is_leaf=is_scaled)))

    def tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.structure, leaves)


def _check_plain(algorithm: Algorithm, question: Question) -> None:
    """Refuse what is no mean of plain numbers, where uploads are masked."""
    if not question.plain:
        what = "gathers clients' values" if question.gathers else "takes means of numbers with a common exponent"
        raise ProtocolError(
            f"{type(algorithm).__name__} {what}, which sums of masked uploads cannot answer; use an algorithm or an "
            "objective that does not, or leave secure aggregation out."
        )


class Outline(NamedTuple):
    """What a round (or the start) asks of a client."""

    questions: tuple[Question, ...]
    structures: tuple[Any, ...]  # of State at the start of every step: Scratch fields come and go
    needs_last: bool  # does what a client keeps depend on the answer to its last question?


def list_steps_at(algorithm: Algorithm, round: int) -> list[Step]:
    """The steps of a round in order, or that of the start."""
    return [FIRST_STEP] if round == START else list_steps(algorithm)


def outline_round(
    algorithm: Algorithm, task: Task, key: Array, uploads: Any, round: int, clients: int, noting: bool
) -> Outline:
    """Read off the program, which is traced and not run. The answer of a gather has an entry for every client asked;
    `noting` says that what a client keeps includes its notes."""
    first = _find_shapes(algorithm, task, key)
    server = None if round == START else algorithm.part(first, "shared", "server")
    local = algorithm.part(first, "local")
    steps = list_steps_at(algorithm, round)
    state = None if round == START else jax.eval_shape(algorithm.begin, server, local)
    questions: list[Question] = []
    structures = []
    last: tuple[int, Any, list[Any]] | None = None  # the step of the last question, its state, the answers before it

    def attempt(
        index: int, server: Any, state: Any, known: Sequence[Any], on_ask: Callable = lambda ask, call, place: None
    ) -> Any:
        call = Call(key, jnp.asarray(round), server, jnp.ones(()), uploads, draw_fresh_key() if uploads else None)
        place = make_only_participant()
        try:
            return take_step(algorithm, task, steps[index], state, make_client(task, place, call), call, replay(known))
        except Ask as ask:
            on_ask(ask, call, place)
            return [jnp.asarray(leaf) for leaf in jax.tree.leaves(ask.tree)]

    for index, step in enumerate(steps):
        structures.append(jax.tree.structure(state))
        known: list[list[jax.ShapeDtypeStruct]] = []
        while True:
            asked: list[tuple[bool, Any, Any]] = []

            def read(ask: Ask, call: Call, place: Participant, asked: list = asked, step: Step = step) -> None:
                answer = lambda: _shape_answer(ask, call, step, clients)
                asked.append((ask.reply is not None, jax.tree.structure(ask.tree), jax.eval_shape(answer)))

            out = jax.eval_shape(functools.partial(attempt, index, on_ask=read), server, state, known)
            if not asked:
                state = out[0]
                break
            ((gathers, structure, answers),) = asked
            last = index, state, list(known)
            questions.append(Question(step, len(known), gathers, structure, out, answers, state))
            known.append(answers)
    keeps = noting or bool(jax.tree.leaves(local))
    if last is None or not keeps:
        return Outline(tuple(questions), tuple(structures), False)
    if questions[-1].gathers:  # a client does not know what shape an answer would have that it does not get
        return Outline(tuple(questions), tuple(structures), True)

    def finish(answer: Any, server: Any, state: Any, known: Sequence[Any]) -> tuple[Any, Notes]:
        index, notes = last[0], {}
        for number in range(index, len(steps)):
            out: Any = attempt(number, server, state, [*known, answer] if number == index else [])
            state, notes = out[0], add_notes(notes, out[1])
        return algorithm.part(state, "local"), notes if noting else {}

    program = jax.make_jaxpr(finish)(questions[-1].answers, server, last[1], last[2])
    used = drop_unused(program.jaxpr)[1][: len(questions[-1].answers)]
    return Outline(tuple(questions), tuple(structures), any(used))


def _shape_answer(ask: Ask, call: Call, step: Step, clients: int) -> list[Any]:
    if ask.reply is None:
        return [convert_to_float(leaf) for leaf in jax.tree.leaves(ask.tree)]
    values = jax.tree.map(lambda a: jnp.zeros((clients, *jnp.shape(a)), jnp.result_type(a)), ask.tree)
    cohort = Cohort(jnp.zeros(clients, jnp.int32), jnp.ones(clients))
    return jax.tree.leaves(ask.reply(values, cohort, jnp.asarray(0), make_shared_key(call, step.index)))


@functools.partial(jax.jit, static_argnames=("step",))
def _attempt(
    algorithm: Algorithm, task: Task, step: Step, index: ArrayLike, state: Any, call: Call, answers: Sequence[Any]
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


def read_leaves(like: Any, leaves: Sequence[np.ndarray]) -> Any:
    """The tree of these shapes with these arrays, which must fit."""
    expected = [(a.shape, a.dtype) for a in jax.tree.leaves(like)]
    if [(a.shape, a.dtype) for a in leaves] != expected:
        raise ProtocolError(
            f"arrays of {[(a.shape, a.dtype.name) for a in leaves]} came where {[(s, d.name) for s, d in expected]} "
            "were expected: they were made with other settings, or in another precision."
        )
    return jax.tree.unflatten(jax.tree.structure(like), list(leaves))


def _hide(tree: Any) -> Any:
    """NaN in place of every number: for what this party must not know, or need."""
    nothing = lambda a: jnp.full(a.shape, jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0, a.dtype)
    return jax.tree.map(nothing, tree)


def _move_to_host(leaves: Any) -> Leaves:
    return [np.asarray(leaf) for leaf in leaves]


# ------------------------------------------------------------------------------------------------- a client


@dataclasses.dataclass
class _Work:
    """A round on its way at a node."""

    round: int
    attempt: int
    exchange: int  # the next one: that of the answer it waits for
    server: Any
    share: float
    since: Standing | None
    index: int  # of the step that asked
    state: Any  # at the start of that step
    answers: list[Leaves]
    noise: Array | None = None
    part: float = 0.0
    asked: tuple[int, ...] = ()


class Node:
    """One client. What it must not lose is in `store`, which never leaves the node and may be on its disk.

    Delivery may be repeated: the same exchange of the same attempt asked twice gives the same answer. A node that was
    restarted has lost the round that it was in, not the rounds before: it takes part again when it is next called up.

    `uploads` are transforms of what it sends, as in `simulate`. Noise comes from `secret`: random bytes that only this
    node knows, made once by secrets.token_bytes(32) and the same until the run is over. What it has answered with noise
    it does not answer again to anybody who asks with other values: the difference would show what the noise hides.
    `noise_seed` draws the noise as `simulate` does with it, for tests.

    With `mask` it sends its weighted part of every mean, masked, and refuses what the server cannot answer from sums.
    `noting` keeps what steps note, for `take_notes`. Where metrics gather clients' values, which may be those of single
    rows, `gathers=False` takes the problem's own metrics in their place; the server must be told the same.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        seed: Seed,
        store: Store | None = None,
        *,
        uploads: Uploads = (),
        secret: bytes | None = None,
        noise_seed: int | None = None,
        mask: Mask | None = None,
        noting: bool = False,
        gathers: bool = True,
    ):
        if task.clients != 1:
            raise UserError(f"a node holds one client's rows; the task has {task.clients} clients.")
        check_match(algorithm, task)
        self.algorithm, self.task, self.key = algorithm, task, make_key(seed)
        self.uploads, self.mask, self.noting, self.gathers = list_transforms(uploads), mask, noting, gathers
        self.store: Store = Memory() if store is None else store
        self._kept = self.store.load()
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
                    check_secret(secret), self._kept, identify((algorithm, task), "the algorithm and its task")
                )
        self._first = _find_shapes(algorithm, task, self.key)
        self._keeps_state = bool(jax.tree.leaves(algorithm.part(self._first, "local")))
        self._outlines: dict[bool, Outline] = {}
        self._work: _Work | None = None
        self._said: tuple[tuple[int, int, int], Leaves | None] | None = None  # what it answered last
        self._notes: dict[int, Notes] = {}
        self._inspection: tuple[Ticket, list[Leaves]] | None = None

    def receive(self, ticket: Ticket) -> Leaves | None:
        """Work until an answer is needed (return the question) or the round is over (return None)."""
        told = None if self._noise is None else self._noise.hear(ticket)
        place = ticket.round, ticket.attempt, ticket.exchange
        if self._said is not None and self._said[0] == place:
            return self._said[1]
        if ticket.exchange == 0:
            work = self._begin(ticket)
        else:
            work = self._work
            if work is None or (work.round, work.attempt, work.exchange) != place or ticket.answer is None:
                waits = "a call" if work is None else f"exchange {work.exchange} of round {work.round}"
                raise ProtocolError(
                    f"the answer for exchange {ticket.exchange} of round {ticket.round} came, but this node waits for "
                    f"{waits} (or it was restarted in this round); call it up again."
                )
            work = dataclasses.replace(work, answers=[*work.answers, ticket.answer])
        if self._noise is not None and told is not None:
            work.noise = self._noise.key(told, work.state)
        question = self._go_on(work)
        if self._noise is not None or (self._keeps_state and self._is_last(ticket)):
            self.store.save(self._kept)
        self._said = place, question
        return question

    def finish(self, since: Standing) -> None:
        """Bring this client's state to the end of its last round that counts."""
        if self._find_kept(since) is not None or not (self._keeps_state or self.noting):
            return
        work = self._recall(since)
        if work is None:
            if not self._keeps_state:
                return
            raise ProtocolError(
                f"this node was asked to go on from round {since.round}, which is not the last one that it has done "
                "nor the one before: its store is of another run or was lost. Start the run anew, or restore the "
                "store from a backup."
            )
        answer = since.answer
        if answer is None:
            answer = _move_to_host(jax.tree.leaves(_hide(self._outline(since.round).questions[-1].answers)))
        self._go_on(dataclasses.replace(work, answers=[*work.answers, answer]))

    def server_shapes(self) -> Any:
        """Of what a server has, as `Position.server`."""
        return self.algorithm.part(self._first, "shared", "server")

    def read_broadcast(self, leaves: Leaves) -> Any:
        """The Shared fields from their arrays, as `Ticket.server` has them."""
        return read_leaves(self.algorithm.part(self._first, "shared"), leaves)

    def client(self, since: Standing | None = None) -> Any:
        """The Local fields as they were at the end of this round, or of the last one."""
        kept = self._kept.get("client") if since is None else self._find_kept(since)
        structure = jax.tree.structure(self.algorithm.part(self._first, "local"))
        return jax.tree.unflatten(structure, kept[1:] if kept is not None else [])

    def take_notes(self) -> dict[int, Notes]:
        """What the steps of finished rounds noted, [sum, number of notes] by name, of each round. It is sent to nobody,
        and given once."""
        rounds = [round for round in self._notes if self._work is None or round != self._work.round]
        return {round: self._notes.pop(round) for round in rounds}

    def inspect(self, ticket: Ticket) -> Leaves | None:
        """The next question of the task's metrics, after the rounds of this ticket; None: there is none left."""
        if ticket.exchange == 0:
            if ticket.since is not None:
                self.finish(ticket.since)
            self._inspection = ticket, []
        elif (
            self._inspection is None
            or ticket.answer is None
            or self._place_of(self._inspection)
            != (
                ticket.round,
                ticket.attempt,
                ticket.exchange,
            )
        ):
            raise ProtocolError("an answer came for metrics that this node was not asked for; ask it from the start.")
        else:
            call, answers = self._inspection
            self._inspection = call, [*answers, ticket.answer]
        call, answers = self._inspection
        server, client = self._complete(call.server), self.client(call.since if self._keeps_state else None)
        out = _inspect(self.task, server, client, self.key, jnp.asarray(call.round), answers, gathers=self.gathers)
        if "refused" in out:
            raise ProtocolError("the metrics of this problem gather clients' values, which this node does not allow.")
        if "ask" in out and self.mask is not None:
            if "plain" not in out:
                raise ProtocolError("the metrics of this problem are not means of plain numbers, which masks need.")
            occasion = Occasion(MEASURING - call.round, call.attempt, len(answers), call.asked)
            return self.mask(_move_to_host(out["ask"]), call.part, occasion)
        return _move_to_host(out["ask"]) if "ask" in out else None

    @staticmethod
    def _place_of(inspection: tuple[Ticket, list[Leaves]]) -> tuple[int, int, int]:
        return inspection[0].round, inspection[0].attempt, len(inspection[1]) + 1

    def _outline(self, round: int) -> Outline:
        initial = round == START
        if initial not in self._outlines:
            arguments = self.algorithm, self.task, self.key, self.uploads, START if initial else 0, 1, self.noting
            self._outlines[initial] = outline_round(*arguments)
        return self._outlines[initial]

    def _is_last(self, ticket: Ticket) -> bool:
        return ticket.exchange + 1 >= len(self._outline(ticket.round).questions)

    def _begin(self, ticket: Ticket) -> _Work:
        if ticket.round == START:
            return _Work(START, ticket.attempt, 0, None, 1.0, None, 0, None, [], None, ticket.part, ticket.asked)
        if ticket.since is None or ticket.server is None:
            raise ProtocolError(f"round {ticket.round} was asked without what it begins from.")
        if self._keeps_state and not self._kept.keys() & {"client", "frame"} and self._work is None:
            raise ProtocolError(
                f"round {ticket.round} was asked of a node that has not started; send round {START} first."
            )
        self.finish(ticket.since)
        server = self._complete(ticket.server)
        state = self.algorithm.begin(server, self.client(ticket.since if self._keeps_state else None))
        self._notes.pop(ticket.round, None)
        return _Work(
            ticket.round, ticket.attempt, 0, server, ticket.share, ticket.since, 0, state, [], None, ticket.part,
            ticket.asked,
        )  # fmt: skip

    def _go_on(self, work: _Work) -> Leaves | None:
        """As far as the answers allow: the next question, or None when the round is over."""
        program = list_steps_at(self.algorithm, work.round)
        noise = self._test_noise if work.noise is None else work.noise
        if noise is None and self._noise is not None:
            noise = draw_fresh_key()  # of an upload that has been sent: nobody sees this one
        share = jnp.asarray(work.share, float)
        call = Call(self.key, jnp.asarray(work.round), work.server, share, self.uploads, noise)
        state, answers = work.state, work.answers
        for index in range(work.index, len(program)):
            step = program[index]._replace(index=None)
            out = _attempt(self.algorithm, self.task, step, index, state, call, answers)
            if "ask" in out:
                self._work = dataclasses.replace(
                    work, exchange=work.exchange + 1, index=index, state=state, answers=answers, noise=None
                )
                if self._keeps_state and self._work.exchange == len(self._outline(work.round).questions):
                    self._kept["frame"] = self._freeze(self._work)
                return self._hide_upload(work, _move_to_host(out["ask"]))
            state, answers = out["done"], []
            if work.round != START and self.noting:
                self._notes[work.round] = add_notes(self._notes.get(work.round, {}), out["notes"])
        self._keep(work, state)
        return None

    def _hide_upload(self, work: _Work, leaves: Leaves) -> Leaves:
        if self.mask is None:
            return leaves
        _check_plain(self.algorithm, self._outline(work.round).questions[work.exchange])
        return self.mask(leaves, work.part, Occasion(work.round, work.attempt, work.exchange, work.asked))

    def _keep(self, work: _Work, state: Any) -> None:
        self._work = None
        if not self._keeps_state:
            return
        before = None if work.since is None else self._find_kept(work.since)
        self._kept.pop("frame", None)
        if before is not None:
            self._kept["client before"] = before
        local = self.algorithm.part(state, "local")
        self._kept["client"] = [np.asarray([work.round, work.attempt]), *_move_to_host(jax.tree.leaves(local))]

    def _find_kept(self, since: Standing) -> Leaves | None:
        tag = [since.round, since.attempt]
        found = (self._kept.get(name) for name in ("client", "client before"))
        return next((kept for kept in found if kept is not None and kept[0].tolist() == tag), None)

    def _freeze(self, work: _Work) -> Leaves:
        """A round that waits for its last answer, as arrays."""
        since = [0, 0, 0] if work.since is None else [1, work.since.round, work.since.attempt]
        counts = [len(answer) for answer in work.answers]
        server = jax.tree.leaves(work.server)
        numbers = np.asarray([work.round, work.attempt, work.exchange, work.index, *since, *counts])
        arrays = [*server, *jax.tree.leaves(work.state), *(leaf for answer in work.answers for leaf in answer)]
        return [numbers, np.asarray(work.share), *_move_to_host(arrays)]

    def _recall(self, since: Standing) -> _Work | None:
        """That round, if it waits for its last answer here."""
        is_it = lambda round, attempt: (round, attempt) == (since.round, since.attempt)
        work = self._work
        if work is not None and is_it(work.round, work.attempt):
            return work if work.exchange == len(self._outline(work.round).questions) else None
        if "frame" not in self._kept:
            return None
        numbers, share, *arrays = self._kept["frame"]
        round, attempt, exchange, index, known, round_before, attempt_before = numbers.tolist()[:7]
        if not is_it(round, attempt):
            return None
        took = lambda number: [arrays.pop(0) for _ in range(number)]
        server = None
        if round != START:
            own = jax.tree.structure(self.algorithm.part(self._first, "shared", "server"))
            server = jax.tree.unflatten(own, took(own.num_leaves))
        structure = self._outline(round).structures[index]
        state = jax.tree.unflatten(structure, took(structure.num_leaves))
        answers = [took(number) for number in numbers.tolist()[7:]]
        before = Standing(round_before, attempt_before, None) if known else None
        return _Work(round, attempt, exchange, server, float(share), before, index, state, answers)

    def _complete(self, server: Any) -> Any:
        """The broadcast with NaN for the server's own fields: they may enter nothing that a client keeps or sends."""
        own = self.algorithm.part(self._first, "server")
        return self.algorithm.State(*(_hide(b) if a is None else a for a, b in zip(server, own, strict=True)))


@functools.partial(jax.jit, static_argnames=("gathers",))
def _inspect(
    task: Task, server: Any, client: Any, key: Array, round: ArrayLike, answers: Sequence[Any], gathers: bool
) -> dict[str, Any]:
    """Run the metrics of the task's only client as far as the known answers allow: {"ask": leaves}, {"refused"} where
    that asks for clients' values and may not, or {"done": metrics}."""
    try:
        return {"done": _run_metrics(task, server, client, key, round, jnp.asarray(task.data.ids)[0], answers, gathers)}
    except Ask as ask:
        if ask.reply is not None and not gathers:
            return {"refused": ()}
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(ask.tree)]
        plain = ask.reply is None and not any(map(is_scaled, jax.tree.leaves(ask.tree, is_leaf=is_scaled)))
        return {"ask": leaves} | ({"plain": ()} if plain else {})


def _run_metrics(
    task: Task, server: Any, client: Any, key: Array, round: Any, id: Any, answers: Any, gathers: bool
) -> Any:
    """The metrics of one client; those of its problem where the task's own would gather and may not."""
    if gathers:
        return _call_metrics(task.metrics, task, server, client, key, round, id, answers)
    refusing = lambda tree, reply, key: _refuse_gather()
    try:
        return _call_metrics(task.metrics, task, server, client, key, round, id, answers, refusing)
    except _Gathers:
        return _call_metrics(task.mean_metrics, task, server, client, key, round, id, answers)


class _Gathers(Exception):
    """Metrics that gather, where they may not."""


def _refuse_gather() -> Any:
    raise _Gathers


def _call_metrics(
    metrics: Callable[..., Any],
    task: Task,
    server: Any,
    client: Any,
    key: Array,
    round: Any,
    id: Any,
    answers: Any,
    gather: Any = None,
) -> Any:
    common_key = fold(key, METRICS)
    exchange = replay(answers) if gather is None else replay(answers)._replace(gather=gather)
    fed = Fed(
        **make_words(exchange, common_key),
        sync=True,
        t=round,
        step=jnp.zeros_like(round),
        server=server,
        key=fold(key, METRICS, id),
        shared_key=common_key,
        share=jnp.ones(()),
    )
    return jax.tree.map(jnp.asarray, dict(metrics(server, client, task.data.client(0), fed)))


class _NoiseBook:
    """A node's keys of noise, one for everything that a question can depend on, and what it has answered so far.

    A key is hashed from the secret and from all that the node was told in this round, what it holds and what it is
    asked: the same question has the same noise, and any other question has another. So nobody who sends the same round
    twice, to this run or to another one with the same secret, can subtract anything. And because a second answer would
    spend privacy that nobody counts, one that differs is refused.
    """

    def __init__(self, secret: bytes, store: dict[str, Leaves], about: str):
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
            heard[ticket.exchange].tobytes(),
            *_convert_to_bytes((ticket.share, ticket.server, ticket.since, ticket.answer)),
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


# ------------------------------------------------------------------------------------------------- the server


def remove_rows(task: Task) -> Task:
    """The task as the server knows it: problem, starting point, shapes and who there is, with one row of NaN in place
    of everybody's data."""
    hide = lambda a: np.full_like(a, np.nan) if np.issubdtype(a.dtype, np.floating) else np.zeros_like(a)
    constants = jax.tree.map(lambda a: hide(np.asarray(a)), task.data.constants)
    number = np.zeros(task.clients, np.int32)
    data = Rows(
        columns=jax.tree.map(lambda a: hide(np.asarray(a)[:1]), task.data.columns),
        offsets=number,
        sizes=number + 1,
        ids=task.data.ids,
        constants=constants,
        largest=task.data.largest,
    )
    return dataclasses.replace(task, data=data)


class Position(NamedTuple):
    """Where a federation stands between two rounds, as its server knows it: all that a checkpoint needs."""

    server: Any  # State with the Shared fields and the server's own
    standing: Mapping[int, Standing]  # of every client


class Member(NamedTuple):
    """One who is asked in a round."""

    weight: float  # in means
    chance: float = 1.0  # weight x chance is the client's weight in the problem


class Server:
    """The server's side: it needs the task without anybody's rows. `send` delivers tickets by client id and yields
    answers as they come.

    `uploads` are as for a Node. The noise of a trusted server is drawn afresh for every round, also for one that is
    repeated; `noise_seed` draws it as `simulate` does with it, for tests. With `sums` clients send masked uploads.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        seed: Seed,
        *,
        uploads: Uploads = (),
        noise_seed: int | None = None,
        sums: Sums | None = None,
        noting: bool = False,
        gathers: bool = True,
    ):
        self.algorithm, self.task, self.key = algorithm, remove_rows(task), make_key(seed)
        self.uploads, self.noise_seed, self.sums = list_transforms(uploads), noise_seed, sums
        self.noting, self.gathers = noting, gathers
        self._first = _find_shapes(algorithm, self.task, self.key)
        self._hidden = _hide(algorithm.part(self._first, "local"))
        self._outlines: dict[tuple[bool, int], Outline] = {}

    def check_masked(self, clients: int) -> None:
        """Refuse, before anybody is asked, what sums of masked uploads cannot answer."""
        for round in (START, 0):
            for question in self._outline(round, clients).questions:
                _check_plain(self.algorithm, question)

    def shapes(self) -> Any:
        """Of `Position.server`."""
        return self.algorithm.part(self._first, "shared", "server")

    def serve(
        self,
        round: int,
        position: Position | None,
        members: Mapping[int, Member],
        send: Send,
        expected: Expected | None = None,
    ) -> Position:
        """One round (or the start, which has no position) with these clients.

        LostClients says who did not answer, or not with what was asked for: the round does not count then, and can be
        asked again without them from the same position. If there are no members nothing changes; but with `expected`
        (see `steps.Expected`) a mean is divided by what it says, and that of nobody is noise.
        """
        server = None if position is None else position.server
        if position is not None and not members and expected is None:
            return position
        outline, attempt = self._outline(round, len(members)), secrets.randbits(62)
        noise = make_noise_key(self.noise_seed, self.key)
        unknown = jnp.full((), jnp.nan)  # a client's share is its own
        call = Call(self.key, jnp.asarray(round), server, unknown, self.uploads, noise, expected)
        tickets = self._call_up(round, attempt, position, members, expected)
        log: list[list[Leaves]] = [[] for _ in list_steps_at(self.algorithm, round)]
        replies: dict[int, Leaves] = {}
        for exchange, question in enumerate(outline.questions):
            known = log[question.step.index]
            if question.gathers:
                arrived = dict(self._receive(question.shapes, send, tickets))
                common, replies = self._reply(question, arrived, members, call, known)
            else:
                common = self._take_mean(question, send, tickets, members, call)
                replies = dict.fromkeys(members, common)
            known.append(common)
            tickets = {i: Ticket(round, attempt, exchange + 1, reply) for i, reply in replies.items()}
        if not outline.questions:
            for _ in self._receive(None, send, tickets):
                pass
        new = self._find_shared(round, server, call, log)
        ends = {i: Standing(round, attempt, replies[i] if outline.needs_last else None) for i in members}
        return Position(new, {**({} if position is None else position.standing), **ends})

    def evaluate(
        self, round: int, position: Position, weights: Mapping[int, float], send: Send
    ) -> dict[str, np.ndarray]:
        """The task's metrics after so many rounds, over these clients; `send` reaches `Node.inspect`."""
        attempt, answers = secrets.randbits(62), []
        shared = self.algorithm.part(position.server, "shared")
        members, whole = {i: Member(weight) for i, weight in weights.items()}, sum(weights.values())
        asked = tuple(sorted(weights)) if self.sums is not None else ()
        tickets = {
            i: Ticket(round, attempt, 0, None, shared, 1.0, position.standing.get(i), weight / whole, asked)
            for i, weight in weights.items()
        }
        call = Call(self.key, jnp.asarray(round), position.server, jnp.ones(()))
        while (question := self._outline_metrics(call, answers, len(members))) is not None:
            if question.gathers:
                arrived = dict(self._receive(question.shapes, send, tickets))
                common = self._reply_metrics(question, arrived, members, call, answers)
            else:
                common = self._take_mean(question, send, tickets, members, call)
            answers.append(common)
            tickets = {i: Ticket(round, attempt, len(answers), common) for i in members}
        arguments = self.task, position.server, self._hidden, self.key, jnp.asarray(round), answers
        values = _finish_metrics(*arguments, gathers=self.gathers)
        return {name: np.asarray(value) for name, value in values.items()}

    def _outline(self, round: int, clients: int) -> Outline:
        at = round == START, max(1, clients)
        if at not in self._outlines:
            arguments = self.algorithm, self.task, self.key, self.uploads, START if at[0] else 0, at[1], self.noting
            self._outlines[at] = outline_round(*arguments)
        return self._outlines[at]

    def _call_up(
        self,
        round: int,
        attempt: int,
        position: Position | None,
        members: Mapping[int, Member],
        expected: Expected | None,
    ) -> dict[int, Ticket]:
        whole = sum(member.weight for member in members.values()) if expected is None else float(expected.whole)
        shared = None if position is None else self.algorithm.part(position.server, "shared")
        return {
            i: Ticket(
                round,
                attempt,
                0,
                None,
                shared,
                1.0 if position is None else member.chance * whole,
                None if position is None else position.standing.get(i),
                member.weight / whole,
                tuple(sorted(members)) if self.sums is not None else (),
            )
            for i, member in members.items()
        }

    def _receive(
        self, expected: Sequence[jax.ShapeDtypeStruct] | None, send: Send, tickets: Mapping[int, Ticket]
    ) -> Iterable[tuple[int, Leaves]]:
        """Answers as they come, each looked at before it is believed; LostClients at the end if any is missing."""
        waiting, lost = set(tickets), dict[int, str]()
        for i, answer in send(tickets):
            if i not in waiting:
                continue
            waiting.discard(i)
            wrong = _find_fault(answer, expected)
            if wrong is not None:
                lost[i] = wrong
            elif not lost and answer is not None and not isinstance(answer, Lost):
                yield i, answer
        lost |= dict.fromkeys(waiting, "no answer came")
        if lost:
            raise LostClients(next(ticket.round for ticket in tickets.values()), lost)

    def _take_mean(
        self, question: Question, send: Send, tickets: Mapping[int, Ticket], members: Mapping[int, Member], call: Call
    ) -> Leaves:
        """Sums grow as answers come: nothing is kept of one client."""
        weights = jnp.asarray([member.weight for member in members.values()] or [0.0], float)
        whole = float(weights.sum() if call.expected is None else call.expected.whole) or 1.0
        sums = [_make_zero(one) for one in jax.tree.leaves(question.tree(question.answers), is_leaf=is_scaled)]
        if self.sums is None:
            for i, answer in self._receive(question.shapes, send, tickets):
                items = jax.tree.leaves(question.tree(answer), is_leaf=is_scaled)
                sums = [_add(total, one, members[i].weight) for total, one in zip(sums, items, strict=True)]
        else:
            _check_plain(self.algorithm, question)
            masked = None
            for _, answer in self._receive(self.sums.shape(question.shapes), send, tickets):
                masked = self.sums.add(masked, answer)
            if masked is not None:
                means = self.sums.reveal(masked, question.answers)
                sums = [np.asarray(mean * whole, zero.dtype) for mean, zero in zip(means, sums, strict=True)]
        if question.plain and not call.uploads:
            return [np.asarray(total / np.asarray(whole, total.dtype)) for total in sums]
        items = jax.tree.structure(question.tree(question.answers), is_leaf=is_scaled)
        largest = find_largest_share(weights, call.expected)
        settled = _settle(jax.tree.unflatten(items, sums), whole, largest, call, question.step.index, question.number)
        return _move_to_host(settled)

    def _reply(
        self,
        question: Question,
        arrived: Mapping[int, Leaves],
        members: Mapping[int, Member],
        call: Call,
        known: list[Leaves],
    ) -> tuple[Leaves, dict[int, Leaves]]:
        """(what the server itself learns from a gather, the answer to each client)."""
        values, ids, weights = self._lay(question, arrived, members)
        state = None if question.state is None else _hide(question.state)
        common, replies = _answer_gather(
            self.algorithm,
            self.task,
            question.step._replace(index=None),
            question.step.index,
            state,
            call,
            known,
            values,
            ids,
            weights,
        )
        common = _move_to_host(common)
        if replies is None:
            return common, dict.fromkeys(members, common)
        replies = _move_to_host(replies)
        return common, {i: [leaf[slot] for leaf in replies] for slot, i in enumerate(sorted(arrived))}

    def _reply_metrics(
        self,
        question: Question,
        arrived: Mapping[int, Leaves],
        members: Mapping[int, Member],
        call: Call,
        known: list[Leaves],
    ) -> Leaves:
        values, ids, weights = self._lay(question, arrived, members)
        common, replies = _answer_metrics(
            self.task, call.server, self._hidden, self.key, call.round, known, values, ids, weights, self.gathers
        )
        if replies is not None:
            raise UserError("a metric gathers values and has an answer for each client, which no server can send.")
        return _move_to_host(common)

    def _lay(
        self, question: Question, arrived: Mapping[int, Leaves], members: Mapping[int, Member]
    ) -> tuple[Leaves, Array, Array]:
        """(values side by side, ids, weights); somebody of weight zero in place of nobody: arrays have a length."""
        ids = sorted(arrived)
        if not ids:
            return [np.zeros((1, *a.shape), a.dtype) for a in question.shapes], jnp.zeros(1, jnp.int32), jnp.zeros(1)
        values = [np.stack(leaves) for leaves in zip(*(arrived[i] for i in ids), strict=True)]
        return values, jnp.asarray(ids, jnp.int32), jnp.asarray([members[i].weight for i in ids], float)

    def _outline_metrics(self, call: Call, answers: list[Leaves], clients: int) -> Question | None:
        """The next question of the metrics."""
        asked: list[Question] = []

        def run(answers: Sequence[Any]) -> Any:
            try:
                arguments = self.task, call.server, self._hidden, self.key, call.round, 0, answers
                return _run_metrics(*arguments, self.gathers)
            except Ask as ask:
                shape = jax.eval_shape(functools.partial(_shape_answer, ask, call, FIRST_STEP, clients))
                leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(ask.tree)]
                sent = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
                structure = jax.tree.structure(ask.tree)
                asked.append(Question(FIRST_STEP, len(answers), ask.reply is not None, structure, sent, shape, None))
                return leaves

        jax.eval_shape(run, answers)
        return asked[0] if asked else None

    def _find_shared(self, round: int, server: Any, call: Call, log: list[list[Leaves]]) -> Any:
        steps = tuple(list_steps_at(self.algorithm, round))
        new = _replay_round(self.algorithm, self.task, steps, server, self._hidden, call, log)
        for name, value in zip(new._fields, new, strict=True):
            if value is None or all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(value)):
                continue
            if any(bool(jnp.isinf(a).any()) for a in jax.tree.leaves(value)):
                raise UserError(
                    f"{type(self.algorithm).__name__} diverged in round {round}: the Shared field {name} is infinite; "
                    "use a smaller step size."
                )
            raise UserError(
                f"{type(self.algorithm).__name__}: the Shared field {name} cannot be derived from the answers "
                "alone; it depends on a client's private values."
            )
        return new


def _find_fault(answer: Answer, expected: Sequence[jax.ShapeDtypeStruct] | None) -> str | None:
    """What is wrong with an answer, in one line."""
    if isinstance(answer, Lost):
        return answer.reason
    if (answer is None) != (expected is None):
        return "it is at another place of the round than the server"
    if answer is None or expected is None:
        return None
    found, wanted = ([(tuple(a.shape), np.dtype(a.dtype).name) for a in some] for some in (answer, expected))
    if found != wanted:
        return f"it sent arrays of the shapes and types {found}, and {wanted} were asked for"
    if not all(np.isfinite(a).all() for a in answer if np.issubdtype(a.dtype, np.inexact)):
        return "it sent numbers that are not finite"
    return None


def _make_zero(item: Any) -> Any:
    if is_scaled(item):
        shift: Any = np.full(item.shift.shape, LOWEST, item.shift.dtype)
        return Scaled(shift, _make_zero(item.value))
    return np.zeros(item.shape, item.dtype)


def _add(total: Any, item: Any, weight: float) -> Any:
    """total + weight x item; `Scaled` numbers are brought to the larger exponent."""
    if not is_scaled(item):
        total += np.asarray(weight, total.dtype) * np.asarray(item, total.dtype)
        return total
    shift: Any = np.maximum(total.shift, item.shift)
    fall = lambda old: np.exp(np.minimum(old - shift, 0))
    return Scaled(shift, _add(total.value * fall(total.shift), item.value * fall(item.shift), weight))


@functools.partial(jax.jit, static_argnames=("number",))
def _settle(sums: Any, whole: Array, largest: Array, call: Call, index: ArrayLike, number: int) -> list[Array]:
    """From sums to what the server answers."""

    def divide(sum: Any) -> Any:
        if is_scaled(sum):
            return Scaled(sum.shift, divide(sum.value)).normal()
        return sum / jnp.asarray(whole, sum.dtype)

    mean = jax.tree.map(divide, sums, is_leaf=is_scaled)
    treatment = make_treatment(call, index, number)
    return jax.tree.leaves(mean if treatment is None else treatment(mean, largest))


@functools.partial(jax.jit, static_argnames=("step",))
def _answer_gather(
    algorithm: Algorithm,
    task: Task,
    step: Step,
    index: ArrayLike,
    state: Any,
    call: Call,
    known: Sequence[Any],
    values: Leaves,
    ids: Array,
    weights: Array,
) -> Answers:
    """(common answer, one answer per client or None) to the gather that this step asks for next."""
    client = make_client(task, make_only_participant(), call)
    try:
        take_step(algorithm, task, step._replace(index=index), state, client, call, replay(known))
    except Ask as ask:
        return _answer_ask(ask, values, ids, weights, make_shared_key(call, index))
    raise AssertionError("a step was asked for a question that it does not have")


@functools.partial(jax.jit, static_argnames=("gathers",))
def _answer_metrics(
    task: Task,
    server: Any,
    client: Any,
    key: Array,
    round: ArrayLike,
    known: Sequence[Any],
    values: Leaves,
    ids: Array,
    weights: Array,
    gathers: bool,
) -> Answers:
    try:
        _run_metrics(task, server, client, key, round, 0, known, gathers)
    except Ask as ask:
        return _answer_ask(ask, values, ids, weights, fold(key, METRICS))
    raise AssertionError("metrics were asked for a question that they do not have")


def _answer_ask(ask: Ask, values: Leaves, ids: Array, weights: Array, key: Array) -> Answers:
    reply, tree = ask.reply, jax.tree.unflatten(jax.tree.structure(ask.tree), values)
    if reply is None or reply is reply_with_all:
        return values, None
    cohort = Cohort(ids, weights)
    one, slots = lambda slot: reply(tree, cohort, slot, key), jnp.arange(ids.size)
    try:  # JAX proves that the reply is the same for everybody: then the server knows it too
        with prove_common():
            return jax.tree.leaves(jax.vmap(one, out_axes=None)(slots)), None
    except NotCommonError:
        replies = jax.vmap(one)(slots)
    # Each reply is one client's own: the server's replay must do without it.
    unknown = jax.tree.map(lambda a: jnp.full(a.shape[1:], jnp.nan, a.dtype), replies)
    return jax.tree.leaves(unknown), jax.tree.leaves(replies)


@functools.partial(jax.jit, static_argnames=("gathers",))
def _finish_metrics(
    task: Task, server: Any, client: Any, key: Array, round: ArrayLike, answers: Sequence[Any], gathers: bool
) -> Any:
    return _run_metrics(task, server, client, key, round, 0, answers, gathers)


@functools.partial(jax.jit, static_argnames=("steps",))
def _replay_round(
    algorithm: Algorithm, task: Task, steps: tuple[Step, ...], server: Any, client: Any, call: Call, log: Any
) -> Any:
    """The Shared fields after a round, from the answers alone. XLA drops the gradients: nobody asks for them."""
    state = None if server is None else algorithm.begin(server, client)
    for step, answers in zip(steps, log, strict=True):
        state = _attempt(algorithm, task, step._replace(index=None), step.index, state, call, answers)["done"]
    return algorithm.split(state)[0]


# ------------------------------------------------------------------------------------------------- in one process


class Deployment(NamedTuple):
    """Where a deployment in one process ended."""

    server: Any
    clients: Any
    noted: dict[str, np.ndarray]  # [rounds, (sum, number of notes)] by name, of those who took part


def choose_members(
    inputs: Any, server: Any, round: int, chances: Array, plan: Any
) -> tuple[dict[int, Member], Expected | None]:
    """Who is asked in a round, as `simulate` would ask them."""
    participants, call = call_up(inputs, server, jnp.asarray(round), chances, plan)
    columns = zip(*(np.asarray(a) for a in (participants.id, participants.weight, participants.chance)), strict=True)
    return {int(i): Member(float(weight), float(chance)) for i, weight, chance in columns if weight > 0}, call.expected


def deploy(
    algorithm: Algorithm, task: Task, seed: Seed = 0, options: Options | None = None, **changes: Unpack[Changes]
) -> Deployment:
    """All nodes and the server in this process; server and clients as `simulate` has them.

    Of the options, those of a round matter: rounds, cohort, sampling, dropout, uploads, noise_seed.
    """
    chosen = make_options(options, changes)
    plan, inputs = make_plan(algorithm, task, chosen), make_inputs(algorithm, task, seed, chosen)
    ids, weight_of = np.asarray(task.data.ids).tolist(), np.asarray(task.weights).tolist()
    nodes = {
        client: Node(
            algorithm,
            select_client(task, p),
            seed,
            uploads=chosen.uploads,
            secret=secrets.token_bytes(32),
            noise_seed=chosen.noise_seed,
            noting=True,
        )
        for p, client in enumerate(ids)
    }
    send = lambda tickets: ((client, nodes[client].receive(ticket)) for client, ticket in tickets.items())
    central = Server(algorithm, task, seed, uploads=chosen.uploads, noise_seed=chosen.noise_seed, noting=True)
    everybody = {i: Member(weight) for i, weight in zip(ids, weight_of, strict=True)}
    position = central.serve(START, None, everybody, send)
    chances = find_chances(task.weights, plan.cohort)
    noted: list[Notes] = [{} for _ in range(chosen.need_rounds())]
    for round in range(chosen.need_rounds()):
        members, expected = choose_members(inputs, position.server, round, chances, plan)
        position = central.serve(round, position, members, send, expected)
    for client, node in nodes.items():
        node.finish(position.standing[client])
        for round, notes in node.take_notes().items():
            noted[round] = add_notes(noted[round], notes)
    clients = jax.tree.map(lambda *a: jnp.stack(a), *(nodes[client].client() for client in ids))
    names = sorted({name for notes in noted for name in notes})
    kept = {name: np.stack([np.asarray(notes.get(name, np.zeros(2))) for notes in noted]) for name in names}
    return Deployment(position.server, clients, kept)


def select_client(task: Task, position: int) -> Task:
    """The task of one client, as its node needs it."""
    own = None if task.local_steps is None else np.asarray(task.local_steps)[position : position + 1]
    return dataclasses.replace(task, data=task.data.only(position), weights=np.ones(1), local_steps=own)
