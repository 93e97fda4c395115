"""Fair federated learning on Adult and German Credit: Table 1 and Figures 1 and 2 of "Local stochastic bilevel
optimization with momentum-based variance reduction".

Two data sets x two ways to deal the rows, six methods; a grid of step sizes x all seeds run side by side. Step sizes
are chosen on validation data; test data choose nothing. One more setting goes past the paper:
weights by group and label, and an upper loss that counts the gap.
"""

import dataclasses
import datetime
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from nestfed.data import load
from nestfed.experiments import frame
from nestfed.experiments.cells import Table, tabulate
from nestfed.experiments.fairness.task import FORGETFUL, Reproduced, Slipped
from nestfed.report import write_report
from nestfed.report.record import Record
from nestfed.workbench.results import make_record
from nestfed.workbench.stages import (
    Budget,
    Trace,
    Trials,
    begin,
    compute_score,
    find_best_changes,
    set_up,
    share_bound,
    sweep_method,
    sweep_next_stage,
)
from nestfed.workbench.task_options import FairnessOptions

METHODS = ("fedavg", "fedreg", "fedminmax", "fcfl", "fedbio", "fedbioacc")


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


DATA = {"adult": "Adult", "german": "Credit"}
DEALING = {"iid": "I.I.D.", "ratios:2:2:6": "non-I.I.D."}
Setting = tuple[str, str, tuple[tuple[str, Any], ...]]  # data, dealing, options of the task
PAST: Setting = ("adult", "ratios:2:2:6", (("group", "sex"), ("weigh", "group+label"), ("gap", 1.0)))
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
    past: Setting = PAST
    seeds: int = 10
    past_seeds: int = 5
    past_methods: tuple[str, ...] = ("fedavg", "fedreg", "fedminmax", "fcfl", "fedbio")
    constants: tuple[float, ...] = (1.0, 50.0)  # c of FedBiOAcc, each with all of the next
    constants_rates: tuple[float, ...] = (1.0, 10.0, 100.0)
    steps: int = 2000
    evaluations: int = 25
    reading_seeds: int = 10
    readings: int = 100  # at most so many of every data set
    grid: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)


QUICK = Plan(
    data=("german",),
    past=("german", "ratios:2:2:6", (("weigh", "group+label"), ("gap", 1.0))),
    seeds=2,
    past_seeds=2,
    past_methods=("fedavg", "fedbio"),
    constants_rates=(1.0,),
    steps=60,
    evaluations=6,
    reading_seeds=1,
    readings=1,
    grid=(0.1, 1.0),
)


def make_scenario(data: str, dealing: str, plan: Plan, *, slip: bool = False, **changes: Any) -> Reproduced:
    options: dict[str, Any] = {"data": data, "partition": dealing, "steps": plan.steps, "features": "standard"}
    options |= {"objective": "paper", "full_batch": False}
    return (Slipped if slip else Reproduced)(FairnessOptions(**(options | changes)))


# ------------------------------------------------------------------------------------------------- trainings


def name_setting(setting: Setting) -> str:
    data, dealing, options = setting
    return "-".join([data, "iid" if dealing == "iid" else "non-iid", *(["past-the-paper"] if options else [])])


class Trainings(frame.Trainings[Plan]):
    """The cells: what was chosen in every setting, with its record in a folder beside it and a report in reports/, and
    `readings-DATA`."""

    processes = 2  # compiling a program keeps one core busy, and half of the time is compiling

    def names(self) -> list[str]:
        return [name for group in self.groups() for name in group]

    def groups(self) -> list[list[str]]:
        settings = [[name_setting(one) for one in group] for group in self.settings()]
        return [*settings, ["constants", *(f"readings-{data}" for data in self.plan.data)]]

    def settings(self) -> list[tuple[Setting, ...]]:
        """Both ways of dealing a data set together, which share their programs; then the one past the paper."""
        paper = [tuple((data, dealing, ()) for dealing in DEALING) for data in self.plan.data]
        return [*paper, (self.plan.past,)]

    def train(self, name: str) -> Table:
        if name.startswith("readings-"):
            data = name.removeprefix("readings-")
            return tabulate(functools.partial(run_readings, data, self.plan, self.say), convert_to_bytes(data))
        if name == "constants":
            return tabulate(functools.partial(run_constants, self.plan), convert_to_bytes(self.plan.data[0]))
        group = next(group for group in self.settings() if name in map(name_setting, group))
        trials = prepare(self.plan, group)[name]
        make = functools.partial(run_setting, trials, self.record_folder(name), self.command, self.plan, self.say)
        found = tabulate(make, convert_to_bytes(group[0][0]))
        write_report(self.known_record(name), self.folder / "reports" / name)
        return found

    def record_folder(self, name: str) -> Path:
        return self.folder / "cells" / name

    def known_record(self, name: str) -> Record:
        return Record.load(self.record_folder(name))

    def record(self, setting: Setting) -> Record:
        return self.known_record(name_setting(setting))


def convert_to_bytes(data: str) -> np.ndarray:
    """A data set as it was read, as bytes."""
    return np.frombuffer(load(data).frame.to_csv(index=False).encode(), np.uint8)


@functools.lru_cache(maxsize=1)  # settings of a group come one after the other
def prepare(plan: Plan, group: tuple[Setting, ...]) -> dict[str, Trials[Any]]:
    """Every setting's task and what it needs for every seed."""
    scenarios = [make_scenario(data, dealing, plan, **dict(options)) for data, dealing, options in group]
    seeds = range(plan.past_seeds if scenarios[0].options.gap else plan.seeds)
    trials = share_bound([set_up(scenario, seeds) for scenario in scenarios])
    return {name_setting(setting): one for setting, one in zip(group, trials, strict=True)}


def run_setting(
    trials: Trials[Any], target: Path, command: str, plan: Plan, say: Callable[[str], None]
) -> pd.DataFrame:
    """All methods on one data set dealt in one way: writes a record, returns the choices."""
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    budget = Budget(evaluations=plan.evaluations)
    scenario, options = trials.scenario, cast(FairnessOptions, trials.scenario.options)
    methods = list(plan.past_methods if options.gap else SEARCHES)
    traces: list[Trace] = []
    choices, model_lr = [], 0.0
    for name in methods:
        clock, search = time.monotonic(), SEARCHES[name]
        grid = {search.key: list(search.values or plan.grid)}
        fixed = search.fixed | ({"model.lr": model_lr} if len(scenario.method(name).stages) > 1 else {})
        tried = sweep_next_stage(begin(trials, name, fixed), grid, budget, progress=False)
        later = scenario.method(name).stages[1:]
        # The paper's problem is the first stage's: its outer objective chooses. Past the paper the final model does.
        for _ in later if options.gap else ():
            tried = sweep_next_stage(tried, {}, budget, progress=False)
        best = find_best_changes(tried)
        selected = tuple(trace for trace in tried.traces if trace.changes == best)
        chosen = dataclasses.replace(trials, traces=selected)
        for _ in () if options.gap else later:
            chosen = sweep_next_stage(chosen, {}, budget, progress=False)
        traces += chosen.traces
        model_lr = best["lr"] if name == "fedavg" else model_lr
        choices.append(
            {
                "setting": target.name,
                "method": scenario.method(name).title,
                "chosen": f"{search.key} = {best[search.key]:g}",
                "tried": ", ".join(f"{value:g}" for value in grid[search.key]),
                "at the edge": best[search.key] in (min(grid[search.key]), max(grid[search.key])),
                "score on validation data": float(np.mean([compute_score(tried, trace) for trace in selected])),
                "runs that diverged": sum(trace.status == "diverged" for trace in tried.traces),
            }
        )
        say(f"{target.name}: {scenario.method(name).title} {time.monotonic() - clock:.0f} s")
    settings = {"experiment": "fairness", "plan": frame.convert_to_plain(plan)} | list_settings(plan)
    record = make_record(
        trials.add(traces),
        settings=settings | {"data": options.data, "partition": options.partition},
        command=command,
        name=target.name,
        methods=methods,
        seconds=time.monotonic() - began,
        started=started,
    )
    record.save(target)
    return pd.DataFrame(choices)


def run_constants(plan: Plan) -> pd.DataFrame:
    """FedBiOAcc's final outer loss by its constant c and its inner step size, on the first data set, non-I.I.D.: what
    of our variant is the constant, and what the longer steps?"""
    trials = set_up(make_scenario(plan.data[0], "ratios:2:2:6", plan), range(plan.past_seeds))
    rows = []
    for c in plan.constants:
        begun = begin(trials, "fedbioacc", {"lr": 1.0, "c_nu": c, "c_omega": c})
        grid = {"lower_lr": list(plan.constants_rates)}
        tried = sweep_next_stage(begun, grid, Budget(evaluations=1), progress=False)
        for lr in plan.constants_rates:
            own = [trace for trace in tried.traces if trace.changes["lower_lr"] == lr]
            ends = np.array([compute_score(tried, trace) for trace in own if trace.status == "finished"])
            row = {"c": c, "inner step size": lr, "outer loss": ends.mean() if len(ends) else np.nan}
            spread = {"outer loss, std": ends.std(ddof=1) if len(ends) > 1 else np.nan, "seeds": len(ends)}
            rows.append(row | spread | {"diverged": len(own) - len(ends)})
    return pd.DataFrame(rows)


def list_readings(data: str) -> list[tuple[str, dict[str, Any]]]:
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


def run_readings(data: str, plan: Plan, say: Callable[[str], None]) -> pd.DataFrame:
    """FedAvg under likely readings of the paper's preparation, dealt I.I.D., with every step size of the grid: which
    level comes closest to the paper's? Here, and only here, published test numbers are looked at to pick."""
    published = np.array([mean for mean, _ in PAPER[data, "iid"]["fedavg"]])
    rows = []
    for title, options in list_readings(data)[: plan.readings]:
        steps = int(plan.steps * options.get("steps", 1))
        changes: dict[str, Any] = options | {"steps": steps}
        scenario = make_scenario(data, "iid", plan, **changes)
        trials = set_up(scenario, range(plan.reading_seeds))
        grid = {"lr": list(plan.grid)}
        tried = sweep_method(trials, "fedavg", {}, grid, Budget(evaluations=1), progress=False)
        chosen = find_best_changes(tried)["lr"]
        for lr in plan.grid:
            own = [t for t in tried.traces if t.changes["lr"] == lr and t.status == "finished"]
            finals = pd.DataFrame(
                [scenario.evaluate(trials.setups[t.seed], t.left)[0] for t in own], columns=list(METRICS)
            )
            ours = finals.mean().to_numpy()
            rows.append(
                {"data": DATA[data], "reading": title, "lr": lr, "chosen by validation": lr == chosen}
                | {METRICS[name]: value for name, value in zip(METRICS, ours, strict=True)}
                | {"std of test accuracy": finals["test_accuracy"].std(ddof=1)}
                | {"distance to the paper": float(np.abs(ours - published).sum())}
            )
        say(f"reading, {DATA[data]}: {title}")
    return pd.DataFrame(rows)


def list_settings(plan: Plan) -> dict[str, Any]:
    """Everything that decides the numbers, beside the plan; the methods' own settings are in the reports."""
    options = frame.convert_to_plain(make_scenario(plan.data[0], "iid", plan).options)
    for key in ("data", "partition"):
        options.pop(key)
    searches = {name: dataclasses.asdict(search) for name, search in SEARCHES.items()}
    return {"dealing": list(DEALING), "searches": searches, "options": options}
