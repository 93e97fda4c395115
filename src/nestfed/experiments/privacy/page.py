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
from nestfed.experiments.claims import Claim, all_below, all_within
from nestfed.experiments.frame import Experiment, Page
from nestfed.experiments.personal.page import VISIBLE, judging_metric
from nestfed.experiments.personal.plan import FLOOR, TITLES
from nestfed.experiments.privacy.plan import METHODS, QUICK, RELEASES, Plan, Trainings, parts
from nestfed.report.statistics import Paired, pair
from nestfed.uploads import privacy
from nestfed.uploads.transforms import CLIPPED, SIGNAL


def make_page(trainings: Trainings) -> Page:
    """Of what is finished."""
    plan, results = trainings.plan, trainings.list_finished()
    final, about = final_table(plan, results), dict(plan.training.data)
    drawn = {}
    for data in about:
        drawn |= accuracy_figures(final.query("data == @data"), data)
    facts = {parts(name)[:2]: cell.settings[0] for name, cell in results.items()}
    ratio = final["signal / noise, at most"].to_numpy(float)
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
            "drowned": int((ratio < 1).sum()),
            "noisy": int(np.isfinite(ratio).sum()),
            "missing": [name for name in trainings.names() if name not in results],
        },
        digits=6,
    )


def final_table(plan: Plan, results: Mapping[str, Cell]) -> pd.DataFrame:
    """One row per method and noise: what it means, how large it is beside the signal, and what is left of accuracy."""
    rows = []
    for name, cell in results.items():
        data, method, release = parts(name)
        for i, (value, facts) in enumerate(zip(plan.values(release), cell.settings, strict=True)):
            guarantee, metric = plan.guarantee(release, value), judging_metric(method)
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
            measured = math.nan if signal is None else _median(signal[i])
            accuracy = cell.final("test_accuracy", i)
            row |= {
                "noise multiplier": guarantee.sigma / (2 * plan.clip) if guarantee is not None else math.nan,
                "norm of the noise in a mean": noise,
                "signal / noise, at most": plan.clip / noise,
                "signal / noise, measured": measured,
                "epsilon of the run": cell.final(privacy.EPSILON, i).mean() if guarantee is not None else math.nan,
                "uploads clipped": cell.final(CLIPPED, i).mean() if release != "plain" else math.nan,
                "test accuracy": accuracy.mean(),
                "test accuracy, std": accuracy.std(ddof=0),
                "worst decile": cell.final("test_accuracy_worst_decile", i).mean(),
                "judged accuracy": cell.final(metric, i).mean(),
                "judged accuracy, std": cell.final(metric, i).std(ddof=0),
                "runs that diverged": int((cell.diverged[i] >= 0).sum()),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def check_claims(plan: Plan, results: Mapping[str, Cell]) -> list[Claim]:
    final = lambda name, i=0: results[name].final(judging_metric(parts(name)[1]), i)

    def against(method: str, reference: str, release: str) -> dict[str, Paired]:
        return {
            f"{data}, {TITLES[method]}, {RELEASES[release]}, {value:g}": pair(
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
        claims.append(
            Claim(
                "1", text, "final test accuracy, with clip and noise minus as they are", kept, all_within(kept, VISIBLE)
            )
        )
    if lost:
        text = "(Ours.) With noise, FedAvg with fine-tuning is below what clients reach alone."
        claims.append(
            Claim(
                str(len(claims) + 1),
                text,
                "final test accuracy, fine-tuned, minus local training only",
                lost,
                all_below(lost, 0.0),
            )
        )
    return claims


def accuracy_figures(own: Any, data: str) -> dict[str, Any]:
    """Accuracies against epsilon and against the noise, where there is more than one; `own` are the data set's rows of
    the final table, a DataFrame."""
    metrics = ["test accuracy", "judged accuracy"]
    noiseless = own.query("`noise multiplier`.isna() and `uploads clipped`.isna()").to_dict("records")
    levels = {
        row["method"] + (", no noise" if row["method"] != TITLES[FLOOR] else ""): {m: row[m] for m in metrics}
        for row in noiseless
    }
    released = own.query("`epsilon of a release` > 0")
    released = released.assign(method=released["method"] + ", " + released["uploads"])
    noisy = own.query("`noise multiplier` > 0")
    several = (("epsilon", released, "epsilon of a release"), ("noise", noisy, "noise multiplier"))
    return {
        f"accuracy-{data}-{name}": functools.partial(plots.lines_over, rows, across, metrics, levels)
        for name, rows, across in several
        if len(rows) > 1
    }


EXPERIMENT = Experiment("privacy", Trainings, Plan(), QUICK, make_page)
