"""Accuracy against privacy: from the cells to the page."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from nestfed.experiments import plots
from nestfed.experiments.cells import Cell
from nestfed.experiments.claims import Case, Claim, below, compare, within
from nestfed.experiments.frame import Experiment, Page
from nestfed.experiments.personal.page import VISIBLE, choose_metric
from nestfed.experiments.personal.plan import FLOOR, TITLES
from nestfed.experiments.privacy.plan import METHODS, QUICK, RELEASES, Plan, Trainings, split_name
from nestfed.uploads import privacy
from nestfed.uploads.transforms import CLIPPED, SIGNAL


def make_page(trainings: Trainings) -> Page:
    """Of what is finished."""
    plan, results = trainings.plan, trainings.list_finished()
    final, about = tabulate_final(plan, results), dict(plan.training.data)
    drawn = {}
    for data in about:
        drawn |= draw_accuracies(final.query("data == @data"), data)
    facts = {split_name(name)[:2]: cell.settings[0] for name, cell in results.items()}
    ratio, measured = (final[f"signal / noise, {kind}"].to_numpy(float) for kind in ("at most", "measured"))
    return Page(
        tables={"final": final},
        figures=drawn,
        claims=check_claims(plan, results),
        words={
            "training": plan.training,
            "about": about,
            "sizes": {
                data: {TITLES[m]: f"{facts[data, m]['numbers']:,}" for m in METHODS if (data, m) in facts}
                for data in about
            },
            "clients": {data: own["clients"] for (data, _), own in facts.items()},
            "figures": list(drawn),
            "rounds": " or ".join(str(own.rounds) for own in about.values()),
            "drowned": {"at most": int((ratio < 1).sum()), "measured": int((measured < 1).sum())},
            "noisy": int(np.isfinite(ratio).sum()),
            "missing": [name for name in trainings.names() if name not in results],
        },
        digits=6,
    )


def tabulate_final(plan: Plan, results: Mapping[str, Cell]) -> pd.DataFrame:
    """One row per method and noise: what it means, how large it is beside the signal, and what is left of accuracy."""
    rows = []
    for name, cell in results.items():
        data, method, release = split_name(name)
        for i, (value, facts) in enumerate(zip(plan.values(release), cell.settings, strict=True)):
            guarantee, metric = plan.guarantee(release, value), choose_metric(method)
            row: dict[str, Any] = {
                "data": data,
                "method": TITLES[method],
                "uploads": RELEASES[release] if method != FLOOR else "none",
                "epsilon of a release": value if release in ("paper", "analytic") else math.nan,
            }
            noise = math.nan
            if guarantee is not None:
                noise = guarantee.sigma * math.sqrt(facts["numbers"] / facts["clients"])
            signal = cell.metrics.get(SIGNAL)
            measured = math.nan if signal is None else _compute_median(signal[i])
            accuracy = cell.final("test_accuracy", i)
            row |= {
                "noise multiplier": guarantee.sigma / (2 * plan.clip) if guarantee is not None else math.nan,
                "norm of the noise in a mean": noise,
                "signal / noise, at most": plan.clip / noise,
                "signal / noise, measured": measured,
                "epsilon of the run": cell.final(privacy.EPSILON, i).mean() if guarantee is not None else math.nan,
                "uploads clipped": cell.final(CLIPPED, i).mean() if release != "plain" else math.nan,
                "test accuracy": accuracy.mean(),
                "test accuracy, std": accuracy.std(ddof=1),
                "worst decile": cell.final("test_accuracy_worst_decile", i).mean(),
                "accuracy of clients' models": cell.final(metric, i).mean(),
                "accuracy of clients' models, std": cell.final(metric, i).std(ddof=1),
                "seeds": len(cell.seeds),
                "runs that diverged": int((cell.diverged[i] >= 0).sum()),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _compute_median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def check_claims(plan: Plan, results: Mapping[str, Cell]) -> list[Claim]:
    def against(method: str, reference: str, release: str) -> dict[str, Case]:
        names = [(data, f"{data}-{method}-{release}", f"{data}-{reference}-plain") for data, _ in plan.training.data]
        return {
            f"{data}, {TITLES[method]}, {RELEASES[release]}"
            + (f", {value:g}" if math.isfinite(value) else ""): _make_case(
                results[name], method, i, results[other], reference
            )
            for data, name, other in names
            if {name, other} <= set(results)
            for i, value in enumerate(plan.values(release))
        }

    noisy = [release for release in plan.releases if release in ("paper", "analytic", "noise")]
    joined = lambda method, reference, releases: dict(
        itertools.chain(*(against(method, reference, release).items() for release in releases))
    )
    final = "final test accuracy of clients' models"
    claims = [
        Claim(
            "1",
            "Clip and noise cost FedReCo less than a point of accuracy: its clients' models do not pass the server.",
            f"{final}, with clip and noise minus as they are",
            within(VISIBLE),
            joined("fedreco", "fedreco", noisy),
            ours=True,
        ),
        Claim(
            "2",
            "But in every row FedReCo is below what clients reach alone.",
            f"{final}, minus local training only",
            below(0),
            joined("fedreco", FLOOR, plan.releases),
            ours=True,
        ),
        Claim(
            "3",
            "With noise, FedAvg with fine-tuning is below what clients reach alone.",
            f"{final}, fine-tuned, minus local training only",
            below(0),
            joined("fedavg-whole", FLOOR, noisy),
            ours=True,
        ),
    ]
    return [claim for claim in claims if claim.cases]


def _make_case(cell: Cell, method: str, setting: int, other: Cell, reference: str) -> Case:
    one, two = choose_metric(method), choose_metric(reference)
    return compare(cell.final(one, setting), other.final(two), motion=max(cell.motion(one, setting), other.motion(two)))


def draw_accuracies(own: Any, data: str) -> dict[str, Any]:
    """Accuracies against epsilon and against the noise, where there is more than one; `own` are the data set's rows of
    the final table, a DataFrame."""
    column = "accuracy of clients' models"
    noiseless = own.query("`noise multiplier`.isna() and `uploads clipped`.isna()").to_dict("records")
    levels = {
        row["method"] + (", no noise" if row["method"] != TITLES[FLOOR] else ""): {column: row[column]}
        for row in noiseless
    }
    released = own.query("`epsilon of a release` > 0")
    released = released.assign(method=released["method"] + ", " + released["uploads"])
    noisy = own.query("`noise multiplier` > 0 and `epsilon of a release`.isna()")
    several = (("epsilon", released, "epsilon of a release"), ("noise", noisy, "noise multiplier"))
    named = {column: "test accuracy of clients' models"}
    return {
        f"accuracy-{data}-{name}": functools.partial(plots.draw_lines_over, rows, across, named, levels=levels)
        for name, rows, across in several
        if len(rows) > 1
    }


EXPERIMENT = Experiment("privacy", "FedReCo", Trainings, Plan(), QUICK, make_page)
