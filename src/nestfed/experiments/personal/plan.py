"""Personalised classification: FedReCo, FedReCo-PVR and their baselines on Fashion-MNIST and CIFAR-10 with few classes
per client, and on FEMNIST, where every client is a person.

All step sizes and strengths are those of the paper (its appendix and its authors' code), the same for all methods. One
more row goes past the paper: FedReCo with the server's step and the strength of the pull chosen on validation images.
The paper's own table is in a part that was not available.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np

from nestfed.algorithms import make
from nestfed.core.algorithm import Algorithm
from nestfed.experiments import frame
from nestfed.experiments.cells import Cell, train_in_turn
from nestfed.experiments.image_tasks import MADE_UP, find_images
from nestfed.experiments.personal.data import PersonalImages, deal_classes, deal_writers, hold_out
from nestfed.experiments.personal.femnist import CLASS_NAMES, load_femnist
from nestfed.experiments.personal.task import (
    COLOUR,
    GREY,
    ImageClasses,
    RandomImageClasses,
    make_personal_task,
    measure_newcomer,
)
from nestfed.models import CNN, Convolution
from nestfed.verbs.personalise import PersonalTask

TITLES = {
    "local-only": "local training only",
    "fedavg-whole": "FedAvg",
    "ditto": "Ditto",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "fedpac": "FedPAC",
    "fedcr": "FedCR",
    "fedreco": "FedReCo",
    "fedreco-pvr": "FedReCo-PVR",
    "fedreco-code": "FedReCo as coded",
    "fedreco-chosen": "FedReCo, chosen",
}
AS_CODED = "fedreco-code"  # where the authors' code differs from the paper: H is a sum, and the server's step is larger
CHOSEN = "fedreco-chosen"  # the server's step and the strength of the pull by validation images, not the paper's
PROPOSED = ("fedreco", "fedreco-pvr", AS_CODED)
FLOOR = "local-only"
CHOSEN_BY = "test_accuracy"  # of cells in which clients are judged by validation images


@dataclasses.dataclass(frozen=True)
class DataPlan:
    """One data set: where it comes from, how it is dealt, its network."""

    title: str
    source: str  # of `load_images`, or "femnist"
    model: CNN
    classes: int = 0  # of a client; 0: a client is a writer
    rounds: int = 200
    evaluate_every: int = 10
    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)
    vary: bool = False  # training images are moved and mirrored at random
    writers: int | None = None  # at most, newcomers included; None: all that have enough images
    newcomers: int = 0  # writers that come after training


FMNIST = DataPlan("Fashion-MNIST, 4 classes per client", "fashion-mnist", GREY, classes=4)
CIFAR10 = DataPlan(
    "CIFAR-10, 2 classes per client",
    "cifar10",
    COLOUR,
    classes=2,
    rounds=80,
    evaluate_every=20,
    mean=(0.491, 0.482, 0.447),
    deviation=(0.247, 0.243, 0.262),
    vary=True,
)
FEMNIST = DataPlan(
    "FEMNIST, a writer per client", "femnist", dataclasses.replace(GREY, outputs=len(CLASS_NAMES)), newcomers=10
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done, and with what settings."""

    data: tuple[tuple[str, DataPlan], ...] = (("fmnist", FMNIST), ("cifar10", CIFAR10), ("femnist", FEMNIST))
    methods: tuple[str, ...] = tuple(TITLES)
    clients: int = 50  # where classes are dealt
    seeds: int = 3
    batch: int = 48
    lr: float = 0.01
    clip: float = 10.0
    couplings: tuple[tuple[str, float], ...] = (
        ("fedreco", 0.01),
        ("fedreco-pvr", 0.01),
        (AS_CODED, 0.01),
        ("ditto", 0.01),
        ("fedpac", 1.0),
    )
    server_lr: float = 0.001  # of FedReCo's common extractor
    coded_server_lr: float = 0.01
    server_lrs: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)  # to choose from, with each of the next
    pulls: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    beta: float = 0.001  # of FedCR
    fine_tune_epochs: int = 10
    newcomer_rounds: int = 10

    def epoch(self, images: PersonalImages) -> int:
        """Steps in which a client of average size sees as many images as it has."""
        return math.ceil(float(np.mean(images.train.sizes)) / self.batch)

    def algorithm(self, method: str, epoch: int, **chosen: float) -> Algorithm:
        """Two epochs per round: of the head and then of the extractor, or of all together."""
        settings: dict[str, Any] = {"lr": self.lr, "clip": self.clip}
        if method in (*PROPOSED, CHOSEN, "fedrep", "fedpac"):
            settings |= {"head_steps": epoch, "local_steps": epoch}
        else:
            settings |= {"local_steps": 2 * epoch}
        couplings = dict(self.couplings)
        settings |= {"coupling": couplings[method]} if method in couplings else {}
        settings |= {"server_lr": self.server_lr} if method in PROPOSED else {}
        settings |= {"beta": self.beta} if method == "fedcr" else {}
        if method == AS_CODED:
            return make("fedreco", **(settings | {"server_lr": self.coded_server_lr, "server_grad": "full"}))
        if method == CHOSEN:
            return make("fedreco", **settings, **chosen)
        return make(method, **settings)

    def task(self, data: str, method: str, seed: int, *, choosing: bool = False) -> PersonalTask:
        """Where settings are chosen, clients are judged by a part of their training images."""
        about, images = dict(self.data)[data], self.images(data, seed)
        images = hold_out(images, seed=seed) if choosing else images
        kind = RandomImageClasses if method == "fedcr" else ImageClasses
        problem = kind(
            model=about.model,
            mean=about.mean,
            deviation=about.deviation,
            vary=about.vary,
            reduction="sum" if method == AS_CODED else "mean",
        )
        return make_personal_task(
            images,
            problem,
            seed=seed,
            batch_size=self.batch,
            fine_tune_steps=self.fine_tune_epochs * self.epoch(images),
            fine_tune_lr=self.lr,
        )

    def images(self, data: str, seed: int) -> PersonalImages:
        return _load_images(dict(self.data)[data], self.clients, seed)

    def list_facts(self, data: str) -> dict[str, int]:
        """What a page says of the data; kept with the trainings, so that pages can be written without them."""
        images = self.images(data, 0)
        return {
            "clients": images.train.clients,
            "train": int(np.sum(images.train.sizes)),
            "test": int(np.sum(images.test.sizes)),
            "epoch": self.epoch(images),
        }


@functools.lru_cache(maxsize=3)
def _load_images(about: DataPlan, clients: int, seed: int) -> PersonalImages:
    if about.classes:
        return deal_classes(_load(about.source), clients=clients, per_client=about.classes, seed=seed)
    return deal_writers(_load(about.source), writers=about.writers, newcomers=about.newcomers, seed=seed)


@functools.lru_cache(maxsize=1)
def _load(source: str) -> Any:
    return load_femnist() if source == "femnist" else find_images(source)


SMALL = CNN(layers=(Convolution(2, 1, stride=4),), hidden=(4,))
QUICK = Plan(
    data=((MADE_UP, DataPlan("made-up images, 2 classes per client", MADE_UP, SMALL, 2, rounds=4, evaluate_every=2)),),
    methods=("local-only", "fedreco", "fedreco-pvr", CHOSEN),
    seeds=2,
    server_lrs=(0.001, 0.1),
    pulls=(0.01,),
    fine_tune_epochs=1,
    newcomer_rounds=2,
)


# ------------------------------------------------------------------------------------------------- trainings


class Trainings(frame.Trainings[Plan]):
    """The cells, DATA-METHOD, and where FedReCo's settings are chosen, choose-DATA; each can be trained alone."""

    def names(self) -> list[str]:
        data, methods = [name for name, _ in self.plan.data], self.plan.methods
        choices = [f"choose-{name}" for name in data if CHOSEN in methods]
        return choices + [f"{name}-{method}" for name in data for method in methods]

    def train(self, name: str) -> Cell:
        if name.startswith("choose-"):
            return self._choose(name.removeprefix("choose-"))
        data, method = name.split("-", 1)
        plan, seeds, facts = self.plan, range(self.plan.seeds), self.plan.list_facts(data)
        about = dict(plan.data)[data]
        chosen = self.chosen(f"choose-{data}", CHOSEN_BY) if method == CHOSEN else {}
        return train_in_turn(
            [(facts | chosen, plan.algorithm(method, facts["epoch"], **chosen))],
            [plan.task(data, method, seed) for seed in seeds],
            seeds,
            after=functools.partial(self._newcomers, data),
            rounds=about.rounds,
            evaluate_every=about.evaluate_every,
            progress=self.progress,
            title=f"{TITLES[method]}, {data}",
        )

    def _choose(self, data: str) -> Cell:
        """FedReCo with every server step and every strength of the pull, with the first seed."""
        plan, rounds, epoch = self.plan, dict(self.plan.data)[data].rounds, self.plan.list_facts(data)["epoch"]
        grid = [{"server_lr": lr, "coupling": pull} for lr, pull in itertools.product(plan.server_lrs, plan.pulls)]
        return train_in_turn(
            [(words, plan.algorithm(CHOSEN, epoch, **words)) for words in grid],
            [plan.task(data, CHOSEN, 0, choosing=True)],
            [0],
            rounds=rounds,
            evaluate_every=rounds,
            progress=self.progress,
            title=f"choosing FedReCo's settings, {data}",
        )

    def _newcomers(self, data: str, algorithm: Any, task: Any, run: Any, seed: int) -> dict[str, float]:
        """How well those who were not there do with what the server has in the end."""
        newcomers = self.plan.images(data, seed).newcomers
        if not newcomers:
            return {}
        if int(run.diverged) >= 0:
            return {"newcomer_accuracy": np.nan, "tuned_newcomer_accuracy": np.nan}
        rounds = self.plan.newcomer_rounds
        found = [measure_newcomer(algorithm, task, run.server, one, rounds=rounds, seed=seed) for one in newcomers]
        before, after = np.mean(found, axis=0)
        return {"newcomer_accuracy": before, "tuned_newcomer_accuracy": after}

    def list_finished(self) -> dict[str, dict[str, Cell]]:
        """Data -> method -> its training, as far as they are there."""
        done = lambda data: [method for method in self.plan.methods if self.done(f"{data}-{method}")]
        found = {data: {m: self.cell(f"{data}-{m}") for m in done(data)} for data, _ in self.plan.data}
        return {data: cells for data, cells in found.items() if cells}
