"""Imbalanced images: from the cells to the page."""

import functools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments import plots
from nestfed.experiments.cells import in_words
from nestfed.experiments.claims import Claim, all_above, no_gain
from nestfed.experiments.dro_images.plan import (
    CHOSEN_BY,
    PROPOSED,
    QUICK,
    TITLES,
    Plan,
    Trainings,
    choice_parts,
    parts,
)
from nestfed.experiments.frame import Experiment, Page
from nestfed.report.statistics import Paired, pair

CENTRALISED = ("fastdro", "pdsgd", "mbsgd")
SHOWN = {
    "train_accuracy": "train accuracy",
    "test_accuracy": "test accuracy",
    "test_worst_class_accuracy": "test accuracy of the worst class",
}


def make_page(trainings: Trainings) -> Page:
    plan, full, final = trainings.plan, Plan(), final_table(trainings)
    missing = []  # what a page made from fewer cells does not show
    if plan.data == full.data:
        missing += [f"{steps} local steps" for steps in full.local_steps if steps not in plan.local_steps]
        missing += [f"clients dealt by {dealing}" for dealing in full.uneven if dealing not in plan.uneven]
    return Page(
        tables={"final": final, "chosen": choice_table(trainings)},
        figures={
            "figure1-methods": functools.partial(figure_one, trainings),
            "figure2-local-steps": functools.partial(figure_two, final),
        },
        claims=check_claims(trainings),
        words={"missing": missing},
    )


def final_table(trainings: Trainings) -> pd.DataFrame:
    """One row per training: settings, means and spreads over seeds, exchanges and bytes of the whole run."""
    rows = []
    for name in trainings.name_counting():
        method, steps, dealing = parts(name)
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


def choice_table(trainings: Trainings) -> pd.DataFrame:
    rows = []
    for name in trainings.choices():
        method, steps = choice_parts(name)
        cell, best = trainings.cell(name), trainings.best(name, CHOSEN_BY)
        rows.append(
            {
                "method": TITLES[method],
                "local steps": steps,
                "chosen": in_words(cell.settings[best]),
                "balanced validation accuracy": cell.metrics[CHOSEN_BY][best, 0, -1],
                "settings tried": len(cell.settings),
                "of them diverged": int((cell.diverged >= 0).any(1).sum()),
            }
        )
    return pd.DataFrame(rows)


def check_claims(trainings: Trainings) -> list[Claim]:
    final = lambda name, metric: trainings.cell(name).final(metric)
    against = lambda metric: {
        f"{TITLES[ours]} minus {TITLES[theirs]}": pair(final(f"{ours}-1-iid", metric), final(f"{theirs}-1-iid", metric))
        for ours in PROPOSED
        for theirs in CENTRALISED
    }
    counts = trainings.plan.local_steps
    middle, last = counts[len(counts) // 2], counts[-1]
    gain = {
        f"{TITLES[method]}, {middle} local steps minus 1": _at_equal_rounds(trainings, method, middle)
        for method in PROPOSED
    }
    further = {
        f"{TITLES[method]}, {last} local steps minus {middle}": pair(
            final(f"{method}-{last}-iid", "test_accuracy"), final(f"{method}-{middle}-iid", "test_accuracy")
        )
        for method in PROPOSED
    }
    server = {
        "train accuracy": pair(final("ds-feddro-1-iid", "train_accuracy"), final("feddro-1-iid", "train_accuracy")),
        "test accuracy": pair(final("ds-feddro-1-iid", "test_accuracy"), final("feddro-1-iid", "test_accuracy")),
    }
    training, test = against("train_accuracy"), against("test_accuracy")
    return [
        Claim(
            "1",
            "FedDRO and DS-FedDRO reach at least the training accuracy of the centralised baselines.",
            "final train accuracy",
            training,
            all_above(training, 0.0),
        ),
        Claim(
            "2",
            "Their test accuracy is comparable (within one point).",
            "final test accuracy",
            test,
            all_above(test, -0.01),
            level=-0.01,
        ),
        Claim("3", "DS-FedDRO is above FedDRO.", "DS-FedDRO minus FedDRO", server, all_above(server, 0.0)),
        Claim(
            "4",
            "Accuracy at a given number of rounds gains with local steps.",
            f"test accuracy after the rounds that {middle} local steps take",
            gain,
            all_above(gain, 0.0),
        ),
        Claim(
            "5",
            "Then it saturates: still more local steps, with the same total of them, gain nothing.",
            "final test accuracy",
            further,
            no_gain(further),
        ),
    ]


def _at_equal_rounds(trainings: Trainings, method: str, local_steps: int) -> Paired:
    many, one = trainings.cell(f"{method}-{local_steps}-iid"), trainings.cell(f"{method}-1-iid")
    known = int(np.searchsorted(one.round, many.round[-1]))  # the first evaluation with at least as many rounds
    return pair(many.final("test_accuracy"), pd.Series(one.metrics["test_accuracy"][0, :, known], one.seeds))


def figure_one(trainings: Trainings) -> Figure:
    histories = [trainings.cell(f"{method}-1-iid").history(method) for method in TITLES]
    about = "communication rounds (one local step each)"
    return plots.metric_panels(pd.concat(histories, ignore_index=True), SHOWN, TITLES, xlabel=about)


def figure_two(final: Any) -> Figure:
    """The final table, a DataFrame, against the number of local steps."""
    return plots.lines_over(final[final.dealing == "iid"], "local steps", list(SHOWN.values()))


EXPERIMENT = Experiment("dro-images", Trainings, Plan(), QUICK, make_page)
