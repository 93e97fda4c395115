"""Accuracy against privacy: FedReCo and FedAvg with the Gaussian mechanism on every upload.

Two readings of epsilon: the paper's formula as it stands (sensitivity = clip, also where it is not proven), and the
analytic mechanism with the true sensitivity of 2 clip. Noise multipliers are given directly beside them, because noise
that keeps a usual epsilon is far larger than the signal in a network of a million numbers.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from nestfed.experiments.cells import Cell, Trainings, load, train_in_turn
from nestfed.experiments.personal import plan as personal
from nestfed.experiments.personal.plan import FLOOR, TITLES, VISIBLE, judged_by
from nestfed.experiments.verdicts import Claim, all_below, claims_table, markdown_claims
from nestfed.report import figures, studies, tables
from nestfed.report.statistics import Paired, paired
from nestfed.uploads import privacy
from nestfed.uploads.privacy import LocalDP
from nestfed.uploads.transforms import CLIPPED, SIGNAL, Clip, ClipMean, Transform

METHODS = ("fedreco", "fedavg-whole")
RELEASES = {
    "plain": "as they are", "clip": "clipped", "paper": "paper's formula", "analytic": "analytic mechanism",
    "noise": "noise multiplier",
}  # fmt: skip


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


TEMPLATE = Path(__file__).with_name("page.md.jinja")
QUICK = Plan(
    training=personal.QUICK,
    releases=("plain", "analytic"), epsilons=(1.0, 100.0),
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
    experiment = Experiment(folder, QUICK if quick else Plan(), progress)
    experiment.train_all()
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


@dataclasses.dataclass(frozen=True)
class Experiment(Trainings):
    """The cells, DATA-METHOD-RELEASE, with a setting for every epsilon or multiplier; each can be trained alone."""

    plan: Plan

    def names(self) -> list[str]:
        of_data = lambda data: (
            f"{data}-{FLOOR}-plain",
            *(f"{data}-{method}-{release}" for method in METHODS for release in self.plan.releases),
        )
        return [name for data, _ in self.plan.training.data for name in of_data(data)]

    def _train(self, name: str) -> Cell:
        data, method, release = parts(name)
        plan, training = self.plan, self.plan.training
        seeds, facts, about = range(training.seeds), training.facts(data), dict(training.data)[data]
        algorithm = training.algorithm(method, facts["epoch"])
        facts |= {"numbers": upload_size(plan, data, method)}
        tasks = [training.task(data, method, seed) for seed in seeds]
        cells = [
            train_in_turn(
                [(facts if math.isnan(value) else facts | {"value": value}, algorithm)], tasks, seeds,
                uploads=plan.uploads(method, release, value), rounds=about.rounds, noise_seed=0,  # data are public
                evaluate_every=about.evaluate_every, progress=self.progress,
                title=f"{TITLES[method]}, {RELEASES[release]}",
            )
            for value in plan.values(release)
        ]  # fmt: skip
        together = lambda arrays: np.concatenate(list(arrays))
        return cells[0]._replace(
            settings=[words for cell in cells for words in cell.settings],
            metrics={name: together(cell.metrics[name] for cell in cells) for name in cells[0].metrics},
            diverged=together(cell.diverged for cell in cells), seconds=sum(cell.seconds for cell in cells),
        )  # fmt: skip

    def finished(self) -> dict[str, Cell]:
        return {name: load(self.path(name)) for name in self.names() if self.path(name).exists()}


def parts(name: str) -> tuple[str, str, str]:
    """(data, method, release) of a cell's name."""
    data, rest = name.split("-", 1)
    method, release = rest.rsplit("-", 1)
    return data, method, release


# ------------------------------------------------------------------------------------------------- results


def upload_size(plan: Plan, data: str, method: str) -> int:
    """Numbers that a client uploads in a round."""
    about = dict(plan.training.data)[data]
    shape = plan.training.images(data, 0).shape
    params = jax.eval_shape(lambda: about.model.init(jax.random.key(0), shape))
    sent = params if method == "fedavg-whole" else params["extractor"]
    return sum(leaf.size for leaf in jax.tree.leaves(sent))


def final_table(plan: Plan, results: Mapping[str, Cell]) -> pd.DataFrame:
    """One row per method and noise: what it means, how large it is beside the signal, and what is left of accuracy."""
    rows = []
    for name, cell in results.items():
        data, method, release = parts(name)
        for i, (value, facts) in enumerate(zip(plan.values(release), cell.settings, strict=True)):
            guarantee, metric = plan.guarantee(release, value), judged_by(method)
            row: dict[str, Any] = {
                "data": data, "method": TITLES[method], "uploads": RELEASES[release] if method != FLOOR else "none",
                "epsilon of a release": value if release in ("paper", "analytic") else math.nan,
            }  # fmt: skip
            noise = math.nan
            if guarantee is not None:
                noise = guarantee.sigma * math.sqrt(facts["numbers"] / facts["clients"])
            signal = cell.metrics.get(SIGNAL)
            measured = math.nan if signal is None else _median(signal[i])
            accuracy = cell.final("test_accuracy", i)
            row |= {
                "noise multiplier": guarantee.sigma / (2 * plan.clip) if guarantee is not None else math.nan,
                "norm of the noise in a mean": noise, "signal / noise, at most": plan.clip / noise,
                "signal / noise, measured": measured,
                "epsilon of the run": cell.final(privacy.EPSILON, i).mean() if guarantee is not None else math.nan,
                "uploads clipped": cell.final(CLIPPED, i).mean() if release != "plain" else math.nan,
                "test accuracy": accuracy.mean(), "test accuracy, std": accuracy.std(ddof=0),
                "worst decile": cell.final("test_accuracy_worst_decile", i).mean(),
                "judged accuracy": cell.final(metric, i).mean(),
                "judged accuracy, std": cell.final(metric, i).std(ddof=0),
                "runs that diverged": int((cell.diverged[i] >= 0).sum()),
            }  # fmt: skip
            rows.append(row)
    return pd.DataFrame(rows)


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def check_claims(plan: Plan, results: Mapping[str, Cell]) -> list[Claim]:
    final = lambda name, i=0: results[name].final(judged_by(parts(name)[1]), i)

    def against(method: str, reference: str, release: str) -> dict[str, Paired]:
        return {
            f"{data}, {TITLES[method]}, {RELEASES[release]}, {value:g}": paired(
                final(f"{data}-{method}-{release}", i), final(f"{data}-{reference}-plain")
            )
            for data, _ in plan.training.data
            for i, value in enumerate(plan.values(release))
            if {f"{data}-{method}-{release}", f"{data}-{reference}-plain"} <= set(results)
        }

    noisy = [release for release in plan.releases if release in ("paper", "analytic", "noise")]
    joined = lambda method, reference: dict(
        itertools.chain(*(against(method, reference, release).items() for release in noisy))
    )
    kept, lost = joined("fedreco", "fedreco"), joined("fedavg-whole", FLOOR)
    claims = []
    if kept:
        text = (
            "(Ours.) Clip and noise cost FedReCo less than a point of accuracy: its clients' models do not pass the "
            "server. (What the clip costs alone is in the table.)"
        )
        claims.append(Claim("1", text, "final test accuracy, with clip and noise minus as they are", kept,
                            personal.within(kept, VISIBLE)))  # fmt: skip
    if lost:
        text = "(Ours.) With noise, FedAvg with fine-tuning is below what clients reach alone."
        claims.append(Claim(str(len(claims) + 1), text, "final test accuracy, fine-tuned, minus local training only",
                            lost, all_below(lost, 0.0)))  # fmt: skip
    return claims


# ------------------------------------------------------------------------------------------------- figures and page


def write_page(experiment: Experiment, command: str) -> Path:
    """The page of what is finished."""
    folder, plan, results = experiment.folder, experiment.plan, experiment.finished()
    training, about = plan.training, dict(plan.training.data)
    table, claims = final_table(plan, results), check_claims(plan, results)
    personal.write_tables(folder, {"final": table, "claims": claims_table(claims)})
    drawn, metrics = [], ["test accuracy", "judged accuracy"]
    for data in about:
        own = table.query("data == @data")
        noiseless = own.query("`noise multiplier`.isna() and `uploads clipped`.isna()").to_dict("records")
        levels = {
            row["method"] + (", no noise" if row["method"] != TITLES[FLOOR] else ""): {m: row[m] for m in metrics}
            for row in noiseless
        }
        released = own.query("`epsilon of a release` > 0")
        released = released.assign(method=released["method"] + ", " + released["uploads"])
        noisy = own.query("`noise multiplier` > 0")
        for name, rows, across in (
            ("epsilon", released, "epsilon of a release"), ("noise", noisy, "noise multiplier"),
        ):  # fmt: skip
            if len(rows) > 1:
                drawn.append(f"accuracy-{data}-{name}")
                figures.write(studies.lines_over(rows, across, metrics, levels), folder / "figures", drawn[-1])
    personal.write_settings(folder, plan)
    facts = {parts(name)[:2]: cell.settings[0] for name, cell in results.items()}
    sizes = {
        data: {TITLES[m]: f"{facts[data, m]['numbers']:,}" for m in METHODS if (data, m) in facts} for data in about
    }
    ratio = table["signal / noise, at most"].to_numpy(float)
    text = personal.render(
        TEMPLATE, plan=plan, training=training, command=command, about=about, sizes=sizes,
        clients={data: own["clients"] for (data, _), own in facts.items()},
        figures=drawn, rounds=" or ".join(str(own.rounds) for own in about.values()), drowned=int((ratio < 1).sum()),
        noisy=int(np.isfinite(ratio).sum()),
        missing=[name for name in experiment.names() if name not in results],
        claims=markdown_claims(claims), table=tables.markdown(table),
        machines=sorted({cell.machine for cell in results.values()}),
        minutes=f"{sum(cell.seconds for cell in results.values()) / 60:.0f}", quick=plan == QUICK,
    )  # fmt: skip
    page = folder / "README.md"
    page.write_text(text, encoding="utf-8")
    return page
