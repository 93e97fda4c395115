"""Sums that do not depend on their order, nor on who holds which row: whole numbers.

A sum of floats depends in its last digits on the order of its terms, so sites that add up their own sums would not have
the encoder of one table. Here a float is a whole multiple of 2^-256, cut into words of 32 bits; words are added, and
everything stays exact. Words may also be masked and added modulo 2^64 by somebody who must not read them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from nestfed.core.settings import UserError

WORDS = 16  # of a number
BITS = 32  # of a word; the rest of its 64 bits is room for two thousand million terms
FINEST = -256  # exponent of the smallest step: squares of all that single precision can hold are numbers here
LARGEST = 2.0 ** (BITS * WORDS + FINEST - 1)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Exact sums of floats."""

    words: np.ndarray  # int64 [sums, WORDS], the lowest first, all but the last from 0 to below 2^32

    @classmethod
    def of(cls, numbers: np.ndarray, place: np.ndarray | None = None, sums: int = 1) -> Self:
        """The sum of all; with places from 0 to `sums` - 1, that of each of them."""
        numbers = np.asarray(numbers, np.float64)
        size = np.abs(numbers)
        if not np.all(size < LARGEST):  # NaN too
            raise UserError(f"a value of size {size.max():.3g} is too large to be summed; give it in other units.")
        words, rest = np.zeros((sums, WORDS), np.int64), np.ldexp(size, -FINEST - BITS * (WORDS - 1))
        sign = np.sign(numbers).astype(np.int64)
        for i in reversed(range(WORDS)):  # every step is exact: floats lose nothing by these
            whole = np.floor(rest)
            signed = sign * whole.astype(np.int64)
            if place is None:
                words[0, i] = signed.sum()
            else:
                np.add.at(words[:, i], place, signed)
            rest = np.ldexp(rest - whole, BITS)
        return cls(_carry(words))

    @classmethod
    def each(cls, numbers: np.ndarray) -> Self:
        """Every number as a sum of its own."""
        flat = np.ravel(numbers)
        return cls.of(flat, np.arange(flat.size), flat.size)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(_carry(self.words + other.words))

    @property
    def values(self) -> np.ndarray:
        """As floats, each rounded once."""
        values, filled = np.zeros(len(self.words)), self.words.any(1)  # most cells of a histogram are empty
        whole = [sum(word << (BITS * i) for i, word in enumerate(row)) for row in self.words[filled].tolist()]
        values[filled] = [number / 2**-FINEST for number in whole]
        return values

    def pack(self) -> np.ndarray:
        """uint64, to be added modulo 2^64 to those of others."""
        return self.words.ravel().view(np.uint64)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> Self:
        """What `pack` gave, or the sum of several such."""
        return cls(_carry(packed.view(np.int64).reshape(-1, WORDS)))


def _carry(words: np.ndarray) -> np.ndarray:
    """The same numbers with every word but the last from 0 to below 2^32, so that a sum tells nothing of its terms."""
    words = words.copy()
    for i in range(WORDS - 1):
        words[:, i + 1] += words[:, i] >> BITS
        words[:, i] &= 2**BITS - 1
    return words


def pack_all(parts: Sequence[Sums]) -> np.ndarray:
    return np.concatenate([part.pack() for part in parts]) if parts else np.zeros(0, np.uint64)
