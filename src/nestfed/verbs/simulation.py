"""Simulation: whole runs, on all devices of all processes that there are.

start, advance      the bare state machine: a `Run`, and one program that carries it over some rounds
evaluate            the metrics of a run as it is
simulate            one run to its end: progress, checkpoints, divergence, history
"""

import dataclasses
import functools
import signal
import threading
import time
from types import FrameType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree, Seed
from nestfed.engine import cohorts, processes, rounds
from nestfed.engine.cohorts import Participant
from nestfed.engine.devices import find_blocks
from nestfed.engine.options import Changes, Options, make_options
from nestfed.engine.planning import make_inputs, make_plan
from nestfed.engine.rounds import Plan, Run, begin_all, call_up, is_finite, make_collective
from nestfed.engine.steps import Call, Exchange, Inputs, Step, list_steps, make_client, take_step
from nestfed.uploads import privacy
from nestfed.uploads.privacy import Spending
from nestfed.verbs import checkpoints, cost
from nestfed.verbs.history import History, check_select, find_rise
from nestfed.verbs.notebook import show_history
from nestfed.verbs.progress import Progress


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves: the state, the history of metrics, who took part, and the output rule's choice."""

    algorithm: Algorithm
    task: Task
    run: Run
    history: dict[str, np.ndarray]  # "round" and the metrics, one entry per evaluation; round 0 is the start
    participants: np.ndarray  # clients that took part, one entry per round
    noted: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # by name: [rounds, (sum, number of notes)]
    remarks: tuple[str, ...] = ()  # what a reader of the numbers must know
    spending: Spending | None = None  # of privacy, where `uploads` has a guarantee

    def _repr_html_(self) -> str:
        """In a notebook."""
        title = f"{type(self.algorithm).__name__} after {int(self.run.round):,} rounds, {self.task.clients} clients"
        return show_history(title, self.history, self.remarks)

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


def start(
    algorithm: Algorithm, task: Task, seed: Seed = 0, options: Options | None = None, **changes: Unpack[Changes]
) -> Run:
    """The run before its first round."""
    programs = Programs(algorithm, task, seed, make_options(options, changes))
    return programs.collect(programs.start())


def advance(
    algorithm: Algorithm,
    task: Task,
    seed: Seed,
    run: Run,
    options: Options | None = None,
    **changes: Unpack[Changes],
) -> tuple[Run, dict[str, np.ndarray]]:
    """Carry a run over `rounds` more rounds: (run, history of these rounds). Cutting a run into pieces changes no
    number (but noise of uploads, unless it has a noise_seed).

    A run that diverges stops there: `run.diverged` is then the round, and the state is the last finite one.
    """
    chosen = make_options(options, changes)
    programs = Programs(algorithm, task, seed, chosen)
    history, end, run = History(first=int(run.round)), int(run.round) + chosen.need_rounds(), programs.lay(run)
    while int(run.round) < end and int(run.diverged) < 0:
        first = int(run.round)
        run, rows = programs.advance(run, first, min(end - first, rounds.CAPACITY))
        history.extend(rows, first, int(run.round) - first, chosen.evaluate_every)
    return programs.collect(run), history.list_arrays()


def evaluate(
    algorithm: Algorithm,
    task: Task,
    run: Run,
    seed: Seed = 0,
    options: Options | None = None,
    **changes: Unpack[Changes],
) -> dict[str, np.ndarray]:
    """The metrics of a run as it is now."""
    programs = Programs(algorithm, task, seed, make_options(options, changes))
    return {name: np.asarray(v) for name, v in programs.evaluate(programs.lay(run)).items()}


def simulate(
    algorithm: Algorithm, task: Task, seed: Seed = 0, options: Options | None = None, **changes: Unpack[Changes]
) -> Result:
    """Run an algorithm on a task, with the options of `nestfed.Options`; `seed` is a whole number or a JAX key.

    Raises Diverged when a value becomes non-finite, with the last finite state.
    """
    chosen = make_options(options, changes)
    chosen.need_rounds()
    programs = Programs(algorithm, task, seed, chosen)
    processes.check_alike(lambda: checkpoints.describe_run(programs.inputs, chosen), checkpoints.WORDS)
    work = _Work(programs, chosen, cost.find_spending(algorithm, task, chosen))
    with _Interrupts() as interrupts:
        work.begin()
        shown = chosen.progress if processes.is_first() else False
        with Progress(chosen.title or type(algorithm).__name__, work.rounds, work.done, shown) as bar:
            work.go_on(bar, interrupts)
    return work.result()


class Programs:
    """The programs of a run on all devices there are. `inputs` are whole, and so is a run once it is collected; `laid`
    inputs, and the runs that programs take and return, are laid out over the devices."""

    def __init__(self, algorithm: Algorithm, task: Task, seed: Seed, options: Options):
        self.blocks = find_blocks(task)
        self.plan = make_plan(algorithm, task, options, blocks=self.blocks)
        # On the device once: NumPy arrays would be copied there for every piece of the run.
        self.inputs = make_inputs(algorithm, task if self.blocks else jax.device_put(task), seed, options)
        self.laid = self.inputs
        if self.blocks is not None:
            self.laid = self.inputs._replace(task=self.blocks.lay_task(self.inputs.task))

    def start(self) -> Run:
        return rounds.start(self.laid, self.plan)

    def shapes(self) -> Run:
        """Of a run as it is collected."""
        run = jax.eval_shape(self.start)
        if self.blocks is None:
            return run
        return run._replace(clients=self.blocks.shapes(run.clients), unsynced=self.blocks.shapes(run.unsynced))

    def advance(self, run: Run, first: int, length: int) -> tuple[Run, dict[str, Any]]:
        return jax.block_until_ready(rounds.advance(self.laid, run, first, length, self.plan))

    def evaluate(self, run: Run) -> dict[str, Array]:
        return rounds.evaluate(self.laid, run, self.plan)

    def lay(self, run: Run) -> Run:
        if self.blocks is None:
            return run
        return run._replace(clients=self.blocks.lay(run.clients), unsynced=self.blocks.lay(run.unsynced))

    def collect(self, run: Run) -> Run:
        """The run on the host of every process, as one device would have it."""
        if self.blocks is None:
            return run
        clients, unsynced = self.blocks.collect(run.clients), self.blocks.collect(run.unsynced)
        return jax.tree.map(np.asarray, run._replace(clients=clients, unsynced=unsynced))


class _Work:
    """A run on its way: its state and history, and the file that holds them from time to time."""

    run: Run

    def __init__(self, programs: Programs, options: Options, spending: Spending | None):
        self.programs, self.options, self.spending = programs, options, spending
        self.rounds = options.need_rounds()
        self.end = self.rounds if spending is None else spending.rounds_within(self.rounds)
        self.identity: dict[str, str] = {}
        self.history = History()
        self.told = 0  # evaluations, to `watch`

    @property
    def done(self) -> int:
        return int(self.run.round)

    def measure_epsilon(self, round: int) -> dict[str, float]:
        """What is spent of privacy after so many rounds, where anything is."""
        return {} if self.spending is None else {privacy.EPSILON: self.spending.epsilon(round)}

    def begin(self) -> None:
        """From the checkpoint, or from the start."""
        programs, path = self.programs, self.options.file
        exists = path is not None and processes.ask_first(path.exists)
        if path:
            self.identity = checkpoints.identify_run(programs.inputs, self.options)
            if exists and not self.options.resume:
                raise checkpoints.CheckpointError(
                    f"{path} exists. Give resume=True to go on from it, or another path; it was left as it is."
                )
        if path and exists:
            whole, log = checkpoints.load(path, self.identity, programs.shapes())
            self.run = programs.lay(whole)
            self.history = History.restore(log)
            if self.done > self.rounds:
                raise checkpoints.CheckpointError(
                    f"{path} has done {self.done} rounds already, more than rounds={self.rounds}; it was left as it is."
                )
        else:
            self.run = programs.start()
            self.check_divergence()
            self.evaluate_now()
        check_select(self.options.select, self.history.find_latest())
        self.tell()

    def tell(self) -> None:
        """Of the evaluations since the last time, to whoever watches."""
        if self.options.watch is None:
            return
        columns = self.history.evaluations()
        for i in range(self.told, len(columns["round"])):
            metrics = {name: values[i] for name, values in columns.items() if name != "round"}
            self.options.watch(int(columns["round"][i]), metrics)
        self.told = len(columns["round"])

    def evaluate_now(self) -> None:
        self.history.add(self.done, self.programs.evaluate(self.run) | self.measure_epsilon(self.done))

    def go_on(self, bar: Progress, interrupts: "_Interrupts") -> None:
        """In pieces to the end, or to where the privacy budget is spent. A piece takes about half a second: a lively
        bar, and a prompt Ctrl-C."""
        every = self.options.checkpoint_every
        piece, saved_at = 1, time.monotonic()
        while self.done < self.end:
            first = self.done
            length = min(piece, rounds.CAPACITY, self.end - first)
            if every:
                length = min(length, every - first % every)
            began = time.monotonic()
            self.run, rows = self.programs.advance(self.run, first, length)
            speed = length / max(time.monotonic() - began, 1e-9)
            piece = max(1, min(4 * piece, int(speed * 0.5)))
            self.history.extend(rows, first, self.done - first, self.options.evaluate_every, self.measure_epsilon)
            self.tell()
            self.check_divergence()
            bar.update(self.done, speed, self.history.find_latest() | self.measure_epsilon(self.done))
            due = self.done % every == 0 if every else time.monotonic() - saved_at > 30
            # By the first process's clock, and for a signal that any of them got.
            piece, due, stop = processes.decide(piece, due, interrupts.pending)
            if stop:
                self.save()
                path = self.options.file
                kept = f" {path} holds it: go on with resume=True." if path else ""
                raise Interrupted(f"interrupted after round {self.done} of {self.rounds}.{kept}", self.result())
            if due and self.done < self.end:
                self.save()
                saved_at = time.monotonic()
        if not self.history.has(self.done):
            self.evaluate_now()
            self.tell()
        self.save()

    def check_divergence(self) -> None:
        if int(self.run.diverged) >= 0:
            if self.done:
                self.save()
            run = self.programs.collect(self.run)
            message, round, field, client = _find_cause(self.programs.inputs, run, self.programs.plan)
            kept = f" The last finite state is in {self.options.file}." if self.options.file and self.done else ""
            raise Diverged(message + kept, self.result(), round=round, field=field, client=client)

    def save(self) -> None:
        if self.options.file:
            run = self.programs.collect(self.run)
            if processes.is_first():
                checkpoints.save(self.options.file, self.identity, run, self.history.list_arrays())

    def result(self) -> Result:
        history, inputs = self.history.evaluations(), self.programs.inputs
        return Result(
            inputs.algorithm,
            inputs.task,
            self.programs.collect(self.run),
            history,
            self.history.participants(),
            self.history.noted(),
            self.find_remarks(history),
            self.spending,
        )

    def find_remarks(self, history: dict[str, np.ndarray]) -> tuple[str, ...]:
        plan, (algorithm, task, *_) = self.programs.plan, self.programs.inputs
        remarks = list(cohorts.find_remarks(np.asarray(task.weights), plan.cohort, plan.dropout))
        if (plan.cohort is not None or plan.dropout) and algorithm.few_clients is not None:
            remarks.append(f"only some clients take part in a round, and {algorithm.few_clients}")
        remarks += privacy.find_remarks(history, self.spending, self.rounds)
        if self.options.noise_seed is not None and any(t.noisy for t in self.programs.inputs.uploads):
            remarks.append("the noise was drawn from noise_seed, which is for tests: it protects nobody.")
        rise = find_rise(history, task.minimised, plan.output)
        return (*remarks, *(() if rise is None else (rise.remark,)))


class _Interrupts:
    """Turn Ctrl-C into a flag while a run is going on, so that it stops between two pieces with a valid state."""

    pending = False

    def __enter__(self) -> "_Interrupts":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, signal: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)


# ------------------------------------------------------------------------------------------------- divergence


def _find_cause(inputs: Inputs, run: Run, plan: Plan) -> tuple[str, int, str, int | None]:
    """(message, round, field, client): repeat the failed round step by step from the last finite state, to say what
    went wrong first, and at whom."""
    algorithm, task = inputs.algorithm, inputs.task
    name, round = type(algorithm).__name__, int(run.diverged)
    if not bool(is_finite((run.server, run.clients))):
        field = _find_bad_field(run.server) or _find_bad_field(run.clients) or "state"
        return f"{name} starts from a non-finite {field}; check the data and the starting point.", 0, field, None

    chances = cohorts.find_chances(task.weights, plan.cohort)
    participants, call = call_up(inputs, run.server, jnp.asarray(round), chances, plan)
    present = np.asarray(participants.weight > 0)
    clients = jax.tree.map(lambda a: a[participants.position], run.clients)
    states = begin_all(algorithm, run.server, clients, participants.slot.size)
    for step in list_steps(algorithm):
        states, spoke_well = _watch_step(inputs, step._replace(index=None), call, step.index, states, participants)
        healthy = np.asarray(jax.vmap(is_finite)(states))
        # Who sent something non-finite, or else, who became non-finite alone.
        guilty = np.flatnonzero(present & ~np.asarray(spoke_well))
        fallen = np.flatnonzero(present & ~healthy)
        if not guilty.size and fallen.size < present.sum():
            guilty = fallen
        if guilty.size or fallen.size:
            slot = int(guilty[0] if guilty.size else fallen[0])
            field = _find_bad_field(jax.tree.map(lambda a: a[slot], states)) or "what it sends"
            client = int(participants.id[slot]) if guilty.size else None
            who = f", first at client {client}" if client is not None else ""
            message = (
                f"{name} diverged in round {round}, local step {step.index}: {field} became non-finite{who}. Use a "
                "smaller step size, or look at that client's data."
            )
            return message, round, field, client
    # Another program adds up in another order: what overflowed by a hair may stay finite here.
    message = (
        f"{name} diverged in round {round}: a value became non-finite. The cause did not show again when the round was "
        "repeated step by step, so it is a matter of rounding; use a smaller step size."
    )
    return message, round, "state", None


@functools.partial(jax.jit, static_argnames=("step",))
def _watch_step(inputs: Inputs, step: Step, call: Call, index: Any, states: Any, participants: Any) -> tuple[Any, Any]:
    """One step of all clients side by side: (states, did each client send finite values only?)."""

    def one_client(state: Any, place: Participant) -> Any:
        together, well = make_collective(place, call.expected), [jnp.asarray(True)]
        mean = lambda tree, treatment: (well.append(is_finite(tree)), together.mean(tree, treatment))[1]
        gather = lambda tree, reply, key: (well.append(is_finite(tree)), together.gather(tree, reply, key))[1]
        client, exchange = make_client(inputs.task, place, call), Exchange(mean, gather)
        own = step._replace(index=index)
        state, _ = take_step(inputs.algorithm, inputs.task, own, state, client, call, exchange)
        return state, jnp.stack(well).all()

    return jax.vmap(one_client, axis_name="clients")(states, participants)


def _find_bad_field(state: Any) -> str | None:
    """The first field with a non-finite value."""
    fields = zip(state._fields, state, strict=True)
    return next((name for name, value in fields if value is not None and not bool(is_finite(value))), None)
