"""Average precision on images: from the cells to the page."""

import functools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments import plots
from nestfed.experiments.auprc.plan import CHOSEN_BY, QUICK, TITLES, Plan, Trainings
from nestfed.experiments.cells import describe_settings
from nestfed.experiments.claims import Case, Claim, above, compare
from nestfed.experiments.frame import Experiment, Page

COUNTS = "test_average_precision"
OURS = ("fcsg", "fcsg-m", "acc-fcsg-m")
ALIKE = -0.005  # "not below": no more than half a point; written down before these trainings
RELEASED_RATE = 0.01  # the step size in the authors' companion code
PUBLISHED = {
    "mnist": {"fedavg": 0.9357, "coda-plus": 0.9733, "fcsg": 0.9868, "fcsg-m": 0.9878, "acc-fcsg-m": 0.9879},
    "cifar10": {"fedavg": 0.5059, "coda-plus": 0.6039, "fcsg": 0.7130, "fcsg-m": 0.7157, "acc-fcsg-m": 0.7184},
}


def make_page(trainings: Trainings) -> Page:
    plan = trainings.plan
    tried = tabulate_choices(trainings)
    choosing = {about.title: trainings.cell(f"choose-{data}:{plan.methods[0]}") for data, about in plan.data}
    return Page(
        tables={"final": tabulate_final(trainings), "tried": tried},
        figures={"precision": functools.partial(draw_precision, trainings)},
        claims=check_claims(trainings),
        words={
            "diverged": int(pd.isna(tried["validation average precision"]).to_numpy().sum()),
            "search_seeds": {title: len(cell.seeds) for title, cell in choosing.items()},
            "released_rate": RELEASED_RATE,
            "released": tabulate_released(trainings),
            "apart": [find_median_gap(trainings, data, about.title) for data, about in plan.data],
        },
    )


def tabulate_final(trainings: Trainings) -> pd.DataFrame:
    """One row per data set and method: average precision, the published one, and the settings."""
    rows = []
    for data, about in trainings.plan.data:
        for method in trainings.plan.methods:
            cell = trainings.cell(f"{data}:{method}")
            values, tried = cell.final(COUNTS), trainings.cell(f"choose-{data}:{method}")
            rows.append(
                {
                    "data": about.title,
                    "method": TITLES[method],
                    "average precision": values.mean(),
                    "std": values.std(ddof=1),
                    "median": values.median(),
                    "lowest seed": values.min(),
                    "collapsed": f"{len(cell.collapsed(COUNTS))} of {len(cell.seeds)}",
                    "published": PUBLISHED.get(data, {}).get(method),
                    "MB up per client": cell.megabytes_up,
                    "chosen": describe_settings(cell.settings[0]),
                    "at the edge": tried.edges(tried.best(CHOSEN_BY)),
                    "runs that diverged": int((cell.diverged >= 0).sum()),
                    "seeds": len(cell.seeds),
                }
            )
    return pd.DataFrame(rows)


def tabulate_choices(trainings: Trainings) -> pd.DataFrame:
    rows = []
    for data, about in trainings.plan.data:
        for method in trainings.plan.methods:
            cell = trainings.cell(f"choose-{data}:{method}")
            values, diverged = cell.metrics[CHOSEN_BY][:, :, -1], (cell.diverged >= 0).sum(1)
            for words, value, lost in zip(cell.settings, values.mean(1), diverged, strict=True):
                rows.append(
                    {"data": about.title, "method": TITLES[method], **words}
                    | {"validation average precision": None if lost else value}
                )
    return pd.DataFrame(rows)


def tabulate_released(trainings: Trainings) -> pd.DataFrame:
    """Validation precision of the search at the released step size (with the best beta), and at the best of all."""
    rows = []
    for data, about in trainings.plan.data:
        for method in trainings.plan.methods:
            cell = trainings.cell(f"choose-{data}:{method}")
            values = np.where((cell.diverged < 0).all(1), cell.metrics[CHOSEN_BY][:, :, -1].mean(1), np.nan)
            released = [
                value for words, value in zip(cell.settings, values, strict=True) if words["lr"] == RELEASED_RATE
            ]
            row: dict[str, Any] = {"data": about.title, "method": TITLES[method]}
            rows.append(
                row | {f"step size {RELEASED_RATE:g}": np.nanmax(released), "best of the grid": np.nanmax(values)}
            )
    return pd.DataFrame(rows)


def find_median_gap(trainings: Trainings, data: str, title: str) -> tuple[str, float]:
    """(data set, how far the family's medians are at most from the published means)."""
    published = PUBLISHED.get(data, {})
    gaps = [abs(trainings.cell(f"{data}:{m}").final(COUNTS).median() - published[m]) for m in OURS if m in published]
    return title, max(gaps, default=np.nan)


def check_claims(trainings: Trainings) -> list[Claim]:
    claims = []
    for number, (data, about) in enumerate(trainings.plan.data, 1):
        cells = {method: trainings.cell(f"{data}:{method}") for method in trainings.plan.methods}
        published = PUBLISHED.get(data, {})

        def case(one: str, other: str, cells: Any = cells, published: Any = published) -> Case:
            fallen = {TITLES[m]: len(cells[m].collapsed(COUNTS)) for m in (one, other)}
            fallen = [f"{title} {count} of {len(cells[one].seeds)}" for title, count in fallen.items() if count]
            return compare(
                cells[one].final(COUNTS),
                cells[other].final(COUNTS),
                motion=max(cells[m].motion(COUNTS) for m in (one, other)),
                published=published[one] - published[other] if {one, other} <= set(published) else None,
                remark=f"collapsed: {', '.join(fallen)}" if fallen else "",
            )

        pairs = lambda *wanted, case=case, cells=cells: {
            f"{TITLES[one]} minus {TITLES[other]}": case(one, other)
            for one, other in wanted
            if {one, other} <= set(cells)
        }
        compared = f"test average precision, {about.title}"
        ours = lambda other: pairs(*((method, other) for method in OURS))
        claims += [
            Claim(f"{number}a", "The FCSG family is above FedAvg.", compared, above(0), ours("fedavg")),
            Claim(f"{number}b", "The FCSG family is above CODA+.", compared, above(0), ours("coda-plus")),
            Claim(f"{number}c", "CODA+ is above FedAvg.", compared, above(0), pairs(("coda-plus", "fedavg"))),
            Claim(
                f"{number}d",
                "FCSG-M is not below FCSG, Acc-FCSG-M not below FCSG-M.",
                compared,
                above(ALIKE),
                pairs(("fcsg-m", "fcsg"), ("acc-fcsg-m", "fcsg-m")),
                reading=f"Not below: by no more than {-ALIKE:g}.",
            ),
        ]
    return [claim for claim in claims if claim.cases]


def draw_precision(trainings: Trainings) -> Figure:
    plan, parts = trainings.plan, []
    for data, about in plan.data:
        histories = [trainings.cell(f"{data}:{method}").history(method) for method in plan.methods]
        parts.append((about.title, pd.concat(histories, ignore_index=True)))
    titles = {method: TITLES[method] for method in plan.methods}
    published = {about.title: PUBLISHED.get(data, {}) for data, about in plan.data}
    return plots.draw_single_seeds(parts, COUNTS, titles, ylabel="test average precision", published=published)


EXPERIMENT = Experiment("auprc", "FCSG", Trainings, Plan(), QUICK, make_page)
