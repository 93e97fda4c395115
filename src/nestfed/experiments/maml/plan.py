"""Federated meta-learning: Figures 2 and 3 of "Federated conditional stochastic optimization", and sine waves.

On Omniglot every client holds characters of its own and draws tasks from them, five at a time; an evaluation adapts the
averaged model to tasks of characters that nobody holds. Settings are chosen on validation characters, with one drawing
to adapt on, and kept for five. Sine waves are the same on a problem of seconds.

Settings and seeds of a cell run one after the other in one program: compiling it takes longer than a short training,
and choosing and training share it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import tomli_w

from nestfed.algorithms import make
from nestfed.core.task import Task
from nestfed.experiments.cells import Cell, Trainings, load, train_in_turn
from nestfed.experiments.maml.data import Omniglot, deal_characters, load_omniglot
from nestfed.experiments.maml.task import CONV4, character_task, sine_task
from nestfed.experiments.verdicts import Claim, all_above, all_below, claims_table, markdown_claims
from nestfed.models import ImageModel
from nestfed.report import figures, studies, tables
from nestfed.report.statistics import Paired, paired

TITLES = {
    "fcsg": "FCSG", "fcsg-m": "FCSG-M", "acc-fcsg-m": "Acc-FCSG-M", "local-scgd-conditional": "Local-SCGD",
    "local-scgdm-conditional": "Local-SCGDM",
}  # fmt: skip
PROPOSED, BASELINES = tuple(TITLES)[:3], tuple(TITLES)[3:]
WEIGHTS = {  # the numbers beside the step size: weights of new values in running ones
    "fcsg": (), "fcsg-m": ("beta",), "acc-fcsg-m": ("beta",), "local-scgd-conditional": ("inner_lr",),
    "local-scgdm-conditional": ("inner_lr", "momentum_lr"),
}  # fmt: skip
PHASES = {"alike": "clients alike", "apart": "every client its own phases"}
FAR = 0.05  # "far above": by more than five points of accuracy


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    studies: tuple[str, ...] = ("sine", "omniglot")
    methods: tuple[str, ...] = tuple(TITLES)
    local_steps: int = 10
    weights: tuple[float, ...] = (0.1, 0.5, 0.9)
    seeds: int = 3
    adaptation_steps: int = 3  # in evaluations; training adapts with one
    batch: int = 5  # tasks per step

    clients: int = 16  # on Omniglot
    shots: tuple[int, ...] = (1, 5)
    queries: int = 15
    inner_lr: float = 0.4
    model: ImageModel = dataclasses.replace(CONV4, dtype="bfloat16")
    rates: tuple[float, ...] = (0.1, 0.05, 0.01)
    slow_rates: tuple[float, ...] = (0.1, 0.05)  # of methods with two gradients per step or two weights
    steps: int = 1000
    search_steps: int = 200
    evaluate_every: int = 10  # rounds
    tasks: int = 600  # in an evaluation

    sine_clients: int = 8
    sine_shots: int = 10
    sine_inner_lr: float = 0.03
    sine_rates: tuple[float, ...] = (0.1, 0.05, 0.02)
    sine_steps: int = 3000
    sine_search_steps: int = 1000
    sine_evaluate_every: int = 20
    sine_tasks: int = 200
    sine_seeds: int = 5


QUICK = Plan(  # two methods: compiling takes all the time
    methods=("fcsg", "local-scgd-conditional"),
    weights=(0.5,), seeds=2, clients=2, shots=(1,), queries=2, batch=1, local_steps=1, rates=(0.05,),
    slow_rates=(0.05,),
    model=dataclasses.replace(CONV4, outputs=2, layers=(CONV4.layers[0]._replace(channels=2, kernel=5, stride=8),)),
    steps=2, search_steps=1, evaluate_every=1, tasks=4, sine_clients=2, sine_rates=(0.01, 0.005), sine_steps=4,
    sine_search_steps=2, sine_evaluate_every=2, sine_tasks=4, sine_seeds=2,
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
    experiment = Experiment(folder, QUICK if quick else Plan(), progress)
    experiment.train_all()
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


def name_of(study: str, part: Any, method: str) -> str:
    """A cell's name: `sine-alike-fcsg`, `omniglot-5-fcsg-m`; `omniglot-choose-fcsg` chooses settings."""
    return f"{study}-{part}-{method}"


@dataclasses.dataclass(frozen=True)
class Experiment(Trainings):
    """The cells, STUDY-PART-METHOD; each can be trained alone, after the choice of its settings."""

    plan: Plan
    data: Omniglot | None = None  # None: loaded when it is needed

    def parts(self, study: str) -> list[str]:
        return list(PHASES) if study == "sine" else [str(shots) for shots in self.plan.shots]

    def names(self, study: str | None = None) -> list[str]:
        """All cells, method by method: choosing and the first training share a program."""
        wanted = self.plan.studies if study is None else (study,)
        return [
            name_of(one, part, method)
            for one in wanted
            for method in self.plan.methods
            for part in ("choose", *self.parts(one))
        ]  # fmt: skip

    def _train(self, name: str) -> Cell:
        study, part, method = name.split("-", 2)
        plan, choosing = self.plan, part == "choose"
        grid = self.grid(study, method) if choosing else [self.chosen(study, method)]
        seeds = range(1 if choosing else plan.sine_seeds if study == "sine" else plan.seeds)
        steps = {
            ("sine", True): plan.sine_search_steps, ("sine", False): plan.sine_steps,
            ("omniglot", True): plan.search_steps, ("omniglot", False): plan.steps,
        }[study, choosing]  # fmt: skip
        part = self.parts(study)[0] if choosing else part
        tasks = [self._task(study, part, seed) for seed in seeds]
        cell = train_in_turn(
            [(words, make(method, local_steps=plan.local_steps, **words)) for words in grid], tasks, seeds,
            rounds=steps // plan.local_steps,
            evaluate_every=plan.sine_evaluate_every if study == "sine" else plan.evaluate_every,
            progress=self.progress, title=f"{TITLES[method]}, {study}",
        )  # fmt: skip
        # Test tasks are evaluated all the time, so that choosing and training are one program; they choose nothing.
        hidden = "test_" if choosing else "validation_"
        shown = {name: values for name, values in cell.metrics.items() if not name.startswith(hidden)}
        return cell._replace(metrics=shown)

    def grid(self, study: str, method: str) -> list[dict[str, float]]:
        plan, weights = self.plan, WEIGHTS[method]
        rates = plan.slow_rates if method == "acc-fcsg-m" or len(weights) > 1 else plan.rates
        rates = plan.sine_rates if study == "sine" else rates
        return [
            {"lr": lr, **dict(zip(weights, values, strict=True))}
            for lr in rates
            for values in itertools.product(plan.weights, repeat=len(weights))
        ]

    def chosen(self, study: str, method: str) -> dict[str, float]:
        """The settings with the smallest loss on validation tasks."""
        cell = self.cell(name_of(study, "choose", method))
        return cell.settings[_smallest(cell, "validation_loss")]

    def _task(self, study: str, part: str, seed: int) -> Task:
        plan = self.plan
        if study == "sine":
            return sine_task(
                clients=plan.sine_clients, own_phases=part == "apart", shots=plan.sine_shots,
                inner_lr=plan.sine_inner_lr, batch_size=plan.batch, seed=seed, tasks=plan.sine_tasks,
                steps=plan.adaptation_steps,
            )  # fmt: skip
        characters = deal_characters(self.data or _omniglot(), clients=plan.clients, seed=seed)
        return character_task(
            characters, model=plan.model, shots=int(part), queries=plan.queries, inner_lr=plan.inner_lr,
            batch_size=plan.batch, seed=seed, tasks=plan.tasks, steps=plan.adaptation_steps,
        )  # fmt: skip

    def finished(self) -> dict[str, list[str]]:
        """Study -> the parts of which every method's training is there: what a page can show."""
        done = lambda study, part: all(self.path(name_of(study, part, method)).exists() for method in self.plan.methods)
        found = {s: [p for p in self.parts(s) if done(s, p) and done(s, "choose")] for s in self.plan.studies}
        return {study: parts for study, parts in found.items() if parts}


@functools.cache
def _omniglot() -> Omniglot:
    return load_omniglot()


def _smallest(cell: Cell, metric: str) -> int:
    return cell._replace(metrics={metric: -cell.metrics[metric]}).best(metric)


# ------------------------------------------------------------------------------------------------- results


def final_table(experiment: Experiment, study: str, parts: Sequence[str]) -> pd.DataFrame:
    """One row per training: test scores over seeds, the interval of one seed's mean over tasks, bytes, time."""
    rows = []
    scores = ("loss",) if study == "sine" else ("accuracy", "loss")
    for part, method in itertools.product(parts, experiment.plan.methods):
        cell = load(experiment.path(name_of(study, part, method)))
        row: dict[str, Any] = {"part": _title(study, part), "method": TITLES[method]}
        for score in scores:
            values, reach = cell.final(f"test_{score}"), cell.final(f"test_{score}_interval")
            row |= {
                f"test {score}": values.mean(), f"test {score}, std": values.std(ddof=0),
                f"95 % over tasks of the {score}": reach.mean(),
            }  # fmt: skip
        row |= {
            "MB up per client": cell.cost["bytes_up"] * int(cell.round[-1]) / 1e6,
            "runs that diverged": int((cell.diverged >= 0).sum()), "seeds": len(cell.seeds), "seconds": cell.seconds,
        }  # fmt: skip
        rows.append(row)
    return pd.DataFrame(rows)


def _title(study: str, part: str) -> str:
    return PHASES[part] if study == "sine" else f"{part}-shot"


def choice_table(experiment: Experiment, parts: dict[str, list[str]]) -> pd.DataFrame:
    rows = []
    for study, method in itertools.product(parts, experiment.plan.methods):
        cell = load(experiment.path(name_of(study, "choose", method)))
        best = _smallest(cell, "validation_loss")
        rows.append(
            {
                "data": study, "method": TITLES[method],
                "chosen": ", ".join(f"{key} = {value:g}" for key, value in cell.settings[best].items()),
                "validation loss": cell.metrics["validation_loss"][best, 0, -1],
                "settings tried": len(cell.settings), "of them diverged": int((cell.diverged >= 0).any(1).sum()),
                "seconds": cell.seconds,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def weight_table(experiment: Experiment, parts: dict[str, list[str]]) -> pd.DataFrame:
    """What the search says of the baselines' estimate: the best validation loss with every weight of its new value."""
    rows = []
    for study, method in itertools.product(parts, [name for name in BASELINES if name in experiment.plan.methods]):
        cell = load(experiment.path(name_of(study, "choose", method)))
        losses = cell.metrics["validation_loss"][:, 0, -1]
        best = lambda weight: min(
            (loss for words, loss in zip(cell.settings, losses, strict=True) if words["inner_lr"] == weight),
            key=lambda loss: (np.isnan(loss), loss),
        )
        row = {"data": study, "method": TITLES[method]}
        rows.append(row | {f"inner_lr = {weight:g}": best(weight) for weight in experiment.plan.weights})
    return pd.DataFrame(rows)


def check_claims(experiment: Experiment, parts: dict[str, list[str]]) -> list[Claim]:
    methods = experiment.plan.methods
    final = lambda study, part, method, score: load(experiment.path(name_of(study, part, method))).final(score)

    def against(study: str, part: str, score: str) -> dict[str, Paired]:
        return {
            f"{_title(study, part)}, {TITLES[ours]} minus {TITLES[theirs]}": paired(
                final(study, part, ours, score), final(study, part, theirs, score)
            )
            for ours, theirs in itertools.product(PROPOSED, BASELINES)
            if {ours, theirs} <= set(methods)
        }

    claims = []
    shots = parts.get("omniglot", [])
    for number, part in enumerate(shots, 1):
        found = against("omniglot", part, "test_accuracy")
        claims.append(
            Claim(
                str(number), f"FCSG, FCSG-M and Acc-FCSG-M are far above Local-SCGD and Local-SCGDM with {part} "
                f"drawing{'s' if part != '1' else ''} to adapt on (by more than {100 * FAR:g} points).",
                "final test accuracy", found, all_above(found, FAR), level=FAR,
            )
        )  # fmt: skip
    if len(shots) > 1:
        gain = {
            TITLES[method]: paired(
                final("omniglot", shots[-1], method, "test_accuracy"),
                final("omniglot", shots[0], method, "test_accuracy"),
            )
            for method in methods
        }
        claims.append(
            Claim(
                str(len(shots) + 1), "More drawings to adapt on are better.",
                f"final test accuracy, {shots[-1]}-shot minus {shots[0]}-shot", gain, all_above(gain, 0.0),
            )
        )  # fmt: skip
    for part in parts.get("sine", []):
        found = against("sine", part, "test_loss")
        claims.append(
            Claim(
                str(len(claims) + 1), "(Ours, not the paper's.) On sine waves the loss of the three is below that of "
                f"Local-SCGD and Local-SCGDM, {PHASES[part]}.", "final test loss", found, all_below(found, 0.0),
            )
        )  # fmt: skip
    return claims


# ------------------------------------------------------------------------------------------------- figures and page


def write_page(experiment: Experiment, command: str) -> Path:
    """The page of what is finished."""
    folder, plan, parts = experiment.folder, experiment.plan, experiment.finished()
    claims = check_claims(experiment, parts)
    finals = {study: final_table(experiment, study, done) for study, done in parts.items()}
    written = {f"final-{study}": table for study, table in finals.items()}
    written |= {"chosen": choice_table(experiment, parts), "claims": claims_table(claims)}
    written |= {"weights": weight_table(experiment, parts)}
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, frame in written.items():
        frame.to_csv(folder / "tables" / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")
    for study, done in parts.items():
        score = "loss" if study == "sine" else "accuracy"
        drawn = [(_title(study, part), _history(experiment, study, part)) for part in done]
        titles = {method: TITLES[method] for method in plan.methods}
        shown = studies.panels(drawn, f"test_{score}", titles, ylabel=f"test {score} after adaptation")
        figures.write(shown, folder / "figures", study)
    settings = dataclasses.asdict(plan) | {"model": str(plan.model)}
    (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    names = [name for study in plan.studies for name in experiment.names(study) if experiment.path(name).exists()]
    cells = [load(experiment.path(name)) for name in names]
    missing = [
        f"{study} ({_title(study, part)})"
        for study in plan.studies
        for part in experiment.parts(study)
        if part not in parts.get(study, ())
    ]
    template = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    text = template.render(
        plan=plan, command=command, missing=missing, parts=parts, claims=markdown_claims(claims),
        finals={study: tables.markdown(table) for study, table in finals.items()},
        chosen=tables.markdown(written["chosen"]), weights=tables.markdown(written["weights"]),
        machines=sorted({cell.machine for cell in cells}),
        minutes=f"{sum(cell.seconds for cell in cells) / 60:.0f}",
    )  # fmt: skip
    page = folder / "README.md"
    page.write_text(text, encoding="utf-8")
    return page


def _history(experiment: Experiment, study: str, part: str) -> pd.DataFrame:
    cell = lambda method: load(experiment.path(name_of(study, part, method)))
    return pd.concat(
        [cell(method).history(method, experiment.plan.local_steps) for method in experiment.plan.methods],
        ignore_index=True,
    )
