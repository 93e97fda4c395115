"""Average precision on images: from the cells to the page."""

import functools

import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments import plots
from nestfed.experiments.auprc.plan import CHOSEN_BY, QUICK, TITLES, Plan, Trainings
from nestfed.experiments.cells import in_words
from nestfed.experiments.claims import Claim, all_above
from nestfed.experiments.frame import Experiment, Page
from nestfed.report.statistics import pair

COUNTS = "test_average_precision"
OURS = ("fcsg", "fcsg-m", "acc-fcsg-m")
PUBLISHED = {
    "mnist": {"fedavg": 0.9357, "coda-plus": 0.9733, "fcsg": 0.9868, "fcsg-m": 0.9878, "acc-fcsg-m": 0.9879},
    "cifar10": {"fedavg": 0.5059, "coda-plus": 0.6039, "fcsg": 0.7130, "fcsg-m": 0.7157, "acc-fcsg-m": 0.7184},
}


def make_page(trainings: Trainings) -> Page:
    plan = trainings.plan
    tried = choice_table(trainings)
    choosing = {about.title: trainings.cell(f"choose-{data}:{plan.methods[0]}") for data, about in plan.data}
    return Page(
        tables={"final": final_table(trainings), "tried": tried},
        figures={f"precision-{data}": functools.partial(precision_figure, trainings, data) for data, _ in plan.data},
        claims=check_claims(trainings),
        words={
            "diverged": int(pd.isna(tried["validation average precision"]).to_numpy().sum()),
            "search_seeds": {title: len(cell.seeds) for title, cell in choosing.items()},
        },
    )


def final_table(trainings: Trainings) -> pd.DataFrame:
    """One row per data set and method: average precision, the published one, and the settings."""
    rows = []
    for data, about in trainings.plan.data:
        for method in trainings.plan.methods:
            cell = trainings.cell(f"{data}:{method}")
            values = cell.final(COUNTS)
            rows.append(
                {
                    "data": about.title,
                    "method": TITLES[method],
                    "average precision": values.mean(),
                    "std": values.std(ddof=0),
                    "lowest seed": values.min(),
                    "published": PUBLISHED.get(data, {}).get(method),
                    "MB up per client": cell.megabytes_up,
                    "chosen": in_words(cell.settings[0]),
                    "runs that diverged": int((cell.diverged >= 0).sum()),
                    "seeds": len(cell.seeds),
                }
            )
    return pd.DataFrame(rows)


def choice_table(trainings: Trainings) -> pd.DataFrame:
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


def check_claims(trainings: Trainings) -> list[Claim]:
    claims = []
    for number, (data, about) in enumerate(trainings.plan.data, 1):
        final = {method: trainings.cell(f"{data}:{method}").final(COUNTS) for method in trainings.plan.methods}
        above = lambda pairs, final=final: {
            f"{TITLES[one]} minus {TITLES[other]}": pair(final[one], final[other])
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
                f"{number}c",
                "FCSG-M is not below FCSG, Acc-FCSG-M not below FCSG-M (by more than 0.005).",
                compared,
                order,
                all_above(order, -0.005),
                level=-0.005,
            ),
        ]
    return [claim for claim in claims if claim.results]


def precision_figure(trainings: Trainings, data: str) -> Figure:
    plan = trainings.plan
    histories = [trainings.cell(f"{data}:{method}").history(method) for method in plan.methods]
    title = {COUNTS: f"{dict(plan.data)[data].title}: test average precision"}
    return plots.metric_panels(pd.concat(histories, ignore_index=True), title, TITLES, xlabel="communication rounds")


EXPERIMENT = Experiment("auprc", Trainings, Plan(), QUICK, make_page)
