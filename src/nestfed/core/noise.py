"""Keys of noise: nobody who sees uploads may guess them, and no two uploads may share one.

The run's seed is no secret: it stands in the settings, and every party of a deployment has it. Noise that protects
somebody is therefore drawn from 256 bits of the operating system's entropy by ChaCha20 (RFC 8439), a cipher, registered
here as one of JAX's generators: `jax.random.normal` and `fold_in` take its keys as they take any other.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nestfed.core.settings import UserError
from nestfed.core.types import Array, ArrayLike

KEY_WORDS = 8  # 256 bits
LEAST_SECRET_BYTES = 16

_CONSTANTS = np.frombuffer(b"expand 32-byte k", np.uint32)
# The first word of a nonce says what a block is for, so that no two uses of a key see the same block.
_STREAM, _FOLD, _SPLIT = 0, 1, 2


def draw_fresh_key() -> Array:
    """A key that nobody knows and nobody can repeat."""
    return convert_to_key(os.urandom(4 * KEY_WORDS))


def make_repeatable_key(noise_seed: int, run: Array) -> Array:
    """The key of a number and of a run's own key, for tests and public data: whoever knows them can take the noise off
    again."""
    if isinstance(noise_seed, bool) or not isinstance(noise_seed, (int, np.integer)):
        raise UserError(f"noise_seed={noise_seed!r} was given; it must be a whole number, or None for fresh noise.")
    numbers = [int(noise_seed), *np.asarray(jax.random.key_data(run)).tolist()]
    return convert_to_key(hashlib.sha256(f"nestfed noise {numbers}".encode()).digest())


def make_noise_key(noise_seed: int | None, run: Array) -> Array:
    """The key of a run's noise: a fresh one, unless the user asks for noise that can be repeated."""
    return draw_fresh_key() if noise_seed is None else make_repeatable_key(noise_seed, run)


def check_secret(secret: Any) -> bytes:
    """A party's secret: bytes that cannot be guessed."""
    if not isinstance(secret, (bytes, bytearray)) or len(secret) < LEAST_SECRET_BYTES:
        given = f"{len(secret)} bytes" if isinstance(secret, (bytes, bytearray)) else f"a {type(secret).__name__}"
        raise UserError(
            f"secret={given} was given; it must be at least {LEAST_SECRET_BYTES} random bytes, made once by "
            "secrets.token_bytes(32) and kept where nobody else can read it."
        )
    return bytes(secret)


def convert_to_key(content: bytes) -> Array:
    """32 bytes as a key."""
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(content, np.uint32)), impl=make_chacha20())


# ------------------------------------------------------------------------------------------------- the generator


def compute_chacha20_block(key: Array, counter: Array, nonce: Sequence[Array] | Array) -> Array:
    """The 16 words of a block for every counter, [..., 16]; key [8], nonce [3]."""
    counter = jnp.asarray(counter, "uint32")
    everywhere = lambda word: jnp.broadcast_to(jnp.asarray(word, "uint32"), counter.shape)
    words = [everywhere(word) for word in (*_CONSTANTS, *key)] + [counter] + [everywhere(word) for word in nonce]
    start = tuple(jnp.stack(words[i : i + 4]) for i in range(0, 16, 4))  # a row of four words at once
    rotate = lambda word, bits: (word << jnp.uint32(bits)) | (word >> jnp.uint32(32 - bits))
    turn = lambda row, places: jnp.concatenate([row[places:], row[:places]])

    def quarter_rounds(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, ...]:
        for first, second in ((16, 12), (8, 7)):
            a = a + b
            d = rotate(d ^ a, first)
            c = c + d
            b = rotate(b ^ c, second)
        return a, b, c, d

    def double_round(_: int, rows: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, c, d = quarter_rounds(*rows)  # columns
        a, b, c, d = quarter_rounds(a, turn(b, 1), turn(c, 2), turn(d, 3))  # diagonals
        return a, turn(b, 3), turn(c, 2), turn(d, 1)

    mixed = lax.fori_loop(0, 10, double_round, start)
    return jnp.moveaxis(jnp.concatenate([a + b for a, b in zip(mixed, start, strict=True)]), 0, -1)


def _derive(key: Array, purpose: int, number: ArrayLike) -> Array:
    nonce = [jnp.uint32(purpose), jnp.asarray(number, "uint32"), jnp.uint32(0)]
    return compute_chacha20_block(key, jnp.uint32(0), nonce)[:KEY_WORDS]


def _fold_in(key: Array, number: ArrayLike) -> Array:
    return _derive(key, _FOLD, number)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    numbers = jnp.arange(int(np.prod(shape)), dtype="uint32")
    return jax.vmap(lambda i: _derive(key, _SPLIT, i))(numbers).reshape(*shape, KEY_WORDS)


def _seed(seed: Array) -> Array:
    return jnp.zeros(KEY_WORDS, "uint32").at[0].set(jnp.asarray(seed, "uint32"))


def _draw_bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    words = -(-count * width // 32)
    nonce = [jnp.uint32(_STREAM), jnp.uint32(0), jnp.uint32(0)]
    blocks = compute_chacha20_block(key, jnp.arange(-(-words // 16), dtype="uint32"), nonce)
    stream = blocks.reshape(-1)[:words]
    if width == 64:
        return lax.bitcast_convert_type(stream.reshape(-1, 2), "uint64").reshape(shape)
    if width < 32:
        stream = lax.bitcast_convert_type(stream, f"uint{width}").reshape(-1)[:count]
    return stream.reshape(shape)


@functools.cache
def make_chacha20() -> Any:
    """The generator as JAX knows it: keys of it draw from all of jax.random."""
    from jax.extend.random import define_prng_impl  # slow to import, and few runs have noise

    return define_prng_impl(
        key_shape=(KEY_WORDS,),
        seed=_seed,
        split=_split,
        random_bits=_draw_bits,
        fold_in=_fold_in,
        name="chacha20",
        tag="cha",
    )
