"""A letter as bytes: a JSON header and arrays in NumPy's own format. No pickles, and nothing is believed unseen.

An array that occurs twice is sent once: what a site is told at the start of a round is often the last answer itself.
"""

import io
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nestfed.core.settings import UserError

VERSION = 1
LONGEST_HEADER = 1 << 22  # bytes
MOST_ARRAYS = 100_000
_SIZE = struct.Struct("!I")


class WireError(UserError):
    """Bytes that are no letter of this version."""


class Letter(NamedTuple):
    """What is sent in either direction."""

    header: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


def pack(letter: Letter) -> bytes:
    parts: dict[bytes, int] = {}
    places = []
    for array in letter.arrays:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.asarray(array), version=(1, 0), allow_pickle=False)
        places.append(parts.setdefault(buffer.getvalue(), len(parts)))
    head = {"wire": VERSION, "places": places, "sizes": [len(part) for part in parts], "header": dict(letter.header)}
    text = json.dumps(head).encode()
    return b"".join([_SIZE.pack(len(text)), text, *parts])


def unpack(data: bytes) -> Letter:
    """WireError says what does not fit."""
    view = memoryview(data)
    if len(view) < _SIZE.size:
        raise WireError(f"a letter of {len(view)} bytes came; it is cut off.")
    (length,) = _SIZE.unpack(view[: _SIZE.size])
    if length > LONGEST_HEADER or length + _SIZE.size > len(view):
        raise WireError(f"a letter came whose header has {length} bytes; it is cut off, or none of ours.")
    try:
        head = json.loads(bytes(view[_SIZE.size : _SIZE.size + length]))
        version = head["wire"]
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a letter came whose header cannot be read ({type(error).__name__}).") from None
    if version != VERSION:
        raise WireError(
            f"a letter of version {version} came, and this nestfed reads version {VERSION}; install equal ones."
        )
    try:
        places, sizes, header = list(head["places"]), list(head["sizes"]), dict(head["header"])
        fits = sum(sizes) == len(view) - _SIZE.size - length and min(sizes, default=0) >= 0
        if not fits or len(places) > MOST_ARRAYS or not all(0 <= place < len(sizes) for place in places):
            raise WireError("a letter came whose parts are not those that its header names; it is cut off.")
        parts, start = [], _SIZE.size + length
        for size in sizes:
            parts.append(_read_array(view[start : start + size]))
            start += size
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a letter came that cannot be read ({error}).") from None
    return Letter(header, [parts[place] for place in places])


def _read_array(data: memoryview) -> np.ndarray:
    """As numpy.load, without making room for more than what came."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array of another format")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    content = data[stream.tell() :]
    if dtype.hasobject or dtype.names or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError("an array that is not as long as it says, or not of numbers")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")
