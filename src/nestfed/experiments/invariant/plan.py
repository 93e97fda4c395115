"""Invariant logistic regression on 16 clients: Figure 1 of "Federated conditional stochastic optimization".

Labels of points are learned from noisy views of them. Accuracy is measured on points without noise; the objective is
known exactly, and so are the minimisers of what the methods really descend on, the objective with m views per point.
Settings are chosen in runs with other seeds, on other points than those of the test.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from nestfed.algorithms import make
from nestfed.experiments import frame
from nestfed.experiments.cells import Cell, train
from nestfed.experiments.invariant.task import InnerMeanDrawn, MeanOfLosses, draw_true_model, make_invariant_task

COMPOSED = {"fcsg": "FCSG", "fcsg-m": "FCSG-M", "acc-fcsg-m": "Acc-FCSG-M"}
CONTRAST = "losses"
TITLES = {**COMPOSED, CONTRAST: "FCSG on the mean of losses"}
CHOSEN_BY = "validation_accuracy"
FIRST_CHOOSING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    dimension: int = 10
    clients: int = 16
    noises: tuple[float, ...] = (1.0, 1.5, 2.0)  # sigma_2 with sigma_1 = 1
    views: tuple[int, ...] = (1, 10, 100)  # m
    rates: tuple[float, ...] = (0.01, 0.005, 0.001)
    betas: tuple[float, ...] = (0.001, 0.01, 0.1, 0.5, 0.9)
    local_steps: int = 50
    first_batches: int = 32
    rounds: int = 1000
    evaluations: int = 40
    seeds: int = 8
    choosing_seeds: int = 2
    validation: int = 10_000
    test: int = 50_000


QUICK = Plan(
    dimension=3,
    clients=4,
    noises=(1.0, 2.0),
    views=(1, 10),
    rates=(0.05,),
    betas=(0.5,),
    local_steps=5,
    first_batches=1,
    rounds=40,
    evaluations=8,
    seeds=3,
    choosing_seeds=1,
    validation=400,
    test=2000,
)


# ------------------------------------------------------------------------------------------------- trainings


class Trainings(frame.Trainings[Plan]):
    """The cells: `choose-METHOD`, the whole grid at every noise and number of views, where there is something to
    choose; and `METHOD`, with the chosen settings."""

    def names(self) -> list[str]:
        several = [method for method in TITLES if len(self._candidates(method)) > 1]
        return [*(f"choose-{method}" for method in several), *TITLES]

    def part(self, method: str, noise: float, views: int) -> Cell:
        """The training that counts. With one view there is no difference between the composition and the contrast."""
        return select_settings(self.cell("fcsg" if method == CONTRAST and views == 1 else method), noise, views)

    def tried(self, method: str, noise: float, views: int) -> Cell:
        """What was trained for choosing."""
        return select_settings(self.cell(f"choose-{method}"), noise, views)

    def final(self, method: str, noise: float, views: int, metric: str) -> pd.Series:
        return self.part(method, noise, views).final(metric)

    def places(self, method: str) -> list[tuple[float, int]]:
        """(noise, views) of the method's own trainings."""
        views = [m for m in self.plan.views if method != CONTRAST or m > 1]
        return [(noise, m) for noise in self.plan.noises for m in views]

    def train(self, name: str) -> Cell:
        plan, choosing, method = self.plan, name.startswith("choose-"), name.removeprefix("choose-")
        first, number = (FIRST_CHOOSING_SEED, plan.choosing_seeds) if choosing else (0, plan.seeds)
        words = [
            {"noise": noise, "m": views} | one
            for noise, views in self.places(method)
            for one in (self._candidates(method) if choosing else [self._chosen(method, noise, views)])
        ]
        settings = [(one, self._make_setting(method, one)) for one in words]
        aside = {"validation": plan.validation} if choosing else {"test": plan.test}
        # Another seed of the task: the points put aside for choosing are not those of the test.
        task = make_invariant_task(settings[0][1][1], clients=plan.clients, aside=aside, seed=first)
        cell = train(
            settings,
            task,
            range(first, first + number),
            rounds=plan.rounds,
            evaluate_every=plan.rounds // (1 if choosing else plan.evaluations),
            progress=self.progress,
            title=name,
        )
        # Six decimals are what float32 knows of numbers near 1; the files are a third of the size.
        return cell._replace(metrics={key: np.round(values.astype(float), 6) for key, values in cell.metrics.items()})

    def _candidates(self, method: str) -> list[dict[str, float]]:
        rates = [{"lr": lr} for lr in self.plan.rates]
        if method in ("fcsg", CONTRAST):
            return rates
        return [rate | {"beta": beta} for rate in rates for beta in self.plan.betas]

    def _chosen(self, method: str, noise: float, views: int) -> dict[str, Any]:
        """The settings that validation points prefer."""
        candidates = self._candidates(method)
        if len(candidates) == 1:
            return candidates[0]
        tried = self.tried(method, noise, views)
        return tried.settings[tried.best(CHOSEN_BY)]

    def _make_setting(self, method: str, words: Mapping[str, Any]) -> tuple[Any, Any]:
        """(algorithm, problem) of these words."""
        momentum = {"beta": words["beta"], "first_batches": self.plan.first_batches} if "beta" in words else {}
        name = "fcsg" if method == CONTRAST else method
        algorithm = make(name, lr=words["lr"], local_steps=self.plan.local_steps, **momentum)
        truth = draw_true_model(self.plan.dimension)
        if method == CONTRAST:
            return algorithm, MeanOfLosses(truth=truth, noise=words["noise"], inner_samples=words["m"])
        return algorithm, InnerMeanDrawn(truth=truth, noise=words["noise"], views=float(words["m"]))


def select_settings(cell: Cell, noise: float, views: int) -> Cell:
    """The settings of a cell with this noise and number of views."""
    rows = [i for i, words in enumerate(cell.settings) if (words["noise"], words["m"]) == (noise, views)]
    return cell._replace(
        settings=[cell.settings[i] for i in rows],
        metrics={name: values[rows] for name, values in cell.metrics.items()},
        diverged=cell.diverged[rows],
    )
