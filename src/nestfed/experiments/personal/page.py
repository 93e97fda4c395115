"""Personalised classification: from the cells to the page."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments.cells import Cell
from nestfed.experiments.claims import Claim, all_above, all_within
from nestfed.experiments.frame import Experiment, Page, markdown
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
from nestfed.report import figures
from nestfed.report.statistics import Paired, pair
from nestfed.report.style import looks

TUNED = ("fedavg-whole", "fedbabu")  # one model for all, meant to be fine-tuned: judged after that
VISIBLE = 0.01  # "no visible difference": less than a point of accuracy


def make_page(trainings: Trainings) -> Page:
    """Of what is finished."""
    plan, results, tried = trainings.plan, trainings.list_finished(), choice_table(trainings)
    about = dict(plan.data)
    frames = {
        f"{kind}-{data}": table(cells)
        for data, cells in results.items()
        for kind, table in (("final", final_table), ("tuned", tuned_table), ("diagnostics", diagnostics_table))
    }
    return Page(
        tables=frames | {"tried": tried},
        figures={
            f"accuracy-{data}-{name}": functools.partial(accuracy_figure, cells, about[data].title, against)
            for data, cells in results.items()
            for name, against in (("rounds", "round"), ("bytes", "bytes"), ("work", "oracle_calls"))
        },
        claims=check_claims(results),
        words={
            "about": about,
            "facts": {data: facts_of(cells) for data, cells in results.items()},
            "couplings": {TITLES[method]: value for method, value in plan.couplings if method in plan.methods},
            "slow": slow_center(results),
            "tried": markdown_choice(tried) if len(tried) else "",
            "missing": [
                f"{TITLES[method]} ({data})"
                for data, method in itertools.product(about, plan.methods)
                if method not in results.get(data, {})
            ],
        },
        digits=6,
    )


def facts_of(cells: Mapping[str, Cell]) -> dict[str, Any]:
    """What the trainings on a data set know of it."""
    return next(iter(cells.values())).settings[0]


def judging_metric(method: str, metric: str = "test_accuracy") -> str:
    """The metric that counts: methods that leave one model for all are meant to be fine-tuned."""
    return f"tuned_{metric}" if method in TUNED else metric


def final_table(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """One row per method, and two where fine-tuning is part of it: accuracies over clients and seeds, and the cost."""
    rows = []
    for method, cell in cells.items():
        for tuned in ("", "tuned_") if method in TUNED else ("",):
            value = lambda metric: cell.final(f"{tuned}{metric}")
            accuracy = value("test_accuracy")
            row: dict[str, Any] = {
                "method": TITLES[method] + (", fine-tuned" if tuned else ""),
                "test accuracy": accuracy.mean(),
                "std over seeds": accuracy.std(ddof=0),
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


def tuned_table(cells: Mapping[str, Cell]) -> pd.DataFrame:
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


def choice_table(trainings: Trainings) -> pd.DataFrame:
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


def markdown_choice(tried: pd.DataFrame) -> str:
    """The same for readers: a row per server step, a column per strength, and below what was chosen."""
    wide = tried.pivot(index=["data", "server step"], columns="lambda", values="validation accuracy")
    wide = wide.loc[list(tried["data"].unique())].rename(columns=lambda value: f"lambda {value:g}")
    chosen = tried[tried["chosen"]]
    named = [
        f"{title}: server step {step:g}, lambda {pull:g}"
        for title, step, pull in zip(chosen["data"], chosen["server step"], chosen["lambda"], strict=True)
    ]
    text = f"{markdown(wide.reset_index())}\nChosen: {'; '.join(named)}.\n"
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


def diagnostics_table(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """What the representations and the steps look like in the end; means over clients and seeds."""
    last = lambda cell, metric: cell.final(metric).mean() if metric in cell.metrics else np.nan
    return pd.DataFrame(
        [
            {"method": TITLES[method]} | {title: last(cell, metric) for metric, title in DIAGNOSTICS.items()}
            for method, cell in cells.items()
        ]
    )


def check_claims(results: Mapping[str, Mapping[str, Cell]]) -> list[Claim]:
    def against(ours: tuple[str, ...], theirs: str) -> dict[str, Paired]:
        return {
            f"{data}, {TITLES[method]} minus {TITLES[theirs]}": pair(
                cells[method].final(judging_metric(method)), cells[theirs].final(judging_metric(theirs))
            )
            for (data, cells), method in itertools.product(results.items(), ours)
            if {method, theirs} <= set(cells)
        }

    compared = "final test accuracy, mean over clients (FedAvg and FedBABU fine-tuned)"
    sharing = tuple(method for method in TITLES if method not in (*PROPOSED, CHOSEN, FLOOR))
    above = {
        "A shared representation helps: FedReCo (also as coded) and -PVR are above local training only.": against(
            PROPOSED, FLOOR
        ),
        "(Ours.) The other methods, which share an extractor or a whole model, are above it too.": against(
            sharing, FLOOR
        ),
        "(Ours.) With settings chosen on validation images, FedReCo is above local training only.": against(
            (CHOSEN,), FLOOR
        ),
        "(Ours.) With settings chosen on validation images, FedReCo is above itself with the paper's.": against(
            (CHOSEN,), "fedreco"
        ),
    }
    variance = against(("fedreco-pvr",), "fedreco")
    text = f"FedReCo-PVR makes no visible difference to FedReCo (within {100 * VISIBLE:g} point of accuracy)."
    found = [Claim("", text, compared, results, all_above(results, 0.0), 0.0) for text, results in above.items()]
    found.append(Claim("", text, compared, variance, all_within(variance, VISIBLE)))
    found = [claim for claim in found if claim.results]
    return [dataclasses.replace(claim, number=str(number)) for number, claim in enumerate(found, 1)]


def slow_center(results: Mapping[str, Mapping[str, Cell]]) -> dict[str, float]:
    """Data -> the share of FedReCo's server means that were shortened, where that is most of them: the common extractor
    then moves by a fixed small length per round, however far it should go."""
    shares = {
        data: float(cells["fedreco"].final("server_clipped_share").mean())
        for data, cells in results.items()
        if "fedreco" in cells
    }
    return {data: share for data, share in shares.items() if share > 0.5}


def accuracy_figure(cells: Mapping[str, Cell], title: str, against: str) -> Figure:
    shown = {method: cell for method, cell in cells.items() if method != AS_CODED}  # it would squeeze the others
    first = sorted(shown, key=lambda method: method not in (*PROPOSED, CHOSEN))  # full lines for those in question
    titles = {method: TITLES[method] + (", fine-tuned" if method in TUNED else "") for method in first}
    history = curves_of(shown, facts_of(cells)["clients"])
    return figures.curves(history, "accuracy", against, title=f"Test accuracy, {title}", methods=looks(titles, FLOOR))


def curves_of(cells: Mapping[str, Cell], clients: int) -> pd.DataFrame:
    """One history of all methods, with `accuracy` as they are judged; bytes and calls of all clients together. The
    first tenth is left out: what models guess at the start would leave no room for the differences."""
    parts = []
    for method, cell in cells.items():
        part = cell.history(method).query("round > round.max() / 10")
        total = {name: part[name] * clients for name in ("bytes", "oracle_calls")}
        parts.append(part.assign(accuracy=part[judging_metric(method)], **total))
    return pd.concat(parts, ignore_index=True)


EXPERIMENT = Experiment("personal", Trainings, Plan(), QUICK, make_page)
