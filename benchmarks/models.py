"""Every model of the tasks on tables beside what pooled rows allow: scikit-learn's logistic regression and trees.

    NESTFED_DATA=folder python benchmarks/models.py [--tables adult,default] [--seeds 3] [--out FOLDER]

All see the same splits: pooled ones have all clients' training rows, nestfed's methods train clients by a real column,
with no setting but the model. Numbers are of test rows. The script writes FOLDER/models.json (every number, seed by
seed) and FOLDER/models.md; what is in the JSON file already is kept, so that an interrupted benchmark goes on.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from nestfed.data import TEST, TRAIN, Federated, Table, load
from nestfed.workbench.scenarios.auprc import Auprc
from nestfed.workbench.stages import Budget, StageTrace, run_method, set_up
from nestfed.workbench.task_options import MODELS, AuprcOptions

TABLES: dict[str, dict[str, Any]] = {
    "adult": {"data": "adult", "clients": "workclass"},
    "bank": {"data": "bank", "clients": "job"},
    "bank with the call's duration": {"data": "bank", "clients": "job"},
    "default": {"data": "default-credit", "clients": "EDUCATION"},
}
POOLED = ("LogisticRegression", "HistGradientBoosting")
METHODS = ("fedavg", "fcsg-m")
REFERENCE = "HistGradientBoosting"
BARS = {"accuracy": 0.01, "average precision": 0.01}  # how far below the reference


class WithDuration(Auprc):
    """The bank's table with how long the call took, which is known only after it."""

    @functools.cached_property
    def table(self) -> Table:
        read = load("bank")
        return dataclasses.replace(read, drop=(), client="job", groups=())


def scenario_of(table: str, **options: Any) -> Auprc:
    kind = WithDuration if "duration" in table else Auprc
    return kind(AuprcOptions(**TABLES[table], **options))


def measure(data: Federated, logits: np.ndarray) -> dict[str, float]:
    """Of the test rows."""
    test = data.part == TEST
    label, logits = data.label[test], logits[test]
    return {
        "accuracy": float(np.mean((logits > 0) == label)),
        "average precision": float(average_precision_score(label, logits)),
        "AUROC": float(roc_auc_score(label, logits)),
    }


def fit_pooled(name: str, table: str, seed: int) -> dict[str, float]:
    """Fit scikit-learn's model with its defaults on all clients' training rows."""
    scenario = scenario_of(table)
    data = scenario.set_up(seed).data
    training = data.part == TRAIN
    if name == "LogisticRegression":
        inputs: Any = data.inputs
        model: Any = LogisticRegression(max_iter=1000)
    else:
        frame = scenario.table.frame.reindex(columns=scenario.table.features())
        inputs = frame.apply(lambda column: column if column.dtype.kind in "iuf" else column.astype("category"))
        model = HistGradientBoostingClassifier(categorical_features="from_dtype", random_state=seed)
    model.fit(inputs[training], data.label[training])
    return measure(data, model.decision_function(inputs))


def train(
    method: str, model: str, table: str, seeds: Sequence[int], evaluations: int = 1
) -> Iterator[tuple[int, dict[str, Any], StageTrace]]:
    """Train by a method with the model's defaults, seed after seed: its numbers, and its last stage."""
    scenario = scenario_of(table, model=model)
    trials = set_up(scenario, seeds)
    for seed, setup in trials.setups.items():
        algorithms = scenario.make_algorithms(method, setup, {})
        trace = run_method(trials, method, algorithms, seed, Budget(evaluations=evaluations), progress=False)
        rounds = [(stage.cost.round, stage.done) for stage in trace.stages]
        sent = {
            "exchanges": sum(price.exchanges * done for price, done in rounds),
            "MB": sum(price.bytes_up * done for price, done in rounds) / 1e6,
        }
        yield seed, measure(setup.data, scenario.logits(setup, trace.left)) | sent, trace.stages[-1]


def run(name: str, table: str, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of the JSON file."""
    began = time.monotonic()
    if name in POOLED:
        found = ((seed, fit_pooled(name, table, seed)) for seed in seeds)
    else:
        method, model = name.split(", ")
        found = ((seed, numbers) for seed, numbers, _ in train(method, model, table, seeds))
    for seed, numbers in found:
        yield {"table": table, "model": name, "seed": seed, **numbers, "seconds": round(time.monotonic() - began, 1)}
        began = time.monotonic()


def markdown(frame: pd.DataFrame) -> str:
    row = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([row(frame.columns), row("---" for _ in frame.columns), *map(row, frame.itertuples(index=False))])


def write_page(rows: list[dict[str, Any]]) -> str:
    lines = ["# Models of tables, test rows, default settings", ""]
    shown_columns = [*BARS, "AUROC", "MB", "seconds"]
    every: Any = pd.DataFrame(rows, columns=["table", "model", "seed", *shown_columns])  # pooled ones send nothing
    for table, found in every.groupby("table", sort=False):
        means = found.groupby("model", sort=False)[shown_columns].mean()
        shown = means.round({**dict.fromkeys((*BARS, "AUROC"), 4), "MB": 1, "seconds": 0}).astype(object)
        if REFERENCE in means.index:
            for metric, margin in BARS.items():
                short = means.loc[REFERENCE, metric] - means[metric]
                shown[f"{metric} within {margin:g}"] = ["yes" if value <= margin else "no" for value in short]
        shown.insert(0, "seeds", found.groupby("model", sort=False)["seed"].nunique())
        lines += [f"## {table}", "", markdown(shown.where(shown.notna(), "").reset_index()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help="separated by commas (default all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS), help="of nestfed, separated by commas (default all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="of nestfed, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of what is written")
    given = parser.parse_args()
    ours = [f"{method}, {model}" for method in given.methods.split(",") for model in given.models.split(",")]
    file, page = given.out / "models.json", given.out / "models.md"
    given.out.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for table in given.tables.split(","):
        for name in (*POOLED, *ours):
            done = {row["seed"] for row in rows if (row["table"], row["model"]) == (table, name)}
            missing = [seed for seed in range(given.seeds) if seed not in done]
            for row in run(name, table, missing) if missing else ():
                rows.append(row)
                file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                page.write_text(write_page(rows), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
