"""Meta-learning: closed forms (T10, T8b), Omniglot's files and tasks, sines, the experiment."""

import dataclasses
import io
import zipfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shared import shared_data

from nestfed import Rows, Sample, Task, UserError, make, simulate, struct
from nestfed.core.randomness import fold
from nestfed.experiments import reproduce
from nestfed.experiments.cells import Cell, load, save
from nestfed.experiments.claims import judge
from nestfed.experiments.maml import page as maml
from nestfed.experiments.maml.data import (
    FederatedCharacters,
    deal_characters,
    load_omniglot,
    read_archive,
    read_prepared,
)
from nestfed.experiments.maml.plan import QUICK, TITLES, Plan, Trainings
from nestfed.experiments.maml.task import CONV4, Characters, make_character_task, make_sine_task
from nestfed.models import CNN, Convolution
from nestfed.problems import Conditional
from nestfed.problems.maml import MAML
from nestfed.verbs.cost import measure


@struct
class Bowls(MAML):
    """Two tasks, both in every batch: loss = curvature (x - center)^2 / 2."""

    def loss(self, params, rows, key):
        center, curvature = rows
        return 0.5 * curvature * jnp.sum((params["x"] - center) ** 2)

    def sample_outer(self, data, key, count):
        return (data.constants, data.constants)


def bowls(curvatures=(1.0, 2.0), first_order=False):
    """T10: centers 1 and 3."""
    one = (jnp.array([[1.0, 3.0]]), jnp.asarray([curvatures]))
    problem = Bowls(inner_lr=0.4, first_order=first_order)
    return Task.create(problem, Rows.from_clients(constants=one), {"x": jnp.zeros(1)}, batch_size=2)


def first_batch(task):
    return Sample(task.sample(task.data.client(0), jax.random.key(0)), jax.random.key(1))


def final(algorithm, task, rounds):
    return simulate(algorithm, task, rounds=rounds, evaluate_every=None, progress=False).server


# ------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(("first_order", "slope"), [(False, -0.72), (True, -1.2)])
def test_t10_value_and_gradient(first_order, slope):
    task = bowls((1.0, 1.0), first_order)
    problem, batch = task.problem, first_batch(task)
    assert float(problem.value(jnp.zeros(1), batch)) == pytest.approx(0.9, abs=1e-12)
    assert float(problem.gradient(jnp.zeros(1), batch)[0]) == pytest.approx(slope, abs=1e-12)
    # The fused composition is the composition, and the oracles of methods for compositions agree with it.
    values, pull = problem.inner_vjp(jnp.zeros(1), batch)
    assert values[:, 0] == pytest.approx([0.4, 1.2])
    assert float(problem.composed_gradient(jnp.zeros(1), pull, values, batch)[0]) == pytest.approx(slope, abs=1e-12)


def test_t10_solution():
    assert float(final(make("fcsg", lr=0.5), bowls(), 400).x[0]) == pytest.approx(1.3636364, abs=1e-7)


@pytest.mark.parametrize("name", ["local-scgd-conditional", "local-scgdm-conditional"])
@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_t10_shared_estimates_stop_elsewhere(name, rate):
    """At (0.4 + 0.2 a) / (0.4 + 0.04 a): T10's 1.0 with the estimate 1.8 as a -> 0, the solution at a = 1."""
    server = final(make(name, lr=min(0.5, rate), inner_lr=rate), bowls(), 8000 if rate < 0.1 else 400)
    limit = (0.4 + 0.2 * rate) / (0.4 + 0.04 * rate)
    assert float(server.x[0]) == pytest.approx(limit, abs=1e-6)
    assert float(server.u[0]) == pytest.approx(0.4 * limit + 1.4, abs=1e-6)
    if rate < 0.1:
        assert (float(server.x[0]), float(server.u[0])) == pytest.approx((1.0, 1.8), abs=5e-3)


@struct
class Lines(Conditional):
    """T8 without noise: g = xi x for xi = 1 and 2, f(y) = y^2 / 2 - y."""

    def sample_outer(self, data, key, count):
        return data.constants

    def sample_inner(self, data, xi, key, count):
        return jnp.zeros(count)

    def inner(self, x, xi, eta, key):
        return (xi * x)[None]

    def outer(self, y, xi, key):
        return jnp.sum(0.5 * y**2 - y)


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_t8b_a_shared_estimate_stops_at_two_thirds(rate):
    task = Task.create(Lines(), Rows.from_clients(constants=jnp.array([[1.0, 2.0]])), jnp.asarray(0.0), batch_size=2)
    name = "local-scgdm-conditional"
    found = float(final(make(name, lr=min(0.1, rate), inner_lr=rate), task, 8000 if rate < 0.1 else 400).x[0])
    assert found == pytest.approx(1.5 / (2.25 + 0.25 * rate), abs=1e-6)
    if rate < 0.1:
        assert found == pytest.approx(2 / 3, abs=1e-3)
    assert float(final(make("fcsg", lr=0.1), task, 400).x[0]) == pytest.approx(0.6, abs=1e-9)


def test_estimates_as_large_as_the_model_double_the_traffic():
    task = bowls()
    up = lambda name: measure(make(name, lr=0.1), task).round.bytes_up // 8
    assert [up(n) for n in ("fcsg", "local-scgd-conditional", "local-scgdm-conditional")] == [1, 2, 3]


def test_several_support_sets_need_a_way_to_draw_them():
    problem = Bowls(inner_lr=0.4, inner_samples=2)
    data = Rows.from_clients(constants=(jnp.ones((1, 2)), jnp.ones((1, 2))))
    with pytest.raises(UserError, match="inner_samples=2.*define sample_support"):
        Task.create(problem, data, {"x": jnp.zeros(1)})


# ------------------------------------------------------------------------------------------------- Omniglot


@pytest.fixture(scope="module")
def omniglot():
    content = (shared_data() / "omniglot28.npz").read_bytes()
    return read_prepared(content)


def test_omniglot_is_split_as_torchmeta_does(omniglot):
    assert omniglot.images.shape == (1623, 20, 28, 28) and omniglot.background.sum() == 964
    parts = omniglot.split()
    assert {name: len(numbers) for name, numbers in parts.items()} == {"train": 1028, "validation": 172, "test": 423}
    assert sorted(np.concatenate(list(parts.values()))) == list(range(1623))
    names = np.array(omniglot.alphabets)
    # The one alphabet that is divided: its first 41 characters are for training.
    gurmukhi = np.flatnonzero(names == "Gurmukhi")
    assert set(gurmukhi[:41]) < set(parts["train"]) and set(gurmukhi[41:]) < set(parts["test"])
    assert set(names[parts["train"]]) & set(names[parts["test"]]) == {"Gurmukhi"}
    assert len(set(names[parts["validation"]])) == 5


def test_characters_are_dealt_evenly_and_to_one_client_each(omniglot):
    dealt = deal_characters(omniglot, clients=16, seed=1)
    assert sorted(set(dealt.rows.sizes.tolist())) == [64, 65] and dealt.rows.sizes.sum() == 1028
    held = {image.tobytes() for image in dealt.rows.columns["image"]}
    trained = {omniglot.images[i].tobytes() for i in omniglot.split()["train"]}
    assert held == trained and len(held) == 1028
    assert (dealt.aside.columns["image"][-423:] == omniglot.images[-423:]).all() and dealt.aside.sizes.tolist() == [
        172,
        423,
    ]
    with pytest.raises(UserError, match="clients=0 was given.*from 1 to 1028"):
        deal_characters(omniglot, clients=0)


def drawing(mark):
    picture = Image.new("1", (105, 105), 1)
    picture.paste(0, (0, 0, mark, 105))  # a black bar on the left
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def archive(drawers=20):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for alphabet, character in (("Zulu", "character02"), ("Alpha", "character01")):
            for drawer in range(1, drawers + 1):
                file.writestr(f"images/{alphabet}/{character}/0001_{drawer:02}.png", drawing(30))
    return content.getvalue()


def test_official_archives_are_inverted_and_reduced():
    found = read_archive(archive(), True)
    assert found.alphabets == ("Alpha", "Zulu") and found.images.shape == (2, 20, 28, 28)
    # 30 of 105 columns are ink: 8 of 28.
    assert (found.images[0, 0, :, :8] == 255).all() and (found.images[0, 0, :, 8:] == 0).all()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("images_background.zip", archive(), "md5 sum .* the official file has 68d2efa1"),
        ("omniglot28.npz", b"nothing", "omniglot28.npz from .* cannot be used as the characters of Omniglot"),
    ],
)
def test_wrong_files_are_refused(name, content, words, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("NESTFED_DATA", str(tmp_path))
    with pytest.raises(UserError, match=words):
        load_omniglot()


def test_an_archive_must_hold_all_drawings():
    with pytest.raises(ValueError, match="19 drawings of Alpha/character01, expected are 20"):
        read_archive(archive(19), True)


# ------------------------------------------------------------------------------------------------- tasks


@pytest.fixture(scope="module")
def few():
    """Characters whose drawings can be told apart: pixel (0, 0) is the character, pixel (0, 1) the drawing."""
    images = np.random.default_rng(0).integers(0, 256, (6, 20, 28, 28)).astype(np.uint8)
    images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]] = 0
    images[:, :, 0, 0] = 1 + np.arange(6)[:, None]
    images[:, :, 0, 1] = 1 + np.arange(20)
    rows = Rows.from_clients([{"image": images[:4]}, {"image": images[4:]}])
    return FederatedCharacters(rows=rows, aside=rows)


SMALL = CNN(outputs=3, norm="batch", layers=(Convolution(2, 5, stride=8, padding="VALID"),))


def corners(images):
    """(character, drawing, quarters turned) of every image."""
    found = []
    for image in np.asarray(images)[..., 0]:
        quarters = next(k for k in range(4) if np.rot90(image, -k)[0, 0])
        back = np.rot90(image, -quarters)
        found.append((int(back[0, 0]), int(back[0, 1]), quarters))
    return found


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), client=st.integers(0, 1))
def test_tasks_hold_different_classes_and_separate_drawings(few, drawn, seed, client):
    query, support = drawn(few.rows.client(client), jax.random.key(seed))
    marks = {name: corners(rows["image"]) for name, rows in (("query", query), ("support", support))}
    assert query["label"].tolist() == [0] * 15 + [1] * 15 + [2] * 15 and support["label"].tolist() == [0, 0, 1, 1, 2, 2]
    for name, rows in (("query", query), ("support", support)):
        for label in range(3):
            classes = {(c, k) for (c, _, k), mine in zip(marks[name], rows["label"], strict=True) if mine == label}
            assert len(classes) == 1
    classes = [(marks["query"][15 * i][0], marks["query"][15 * i][2]) for i in range(3)]
    assert (
        len(set(classes)) == 3
        and [(marks["support"][2 * i][0], marks["support"][2 * i][2]) for i in range(3)] == classes
    )
    assert {c for c, _ in classes} <= ({1, 2, 3, 4} if client == 0 else {5, 6})
    every = marks["query"] + marks["support"]
    assert len(set(every)) == len(every) == 3 * 17


@pytest.fixture(scope="module")
def drawn():
    problem = Characters(inner_lr=0.4, model=SMALL, ways=3, shots=2)

    @jax.jit
    def draw(data, key):
        query, source = problem.sample_task(data, key)
        return query, problem.sample_support(source, jax.random.fold_in(key, 1))

    return draw


def test_all_classes_of_a_client_are_drawn(few, drawn):
    """Two characters and their turned forms: eight classes, three of them in a task, all equally often."""
    draw = jax.jit(jax.vmap(lambda key: drawn(few.rows.client(1), key)[0]["image"][::15]))
    marks = corners(np.asarray(draw(jax.random.split(jax.random.key(0), 400))).reshape(-1, 28, 28, 1))
    _, counts = np.unique([(c, k) for c, _, k in marks], axis=0, return_counts=True)
    # Each count has mean 150 and a variance of at most 150.
    assert counts.shape == (8,) and abs(counts - 150).max() < 4.5 * 150**0.5


def test_impossible_tasks_are_refused(few):
    with pytest.raises(UserError, match="shots=6 and queries=15 were given, but there are 20 drawings"):
        make_character_task(few, model=SMALL, shots=6)
    with pytest.raises(UserError, match="a client has 2 characters.*ways=9"):
        make_character_task(few, model=dataclasses.replace(SMALL, outputs=9))


def test_network_is_the_paper_s():
    params = CONV4.init(jax.random.key(0), (28, 28, 1))
    assert sum(a.size for a in jax.tree.leaves(params)) == 91_781


def test_evaluation_is_the_mean_after_three_steps(few):
    task = make_character_task(few, model=SMALL, tasks=4, at_once=2, queries=3)
    problem, params = task.problem, task.problem.tree(0, task.params[0])
    found = jax.jit(lambda x: task.metrics(SimpleNamespace(x=x), None, None, None))(task.params[0])

    @jax.jit
    def loss_of(number):
        key = fold(jax.random.key(0), number)
        query, source = problem.sample_task(few.aside.client(1), fold(key, 0))
        support, adapted = problem.sample_support(source, fold(key, 1)), params
        for _ in range(3):
            gradient = jax.grad(lambda x: problem.loss(x, support, key))(adapted)
            adapted = jax.tree.map(lambda x, g: x - 0.4 * g, adapted, gradient)
        return problem.loss(adapted, query, key)

    losses = [float(loss_of(number)) for number in range(4, 8)]  # those before are for validation
    assert float(found["test_loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(found["test_loss_interval"]) == pytest.approx(1.96 * np.std(losses, ddof=1) / 2, rel=1e-4)


def test_sine_waves_are_learnt():
    """Phases of a client lie in its range, and training makes adaptation better."""
    task = make_sine_task(clients=2, own_phases=True, tasks=50)
    for client, (low, high) in enumerate([(0, np.pi / 2), (np.pi / 2, np.pi)]):
        (amplitude, phase) = jax.vmap(lambda k: task.problem.sample_task(task.data.client(client), k)[1])(
            jax.random.split(jax.random.key(0), 200)
        )
        assert low <= phase.min() < low + 0.1 and high - 0.1 < phase.max() <= high
        assert 0.1 <= amplitude.min() < 0.4 and 4.7 < amplitude.max() <= 5
    found = simulate(make("fcsg", lr=0.05, local_steps=10), task, rounds=60, evaluate_every=60, progress=False).history
    assert found["test_loss"][-1] < 0.7 * found["test_loss"][0]
    # Both parts have all phases, and yet tasks of their own: settings are not chosen on test tasks.
    assert abs(found["validation_loss"][0] - found["test_loss"][0]) > 0.01


# ------------------------------------------------------------------------------------------------- the experiment


def test_quick_experiment(tmp_path, monkeypatch):
    """Without any file: its characters are made up, and the page says so."""
    monkeypatch.setenv("NESTFED_DATA", str(tmp_path / "nothing"))
    # Sine waves go the same way; a program less to compile.
    quick = dataclasses.replace(QUICK, studies=("omniglot",), rates=(0.05, 0.01))
    monkeypatch.setattr(maml, "EXPERIMENT", dataclasses.replace(maml.EXPERIMENT, quick=quick))
    page = reproduce("maml", out=tmp_path / "out", quick=True, progress=False)
    text = page.read_text()
    assert "{{" not in text and "Not run yet" not in text and text.count("Compared:") == 1
    assert "characters that are made up" in text
    choice = load(tmp_path / "out" / "cells" / "omniglot-choose-fcsg.parquet")
    assert choice.settings == [{"lr": 0.05}, {"lr": 0.01}] and not any(m.startswith("test") for m in choice.metrics)
    best = int(choice.metrics["validation_loss"][:, 0, -1].argmin())
    final = load(tmp_path / "out" / "cells" / "omniglot-1-fcsg.parquet")
    assert final.settings == [choice.settings[best]] and final.metrics["test_loss"].shape == (1, 2, 3)
    assert (page.parent / "figures" / "omniglot.png").stat().st_size > 10_000


def test_page_of_made_up_cells(tmp_path):
    """Numbers put in come out; what is not there yet is named."""
    trainings = Trainings(tmp_path, Plan(), "nestfed reproduce maml")
    level = dict(zip(TITLES, (0.9, 0.92, 0.91, 0.5, 0.88), strict=True))

    def invented(name):
        study, part, method = name.split("-", 2)
        seeds = 1 if part == "choose" else 3
        settings = trainings.grid(study, method) if part == "choose" else [{"lr": 0.1}]
        worse = [words["lr"] + words.get("inner_lr", 0) if part == "choose" else 0 for words in settings]
        final = np.array([[level[method] + 0.001 * s + more for s in range(seeds)] for more in worse])
        values = np.stack([0 * final, final], 2)
        scores = [
            f"{p}_{s}{i}" for p in ("test", "validation") for s in ("accuracy", "loss") for i in ("", "_interval")
        ]
        return Cell(
            settings=settings, seeds=list(range(seeds)), round=np.array([0, 4]),
            metrics=dict.fromkeys(scores, values), diverged=-np.ones((len(settings), seeds), int),
            cost={"exchanges": 1, "bytes_up": 100, "bytes_down": 50, "oracles": {"GRAD": 1}}, seconds=6.0,
            machine="abacus",
        )  # fmt: skip

    for name in trainings.names("omniglot"):
        save(trainings.path(name), invented(name))
    text = maml.EXPERIMENT.write(trainings, maml.make_page(trainings)).read_text()
    assert "Not run yet: sine (clients alike), sine (every client its own phases)." in text and "abacus" in text
    table = maml.tabulate_final(trainings, "omniglot", ["1"]).set_index("method")
    assert table.loc["FCSG-M", "test accuracy"] == pytest.approx(0.921)
    weights = maml.tabulate_weights(trainings, trainings.list_finished()).set_index("method")
    assert weights.loc["Local-SCGDM", "inner_lr = 0.5"] == pytest.approx(
        0.88 + 0.5 + 0.05
    )  # the best of its step sizes
    judged = {one.claim.number: one for one in judge(maml.check_claims(trainings, trainings.list_finished()))}
    # 0.92 and 0.91 are not five points above 0.88.
    assert judged["1"].verdict == "refuted" and judged["1"].counts == {"holds": 3, "refuted": 3, "undecided": 0}
    assert judged["3"].verdict == "undecided"  # both have the same
