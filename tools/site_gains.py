"""What was measured, for the page "which method for my problem": a hook of mkdocs.

On that page a line <!-- measured: robust; dro-images, dro-fairness --> becomes what methods of the task gained and lost
on real tables (benchmarks/results/tables-robust.json, written by benchmarks/tables.py), and below it the differences
that the named experiments found (experiments/NAME/tables/claims.csv, made from their cells). Nothing stands there for a
file that is not there.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from nestfed.report.metrics import Metric
from nestfed.report.statistics import Paired, pair
from nestfed.report.style import format_number, format_numbers
from nestfed.workbench.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- measured: ([\w-]*); ([\w, -]*) -->$", re.M)
MOST_METRICS = 2  # of a task: its first ones


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return MARK.sub(lambda match: measured(ROOT, match[1], match[2].split(", ")), markdown)


def measured(root: Path, task: str, experiments: Iterable[str]) -> str:
    """Everything that is known of a task, as Markdown."""
    results = root / "benchmarks" / "results" / f"tables-{task}.json"
    lines = list(task_lines(task, json.loads(results.read_text())["runs"])) if results.exists() else []
    for name in filter(None, experiments):
        claims = root / "experiments" / name / "tables" / "claims.csv"
        if claims.exists():
            lines += experiment_lines(name, pd.read_csv(claims))
    return "\n".join(lines)


def task_lines(task: str, runs: dict[str, Any]) -> Iterator[str]:
    """A row for every table and method: differences to the baseline, paired by seed."""
    scenario = SCENARIOS[task]
    metrics, baseline = scenario.metrics[:MOST_METRICS], scenario.baseline
    title = scenario.methods[baseline].title
    columns = [f"{metric.title}, {title} | difference to it [95 % interval]" for metric in metrics]
    seeds = {len({row["seed"] for row in run["final"]}) for run in runs.values()}
    yield (
        f"Measured with no setting but the task and the table's columns, {' or '.join(map(str, sorted(seeds)))} seeds; "
        "the commands are below."
    )
    yield ""
    yield f"| table | method | {' | '.join(columns)} |"
    yield f"| --- | --- |{' ---: | --- |' * len(metrics)}"
    for name, run in runs.items():
        final: dict[str, Any] = dict(tuple(pd.DataFrame(run["final"]).set_index("seed").groupby("method", sort=False)))
        for method, own in final.items():
            if method != baseline:
                both = [(own[metric.name], final[baseline][metric.name], metric) for metric in metrics]
                cells = [
                    f"{format_number(theirs.mean())} | {verdict(pair(ours, theirs), metric)}"
                    for ours, theirs, metric in both
                ]
                yield f"| {name} | {scenario.methods[method].title} | {' | '.join(cells)} |"
    yield ""
    yield '??? note "The commands"'
    yield from (f"    - `{run['command']}`" for run in runs.values())
    yield ""


def verdict(found: Paired, metric: Metric) -> str:
    """The difference with its interval, and whether that is a gain."""
    if found.n == 0:
        return "no result"
    if not found.clear:
        word = "no clear difference"
    else:
        word = "**gain**" if (found.mean > 0) == (metric.better == "higher") else "**loss**"
    return f"{interval(found.mean, found.low, found.high)} {word}"


def interval(mean: float, low: float, high: float) -> str:
    """A difference with its interval, where it has one; a line may break between the two alone."""
    shown, least, most = format_numbers([mean, low, high])
    sign = "+" if mean > 0 else ""
    return f"{sign}{shown} [{least},\N{NO-BREAK SPACE}{most}]" if high >= low else f"{sign}{shown}"


def experiment_lines(name: str, claims: pd.DataFrame) -> Iterator[str]:
    """The differences that an experiment found, folded in."""
    if "difference" not in claims:
        return
    yield f'??? note "Measured in the experiment {name}: {len(claims)} differences"'
    yield f"    [The experiment](../experiments/{name}/README.md) says what was claimed and what of it holds."
    yield ""
    yield "    | compared | case | difference [95 % interval] | seeds |"
    yield "    | --- | --- | --- | ---: |"
    for row in claims.to_dict("records"):
        found = interval(row["difference"], row["low"], row["high"])
        yield f"    | {row['compared']} | {row['case']} | {found} | {row['seeds']} |"
    yield ""
