"""Who takes part in a round.

A cohort is drawn so that the means over it are right on average. A client is asked with a probability, its *chance*,
and counts in means with its weight in the problem / its chance:

    weights    (default) as many clients as asked for, each with a chance in proportion to its weight, at most 1.
               The weights in means then add up to 1 for every cohort, so a mean of x is an unbiased mean of x.
    uniform    as many clients as asked for, all sets of clients equally likely, and means by renormalised weights. With
               equal weights this is the same; with unequal ones it is another problem (small clients count for more),
               and it is what most programs do.
    poisson    every client by a coin of its own, whose probability is its chance: a cohort of any size, an empty one
               included. What privacy accounting asks for. A mean over it is a ratio of sums, right up to an error of
               the order of 1 / cohort.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from nestfed.core.algorithm import Cohort
from nestfed.core.randomness import COHORT, DROPOUT, draw_below, draw_priorities, fold
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import AnyArray, Array

SAMPLINGS = ("weights", "uniform", "poisson")
OVERFLOW = 1e-20  # probability that a Poisson cohort is larger than the room made for it


class Participant(NamedTuple):
    """One client's place in a round."""

    position: Array  # in the task
    id: Array  # names the client in random draws
    slot: Array  # in the cohort
    weight: Array  # in means; zero: takes no part
    chance: Array  # weight x chance is the client's weight in the problem


class CohortRule(NamedTuple):
    """How a cohort is drawn: a part of the program."""

    size: float  # expected number of clients
    sampling: str
    room: int  # for so many clients at the most

    @property
    def random_size(self) -> bool:
        return self.sampling == "poisson"


def make_cohort_rule(cohort: int | float | None, sampling: str, weights: np.ndarray) -> CohortRule | None:
    """What a user asks for, checked; None: everybody takes part. `weights` are [..., clients]."""
    clients = weights.shape[-1]
    if sampling not in SAMPLINGS:
        raise UserError(f"sampling={sampling!r} was given; use one of {', '.join(SAMPLINGS)}.")
    size = find_expected_cohort(cohort, clients)
    if sampling == "poisson":
        if size is None:
            raise UserError("sampling='poisson' was given without cohort; give the expected number of clients.")
        return CohortRule(float(size), sampling, _find_room(float(size), clients))
    if size is None or round(size) >= clients:
        return None
    number = max(1, round(size))
    if np.ptp(weights) <= 1e-9 * weights.max():
        sampling = "uniform"  # the same, and a fast selection
    able = int(np.count_nonzero(weights > 0, axis=-1).min())
    if sampling == "weights" and number > able:
        raise UserError(f"cohort={number}, but only {able} clients have a weight above 0; use at most {able}.")
    return CohortRule(number, sampling, number)


def find_expected_cohort(cohort: int | float | None, clients: int) -> float | None:
    """The number of clients per round from a number, a fraction or None."""
    if cohort is None:
        return None
    if isinstance(cohort, bool) or not isinstance(cohort, (int, float, np.integer, np.floating)):
        raise UserError(f"cohort={cohort!r} was given; use a number of clients, a fraction, or None for all of them.")
    if isinstance(cohort, (float, np.floating)):
        if not 0 < cohort <= 1:
            raise UserError(f"cohort={cohort} was given; a fraction of the clients lies between 0 and 1.")
        return float(cohort) * clients
    if cohort < 1:
        raise UserError(f"cohort={cohort} was given; a round needs at least one client.")
    if cohort > clients:
        raise UserError(f"cohort={cohort}, but the task has {clients} clients; use cohort=None for all of them.")
    return int(cohort)


def _find_room(size: float, clients: int) -> int:
    """For a Poisson cohort. Coins of unequal chances are less spread than equal ones (Hoeffding 1956)."""
    from scipy.special import bdtrc  # not needed without Poisson cohorts

    numbers = np.arange(int(np.ceil(size)) + 1, clients + 1)
    enough = numbers[bdtrc(numbers, clients, size / clients) < OVERFLOW]
    return int(enough[0]) if enough.size else clients


def find_chances(weights: AnyArray, rule: CohortRule | None) -> Array:
    """Every client's chance to be asked: min(1, tau weight), the same in sum as the cohort's expected size."""
    weights = jnp.asarray(weights)
    if rule is None or rule.sampling == "uniform":
        return jnp.ones_like(weights)  # the drawing is the same for all: it does not show in means
    order = jnp.argsort(-weights)
    sorted_weights = weights[order]
    rest = jnp.cumsum(sorted_weights[::-1])[::-1]
    left = rule.size - jnp.arange(weights.size)
    # The clients that are always asked: the first number of them that leaves nobody else a chance above 1.
    always = jnp.argmax(left * sorted_weights <= rest)
    return jnp.minimum(1, weights * (left[always] / rest[always]).astype(weights.dtype))


def find_remarks(weights: np.ndarray, rule: CohortRule | None, dropout: bool) -> tuple[str, ...]:
    """What a reader must know of means over those who take part, in plain words."""
    if np.ptp(weights) <= 1e-9 * weights.max():
        return ()
    if rule is not None and rule.sampling == "uniform":
        return (
            "cohorts are drawn uniformly although clients weigh differently: light clients count for more than their "
            "weights say. sampling='weights' solves the stated problem.",
        )
    always_asked = rule is None or float(np.max(find_chances(weights, rule))) >= 1
    if dropout and always_asked:
        return (
            "clients weigh differently and some of them do not answer: a mean over those who do lets light clients "
            "count for more than their weights say. Smaller cohorts, in which all count alike, do not.",
        )
    return ()


def list_participants(task: Task) -> Participant:
    """All clients, as at the start and in metrics."""
    positions, weights = jnp.arange(task.clients), jnp.asarray(task.weights)
    return Participant(positions, jnp.asarray(task.data.ids), positions, weights, jnp.ones_like(weights))


def choose_cohort(
    task: Task,
    key: Array,
    round: Array,
    rule: CohortRule | None = None,
    dropout: Array | None = None,
    *,
    chances: Array | None = None,
    secret: Array | None = None,
) -> Participant:
    """The participants of a round. Draws are keyed by client id: a new client displaces few. Dropped clients get weight
    zero.

    `chances` are those of `find_chances`, for whoever has computed them before the first round. `secret` draws the
    cohort in place of the run's key, which everybody knows: for a guarantee that counts on nobody knowing who took
    part.
    """
    ids, weights = jnp.asarray(task.data.ids), jnp.asarray(task.weights)
    of_all: Any = find_chances(weights, rule) if chances is None else chances
    positions, present = jnp.arange(task.clients), None
    if rule is not None:
        chosen_by = fold(key if secret is None else secret, COHORT, round)
        priority = draw_priorities(chosen_by, ids)
        draw = {"uniform": _draw_uniformly, "weights": _draw_by_weight, "poisson": _draw_by_coin}[rule.sampling]
        positions, present = draw(chosen_by, priority, of_all, rule)
        weights = weights / jnp.where(of_all > 0, of_all, 1).astype(weights.dtype)
    ids, weights, own = ids[positions], weights[positions], of_all[positions]
    if present is not None:
        weights = jnp.where(present, weights, 0)
    if dropout is not None:
        luck = draw_priorities(fold(key, DROPOUT, round), ids).astype(weights.dtype) / 2.0**32
        weights = jnp.where(luck >= dropout, weights, 0)
    return Participant(positions, ids, jnp.arange(positions.size), weights, own)


def _draw_uniformly(key: Array, priority: Array, chances: Array, rule: CohortRule) -> tuple[Array, None]:
    """The clients with the largest priorities: a larger cohort contains the smaller one."""
    # As floats of the same order (no NaN, nothing denormal): for these there is a fast selection, not a whole sort.
    _, chosen = lax.top_k(lax.bitcast_convert_type((priority >> 3) + 0x00800000, jnp.float32), rule.room)
    return jnp.sort(chosen), None  # the task's own order within the cohort


def _draw_by_weight(key: Array, priority: Array, chances: Array, rule: CohortRule) -> tuple[Array, Array]:
    """Systematic sampling from the clients in random order: exactly these chances, and nobody twice.

    Chances are laid end to end in whole numbers, and evenly spaced points are dropped on them from a random start.
    """
    spacing = 2**31 // rule.room  # leaves room for rounding below 2^32
    lengths = jnp.where(chances < 1, jnp.minimum(chances, 0.9999999) * float(spacing), 0).astype("uint32")
    lengths = jnp.where(chances < 1, lengths, jnp.uint32(spacing))
    order = jnp.argsort(priority)
    ends = jnp.cumsum(lengths[order], dtype="uint32")
    start = draw_below(key, jnp.uint32(spacing))
    points_before = jnp.where(ends > start, (ends - start - 1) // jnp.uint32(spacing) + 1, 0)
    hit = jnp.diff(points_before, prepend=points_before[:1] * 0) > 0
    chosen = jnp.zeros(priority.shape, bool).at[order].set(hit)
    _, positions = lax.top_k(chosen.astype(jnp.float32), rule.room)  # the first ones among equals
    positions = jnp.sort(positions)
    return positions, chosen[positions]  # rounding may leave the last point without a client


def _draw_by_coin(key: Array, priority: Array, chances: Array, rule: CohortRule) -> tuple[Array, Array]:
    """Every client whose coin falls; the other places go to clients that take no part."""
    luck = priority.astype(jnp.float32) / 2.0**32
    present = (luck < chances.astype(jnp.float32)) | (chances >= 1)
    order = luck / jnp.maximum(chances.astype(jnp.float32), 1e-30)
    _, positions = lax.top_k(jnp.where(present, 1 - jnp.minimum(order, 1), -1 - order), rule.room)
    positions = jnp.sort(positions)
    return positions, present[positions]


def show_cohort(participants: Participant) -> Cohort:
    """What a reply to a gather knows about the cohort."""
    return Cohort(participants.id, participants.weight)


def find_expected_weight(weights: AnyArray, chances: Array) -> tuple[Array, Array]:
    """(what the weights in means of a Poisson cohort add up to on average, the largest of them)."""
    in_means = jnp.asarray(weights) / jnp.where(chances > 0, chances, 1)
    return jnp.ones((), in_means.dtype), jnp.max(in_means)
