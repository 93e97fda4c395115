"""Random numbers by meaning: a key is hashed from what it is for, never split by a size or a position.

The hash is JAX's own, threefry-2x32, written out as elementwise operations: on a CPU that runs a simulated round of a
small model twice as fast as `jax.random.fold_in` and `bits`, whose loops the compiler cannot fuse, and it compiles
faster too. `fold` with one number gives the very key of `jax.random.fold_in`. Keys of other generators go through
jax.random.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.types import Array, ArrayLike

# Streams of random numbers. A key is folded from (seed, stream, round, client id, step, draw), never split by a size
# or a position: adding a client, changing the cohort or the chunking of a run changes nobody else's numbers.
INIT, BATCH, COHORT, DROPOUT, SHARED, OUTPUT, METRICS, UPLOAD, ANSWER = range(9)


def fold(key: Array, *meaning: ArrayLike) -> Array:
    """A key for what `meaning` says: fold in one number after the other."""
    if _is_threefry(key):
        for number in meaning:
            key = _hash_key(key, jnp.uint32(0), number)
        return key
    # A loop, because other generators take many operations to compile.
    numbers = jnp.stack([jnp.asarray(part).astype("uint32") for number in meaning for part in (0, number)])
    return lax.scan(lambda key, number: (jax.random.fold_in(key, number), None), key, numbers)[0]


def fold_pair(key: Array, first: ArrayLike, second: ArrayLike) -> Array:
    """A key for two numbers at once, for half the price of folding in one after the other."""
    return _hash_key(key, jnp.asarray(first).astype("uint32") + 1, second)  # + 1: never the key of `fold`


@jax.jit  # here and below: traced once per shape, not once per use
def _hash_key(key: Array, first: ArrayLike, second: ArrayLike) -> Array:
    if not _is_threefry(key):
        return jax.random.fold_in(jax.random.fold_in(key, first), second)
    words = jax.random.key_data(key)
    hashed = jnp.stack(_hash_by_threefry(words[0], words[1], first, jnp.asarray(second).astype("uint32")))
    # The barrier keeps the compiler from hashing again in every element that uses the key.
    return jax.random.wrap_key_data(lax.optimization_barrier(hashed), impl="threefry2x32")


@functools.partial(jax.jit, static_argnums=1)
def draw_words(key: Array, count: int) -> Array:
    """`count` random 32-bit words."""
    if not _is_threefry(key):
        return jax.random.bits(key, (count,), "uint32")
    words = jax.random.key_data(key)
    half = jnp.arange((count + 1) // 2, dtype="uint32")
    # A first counter that no key is hashed from: words and keys of one key never coincide.
    return jnp.stack(_hash_by_threefry(words[0], words[1], jnp.uint32(0xFFFFFFFF), half), axis=-1).reshape(-1)[:count]


@functools.partial(jax.jit, static_argnums=1)
def draw_indices(key: Array, count: int, size: Array) -> Array:
    """`count` whole numbers, uniform in 0 .. size - 1: word x size / 2^32, with a bias below size / 2^32."""
    return lax.optimization_barrier(_multiply_high(draw_words(key, count), size.astype("uint32")).astype("int32"))


def _multiply_high(a: Array, b: Array) -> Array:
    """The upper half of a product of 32-bit words, by halves: 64 bits are not given, and a division costs more."""
    low = jnp.uint32(0xFFFF)
    a0, a1, b0, b1 = a & low, a >> 16, b & low, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    return a1 * b1 + (middle >> 16) + ((a0 * b1 + (middle & low)) >> 16)


def draw_below(key: Array, size: Array) -> Array:
    """One random word below `size`, uniformly."""
    return _multiply_high(draw_words(key, 1)[0], size)


def draw_priorities(key: Array, ids: Array) -> Array:
    """A random 32-bit word for each id, which does not depend on the other ids."""
    return jax.vmap(lambda i: draw_words(fold(key, i), 1)[0])(ids)


def _is_threefry(key: Array) -> bool:
    return str(jax.random.key_impl(key)) == "threefry2x32"


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@jax.jit
def _hash_by_threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r)))
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1
