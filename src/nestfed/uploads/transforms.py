"""Transforms of what clients upload, and differential privacy.

A transform stands between the question of `fed.mean` (or `fed.gather`) and its answer; algorithms do not notice it.

    Clip, Sparsify, Quantise, GaussianNoise    what a client does to its upload before it leaves
    ServerNoise                                what the server does to a mean before it answers
    ClipMean                                   what everybody does to that answer before it is used
    LocalDP, CentralDP                         a guarantee: the transforms that give it, and what it costs (`Spending`)

Transforms act on what is news in an upload: the tree less what the algorithm named as `around`. Metrics are not
transformed: they are evaluation, exact, and outside every guarantee. The exchanges of `init` are uploads like others.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from nestfed.core.randomness import draw_words, fold
from nestfed.core.scaled import is_scaled
from nestfed.core.settings import UserError, setting, static, struct, validate
from nestfed.core.types import Array, PyTree

INDEX_BYTES = 4  # of the place of a number in a sparse upload
SIGNAL, CLIPPED = "signal_to_noise", "clipped_uploads"  # columns of the history


# ------------------------------------------------------------------------------------------------- transforms


class Parcel(NamedTuple):
    """One array of an upload on its way: what it takes to send it."""

    size: int  # numbers in the array
    itemsize: int  # bytes of one of them, as computed
    sent: int  # numbers that are sent
    bits: int  # of a number that is sent
    indexed: bool = False  # are the places of the numbers sent too?
    extra: int = 0  # bytes besides

    @property
    def nbytes(self) -> int:
        return -(-self.sent * self.bits // 8) + INDEX_BYTES * self.sent * self.indexed + self.extra


@struct
class Transform:
    """What happens to uploads on their way. Subclasses override what they change."""

    clipping: ClassVar[bool] = False  # does `clips` say anything?
    noisy: ClassVar[bool] = False  # does `variance` say anything?
    hides_in_mean: ClassVar[bool] = False  # is it the mean that protects? Then a gather cannot be allowed

    @property
    def touches(self) -> bool:
        """Does it change anything?"""
        return any(self.changes(word) for word in ("apply", "treat", "finish"))

    @classmethod
    def changes(cls, word: str) -> bool:
        """Does it define this method?"""
        return getattr(cls, word) is not getattr(Transform, word)

    def check(self) -> None:
        """Refuse settings out of range."""
        validate(self)

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        """One client's whole upload as it leaves the client. The key of a `noisy` transform is a secret, drawn for this
        upload alone; that of others follows from the run's seed."""
        return tree

    def clips(self, tree: PyTree) -> Array:
        """Will `apply` shorten this upload?"""
        return jnp.asarray(False)

    def treat(self, mean: PyTree, largest: Array, key: Array) -> PyTree:
        """The mean as the server answers it; `largest` is the largest share of a client in it."""
        return mean

    def finish(self, mean: PyTree) -> PyTree:
        """The mean as it is used: everybody does the same to the server's answer, after what is recorded about it."""
        return mean

    def variance(self, largest: Array, squares: Array) -> Array:
        """Of the noise in a number of the mean, for the largest and the sum of squares of the clients' shares."""
        return jnp.zeros(())

    def pack(self, parcel: Parcel) -> Parcel:
        """What an array costs to send."""
        return parcel


@struct
class Clip(Transform):
    """The upload times min(1, norm / its norm), taken over all its arrays together."""

    norm: float = setting("C: largest norm of an upload", above=0)

    clipping = True

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        return clip_to_norm(tree, self.norm)

    def clips(self, tree: PyTree) -> Array:
        return compute_joint_norm(tree) > self.norm


@struct
class ClipMean(Transform):
    """The same for the mean."""

    norm: float = setting("C: largest norm of a mean", above=0)

    def finish(self, mean: PyTree) -> PyTree:
        return clip_to_norm(mean, self.norm)


@struct
class GaussianNoise(Transform):
    """Independent noise N(0, sigma^2) on every number of the upload."""

    sigma: float = setting("sigma: standard deviation of the noise", at_least=0)

    noisy = True

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        return _add_noise(tree, self.sigma, key)

    def variance(self, largest: Array, squares: Array) -> Array:
        return self.sigma**2 * squares

    def pack(self, parcel: Parcel) -> Parcel:
        return Parcel(parcel.size, parcel.itemsize, parcel.size, 8 * parcel.itemsize)  # noise fills zeros and digits


@struct
class ServerNoise(Transform):
    """Noise N(0, (scale x the largest share of a client)^2) on every number of the mean, added by a trusted server."""

    scale: float = setting("standard deviation of the noise in the mean of one client alone", at_least=0)

    noisy = True
    hides_in_mean = True

    def treat(self, mean: PyTree, largest: Array, key: Array) -> PyTree:
        return _add_noise(mean, self.scale * largest, key)

    def variance(self, largest: Array, squares: Array) -> Array:
        return (self.scale * largest) ** 2


@struct
class Sparsify(Transform):
    """Send a random part of the numbers of each array, made larger so that the mean is right."""

    fraction: float = static()

    def check(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise UserError(
                f"Sparsify: fraction={self.fraction!r} was given, but fraction (share of the numbers that are sent) "
                "must be a number above 0 and at most 1."
            )

    def count_sent(self, size: int) -> int:
        return max(1, math.ceil(self.fraction * size - 1e-9))

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        def sparse(a: Array, key: Array) -> Array:
            kept = self.count_sent(a.size)
            chosen = jnp.argsort(draw_words(key, a.size))[:kept]
            factors = jnp.zeros(a.size, a.dtype).at[chosen].set(a.size / kept)
            return a * factors.reshape(a.shape)

        return _apply_to_each(sparse, tree, key)

    def pack(self, parcel: Parcel) -> Parcel:
        return parcel._replace(sent=min(parcel.sent, self.count_sent(parcel.size)), indexed=True)


@struct
class Quantise(Transform):
    """Round every number to one of 2^bits - 1 levels between -m and m, the largest of its array, at random so that the
    mean is right; zero stays zero."""

    bits: int = setting("bits of a number that is sent", at_least=2, at_most=16, static=True)

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        levels = 2 ** (self.bits - 1) - 1

        def round_randomly(a: Array, key: Array) -> Array:
            largest = jnp.max(jnp.abs(a))
            unit = jnp.where(largest > 0, largest, 1) / levels
            below = jnp.floor(a / unit)
            return unit * (below + (jax.random.uniform(key, a.shape, a.dtype) < a / unit - below))

        return _apply_to_each(round_randomly, tree, key)

    def pack(self, parcel: Parcel) -> Parcel:
        return parcel._replace(bits=min(parcel.bits, self.bits), extra=parcel.extra + parcel.itemsize)


def compute_joint_norm(tree: PyTree) -> Array:
    """The Euclidean norm over all arrays of a tree."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree)))


def clip_to_norm(tree: PyTree, norm: float) -> PyTree:
    """The tree times min(1, norm / its norm)."""
    length = compute_joint_norm(tree)
    factor = jnp.where(length > norm, norm / jnp.where(length > 0, length, 1), 1)
    return jax.tree.map(lambda a: a * factor.astype(a.dtype), tree)


def _apply_to_each(function: Callable, tree: PyTree, key: Array) -> PyTree:
    """function(array, its own key) for all arrays that hold anything."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [function(a, fold(key, i)) if a.size else a for i, a in enumerate(leaves)])


def _add_noise(tree: PyTree, sigma: Any, key: Array) -> PyTree:
    noise = lambda a, key: (sigma * jax.random.normal(key, a.shape, a.dtype)).astype(a.dtype)
    return _apply_to_each(lambda a, key: a + noise(a, key), tree, key)


# ------------------------------------------------------------------------------------------------- on the way


def subtract_reference(tree: PyTree, around: PyTree) -> PyTree:
    """What is news in an upload."""
    if around is None:
        return tree

    def difference(reference: Any, values: Any) -> Any:
        if reference is None:
            return values
        if is_scaled(reference) or is_scaled(values) or jnp.shape(reference) == jnp.shape(values):
            return values - reference
        raise UserError(
            f"fed.mean: around has an array of shape {jnp.shape(reference)} where the tree has one of shape "
            f"{jnp.shape(values)}; give a reference of the same shape, or None."
        )

    return _map_together(difference, around, tree)


def add_reference(tree: PyTree, around: PyTree) -> PyTree:
    """The answer from the mean of the news."""
    if around is None:
        return tree
    return _map_together(lambda reference, values: values if reference is None else reference + values, around, tree)


def _map_together(function: Callable, around: PyTree, tree: PyTree) -> PyTree:
    try:
        return jax.tree.map(function, around, tree, is_leaf=lambda a: a is None or is_scaled(a))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            "fed.mean: around has another structure than the tree; give a tree of the same structure, with None "
            "where there is no reference."
        ) from error


def apply_all(transforms: Sequence[Transform], tree: PyTree, key: Array, noise: Array | None) -> tuple[PyTree, Array]:
    """(one client's upload as it leaves the client, was it clipped?)."""
    if any(t.touches for t in transforms) and any(is_scaled(a) for a in jax.tree.leaves(tree, is_leaf=is_scaled)):
        raise UserError(
            "uploads= was given, but the algorithm uploads numbers with an exponent of their own (Scaled: exponentials "
            "of losses, as KL-robust problems have), for which a norm or a noise of one size means nothing. Choose "
            "another divergence (chi-square, CVaR), or run without uploads=."
        )
    clipped = jnp.asarray(False)
    for i, transform in enumerate(transforms):
        if not transform.changes("apply"):
            continue
        clipped = clipped | transform.clips(tree)
        tree = transform.apply(tree, fold(_choose_key(transform, key, noise), i))
    return tree, clipped


def answer_all(
    transforms: Sequence[Transform], mean: PyTree, largest: Array, key: Array, noise: Array | None
) -> PyTree:
    """A mean as the server answers it."""
    for i, transform in enumerate(transforms):
        if transform.changes("treat"):
            mean = transform.treat(mean, largest, fold(_choose_key(transform, key, noise), i))
    return mean


def _choose_key(transform: Transform, key: Array, noise: Array | None) -> Array:
    if transform.noisy and noise is None:
        raise UserError(
            f"{type(transform).__name__} draws noise, and no key of noise was given; give "
            "nestfed.core.noise.draw_fresh_key()."
        )
    return noise if transform.noisy and noise is not None else key


def finish_all(transforms: Sequence[Transform], mean: PyTree) -> PyTree:
    """The server's answer as it is used."""
    for transform in transforms:
        mean = transform.finish(mean)
    return mean


def count_upload_bytes(transforms: Sequence[Transform], size: int, itemsize: int) -> int:
    """Bytes of one array of an upload."""
    parcel = Parcel(size, itemsize, size, 8 * itemsize)
    for transform in transforms:
        parcel = transform.pack(parcel)
    return parcel.nbytes


# ------------------------------------------------------------------------------------------------- for the record


def measure_signal(
    transforms: Sequence[Transform], squares: Array, numbers: Array, shares: Array, largest: Array
) -> Array:
    """The norm of the signal in an answered mean / that of the noise in it; NaN without noise.

    squares    of the mean's norm: the signal's and the noise's together
    numbers    in the mean
    shares     of the clients in it
    largest    share that a client can have
    """
    noise = numbers * sum(t.variance(largest, jnp.sum(shares**2)) for t in transforms)
    # The noise is independent of the signal, so squares add up: what the noise does not explain is signal.
    ratio = jnp.sqrt(jnp.maximum(squares - noise, 0) / jnp.where(noise > 0, noise, 1))
    return jnp.where(noise > 0, ratio, jnp.nan)
