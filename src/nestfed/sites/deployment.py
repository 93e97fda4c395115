"""A run between sites, from settings to a folder with a report, as `nestfed run` leaves one.

run_sites    over a link to sites that are there already
run_local    all of it on this machine: rows are dealt to files, a worker is started for each
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import tomli_w

from nestfed.core.settings import UserError
from nestfed.data.table import draft_schema
from nestfed.report import write_report
from nestfed.report.metrics import Metric
from nestfed.report.record import Record, replace_file
from nestfed.sites.coordinator import ANSWER, Coordinator, LegResult, Roll, Run, add_up, read_run_id
from nestfed.sites.engines import choose_engine, open_link, open_local
from nestfed.sites.kits import read_deployment
from nestfed.sites.link import Link
from nestfed.sites.masks import MaskedSums, check_number, make_mask_key
from nestfed.sites.problem import write_schema
from nestfed.sites.wire import Letter, pack, unpack
from nestfed.sites.worker import Leg, keep_file
from nestfed.verbs import cost
from nestfed.workbench.commands import find_fresh
from nestfed.workbench.fields import read_settings
from nestfed.workbench.request import Request
from nestfed.workbench.results import add_gains, collect_cost, collect_privacy, list_versions, make_history_frame
from nestfed.workbench.site_setup import Prepared, ServerSetup
from nestfed.workbench.stages import FINISHED, StageTrace, Trace, Trials
from nestfed.workbench.study import Stopped, Study

RUNS = Path("runs")
OF_A_SITE = ("data", "clients", "partition", "schema")  # settings that say where rows are, which every site knows
USUAL_SITES = 3


def run_sites(
    settings: Mapping[str, Any],
    schema: str,
    names: Sequence[str],
    link: Link,
    *,
    out: Path,
    resume: bool = False,
    masked: bool = False,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
    answer: float = ANSWER,
    command: str = "",
) -> Study:
    """Train at these sites, in this order; `schema` is the text of the schema that all of them have."""
    asked = {name: value for name, value in settings.items() if name not in OF_A_SITE}
    request = Request.of({**asked, "tune": False})
    _check_request(request)
    if masked:
        check_number(len(names))
    said = json.loads(json.dumps({name: v for name, v in request.settings().items() if name not in OF_A_SITE}))
    _claim_folder(out, said, resume)
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    run_id, roll = read_run_id(out), Roll(link, names, say=say, answer=answer)
    traces, setups, finals, scenario = [], {}, [], None
    for seed in request.seed_list:
        run = Run(f"{run_id}-{seed}", said, schema, seed, tuple(names), masked)
        hub = ServerSetup(said, write_schema(schema, out), sites=len(names), seed=seed)
        sums = _find_sums(out / "checkpoints" / f"sums-seed{seed}", roll, run, hub)
        prepared = hub.prepare(sums)
        scenario, setups[seed] = prepared.scenario, prepared.setup
        for method in request.methods:
            trace, final = _run_method(request, prepared, run, roll, method, sums, out, progress)
            traces.append(trace)
            finals.append({"method": method, "seed": seed, "status": FINISHED, "above_start": False} | final)
    assert scenario is not None
    trials = Trials(scenario, setups, tuple(traces))
    about = {
        "name": out.name,
        "command": command,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
    }
    record = _make_record(trials, request, said, names, pd.DataFrame(finals), about, roll)
    models = {}
    for trace in traces:
        model = scenario.make_model(setups[trace.seed], trace.left)
        model.save(out / "models" / f"{trace.method}-seed{trace.seed}.npz")
        models[trace.method, trace.seed] = model
    record.save(out)
    write_report(record, out)
    return Study(out, record, models)


def _check_request(request: Request) -> None:
    if request.task == "personal":
        raise UserError(
            "the task personal trains a model for each client, which its site keeps; a run between sites has no way to "
            "use or judge these yet. Use fairness, robust or auprc."
        )
    if request.output == "random":
        raise UserError("output='random' was given; a run between sites knows 'last', 'average' and 'best'.")


def _claim_folder(out: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """A new folder, or that of this run."""
    file = out / "settings.toml"
    if file.exists():
        if not resume:
            raise UserError(f"{out} holds a run already; give --resume, or another folder (--out).")
        theirs = read_settings(file)
        different = [name for name in {**settings, **theirs} if theirs.get(name) != settings.get(name)]
        if different:
            raise UserError(f"{out} holds a run with other settings ({', '.join(different)}); give those (--out).")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not the folder of a run; give another one (--out).")
    out.mkdir(parents=True, exist_ok=True)
    replace_file(file, tomli_w.dumps(dict(settings)).encode())


def _find_sums(file: Path, roll: Roll, run: Run, hub: ServerSetup) -> list[np.ndarray]:
    """The sums of all sites' rows, asked for once."""
    if file.exists():
        return list(unpack(file.read_bytes()).arrays)
    sums = add_up(roll, run, hub.EXCHANGES)
    keep_file(file, pack(Letter({}, sums)))
    return sums


def _run_method(
    request: Request,
    prepared: Prepared,
    run: Run,
    roll: Roll,
    method: str,
    sums: Sequence[np.ndarray],
    out: Path,
    progress: bool | None,
) -> tuple[Trace, dict[str, float]]:
    """(one seed of a method, the metrics of its output), stage after stage."""
    scenario, changes = prepared.scenario, request.changes(method)
    algorithms = prepared.make_algorithms(method, changes)
    trace, earlier, final = Trace(method, run.seed, {}), [], {}
    for number, (stage, algorithm) in enumerate(zip(scenario.method(method).stages, algorithms, strict=True)):
        task = prepared.task(method, number, trace.left)
        options = request.budget.options(request.budget.count_rounds(scenario, algorithm), scenario, trace)
        remarks: tuple[str, ...] = ()
        if options.select is not None:  # what is recorded without gathering rows may not have it
            options = dataclasses.replace(options, output="last", select=None)
            remarks = (
                f"{scenario.method(method).title}: the last model counts. `nestfed run` chooses the best one by scores "
                "of validation rows, which sites give away to nobody.",
            )
        leg = Leg(method=method, seed=run.seed, stage=number, changes=json.loads(json.dumps(changes)))
        file = out / "checkpoints" / f"{leg.name}.run"
        masks = MaskedSums() if run.masked else None
        central = Coordinator(
            roll, run, leg, algorithm, task, options, file=file, sums=sums, earlier=earlier, masks=masks
        )
        title = f"{scenario.method(method).title}, seed {run.seed}"
        result = central.train(progress, title)
        price = cost.measure(algorithm, central.task, options)
        left = prepared.leave(task, result.output)
        done = _trace_stage(stage.name, options, result, price, task)
        done = dataclasses.replace(done, notes=(*done.notes, *remarks))
        trace = trace.extend(done, left, FINISHED, {})
        earlier += [np.asarray(a) for a in jax.tree.leaves(result.output)]
        final = {name: float(value) for name, value in result.final.items() if np.ndim(value) == 0}
    return trace, final


def _trace_stage(name: str, options: Any, result: LegResult, price: cost.Cost, task: Any) -> StageTrace:
    return StageTrace(
        name,
        options.need_rounds(),
        result.history,
        result.participants,
        price,
        task.clients,
        options.output,
        task.minimised,
        result.remarks,
        result.spending,
    )


def _make_record(
    trials: Trials[Any],
    request: Request,
    settings: dict[str, Any],
    names: Sequence[str],
    final: pd.DataFrame,
    about: Mapping[str, Any],
    roll: Roll,
) -> Record:
    """What is known without anybody's rows: metrics that are sums, of no single site or group."""
    scenario = trials.scenario
    final["above_start"] = [trace.rise is not None for trace in trials.traces]
    headline = [metric for metric in scenario.headline if metric.name in final]
    if not headline:
        recorded = [name for name in final.columns if name not in ("method", "seed", "status", "above_start")]
        better = lambda name: "higher" if "accuracy" in name else "lower"
        headline = [Metric(name, name.replace("_", " "), better(name)) for name in recorded[:3]]
    methods = request.methods
    empty = lambda *columns: pd.DataFrame(columns=pd.Index(columns))
    notes = [note for trace in trials.traces for stage in trace.stages for note in stage.notes]
    record = Record(
        settings=settings,
        about={
            **about,
            "title": scenario.title,
            "task": scenario.name,
            "methods": {method: scenario.method(method).title for method in methods},
            "baseline": scenario.baseline if scenario.baseline in methods else methods[0],
            "references": [],
            "select": scenario.select,
            "metrics": [dataclasses.asdict(metric) for metric in headline],
            "chart": None,
            "seeds": list(trials.setups),
            "versions": list_versions(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores; rows at {len(names)} sites",
            "data": "at the sites",
            "status": FINISHED,
            "notes": [
                f"the rows stayed at {len(names)} sites ({', '.join(names)}); the coordinator sent "
                f"{roll.sent / 1e6:.1f} MB and received {roll.received / 1e6:.1f} MB since it was started.",
                *dict.fromkeys(notes),
            ],
            **collect_privacy(trials.traces),
        },
        history=pd.concat([make_history_frame(trials, trace) for trace in trials.traces], ignore_index=True),
        final=final,
        slices=empty("kind", "slice", "split", "metric", "value", "method", "seed"),
        holdings=empty("client", "group", "label", "part", "rows", "seed"),
        cost={trace.method: collect_cost(trace) for trace in trials.traces},
    )
    return add_gains(record)


# ------------------------------------------------------------------------------------------------- on one machine


def run_local(
    settings: Mapping[str, Any],
    *,
    sites: int = USUAL_SITES,
    engine: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    masked: bool = False,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
    answer: float = ANSWER,
) -> Study:
    """Deal the rows of a task to files, one for each site, and train between processes of this machine."""
    chosen = choose_engine(engine)
    request = Request.of({**settings, "tune": False})
    _check_request(request)
    where = out or find_fresh(RUNS / f"deploy-{request.task}")
    command = f"nestfed deploy local{request.command().removeprefix('nestfed run')} --sites {sites} --engine {chosen}"
    with tempfile.TemporaryDirectory(prefix="nestfed-") as folder, _say_how_to_go_on(f"{command} --out {where}"):
        work = Path(folder)
        files, schema = _deal_rows(request, sites, work)
        if masked:
            check_number(len(files))
        say(f"{len(files)} sites on this machine, letters carried by {chosen}")
        with open_local(chosen, work / "kits", files, where / "sites", say) as link:
            if masked:
                _share_mask_keys(work / "kits", list(files))
            how: dict[str, Any] = {"resume": resume, "masked": masked, "progress": progress, "say": say}
            return run_sites(
                request.settings(), schema, list(files), link, out=where, answer=answer, command=command, **how
            )


def _deal_rows(request: Request, sites: int, folder: Path) -> tuple[dict[str, Path], str]:
    """(a file of rows for each site, the text of their schema), dealt as `nestfed run` does with the first seed."""
    options = request.options
    scenario: Any = request.scenario
    if "clients" not in options and scenario.table.client is None:
        scenario = scenario.change(clients=str(sites))
    dealt = scenario.deal(request.seed_list[0])
    table = scenario.table
    agreed = table.schema or draft_schema(table, scenario.options.batch_rows(len(table.frame)))
    columns = [name for name in table.frame.columns if name != table.client]
    files = {}
    for number, _ in enumerate(dealt.client_names):
        name = f"site-{number + 1}"
        files[name] = folder / f"{name}.csv"
        table.frame.loc[dealt.client == number, columns].to_csv(files[name], index=False)
    return files, agreed.to_toml()


def _share_mask_keys(folder: Path, names: Sequence[str]) -> None:
    """As people would do it: every site makes a key, and all get the list of the public ones."""
    publics = {name: make_mask_key(folder / name) for name in names}
    for name in names:
        (folder / name / "masks.toml").write_text(tomli_w.dumps(publics), encoding="utf-8")


@contextlib.contextmanager
def _say_how_to_go_on(command: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"interrupted. Go on with: {command} --resume") from None


def run_deployment(folder: Path, settings: Mapping[str, Any], *, out: Path | None = None, **how: Any) -> Study:
    """A run of the deployment in this folder, over the framework that it was made for."""
    deployment = read_deployment(folder)
    schema = settings.get("schema") or folder / "schema.toml"
    if not Path(schema).exists():
        raise UserError(
            f"there is no schema {schema}; sites draft one each (`nestfed site schema`), and `nestfed deploy schema` "
            "merges the drafts. Give it as schema= in the settings, or put it there."
        )
    task = Request.of({name: v for name, v in settings.items() if name not in OF_A_SITE}).task
    where = out or find_fresh(RUNS / f"deploy-{task}")
    command = f"nestfed deploy run {shlex.quote(str(folder))} {shlex.quote(str(where / 'settings.toml'))} --out {where}"
    with _say_how_to_go_on(command):
        text = Path(schema).read_text(encoding="utf-8")
        with contextlib.closing(open_link(folder)) as link:
            return run_sites(settings, text, deployment.sites, link, out=where, command=command, **how)
