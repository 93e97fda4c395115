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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import tomli_w

from nestfed.algorithms import make
from nestfed.core.algorithm import Algorithm
from nestfed.data.images import load_images
from nestfed.experiments.cells import Cell, Trainings, load, train_in_turn
from nestfed.experiments.personal.data import PersonalImages, deal_classes, deal_writers, held_out
from nestfed.experiments.personal.femnist import CLASS_NAMES, load_femnist
from nestfed.experiments.personal.task import (
    COLOUR,
    GREY,
    ImageClasses,
    RandomImageClasses,
    newcomer_accuracy,
    personal_task,
)
from nestfed.experiments.verdicts import Claim, all_above, claims_table, markdown_claims
from nestfed.models import CNN, Convolution
from nestfed.report import figures, tables
from nestfed.report.statistics import Paired, paired
from nestfed.report.style import looks
from nestfed.verbs.personalise import PersonalTask

TITLES = {
    "local-only": "local training only", "fedavg-whole": "FedAvg", "ditto": "Ditto", "fedrep": "FedRep",
    "fedbabu": "FedBABU", "fedpac": "FedPAC", "fedcr": "FedCR", "fedreco": "FedReCo", "fedreco-pvr": "FedReCo-PVR",
    "fedreco-code": "FedReCo as coded", "fedreco-chosen": "FedReCo, chosen",
}  # fmt: skip
AS_CODED = "fedreco-code"  # where the authors' code differs from the paper: H is a sum, and the server's step is larger
CHOSEN = "fedreco-chosen"  # the server's step and the strength of the pull by validation images, not the paper's
PROPOSED = ("fedreco", "fedreco-pvr", AS_CODED)
FLOOR = "local-only"
TUNED = ("fedavg-whole", "fedbabu")  # one model for all, meant to be fine-tuned: judged after that
VISIBLE = 0.01  # "no visible difference": less than a point of accuracy


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
    "CIFAR-10, 2 classes per client", "cifar10", COLOUR, classes=2,
    rounds=80, evaluate_every=20,
    mean=(0.491, 0.482, 0.447), deviation=(0.247, 0.243, 0.262), vary=True,
)  # fmt: skip
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
        images = held_out(images, seed=seed) if choosing else images
        kind = RandomImageClasses if method == "fedcr" else ImageClasses
        problem = kind(
            model=about.model, mean=about.mean, deviation=about.deviation, vary=about.vary,
            reduction="sum" if method == AS_CODED else "mean",
        )  # fmt: skip
        return personal_task(
            images, problem, seed=seed, batch_size=self.batch,
            fine_tune_steps=self.fine_tune_epochs * self.epoch(images), fine_tune_lr=self.lr,
        )  # fmt: skip

    def images(self, data: str, seed: int) -> PersonalImages:
        return _images(dict(self.data)[data], self.clients, seed)

    def facts(self, data: str) -> dict[str, int]:
        """What a page says of the data; kept with the trainings, so that pages can be written without them."""
        images = self.images(data, 0)
        return {
            "clients": images.train.clients, "train": int(np.sum(images.train.sizes)),
            "test": int(np.sum(images.test.sizes)), "epoch": self.epoch(images),
        }  # fmt: skip


@functools.lru_cache(maxsize=3)
def _images(about: DataPlan, clients: int, seed: int) -> PersonalImages:
    if about.classes:
        return deal_classes(_loaded(about.source), clients=clients, per_client=about.classes, seed=seed)
    return deal_writers(_loaded(about.source), writers=about.writers, newcomers=about.newcomers, seed=seed)


@functools.lru_cache(maxsize=1)
def _loaded(source: str) -> Any:
    return load_femnist() if source == "femnist" else load_images(source)


SMALL = CNN(layers=(Convolution(2, 1, stride=4),), hidden=(4,))
QUICK = Plan(
    data=(("mnist", DataPlan("MNIST, 2 classes per client", "mnist", SMALL, classes=2, rounds=4, evaluate_every=2)),),
    methods=("local-only", "fedreco", "fedreco-pvr", CHOSEN), seeds=2, server_lrs=(0.001, 0.1), pulls=(0.01,),
    fine_tune_epochs=1, newcomer_rounds=2,
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
    experiment = Experiment(folder, QUICK if quick else Plan(), progress)
    experiment.train_all()
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


@dataclasses.dataclass(frozen=True)
class Experiment(Trainings):
    """The cells, DATA-METHOD, and where FedReCo's settings are chosen, choose-DATA; each can be trained alone."""

    plan: Plan

    def names(self) -> list[str]:
        data, methods = [name for name, _ in self.plan.data], self.plan.methods
        choices = [f"choose-{name}" for name in data if CHOSEN in methods]
        return choices + [f"{name}-{method}" for name in data for method in methods]

    def _train(self, name: str) -> Cell:
        if name.startswith("choose-"):
            return self._choose(name.removeprefix("choose-"))
        data, method = name.split("-", 1)
        plan, seeds, facts = self.plan, range(self.plan.seeds), self.plan.facts(data)
        about = dict(plan.data)[data]
        chosen = self.chosen(data) if method == CHOSEN else {}
        return train_in_turn(
            [(facts | chosen, plan.algorithm(method, facts["epoch"], **chosen))],
            [plan.task(data, method, seed) for seed in seeds], seeds,
            after=functools.partial(self._newcomers, data), rounds=about.rounds, evaluate_every=about.evaluate_every,
            progress=self.progress, title=f"{TITLES[method]}, {data}",
        )  # fmt: skip

    def _choose(self, data: str) -> Cell:
        """FedReCo with every server step and every strength of the pull, with the first seed."""
        plan, rounds, epoch = self.plan, dict(self.plan.data)[data].rounds, self.plan.facts(data)["epoch"]
        grid = [{"server_lr": lr, "coupling": pull} for lr, pull in itertools.product(plan.server_lrs, plan.pulls)]
        return train_in_turn(
            [(words, plan.algorithm(CHOSEN, epoch, **words)) for words in grid],
            [plan.task(data, CHOSEN, 0, choosing=True)], [0], rounds=rounds, evaluate_every=rounds,
            progress=self.progress, title=f"choosing FedReCo's settings, {data}",
        )  # fmt: skip

    def chosen(self, data: str) -> dict[str, float]:
        """The settings of FedReCo with which clients do best on validation images."""
        cell = self.cell(f"choose-{data}")
        return cell.settings[cell.best("test_accuracy")]

    def _newcomers(self, data: str, algorithm: Any, task: Any, run: Any, seed: int) -> dict[str, float]:
        """How well those who were not there do with what the server has in the end."""
        newcomers = self.plan.images(data, seed).newcomers
        if not newcomers:
            return {}
        if int(run.diverged) >= 0:
            return {"newcomer_accuracy": np.nan, "tuned_newcomer_accuracy": np.nan}
        rounds = self.plan.newcomer_rounds
        found = [newcomer_accuracy(algorithm, task, run.server, one, rounds=rounds, seed=seed) for one in newcomers]
        before, after = np.mean(found, axis=0)
        return {"newcomer_accuracy": before, "tuned_newcomer_accuracy": after}

    def finished(self) -> dict[str, dict[str, Cell]]:
        """Data -> method -> its training, as far as they are there."""
        paths = lambda data: {method: self.path(f"{data}-{method}") for method in self.plan.methods}
        found = {
            data: {method: load(path) for method, path in paths(data).items() if path.exists()}
            for data, _ in self.plan.data
        }
        return {data: cells for data, cells in found.items() if cells}


def judged_by(method: str, metric: str = "test_accuracy") -> str:
    """The metric that counts: methods that leave one model for all are meant to be fine-tuned."""
    return f"tuned_{metric}" if method in TUNED else metric


# ------------------------------------------------------------------------------------------------- results


def final_table(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """One row per method, and two where fine-tuning is part of it: accuracies over clients and seeds, and the cost."""
    rows = []
    for method, cell in cells.items():
        rounds = int(cell.round[-1])
        for tuned in ("", "tuned_") if method in TUNED else ("",):
            value = lambda metric: cell.final(f"{tuned}{metric}")
            accuracy = value("test_accuracy")
            row: dict[str, Any] = {
                "method": TITLES[method] + (", fine-tuned" if tuned else ""),
                "test accuracy": accuracy.mean(), "std over seeds": accuracy.std(ddof=0),
                "worst decile": value("test_accuracy_worst_decile").mean(),
                "lowest": value("test_accuracy_lowest").mean(),
                "std over clients": value("test_accuracy_deviation").mean(),
                "train loss": value("train_loss").mean(),
            }  # fmt: skip
            if "newcomer_accuracy" in cell.metrics:
                row["newcomers"] = value("newcomer_accuracy").mean()
            row |= {
                "MB up per client": cell.cost["bytes_up"] * rounds / 1e6,
                "MB down per client": cell.cost["bytes_down"] * rounds / 1e6,
                "thousand gradients per client": cell.cost["oracles"].get("GRAD", 0) * rounds / 1e3,
                "runs that diverged": int((cell.diverged >= 0).sum()), "seeds": len(cell.seeds),
                "minutes": cell.seconds / 60,
            }  # fmt: skip
            rows.append(row)
    return pd.DataFrame(rows)


def tuned_table(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """What the same fine-tuning of the head gives every method."""
    rows = []
    for method, cell in cells.items():
        row: dict[str, Any] = {"method": TITLES[method]}
        for title, metric in {
            "test accuracy": "test_accuracy", "fine-tuned": "tuned_test_accuracy",
            "worst decile": "test_accuracy_worst_decile",
            "worst decile, fine-tuned": "tuned_test_accuracy_worst_decile",
            "newcomers": "newcomer_accuracy", "newcomers, fine-tuned": "tuned_newcomer_accuracy",
        }.items():  # fmt: skip
            if metric in cell.metrics:
                row[title] = cell.final(metric).mean()
        rows.append(row)
    return pd.DataFrame(rows)


def choice_table(experiment: Experiment) -> pd.DataFrame:
    """How well clients did on validation images, by FedReCo's server step and strength of the pull."""
    rows = []
    for data, about in experiment.plan.data:
        if not experiment.path(f"choose-{data}").exists():
            continue
        cell = experiment.cell(f"choose-{data}")
        best = cell.best("test_accuracy")
        for i, words in enumerate(cell.settings):
            row = {"data": about.title, "server step": words["server_lr"], "lambda": words["coupling"]}
            value = np.nan if cell.diverged[i].max() >= 0 else cell.final("test_accuracy", i).mean()
            rows.append(row | {"validation accuracy": value, "chosen": i == best})
    return pd.DataFrame(rows)


def markdown_choice(tried: pd.DataFrame) -> str:
    """The same for readers: a row per server step, a column per strength, and below what was chosen."""
    wide = tried.pivot(index=["data", "server step"], columns="lambda", values="validation accuracy")
    wide = wide.loc[list(tried["data"].unique())].rename(columns=lambda value: f"lambda {value:g}")
    chosen = tried[tried["chosen"]]
    named = [
        f"{title}: server step {step:g}, lambda {pull:g}"
        for title, step, pull in zip(chosen["data"], chosen["server step"], chosen["lambda"], strict=True)
    ]
    text = f"{tables.markdown(wide.reset_index())}\nChosen: {'; '.join(named)}.\n"
    if max(chosen["lambda"]) == min(tried["lambda"]):
        text += "Everywhere that is the weakest pull of the grid; without any, every client trains alone.\n"
    return text


DIAGNOSTICS = {
    "representation_distance": "H", "representation_norm": "|phi|", "center_distance": "|u_k - u_0|",
    "clipped_share": "local gradients clipped", "server_clipped_share": "server means clipped",
}  # fmt: skip


def diagnostics_table(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """What the representations and the steps look like in the end; means over clients and seeds."""
    last = lambda cell, metric: cell.final(metric).mean() if metric in cell.metrics else np.nan
    return pd.DataFrame(
        [
            {"method": TITLES[method]} | {title: last(cell, metric) for metric, title in DIAGNOSTICS.items()}
            for method, cell in cells.items()
        ]
    )


def check_claims(results: Mapping[str, Mapping[str, Cell]]) -> list[Claim]:
    def against(ours: tuple[str, ...], theirs: str) -> dict[str, Paired]:
        return {
            f"{data}, {TITLES[method]} minus {TITLES[theirs]}": paired(
                cells[method].final(judged_by(method)), cells[theirs].final(judged_by(theirs))
            )
            for (data, cells), method in itertools.product(results.items(), ours)
            if {method, theirs} <= set(cells)
        }

    compared = "final test accuracy, mean over clients (FedAvg and FedBABU fine-tuned)"
    sharing = tuple(method for method in TITLES if method not in (*PROPOSED, CHOSEN, FLOOR))
    above = {
        "A shared representation helps: FedReCo (also as coded) and -PVR are above local training only.":
            against(PROPOSED, FLOOR),
        "(Ours.) The other methods, which share an extractor or a whole model, are above it too.":
            against(sharing, FLOOR),
        "(Ours.) With settings chosen on validation images, FedReCo is above local training only.":
            against((CHOSEN,), FLOOR),
        "(Ours.) With settings chosen on validation images, FedReCo is above itself with the paper's.":
            against((CHOSEN,), "fedreco"),
    }  # fmt: skip
    variance = against(("fedreco-pvr",), "fedreco")
    text = f"FedReCo-PVR makes no visible difference to FedReCo (within {100 * VISIBLE:g} point of accuracy)."
    found = [Claim("", text, compared, results, all_above(results, 0.0), 0.0) for text, results in above.items()]
    found.append(Claim("", text, compared, variance, within(variance, VISIBLE)))
    found = [claim for claim in found if claim.results]
    return [dataclasses.replace(claim, number=str(number)) for number, claim in enumerate(found, 1)]


def slow_center(results: Mapping[str, Mapping[str, Cell]]) -> dict[str, float]:
    """Data -> the share of FedReCo's server means that were shortened, where that is most of them: the common extractor
    then moves by a fixed small length per round, however far it should go."""
    shares = {
        data: float(cells["fedreco"].final("server_clipped_share").mean())
        for data, cells in results.items()
        if "fedreco" in cells
    }
    return {data: share for data, share in shares.items() if share > 0.5}


def within(results: Mapping[str, Paired], margin: float) -> str:
    """Are all differences smaller than the margin, in the mean and with their intervals?"""
    n = len(results)
    near = sum(abs(r.mean) < margin for r in results.values())
    clear = sum(-margin < r.low and r.high < margin for r in results.values())
    count = f"{near} of {n} cases in the mean, {clear} of {n} with the whole 95 % interval"
    if clear == n:
        return f"holds ({count})"
    return f"holds in the mean only ({count})" if near == n else f"does not hold ({count})"


# ------------------------------------------------------------------------------------------------- figures and page


def curves_of(cells: Mapping[str, Cell], clients: int) -> pd.DataFrame:
    """One history of all methods, with `accuracy` as they are judged; bytes and calls of all clients together. The
    first tenth is left out: what models guess at the start would leave no room for the differences."""
    parts = []
    for method, cell in cells.items():
        part = cell.history(method).query("round > round.max() / 10")
        total = {name: part[name] * clients for name in ("bytes", "oracle_calls")}
        parts.append(part.assign(accuracy=part[judged_by(method)], **total))
    return pd.concat(parts, ignore_index=True)


def write_tables(folder: Path, frames: Mapping[str, pd.DataFrame]) -> None:
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(folder / "tables" / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def write_settings(folder: Path, plan: Any) -> None:
    (folder / "settings.toml").write_text(tomli_w.dumps(_plain(plan)), encoding="utf-8")


def _plain(value: Any) -> Any:
    """As a settings file has it: records as tables, pairs with names as tables, networks in words."""
    if isinstance(value, CNN):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _plain(own) for name, own in fields.items() if own is not None}
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(own, tuple) for own in value)
        return {name: _plain(own) for name, own in value} if pairs else [_plain(own) for own in value]
    return value


TEMPLATE = Path(__file__).with_name("page.md.jinja")


def render(template: Path, **values: Any) -> str:
    text = template.read_text(encoding="utf-8")
    return jinja2.Template(text, keep_trailing_newline=True, trim_blocks=True).render(**values)


def write_page(experiment: Experiment, command: str) -> Path:
    """The page of what is finished."""
    folder, plan, results = experiment.folder, experiment.plan, experiment.finished()
    claims, about = check_claims(results), dict(plan.data)
    frames = {
        f"{kind}-{data}": table(cells)
        for data, cells in results.items()
        for kind, table in (("final", final_table), ("tuned", tuned_table), ("diagnostics", diagnostics_table))
    }
    tried = choice_table(experiment)
    write_tables(folder, frames | {"claims": claims_table(claims)} | ({"tried": tried} if len(tried) else {}))
    facts = {data: next(iter(cells.values())).settings[0] for data, cells in results.items()}
    for data, cells in results.items():
        cells = {method: cell for method, cell in cells.items() if method != AS_CODED}  # it would squeeze the others
        history = curves_of(cells, facts[data]["clients"])
        first = sorted(cells, key=lambda method: method not in (*PROPOSED, CHOSEN))  # full lines for those in question
        titles = {method: TITLES[method] + (", fine-tuned" if method in TUNED else "") for method in first}
        drawn = looks(titles, FLOOR)
        for against, name in (("round", "rounds"), ("bytes", "bytes"), ("oracle_calls", "work")):
            title = f"Test accuracy, {about[data].title}"
            shown = figures.curves(history, "accuracy", against, title=title, methods=drawn)
            figures.write(shown, folder / "figures", f"accuracy-{data}-{name}")
    write_settings(folder, plan)
    cells = [load(path) for path in map(experiment.path, experiment.names()) if path.exists()]
    missing = [
        f"{TITLES[m]} ({data})" for data, m in itertools.product(about, plan.methods) if m not in results.get(data, {})
    ]
    text = render(
        TEMPLATE, plan=plan, command=command, about=about, facts=facts, missing=missing,
        couplings={TITLES[method]: value for method, value in plan.couplings if method in plan.methods},
        claims=markdown_claims(claims), tables={name: tables.markdown(frame) for name, frame in frames.items()},
        slow=slow_center(results), tried=markdown_choice(tried) if len(tried) else "",
        machines=sorted({cell.machine for cell in cells}),
        minutes=f"{sum(cell.seconds for cell in cells) / 60:.0f}", quick=plan == QUICK,
    )  # fmt: skip
    page = folder / "README.md"
    page.write_text(text, encoding="utf-8")
    return page
