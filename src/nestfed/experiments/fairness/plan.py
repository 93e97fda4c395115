"""Fair federated learning on Adult and German Credit: Table 1 and Figures 1 and 2 of "Local stochastic bilevel
optimization with momentum-based variance reduction".

Two data sets x two ways to deal the rows, six methods; a grid of step sizes x all seeds run side by side. Step sizes
are chosen on validation data; test data choose nothing. One more setting goes past the paper:
weights by group and label, and an upper loss that counts the gap.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import numpy as np
import pandas as pd
import tomli_w

from nestfed.data import Table
from nestfed.experiments import figures as studies
from nestfed.experiments.claims import Claim, all_above, all_below, at_level, claims_table, markdown_claims
from nestfed.experiments.fairness.data import with_slip
from nestfed.report import figures, tables, write_report
from nestfed.report.record import Record
from nestfed.report.statistics import finished, paired
from nestfed.workbench.results import make_record
from nestfed.workbench.scenario import Method
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.stages import (
    Budget,
    Trace,
    best_changes,
    bounded,
    make_setups,
    score_of,
    sweep_method,
    sweep_next_stage,
)

GRID = [0.001, 0.01, 0.1, 1.0]
METHODS = ("fedavg", "fedreg", "fedminmax", "fcfl", "fedbio", "fedbioacc")
# FedBiOAcc with a momentum that forgets, and inner steps that match its shrinking factor alpha_t: not in the paper.
FORGETFUL = "fedbioacc-c50"
BILEVEL = ("fedbio", "fedbioacc", FORGETFUL)


@dataclasses.dataclass(frozen=True)
class Search:
    """What is fixed and which setting is searched; the second stage takes the step size chosen for FedAvg."""

    key: str = "lr"
    fixed: dict[str, float] = dataclasses.field(default_factory=dict)
    values: tuple[float, ...] = ()  # another grid than the plan's


# Outer steps are fixed: 0.1 for FedBiO as in the paper; FedBiOAcc's factor alpha_t begins there with lr = 1.
SEARCHES: dict[str, Search] = {name: Search() for name in METHODS} | {
    "fedbio": Search("lower_lr", {"lr": 0.1}),
    "fedbioacc": Search("lower_lr", {"lr": 1.0, "c_nu": 1.0, "c_omega": 1.0}),
    FORGETFUL: Search("lower_lr", {"lr": 1.0, "c_nu": 50.0, "c_omega": 50.0}, values=(1.0, 10.0, 100.0)),
}


@dataclasses.dataclass(frozen=True)
class Reproduced(Fairness):
    """The task with the variant beside the paper's methods."""

    methods: ClassVar[dict[str, Method]] = Fairness.methods | {
        FORGETFUL: dataclasses.replace(Fairness.methods["fedbioacc"], title="FedBiOAcc, c = 50")
    }


@dataclasses.dataclass(frozen=True)
class Slipped(Reproduced):
    """The same with a slip in the preparation of the data."""

    @functools.cached_property
    def table(self) -> Table:
        table = super().table
        return with_slip(table, table.group_columns(self.group))


DATA = {"adult": "Adult", "german": "Credit"}
DEALING = {"iid": "I.I.D.", "ratios:2:2:6": "non-I.I.D."}
PAST = ("adult", "ratios:2:2:6", {"group": "sex", "weigh": "group+label", "gap": 1.0})
METRICS = {"test_accuracy": "test accuracy", "train_eqopp": "train EqOpp", "test_eqopp": "test EqOpp"}

# Table 1: (mean, standard deviation) of test accuracy, train EqOpp, test EqOpp.
PAPER: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {
    ("adult", "iid"): {
        "fedavg": [(0.8239, 0.0167), (0.0391, 0.0061), (0.0420, 0.0034)],
        "fedreg": [(0.8240, 0.0159), (0.0361, 0.0047), (0.0425, 0.0029)],
        "fedminmax": [(0.8228, 0.0163), (0.0220, 0.0057), (0.0366, 0.0049)],
        "fcfl": [(0.8238, 0.0159), (0.0356, 0.0029), (0.0452, 0.0012)],
        "fedbio": [(0.8228, 0.0163), (0.0238, 0.0058), (0.0337, 0.0012)],
        "fedbioacc": [(0.8391, 0.0163), (0.0222, 0.0064), (0.0335, 0.0006)],
    },
    ("adult", "ratios:2:2:6"): {
        "fedavg": [(0.8283, 0.0080), (0.0261, 0.0022), (0.0507, 0.0011)],
        "fedreg": [(0.8271, 0.0077), (0.0244, 0.0013), (0.0498, 0.0010)],
        "fedminmax": [(0.8272, 0.0077), (0.0274, 0.0029), (0.0363, 0.0013)],
        "fcfl": [(0.8273, 0.0074), (0.0249, 0.0032), (0.0501, 0.0014)],
        "fedbio": [(0.8331, 0.0019), (0.0263, 0.0010), (0.0338, 0.0008)],
        "fedbioacc": [(0.8204, 0.0013), (0.0289, 0.0005), (0.0356, 0.0055)],
    },
    ("german", "iid"): {
        "fedavg": [(0.6873, 0.0314), (0.0788, 0.0136), (0.0599, 0.0122)],
        "fedreg": [(0.6870, 0.0374), (0.0836, 0.0015), (0.0575, 0.0114)],
        "fedminmax": [(0.6759, 0.0757), (0.0857, 0.0042), (0.0722, 0.0013)],
        "fcfl": [(0.6864, 0.0237), (0.0727, 0.0073), (0.0375, 0.0028)],
        "fedbio": [(0.7015, 0.0169), (0.0548, 0.0072), (0.0513, 0.0059)],
        "fedbioacc": [(0.7067, 0.0121), (0.0665, 0.0034), (0.0501, 0.0051)],
    },
    ("german", "ratios:2:2:6"): {
        "fedavg": [(0.7386, 0.0011), (0.0832, 0.0248), (0.1354, 0.0128)],
        "fedreg": [(0.7303, 0.0097), (0.0735, 0.0216), (0.1341, 0.0088)],
        "fedminmax": [(0.6966, 0.0104), (0.0477, 0.0155), (0.1222, 0.0024)],
        "fcfl": [(0.7266, 0.0026), (0.0777, 0.0162), (0.1463, 0.0014)],
        "fedbio": [(0.7339, 0.0033), (0.0782, 0.0116), (0.1260, 0.0013)],
        "fedbioacc": [(0.7312, 0.0023), (0.0799, 0.0152), (0.1021, 0.0011)],
    },
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    data: tuple[str, ...] = tuple(DATA)
    past: tuple[str, str, dict[str, Any]] = PAST
    seeds: int = 10
    past_seeds: int = 5
    past_methods: tuple[str, ...] = ("fedavg", "fedreg", "fedminmax", "fcfl", "fedbio")
    steps: int = 2000
    evaluations: int = 25
    reading_seeds: int = 3
    readings: int = 100  # at most so many of every data set
    grid: tuple[float, ...] = tuple(GRID)


FULL = Plan()
QUICK = Plan(
    data=("german",), past=("german", "ratios:2:2:6", {"weigh": "group+label", "gap": 1.0}), seeds=2, past_seeds=2,
    past_methods=("fedavg", "fedbio"), steps=60, evaluations=6, reading_seeds=1, readings=1, grid=(0.1, 1.0),
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool = False, progress: bool | None = None) -> Path:
    """The whole experiment; returns the path of its page."""
    began = time.monotonic()
    plan = QUICK if quick else FULL
    say = functools.partial(_say, progress is not False)
    # Two processes: compiling a program keeps one core busy, and half of the time is compiling.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=context)
    try:
        submit = lambda function, *given: pool.submit(function, *given, command, plan, progress is not False)
        # Both ways of dealing a data set in one process: they share their programs.
        settings = [submit(run_settings, folder, [(data, dealing, {}) for dealing in DEALING]) for data in plan.data]
        settings.append(submit(run_settings, folder, [plan.past]))
        readings = pool.submit(run_readings, plan, progress is not False)
        chosen = pd.concat([future.result() for future in settings], ignore_index=True)
        explored = readings.result()
    finally:
        pool.shutdown(cancel_futures=True)
    say("writing tables and figures")
    records = {cell: Record.load(_record_folder(folder, *cell, {})) for cell in PAPER if cell[0] in plan.data}
    past = Record.load(_record_folder(folder, *plan.past))
    table, claims = table_one(records), check_claims(records)
    tables.write(table, folder / "tables", "table1", shown=shown_table(table))
    tables.write(chosen, folder / "tables", "chosen")
    tables.write(explored, folder / "tables", "readings")
    tables.write(claims_table(claims), folder / "tables", "claims")
    tables.write(*tables.headline(past)[:1], folder / "tables", "past", shown=tables.headline(past)[1])
    for data in plan.data:
        figures.write(convergence_figure(data, records), folder / "figures", figure_name(data))
    figures.write(studies.against_published(table), folder / "figures", "table1")
    figures.write(figures.trade_off(past), folder / "figures", "past")
    seeds = [r.final.assign(setting=r.about["name"]) for r in (*records.values(), past)]
    pd.concat(seeds).to_csv(folder / "tables" / "seeds.csv", index=False)
    (folder / "settings.toml").write_text(tomli_w.dumps(_settings(plan)), encoding="utf-8")
    page = folder / "README.md"
    page.write_text(
        _page(command, plan, table, chosen, explored, claims, past, time.monotonic() - began), encoding="utf-8"
    )
    return page


def _say(show: bool, text: str) -> None:
    if show:
        print(f"{datetime.datetime.now():%H:%M:%S}  {text}", file=sys.stderr, flush=True)


def _record_folder(folder: Path, data: str, dealing: str, options: Mapping[str, Any]) -> Path:
    return (
        folder
        / "reports"
        / "-".join([data, "iid" if dealing == "iid" else "non-iid", *(["past-the-paper"] if options else [])])
    )


def make_kind(data: str, dealing: str, plan: Plan, *, slip: bool = False, **changes: Any) -> Reproduced:
    options: dict[str, Any] = {"data": data, "partition": dealing, "steps": plan.steps, "full_batch": False}
    return (Slipped if slip else Reproduced)(**(options | changes))


# ------------------------------------------------------------------------------------------------- runs


def run_settings(
    folder: Path, cells: Sequence[tuple[str, str, dict[str, Any]]], command: str, plan: Plan, show: bool
) -> pd.DataFrame:
    """Settings of one data set, one after the other."""
    kinds = [make_kind(data, dealing, plan, **options) for data, dealing, options in cells]
    seeds = range(plan.past_seeds if kinds[0].gap else plan.seeds)
    setups = bounded([make_setups(kind, seeds) for kind in kinds])
    targets = [_record_folder(folder, *cell) for cell in cells]
    done = [run_setting(*one, command, plan, show) for one in zip(kinds, setups, targets, strict=True)]
    return pd.concat(done, ignore_index=True)


def run_setting(
    kind: Reproduced, setups: Mapping[int, Any], target: Path, command: str, plan: Plan, show: bool
) -> pd.DataFrame:
    """All methods on one data set dealt in one way: writes a record with its report, returns the choices."""
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    budget = Budget(evaluations=plan.evaluations)
    methods = list(plan.past_methods if kind.gap else SEARCHES)
    traces: list[Trace] = []
    choices, model_lr = [], 0.0
    for name in methods:
        clock, search = time.monotonic(), SEARCHES[name]
        grid = {search.key: list(search.values or plan.grid)}
        fixed = search.fixed | ({"model.lr": model_lr} if len(kind.method(name).stages) > 1 else {})
        start = [Trace(name, seed, fixed) for seed in setups]
        tried = sweep_next_stage(kind, setups, start, grid, budget, progress=False)
        later = kind.method(name).stages[1:]
        # The paper's problem is the first stage's: its outer objective chooses. Past the paper the final model does.
        for _ in later if kind.gap else ():
            tried = sweep_next_stage(kind, setups, tried, {}, budget, progress=False)
        best = best_changes(kind, setups, tried)
        chosen = [trace for trace in tried if trace.changes == best]
        for _ in () if kind.gap else later:
            chosen = sweep_next_stage(kind, setups, chosen, {}, budget, progress=False)
        traces += chosen
        model_lr = best["lr"] if name == "fedavg" else model_lr
        choices.append(
            {
                "setting": target.name, "method": kind.method(name).title,
                "chosen": f"{search.key} = {best[search.key]:g}",
                "tried": ", ".join(f"{value:g}" for value in grid[search.key]),
                "at the edge": best[search.key] in (min(grid[search.key]), max(grid[search.key])),
                "score on validation data": float(
                    np.mean([score_of(kind, setups, trace) for trace in tried if trace.changes == best])
                ),
                "runs that diverged": sum(trace.status == "diverged" for trace in tried),
            }
        )  # fmt: skip
        _say(show, f"{target.name}: {kind.method(name).title} {time.monotonic() - clock:.0f} s")
    record = make_record(
        kind, setups, traces, settings=_settings(plan) | {"data": kind.data, "partition": kind.partition},
        command=command, name=target.name, methods=methods,
        seconds=time.monotonic() - began, started=started,
    )  # fmt: skip
    record.save(target)
    write_report(record, target)
    return pd.DataFrame(choices)


def readings(data: str) -> list[tuple[str, dict[str, Any]]]:
    """What the paper may have done: (what is different, options)."""
    flipped = {"positive": {"adult": "<=50K", "german": "1"}[data]}
    scaled = {"features": "minimax-fair"}
    varied: list[tuple[str, dict[str, Any]]] = [
        ("as in the table", {}),
        ("a quarter of the steps", {"steps": 0.25}),
        ("the group is a feature too", {"keep_group": True}),
        ("two-layer network", {"model": "network"}),
        ("EqOpp of the other label", flipped),
        ("powers of ten", scaled),
        ("powers of ten, a quarter of the steps", scaled | {"steps": 0.25}),
        ("powers of ten, EqOpp of the other label", scaled | flipped),
        ("features not scaled", {"features": "minimax-fair-raw"}),
    ]
    by_sex = {"group": "sex"}
    return varied + [
        ("220 columns", scaled | {"slip": True}),
        ("groups by sex", by_sex),
        ("groups by sex, powers of ten", by_sex | scaled),
        ("groups by sex, powers of ten, two-layer network", by_sex | scaled | {"model": "network"}),
        ("groups by sex, EqOpp of the other label", by_sex | flipped),
    ] * (data == "adult")


def run_readings(plan: Plan, show: bool) -> pd.DataFrame:
    """FedAvg under likely readings of the paper's preparation, dealt I.I.D., with every step size of the grid: which
    level comes closest to the paper's? Here, and only here, published test numbers are looked at to pick."""
    rows = []
    for data in plan.data:
        published = np.array([mean for mean, _ in PAPER[data, "iid"]["fedavg"]])
        for title, options in readings(data)[: plan.readings]:
            steps = int(plan.steps * options.get("steps", 1))
            changes: dict[str, Any] = options | {"steps": steps}
            kind = make_kind(data, "iid", plan, **changes)
            setups = make_setups(kind, range(plan.reading_seeds))
            grid = {"lr": list(plan.grid)}
            tried = sweep_method(kind, "fedavg", setups, {}, grid, Budget(evaluations=1), progress=False)
            chosen = best_changes(kind, setups, tried)["lr"]
            for lr in plan.grid:
                own = [t for t in tried if t.changes["lr"] == lr and t.status == "finished"]
                finals = pd.DataFrame([kind.evaluate(setups[t.seed], t.left)[0] for t in own], columns=list(METRICS))
                ours = finals.mean().to_numpy()
                rows.append(
                    {"data": DATA[data], "reading": title, "lr": lr, "chosen by validation": lr == chosen}
                    | {METRICS[name]: value for name, value in zip(METRICS, ours, strict=True)}
                    | {"std of test accuracy": finals["test_accuracy"].std(ddof=0)}
                    | {"distance to the paper": float(np.abs(ours - published).sum())}
                )
            _say(show, f"reading, {DATA[data]}: {title}")
    return pd.DataFrame(rows)


def closest_readings(explored: pd.DataFrame) -> pd.DataFrame:
    """The closest step size of every reading, the closest reading first."""
    best = explored.loc[explored.groupby(["data", "reading"], sort=False)["distance to the paper"].idxmin()]
    return best.sort_values(["data", "distance to the paper"], ignore_index=True)


# ------------------------------------------------------------------------------------------------- Table 1


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
                        "data": DATA[cell[0]], "dealing": DEALING[cell[1]], "method": record.title(method),
                        "metric": title, "ours": own[name].mean(), "ours std": own[name].std(ddof=0),
                        "seeds": len(own), "paper": mean, "paper std": std,
                    }
                )  # fmt: skip
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


# ------------------------------------------------------------------------------------------------- claims


def check_claims(records: Mapping[tuple[str, str], Record]) -> list[Claim]:
    """Every claim with the differences that decide it."""
    final: dict[Any, Any] = {cell: finished(record) for cell, record in records.items()}
    value = lambda cell, method, metric: final[cell][final[cell].method == method].set_index("seed")[metric]
    against = lambda metric: {
        (method, cell): paired(value(cell, method, metric), value(cell, "fedavg", metric))
        for method in ("fedbio", "fedbioacc")
        for cell in records
    }
    name = lambda method, cell: f"{Reproduced.methods[method].title}, {DATA[cell[0]]}, {DEALING[cell[1]]}"
    named = lambda results: {name(*key): result for key, result in results.items()}

    eqopp = named(against("test_eqopp"))
    accuracy = {case: at_level(result, -0.01) for case, result in named(against("test_accuracy")).items()}
    half = lambda method: {
        name(method, cell): paired(_rounds_to_fedbio(record, method), _half_of_the_rounds(record))
        for cell, record in records.items()
    }
    slower = {
        name(method, (data, "ratios:2:2:6")): paired(
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
            lost[name(method, (data, "ratios:2:2:6"))] = paired(after, before)
            had.append(paired(before, before * 0).low > 0)
    return [
        Claim(
            "1", "FedBiO and FedBiOAcc have a lower test EqOpp gap than FedAvg in all four settings.",
            "test EqOpp gap minus FedAvg's", eqopp, all_below(eqopp, 0.0),
        ),
        Claim(
            "2", "They lose at most one point of test accuracy.", "test accuracy minus FedAvg's", accuracy,
            all_above(accuracy, -0.01), level=-0.01,
        ),
        Claim(
            "3", "FedBiOAcc reaches FedBiO's final outer loss in at most half the rounds.",
            "rounds needed, minus half of all rounds (a run that never gets there counts as all rounds)",
            half("fedbioacc"), all_below(half("fedbioacc"), 0.0, or_equal=True),
        ),
        Claim(
            "3b", "The same with c = 50 instead of the paper's 1, and inner steps up to 100 (our variant).",
            "rounds needed, minus half of all rounds", half(FORGETFUL), all_below(half(FORGETFUL), 0.0, or_equal=True),
        ),
        Claim(
            "4", "Dealing rows non-I.I.D. slows convergence.",
            "rounds to 90 % of the outer loss's decrease, non-I.I.D. minus I.I.D.", slower, all_above(slower, 0.0),
        ),
        Claim(
            "5", "FedReg and FCFL lose their advantage over FedAvg when rows are dealt non-I.I.D.",
            "advantage in test EqOpp, non-I.I.D. minus I.I.D.", lost,
            all_below(lost, 0.0) if all(had)
            else f"cannot be judged: {sum(had)} of {len(had)} have a clear I.I.D. advantage to lose",
        ),
    ]  # fmt: skip


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


# ------------------------------------------------------------------------------------------------- figures and page


def convergence_figure(data: str, records: Mapping[tuple[str, str], Record]) -> Any:
    """Figures 1 and 2: outer objective against communication rounds."""
    panels = []
    for dealing, title in DEALING.items():
        history = records[data, dealing].history
        chosen = history[history.method.isin(BILEVEL) & (history.stage == "weights")]
        panels.append((f"{DATA[data]}, {title}", chosen))
    titles = {name: Reproduced.methods[name].title for name in BILEVEL}
    return studies.panels(panels, "outer_loss", titles, ylabel="outer objective (balanced validation loss)")


def figure_name(data: str) -> str:
    return f"figure{list(DATA).index(data) + 1}-{data}"


def _settings(plan: Plan) -> dict[str, Any]:
    """Everything that decides the numbers; the methods' own settings are in the reports."""
    kind = make_kind(plan.data[0], "iid", plan)
    options = {key: value for key, value in dataclasses.asdict(kind).items() if value is not None}
    for key in ("data", "partition"):
        options.pop(key)
    return {
        "experiment": "fairness",
        "plan": {key: value for key, value in dataclasses.asdict(plan).items()},
        "dealing": list(DEALING),
        "searches": {name: dataclasses.asdict(search) for name, search in SEARCHES.items()},
        "options": options,
    }


def _page(
    command: str,
    plan: Plan,
    table: pd.DataFrame,
    chosen: pd.DataFrame,
    explored: pd.DataFrame,
    claims: Sequence[Claim],
    past: Record,
    seconds: float,
) -> str:
    closest = closest_readings(explored)
    first = closest.groupby("data").first().reset_index().to_dict("records")
    template = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    return template.render(
        plan=plan,
        command=command,
        past_data=f"{DATA[plan.past[0]]}, groups by {plan.past[2].get('group', 'sex and marital status')}",
        minutes=f"{seconds / 60:.1f}",
        about=past.about,
        claims=markdown_claims(claims),
        table=tables.markdown(shown_table(table)),
        convergence=[(DATA[data], f"figures/{figure_name(data)}.png") for data in plan.data],
        closest="; ".join(f"{row['data']}: {row['reading']}, step size {row['lr']:g}" for row in first),
        readings=tables.markdown(closest),
        past=tables.markdown(tables.headline(past)[1]),
        chosen=tables.markdown(chosen),
    )
