"""Imbalanced images: CIFAR10-ST with ResNet20 on eight clients, Figures 1, 2 and 4 of "Federated compositional
optimization: the impact of two-sided learning rates on communication efficiency".

Of each class in the first half only the last 100 training images are kept; the test set is balanced. Settings are
chosen on a tenth of the training images that is put aside for that; the runs that count train on all of them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jinja2
import numpy as np
import pandas as pd
import tomli_w

from nestfed.algorithms import make
from nestfed.core.schedules import StepDecay
from nestfed.core.task import Task
from nestfed.data.images import FederatedImages, Images, deal_images, load_images
from nestfed.experiments.cells import Cell, kept, train
from nestfed.experiments.dro_images.data import shorten_first_half
from nestfed.experiments.dro_images.task import ClassLimits, ImageLosses, image_losses, image_task
from nestfed.experiments.verdicts import Claim, all_above, claims_table, markdown_claims
from nestfed.models import CNN, Convolution, ImageModel, ResNet
from nestfed.problems.robust import KL, MeanLoss
from nestfed.report import figures, studies, tables
from nestfed.report.statistics import paired

TITLES = {"feddro": "FedDRO", "ds-feddro": "DS-FedDRO", "fastdro": "FastDRO", "pdsgd": "PDSGD", "mbsgd": "MBSGD"}
PROPOSED = ("feddro", "ds-feddro")
CENTRALISED = ("fastdro", "pdsgd", "mbsgd")
SERVER_RATE = 1.3  # both server rates of DS-FedDRO, the paper's for CIFAR10-ST
SHOWN = {
    "train_accuracy": "train accuracy", "test_accuracy": "test accuracy",
    "test_worst_class_accuracy": "test accuracy of the worst class",
}  # fmt: skip
CHOSEN_BY = "validation_balanced_accuracy"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    data: str = "cifar10"
    keep: int = 100
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
    data="mnist", keep=20, model=CNN(layers=(Convolution(8, pool=4),)), clients=2, batch=4, steps=8,
    search_steps=4, rates=(0.01, 0.05), prices=(5.0,), more_rates=(0.01,), betas=(0.5,), penalties=(1.0,), seeds=2,
    local_steps=(1, 2), uneven=(), evaluations=2,
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
    plan = QUICK if quick else Plan()
    experiment = Experiment(folder, plan, shorten_first_half(load_images(plan.data), plan.keep), progress)
    for name in experiment.names():
        experiment.cell(name)
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


def trainings(plan: Plan) -> list[str]:
    """The trainings that count: all methods with one local step, ours with more, and on clients that differ."""
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


def parts(name: str) -> tuple[str, int, str]:
    """(method, local steps, dealing) of a training's name."""
    method, steps, dealing = name.rsplit("-", 2)
    return method, int(steps), dealing


def choice_parts(name: str) -> tuple[str, int]:
    """(method, local steps) of the name of a choice of settings."""
    method, steps = name.removeprefix("choose-").rsplit("-", 1)
    return method, int(steps)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The cells: `choose-METHOD-LOCALSTEPS` (step size and price with one local step, step size and beta with more)
    and the trainings that count, `METHOD-LOCALSTEPS-DEALING`."""

    folder: Path
    plan: Plan
    images: Images
    progress: bool | None = None

    def names(self) -> list[str]:
        """All cells, in an order in which each finds what it needs."""
        return [*self.choices(), *trainings(self.plan)]

    def choices(self) -> list[str]:
        more = [steps for steps in self.plan.local_steps if steps > 1]
        return [
            *(f"choose-{method}-1" for method in TITLES),
            *(f"choose-{method}-{steps}" for method in PROPOSED for steps in more),
        ]

    def cell(self, name: str) -> Cell:
        return kept(self.folder / "cells" / f"{name.replace(':', '-')}.json", functools.partial(self._train, name))

    def _train(self, name: str) -> Cell:
        if name.startswith("choose-"):
            method, steps = choice_parts(name)
            return self._sweep(method, self._grid(method, steps), steps, self.plan.search_steps, choosing=True)
        method, steps, dealing = parts(name)
        return self._sweep(
            method, [self.chosen(method, steps)], steps, self.plan.steps, choosing=False, dealing=dealing
        )

    def _grid(self, method: str, local_steps: int) -> list[dict[str, Any]]:
        plan = self.plan
        if local_steps == 1:
            key, values = ("penalty", plan.penalties) if method == "pdsgd" else ("price", plan.prices)
            return [{"lr": lr, key: value} for lr in plan.rates for value in values]
        price = self.chosen(method, 1)["price"]
        # A server rate that takes more than the whole step to the new value overshoots it in every round.
        betas = [beta for beta in plan.betas if method != "ds-feddro" or SERVER_RATE * beta <= 1]
        return [{"lr": lr, "price": price, "beta": beta} for lr in plan.more_rates for beta in betas]

    def chosen(self, method: str, local_steps: int) -> dict[str, Any]:
        """The settings that validation images prefer."""
        cell = self.cell(f"choose-{method}-{local_steps}")
        return cell.settings[cell.best(CHOSEN_BY)]

    def _sweep(
        self, method: str, grid: Sequence[dict[str, Any]], local_steps: int, steps: int, *, choosing: bool,
        dealing: str = "iid",
    ) -> Cell:  # fmt: skip
        plan = self.plan
        seeds = range(1) if choosing else range(plan.seeds)
        dealt = [
            deal_images(
                self.images, partition=dealing, clients=plan.clients, validation=0.1 if choosing else 0.0, seed=seed
            )
            for seed in seeds
        ]
        losses = image_losses(dealt[0], plan.model)
        tasks = [self._task(method, images, losses, seed) for images, seed in zip(dealt, seeds, strict=True)]
        settings = [(words, self._setting(method, words, losses, dealt[0], local_steps, steps)) for words in grid]
        rounds = steps // local_steps
        every = max(1, rounds if choosing else rounds // plan.evaluations)
        return train(
            settings, tasks, seeds, rounds=rounds, evaluate_every=every, progress=self.progress,
            title=f"{TITLES[method]}, {local_steps} local steps",
        )  # fmt: skip

    def _task(self, method: str, images: FederatedImages, losses: ImageLosses, seed: int) -> Task:
        params = self.plan.model.init(jax.random.key(seed), images.rows.columns["image"].shape[1:])
        problem = self._problem(method, losses, images, 1.0)
        return image_task(problem, images, params, losses=losses, batch_size=self.plan.batch)

    def _problem(self, method: str, losses: ImageLosses, images: FederatedImages, price: float | None) -> Any:
        labels, decay = images.rows.columns["label"], self.plan.weight_decay
        if method == "pdsgd":
            shares = np.bincount(labels, minlength=len(images.class_names)) / len(labels)
            return ClassLimits(losses=losses, shares=shares.astype(np.float32), weight_decay=decay)
        if method == "fastdro":
            return MeanLoss(losses=losses, weight_decay=decay)
        return KL(losses=losses, price=price or 1.0, weight_decay=decay, largest_weight=float(len(labels)))

    def _setting(
        self, method: str, words: dict[str, Any], losses: ImageLosses, images: FederatedImages, local_steps: int,
        steps: int,
    ) -> tuple[Any, Any]:  # fmt: skip
        """(algorithm, problem) of these words; the step size falls to a tenth after three quarters, as in the paper."""
        rate = StepDecay(scale=words["lr"], at=0.75 * steps)
        own: dict[str, dict[str, Any]] = {
            "feddro": {"beta": words.get("beta", 0.9), "local_steps": local_steps},
            "ds-feddro": {
                "beta": words.get("beta", 0.5), "server_lr": SERVER_RATE, "server_inner_lr": SERVER_RATE,
                "local_steps": local_steps,
            },
            "fastdro": {"geometry": "chi-square-penalty", "price": words.get("price", 1.0)},
            "pdsgd": {"penalty": words.get("penalty", 1.0), "dual_lr": words.get("penalty", 1.0)},
            "mbsgd": {},
        }  # fmt: skip
        return make(method, lr=rate, **own[method]), self._problem(method, losses, images, words.get("price"))


# ------------------------------------------------------------------------------------------------- results


def final_table(experiment: Experiment) -> pd.DataFrame:
    """One row per training: settings, means and spreads over seeds, exchanges and bytes of the whole run."""
    rows = []
    for name in trainings(experiment.plan):
        method, steps, dealing = parts(name)
        cell = experiment.cell(name)
        rounds = int(cell.round[-1])
        row = {"dealing": dealing, "method": TITLES[method], "local steps": steps, "rounds": rounds}
        for metric, title in SHOWN.items():
            values = cell.final(metric)
            row |= {title: values.mean(), f"{title}, std": values.std(ddof=0)}
        row |= {
            "exchanges": cell.cost["exchanges"] * rounds,
            "MB up per client": cell.cost["bytes_up"] * rounds / 1e6,
            "runs that diverged": int((cell.diverged >= 0).sum()), "seeds": len(cell.seeds),
            "minutes": cell.seconds / 60,
        }  # fmt: skip
        rows.append(row)
    return pd.DataFrame(rows)


def choice_table(experiment: Experiment) -> pd.DataFrame:
    rows = []
    for name in experiment.choices():
        method, steps = choice_parts(name)
        cell = experiment.cell(name)
        best = cell.settings[cell.best(CHOSEN_BY)]
        rows.append(
            {
                "method": TITLES[method],
                "local steps": steps,
                "chosen": ", ".join(f"{key} = {value:g}" for key, value in best.items()),
                "balanced validation accuracy": cell.metrics[CHOSEN_BY][cell.best(CHOSEN_BY), 0, -1],
                "settings tried": len(cell.settings), "of them diverged": int((cell.diverged >= 0).any(1).sum()),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def check_claims(experiment: Experiment) -> list[Claim]:
    final = lambda name, metric: experiment.cell(name).final(metric)
    against = lambda metric: {
        f"{TITLES[ours]} minus {TITLES[theirs]}": paired(
            final(f"{ours}-1-iid", metric), final(f"{theirs}-1-iid", metric)
        )
        for ours in PROPOSED
        for theirs in CENTRALISED
    }
    counts = experiment.plan.local_steps
    middle, last = counts[len(counts) // 2], counts[-1]
    gain = {
        f"{TITLES[method]}, {middle} local steps minus 1": _at_equal_rounds(experiment, method, middle)
        for method in PROPOSED
    }
    further = {
        f"{TITLES[method]}, {last} local steps minus {middle}": paired(
            final(f"{method}-{last}-iid", "test_accuracy"), final(f"{method}-{middle}-iid", "test_accuracy")
        )
        for method in PROPOSED
    }
    server = {
        "train accuracy": paired(final("ds-feddro-1-iid", "train_accuracy"), final("feddro-1-iid", "train_accuracy")),
        "test accuracy": paired(final("ds-feddro-1-iid", "test_accuracy"), final("feddro-1-iid", "test_accuracy")),
    }
    training, test = against("train_accuracy"), against("test_accuracy")
    return [
        Claim(
            "1", "FedDRO and DS-FedDRO reach at least the training accuracy of the centralised baselines.",
            "final train accuracy", training, all_above(training, 0.0),
        ),
        Claim(
            "2", "Their test accuracy is comparable (within one point).", "final test accuracy", test,
            all_above(test, -0.01), level=-0.01,
        ),
        Claim("3", "DS-FedDRO is above FedDRO.", "DS-FedDRO minus FedDRO", server, all_above(server, 0.0)),
        Claim(
            "4", "Accuracy at a given number of rounds gains with local steps.",
            f"test accuracy after the rounds that {middle} local steps take", gain, all_above(gain, 0.0),
        ),
        Claim(
            "5", "Then it saturates: still more local steps, with the same total of them, gain nothing.",
            "final test accuracy", further, _saturates(further),
        ),
    ]  # fmt: skip


def _at_equal_rounds(experiment: Experiment, method: str, local_steps: int) -> Any:
    many, one = experiment.cell(f"{method}-{local_steps}-iid"), experiment.cell(f"{method}-1-iid")
    known = int(np.searchsorted(one.round, many.round[-1]))  # the first evaluation with at least as many rounds
    return paired(many.final("test_accuracy"), pd.Series(one.metrics["test_accuracy"][0, :, known], one.seeds))


def _saturates(further: Any) -> str:
    gained = sum(result.low > 0 for result in further.values())
    unknown = sum(not np.isfinite(result.low) for result in further.values())
    if unknown:
        return f"cannot be said (no interval in {unknown} of {len(further)} cases)"
    return f"holds (no clear gain in {len(further)} cases)" if not gained else f"does not hold ({gained} clear gains)"


# ------------------------------------------------------------------------------------------------- figures and page


def write_page(experiment: Experiment, command: str) -> Path:
    folder, plan = experiment.folder, experiment.plan
    table, chosen, claims = final_table(experiment), choice_table(experiment), check_claims(experiment)
    for name, frame in {"final": table, "chosen": chosen, "claims": claims_table(claims)}.items():
        (folder / "tables").mkdir(parents=True, exist_ok=True)
        frame.to_csv(folder / "tables" / f"{name}.csv", index=False)
    history = pd.concat([experiment.cell(f"{method}-1-iid").history(method) for method in TITLES], ignore_index=True)
    figures.write(
        studies.metric_panels(history, SHOWN, TITLES, xlabel="communication rounds (one local step each)"),
        folder / "figures", "figure1-methods",
    )  # fmt: skip
    figures.write(
        studies.lines_over(table[table.dealing == "iid"], "local steps", list(SHOWN.values())),
        folder / "figures",
        "figure2-local-steps",
    )
    settings = dataclasses.asdict(plan) | {"model": str(plan.model)}
    (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    cells = [experiment.cell(name) for name in experiment.names()]
    template = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    full = Plan()
    missing = []  # what a page made from fewer cells does not show
    if plan.data == full.data:
        missing += [f"{steps} local steps" for steps in full.local_steps if steps not in plan.local_steps]
        missing += [f"clients dealt by {dealing}" for dealing in full.uneven if dealing not in plan.uneven]
    page = folder / "README.md"
    text = template.render(
        plan=plan, command=command, missing=missing, machines=sorted({cell.machine for cell in cells}),
        minutes=f"{sum(cell.seconds for cell in cells) / 60:.0f}", claims=markdown_claims(claims),
        table=tables.markdown(table), chosen=tables.markdown(chosen), images=len(experiment.images.train_labels),
    )  # fmt: skip
    page.write_text(text, encoding="utf-8")
    return page
