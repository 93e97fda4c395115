"""The average-precision task: metrics against scikit-learn, objectives, a user's own banks on the command line."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import example
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from nestfed.core.settings import UserError
from nestfed.data import TEST, TRAIN, VALIDATION
from nestfed.problems.ranking import AveragePrecision, find_precisions
from nestfed.report import figures
from nestfed.report.page import render
from nestfed.report.record import Record
from nestfed.uploads.privacy import LocalDP
from nestfed.workbench.request import Request
from nestfed.workbench.scenarios import TabularModel
from nestfed.workbench.scenarios.auprc import EVERYBODY, Auprc, make_area_under_curve, make_average_precision
from nestfed.workbench.scenarios.tabular import make_mean_loss
from nestfed.workbench.stages import Budget, run_method, set_up, sweep_method
from nestfed.workbench.task_options import AuprcOptions

ROOT = Path(__file__).parent.parent


def banks(seed=0) -> pd.DataFrame:
    """One payment in fifteen is a fraud; the bank at the harbour saw none."""
    random = np.random.default_rng(seed)
    bank = np.repeat(["north", "south", "harbour"], (260, 220, 120))
    amount, hour = random.normal(size=600).round(3), random.normal(size=600).round(3)
    night = random.choice(["yes", "no"], 600)
    fraud = (2 * amount + (night == "yes") + random.normal(size=600) > 3) & (bank != "harbour")
    frame = pd.DataFrame(
        {"amount": amount, "hour": hour, "night": night, "bank": bank, "fraud": np.where(fraud, "yes", "no")}
    )
    return frame.sample(frac=1, random_state=seed)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "banks.csv"
    banks().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def scenario(path):
    return Auprc(AuprcOptions(data=str(path), label="fraud", positive="yes", clients="bank", batch_size=16, steps=100))


# ------------------------------------------------------------------------------------------------- metrics


program = jax.jit(find_precisions, static_argnames="segments")


def precision_at(label, scores, recall):
    precision, reached, _ = precision_recall_curve(label, scores)
    return precision[:-1][reached[:-1] >= recall].max()


@given(seed=st.integers(0, 2**32 - 1), recall=st.sampled_from([0.3, 0.5, 0.8, 1.0]))
@settings(max_examples=40, deadline=None)
def test_average_precision_is_that_of_scikit_learn(seed, recall):
    random = np.random.default_rng(seed)
    rows, segments = 60, 5
    segment = random.integers(0, segments, rows)
    scores = random.normal(size=rows).round(random.integers(0, 3))  # many ties, some, hardly any; and -0.0
    label = (random.random(rows) < 0.3) & (segment != 2)
    averages, at_recall = program(jnp.asarray(scores), jnp.asarray(label), jnp.asarray(segment), segments, recall)
    for i in range(segments):
        inside = segment == i
        if not label[inside].any():
            assert np.isnan(averages[i]) and np.isnan(at_recall[i])
            continue
        assert averages[i] == pytest.approx(average_precision_score(label[inside], scores[inside]), rel=1e-12)
        assert at_recall[i] == pytest.approx(precision_at(label[inside], scores[inside], recall), rel=1e-12)


def test_more_recall_costs_precision_and_chance_is_the_share_of_positives():
    random = np.random.default_rng(0)
    scores, label, one = random.normal(size=4000), random.random(4000) < 0.1, np.zeros(4000, int)
    measured = lambda scores, recall: program(jnp.asarray(scores), jnp.asarray(label), jnp.asarray(one), 1, recall)
    found = [measured(scores, recall) for recall in (0.1, 0.5, 0.8, 1.0)]
    at_recall = [float(best[0]) for _, best in found]
    assert at_recall == sorted(at_recall, reverse=True)
    assert float(found[0][0][0]) == pytest.approx(label.mean(), abs=0.02)
    perfect, _ = measured(label + 0.0, 0.5)
    assert float(perfect[0]) == 1


# ------------------------------------------------------------------------------------------------- set-up, objectives


def test_training_rows_lie_positives_last_and_batches_are_stratified(scenario):
    setup = scenario.set_up(0)
    data, rows = setup.data, setup.rows
    assert data.client_names[int(np.argmin(setup.positives))] == "harbour" and setup.positives.min() == 0
    for k in range(3):
        start, size, number = int(rows.offsets[k]), int(setup.train_sizes[k]), int(setup.positives[k])
        label = rows.columns["label"][start : start + size]
        assert label[: size - number].sum() == 0 and label[size - number :].sum() == number
        assert number == ((data.client == k) & (data.part == TRAIN) & (data.label == 1)).sum()
    task = make_average_precision(scenario, setup, None)
    k = int(np.argmax(setup.positives))
    batch = task.sample(task.data.client(k), jax.random.key(0))
    assert batch.positive.sum() == scenario.batch_positives(setup) == 8 and batch.positive[:8].all()
    np.testing.assert_array_equal(batch.rows["label"], batch.positive)
    assert (batch.rows["part"] == TRAIN).all()


def test_clients_count_by_their_positives_and_who_has_none_not_at_all(scenario):
    setup = scenario.set_up(0)
    harbour = setup.data.client_names.index("harbour")
    by_positives = make_average_precision(scenario, setup, None).weights
    np.testing.assert_allclose(by_positives, setup.positives / setup.positives.sum())
    assert by_positives[harbour] == 0
    for other in (make_mean_loss, make_area_under_curve):
        np.testing.assert_allclose(other(scenario, setup, None).weights, setup.train_sizes / setup.train_sizes.sum())
    share = setup.positives.sum() / setup.train_sizes.sum()
    assert make_area_under_curve(scenario, setup, None).problem.positive_share == pytest.approx(
        share
    )  # that of the pooled rows
    uniform = scenario.change(averaging="uniform")
    np.testing.assert_allclose(make_average_precision(uniform, setup, None).weights, np.where(by_positives > 0, 0.5, 0))
    np.testing.assert_allclose(make_mean_loss(uniform, setup, None).weights, 1 / 3)


def test_estimates_of_positives_know_their_rows_where_seeds_share_a_pool(scenario):
    """A sweep lays the rows of all seeds in one pool: metrics in training are those of the final state of each."""
    short = scenario.change(steps=10, warm_start=False)
    trials = sweep_method(
        set_up(short, range(2)), "soap", {}, {"lr": [0.01, 1.0]}, Budget(evaluations=1), progress=False
    )
    for trace in trials.traces:
        final, _ = short.evaluate(trials.setups[trace.seed], trace.left)
        assert short.score(final) == pytest.approx(1 - final["validation_average_precision"])
        recorded = {name: values[-1] for name, values in trace.stages[0].history.items() if name in final}
        assert set(recorded) == set(final)
        for name, value in recorded.items():
            assert value == pytest.approx(final[name], rel=1e-6), name


def test_ranking_begins_with_the_model_of_fedavg_and_never_ends_below_it_on_validation_rows(scenario):
    short = scenario.change(steps=40)
    trials = set_up(short, [0])

    def run(name, budget=Budget(evaluations=4), **changes):  # noqa: B008  (never changed)
        algorithms = short.make_algorithms(name, trials.first, changes)
        return run_method(trials, name, algorithms, 0, budget, progress=False)

    theta = lambda trace: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(trace.left.theta)])
    missed = lambda trace: short.score(short.evaluate(trials.first, trace.left)[0])
    fedavg, still, wild = run("fedavg"), run("fcsg-m", **{"rank.lr": 1e-12}), run("fcsg-m", **{"rank.lr": 300.0})
    np.testing.assert_allclose(theta(still), theta(fedavg), atol=1e-8)
    assert [stage.name for stage in wild.stages] == ["warm", "rank"] and wild.stages[1].output == "best"
    assert missed(wild) <= missed(fedavg) + 1e-9
    last = run("fcsg-m", Budget(evaluations=4, output="last"), **{"rank.lr": 300.0})
    assert missed(last) > missed(wild)
    # Rows that choose an iterate are covered by no guarantee: with privacy the last one counts.
    private = Budget(rounds=1, evaluations=1, privacy=LocalDP(clip=1.0, noise_multiplier=1.0, delta=1e-5))
    assert run("fcsg-m", private).stages[1].output == "last"


# ------------------------------------------------------------------------------------------------- the command line


def surrogate(scenario, setup, theta) -> float:
    """-1 x the smoothed average precision of the training rows: numpy, straight from the formula, one client at a time,
    positives and negatives weighed as in a batch."""
    data = setup.data
    h = 1 / (1 + np.exp(-np.asarray(setup.model(theta, jnp.asarray(data.inputs)), float)))
    share, total = scenario.batch_positives(setup) / setup.batch_size, 0.0
    for k in range(len(data.client_names)):
        own = (data.client == k) & (data.part == TRAIN)
        above, below = h[own & (data.label == 1)], h[own & (data.label == 0)]
        if not above.size:
            continue
        pair = lambda others: (np.maximum(scenario.options.margin - above[:, None] + others[None], 0) ** 2).mean(1)
        hits, misses = share * pair(above), (1 - share) * pair(below)
        total -= (hits / (hits + misses)).sum()
    return total / setup.positives.sum()


def test_own_banks_in_one_command(call, path, scenario, monkeypatch):
    words = ["--data", path, "--label", "fraud", "--positive", "yes", "--clients", "bank", "--batch-size", "16"]
    code, out, err = call(
        "run",
        "auprc",
        *words,
        "--steps",
        "100",
        "--evaluations",
        "2",
        "--recall",
        "0.5",
        "--no-warm-start",
        "--out",
        "a",
    )
    assert code == 0, err
    assert "No positive training row (first seed): harbour." in out.replace("\n", " ")
    record = Record.load(Path("a"))
    assert record.methods == ["fedavg", "coda-plus", "fcsg-m"] and record.about["baseline"] == "fedavg"
    assert [metric.title for metric in record.metrics] == [
        "test average precision", "test average precision, mean of clients", "test precision at recall 0.5",
        "test AUROC",
    ]  # fmt: skip
    for name in ("report.html", "lines.parquet", "figures/precision-recall.png", "figures/precision-recall.svg"):
        assert (Path("a") / name).stat().st_size > 1000, name

    # Metrics in training (one compiled sort) are those of the final state (scikit-learn).
    last, final = record.history.groupby("method").last(), record.final.set_index("method")
    shared = [name for name in final if name in last.columns and name not in ("seed", "status")]
    assert len(shared) == 13
    for name in shared:
        np.testing.assert_allclose(last[name], final.loc[last.index, name], rtol=1e-6, err_msg=name)

    # Each method's saved model, used on the table as a stranger would, gives the numbers of the report.
    setup = scenario.change(recall=0.5).set_up(0)
    data, frame = setup.data, pd.read_csv(path)
    for method in record.methods:
        scores = TabularModel.load(f"a/models/{method}-seed0.npz").probability(frame)
        test = data.part == TEST
        expected = final.loc[method]
        assert expected.test_average_precision == pytest.approx(
            average_precision_score(data.label[test], scores[test]), rel=1e-5
        )
        assert expected.test_auroc == pytest.approx(roc_auc_score(data.label[test], scores[test]), rel=1e-5)
        own = [
            average_precision_score(data.label[mine], scores[mine])
            for k in range(3)
            if data.label[mine := test & (data.client == k)].any()
        ]
        assert expected.test_client_average_precision == pytest.approx(np.mean(own), rel=1e-5)

    # What is trained goes down.
    trained = TabularModel.load("a/models/fcsg-m-seed0.npz").theta
    assert surrogate(scenario, setup, trained) < surrogate(scenario, setup, setup.theta) - 0.02

    # A client without positives keeps its line, with dashes, and the page names it.
    table = Path("a/tables/slices-client.md").read_text()
    assert "| average precision | harbour | test | – | – | – |" in table and "| AUROC | harbour | test | – |" in table
    page = Path("a/report.html").read_text()
    assert "harbour" in page and "Precision and recall, test rows" in page
    assert page.count("<polyline") == 3 * 3 and "<figcaption>all clients</figcaption>" in page  # two banks and all

    # The lines: never above what is possible, ending at the share that full recall costs, with the right area.
    lines = record.lines
    assert set(lines.slice) == {EVERYBODY, "north", "south"} and lines.y.between(0, 1).all()
    for method, line in lines[lines.slice == EVERYBODY].groupby("method"):
        assert line.y.mean() == pytest.approx(final.test_average_precision[method], abs=0.03)
        full = precision_at(
            data.label[test], TabularModel.load(f"a/models/{method}-seed0.npz").probability(frame)[test], 1
        )
        assert line.y.iloc[-1] == pytest.approx(full, rel=1e-5)

    # All of this is in the folder; two runs can be compared, lines and all.
    assert render(record) == page
    shutil.copytree("a", "b")
    monkeypatch.setattr("nestfed.workbench.commands.write_report", lambda record, folder: None)  # figures take seconds
    assert call("compare", "a", "b", "--out", "c")[0] == 0
    titles = {f"{method} ({folder})" for method in record.methods for folder in "ab"}
    assert set(Record.load(Path("c")).lines.method) == titles


def test_records_without_lines_have_no_chart():
    record = example()
    assert record.chart is None
    with pytest.raises(UserError, match="draws no lines"):
        figures.draw_chart(record)


def test_cost_and_lists_know_the_task(call, path):
    """Every method, traced: SOAP sends what FCSG sends, momentum twice that, CODA+ three numbers more than FedAvg."""
    code, out, err = call(
        "cost", "auprc", "--data", path, "--label", "fraud", "--positive", "yes", "--clients", "bank", "--json"
    )
    assert code == 0, err
    table = pd.DataFrame(json.loads(out))
    sent = table[table.stage != "warm"].set_index("method")["bytes up"]
    assert len(sent) == len(Auprc.methods)
    assert set(table[table.stage == "warm"]["bytes up"]) == {sent["FedAvg"]}
    number = jnp.zeros(()).dtype.itemsize
    assert sent["FCSG"] == sent["SOAP"] == sent["FedAvg"]
    assert sent["FCSG-M"] == sent["Acc-FCSG-M"] == 2 * sent["FCSG"]
    assert sent["CODA+"] == sent["FedAvg"] + 3 * number and sent["CODASCA"] == 2 * sent["CODA+"]
    assert "auprc" in call("list", "tasks")[1]


OWN = ["--data", "my.csv", "--label", "fraud", "--clients", "bank"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data", "my.csv"], "without a label"),
        ([*OWN, "--recall", "0"], "recall=0.0 was given"),
        ([*OWN, "--recall", "1.5"], "recall=1.5 was given"),
        ([*OWN, "--margin", "0"], "margin=0.0 was given"),
        ([*OWN, "--batch-positives", "16", "--batch-size", "16"], "batch_positives=16 was given for batches of 16"),
        ([*OWN, "--strength", "1"], "there is no setting 'strength' for the task auprc"),
        ([*OWN, "-a", "feddro"], "'feddro' is no method for the task auprc"),
        (["--data", "my.csv", "--label", "rare", "--clients", "bank"], "none of the 2 positive rows is among the"),
    ],
)
def test_mistakes_are_one_line(call, words, message):
    frame = banks()
    frame.assign(rare=(np.arange(600) < 2).astype(int), fraud=(frame.fraud == "yes").astype(int)).to_csv(
        "my.csv", index=False
    )
    code, _, err = call("run", "auprc", *words)
    assert code == 1 and message in err and err.startswith("nestfed: "), (code, err)
    assert len(err.strip().splitlines()) == 1 and not Path("runs").exists()


def test_the_usual_run_needs_no_option():
    request = Request.of({"task": "auprc"})
    assert request.methods == ["fedavg", "coda-plus", "fcsg-m"]
    setup = request.scenario.set_up(0)
    rates = [setup.data.label[setup.data.client == k].mean() for k in range(3)]
    assert max(rates) - min(rates) > 0.1 and (setup.positives > 0).all()
    assert isinstance(make_average_precision(request.scenario, setup, None).problem, AveragePrecision)


def test_the_page_names_the_settings_that_hold():
    text = (ROOT / "docs" / "auprc.md").read_text(encoding="utf-8")
    assert f"`--margin` ({AuprcOptions().margin:g})" in text
    named = set(re.findall(r"^\| `(.*?)` ", text, re.M)) | set(re.findall(r"`([a-z-]+)`(?=[,|( ])", text))
    assert set(Auprc.methods) <= named


@pytest.mark.parametrize("positives, kept", [(8, False), (400, True)])
def test_ranking_counts_where_it_is_better_beyond_chance(monkeypatch, positives, kept):
    generator = np.random.default_rng(0)
    label = np.repeat([1, 0], [positives, 4 * positives])
    before = label + generator.normal(size=label.size)
    after = 1.1 * label + before - label
    data = SimpleNamespace(label=label, part=np.full(label.size, VALIDATION))
    monkeypatch.setattr(Auprc, "tabulate_outcomes", lambda self, setup, left: (left, None))
    improves = lambda first, last: Auprc().improves(SimpleNamespace(data=data), first, last)
    assert average_precision_score(label, after) > average_precision_score(label, before)
    assert improves(before, after) is kept
    assert not improves(before, before) and not improves(after, before)
