"""Personalised classification: from the cells to the page."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from nestfed.experiments.cells import Cell
from nestfed.experiments.claims import Case, Claim, above, compare, within
from nestfed.experiments.frame import Experiment, Page, format_markdown
from nestfed.experiments.personal.plan import (
    AS_CODED,
    CHOSEN,
    CHOSEN_BY,
    FLOOR,
    PROPOSED,
    QUICK,
    TITLES,
    Plan,
    Trainings,
)
from nestfed.report.figures import MUTED, STYLE
from nestfed.report.statistics import pair
from nestfed.report.style import choose_looks

TUNED = ("fedavg-whole", "fedbabu")  # one model for all, meant to be fine-tuned: judged after that
VISIBLE = 0.01  # "no visible difference": less than a point of accuracy


def make_page(trainings: Trainings) -> Page:
    """Of what is finished."""
    plan, results, tried = trainings.plan, trainings.list_finished(), tabulate_choices(trainings)
    about = dict(plan.data)
    frames = {
        f"{kind}-{data}": table(cells)
        for data, cells in results.items()
        for kind, table in (("final", tabulate_final), ("tuned", tabulate_tuned), ("diagnostics", tabulate_diagnostics))
    }
    return Page(
        tables=frames | {"tried": tried},
        figures={
            **{f"accuracy-{data}": functools.partial(draw_curves, cells) for data, cells in results.items()},
            "differences": functools.partial(draw_differences, results, {data: about[data].title for data in results}),
        },
        claims=check_claims(results),
        words={
            "about": about,
            "facts": {data: list_facts(cells) for data, cells in results.items()},
            "couplings": {TITLES[method]: value for method, value in plan.couplings if method in plan.methods},
            "slow": find_slow_center(results),
            "tried": format_choice(tried) if len(tried) else "",
            "missing": [
                f"{TITLES[method]} ({data})"
                for data, method in itertools.product(about, plan.methods)
                if method not in results.get(data, {})
            ],
        },
        digits=6,
    )


def list_facts(cells: Mapping[str, Cell]) -> dict[str, Any]:
    """What the trainings on a data set know of it."""
    return next(iter(cells.values())).settings[0]


def choose_metric(method: str, metric: str = "test_accuracy") -> str:
    """The metric that counts: methods that leave one model for all are meant to be fine-tuned."""
    return f"tuned_{metric}" if method in TUNED else metric


def tabulate_final(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """One row per method, and two where fine-tuning is part of it: accuracies over clients and seeds, and the cost."""
    rows = []
    for method, cell in cells.items():
        for tuned in ("", "tuned_") if method in TUNED else ("",):
            value = lambda metric: cell.final(f"{tuned}{metric}")
            accuracy = value("test_accuracy")
            row: dict[str, Any] = {
                "method": TITLES[method] + (", fine-tuned" if tuned else ""),
                "test accuracy": accuracy.mean(),
                "std over seeds": accuracy.std(ddof=1),
                "worst decile": value("test_accuracy_worst_decile").mean(),
                "lowest": value("test_accuracy_lowest").mean(),
                "std over clients": value("test_accuracy_deviation").mean(),
                "train loss": value("train_loss").mean(),
            }
            if "newcomer_accuracy" in cell.metrics:
                row["newcomers"] = value("newcomer_accuracy").mean()
            row |= {
                "MB up per client": cell.megabytes_up,
                "MB down per client": cell.cost["bytes_down"] * cell.rounds / 1e6,
                "thousand gradients per client": cell.cost["oracles"].get("GRAD", 0) * cell.rounds / 1e3,
                "runs that diverged": int((cell.diverged >= 0).sum()),
                "seeds": len(cell.seeds),
                "minutes": cell.seconds / 60,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def tabulate_tuned(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """What the same fine-tuning of the head gives every method."""
    rows = []
    for method, cell in cells.items():
        row: dict[str, Any] = {"method": TITLES[method]}
        for title, metric in {
            "test accuracy": "test_accuracy",
            "fine-tuned": "tuned_test_accuracy",
            "worst decile": "test_accuracy_worst_decile",
            "worst decile, fine-tuned": "tuned_test_accuracy_worst_decile",
            "newcomers": "newcomer_accuracy",
            "newcomers, fine-tuned": "tuned_newcomer_accuracy",
        }.items():
            if metric in cell.metrics:
                row[title] = cell.final(metric).mean()
        rows.append(row)
    return pd.DataFrame(rows)


def tabulate_choices(trainings: Trainings) -> pd.DataFrame:
    """How well clients did on validation images, by FedReCo's server step and strength of the pull."""
    rows = []
    for data, about in trainings.plan.data:
        name = f"choose-{data}"
        if not trainings.done(name):
            continue
        cell, best = trainings.cell(name), trainings.best(name, CHOSEN_BY)
        for i, words in enumerate(cell.settings):
            row = {"data": about.title, "server step": words["server_lr"], "lambda": words["coupling"]}
            value = np.nan if cell.diverged[i].max() >= 0 else cell.final(CHOSEN_BY, i).mean()
            rows.append(row | {"validation accuracy": value, "chosen": i == best})
    return pd.DataFrame(rows)


def format_choice(tried: pd.DataFrame) -> str:
    """The same for readers: a row per server step, a column per strength, and below what was chosen."""
    wide = tried.pivot(index=["data", "server step"], columns="lambda", values="validation accuracy")
    wide = wide.loc[list(tried["data"].unique())].rename(columns=lambda value: f"lambda {value:g}")
    chosen = tried[tried["chosen"]]
    named = [
        f"{title}: server step {step:g}, lambda {pull:g}"
        for title, step, pull in zip(chosen["data"], chosen["server step"], chosen["lambda"], strict=True)
    ]
    text = f"{format_markdown(wide.reset_index())}\nChosen: {'; '.join(named)}.\n"
    if max(chosen["lambda"]) == min(tried["lambda"]):
        text += "Everywhere that is the weakest pull of the grid; without any, every client trains alone.\n"
    return text


DIAGNOSTICS = {
    "representation_distance": "H",
    "representation_norm": "|phi|",
    "center_distance": "|u_k - u_0|",
    "clipped_share": "local gradients clipped",
    "server_clipped_share": "server means clipped",
}


def tabulate_diagnostics(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """What the representations and the steps look like in the end; means over clients and seeds."""
    last = lambda cell, metric: cell.final(metric).mean() if metric in cell.metrics else np.nan
    return pd.DataFrame(
        [
            {"method": TITLES[method]} | {title: last(cell, metric) for metric, title in DIAGNOSTICS.items()}
            for method, cell in cells.items()
        ]
    )


def check_claims(results: Mapping[str, Mapping[str, Cell]]) -> list[Claim]:
    def against(ours: tuple[str, ...], theirs: str) -> dict[str, Case]:
        return {
            f"{data}, {TITLES[method]} minus {TITLES[theirs]}": compare_as_judged(
                cells[method], method, cells[theirs], theirs
            )
            for (data, cells), method in itertools.product(results.items(), ours)
            if {method, theirs} <= set(cells)
        }

    def tuned(ours: tuple[str, ...], theirs: str) -> dict[str, Case]:
        metric = "tuned_test_accuracy"
        return {
            f"{data}, {TITLES[method]} minus {TITLES[theirs]}": compare(
                cells[method].final(metric),
                cells[theirs].final(metric),
                motion=max(cells[m].motion(metric) for m in (method, theirs)),
            )
            for (data, cells), method in itertools.product(results.items(), ours)
            if {method, theirs} <= set(cells)
        }

    compared = "final test accuracy, mean over clients (FedAvg and FedBABU fine-tuned)"
    sharing = tuple(method for method in TITLES if method not in (*PROPOSED, CHOSEN, FLOOR))
    helps = "A shared representation helps: FedReCo and FedReCo-PVR are above local training only."
    visible = f"FedReCo-PVR makes no visible difference to FedReCo (within {100 * VISIBLE:g} point of accuracy)."
    claims = [
        Claim("1", helps, compared, above(0), against(tuple(m for m in PROPOSED if m != AS_CODED), FLOOR)),
        Claim(
            "2",
            visible,
            compared,
            within(VISIBLE),
            against(("fedreco-pvr",), "fedreco"),
        ),
        Claim(
            "3",
            "FedReCo with a sum for H and a larger server step (see below) is above local training only.",
            compared,
            above(0),
            against((AS_CODED,), FLOOR),
            ours=True,
        ),
        Claim(
            "4",
            "The other methods, which share an extractor or a whole model, are above local training only.",
            compared,
            above(0),
            against(sharing, FLOOR),
            ours=True,
        ),
        Claim(
            "5",
            "The same with all fine-tuned alike, local training too.",
            "final test accuracy after the same fine-tuning of the head",
            above(0),
            tuned(sharing, FLOOR),
            ours=True,
        ),
        Claim(
            "6",
            "With settings chosen on validation images, FedReCo is above local training only.",
            compared,
            above(0),
            against((CHOSEN,), FLOOR),
            ours=True,
        ),
        Claim(
            "7",
            "With settings chosen on validation images, FedReCo is above itself with the paper's.",
            compared,
            above(0),
            against((CHOSEN,), "fedreco"),
            ours=True,
        ),
    ]
    found = [claim for claim in claims if claim.cases]
    return [dataclasses.replace(claim, number=str(number)) for number, claim in enumerate(found, 1)]


def compare_as_judged(cell: Cell, method: str, other: Cell, theirs: str) -> Case:
    """The difference of two methods, each as it is judged."""
    one, two = choose_metric(method), choose_metric(theirs)
    return compare(cell.final(one), other.final(two), motion=max(cell.motion(one), other.motion(two)))


def find_slow_center(results: Mapping[str, Mapping[str, Cell]]) -> dict[str, float]:
    """Data -> the share of FedReCo's server means that were shortened, where that is most of them: the common extractor
    then moves by a fixed small length per round, however far it should go."""
    shares = {
        data: float(cells["fedreco"].final("server_clipped_share").mean())
        for data, cells in results.items()
        if "fedreco" in cells
    }
    return {data: share for data, share in shares.items() if share > 0.5}


def draw_curves(cells: Mapping[str, Cell]) -> Figure:
    """A panel per method, with the others in grey: errors as they are judged, against rounds, every seed by itself, on
    a scale of powers of ten. The start, where all guess, is left out."""
    with matplotlib.rc_context(STYLE):
        columns = min(5, len(cells))
        rows = -(-len(cells) // columns)
        figure = Figure(figsize=(2.3 * columns + 0.6, 2.1 * rows + 0.5), layout="constrained")
        grid = np.ravel(figure.subplots(rows, columns, sharex=True, sharey=True))
        drawn = choose_looks({method: TITLES[method] for method in cells}, FLOOR)
        for axes in grid[len(cells) :]:
            axes.set_visible(False)
        for axes, method in zip(grid, cells, strict=False):
            for other, cell in cells.items():
                errors = 1 - cell.metrics[choose_metric(other)][0][:, 1:]
                if other != method:
                    axes.plot(cell.round[1:], errors.mean(0), color=MUTED, linewidth=0.7, alpha=0.5)
                else:
                    axes.plot(cell.round[1:], errors.T, color=drawn[method].colour, linewidth=1.3)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(TITLES[method] + ("\nfine-tuned" if method in TUNED else ""), fontsize=9)
            axes.margins(x=0.01)
        figure.supxlabel("communication rounds", fontsize=10, color=MUTED)
        figure.supylabel("test error, mean over clients", fontsize=10, color=MUTED)
    return figure


def draw_differences(results: Mapping[str, Mapping[str, Cell]], titles: Mapping[str, str]) -> Figure:
    """A panel per data set, a line per method: its final accuracy minus that of local training only, with the interval;
    a ring where both were fine-tuned alike."""
    # As coded, FedReCo is so far below that it would squeeze all others.
    wanted = [method for method in TITLES if method not in (FLOOR, AS_CODED)]
    methods = [method for method in wanted if any(method in cells for cells in results.values())]
    drawn = choose_looks({method: TITLES[method] for method in methods})
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(3.6 * len(results) + 1.8, 0.36 * len(methods) + 1.5), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(results), sharey=True))
        for axes, (data, cells) in zip(grid, results.items(), strict=True):
            floor = cells.get(FLOOR)
            for place, method in enumerate(methods):
                if method not in cells or floor is None:
                    continue
                found = compare_as_judged(cells[method], method, floor, FLOOR).found
                axes.plot([found.low, found.high], [-place, -place], color=drawn[method].colour, linewidth=2)
                axes.plot(found.mean, -place, "o", color=drawn[method].colour, markersize=6)
                tuned = pair(cells[method].final("tuned_test_accuracy"), floor.final("tuned_test_accuracy"))
                axes.plot(tuned.mean, -place - 0.22, "o", color=MUTED, markerfacecolor="none", markersize=5)
            axes.axvline(0, color=MUTED, linewidth=1, linestyle=(0, (1, 2.5)))
            axes.set_yticks([-place for place in range(len(methods))], [TITLES[method] for method in methods])
            axes.set_title(titles[data], fontsize=10)
        text = "Test accuracy minus that of local training only: paired mean and 95 % interval. Rings: both fine-tuned."
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=MUTED)
    return figure


EXPERIMENT = Experiment("personal", "FedReCo", Trainings, Plan(), QUICK, make_page)
