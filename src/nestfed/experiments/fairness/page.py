"""Fair federated learning: from the records and cells to the page."""

import functools
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed.experiments.claims import Case, Claim, above, below, compare
from nestfed.experiments.fairness.plan import (
    DATA,
    DEALING,
    METRICS,
    PAPER,
    QUICK,
    Plan,
    Trainings,
    list_settings,
    name_setting,
)
from nestfed.experiments.fairness.task import FORGETFUL, Reproduced
from nestfed.experiments.frame import Experiment, Page
from nestfed.experiments.plots import draw_panels
from nestfed.report.figures import MUTED, STYLE
from nestfed.report.record import Record
from nestfed.report.statistics import compute_half_width, select_finished
from nestfed.report.style import choose_looks
from nestfed.report.tables import tabulate_headline

BILEVEL = ("fedbio", "fedbioacc", FORGETFUL)


def make_page(trainings: Trainings) -> Page:
    plan, dealt = trainings.plan, [setting for group in trainings.settings() for setting in group]
    records = {setting[:2]: trainings.record(setting) for setting in dealt if setting != plan.past}
    past = trainings.record(plan.past)
    table = make_table_one(records)
    explored = pd.concat([trainings.table(f"readings-{data}") for data in plan.data], ignore_index=True)
    closest = find_closest_readings(explored)
    first = closest.groupby("data").first().reset_index().to_dict("records")
    numbers, shown = tabulate_headline(past)
    return Page(
        tables={
            "table1": table,
            "chosen": pd.concat([trainings.table(name_setting(setting)) for setting in dealt], ignore_index=True),
            "readings": explored,
            "past": numbers,
            "constants": trainings.table("constants"),
            "seeds": pd.concat([r.final.assign(setting=r.about["name"]) for r in (*records.values(), past)]),
        },
        figures={
            **{name_figure(data): functools.partial(draw_convergence, data, records) for data in plan.data},
            "table1": functools.partial(draw_against_published, table),
            "past": functools.partial(draw_past, past),
        },
        claims=check_claims(records),
        words={
            "past_data": f"{DATA[plan.past[0]]}, groups by {dict(plan.past[2]).get('group', 'sex and marital status')}",
            "convergence": [(DATA[data], f"figures/{name_figure(data)}.png") for data in plan.data],
            "closest_readings": closest,
            "edges": sum(
                trainings.table(name_setting(setting))["at the edge"].tolist().count(True) for setting in dealt
            ),
            "closest": "; ".join(f"{row['data']}: {row['reading']}, step size {row['lr']:g}" for row in first),
        },
        shown={"table1": format_table(table), "past": shown},
        typeset=("table1", "chosen", "readings", "past"),
        settings=list_settings(plan),
    )


# ------------------------------------------------------------------------------------------------- tables


def make_table_one(records: Mapping[tuple[str, str], Record]) -> pd.DataFrame:
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
                        "ours std": own[name].std(ddof=1),
                        "seeds": len(own),
                        "diverged": len(record.final[record.final.method == method]) - len(own),
                        "paper": mean,
                        "paper std": std,
                    }
                )
    return pd.DataFrame(rows)


def format_table(table: pd.DataFrame) -> pd.DataFrame:
    """As people read it: one row per setting and method."""
    both = lambda mean, std: f"{mean:.4f} ± {std:.4f}" if np.isfinite(mean) else "–"
    rows: dict[tuple, dict[str, str]] = {}
    for row in table.to_dict("records"):
        line = rows.setdefault((row["data"], row["dealing"], row["method"]), {})
        line[row["metric"]] = both(row["ours"], row["ours std"])
        line[f"{row['metric']}, paper"] = both(row["paper"], row["paper std"])
    names = ("data", "dealing", "method")
    return pd.DataFrame([dict(zip(names, key, strict=True)) | line for key, line in rows.items()])


def find_closest_readings(explored: pd.DataFrame) -> pd.DataFrame:
    """The closest step size of every reading, the closest reading first."""
    best = explored.loc[explored.groupby(["data", "reading"], sort=False)["distance to the paper"].idxmin()]
    return best.sort_values(["data", "distance to the paper"], ignore_index=True)


# ------------------------------------------------------------------------------------------------- claims


def check_claims(records: Mapping[tuple[str, str], Record]) -> list[Claim]:
    """Every claim with the differences that decide it."""
    final: dict[Any, Any] = {cell: select_finished(record) for cell, record in records.items()}
    seeds = {cell: len(record.final["seed"].unique()) for cell, record in records.items()}
    value = lambda cell, method, metric: final[cell][final[cell].method == method].set_index("seed")[metric]
    name = lambda method, cell: f"{Reproduced.methods[method].title}, {DATA[cell[0]]}, {DEALING[cell[1]]}"
    mean = lambda cell, method, metric: PAPER[cell][method][list(METRICS).index(metric)][0]

    def against(metric: str, *methods: str) -> dict[str, Case]:
        return {
            name(method, cell): compare(
                value(cell, method, metric),
                value(cell, "fedavg", metric),
                published=mean(cell, method, metric) - mean(cell, "fedavg", metric),
            )._replace(seeds=seeds[cell])
            for method in methods
            for cell in records
        }

    half = lambda method: {
        name(method, cell): compare(_count_rounds_to_fedbio(record, method), _halve_rounds(record))
        for cell, record in records.items()
    }
    pairs_of_dealings = [data for data in DATA if (data, "iid") in records]
    slower = {
        name(method, (data, "ratios:2:2:6")): compare(
            _count_rounds_to_settle(records[data, "ratios:2:2:6"], method),
            _count_rounds_to_settle(records[data, "iid"], method),
        )
        for method in ("fedbio", "fedbioacc")
        for data in pairs_of_dealings
    }
    advantage = lambda method, cell: value(cell, "fedavg", "test_eqopp") - value(cell, method, "test_eqopp")
    published = lambda method, cell: mean(cell, "fedavg", "test_eqopp") - mean(cell, method, "test_eqopp")
    lost = {}
    for method in ("fedreg", "fcfl"):
        for data in pairs_of_dealings:
            iid, uneven = (data, "iid"), (data, "ratios:2:2:6")
            before = advantage(method, iid)
            had = compare(before, before * 0).found.low > 0
            lost[name(method, uneven)] = compare(
                advantage(method, uneven),
                before,
                published=published(method, uneven) - published(method, iid),
            )._replace(open="" if had else "there is no clear I.I.D. advantage to lose")
    best = _count_columns_won(final)
    return [
        Claim(
            "1",
            "FedBiO and FedBiOAcc have a lower test EqOpp gap than FedAvg in all settings.",
            "test EqOpp gap minus FedAvg's",
            below(0),
            against("test_eqopp", "fedbio", "fedbioacc"),
        ),
        Claim(
            "2",
            "They lose at most one point of test accuracy.",
            "test accuracy minus FedAvg's",
            above(-0.01),
            against("test_accuracy", "fedbio", "fedbioacc"),
        ),
        Claim(
            "3",
            "FedBiOAcc reaches FedBiO's final outer loss in at most half the rounds.",
            "rounds needed, minus half of all rounds (a run that never gets there counts as all rounds)",
            below(0),
            half("fedbioacc"),
        ),
        Claim(
            "3b",
            "So does FedBiOAcc with c = 50 instead of the paper's 1, and inner steps up to 100.",
            "rounds needed, minus half of all rounds",
            below(0),
            half(FORGETFUL),
            ours=True,
        ),
        Claim(
            "4",
            "Dealing rows non-I.I.D. slows convergence.",
            "rounds to 90 % of the outer loss's decrease, non-I.I.D. minus I.I.D.",
            above(0),
            slower,
        ),
        Claim(
            "5",
            "FedReg and FCFL lose their advantage over FedAvg when rows are dealt non-I.I.D.",
            "advantage in test EqOpp, non-I.I.D. minus I.I.D.",
            below(0),
            lost,
        ),
        Claim(
            "6",
            "FedBiO or FedBiOAcc has the best result in most columns of Table 1.",
            "number of columns in which one of them is best in a seed, minus half of all columns",
            above(0),
            {
                f"{len(METRICS) * len(records)} columns": compare(
                    best, best * 0 + len(METRICS) * len(records) / 2, published=_count_published_wins(list(records))
                )
            },
            reading="Judged seed by seed; the paper's figure is that of its means.",
        ),
        Claim(
            "7",
            "FedMinMax is strong however rows are dealt: its test EqOpp gap is below FedAvg's.",
            "test EqOpp gap minus FedAvg's",
            below(0),
            against("test_eqopp", "fedminmax"),
        ),
    ]


def _count_columns_won(final: Mapping[tuple[str, str], Any]) -> pd.Series:
    """By seed: in how many columns of Table 1 FedBiO or FedBiOAcc is best among the paper's methods."""
    won = []
    for rows in final.values():
        own = rows[rows["method"].isin(list(PAPER["adult", "iid"]))]
        for metric in METRICS:
            wide = own.pivot(index="seed", columns="method", values=metric).dropna()
            first = wide.idxmax(axis=1) if metric == "test_accuracy" else wide.idxmin(axis=1)
            won.append(first.isin(["fedbio", "fedbioacc"]).astype(float))
    return pd.concat(won, axis=1).sum(axis=1, skipna=False)


def _count_published_wins(cells: list[tuple[str, str]]) -> float:
    """The same for the paper's means, minus half of the columns."""
    won = 0
    for cell in cells:
        for i, metric in enumerate(METRICS):
            means = {method: numbers[i][0] for method, numbers in PAPER[cell].items()}
            first = (max if metric == "test_accuracy" else min)(means, key=lambda method: means[method])
            won += first in ("fedbio", "fedbioacc")
    return won - len(METRICS) * len(cells) / 2


def _select_outer_loss(record: Record, method: str) -> Any:
    """The outer loss of the stage that learns weights: one column per seed, by round."""
    own = record.history[(record.history.method == method) & (record.history.stage == "weights")]
    return own.pivot(index="round", columns="seed", values="outer_loss")


def _count_rounds_to_fedbio(record: Record, method: str) -> pd.Series:
    slow, fast = _select_outer_loss(record, "fedbio"), _select_outer_loss(record, method)
    return pd.Series({seed: _find_first_round(fast[seed], slow[seed].iloc[-1]) for seed in fast.columns})


def _halve_rounds(record: Record) -> pd.Series:
    slow = _select_outer_loss(record, "fedbio")
    return pd.Series(slow.index[-1] / 2, index=slow.columns)


def _count_rounds_to_settle(record: Record, method: str) -> pd.Series:
    """Rounds to 90 % of the decrease from the start to the lowest value; NaN for a loss that only rises."""
    losses = _select_outer_loss(record, method)
    falls = losses.min() < losses.iloc[0]
    level = losses.iloc[0] - 0.9 * (losses.iloc[0] - losses.min())
    return pd.Series({s: _find_first_round(losses[s], level[s]) if falls[s] else np.nan for s in losses.columns})


def _find_first_round(losses: pd.Series, level: float) -> float:
    reached = losses.index[losses.to_numpy() <= level]
    return float(reached[0] if len(reached) else losses.index[-1])


# ------------------------------------------------------------------------------------------------- figures


def draw_convergence(data: str, records: Mapping[tuple[str, str], Record]) -> Figure:
    """Figures 1 and 2: outer objective against communication rounds."""
    parts = []
    for dealing, title in DEALING.items():
        history = records[data, dealing].history
        chosen = history[history.method.isin(BILEVEL) & (history.stage == "weights")]
        parts.append((f"{DATA[data]}, {title}", chosen))
    titles = {name: Reproduced.methods[name].title for name in BILEVEL}
    return draw_panels(parts, "outer_loss", titles, ylabel="outer objective (balanced validation loss)")


def draw_past(record: Record) -> Figure:
    """Past the paper: the paired differences to FedAvg of both metrics, with their intervals."""
    table = tabulate_headline(record)[0].set_index("method")
    others = [method for method in record.methods if method != "fedavg"]
    metrics = {"test_eqopp": "test EqOpp gap", "test_accuracy": "test accuracy"}
    drawn = choose_looks({method: record.title(method) for method in others})
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(9.0, 0.42 * len(others) + 1.5), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(metrics), sharey=True))
        for axes, (metric, title) in zip(grid, metrics.items(), strict=True):
            for place, method in enumerate(others):
                mean, low, high = (float(table.at[method, f"{metric} {key}"]) for key in ("difference", "low", "high"))
                axes.plot([low, high], [-place, -place], color=drawn[method].colour, linewidth=2)
                axes.plot(mean, -place, "o", color=drawn[method].colour, markersize=6)
            axes.axvline(0, color=MUTED, linewidth=1, linestyle=(0, (1, 2.5)))
            axes.set_yticks([-place for place in range(len(others))], [drawn[method].title for method in others])
            axes.set_title(f"{title}, minus FedAvg's", fontsize=10)
            axes.locator_params(axis="x", nbins=5)
        figure.supxlabel(
            "Paired differences over seeds with their 95 % intervals.", x=0.01, ha="left", fontsize=8, color=MUTED
        )
    return figure


def name_figure(data: str) -> str:
    return f"figure{list(DATA).index(data) + 1}-{data}"


def draw_against_published(table: Any) -> Figure:
    """A row per setting, a column per metric, a line per method: ours with its interval, the published value as a ring.

    `table` is a DataFrame with the columns data, dealing, method, metric, ours, ours std, seeds, paper, paper std.
    """
    settings = list(table[["data", "dealing"]].drop_duplicates().itertuples(index=False, name=None))
    metrics, methods = list(table["metric"].unique()), list(table["method"].unique())
    drawn = choose_looks({method: method for method in methods}, methods[0])
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
                        xerr=float(
                            compute_half_width(
                                line["ours std"] * ((line["seeds"] - 1) / line["seeds"]) ** 0.5, line["seeds"]
                            )
                        ),
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
            "Filled: ours, mean over seeds and its 95 % interval. Rings: the paper's, with its standard deviation.",
            x=0.01,
            ha="left",
            fontsize=8,
            color=MUTED,
        )
    return figure


EXPERIMENT = Experiment("fairness", "FedBiO", Trainings, Plan(), QUICK, make_page)
