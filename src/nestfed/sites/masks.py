"""Sums that a server can read and terms that it cannot: pairwise masks.

Every two sites share a secret (X25519), and from it a stream of whole numbers for every exchange (HKDF, AES-CTR). One
of the two adds the stream to what it sends and the other subtracts it, modulo 2^64: in the sum over all sites nothing
is left of them, and any smaller sum looks like random bits. An upload is rounded to whole multiples of 2^-33 before,
so the sum is exact to that, in any order.

The server is trusted to follow the protocol: it must not ask the same sites twice for the same exchange with other
values, and a round in which a site is lost must not count. Nobody is trusted with a site's key: a site makes it, and
the public keys come to the others on a list that people agree on, not from the server.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nestfed.core.settings import UserError
from nestfed.verbs.messages import Leaves, Occasion

GRID = 33  # an upload is rounded to multiples of 2^-GRID
LARGEST = 2.0 ** (63 - GRID)  # of the sum of all uploads' absolute values: what 64 bits with a sign hold
FEWEST = 3  # with two sites, each knows the other's number from the sum
PREPARING = -2  # the round of exchanges before the first one
KEY_FILE, LIST_FILE = "mask.key", "masks.toml"


def check_number(sites: int) -> None:
    """Refuse masks where a sum would tell of one site."""
    if sites < FEWEST:
        raise UserError(
            f"secure aggregation was asked for with {sites} sites; a sum of two gives each away to the other: it takes "
            f"{FEWEST} sites or more."
        )


class SiteMask:
    """A site's side: what it sends in place of its weighted numbers."""

    def __init__(self, own: int, private: X25519PrivateKey, publics: Mapping[int, bytes], run: str):
        """`publics` are the public keys of all sites by their numbers, this one's (`own`) among them; `run` names the
        run, and no two runs have the same name."""
        check_number(len(publics))
        if publics.get(own) != private.public_key().public_bytes_raw():
            raise UserError(
                f"the list of public keys has another key for site {own + 1} than the one that this site holds; put "
                "the key that `nestfed site key` prints here on the list, and give the new list to all sites."
            )
        self.own, self.run = own, run
        self._secrets = {
            other: private.exchange(X25519PublicKey.from_public_bytes(public))
            for other, public in publics.items()
            if other != own
        }

    def __call__(self, leaves: Leaves, part: float, occasion: Occasion) -> Leaves:
        """`part` x these numbers, masked: one vector of uint64."""
        flat = np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves]) * part
        bound = LARGEST / max(1, len(occasion.asked))
        largest = float(np.abs(flat).max(initial=0.0))
        if not largest < bound:  # NaN too
            raise UserError(
                f"an upload has a number of size {largest:.3g}, and with secure aggregation among "
                f"{len(occasion.asked)} sites it must be below {bound:.3g}: a larger one would be lost in the sum. "
                "Give smaller step sizes, or bring the data to a smaller scale."
            )
        return [self.hide(np.rint(flat * 2.0**GRID).astype(np.int64).view(np.uint64), occasion)]

    def hide(self, words: np.ndarray, occasion: Occasion) -> np.ndarray:
        """Whole numbers (uint64), masked."""
        asked = set(occasion.asked)
        unknown = asked - self._secrets.keys() - {self.own}
        if self.own not in asked or len(asked) < FEWEST or unknown:
            raise UserError(
                f"sites {sorted(number + 1 for number in asked)} were asked for a masked sum; it takes {FEWEST} or "
                "more of those whose public keys are on the list, and this one among them."
            )
        label = _name_occasion(self.run, occasion)
        masked = words.astype(np.uint64)
        for other in sorted(asked - {self.own}):
            mask = _draw_stream(self._secrets[other], label, words.size)
            masked = masked + mask if self.own < other else masked - mask
        return masked


def _name_occasion(run: str, occasion: Occasion) -> bytes:
    """A name that no other exchange has."""
    asked = ",".join(map(str, sorted(occasion.asked)))
    numbers = f"{occasion.round} {occasion.attempt} {occasion.exchange} {asked}"
    return b"nestfed mask " + hashlib.sha256(f"{run}\n{numbers}".encode()).digest()


def _draw_stream(secret: bytes, label: bytes, number: int) -> np.ndarray:
    """A key of its own for every label, so the counter may begin at zero."""
    key = HKDF(SHA256(), 32, None, label).derive(secret)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * number))
    return np.frombuffer(stream, np.uint64)


class MaskedSums:
    """The server's side: it adds what it cannot read, and reads the sum."""

    def shape(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """Of what a site sends in place of arrays of these shapes."""
        return [jax.ShapeDtypeStruct((sum(_count_numbers(one) for one in shapes),), np.dtype(np.uint64))]

    def add(self, total: Leaves | None, sent: Leaves) -> Leaves:
        return list(sent) if total is None else [a + b for a, b in zip(total, sent, strict=True)]

    def reveal(self, total: Leaves, shapes: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
        """The sum of all sites' numbers, once all of them are in it."""
        (words,) = total
        flat = words.view(np.int64).astype(np.float64) / 2.0**GRID
        ends = np.cumsum([_count_numbers(one) for one in shapes])[:-1]
        parts = zip(np.split(flat, ends), shapes, strict=True)
        return [part.reshape(one.shape).astype(one.dtype) for part, one in parts]


def _count_numbers(shape: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(shape.shape))


# ------------------------------------------------------------------------------------------------- keys


def make_mask_key(folder: Path) -> str:
    """This site's public key, for the list; its private one is made where there is none, and stays in the folder."""
    file = folder / KEY_FILE
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(X25519PrivateKey.generate().private_bytes_raw().hex() + "\n", encoding="ascii")
    return _read_private(file).public_key().public_bytes_raw().hex()


def read_mask(folder: Path, name: str, sites: Sequence[str], run: str) -> SiteMask:
    """The mask of the site of this name, from its key and the list in its folder; `sites` are all names in order."""
    try:
        listed = tomllib.loads((folder / LIST_FILE).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {LIST_FILE}, the list of all sites' public keys that secure aggregation needs; every "
            f'site prints its line by `nestfed site key`, and all lines together are the file ({name} = "...").'
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{folder / LIST_FILE} is not a readable TOML file: {error}.") from None
    publics = {}
    for number, site in enumerate(sites):
        if not re.fullmatch("[0-9a-f]{64}", str(listed.get(site, ""))):
            raise UserError(f"{folder / LIST_FILE} has no public key of 64 hexadecimal digits for the site {site!r}.")
        publics[number] = bytes.fromhex(listed[site])
    return SiteMask(list(sites).index(name), _read_private(folder / KEY_FILE), publics, run)


def _read_private(file: Path) -> X25519PrivateKey:
    try:
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(file.read_text(encoding="ascii").strip()))
    except FileNotFoundError:
        raise UserError(f"there is no {file}; `nestfed site key` makes one.") from None
    except (ValueError, OSError):
        raise UserError(f"{file} is not a readable key; restore it, or remove it and make a new one.") from None
