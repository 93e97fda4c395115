"""Federated meta-learning: from the cells to the page."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments import plots
from nestfed.experiments.cells import in_words
from nestfed.experiments.claims import Claim, all_above, all_below
from nestfed.experiments.frame import Experiment, Page
from nestfed.experiments.maml.plan import (
    BASELINES,
    CHOSEN_BY,
    PHASES,
    PROPOSED,
    QUICK,
    TITLES,
    Plan,
    Trainings,
    name_of,
)
from nestfed.report.statistics import Paired, pair

FAR = 0.05  # "far above": by more than five points of accuracy


def make_page(trainings: Trainings) -> Page:
    """Of what is finished."""
    plan, parts = trainings.plan, trainings.list_finished()
    finals = {f"final-{study}": final_table(trainings, study, done) for study, done in parts.items()}
    return Page(
        tables=finals | {"chosen": choice_table(trainings, parts), "weights": weight_table(trainings, parts)},
        figures={study: functools.partial(curves, trainings, study, done) for study, done in parts.items()},
        claims=check_claims(trainings, parts),
        words={
            "studies": list(parts),
            "missing": [
                f"{study} ({_title(study, part)})"
                for study in plan.studies
                for part in trainings.parts(study)
                if part not in parts.get(study, ())
            ],
        },
        digits=6,
    )


def final_table(trainings: Trainings, study: str, parts: Sequence[str]) -> pd.DataFrame:
    """One row per training: test scores over seeds, the interval of one seed's mean over tasks, bytes, time."""
    rows = []
    scores = ("loss",) if study == "sine" else ("accuracy", "loss")
    for part, method in itertools.product(parts, trainings.plan.methods):
        cell = trainings.cell(name_of(study, part, method))
        row: dict[str, Any] = {"part": _title(study, part), "method": TITLES[method]}
        for score in scores:
            row |= cell.moments(f"test_{score}", f"test {score}")
            row[f"95 % over tasks of the {score}"] = cell.final(f"test_{score}_interval").mean()
        row |= {
            "MB up per client": cell.megabytes_up,
            "runs that diverged": int((cell.diverged >= 0).sum()),
            "seeds": len(cell.seeds),
            "seconds": cell.seconds,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _title(study: str, part: str) -> str:
    return PHASES[part] if study == "sine" else f"{part}-shot"


def choice_table(trainings: Trainings, parts: dict[str, list[str]]) -> pd.DataFrame:
    rows = []
    for study, method in itertools.product(parts, trainings.plan.methods):
        name = name_of(study, "choose", method)
        cell, best = trainings.cell(name), trainings.best(name, CHOSEN_BY, smallest=True)
        rows.append(
            {
                "data": study,
                "method": TITLES[method],
                "chosen": in_words(cell.settings[best]),
                "validation loss": cell.metrics[CHOSEN_BY][best, 0, -1],
                "settings tried": len(cell.settings),
                "of them diverged": int((cell.diverged >= 0).any(1).sum()),
                "seconds": cell.seconds,
            }
        )
    return pd.DataFrame(rows)


def weight_table(trainings: Trainings, parts: dict[str, list[str]]) -> pd.DataFrame:
    """What the search says of the baselines' estimate: the best validation loss with every weight of its new value."""
    rows = []
    for study, method in itertools.product(parts, [name for name in BASELINES if name in trainings.plan.methods]):
        cell = trainings.cell(name_of(study, "choose", method))
        losses = cell.metrics[CHOSEN_BY][:, 0, -1]
        best = lambda weight: min(
            (loss for words, loss in zip(cell.settings, losses, strict=True) if words["inner_lr"] == weight),
            key=lambda loss: (np.isnan(loss), loss),
        )
        row = {"data": study, "method": TITLES[method]}
        rows.append(row | {f"inner_lr = {weight:g}": best(weight) for weight in trainings.plan.weights})
    return pd.DataFrame(rows)


def check_claims(trainings: Trainings, parts: dict[str, list[str]]) -> list[Claim]:
    methods = trainings.plan.methods
    final = lambda study, part, method, score: trainings.cell(name_of(study, part, method)).final(score)

    def against(study: str, part: str, score: str) -> dict[str, Paired]:
        return {
            f"{_title(study, part)}, {TITLES[ours]} minus {TITLES[theirs]}": pair(
                final(study, part, ours, score), final(study, part, theirs, score)
            )
            for ours, theirs in itertools.product(PROPOSED, BASELINES)
            if {ours, theirs} <= set(methods)
        }

    claims = []
    shots = parts.get("omniglot", [])
    for number, part in enumerate(shots, 1):
        found = against("omniglot", part, "test_accuracy")
        claims.append(
            Claim(
                str(number),
                f"FCSG, FCSG-M and Acc-FCSG-M are far above Local-SCGD and Local-SCGDM with {part} "
                f"drawing{'s' if part != '1' else ''} to adapt on (by more than {100 * FAR:g} points).",
                "final test accuracy",
                found,
                all_above(found, FAR),
                level=FAR,
            )
        )
    if len(shots) > 1:
        gain = {
            TITLES[method]: pair(
                final("omniglot", shots[-1], method, "test_accuracy"),
                final("omniglot", shots[0], method, "test_accuracy"),
            )
            for method in methods
        }
        claims.append(
            Claim(
                str(len(shots) + 1),
                "More drawings to adapt on are better.",
                f"final test accuracy, {shots[-1]}-shot minus {shots[0]}-shot",
                gain,
                all_above(gain, 0.0),
            )
        )
    for part in parts.get("sine", []):
        found = against("sine", part, "test_loss")
        claims.append(
            Claim(
                str(len(claims) + 1),
                "(Ours, not the paper's.) On sine waves the loss of the three is below that of "
                f"Local-SCGD and Local-SCGDM, {PHASES[part]}.",
                "final test loss",
                found,
                all_below(found, 0.0),
            )
        )
    return claims


def curves(trainings: Trainings, study: str, parts: Sequence[str]) -> Figure:
    score, methods = "loss" if study == "sine" else "accuracy", trainings.plan.methods
    drawn = [(_title(study, part), _history(trainings, study, part)) for part in parts]
    titles = {method: TITLES[method] for method in methods}
    return plots.panels(drawn, f"test_{score}", titles, ylabel=f"test {score} after adaptation")


def _history(trainings: Trainings, study: str, part: str) -> pd.DataFrame:
    cell = lambda method: trainings.cell(name_of(study, part, method))
    return pd.concat(
        [cell(method).history(method, trainings.plan.local_steps) for method in trainings.plan.methods],
        ignore_index=True,
    )


EXPERIMENT = Experiment("maml", Trainings, Plan(), QUICK, make_page)
