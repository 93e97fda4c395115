"""Accuracy against privacy: FedReCo and FedAvg with the Gaussian mechanism on every upload.

Two readings of epsilon: the paper's formula as it stands (sensitivity = clip, also where it is not proven), and the
analytic mechanism with the true sensitivity of 2 clip. Noise multipliers are given directly beside them, because noise
that keeps a usual epsilon is far larger than the signal in a network of a million numbers.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from nestfed.experiments import frame
from nestfed.experiments.cells import Cell, train_in_turn
from nestfed.experiments.personal import plan as personal
from nestfed.experiments.personal.plan import FLOOR, TITLES
from nestfed.uploads.privacy import LocalDP
from nestfed.uploads.transforms import Clip, ClipMean, Transform

METHODS = ("fedreco", "fedavg-whole")
RELEASES = {
    "plain": "as they are",
    "clip": "clipped",
    "paper": "paper's formula",
    "analytic": "analytic mechanism",
    "noise": "noise multiplier",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    training: personal.Plan = dataclasses.replace(
        personal.Plan(), data=(("fmnist", dataclasses.replace(personal.FMNIST, rounds=100, evaluate_every=20)),)
    )
    releases: tuple[str, ...] = tuple(RELEASES)
    epsilons: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0)  # of one release
    multipliers: tuple[float, ...] = (0.0001, 0.001, 0.01)  # noise / (2 clip)
    delta: float = 1e-5
    clip: float = 10.0

    def values(self, release: str) -> tuple[float, ...]:
        """What a release is done with: epsilons, multipliers, or nothing."""
        return {"paper": self.epsilons, "analytic": self.epsilons, "noise": self.multipliers}.get(release, (math.nan,))

    def guarantee(self, release: str, value: float) -> LocalDP | None:
        """The noise of a release; None: there is none."""
        common: dict[str, Any] = {"clip": self.clip, "delta": self.delta}
        if release == "paper":
            return LocalDP(epsilon=value, mechanism="paper", sensitivity_factor=1, as_printed=value >= 1, **common)
        if release == "analytic":
            return LocalDP(epsilon=value, **common)
        return LocalDP(noise_multiplier=value, **common) if release == "noise" else None

    def uploads(self, method: str, release: str, value: float) -> tuple[Transform | LocalDP, ...]:
        if release == "plain":
            return ()
        # The server clips the mean again; FedReCo does so in any case.
        again = () if method == "fedreco" else (ClipMean(norm=self.clip),)
        return (self.guarantee(release, value) or Clip(norm=self.clip), *again)


QUICK = Plan(training=personal.QUICK, releases=("plain", "analytic"), epsilons=(1.0, 100.0))


# ------------------------------------------------------------------------------------------------- trainings


class Trainings(frame.Trainings[Plan]):
    """The cells, DATA-METHOD-RELEASE, with a setting for every epsilon or multiplier; each can be trained alone."""

    def names(self) -> list[str]:
        of_data = lambda data: (
            f"{data}-{FLOOR}-plain",
            *(f"{data}-{method}-{release}" for method in METHODS for release in self.plan.releases),
        )
        return [name for data, _ in self.plan.training.data for name in of_data(data)]

    def train(self, name: str) -> Cell:
        data, method, release = split_name(name)
        plan, training = self.plan, self.plan.training
        seeds, facts, about = range(training.seeds), training.list_facts(data), dict(training.data)[data]
        algorithm = training.algorithm(method, facts["epoch"])
        facts |= {"numbers": find_upload_size(plan, data, method)}
        tasks = [training.task(data, method, seed) for seed in seeds]
        cells = [
            train_in_turn(
                [(facts if math.isnan(value) else facts | {"value": value}, algorithm)],
                tasks,
                seeds,
                uploads=plan.uploads(method, release, value),
                rounds=about.rounds,
                noise_seed=0,  # data are public
                evaluate_every=about.evaluate_every,
                progress=self.progress,
                title=f"{TITLES[method]}, {RELEASES[release]}",
            )
            for value in plan.values(release)
        ]
        together = lambda arrays: np.concatenate(list(arrays))
        return cells[0]._replace(
            settings=[words for cell in cells for words in cell.settings],
            metrics={name: together(cell.metrics[name] for cell in cells) for name in cells[0].metrics},
            diverged=together(cell.diverged for cell in cells),
            seconds=sum(cell.seconds for cell in cells),
        )

    def list_finished(self) -> dict[str, Cell]:
        return {name: self.cell(name) for name in self.names() if self.done(name)}


def split_name(name: str) -> tuple[str, str, str]:
    """(data, method, release) of a cell's name."""
    data, rest = name.split("-", 1)
    method, release = rest.rsplit("-", 1)
    return data, method, release


def find_upload_size(plan: Plan, data: str, method: str) -> int:
    """Numbers that a client uploads in a round."""
    about = dict(plan.training.data)[data]
    shape = plan.training.images(data, 0).shape
    params = jax.eval_shape(lambda: about.model.init(jax.random.key(0), shape))
    sent = params if method == "fedavg-whole" else params["extractor"]
    return sum(leaf.size for leaf in jax.tree.leaves(sent))
