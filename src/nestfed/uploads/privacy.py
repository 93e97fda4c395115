"""Differential privacy: guarantees, and what a run spends of them."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nestfed.core.settings import UserError, check_registered
from nestfed.uploads.transforms import SIGNAL, Clip, GaussianNoise, ServerNoise, Transform

EPSILON = "epsilon"  # a column of the history
NEIGHBOURS = ("replace", "add-or-remove")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee(abc.ABC):
    """The Gaussian mechanism on every exchange. Use LocalDP or CentralDP.

    clip                  largest norm of an upload (of what is news in it)
    noise_multiplier      noise / sensitivity; or
    epsilon               of one exchange, from which the noise follows by `mechanism`
    delta                 of the guarantee
    neighbours            which two federations may hardly be told apart. "replace": one client holds other data, so two
                          of its uploads may lie 2 clip apart and noise_multiplier is noise / (2 clip). "add-or-remove":
                          one client more or less; noise_multiplier is noise / clip, as in Opacus and TensorFlow
                          Privacy. It needs Poisson cohorts, and says half as much
    sensitivity_factor    sensitivity / clip, which follows from `neighbours`. 1 with "replace" reproduces papers that
                          take clip for the sensitivity; what is spent is counted with 2
    mechanism             "analytic": the exact noise (Balle and Wang 2018); "paper": sqrt(2 ln(1.25 / delta)) / epsilon
    as_printed            use the formula of "paper" where it does not hold (epsilon >= 1), to repeat a paper's numbers
    budget                epsilon of the whole run: it ends before a round that would spend more
    earlier               `Result.spent` of runs before on the same data, which count too
    """

    clip: float
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    neighbours: str = "replace"
    sensitivity_factor: int | None = None
    mechanism: str = "analytic"
    as_printed: bool = False
    budget: float | None = None
    earlier: "tuple[tuple[Spending, int], ...]" = ()

    def __post_init__(self) -> None:
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
        if self.neighbours not in NEIGHBOURS:
            raise UserError(f"{name}: neighbours={self.neighbours!r} was given; use {' or '.join(NEIGHBOURS)}.")
        if self.sensitivity_factor not in (None, 1, 2):
            raise UserError(
                f"{name}: sensitivity_factor={self.sensitivity_factor!r} was given; leave it out, or use 1 (papers)."
            )
        if any(spent.guarantee.neighbours != self.neighbours for spent, _ in self.earlier):
            raise UserError(
                f"{name}: neighbours={self.neighbours!r} was given, and what was spent earlier is counted for others; "
                "use the same neighbours in all runs on the same data."
            )
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
        """Noise / sensitivity as the guarantee was told."""
        if self.epsilon is None:
            return float(self.noise_multiplier or 0)
        if self.mechanism == "paper":
            return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon
        with np.errstate(all="ignore"):  # the search passes where a logarithm of zero is taken
            return float(_load_accounting().get_sigma_gaussian(self.epsilon, self.delta))

    @property
    def true_factor(self) -> int:
        """The largest distance of two uploads of neighbours, in clips."""
        return 2 if self.neighbours == "replace" else 1

    @property
    def true_multiplier(self) -> float:
        """Noise / true sensitivity, whatever the guarantee was told."""
        return self.multiplier * (self.sensitivity_factor or self.true_factor) / self.true_factor

    @property
    def sigma(self) -> float:
        """The noise on one client's upload; in a central guarantee, in the mean of a single client."""
        return self.true_multiplier * self.true_factor * self.clip

    def check_cohort(self, random_size: bool) -> None:
        """Refuse ways of choosing cohorts for which this says nothing."""
        if self.neighbours == "add-or-remove" and not random_size:
            raise UserError(
                f"{type(self).__name__}: neighbours='add-or-remove' was given without sampling='poisson'. With one "
                "client more or less a mean is divided by another number, and cohorts of a fixed size have other "
                "members; use Poisson cohorts, or neighbours='replace'."
            )

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

    def check_cohort(self, random_size: bool) -> None:
        if self.neighbours != "replace":
            raise UserError(
                "LocalDP: neighbours='add-or-remove' was given, but the server sees who uploads: whether a client "
                "takes part cannot be hidden, only what it holds. Use neighbours='replace', or CentralDP."
            )

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return Clip(norm=float(self.clip)), GaussianNoise(sigma=self.sigma)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CentralDP(Guarantee):
    """Clients clip, a trusted server adds noise to the mean: protects a client's data against those who see the models.

    The sensitivity of a mean is that of an upload times the largest share of a client in it. Poisson cohorts amplify
    the guarantee (then a mean is a sum divided by what is expected, and an empty round is noise), and so do cohorts of
    a fixed size where all clients weigh the same and none of them keeps a state.
    """

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return Clip(norm=float(self.clip)), ServerNoise(scale=self.sigma)


Uploads = Transform | Guarantee | Sequence[Transform | Guarantee]


def _list(uploads: Any) -> tuple[Any, ...]:
    return tuple(uploads) if isinstance(uploads, (tuple, list)) else (uploads,)


def find_guarantee(uploads: Uploads) -> Guarantee | None:
    """The guarantee among what was given as `uploads`."""
    return next((entry for entry in _list(uploads) if isinstance(entry, Guarantee)), None)


def list_transforms(uploads: Uploads) -> tuple[Transform, ...]:
    """What was given as `uploads`, checked, as transforms in their order."""
    transforms: list[Transform] = []
    guarantees: list[Guarantee] = []
    for entry in _list(uploads):
        if isinstance(entry, Guarantee):
            guarantees.append(entry)
            transforms.extend(entry.transforms)
            continue
        if not isinstance(entry, Transform):
            raise UserError(
                f"uploads holds {entry!r}; give transforms of nestfed.uploads, such as Clip(norm=1.0), LocalDP or "
                "CentralDP."
            )
        check_registered(entry)
        entry.check()
        if entry.changes("apply") and any(isinstance(guarantee, CentralDP) for guarantee in guarantees):
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

    The Gaussian mechanisms of all exchanges compose exactly. Rounds of Poisson cohorts are composed by privacy loss
    distributions (tight up to their grid), rounds of cohorts of a fixed size by Renyi divergences.
    """

    guarantee: Guarantee
    start: int  # exchanges of the start
    round: int  # exchanges of a round
    clients: int
    cohort: float | None = None  # its (expected) size, where it is drawn at random and amplifies; None otherwise
    chance: float | None = None  # the largest probability of a client to be in a Poisson cohort; None: a fixed size
    repeatable: bool = False  # was the noise drawn from a number? Then it protects nobody

    def __post_init__(self) -> None:
        _load_accounting()  # what is missing shows before anything runs

    def epsilon(self, rounds: int) -> float:
        """After so many rounds."""
        return _compute_epsilon((*self.guarantee.earlier, (self, int(rounds))), self.guarantee.delta)

    @property
    def noise_multiplier(self) -> float:
        """Noise / true sensitivity."""
        return self.guarantee.true_multiplier

    @property
    def exact_precision(self) -> float:
        """Of a round's exchanges together, where nothing is amplified: 1 / multiplier^2."""
        return self.round / self.noise_multiplier**2

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

    @property
    def sampling(self) -> str:
        """In words."""
        if self.cohort is None:
            return "none"
        return f"{self.cohort:g} of {self.clients} clients" + (" (Poisson)" if self.chance is not None else "")

    def summarise(self, rounds: int) -> dict[str, Any]:
        """For the record of a run."""
        guarantee = self.guarantee
        return (
            {
                "guarantee": type(guarantee).__name__,
                "epsilon": self.epsilon(rounds),
                "delta": guarantee.delta,
                "neighbours": guarantee.neighbours,
                "rounds": int(rounds),
                "exchanges": self.start + self.round * int(rounds),
                "clip": float(guarantee.clip),
                "noise multiplier": self.noise_multiplier,
                "sigma": guarantee.sigma,
                "sampling": self.sampling,
            }
            | ({} if guarantee.budget is None else {"budget": guarantee.budget})
            | ({"noise": "repeatable: for tests"} if self.repeatable else {})
        )


@functools.lru_cache(maxsize=4096)
def _compute_epsilon(parts: tuple[tuple[Spending, int], ...], delta: float) -> float:
    """Of all parts together: the smallest of the bounds that apply."""
    poisson = [(s, rounds) for s, rounds in parts if s.chance is not None and rounds]
    fixed = [(s, rounds) for s, rounds in parts if s.cohort is not None and s.chance is None and rounds]
    bounds = [_compute_exactly(parts, delta)]
    if poisson and bounds[0]:
        bounds.append(_compose_loss_distributions(parts, poisson, delta))
    if fixed and bounds[0]:
        bounds.append(_compose_renyi_divergences(parts, fixed, delta))
    return min(bounds)


def _compute_precision(parts: Sequence[tuple[Spending, int]], amplified: Sequence[tuple[Spending, int]] = ()) -> float:
    """Several Gaussian mechanisms are one: 1 / multiplier^2 adds up, here without the rounds of amplified parts."""
    total = 0.0
    for part in parts:
        spending, rounds = part
        total += spending.start / spending.noise_multiplier**2
        total += 0 if part in amplified else rounds * spending.exact_precision
    return total


def _compute_exactly(parts: Sequence[tuple[Spending, int]], delta: float) -> float:
    precision = _compute_precision(parts)
    if precision == 0:
        return 0.0
    with np.errstate(all="ignore"):  # the search passes where a logarithm of zero is taken
        return float(_load_accounting().get_epsilon_gaussian(1 / math.sqrt(precision), delta))


def _compose_loss_distributions(parts: Sequence[Any], poisson: Sequence[tuple[Spending, int]], delta: float) -> float:
    losses: Any = None
    for spending, rounds in poisson:
        guarantee = spending.guarantee
        # The exchanges of a round see one cohort: together they are one Gaussian mechanism, drawn once.
        noise = spending.noise_multiplier * guarantee.true_factor / math.sqrt(spending.round)
        several = _make_loss_distribution(noise, float(spending.chance or 0), guarantee.neighbours).self_compose(rounds)
        losses = several if losses is None else losses.compose(several)
    rest = _compute_precision(parts, poisson)
    if rest:
        guarantee = poisson[0][0].guarantee
        noise = guarantee.true_factor / math.sqrt(rest)
        losses = losses.compose(_make_loss_distribution(noise, 1.0, guarantee.neighbours))
    return float(losses.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _make_loss_distribution(noise: float, chance: float, neighbours: str) -> Any:
    """Of one round, for noise / clip and the probability to be in it."""
    accounting = _load_accounting()
    relation = accounting.NeighboringRelation
    return accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=chance,
        neighboring_relation=relation.REPLACE_ONE if neighbours == "replace" else relation.ADD_OR_REMOVE_ONE,
    )


def _compose_renyi_divergences(parts: Sequence[Any], fixed: Sequence[tuple[Spending, int]], delta: float) -> float:
    accounting = _load_accounting()
    divergence: Any = _compute_precision(parts, fixed) * _list_orders() / 2
    for spending, rounds in fixed:
        multiplier = spending.noise_multiplier / math.sqrt(spending.round)
        divergence = divergence + rounds * _bound_cohort(multiplier, int(spending.cohort or 0), spending.clients)
    with np.errstate(all="ignore"):
        return float(accounting.rdp.compute_epsilon(_list_orders(), divergence, delta)[0])


def _list_orders() -> np.ndarray:
    return np.asarray(_load_accounting().rdp.RdpAccountant().orders, float)


@functools.lru_cache(maxsize=64)
def _bound_cohort(multiplier: float, cohort: int, clients: int) -> np.ndarray:
    """Renyi divergences of one round of a cohort drawn without replacement."""
    accounting = _load_accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    with np.errstate(all="ignore"):
        accountant.compose(
            accounting.SampledWithoutReplacementDpEvent(clients, cohort, accounting.GaussianDpEvent(multiplier))
        )
    return np.asarray(accountant.rdp, float)


def _load_accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld.privacy_loss_distribution
        import dp_accounting.rdp
    except ImportError as error:
        raise UserError(
            "differential privacy needs the package dp-accounting; install it with: pip install 'nestfed[privacy]'."
        ) from error
    return dp_accounting


def find_remarks(history: dict[str, np.ndarray], spending: Spending | None, asked: int) -> tuple[str, ...]:
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
