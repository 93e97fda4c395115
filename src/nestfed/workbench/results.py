"""From the traces of a run to its record."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
import pandas as pd

from nestfed.core.identity import identify
from nestfed.report.record import LINE_COLUMNS, Record
from nestfed.report.statistics import find_gains
from nestfed.workbench.stages import DIVERGED, FINISHED, Trace, Trials
from nestfed.workbench.tuning import Chosen, describe

REFERENCES = ("fedavg", "local-only")  # what one would take anyhow, where a run has it


def make_record(
    trials: Trials[Any],
    *,
    settings: dict[str, Any],
    command: str,
    name: str,
    methods: Sequence[str],
    seconds: float,
    started: str,
    tuned: Chosen | None = None,
) -> Record:
    """The record of finished traces."""
    scenario, setups, traces = trials.scenario, trials.setups, trials.traces
    finals, slices, lines, candidates = [], [], [], []
    for trace in traces:
        row: dict[str, Any] = {"method": trace.method, "seed": trace.seed, "status": trace.status}
        row["above_start"] = trace.rise is not None
        if trace.status == FINISHED:
            metrics, parts = scenario.evaluate(setups[trace.seed], trace.left)
            row |= metrics
            slices.append(parts.assign(method=trace.method, seed=trace.seed))
            found = scenario.list_candidates(setups[trace.seed], trace.left)
            candidates += [] if found.empty else [found.assign(method=trace.method, seed=trace.seed)]
            if scenario.chart is not None:
                lines.append(
                    scenario.compute_lines(setups[trace.seed], trace.left).assign(method=trace.method, seed=trace.seed)
                )
        finals.append(row)
    holdings = [scenario.count_holdings(setup).assign(seed=seed) for seed, setup in setups.items()]
    failed = [f"{scenario.method(t.method).title}, seed {t.seed}, diverged." for t in traces if t.status == DIVERGED]
    record = Record(
        settings=settings,
        about={
            "name": name,
            "title": scenario.title,
            "task": scenario.name,
            "command": command,
            "methods": {method: scenario.method(method).title for method in methods},
            "baseline": scenario.baseline if scenario.baseline in methods else methods[0],
            "references": [method for method in REFERENCES if method in methods],
            "select": scenario.select,
            "metrics": [dataclasses.asdict(metric) for metric in scenario.headline],
            "chart": None if scenario.chart is None else dataclasses.asdict(scenario.chart),
            "seeds": list(setups),
            "versions": list_versions(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, JAX on {jax.default_backend()}",
            "data": identify(trials.first.rows.columns),
            "started": started,
            "seconds": round(seconds, 1),
            "status": DIVERGED if failed else FINISHED,
            "notes": [
                *scenario.list_warnings(pd.DataFrame(finals)),
                *failed,
                *_describe_tuning(trials, tuned or {}),
                *_describe_stages(trials),
                *scenario.list_notes(trials.first),
            ],
        }
        | collect_privacy(traces)
        | ({"tuned": tuned} if tuned else {}),
        history=pd.concat([make_history_frame(trials, trace) for trace in traces], ignore_index=True),
        final=pd.DataFrame(finals),
        slices=pd.concat(slices, ignore_index=True) if slices else pd.DataFrame(columns=list(SLICE_COLUMNS)),
        holdings=pd.concat(holdings, ignore_index=True),
        # Of the seed that came furthest: one that diverged early has not seen all stages.
        cost={trace.method: collect_cost(trace) for trace in sorted(traces, key=lambda trace: len(trace.stages))},
        lines=pd.concat(lines, ignore_index=True) if lines else pd.DataFrame(columns=pd.Index(LINE_COLUMNS)),
        candidates=pd.concat(candidates, ignore_index=True) if candidates else pd.DataFrame(),
    )
    return add_gains(record)


def add_gains(record: Record) -> Record:
    """With the sentences of what every method gained."""
    return dataclasses.replace(record, about={**record.about, "gains": find_gains(record)})


def _describe_tuning(trials: Trials[Any], tuned: Chosen) -> list[str]:
    """A line for all methods."""
    said = [f"{trials.scenario.method(name).title}: {describe(found)}" for name, found in tuned.items()]
    by = f"Chosen on validation rows before the run, by {trials.scenario.select}"
    return [f"{by}. {'; '.join(said)}."] if said else []


def _describe_stages(trials: Trials[Any]) -> list[str]:
    """What the stages have to say: once per method, of the first seed that says anything."""
    said: dict[str, list[str]] = {}
    for trace in trials.traces:
        named = lambda stage: f", {stage.name}" if len(trace.stages) > 1 else ""
        found = [f"{named(stage)}, seed {trace.seed}: {note}" for stage in trace.stages for note in stage.notes]
        if found:
            said.setdefault(trace.method, found)
    return [trials.scenario.method(method).title + note for method, notes in said.items() for note in notes]


def collect_privacy(traces: Sequence[Trace]) -> dict[str, Any]:
    """What every method has spent, by its last stage: stages count what was spent before them."""
    spent = {
        trace.method: stage.spending.summarise(stage.rounds_spent)
        for trace in traces
        for stage in trace.stages[-1:]
        if stage.spending is not None
    }
    return {"privacy": spent} if spent else {}


SLICE_COLUMNS = ("kind", "slice", "split", "metric", "value", "method", "seed")


def make_history_frame(trials: Trials[Any], trace: Trace) -> pd.DataFrame:
    """One row per evaluation; rounds, bytes and work are counted through all the stages."""
    frames, before = [], {"round": 0, "bytes": 0, "oracle_calls": 0, "samples": 0}
    for stage in trace.stages:
        rounds = stage.history["round"]
        totals = stage.cost.totals(stage.participants, stage.clients)
        columns = {"round": before["round"] + rounds}
        columns |= {name: before[name] + total[rounds] for name, total in totals.items()}
        for name, values in stage.history.items():
            if values.ndim == 2:
                columns |= dict(zip(trials.scenario.list_entries(name, trials.first), values.T, strict=True))
            elif name != "round":
                columns[name] = values
        frame = pd.DataFrame(columns)
        frame.insert(0, "stage", stage.name)
        frames.append(frame)
        before = {name: int(frame[name].iloc[-1]) for name in before}
    frame = pd.concat(frames, ignore_index=True)
    frame.insert(0, "seed", trace.seed)
    frame.insert(0, "method", trace.method)
    return frame


def collect_cost(trace: Trace) -> dict[str, Any]:
    return {
        stage.name: {
            "start": dataclasses.asdict(stage.cost.start),
            "round": dataclasses.asdict(stage.cost.round),
            "rounds": stage.rounds,
        }
        for stage in trace.stages
    }


def list_versions() -> dict[str, str]:
    packages = ("nestfed", "jax", "jaxlib", "numpy", "optax", "pandas", "pyarrow")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
