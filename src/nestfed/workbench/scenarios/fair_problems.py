"""The problems of fair classification, all on the same rows: inputs, a binary label s, a group a.

    WeightedRisk       mean of omega_a loss + (penalty / 2) |theta|^2                     FedAvg, and every second stage
    RegularisedRisk    mean of loss + coefficient (largest - smallest soft true positive rate)                   FedReg
    GroupWeights       upper: loss on the validation set; lower: WeightedRisk, omega the upper variable   FedBiO(Acc)
    GroupMinimax       min_theta max_mu sum_a mu_a risk_a(theta)                                             FedMinMax
    DisparityLimit     loss of every client, with its soft gap of true positive rates as constraint               FCFL

Ref.  "Local stochastic bilevel optimization with momentum-based variance reduction", Section 6 and Equation 48.
"""

import jax
import jax.numpy as jnp

from nestfed.core.settings import setting, static, struct
from nestfed.core.types import Array, PyTree
from nestfed.models import Perceptron, RowModel
from nestfed.problems import Bilevel, Constrained, Minimax, SingleLevel
from nestfed.workbench.scenarios.tabular import losses

SHARPNESS = 10.0  # kappa of the soft true positive rate sigma(kappa z)


# ------------------------------------------------------------------------------------------------- means of rows


def mean_of(values: Array, rows: PyTree) -> Array:
    """The mean over a batch; `weight` is 1, or marks the padding of a batch of all rows."""
    return jnp.mean(rows["weight"] * values)


def squared_norm(theta: PyTree) -> Array:
    return jnp.asarray(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(theta)))


def group_sums(values: Array, rows: PyTree, groups: int) -> Array:
    """Weighted sums of a batch's values by group."""
    member = jax.nn.one_hot(rows["group"], groups, dtype=values.dtype)
    return (rows["weight"] * values) @ member


def soft_gap(model: RowModel, theta: PyTree, rows: PyTree, groups: int) -> Array:
    """max_a tau_a - min_a tau_a with tau_a = mean of sigma(kappa z) over the positives of group a.

    Groups without a positive in the batch are left out; with fewer than two groups there is no gap.
    """
    positives = group_sums(rows["label"], rows, groups)
    soft = jax.nn.sigmoid(SHARPNESS * model(theta, rows["inputs"]))
    rates = group_sums(rows["label"] * soft, rows, groups) / jnp.where(positives > 0, positives, 1)
    present = positives > 0
    # A group that is left out stands in for no extreme: it takes the place of the first present one.
    rates = jnp.where(present, rates, rates[jnp.argmax(present)])
    return jnp.max(rates) - jnp.min(rates)


# ------------------------------------------------------------------------------------------------- problems


def weight_of(weights: Array, rows: PyTree, *, by_label: bool) -> Array:
    """Every row's weight, where there is one per group or one per group and label."""
    return weights[2 * rows["group"] + rows["label"].astype(jnp.int32) if by_label else rows["group"]]


@struct
class WeightedRisk(SingleLevel):
    """mean of omega_a loss + (penalty / 2) |theta|^2; the weights omega are given."""

    weights: Array
    by_label: bool = static(default=False)
    penalty: float = 1e-3
    model: RowModel = static(default=Perceptron())

    def loss(self, x, batch, key):
        rows = batch["train"]
        weighted = weight_of(jnp.asarray(self.weights), rows, by_label=self.by_label) * losses(self.model, x, rows)
        return mean_of(weighted, rows) + self.penalty / 2 * squared_norm(x)


@struct
class RegularisedRisk(SingleLevel):
    """mean of loss + (penalty / 2) |theta|^2 + coefficient (soft gap of true positive rates in the batch)."""

    groups: int = static()
    coefficient: float = 0.1
    penalty: float = 1e-3
    model: RowModel = static(default=Perceptron())

    def loss(self, x, batch, key):
        rows = batch["train"]
        risk = mean_of(losses(self.model, x, rows), rows) + self.penalty / 2 * squared_norm(x)
        return risk + self.coefficient * soft_gap(self.model, x, rows, self.groups)


@struct
class GroupWeights(Bilevel):
    """Choose the weight of every group so that each client's weighted model does well on its balanced validation set.

    `form` says how the upper variable gives weights: "projected" (not negative, of mean 1, kept so after every step) or
    "softmax" (their number x softmax). Beyond the paper: weights may be per group and label (`by_label`), and `gap` > 0
    adds gap x (the soft gap of true positive rates on the validation batch) to the upper loss.
    """

    groups: int = static()
    penalty: float = 1e-3
    gap: float = 0.0
    model: RowModel = static(default=Perceptron())
    form: str = setting("projected or softmax", default="projected", choices=("projected", "softmax"), static=True)
    by_label: bool = static(default=False)

    def start(self) -> Array:
        """The variable that gives weights of 1."""
        number = self.groups * (2 if self.by_label else 1)
        return jnp.ones(number) if self.form == "projected" else jnp.zeros(number)

    def weights(self, x):
        return x if self.form == "projected" else x.size * jax.nn.softmax(x)

    def upper(self, x, y, batch, key):
        rows = batch["validation"]
        return mean_of(losses(self.model, y, rows), rows) + self.gap * soft_gap(self.model, y, rows, self.groups)

    def lower(self, x, y, batch, key):
        rows = batch["train"]
        weighted = weight_of(self.weights(x), rows, by_label=self.by_label) * losses(self.model, y, rows)
        return mean_of(weighted, rows) + self.penalty / 2 * squared_norm(y)

    def project_x(self, x):
        if self.form == "softmax":
            return x
        x = jnp.maximum(x, 0)
        mean = jnp.mean(x)
        return jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1), 1)

    def params_of(self, server, client):
        return self.tree(1, server.y if client.y is None else client.y)


@struct
class GroupMinimax(Minimax):
    """min_theta max_mu sum_a mu_a risk_a(theta), mu on the simplex."""

    groups: int = static()
    penalty: float = 1e-3
    model: RowModel = static(default=Perceptron())

    def value(self, x, alpha, batch, key):
        rows = batch["train"]
        weighted = alpha[rows["group"]] * losses(self.model, x, rows)
        return mean_of(weighted, rows) + self.penalty / 2 * squared_norm(x)

    def group_risks(self, x, batch, key):
        rows = batch["train"]
        counts = group_sums(jnp.ones_like(rows["label"]), rows, self.groups)
        return group_sums(losses(self.model, x, rows), rows, self.groups) / jnp.where(counts > 0, counts, 1), counts

    def group_shares(self, batch, key):
        return batch["shares"]


@struct
class DisparityLimit(Constrained):
    """Every client's loss, and the soft gap of its true positive rates between groups as the one constraint."""

    groups: int = static()
    penalty: float = 1e-3
    model: RowModel = static(default=Perceptron())

    def objective(self, x, batch, key):
        rows = batch["train"]
        return mean_of(losses(self.model, x, rows), rows) + self.penalty / 2 * squared_norm(x)

    def constraints(self, x, batch, key):
        return soft_gap(self.model, x, batch["train"], self.groups)[None]
