"""Noisy protected groups: equal opportunity on Adult, Figures 3, 5 and 6 of "Federated compositional optimization: the
impact of two-sided learning rates on communication efficiency".

Step sizes are constant, so a run read at any of its rounds is a run of that length: every training is judged after a
number of rounds, as in the paper, and once more after a number of local steps. Settings are chosen on validation rows,
for both occasions separately.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nestfed.algorithms import make
from nestfed.core.task import Task
from nestfed.experiments import frame
from nestfed.experiments.cells import Cell, train
from nestfed.experiments.dro_fairness.data import NoisyGroups, deal_noisy_groups
from nestfed.experiments.dro_fairness.task import make_noisy_groups_task

TITLES = {"feddro": "FedDRO", "ds-feddro": "DS-FedDRO", "gcivr": "GCIVR", "unconstrained": "Unconstrained"}
PROPOSED = ("feddro", "ds-feddro")
BETAS = {"feddro": 0.9, "ds-feddro": 0.5}  # with one local step; 0.9 times the server rate would overshoot
SERVER_RATE = 1.3  # both server rates of DS-FedDRO
EPOCH = 10  # steps of GCIVR between its large batches of as many small ones; each of its steps is a round
READINGS: dict[str, dict[str, Any]] = {
    "rows": {},
    "positives": {"reference": "positives"},
    "scalar": {"form": "scalar"},
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    thinning: int = 1  # every so many rows of Adult
    clients: int = 8
    batch: int = 16
    noise: float = 0.3
    margin: float = 0.05
    readings: tuple[str, ...] = tuple(READINGS)
    rounds: int = 200
    steps: int = 3200
    paper_rates: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1)
    more_rates: tuple[float, ...] = (0.3, 1.0)
    large_rates: tuple[float, ...] = (3.0,)  # with up to four local steps
    betas: tuple[float, ...] = (0.1, 0.5, 0.9)
    local_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    chosen_with: int = 8  # local steps per round where beta for more than one is chosen
    saturation: int = 32  # local steps above which the paper saw no gain
    few_clients: tuple[int, ...] = (1, 2, 3, 4)
    few_clients_steps: tuple[int, ...] = (1, 4)
    evaluate_every: int = 10  # rounds between the points of a curve up to `rounds`
    seeds: int = 10


QUICK = Plan(
    thinning=24,
    clients=2,
    batch=8,
    readings=("rows",),
    rounds=20,
    steps=40,
    paper_rates=(0.1,),
    more_rates=(),
    large_rates=(),
    betas=(0.5,),
    local_steps=(1, 2),
    chosen_with=2,
    saturation=2,
    few_clients=(1, 2),
    few_clients_steps=(1,),
    evaluate_every=20,
    seeds=2,
)


# ------------------------------------------------------------------------------------------------- trainings


@dataclasses.dataclass(frozen=True)
class Training:
    """All step sizes and seeds of one method; more is swept with `chosen_with` local steps only."""

    method: str
    clients: int
    local_steps: int = 1
    reading: str = "rows"

    @property
    def name(self) -> str:
        return f"{self.method}-{self.reading}-{self.local_steps}-steps-{self.clients}-clients"

    @property
    def curve(self) -> str:
        """The name of the cell with the chosen setting once more, evaluated more often."""
        return f"{self.name}-curve"

    @property
    def title(self) -> str:
        return f"{TITLES[self.method]}, {self.local_steps} local steps, {self.clients} clients, {self.reading}"

    @property
    def steps_per_round(self) -> int:
        """Steps of a round of the program."""
        return EPOCH if self.method == "gcivr" else self.local_steps

    @property
    def rounds_per_round(self) -> int:
        """What the paper counts as rounds in a round of the program: times that the model is exchanged."""
        return EPOCH if self.method == "gcivr" else 1

    @property
    def chosen_by(self) -> str:
        """The metric whose smallest value chooses settings: what the method minimises, on validation rows."""
        return "validation_loss" if self.method == "unconstrained" else "validation_objective"


class Trainings(frame.Trainings[Plan]):
    """A cell for every training, and one for its curve where that is drawn finely. An occasion to judge a training is
    "rounds" or "steps" (see `Plan`)."""

    def names(self) -> list[str]:
        fine = set(self.drawn_finely)
        return [name for one in self.all_trainings for name in ((one.name, one.curve) if one in fine else (one.name,))]

    @functools.cached_property
    def all_trainings(self) -> list[Training]:
        return list(dict.fromkeys([*self.compared, *self.local_steps, *self.few_clients]))

    @functools.cached_property
    def compared(self) -> list[Training]:
        """All methods, one step per round."""
        methods = {"scalar": PROPOSED}
        return [
            Training(method, self.plan.clients, reading=reading)
            for reading in self.plan.readings
            for method in methods.get(reading, TITLES)
            if not (method == "unconstrained" and reading != "rows")  # it ignores the constraints, however read
        ]

    @functools.cached_property
    def local_steps(self) -> list[Training]:
        plan = self.plan
        return [Training(method, plan.clients, steps) for method in PROPOSED for steps in plan.local_steps]

    @functools.cached_property
    def drawn_finely(self) -> list[Training]:
        return [training for training in self.compared if training.reading == "rows"]

    @functools.cached_property
    def few_clients(self) -> list[Training]:
        plan = self.plan
        return [Training("feddro", clients, steps) for clients in plan.few_clients for steps in plan.few_clients_steps]

    def list_occasions(self, training: Training) -> tuple[str, ...]:
        return ("rounds", "steps") if training.clients == self.plan.clients else ("rounds",)

    def occasion(self, after: str) -> str:
        return f"{self.plan.rounds} rounds" if after == "rounds" else f"{self.plan.steps} steps"

    def train(self, name: str) -> Cell:
        training = next(training for training in self.all_trainings if name in (training.name, training.curve))
        if name == training.curve:
            grid = [self.cell(training.name).settings[self.choose(training, "rounds")]]
            last, every = self._last(training, "rounds"), self.plan.evaluate_every // training.rounds_per_round
        else:
            grid, occasions = (
                self._make_grid(training),
                [self._last(training, after) for after in self.list_occasions(training)],
            )
            last, every = max(occasions), math.gcd(*occasions)
        return train(
            [(words, _make_algorithm(training, words)) for words in grid],
            self._tasks(training),
            range(self.plan.seeds),
            rounds=last,
            evaluate_every=every,
            progress=self.progress,
            title=training.title,
        )

    def choose(self, training: Training, after: str, rates: Sequence[float] | None = None) -> int:
        """The setting that validation rows prefer on this occasion, perhaps among some step sizes only."""
        tried = self.cell(training.name).settings
        among = [i for i, words in enumerate(tried) if rates is None or words["lr"] in rates]
        at = self._place(training, after)
        return self.best(training.name, training.chosen_by, smallest=True, at=at, among=among)

    def measured(self, training: Training, after: str, setting: int | None = None) -> Any:
        """The metrics of a setting, the preferred one if none is named, on this occasion: a DataFrame by seed."""
        cell, place = self.cell(training.name), self._place(training, after)
        setting = self.choose(training, after) if setting is None else setting
        values = {metric: column[setting, :, place] for metric, column in cell.metrics.items()}
        return pd.DataFrame(values, index=pd.Index(cell.seeds, name="seed"))

    def history(self, training: Training, after: str) -> Any:
        """The curves of the chosen setting up to this occasion, against the rounds that the paper counts; the start,
        which is random, is left out."""
        name, setting = (training.curve, 0) if after == "rounds" else (training.name, self.choose(training, after))
        history: Any = self.cell(name).history(training.method, training.steps_per_round, setting)
        history = history[(history["round"] > 0) & (history["round"] <= self._last(training, after))]
        return history.assign(round=history["round"] * training.rounds_per_round)

    def _last(self, training: Training, after: str) -> int:
        """The last round of the program before this occasion."""
        if after == "rounds":
            return self.plan.rounds // training.rounds_per_round
        return self.plan.steps // training.steps_per_round

    def _place(self, training: Training, after: str) -> int:
        return int(np.flatnonzero(self.cell(training.name).round == self._last(training, after))[0])

    def _make_grid(self, training: Training) -> list[dict[str, float]]:
        plan = self.plan
        rates = plan.paper_rates + plan.more_rates + (plan.large_rates if training.local_steps <= 4 else ())
        if training.method not in PROPOSED:
            return [{"lr": lr} for lr in rates]
        if training.local_steps == 1:
            return [{"lr": lr, "beta": BETAS[training.method]} for lr in rates]
        search = Training(training.method, plan.clients, plan.chosen_with)
        if training == search:
            return [{"lr": lr, "beta": beta} for lr, beta in itertools.product(rates, plan.betas)]
        beta = self.cell(search.name).settings[self.choose(search, "steps")]["beta"]
        return [{"lr": lr, "beta": beta} for lr in rates]

    def _tasks(self, training: Training) -> list[Task]:
        reads = lambda task: dataclasses.replace(task.problem, **READINGS[training.reading])
        places = training.clients if training.clients == self.plan.clients else max(self.plan.few_clients)
        tasks = [dataclasses.replace(task, problem=reads(task)) for task in make_tasks(self.plan, training.clients)]
        return [_add_empty_clients(task, places) for task in tasks]


@functools.lru_cache(maxsize=1)  # trainings in a row share them, and all together are large
def make_tasks(plan: Plan, clients: int) -> list[Task]:
    """One per seed."""
    return [
        make_noisy_groups_task(
            _thin_out(deal_noisy_groups(clients=clients, seed=seed), plan.thinning),
            noise=plan.noise,
            margin=plan.margin,
            batch_size=plan.batch,
            seed=seed,
        )
        for seed in range(plan.seeds)
    ]


def _thin_out(data: NoisyGroups, thinning: int) -> NoisyGroups:
    columns = ("inputs", "true_group", "label", "part", "client")
    return dataclasses.replace(data, **{name: getattr(data, name)[::thinning] for name in columns})


def _make_algorithm(training: Training, words: Mapping[str, float]) -> Any:
    own: dict[str, dict[str, Any]] = {
        "feddro": {"local_steps": training.local_steps},
        "ds-feddro": {
            "local_steps": training.local_steps,
            "server_lr": SERVER_RATE,
            "server_inner_lr": SERVER_RATE,
        },
        "gcivr": {"local_steps": EPOCH, "refresh_batches": EPOCH},
        "unconstrained": {},
    }
    return make(training.method, **words, **own[training.method])


def _add_empty_clients(task: Task, places: int) -> Task:
    """The task with empty clients, which have weight zero and take part in nothing: tasks with different numbers of
    clients then share their program."""
    empty = places - task.clients
    more = lambda a, value: np.concatenate([a, np.full(empty, value, np.asarray(a).dtype)])
    rows = task.data
    data = dataclasses.replace(
        rows,
        offsets=more(rows.offsets, 0),
        sizes=more(rows.sizes, 1),
        ids=np.arange(places, dtype=np.int32),
        largest=int(rows.sizes.sum()),
    )
    return dataclasses.replace(task, data=data, weights=more(task.weights, 0.0))
