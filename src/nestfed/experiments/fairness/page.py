"""Fair federated learning: from the records and cells to the page."""

import functools
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments.claims import Claim, all_above, all_below, at_level
from nestfed.experiments.fairness.plan import (
    DATA,
    DEALING,
    METRICS,
    PAPER,
    QUICK,
    Plan,
    Trainings,
    list_settings,
    setting_name,
)
from nestfed.experiments.fairness.task import FORGETFUL, Reproduced
from nestfed.experiments.frame import Experiment, Page
from nestfed.experiments.plots import panels
from nestfed.report import figures
from nestfed.report.figures import MUTED, STYLE
from nestfed.report.record import Record
from nestfed.report.statistics import pair, select_finished
from nestfed.report.style import looks
from nestfed.report.tables import headline

BILEVEL = ("fedbio", "fedbioacc", FORGETFUL)


def make_page(trainings: Trainings) -> Page:
    plan, dealt = trainings.plan, [setting for group in trainings.settings() for setting in group]
    records = {setting[:2]: trainings.record(setting) for setting in dealt if setting != plan.past}
    past = trainings.record(plan.past)
    table = table_one(records)
    explored = pd.concat([trainings.table(f"readings-{data}") for data in plan.data], ignore_index=True)
    closest = closest_readings(explored)
    first = closest.groupby("data").first().reset_index().to_dict("records")
    numbers, shown = headline(past)
    return Page(
        tables={
            "table1": table,
            "chosen": pd.concat([trainings.table(setting_name(setting)) for setting in dealt], ignore_index=True),
            "readings": explored,
            "past": numbers,
            "seeds": pd.concat([r.final.assign(setting=r.about["name"]) for r in (*records.values(), past)]),
        },
        figures={
            **{figure_name(data): functools.partial(convergence_figure, data, records) for data in plan.data},
            "table1": functools.partial(against_published, table),
            "past": functools.partial(figures.trade_off, past),
        },
        claims=check_claims(records),
        words={
            "past_data": f"{DATA[plan.past[0]]}, groups by {dict(plan.past[2]).get('group', 'sex and marital status')}",
            "convergence": [(DATA[data], f"figures/{figure_name(data)}.png") for data in plan.data],
            "closest_readings": closest,
            "closest": "; ".join(f"{row['data']}: {row['reading']}, step size {row['lr']:g}" for row in first),
        },
        shown={"table1": shown_table(table), "past": shown},
        typeset=("table1", "chosen", "readings", "claims", "past"),
        settings=list_settings(plan),
    )


# ------------------------------------------------------------------------------------------------- tables


def table_one(records: Mapping[tuple[str, str], Record]) -> pd.DataFrame:
    """Ours and the paper's numbers, one row per setting, method and metric."""
    rows = []
    for cell, record in records.items():
        for method in record.methods:
            own = record.final[(record.final.method == method) & (record.final.status == "finished")]
            published = PAPER[cell].get(method, [(np.nan, np.nan)] * len(METRICS))
            for (name, title), (mean, std) in zip(METRICS.items(), published, strict=True):
                rows.append(
                    {
                        "data": DATA[cell[0]],
                        "dealing": DEALING[cell[1]],
                        "method": record.title(method),
                        "metric": title,
                        "ours": own[name].mean(),
                        "ours std": own[name].std(ddof=0),
                        "seeds": len(own),
                        "paper": mean,
                        "paper std": std,
                    }
                )
    return pd.DataFrame(rows)


def shown_table(table: pd.DataFrame) -> pd.DataFrame:
    """As people read it: one row per setting and method."""
    both = lambda mean, std: f"{mean:.4f} ± {std:.4f}" if np.isfinite(mean) else "–"
    rows: dict[tuple, dict[str, str]] = {}
    for row in table.to_dict("records"):
        line = rows.setdefault((row["data"], row["dealing"], row["method"]), {})
        line[row["metric"]] = both(row["ours"], row["ours std"])
        line[f"{row['metric']}, paper"] = both(row["paper"], row["paper std"])
    names = ("data", "dealing", "method")
    return pd.DataFrame([dict(zip(names, key, strict=True)) | line for key, line in rows.items()])


def closest_readings(explored: pd.DataFrame) -> pd.DataFrame:
    """The closest step size of every reading, the closest reading first."""
    best = explored.loc[explored.groupby(["data", "reading"], sort=False)["distance to the paper"].idxmin()]
    return best.sort_values(["data", "distance to the paper"], ignore_index=True)


# ------------------------------------------------------------------------------------------------- claims


def check_claims(records: Mapping[tuple[str, str], Record]) -> list[Claim]:
    """Every claim with the differences that decide it."""
    final: dict[Any, Any] = {cell: select_finished(record) for cell, record in records.items()}
    value = lambda cell, method, metric: final[cell][final[cell].method == method].set_index("seed")[metric]
    against = lambda metric: {
        (method, cell): pair(value(cell, method, metric), value(cell, "fedavg", metric))
        for method in ("fedbio", "fedbioacc")
        for cell in records
    }
    name = lambda method, cell: f"{Reproduced.methods[method].title}, {DATA[cell[0]]}, {DEALING[cell[1]]}"
    named = lambda results: {name(*key): result for key, result in results.items()}

    eqopp = named(against("test_eqopp"))
    accuracy = {case: at_level(result, -0.01) for case, result in named(against("test_accuracy")).items()}
    half = lambda method: {
        name(method, cell): pair(_rounds_to_fedbio(record, method), _half_of_the_rounds(record))
        for cell, record in records.items()
    }
    slower = {
        name(method, (data, "ratios:2:2:6")): pair(
            _rounds_to_settle(records[data, "ratios:2:2:6"], method), _rounds_to_settle(records[data, "iid"], method)
        )
        for method in ("fedbio", "fedbioacc")
        for data in dict.fromkeys(data for data, _ in records)
    }
    advantage = lambda method, cell: value(cell, "fedavg", "test_eqopp") - value(cell, method, "test_eqopp")
    lost, had = {}, []
    for method in ("fedreg", "fcfl"):
        for data in dict.fromkeys(data for data, _ in records):
            before, after = advantage(method, (data, "iid")), advantage(method, (data, "ratios:2:2:6"))
            lost[name(method, (data, "ratios:2:2:6"))] = pair(after, before)
            had.append(pair(before, before * 0).low > 0)
    return [
        Claim(
            "1",
            "FedBiO and FedBiOAcc have a lower test EqOpp gap than FedAvg in all four settings.",
            "test EqOpp gap minus FedAvg's",
            eqopp,
            all_below(eqopp, 0.0),
        ),
        Claim(
            "2",
            "They lose at most one point of test accuracy.",
            "test accuracy minus FedAvg's",
            accuracy,
            all_above(accuracy, -0.01),
            level=-0.01,
        ),
        Claim(
            "3",
            "FedBiOAcc reaches FedBiO's final outer loss in at most half the rounds.",
            "rounds needed, minus half of all rounds (a run that never gets there counts as all rounds)",
            half("fedbioacc"),
            all_below(half("fedbioacc"), 0.0, or_equal=True),
        ),
        Claim(
            "3b",
            "The same with c = 50 instead of the paper's 1, and inner steps up to 100 (our variant).",
            "rounds needed, minus half of all rounds",
            half(FORGETFUL),
            all_below(half(FORGETFUL), 0.0, or_equal=True),
        ),
        Claim(
            "4",
            "Dealing rows non-I.I.D. slows convergence.",
            "rounds to 90 % of the outer loss's decrease, non-I.I.D. minus I.I.D.",
            slower,
            all_above(slower, 0.0),
        ),
        Claim(
            "5",
            "FedReg and FCFL lose their advantage over FedAvg when rows are dealt non-I.I.D.",
            "advantage in test EqOpp, non-I.I.D. minus I.I.D.",
            lost,
            all_below(lost, 0.0)
            if all(had)
            else f"cannot be judged: {sum(had)} of {len(had)} have a clear I.I.D. advantage to lose",
        ),
    ]


def _outer_loss(record: Record, method: str) -> Any:
    """The outer loss of the stage that learns weights: one column per seed, by round."""
    own = record.history[(record.history.method == method) & (record.history.stage == "weights")]
    return own.pivot(index="round", columns="seed", values="outer_loss")


def _rounds_to_fedbio(record: Record, method: str) -> pd.Series:
    slow, fast = _outer_loss(record, "fedbio"), _outer_loss(record, method)
    return pd.Series({seed: _first_round(fast[seed], slow[seed].iloc[-1]) for seed in fast.columns})


def _half_of_the_rounds(record: Record) -> pd.Series:
    slow = _outer_loss(record, "fedbio")
    return pd.Series(slow.index[-1] / 2, index=slow.columns)


def _rounds_to_settle(record: Record, method: str) -> pd.Series:
    """Rounds to 90 % of the decrease from the start to the lowest value; NaN for a loss that only rises."""
    losses = _outer_loss(record, method)
    falls = losses.min() < losses.iloc[0]
    level = losses.iloc[0] - 0.9 * (losses.iloc[0] - losses.min())
    return pd.Series({s: _first_round(losses[s], level[s]) if falls[s] else np.nan for s in losses.columns})


def _first_round(losses: pd.Series, level: float) -> float:
    reached = losses.index[losses.to_numpy() <= level]
    return float(reached[0] if len(reached) else losses.index[-1])


# ------------------------------------------------------------------------------------------------- figures


def convergence_figure(data: str, records: Mapping[tuple[str, str], Record]) -> Figure:
    """Figures 1 and 2: outer objective against communication rounds."""
    parts = []
    for dealing, title in DEALING.items():
        history = records[data, dealing].history
        chosen = history[history.method.isin(BILEVEL) & (history.stage == "weights")]
        parts.append((f"{DATA[data]}, {title}", chosen))
    titles = {name: Reproduced.methods[name].title for name in BILEVEL}
    return panels(parts, "outer_loss", titles, ylabel="outer objective (balanced validation loss)")


def figure_name(data: str) -> str:
    return f"figure{list(DATA).index(data) + 1}-{data}"


def against_published(table: Any) -> Figure:
    """A row per setting, a column per metric, a line per method: ours with its spread, the published value as a ring.

    `table` is a DataFrame with the columns data, dealing, method, metric, ours, ours std, paper, paper std.
    """
    settings = list(table[["data", "dealing"]].drop_duplicates().itertuples(index=False, name=None))
    metrics, methods = list(table["metric"].unique()), list(table["method"].unique())
    drawn = looks({method: method for method in methods}, methods[0])
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(
            figsize=(4.0 * len(metrics) + 1, 0.32 * len(methods) * len(settings) + 2.4), layout="constrained"
        )
        grid = np.reshape(figure.subplots(len(settings), len(metrics), sharex="col"), (len(settings), len(metrics)))
        for row, (data, dealing) in enumerate(settings):
            for column, metric in enumerate(metrics):
                axes, chosen = grid[row, column], table[(table.data == data) & (table.dealing == dealing)]
                chosen = chosen[chosen.metric == metric].set_index("method").loc[methods]
                for place, (method, line) in enumerate(chosen.iterrows()):
                    look = drawn[str(method)]
                    axes.errorbar(
                        line["ours"],
                        -place,
                        xerr=line["ours std"],
                        fmt="o",
                        color=look.colour,
                        markersize=6,
                        elinewidth=1.6,
                        capsize=0,
                        zorder=3,
                    )
                    axes.errorbar(
                        line["paper"],
                        -place,
                        xerr=line["paper std"],
                        fmt="o",
                        markerfacecolor="none",
                        color=MUTED,
                        markersize=6,
                        elinewidth=1,
                        capsize=0,
                        zorder=2,
                    )
                axes.set_yticks(
                    [-place for place in range(len(methods))], methods if column == 0 else [""] * len(methods)
                )
                axes.set_title(f"{data}, {dealing}: {metric}" if column == 0 else metric, fontsize=10)
        figure.supxlabel(
            "Filled: ours, mean and standard deviation over seeds. Rings: the paper's.",
            x=0.01,
            ha="left",
            fontsize=8,
            color=MUTED,
        )
    return figure


EXPERIMENT = Experiment("fairness", Trainings, Plan(), QUICK, make_page)
