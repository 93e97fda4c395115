"""Networks as pairs of functions: `init(key, shape)` makes a parameter tree, calling the model gives outputs.

Any such pair serves; these are the ones that the shipped tasks offer, and the pieces they are made of. Clients have
weights of their own, so everything here must be fast under `vmap` over the weights: a convolution is shifted slices and
one matrix product, because vmapped kernels of XLA's own convolution become grouped convolutions, and its gradients
are slow inside a loop on a CPU.

Networks take images as [rows, height, width, channels] and turn them into planes, [channels, height, width, rows]:
slices, windows and patches are then long runs of memory, and a training step on a CPU takes 0.7 of the time.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.settings import UserError, suggest
from nestfed.core.types import Array, PyTree

# ------------------------------------------------------------------------------------------------- pieces


def dense(layer: PyTree, inputs: Array) -> Array:
    """Return inputs @ weight + bias, computed in the type of the inputs."""
    return _add(inputs @ layer["weight"].astype(inputs.dtype), layer["bias"][None])


def _add(values: Array, bias: Array) -> Array:
    # This adds in the bias's own precision: the gradient of a bias is a long sum, which half precision would spoil.
    return (values + bias).astype(values.dtype)


def init_dense(key: Array, inputs: int, outputs: int, gain: float = 1.0) -> PyTree:
    """Return normal weights of variance gain / inputs (gain 2 is He's, for layers before a ReLU) and a bias of zero."""
    weight = jax.random.normal(key, (inputs, outputs)) * math.sqrt(gain) / math.sqrt(inputs)
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def convert_to_planes(images: Array) -> Array:
    """Turn [rows, height, width, channels] into [channels, height, width, rows]."""
    return images.transpose(3, 1, 2, 0)


def convolve(planes: Array, kernel: Array, stride: int = 1, padding: int | str = "SAME", pool: int = 1) -> Array:
    """Convolve planes with a kernel [height, width, channels, outputs], in the type of the planes.

    padding    "SAME" (outputs: inputs / stride, rounded up), "VALID" (none), or a number of zeros at every border
    pool       keeps the largest of every pool x pool outputs; a border that fills no such window is left out
    """
    height, width, channels, outputs = kernel.shape
    if planes.shape[0] != channels:
        raise UserError(
            f"images of {planes.shape[0]} channels were given to a kernel for {channels}; initialise the network with "
            "the shape of the images, (height, width, channels)."
        )
    sides, windows = planes.shape[1:3], (height, width)
    if isinstance(padding, str):
        pads = [tuple(map(int, pair)) for pair in lax.padtype_to_pads(sides, windows, (stride, stride), padding)]
    else:
        pads = [(padding, padding)] * 2
    high, wide = (
        (side + sum(pair) - window) // stride + 1 for side, pair, window in zip(sides, pads, windows, strict=True)
    )
    if min(high, wide) < 1:
        raise UserError(
            f"images of {sides[0]} x {sides[1]} are too small for a kernel of {height} x {width} with padding "
            f"{padding!r}; use larger images, a smaller kernel or more padding."
        )
    if min(high, wide) < pool:
        raise _refuse_to_pool(high, wide, pool)
    # The outputs at one place of all windows are a convolution of their own, of stride x pool: each is a product, and
    # the largest of these matrices is kept. Strided slices are made once; all shifts are then runs of memory.
    high, wide, jump = high // pool, wide // pool, stride * pool
    padded = jnp.pad(planes, ((0, 0), *pads, (0, 0)))
    strided = [[padded[:, i::jump, j::jump] for j in range(jump)] for i in range(jump)]
    shifted = lambda i, j: strided[i % jump][j % jump][:, i // jump : i // jump + high, j // jump : j // jump + wide]
    flat = height * width * channels
    weights = kernel.reshape(flat, outputs).astype(planes.dtype).T

    def product(first: int, second: int) -> Array:
        corners = [(first * stride + i, second * stride + j) for i in range(height) for j in range(width)]
        return weights @ jnp.concatenate([shifted(i, j) for i, j in corners]).reshape(flat, -1)

    products = [product(first, second) for first in range(pool) for second in range(pool)]
    return functools.reduce(_pick_larger, products).reshape(outputs, high, wide, -1)


@jax.custom_jvp
def _pick_larger(first: Array, second: Array) -> Array:
    return jnp.maximum(first, second)


@_pick_larger.defjvp
def _pick_larger_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Among equals the first counts, as elsewhere in the field; JAX's own rule halves, which takes longer."""
    (first, second), (its_change, other_change) = primals, tangents
    chosen = first >= second
    return _pick_larger(first, second), jnp.where(chosen, its_change, other_change)


def conv2d(images: Array, kernel: Array, stride: int = 1, padding: int | str = "SAME") -> Array:
    """Do as `convolve`, for images [rows, height, width, channels] in networks of your own."""
    return convolve(convert_to_planes(images), kernel, stride, padding).transpose(3, 1, 2, 0)


def init_kernel(key: Array, size: int, inputs: int, outputs: int) -> Array:
    """Return He's initialisation: normal numbers of variance 2 / (how many numbers one output sees)."""
    return jax.random.normal(key, (size, size, inputs, outputs)) * math.sqrt(2 / (size * size * inputs))


def _refuse_to_pool(height: int, width: int, window: int) -> UserError:
    return UserError(
        f"images of {height} x {width} are too small to pool windows of {window} x {window}; pool less often, or use "
        "larger images."
    )


def _cut_windows(planes: Array, window: int) -> Array:
    """Return windows side by side, [channels, height, window, width, window, rows], without what does not fill one."""
    channels, height, width, rows = planes.shape
    if min(height, width) < window:
        raise _refuse_to_pool(height, width, window)
    high, wide = height // window, width // window
    return planes[:, : high * window, : wide * window].reshape(channels, high, window, wide, window, rows)


def max_pool(planes: Array, window: int = 2) -> Array:
    """Return the largest number of every window; windows lie side by side, and a border that fills none is left out."""
    if window == 1:
        return planes
    windows = _cut_windows(planes, window)
    lines = functools.reduce(_pick_larger, [windows[:, :, i] for i in range(window)])
    return functools.reduce(_pick_larger, [lines[:, :, :, i] for i in range(window)])


def average_pool(planes: Array, window: int = 2) -> Array:
    """Return the mean of every window; windows lie side by side, and a border that fills none is left out."""
    return planes if window == 1 else _cut_windows(planes, window).mean((2, 4))


GROUPS = 8
EPSILON = 1e-5


def _standardise(values: Array, axes: tuple[int, ...]) -> Array:
    """Give values mean 0 and variance 1 over the axes, with statistics of at least single precision."""
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    centred = wide - wide.mean(axes, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(axes, keepdims=True) + EPSILON)


def group_norm(layer: PyTree, planes: Array, groups: int = GROUPS) -> Array:
    """Standardise every image and group of channels, then scale and shift each channel."""
    channels, *rest = planes.shape
    if channels % groups:
        raise UserError(
            f"{channels} channels cannot be put into {groups} equal groups for GroupNorm; use a multiple of {groups}, "
            "or norm='batch'."
        )
    grouped = planes.reshape(groups, channels // groups, *rest)
    return _scale_and_shift(layer, _standardise(grouped, (1, 2, 3)).reshape(planes.shape), planes.dtype)


def batch_norm(layer: PyTree, planes: Array) -> Array:
    """Standardise every channel over the batch at hand, in training and in use; then scale and shift it.

    There are no running statistics: what a network answers for an image depends on the others in the batch.
    """
    return _scale_and_shift(layer, _standardise(planes, (1, 2, 3)), planes.dtype)


def _scale_and_shift(layer: PyTree, values: Array, dtype: Any) -> Array:
    scale, shift = _spread_over_channels(layer["scale"]), _spread_over_channels(layer["shift"])
    return (values * scale + shift).astype(dtype)


def _spread_over_channels(vector: Array) -> Array:
    return vector[:, None, None, None]


def init_norm(channels: int) -> PyTree:
    return {"scale": jnp.ones(channels), "shift": jnp.zeros(channels)}


NORMS = {"group": group_norm, "batch": batch_norm}


def _check_norm(norm: str | None, choices: tuple[str | None, ...]) -> None:
    if norm not in choices:
        raise UserError(f"norm={norm!r} was given; use one of {', '.join(map(repr, choices))}.")


# ------------------------------------------------------------------------------------------------- rows of numbers


class RowModel(abc.ABC):
    """A model for rows of numbers, in two parts: a body that makes a representation of a row, and a head."""

    outputs: int

    @abc.abstractmethod
    def init(self, key: Array, features: int) -> PyTree:
        """Return parameters for rows of so many numbers."""

    @abc.abstractmethod
    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return (body, head)."""

    @abc.abstractmethod
    def join(self, body: PyTree, head: PyTree) -> PyTree:
        """Return the parameters of these parts."""

    @abc.abstractmethod
    def represent(self, body: PyTree, inputs: Array) -> Array:
        """Return what the head sees, [rows, width]."""

    def decide(self, head: PyTree, representation: Array) -> Array:
        """Return logits, [rows, outputs]."""
        return dense(head, representation)

    def __call__(self, params: PyTree, inputs: Array) -> Array:
        """Return logits: [rows] for one output, [rows, outputs] for several."""
        inputs = inputs.astype(jnp.result_type(inputs, *jax.tree.leaves(params)))
        body, head = self.split(params)
        logits = self.decide(head, self.represent(body, inputs))
        return logits[:, 0] if self.outputs == 1 else logits


@dataclasses.dataclass(frozen=True)
class Perceptron(RowModel):
    """Has fully connected layers, of which the last one is the head.

    Without a hidden layer it is logistic regression: its body are the slopes, its head the intercepts.
    """

    hidden: tuple[int, ...] = ()
    outputs: int = 1

    def init(self, key, features):
        widths = (features, *self.hidden, self.outputs)
        keys = jax.random.split(key, len(widths) - 1)
        return [init_dense(k, *sides) for k, sides in zip(keys, zip(widths, widths[1:], strict=False), strict=True)]

    def split(self, params):
        *hidden, last = params
        return (hidden, last) if hidden else (last["weight"], last["bias"])

    def join(self, body, head):
        return [*body, head] if self.hidden else [{"weight": body, "bias": head}]

    def represent(self, body, inputs):
        if not self.hidden:
            return inputs @ body
        for layer in body:
            inputs = jax.nn.relu(dense(layer, inputs))
        return inputs

    def decide(self, head, representation):
        return super().decide(head, representation) if self.hidden else representation + head[None]


@dataclasses.dataclass(frozen=True)
class TabularNetwork(RowModel):
    """Adds embeddings of a row's columns, then what residual blocks make of their sum.

    It reads rows in the recipe "piecewise": a category's embedding is its row of the first matrix, a number's the sum
    of those of its bins, the last of them in part. A block is x + W2 silu(W1 norm(x)), the pre-norm block of Gorishniy,
    Rubachev, Khrulkov and Babenko, "Revisiting deep learning models for tabular data", NeurIPS 2021, arXiv:2106.11959,
    with a norm that looks at one row alone, and SiLU, which has second derivatives.
    """

    width: int = 32
    blocks: int = 2
    outputs: int = 1

    def init(self, key, features):
        first, last, *keys = jax.random.split(key, 2 + 2 * self.blocks)
        layer = lambda k: init_dense(k, self.width, self.width)
        blocks = [
            {"norm": init_norm(self.width), "in": layer(one), "out": layer(two)}
            for one, two in zip(keys[::2], keys[1::2], strict=True)
        ]
        body = {
            "embedding": init_dense(first, features, self.width),
            "blocks": blocks,
            "norm": init_norm(self.width),
        }
        return {"body": body, "head": init_dense(last, self.width, self.outputs)}

    def split(self, params):
        return params["body"], params["head"]

    def join(self, body, head):
        return {"body": body, "head": head}

    def represent(self, body, inputs):
        values = dense(body["embedding"], inputs)
        for block in body["blocks"]:
            inside = jax.nn.silu(dense(block["in"], layer_norm(block["norm"], values)))
            values = values + dense(block["out"], inside)
        return layer_norm(body["norm"], values)


def layer_norm(layer: PyTree, values: Array) -> Array:
    """Standardise every row, then scale and shift each of its numbers."""
    return (_standardise(values, (-1,)) * layer["scale"][None] + layer["shift"][None]).astype(values.dtype)


def _compute_logits(head: PyTree, features: Array) -> Array:
    logits = dense(head, features)
    return logits[:, 0] if logits.shape[1] == 1 else logits


# ------------------------------------------------------------------------------------------------- images


@dataclasses.dataclass(frozen=True)
class ImageModel(abc.ABC):
    """A network for images: an extractor of features and a linear head, {"extractor": ..., "head": ...}.

    `dtype` is the type to compute in, such as "bfloat16"; parameters, statistics of norms and logits keep their own.
    """

    outputs: int = 10
    dtype: str | None = None

    @abc.abstractmethod
    def init_extractor(self, key: Array, shape: tuple[int, int, int]) -> PyTree:
        """Return the parameters of `features`."""

    @abc.abstractmethod
    def features(self, extractor: PyTree, images: Array) -> Array:
        """Return what the head sees, [rows, features]."""

    def init(self, key: Array, shape: tuple[int, int, int]) -> PyTree:
        """Return parameters for images of this shape, (height, width, channels)."""
        body, head = jax.random.split(key)
        extractor = self.init_extractor(body, shape)
        width = jax.eval_shape(self.features, extractor, jax.ShapeDtypeStruct((1, *shape), jnp.float32)).shape[1]
        return {"extractor": extractor, "head": init_dense(head, width, self.outputs)}

    def __call__(self, params: PyTree, images: Array) -> Array:
        """Return logits: [rows] for one output, [rows, outputs] for several."""
        head = params["head"]
        return _compute_logits(head, self.features(params["extractor"], images).astype(head["weight"].dtype))

    def _planes(self, images: Array, parameter: Array) -> Array:
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise UserError(
                f"images of type {images.dtype} were given to a network; normalise them to floating-point numbers "
                "first, for example (images / 255 - mean) / deviation."
            )
        return convert_to_planes(images.astype(self.dtype or jnp.promote_types(images.dtype, parameter.dtype)))


class Convolution(NamedTuple):
    """Describes a layer of a CNN: a kernel of kernel x kernel, then the largest of every pool x pool outputs."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int | str = "SAME"
    pool: int = 1


@dataclasses.dataclass(frozen=True)
class CNN(ImageModel):
    """Has convolutions (each with ReLU, a norm if there is one, and pooling), then fully connected layers."""

    layers: tuple[Convolution, ...] = (Convolution(32, pool=2), Convolution(64, pool=2), Convolution(64))
    hidden: tuple[int, ...] = ()
    norm: str | None = None

    def __post_init__(self) -> None:
        _check_norm(self.norm, (None, *NORMS))

    def init_extractor(self, key, shape):
        keys = iter(jax.random.split(key, len(self.layers) + len(self.hidden)))
        convolutions, hidden, channels = [], [], shape[2]
        for layer in self.layers:
            kernel = init_kernel(next(keys), layer.kernel, channels, layer.channels)
            norm = {} if self.norm is None else {"norm": init_norm(layer.channels)}
            convolutions.append({"kernel": kernel, "bias": jnp.zeros(layer.channels), **norm})
            channels = layer.channels
        image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        width = jax.eval_shape(self._convolve, convolutions, image).shape[1]
        for wanted in self.hidden:
            hidden.append(init_dense(next(keys), width, wanted, gain=2.0))
            width = wanted
        return {"convolutions": convolutions, "hidden": hidden}

    def features(self, extractor, images):
        values = self._convolve(extractor["convolutions"], images)
        for layer in extractor["hidden"]:
            values = jax.nn.relu(dense(layer, values))
        return values

    def _convolve(self, convolutions: PyTree, images: Array) -> Array:
        values = self._planes(images, convolutions[0]["kernel"])
        for layer, params in zip(self.layers, convolutions, strict=True):
            # A ReLU and a bias keep the order of numbers: after pooling they do the same to fewer numbers.
            at_once = layer.pool if self.norm is None else 1
            values = convolve(values, params["kernel"], layer.stride, layer.padding, at_once)
            values = jax.nn.relu(_add(values, _spread_over_channels(params["bias"])))
            if self.norm is not None:
                values = max_pool(NORMS[self.norm](params["norm"], values), layer.pool)
        return values.transpose(3, 1, 2, 0).reshape(values.shape[3], -1)


@dataclasses.dataclass(frozen=True)
class ResNet(ImageModel):
    """The residual networks for small images, of 2 blocks x stages + 2 layers; the defaults make ResNet20.

    They are those of He, Zhang, Ren and Sun, "Deep residual learning for image recognition", CVPR 2016,
    doi:10.1109/CVPR.2016.90, arXiv:1512.03385.

    A shortcut between stages takes every second pixel and fills the new channels with zeros (their option A), so that
    it has no parameters. `norm` is "group" (8 groups; an image's output depends on that image alone) or "batch".
    """

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 3
    norm: str = "group"

    def __post_init__(self) -> None:
        _check_norm(self.norm, tuple(NORMS))

    @property
    def _blocks(self) -> list[tuple[int, int, int]]:
        """Return (channels in, channels out, stride) of every block."""
        sides = zip((self.widths[0], *self.widths), self.widths, strict=False)
        first = [(inputs, outputs, 1 if stage == 0 else 2) for stage, (inputs, outputs) in enumerate(sides)]
        return [one for start in first for one in (start, *[(start[1], start[1], 1)] * (self.blocks - 1))]

    def init_extractor(self, key, shape):
        keys = iter(jax.random.split(key, 1 + 2 * len(self._blocks)))
        layer = lambda inputs, outputs: {
            "kernel": init_kernel(next(keys), 3, inputs, outputs),
            "norm": init_norm(outputs),
        }
        return {
            "stem": layer(shape[2], self.widths[0]),
            "blocks": [(layer(inputs, outputs), layer(outputs, outputs)) for inputs, outputs, _ in self._blocks],
        }

    def features(self, extractor, images):
        normed = lambda layer, values, stride=1: NORMS[self.norm](
            layer["norm"], convolve(values, layer["kernel"], stride, padding=1)
        )
        stem = extractor["stem"]
        values = jax.nn.relu(normed(stem, self._planes(images, stem["kernel"])))
        for (inputs, outputs, stride), (first, second) in zip(self._blocks, extractor["blocks"], strict=True):
            shortcut = jnp.pad(values[:, ::stride, ::stride], ((0, outputs - inputs), (0, 0), (0, 0), (0, 0)))
            inside = jax.nn.relu(normed(first, values, stride))
            values = jax.nn.relu(shortcut + normed(second, inside))
        return values.mean((1, 2)).T


# ------------------------------------------------------------------------------------------------- by name

M = TypeVar("M")


class Entry(NamedTuple, Generic[M]):
    model: M
    description: str


MODELS: dict[str, Entry[RowModel]] = {
    "logistic": Entry(Perceptron(), "logistic regression"),
    "network": Entry(Perceptron((64,)), "one hidden layer of 64"),
    "tabular": Entry(TabularNetwork(), "embeddings of all columns, then residual blocks"),
}
IMAGE_MODELS: dict[str, Entry[ImageModel]] = {
    "cnn": Entry(CNN(), "three 3 x 3 convolutions of 32, 64 and 64 channels; 97,290 parameters on 32 x 32 colours"),
    "resnet20": Entry(ResNet(), "ResNet20 with GroupNorm; 269,722 parameters"),
    "resnet20-batchnorm": Entry(ResNet(norm="batch"), "ResNet20 with statistics of the batch at hand"),
}


def find_model(name: str) -> RowModel:
    """Return a model for rows of numbers; `dataclasses.replace(model, outputs=...)` gives it classes."""
    return _find(name, MODELS, "rows of numbers")


def describe_model(model: RowModel) -> dict[str, Any]:
    """Return plain text and numbers, for files."""
    fields: Any = model  # all of them are dataclasses
    return {"kind": type(model).__name__, **dataclasses.asdict(fields)}


def make_model(description: Mapping[str, Any]) -> RowModel:
    """Return the model that `describe_model` described."""
    kinds: dict[str, type[RowModel]] = {kind.__name__: kind for kind in (Perceptron, TabularNetwork)}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in description.items()}
    return kinds[description["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def find_image_model(name: str) -> ImageModel:
    """Return a model for images; `dataclasses.replace(model, outputs=..., dtype=...)` changes it."""
    return _find(name, IMAGE_MODELS, "images")


def _find(name: str, known: Mapping[str, Entry[M]], inputs: str) -> M:
    if name not in known:
        hint = f"{suggest(name, known, otherwise=';')} Known are {', '.join(known)}."
        raise UserError(f"there is no model {name!r} for {inputs}{hint}")
    return known[name].model
