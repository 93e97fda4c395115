"""Convolutions against XLA's own, norms and pools against NumPy, networks against what is known of them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.flatten_util import ravel_pytree

import nestfed
from nestfed import Rows, Task, UserError, make, simulate, workbench
from nestfed.models import (
    CNN,
    IMAGE_MODELS,
    MODELS,
    Convolution,
    ImageModel,
    Perceptron,
    ResNet,
    TabularNetwork,
    average_pool,
    batch_norm,
    conv2d,
    convert_to_planes,
    convolve,
    describe_model,
    find_image_model,
    find_model,
    group_norm,
    init_kernel,
    make_model,
    max_pool,
)
from nestfed.problems import SingleLevel
from nestfed.workbench import task_options
from nestfed.workbench.scenarios import SCENARIOS, TabularModel
from nestfed.workbench.task_options import TASKS

KEY = jax.random.key(0)
normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
count = lambda tree: ravel_pytree(tree)[0].size
numbers = lambda model, shape: jax.eval_shape(lambda: ravel_pytree(model.init(KEY, shape))[0]).size

# ------------------------------------------------------------------------------------------------- pieces


@settings(max_examples=15, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    windows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 3),
    padding=st.sampled_from(["SAME", "VALID", 0, 1, 2]),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_conv2d_and_its_gradients_are_those_of_xla(sides, windows, stride, padding, channels):
    images, kernel = normal(0, 2, *sides, channels[0]), normal(1, *windows, *channels)
    room = 0 if isinstance(padding, str) else 2 * padding
    if padding != "SAME" and any(side + room < window for side, window in zip(sides, windows, strict=True)):
        with pytest.raises(UserError, match="too small"):
            conv2d(images, kernel, stride, padding)
        return
    pads = padding if isinstance(padding, str) else [(padding, padding)] * 2
    reference = lambda images, kernel: lax.conv_general_dilated(
        images, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    ours = lambda images, kernel: conv2d(images, kernel, stride, padding)

    @jax.jit  # one compilation instead of one per operation
    def both(images, kernel):
        cotangent = normal(2, *jax.eval_shape(reference, images, kernel).shape)
        pulled = lambda function: jax.vjp(function, images, kernel)
        (value, pull), (expected, expected_pull) = pulled(ours), pulled(reference)
        return (value, *pull(cotangent)), (expected, *expected_pull(cotangent))

    jax.tree.map(close, *both(images, kernel))


def test_conv2d_side_by_side_is_one_batched_product_and_no_convolution():
    images, kernels = normal(0, 3, 2, 5, 5, 2), normal(1, 3, 3, 3, 2, 4)
    program = str(jax.make_jaxpr(jax.vmap(conv2d))(images, kernels))
    assert program.count("dot_general") == 1 and "conv_general" not in program
    together = jax.jit(jax.vmap(conv2d))(images, kernels)
    one = jax.jit(conv2d)
    for k in range(3):
        close(together[k], one(images[k], kernels[k]))


def test_conv2d_refuses_images_of_other_channels():
    with pytest.raises(UserError, match="images of 1 channels were given to a kernel for 3"):
        conv2d(normal(0, 1, 4, 4, 1), normal(1, 3, 3, 3, 2))


@pytest.mark.parametrize("side", [6, 7])
def test_pools_take_windows_side_by_side_and_leave_out_the_rest(side):
    planes = normal(0, 3, side, 6, 2)
    windows = np.stack([planes[:, i:6:3, j:6:3] for i in range(3) for j in range(3)])
    close(max_pool(planes, 3), windows.max(0))
    close(average_pool(planes, 3), windows.mean(0))
    assert max_pool(planes, 1) is planes and average_pool(planes, 1) is planes
    with pytest.raises(UserError, match="too small to pool windows of 9 x 9"):
        max_pool(planes, 9)


def test_gradient_of_max_pool_goes_to_the_largest():
    planes = jnp.arange(16.0).reshape(1, 4, 4, 1)
    gradient = jax.grad(lambda a: (max_pool(a)[0, :, :, 0] * jnp.array([[1.0, 2], [3, 4]])).sum())(planes)
    expected = np.zeros((4, 4))
    expected[1::2, 1::2] = [[1, 2], [3, 4]]
    close(gradient[0, :, :, 0], expected)


def test_among_equals_the_first_gets_the_gradient():
    gradient = jax.grad(lambda planes: max_pool(planes).sum())(jnp.ones((1, 2, 2, 1)))
    close(gradient[0, :, :, 0], [[1, 0], [0, 0]])


@pytest.mark.parametrize("stride, padding, pool", [(1, "VALID", 2), (2, "SAME", 2), (1, 1, 3)])
def test_pooling_within_a_convolution_is_pooling_after_it(stride, padding, pool):
    planes, kernel = normal(0, 2, 11, 9, 3), normal(1, 3, 2, 2, 4)
    after = lambda planes, kernel: max_pool(convolve(planes, kernel, stride, padding), pool)
    within = lambda planes, kernel: convolve(planes, kernel, stride, padding, pool)
    close(within(planes, kernel), after(planes, kernel))
    gradients = lambda function: jax.grad(lambda *inputs: (function(*inputs) ** 2).sum(), (0, 1))(planes, kernel)
    for ours, expected in zip(gradients(within), gradients(after), strict=True):
        close(ours, expected)


def test_norms_standardise_groups_of_an_image_or_channels_of_a_batch():
    planes = np.asarray(5 + 3 * normal(0, 6, 3, 5, 4))
    layer = {"scale": normal(1, 6), "shift": normal(2, 6)}
    affine = lambda a: a * np.asarray(layer["scale"])[:, None, None, None] + layer["shift"][:, None, None, None]
    standard = lambda a: (a - a.mean()) / np.sqrt(a.var() + 1e-5)
    by_group = np.empty_like(planes)
    for row in range(4):
        for first in (0, 2, 4):
            by_group[first : first + 2, :, :, row] = standard(planes[first : first + 2, :, :, row])
    close(group_norm(layer, planes, groups=3), affine(by_group))
    close(batch_norm(layer, planes), affine(np.stack([standard(plane) for plane in planes])))
    with pytest.raises(UserError, match="6 channels cannot be put into 8 equal groups"):
        group_norm(layer, planes)


def test_half_precision_statistics_are_single():
    """Of 4,096 numbers around 100, bfloat16 could not even hold the mean."""
    planes = (100 + normal(0, 1, 64, 64, 1)).astype(jnp.bfloat16)
    layer = {"scale": jnp.ones(1, jnp.float32), "shift": jnp.zeros(1, jnp.float32)}
    answer = batch_norm(layer, planes)
    assert answer.dtype == jnp.bfloat16
    assert abs(float(answer.astype(jnp.float32).mean())) < 1e-2
    assert float(answer.astype(jnp.float32).std()) == pytest.approx(1, abs=1e-2)


def test_initialisation_keeps_the_size_of_values_through_relus():
    """He's rule: the mean square of the inputs of every layer stays, however deep."""
    values = normal(0, 4, 11, 11, 64)
    for depth in range(4):
        values = conv2d(jax.nn.relu(values), init_kernel(jax.random.key(depth), 3, 64, 64), padding="VALID")
    assert 0.5 < float((values**2).mean()) < 1.5


# ------------------------------------------------------------------------------------------------- networks

NETWORKS: dict[str, tuple[ImageModel, tuple[int, int, int]]] = {
    "cnn": (CNN(layers=(Convolution(3, pool=2), Convolution(2, 2, 2, "VALID")), hidden=(5,), outputs=4), (7, 6, 2)),
    "cnn with norm": (CNN(layers=(Convolution(8, padding=2, stride=2),), norm="group", outputs=1), (5, 5, 1)),
    "resnet": (ResNet(widths=(8, 16), blocks=1, outputs=3), (6, 5, 3)),
    "resnet with batch norm": (ResNet(widths=(2, 4), blocks=2, norm="batch", outputs=3), (4, 4, 1)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_side_by_side_are_networks_one_after_the_other(name):
    model, shape = NETWORKS[name]
    params = jax.vmap(lambda key: model.init(key, shape))(jax.random.split(KEY, 3))
    images = normal(1, 3, 4, *shape)
    loss = lambda params, images: jnp.sum(jnp.sin(model(params, images)))
    both = jax.value_and_grad(loss)
    together = jax.jit(jax.vmap(both))(params, images)
    one = jax.jit(both)
    for k in range(3):
        alone = one(jax.tree.map(lambda a: a[k], params), images[k])
        jax.tree.map(lambda all, single: close(all[k], single), together, alone)
    assert all(bool(np.any(leaf)) for leaf in jax.tree.leaves(together[1])), "a parameter without effect"


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_those_of_features_and_head(name):
    model, shape = NETWORKS[name]
    params, images = model.init(KEY, shape), normal(1, 4, *shape)
    features, head = jax.jit(model.features)(params["extractor"], images), params["head"]
    logits = features @ head["weight"] + head["bias"][None]
    close(jax.jit(model)(params, images), logits[:, 0] if model.outputs == 1 else logits)
    assert logits.shape == (4, model.outputs)


def test_group_norm_answers_for_an_image_alone_and_batch_norm_does_not():
    model, images = ResNet(widths=(8,), blocks=1), normal(1, 3, 4, 4, 2)
    params = model.init(KEY, (4, 4, 2))
    first = lambda model: jax.jit(lambda images: (model(params, images)[0], model(params, images[:1])[0]))(images)
    close(*first(model))
    with_others, alone = first(dataclasses.replace(model, norm="batch"))
    assert abs(with_others - alone).max() > 1e-3


def test_residual_block_with_empty_branches_is_its_shortcut():
    """With zero scales in the second norms only the stem and the shortcuts remain: subsampled, padded with zeros."""
    model, images = ResNet(widths=(8, 16), blocks=2), normal(1, 2, 6, 6, 3)
    params = model.init(KEY, (6, 6, 3))
    extractor = params["extractor"]
    for _, second in extractor["blocks"]:
        second["norm"]["scale"] = jnp.zeros_like(second["norm"]["scale"])
    stem = extractor["stem"]
    values = jax.nn.relu(group_norm(stem["norm"], convolve(convert_to_planes(images), stem["kernel"])))
    features = jax.jit(model.features)(extractor, images)
    close(features[:, :8], values[:, ::2, ::2].mean((1, 2)).T)
    close(features[:, 8:], 0)


def test_numbers_of_parameters():
    """Of He et al.'s ResNet20 with option A, of the benchmark's CNN, and of networks that papers name."""
    colour, grey = (32, 32, 3), (28, 28, 1)
    assert numbers(ResNet(), colour) == numbers(ResNet(norm="batch"), colour) == 269_722
    assert numbers(ResNet(outputs=100), colour) == 269_722 + 90 * 65
    assert numbers(CNN(), colour) == 97_290

    # Personalised classification: two 5 x 5 convolutions, two layers of 1024, a linear head.
    valid = lambda *channels: tuple(Convolution(c, 5, padding="VALID", pool=2) for c in channels)
    for shape, channels, extractor in ((grey, (4, 12), 1_248_548), (colour, (64, 64), 2_796_352)):
        assert numbers(CNN(layers=valid(*channels), hidden=(1024, 1024)), shape) == extractor + 10_250
    # Average precision: one output.
    assert numbers(CNN(layers=valid(20, 50), hidden=(500,), outputs=1), grey) == 426_571
    pooled = tuple(Convolution(c, pool=2) for c in (16, 32, 64))
    assert numbers(CNN(layers=pooled, hidden=(512, 64), outputs=1), colour) == 581_281
    # Few-shot learning: strides instead of pools, batch norm.
    strided = (*[Convolution(64, stride=2, padding="VALID")] * 3, Convolution(64, 2, padding="VALID"))
    assert numbers(CNN(layers=strided, norm="batch", outputs=5), grey) == 91_781


def test_perceptron_with_classes_is_a_column_of_perceptrons_with_one_output():
    single, several = Perceptron((7,)), Perceptron((7,), outputs=3)
    params, inputs = several.init(KEY, 4), normal(1, 5, 4)
    logits = several(params, inputs)
    assert logits.shape == (5, 3)
    for c in range(3):
        head = {"weight": params[1]["weight"][:, c : c + 1], "bias": params[1]["bias"][c : c + 1]}
        close(single([params[0], head], inputs), logits[:, c])


@pytest.mark.parametrize("model", [Perceptron(), Perceptron((5,)), TabularNetwork(width=4, blocks=1)])
def test_a_model_of_rows_is_its_two_parts(model):
    params, inputs = model.init(KEY, 6), normal(1, 5, 6)
    body, head = model.split(params)
    assert count(body) and count(head) and count(body) + count(head) == count(params)
    joined = model.join(body, head)
    jax.tree.map(np.testing.assert_array_equal, joined, params)
    close(model(params, inputs), model.decide(head, model.represent(body, inputs))[:, 0])
    assert make_model(json.loads(json.dumps(describe_model(model)))) == model


def test_the_tabular_network_adds_embeddings_and_looks_at_one_row_alone():
    model = TabularNetwork(width=4, blocks=2)
    params, inputs = model.init(KEY, 6), normal(1, 5, 6)
    run = jax.jit(model)
    together = run(params, inputs)
    close(together, jnp.concatenate([run(params, row[None]) for row in inputs]))
    # Without what blocks add, the head sees the standardised sum of the columns' embeddings.
    for block in params["body"]["blocks"]:
        block["out"] = jax.tree.map(jnp.zeros_like, block["out"])
    embedding = params["body"]["embedding"]["weight"]
    added = np.asarray((inputs[:, :, None] * embedding[None]).sum(1))
    normed = (added - added.mean(1, keepdims=True)) / np.sqrt(added.var(1, keepdims=True) + 1e-5)
    close(model(params, inputs), normed @ params["head"]["weight"][:, 0])  # its bias starts at 0


def test_the_tabular_network_has_second_derivatives():
    """Products with the Hessian are differences of gradients; those with respect to a row's weight are gradients."""
    model, inputs, label = TabularNetwork(width=3, blocks=1), normal(1, 6, 4), jnp.arange(6) % 2
    start, tree = ravel_pytree(model.init(KEY, 4))
    loss = lambda theta: optax.sigmoid_binary_cross_entropy(model(tree(theta), inputs), label).mean()
    gradient, along, h = jax.jit(jax.grad(loss)), normal(2, start.size), 1e-5
    product = jax.jit(lambda theta: jax.jvp(jax.grad(loss), (theta,), (along,))[1])(start)
    difference = (gradient(start + h * along) - gradient(start - h * along)) / (2 * h)
    np.testing.assert_allclose(product, difference, rtol=1e-5, atol=1e-7)
    assert np.abs(product).max() > 1e-2


def test_half_precision_is_near_full_and_leaves_parameters_alone(monkeypatch):
    # Rounding switches a few ReLUs, which says nothing about precision: a smooth function in their place.
    monkeypatch.setattr(jax.nn, "relu", jax.nn.gelu)
    shape = (6, 6, 3)
    images, label = normal(1, 6, *shape).astype(jnp.float32), jnp.arange(6) % 3

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, model):
        loss = lambda params: -jax.nn.log_softmax(model(params, images))[jnp.arange(6), label].mean()
        return jax.grad(loss)(params)

    for full in (CNN(layers=(Convolution(8),) * 2, outputs=3), ResNet(widths=(8,), blocks=1, outputs=3)):
        half = dataclasses.replace(full, dtype="bfloat16")
        params = jax.tree.map(lambda a: a.astype(jnp.float32), full.init(KEY, shape))
        assert jax.eval_shape(half, params, images).dtype == jnp.float32
        ours, exact = gradient(params, half), gradient(params, full)
        assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {jnp.dtype("float32")}
        error = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), ours, exact)
        assert 1e-4 < max(jax.tree.leaves(error)) < 0.05


def test_a_network_trains_in_a_federation_whatever_the_client_axis():
    """Which half of the image is bright: a CNN learns it by FedAvg, side by side and one after the other alike."""
    model = CNN(layers=(Convolution(4, pool=2),), outputs=2)
    label = np.arange(24) % 2
    images = np.array(0.3 * normal(0, 24, 6, 6, 1))
    images[label == 0, :3] += 1
    images[label == 1, 3:] += 1

    @nestfed.struct
    class Halves(SingleLevel):
        def loss(self, params, batch, key):
            images, label = batch
            return -jnp.take_along_axis(jax.nn.log_softmax(model(params, images)), label[:, None], 1).mean()

    data = Rows.from_table((images, label), np.arange(24) // 8)
    task = Task.create(Halves(), data, model.init(KEY, (6, 6, 1)), batch_size=4)
    runs = [
        simulate(make("fedavg", lr=0.2, local_steps=3), task, rounds=15, evaluate_every=None, client_axis=axis)
        for axis in ("vmap", "map")
    ]
    close(runs[0].server.x, runs[1].server.x)
    assert runs[0].history["loss"][0] > 0.4 and runs[0].history["loss"][-1] < 0.1
    assert bool((model(runs[0].params(), images).argmax(1) == label).all())


# ------------------------------------------------------------------------------------------------- in the named tasks


@pytest.fixture
def table(tmp_path) -> pd.DataFrame:
    """Who is ill follows from the product of two numbers: nothing linear finds it. Written to my.csv too."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 240)).round(2)
    ill = np.where(a * b > 0, "yes", "no")
    sex, site = random.choice(["f", "m"], 240), np.repeat(["north", "south", "east"], 80)
    word = random.choice(["x", "y", "z"], 240)
    frame = pd.DataFrame({"a": a, "b": b, "word": word, "sex": sex, "site": site, "ill": ill})
    frame.to_csv(tmp_path / "my.csv", index=False)
    return frame


ROLES = {"label": "ill", "positive": "yes", "clients": "site", "group": "sex"}


@pytest.mark.parametrize("task", TASKS)
def test_every_method_of_every_task_has_its_derivatives_of_the_tabular_network(task, table, tmp_path):
    """Every method's round is traced: products with Hessians, gradients of gradients, heads and bodies."""
    prices = workbench.tabulate_costs(task, data=str(tmp_path / "my.csv"), model="tabular", batch_size=4, **ROLES)
    assert set(prices["method"]) == {method.title for method in SCENARIOS[task].methods.values()}


def test_a_network_trained_by_a_nested_method_finds_what_nothing_linear_does(table, tmp_path):
    study = workbench.run(
        "auprc", algorithm="fcsg-m", data=str(tmp_path / "my.csv"), model="tabular", steps=300, batch_size=32,
        evaluations=1, out=tmp_path / "run", progress=False, **ROLES,
    )  # fmt: skip
    final = study.record.final.iloc[0]
    assert final["test_average_precision"] > 0.8 > 0.6 > table["ill"].eq("yes").mean()
    # The saved model needs nothing but its file and new rows.
    model = TabularModel.load(next((tmp_path / "run" / "models").glob("*.npz")))
    new = table.drop(columns=["ill", "site"])
    np.testing.assert_array_equal(model.probability(new), study.model("fcsg-m").probability(new))
    unseen = model.encoder.transform(new.assign(word="never seen"))
    words = [i for i, name in enumerate(model.encoder.names) if name.startswith("word=")]
    assert words and (unseen[:, words] == 0).all()
    with pytest.raises(UserError, match="the columns b are missing; the features were fitted on a, b, word"):
        model.probability(new.drop(columns="b"))


# ------------------------------------------------------------------------------------------------- by name, mistakes


def test_models_by_name():
    assert find_model("logistic") == Perceptron() and find_model("network") == Perceptron((64,))
    assert tuple(MODELS) == task_options.MODELS
    assert find_image_model("resnet20") == ResNet() and find_image_model("cnn") == CNN()
    assert all(entry.description for entry in (*MODELS.values(), *IMAGE_MODELS.values()))
    with pytest.raises(UserError, match=r"no model 'logistics' for rows of numbers; did you mean 'logistic'\?"):
        find_model("logistics")
    with pytest.raises(UserError, match=r"no model 'ResNet-20' for images; did you mean 'resnet20'\?"):
        find_image_model("ResNet-20")
    with pytest.raises(UserError, match="no model 'transformer' for images; Known are cnn, resnet20"):
        find_image_model("transformer")


@pytest.mark.parametrize("kind", [CNN, ResNet])
def test_mistakes_with_networks(kind):
    model = kind(outputs=2)
    with pytest.raises(UserError, match="norm='layer' was given; use one of .*'group', 'batch'"):
        kind(norm="layer")
    params = model.init(KEY, (4, 4, 3))
    with pytest.raises(UserError, match="images of type uint8 were given to a network; normalise them"):
        model(params, jnp.zeros((1, 4, 4, 3), jnp.uint8))


def test_resnet_has_a_norm():
    with pytest.raises(UserError, match="norm=None was given; use one of 'group', 'batch'"):
        ResNet(norm=None)  # pyright: ignore[reportArgumentType]
