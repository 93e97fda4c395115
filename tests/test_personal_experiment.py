"""Personalised experiments: how images are dealt, FEMNIST by writer, the problems, the pages, the benchmarks."""

import dataclasses
import importlib.util
import json
import math
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import tomli_w
from numpy.testing import assert_allclose, assert_array_equal
from shared import shared_data

from nestfed import UserError, make, simulate
from nestfed.data.images import Images
from nestfed.experiments import EXPERIMENTS, reproduce
from nestfed.experiments.cells import Cell, load, save
from nestfed.experiments.claims import judge
from nestfed.experiments.frame import convert_to_plain
from nestfed.experiments.image_tasks import MADE_UP
from nestfed.experiments.personal import page as personal_page
from nestfed.experiments.personal import plan as personal
from nestfed.experiments.personal.data import deal_classes, deal_writers, hold_out
from nestfed.experiments.personal.femnist import CLASS_NAMES, load_femnist
from nestfed.experiments.personal.task import COLOUR, GREY, ImageClasses, RandomImageClasses, make_personal_task
from nestfed.experiments.privacy import page as privacy_page
from nestfed.experiments.privacy import plan as privacy
from nestfed.uploads.privacy import LocalDP
from nestfed.uploads.transforms import Clip, ClipMean

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def made_images(each, shape=(2, 2, 1), classes=10):
    """`each` = (training, test) images of every class, whose first pixels number the images of a set."""
    labels = [np.repeat(np.arange(classes), number).astype(np.int32) for number in each]
    pixels = [np.zeros((len(label), *shape), np.uint8) for label in labels]
    number = 0
    for part in pixels:
        part[:, 0, 0, 0], part[:, 0, 1, 0], part[:, 1, 0, 0] = (
            (np.arange(number, number + len(part)) // base) % 256 for base in (1, 256, 65536)
        )
        number += len(part)
    return Images(pixels[0], labels[0], pixels[1], labels[1], tuple(map(str, range(classes))))


def numbers_of(pixels):
    digits = pixels.astype(int)[..., 0]
    return digits[:, 0, 0] + 256 * digits[:, 0, 1] + 65536 * digits[:, 1, 0]


# ------------------------------------------------------------------------------------------------- dealing


@pytest.mark.parametrize("each, per_client, expected", [((6000, 1000), 4, (980, 420)), ((5000, 1000), 2, (840, 360))])
def test_the_paper_s_numbers_of_images(each, per_client, expected):
    """Fashion-MNIST and CIFAR-10: 49,000 / 21,000 and 42,000 / 18,000 images on 50 clients; each image lies once."""
    images = made_images(each)
    dealt = deal_classes(images, clients=50, per_client=per_client, seed=3)
    for rows, size in zip((dealt.train, dealt.test), expected, strict=True):
        assert_array_equal(rows.sizes, np.full(50, size))
        for client in (0, 9, 47):
            first = int(rows.offsets[client])
            held, counts = np.unique(rows.columns[1][first : first + size], return_counts=True)
            assert set(held) == {(client + i) % 10 for i in range(per_client)}
            assert len(set(counts)) == 1
    everything = np.concatenate([numbers_of(rows.columns[0]) for rows in (dealt.train, dealt.test)])
    assert_array_equal(np.sort(everything), np.arange(sum(each) * 10))
    other = deal_classes(images, clients=50, per_client=per_client, seed=4)
    assert not np.array_equal(other.train.columns[0], dealt.train.columns[0])


def test_settings_are_chosen_without_test_images():
    dealt = deal_classes(made_images((60, 40)), clients=10, per_client=2, seed=3)
    inner = hold_out(dealt, seed=3)
    assert_array_equal(inner.train.sizes, np.full(10, 49))  # 70 % of 70 of 100
    for client in (0, 7):
        of = lambda rows, i=client: set(
            numbers_of(rows.columns[0][int(rows.offsets[i]) : int(rows.offsets[i]) + int(rows.sizes[i])])
        )
        assert of(inner.train) | of(inner.test) == of(dealt.train) and not of(inner.train) & of(inner.test)
    assert not np.array_equal(hold_out(dealt, seed=4).test.columns[0], inner.test.columns[0])


def test_dealing_that_cannot_be_is_refused():
    images = made_images((4, 2))
    with pytest.raises(UserError, match="from 1 to all 10"):
        deal_classes(images, clients=10, per_client=11)
    with pytest.raises(UserError, match="at least 9 clients"):
        deal_classes(images, clients=8, per_client=2)
    with pytest.raises(UserError, match="use fewer clients"):
        deal_classes(images, clients=50, per_client=2)


# ------------------------------------------------------------------------------------------------- FEMNIST


def test_the_sample_of_femnist_without_its_second_copies(monkeypatch):
    folder = shared_data()
    monkeypatch.setenv("NESTFED_DATA", str(folder))
    femnist = load_femnist()
    with np.load(folder / "femnist_leaf_sample.npz") as file:
        single = file["is_dup"] == 0
        assert_array_equal(femnist.images[..., 0], file["x"][single])
        assert_array_equal(femnist.labels, file["y"][single])
    dealt = deal_writers(femnist, newcomers=10)
    assert (dealt.train.clients, dealt.shape, len(dealt.class_names)) == (90, (28, 28, 1), 62)
    sizes = np.asarray(dealt.train.sizes) + np.asarray(dealt.test.sizes)
    counts = np.bincount(femnist.writer)
    assert_array_equal(sizes, counts[counts >= 80][:90])
    assert len({rows.clients and int(rows.sizes[0]) for rows, _ in dealt.newcomers}) == 1
    late = dealt.newcomers[0][0].columns[0]
    assert not any((late[0] == dealt.train.columns[0]).all((1, 2, 3)))


def leaf_file(folder, **changes):
    pixel = lambda value: [value] * 784
    own = {"a": {"x": [pixel(0.0), pixel(1.0), pixel(0.0)], "y": [0, 61, 0]}, "b": {"x": [pixel(0.5)], "y": [10]}}
    made = {"users": ["a", "b"], "num_samples": [3, 1], "user_data": own} | changes
    (folder / "femnist.json").write_text(json.dumps(made))


def test_a_file_of_leaf_and_what_is_wrong_with_others(tmp_path, monkeypatch):
    monkeypatch.setenv("NESTFED_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"on no host \(the program of LEAF.*femnist.json into a folder"):
        load_femnist()
    leaf_file(tmp_path)
    femnist = load_femnist()  # the third image of "a" is its first
    assert_array_equal(femnist.labels, [0, 61, 10])
    assert_array_equal(femnist.writer, [0, 0, 1])
    assert_array_equal(femnist.images[:, 0, 0, 0], [0, 255, 128])
    assert femnist.writers == ("a", "b") and CLASS_NAMES[61] == "z"
    with pytest.raises(UserError, match="nobody is left to train"):
        deal_writers(femnist, newcomers=2, at_least=1)
    leaf_file(tmp_path, user_data={"a": {"x": [[0.0] * 784], "y": [62]}, "b": {"x": [[0.0] * 784], "y": [1]}})
    with pytest.raises(UserError, match="labels go from 1 to 62"):
        load_femnist()
    (tmp_path / "femnist.json").write_text("{")
    with pytest.raises(UserError, match="cannot be used as FEMNIST"):
        load_femnist()
    (tmp_path / "femnist.json").unlink()
    (tmp_path / "femnist_leaf_sample.npz").write_bytes(b"damaged")
    with pytest.raises(UserError, match="md5"):
        load_femnist()


# ------------------------------------------------------------------------------------------------- the problem


def test_the_networks_have_the_paper_s_numbers_of_parameters():
    sizes = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    for model, shape, extractor in ((GREY, (28, 28, 1), 1_248_548), (COLOUR, (32, 32, 3), 2_796_352)):
        params = jax.eval_shape(lambda: ImageClasses(model=model).init(jax.random.key(0), shape))
        assert (sizes(params["extractor"]), sizes(params["head"])) == (extractor, 10_250)
        random = jax.eval_shape(lambda: RandomImageClasses(model=model).init(jax.random.key(0), shape))
        # The second layer of 1024 gives way to 2 x 256; the head sees 256.
        assert sizes(random["extractor"]) == extractor - 1024 * 1025 + 512 * 1025
        assert sizes(random["head"]) == 2_570


def test_both_extractors_see_the_same_varied_batch_and_passes_see_none():
    images = made_images((6, 2), (6, 6, 1))
    problem = ImageClasses(model=personal.SMALL, vary=True)
    task = make_personal_task(deal_classes(images, clients=10), problem, batch_size=4)
    rows, key = task.data.client(0), jax.random.key(1)
    plain, labels = rows.draw(key, 4)
    varied, same = task.problem.sample(rows, key, 4)
    assert_array_equal(labels, same)
    assert varied.shape == plain.shape and jnp.issubdtype(varied.dtype, jnp.floating)
    assert not np.allclose(varied, problem.prepare(plain))
    assert_allclose(problem.prepare(plain), (np.asarray(plain) / 255 - 0.5) / 0.5, rtol=1e-6)
    assert problem.prepare(varied) is varied


def test_fedcr_trains_on_random_representations_of_images():
    images = made_images((6, 2), (4, 4, 1))
    model = dataclasses.replace(personal.SMALL, hidden=(3, 3))
    problem = RandomImageClasses(model=model, width=2, draws=3)
    task = make_personal_task(deal_classes(images, clients=10, per_client=2), problem, batch_size=4)
    found = simulate(make("fedcr", lr=0.1, local_steps=1), task, rounds=1, progress=False)
    assert found.server.mean.shape == (10, 2)
    assert np.isfinite(found.history["test_loss"]).all() and 0 <= found.history["test_accuracy"][-1] <= 1


# ------------------------------------------------------------------------------------------------- the pages


def test_quick_personal(tmp_path, monkeypatch):
    monkeypatch.setenv("NESTFED_DATA", str(shared_data()))
    small = dataclasses.replace(personal.SMALL, outputs=len(CLASS_NAMES))
    writers = dataclasses.replace(personal.FEMNIST, model=small, rounds=2, evaluate_every=2, writers=5, newcomers=2)
    data, methods = (("femnist", writers),), ("fedreco-chosen",)
    quick = dataclasses.replace(personal.QUICK, data=data, methods=methods)
    monkeypatch.setattr(personal_page, "EXPERIMENT", dataclasses.replace(personal_page.EXPERIMENT, quick=quick))
    page = reproduce("personal", out=tmp_path / "out", quick=True, progress=False)
    text = page.read_text()
    assert "{{" not in text and "{%" not in text and "Not run yet" not in text and "quick version" in text
    cell, tried = (
        load(tmp_path / "out" / "cells" / f"{n}.parquet") for n in ("femnist-fedreco-chosen", "choose-femnist")
    )
    assert cell.metrics["test_accuracy"].shape == (1, 2, 2) and len(tried.settings) == 2
    assert tried.settings[tried.best("test_accuracy")].items() <= cell.settings[0].items()
    assert cell.settings[0]["epoch"] == 3
    newcomers = cell.metrics["newcomer_accuracy"]
    assert np.isnan(newcomers[..., 0]).all() and (newcomers[..., -1] >= 0).all()
    table = pd.read_csv(tmp_path / "out" / "tables" / "final-femnist.csv").set_index("method")
    row = table.loc["FedReCo, chosen"]
    assert_allclose(row["newcomers"], newcomers[0, :, -1].mean(), rtol=1e-5)
    assert row["thousand gradients per client"] == pytest.approx(2 * (3 + 3 + 1) / 1e3)
    for figure in ("accuracy-femnist", "claims"):
        assert (page.parent / "figures" / f"{figure}.png").exists() == (figure != "claims")  # one method claims nothing


def test_private_trainings_by_name_and_their_page(tmp_path, monkeypatch):
    """The same noise by two readings of epsilon is one program; what is not there yet is named."""
    images = deal_classes(made_images((8, 2), (8, 8, 3)), clients=10)
    monkeypatch.setattr(personal, "_load_images", lambda about, clients, seed: images)
    plan = dataclasses.replace(privacy.QUICK, releases=("plain", "paper", "analytic"), epsilons=(100.0,))
    ((name, about),) = plan.training.data
    assert name == MADE_UP
    data = ((name, dataclasses.replace(about, rounds=2)),)
    plan = dataclasses.replace(plan, training=dataclasses.replace(plan.training, data=data, seeds=1))
    trainings = privacy.Trainings(tmp_path, plan, "nestfed reproduce privacy", progress=False)
    for release in ("paper", "analytic"):
        trainings.cell(f"{name}-fedavg-whole-{release}")
    page = privacy_page.EXPERIMENT.write(trainings, privacy_page.make_page(trainings))
    text = page.read_text()
    assert "{{" not in text and "{%" not in text
    assert f"Not run yet: {name}-local-only-plain, {name}-fedreco-plain" in text
    table = pd.read_csv(tmp_path / "tables" / "final.csv").set_index("uploads")
    paper, exact = table.loc["paper's formula"], table.loc["analytic mechanism"]
    size, sigma = privacy.find_upload_size(plan, name, "fedavg-whole"), math.sqrt(2 * math.log(1.25e5)) * 10 / 100
    assert_allclose(paper["norm of the noise in a mean"], sigma * math.sqrt(size / 10), rtol=1e-4)
    assert_allclose(paper["noise multiplier"], sigma / 20, rtol=1e-4)
    assert exact["norm of the noise in a mean"] > paper["norm of the noise in a mean"]
    assert 100 < exact["epsilon of the run"] < paper["epsilon of the run"]  # two releases; with the true sensitivity
    assert (tmp_path / "figures" / f"accuracy-{name}-epsilon.png").stat().st_size > 5_000
    assert "privacy" in EXPERIMENTS


def test_what_is_done_to_uploads():
    plan = privacy.Plan()
    assert plan.uploads("fedreco", "plain", math.nan) == ()
    (clip,), (twice, mean) = (plan.uploads(method, "clip", math.nan) for method in privacy.METHODS)
    assert isinstance(clip, Clip) and isinstance(twice, Clip) and isinstance(mean, ClipMean)
    for release, value, sigma in (("paper", 1.0, 48.4481), ("paper", 10.0, 4.8448), ("noise", 0.01, 0.2)):
        (guarantee,) = plan.uploads("fedreco", release, value)
        assert isinstance(guarantee, LocalDP) and guarantee.sigma == pytest.approx(sigma, rel=1e-5)
    names = privacy.Trainings(Path(), plan).names()
    assert len(set(names)) == len(names) == 11
    assert privacy.split_name("fmnist-fedavg-whole-paper") == ("fmnist", "fedavg-whole", "paper")


def test_every_method_of_the_plan_has_the_paper_s_settings():
    plan = personal.Plan()
    made: dict[str, Any] = {method: plan.algorithm(method, 21) for method in plan.methods if method != personal.CHOSEN}
    assert {(a.lr, a.clip) for a in made.values()} == {(0.01, 10.0)}
    steps = {method: getattr(a, "head_steps", 0) + a.local_steps for method, a in made.items()}
    assert set(steps.values()) == {42}  # two epochs
    assert (made["fedreco"].coupling, made["fedreco-pvr"].server_lr, made["fedpac"].coupling) == (0.01, 0.001, 1.0)
    coded = made["fedreco-code"]
    assert (coded.server_lr, coded.server_grad, coded.coupling) == (0.01, "full", 0.01)
    chosen: Any = plan.algorithm(personal.CHOSEN, 21, server_lr=1.0, coupling=0.1)
    other = {
        field.name
        for field in dataclasses.fields(chosen)
        if getattr(chosen, field.name) != getattr(made["fedreco"], field.name)
    }
    assert other == {"server_lr", "coupling"}
    names = personal.Trainings(Path(), plan).names()
    assert len(names) == 36 and names.index("choose-femnist") < names.index("femnist-fedreco-chosen")


def test_page_of_made_up_cells(tmp_path):
    """Numbers put in come out, without data; FedAvg and FedBABU are judged fine-tuned; what is not there is named."""
    plan = dataclasses.replace(personal.Plan(), data=personal.Plan().data[:2])
    trainings = personal.Trainings(tmp_path, plan, "nestfed reproduce personal")
    level = dict(zip(personal.TITLES, (0.8, 0.5, 0.85, 0.86, 0.1, 0.79, 0.84, 0.9, 0.904, 0.91, 0.79), strict=True))
    parts = ("", "_worst_decile", "_lowest", "_deviation")

    def invented(method):
        accuracy = np.array([[[0.0, level[method] + 0.001 * seed] for seed in range(3)]])
        metrics = {f"test_accuracy{part}": accuracy for part in parts}
        metrics |= {f"tuned_{name}": np.minimum(values + 0.35, 1) for name, values in metrics.items()}
        metrics |= {f"{tuned}train_loss": 0 * accuracy for tuned in ("", "tuned_")}
        metrics["server_clipped_share"] = 0 * accuracy + 0.75
        return Cell(
            settings=[{"clients": 50, "train": 49000, "test": 21000, "epoch": 21}],
            seeds=[0, 1, 2], round=np.array([0, 4]), metrics=metrics, diverged=-np.ones((1, 3), int),
            cost={"exchanges": 1, "bytes_up": 100, "bytes_down": 50, "oracles": {"GRAD": 7}}, seconds=6.0,
            machine="abacus",
        )  # fmt: skip

    for method in plan.methods:
        save(trainings.path(f"fmnist-{method}"), invented(method))
    text = personal_page.EXPERIMENT.write(trainings, personal_page.make_page(trainings)).read_text()
    assert "Not run yet: local training only (cifar10), FedAvg (cifar10)" in text and "abacus" in text
    assert "50 clients, 49000 images to train on and 21000" in " ".join(text.split())
    table = personal_page.tabulate_final(trainings.list_finished()["fmnist"]).set_index("method")
    assert table.loc["FedAvg", "test accuracy"] == pytest.approx(0.501)
    assert table.loc["FedAvg, fine-tuned", "test accuracy"] == pytest.approx(0.851)
    judged = judge(personal_page.check_claims(trainings.list_finished()))
    shared, variance, coded, others, alike, chosen, chosen_and_not = judged
    assert chosen.verdict == chosen_and_not.verdict == "refuted"
    assert shared.verdict == variance.verdict == coded.verdict == "holds"
    against = [name for name, one in others.cases.items() if one.verdict == "refuted"]
    assert [name.split(", ")[1].split(" minus")[0] for name in against] == ["FedBABU", "FedPAC"]
    assert "Ditto" not in str([name for name, one in alike.cases.items() if one.verdict == "refuted"])
    assert "server's mean is shortened to norm 10.0 in most rounds (fmnist 75 %)" in (" ".join(text.split()))
    settings = tomllib.loads(tomli_w.dumps(convert_to_plain(plan)))
    assert settings["couplings"]["fedpac"] == 1.0 and settings["data"]["cifar10"]["classes"] == 2


# ------------------------------------------------------------------------------------------------- benchmarks


def test_benchmarks_do_the_same_work_in_both_systems(tmp_path, monkeypatch, capsys):
    """PyTorch is no dependency: without it nestfed is measured alone."""
    torch_there = importlib.util.find_spec("torch") is not None
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "cpu")  # so that it is put back
    for script in ("personal_gpu", "personal_cpu"):
        out = tmp_path / f"{script}.json"
        words = ["--small", "--network", "grey", "--rounds", "1", "--repeats", "1", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
        ours, *theirs = json.loads(out.read_text())["results"]["grey"]
        assert ours["system"] == "nestfed" and bool(theirs) == torch_there
        assert ours["loss_after"] < ours["loss_before"]
        assert_allclose([row["loss_before"] for row in theirs], ours["loss_before"], rtol=1e-5)
        assert ("; the same work" in capsys.readouterr().out) == torch_there
