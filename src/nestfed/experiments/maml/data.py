"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings of each, at 28 x 28 with ink as 255.

`fetch` finds the two official archives, whose drawings (105 x 105, black on white) are inverted and reduced here, or
`omniglot28.npz`, in which that was done before. A row of a federation is a character with all its drawings.
"""

import dataclasses
import functools
import hashlib
import io
import zipfile
import zlib

import numpy as np

from nestfed.core.rows import Rows
from nestfed.core.settings import UserError, summarise_error
from nestfed.data.fetch import REMEDY, Official, obtain
from nestfed.experiments.image_tasks import blow_up

CHARACTERS, DRAWERS, SIDE = 1623, 20, 28
BACKGROUND = 964  # characters in the first archive
# The split 1028 / 172 / 423 of Vinyals et al., "Matching networks for one shot learning", NeurIPS 2016, as Torchmeta
# ships it: these alphabets for validation, and for the test the last characters of the second archive, from the 42nd
# of Gurmukhi on, in the order of alphabets and characters.
VALIDATION_ALPHABETS = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")
TEST_CHARACTERS = 423

PREPARED = "omniglot28.npz"
PREPARED_SHA256 = (
    "d76a1451bb8709f84cd8678e2c1e218339e26c1e23790e402fb39f8144e9a3db"  # of its drawings, in the order of the file
)
ARCHIVES = {
    "images_background": "68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation": "6b91aef0f799c5bb55b94e3f2daec811",
}


@dataclasses.dataclass(frozen=True)
class Omniglot:
    """All characters, in the order of archive, alphabet and number."""

    images: np.ndarray  # uint8 [characters, drawings, 28, 28]
    alphabets: tuple[str, ...]  # of every character
    background: np.ndarray  # bool [characters]: in the first archive

    def split(self) -> dict[str, np.ndarray]:
        """The numbers of the characters for training, validation and test."""
        validation = self.background & np.isin(self.alphabets, VALIDATION_ALPHABETS)
        test = np.arange(len(self.images)) >= len(self.images) - TEST_CHARACTERS
        return {
            name: np.flatnonzero(mask)
            for name, mask in {"train": ~validation & ~test, "validation": validation, "test": test}.items()
        }


def make_up_omniglot() -> Omniglot:
    """As many drawings of as many characters: a coarse pattern each, under noise. They mean nothing."""
    random = np.random.default_rng(0)
    patterns = blow_up(random.integers(0, 2, (CHARACTERS, 1, SIDE // 4, SIDE // 4), np.uint8))
    noise = random.integers(0, 128, (CHARACTERS, DRAWERS, SIDE, SIDE), np.uint8)
    background = np.arange(CHARACTERS) < BACKGROUND
    alphabets = tuple(VALIDATION_ALPHABETS[0] if i < 172 else "made up" for i in range(CHARACTERS))
    return Omniglot(127 * patterns + noise, alphabets, background)


def load_omniglot() -> Omniglot:
    """Omniglot from the folder NESTFED_DATA, the cache folder, or the official host."""
    first, second = (
        Official(
            files=(f"{archive}.zip",),
            # Not ending in ".zip": the archive itself is wanted, not a file in it.
            address=f"https://github.com/brendenlake/omniglot/blob/master/python/{archive}.zip?raw=true",
            md5={f"{archive}.zip": md5},
            other_names=(PREPARED,) if archive == "images_background" else (),
        )
        for archive, md5 in ARCHIVES.items()
    )
    found = obtain("omniglot", first, functools.partial(_read, background=True))
    if len(found.images) == BACKGROUND:
        other = obtain("omniglot", second, functools.partial(_read, background=False))
        found = Omniglot(
            np.concatenate([found.images, other.images]),
            (*found.alphabets, *other.alphabets),
            np.concatenate([found.background, other.background]),
        )
    if len(found.images) != CHARACTERS:
        raise UserError(f"Omniglot has {CHARACTERS} characters, {len(found.images)} were found. {REMEDY}")
    return found


def _read(contents: dict[str, bytes], where: str, background: bool) -> Omniglot:
    ((name, content),) = contents.items()
    try:
        return read_prepared(content) if name == PREPARED else read_archive(content, background)
    except (ValueError, LookupError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{name} from {where} cannot be used as the characters of Omniglot ({summarise_error(error)}). {REMEDY}"
        ) from None


def read_prepared(content: bytes) -> Omniglot:
    """An npz file with the drawings at 28 x 28, sorted by archive, alphabet, character and drawer."""
    with np.load(io.BytesIO(content)) as file:
        pixels, alphabet, names, split = (file[name] for name in ("x", "alphabet", "alphabets", "split"))
    digest = hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest()
    if digest != PREPARED_SHA256:
        raise ValueError(f"its drawings have the sha256 sum {digest}, expected is {PREPARED_SHA256}")
    return Omniglot(
        images=pixels.reshape(CHARACTERS, DRAWERS, SIDE, SIDE),
        alphabets=tuple(str(names[i]) for i in alphabet[::DRAWERS]),
        background=split[::DRAWERS] == 0,
    )


def read_archive(content: bytes, background: bool) -> Omniglot:
    """An official archive: FOLDER/ALPHABET/characterNN/FILE_DRAWER.png."""
    from PIL import Image, ImageOps  # comes with matplotlib; prepared files need neither

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        drawings = sorted(name for name in archive.namelist() if name.endswith(".png"))
        characters: dict[tuple[str, str], list[np.ndarray]] = {}
        for name in drawings:
            *_, alphabet, character, _ = name.split("/")
            ink = ImageOps.invert(Image.open(io.BytesIO(archive.read(name))).convert("L"))
            small = np.asarray(ink.resize((SIDE, SIDE), Image.Resampling.BOX), np.uint8)
            characters.setdefault((alphabet, character), []).append(small)
    for (alphabet, character), found in characters.items():
        if len(found) != DRAWERS:
            raise ValueError(f"it holds {len(found)} drawings of {alphabet}/{character}, expected are {DRAWERS}")
    if not characters:
        raise ValueError("it holds no drawings")
    return Omniglot(
        images=np.stack([np.stack(found) for found in characters.values()]),
        alphabets=tuple(alphabet for alphabet, _ in characters),
        background=np.full(len(characters), background),
    )


# ------------------------------------------------------------------------------------------------- dealing


@dataclasses.dataclass(frozen=True)
class FederatedCharacters:
    """Characters for training dealt to clients; those for choosing settings and for the test are nobody's."""

    rows: Rows  # column "image", uint8 [characters, drawings, 28, 28]
    aside: Rows  # likewise; its two "clients" are the characters for validation and for the test


def deal_characters(omniglot: Omniglot, *, clients: int = 16, seed: int = 0) -> FederatedCharacters:
    """Deal the characters for training to clients at random, each to one client, as evenly as their number allows."""
    parts = omniglot.split()
    if isinstance(clients, bool) or not isinstance(clients, int) or not 1 <= clients <= len(parts["train"]):
        raise UserError(
            f"clients={clients!r} was given; it must be a whole number from 1 to {len(parts['train'])}, the number of "
            "characters for training."
        )
    order = np.random.default_rng(seed).permutation(parts["train"])
    holding = lambda numbers: {"image": omniglot.images[np.sort(numbers)]}
    return FederatedCharacters(
        rows=Rows.from_clients([holding(numbers) for numbers in np.array_split(order, clients)]),
        aside=Rows.from_clients([holding(parts["validation"]), holding(parts["test"])]),
    )
