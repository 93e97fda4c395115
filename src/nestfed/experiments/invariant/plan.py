"""Invariant logistic regression on 16 clients: Figure 1 of "Federated conditional stochastic optimization".

Labels of points are learned from noisy views of them. Accuracy is measured on points without noise; the objective is
known exactly, and so are the minimisers of what the methods really descend on, the objective with m views per point.
Settings are chosen in runs with other seeds, on other points than those of the test.
"""

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jinja2
import matplotlib
import numpy as np
import pandas as pd
import tomli_w
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.optimize import minimize

from nestfed.algorithms import make
from nestfed.experiments.cells import Cell, Trainings, train
from nestfed.experiments.invariant.task import (
    InnerMeanDrawn,
    MeanOfLosses,
    expected_softplus,
    invariant_task,
    true_model,
)
from nestfed.experiments.verdicts import Claim, all_above, all_below, claims_table, markdown_claims
from nestfed.report import figures, tables
from nestfed.report.figures import INK, MUTED, STYLE
from nestfed.report.statistics import Paired, paired
from nestfed.report.style import Look, looks
from nestfed.workbench.results import versions

COMPOSED = {"fcsg": "FCSG", "fcsg-m": "FCSG-M", "acc-fcsg-m": "Acc-FCSG-M"}
CONTRAST = "losses"
TITLES = {**COMPOSED, CONTRAST: "FCSG on the mean of losses"}
CHOSEN_BY = "validation_accuracy"
ALIKE = 0.002  # accuracies no further apart than this are called alike
NO_GAIN = 0.01  # in F; what a method for the composition can gain is 0.3 and more
FIRST_CHOOSING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    dimension: int = 10
    clients: int = 16
    noises: tuple[float, ...] = (1.0, 1.5, 2.0)  # sigma_2 with sigma_1 = 1
    views: tuple[int, ...] = (1, 10, 100)  # m
    rates: tuple[float, ...] = (0.01, 0.005, 0.001)
    betas: tuple[float, ...] = (0.001, 0.01, 0.1, 0.5, 0.9)
    local_steps: int = 50
    first_batches: int = 32
    rounds: int = 1000
    evaluations: int = 40
    seeds: int = 8
    choosing_seeds: int = 2
    validation: int = 10_000
    test: int = 50_000


QUICK = Plan(
    dimension=3, clients=4, noises=(1.0, 2.0), views=(1, 10), rates=(0.05,), betas=(0.5,), local_steps=5,
    first_batches=1, rounds=40, evaluations=8, seeds=3, choosing_seeds=1, validation=400, test=2000,
)  # fmt: skip


def run(folder: Path, command: str, *, quick: bool, progress: bool | None) -> Path:
    experiment = Experiment(folder, QUICK if quick else Plan(), progress)
    experiment.train_all()
    return write_page(experiment, command)


# ------------------------------------------------------------------------------------------------- trainings


@dataclasses.dataclass(frozen=True)
class Experiment(Trainings):
    """The cells: `choose-METHOD`, the whole grid at every noise and number of views, where there is something to
    choose; and `METHOD`, with the chosen settings."""

    plan: Plan

    def names(self) -> list[str]:
        several = [method for method in TITLES if len(self._candidates(method)) > 1]
        return [*(f"choose-{method}" for method in several), *TITLES]

    def part(self, method: str, noise: float, views: int) -> Cell:
        """The training that counts. With one view there is no difference between the composition and the contrast."""
        return only(self.cell("fcsg" if method == CONTRAST and views == 1 else method), noise, views)

    def tried(self, method: str, noise: float, views: int) -> Cell:
        """What was trained for choosing."""
        return only(self.cell(f"choose-{method}"), noise, views)

    def final(self, method: str, noise: float, views: int, metric: str) -> pd.Series:
        return self.part(method, noise, views).final(metric)

    def places(self, method: str) -> list[tuple[float, int]]:
        """(noise, views) of the method's own trainings."""
        views = [m for m in self.plan.views if method != CONTRAST or m > 1]
        return [(noise, m) for noise in self.plan.noises for m in views]

    def _train(self, name: str) -> Cell:
        plan, choosing, method = self.plan, name.startswith("choose-"), name.removeprefix("choose-")
        first, number = (FIRST_CHOOSING_SEED, plan.choosing_seeds) if choosing else (0, plan.seeds)
        words = [
            {"noise": noise, "m": views} | one
            for noise, views in self.places(method)
            for one in (self._candidates(method) if choosing else [self._chosen(method, noise, views)])
        ]
        settings = [(one, self._setting(method, one)) for one in words]
        aside = {"validation": plan.validation} if choosing else {"test": plan.test}
        # Another seed of the task: the points put aside for choosing are not those of the test.
        task = invariant_task(settings[0][1][1], clients=plan.clients, aside=aside, seed=first)
        cell = train(
            settings, task, range(first, first + number), rounds=plan.rounds,
            evaluate_every=plan.rounds // (1 if choosing else plan.evaluations), progress=self.progress, title=name,
        )  # fmt: skip
        # Six decimals are what float32 knows of numbers near 1; the files are a third of the size.
        return cell._replace(metrics={key: np.round(values.astype(float), 6) for key, values in cell.metrics.items()})

    def _candidates(self, method: str) -> list[dict[str, float]]:
        rates = [{"lr": lr} for lr in self.plan.rates]
        if method in ("fcsg", CONTRAST):
            return rates
        return [rate | {"beta": beta} for rate in rates for beta in self.plan.betas]

    def _chosen(self, method: str, noise: float, views: int) -> dict[str, Any]:
        """The settings that validation points prefer."""
        candidates = self._candidates(method)
        if len(candidates) == 1:
            return candidates[0]
        tried = self.tried(method, noise, views)
        return tried.settings[tried.best(CHOSEN_BY)]

    def _setting(self, method: str, words: Mapping[str, Any]) -> tuple[Any, Any]:
        """(algorithm, problem) of these words."""
        momentum = {"beta": words["beta"], "first_batches": self.plan.first_batches} if "beta" in words else {}
        name = "fcsg" if method == CONTRAST else method
        algorithm = make(name, lr=words["lr"], local_steps=self.plan.local_steps, **momentum)
        truth = true_model(self.plan.dimension)
        if method == CONTRAST:
            return algorithm, MeanOfLosses(truth=truth, noise=words["noise"], inner_samples=words["m"])
        return algorithm, InnerMeanDrawn(truth=truth, noise=words["noise"], views=float(words["m"]))


def only(cell: Cell, noise: float, views: int) -> Cell:
    """The settings of a cell with this noise and number of views."""
    rows = [i for i, words in enumerate(cell.settings) if (words["noise"], words["m"]) == (noise, views)]
    return cell._replace(
        settings=[cell.settings[i] for i in rows],
        metrics={name: values[rows] for name, values in cell.metrics.items()},
        diverged=cell.diverged[rows],
    )


# ------------------------------------------------------------------------------------------------- known exactly


def limits_table(plan: Plan) -> pd.DataFrame:
    """The minimisers of the objective with m views, which all methods for the composition descend on, found from its
    exact values and without any sample; one view is also where the mean of losses leads, for every m."""
    rows = []
    with jax.enable_x64(True):
        truth = np.asarray(true_model(plan.dimension), float)
        center, start = jnp.zeros(plan.dimension), truth / np.linalg.norm(truth)
        slope = jax.jit(jax.value_and_grad(lambda x, problem: problem.plug_in_objective(x, center)))
        for noise in plan.noises:
            for views in plan.views:
                problem = InnerMeanDrawn(truth=jnp.asarray(truth), noise=noise, views=float(views))
                both = lambda x, problem=problem: tuple(np.asarray(v) for v in slope(jnp.asarray(x), problem))
                x = minimize(both, start, jac=True, method="BFGS", options={"gtol": 1e-9}).x
                cosine = x @ truth / np.linalg.norm(x) / np.linalg.norm(truth)
                objective = float(problem.objective(jnp.asarray(x), center))
                accuracy = float(1 - np.arccos(min(cosine, 1.0)) / np.pi)
                rows.append(
                    {
                        "noise": noise, "m": views, "F at the minimiser": objective,
                        "its length": float(np.linalg.norm(x)), "its accuracy": accuracy,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def one_point_table() -> pd.DataFrame:
    """One point a = 0.5 with label 1 at x = 2, noise 1: the loss of the mean of m views against the mean of losses."""
    with jax.enable_x64(True):
        at = lambda deviation: float(expected_softplus(jnp.asarray(-1.0), jnp.asarray(deviation)))
        return pd.DataFrame(
            [
                {"m": m, "exact loss": at(0.0), "with the mean of m views": at(2 / m**0.5), "mean of losses": at(2.0)}
                for m in (1, 10, 100)
            ]
        )


# ------------------------------------------------------------------------------------------------- results


def final_table(experiment: Experiment) -> pd.DataFrame:
    """One row per noise, number of views and method: settings, means and spreads over seeds and rounds."""
    rows = []
    for noise in experiment.plan.noises:
        for views in experiment.plan.views:
            for method, title in TITLES.items():
                cell = experiment.part(method, noise, views)
                row = {"noise": noise, "m": views, "method": title, "step size": cell.settings[0]["lr"]}
                row |= {"beta": cell.settings[0].get("beta", np.nan)}
                for metric, name in {"test_accuracy": "test accuracy", "objective": "F", "norm": "length of x"}.items():
                    values = cell.final(metric)
                    row |= {name: values.mean(), f"{name}, std": values.std(ddof=0)}
                over_rounds = late(cell).std(1).mean()
                row |= {"std of accuracy over rounds": over_rounds, "diverged": int((cell.diverged >= 0).sum())}
                rows.append(row)
    return pd.DataFrame(rows)


def choice_table(experiment: Experiment) -> pd.DataFrame:
    """Every setting that was tried, with the means over seeds that its choice could be made by."""
    rows = []
    for method in (name.removeprefix("choose-") for name in experiment.names() if name.startswith("choose-")):
        for noise, views in experiment.places(method):
            tried = experiment.tried(method, noise, views)
            for i, words in enumerate(tried.settings):
                found = {name: tried.metrics[name][i, :, -1].mean() for name in (CHOSEN_BY, "objective")}
                taken = {"diverged": int((tried.diverged[i] >= 0).sum()), "taken": i == tried.best(CHOSEN_BY)}
                rows.append({"method": TITLES[method]} | words | found | taken)
    return pd.DataFrame(rows)


def equal_steps_table(choices: Any, noise: float, views: int) -> pd.DataFrame:
    """Accuracies on validation points of the methods for the composition, with a column for every step size; `choices`
    is the DataFrame of `choice_table`."""
    own = choices[
        (choices["noise"] == noise) & (choices["m"] == views) & choices["method"].isin(list(COMPOSED.values()))
    ]
    own = own.assign(beta=own["beta"].fillna(np.inf), step=[f"step size {lr:g}" for lr in own["lr"]])
    wide = own.pivot(index=["method", "beta"], columns="step", values=CHOSEN_BY).sort_index()
    table = wide.reindex(list(COMPOSED.values()), level="method").reset_index()
    return table.assign(beta=table["beta"].replace(np.inf, np.nan))


def late(cell: Cell) -> np.ndarray:
    """Test accuracies in the second half of the rounds, when the runs have settled: [seeds, evaluations]."""
    values = cell.metrics["test_accuracy"][0]
    return values[:, values.shape[1] // 2 :]


def check_claims(experiment: Experiment) -> list[Claim]:
    plan = experiment.plan
    few, many, quiet, loud = plan.views[0], plan.views[-1], plan.noises[0], plan.noises[-1]

    def gap(method: str, noise: float, metric: str) -> pd.Series:
        """How much is lost with few views against many; positive where few are worse."""
        sign = 1 if metric == "test_accuracy" else -1
        end = lambda views: experiment.final(method, noise, views, metric)
        return sign * (end(many) - end(few))

    needs = {
        f"{title}, {words}": paired(gap(method, loud, metric), gap(method, quiet, metric))
        for method, title in COMPOSED.items()
        for metric, words in (("test_accuracy", "test accuracy"), ("objective", "F"))
    }
    end = lambda method, noise: experiment.final(method, noise, many, "test_accuracy")
    alike = {f"noise {noise:g}": paired(end("fcsg-m", noise), end("fcsg", noise)) for noise in plan.noises}
    between = lambda spread, method: {
        f"m = {views}, noise {noise:g}": paired(
            *(spread(experiment.part(one, noise, views)) for one in (method, "fcsg"))
        )
        for views in plan.views[:-1]
        for noise in plan.noises
    }
    rounds, seeds = between(spread_over_rounds, "fcsg-m"), between(spread_over_seeds, "fcsg-m")
    accelerated = between(spread_over_rounds, "acc-fcsg-m")
    gains = {
        f"noise {noise:g}": paired(gap("fcsg", noise, "objective"), gap(CONTRAST, noise, "objective"))
        for noise in plan.noises
    }
    nothing = pd.Series(0.0, range(plan.seeds))
    stays = {f"noise {noise:g}": paired(gap(CONTRAST, noise, "objective"), nothing) for noise in plan.noises}
    return [
        Claim(
            "1", f"Larger noise needs larger m: what m = {few} loses against m = {many} grows with the noise.",
            f"the loss at noise {loud:g} minus the loss at noise {quiet:g}", needs, all_above(needs, 0.0),
        ),
        Claim(
            "2", f"FCSG and FCSG-M are alike at m = {many}: their accuracies differ by less than {ALIKE:g}.",
            "final test accuracy, FCSG-M minus FCSG", alike, within(alike, ALIKE),
        ),
        Claim(
            "3a", "FCSG-M is steadier than FCSG at small m: over rounds.",
            "standard deviation of a run's test accuracy over the second half of its rounds, FCSG-M minus FCSG",
            rounds, all_below(rounds, 0.0),
        ),
        Claim(
            "3b", "FCSG-M is steadier than FCSG at small m: over seeds.",
            "distance of a run's test accuracy from the mean over seeds, averaged over the second half of its rounds, "
            "FCSG-M minus FCSG", seeds, all_below(seeds, 0.0),
        ),
        Claim(
            "3c", "(Ours.) Acc-FCSG-M, which the figure leaves out, is steadier than FCSG at small m: over rounds.",
            "standard deviation of a run's test accuracy over the second half of its rounds, Acc-FCSG-M minus FCSG",
            accelerated, all_below(accelerated, 0.0),
        ),
        Claim(
            "4a", f"(Ours.) The mean of losses does not improve with m: it gains less than {NO_GAIN:g} in F.",
            f"F at m = {few} minus F at m = {many}, FCSG on the mean of losses", stays, within(stays, NO_GAIN),
        ),
        Claim(
            "4b", "(Ours.) The composition does.",
            f"F at m = {few} minus F at m = {many}: the gain of FCSG minus that of FCSG on the mean of losses", gains,
            all_above(gains, 0.0),
        ),
    ]  # fmt: skip


def spread_over_rounds(cell: Cell) -> pd.Series:
    return pd.Series(late(cell).std(1), cell.seeds)


def spread_over_seeds(cell: Cell) -> pd.Series:
    return pd.Series(np.abs(late(cell) - late(cell).mean(0)).mean(1), cell.seeds)


def within(results: Mapping[str, Paired], reach: float) -> str:
    """Are all differences surely no larger than `reach`?"""
    inside = [abs(r.mean) < reach for r in results.values()]
    clear = [-reach < r.low and r.high < reach for r in results.values()]
    count = f"{sum(inside)} of {len(inside)} cases in the mean, {sum(clear)} with the whole 95 % interval"
    return (
        f"holds ({count})"
        if all(clear)
        else f"{'holds in the mean only' if all(inside) else 'does not hold'} ({count})"
    )


# ------------------------------------------------------------------------------------------------- figures and page


def figure_one(experiment: Experiment) -> Figure:
    """A row per noise, a column per number of views: errors on test points over rounds, on a scale of powers of ten."""
    plan = experiment.plan
    drawn = looks(TITLES, CONTRAST)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.1 * len(plan.noises) + 1.0), layout="constrained")
        grid = np.reshape(
            figure.subplots(len(plan.noises), len(plan.views), sharex=True, sharey=True),
            (len(plan.noises), len(plan.views)),
        )
        for (i, j), axes in np.ndenumerate(grid):
            noise, views = plan.noises[i], plan.views[j]
            for method, look in drawn.items():
                if (noise, views) in experiment.places(method):
                    _draw_errors(axes, experiment.part(method, noise, views), look)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.margins(x=0.01)
            axes.set_title(f"m = {views}" if i == 0 else "")
            if j == 0:
                axes.set_ylabel(f"noise {noise:g}\ntest error", color=INK)
        figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="outside upper left", ncols=len(drawn))
        figure.supxlabel(
            f"communication rounds of {plan.local_steps} local steps; mean over {plan.seeds} seeds, the band spans all "
            "of them", fontsize=9, color=MUTED,
        )  # fmt: skip
    return figure


def _draw_errors(axes: Any, cell: Cell, look: Look) -> None:
    after = cell.round > 0  # at the start every model is as good as chance
    errors = 1 - cell.metrics["test_accuracy"][0][:, after]
    # A thin broken line over a thick one: where two methods coincide, both are seen.
    width, dash = {TITLES["fcsg"]: (3.2, ()), TITLES["fcsg-m"]: (1.8, (3, 1.5))}.get(look.title, (1.8, ()))
    axes.plot(cell.round[after], errors.mean(0), color=look.colour, linewidth=width, dashes=dash, label=look.title)
    axes.fill_between(cell.round[after], errors.min(0), errors.max(0), color=look.colour, alpha=0.13, linewidth=0)


def figure_two(table: Any, limits: Any) -> Figure:
    """F after the last round against the number of views, and where endless training would lead; both arguments are
    DataFrames."""
    noises, views = sorted(table["noise"].unique()), sorted(table["m"].unique())
    drawn = looks({title: title for title in TITLES.values()}, TITLES[CONTRAST])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(3.6 * len(noises), 9.0), 3.9), layout="constrained")
        grid = np.ravel(figure.subplots(1, len(noises), sharey=True))
        for axes, noise in zip(grid, noises, strict=True):
            known = limits[limits["noise"] == noise]
            reached, one = known["F at the minimiser"].to_numpy(float), known["F at the minimiser"].iloc[0]
            dotted = {"color": INK, "linewidth": 1, "linestyle": (0, (1, 2.5)), "zorder": 1}
            axes.plot(known["m"], reached, label="endless training", **dotted)
            axes.plot(known["m"], np.full(len(known), one), **dotted)
            for i, (title, look) in enumerate(drawn.items()):
                own = table[(table["noise"] == noise) & (table["method"] == title)].sort_values("m")
                shifted = own["m"].to_numpy(float) * 1.06 ** (i - 1.5)  # side by side where they coincide
                axes.errorbar(
                    shifted, own["F"], yerr=own["F, std"], color=look.colour, marker=look.marker, markersize=5,
                    linewidth=1.6, elinewidth=1.2, label=title,
                )  # fmt: skip
            axes.set_xscale("log")
            axes.set_xticks(views, [str(view) for view in views])
            axes.minorticks_off()
            axes.set(title=f"Noise {noise:g}", xlabel="m, views per point")
        grid[0].set(ylabel="F after the last round", ylim=(0, 1.08 * max(table["F"].max(), limits.iloc[:, 2].max())))
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(drawn) + 1)
    return figure


def write_page(experiment: Experiment, command: str) -> Path:
    folder, plan = experiment.folder, experiment.plan
    limits, table, choices = limits_table(plan), final_table(experiment), choice_table(experiment)
    claims = check_claims(experiment)
    written = {"final": table, "limits": limits, "tried": choices, "claims": claims_table(claims)}
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, frame in written.items():
        if not frame.empty:
            frame.to_csv(folder / "tables" / f"{name}.csv", index=False)
    figures.write(figure_one(experiment), folder / "figures", "figure1")
    figures.write(figure_two(table, limits), folder / "figures", "objective")
    (folder / "settings.toml").write_text(tomli_w.dumps(dataclasses.asdict(plan)), encoding="utf-8")
    cells = [experiment.cell(name) for name in experiment.names()]
    template = jinja2.Template(
        Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    page = folder / "README.md"
    text = template.render(
        plan=plan, command=command, claims=markdown_claims(claims), table=tables.markdown(shown(table)),
        limits=tables.markdown(shown(limits)), one_point=tables.markdown(one_point_table()), versions=versions(),
        minutes=f"{sum(cell.seconds for cell in cells) / 60:.1f}", first_choosing_seed=FIRST_CHOOSING_SEED,
        equal_steps=None if choices.empty else tables.markdown(
            shown(equal_steps_table(choices, plan.noises[-1], plan.views[0]))
        ),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {', '.join(sorted({cell.machine for cell in cells}))}",
    )  # fmt: skip
    page.write_text(text, encoding="utf-8")
    return page


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Settings as they were written, and a mean with its spread in one column."""
    plain = lambda value: "–" if np.isnan(value) else f"{value:g}"
    columns: dict[str, Sequence[Any]] = {}
    for name in map(str, table.columns):
        values = table[name]
        if name.endswith(", std"):
            continue
        if name in ("noise", "step size", "beta"):
            columns[name] = [plain(value) for value in values]
        elif f"{name}, std" in table:
            pairs = zip(values, table[f"{name}, std"], strict=True)
            columns[name] = [f"{mean:.4f} ± {std:.4f}" for mean, std in pairs]
        else:
            columns[name] = list(values)
    return pd.DataFrame(columns)
