"""Distributionally robust objectives: from the losses of single rows to a composition.

Each asks for the largest mean loss that an adversary can reach by moving weight between all clients' rows, at a price
or within a limit. `losses(x, batch, key)` gives one loss per row of a batch; x is the user's parameter tree.

    KL          max_p  sum p_i l_i - price KL(p | uniform)     = price log mean exp(l / price)
    ChiSquare   max_p  sum p_i l_i - price (n/2) |p - 1/n|^2   = mean l + Var(l) / (2 price)
    CVaR        max_p  sum p_i l_i,  p_i <= 1 / (tail n)       = min_c  c + mean (l - c)_+ / tail
    MeanLoss    p uniform: the ordinary average, for comparison and for methods that weigh the rows of a batch

All of them add (weight_decay / 2) |x|^2.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.scaled import Scaled
from nestfed.core.settings import setting, static, struct
from nestfed.core.types import Array, PyTree
from nestfed.problems import Compositional, SingleLevel

OverRows = Callable[[Callable[[Any], Any]], Any]  # takes a function of a batch; its exact mean over all clients' rows
_PRICE = "lambda: the price of moving weight to bad rows; the smaller, the more cautious"
_DECAY = "mu: (mu / 2) |x|^2 is added"


def half_square(x: PyTree) -> Any:
    return 0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


class WeighsRows(abc.ABC):
    """A problem whose adversary gives every row a weight w, of mean 1."""

    @abc.abstractmethod
    def describe_weights(self, x: PyTree, over_rows: OverRows, key: Array) -> dict[str, Array]:
        """How w is spread at x: `effective_share`, (mean w)^2 / mean w^2, and what tells whether the formula holds."""


@struct
class KL(Compositional, WeighsRows):
    """g = mean exp(l / price), f(y) = price log y. Losses must not be negative: then g >= 1, and y is kept there.

    scale "paper" leaves out the factor price of f, as FedDRO's paper does: gradients are 1 / price times larger, so
    step sizes do not carry over. largest_weight bounds what a row can count, relative to the average row, and keeps an
    estimate of g that is far too small from blowing up a step. No row can weigh more than all of them together: that
    exact bound is taken from the task's rows and weights. It matters: where the largest loss falls by more than about
    35 prices in a step, what is left of the estimate is rounding.
    """

    losses: Callable[[PyTree, PyTree, Array], Array] = static()
    price: float = setting(_PRICE, default=1.0, above=0)
    weight_decay: float = setting(_DECAY, default=0.0, at_least=0)
    largest_weight: float | None = setting("bound on the weight of a row; None: exact", default=None, above=0)
    scale: str = setting("factor of the logarithm", default="lambda", choices=("lambda", "paper"), static=True)

    @property
    def factor(self) -> Any:
        return self.price if self.scale == "lambda" else 1.0

    def fit_to(self, data, weights):
        if self.largest_weight is not None:
            return self
        sizes = np.asarray(data.sizes, float)
        heaviest = np.max(sizes[weights > 0] / weights[weights > 0]) if data.columns is not None else np.inf
        return dataclasses.replace(self, largest_weight=float(heaviest))

    def inner(self, x, batch, key):
        return Scaled.mean_exp(self.losses(x, batch, key) / self.price)

    def outer(self, y, batch, key):
        return self.factor * y.log()

    def extra(self, x, batch, key):
        return self.weight_decay * half_square(x)

    def project_y(self, y):
        return y.at_least(1.0)

    def bound_slope(self, slope):
        return jnp.minimum(slope, self.factor * self.largest_weight)

    def describe_weights(self, x, over_rows, key):
        exponents = lambda batch: self.losses(x, batch, key) / self.price
        first, second = over_rows(lambda b: (Scaled.mean_exp(exponents(b)), Scaled.mean_exp(2 * exponents(b))))
        return {"effective_share": jnp.exp(2 * first.log() - second.log())}


@struct
class ChiSquare(Compositional, WeighsRows):
    """g = mean l, h = mean l + mean l^2 / (2 price), f(y) = -y^2 / (2 price): the mean plus Var / (2 price).

    This is exact while no weight 1/n + (l_i - mean l) / (price n) is negative, that is while every loss is at least the
    mean minus price. `as_printed` is the formula of FedDRO's paper, -Var / (2 price), which rewards variance; it is
    kept to show that.
    """

    losses: Callable[[PyTree, PyTree, Array], Array] = static()
    price: float = setting(_PRICE, default=1.0, above=0)
    weight_decay: float = setting(_DECAY, default=0.0, at_least=0)
    as_printed: bool = setting("the paper's formula, with the wrong sign", default=False, static=True)

    def inner(self, x, batch, key):
        return jnp.mean(self.losses(x, batch, key))

    def outer(self, y, batch, key):
        return (1 if self.as_printed else -1) * y**2 / (2 * self.price)

    def extra(self, x, batch, key):
        losses = self.losses(x, batch, key)
        square = jnp.mean(losses**2) / (2 * self.price)
        return self.weight_decay * half_square(x) + (-square if self.as_printed else jnp.mean(losses) + square)

    def project_y(self, y):
        return jnp.maximum(y, 0)

    def describe_weights(self, x, over_rows, key):
        mean = over_rows(lambda batch: jnp.mean(self.losses(x, batch, key)))
        weights = lambda batch: 1 + (self.losses(x, batch, key) - mean) / self.price
        negative = lambda w: jnp.mean((w < 0).astype(w.dtype))
        square, share = over_rows(lambda batch: (jnp.mean(weights(batch) ** 2), negative(weights(batch))))
        return {"effective_share": 1 / square, "negative_share": share}


@struct
class CVaR(Compositional, WeighsRows):
    """The mean of the worst share `tail` of losses: g = mean smooth (l - c)_+, f(y) = y / tail, h = c.

    The threshold c is a variable: x is {"model": the user's tree, "threshold": c}, made by `start`. (v)_+ is smoothed
    to width log(1 + e^(v / width)), which is larger by at most width log 2.
    """

    losses: Callable[[PyTree, PyTree, Array], Array] = static()
    tail: float = setting("alpha: share of rows in the tail", default=0.5, above=0, at_most=1)
    width: float = setting("width of the smoothing", default=0.05, above=0)
    weight_decay: float = setting(_DECAY, default=0.0, at_least=0)

    def start(self, model: PyTree, threshold: float = 0.0) -> PyTree:
        return {"model": model, "threshold": jnp.asarray(threshold)}

    def params_of(self, server, client):
        return super().params_of(server, client)["model"]

    def inner(self, x, batch, key):
        excess = self.losses(x["model"], batch, key) - x["threshold"]
        return self.width * jnp.mean(jax.nn.softplus(excess / self.width))

    def outer(self, y, batch, key):
        return y / self.tail

    def extra(self, x, batch, key):
        return x["threshold"] + self.weight_decay * half_square(x["model"])

    def project_y(self, y):
        return jnp.maximum(y, 0)

    def describe_weights(self, x, over_rows, key):
        excess = lambda batch: self.losses(x["model"], batch, key) - x["threshold"]
        weights = lambda batch: jax.nn.sigmoid(excess(batch) / self.width)
        mean, square = over_rows(lambda batch: (jnp.mean(weights(batch)), jnp.mean(weights(batch) ** 2)))
        return {"effective_share": mean**2 / square, "tail_mass": mean / self.tail}


@struct
class MeanLoss(SingleLevel):
    """The mean of l, without an adversary."""

    losses: Callable[[PyTree, PyTree, Array], Array] = static()
    weight_decay: float = setting(_DECAY, default=0.0, at_least=0)

    def per_row(self, x, batch, key):
        return self.losses(x, batch, key)

    def regulariser(self, x):
        return self.weight_decay * half_square(x)
