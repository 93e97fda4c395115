"""Invariant logistic regression: exact values (T9) against samples and quadrature, the mean of views at once, the
contrast, and the reproduction of Figure 1."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import integrate, stats

from nestfed import Rows, Task, UserError, make, simulate
from nestfed.core.algorithm import Sample
from nestfed.experiments import cells, reproduce
from nestfed.experiments.claims import judge
from nestfed.experiments.invariant import page as invariant
from nestfed.experiments.invariant.plan import CONTRAST, QUICK, Trainings
from nestfed.experiments.invariant.task import (
    InnerMeanDrawn,
    InvariantLogistic,
    MeanOfLosses,
    compute_expected_softplus,
    draw_normal,
    draw_true_model,
    label_points,
    make_invariant_task,
)

TRUTH = jnp.array([1.0, -0.5, 0.25])
X = jnp.array([0.8, -1.0, 0.1])


def softplus(y):
    return np.logaddexp(0, y)


# ------------------------------------------------------------------------------------------------- exact values


@pytest.mark.parametrize(("views", "expected"), [(1, 0.6424954), (10, 0.3518373), (100, 0.3171868)])
def test_t9_the_loss_of_one_point(views, expected):
    """By SciPy's adaptive quadrature. (The 0.6434, 0.3520, 0.3175 of the specification are means of samples.)"""
    found = float(compute_expected_softplus(jnp.asarray(-1.0), jnp.asarray(2 / views**0.5)))
    exact, _ = integrate.quad(lambda z: softplus(-1 - 2 / views**0.5 * z) * stats.norm.pdf(z), -12, 12)
    assert found == pytest.approx(exact, abs=1e-10) and found == pytest.approx(expected, abs=1e-7)


def test_t9_without_noise():
    assert float(compute_expected_softplus(jnp.asarray(-1.0), jnp.asarray(0.0))) == pytest.approx(0.3132617, abs=1e-7)
    row = invariant.tabulate_one_point().iloc[1]
    assert_allclose(row[1:].astype(float), [0.3132617, 0.3518373, 0.6424954], atol=1e-7)


@pytest.mark.parametrize("deviation", [0.01, 1.0, 20.0])
def test_quadrature_holds_for_narrow_and_wide_normals(deviation):
    near = lambda z: softplus(0.3 + deviation * z) * stats.norm.pdf(z)
    exact = sum(integrate.quad(near, *ends, epsabs=1e-13)[0] for ends in ((-12, -1), (-1, 1), (1, 12)))
    assert float(compute_expected_softplus(jnp.asarray(0.3), jnp.asarray(deviation))) == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("kind", [InvariantLogistic, MeanOfLosses])
def test_objectives_are_means_over_samples(kind):
    """Labels, centers, noise and penalty all enter: a million points, five standard errors."""
    problem = kind(truth=TRUTH, noise=1.5, spread=0.7, inner_samples=2, penalty=0.1)
    center, random = np.array([0.3, 0.2, -0.6]), np.random.default_rng(0)
    points = center + 0.7 * random.normal(size=(1_000_000, 3))
    label = np.sign(points @ TRUTH)
    views = points[:, None] + 1.5 * random.normal(size=(1_000_000, 2, 3))
    penalty = 0.1 * np.sum(10 * X**2 / (1 + 10 * X**2))
    exact = softplus(-label * (points @ X))
    if kind is MeanOfLosses:
        drawn = softplus(-label[:, None] * (views @ X)).mean(1)
    else:
        drawn = softplus(-label * (views.mean(1) @ X))
    for found, values in ((problem.objective, exact), (problem.plug_in_objective, drawn)):
        value = float(found(X, jnp.asarray(center)))
        assert value == pytest.approx(values.mean() + penalty, abs=5 * values.std() / 1000)


def test_normal_numbers_are_normal():
    for dtype in (jnp.float32, jnp.float64):
        drawn = np.asarray(draw_normal(jax.random.key(3), (200, 100), dtype))
        assert drawn.shape == (200, 100) and drawn.dtype == dtype and np.isfinite(drawn).all()
        assert stats.kstest(drawn.ravel(), "norm").pvalue > 0.01
        assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.25


# ------------------------------------------------------------------------------------------------- estimates


def gradients(problem, count=4000):
    """Independent gradients at X of one point each, [count, 3]."""
    task = Task.create(problem, Rows.from_clients(constants=jnp.array([[0.2, 0.0, 0.1]])), jnp.zeros(3))
    key, data = jax.random.key(5), task.data.client(0)
    one = lambda i: task.problem.gradient(X, Sample(task.sample(data, jax.random.fold_in(key, i)), key))
    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(count)))


def test_estimates_average_to_the_objective_with_m_views():
    """Literal views, their mean at once (equal in law) and the contrast, each against its exact gradient."""
    settings = {"truth": TRUTH, "noise": 2.0}
    each = InvariantLogistic(**settings, inner_samples=4)
    at_once, contrast = InnerMeanDrawn(**settings, views=4.0), MeanOfLosses(**settings, inner_samples=4)
    center = jnp.array([0.2, 0.0, 0.1])
    found = {}
    for problem in (each, at_once, contrast):
        found[type(problem)] = drawn = gradients(problem)
        exact = jax.grad(problem.plug_in_objective)(X, center)
        assert_allclose(drawn.mean(0), exact, atol=4 * drawn.std(0).max() / len(drawn) ** 0.5)
    exact = [float(problem.plug_in_objective(X, center)) for problem in (each, at_once, contrast)]
    assert exact[0] == exact[1] and exact[2] > exact[0] + 0.1  # so the test above can tell the contrast apart
    for column in range(3):
        assert stats.ks_2samp(found[InvariantLogistic][:, column], found[InnerMeanDrawn][:, column]).pvalue > 0.005


def test_with_one_view_all_three_are_one():
    settings = {"truth": TRUTH, "noise": 2.0}
    of = lambda kind: gradients(kind(**settings), count=5)
    assert_allclose(of(InnerMeanDrawn), of(InvariantLogistic), rtol=1e-12)
    assert_allclose(of(MeanOfLosses), of(InvariantLogistic), rtol=1e-12)


# ------------------------------------------------------------------------------------------------- the task


def test_metrics_of_clients_that_differ():
    """F is the mean over clients' own; accuracy is that of numpy and close to the angle between x and the truth."""
    task = make_invariant_task(InvariantLogistic(truth=TRUTH), clients=4, shift=0.5, aside={"test": 8000}, seed=2)
    run = simulate(make("fcsg", lr=0.1), task, rounds=3, progress=False)
    x, centers = run.server.x, task.data.constants
    last = {name: float(values[-1]) for name, values in run.history.items()}
    own = [float(task.problem.objective(x, center)) for center in centers]
    assert last["objective"] == pytest.approx(np.mean(own)) and np.std(own) > 1e-3
    points = np.asarray(task.aside["test"])
    assert last["test_accuracy"] == pytest.approx(np.mean(np.sign(points @ x) == np.sign(points @ TRUTH)))
    assert last["norm"] == pytest.approx(np.linalg.norm(x))
    assert_allclose(points.reshape(2000, 4, 3).mean(0), centers, atol=5 / 2000**0.5)
    same = make_invariant_task(InvariantLogistic(truth=TRUTH), clients=4, aside={"test": 40_000}).aside["test"]
    angle = np.arccos(X @ TRUTH / np.linalg.norm(X) / np.linalg.norm(TRUTH))
    assert np.mean(label_points(same, X) == label_points(same, TRUTH)) == pytest.approx(1 - angle / np.pi, abs=0.01)


def test_refusals():
    problem = InvariantLogistic(truth=TRUTH)
    with pytest.raises(UserError, match="10 points of 'test' cannot come equally from 4 clients"):
        make_invariant_task(problem, clients=4, aside={"test": 10})
    with pytest.raises(UserError, match="shift=-1"):
        make_invariant_task(problem, shift=-1)
    with pytest.raises(UserError, match="noise=-1"):
        make_invariant_task(InvariantLogistic(truth=TRUTH, noise=-1.0))
    with pytest.raises(UserError, match="inner_samples=2"):
        make_invariant_task(InnerMeanDrawn(truth=TRUTH, inner_samples=2))


# ------------------------------------------------------------------------------------------------- the experiment


def test_the_quick_version_makes_its_page(tmp_path):
    page = reproduce("invariant", out=tmp_path / "out", quick=True, progress=False)
    text = page.read_text()
    assert "{{" not in text and "nestfed reproduce invariant --quick" in text and text.count("Compared:") == 7
    linked = re.findall(r"\]\((.*?)\)", text)
    assert len(linked) == 6 and all((page.parent / path).exists() for path in linked)
    cell = cells.load(page.parent / "cells" / "fcsg.parquet")
    assert cell.settings[0] == {"noise": 1.0, "m": 1, "lr": 0.05} and cell.seeds == [0, 1, 2]
    objective = cell.metrics["objective"]
    assert (objective[:, :, -1] < objective[:, :, 0]).all()


def test_settings_are_chosen_on_other_seeds_and_points(tmp_path):
    plan = dataclasses.replace(QUICK, rates=(1e-6, 0.1), rounds=8, evaluations=2, noises=(1.0,), local_steps=1)
    trainings = Trainings(tmp_path, plan, progress=False)
    cell = trainings.part("fcsg", 1.0, 10)
    tried = cells.load(tmp_path / "cells" / "choose-fcsg.parquet")
    assert tried.seeds == [1000] and set(tried.metrics) == {"objective", "norm", "validation_accuracy"}
    best = int(tried.metrics["validation_accuracy"][2:, 0, -1].argmax())  # two rates with m = 1, then two with m = 10
    assert cell.settings == [tried.settings[2 + best]] and "test_accuracy" in cell.metrics
    assert trainings.part(CONTRAST, 1.0, 1).settings == trainings.part("fcsg", 1.0, 1).settings


def test_limits_are_minimisers():
    """Noise shortens the minimiser, m views make it that of noise / sqrt(m), and its direction is nearly right."""
    plan = dataclasses.replace(QUICK, noises=(0.5, 1.0), views=(1, 4))
    table = invariant.tabulate_limits(plan).set_index(["noise", "m"])
    assert_allclose(table.loc[(1.0, 4)], table.loc[(0.5, 1)], rtol=1e-6)
    assert table.loc[(1.0, 1), "its length"] < table.loc[(0.5, 1), "its length"]
    assert (table["its accuracy"] > 0.99).all()
    problem = InnerMeanDrawn(truth=draw_true_model(3), noise=1.0)
    nearby = [float(problem.plug_in_objective(r * draw_true_model(3), jnp.zeros(3))) for r in np.linspace(0.1, 3, 30)]
    scaled = np.linspace(0.1, 3, 30)[int(np.argmin(nearby))] * np.linalg.norm(draw_true_model(3))
    assert table.loc[(1.0, 1), "its length"] == pytest.approx(scaled, rel=0.15)


PLAN = dataclasses.replace(QUICK, seeds=4)


def made_up(folder, plan=PLAN, *, loss=0.02, apart=0.0, swing=0.5, contrast=0.0):
    """Trainings whose cells fulfil every claim: accuracies that m = 1 lowers with the noise and that swing from
    evaluation to evaluation, half as much with momentum; the contrast stays at the F of m = 1."""
    trainings = Trainings(folder, plan, "nestfed reproduce invariant")
    for name in trainings.names():
        method, choosing = name.removeprefix("choose-"), name.startswith("choose-")
        seeds = [1000] if choosing else [0, 1, 2, 3]
        rates = (0.1, 0.2) if choosing else (0.1,)
        beta = {"beta": 0.5} if "-m" in method else {}
        words = [{"noise": noise, "m": m, "lr": lr} | beta for noise, m in trainings.places(method) for lr in rates]
        wave = 0.001 * (swing if "-m" in method else 1.0) * np.outer(1 + 0.1 * np.arange(4), [1, -1] * 4)
        accuracy, objective = np.zeros((2, len(words), len(seeds), 8))
        for i, one in enumerate(words):
            lost = loss * one["noise"] * (one["m"] == 1)
            accuracy[i] = (0.95 - lost + wave + apart * (method == "fcsg-m") - one["lr"])[: len(seeds)]
            objective[i] = (0.1 + 10 * lost + 0.001 * np.arange(4)[: len(seeds)])[:, None]
            if method == CONTRAST:
                objective[i] += 10 * loss * one["noise"] - contrast
        part = "validation" if choosing else "test"
        cell = cells.Cell(
            settings=words, seeds=seeds, round=np.arange(8), diverged=-np.ones((len(words), len(seeds)), int),
            metrics={f"{part}_accuracy": accuracy, "objective": objective, "norm": objective},
            cost={"exchanges": 1, "bytes_up": 1, "bytes_down": 1, "oracles": {"GRAD": 1}}, seconds=1.0,
            machine="abacus",
        )  # fmt: skip
        cells.save(trainings.path(name), cell)
    return trainings


def test_verdicts_follow_the_numbers(tmp_path):
    def verdicts(name, **changes):
        claims = invariant.check_claims(made_up(tmp_path / name, **changes))
        return {one.claim.number: one.verdict for one in judge(claims)}

    fulfilled = verdicts("all")
    assert set(fulfilled.values()) == {"holds"} and list(fulfilled) == ["1", "2", "3a", "3b", "3c", "4a", "4b"]
    assert verdicts("loss", loss=-0.02)["1"] == "refuted"
    assert verdicts("apart", apart=0.01)["2"] == "refuted"
    swinging = verdicts("swing", swing=2.0)
    assert swinging["3a"] == swinging["3c"] == "refuted" and swinging["3b"] != "holds"
    gaining = verdicts("contrast", contrast=0.5)
    assert gaining["4a"] == gaining["4b"] == "refuted"


def test_page_of_made_up_cells(tmp_path):
    """Numbers put in come out, and all settings that were tried are listed."""
    plan = dataclasses.replace(PLAN, rates=(0.1, 0.2))
    trainings = made_up(tmp_path, plan)
    text = invariant.EXPERIMENT.write(trainings, invariant.make_page(trainings)).read_text()
    assert "abacus" in text and "tables/tried.csv" in text
    tried = pd.read_csv(tmp_path / "tables" / "tried.csv")
    assert len(tried) == 2 * (3 * 4 + 2) and (tried.taken == (tried.lr == 0.1)).all()
    equal = invariant.tabulate_equal_steps(tried, 2.0, 1)
    assert equal["method"].tolist() == ["FCSG", "FCSG-M", "Acc-FCSG-M"] and np.isnan(equal["beta"][0])
    assert_allclose(equal["step size 0.1"] - equal["step size 0.2"], 0.1)
    table = invariant.tabulate_final(trainings).set_index(["noise", "m", "method"])
    row = table.loc[(2.0, 1, "FCSG")]
    assert row["test accuracy"] == pytest.approx(0.95 - 0.04 - 0.001 * 1.15 - 0.1)
    assert row["F"] == pytest.approx(0.1 + 0.4 + 0.0015) and row["diverged"] == 0
    assert row["std of accuracy over rounds"] == pytest.approx(0.001 * 1.15 * (4 / 3) ** 0.5)
    for figure in ("figure1", "objective"):
        assert (tmp_path / "figures" / f"{figure}.png").stat().st_size > 10_000
