"""Imbalanced images: CIFAR10-ST with ResNet20 on eight clients, Figures 1, 2 and 4 of "Federated compositional
optimization: the impact of two-sided learning rates on communication efficiency".

Of each class in the first half only the last 100 training images are kept; the test set is balanced. Settings are
chosen on a tenth of the training images that is put aside for that; the runs that count train on all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from nestfed.algorithms import make
from nestfed.core.schedules import StepDecay
from nestfed.core.task import Task
from nestfed.data.images import FederatedImages, deal_images
from nestfed.experiments import frame
from nestfed.experiments.cells import Cell, train
from nestfed.experiments.dro_images import data
from nestfed.experiments.dro_images.task import ClassLimits, ImageLosses, make_image_losses, make_image_task
from nestfed.experiments.image_tasks import MADE_UP
from nestfed.models import CNN, Convolution, ImageModel, ResNet
from nestfed.problems.robust import KL, MeanLoss

TITLES = {"feddro": "FedDRO", "ds-feddro": "DS-FedDRO", "fastdro": "FastDRO", "pdsgd": "PDSGD", "mbsgd": "MBSGD"}
PROPOSED = ("feddro", "ds-feddro")
SERVER_RATE = 1.3  # both server rates of DS-FedDRO, the paper's for CIFAR10-ST
CHOSEN_BY = "validation_balanced_accuracy"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    data: str = "cifar10"
    keep: int = 100
    images: int = 25_500  # training images that are left
    model: ImageModel = ResNet(dtype="bfloat16")
    clients: int = 8
    batch: int = 16
    steps: int = 199 * 16  # local steps; 199 pass over all training images once
    search_steps: int = 199 * 6
    rates: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1)
    prices: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0)
    more_rates: tuple[float, ...] = (0.01, 0.05, 0.1)  # with several local steps, together with betas
    betas: tuple[float, ...] = (0.1, 0.5, 0.9)
    penalties: tuple[float, ...] = (0.1, 1.0, 10.0)  # of PDSGD, for its multipliers' steps too
    seeds: int = 3
    local_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    uneven: tuple[str, ...] = ("dirichlet:0.3",)  # other ways to deal the images, for our methods
    uneven_steps: tuple[int, ...] = (1, 8)  # local steps per round there, with the settings of the even dealing
    evaluations: int = 8
    weight_decay: float = 5e-4


QUICK = Plan(
    data=MADE_UP,
    keep=20,
    images=700,
    model=CNN(layers=(Convolution(8, pool=4),)),
    clients=2,
    batch=4,
    steps=8,
    search_steps=4,
    rates=(0.01, 0.05),
    prices=(5.0,),
    more_rates=(0.01,),
    betas=(0.5,),
    penalties=(1.0,),
    seeds=2,
    local_steps=(1, 2),
    uneven=(),
    evaluations=2,
)


# ------------------------------------------------------------------------------------------------- trainings


def split_name(name: str) -> tuple[str, int, str]:
    """(method, local steps, dealing) of a training's name."""
    method, steps, dealing = name.rsplit("-", 2)
    return method, int(steps), dealing


def split_choice_name(name: str) -> tuple[str, int]:
    """(method, local steps) of the name of a choice of settings."""
    method, steps = name.removeprefix("choose-").rsplit("-", 1)
    return method, int(steps)


class Trainings(frame.Trainings[Plan]):
    """The cells: `choose-METHOD-LOCALSTEPS` (step size and price with one local step, step size and beta with more)
    and the trainings that count, `METHOD-LOCALSTEPS-DEALING`."""

    def names(self) -> list[str]:
        return [*self.choices(), *self.name_counting()]

    def choices(self) -> list[str]:
        more = [steps for steps in self.plan.local_steps if steps > 1]
        return [
            *(f"choose-{method}-1" for method in TITLES),
            *(f"choose-{method}-{steps}" for method in PROPOSED for steps in more),
        ]

    def name_counting(self) -> list[str]:
        """The trainings that count: all methods with one local step, ours with more, and on clients that differ."""
        plan = self.plan
        more = [steps for steps in plan.local_steps if steps > 1]
        return [
            *(f"{method}-1-iid" for method in TITLES),
            *(f"{method}-{steps}-iid" for method in PROPOSED for steps in more),
            *(
                f"{method}-{steps}-{dealing}"
                for dealing in plan.uneven
                for method in PROPOSED
                for steps in plan.uneven_steps
            ),
        ]

    def train(self, name: str) -> Cell:
        if name.startswith("choose-"):
            method, steps = split_choice_name(name)
            return self._sweep(method, self._make_grid(method, steps), steps, self.plan.search_steps, choosing=True)
        method, steps, dealing = split_name(name)
        words = self.chosen(f"choose-{method}-{steps}", CHOSEN_BY)
        return self._sweep(method, [words], steps, self.plan.steps, choosing=False, dealing=dealing)

    def _make_grid(self, method: str, local_steps: int) -> list[dict[str, Any]]:
        plan = self.plan
        if local_steps == 1:
            key, values = ("penalty", plan.penalties) if method == "pdsgd" else ("price", plan.prices)
            return [{"lr": lr, key: value} for lr in plan.rates for value in values]
        price = self.chosen(f"choose-{method}-1", CHOSEN_BY)["price"]
        # A server rate that takes more than the whole step to the new value overshoots it in every round.
        betas = [beta for beta in plan.betas if method != "ds-feddro" or SERVER_RATE * beta <= 1]
        return [{"lr": lr, "price": price, "beta": beta} for lr in plan.more_rates for beta in betas]

    def _sweep(
        self,
        method: str,
        grid: Sequence[dict[str, Any]],
        local_steps: int,
        steps: int,
        *,
        choosing: bool,
        dealing: str = "iid",
    ) -> Cell:
        plan, images = self.plan, data.load_short(self.plan.data, self.plan.keep)
        assert len(images.train_labels) == plan.images, "a page must not say otherwise"
        seeds = range(1) if choosing else range(plan.seeds)
        dealt = [
            deal_images(images, partition=dealing, clients=plan.clients, validation=0.1 if choosing else 0.0, seed=seed)
            for seed in seeds
        ]
        losses = make_image_losses(dealt[0], plan.model)
        tasks = [self._make_task(method, images, losses, seed) for images, seed in zip(dealt, seeds, strict=True)]
        settings = [(words, self._make_setting(method, words, losses, dealt[0], local_steps, steps)) for words in grid]
        rounds = steps // local_steps
        every = max(1, rounds if choosing else rounds // plan.evaluations)
        return train(
            settings,
            tasks,
            seeds,
            rounds=rounds,
            evaluate_every=every,
            progress=self.progress,
            title=f"{TITLES[method]}, {local_steps} local steps",
        )

    def _make_task(self, method: str, images: FederatedImages, losses: ImageLosses, seed: int) -> Task:
        params = self.plan.model.init(jax.random.key(seed), images.rows.columns["image"].shape[1:])
        problem = self._make_problem(method, losses, images, 1.0)
        return make_image_task(problem, images, params, losses=losses, batch_size=self.plan.batch)

    def _make_problem(self, method: str, losses: ImageLosses, images: FederatedImages, price: float | None) -> Any:
        labels, decay = images.rows.columns["label"], self.plan.weight_decay
        if method == "pdsgd":
            shares = np.bincount(labels, minlength=len(images.class_names)) / len(labels)
            return ClassLimits(losses=losses, shares=shares.astype(np.float32), weight_decay=decay)
        if method == "fastdro":
            return MeanLoss(losses=losses, weight_decay=decay)
        return KL(losses=losses, price=price or 1.0, weight_decay=decay, largest_weight=float(len(labels)))

    def _make_setting(
        self,
        method: str,
        words: dict[str, Any],
        losses: ImageLosses,
        images: FederatedImages,
        local_steps: int,
        steps: int,
    ) -> tuple[Any, Any]:
        """(algorithm, problem) of these words; the step size falls to a tenth after three quarters, as in the paper."""
        rate = StepDecay(scale=words["lr"], at=0.75 * steps)
        own: dict[str, dict[str, Any]] = {
            "feddro": {"beta": words.get("beta", 0.9), "local_steps": local_steps},
            "ds-feddro": {
                "beta": words.get("beta", 0.5),
                "server_lr": SERVER_RATE,
                "server_inner_lr": SERVER_RATE,
                "local_steps": local_steps,
            },
            "fastdro": {"geometry": "chi-square-penalty", "price": words.get("price", 1.0)},
            "pdsgd": {"penalty": words.get("penalty", 1.0), "dual_lr": words.get("penalty", 1.0)},
            "mbsgd": {},
        }
        return make(method, lr=rate, **own[method]), self._make_problem(method, losses, images, words.get("price"))
