"""Noisy protected groups: from the cells to the page."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.data import load
from nestfed.experiments import plots
from nestfed.experiments.cells import describe_settings
from nestfed.experiments.claims import Case, Claim, above, below, compare, within
from nestfed.experiments.dro_fairness.data import GROUPS
from nestfed.experiments.dro_fairness.plan import (
    BETAS,
    EPOCH,
    PROPOSED,
    QUICK,
    SERVER_RATE,
    TITLES,
    Plan,
    Training,
    Trainings,
)
from nestfed.experiments.frame import Experiment, Page, format_markdown
from nestfed.report.style import format_number, format_spread, make_file_name

SHOWN = {
    "train_accuracy": "train accuracy",
    "test_accuracy": "test accuracy",
    "train_violation": "train violation",
    "test_violation": "test violation",
}
COMPARABLE = 0.01  # violations that differ by less


def make_page(trainings: Trainings) -> Page:
    plan, seeds, cost = trainings.plan, tabulate_seeds(trainings), tabulate_costs(trainings)
    final = tabulate_final(seeds)
    drawn = draw_figures(trainings, final)
    rows = functools.partial(select_rows, final, trainings)
    compared = rows(trainings.compared, "rounds", "steps")
    local_steps = rows(trainings.local_steps, "rounds", "steps").sort_values(["after", "method", "local steps"])
    few = rows(trainings.few_clients, "rounds").sort_values(["local steps", "clients"])
    titles = list(SHOWN.values())
    tpr = [f"test tpr{'' if group is None else ' ' + group}" for group in (None, *GROUPS)]
    tpr.append("test tpr spread")
    proxies = ["train violation by proxy", "test violation by proxy"]

    def value(reading: str, method: str, after: str, column: str) -> float:
        """A number of the final table, one step per round."""
        return float(rows([Training(method, plan.clients, reading=reading)], after)[column].iloc[0])

    return Page(
        tables={
            "seeds": seeds,
            "final": final,
            "chosen": tabulate_choices(trainings),
            "paper-rates": tabulate_paper_rates(trainings),
            "cost": cost,
        },
        figures=drawn,
        claims=check_claims(trainings),
        words={
            "epoch": EPOCH,
            "server_rate": SERVER_RATE,
            "betas": BETAS,
            "drawn": list(drawn),
            "value": value,
            "number": format_number,
            "always_no": 1 - load("adult-all").labels().mean(),
            "at_equal_steps": rows(trainings.local_steps, "steps")["train objective"],
            "methods": format_table(compared, ["reading", "after", "method", "lr"], titles),
            "rates": format_table(compared, ["reading", "after", "method"], [*tpr, *proxies]),
            "local_steps": format_table(
                local_steps, ["after", "method", "local steps", "lr", "beta"], [*titles, "train objective"]
            ),
            "clients": format_table(few, ["local steps", "clients", "lr"], titles),
        },
        shown={"cost": cost.astype({"exchanges": int, "bytes up": int, "bytes down": int})},
        digits=6,
        settings={"betas_of_one_step": BETAS, "server_rate": SERVER_RATE, "gcivr_epoch": EPOCH},
    )


def tabulate_seeds(trainings: Trainings) -> pd.DataFrame:
    """One row per training, occasion and seed: all metrics of the chosen setting."""
    rows = []
    for training in trainings.all_trainings:
        for after in trainings.list_occasions(training):
            words = trainings.cell(training.name).settings[trainings.choose(training, after)]
            about = _describe(trainings, training, after) | {"lr": words["lr"], "beta": words.get("beta", np.nan)}
            result = add_spreads(trainings.measured(training, after)).reset_index()
            rows.append(result.assign(**about)[[*about, *result.columns]])
    return pd.concat(rows, ignore_index=True)


def _describe(trainings: Trainings, training: Training, after: str) -> dict[str, Any]:
    return {
        "reading": training.reading,
        "method": TITLES[training.method],
        "local steps": training.local_steps,
        "clients": training.clients,
        "after": trainings.occasion(after),
    }


KEYS = ["reading", "method", "local steps", "clients", "after"]


def tabulate_final(seeds: pd.DataFrame) -> pd.DataFrame:
    """Means and standard deviations over seeds of the metrics shown, in the order of the trainings."""
    grouped = seeds.groupby(KEYS, sort=False, dropna=False)
    columns: dict[str, Any] = {"lr": grouped["lr"].first(), "beta": grouped["beta"].first()}
    metrics = SHOWN | {
        "train_proxy_violation": "train violation by proxy",
        "test_proxy_violation": "test violation by proxy",
        "train_objective": "train objective",
        "validation_objective": "validation objective",
    }
    metrics |= {"train_tpr_spread": "train tpr spread", "test_tpr_spread": "test tpr spread"}
    metrics |= {name: name.replace("_", " ") for name in seeds.columns if "_tpr" in name and name not in metrics}
    for metric, title in metrics.items():
        columns |= {title: grouped[metric].mean(), f"{title}, std": grouped[metric].std(ddof=1)}
    return pd.DataFrame(columns | {"seeds": grouped.size()}).reset_index()


def select_rows(final: Any, trainings: Trainings, wanted: Sequence[Training], *after: str) -> Any:
    """The rows of the final table about these trainings on these occasions."""
    keys = {tuple(_describe(trainings, training, occasion).values()) for training in wanted for occasion in after}
    return final[[key in keys for key in final[KEYS].itertuples(index=False, name=None)]]


def format_table(final: Any, keys: Sequence[str], metrics: Sequence[str]) -> str:
    """Rows of the final table as Markdown: mean ± standard deviation."""
    shown = final[list(keys)].map(lambda value: f"{value:g}" if isinstance(value, float) else value)
    for metric in metrics:
        moments = zip(final[metric], final[f"{metric}, std"], final["seeds"], strict=True)
        shown[metric] = [format_spread(mean, std, n) for mean, std, n in moments]
    return format_markdown(shown)


def tabulate_choices(trainings: Trainings) -> pd.DataFrame:
    """What was chosen for every training and occasion, and how the best of the paper's step sizes compares."""
    rows = []
    for training in trainings.all_trainings:
        cell = trainings.cell(training.name)
        rates = sorted({words["lr"] for words in cell.settings})
        for after in trainings.list_occasions(training):
            score = lambda setting: trainings.measured(training, after, setting)[training.chosen_by].mean()
            best = trainings.choose(training, after)
            published = trainings.choose(training, after, trainings.plan.paper_rates)
            words = cell.settings[best]
            rows.append(
                _describe(trainings, training, after)
                | {
                    "chosen": describe_settings(words),
                    "at the edge": "yes" if words["lr"] in (rates[0], rates[-1]) else "",
                    "score": score(best),
                    "best of the paper's": f"{cell.settings[published]['lr']:g}",
                    "its score": score(published),
                    "settings tried": len(cell.settings),
                    "of them diverged": int((cell.diverged >= 0).any(1).sum()),
                }
            )
    return pd.DataFrame(rows)


def tabulate_costs(trainings: Trainings) -> pd.DataFrame:
    """What a client sends in a round of the paper's count, at one step per round and at the most."""
    rows = []
    several = [t for t in trainings.local_steps if t.local_steps == max(trainings.plan.local_steps)]
    for training in trainings.drawn_finely + several:
        cost, rounds = trainings.cell(training.name).cost, training.rounds_per_round
        rows.append(
            {
                "method": TITLES[training.method],
                "local steps": training.local_steps,
                "exchanges": cost["exchanges"] / rounds,
                "bytes up": cost["bytes_up"] / rounds,
                "bytes down": cost["bytes_down"] / rounds,
            }
        )
    return pd.DataFrame(rows)


def tabulate_paper_rates(trainings: Trainings) -> pd.DataFrame:
    """The methods after the paper's rounds, if only the paper's step sizes are allowed."""
    rows = []
    for training in trainings.compared:
        setting = trainings.choose(training, "rounds", trainings.plan.paper_rates)
        result = trainings.measured(training, "rounds", setting)
        lr = trainings.cell(training.name).settings[setting]["lr"]
        row: dict[str, Any] = {"reading": training.reading, "method": TITLES[training.method], "lr": f"{lr:g}"}
        for metric, title in SHOWN.items():
            row[title] = format_spread(result[metric].mean(), result[metric].std(ddof=1), len(result))
        rows.append(row)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------------- claims


def check_claims(trainings: Trainings) -> list[Claim]:
    """What the paper says; the claims on methods once more with positives as the reference."""
    claims = (
        _make_method_claims(trainings, "rows", "")
        + _make_local_steps_claims(trainings)
        + _make_clients_claims(trainings)
    )
    return claims + (_make_method_claims(trainings, "positives", "b") if "positives" in trainings.plan.readings else [])


def _compare(trainings: Trainings, one: Training, other: Training, metric: str, after: str) -> Case:
    own, others = (add_spreads(trainings.measured(training, after))[metric] for training in (one, other))
    return compare(own, others)


def add_spreads(measured: Any) -> Any:
    """With how far the true positive rates of the groups lie apart; the violation looks at one side only."""
    spreads = {}
    for part in ("train", "test"):
        rates = measured[[f"{part}_tpr_{group}" for group in GROUPS]]
        spreads[f"{part}_tpr_spread"] = rates.max(axis=1) - rates.min(axis=1)
    return measured.assign(**spreads)


def _make_method_claims(trainings: Trainings, reading: str, mark: str) -> list[Claim]:
    clients, ours = trainings.plan.clients, bool(mark)
    theirs = {"gcivr": Training("gcivr", clients, reading=reading), "unconstrained": Training("unconstrained", clients)}

    def against(baseline: str, measure: str) -> dict[str, Case]:
        return {
            f"{TITLES[method]}, {part}, {trainings.occasion(after)}": _compare(
                trainings, Training(method, clients, reading=reading), theirs[baseline], f"{part}_{measure}", after
            )
            for method in PROPOSED
            for part in ("train", "test")
            for after in ("rounds", "steps")
        }

    of = "" if not mark else " (positives as the reference)"
    first, second = (Training(method, clients, reading=reading) for method in PROPOSED)
    ahead = {
        trainings.occasion(after): _compare(trainings, first, second, "train_accuracy", after)
        for after in ("rounds", "steps")
    }
    return [
        Claim(
            f"1{mark}",
            f"FedDRO and DS-FedDRO violate the constraints less than unconstrained training{of}.",
            "maximum violation minus that of unconstrained training",
            below(0),
            against("unconstrained", "violation"),
            ours=ours,
        ),
        Claim(
            f"1{mark}, both sides" if mark else "1, both sides",
            f"Their true positive rates also lie closer together{of}.",
            "largest minus smallest rate of a group, minus that of unconstrained training",
            below(0),
            against("unconstrained", "tpr_spread"),
            ours=True,
        ),
        Claim(
            f"2{mark}",
            f"Their accuracy is above that of unconstrained training{of}.",
            "accuracy minus that of unconstrained training",
            above(0),
            against("unconstrained", "accuracy"),
            ours=ours,
        ),
        Claim(
            f"3{mark}",
            f"Their violations match those of GCIVR{of}.",
            "maximum violation minus GCIVR's",
            within(COMPARABLE),
            against("gcivr", "violation"),
            ours=ours,
            reading=f"Match: within {COMPARABLE:g}.",
        ),
        Claim(
            f"4{mark}",
            f"Their accuracy is above that of GCIVR{of}.",
            "accuracy minus GCIVR's",
            above(0),
            against("gcivr", "accuracy"),
            ours=ours,
        ),
        Claim(
            f"5{mark}",
            f"FedDRO is ahead of DS-FedDRO in training accuracy{of}.",
            "train accuracy, FedDRO minus DS-FedDRO",
            above(0),
            ahead,
            ours=ours,
        ),
    ]


def _make_local_steps_claims(trainings: Trainings) -> list[Claim]:
    plan = trainings.plan
    most, enough = max(plan.local_steps), plan.saturation

    def contrast(many: int, few: int) -> dict[str, Case]:
        return {
            f"{TITLES[method]}, {part}, {many} minus {few}": _compare(
                trainings,
                Training(method, plan.clients, many),
                Training(method, plan.clients, few),
                f"{part}_accuracy",
                "rounds",
            )
            for method in PROPOSED
            for part in ("train", "test")
        }

    return [
        Claim(
            "6",
            "Accuracy gains with local steps, at equal rounds.",
            f"accuracy after {plan.rounds} rounds, {enough} local steps minus 1",
            above(0),
            contrast(enough, 1),
        ),
        Claim(
            "7",
            f"The gain saturates at about {enough} local steps, at equal rounds.",
            f"accuracy after {plan.rounds} rounds, {most} local steps minus {enough}",
            within(COMPARABLE),
            contrast(most, enough),
            reading=f"Saturates: within {COMPARABLE:g}; the bound is that of claim 3.",
        ),
    ]


def _make_clients_claims(trainings: Trainings) -> list[Claim]:
    plan = trainings.plan
    many, few = max(plan.few_clients), min(plan.few_clients)

    def same_step(steps: int, metric: str) -> Case:
        """With the settings that the most clients chose."""
        setting = trainings.choose(Training("feddro", many, steps), "rounds")
        one, other = (trainings.measured(Training("feddro", n, steps), "rounds", setting)[metric] for n in (many, few))
        return compare(one, other)

    def contrast(*metrics: str) -> dict[str, Case]:
        found = {}
        for steps, metric in itertools.product(plan.few_clients_steps, metrics):
            one, other = (Training("feddro", n, steps) for n in (many, few))
            case = f"{metric.split('_')[0]}, {steps} local step{'s' if steps > 1 else ''}"
            found[f"{case}, each with its step size"] = _compare(trainings, one, other, metric, "rounds")
            found[f"{case}, one step size"] = same_step(steps, metric)
        return found

    return [
        Claim(
            "8",
            "Accuracy rises with the number of clients.",
            f"FedDRO after {plan.rounds} rounds, accuracy with {many} clients minus {few}",
            above(0),
            contrast("train_accuracy", "test_accuracy"),
        ),
        Claim(
            "8, objective",
            "The objective, which is what is minimised, falls with the number of clients.",
            f"FedDRO after {plan.rounds} rounds, objective on training rows with {many} clients minus {few}",
            below(0),
            contrast("train_objective"),
            ours=True,
        ),
    ]


# ------------------------------------------------------------------------------------------------- figures


def draw_figures(trainings: Trainings, final: Any) -> dict[str, Callable[[], Figure]]:
    """All figures by name; `final` is the final table, a DataFrame."""
    plan = trainings.plan
    drawn = [("rows", "rounds", "test"), ("rows", "rounds", "train"), ("rows", "steps", "test")]
    drawn += [("positives", "steps", "test")] if "positives" in plan.readings else []
    found = {
        make_file_name("methods", reading, trainings.occasion(after), part): functools.partial(
            draw_methods, trainings, reading, after, part
        )
        for reading, after, part in drawn
    }
    rows = select_rows(final, trainings, trainings.local_steps, "rounds")
    metrics = {name: name for name in ("train accuracy", "test accuracy", "train objective")}
    name = make_file_name("local steps", trainings.occasion("rounds"))
    found[name] = functools.partial(plots.draw_lines_over, rows, "local steps", metrics)
    few = select_rows(final, trainings, trainings.few_clients, "rounds")
    few = few.assign(method=[f"FedDRO, I = {steps}" for steps in few["local steps"]])
    found["clients"] = functools.partial(plots.draw_lines_over, few, "clients", metrics)
    return found


def draw_methods(trainings: Trainings, reading: str, after: str, part: str) -> Figure:
    others = [training for training in trainings.compared if training.reading == reading]
    shown = dict.fromkeys([*others, Training("unconstrained", trainings.plan.clients)])
    history = pd.concat([trainings.history(training, after) for training in shown], ignore_index=True)
    metrics = {name: title for name, title in SHOWN.items() if name.startswith(part)}
    about = f"communication rounds, one step each. {plots.BAND}"
    return plots.draw_metric_panels(history, metrics, TITLES, xlabel=about)


EXPERIMENT = Experiment("dro-fairness", "FedDRO", Trainings, Plan(), QUICK, make_page)
