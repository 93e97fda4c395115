"""Transforms of what clients upload, and differential privacy.

A transform stands between the question of `fed.mean` (or `fed.gather`) and its answer; algorithms do not notice it.

    Clip, Sparsify, Quantise, GaussianNoise    what a client does to its upload before it leaves
    ServerNoise                                what the server does to a mean before it answers
    ClipMean                                   what everybody does to that answer before it is used
    LocalDP, CentralDP                         a guarantee: the transforms that give it, and what it costs (`Spending`)

Transforms act on what is news in an upload: the tree less what the algorithm named as `around`. Metrics are not
transformed: they are evaluation, exact, and outside every guarantee. The exchanges of `init` are uploads like others.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core import Array, PyTree, UserError, check_registered, setting, static, struct, validate
from nestfed.randomness import fold, random_words
from nestfed.scaled import is_scaled

INDEX_BYTES = 4  # of the place of a number in a sparse upload


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
        own = type(self)
        return any(getattr(own, word) is not getattr(Transform, word) for word in ("apply", "treat", "finish"))

    def check(self) -> None:
        """Refuse settings out of range."""
        validate(self)

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        """One client's whole upload as it leaves the client."""
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
        return shortened(tree, self.norm)

    def clips(self, tree: PyTree) -> Array:
        return joint_norm(tree) > self.norm


@struct
class ClipMean(Transform):
    """The same for the mean."""

    norm: float = setting("C: largest norm of a mean", above=0)

    def finish(self, mean: PyTree) -> PyTree:
        return shortened(mean, self.norm)


@struct
class GaussianNoise(Transform):
    """Independent noise N(0, sigma^2) on every number of the upload."""

    sigma: float = setting("sigma: standard deviation of the noise", at_least=0)

    noisy = True

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        return _with_noise(tree, self.sigma, key)

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
        return _with_noise(mean, self.scale * largest, key)

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

    def kept(self, size: int) -> int:
        return max(1, math.ceil(self.fraction * size - 1e-9))

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        def sparse(a, key):
            kept = self.kept(a.size)
            chosen = jnp.argsort(random_words(key, a.size))[:kept]
            factors = jnp.zeros(a.size, a.dtype).at[chosen].set(a.size / kept)
            return a * factors.reshape(a.shape)

        return _each(sparse, tree, key)

    def pack(self, parcel: Parcel) -> Parcel:
        return parcel._replace(sent=min(parcel.sent, self.kept(parcel.size)), indexed=True)


@struct
class Quantise(Transform):
    """Round every number to one of 2^bits - 1 levels between -m and m, the largest of its array, at random so that the
    mean is right; zero stays zero."""

    bits: int = setting("bits of a number that is sent", at_least=2, at_most=16, static=True)

    def apply(self, tree: PyTree, key: Array) -> PyTree:
        levels = 2 ** (self.bits - 1) - 1

        def rounded(a, key):
            largest = jnp.max(jnp.abs(a))
            unit = jnp.where(largest > 0, largest, 1) / levels
            below = jnp.floor(a / unit)
            return unit * (below + (jax.random.uniform(key, a.shape, a.dtype) < a / unit - below))

        return _each(rounded, tree, key)

    def pack(self, parcel: Parcel) -> Parcel:
        return parcel._replace(bits=min(parcel.bits, self.bits), extra=parcel.extra + parcel.itemsize)


def joint_norm(tree: PyTree) -> Array:
    """The Euclidean norm over all arrays of a tree."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree)))


def shortened(tree: PyTree, norm: float) -> PyTree:
    """The tree times min(1, norm / its norm)."""
    length = joint_norm(tree)
    factor = jnp.where(length > norm, norm / jnp.where(length > 0, length, 1), 1)
    return jax.tree.map(lambda a: a * factor.astype(a.dtype), tree)


def _each(function: Callable, tree: PyTree, key: Array) -> PyTree:
    """function(array, its own key) for all arrays that hold anything."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [function(a, fold(key, i)) if a.size else a for i, a in enumerate(leaves)])


def _with_noise(tree: PyTree, sigma: Any, key: Array) -> PyTree:
    noise = lambda a, key: (sigma * jax.random.normal(key, a.shape, a.dtype)).astype(a.dtype)
    return _each(lambda a, key: a + noise(a, key), tree, key)


# ------------------------------------------------------------------------------------------------- on the way


def minus(tree: PyTree, around: PyTree) -> PyTree:
    """What is news in an upload."""
    if around is None:
        return tree

    def difference(reference, values):
        if reference is None:
            return values
        if is_scaled(reference) or is_scaled(values) or jnp.shape(reference) == jnp.shape(values):
            return values - reference
        raise UserError(
            f"fed.mean: around has an array of shape {jnp.shape(reference)} where the tree has one of shape "
            f"{jnp.shape(values)}; give a reference of the same shape, or None."
        )

    return _matched(difference, around, tree)


def plus(tree: PyTree, around: PyTree) -> PyTree:
    """The answer from the mean of the news."""
    if around is None:
        return tree
    return _matched(lambda reference, values: values if reference is None else reference + values, around, tree)


def _matched(function: Callable, around: PyTree, tree: PyTree) -> PyTree:
    try:
        return jax.tree.map(function, around, tree, is_leaf=lambda a: a is None or is_scaled(a))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            "fed.mean: around has another structure than the tree; give a tree of the same structure, with None "
            "where there is no reference."
        ) from error


def transformed(transforms: Sequence[Transform], tree: PyTree, key: Array) -> tuple[PyTree, Array]:
    """(one client's upload as it leaves the client, was it clipped?)."""
    if any(t.touches for t in transforms) and any(is_scaled(a) for a in jax.tree.leaves(tree, is_leaf=is_scaled)):
        raise UserError(
            "uploads= was given, but the algorithm uploads numbers with an exponent of their own (Scaled: exponentials "
            "of losses, as KL-robust problems have), for which a norm or a noise of one size means nothing. Choose "
            "another divergence (chi-square, CVaR), or run without uploads=."
        )
    clipped = jnp.asarray(False)
    for i, transform in enumerate(transforms):
        clipped = clipped | transform.clips(tree)
        tree = transform.apply(tree, fold(key, i))
    return tree, clipped


def treated(transforms: Sequence[Transform], mean: PyTree, largest: Array, key: Array) -> PyTree:
    """A mean as the server answers it."""
    for i, transform in enumerate(transforms):
        mean = transform.treat(mean, largest, fold(key, i))
    return mean


def finished(transforms: Sequence[Transform], mean: PyTree) -> PyTree:
    """The server's answer as it is used."""
    for transform in transforms:
        mean = transform.finish(mean)
    return mean


def upload_bytes(transforms: Sequence[Transform], size: int, itemsize: int) -> int:
    """Bytes of one array of an upload."""
    parcel = Parcel(size, itemsize, size, 8 * itemsize)
    for transform in transforms:
        parcel = transform.pack(parcel)
    return parcel.nbytes


# ------------------------------------------------------------------------------------------------- guarantees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee(abc.ABC):
    """The Gaussian mechanism on every exchange. Use LocalDP or CentralDP.

    clip                  largest norm of an upload (of what is news in it)
    noise_multiplier      noise / sensitivity; or
    epsilon               of one exchange, from which the noise follows by `mechanism`
    delta                 of the guarantee
    sensitivity_factor    sensitivity / clip. A client may hold any data, so two of its uploads may lie 2 clip apart: 2.
                          1 reproduces papers that take clip for the sensitivity; what is spent is counted with 2
    mechanism             "analytic": the exact noise (Balle and Wang 2018); "paper": sqrt(2 ln(1.25 / delta)) / epsilon
    as_printed            use the formula of "paper" where it does not hold (epsilon >= 1), to repeat a paper's numbers
    budget                epsilon of the whole run: it ends before a round that would spend more
    earlier               `Result.spent` of runs before on the same data, which count too
    """

    clip: float
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    sensitivity_factor: int = 2
    mechanism: str = "analytic"
    as_printed: bool = False
    budget: float | None = None
    earlier: "tuple[tuple[Spending, int], ...]" = ()

    def __post_init__(self):
        name = type(self).__name__
        for field in ("clip", "delta", "noise_multiplier", "epsilon", "budget"):
            value = getattr(self, field)
            if value is None and field not in ("clip", "delta"):
                continue
            number = float(value) if isinstance(value, (int, float, np.number)) else math.nan
            if isinstance(value, bool) or not 0 < number < (1 if field == "delta" else math.inf):
                bound = "a number between 0 and 1" if field == "delta" else "a finite number above 0"
                raise UserError(f"{name}: {field}={value!r} was given; it must be {bound}.")
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise UserError(
                f"{name}: epsilon={self.epsilon!r} and noise_multiplier={self.noise_multiplier!r} were given; give one "
                "of them, the other follows."
            )
        if self.sensitivity_factor not in (1, 2):
            raise UserError(f"{name}: sensitivity_factor={self.sensitivity_factor!r} was given; use 2, or 1 (papers).")
        if self.mechanism not in ("analytic", "paper"):
            raise UserError(f"{name}: mechanism={self.mechanism!r} was given; use 'analytic' or 'paper'.")
        if self.mechanism == "paper" and self.epsilon is not None and self.epsilon >= 1 and not self.as_printed:
            raise UserError(
                f"{name}: epsilon={self.epsilon:g} was given with mechanism='paper', whose formula sqrt(2 ln(1.25 / "
                "delta)) / epsilon is proven for epsilon < 1 only. Use the analytic Gaussian mechanism "
                "(mechanism='analytic', Balle and Wang 2018), which holds for every epsilon; as_printed=True repeats a "
                "paper's numbers without a proof."
            )

    @property
    def multiplier(self) -> float:
        """Noise / sensitivity, the sensitivity being sensitivity_factor x clip."""
        if self.epsilon is None:
            return float(self.noise_multiplier or 0)
        if self.mechanism == "paper":
            return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon
        with np.errstate(all="ignore"):  # the search passes where a logarithm of zero is taken
            return float(_accounting().get_sigma_gaussian(self.epsilon, self.delta))

    @property
    def sigma(self) -> float:
        """The noise on one client's upload; in a central guarantee, in the mean of a single client."""
        return self.multiplier * self.sensitivity_factor * self.clip

    @property
    @abc.abstractmethod
    def transforms(self) -> tuple[Transform, ...]:
        """What gives the guarantee, in the order of use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalDP(Guarantee):
    """Every client clips its upload and adds noise before it leaves: protects a client's data against the server.

    A client that changes all its data is protected. The server sees who sent what, so sampling clients amplifies
    nothing; what is spent is counted for a client that takes part in every round.
    """

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return Clip(norm=float(self.clip)), GaussianNoise(sigma=self.sigma)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CentralDP(Guarantee):
    """Clients clip, a trusted server adds noise to the mean: protects a client's data against those who see the models.

    The sensitivity of a mean is that of an upload times the largest share of a client in it. A cohort drawn at random
    amplifies the guarantee where all clients weigh the same.
    """

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return Clip(norm=float(self.clip)), ServerNoise(scale=self.sigma)


Uploads = Transform | Guarantee | Sequence[Transform | Guarantee]


def _listed(uploads: Any) -> tuple[Any, ...]:
    return (uploads,) if isinstance(uploads, (Transform, Guarantee)) else tuple(uploads)


def guarantee_of(uploads: Uploads) -> Guarantee | None:
    """The guarantee among what was given as `uploads`."""
    return next((entry for entry in _listed(uploads) if isinstance(entry, Guarantee)), None)


def transforms_of(uploads: Uploads) -> tuple[Transform, ...]:
    """What was given as `uploads`, checked, as transforms in their order."""
    transforms: list[Transform] = []
    guarantees: list[Guarantee] = []
    for entry in _listed(uploads):
        if isinstance(entry, Guarantee):
            guarantees.append(entry)
            transforms.extend(entry.transforms)
            continue
        if not isinstance(entry, Transform):
            raise UserError(
                f"uploads holds {entry!r}; give transforms of nestfed.privacy, such as Clip(norm=1.0), LocalDP or "
                "CentralDP."
            )
        check_registered(entry)
        entry.check()
        changes = type(entry).apply is not Transform.apply
        if changes and any(isinstance(guarantee, CentralDP) for guarantee in guarantees):
            raise UserError(
                f"uploads has {type(entry).__name__} after CentralDP, which could lengthen a clipped upload and break "
                "the guarantee; put it before."
            )
        transforms.append(entry)
    if len(guarantees) > 1:
        raise UserError("uploads has two guarantees; give one of LocalDP and CentralDP.")
    return tuple(transforms)


# ------------------------------------------------------------------------------------------------- what is spent


@dataclasses.dataclass(frozen=True)
class Spending:
    """What a run spends of privacy: epsilon as a function of the rounds done, for the guarantee's delta.

    Neighbours are federations in which one client holds other data. The Gaussian mechanisms of all exchanges compose
    exactly; rounds of a sampled cohort are composed by Renyi divergences (sampling without replacement).
    """

    guarantee: Guarantee
    start: int  # exchanges of the start
    round: int  # exchanges of a round
    clients: int
    cohort: int | None = None  # drawn at random and unseen; None: everybody, or it amplifies nothing

    def __post_init__(self):
        _accounting()  # what is missing shows before anything runs

    def epsilon(self, rounds: int) -> float:
        """After so many rounds."""
        return _epsilon((*self.guarantee.earlier, (self, int(rounds))), self.guarantee.delta)

    @property
    def noise_multiplier(self) -> float:
        """Noise / true sensitivity, which is 2 clip whatever the guarantee was told."""
        return self.guarantee.multiplier * self.guarantee.sensitivity_factor / 2

    def rounds_within(self, most: int) -> int:
        """How many of `most` rounds the guarantee's budget allows."""
        budget = self.guarantee.budget
        if budget is None or self.epsilon(most) <= budget:
            return most
        if self.epsilon(1) > budget:
            raise UserError(
                f"budget={budget:g} was given, but the first round spends epsilon {self.epsilon(1):.4g} (delta "
                f"{self.guarantee.delta:g}, {self.start} exchanges at the start and {self.round} in a round); give "
                "a larger budget or more noise."
            )
        low, high = 1, most  # low is allowed, high is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle) <= budget else (low, middle)
        return low

    def summary(self, rounds: int) -> dict[str, Any]:
        """For the record of a run."""
        guarantee = self.guarantee
        return {
            "guarantee": type(guarantee).__name__,
            "epsilon": self.epsilon(rounds),
            "delta": guarantee.delta,
            "rounds": int(rounds),
            "exchanges": self.start + self.round * int(rounds),
            "clip": float(guarantee.clip),
            "noise multiplier": self.noise_multiplier,
            "sigma": guarantee.sigma,
            "sampling": "none" if self.cohort is None else f"{self.cohort} of {self.clients} clients",
        } | ({} if guarantee.budget is None else {"budget": guarantee.budget})


def _epsilon(parts: Sequence[tuple[Spending, int]], delta: float) -> float:
    """Of all parts together. Several Gaussian mechanisms are one: 1 / multiplier^2 adds up."""
    accounting = _accounting()
    precision = sum((s.start + rounds * s.round) / s.noise_multiplier**2 for s, rounds in parts)
    if precision == 0:
        return 0.0
    with np.errstate(all="ignore"):  # the search passes where a logarithm of zero is taken
        exact = float(accounting.get_epsilon_gaussian(1 / math.sqrt(precision), delta))
    if all(s.cohort is None for s, _ in parts):
        return exact
    divergence: Any = 0.0
    for s, rounds in parts:
        whole = s.start + (rounds * s.round if s.cohort is None else 0)
        divergence = divergence + whole * _orders() / (2 * s.noise_multiplier**2)
        if s.cohort is not None:
            divergence = divergence + rounds * _sampled(s.noise_multiplier / math.sqrt(s.round), s.cohort, s.clients)
    with np.errstate(all="ignore"):
        amplified = float(accounting.rdp.compute_epsilon(_orders(), divergence, delta)[0])
    return min(exact, amplified)


def _orders() -> np.ndarray:
    return np.asarray(_accounting().rdp.RdpAccountant().orders, float)


@functools.lru_cache(maxsize=64)
def _sampled(multiplier: float, cohort: int, clients: int) -> np.ndarray:
    """Renyi divergences of one round of a cohort drawn without replacement."""
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    with np.errstate(all="ignore"):
        accountant.compose(
            accounting.SampledWithoutReplacementDpEvent(clients, cohort, accounting.GaussianDpEvent(multiplier))
        )
    return np.asarray(accountant.rdp, float)


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise UserError(
            "differential privacy needs the package dp-accounting; install it with: pip install 'nestfed[privacy]'."
        ) from error
    return dp_accounting


# ------------------------------------------------------------------------------------------------- for the record

SIGNAL, CLIPPED, EPSILON = "signal_to_noise", "clipped_uploads", "epsilon"  # columns of the history


def columns(transforms: Sequence[Transform]) -> list[str]:
    """What rounds record about uploads."""
    return [SIGNAL] * any(t.noisy for t in transforms) + [CLIPPED] * any(t.clipping for t in transforms)


def statistics(
    transforms: Sequence[Transform], squared: Array, numbers: Array, clipped: Array, shares: Array
) -> dict[str, Array]:
    """The columns of a round.

    squared    of the norms of the answered means, summed over exchanges: the signal's and the noise's together
    numbers    in these means
    clipped    fraction of uploads that were clipped
    shares     of the clients in a mean
    """
    values = {}
    if SIGNAL in columns(transforms):
        largest, squares = jnp.max(shares), jnp.sum(shares**2)
        noise = numbers * sum(t.variance(largest, squares) for t in transforms)
        # The noise is independent of the signal, so squares add up: what the noise does not explain is signal.
        ratio = jnp.sqrt(jnp.maximum(squared - noise, 0) / jnp.where(noise > 0, noise, 1))
        values[SIGNAL] = jnp.where(noise > 0, ratio, jnp.nan)
    if CLIPPED in columns(transforms):
        values[CLIPPED] = clipped
    return values


def remarks(history: dict[str, np.ndarray], spending: Spending | None, asked: int) -> tuple[str, ...]:
    """What a reader of a result must know, in plain words; `asked` is the number of rounds that was asked for."""
    found = []
    ratios = np.asarray(history.get(SIGNAL, []), float)
    ratios = ratios[np.isfinite(ratios)]
    ratio = float(np.median(ratios)) if ratios.size else math.inf
    if ratio < 1:
        size = f"{ratio:.2g} times" if ratio > 0.05 else "less than 0.05 times"
        found.append(
            f"the noise drowns the signal in {np.sum(ratios < 1)} of {ratios.size} evaluations: the mean of the "
            f"uploads has {size} the norm of the noise in it (median). More clients, fewer parameters, or less noise "
            "would help."
        )
    done = int(history["round"][-1]) if len(history["round"]) else 0
    if spending is not None and spending.guarantee.budget is not None and done < asked:
        if done >= spending.rounds_within(asked):
            found.append(
                f"stopped after round {done} of {asked}: epsilon {spending.epsilon(done):.4g} is spent, and another "
                f"round would exceed the budget of {spending.guarantee.budget:g}."
            )
    return tuple(found)
