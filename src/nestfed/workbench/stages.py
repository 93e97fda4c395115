"""Running a method, stage after stage: one seed at a time with checkpoints, or many settings x seeds side by side."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError
from nestfed.engine.options import Options, Watch
from nestfed.uploads.privacy import Guarantee, Spending, find_remarks
from nestfed.verbs import cost
from nestfed.verbs.history import Rise, find_rise
from nestfed.verbs.simulation import Diverged, simulate
from nestfed.verbs.sweeps import sweep
from nestfed.workbench.scenario import Scenario

FINISHED, DIVERGED = "finished", "diverged"


class AllDiverged(UserError):
    """No setting of a search came to its end."""

    exit_code = 3


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation of one method and seed, while it is on its way."""

    method: str
    seed: int
    stage: str
    round: int  # counted through the method's stages
    metrics: Mapping[str, float]  # finite numbers only

    @property
    def series(self) -> str:
        """Whose curve it belongs to."""
        return name_series(self.method, self.seed)


def name_series(method: str, seed: int) -> str:
    return f"{method}-seed{seed}"


def select_finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn."""
    return {name: float(value) for name, value in metrics.items() if np.isfinite(value)}


@dataclasses.dataclass(frozen=True)
class StageTrace:
    """What one stage of one seed left."""

    name: str
    rounds: int
    history: dict[str, np.ndarray]
    participants: np.ndarray
    cost: cost.Cost
    clients: int
    output: str  # the rule that chose the state it left
    minimised: str | None = None  # the metric that it was to make small
    notes: tuple[str, ...] = ()  # what a reader of its numbers must know
    spending: Spending | None = None  # of privacy, with that of the stages before
    diverged: bool = False

    @property
    def done(self) -> int:
        """Rounds: fewer than asked for where it diverged or its privacy budget was spent."""
        return len(self.participants)

    @property
    def rounds_spent(self) -> int:
        """Rounds in which clients have answered: one that diverged has no result, but it was one."""
        return self.done + self.diverged

    @property
    def rise(self) -> Rise | None:
        """Of its objective, where it ended above its start."""
        return find_rise(self.history, self.minimised, self.output)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A method with its settings and a seed: all its stages, and what the last one left."""

    method: str
    seed: int
    changes: dict[str, Any]
    stages: tuple[StageTrace, ...] = ()
    left: Any = None  # as the scenario wants it: `Scenario.leave`
    status: str = FINISHED

    @property
    def rise(self) -> Rise | None:
        """Of the objective of the last stage, whose state is the result."""
        return self.stages[-1].rise if self.stages and self.status == FINISHED else None

    @property
    def spent(self) -> tuple[tuple[Spending, int], ...]:
        """Of privacy, by all stages so far."""
        return tuple((stage.spending, stage.rounds_spent) for stage in self.stages if stage.spending is not None)

    def extend(self, stage: StageTrace, left: Any, status: str, changes: Mapping[str, Any]) -> "Trace":
        status = DIVERGED if DIVERGED in (status, self.status) else status
        return dataclasses.replace(
            self, stages=(*self.stages, stage), left=left, status=status, changes={**self.changes, **changes}
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long and with whom: the same for all methods of a run."""

    rounds: int | None = None  # of every stage; None: the scenario's number of steps / local_steps
    cohort: int | float | None = None
    sampling: str = "weights"
    dropout: float = 0.0
    evaluations: int | None = 100  # about so many in every stage; None: of its start and its end alone
    output: str | None = None  # which iterate of the last stage counts; None: what the method's paper returns
    privacy: Guarantee | None = None  # its budget is for all stages of a method; those that exchange get equal parts
    noise_seed: int | None = None  # None: nobody can repeat the noise

    def count_rounds(self, scenario: Scenario[Any], algorithm: Algorithm) -> int:
        return self.rounds or max(1, scenario.options.steps // algorithm.local_steps)

    def options(self, rounds: int, scenario: Scenario[Any], trace: Trace) -> Options:
        """Of a run of the next stage; the user's choice of output is about the last one."""
        stages, number = scenario.method(trace.method).stages, len(trace.stages)
        output = self.output if number + 1 == len(stages) else None
        if output is None:
            output = scenario.choose_output(stages[number])
            # The best iterate is known by evaluations alone, and by rows that no guarantee covers.
            if output == "best" and (self.evaluations is None or self.privacy is not None):
                output = "last"
        guarantee = self.privacy
        if guarantee is not None:
            exchanging = [not stage.alone for stage in stages]
            part = sum(exchanging[: number + 1]) / max(1, sum(exchanging))
            spend = None if guarantee.budget is None else guarantee.budget * part
            guarantee = dataclasses.replace(guarantee, earlier=trace.spent, budget=spend)
        return Options(
            rounds=rounds,
            output=output,
            select=scenario.select if output == "best" else None,
            cohort=self.cohort,
            sampling=self.sampling,
            dropout=self.dropout,
            evaluate_every=None if self.evaluations is None else max(1, rounds // self.evaluations),
            uploads=() if guarantee is None else guarantee,
            # Stages never share their noise, not even where it is repeatable.
            noise_seed=None if self.noise_seed is None else self.noise_seed * len(stages) + number,
        )


Setup = TypeVar("Setup")


@dataclasses.dataclass(frozen=True)
class Trials(Generic[Setup]):
    """A scenario, its data for every seed, and what was run on them so far."""

    scenario: Scenario[Setup]
    setups: Mapping[int, Setup]  # by seed
    traces: tuple[Trace, ...] = ()

    @property
    def first(self) -> Setup:
        """The set-up of the first seed, where any will do."""
        return next(iter(self.setups.values()))

    def add(self, traces: Iterable[Trace]) -> "Trials[Setup]":
        return dataclasses.replace(self, traces=(*self.traces, *traces))


def set_up(scenario: Scenario[Setup], seeds: Iterable[int]) -> Trials[Setup]:
    """Every seed's data; nothing is run yet."""
    (trials,) = share_bound([Trials(scenario, {seed: scenario.set_up(seed) for seed in seeds})])
    return trials


def share_bound(several: Sequence[Trials[Any]]) -> list[Trials[Any]]:
    """The same with one bound on the sizes of all clients: they then share their compiled programs."""
    largest = max(setup.rows.largest for trials in several for setup in trials.setups.values())
    bound = lambda setup: dataclasses.replace(setup, rows=dataclasses.replace(setup.rows, largest=largest))
    return [
        dataclasses.replace(trials, setups={seed: bound(setup) for seed, setup in trials.setups.items()})
        for trials in several
    ]


def run_method(
    trials: Trials[Any],
    name: str,
    algorithms: Sequence[Algorithm],
    seed: int,
    budget: Budget,
    *,
    checkpoints: Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    listen: Callable[[Evaluation], None] | None = None,
) -> Trace:
    """One seed of a method, given the algorithm of every stage; a stage that diverges is the last one. `listen` gets
    every evaluation soon after it was made."""
    scenario, method = trials.scenario, trials.scenario.method(name)
    trace = Trace(name, seed, {})
    for stage, algorithm in zip(method.stages, algorithms, strict=True):
        task = stage.task(scenario, trials.setups[seed], trace.left)
        options = budget.options(budget.count_rounds(scenario, algorithm), scenario, trace)
        title = f"{method.title}, seed {seed}" + (f", {stage.name}" if len(method.stages) > 1 else "")
        file = None if checkpoints is None else checkpoints / f"{name}-seed{seed}-{stage.name}.npz"
        watch = None if listen is None else _relay(listen, trials, trace, stage.name)
        options = dataclasses.replace(
            options, title=title, progress=progress, checkpoint=file, resume=resume, watch=watch
        )
        try:
            result, status = simulate(algorithm, task, seed, options), FINISHED
        except Diverged as error:
            result, status = error.result, DIVERGED
        done = StageTrace(
            stage.name,
            options.need_rounds(),
            result.history,
            result.participants,
            cost.measure(algorithm, task, options),
            task.clients,
            options.output,
            task.minimised,
            result.remarks,
            result.spending,
            status == DIVERGED,
        )
        left = scenario.leave(task, result.output, result.clients)
        left = _choose_left(trials, trace, left, options)
        trace = trace.extend(done, left, status, {})
        if status == DIVERGED:
            break
    return trace


def _choose_left(trials: Trials[Any], before: Trace, left: Any, options: Options) -> Any:
    """What a stage leaves; where its best iterate counts and is not clearly better than its start, what the stage
    before left."""
    if options.select is None or before.left is None:
        return left
    return left if trials.scenario.improves(trials.setups[before.seed], before.left, left) else before.left


def _relay(listen: Callable[[Evaluation], None], trials: Trials[Any], trace: Trace, stage: str) -> Watch:
    """From what a simulation tells to what a listener of the whole method wants to know."""
    before = sum(int(done.history["round"][-1]) for done in trace.stages)

    def watch(round: int, metrics: Mapping[str, np.ndarray]) -> None:
        numbers: dict[str, Any] = {}
        for name, value in metrics.items():
            entries = trials.scenario.list_entries(name, trials.first) if value.ndim else [name]
            numbers |= dict(zip(entries, np.atleast_1d(value), strict=True))
        listen(Evaluation(trace.method, trace.seed, stage, before + round, select_finite(numbers)))

    return watch


def sweep_method(
    trials: Trials[Any],
    name: str,
    changes: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    budget: Budget,
    *,
    progress: bool | None = None,
) -> Trials[Any]:
    """All combinations of a grid x all seeds, side by side. A grid may reach into every stage (`model.lr`): each stage
    runs its own combinations on everything that the stages before have left."""
    swept = begin(trials, name, changes)
    for _ in trials.scenario.method(name).stages:
        swept = sweep_next_stage(swept, grid, budget, progress=progress)
    return swept


def begin(trials: Trials[Any], name: str, changes: Mapping[str, Any]) -> Trials[Any]:
    """A method with its settings on every seed, before its first stage."""
    return dataclasses.replace(trials, traces=tuple(Trace(name, seed, dict(changes)) for seed in trials.setups))


def sweep_next_stage(
    trials: Trials[Any],
    grid: Mapping[str, Sequence[Any]],
    budget: Budget,
    *,
    progress: bool | None = None,
) -> Trials[Any]:
    """The next stage of unfinished traces of one method, for all combinations of its own part of the grid."""
    scenario, traces = trials.scenario, trials.traces
    name, number = traces[0].method, len(traces[0].stages)
    method = scenario.method(name)
    stage = method.stages[number]
    own = {key: values for key, values in grid.items() if method.find_stage(key) == number}
    combinations = [dict(zip(own, values, strict=True)) for values in itertools.product(*own.values())]
    # Earlier stages' settings differ between the traces, this one's do not: any trace's will do.
    algorithms = [
        scenario.make_algorithms(name, trials.first, {**traces[0].changes, **chosen})[number] for chosen in combinations
    ]
    tasks = [stage.task(scenario, trials.setups[trace.seed], trace.left) for trace in traces]
    extended: list[Trace] = []
    lengths = [budget.count_rounds(scenario, algorithm) for algorithm in algorithms]
    for rounds in sorted(set(lengths)):
        members = [i for i, length in enumerate(lengths) if length == rounds]
        options = budget.options(rounds, scenario, traces[0])  # all traces have spent the same
        options = dataclasses.replace(options, title=f"{method.title}, {stage.name}", progress=progress)
        done = sweep([algorithms[i] for i in members], tasks, [trace.seed for trace in traces], options)
        for row, i in enumerate(members):
            price = cost.measure(algorithms[i], tasks[0], options)
            for column, trace in enumerate(traces):
                own_part = lambda key, values: values if key == "round" else values[row, column]
                history = {key: own_part(key, values) for key, values in done.history.items()}
                one = jax.tree.map(lambda a: np.asarray(a[column]), done.runs[row])
                rise = find_rise(history, tasks[0].minimised, options.output)
                notes = find_remarks(history, done.spending[row], rounds) + (() if rise is None else (rise.remark,))
                passed = StageTrace(
                    stage.name,
                    rounds,
                    history,
                    done.participants[row, column],
                    price,
                    tasks[0].clients,
                    options.output,
                    tasks[0].minimised,
                    notes,
                    done.spending[row],
                    bool(done.diverged[row, column] >= 0),
                )
                status = DIVERGED if done.diverged[row, column] >= 0 else FINISHED
                server = one.server if one.output is None else one.output.server
                left = scenario.leave(tasks[column], server, one.clients)
                left = _choose_left(trials, trace, left, options)
                extended.append(trace.extend(passed, left, status, combinations[i]))
    return dataclasses.replace(trials, traces=tuple(extended))


def compute_score(
    trials: Trials[Any], trace: Trace, score: Callable[[Mapping[str, float]], float] | None = None
) -> float:
    """What settings are chosen by (None: the scenario's score), of the state that the last stage left; infinite for a
    run that diverged."""
    if trace.status == DIVERGED:
        return np.inf
    stage = trace.stages[-1]
    if stage.output == "last":  # measured already
        final = {name: float(values[-1]) for name, values in stage.history.items() if values.ndim == 1}
    else:
        final, _ = trials.scenario.evaluate(trials.setups[trace.seed], trace.left)
    value = (score or trials.scenario.score)(final)
    return value if np.isfinite(value) else np.inf


def find_best_changes(trials: Trials[Any]) -> dict[str, Any]:
    """The settings with the smallest score on validation data, averaged over seeds. A setting of which any seed
    diverged is passed over."""
    scores: dict[tuple, list[float]] = {}
    for trace in trials.traces:
        scores.setdefault(tuple(trace.changes.items()), []).append(compute_score(trials, trace))
    means = {key: float(np.mean(values)) for key, values in scores.items()}
    best = min(means, key=lambda key: means[key])
    if not np.isfinite(means[best]):
        raise AllDiverged(f"every setting of {trials.traces[0].method} diverged; give smaller step sizes.")
    return dict(best)
