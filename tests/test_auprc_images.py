"""Images as rare positives: how they are made and dealt, what is recorded, and the experiment from the command line."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score
from typer.testing import CliRunner

from nestfed import simulate
from nestfed.algorithms import make
from nestfed.cli import app
from nestfed.data.images import Images
from nestfed.experiments.auprc.data import deal_ranked, thin_out_second_half
from nestfed.experiments.auprc.page import PUBLISHED
from nestfed.experiments.auprc.plan import TITLES, Plan, Trainings
from nestfed.experiments.auprc.task import BinaryLosses, ImageLoss, ImageScores, make_ranked_task
from nestfed.models import CNN, Convolution


@pytest.fixture
def images():
    random = np.random.default_rng(0)
    labels = np.tile(np.arange(4), 30).astype(np.int32)
    pixels = random.integers(0, 256, (120, 4, 4, 1)).astype(np.uint8)
    return Images(pixels, labels, pixels[:20], labels[:20], ("a", "b", "c", "d"))


def test_the_second_half_becomes_rare_and_tests_stay(images):
    rare = thin_out_second_half(images, 0.2)
    assert rare.train_labels.sum() == 2 * 6 and (rare.train_labels == 0).sum() == 60
    first = np.flatnonzero(images.train_labels == 2)[:6]
    assert all((rare.train_images == images.train_images[i]).all((1, 2, 3)).any() for i in first)
    np.testing.assert_array_equal(rare.test_labels, images.test_labels >= 2)


def test_a_client_holds_negatives_first(images):
    dealt = deal_ranked(thin_out_second_half(images, 0.5), clients=3, validation=0.2, seed=1)
    rows = dealt.rows
    for start, size, positives in zip(rows.offsets, rows.sizes, rows.constants["positives"], strict=True):
        label = rows.columns["label"][start : start + size]
        assert (np.diff(label) >= 0).all() and label.sum() == positives
    assert dealt.validation_labels.mean() == pytest.approx(1 / 3)  # of every class a fifth


def test_fedavg_on_binary_images_records_the_exact_precision(images):
    model = CNN(layers=(Convolution(2, pool=2),), outputs=1)
    dealt = deal_ranked(thin_out_second_half(images, 0.5), clients=2, validation=0.0, seed=0)
    scores = ImageScores(model, (0.5,), (0.3,))
    params = model.init(jax.random.key(0), (4, 4, 1))
    task = make_ranked_task(ImageLoss(losses=BinaryLosses(scores)), dealt, params, scores=scores, batch_size=4)
    trained = simulate(make("fedavg", lr=0.1, local_steps=2), task, rounds=2, progress=False)
    final = task.problem.tree(0, trained.server.x)
    found = scores(final, {"image": jnp.asarray(dealt.test_images)})
    expected = average_precision_score(dealt.test_labels, np.asarray(found))
    assert trained.history["test_average_precision"][-1] == pytest.approx(expected)


def test_the_experiment_from_the_command_line(tmp_path, monkeypatch):
    """Without any file: its images are made up, and the page says so."""
    monkeypatch.setenv("NESTFED_DATA", str(tmp_path / "nothing"))
    done = CliRunner().invoke(app, ["reproduce", "auprc", "--quick", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "README.md").read_text()
    table = pd.read_csv(tmp_path / "out" / "tables" / "final.csv")
    assert table["method"].tolist() == ["FedAvg", "CODA+", "FCSG"] and table["average precision"].between(0, 1).all()
    assert f"{table['average precision'][1]:.4f}" in page and "images that are made up" in page
    assert (tmp_path / "out" / "figures" / "precision.png").stat().st_size > 5000


def test_every_training_of_the_plan_has_a_published_number():
    plan = Plan()
    assert all(set(PUBLISHED[data]) == set(TITLES) for data, _ in plan.data)
    assert len(set(Trainings(Path(), plan).names())) == 2 * 2 * len(TITLES)
