"""The verbs of the command line, in Python: run, sweep, compare, report, tabulate_costs, describe_data.

Each takes the name of a task and plain settings; those that train leave a folder of files, and return an object with
its tables. The settings are the options of every run (`CommonOptions`) and those of the task (`RobustOptions` and the
others in `task_options.py`), which `nestfed run TASK --help` shows.
"""

import collections
import contextlib
import dataclasses
import datetime
import glob
import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from nestfed.core.algorithm import Algorithm
from nestfed.core.settings import UserError
from nestfed.engine import processes
from nestfed.engine.cohorts import find_expected_cohort
from nestfed.report import figures, tables, write_report
from nestfed.report.record import Record, replace_file
from nestfed.report.search import draw_sweep
from nestfed.report.style import format_duration
from nestfed.verbs.cost import measure
from nestfed.verbs.simulation import start
from nestfed.workbench import tuning
from nestfed.workbench.fields import list_options, read_settings
from nestfed.workbench.request import Request
from nestfed.workbench.results import add_gains, make_record
from nestfed.workbench.stages import (
    DIVERGED,
    FINISHED,
    Trials,
    compute_score,
    find_best_changes,
    run_method,
    set_up,
    sweep_method,
)
from nestfed.workbench.study import Search, Stopped, Study
from nestfed.workbench.task_options import DATA, TASKS, USUAL_TASK
from nestfed.workbench.tracking import Tracker, find_trackers, follow
from nestfed.workbench.tuning import Chosen, estimate_seconds, list_changes, tune

RUNS = Path("runs")
CHOSEN = "tuned.json"  # in a run's folder: what tuning chose
Tables = list[tuple[str, pd.DataFrame]]  # with their titles


# ------------------------------------------------------------------------------------------------- run


def run(
    task: str = USUAL_TASK,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    show: Callable[[Tables], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    track: str | Tracker | Sequence[str | Tracker] | None = None,
    **settings: Any,
) -> Study:
    """Train one or several methods on a named task and write everything to a folder.

    out, resume    the folder (runs/<name>); resume=True goes on with what is there
    progress       show a progress bar; None: if standard error is a terminal
    show           gets tables of the data before training begins: (title, table)
    say            gets lines about what tuning does
    track          who is told of settings, curves and results: "mlflow", "tensorboard", "wandb", or trackers of yours
    settings       options of every run and of the task: algorithm=["fedavg", "fedbio"], seeds=3, data="my.csv", ...
                   A seed decides the split, the dealing to clients, the start and the batches
    """
    request = Request.of({"task": task, **settings})
    # With several processes, the first one knows the folder, and it alone writes.
    trackers = find_trackers(track if processes.is_first() else None)
    processes.check_alike(lambda: {name: repr(v) for name, v in request.settings().items() if name != "data"})
    where, chosen = processes.ask_first(lambda: _find_folder(request, out, resume))
    folder = Path(where)
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    trials = set_up(request.scenario, request.seed_list)
    # A wrong setting of the last method shows before the first one trains, and before anything is written.
    _make_algorithms(request, trials)
    if show is not None:
        show(_describe(trials))
    processes.ask_first(lambda: _write_settings(folder, request))

    with contextlib.ExitStack() as stack:
        stack.enter_context(_say_how_to_go_on(folder))
        if chosen is None:
            tuned = choose_settings(request, trials, progress, say)  # by every process for itself
            chosen = processes.ask_first(lambda: tuned)
            if processes.is_first():
                replace_file(folder / CHOSEN, json.dumps(chosen, indent=2).encode())
        if chosen:
            request = request.adopt(list_changes(chosen))
            processes.ask_first(lambda: _write_settings(folder, request))
        stack.enter_context(follow(trackers, folder.name, folder, request.settings()))
        algorithms = _make_algorithms(request, trials)
        trials = trials.add(
            run_method(
                trials,
                name,
                algorithms[name],
                seed,
                request.budget,
                checkpoints=folder / "checkpoints",
                resume=resume,
                progress=progress,
                listen=trackers.evaluate if trackers.members else None,
            )
            for name in request.methods
            for seed in request.seed_list
        )
        record = make_record(
            trials,
            settings=request.settings(),
            command=request.command(),
            name=folder.name,
            methods=request.methods,
            seconds=time.monotonic() - began,
            started=started.isoformat(timespec="seconds"),
            tuned=chosen,
        )
        models = {}
        for trace in trials.traces:
            if trace.status == FINISHED:
                models[trace.method, trace.seed] = trials.scenario.make_model(trials.setups[trace.seed], trace.left)
        study = Study(folder, record, models)
        if processes.is_first():
            for (method, seed), model in models.items():
                model.save(folder / "models" / f"{method}-seed{seed}.npz")
            record.save(folder)
            write_report(record, folder)
            trackers.finish(study)
    return study


@contextlib.contextmanager
def _say_how_to_go_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        again = f"Go on with: nestfed run {shlex.quote(str(folder / 'settings.toml'))} --resume"
        done = str(error).partition(".")[0] or "interrupted"
        raise Stopped(f"{done}. {again}") from None


def describe_data(task: str = USUAL_TASK, **settings: Any) -> Tables:
    """What a person should see of the data before training. What `run` would refuse is refused here."""
    request = Request.of({"task": task, **settings})
    trials = set_up(request.scenario, request.seed_list[:1])
    _make_algorithms(request, trials)
    return _describe(trials)


def _make_algorithms(request: Request, trials: Trials[Any]) -> dict[str, list[Algorithm]]:
    """Those of every method's stages; a wrong setting or cohort shows here."""
    find_expected_cohort(request.budget.cohort, trials.first.rows.clients)
    make = lambda name: trials.scenario.make_algorithms(name, trials.first, request.changes(name))
    return {name: make(name) for name in request.methods}


def _describe(trials: Trials[Any]) -> Tables:
    holdings: Any = trials.scenario.count_holdings(trials.first)
    holdings = holdings.assign(group="rows of " + holdings.group)  # a group may be called "client"
    held = holdings.pivot_table(index="client", columns="group", values="rows", aggfunc="sum", fill_value=0, sort=False)
    by_group = held if held.shape[1] > 1 else held.iloc[:, :0]
    who = by_group.assign(**{"all rows": held.sum(axis=1)}).reset_index()
    return [*trials.scenario.summarise(), (f"Who holds what, seed {next(iter(trials.setups))}", who)]


def _name_run(request: Request) -> str:
    """<task>-<data>-<methods>"""
    parts = [part for part in Path(str(request.options.get("data", ""))).parts if not glob.has_magic(part)]
    data = Path(parts[-1]).stem if parts else ""
    methods = request.methods if len(request.methods) < 4 else [*request.methods[:2], "and-others"]
    return "-".join(word for word in (request.task, data, *methods) if word)


def find_fresh(folder: Path) -> Path:
    """The folder, or the next number beside it."""
    candidates = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _claim(out: str | Path | None, usual: Path) -> Path:
    """A new folder, made before the work: what cannot be written shows at once."""
    folder = Path(out) if out is not None else find_fresh(usual)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; give another folder (--out).")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _find_folder(request: Request, out: str | Path | None, resume: bool) -> tuple[str, Chosen | None]:
    """(the folder of a run, what was chosen there: it is not chosen again)."""
    folder = Path(out) if out is not None else find_fresh(RUNS / _name_run(request))
    chosen = _read_chosen(folder) if resume else None
    _check_folder(folder, request, resume, chosen or {})
    return str(folder), chosen


def choose_settings(
    request: Request,
    trials: Trials[Any],
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Chosen:
    """What is chosen before training; nothing where that was not wanted, or would take too long."""
    given = {name: request.changes(name) for name in request.methods}
    if request.tune is False:
        return {}
    if request.privacy is not None:
        say("not tuned: every setting that is tried would spend privacy (give them with --set).")
        return {}
    seconds = estimate_seconds(trials, given, request.budget)
    if not seconds:
        return {}
    long = f"about {format_duration(seconds)} on two cores"
    if request.tune is None and seconds > tuning.MOST_SECONDS:
        say(f"not tuned: it would take {long} (--tune does it).")
        return {}
    say(f"tuning first, by {trials.scenario.select}: {long} (--no-tune leaves it out).")
    return tune(trials, given, request.budget, progress=progress, say=say)


def _read_chosen(folder: Path) -> Chosen | None:
    return json.loads((folder / CHOSEN).read_text(encoding="utf-8")) if (folder / CHOSEN).exists() else None


def _check_folder(folder: Path, request: Request, resume: bool, chosen: Chosen) -> None:
    """What is there already is never overwritten by another run."""
    if (folder / "settings.toml").exists():
        if not resume:
            raise UserError(f"{folder} holds a run already; give resume (--resume), or another folder (--out).")
        both = Request.of(read_settings(folder / "settings.toml")), request
        theirs, ours = ((one.adopt(list_changes(chosen)) if chosen else one).settings() for one in both)
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
    replace_file(folder / "settings.toml", content.encode())


# ------------------------------------------------------------------------------------------------- sweep


def sweep(
    task: str = USUAL_TASK,
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
    if request.tune:
        raise UserError("tune was given, but a sweep is a search itself; leave it out, or use run.")
    (name,), scenario = request.methods, request.scenario
    for key in grid:
        if key in scenario.aims:
            raise UserError(
                f"a grid of {key!r} was given, but {key} decides what the score measures, and scores of different "
                "aims do not compare; run each value by itself and compare the runs (nestfed compare)."
            )
    budget = dataclasses.replace(request.budget, evaluations=min(request.evaluations, 10))
    trials = set_up(scenario, request.seed_list)
    # Settings of the task itself (penalty, gap) change its numbers, not its programs.
    of_task = {key: values for key, values in grid.items() if key in _list_number_options(request.task)}
    rest = {key: values for key, values in grid.items() if key not in of_task}
    for chosen in _combine(rest):  # a wrong setting shows before anything runs
        scenario.make_algorithms(name, trials.first, {**request.changes(name), **chosen})
    variants = [(chosen, scenario.change(**chosen)) for chosen in _combine(of_task)]
    folder = _claim(out, RUNS / f"sweep-{request.task}-{name}")
    for chosen, changed in variants:
        own = dataclasses.replace(trials, scenario=changed, traces=())
        done = sweep_method(own, name, request.changes(name), rest, budget, progress=progress)
        trials = trials.add(dataclasses.replace(trace, changes={**chosen, **trace.changes}) for trace in done.traces)
    table = tabulate_sweep(trials, list(grid))
    tables.write(table, folder, "sweep")
    figures.write(draw_sweep(table, list(grid), "score", scenario.method(name).title), folder, "sweep")
    best = find_best_changes(trials)
    chosen = dataclasses.replace(
        request,
        options={**request.options, **{key: value for key, value in best.items() if key in of_task}},
        set={key: value for key, value in best.items() if key not in of_task},
        tune=False,
    )
    (folder / "best.toml").write_text(tomli_w.dumps(chosen.settings()), encoding="utf-8")
    return Search(folder, table, best, chosen.command())


def _combine(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _list_number_options(task: str) -> list[str]:
    """Options of a task that are plain numbers of its problems: they can be swept."""
    return [name for name, option in list_options(TASKS[task]).items() if option.hint is float and option.panel != DATA]


def tabulate_sweep(trials: Trials[Any], keys: Sequence[str]) -> pd.DataFrame:
    """One row per setting, best first: its score on validation data, and every recorded metric beside it."""
    rows = []
    for trace in trials.traces:
        last = {name: v[-1] for name, v in trace.stages[-1].history.items() if name != "round" and v.ndim == 1}
        row: dict[str, Any] = {key: trace.changes[key] for key in keys}
        row |= {"score": compute_score(trials, trace)} | {name: float(value) for name, value in last.items()}
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

    def join(table: str) -> pd.DataFrame:
        found = [(getattr(record, table), label) for record, label in zip(records, labels, strict=True)]
        named = [own.assign(method=own.method.map(label)) for own, label in found if "method" in own]
        return pd.concat(named or [pd.DataFrame()], ignore_index=True)

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
    by_method = lambda key: {
        label[method]: value
        for record, label in zip(records, labels, strict=True)
        for method, value in record.about.get(key, {}).items()
    }
    apart = {key: found for key in ("privacy", "tuned") if (found := by_method(key))}
    folder = _claim(out, RUNS / f"compare-{'-'.join(names)}")
    record = Record(
        settings={"compared": [str(folder) for folder in folders]},
        about={key: value for key, value in first.items() if key not in ("privacy", "tuned")}
        | {
            "name": folder.name,
            "command": shlex.join(["nestfed", "compare", *map(str, folders)]),
            "methods": titles,
            "baseline": labels[0][baseline],
            "references": [labels[0][method] for method in first.get("references", ())],
            "seeds": sorted({seed for record in records for seed in record.about["seeds"]}),
            "seconds": round(sum(record.about["seconds"] for record in records), 1),
            "notes": list(dict.fromkeys(notes)),
        }
        | apart,
        history=join("history"),
        final=join("final"),
        slices=join("slices"),
        holdings=records[0].holdings,
        cost={n[m]: r.cost[m] for r, n in zip(records, labels, strict=True) for m in r.methods},
        lines=join("lines"),
        candidates=join("candidates"),
    )
    record = add_gains(record)
    record.save(folder)
    write_report(record, folder)
    return Study(folder, record, {})


def report(folder: str | Path) -> Path:
    """Write the report of a run again, from its files."""
    return write_report(Record.load(Path(folder)), Path(folder))


def tabulate_costs(task: str = USUAL_TASK, **settings: Any) -> pd.DataFrame:
    """What every method costs one client on a task: the ledger of a round, read off the traced programs."""
    request = Request.of({"task": task, **settings})
    scenario, guarantee = request.scenario, request.guarantee
    setup = scenario.set_up(request.seed_list[0])
    rows = []
    for name in request.methods if request.algorithm is not None else scenario.methods:
        method, before = scenario.method(name), None
        algorithms = scenario.make_algorithms(name, setup, request.changes(name))
        for stage, algorithm in zip(method.stages, algorithms, strict=True):
            problem_task = stage.task(scenario, setup, before)
            uploads = () if guarantee is None else guarantee
            price = measure(algorithm, problem_task, cohort=request.cohort, uploads=uploads)
            rounds = request.budget.count_rounds(scenario, algorithm)
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
                before = scenario.leave(problem_task, begun.server, begun.clients)
    return pd.DataFrame(rows)
