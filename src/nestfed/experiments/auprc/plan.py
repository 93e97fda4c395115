"""Average precision on images, Table 2 of "Federated conditional stochastic optimization": MNIST and CIFAR-10 with
classes of the first half as negatives and a fifth of the others' training images as positives.

Settings are chosen on a tenth of the training images that is put aside for that; the runs that count train on all of
them.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jinja2
import pandas as pd
import tomli_w

from nestfed.algorithms import make
from nestfed.core.task import Task
from nestfed.data.images import FederatedImages, Images, load_images
from nestfed.experiments.auprc.task import BinaryLosses, ImageScores, deal_ranked, ranked_task, rare_second_half
from nestfed.experiments.cells import Cell, Trainings, train
from nestfed.experiments.verdicts import Claim, all_above, claims_table, markdown_claims
from nestfed.models import CNN, Convolution
from nestfed.problems.ranking import AreaUnderRoc, AveragePrecision
from nestfed.problems.robust import MeanLoss
from nestfed.report import figures, studies, tables
from nestfed.report.statistics import paired

TITLES = {"fedavg": "FedAvg", "coda-plus": "CODA+", "fcsg": "FCSG", "fcsg-m": "FCSG-M", "acc-fcsg-m": "Acc-FCSG-M"}
OURS = ("fcsg", "fcsg-m", "acc-fcsg-m")
PUBLISHED = {
    "mnist": {"fedavg": 0.9357, "coda-plus": 0.9733, "fcsg": 0.9868, "fcsg-m": 0.9878, "acc-fcsg-m": 0.9879},
    "cifar10": {"fedavg": 0.5059, "coda-plus": 0.6039, "fcsg": 0.7130, "fcsg-m": 0.7157, "acc-fcsg-m": 0.7184},
}
CHOSEN_BY, COUNTS = "validation_average_precision", "test_average_precision"


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
        hidden=(500,), outputs=1,
    ),
    batch=20, positives=3, steps=300, search_steps=300,
)  # fmt: skip
CIFAR10 = DataPlan(
    "CIFAR-10",
    CNN(
        layers=(Convolution(16, pool=2), Convolution(32, pool=2), Convolution(64, pool=2)), hidden=(512, 64), outputs=1
    ),
    batch=60, positives=20, steps=2000, search_steps=500,
)  # fmt: skip


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


_SMALL = DataPlan("MNIST", CNN(layers=(Convolution(4, pool=4),), outputs=1), 6, 2, 4, 4)
QUICK = Plan(
    data=(("mnist", _SMALL),), methods=("coda-plus", "fcsg"), keep=0.02, clients=2, local_steps=2,
    rates=(0.01, 0.1), more_rates=(), betas=(0.5,), seeds=2, search_seeds=1, evaluations=2,
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
    experiment = Experiment(folder, QUICK if quick else Plan(), progress)
    experiment.train_all()
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


@dataclasses.dataclass(frozen=True)
class Experiment(Trainings):
    """The cells: `choose-DATA-METHOD` (step size and beta) and the trainings that count, `DATA-METHOD`."""

    plan: Plan

    def names(self) -> list[str]:
        plan = self.plan
        return [
            f"{what}{data}:{method}" for data, _ in plan.data for what in ("choose-", "") for method in plan.methods
        ]

    def images(self, data: str) -> Images:
        return _images(data, self.plan.keep)

    def _train(self, name: str) -> Cell:
        data, method = name.removeprefix("choose-").split(":")
        if name.startswith("choose-"):
            return self._sweep(data, method, self._grid(method), choosing=True)
        return self._sweep(data, method, [self.chosen(data, method)], choosing=False)

    def _grid(self, method: str) -> list[dict[str, Any]]:
        plan = self.plan
        rates = (*plan.rates, *plan.more_rates)
        if method in ("fcsg-m", "acc-fcsg-m"):
            return [{"lr": lr, "beta": beta} for lr in rates for beta in plan.betas]
        return [{"lr": lr} for lr in rates]

    def chosen(self, data: str, method: str) -> dict[str, Any]:
        """The settings that validation images prefer."""
        cell = self.cell(f"choose-{data}:{method}")
        return cell.settings[cell.best(CHOSEN_BY)]

    def _sweep(self, data: str, method: str, grid: list[dict[str, Any]], *, choosing: bool) -> Cell:
        plan, about = self.plan, dict(self.plan.data)[data]
        seeds = range(plan.search_seeds if choosing else plan.seeds)
        dealt = [
            deal_ranked(self.images(data), clients=plan.clients, validation=0.1 if choosing else 0.0, seed=seed)
            for seed in seeds
        ]
        numbers = lambda a: tuple(float(v) for v in a)
        # One normalisation for all seeds: they then share a program.
        scores = ImageScores(about.model, numbers(dealt[0].mean), numbers(dealt[0].deviation))
        tasks = [self._task(method, about, images, scores, seed) for images, seed in zip(dealt, seeds, strict=True)]
        steps = about.search_steps if choosing else about.steps
        rounds = steps // plan.local_steps
        return train(
            [(words, self._algorithm(method, words, steps)) for words in grid], tasks, seeds, rounds=rounds,
            evaluate_every=max(1, rounds if choosing else rounds // plan.evaluations), progress=self.progress,
            title=f"{about.title}, {TITLES[method]}",
        )  # fmt: skip

    def _algorithm(self, method: str, words: dict[str, Any], steps: int) -> Any:
        # CODA+: two stages, the second three times as long.
        more = {"stage_steps": max(1, steps // 4)} if method == "coda-plus" else {}
        return make(method, local_steps=self.plan.local_steps, **words, **more)

    def _task(
        self, method: str, about: DataPlan, images: FederatedImages, scores: ImageScores, seed: int
    ) -> Task:  # fmt: skip
        params: Any = about.model.init(jax.random.key(seed), images.rows.columns["image"].shape[1:])
        if method == "fedavg":
            problem: Any = MeanLoss(losses=BinaryLosses(scores))
        elif method == "coda-plus":
            share = float(images.rows.columns["label"].mean())
            problem = AreaUnderRoc(scores=scores, positive_share=share)
            params = problem.start(params)
        else:
            problem = AveragePrecision(
                scores=scores, margin=self.plan.margin, positives=about.positives, inner_samples=about.batch
            )
        return ranked_task(problem, images, params, scores=scores, batch_size=about.batch)


@functools.cache
def _images(data: str, keep: float) -> Images:
    return rare_second_half(load_images(data), keep)


# ------------------------------------------------------------------------------------------------- results


def final_table(experiment: Experiment) -> pd.DataFrame:
    """One row per data set and method: average precision, the published one, and the settings."""
    rows = []
    for data, about in experiment.plan.data:
        for method in experiment.plan.methods:
            cell = experiment.cell(f"{data}:{method}")
            values, published = cell.final(COUNTS), PUBLISHED.get(data, {}).get(method)
            rounds = int(cell.round[-1])
            rows.append(
                {
                    "data": about.title, "method": TITLES[method], "average precision": values.mean(),
                    "std": values.std(ddof=0), "lowest seed": values.min(), "published": published,
                    "MB up per client": cell.cost["bytes_up"] * rounds / 1e6,
                    "chosen": ", ".join(f"{key} = {value:g}" for key, value in cell.settings[0].items()),
                    "runs that diverged": int((cell.diverged >= 0).sum()), "seeds": len(cell.seeds),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def choice_table(experiment: Experiment) -> pd.DataFrame:
    rows = []
    for data, about in experiment.plan.data:
        for method in experiment.plan.methods:
            cell = experiment.cell(f"choose-{data}:{method}")
            values, diverged = cell.metrics[CHOSEN_BY][:, :, -1], (cell.diverged >= 0).sum(1)
            for words, value, lost in zip(cell.settings, values.mean(1), diverged, strict=True):
                rows.append(
                    {"data": about.title, "method": TITLES[method], **words}
                    | {"validation average precision": None if lost else value}
                )
    return pd.DataFrame(rows)


def check_claims(experiment: Experiment) -> list[Claim]:
    claims = []
    for number, (data, about) in enumerate(experiment.plan.data, 1):
        final = {method: experiment.cell(f"{data}:{method}").final(COUNTS) for method in experiment.plan.methods}
        above = lambda pairs, final=final: {
            f"{TITLES[one]} minus {TITLES[other]}": paired(final[one], final[other])
            for one, other in pairs
            if one in final and other in final
        }
        baselines = above([("coda-plus", "fedavg")])
        ours = above([(method, "coda-plus") for method in OURS])
        order = above([("fcsg-m", "fcsg"), ("acc-fcsg-m", "fcsg-m")])
        compared = f"test average precision, {about.title}"
        claims += [
            Claim(f"{number}a", "CODA+ is above FedAvg.", compared, baselines, all_above(baselines, 0.0)),
            Claim(f"{number}b", "The FCSG family is above CODA+.", compared, ours, all_above(ours, 0.0)),
            Claim(
                f"{number}c", "FCSG-M is not below FCSG, Acc-FCSG-M not below FCSG-M (by more than 0.005).", compared,
                order, all_above(order, -0.005), level=-0.005,
            ),
        ]  # fmt: skip
    return [claim for claim in claims if claim.results]


def write_page(experiment: Experiment, command: str) -> Path:
    folder, plan = experiment.folder, experiment.plan
    table, chosen, claims = final_table(experiment), choice_table(experiment), check_claims(experiment)
    for name, frame in {"final": table, "tried": chosen, "claims": claims_table(claims)}.items():
        (folder / "tables").mkdir(parents=True, exist_ok=True)
        frame.to_csv(folder / "tables" / f"{name}.csv", index=False)
    for data, about in plan.data:
        cells = {method: experiment.cell(f"{data}:{method}") for method in plan.methods}
        history = pd.concat([cell.history(method) for method, cell in cells.items()], ignore_index=True)
        drawn = studies.metric_panels(
            history, {COUNTS: f"{about.title}: test average precision"}, TITLES, xlabel="communication rounds"
        )
        figures.write(drawn, folder / "figures", f"precision-{data}")
    (folder / "settings.toml").write_text(tomli_w.dumps(_words(plan)), encoding="utf-8")
    cells = [experiment.cell(name) for name in experiment.names()]
    choosing = {about.title: experiment.cell(f"choose-{data}:{plan.methods[0]}") for data, about in plan.data}
    template = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    page = folder / "README.md"
    text = template.render(
        plan=plan, command=command, machines=sorted({cell.machine for cell in cells}),
        minutes=f"{sum(cell.seconds for cell in cells) / 60:.0f}", claims=markdown_claims(claims),
        table=tables.markdown(table), diverged=int(pd.isna(chosen["validation average precision"]).to_numpy().sum()),
        tried=len(chosen), search_seeds={title: len(cell.seeds) for title, cell in choosing.items()},
    )  # fmt: skip
    page.write_text(text, encoding="utf-8")
    return page


def _words(plan: Plan) -> dict[str, Any]:
    data = {name: dataclasses.asdict(about) | {"model": str(about.model)} for name, about in plan.data}
    return {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "data"} | data
