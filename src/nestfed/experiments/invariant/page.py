"""Invariant logistic regression: from the cells to the page, and what is known exactly."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.optimize import minimize

from nestfed.experiments.cells import Cell
from nestfed.experiments.claims import Case, Claim, above, below, compare, within
from nestfed.experiments.frame import Experiment, Page
from nestfed.experiments.invariant.plan import (
    CHOSEN_BY,
    COMPOSED,
    CONTRAST,
    FIRST_CHOOSING_SEED,
    QUICK,
    TITLES,
    Plan,
    Trainings,
)
from nestfed.experiments.invariant.task import InnerMeanDrawn, compute_expected_softplus, draw_true_model
from nestfed.report.figures import INK, MUTED, STYLE
from nestfed.report.statistics import compute_half_width
from nestfed.report.style import Look, choose_looks

ALIKE = 0.002  # accuracies no further apart than this are called alike
NO_GAIN = 0.01  # in F; what a method for the composition can gain is 0.3 and more


def make_page(trainings: Trainings) -> Page:
    plan = trainings.plan
    limits, final, tried = tabulate_limits(plan), tabulate_final(trainings), tabulate_choices(trainings)
    equal_steps = pd.DataFrame() if tried.empty else tabulate_equal_steps(tried, plan.noises[-1], plan.views[0])
    return Page(
        tables={"final": final, "limits": limits, "tried": tried},
        figures={
            "figure1": functools.partial(draw_figure_one, trainings),
            "objective": functools.partial(draw_figure_two, final, limits, plan.seeds),
        },
        claims=check_claims(trainings),
        words={
            "one_point": tabulate_one_point(),
            "equal_steps": show_settings(equal_steps),
            "first_choosing_seed": FIRST_CHOOSING_SEED,
        },
        shown={"final": show_settings(final), "limits": show_settings(limits)},
    )


# ------------------------------------------------------------------------------------------------- known exactly


def tabulate_limits(plan: Plan) -> pd.DataFrame:
    """The minimisers of the objective with m views, which all methods for the composition descend on, found from its
    exact values and without any sample; one view is also where the mean of losses leads, for every m."""
    rows = []
    with jax.enable_x64(True):
        truth = np.asarray(draw_true_model(plan.dimension), float)
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
                        "noise": noise,
                        "m": views,
                        "F at the minimiser": objective,
                        "its length": float(np.linalg.norm(x)),
                        "its accuracy": accuracy,
                    }
                )
    return pd.DataFrame(rows)


def tabulate_one_point() -> pd.DataFrame:
    """One point a = 0.5 with label 1 at x = 2, noise 1: the loss of the mean of m views against the mean of losses."""
    with jax.enable_x64(True):
        at = lambda deviation: float(compute_expected_softplus(jnp.asarray(-1.0), jnp.asarray(deviation)))
        return pd.DataFrame(
            [
                {"m": m, "exact loss": at(0.0), "with the mean of m views": at(2 / m**0.5), "mean of losses": at(2.0)}
                for m in (1, 10, 100)
            ]
        )


# ------------------------------------------------------------------------------------------------- results


def tabulate_final(trainings: Trainings) -> pd.DataFrame:
    """One row per noise, number of views and method: settings, means and spreads over seeds and rounds."""
    rows = []
    for noise in trainings.plan.noises:
        for views in trainings.plan.views:
            for method, title in TITLES.items():
                cell = trainings.part(method, noise, views)
                row = {"noise": noise, "m": views, "method": title, "step size": cell.settings[0]["lr"]}
                row |= {"beta": cell.settings[0].get("beta", np.nan)}
                for metric, name in {"test_accuracy": "test accuracy", "objective": "F", "norm": "length of x"}.items():
                    row |= cell.moments(metric, name)
                over_rounds = select_late(cell).std(1, ddof=1).mean()
                row |= {"std of accuracy over rounds": over_rounds, "diverged": int((cell.diverged >= 0).sum())}
                rows.append(row)
    return pd.DataFrame(rows)


def tabulate_choices(trainings: Trainings) -> pd.DataFrame:
    """Every setting that was tried, with the means over seeds that its choice could be made by."""
    rows = []
    for method in (name.removeprefix("choose-") for name in trainings.names() if name.startswith("choose-")):
        for noise, views in trainings.places(method):
            tried = trainings.tried(method, noise, views)
            for i, words in enumerate(tried.settings):
                found = {name: tried.metrics[name][i, :, -1].mean() for name in (CHOSEN_BY, "objective")}
                taken = {"diverged": int((tried.diverged[i] >= 0).sum()), "taken": i == tried.best(CHOSEN_BY)}
                rows.append({"method": TITLES[method]} | words | found | taken)
    return pd.DataFrame(rows)


def tabulate_equal_steps(choices: Any, noise: float, views: int) -> pd.DataFrame:
    """Accuracies on validation points of the methods for the composition, with a column for every step size; `choices`
    is the DataFrame of `tabulate_choices`."""
    own = choices[
        (choices["noise"] == noise) & (choices["m"] == views) & choices["method"].isin(list(COMPOSED.values()))
    ]
    own = own.assign(beta=own["beta"].fillna(np.inf), step=[f"step size {lr:g}" for lr in own["lr"]])
    wide = own.pivot(index=["method", "beta"], columns="step", values=CHOSEN_BY).sort_index()
    table = wide.reindex(list(COMPOSED.values()), level="method").reset_index()
    return table.assign(beta=table["beta"].replace(np.inf, np.nan))


def select_late(cell: Cell) -> np.ndarray:
    """Test accuracies in the second half of the rounds, when the runs have settled: [seeds, evaluations]."""
    values = cell.metrics["test_accuracy"][0]
    return values[:, values.shape[1] // 2 :]


def check_claims(trainings: Trainings) -> list[Claim]:
    plan = trainings.plan
    few, many, quiet, loud = plan.views[0], plan.views[-1], plan.noises[0], plan.noises[-1]

    def gap(method: str, noise: float, metric: str) -> pd.Series:
        """How much is lost with few views against many; positive where few are worse."""
        sign = 1 if metric == "test_accuracy" else -1
        end = lambda views: trainings.final(method, noise, views, metric)
        return sign * (end(many) - end(few))

    needs = {
        f"{title}, {words}": compare(gap(method, loud, metric), gap(method, quiet, metric))
        for method, title in COMPOSED.items()
        for metric, words in (("test_accuracy", "test accuracy"), ("objective", "F"))
    }
    end = lambda method, noise: trainings.final(method, noise, many, "test_accuracy")
    alike = {f"noise {noise:g}": compare(end("fcsg-m", noise), end("fcsg", noise)) for noise in plan.noises}

    def between(spread: Callable[[Cell], pd.Series], method: str) -> dict[str, Case]:
        of = lambda one, noise, views: spread(trainings.part(one, noise, views))
        return {
            f"m = {views}, noise {noise:g}": compare(of(method, noise, views), of("fcsg", noise, views))
            for views in plan.views[:-1]
            for noise in plan.noises
        }

    rounds, seeds = between(measure_spread_over_rounds, "fcsg-m"), between(measure_spread_over_seeds, "fcsg-m")
    accelerated = between(measure_spread_over_rounds, "acc-fcsg-m")
    gains = {
        f"noise {noise:g}": compare(gap("fcsg", noise, "objective"), gap(CONTRAST, noise, "objective"))
        for noise in plan.noises
    }
    nothing = pd.Series(0.0, range(plan.seeds))
    stays = {f"noise {noise:g}": compare(gap(CONTRAST, noise, "objective"), nothing) for noise in plan.noises}
    return [
        Claim(
            "1",
            f"Larger noise needs larger m: what m = {few} loses against m = {many} grows with the noise.",
            f"the loss at noise {loud:g} minus the loss at noise {quiet:g}",
            above(0),
            needs,
        ),
        Claim(
            "2",
            f"FCSG and FCSG-M are alike at m = {many}.",
            "final test accuracy, FCSG-M minus FCSG",
            within(ALIKE),
            alike,
            reading=f"Alike: within {ALIKE:g}.",
        ),
        Claim(
            "3a",
            "FCSG-M is steadier than FCSG at small m: over rounds.",
            "standard deviation of a run's test accuracy over the second half of its rounds, FCSG-M minus FCSG",
            below(0),
            rounds,
        ),
        Claim(
            "3b",
            "FCSG-M is steadier than FCSG at small m: over seeds.",
            "distance of a run's test accuracy from the mean over seeds, averaged over the second half of its rounds, "
            "FCSG-M minus FCSG",
            below(0),
            seeds,
        ),
        Claim(
            "3c",
            "Acc-FCSG-M, which the figure leaves out, is steadier than FCSG at small m: over rounds.",
            "standard deviation of a run's test accuracy over the second half of its rounds, Acc-FCSG-M minus FCSG",
            below(0),
            accelerated,
            ours=True,
        ),
        Claim(
            "4a",
            "The mean of losses does not improve with m.",
            f"F at m = {few} minus F at m = {many}, FCSG on the mean of losses",
            within(NO_GAIN),
            stays,
            ours=True,
            reading=f"Does not improve: F changes by less than {NO_GAIN:g}.",
        ),
        Claim(
            "4b",
            "The composition does.",
            f"F at m = {few} minus F at m = {many}: the gain of FCSG minus that of FCSG on the mean of losses",
            above(0),
            gains,
            ours=True,
        ),
    ]


def measure_spread_over_rounds(cell: Cell) -> pd.Series:
    return pd.Series(select_late(cell).std(1, ddof=1), cell.seeds)


def measure_spread_over_seeds(cell: Cell) -> pd.Series:
    return pd.Series(np.abs(select_late(cell) - select_late(cell).mean(0)).mean(1), cell.seeds)


# ------------------------------------------------------------------------------------------------- figures and page


def draw_figure_one(trainings: Trainings) -> Figure:
    """A row per noise, a column per number of views: errors on test points over rounds, on a scale of powers of ten."""
    plan = trainings.plan
    drawn = choose_looks(TITLES, CONTRAST)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.1 * len(plan.noises) + 1.0), layout="constrained")
        grid = np.reshape(
            figure.subplots(len(plan.noises), len(plan.views), sharex=True, sharey=True),
            (len(plan.noises), len(plan.views)),
        )
        for (i, j), axes in np.ndenumerate(grid):
            noise, views = plan.noises[i], plan.views[j]
            for method, look in drawn.items():
                if (noise, views) in trainings.places(method):
                    _draw_errors(axes, trainings.part(method, noise, views), look)
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
            f"communication rounds of {plan.local_steps} local steps; mean over {plan.seeds} seeds with its 95 % "
            "interval",
            fontsize=9,
            color=MUTED,
        )
    return figure


def _draw_errors(axes: Any, cell: Cell, look: Look) -> None:
    after = cell.round > 0  # at the start every model is as good as chance
    errors = 1 - cell.metrics["test_accuracy"][0][:, after]
    # A thin broken line over a thick one: where two methods coincide, both are seen.
    width, dash = {TITLES["fcsg"]: (3.2, ()), TITLES["fcsg-m"]: (1.8, (3, 1.5))}.get(look.title, (1.8, ()))
    axes.plot(cell.round[after], errors.mean(0), color=look.colour, linewidth=width, dashes=dash, label=look.title)
    reach = compute_half_width(errors.std(0), len(errors))
    low = np.maximum(errors.mean(0) - reach, errors.min(0) / 2)  # an interval may reach below 0, which has no logarithm
    axes.fill_between(cell.round[after], low, errors.mean(0) + reach, color=look.colour, alpha=0.2, linewidth=0)


def draw_figure_two(table: Any, limits: Any, seeds: int) -> Figure:
    """F after the last round against the number of views, with its interval over so many seeds, and where endless
    training would lead; the first two arguments are DataFrames."""
    noises, views = sorted(table["noise"].unique()), sorted(table["m"].unique())
    drawn = choose_looks({title: title for title in TITLES.values()}, TITLES[CONTRAST])
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
                    shifted,
                    own["F"],
                    yerr=compute_half_width(own["F, std"] * np.sqrt((seeds - 1) / seeds), seeds),
                    color=look.colour,
                    marker=look.marker,
                    markersize=5,
                    linewidth=1.6,
                    elinewidth=1.2,
                    label=title,
                )
            axes.set_xscale("log")
            axes.set_xticks(views, [str(view) for view in views])
            axes.minorticks_off()
            axes.set(title=f"Noise {noise:g}", xlabel="m, views per point")
        grid[0].set(ylabel="F after the last round", ylim=(0, 1.08 * max(table["F"].max(), limits.iloc[:, 2].max())))
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(drawn) + 1)
    return figure


def show_settings(table: pd.DataFrame) -> pd.DataFrame:
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


EXPERIMENT = Experiment("invariant", "FCSG", Trainings, Plan(), QUICK, make_page)
