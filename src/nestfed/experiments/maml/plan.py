"""Federated meta-learning: Figures 2 and 3 of "Federated conditional stochastic optimization", and sine waves.

On Omniglot every client holds characters of its own and draws tasks from them, five at a time; an evaluation adapts the
averaged model to tasks of characters that nobody holds. Settings are chosen on validation characters, with one drawing
to adapt on, and kept for five. Sine waves are the same on a problem of seconds.

Settings and seeds of a cell run one after the other in one program: compiling it takes longer than a short training,
and choosing and training share it.
"""

import dataclasses
import functools
import itertools
from typing import Any

from nestfed.algorithms import make
from nestfed.core.task import Task
from nestfed.experiments import frame
from nestfed.experiments.cells import Cell, train_in_turn
from nestfed.experiments.maml.data import Omniglot, deal_characters, load_omniglot, make_up_omniglot
from nestfed.experiments.maml.task import CONV4, make_character_task, make_sine_task
from nestfed.models import ImageModel

TITLES = {
    "fcsg": "FCSG",
    "fcsg-m": "FCSG-M",
    "acc-fcsg-m": "Acc-FCSG-M",
    "local-scgd-conditional": "Local-SCGD",
    "local-scgdm-conditional": "Local-SCGDM",
}
PROPOSED, BASELINES = tuple(TITLES)[:3], tuple(TITLES)[3:]
WEIGHTS = {  # the numbers beside the step size: weights of new values in running ones
    "fcsg": (),
    "fcsg-m": ("beta",),
    "acc-fcsg-m": ("beta",),
    "local-scgd-conditional": ("inner_lr",),
    "local-scgdm-conditional": ("inner_lr", "momentum_lr"),
}
PHASES = {"alike": "clients alike", "apart": "every client its own phases"}
CHOSEN_BY = "validation_loss"  # the smaller the better


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    studies: tuple[str, ...] = ("sine", "omniglot")
    methods: tuple[str, ...] = tuple(TITLES)
    local_steps: int = 10
    weights: tuple[float, ...] = (0.1, 0.5, 0.9)
    seeds: int = 3
    adaptation_steps: int = 3  # in evaluations; training adapts with one
    batch: int = 5  # tasks per step

    made_up: bool = False  # the characters of Omniglot
    clients: int = 16  # on Omniglot
    shots: tuple[int, ...] = (1, 5)
    queries: int = 15
    inner_lr: float = 0.4
    model: ImageModel = dataclasses.replace(CONV4, dtype="bfloat16")
    rates: tuple[float, ...] = (0.1, 0.05, 0.01)
    slow_rates: tuple[float, ...] = (0.1, 0.05)  # of methods with two gradients per step or two weights
    steps: int = 1000
    search_steps: int = 200
    evaluate_every: int = 10  # rounds
    tasks: int = 600  # in an evaluation

    sine_clients: int = 8
    sine_shots: int = 10
    sine_inner_lr: float = 0.03
    sine_rates: tuple[float, ...] = (0.1, 0.05, 0.02)
    sine_steps: int = 3000
    sine_search_steps: int = 1000
    sine_evaluate_every: int = 20
    sine_tasks: int = 200
    sine_seeds: int = 5


QUICK = Plan(  # two methods: compiling takes all the time
    methods=("fcsg", "local-scgd-conditional"),
    weights=(0.5,),
    seeds=2,
    made_up=True,
    clients=2,
    shots=(1,),
    queries=2,
    batch=1,
    local_steps=1,
    rates=(0.05,),
    slow_rates=(0.05,),
    model=dataclasses.replace(CONV4, outputs=2, layers=(CONV4.layers[0]._replace(channels=2, kernel=5, stride=8),)),
    steps=2,
    search_steps=1,
    evaluate_every=1,
    tasks=4,
    sine_clients=2,
    sine_rates=(0.01, 0.005),
    sine_steps=4,
    sine_search_steps=2,
    sine_evaluate_every=2,
    sine_tasks=4,
    sine_seeds=2,
)


# ------------------------------------------------------------------------------------------------- trainings


def make_name(study: str, part: Any, method: str) -> str:
    """A cell's name: `sine-alike-fcsg`, `omniglot-5-fcsg-m`; `omniglot-choose-fcsg` chooses settings."""
    return f"{study}-{part}-{method}"


class Trainings(frame.Trainings[Plan]):
    """The cells, STUDY-PART-METHOD; each can be trained alone, after the choice of its settings."""

    def parts(self, study: str) -> list[str]:
        return list(PHASES) if study == "sine" else [str(shots) for shots in self.plan.shots]

    def names(self, study: str | None = None) -> list[str]:
        """All cells, method by method: choosing and the first training share a program."""
        wanted = self.plan.studies if study is None else (study,)
        return [
            make_name(one, part, method)
            for one in wanted
            for method in self.plan.methods
            for part in ("choose", *self.parts(one))
        ]

    def train(self, name: str) -> Cell:
        study, part, method = name.split("-", 2)
        plan, choosing = self.plan, part == "choose"
        choice = make_name(study, "choose", method)
        grid = self.grid(study, method) if choosing else [self.chosen(choice, CHOSEN_BY, smallest=True)]
        seeds = range(1 if choosing else plan.sine_seeds if study == "sine" else plan.seeds)
        steps = {
            ("sine", True): plan.sine_search_steps,
            ("sine", False): plan.sine_steps,
            ("omniglot", True): plan.search_steps,
            ("omniglot", False): plan.steps,
        }[study, choosing]
        part = self.parts(study)[0] if choosing else part
        tasks = [self._make_task(study, part, seed) for seed in seeds]
        cell = train_in_turn(
            [(words, make(method, local_steps=plan.local_steps, **words)) for words in grid],
            tasks,
            seeds,
            rounds=steps // plan.local_steps,
            evaluate_every=plan.sine_evaluate_every if study == "sine" else plan.evaluate_every,
            progress=self.progress,
            title=f"{TITLES[method]}, {study}",
        )
        # Test tasks are evaluated all the time, so that choosing and training are one program; they choose nothing.
        hidden = "test_" if choosing else "validation_"
        shown = {name: values for name, values in cell.metrics.items() if not name.startswith(hidden)}
        return cell._replace(metrics=shown)

    def grid(self, study: str, method: str) -> list[dict[str, float]]:
        plan, weights = self.plan, WEIGHTS[method]
        rates = plan.slow_rates if method == "acc-fcsg-m" or len(weights) > 1 else plan.rates
        rates = plan.sine_rates if study == "sine" else rates
        return [
            {"lr": lr, **dict(zip(weights, values, strict=True))}
            for lr in rates
            for values in itertools.product(plan.weights, repeat=len(weights))
        ]

    def _make_task(self, study: str, part: str, seed: int) -> Task:
        plan = self.plan
        if study == "sine":
            return make_sine_task(
                clients=plan.sine_clients,
                own_phases=part == "apart",
                shots=plan.sine_shots,
                inner_lr=plan.sine_inner_lr,
                batch_size=plan.batch,
                seed=seed,
                tasks=plan.sine_tasks,
                steps=plan.adaptation_steps,
            )
        characters = deal_characters(_load_omniglot(plan.made_up), clients=plan.clients, seed=seed)
        return make_character_task(
            characters,
            model=plan.model,
            shots=int(part),
            queries=plan.queries,
            inner_lr=plan.inner_lr,
            batch_size=plan.batch,
            seed=seed,
            tasks=plan.tasks,
            steps=plan.adaptation_steps,
        )

    def list_finished(self) -> dict[str, list[str]]:
        """Study -> the parts of which every method's training is there: what a page can show."""
        done = lambda study, part: all(self.done(make_name(study, part, method)) for method in self.plan.methods)
        found = {s: [p for p in self.parts(s) if done(s, p) and done(s, "choose")] for s in self.plan.studies}
        return {study: parts for study, parts in found.items() if parts}


@functools.cache
def _load_omniglot(made_up: bool) -> Omniglot:
    return make_up_omniglot() if made_up else load_omniglot()
