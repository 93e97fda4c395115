"""FEMNIST: handwritten digits and letters at 28 x 28 by the person who wrote them, as LEAF puts them together.

LEAF's program makes the files from NIST's images; nobody serves them. `fetch` finds `femnist.json`, one file of its
output, or `femnist_leaf_sample.npz`, a sample that was packed before. Training and test images of LEAF are put together
here: who splits a writer's images does so by a rule of their own.
"""

import dataclasses
import io
import json
import zipfile
from typing import Any

import numpy as np

from nestfed.core.settings import UserError, summarise_error
from nestfed.data.fetch import REMEDY, Official, obtain

SIDE = 28
CLASS_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
SAMPLE = "femnist_leaf_sample.npz"
SOURCE = Official(
    files=("femnist.json",),
    address=None,
    origin="the program of LEAF, https://github.com/TalwalkarLab/leaf, makes them from NIST's images",
    md5={SAMPLE: "4873844e1009c9b381b45c88430d5671"},
    other_names=(SAMPLE,),
)


@dataclasses.dataclass(frozen=True)
class Femnist:
    """All images, in the order of the file. No image is there twice for one writer."""

    images: np.ndarray  # uint8 [images, 28, 28, 1], paper 255 and ink 0
    labels: np.ndarray  # int32 [images], into CLASS_NAMES
    writer: np.ndarray  # int32 [images], into `writers`
    writers: tuple[str, ...]


def load_femnist() -> Femnist:
    """FEMNIST from the folder NESTFED_DATA or the cache folder."""
    return obtain("femnist", SOURCE, _read)


def _read(contents: dict[str, bytes], where: str) -> Femnist:
    ((name, content),) = contents.items()
    try:
        return _check(*(read_sample(content) if name == SAMPLE else read_leaf(content)))
    except (ValueError, LookupError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{name} from {where} cannot be used as FEMNIST ({summarise_error(error)}). {REMEDY}") from None


def read_sample(content: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """An npz file with the arrays x, y, writer and writers."""
    with np.load(io.BytesIO(content)) as file:
        return file["x"], file["y"], file["writer"], file["writers"]


def read_leaf(content: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """A JSON file of LEAF: for every writer rows of 784 numbers from 0 to 1, and labels."""
    found = json.loads(content)
    writers = found["users"]
    rows = [found["user_data"][writer] for writer in writers]
    pixels = np.concatenate([np.asarray(row["x"], float).reshape(-1, SIDE, SIDE) for row in rows])
    labels = np.concatenate([np.asarray(row["y"], int) for row in rows])
    return np.rint(255 * pixels), labels, np.repeat(np.arange(len(rows)), [len(row["y"]) for row in rows]), writers


def _check(pixels: np.ndarray, labels: np.ndarray, writer: np.ndarray, writers: Any) -> Femnist:
    if pixels.shape[1:] != (SIDE, SIDE) or not len(pixels) == len(labels) == len(writer):
        raise ValueError(f"its images have the shape {pixels.shape}, with {len(labels)} labels")
    if pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(f"its pixels go from {pixels.min():g} to {pixels.max():g}, not from 0 to 255")
    if labels.min() < 0 or labels.max() >= len(CLASS_NAMES):
        raise ValueError(f"its labels go from {labels.min()} to {labels.max()}, not from 0 to {len(CLASS_NAMES) - 1}")
    # LEAF's output has one image of a writer twice, possibly once for training and once for the test.
    pixels = pixels.astype(np.uint8)
    first: dict[tuple[int, bytes], int] = {}
    for i, (own, image) in enumerate(zip(writer.tolist(), pixels, strict=True)):
        first.setdefault((own, image.tobytes()), i)
    rows = np.fromiter(first.values(), int)
    return Femnist(
        images=np.ascontiguousarray(pixels[rows, :, :, None]),
        labels=labels[rows].astype(np.int32),
        writer=writer[rows].astype(np.int32),
        writers=tuple(map(str, writers)),
    )
