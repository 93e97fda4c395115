"""Average precision on images, Table 2 of "Federated conditional stochastic optimization": MNIST and CIFAR-10 with
classes of the first half as negatives and a fifth of the others' training images as positives.

Settings are chosen on a tenth of the training images that is put aside for that; the runs that count train on all of
them.
"""

import dataclasses
import functools
from typing import Any

import jax

from nestfed.algorithms import make
from nestfed.core.task import Task
from nestfed.data.images import FederatedImages, Images
from nestfed.experiments import frame
from nestfed.experiments.auprc.data import deal_ranked, thin_out_second_half
from nestfed.experiments.auprc.task import BinaryLosses, ImageLoss, ImageScores, make_ranked_task
from nestfed.experiments.cells import Cell, train
from nestfed.experiments.image_tasks import MADE_UP, convert_to_numbers, find_images
from nestfed.models import CNN, Convolution
from nestfed.problems.ranking import AreaUnderRoc, AveragePrecision

TITLES = {"fedavg": "FedAvg", "coda-plus": "CODA+", "fcsg": "FCSG", "fcsg-m": "FCSG-M", "acc-fcsg-m": "Acc-FCSG-M"}
CHOSEN_BY = "validation_average_precision"


@dataclasses.dataclass(frozen=True)
class DataPlan:
    """One data set: its network, its batches and how long it is trained."""

    title: str
    model: CNN
    batch: int
    positives: int  # in a batch of the methods for average precision
    steps: int  # local steps
    search_steps: int  # where settings are chosen


# The networks, batches and numbers of steps are those of the authors' decentralised companion code.
MNIST = DataPlan(
    "MNIST",
    CNN(
        layers=(Convolution(20, 5, padding="VALID", pool=2), Convolution(50, 5, padding="VALID", pool=2)),
        hidden=(500,),
        outputs=1,
    ),
    batch=20,
    positives=3,
    steps=300,
    search_steps=300,
)
CIFAR10 = DataPlan(
    "CIFAR-10",
    CNN(
        layers=(Convolution(16, pool=2), Convolution(32, pool=2), Convolution(64, pool=2)), hidden=(512, 64), outputs=1
    ),
    batch=60,
    positives=20,
    steps=2000,
    search_steps=500,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    data: tuple[tuple[str, DataPlan], ...] = (("mnist", MNIST), ("cifar10", CIFAR10))
    methods: tuple[str, ...] = tuple(TITLES)
    keep: float = 0.2  # of the positive training images
    clients: int = 16
    local_steps: int = 10
    margin: float = 0.1
    rates: tuple[float, ...] = (0.001, 0.005, 0.01, 0.05, 0.1)
    more_rates: tuple[float, ...] = (0.5, 1.0)  # beyond the paper's grid, for methods that prefer its end
    betas: tuple[float, ...] = (0.1, 0.5, 0.9)
    seeds: int = 5
    search_seeds: int = 3  # one is not enough: with large steps some runs collapse and others win
    evaluations: int = 10


_SMALL = DataPlan("made-up images", CNN(layers=(Convolution(4, pool=4),), outputs=1), 6, 2, 4, 4)
QUICK = Plan(
    data=((MADE_UP, _SMALL),),
    methods=("fedavg", "coda-plus", "fcsg"),
    keep=0.1,
    clients=2,
    local_steps=2,
    rates=(0.01, 0.1),
    more_rates=(),
    betas=(0.5,),
    seeds=2,
    search_seeds=1,
    evaluations=2,
)


# ------------------------------------------------------------------------------------------------- trainings


class Trainings(frame.Trainings[Plan]):
    """The cells: `choose-DATA:METHOD` (step size and beta) and the trainings that count, `DATA:METHOD`."""

    def names(self) -> list[str]:
        plan = self.plan
        return [
            f"{what}{data}:{method}" for data, _ in plan.data for what in ("choose-", "") for method in plan.methods
        ]

    def images(self, data: str) -> Images:
        return _load_images(data, self.plan.keep)

    def train(self, name: str) -> Cell:
        data, method = name.removeprefix("choose-").split(":")
        if name.startswith("choose-"):
            return self._sweep(data, method, self._make_grid(method), choosing=True)
        return self._sweep(data, method, [self.chosen(f"choose-{name}", CHOSEN_BY)], choosing=False)

    def _make_grid(self, method: str) -> list[dict[str, Any]]:
        plan = self.plan
        rates = (*plan.rates, *plan.more_rates)
        if method in ("fcsg-m", "acc-fcsg-m"):
            return [{"lr": lr, "beta": beta} for lr in rates for beta in plan.betas]
        return [{"lr": lr} for lr in rates]

    def _sweep(self, data: str, method: str, grid: list[dict[str, Any]], *, choosing: bool) -> Cell:
        plan, about = self.plan, dict(self.plan.data)[data]
        seeds = range(plan.search_seeds if choosing else plan.seeds)
        dealt = [
            deal_ranked(self.images(data), clients=plan.clients, validation=0.1 if choosing else 0.0, seed=seed)
            for seed in seeds
        ]
        # One normalisation for all seeds: they then share a program.
        scores = ImageScores(about.model, convert_to_numbers(dealt[0].mean), convert_to_numbers(dealt[0].deviation))
        tasks = [
            self._make_task(method, about, images, scores, seed) for images, seed in zip(dealt, seeds, strict=True)
        ]
        steps = about.search_steps if choosing else about.steps
        rounds = steps // plan.local_steps
        return train(
            [(words, self._make_algorithm(method, words, steps)) for words in grid],
            tasks,
            seeds,
            rounds=rounds,
            evaluate_every=max(1, rounds if choosing else rounds // plan.evaluations),
            progress=self.progress,
            title=f"{about.title}, {TITLES[method]}",
        )

    def _make_algorithm(self, method: str, words: dict[str, Any], steps: int) -> Any:
        # CODA+: two stages, the second three times as long.
        more = {"stage_steps": max(1, steps // 4)} if method == "coda-plus" else {}
        return make(method, local_steps=self.plan.local_steps, **words, **more)

    def _make_task(self, method: str, about: DataPlan, images: FederatedImages, scores: ImageScores, seed: int) -> Task:
        params: Any = about.model.init(jax.random.key(seed), images.rows.columns["image"].shape[1:])
        if method == "fedavg":
            problem: Any = ImageLoss(losses=BinaryLosses(scores))
        elif method == "coda-plus":
            share = float(images.rows.columns["label"].mean())
            problem = AreaUnderRoc(scores=scores, positive_share=share)
            params = problem.start(params)
        else:
            problem = AveragePrecision(
                scores=scores, margin=self.plan.margin, positives=about.positives, inner_samples=about.batch
            )
        return make_ranked_task(problem, images, params, scores=scores, batch_size=about.batch)


@functools.lru_cache(maxsize=4)
def _load_images(data: str, keep: float) -> Images:
    return thin_out_second_half(find_images(data), keep)
