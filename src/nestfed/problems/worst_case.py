"""The adversary's best response: how it weighs the rows of a batch once their losses are known.

    chi_square       max_p  sum p_i l_i - price (n/2) |p - 1/n|^2       p_i = (l_i - c)_+ / (price n)
    chi_square_ball  max_p  sum p_i l_i,  (n/2) |p - 1/n|^2 <= radius   p_i ~ (l_i - c)_+
    cvar             max_p  sum p_i l_i,  p_i <= 1 / (tail n)           the largest losses, as much as each may take
    kl               max_p  sum p_i l_i - price KL(p | uniform)         p_i ~ exp(l_i / price)
    kl_cvar          as kl, with p_i <= 1 / (tail n)                    p_i = min(exp((l_i - c) / price), 1 / tail) / n

p has sum 1 and no negative entry. By the envelope theorem sum p_i grad l_i, with p held fixed, is the gradient of the
value. `weights` are the rows' nominal weights in place of 1/n, of any sum: rows of weight zero are left out, whatever
their losses. Everything has a fixed number of steps and goes through jit and vmap; nothing is meant to be
differentiated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from nestfed.core.types import Array, ArrayLike

HALVINGS = 60  # of an interval; after that float64 knows no smaller one
ALIKE = 1e-5  # losses that differ by less, relative to the largest, are not told apart: no c can be found for them


class Batch(NamedTuple):
    """Holds the losses of the rows that count, and the nominal weights of all rows."""

    losses: Array  # where the weight is zero, the smallest of the others
    nominal: Array  # sum 1
    lowest: Array
    highest: Array

    @property
    def mean(self) -> Array:
        return self.nominal @ self.losses


def chi_square(losses: Array, price: ArrayLike, weights: Array | None = None) -> Array:
    batch = _make_batch(losses, weights)
    paid = lambda level: batch.nominal * jnp.maximum(batch.losses - level, 0) / price
    level = _find_root(lambda level: paid(level).sum() - 1, batch.mean - price, batch.highest)
    return _respond(batch, paid(level))


def chi_square_ball(losses: Array, radius: ArrayLike, weights: Array | None = None) -> Array:
    batch = _make_batch(losses, weights)
    excess = lambda level: jnp.maximum(batch.losses - level, 0)

    def room(level: Array) -> Array:
        """Return how much of the radius is left; it falls with the level, down to what the top rows alone leave."""
        first, second = batch.nominal @ excess(level), batch.nominal @ excess(level) ** 2
        return jnp.asarray(radius - 0.5 * (second / first**2 - 1))

    variance = batch.nominal @ (batch.losses - batch.mean) ** 2
    start = jnp.minimum(batch.lowest, batch.mean - jnp.sqrt(variance / (2 * radius)))
    level = _find_root(room, start, batch.highest)
    top = jnp.where(batch.losses == batch.highest, batch.nominal, 0)
    alone = 0.5 * (1 / top.sum() - 1) <= radius
    return _respond(batch, jnp.where(alone, top, batch.nominal * excess(level)))


def cvar(losses: Array, tail: ArrayLike, weights: Array | None = None) -> Array:
    batch = _make_batch(losses, weights)
    largest_first = jnp.argsort(-batch.losses)
    full = jnp.cumsum(batch.nominal[largest_first]) / tail < 1
    edge = batch.losses[largest_first][jnp.minimum(full.sum(), full.size - 1)]
    above, at_edge = batch.losses > edge, batch.losses == edge
    taken = jnp.where(above, batch.nominal / tail, 0)
    # Rows that tie at the edge share what is left, so the order of the rows does not matter.
    tied = jnp.where(at_edge, batch.nominal, 0)
    return taken + jnp.maximum(1 - taken.sum(), 0) * tied / tied.sum()


def kl(losses: Array, price: ArrayLike, weights: Array | None = None) -> Array:
    batch = _make_batch(losses, weights)
    raw = batch.nominal * jnp.exp((batch.losses - batch.highest) / price)
    return raw / raw.sum()


def kl_cvar(losses: Array, price: ArrayLike, tail: ArrayLike, weights: Array | None = None) -> Array:
    batch = _make_batch(losses, weights)
    cap = -jnp.log(jnp.asarray(tail, batch.losses.dtype))
    taken = lambda level: batch.nominal * jnp.exp(jnp.minimum((batch.losses - level) / price, cap))
    # Below the start every row is at its cap, and the sum is 1 / tail.
    level = _find_root(lambda level: taken(level).sum() - 1, batch.lowest - price * cap, batch.highest)
    return _respond(batch, taken(level))


def effective_sample_size(p: Array, weights: Array | None = None) -> Array:
    """Return 1 / (n sum p_i^2), 1 for uniform p: this share of rows, if they counted alike, gives as noisy a mean."""
    nominal = _make_nominal(p, weights)
    return 1 / jnp.sum(jnp.where(nominal > 0, p**2 / jnp.where(nominal > 0, nominal, 1), 0))


def negative_share(losses: Array, price: ArrayLike, weights: Array | None = None) -> Array:
    """Return the share of rows to which 1/n + (l_i - mean l) / (price n) gives a negative weight: where it is not zero,
    mean + Var / (2 price) is larger than the value of `chi_square`."""
    batch = _make_batch(losses, weights)
    return jnp.sum(jnp.where(batch.losses < batch.mean - price, batch.nominal, 0))


# ------------------------------------------------------------------------------------------------- parts


def _make_nominal(like: Array, weights: Array | None) -> Array:
    if weights is None:
        return jnp.full_like(like, 1 / like.size)
    weights = jnp.asarray(weights, like.dtype)
    return weights / weights.sum()


def _make_batch(losses: Array, weights: Array | None) -> Batch:
    losses = jnp.asarray(losses)
    nominal = _make_nominal(losses, weights)
    lowest = jnp.min(jnp.where(nominal > 0, losses, jnp.inf))
    losses = jnp.where(nominal > 0, losses, lowest)
    return Batch(losses, nominal, lowest, jnp.max(losses))


def _respond(batch: Batch, raw: Array) -> Array:
    alike = batch.highest - batch.lowest <= ALIKE * jnp.abs(batch.highest)
    return jnp.where(alike, batch.nominal, raw / raw.sum())


def _find_root(function: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Find from below where a falling function, not negative at `low` and not positive at `high`, is zero."""

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + 0.5 * (high - low)
        positive = function(middle) > 0
        return jnp.where(positive, middle, low), jnp.where(positive, high, middle)

    return lax.fori_loop(0, HALVINGS, halve, (low, high))[0]
