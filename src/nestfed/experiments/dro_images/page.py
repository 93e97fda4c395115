"""Imbalanced images: from the cells to the page."""

import functools
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments import plots
from nestfed.experiments.cells import describe_settings
from nestfed.experiments.claims import Case, Claim, above, compare, within
from nestfed.experiments.dro_images.plan import (
    CHOSEN_BY,
    PROPOSED,
    QUICK,
    TITLES,
    Plan,
    Trainings,
    split_choice_name,
    split_name,
)
from nestfed.experiments.frame import Experiment, Page

CENTRALISED = ("fastdro", "pdsgd", "mbsgd")
SHOWN = {
    "train_accuracy": "train accuracy",
    "train_balanced_accuracy": "train accuracy, mean over classes",
    "test_accuracy": "test accuracy",
    "test_worst_class_accuracy": "test accuracy of the worst class",
}
DRAWN = {name: title for name, title in SHOWN.items() if "worst" not in name}
ALIKE = 0.01  # "comparable", "saturates": within one point; written down for claim 2 before these trainings


def make_page(trainings: Trainings) -> Page:
    plan, full, final = trainings.plan, Plan(), tabulate_final(trainings)
    missing = []  # what a page made from fewer cells does not show
    if plan.data == full.data:
        missing += [f"{steps} local steps" for steps in full.local_steps if steps not in plan.local_steps]
        missing += [f"clients dealt by {dealing}" for dealing in full.uneven if dealing not in plan.uneven]
    return Page(
        tables={"final": final, "chosen": tabulate_choices(trainings)},
        figures={
            "figure1-methods": functools.partial(draw_figure_one, trainings),
            "figure2-local-steps": functools.partial(draw_figure_two, trainings),
        },
        claims=check_claims(trainings),
        words={
            "missing": missing,
            "worst": final[SHOWN["test_worst_class_accuracy"]].max(),
            "edges": tabulate_choices(trainings)["at the edge"].ne("").sum(),
        },
    )


def tabulate_final(trainings: Trainings) -> pd.DataFrame:
    """One row per training: settings, means and spreads over seeds, exchanges and bytes of the whole run."""
    rows = []
    for name in trainings.name_counting():
        method, steps, dealing = split_name(name)
        cell = trainings.cell(name)
        row: dict[str, Any] = {
            "dealing": dealing,
            "method": TITLES[method],
            "local steps": steps,
            "rounds": cell.rounds,
        }
        for metric, title in SHOWN.items():
            row |= cell.moments(metric, title)
        row |= {
            "exchanges": cell.cost["exchanges"] * cell.rounds,
            "MB up per client": cell.megabytes_up,
            "runs that diverged": int((cell.diverged >= 0).sum()),
            "seeds": len(cell.seeds),
            "minutes": cell.seconds / 60,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def tabulate_choices(trainings: Trainings) -> pd.DataFrame:
    rows = []
    for name in trainings.choices():
        method, steps = split_choice_name(name)
        cell, best = trainings.cell(name), trainings.best(name, CHOSEN_BY)
        rows.append(
            {
                "method": TITLES[method],
                "local steps": steps,
                "chosen": describe_settings(cell.settings[best]),
                "at the edge": cell.edges(best),
                "balanced validation accuracy": cell.metrics[CHOSEN_BY][best, 0, -1],
                "settings tried": len(cell.settings),
                "of them diverged": int((cell.diverged >= 0).any(1).sum()),
            }
        )
    return pd.DataFrame(rows)


def check_claims(trainings: Trainings) -> list[Claim]:
    counts = trainings.plan.local_steps
    middle, last = counts[len(counts) // 2], counts[-1]

    def end(ours: str, theirs: str, metric: str) -> Case:
        """One local step each, after all steps."""
        one, other = trainings.cell(f"{ours}-1-iid"), trainings.cell(f"{theirs}-1-iid")
        motion = max(one.motion(metric), other.motion(metric))
        return compare(one.final(metric), other.final(metric), motion=motion)

    against = lambda metric: {
        f"{TITLES[ours]} minus {TITLES[theirs]}": end(ours, theirs, metric)
        for ours in PROPOSED
        for theirs in CENTRALISED
    }
    server = {SHOWN[metric]: end("ds-feddro", "feddro", metric) for metric in ("train_accuracy", "test_accuracy")}
    by_rounds = lambda many, few: {
        f"{TITLES[m]}, {many} local steps minus {few}": compare_at_equal_rounds(trainings, m, many, few)
        for m in PROPOSED
    }
    by_steps = lambda many, few: {
        f"{TITLES[m]}, {many} local steps minus {few}": compare(
            *(trainings.cell(f"{m}-{steps}-iid").final("test_accuracy") for steps in (many, few))
        )
        for m in PROPOSED
    }
    rounds = lambda steps: f"test accuracy after the rounds that {steps} local steps take"
    total = f"test accuracy after {trainings.plan.steps} local steps"
    return [
        Claim(
            "1",
            "FedDRO and DS-FedDRO have a higher training accuracy than the centralised baselines.",
            "final train accuracy",
            above(0),
            against("train_accuracy"),
        ),
        Claim(
            "2",
            "Their test accuracy is comparable.",
            "final test accuracy",
            within(ALIKE),
            against("test_accuracy"),
            reading="Comparable: within one point.",
        ),
        Claim("3", "DS-FedDRO is above FedDRO.", "final accuracy, DS-FedDRO minus FedDRO", above(0), server),
        Claim(
            "4a", "Accuracy gains with local steps, at equal rounds.", rounds(middle), above(0), by_rounds(middle, 1)
        ),
        Claim(
            "5a",
            "Then it saturates, at equal rounds.",
            rounds(last),
            within(ALIKE),
            by_rounds(last, middle),
            reading="Saturates: within one point; the bound is that of claim 2.",
        ),
        Claim("4b", "Accuracy gains with local steps, at equal steps.", total, above(0), by_steps(middle, 1)),
        Claim(
            "5b",
            "Then it saturates, at equal steps.",
            total,
            within(ALIKE),
            by_steps(last, middle),
            reading="Saturates: within one point; the bound is that of claim 2.",
        ),
    ]


def compare_at_equal_rounds(trainings: Trainings, method: str, many: int, few: int) -> Case:
    """After the rounds that the more local steps take in all, or the evaluation nearest to them."""
    longer, shorter = trainings.cell(f"{method}-{many}-iid"), trainings.cell(f"{method}-{few}-iid")
    return compare(longer.final("test_accuracy"), shorter.near("test_accuracy", longer.rounds))


def draw_figure_one(trainings: Trainings) -> Figure:
    histories = [trainings.cell(f"{method}-1-iid").history(method) for method in TITLES]
    about = f"communication rounds, one local step each. {plots.BAND}"
    return plots.draw_metric_panels(pd.concat(histories, ignore_index=True), DRAWN, TITLES, xlabel=about)


def draw_figure_two(trainings: Trainings) -> Figure:
    """Test accuracy against the number of local steps, on both axes: after equally many steps, and after as many rounds
    as the most local steps take, where a training was looked at then."""
    plan, rows = trainings.plan, []
    fewest = trainings.cell(f"{PROPOSED[0]}-{plan.local_steps[-1]}-iid").rounds
    for method in PROPOSED:
        for steps in plan.local_steps:
            cell = trainings.cell(f"{method}-{steps}-iid")
            row = {"method": TITLES[method], "local steps": steps, "seeds": len(cell.seeds)}
            early = cell.near("test_accuracy", fewest)
            row |= cell.moments("test_accuracy", "steps") | {"rounds": early.mean(), "rounds, std": early.std(ddof=1)}
            rows.append(row)
    axes = {
        "steps": f"test accuracy after {plan.steps} local steps",
        "rounds": f"test accuracy after about {fewest} rounds",
    }
    return plots.draw_lines_over(pd.DataFrame(rows), "local steps", axes)


EXPERIMENT = Experiment("dro-images", "FedDRO", Trainings, Plan(), QUICK, make_page)
