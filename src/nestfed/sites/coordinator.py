"""The coordinator of a run between sites: rounds over a link, whoever is lost, and a file from which it goes on.

It has no rows. A site that does not answer, or not with what was asked for, is left out; the round is repeated without
it, so that the numbers are those of a simulation in which it dropped out. It is asked again once a cheap hello
succeeds. Where the repetition of a round would give something away (noise, masks), the round does not count instead.
"""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.engine.cohorts import find_chances
from nestfed.engine.options import Options
from nestfed.engine.planning import make_inputs, make_plan
from nestfed.sites.link import Link, LostSite
from nestfed.sites.masks import FEWEST
from nestfed.sites.wire import VERSION, Letter, WireError, pack, unpack
from nestfed.sites.worker import Leg, describe_party, keep_file, write_ticket
from nestfed.uploads.privacy import EPSILON, Spending, list_transforms
from nestfed.verbs import cost
from nestfed.verbs.history import History, check_select, find_rise
from nestfed.verbs.messages import (
    START,
    Answer,
    Lost,
    LostClients,
    Member,
    Position,
    Send,
    Server,
    Standing,
    Sums,
    Ticket,
    choose_members,
    read_leaves,
)
from nestfed.verbs.progress import Progress

ANSWER = 600.0  # seconds in which a site must answer; the first answer to a question compiles
AGAIN = 60.0  # seconds for a question that all who are asked have answered before, at the least
SLACK = 10  # ... and so many times the longest answer so far
HELLO = 5.0  # seconds for a hello
PATIENCE = 120.0  # seconds to wait for sites that must be there
EASE = 10  # a lost site is asked again after so many times the time that the last hello took


class Unanswered(UserError):
    """Sites that must be there are not."""


@dataclasses.dataclass
class _Absence:
    """A site that is lost, and when it is asked again."""

    reason: str
    next: float
    said: bool = True  # was a person told?


class Roll:
    """The sites of a run by number, over a link: who is there, and what they answer."""

    def __init__(
        self,
        link: Link,
        names: Sequence[str],
        *,
        answer: float = ANSWER,
        hello: float = HELLO,
        patience: float = PATIENCE,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.link, self.names, self.say = link, list(names), say
        self.answer, self.hello, self.patience = answer, hello, patience
        self.absent: dict[int, _Absence] = {}
        self.sent = self.received = 0  # bytes

    @property
    def present(self) -> list[int]:
        return [k for k in range(len(self.names)) if k not in self.absent]

    def ask(self, letters: Mapping[int, Letter], timeout: float) -> Iterator[tuple[int, Letter | Lost]]:
        """Answers as they come, each site's once."""
        packed = {self.names[k]: pack(letter) for k, letter in letters.items()}
        self.sent += sum(map(len, packed.values()))
        for name, answer in self.link.ask(packed, timeout):
            if isinstance(answer, LostSite):
                yield self.names.index(name), Lost(answer.reason)
                continue
            self.received += len(answer)
            yield self.names.index(name), _read_answer(answer)

    def lose(self, reasons: Mapping[int, str]) -> None:
        for k, reason in reasons.items():
            if k not in self.absent:
                self.say(f"{self.names[k]} is left out: {reason}")
            self.absent[k] = _Absence(reason, time.monotonic())

    def find_back(self, open_again: Callable[[Sequence[int]], Mapping[int, str]], at_once: bool = False) -> None:
        """Take in again those that answer a hello and can be opened; the others are asked later."""
        due = [k for k, absence in self.absent.items() if at_once or absence.next <= time.monotonic()]
        if not due:
            return
        began = time.monotonic()
        wrong, heard = dict[int, str](), set[int]()
        for k, answer in self.ask({k: Letter({"kind": "hello"}) for k in due}, self.hello):
            if isinstance(answer, Letter):
                heard.add(k)
            reason = answer.reason if isinstance(answer, Lost) else _find_difference(answer.header)
            if reason is not None:
                wrong[k] = reason
        there = [k for k in due if k not in wrong]
        wrong |= open_again(there) if there else {}
        took = time.monotonic() - began
        for k in due:
            if k in wrong:
                if k in heard and wrong[k] != self.absent[k].reason:
                    self.say(f"{self.names[k]} cannot take part: {wrong[k]}")
                self.absent[k] = dataclasses.replace(
                    self.absent[k], reason=wrong[k], next=time.monotonic() + EASE * took
                )
            elif self.absent.pop(k).said:
                self.say(f"{self.names[k]} is there again")

    def forget(self) -> None:
        """Nobody has been asked yet in this part of the run."""
        for k in self.present:
            self.absent[k] = _Absence("it has not answered yet", 0.0, said=False)

    def gather(self, open_again: Callable[[Sequence[int]], Mapping[int, str]], needed: Callable[[], bool]) -> None:
        """Wait until those are there who are needed; Unanswered after `patience` seconds."""
        deadline = time.monotonic() + self.patience
        while not needed():
            self.find_back(open_again, at_once=True)
            if needed():
                return
            if time.monotonic() > deadline:
                raise Unanswered(f"not everybody who is needed is there: {self.describe_absent()}.")
            time.sleep(min(1.0, self.hello))

    def describe_absent(self) -> str:
        said = (f"{self.names[k]} ({absence.reason.rstrip('.')})" for k, absence in sorted(self.absent.items()))
        return ", ".join(said)


def _read_answer(data: bytes) -> Letter | Lost:
    try:
        letter = unpack(data)
    except WireError as error:
        return Lost(str(error))
    refused = letter.header.get("refused")
    return letter if refused is None else Lost(str(refused))


def _find_difference(header: Mapping[str, Any]) -> str | None:
    here = {"wire": VERSION, "nestfed": version("nestfed"), "precision": str(jax.numpy.result_type(float))}
    words = {"wire": "letters of version", "nestfed": "nestfed", "precision": "numbers of the type"}
    for name, mine in here.items():
        if header.get(name) != mine:
            return f"it has {words[name]} {header.get(name)}, and the coordinator {mine}; install and set the same"
    return None


# ------------------------------------------------------------------------------------------------- before a run


@dataclasses.dataclass(frozen=True)
class Run:
    """What all letters of a seed's run have in common."""

    id: str
    settings: Mapping[str, Any]
    schema: str | None
    seed: int
    names: tuple[str, ...]  # of the sites, by their numbers
    masked: bool = False

    def header(self, k: int) -> dict[str, Any]:
        return {
            "run": self.id,
            "settings": dict(self.settings),
            "schema": self.schema,
            "number": k,
            "names": list(self.names),
            "seed": self.seed,
            "masked": self.masked,
        }


def add_up(roll: Roll, run: Run, exchanges: int) -> list[np.ndarray]:
    """The sums of all sites that a task is made of; every site must tell its part."""
    sums: list[np.ndarray] = []
    for _ in range(exchanges):
        told: dict[int, np.ndarray] = {}
        attempt = secrets.randbits(62)

        def ask(who: Iterable[int], told: dict[int, np.ndarray] = told) -> dict[int, str]:
            wrong = {}
            head = {"kind": "tell", "attempt": attempt}
            letters = {k: Letter({**head, **run.header(k)}, sums) for k in who if k not in told}
            for k, answer in roll.ask(letters, roll.answer):
                if isinstance(answer, Lost):
                    wrong[k] = answer.reason
                elif len(answer.arrays) != 1 or answer.arrays[0].dtype != np.uint64:
                    wrong[k] = "it told something else than a sum"
                else:
                    told[k] = np.array(answer.arrays[0])
            return wrong

        roll.forget()
        roll.gather(ask, lambda told=told: len(told) == len(run.names))
        if len({part.shape for part in told.values()}) > 1:
            raise UserError("the sites' sums have different lengths: they have different schemas.")
        sums.append(functools.reduce(np.add, told.values()))
    return sums


# ------------------------------------------------------------------------------------------------- rounds


@dataclasses.dataclass
class _Books:
    """What the coordinator must not lose of a leg."""

    round: int
    position: Position
    history: History
    output: Any  # of the rule "average" or "best": the state so far
    score: float


@dataclasses.dataclass(frozen=True)
class LegResult:
    """What a leg leaves."""

    position: Position
    output: Any
    history: dict[str, np.ndarray]
    participants: np.ndarray
    final: dict[str, np.ndarray]  # the metrics of the output
    remarks: tuple[str, ...]
    spending: Spending | None


class Coordinator:
    """One leg of a run: an algorithm on a task, with the sites of a roll."""

    def __init__(
        self,
        roll: Roll,
        run: Run,
        leg: Leg,
        algorithm: Algorithm,
        task: Task,
        options: Options,
        *,
        file: Path,
        sums: Sequence[np.ndarray] = (),
        earlier: Sequence[np.ndarray] = (),
        masks: Sums | None = None,
    ):
        self.roll, self.run, self.leg, self.options, self.file = roll, run, leg, options, file
        self.algorithm, self.sums, self.earlier = algorithm, list(sums), list(earlier)
        noise = options.noise_seed
        self.server = Server(
            algorithm, task, leg["seed"], uploads=options.uploads, noise_seed=noise, sums=masks, gathers=False
        )
        task = self.server.task
        self.task, self.inputs = task, make_inputs(algorithm, task, leg["seed"], options)
        self.plan = make_plan(algorithm, task, options)
        self.chances = find_chances(task.weights, self.plan.cohort)
        self.party = describe_party(algorithm, task)
        ids, weights = np.asarray(task.data.ids).tolist(), np.asarray(task.weights).tolist()
        # A site that weighs nothing takes part in nothing.
        self.weights: dict[int, float] = {k: weight for k, weight in zip(ids, weights, strict=True) if weight > 0}
        self.spending = cost.find_spending(algorithm, task, options)
        if options.output == "random":
            raise UserError("output='random' was given; a run of sites knows 'last', 'average' and 'best'.")
        self._answered: set[tuple[int, str, bool, int]] = set()  # questions, by site: it has compiled them
        self._longest = 0.0  # seconds
        if masks is not None:
            self.server.check_masked(len(roll.names))
            if len(self.weights) < FEWEST:
                raise UserError(
                    f"{len(self.weights)} of the sites weigh something in {leg['method']}, and a sum of so few gives "
                    f"them away to each other: secure aggregation takes {FEWEST}."
                )
        self.fewest = 1 if masks is None else FEWEST  # sites that a sum takes
        # A second sum over fewer sites, or a second answer with noise, would tell what the first one hides.
        self.once = masks is not None or any(transform.noisy for transform in list_transforms(options.uploads))

    # --- letters

    def open_at(self, who: Sequence[int]) -> dict[int, str]:
        """Sites that cannot take part in this leg, and why."""
        wrong: dict[int, str] = {}
        self._answered -= {question for question in self._answered if question[0] in who}
        head = {"kind": "open", "leg": self.leg, "sums": len(self.sums)}
        letters = {k: Letter({**self.run.header(k), **head}, [*self.sums, *self.earlier]) for k in who}
        for k, answer in self.roll.ask(letters, self.roll.answer):
            if isinstance(answer, Lost):
                wrong[k] = answer.reason
                continue
            theirs = answer.header.get("party", {})
            for name, mine in self.party.items():
                if theirs.get(name) != mine:
                    wrong[k] = f"its {name} is {theirs.get(name)!r}, and the coordinator's {mine!r}"
                    break
        return wrong

    def _deliver(self, kind: str) -> Send:
        def send(tickets: Mapping[int, Ticket]) -> Iterator[tuple[int, Answer]]:
            letters, began = {}, time.monotonic()
            known = {k: (k, kind, ticket.round == START, ticket.exchange) for k, ticket in tickets.items()}
            timeout = self.roll.answer
            if self._answered.issuperset(known.values()):
                timeout = min(timeout, max(AGAIN, SLACK * self._longest))
            for k, ticket in tickets.items():
                shared = None if ticket.server is None else [np.asarray(a) for a in jax.tree.leaves(ticket.server)]
                head, arrays = write_ticket(ticket, shared)
                letters[k] = Letter({"kind": kind, "run": self.run.id, "leg": self.leg.name, **head}, arrays)
            for k, answer in self.roll.ask(letters, timeout):
                if isinstance(answer, Lost):
                    yield k, answer
                else:
                    if known[k] in self._answered:  # the first answer compiled
                        self._longest = max(self._longest, time.monotonic() - began)
                    self._answered.add(known[k])
                    yield k, list(answer.arrays) if answer.header.get("asks") else None

        return send

    # --- a leg

    def train(self, progress: bool | None = None, title: str = "") -> LegResult:
        """From the file, or from the start, to the end."""
        self.roll.forget()
        rounds = self.options.need_rounds()
        end = rounds if self.spending is None else self.spending.rounds_within(rounds)
        books = self._read_books()
        if books is None:
            books = self._start()
        else:
            with contextlib.suppress(Unanswered):  # all are waited for once: who is only slow to start misses no round
                self.roll.gather(self.open_at, lambda: not self.roll.absent)
            self.roll.gather(self.open_at, lambda: len(self.roll.present) >= self.fewest)
        self._evaluate_if_due(books)
        check_select(self.options.select, books.history.find_latest())
        with Progress(title or type(self.algorithm).__name__, rounds, books.round, progress) as bar:
            while books.round < end:
                began = time.monotonic()
                self._do_round(books)
                self._write_books(books)
                self._evaluate_if_due(books)
                bar.update(books.round, 1 / max(time.monotonic() - began, 1e-9), books.history.find_latest())
        if not books.history.has(books.round):
            self._evaluate(books)
            self._write_books(books)
        return self._finish(books)

    def _start(self) -> _Books:
        """The start needs everybody."""
        everybody = {k: Member(weight) for k, weight in self.weights.items()}
        all_there = lambda: not self.roll.absent
        deadline = time.monotonic() + self.roll.patience
        while True:
            self.roll.gather(self.open_at, all_there)
            try:
                position = self.server.serve(START, None, everybody, self._deliver("ticket"))
                break
            except LostClients as error:
                self.roll.lose(error.reasons)
                if time.monotonic() > deadline:
                    raise Unanswered(str(error)) from None
        books = _Books(0, position, History(), None, np.inf)
        self._write_books(books)
        return books

    def _do_round(self, books: _Books) -> None:
        self.roll.find_back(self.open_at)
        members, expected = {k: Member(weight) for k, weight in self.weights.items()}, None
        if self.plan.cohort is not None or self.plan.dropout:
            members, expected = choose_members(self.inputs, books.position.server, books.round, self.chances, self.plan)
        if len(members) < self.fewest:  # a cohort whose sum would tell of single sites is not asked
            members = {}
        taken: dict[int, Member] = {}
        while members:
            taken = {k: member for k, member in members.items() if k not in self.roll.absent}
            if len(taken) < self.fewest:
                self.roll.gather(self.open_at, lambda: len(set(members) & set(self.roll.present)) >= self.fewest)
                continue
            try:
                books.position = self.server.serve(
                    books.round, books.position, taken, self._deliver("ticket"), expected
                )
                break
            except LostClients as error:
                self._check_divergence(books.round, error, taken)
                self.roll.lose(error.reasons)
                if self.once:
                    taken = {}
                    break
        if not members and expected is not None:
            books.position = self.server.serve(books.round, books.position, {}, self._deliver("ticket"), expected)
        books.round += 1
        row = {"participants": np.asarray([len(taken)], np.int32), "notes": {}, "metrics": {}}
        books.history.extend(row, books.round - 1, 1, None)
        self._choose_output(books)

    def _check_divergence(self, round: int, error: LostClients, taken: Mapping[int, Member]) -> None:
        if set(error.reasons) == set(taken) and all("not finite" in reason for reason in error.reasons.values()):
            raise UserError(
                f"{type(self.algorithm).__name__} diverged in round {round}: no site's numbers are finite any more; "
                f"use a smaller step size. {self.file} holds the state before that round."
            )

    def _evaluate_if_due(self, books: _Books) -> None:
        every = self.options.evaluate_every
        if not books.history.has(books.round) and (books.round == 0 or (every and books.round % every == 0)):
            self._evaluate(books)
            self._write_books(books)

    def _evaluate(self, books: _Books) -> None:
        values = self._measure(books.round, books.position)
        epsilon = {} if self.spending is None else {EPSILON: self.spending.epsilon(books.round)}
        books.history.add(books.round, values | epsilon)
        if self.options.output == "best" and books.round:
            score = float(values[self.options.select or ""])
            if score < books.score:
                books.score, books.output = score, books.position.server

    def _measure(self, round: int, position: Position) -> dict[str, np.ndarray]:
        """Metrics of a state, over the sites that are there."""
        while True:
            there = {k: self.weights[k] for k in self.roll.present if k in self.weights}
            if len(there) < self.fewest:
                self.roll.gather(self.open_at, lambda: len(self.roll.present) >= self.fewest)
                continue
            try:
                return self.server.evaluate(round, position, there, self._deliver("metrics"))
            except LostClients as error:
                self.roll.lose(error.reasons)

    def _choose_output(self, books: _Books) -> None:
        if self.options.output != "average":
            return
        done, old, new = books.round, books.output, books.position.server
        moving = lambda a, b: a + (b - a) / done if np.issubdtype(np.asarray(b).dtype, np.floating) else b
        books.output = new if old is None else jax.tree.map(lambda a, b: np.asarray(moving(a, b), b.dtype), old, new)

    def _finish(self, books: _Books) -> LegResult:
        output = books.position.server if books.output is None else books.output
        history = books.history.evaluations()
        if self.options.output == "last":
            final = {name: values[-1] for name, values in history.items() if name != "round"}
        else:
            final = self._measure(books.round, books.position._replace(server=output))
        rise = find_rise(history, self.task.minimised, self.options.output)
        remarks = () if rise is None else (rise.remark,)
        participants = books.history.participants()
        return LegResult(books.position, output, history, participants, final, remarks, self.spending)

    # --- the file

    def _write_books(self, books: _Books) -> None:
        """After every round, before the next: sites go back one round only."""
        standing = books.position.standing
        own = [np.asarray(a) for a in jax.tree.leaves(books.position.server)]
        chosen = [np.asarray(a) for a in jax.tree.leaves(books.output)]
        answers = [a for _, one in sorted(standing.items()) for a in one.answer or []]
        history = {name: np.asarray(column) for name, column in books.history.list_arrays().items()}
        header = {
            "run": self.run.id,
            "leg": self.leg,
            "round": books.round,
            "score": books.score if np.isfinite(books.score) else None,
            "output": books.output is not None,
            "standing": [
                [k, one.round, one.attempt, None if one.answer is None else len(one.answer)]
                for k, one in sorted(standing.items())
            ],
            "history": list(history),
        }
        keep_file(self.file, pack(Letter(header, [*own, *chosen, *answers, *history.values()])))

    def _read_books(self) -> _Books | None:
        if not self.file.exists():
            return None
        try:
            header, arrays = unpack(self.file.read_bytes())
        except WireError as error:
            raise UserError(
                f"{self.file} is no whole checkpoint of this run ({error}) It was left as it is; move it away to start "
                "this part of the run anew."
            ) from None
        if header["leg"] != self.leg or header["run"] != self.run.id:
            raise UserError(f"{self.file} belongs to another run; it was left as it is. Give another folder (--out).")
        rest, like = list(arrays), self.server.shapes()
        take = lambda number: [rest.pop(0) for _ in range(number)]
        read = lambda: jax.tree.map(jax.numpy.asarray, read_leaves(like, take(len(jax.tree.leaves(like)))))
        server = read()
        output = read() if header["output"] else None
        standing = {
            k: Standing(round, attempt, None if number is None else take(number))
            for k, round, attempt, number in header["standing"]
        }
        history = History.restore(dict(zip(header["history"], rest, strict=True)))
        score = np.inf if header["score"] is None else float(header["score"])
        return _Books(int(header["round"]), Position(server, standing), history, output, score)


def read_run_id(folder: Path) -> str:
    """The id of the run in this folder, drawn once: sites keep their state under it."""
    path = folder / "run.id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        keep_file(path, secrets.token_hex(8).encode())
    return path.read_text(encoding="ascii")
