"""The verbs of the command line, in Python: run, sweep, compare, report, cost.

Each takes the name of a task and plain settings, leaves a folder of files, and returns an object with its tables.
"""

import collections
import contextlib
import dataclasses
import datetime
import itertools
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd
import tomli_w

from nestfed.core.settings import UserError
from nestfed.engine.cohorts import expected_cohort
from nestfed.report import figures, tables, write_report
from nestfed.report.record import Record, replace_file
from nestfed.report.search import sweep_figure
from nestfed.verbs.cost import measure
from nestfed.verbs.simulation import start
from nestfed.workbench.request import Request, find_task, read_settings
from nestfed.workbench.results import make_record
from nestfed.workbench.scenario import Kind, Setup
from nestfed.workbench.stages import (
    DIVERGED,
    FINISHED,
    Trace,
    best_changes,
    make_setups,
    run_method,
    score_of,
    sweep_method,
)

RUNS = Path("runs")


@dataclasses.dataclass(frozen=True)
class Study:
    """A finished run: its folder, its tables and its models."""

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r}: {', '.join(self.record.methods)}; seeds {self.record.about['seeds']})"

    folder: Path
    record: Record
    models: dict[tuple[str, int], Any]  # by method and seed

    @property
    def history(self) -> pd.DataFrame:
        return self.record.history

    @property
    def final(self) -> pd.DataFrame:
        return self.record.final

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def figures(self) -> list[Path]:
        return sorted((self.folder / "figures").glob("*.png"))

    def model(self, method: str | None = None, seed: int | None = None) -> Any:
        """The final model of a method (the first one) and a seed (the first one)."""
        method = method or self.record.methods[0]
        seed = int(self.record.about["seeds"][0] if seed is None else seed)
        if (method, seed) not in self.models:
            raise UserError(f"there is no final model of {method!r} and seed {seed}: {sorted(self.models)} are there.")
        return self.models[method, seed]


# ------------------------------------------------------------------------------------------------- run


def run(
    task: str = "fairness",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Study:
    """Train one or several methods on a named task and write everything to a folder.

    algorithm      one method or several (FedAvg and FedBiO); the others are compared with FedAvg, or with the first
    seeds          a number, or a list; a seed decides the split, the dealing to clients, the start and the batches
    rounds         of every stage; without it the task's number of local steps decides
    cohort, dropout, evaluations     as in `simulate`; about `evaluations` evaluations in every stage
    output         which iterate counts: "last", "average", "random", or "best" on validation data
    privacy        "local" or "central" differential privacy, with clip, noise_multiplier, delta and epsilon_budget
    set            settings of the algorithms: {"lr": 0.1, "fedbio.lower_lr": 0.5, "model.lr": 1.0}
    out, resume    the folder (runs/<name>); resume=True goes on with what is there
    and the options of the task: data, label, group, clients, partition, features, model, ...
    """
    request = Request.of({"task": task, **settings})
    kind, methods, budget = request.kind, request.methods, request.budget
    folder = Path(out) if out is not None else fresh(RUNS / _stem(request))
    _check_folder(folder, request, resume)
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    setups = make_setups(kind, request.seed_list)
    first = next(iter(setups.values()))
    # A wrong setting of the last method shows before the first one trains, and before anything is written.
    algorithms = {name: kind.method(name).algorithms(first, request.changes(name)) for name in methods}
    expected_cohort(budget.cohort, first.rows.clients)
    _write_settings(folder, request)

    with _saying_how_to_go_on(folder):
        traces = [
            run_method(
                kind, name, algorithms[name], setup, seed, budget, checkpoints=folder / "checkpoints", resume=resume,
                progress=progress,
            )
            for name in methods
            for seed, setup in setups.items()
        ]  # fmt: skip
        record = make_record(
            kind, setups, traces, settings=request.settings(), command=request.command(), name=folder.name,
            methods=methods, seconds=time.monotonic() - began, started=started.isoformat(timespec="seconds"),
        )  # fmt: skip
        models = {}
        for trace in traces:
            if trace.status == FINISHED:
                models[trace.method, trace.seed] = kind.trained(setups[trace.seed], trace.left)
                models[trace.method, trace.seed].save(folder / "models" / f"{trace.method}-seed{trace.seed}.npz")
        record.save(folder)
        write_report(record, folder)
    return Study(folder, record, models)


@contextlib.contextmanager
def _saying_how_to_go_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        again = f"Go on with: nestfed run {shlex.quote(str(folder / 'settings.toml'))} --resume"
        done = str(error).partition(".")[0] or "interrupted"
        raise Stopped(f"{done}. {again}") from None


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; the message says how to go on."""


def describe_data(
    task: str = "fairness", *, out: str | Path | None = None, resume: bool = False, **settings: Any
) -> list[tuple[str, pd.DataFrame]]:
    """What a person should see of the data before training: (title, table). What `run` would refuse is refused here."""
    request = Request.of({"task": task, **settings})
    kind, seed = request.kind, request.seed_list[0]
    budget, methods = request.budget, request.methods
    if out is not None:
        _check_folder(Path(out), request, resume)
    setup = kind.set_up(seed)
    for name in methods:
        kind.method(name).algorithms(setup, request.changes(name))
    expected_cohort(budget.cohort, setup.rows.clients)
    holdings: Any = kind.holdings(setup)
    holdings = holdings.assign(group="rows of " + holdings.group)  # a group may be called "client"
    held = holdings.pivot_table(index="client", columns="group", values="rows", aggfunc="sum", fill_value=0, sort=False)
    by_group = held if held.shape[1] > 1 else held.iloc[:, :0]
    return [
        *kind.summary(),
        (f"Who holds what, seed {seed}", by_group.assign(**{"all rows": held.sum(axis=1)}).reset_index()),
    ]


def _stem(request: Request) -> str:
    """<task>-<data>-<methods>"""
    data = Path(str(request.options.get("data", ""))).stem
    methods = request.methods if len(request.methods) < 4 else [*request.methods[:2], "and-others"]
    return "-".join(word for word in (request.task, data, *methods) if word)


def fresh(folder: Path) -> Path:
    """The folder, or the next number beside it."""
    candidates = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _claimed(out: str | Path | None, usual: Path) -> Path:
    """A new folder, made before the work: what cannot be written shows at once."""
    folder = Path(out) if out is not None else fresh(usual)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; give another folder (--out).")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_folder(folder: Path, request: Request, resume: bool) -> None:
    """What is there already is never overwritten by another run."""
    if (folder / "settings.toml").exists():
        theirs, ours = read_settings(folder / "settings.toml"), request.settings()
        if not resume:
            raise UserError(f"{folder} holds a run already; give resume (--resume), or another folder (--out).")
        if theirs != ours:
            different = [key for key in theirs | ours if theirs.get(key) != ours.get(key)]
            raise UserError(
                f"{folder} holds a run with other settings ({', '.join(different)}); give those, or another folder."
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not the folder of a run; give another one.")


def _write_settings(folder: Path, request: Request) -> None:
    """Before training: a killed run can go on."""
    try:
        content = tomli_w.dumps(request.settings())
    except TypeError as error:
        raise UserError(f"a setting cannot be written to a file: {error}. Use numbers, texts and switches.") from error
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "settings.toml").exists():
        replace_file(folder / "settings.toml", content.encode())


# ------------------------------------------------------------------------------------------------- sweep


@dataclasses.dataclass(frozen=True)
class Search:
    """A finished sweep: every setting and seed, and the choice by validation data."""

    folder: Path
    table: pd.DataFrame  # one row per setting: its values, means over seeds, how many seeds diverged
    best: dict[str, Any]
    command: str  # runs the method with the chosen settings


def sweep(
    task: str = "fairness",
    *,
    grid: Mapping[str, Sequence[Any]],
    out: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Search:
    """Try all combinations of a grid of settings, side by side, and choose by validation data, never by test data.

    `grid` maps settings of one method to values: {"lr": [0.01, 0.1, 1.0], "model.lr": [0.1, 1.0]}; the other arguments
    are those of `run`. A grid may also reach numbers of the task itself (penalty, gap).
    """
    request = Request.of({"task": task, **settings})
    if request.algorithm is None or len(request.methods) != 1:
        raise UserError("a sweep is of one method; name it with algorithm= (--algorithm on the command line).")
    if not grid or not all(grid.values()):
        raise UserError("a sweep needs a grid of values, for example lr=0.01,0.1,1 (--grid on the command line).")
    (name,), kind = request.methods, request.kind
    for key in grid:
        if key in kind.aims:
            raise UserError(
                f"a grid of {key!r} was given, but {key} decides what the score measures, and scores of different "
                "aims do not compare; run each value by itself and compare the runs (nestfed compare)."
            )
    budget = dataclasses.replace(request.budget, evaluations=min(request.evaluations, 10))
    setups = make_setups(kind, request.seed_list)
    # Settings of the task itself (penalty, gap) change its numbers, not its programs.
    of_task = {key: values for key, values in grid.items() if key in _number_options(kind)}
    rest = {key: values for key, values in grid.items() if key not in of_task}
    variants = [dict(zip(of_task, values, strict=True)) for values in itertools.product(*of_task.values())]
    kinds = [find_task(request.task).from_options({**request.options, **variant}) for variant in variants]
    for combination in itertools.product(*rest.values()):  # a wrong setting shows before anything runs
        kind.method(name).algorithms(
            next(iter(setups.values())), {**request.changes(name), **dict(zip(rest, combination, strict=True))}
        )
    folder = _claimed(out, RUNS / f"sweep-{request.task}-{name}")
    traces = []
    for variant, changed in zip(variants, kinds, strict=True):
        own = {seed: dataclasses.replace(setup, kind=changed) for seed, setup in setups.items()}
        done = sweep_method(changed, name, own, request.changes(name), rest, budget, progress=progress)
        traces += [dataclasses.replace(trace, changes={**variant, **trace.changes}) for trace in done]
    table = sweep_table(kind, setups, traces, list(grid))
    tables.write(table, folder, "sweep")
    figures.write(sweep_figure(table, list(grid), "score", kind.method(name).title), folder, "sweep")
    best = best_changes(kind, setups, traces)
    chosen = dataclasses.replace(
        request,
        options={**request.options, **{key: value for key, value in best.items() if key in of_task}},
        set={key: value for key, value in best.items() if key not in of_task},
    )
    (folder / "best.toml").write_text(tomli_w.dumps(chosen.settings()), encoding="utf-8")
    return Search(folder, table, best, chosen.command())


def _number_options(kind: Kind) -> list[str]:
    """Options of a task that are plain numbers: they can be swept."""
    hints = get_type_hints(type(kind))
    return [field.name for field in dataclasses.fields(kind) if hints[field.name] is float]


def sweep_table(kind: Kind, setups: Mapping[int, Setup], traces: Sequence[Trace], keys: Sequence[str]) -> pd.DataFrame:
    """One row per setting, best first: its score on validation data, and every recorded metric beside it."""
    rows = []
    for trace in traces:
        last = {name: v[-1] for name, v in trace.stages[-1].history.items() if name != "round" and v.ndim == 1}
        row: dict[str, Any] = {key: trace.changes[key] for key in keys}
        row |= {"score": score_of(kind, setups, trace)} | {name: float(value) for name, value in last.items()}
        rows.append(row | {"diverged": trace.status == DIVERGED})
    grouped: Any = pd.DataFrame(rows).groupby(list(keys), sort=False, as_index=False)
    means = grouped.mean(numeric_only=True).drop(columns="diverged")
    table = means.merge(grouped["diverged"].sum(), on=list(keys))
    return table.sort_values("score", kind="stable", ignore_index=True)


# ------------------------------------------------------------------------------------------------- other verbs


def compare(folders: Sequence[str | Path], *, out: str | Path | None = None) -> Study:
    """One report of several runs of a task. Methods that appear twice are told apart by the names of their folders."""
    if len(folders) < 2:
        raise UserError("compare needs at least two folders of runs.")
    records = [Record.load(Path(folder)) for folder in folders]
    names = [Path(folder).resolve().name for folder in folders]
    first = records[0].about
    for folder, record in zip(folders, records, strict=True):
        if record.about["task"] != first["task"]:
            raise UserError(f"{folder} is a run of {record.about['task']}, {folders[0]} of {first['task']}.")
    counted = collections.Counter(method for record in records for method in record.methods)
    labels = [
        {m: m if counted[m] == 1 else f"{m} ({name})" for m in record.methods}
        for name, record in zip(names, records, strict=True)
    ]
    if len(set(sum((list(label.values()) for label in labels), []))) != counted.total():
        raise UserError("two of the folders have the same name and the same methods; rename one.")
    renamed = lambda table: pd.concat(
        [
            getattr(r, table).assign(method=getattr(r, table).method.map(n))
            for r, n in zip(records, labels, strict=True)
        ],
        ignore_index=True,
    )
    titles = {
        label[m]: record.title(m) if counted[m] == 1 else f"{record.title(m)} ({name})"
        for name, record, label in zip(names, records, labels, strict=True)
        for m in record.methods
    }
    baseline = first["baseline"]
    notes = [note for record in records for note in record.about["notes"]]
    if len({record.about["data"] for record in records}) > 1:
        notes.insert(
            0, "The runs have different data or splits: equal seeds do not pair, read the differences with care."
        )
    spent = {
        label[method]: value
        for record, label in zip(records, labels, strict=True)
        for method, value in record.about.get("privacy", {}).items()
    }
    folder = _claimed(out, RUNS / f"compare-{'-'.join(names)}")
    record = Record(
        settings={"compared": [str(folder) for folder in folders]},
        about={key: value for key, value in first.items() if key != "privacy"}
        | {
            "name": folder.name,
            "command": shlex.join(["nestfed", "compare", *map(str, folders)]),
            "methods": titles,
            "baseline": labels[0][baseline],
            "seeds": sorted({seed for record in records for seed in record.about["seeds"]}),
            "seconds": round(sum(record.about["seconds"] for record in records), 1),
            "notes": list(dict.fromkeys(notes)),
        }
        | ({"privacy": spent} if spent else {}),
        history=renamed("history"),
        final=renamed("final"),
        slices=renamed("slices"),
        holdings=records[0].holdings,
        cost={n[m]: r.cost[m] for r, n in zip(records, labels, strict=True) for m in r.methods},
        lines=renamed("lines"),
    )
    record.save(folder)
    write_report(record, folder)
    return Study(folder, record, {})


def report(folder: str | Path) -> Path:
    """Write the report of a run again, from its files."""
    return write_report(Record.load(Path(folder)), Path(folder))


def cost_table(task: str = "fairness", **settings: Any) -> pd.DataFrame:
    """What every method costs one client on a task: the ledger of a round, read off the traced programs."""
    request = Request.of({"task": task, **settings})
    kind, setup = request.kind, request.kind.set_up(request.seed_list[0])
    guarantee = request.guarantee
    rows = []
    for name in request.methods if request.algorithm is not None else kind.methods:
        method, before = kind.method(name), None
        for stage, algorithm in zip(method.stages, method.algorithms(setup, request.changes(name)), strict=True):
            problem_task = stage.task(setup, before)
            uploads = () if guarantee is None else guarantee
            price = measure(algorithm, problem_task, cohort=request.cohort, uploads=uploads)
            rounds = request.budget.rounds_of(kind, algorithm)
            rows.append(
                {
                    "method": method.title,
                    "stage": stage.name,
                    "local steps": algorithm.local_steps,
                    "exchanges": price.round.exchanges,
                    "bytes up": price.round.bytes_up,
                    "bytes down": price.round.bytes_down,
                    "oracles": " ".join(f"{kind} {n}" for kind, n in price.round.oracles.items()),
                    "samples": price.round.samples,
                    "rounds": rounds,
                    "total MB": rounds * (price.round.bytes_up + price.round.bytes_down) / 1e6,
                }
            )
            if stage is not method.stages[-1]:
                begun = start(algorithm, problem_task, 0)  # in place of what the stage would leave: for shapes
                before = kind.left(begun.server, begun.clients, problem_task.clients)
    return pd.DataFrame(rows)
