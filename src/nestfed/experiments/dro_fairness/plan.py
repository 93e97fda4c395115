"""Noisy protected groups: equal opportunity on Adult, Figures 3, 5 and 6 of "Federated compositional optimization: the
impact of two-sided learning rates on communication efficiency".

Step sizes are constant, so a run read at any of its rounds is a run of that length: every training is judged after a
number of rounds, as in the paper, and once more after a number of local steps. Settings are chosen on validation rows,
for both occasions separately.
"""

import dataclasses
import functools
import itertools
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import tomli_w

from nestfed.algorithms import make
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.data import load
from nestfed.experiments.cells import Cell, kept, train
from nestfed.experiments.dro_fairness.data import GROUPS, NoisyGroups, adult_noisy_groups
from nestfed.experiments.dro_fairness.task import noisy_groups_task
from nestfed.experiments.verdicts import Claim, all_above, all_below, at_level, claims_table, markdown_claims
from nestfed.report import figures, studies, tables
from nestfed.report.statistics import Paired, paired
from nestfed.report.style import file_name, number, spread
from nestfed.workbench.results import versions

TITLES = {"feddro": "FedDRO", "ds-feddro": "DS-FedDRO", "gcivr": "GCIVR", "unconstrained": "Unconstrained"}
PROPOSED = ("feddro", "ds-feddro")
BETAS = {"feddro": 0.9, "ds-feddro": 0.5}  # with one local step; 0.9 times the server rate would overshoot
SERVER_RATE = 1.3  # both server rates of DS-FedDRO
EPOCH = 10  # steps of GCIVR between its large batches of as many small ones; each of its steps is a round
READINGS: dict[str, dict[str, Any]] = {
    "rows": {}, "positives": {"reference": "positives"}, "scalar": {"form": "scalar"},
}  # fmt: skip
SHOWN = {
    "train_accuracy": "train accuracy", "test_accuracy": "test accuracy", "train_violation": "train violation",
    "test_violation": "test violation",
}  # fmt: skip
COMPARABLE = 0.01  # violations that differ by less


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    thinning: int = 1  # every so many rows of Adult
    clients: int = 8
    batch: int = 16
    noise: float = 0.3
    margin: float = 0.05
    readings: tuple[str, ...] = tuple(READINGS)
    rounds: int = 200
    steps: int = 3200
    paper_rates: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1)
    more_rates: tuple[float, ...] = (0.3, 1.0)
    large_rates: tuple[float, ...] = (3.0,)  # with up to four local steps
    betas: tuple[float, ...] = (0.1, 0.5, 0.9)
    local_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    chosen_with: int = 8  # local steps per round where beta for more than one is chosen
    saturation: int = 32  # local steps above which the paper saw no gain
    few_clients: tuple[int, ...] = (1, 2, 3, 4)
    few_clients_steps: tuple[int, ...] = (1, 4)
    evaluate_every: int = 10  # rounds between the points of a curve up to `rounds`
    seeds: int = 10


QUICK = Plan(
    thinning=24, clients=2, batch=8, readings=("rows",), rounds=20, steps=40, paper_rates=(0.1,), more_rates=(),
    large_rates=(), betas=(0.5,), local_steps=(1, 2), chosen_with=2, saturation=2, few_clients=(1, 2),
    few_clients_steps=(1,), evaluate_every=20, seeds=2,
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool = False, progress: bool | None = None) -> Path:
    """The whole experiment; returns the path of its page."""
    experiment = Experiment(folder, QUICK if quick else Plan(), progress)
    for training in experiment.trainings:
        experiment.cell(training)
        if training in experiment.drawn_finely:
            experiment.curve(training)
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


@dataclasses.dataclass(frozen=True)
class Training:
    """All step sizes and seeds of one method; more is swept with `chosen_with` local steps only."""

    method: str
    clients: int
    local_steps: int = 1
    reading: str = "rows"

    @property
    def name(self) -> str:
        return f"{self.method}-{self.reading}-{self.local_steps}-steps-{self.clients}-clients"

    @property
    def title(self) -> str:
        return f"{TITLES[self.method]}, {self.local_steps} local steps, {self.clients} clients, {self.reading}"

    @property
    def steps_per_round(self) -> int:
        """Steps of a round of the program."""
        return EPOCH if self.method == "gcivr" else self.local_steps

    @property
    def rounds_per_round(self) -> int:
        """What the paper counts as rounds in a round of the program: times that the model is exchanged."""
        return EPOCH if self.method == "gcivr" else 1

    @property
    def chosen_by(self) -> str:
        """The metric whose smallest value chooses settings: what the method minimises, on validation rows."""
        return "validation_loss" if self.method == "unconstrained" else "validation_objective"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The trainings and what came out of them; an occasion to judge one is "rounds" or "steps" (see `Plan`)."""

    folder: Path
    plan: Plan
    progress: bool | None = None
    known: dict[str, Cell] = dataclasses.field(default_factory=dict)  # by the names of their files

    @functools.cached_property
    def trainings(self) -> list[Training]:
        return list(dict.fromkeys([*self.compared, *self.local_steps, *self.few_clients]))

    @functools.cached_property
    def compared(self) -> list[Training]:
        """All methods, one step per round."""
        methods = {"scalar": PROPOSED}
        return [
            Training(method, self.plan.clients, reading=reading)
            for reading in self.plan.readings
            for method in methods.get(reading, TITLES)
            if not (method == "unconstrained" and reading != "rows")  # it ignores the constraints, however read
        ]

    @functools.cached_property
    def local_steps(self) -> list[Training]:
        plan = self.plan
        return [Training(method, plan.clients, steps) for method in PROPOSED for steps in plan.local_steps]

    @functools.cached_property
    def drawn_finely(self) -> list[Training]:
        return [training for training in self.compared if training.reading == "rows"]

    @functools.cached_property
    def few_clients(self) -> list[Training]:
        plan = self.plan
        return [Training("feddro", clients, steps) for clients in plan.few_clients for steps in plan.few_clients_steps]

    def occasions(self, training: Training) -> tuple[str, ...]:
        return ("rounds", "steps") if training.clients == self.plan.clients else ("rounds",)

    def occasion(self, after: str) -> str:
        return f"{self.plan.rounds} rounds" if after == "rounds" else f"{self.plan.steps} steps"

    def cell(self, training: Training) -> Cell:
        """All settings, on the occasions to judge them."""
        last = [self._last(training, after) for after in self.occasions(training)]
        return self._kept(training, training.name, lambda: self._grid(training), last, math.gcd(*last))

    def curve(self, training: Training) -> Cell:
        """The setting chosen for the first occasion once more, evaluated more often."""
        chosen = lambda: [self.cell(training).settings[self.chosen(training, "rounds")]]
        every = self.plan.evaluate_every // training.rounds_per_round
        return self._kept(training, f"{training.name}-curve", chosen, [self._last(training, "rounds")], every)

    def _kept(
        self, training: Training, name: str, grid: Callable[[], list[dict[str, float]]], last: list[int], every: int
    ) -> Cell:
        def make_cell() -> Cell:
            settings = [(words, _algorithm(training, words)) for words in grid()]
            return train(
                settings, self._tasks(training), range(self.plan.seeds), rounds=max(last), evaluate_every=every,
                progress=self.progress, title=training.title,
            )  # fmt: skip

        if name not in self.known:
            self.known[name] = kept(self.folder / "cells" / f"{name}.json", make_cell)
        return self.known[name]

    def chosen(self, training: Training, after: str, rates: Sequence[float] | None = None) -> int:
        """The setting that validation rows prefer on this occasion, perhaps among some step sizes only."""
        cell, place = self.cell(training), self._place(training, after)
        score = cell.metrics[training.chosen_by][:, :, place].mean(1)
        diverged = ((cell.diverged >= 0) & (cell.diverged <= cell.round[place])).any(1)
        allowed = np.array([rates is None or words["lr"] in rates for words in cell.settings])
        usable = allowed & np.isfinite(score) & ~diverged
        if not usable.any():
            raise UserError(f"{training.title}: every setting diverged; the grid needs smaller step sizes.")
        return int(np.where(usable, score, np.inf).argmin())

    def result(self, training: Training, after: str, setting: int | None = None) -> Any:
        """The metrics of a setting on this occasion: a DataFrame by seed."""
        cell, place = self.cell(training), self._place(training, after)
        setting = self.chosen(training, after) if setting is None else setting
        values = {metric: column[setting, :, place] for metric, column in cell.metrics.items()}
        return pd.DataFrame(values, index=pd.Index(cell.seeds, name="seed"))

    def history(self, training: Training, after: str) -> Any:
        """The curves of the chosen setting up to this occasion, against the rounds that the paper counts; the start,
        which is random, is left out."""
        fine = after == "rounds"
        cell, setting = (self.curve(training), 0) if fine else (self.cell(training), self.chosen(training, after))
        history: Any = cell.history(training.method, training.steps_per_round, setting)
        history = history[(history["round"] > 0) & (history["round"] <= self._last(training, after))]
        return history.assign(round=history["round"] * training.rounds_per_round)

    def _last(self, training: Training, after: str) -> int:
        """The last round of the program before this occasion."""
        if after == "rounds":
            return self.plan.rounds // training.rounds_per_round
        return self.plan.steps // training.steps_per_round

    def _place(self, training: Training, after: str) -> int:
        return int(np.flatnonzero(self.cell(training).round == self._last(training, after))[0])

    def _grid(self, training: Training) -> list[dict[str, float]]:
        plan = self.plan
        rates = plan.paper_rates + plan.more_rates + (plan.large_rates if training.local_steps <= 4 else ())
        if training.method not in PROPOSED:
            return [{"lr": lr} for lr in rates]
        if training.local_steps == 1:
            return [{"lr": lr, "beta": BETAS[training.method]} for lr in rates]
        search = Training(training.method, plan.clients, plan.chosen_with)
        if training == search:
            return [{"lr": lr, "beta": beta} for lr, beta in itertools.product(rates, plan.betas)]
        beta = self.cell(search).settings[self.chosen(search, "steps")]["beta"]
        return [{"lr": lr, "beta": beta} for lr in rates]

    def _tasks(self, training: Training) -> list[Task]:
        reads = lambda task: dataclasses.replace(task.problem, **READINGS[training.reading])
        seats = training.clients if training.clients == self.plan.clients else max(self.plan.few_clients)
        tasks = [dataclasses.replace(task, problem=reads(task)) for task in make_tasks(self.plan, training.clients)]
        return [_seated(task, seats) for task in tasks]


@functools.lru_cache(maxsize=1)  # trainings in a row share them, and all together are large
def make_tasks(plan: Plan, clients: int) -> list[Task]:
    """One per seed."""
    return [
        noisy_groups_task(
            _thinned(adult_noisy_groups(clients=clients, seed=seed), plan.thinning), noise=plan.noise,
            margin=plan.margin, batch_size=plan.batch, seed=seed,
        )
        for seed in range(plan.seeds)
    ]  # fmt: skip


def _thinned(data: NoisyGroups, thinning: int) -> NoisyGroups:
    columns = ("inputs", "true_group", "label", "part", "client")
    return dataclasses.replace(data, **{name: getattr(data, name)[::thinning] for name in columns})


def _algorithm(training: Training, words: Mapping[str, float]) -> Any:
    own: dict[str, dict[str, Any]] = {
        "feddro": {"local_steps": training.local_steps},
        "ds-feddro": {
            "local_steps": training.local_steps, "server_lr": SERVER_RATE, "server_inner_lr": SERVER_RATE,
        },
        "gcivr": {"local_steps": EPOCH, "refresh_batches": EPOCH},
        "unconstrained": {},
    }  # fmt: skip
    return make(training.method, **words, **own[training.method])


def _seated(task: Task, seats: int) -> Task:
    """The task with empty seats, which have weight zero and take part in nothing: tasks with different numbers of
    clients then share their program."""
    empty = seats - task.clients
    more = lambda a, value: np.concatenate([a, np.full(empty, value, np.asarray(a).dtype)])
    rows = task.data
    data = dataclasses.replace(
        rows, offsets=more(rows.offsets, 0), sizes=more(rows.sizes, 1), ids=np.arange(seats, dtype=np.int32),
        largest=int(rows.sizes.sum()),
    )  # fmt: skip
    return dataclasses.replace(task, data=data, weights=more(task.weights, 0.0))


# ------------------------------------------------------------------------------------------------- results


def seeds_table(experiment: Experiment) -> pd.DataFrame:
    """One row per training, occasion and seed: all metrics of the chosen setting."""
    rows = []
    for training in experiment.trainings:
        for after in experiment.occasions(training):
            words = experiment.cell(training).settings[experiment.chosen(training, after)]
            about = _about(experiment, training, after) | {"lr": words["lr"], "beta": words.get("beta", np.nan)}
            result = experiment.result(training, after).reset_index()
            rows.append(result.assign(**about)[[*about, *result.columns]])
    return pd.concat(rows, ignore_index=True)


def _about(experiment: Experiment, training: Training, after: str) -> dict[str, Any]:
    return {
        "reading": training.reading, "method": TITLES[training.method], "local steps": training.local_steps,
        "clients": training.clients, "after": experiment.occasion(after),
    }  # fmt: skip


KEYS = ["reading", "method", "local steps", "clients", "after"]


def final_table(seeds: pd.DataFrame) -> pd.DataFrame:
    """Means and standard deviations over seeds of the metrics shown, in the order of the trainings."""
    grouped = seeds.groupby(KEYS, sort=False, dropna=False)
    columns: dict[str, Any] = {"lr": grouped["lr"].first(), "beta": grouped["beta"].first()}
    metrics = SHOWN | {
        "train_proxy_violation": "train violation by proxy", "test_proxy_violation": "test violation by proxy",
        "train_objective": "train objective", "validation_objective": "validation objective",
    }  # fmt: skip
    metrics |= {name: name.replace("_", " ") for name in seeds.columns if name.startswith(("train_tpr", "test_tpr"))}
    for metric, title in metrics.items():
        columns |= {title: grouped[metric].mean(), f"{title}, std": grouped[metric].std(ddof=0)}
    return pd.DataFrame(columns | {"seeds": grouped.size()}).reset_index()


def rows_of(final: Any, experiment: Experiment, trainings: Sequence[Training], *after: str) -> Any:
    """The rows of the final table about these trainings on these occasions."""
    wanted = {tuple(_about(experiment, t, occasion).values()) for t in trainings for occasion in after}
    return final[[key in wanted for key in final[KEYS].itertuples(index=False, name=None)]]


def shown_table(final: Any, keys: Sequence[str], metrics: Sequence[str]) -> str:
    """Rows of the final table as Markdown: mean ± standard deviation."""
    shown = final[list(keys)].map(lambda value: f"{value:g}" if isinstance(value, float) else value)
    for metric in metrics:
        moments = zip(final[metric], final[f"{metric}, std"], final["seeds"], strict=True)
        shown[metric] = [spread(mean, std, n) for mean, std, n in moments]
    return tables.markdown(shown)


def choice_table(experiment: Experiment) -> pd.DataFrame:
    """What was chosen for every training and occasion, and how the best of the paper's step sizes compares."""
    rows = []
    for training in experiment.trainings:
        cell = experiment.cell(training)
        rates = sorted({words["lr"] for words in cell.settings})
        for after in experiment.occasions(training):
            score = lambda setting: experiment.result(training, after, setting)[training.chosen_by].mean()
            best = experiment.chosen(training, after)
            published = experiment.chosen(training, after, experiment.plan.paper_rates)
            words = cell.settings[best]
            rows.append(
                _about(experiment, training, after)
                | {
                    "chosen": ", ".join(f"{key} = {value:g}" for key, value in words.items()),
                    "at the edge": "yes" if words["lr"] in (rates[0], rates[-1]) else "",
                    "score": score(best), "best of the paper's": f"{cell.settings[published]['lr']:g}",
                    "its score": score(published), "settings tried": len(cell.settings),
                    "of them diverged": int((cell.diverged >= 0).any(1).sum()),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def cost_table(experiment: Experiment) -> pd.DataFrame:
    """What a client sends in a round of the paper's count, at one step per round and at the most."""
    rows = []
    several = [t for t in experiment.local_steps if t.local_steps == max(experiment.plan.local_steps)]
    for training in experiment.drawn_finely + several:
        cost, rounds = experiment.cell(training).cost, training.rounds_per_round
        rows.append(
            {
                "method": TITLES[training.method], "local steps": training.local_steps,
                "exchanges": cost["exchanges"] / rounds, "bytes up": cost["bytes_up"] / rounds,
                "bytes down": cost["bytes_down"] / rounds,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def paper_rates_table(experiment: Experiment) -> pd.DataFrame:
    """The methods after the paper's rounds, if only the paper's step sizes are allowed."""
    rows = []
    for training in experiment.compared:
        setting = experiment.chosen(training, "rounds", experiment.plan.paper_rates)
        result = experiment.result(training, "rounds", setting)
        lr = experiment.cell(training).settings[setting]["lr"]
        row: dict[str, Any] = {"reading": training.reading, "method": TITLES[training.method], "lr": f"{lr:g}"}
        for metric, title in SHOWN.items():
            row[title] = spread(result[metric].mean(), result[metric].std(ddof=0), len(result))
        rows.append(row)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------------- claims


def check_claims(experiment: Experiment) -> list[Claim]:
    """What the paper says; the claims on methods once more with positives as the reference."""
    claims = _method_claims(experiment, "rows", "") + _local_steps_claims(experiment) + _clients_claims(experiment)
    return claims + (_method_claims(experiment, "positives", "b") if "positives" in experiment.plan.readings else [])


def _minus(experiment: Experiment, one: Training, other: Training, metric: str, after: str) -> Paired:
    return paired(experiment.result(one, after)[metric], experiment.result(other, after)[metric])


def _method_claims(experiment: Experiment, reading: str, mark: str) -> list[Claim]:
    clients = experiment.plan.clients
    theirs = {
        "gcivr": Training("gcivr", clients, reading=reading), "unconstrained": Training("unconstrained", clients),
    }  # fmt: skip

    def against(baseline: str, measure: str) -> dict[str, Paired]:
        return {
            f"{TITLES[method]}, {part}, {experiment.occasion(after)}": _minus(
                experiment, Training(method, clients, reading=reading), theirs[baseline], f"{part}_{measure}", after
            )
            for method in PROPOSED
            for part in ("train", "test")
            for after in ("rounds", "steps")
        }

    of = "" if not mark else " (positives as the reference)"
    lower, accurate = against("unconstrained", "violation"), against("unconstrained", "accuracy")
    comparable = {case: at_level(r, COMPARABLE) for case, r in against("gcivr", "violation").items()}
    better = against("gcivr", "accuracy")
    first, second = (Training(method, clients, reading=reading) for method in PROPOSED)
    ahead = {
        experiment.occasion(after): _minus(experiment, first, second, "train_accuracy", after)
        for after in ("rounds", "steps")
    }
    return [
        Claim(
            f"1{mark}", f"FedDRO and DS-FedDRO violate the constraints less than unconstrained training{of}.",
            "maximum violation minus that of unconstrained training", lower, all_below(lower, 0.0),
        ),
        Claim(
            f"2{mark}", f"Their accuracy is above that of unconstrained training{of}.",
            "accuracy minus that of unconstrained training", accurate, all_above(accurate, 0.0),
        ),
        Claim(
            f"3{mark}", f"Their violations match those of GCIVR, that is, are at most {COMPARABLE:g} larger{of}.",
            "maximum violation minus GCIVR's", comparable, all_below(comparable, COMPARABLE), level=COMPARABLE,
        ),
        Claim(
            f"4{mark}", f"Their accuracy is above that of GCIVR{of}.", "accuracy minus GCIVR's", better,
            all_above(better, 0.0),
        ),
        Claim(
            f"5{mark}", f"FedDRO is ahead of DS-FedDRO in training accuracy{of}.",
            "train accuracy, FedDRO minus DS-FedDRO", ahead, all_above(ahead, 0.0),
        ),
    ]  # fmt: skip


def _local_steps_claims(experiment: Experiment) -> list[Claim]:
    plan = experiment.plan
    most, enough = max(plan.local_steps), plan.saturation

    def compare(many: int, few: int) -> dict[str, Paired]:
        return {
            f"{TITLES[method]}, {part}, {many} minus {few}": _minus(
                experiment, Training(method, plan.clients, many), Training(method, plan.clients, few),
                f"{part}_accuracy", "rounds",
            )
            for method in PROPOSED
            for part in ("train", "test")
        }  # fmt: skip

    gain, further = compare(enough, 1), compare(most, enough)
    gained = sum(result.low > 0 for result in further.values())
    return [
        Claim(
            "6", f"Accuracy after {plan.rounds} rounds gains with local steps.",
            f"accuracy, {enough} local steps minus 1", gain, all_above(gain, 0.0),
        ),
        Claim(
            "7", f"The gain saturates at about {enough} local steps.",
            f"accuracy, {most} local steps minus {enough}", further,
            f"does not hold ({gained} clear gains)" if gained else f"holds (no clear gain in {len(further)} cases)",
        ),
    ]  # fmt: skip


def _clients_claims(experiment: Experiment) -> list[Claim]:
    plan = experiment.plan
    many, few = max(plan.few_clients), min(plan.few_clients)

    def same_step(steps: int, metric: str) -> Paired:
        """With the settings that the most clients chose."""
        setting = experiment.chosen(Training("feddro", many, steps), "rounds")
        one, other = (experiment.result(Training("feddro", n, steps), "rounds", setting)[metric] for n in (many, few))
        return paired(one, other)

    results = {}
    for steps, part in itertools.product(plan.few_clients_steps, ("train", "test")):
        one, other = (Training("feddro", n, steps) for n in (many, few))
        case = f"{part}, {steps} local step{'s' if steps > 1 else ''}"
        results[f"{case}, each with its step size"] = _minus(experiment, one, other, f"{part}_accuracy", "rounds")
        results[f"{case}, one step size"] = same_step(steps, f"{part}_accuracy")
    return [
        Claim(
            "8", "Accuracy rises with the number of clients.",
            f"FedDRO after {plan.rounds} rounds, accuracy with {many} clients minus {few}", results,
            all_above(results, 0.0),
        )
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- figures and page


def write_figures(experiment: Experiment, final: Any) -> list[str]:
    """All figures; returns their names."""
    plan, written = experiment.plan, []

    def write(figure: Any, *words: str) -> None:
        name = file_name(*words)
        figures.write(figure, experiment.folder / "figures", name)
        written.append(name)

    drawn = [("rows", "rounds", "test"), ("rows", "rounds", "train"), ("rows", "steps", "test")]
    drawn += [("positives", "steps", "test")] if "positives" in plan.readings else []
    for reading, after, part in drawn:
        others = [training for training in experiment.compared if training.reading == reading]
        shown = dict.fromkeys([*others, Training("unconstrained", plan.clients)])
        history = pd.concat([experiment.history(training, after) for training in shown], ignore_index=True)
        metrics = {name: title for name, title in SHOWN.items() if name.startswith(part)}
        about = "communication rounds, one step each; mean and standard deviation over seeds"
        figure = studies.metric_panels(history, metrics, TITLES, xlabel=about)
        write(figure, "methods", reading, experiment.occasion(after), part)
    rows = rows_of(final, experiment, experiment.local_steps, "rounds")
    metrics = ["train accuracy", "test accuracy", "train objective"]
    write(studies.lines_over(rows, "local steps", metrics), "local steps", experiment.occasion("rounds"))
    few = rows_of(final, experiment, experiment.few_clients, "rounds")
    few = few.assign(method=[f"FedDRO, I = {steps}" for steps in few["local steps"]])
    write(studies.lines_over(few, "clients", ["train accuracy", "test accuracy"]), "clients")
    return written


def write_page(experiment: Experiment, command: str) -> Path:
    folder, plan = experiment.folder, experiment.plan
    seeds, claims = seeds_table(experiment), check_claims(experiment)
    final, chosen, published = final_table(seeds), choice_table(experiment), paper_rates_table(experiment)
    written = {
        "seeds": seeds, "final": final, "chosen": chosen, "paper-rates": published, "cost": cost_table(experiment),
        "claims": claims_table(claims),
    }  # fmt: skip
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, frame in written.items():
        frame.to_csv(folder / "tables" / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")
    drawn = write_figures(experiment, final)
    settings = dataclasses.asdict(plan) | {"betas_of_one_step": BETAS, "server_rate": SERVER_RATE, "gcivr_epoch": EPOCH}
    (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    compared = rows_of(final, experiment, experiment.compared, "rounds", "steps")
    local_steps = rows_of(final, experiment, experiment.local_steps, "rounds", "steps")
    local_steps = local_steps.sort_values(["after", "method", "local steps"])
    few = rows_of(final, experiment, experiment.few_clients, "rounds").sort_values(["local steps", "clients"])
    at_equal_steps = rows_of(final, experiment, experiment.local_steps, "steps")["train objective"]
    titles = list(SHOWN.values())
    tpr = [f"test tpr{'' if group is None else ' ' + group}" for group in (None, *GROUPS)]
    cells = [experiment.cell(training) for training in experiment.trainings]
    cells += [experiment.curve(training) for training in experiment.drawn_finely]

    def value(reading: str, method: str, after: str, column: str) -> float:
        """A number of the final table, one step per round."""
        training = Training(method, plan.clients, reading=reading)
        return float(rows_of(final, experiment, [training], after)[column].iloc[0])

    text = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    ).render(
        plan=plan, command=command, epoch=EPOCH, server_rate=SERVER_RATE, betas=BETAS, drawn=drawn, value=value,
        at_equal_steps=at_equal_steps,
        number=number, minutes=f"{sum(cell.seconds for cell in cells) / 60:.1f}",
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {', '.join(sorted({c.machine for c in cells}))}",
        versions=versions(), always_no=1 - load("adult-all").labels().mean(), claims=markdown_claims(claims),
        methods=shown_table(compared, ["reading", "after", "method", "lr"], titles),
        rates=shown_table(
            compared, ["reading", "after", "method"], [*tpr, "train violation by proxy", "test violation by proxy"]
        ),
        local_steps=shown_table(
            local_steps, ["after", "method", "local steps", "lr", "beta"],
            [*titles, "train objective"],
        ),
        clients=shown_table(few, ["local steps", "clients", "lr"], titles),
        published=tables.markdown(published), chosen=tables.markdown(chosen),
        cost=tables.markdown(written["cost"].astype({"exchanges": int, "bytes up": int, "bytes down": int})),
    )  # fmt: skip
    page = folder / "README.md"
    page.write_text(text, encoding="utf-8")
    return page
