"""A limit on the gap: thresholds and bounds against independent computations, the choice, and a run from the command
line."""

import itertools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest

import nestfed
from nestfed import cli
from nestfed.core.rows import Rows
from nestfed.core.task import Task
from nestfed.data import VALIDATION
from nestfed.data.partition import TEST
from nestfed.report.record import Record
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios import TabularModel
from nestfed.workbench.scenarios.fair_limit import (
    bound_gap,
    choose,
    choose_thresholds,
    compute_logit,
    count,
    count_scores,
    describe,
)
from nestfed.workbench.scenarios.fair_problems import PRICE_SPEED, GapWeights, LimitedGaps
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.task_options import FairnessOptions

METRICS = ("eqopp", "eqodds", "parity")


def linear(theta, inputs):
    return inputs @ theta


# ------------------------------------------------------------------------------------------------- thresholds by group

SCORE = np.array([0.95, 0.85, 0.75, 0.65, 0.35, 0.25, 0.90, 0.55, 0.45, 0.40, 0.20, 0.10])
LABEL = np.array([1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0])
GROUP = np.repeat([0, 1], 6)


def gap_by_hand(decisions, metric):
    """By plain loops over the groups."""
    wanted = {"eqopp": [1], "eqodds": [1, 0], "parity": [None]}[metric]
    gaps = []
    for label in wanted:
        rows = np.ones(len(LABEL), bool) if label is None else label == LABEL
        rates = [decisions[rows & (a == GROUP)].mean() for a in (0, 1)]
        gaps.append(abs(rates[0] - rates[1]))
    return max(gaps)


def test_thresholds_of_a_tiny_table_are_those_worked_out_by_hand():
    """Group 0 alone is best served from 0.65 on (5 of 6 right, all of its three positives found), group 1 from 0.9 on
    (4 of 6, one of three), or from 0.45 on (4 of 6, two of three). Equal rates: three of three costs group 1 one row
    more (0.2 on: 3 right), two of three costs none of group 0's rows (from 0.85 on: 5 right) and none of group 1's."""
    counts = count_scores(SCORE, LABEL, GROUP, 2)
    chosen = choose_thresholds(counts, "eqopp", 0.0)
    decisions = SCORE > 1 / (1 + np.exp(-compute_logit(chosen)))[GROUP] - 1e-9
    assert decisions.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert (decisions == LABEL).sum() == 9 and gap_by_hand(decisions, "eqopp") == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("limit", [0.0, 0.2, 0.4, 1.0])
def test_no_pair_of_thresholds_within_the_limit_is_right_more_often(metric, limit):
    cuts = np.append(np.unique(SCORE), 2.0)
    every = [SCORE >= np.where(GROUP == 0, a, b) for a, b in itertools.product(cuts, cuts)]
    best = max((d == LABEL).sum() for d in every if gap_by_hand(d, metric) <= limit + 1e-9)
    chosen = choose_thresholds(count_scores(SCORE, LABEL, GROUP, 2), metric, limit)
    decisions = SCORE > 1 / (1 + np.exp(-compute_logit(chosen)))[GROUP] - 1e-9
    assert (decisions == LABEL).sum() == best and gap_by_hand(decisions, metric) <= limit + 1e-9


def test_histograms_of_clients_add_up():
    first = np.arange(len(SCORE)) % 2 == 0
    parts = [count_scores(SCORE[rows], LABEL[rows], GROUP[rows], 2) for rows in (first, ~first)]
    np.testing.assert_array_equal(sum(parts), count_scores(SCORE, LABEL, GROUP, 2))


# ------------------------------------------------------------------------------------------------- the bound


def test_the_bound_is_newcombes_of_the_worst_pair():
    hits, cases, confidence = np.array([30.0, 55.0, 4.0]), np.array([60.0, 90.0, 9.0]), 0.95
    bounds = []
    for a, b in itertools.permutations(range(3), 2):
        wilson = [
            binomtest(int(hits[i]), int(cases[i])).proportion_ci(2 * confidence - 1, method="wilson") for i in (a, b)
        ]
        rates = hits / cases
        reach = np.hypot(wilson[0].high - rates[a], rates[b] - wilson[1].low)
        bounds.append(rates[a] - rates[b] + reach)
    assert bound_gap(hits[None], cases[None], confidence) == pytest.approx(max(bounds), abs=1e-9)
    others = np.array([20.0, 60.0, 8.0])
    two_kinds = bound_gap(np.stack([hits, others]), np.stack([cases, cases]), confidence)
    assert two_kinds == pytest.approx(max(max(bounds), bound_gap(others[None], cases[None], confidence)))


def test_nothing_can_be_said_of_a_group_without_rows():
    assert bound_gap(np.array([[5.0, 0.0]]), np.array([[10.0, 0.0]]), 0.95) == 1


@pytest.mark.parametrize("rates", [(0.5, 0.5, 0.5), (0.6, 0.5), (0.1, 0.1), (0.9, 0.7, 0.8)])
def test_the_bound_holds_as_often_as_it_says(rates):
    random = np.random.default_rng(0)
    cases = np.array([80.0, 150.0, 60.0])[: len(rates)]
    truth = max(rates) - min(rates)
    held = [
        bound_gap(random.binomial(cases.astype(int), rates)[None].astype(float), cases[None], 0.9) >= truth - 1e-12
        for _ in range(1000)
    ]
    assert np.mean(held) > 0.9 - 3 * np.sqrt(0.9 * 0.1 / 1000)


# ------------------------------------------------------------------------------------------------- the choice


def some_rows(number=6000):
    """Two groups, the second of which has its positives lower; the parts in turn."""
    random = np.random.default_rng(1)
    group, label = random.integers(0, 2, number), random.integers(0, 2, number)
    score = 1.5 * label - 0.75 - 0.6 * group * label + random.normal(size=number)
    inputs = np.stack([score, group * label], 1)  # the second helps the second group's positives
    return {"inputs": inputs, "label": label, "group": group, "part": np.arange(number) % 3}


def some_problem(metric="eqopp"):
    """Models that differ in how much they help; the last one does not."""
    helps = np.array([0.6, 0.3, 0.0])
    return SimpleNamespace(
        limits=np.array([0.0, 0.1, 1.0]),
        groups=2,
        metric=metric,
        model=lambda theta, inputs: inputs @ theta,
        models=lambda server: np.stack([np.ones(3), helps], 1),
    )


def recount(rows, logits, part):
    inside = rows["part"] == part
    return count((logits > 0)[None, inside], rows["label"][inside], rows["group"][inside], 2, "eqopp")


@pytest.mark.parametrize("by_group", [False, True])
def test_the_chosen_model_keeps_the_limit_on_validation_rows(by_group):
    rows, limit = some_rows(), 0.1
    choice = choose(some_problem(), None, rows, limit, 0.95, by_group)
    chosen, table = choice.chosen, choice.table
    shift = 0 if chosen.thresholds is None else chosen.thresholds[rows["group"]]
    counts = recount(rows, rows["inputs"] @ chosen.theta - shift, VALIDATION)
    assert choice.within and table["chosen"].sum() == 1
    assert bound_gap(counts.hits[0], counts.cases, 0.95) == pytest.approx(choice.bound) and choice.bound <= limit
    assert counts.gaps[0] == pytest.approx(float(table.loc[table["chosen"], "validation_gap"].iloc[0]))
    assert counts.accuracy[0] == pytest.approx(table.loc[table["bound"] <= limit, "validation_accuracy"].max())
    assert set(table["way"]) == {"primal-dual", "no limit"} | ({"group thresholds"} if by_group else set())
    assert table["bound"].iloc[2] > limit  # without help the second group is served worse


def test_the_chosen_model_is_beyond_the_limit_no_more_often_than_it_says():
    """Of four models whose true gaps lie around the limit, on rows drawn anew."""
    rows, problem, limit, misses = some_rows(40_000), some_problem(), 0.12, 0
    helps = np.array([0.6, 0.45, 0.3, 0.15])
    decisions = rows["inputs"] @ np.stack([np.ones(4), helps]) > 0
    of = lambda drawn: count(decisions[drawn].T, rows["label"][drawn], rows["group"][drawn], 2, problem.metric)
    truth, random = of(np.arange(40_000)).gaps, np.random.default_rng(0)
    assert (truth <= limit).any() and (truth > limit).any()
    for _ in range(200):
        counts = of(random.integers(40_000, size=1500))
        passed = np.flatnonzero(counts.bounds(0.9) <= limit)
        misses += len(passed) > 0 and truth[passed[counts.accuracy[passed].argmax()]] > limit
    assert misses / 200 < 0.1 + 3 * np.sqrt(0.1 * 0.9 / 200)


def test_it_says_so_where_no_model_keeps_the_limit():
    choice = choose(some_problem(), None, some_rows(), 0.001, 0.95, by_group=True)
    assert not choice.within and choice.bound == pytest.approx(choice.table["bound"].min())
    options = FairnessOptions(limit=0.001)
    row = {"validation_eqopp": 0.01, "validation_accuracy": 0.7, "gap_bound": choice.bound, "within_limit": 0.0}
    said = describe("Limited", 3, row, options)
    assert said.startswith("Limited, seed 3: of no model it can be said that its EqOpp gap is at most 0.001 with 95 %")
    assert f"bounds it by {choice.bound:.4f}" in said
    kept = describe("Limited", 3, row | {"within_limit": 1.0}, options)
    assert kept.startswith("Limited, seed 3: the EqOpp gap is at most 0.001 with 95 % confidence; on validation rows")


def test_the_rows_to_judge_by_are_the_same_share_of_every_client_and_group():
    scenario = Fairness(FairnessOptions(data="german", group="foreign_worker", clients="housing", limit=0.1))
    data = scenario.set_up(0).data
    for client, group in itertools.product(range(len(data.client_names)), (0, 1)):
        rest = (data.client == client) & (data.group == group) & (data.part != TEST)
        assert (data.part[rest] == VALIDATION).sum() == round(0.4 * rest.sum())


# ------------------------------------------------------------------------------------------------- problems


def batch_of(random, number):
    return {
        "inputs": jnp.asarray(random.normal(size=(number, 3))),
        "label": jnp.asarray(random.integers(0, 2, number), float),
        "group": jnp.asarray(random.integers(0, 2, number)),
        "weight": jnp.ones(number),
    }


def shares_of(batch, kinds):
    group, label = np.asarray(batch["group"]), np.asarray(batch["label"])
    of_kind = lambda wanted: np.ones(len(label), bool) if wanted is None else label == wanted
    return np.array([[(of_kind(kind) & (group == a)).mean() for a in (0, 1)] for kind in kinds])


@pytest.mark.parametrize(("metric", "kinds"), [("eqopp", (1,)), ("eqodds", (1, 0)), ("parity", (None,))])
def test_multipliers_climb_along_what_the_decisions_exceed_and_models_descend_on_priced_rows(metric, kinds):
    random = np.random.default_rng(2)
    batch = batch_of(random, 200)
    shares, limits = shares_of(batch, kinds), np.array([0.0, 0.1])
    problem = LimitedGaps(shares=shares, limits=limits, groups=2, metric=metric, penalty=0.1, model=linear)
    theta = jnp.asarray(random.normal(size=(2, 3)))
    alpha = jnp.asarray(random.uniform(size=(2, 2, len(kinds), 2)))
    of_theta, of_alpha = jax.grad(problem.value, (0, 1))(theta, alpha, {"train": batch}, None)
    label, group, inputs = (np.asarray(batch[name]) for name in ("label", "group", "inputs"))
    for m in range(2):
        logits = inputs @ np.asarray(theta[m])
        costs = 1 - 2 * label
        for k, kind in enumerate(kinds):
            inside = np.ones(200, bool) if kind is None else label == kind
            rate = (logits > 0)[inside].mean()
            net = np.asarray(alpha[m, 0, k] - alpha[m, 1, k])
            for a in (0, 1):
                excess = (logits > 0)[inside & (group == a)].mean() - rate
                np.testing.assert_allclose(of_alpha[m, 0, k, a], excess - limits[m] / 2, atol=1e-6)
                np.testing.assert_allclose(of_alpha[m, 1, k, a], -excess - limits[m] / 2, atol=1e-6)
                costs = costs + net[a] * ((inside & (group == a)) - shares[k, a] / shares[k].sum() * inside)
        # The gradient of |cost| logistic loss(logit, the cheaper decision), row by row.
        residual = np.abs(costs) * (1 / (1 + np.exp(-logits)) - (costs < 0))
        np.testing.assert_allclose(of_theta[m], inputs.T @ residual / 200 + 0.1 * np.asarray(theta[m]), rtol=1e-5)


def test_prices_of_the_gap_follow_the_decisions_of_all_clients_rows():
    random = np.random.default_rng(3)
    known = batch_of(random, 300)
    shares = shares_of(known, (1,))[0]
    problem = GapWeights(groups=2, shares=shares, gap=0.7, by_label=True, model=linear)
    theta, x = jnp.asarray(random.normal(size=3)), {"weights": jnp.ones(4), "prices": jnp.array([0.4, -0.2])}
    sizes = (100, 200)
    ends = [slice(0, 100), slice(100, 300)]
    gradients = [
        jax.grad(problem.upper)(x, theta, {"validation": known, "known": {n: v[end] for n, v in known.items()}}, None)
        for end in ends
    ]
    of_prices = sum(size / 300 * g["prices"] for size, g in zip(sizes, gradients, strict=True))
    label, group = np.asarray(known["label"]) == 1, np.asarray(known["group"])
    decided = np.asarray(linear(theta, known["inputs"])) > 0
    excess = [decided[label & (group == a)].mean() - decided[label].mean() for a in (0, 1)]
    np.testing.assert_allclose(of_prices, -PRICE_SPEED * np.array(excess), atol=1e-6)
    kept = problem.project_x({"weights": jnp.array([-1.0, 1, 1, 1]), "prices": jnp.array([3.0, -0.5])})
    assert kept["prices"].tolist() == [1.0, -0.5] and kept["weights"].tolist() == pytest.approx(
        [0, 4 / 3, 4 / 3, 4 / 3]
    )


def test_models_within_limits_reach_them():
    """Full batches of two groups, one of which has fewer positives: who is told the group finds fewer of them there."""
    random = np.random.default_rng(4)
    group = random.integers(0, 2, 600)
    label = random.binomial(1, np.where(group == 0, 0.7, 0.3))
    score = 1.5 * label - 0.75 + random.normal(size=600)
    batch = {
        "inputs": jnp.asarray(np.stack([score, group, np.ones(600)], 1)),
        "label": jnp.asarray(label, float),
        "group": jnp.asarray(group),
        "weight": jnp.ones(600),
    }
    limits = np.array([0.02, 0.1, 1.0])
    problem = LimitedGaps(shares=shares_of(batch, (1,)), limits=limits, groups=2, metric="eqopp", model=linear)
    data = Rows.from_clients(constants=jax.tree.map(lambda a: a[None], {"train": batch}))
    task = Task.create(problem, data, problem.start(jnp.zeros(3)))
    algorithm = nestfed.make(
        "coda-plus", lr=0.5, dual_lr=0.1, gamma=np.inf, stage_steps=400, growth=1.0, shrink=1.0, local_steps=5
    )
    end = nestfed.simulate(algorithm, task, rounds=160, evaluate_every=None)
    models = np.asarray(task.problem.models(end.server))
    decisions = (np.asarray(batch["inputs"]) @ models.T).T > 0
    gaps = count(decisions, np.asarray(batch["label"]), np.asarray(batch["group"]), 2, "eqopp").gaps
    assert gaps[2] > 0.2 and gaps[1] < 0.15 and gaps[0] < 0.06


# ------------------------------------------------------------------------------------------------- a whole run


def test_a_run_with_a_limit_shows_the_candidates_and_saves_the_chosen_one(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    words = "nestfed run fairness --data german --group foreign_worker --limit 0.9 --confidence 0.6 --metric parity "
    words += f"--group-at-prediction --steps 20 --evaluations 1 --no-tune --out {folder}"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed, problem = capsys.readouterr()
    assert ended.value.code == 0, problem
    assert "What a limit on the gap costs" in printed and "group thresholds" in printed
    assert "the gap of positive decisions is at most 0.9 with 60 % confidence" in " ".join(printed.split())
    record = Record.load(folder)
    assert record.methods == ["fedavg", "limited"] and record.metrics[0].name == "test_parity"
    assert record.candidates["chosen"].sum() == 1
    assert (folder / "figures" / "candidates.png").stat().st_size > 1000
    assert "What a limit costs" in (folder / "report.html").read_text()
    # The saved model decides as the final numbers say, thresholds and all.
    model = TabularModel.load(folder / "models" / "limited-seed0.npz")
    request = Request.of({"task": "fairness", "data": "german", "group": "foreign_worker", "limit": 0.9})
    data = request.scenario.set_up(0).data
    frame = nestfed.data.load("german").frame
    test = data.part == 2
    decided = model.probability(frame)[test] > 0.5
    accuracy = (decided == data.label[test]).mean()
    assert accuracy == pytest.approx(record.final.set_index("method").loc["limited", "test_accuracy"])
    if model.thresholds is not None:
        with pytest.raises(nestfed.UserError, match="foreign_worker is 'A999' in a row"):
            model.probability(frame.assign(foreign_worker="A999"))


def test_a_limit_brings_its_method_and_the_method_needs_a_limit():
    of = lambda **settings: Request.of({"task": "fairness", **settings}).methods
    assert of(limit=0.1) == ["fedavg", "limited"] and of(limit=0.1, algorithm=["fedbio"]) == ["fedbio", "limited"]
    with pytest.raises(nestfed.UserError, match="limited was asked for without a limit"):
        of(algorithm=["limited"])
    private = Request.of({"task": "fairness", "limit": 0.1, "privacy": "central", "clip": 1, "noise_multiplier": 1})
    with pytest.raises(nestfed.UserError, match="a limit was given together with privacy"):
        _ = private.guarantee


def test_the_paper_is_one_option_away():
    gap, paper = (Fairness(FairnessOptions(**options)) for options in ({}, {"objective": "paper"}))
    assert (gap.weighs_labels, gap.gap_weight, paper.weighs_labels, paper.gap_weight) == (True, 1.0, False, 0.0)
    assert [scenario.method("fedbio").stages[0].output for scenario in (gap, paper)] == ["average", "last"]
    both = Fairness(FairnessOptions(objective="paper", weigh="group+label", gap=0.5))
    assert both.weighs_labels and both.gap_weight == 0.5
