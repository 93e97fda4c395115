"""Federated meta-learning: from the cells to the page."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments import plots
from nestfed.experiments.cells import describe_settings
from nestfed.experiments.claims import Case, Claim, above, below, compare
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
    make_name,
)
from nestfed.report.figures import MUTED, STYLE
from nestfed.report.statistics import select_rows
from nestfed.report.style import choose_looks

FAR = 0.05  # "far above": by more than five points of accuracy


def make_page(trainings: Trainings) -> Page:
    """Of what is finished."""
    plan, parts = trainings.plan, trainings.list_finished()
    finals = {f"final-{study}": tabulate_final(trainings, study, done) for study, done in parts.items()}
    return Page(
        tables=finals | {"chosen": tabulate_choices(trainings, parts), "weights": tabulate_weights(trainings, parts)},
        figures={
            **{study: functools.partial(draw_curves, trainings, study, done) for study, done in parts.items()},
            **{
                f"{study}-differences": functools.partial(draw_apart, trainings, study, done)
                for study, done in parts.items()
            },
            "weights": functools.partial(draw_weights, trainings, parts),
        },
        claims=check_claims(trainings, parts),
        words={
            "studies": list(parts),
            "missing": [
                f"{study} ({_make_title(study, part)})"
                for study in plan.studies
                for part in trainings.parts(study)
                if part not in parts.get(study, ())
            ],
        },
        digits=6,
    )


def tabulate_final(trainings: Trainings, study: str, parts: Sequence[str]) -> pd.DataFrame:
    """One row per training: test scores over seeds, the interval of one seed's mean over tasks, bytes, time."""
    lines = []
    scores = ("loss",) if study == "sine" else ("accuracy", "loss")
    for part, method in itertools.product(parts, trainings.plan.methods):
        cell = trainings.cell(make_name(study, part, method))
        row: dict[str, Any] = {"part": _make_title(study, part), "method": TITLES[method]}
        for score in scores:
            row |= cell.moments(f"test_{score}", f"test {score}")
            row[f"95 % over tasks of the {score}"] = cell.final(f"test_{score}_interval").mean()
        row |= {
            "MB up per client": cell.megabytes_up,
            "runs that diverged": int((cell.diverged >= 0).sum()),
            "seeds": len(cell.seeds),
            "seconds": cell.seconds,
        }
        lines.append(row)
    return pd.DataFrame(lines)


def _make_title(study: str, part: str) -> str:
    return PHASES[part] if study == "sine" else f"{part}-shot"


def tabulate_choices(trainings: Trainings, parts: dict[str, list[str]]) -> pd.DataFrame:
    rows = []
    for study, method in itertools.product(parts, trainings.plan.methods):
        name = make_name(study, "choose", method)
        cell, best = trainings.cell(name), trainings.best(name, CHOSEN_BY, smallest=True)
        rows.append(
            {
                "data": study,
                "method": TITLES[method],
                "chosen": describe_settings(cell.settings[best]),
                "at the edge": cell.edges(best),
                "validation loss": cell.metrics[CHOSEN_BY][best, 0, -1],
                "settings tried": len(cell.settings),
                "of them diverged": int((cell.diverged >= 0).any(1).sum()),
                "seconds": cell.seconds,
            }
        )
    return pd.DataFrame(rows)


def tabulate_weights(trainings: Trainings, parts: dict[str, list[str]]) -> pd.DataFrame:
    """What the search says of the baselines' estimate: the best validation loss with every weight of its new value."""
    rows = []
    for study, method in itertools.product(parts, [name for name in BASELINES if name in trainings.plan.methods]):
        cell = trainings.cell(make_name(study, "choose", method))
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

    def case(score: str, one: str, other: str) -> Case:
        first, second = trainings.cell(one), trainings.cell(other)
        motion = max(first.motion(score), second.motion(score))
        return compare(first.final(score), second.final(score), motion=motion)

    def against(study: str, part: str, score: str) -> dict[str, Case]:
        return {
            f"{_make_title(study, part)}, {TITLES[ours]} minus {TITLES[theirs]}": case(
                score, make_name(study, part, ours), make_name(study, part, theirs)
            )
            for ours, theirs in itertools.product(PROPOSED, BASELINES)
            if {ours, theirs} <= set(methods)
        }

    claims = []
    shots = parts.get("omniglot", [])
    for number, part in enumerate(shots, 1):
        claims.append(
            Claim(
                str(number),
                f"FCSG, FCSG-M and Acc-FCSG-M are far above Local-SCGD and Local-SCGDM with {part} "
                f"drawing{'s' if part != '1' else ''} to adapt on.",
                "final test accuracy",
                above(FAR),
                against("omniglot", part, "test_accuracy"),
                reading=f"Far above: by more than {100 * FAR:g} points.",
            )
        )
    if len(shots) > 1:
        gain = {
            TITLES[m]: case("test_accuracy", *(make_name("omniglot", shots[end], m) for end in (-1, 0)))
            for m in methods
        }
        claims.append(
            Claim(
                str(len(shots) + 1),
                "More drawings to adapt on are better.",
                f"final test accuracy, {shots[-1]}-shot minus {shots[0]}-shot",
                above(0),
                gain,
            )
        )
    for part in parts.get("sine", []):
        claims.append(
            Claim(
                str(len(claims) + 1),
                f"On sine waves the loss of the three is below that of Local-SCGD and Local-SCGDM, {PHASES[part]}.",
                "final test loss",
                below(0),
                against("sine", part, "test_loss"),
                ours=True,
            )
        )
    return claims


def draw_apart(trainings: Trainings, study: str, parts: Sequence[str]) -> Figure:
    """What the curves would hide where they coincide: the differences to Local-SCGD."""
    score, methods = "loss" if study == "sine" else "accuracy", trainings.plan.methods
    drawn = [(_make_title(study, part), _read_history(trainings, study, part)) for part in parts]
    titles = {method: TITLES[method] for method in methods}
    return plots.draw_differences(drawn, f"test_{score}", titles, BASELINES[0], ylabel=f"test {score}, difference")


def draw_weights(trainings: Trainings, parts: dict[str, list[str]]) -> Figure:
    """The search again: the best validation loss of the baselines with every weight of a new value, and FCSG's."""
    table = tabulate_weights(trainings, parts)
    weights = trainings.plan.weights
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(parts) + 1.6, 3.6), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(parts)))
        for axes, study in zip(grid, parts, strict=True):
            own = select_rows(table, data=study)
            drawn = choose_looks({str(title): str(title) for title in own["method"]})
            for title, look in drawn.items():
                row: Any = select_rows(own, method=title).iloc[0]
                losses = [row[f"inner_lr = {weight:g}"] for weight in weights]
                axes.plot(weights, losses, color=look.colour, marker=look.marker, linewidth=2, label=look.title)
            cell = trainings.cell(make_name(study, "choose", PROPOSED[0]))
            best = np.nanmin(cell.metrics[CHOSEN_BY][:, 0, -1])
            axes.axhline(best, color=MUTED, linestyle="dashed", linewidth=1.4, label=TITLES[PROPOSED[0]])
            axes.set(title=study.capitalize(), xlabel="weight of the new value", xticks=weights)
        grid[0].set_ylabel("best validation loss of the search")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def draw_curves(trainings: Trainings, study: str, parts: Sequence[str]) -> Figure:
    score, methods = "loss" if study == "sine" else "accuracy", trainings.plan.methods
    drawn = [(_make_title(study, part), _read_history(trainings, study, part)) for part in parts]
    titles = {method: TITLES[method] for method in methods}
    return plots.draw_panels(drawn, f"test_{score}", titles, ylabel=f"test {score} after adaptation")


def _read_history(trainings: Trainings, study: str, part: str) -> pd.DataFrame:
    cell = lambda method: trainings.cell(make_name(study, part, method))
    return pd.concat(
        [cell(method).history(method, trainings.plan.local_steps) for method in trainings.plan.methods],
        ignore_index=True,
    )


EXPERIMENT = Experiment("maml", "FCSG", Trainings, Plan(), QUICK, make_page)
