"""Robust training on images: losses, limits and metrics against numpy; trainings kept as files; the page."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import cifar10_subset, shared_data

from nestfed import UserError, make, simulate
from nestfed.data.images import Images, deal_images
from nestfed.experiments import cells
from nestfed.experiments.claims import judge
from nestfed.experiments.dro_images import data, page
from nestfed.experiments.dro_images.data import mark_last_of_first_half, shorten_first_half
from nestfed.experiments.dro_images.plan import CHOSEN_BY, QUICK, Trainings
from nestfed.experiments.dro_images.task import ClassLimits, make_image_losses, make_image_task
from nestfed.models import CNN, Convolution
from nestfed.problems.robust import MeanLoss
from nestfed.problems.toys import quadratics

CLASSES = tuple("abcd")
MODEL = CNN(outputs=4, layers=(Convolution(2, pool=4),))
PLAN = dataclasses.replace(QUICK, images=48, model=MODEL, rates=(0.05, 0.01), prices=(5.0,), steps=4, search_steps=2)


@pytest.fixture(scope="module")
def made():
    random = np.random.default_rng(0)
    pixels = lambda n: random.integers(0, 256, (n, 8, 8, 3)).astype(np.uint8)
    labels = lambda n: np.arange(n, dtype=np.int32) % 4
    return Images(pixels(48), labels(48), pixels(20), labels(20), CLASSES)


@pytest.fixture(scope="module")
def dealt(made):
    return deal_images(made, clients=2, validation=0.25)


def test_metrics_are_those_of_numpy(dealt):
    losses = make_image_losses(dealt, MODEL, vary=False)
    params = MODEL.init(jax.random.key(0), (8, 8, 3))
    task = make_image_task(MeanLoss(losses=losses), dealt, params, losses=losses, batch_size=4)
    run = simulate(make("fedavg", lr=0.1), task, rounds=1, progress=False)
    params = task.problem.tree(0, run.server.x)
    parts = {
        "train": (dealt.rows.columns["image"], dealt.rows.columns["label"]),
        "validation": (dealt.validation_images, dealt.validation_labels),
        "test": (dealt.test_images, dealt.test_labels),
    }
    for part, (pixels, labels) in parts.items():
        logits = MODEL(params, losses.prepare(pixels))
        right = np.asarray(logits.argmax(1) == labels)
        by_class = [right[labels == c].mean() for c in range(4)]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        found = lambda name: float(run.history[f"{part}_{name}"][-1])
        assert found("accuracy") == pytest.approx(right.mean(), abs=1e-6)
        assert found("worst_class_accuracy") == pytest.approx(min(by_class), abs=1e-6)
        assert found("balanced_accuracy") == pytest.approx(np.mean(by_class), abs=1e-6)
        assert found("loss") == pytest.approx(float(loss), rel=1e-5)


def test_images_are_varied_in_training_only(dealt):
    params = MODEL.init(jax.random.key(0), (8, 8, 3))
    batch = {"image": dealt.test_images[:3], "label": dealt.test_labels[:3]}
    varied, plain = make_image_losses(dealt, MODEL), make_image_losses(dealt, MODEL, vary=False)
    of = lambda losses, seed: np.asarray(losses(params, batch, jax.random.key(seed)))
    assert (of(varied, 0) == of(varied, 0)).all() and (of(varied, 0) != of(varied, 1)).any()
    assert (of(plain, 0) == of(plain, 1)).all()


def test_limits_on_classes_are_right_on_average(dealt):
    losses = make_image_losses(dealt, MODEL, vary=False)
    params = MODEL.init(jax.random.key(1), (8, 8, 3))
    batch = {"image": dealt.rows.columns["image"], "label": dealt.rows.columns["label"]}
    shares = np.bincount(batch["label"]) / len(batch["label"])
    problem = ClassLimits(losses=losses, shares=jnp.asarray(shares), margin=0.05)
    each, key = np.asarray(losses(params, batch, jax.random.key(0))), jax.random.key(0)
    expected = [share * (each[batch["label"] == c].mean() - each.mean() - 0.05) for c, share in enumerate(shares)]
    assert problem.constraints(params, batch, key) == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------------------------------------- imbalance


@pytest.mark.parametrize(("classes", "each", "rows"), [(10, 5000, 25500), (100, 500, 30000)])
def test_sizes_of_the_short_sets(classes, each, rows):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes, dtype=np.int32), each))
    mask = mark_last_of_first_half(labels, classes)
    assert mask.sum() == rows
    counts = np.bincount(labels[mask])
    assert counts.tolist() == [100] * (classes // 2) + [each] * (classes // 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60).map(lambda drawn: np.array(drawn, np.int32)), st.integers(1, 9))
def test_the_last_images_of_the_short_classes_are_kept(labels, keep):
    mask = mark_last_of_first_half(labels, 5, keep)
    for label in range(5):
        places = np.flatnonzero(labels == label)
        expected = places[-keep:] if label < 2 else places
        np.testing.assert_array_equal(np.flatnonzero(mask & (labels == label)), expected)


def test_at_least_one_image_is_kept():
    for keep in (0, -1, 2.5):
        with pytest.raises(UserError, match=f"keep={keep} was given"):
            mark_last_of_first_half(np.zeros(3, np.int32), 2, keep)


def test_the_subset_holds_the_short_classes():
    images = cifar10_subset()
    with np.load(shared_data() / "cifar10_subset_14000.npz") as file:
        place = file["train_index"]  # in the official 50,000
    short = mark_last_of_first_half(images.train_labels, 10)
    for label in range(5):
        mine = images.train_labels == label
        assert (short & mine).sum() == 100
        # Between the first 1,100 and the last 100 of 5,000 images lie 3,800 that the subset leaves out.
        assert place[short & mine].min() - place[mine & ~short].max() > 30000
        assert place[short & mine].min() > 48000
    shortened = shorten_first_half(images)
    assert np.bincount(shortened.train_labels).tolist() == [100] * 5 + [1200] * 5
    np.testing.assert_array_equal(shortened.train_images, images.train_images[short])
    np.testing.assert_array_equal(shortened.test_images, images.test_images)


# ------------------------------------------------------------------------------------------------- cells


def test_a_cell_is_computed_once(tmp_path):
    made = []

    def train():
        made.append(1)
        settings = [({"lr": lr}, make("fedavg", lr=lr)) for lr in (0.1, 1e30)]
        metrics = lambda task, server, client, data, fed: {"closeness": -((server.x[0] - 0.8) ** 2)}
        return cells.train(settings, quadratics(), [0, 3], rounds=30, progress=False, metrics=metrics)

    class One(Trainings):
        def train(self, name):
            return train()

    cell, again = (One(tmp_path, PLAN).cell("one") for _ in range(2))
    path = tmp_path / "cells" / "one.parquet"
    assert made == [1] and pd.read_parquet(path).attrs["settings"] == [{"lr": 0.1}, {"lr": 1e30}]
    assert set(cell.origin) == {"commit", "versions", "host", "data"} and cell.origin == again.origin
    assert (cell.metrics["closeness"][0] == again.metrics["closeness"][0]).all()
    assert cell.diverged[0].tolist() == [-1, -1] and (cell.diverged[1] >= 0).all()
    assert cell.best("closeness") == 0 and cell.settings[0] == {"lr": 0.1}
    assert cell.final("closeness").index.tolist() == [0, 3]
    history = cell.history("fedavg", local_steps=2)
    assert len(history) == 2 * 31 and history.step.max() == 60 and history.bytes.max() == 30 * 16
    with pytest.raises(UserError, match="every setting diverged"):
        cell._replace(diverged=np.ones((2, 2), int)).best("closeness")


def test_settings_are_chosen_on_validation_images_and_used(made, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_short", lambda name, keep: made)
    cell = Trainings(tmp_path, PLAN, progress=False).cell("feddro-1-iid")
    choice = cells.load(tmp_path / "cells" / "choose-feddro-1.parquet")
    assert choice.settings == [{"lr": 0.05, "price": 5.0}, {"lr": 0.01, "price": 5.0}] and choice.seeds == [0]
    best = int(choice.metrics["validation_balanced_accuracy"][:, 0, -1].argmax())
    assert cell.settings == [choice.settings[best]] and cell.seeds == [0, 1]
    assert "validation_accuracy" not in cell.metrics and "projected_share" in cell.metrics
    assert cell.round.tolist() == [0, 2, 4] and np.isfinite(cell.metrics["test_accuracy"]).all()


def test_page_of_made_up_cells(tmp_path):
    """Numbers put in come out: table, verdicts and figures follow from the cells."""
    plan = dataclasses.replace(PLAN, local_steps=(1, 2, 4), seeds=3)
    trainings = Trainings(tmp_path, plan, "nestfed reproduce dro-images")
    level = {"feddro-1-iid": 0.8, "ds-feddro-1-iid": 0.7, "fastdro-1-iid": 0.6, "pdsgd-1-iid": 0.5, "mbsgd-1-iid": 0.4}

    def invented(name):
        choosing = name.startswith("choose-")
        seeds = 1 if choosing else 3
        final = np.array([[level.get(name, 0.6) + 0.001 * s for s in range(seeds)]])
        values = np.stack([0 * final, final], 2)
        names = [*page.SHOWN, CHOSEN_BY]
        return cells.Cell(
            settings=[{"lr": 0.1}], seeds=list(range(seeds)), round=np.array([0, 4]),
            metrics=dict.fromkeys(names, values), diverged=-np.ones((1, seeds), int),
            cost={"exchanges": 2, "bytes_up": 100, "bytes_down": 50, "oracles": {"GRAD": 1}}, seconds=6.0,
            machine="abacus",
        )  # fmt: skip

    for name in trainings.names():
        cells.save(trainings.path(name), invented(name))
    text = page.EXPERIMENT.write(trainings, page.make_page(trainings)).read_text()
    assert "{{" not in text and "abacus" in text and text.count("Compared:") == 7
    table = page.tabulate_final(trainings).set_index(["method", "local steps"])
    assert table.loc[("FedDRO", 1), "test accuracy"] == pytest.approx(0.801)
    assert table.loc[("FedDRO", 1), "exchanges"] == 8 and table.loc[("FedDRO", 1), "MB up per client"] == 4e-4
    verdicts = {one.claim.number: one.verdict for one in judge(page.check_claims(trainings))}
    assert verdicts["1"] == "holds" and verdicts["2"] == verdicts["3"] == verdicts["4b"] == "refuted"
    assert verdicts["5a"] == verdicts["5b"] == "holds"
    for figure in ("figure1-methods", "figure2-local-steps"):
        assert (tmp_path / "figures" / f"{figure}.png").stat().st_size > 10_000
