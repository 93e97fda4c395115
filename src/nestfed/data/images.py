"""Public sets of images by name; images dealt to clients, normalised and varied.

`fetch` finds the files; nothing is used before its checksum, its counts and, where it is known, the checksum of the
pixels are right. Pixels stay bytes until a model sees them: a pool of floats would be four times as large.
"""

import dataclasses
import functools
import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import lax

from nestfed.core.randomness import draw_indices
from nestfed.core.rows import Rows
from nestfed.core.settings import UserError, suggest, summarise_error
from nestfed.core.types import AnyArray, Array
from nestfed.data import partition as rules
from nestfed.data.fetch import REMEDY, Official, obtain
from nestfed.data.partition import TRAIN
from nestfed.data.table import NEAREST

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
IDX_FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


@dataclasses.dataclass(frozen=True)
class Images:
    """Images and their classes, in the order of the files."""

    train_images: np.ndarray  # uint8 [images, height, width, channels]
    train_labels: np.ndarray  # int32 [images]
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]

    def digest(self) -> str:
        """sha256 of all pixels, training images first, followed by all labels as bytes."""
        digest = hashlib.sha256()
        for array in (self.train_images, self.test_images, self.train_labels, self.test_labels):
            digest.update(np.ascontiguousarray(array, np.uint8).data)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSource(Official):
    """Where images come from and how their files are read."""

    train: int
    test: int
    classes: int
    read: Callable[..., Images]  # from the bytes of the files
    sha256: str | None = None  # of pixels and labels (`Images.digest`), whatever file they come in


# ------------------------------------------------------------------------------------------------- reading


def _read_members(content: bytes, wanted: Sequence[str]) -> list[bytes]:
    """The contents of these files of a tar.gz archive."""
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for member in archive:
                name = member.name.rsplit("/", 1)[-1]
                file = archive.extractfile(member) if name in wanted else None
                if file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error):
        raise ValueError("it is not a complete tar.gz archive") from None
    for name in wanted:
        if name not in found:
            raise ValueError(f"it does not hold {name}")
    return [found[name] for name in wanted]


def _read_records(batch: bytes, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """(images, their last labels) of a batch: an image has so many labels of a byte each, the broadest first, and then
    a red, a green and a blue plane."""
    size = labels + 3 * 32 * 32
    if len(batch) % size:
        raise ValueError(f"a batch in it has {len(batch)} bytes, images have {size} each")
    rows = np.frombuffer(batch, np.uint8).reshape(-1, size)
    images = rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, labels - 1].astype(np.int32)


def read_cifar10(content: bytes) -> Images:
    """The official archive, or an npz file with the arrays of `Images`."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with np.load(io.BytesIO(content)) as file:
            pixels = (file["train_images"], file["test_images"])
            labels = (file["train_labels"].astype(np.int32), file["test_labels"].astype(np.int32))
        return Images(pixels[0], labels[0], pixels[1], labels[1], CIFAR10_CLASSES)
    *train, test = _read_members(content, (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"))
    return Images(*_read_records(b"".join(train), 1), *_read_records(test, 1), CIFAR10_CLASSES)


def read_cifar100(content: bytes) -> Images:
    """The official archive; an image has the label of its superclass and then its own."""
    train, test, names = _read_members(content, ("train.bin", "test.bin", "fine_label_names.txt"))
    return Images(*_read_records(train, 2), *_read_records(test, 2), tuple(names.decode("ascii").split()))


def read_idx(content: bytes) -> np.ndarray:
    """An array of bytes: two zeros, the code of the type, the number of dimensions, the dimensions, the values."""
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zeros or kind != 8:
        raise ValueError(f"it starts with {content[:4].hex()}, an idx file of bytes with 000008")
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_files(
    train_images: bytes, train_labels: bytes, test_images: bytes, test_labels: bytes, class_names: Sequence[str]
) -> Images:
    return Images(
        train_images=read_idx(train_images)[..., None],
        train_labels=read_idx(train_labels).astype(np.int32),
        test_images=read_idx(test_images)[..., None],
        test_labels=read_idx(test_labels).astype(np.int32),
        class_names=tuple(class_names),
    )


# ------------------------------------------------------------------------------------------------- sources


def _make_idx_source(folder: str, address: str, class_names: Sequence[str], md5: Sequence[str]) -> ImageSource:
    files = tuple(f"{folder}/{file}" for file in IDX_FILES)  # several sets have files of these names
    return ImageSource(
        files=files,
        address=address,
        # Of the files inside the .gz: how they were compressed differs from distributor to distributor.
        md5=dict(zip(files, md5, strict=True)),
        train=60000,
        test=10000,
        classes=10,
        read=functools.partial(read_idx_files, class_names=class_names),
    )


TORONTO = "https://www.cs.toronto.edu/~kriz"

IMAGE_SOURCES = {
    "cifar10": ImageSource(
        files=("cifar-10-binary.tar.gz",),
        address=f"{TORONTO}/cifar-10-binary.tar.gz",
        md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        other_names=("cifar10.npz",),  # as tools/fetch_cifar10.py writes it
        train=50000,
        test=10000,
        classes=10,
        read=read_cifar10,
        # Computed by tools/fetch_cifar10.py from images that, written in the layout of the official binary batches,
        # have the sha256 sums of these batches.
        sha256="795f1793d7b8f8883c578442a02455d2469d49685325e98ea0621b15f4a88d69",
    ),
    "cifar100": ImageSource(
        files=("cifar-100-binary.tar.gz",),
        address=f"{TORONTO}/cifar-100-binary.tar.gz",
        md5={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        train=50000,
        test=10000,
        classes=100,
        read=read_cifar100,
    ),
    # The mirror of the Common Visual Data Foundation: the author's own page no longer serves the files.
    "mnist": _make_idx_source(
        "mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        tuple("0123456789"),
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion-mnist": _make_idx_source(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        FASHION_CLASSES,
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ),
}


def load_images(name: str) -> Images:
    """A public set of images by its name: cifar10, cifar100, mnist or fashion-mnist."""
    if name not in IMAGE_SOURCES:
        raise UserError(
            f"unknown images {name!r}{suggest(name, IMAGE_SOURCES, *NEAREST)}; known are {', '.join(IMAGE_SOURCES)}."
        )
    source = IMAGE_SOURCES[name]
    return obtain(name, source, lambda contents, where: _read(name, source, contents, where))


def _read(name: str, source: ImageSource, contents: dict[str, bytes], where: str) -> Images:
    files = " and ".join(contents)
    refusal = lambda problem: UserError(
        f"{files} from {where} cannot be used as the images {name!r} ({problem}). {REMEDY}"
    )
    try:
        images = source.read(*contents.values())
        problem = _find_difference(images, source)
    except (ValueError, LookupError, TypeError, OSError, struct.error, zipfile.BadZipFile) as error:
        raise refusal(summarise_error(error)) from None
    if problem:
        raise refusal(problem)
    return images


def _find_difference(images: Images, source: ImageSource) -> str | None:
    """What tells these images from those that the source stands for."""
    found = (len(images.train_images), len(images.test_images), len(images.class_names))
    expected = (source.train, source.test, source.classes)
    if found != expected:
        words = "{} training images, {} test images and {} classes"
        return f"it holds {words.format(*found)}, expected are {words.format(*expected)}"
    for pixels, labels in ((images.train_images, images.train_labels), (images.test_images, images.test_labels)):
        if labels.shape != pixels.shape[:1] or labels.min() < 0 or labels.max() >= source.classes:
            return f"its labels are not one number from 0 to {source.classes - 1} per image"
    if source.sha256 and images.digest() != source.sha256:
        return f"its pixels and labels have the sha256 sum {images.digest()}, the official ones {source.sha256}"
    return None


# ------------------------------------------------------------------------------------------------- dealing


@dataclasses.dataclass(frozen=True)
class FederatedImages:
    """Training images dealt to clients; the images for choosing settings and for the final test are nobody's."""

    rows: Rows  # columns "image", uint8 [images, height, width, channels], and "label", int32 [images]
    validation_images: np.ndarray
    validation_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    mean: np.ndarray  # float32 [channels]: of the training images, for `normalise`
    deviation: np.ndarray
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]

    @property
    def aside(self) -> dict[str, dict[str, np.ndarray]]:
        """Images that nobody trains on, "validation" and "test", as far as there are any; columns as in the rows."""
        parts = {
            "validation": {"image": self.validation_images, "label": self.validation_labels},
            "test": {"image": self.test_images, "label": self.test_labels},
        }
        return {name: part for name, part in parts.items() if len(part["label"])}

    def count_holdings(self) -> pd.DataFrame:
        """Training images per client and class, as tables of people have them: classes are groups, labels are none."""
        label = self.rows.columns["label"]
        client, zeros = np.repeat(np.arange(self.rows.clients), self.rows.sizes), np.zeros(len(label), int)
        table = rules.count_holdings(client, label, zeros, zeros + TRAIN, self.client_names, self.class_names)
        return table.drop(columns="label")


def deal_images(
    images: Images, *, partition: str = "iid", clients: int | None = None, validation: float = 0.0, seed: int = 0
) -> FederatedImages:
    """Deal the training images to clients.

    partition   see `assign`; ratios are by class
    clients     their number; None: three, or as many as there are ratios
    validation  the share of each class's training images that is set aside
    """
    if not 0 <= validation < 1:
        raise UserError(f"validation={validation} was given; it must be from 0 to below 1.")
    aside = rules.split_by_group(images.train_labels, validation, seed)
    pixels, labels = images.train_images[~aside], images.train_labels[~aside]
    client, client_names = rules.assign(partition, labels=labels, groups=labels, clients=clients, seed=seed)
    mean, deviation = measure_channels(pixels)
    return FederatedImages(
        rows=Rows.from_table({"image": pixels, "label": labels}, client),
        validation_images=images.train_images[aside],
        validation_labels=images.train_labels[aside],
        test_images=images.test_images,
        test_labels=images.test_labels,
        mean=mean,
        deviation=deviation,
        class_names=images.class_names,
        client_names=client_names,
    )


# ------------------------------------------------------------------------------------------------- inputs of a model


def measure_channels(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, float32, with pixels from 0 to 1; 1 for a channel of one value."""
    # Counts of the 256 values: exact, and no copy of all pixels as floats.
    counts = np.stack([np.bincount(channel, minlength=256) for channel in images.reshape(-1, images.shape[-1]).T])
    values, shares = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    deviation = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return mean.astype(np.float32), np.where(deviation > 0, deviation, 1).astype(np.float32)


def normalise(images: AnyArray, mean: AnyArray, deviation: AnyArray) -> Array:
    """Bytes [..., channels] as numbers of mean 0 and deviation 1, of the type of `mean`."""
    per_channel = lambda a: jnp.asarray(a).reshape((1,) * (jnp.ndim(images) - 1) + (-1,))
    mean, deviation = per_channel(mean), per_channel(deviation)
    return (jnp.asarray(images).astype(mean.dtype) / 255 - mean) / deviation


def crop_and_flip(images: Array, key: Array, padding: int = 4) -> Array:
    """Each image moved by up to `padding` pixels both ways, with zeros from outside, and mirrored or not: all equally
    likely. Meant for normalised images, where zero is the mean colour."""
    number, height, width, channels = images.shape
    places = 2 * padding + 1
    drawn = draw_indices(key, number, jnp.uint32(2 * places**2))
    top, left, mirrored = drawn // (2 * places), drawn // 2 % places, drawn % 2 == 1
    around = (padding, padding)
    padded = jnp.pad(images, ((0, 0), around, around, (0, 0)))
    cut = lambda image, i, j: lax.dynamic_slice(image, (i, j, jnp.zeros_like(i)), (height, width, channels))
    moved = jax.vmap(cut)(padded, top, left)
    return jnp.where(mirrored[:, None, None, None], moved[:, :, ::-1], moved)
