"""Choosing settings before a run, by the task's own score on validation rows.

A stage of a method says which of its settings may be chosen, as factors of what is recommended (`Stage.tuned`). Step
sizes far apart are tried side by side, settings x seeds, for a short part of the run. Where the best one lies at the
edge, the window moves on: a table of another scale wants another step size. What is near the best is then tried for
longer, beside what is recommended, which stays unless another value is better beyond the noise between seeds.
Other settings follow, with the step size chosen. All sweeps of a stage have as many settings, where they can: they are
then one compiled program.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from nestfed.core.settings import UserError
from nestfed.engine.cohorts import find_expected_cohort
from nestfed.engine.steps import count_steps
from nestfed.workbench.scenario import Scenario
from nestfed.workbench.stages import Budget, Trials, begin, compute_score, sweep_next_stage

SEEDS = 3
OTHER_BATCHES = 1_000_003  # from a seed to another one with the same split
SHORT, LONG = 1 / 8, 1 / 2  # parts of a run: to compare settings far apart, and those near the best
NEAR = (1.0, 0.4, 2.5, 0.65, 1.6, 0.25, 4.0)  # factors of the best
MOST_MOVES = 8  # of a window
CONFIDENCE = 0.95  # that a value is better than what is recommended
WORTH = 0.02  # of the score: what a value must gain to replace what is recommended
MOST_SECONDS = 60.0  # of tuning that nobody asked for
# Measured on two cores: compiling a stage's program, a row of a batch, and a number of the model that it meets.
COMPILE_SECONDS, ROW_SECONDS, NUMBER_SECONDS = 5.0, 5e-8, 2e-9

Chosen = dict[str, dict[str, dict[str, Any]]]  # by method and setting: chosen, recommended, tried
Given = Mapping[str, Mapping[str, Any]]  # by method: the user's settings, which are not tuned


def estimate_seconds(trials: Trials[Any], given: Given, budget: Budget) -> float:
    """About how long `tune` takes on two cores; 0 where nothing can be tuned. From sizes and not from a clock: the
    same command decides alike on every machine."""
    scenario, setup = trials.scenario, trials.first
    clients = find_expected_cohort(budget.cohort, setup.rows.clients) or setup.rows.clients
    rows, numbers = scenario.count_batch_work(setup)
    step = clients * rows * (ROW_SECONDS + NUMBER_SECONDS * numbers)
    seconds: dict[Any, float] = {}
    for name, changes in given.items():
        for number, algorithm in enumerate(scenario.make_algorithms(name, setup, changes)):
            settings = _list_open_settings(scenario, name, number, changes)
            steps = budget.count_rounds(scenario, algorithm) * count_steps(algorithm)
            lanes = sum(len(factors) * (LONG + SHORT * _is_step_size(key)) for key, factors in settings.items())
            if lanes:
                which = _identify_stage(trials, name, number, changes)
                seconds[which] = COMPILE_SECONDS + SEEDS * lanes * steps * step
    return sum(seconds.values())


def tune(
    trials: Trials[Any],
    given: Given,
    budget: Budget,
    *,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Chosen:
    """Choose what the user did not give of the settings of these methods."""
    trials = _take_few_seeds(trials)
    # The start and the end are measured; the last iterate counts unless a method has another.
    budget = dataclasses.replace(budget, evaluations=None, output=None if budget.output == "best" else budget.output)
    firsts: dict[Any, tuple[Trials[Any], dict[str, Any]]] = {}  # methods may have their first stage in common
    chosen: Chosen = {}
    for name, changes in given.items():
        method, swept, found = trials.scenario.method(name), begin(trials, name, changes), {}
        for number in range(_find_last_to_tune(trials.scenario, name, changes) + 1):
            which = _identify_stage(trials, name, number, changes)
            if which not in firsts:
                firsts[which] = _tune_stage(swept, budget, progress)
            left, own = firsts[which]
            swept = dataclasses.replace(
                left, traces=tuple(dataclasses.replace(trace, method=name) for trace in left.traces)
            )
            found |= own
        if found:
            chosen[name] = found
            say(f"tuned {method.title}: {describe(found)}")
    return chosen


def describe(found: Mapping[str, Mapping[str, Any]]) -> str:
    """What was chosen for a method, and from what."""
    parts = []
    for setting, one in found.items():
        how = "as recommended" if one["chosen"] == one["recommended"] else f"recommended {one['recommended']:g}"
        parts.append(f"{setting} {one['chosen']:g} ({how}; {min(one['tried']):g} to {max(one['tried']):g} tried)")
    return ", ".join(parts)


def list_changes(chosen: Chosen) -> dict[str, float]:
    """As a user would give them: fedavg.lr."""
    return {f"{name}.{key}": one["chosen"] for name, found in chosen.items() for key, one in found.items()}


# ------------------------------------------------------------------------------------------------- what may be tuned


def _list_open_settings(
    scenario: Scenario[Any], name: str, number: int, given: Mapping[str, Any]
) -> dict[str, tuple[float, ...]]:
    """The settings of a stage that are tuned, as the user would name them, and their factors."""
    method = scenario.method(name)
    named = {method.full(number, key): factors for key, factors in method.stages[number].tuned.items()}
    return {key: factors for key, factors in named.items() if key not in given}


def _find_last_to_tune(scenario: Scenario[Any], name: str, given: Mapping[str, Any]) -> int:
    """The number of the last stage with something to tune; -1 where there is none."""
    stages = range(len(scenario.method(name).stages))
    return max((number for number in stages if _list_open_settings(scenario, name, number, given)), default=-1)


def _identify_stage(trials: Trials[Any], name: str, number: int, given: Mapping[str, Any]) -> Any:
    """Equal for first stages that search for the same."""
    stage = trials.scenario.method(name).stages[number]
    if number:
        return name, number
    algorithm = trials.scenario.make_algorithms(name, trials.first, given)[number]
    return stage.task, stage.output, repr(algorithm), repr(_list_open_settings(trials.scenario, name, number, given))


def _is_step_size(key: str) -> bool:
    return key.endswith("lr")


def _take_few_seeds(trials: Trials[Any]) -> Trials[Any]:
    """The first seeds of a run; where there is one alone, its split is trained on several times, by other batches."""
    seeds = list(trials.setups)[:SEEDS]
    setups = {seed: trials.setups[seed] for seed in seeds}
    if len(seeds) == 1:
        setups = {seeds[0] + OTHER_BATCHES * i: trials.first for i in range(SEEDS)}
    return dataclasses.replace(trials, setups=setups, traces=())


# ------------------------------------------------------------------------------------------------- one stage


def _tune_stage(
    trials: Trials[Any], budget: Budget, progress: bool | None
) -> tuple[Trials[Any], dict[str, dict[str, Any]]]:
    """The next stage of a method: (what it leaves with the chosen settings, what was chosen)."""
    scenario, first = trials.scenario, trials.traces[0]
    name, number, found = first.method, len(first.stages), {}
    settings = _list_open_settings(scenario, name, number, first.changes)
    left = None
    for key, factors in settings.items():
        changes = trials.traces[0].changes
        recommended = _recommend(trials, key, changes)
        near, tried = [_round(recommended * factor) for factor in factors], {recommended}
        if _is_step_size(key):
            window = _move_window(trials, key, recommended, factors, budget, progress)
            tried |= set(window)
            best = min(window, key=lambda value: window[value].mean())
            near = [recommended, *(_round(best * factor) for factor in NEAR)]
        near = [value for value in dict.fromkeys(near) if _is_allowed(trials, {**changes, key: value})][: len(factors)]
        swept = _sweep(trials, {key: near}, LONG, budget, progress)
        value = _prefer(_read_scores(swept, key), recommended)
        found[key] = {"chosen": value, "recommended": recommended, "tried": sorted(tried | set(near))}
        own = tuple(dataclasses.replace(trace, changes={**trace.changes, key: value}) for trace in trials.traces)
        trials = dataclasses.replace(trials, traces=own)
        kept = tuple(trace for trace in swept.traces if trace.changes[key] == value)
        left = dataclasses.replace(swept, traces=kept)
    return left or _sweep(trials, {}, LONG, budget, progress), found


def _move_window(
    trials: Trials[Any], key: str, center: float, factors: Sequence[float], budget: Budget, progress: bool | None
) -> dict[float, np.ndarray]:
    """The scores of step sizes around the center, and of further ones while the best lies at the edge."""
    scores: dict[float, np.ndarray] = {}
    for _ in range(MOST_MOVES):
        values = [_round(center * factor) for factor in factors]
        scores |= _read_scores(_sweep(trials, {key: values}, SHORT, budget, progress), key)
        best = min(scores, key=lambda value: scores[value].mean())
        if best == min(scores) or not np.isfinite(scores[best].mean()):
            center = min(scores) / max(factors)
        elif best == max(scores):
            center = max(scores) / min(factors)
        else:
            break
    return scores


def _sweep(
    trials: Trials[Any],
    grid: Mapping[str, Sequence[float]],
    part: float,
    budget: Budget,
    progress: bool | None,
) -> Trials[Any]:
    """The next stage for a part of its rounds."""
    scenario, first = trials.scenario, trials.traces[0]
    algorithm = scenario.make_algorithms(first.method, trials.first, first.changes)[len(first.stages)]
    rounds = max(1, round(part * budget.count_rounds(scenario, algorithm)))
    return sweep_next_stage(trials, grid, dataclasses.replace(budget, rounds=rounds), progress=progress)


def _read_scores(swept: Trials[Any], key: str) -> dict[float, np.ndarray]:
    """By value, one per seed; infinite for what diverged or ended above its start."""
    score = swept.scenario.score_step_sizes if _is_step_size(key) else swept.scenario.score
    scores: dict[float, list[float]] = {}
    for trace in swept.traces:
        value = np.inf if trace.rise is not None else compute_score(swept, trace, score)
        scores.setdefault(trace.changes[key], []).append(value)
    return {value: np.asarray(own) for value, own in scores.items()}


def _prefer(scores: Mapping[float, np.ndarray], recommended: float) -> float:
    """The best value, if it is better than what is recommended beyond the chance of few seeds (a one-sided t test), and
    by enough to be worth the noise of a larger step."""
    best = min(scores, key=lambda value: scores[value].mean())
    if not np.isfinite(scores[best]).all():
        return recommended
    if not np.isfinite(scores[recommended]).all():
        return best
    gain = scores[recommended] - scores[best]
    by_chance = stdtrit(len(gain) - 1, CONFIDENCE) * gain.std(ddof=1) / len(gain) ** 0.5
    return best if gain.mean() > max(by_chance, WORTH * scores[recommended].mean()) else recommended


def _recommend(trials: Trials[Any], key: str, changes: Mapping[str, Any]) -> float:
    """The value that the method has without tuning."""
    first = trials.traces[0]
    method, number = trials.scenario.method(first.method), len(first.stages)
    algorithm = trials.scenario.make_algorithms(first.method, trials.first, changes)[number]
    return float(operator.attrgetter(method.plain(key))(algorithm))


def _is_allowed(trials: Trials[Any], changes: Mapping[str, Any]) -> bool:
    """Is no setting out of its range?"""
    try:
        trials.scenario.make_algorithms(trials.traces[0].method, trials.first, changes)
    except UserError:
        return False
    return True


def _round(value: float) -> float:
    return float(f"{value:.2g}")
