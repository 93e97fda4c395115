"""Simulation: whole runs on one machine.

start, advance      the bare state machine: a `Run`, and one program that carries it over some rounds
simulate            one run to its end: progress, checkpoints, divergence, history
sweep (sweep.py)    many settings x many seeds side by side in one program
"""

import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.noise import noise_key
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.engine import cohorts
from nestfed.engine import rounds as engine
from nestfed.engine.cohorts import chances_of
from nestfed.engine.options import as_key, check_positive, check_select, make_plan
from nestfed.engine.rounds import Plan, Run, begin_all, call_up, collective, finite
from nestfed.engine.steps import Exchange, Step, seated, take_step
from nestfed.uploads import privacy
from nestfed.uploads.privacy import Spending, Uploads
from nestfed.uploads.transforms import Transform, columns
from nestfed.verbs import checkpoints, cost
from nestfed.verbs.history import History, rise_of
from nestfed.verbs.progress import Progress


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves: the state, the history of metrics, who took part, and the output rule's choice."""

    algorithm: Algorithm
    task: Task
    run: Run
    history: dict[str, np.ndarray]  # "round" and the metrics, one entry per evaluation; round 0 is the start
    participants: np.ndarray  # clients that took part, one entry per round
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know
    spending: Spending | None = None  # of privacy, where `uploads` has a guarantee

    @property
    def spent(self) -> tuple[tuple[Spending, int], ...]:
        """What has been spent of privacy on these data, for the `earlier` of a guarantee."""
        if self.spending is None:
            return ()
        return (*self.spending.guarantee.earlier, (self.spending, self.rounds_spent))

    @property
    def rounds_spent(self) -> int:
        """Rounds in which clients have answered: one that diverged has no result, but it was one."""
        return int(self.run.round) + (int(self.run.diverged) >= 0)

    @property
    def server(self) -> Any:
        return self.run.server

    @property
    def clients(self) -> Any:
        return self.run.clients

    @property
    def output(self) -> Any:
        """The server state chosen by the output rule."""
        return self.run.server if self.run.output is None else self.run.output.server

    def params(self, variable: str = "x") -> PyTree:
        """A shared variable of the output, as the user's own parameter tree."""
        names = self.task.problem.variables
        if variable not in names or getattr(self.output, variable, None) is None:
            raise UserError(f"{type(self.algorithm).__name__} keeps no {variable!r} on the server.")
        return self.task.problem.tree(names.index(variable), getattr(self.output, variable))


class Diverged(RuntimeError):
    """A value became non-finite. `result` holds the last finite state and the history up to it."""

    def __init__(self, message: str, result: Result, *, round: int, field: str, client: int | None):
        super().__init__(message)
        self.result, self.round, self.field, self.client = result, round, field, client


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: `result` holds the run as far as it came; a checkpoint was written if a path was given."""

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result


def start(algorithm: Algorithm, task: Task, seed: Any = 0, *, noise_seed: int | None = None, **options: Any) -> Run:
    """The run before its first round. Options are those of `simulate` that shape the state."""
    plan, _ = make_plan(algorithm, task, **options)
    uploads = privacy.transforms_of(options.get("uploads", ()))
    key = as_key(seed)
    return engine.start(algorithm, task, key, plan, uploads, noise_key(noise_seed, key))


def advance(
    algorithm: Algorithm,
    task: Task,
    seed: Any,
    run: Run,
    *,
    rounds: int,
    dropout: float = 0.0,
    noise_seed: int | None = None,
    **options: Any,
) -> tuple[Run, dict[str, np.ndarray]]:
    """Carry a run over some rounds: (run, history of these rounds). Cutting a run into pieces changes no number (but
    noise of uploads, unless it has a noise_seed).

    A run that diverges stops there: `run.diverged` is then the round, and the state is the last finite one.
    """
    plan, rate = make_plan(algorithm, task, dropout=dropout, **options)
    check_positive("rounds", rounds)
    uploads = privacy.transforms_of(options.get("uploads", ()))
    key, history, end = as_key(seed), History(), int(run.round) + rounds
    noise = noise_key(noise_seed, key)
    while int(run.round) < end and int(run.diverged) < 0:
        first = int(run.round)
        length = min(end - first, engine.CAPACITY)
        run, rows = engine.advance(algorithm, task, key, run, first, length, rate, plan, uploads, noise)
        history.extend(rows, first, int(run.round) - first, plan.evaluate_every)
    return run, history.arrays()


def evaluate(algorithm: Algorithm, task: Task, run: Run, seed: Any = 0, **options: Any) -> dict[str, np.ndarray]:
    """The metrics of a run as it is now."""
    plan, _ = make_plan(algorithm, task, **options)
    return {name: np.asarray(v) for name, v in engine.evaluate(algorithm, task, as_key(seed), run, plan).items()}


def simulate(
    algorithm: Algorithm,
    task: Task,
    seed: Any = 0,
    *,
    rounds: int,
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
    noise_seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool | None = None,
    title: str | None = None,
) -> Result:
    """Run an algorithm on a task.

    seed              a whole number, or a JAX key
    cohort            clients per round: a number, a fraction (0.1), or None for all
    sampling          how they are drawn: "weights" (a client's chance goes with its weight, so that the stated problem
                      is solved), "uniform" (all alike; with unequal weights that is another problem), or "poisson"
                      (each by a coin of its own: `cohort` is the expected number). See `nestfed.cohorts`
    dropout           probability that a chosen client fails to take part in a round
    evaluate_every    rounds between two evaluations, or None; the start and the end are always evaluated
    metrics           more metrics: a client program (task, server, client, data, fed) -> dict (see `diagnostics`)
    output            which iterate `Result.output` is: "last", "average", "random", or "best" by the metric `select`
                      (smallest value; use one computed on validation data)
    unsynced          keep each client's state before the last step of its round, for diagnostics of client drift
    client_axis       "vmap" (clients side by side), "map" (client after client, `client_chunk` at a time), or "auto"
    uploads           what happens to uploads on their way (`privacy`): transforms, or a guarantee such as LocalDP.
                      With noise the history has `signal_to_noise` (norm of the mean of the uploads / norm of the noise
                      in it), with a clip `clipped_uploads`, with a guarantee `epsilon`; a run ends before a round that
                      would exceed the guarantee's budget, and says so in `Result.notes`
    noise_seed        None: noise comes from the operating system's entropy, and no two runs share it. A whole number
                      makes it repeatable, for tests: it then protects nobody, and the result says so
    checkpoint        a file that holds the run from time to time (or every `checkpoint_every` rounds), at the end, and
                      when the run is interrupted or diverges; `resume=True` goes on from it, bit for bit
    progress          show a progress bar; None: if standard error is a terminal; `title` stands beside it

    Raises Diverged when a value becomes non-finite, with the last finite state.
    """
    plan, rate = make_plan(
        algorithm,
        task,
        cohort=cohort,
        sampling=sampling,
        dropout=dropout,
        evaluate_every=evaluate_every,
        metrics=metrics,
        output=output,
        select=select,
        unsynced=unsynced,
        client_axis=client_axis,
        client_chunk=client_chunk,
        uploads=uploads,
    )
    check_positive("rounds", rounds)
    key, repeatable = as_key(seed), noise_seed is not None
    spending = cost.spending(algorithm, task, uploads, cohort=plan.cohort, repeatable=repeatable)
    if checkpoint_every is not None:
        check_positive("checkpoint_every", checkpoint_every)
        if checkpoint is None:
            raise UserError("checkpoint_every was given without checkpoint; give the path of a file.")
    # On the device once: NumPy arrays would be copied there for every piece of the run.
    task = jax.device_put(task)
    work = _Work(
        algorithm,
        task,
        key,
        plan,
        rate,
        None if checkpoint is None else Path(checkpoint),
        privacy.transforms_of(uploads),
        noise_key(noise_seed, key),
        repeatable,
        spending,
        rounds,
    )
    with _Interrupts() as interrupts:
        work.begin(resume=resume, dropout=dropout)
        with Progress(title or type(algorithm).__name__, rounds, work.done, progress) as bar:
            work.go_on(checkpoint_every, bar, interrupts)
    return work.result()


class _Work:
    """A run on its way: its state and history, and the file that holds them from time to time."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        key: Array,
        plan: Plan,
        dropout: Array,
        path: Path | None,
        uploads: tuple[Transform, ...],
        noise: Array,
        repeatable: bool,
        spending: Spending | None,
        rounds: int,
    ):
        self.algorithm, self.task, self.key, self.plan, self.dropout, self.path = (
            algorithm,
            task,
            key,
            plan,
            dropout,
            path,
        )
        self.uploads, self.noise, self.repeatable = uploads, noise, repeatable and any(t.noisy for t in uploads)
        self.spending, self.rounds = spending, rounds
        self.end = rounds if spending is None else spending.rounds_within(rounds)
        self.recorded = dict.fromkeys(columns(uploads), np.nan)  # about the uploads of the last round
        self.identity: dict[str, str] = {}
        self.run: Run
        self.history = History()

    @property
    def done(self) -> int:
        return int(self.run.round)

    def spent(self, round: int) -> dict[str, float]:
        """Of privacy, up to a round."""
        return {} if self.spending is None else {privacy.EPSILON: self.spending.epsilon(round)}

    def begin(self, *, resume: bool, dropout: float) -> None:
        """From the checkpoint, or from the start."""
        rounds = self.rounds
        inputs, plan = (self.algorithm, self.task, self.key), self.plan
        if self.path:
            shaping = {
                name: getattr(plan, name) for name in ("cohort", "evaluate_every", "output", "select", "unsynced")
            }
            shaping |= {"uploads": self.uploads} if self.uploads else {}
            self.identity = checkpoints.identity(*inputs, metrics=plan.metrics, dropout=dropout, **shaping)
            if self.path.exists() and not resume:
                raise checkpoints.CheckpointError(
                    f"{self.path} exists. Give resume=True to go on from it, or another path; it was left as it is."
                )
        if self.path and self.path.exists():
            like = jax.eval_shape(lambda: engine.start(*inputs, plan, self.uploads, self.noise))
            self.run, log = checkpoints.load(self.path, self.identity, like)
            self.history = History.restored(log)
            if self.done > rounds:
                raise checkpoints.CheckpointError(
                    f"{self.path} has done {self.done} rounds already, more than rounds={rounds}; it was left as it is."
                )
        else:
            self.run = engine.start(*inputs, plan, self.uploads, self.noise)
            self.check_divergence()
            self.history.add(0, engine.evaluate(*inputs, self.run, plan) | self.recorded | self.spent(0))
        check_select(plan.select, self.history.latest())

    def go_on(self, checkpoint_every: int | None, bar: Progress, interrupts: "_Interrupts") -> None:
        """In pieces to the end, or to where the privacy budget is spent. A piece takes about half a second: a lively
        bar, and a prompt Ctrl-C."""
        rounds = self.end
        piece, saved_at = 1, time.monotonic()
        while self.done < rounds:
            first = self.done
            length = min(piece, engine.CAPACITY, rounds - first)
            if checkpoint_every:
                length = min(length, checkpoint_every - first % checkpoint_every)
            began = time.monotonic()
            self.run, rows = jax.block_until_ready(
                engine.advance(
                    self.algorithm, self.task, self.key, self.run, first, length, self.dropout, self.plan, self.uploads,
                    self.noise,
                )
            )  # fmt: skip
            speed = length / max(time.monotonic() - began, 1e-9)
            piece = max(1, min(4 * piece, int(speed * 0.5)))
            self.history.extend(rows, first, self.done - first, self.plan.evaluate_every, self.spent)
            self.check_divergence()
            self.recorded = {name: np.asarray(rows[name])[length - 1] for name in self.recorded}
            bar.update(self.done, speed, self.history.latest() | self.spent(self.done))
            due = self.done % checkpoint_every == 0 if checkpoint_every else time.monotonic() - saved_at > 30
            if interrupts.pending:
                self.save()
                kept = f" {self.path} holds it: go on with resume=True." if self.path else ""
                raise Interrupted(f"interrupted after round {self.done} of {rounds}.{kept}", self.result())
            if due and self.done < rounds:
                self.save()
                saved_at = time.monotonic()
        if not self.history.has(self.done):
            values = engine.evaluate(self.algorithm, self.task, self.key, self.run, self.plan)
            self.history.add(self.done, values | self.recorded | self.spent(self.done))
        self.save()

    def check_divergence(self) -> None:
        if int(self.run.diverged) >= 0:
            if self.done:
                self.save()
            message, round, field, client = _diagnosis(
                self.algorithm, self.task, self.key, self.run, self.dropout, self.plan, self.uploads, self.noise
            )
            kept = f" The last finite state is in {self.path}." if self.path and self.done else ""
            raise Diverged(message + kept, self.result(), round=round, field=field, client=client)

    def save(self) -> None:
        if self.path:
            checkpoints.save(self.path, self.identity, self.run, self.history.arrays())

    def result(self) -> Result:
        history = self.history.evaluations()
        few = self.plan.cohort is not None or self.plan.dropout
        notes = cohorts.remarks(np.asarray(self.task.weights), self.plan.cohort, self.plan.dropout)
        if few and self.algorithm.few_clients is not None:
            notes += (f"only some clients take part in a round, and {self.algorithm.few_clients}",)
        notes += privacy.remarks(history, self.spending, self.rounds)
        rise = rise_of(history, self.task.minimised, self.plan.output)
        notes += () if rise is None else (rise.remark,)
        if self.repeatable:
            notes += ("the noise was drawn from noise_seed, which is for tests: it protects nobody.",)
        participants = self.history.participants()
        return Result(self.algorithm, self.task, self.run, history, participants, notes, self.spending)


class _Interrupts:
    """Turn Ctrl-C into a flag while a run is going on, so that it stops between two pieces with a valid state."""

    pending = False

    def __enter__(self) -> "_Interrupts":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: Any) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    def __exit__(self, *_: Any) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)


# ------------------------------------------------------------------------------------------------- divergence


def _diagnosis(
    algorithm: Algorithm,
    task: Task,
    key: Array,
    run: Run,
    dropout: Array,
    plan: Plan,
    uploads: tuple[Transform, ...],
    noise: Array,
) -> tuple[str, int, str, int | None]:
    """(message, round, field, client): repeat the failed round step by step from the last finite state, to say what
    went wrong first, and at whom."""
    name, round = type(algorithm).__name__, int(run.diverged)
    if not bool(finite((run.server, run.clients))):
        field = _bad_field(run.server) or _bad_field(run.clients) or "state"
        return f"{name} starts from a non-finite {field}; check the data and the starting point.", 0, field, None

    chances = chances_of(task.weights, plan.cohort)
    seats, call = call_up(task, key, run.server, jnp.asarray(round), chances, dropout, plan, uploads, noise)
    present = np.asarray(seats.weight > 0)
    clients = jax.tree.map(lambda a: a[seats.position], run.clients)
    states = begin_all(algorithm, run.server, clients, seats.slot.size)
    index = 0
    for phase, (_, repeats, sync) in enumerate(algorithm.schedule()):
        watched = jax.jit(functools.partial(_watched_step, algorithm, task, phase, sync, call))
        for _ in range(repeats):
            states, spoke_well = watched(index, states, seats)
            healthy = np.asarray(jax.vmap(finite)(states))
            # Who sent something non-finite, or else, who became non-finite alone.
            guilty = np.flatnonzero(present & ~np.asarray(spoke_well))
            fallen = np.flatnonzero(present & ~healthy)
            if not guilty.size and fallen.size < present.sum():
                guilty = fallen
            if guilty.size or fallen.size:
                slot = int(guilty[0] if guilty.size else fallen[0])
                field = _bad_field(jax.tree.map(lambda a: a[slot], states)) or "what it sends"
                client = int(seats.id[slot]) if guilty.size else None
                who = f", first at client {client}" if client is not None else ""
                message = (
                    f"{name} diverged in round {round}, local step {index}: {field} became non-finite{who}. Use "
                    "a smaller "
                    "step size, or look at that client's data."
                )
                return message, round, field, client
            index += 1
    # Another program adds up in another order: what overflowed by a hair may stay finite here.
    message = (
        f"{name} diverged in round {round}: a value became non-finite. The cause did not show again when the round was "
        "repeated step by step, so it is a matter of rounding; use a smaller step size."
    )
    return message, round, "state", None


def _watched_step(algorithm, task, phase, sync, call, index, states, seats):
    """One step of all clients side by side: (states, did each client send finite values only?)."""

    def one_client(state, seat):
        together, well = collective(seat, call.expected), [jnp.asarray(True)]
        mean = lambda tree, treatment: (well.append(finite(tree)), together.mean(tree, treatment))[1]
        gather = lambda tree, reply, key: (well.append(finite(tree)), together.gather(tree, reply, key))[1]
        step = Step(phase, index, sync)
        state = take_step(algorithm, task, step, state, seated(task, seat, call), call, Exchange(mean, gather))
        return state, jnp.stack(well).all()

    return jax.vmap(one_client, axis_name="clients")(states, seats)


def _bad_field(state: Any) -> str | None:
    """The first field with a non-finite value."""
    fields = zip(state._fields, state, strict=True)
    return next((name for name, value in fields if value is not None and not bool(finite(value))), None)
