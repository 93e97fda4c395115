"""What a limit on the gap costs: the candidates of `limited`, trained by clients, beside fairlearn on pooled rows.

    python benchmarks/fairness_limit.py [--seeds 5] [--group-at-prediction] [--metric eqopp] [--out FOLDER]

Adult by sex, three clients. fairlearn's ExponentiatedGradient (several tolerances) and ThresholdOptimizer get the same
rows in one place, those for validation too, because they need none; both are judged by the chances of their random
decisions. The script writes FOLDER/fairness-limit.json (all points, seed by seed) and FOLDER/fairness-limit.png.
Without fairlearn (`pip install fairlearn`) its points are reported as missing.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nestfed import workbench
from nestfed.data.partition import TEST
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios.fair_problems import mark_cells

TOLERANCES = (0.002, 0.01, 0.03)  # of ExponentiatedGradient
CONSTRAINTS = {"eqopp": "TruePositiveRateParity", "eqodds": "EqualizedOdds", "parity": "DemographicParity"}
RULES = {"eqopp": "true_positive_rate_parity", "eqodds": "equalized_odds", "parity": "demographic_parity"}
SETTINGS: dict[str, Any] = {"data": "adult", "group": "sex", "limit": 0.05}


def run_ours(settings: dict[str, Any], seeds: int) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as folder:
        study = workbench.run(
            "fairness",
            algorithm=["limited"],
            seeds=seeds,
            evaluations=1,
            tune=False,
            progress=False,
            out=Path(folder) / "run",
            **settings,
        )
    columns = {"test_gap": "gap", "test_accuracy": "accuracy"}
    name = lambda row: f"{row['way']} {row['number']}"
    found = study.record.candidates.rename(columns=columns)
    return found.assign(name=found.apply(name, axis=1), source="nestfed")[
        ["source", "name", "way", "seed", "gap", "accuracy", "chosen"]
    ]


def run_theirs(settings: dict[str, Any], seeds: int, metric: str) -> pd.DataFrame | None:
    try:
        import fairlearn.postprocessing as post
        import fairlearn.reductions as reductions
    except ImportError:
        return None
    from sklearn.linear_model import LogisticRegression

    scenario = Request.of({"task": "fairness", **settings}).scenario
    rows = []
    for seed in range(seeds):
        data = scenario.set_up(seed).data
        known, test = data.part != TEST, data.part == TEST
        inputs, label, group = data.inputs.astype(float), data.label, data.group
        learner = lambda: LogisticRegression(max_iter=1000)
        fitted = {}
        for tolerance in TOLERANCES:
            constraint = getattr(reductions, CONSTRAINTS[metric])(difference_bound=tolerance)
            model = reductions.ExponentiatedGradient(learner(), constraint, eps=tolerance)
            model.fit(inputs[known], label[known], sensitive_features=group[known])
            fitted[f"ExponentiatedGradient {tolerance:g}"] = model._pmf_predict(inputs[test])[:, 1]
        plain = learner().fit(inputs[known], label[known])
        fitted["LogisticRegression"] = plain.predict(inputs[test]).astype(float)
        rule = post.ThresholdOptimizer(
            estimator=plain, constraints=RULES[metric], prefit=True, predict_method="predict_proba"
        )
        rule.fit(inputs[known], label[known], sensitive_features=group[known])
        fitted["ThresholdOptimizer"] = rule._pmf_predict(inputs[test], sensitive_features=group[test])[:, 1]
        for name, chance in fitted.items():
            rows.append(
                {"source": "fairlearn", "name": name, "way": name.split()[0], "seed": seed, "chosen": False}
                | judge(chance, label[test], group[test], len(data.group_names), metric)
            )
    return pd.DataFrame(rows)


def judge(chance: np.ndarray, label: np.ndarray, group: np.ndarray, groups: int, metric: str) -> dict[str, float]:
    """Of decisions that are positive with a chance."""
    inside = np.asarray(mark_cells(label, group, groups, metric)).astype(float)
    rates = inside @ chance / inside.sum(-1)
    right = np.where(label == 1, chance, 1 - chance)
    return {"gap": float(np.ptp(rates, axis=-1).max()), "accuracy": float(right.mean())}


def compare(points: pd.DataFrame) -> list[dict[str, Any]]:
    """For every point of fairlearn: is there one of ours that is not worse in either number, within one standard error
    of the differences between the two, seed by seed?"""
    tables = {column: points.pivot(index="seed", columns="name", values=column) for column in ("gap", "accuracy")}
    ours = points.loc[points["source"] == "nestfed", "name"].unique()
    found = []
    for name in points.loc[points["source"] == "fairlearn", "name"].unique():
        verdicts = []
        for own in ours:
            more_gap = tables["gap"][own] - tables["gap"][name]
            less_accuracy = tables["accuracy"][name] - tables["accuracy"][own]
            excess = [
                float(d.mean()) - float(d.std(ddof=1)) / len(d) ** 0.5 if len(d) > 1 else float(d.mean())
                for d in (more_gap, less_accuracy)
            ]
            verdicts.append((max(excess), own, float(more_gap.mean()), float(less_accuracy.mean())))
        worst, own, more_gap, less_accuracy = min(verdicts)
        found.append(
            {
                "point": name,
                "nearest": own,
                "more gap": more_gap,
                "less accuracy": less_accuracy,
                "dominated": worst > 0,
            }
        )
    return found


def draw(points: pd.DataFrame, metric: str) -> Figure:
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.subplots()
    for (source, way), own in points.groupby(["source", "way"], sort=False):
        means = own.groupby("name", sort=False)[["gap", "accuracy"]].mean()
        errors = own.groupby("name", sort=False)[["gap", "accuracy"]].sem().fillna(0)
        axes.errorbar(
            means["gap"],
            means["accuracy"],
            xerr=errors["gap"],
            yerr=errors["accuracy"],
            fmt="o-" if source == "nestfed" else "s",
            markersize=6,
            linewidth=1.2,
            elinewidth=0.8,
            label=f"{way} ({source}{', pooled rows' if source == 'fairlearn' else ', 3 clients'})",
        )
    axes.set(
        xlabel=f"test gap, {metric} (lower is better)",
        ylabel="test accuracy (higher is better)",
        title=f"Adult by sex, means over {points['seed'].nunique()} seeds; bars are standard errors",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds (default 5)")
    parser.add_argument("--metric", choices=sorted(CONSTRAINTS), default="eqopp")
    parser.add_argument("--group-at-prediction", action="store_true", help="thresholds by group too")
    parser.add_argument("--steps", type=int, default=2000, help="local steps of every stage (default 2000)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of what is written")
    given = parser.parse_args()
    settings = SETTINGS | {
        "metric": given.metric,
        "group_at_prediction": given.group_at_prediction,
        "steps": given.steps,
    }
    warnings.filterwarnings("ignore")
    theirs = run_theirs(settings, given.seeds, given.metric)
    points = pd.concat([run_ours(settings, given.seeds), *([] if theirs is None else [theirs])], ignore_index=True)
    content: dict[str, Any] = {"settings": settings, "points": json.loads(points.to_json(orient="records"))}
    content["fairlearn"] = "missing: pip install fairlearn" if theirs is None else compare(points)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "fairness-limit.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(points, given.metric).savefig(given.out / "fairness-limit.png", dpi=150)
    means = points.groupby(["source", "name"], sort=False)[["gap", "accuracy"]]
    print(means.mean().join(means.sem().add_suffix(" s.e.")).round(4).to_string())
    print(pd.DataFrame(content["fairlearn"]).round(4).to_string() if theirs is not None else content["fairlearn"])


if __name__ == "__main__":
    main()
