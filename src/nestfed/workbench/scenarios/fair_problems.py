"""The problems of fair classification, all on the same rows: inputs, a binary label s, a group a.

    WeightedRisk       mean of omega_a loss + (penalty / 2) |theta|^2                     FedAvg, and every second stage
    RegularisedRisk    mean of loss + coefficient (largest - smallest soft true positive rate)                   FedReg
    GroupWeights       upper: loss on the validation set; lower: WeightedRisk, omega the upper variable   FedBiO(Acc),
                                                                                             as in their paper
    GapWeights         the same, with the gap of all clients' rows in the upper loss                       FedBiO(Acc)
    GroupMinimax       min_theta max_mu sum_a mu_a risk_a(theta)                                             FedMinMax
    DisparityLimit     loss of every client, with its soft gap of true positive rates as constraint               FCFL
    LimitedGaps        several models, each with its own limit on the gap of all clients' rows             primal-dual

Ref.  "Local stochastic bilevel optimization with momentum-based variance reduction", Section 6 and Equation 48.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from nestfed.core.settings import setting, static, struct
from nestfed.core.types import AnyArray, Array, PyTree
from nestfed.models import Perceptron, RowModel
from nestfed.problems import Bilevel, Constrained, Minimax, SingleLevel
from nestfed.workbench.scenarios.tabular import compute_losses

SHARPNESS = 10.0  # kappa of the soft true positive rate sigma(kappa z)
PRICE_SPEED = 0.3  # of the prices of `GapWeights` beside the weights, whose step size they share


# ------------------------------------------------------------------------------------------------- means of rows


def average(values: Array, rows: PyTree) -> Array:
    """The mean over a batch; `weight` is 1, or marks the padding of a batch of all rows."""
    return jnp.mean(rows["weight"] * values)


def square_norm(theta: PyTree) -> Array:
    return jnp.asarray(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(theta)))


def sum_by_group(values: Array, rows: PyTree, groups: int) -> Array:
    """Weighted sums of a batch's values by group."""
    member = jax.nn.one_hot(rows["group"], groups, dtype=values.dtype)
    return (rows["weight"] * values) @ member


def compute_soft_gap(model: RowModel, theta: PyTree, rows: PyTree, groups: int) -> Array:
    """max_a tau_a - min_a tau_a with tau_a = mean of sigma(kappa z) over the positives of group a.

    Groups without a positive in the batch are left out; with fewer than two groups there is no gap.
    """
    positives = sum_by_group(rows["label"], rows, groups)
    soft = jax.nn.sigmoid(SHARPNESS * model(theta, rows["inputs"]))
    rates = sum_by_group(rows["label"] * soft, rows, groups) / jnp.where(positives > 0, positives, 1)
    present = positives > 0
    # A group that is left out stands in for no extreme: it takes the place of the first present one.
    rates = jnp.where(present, rates, rates[jnp.argmax(present)])
    return jnp.max(rates) - jnp.min(rates)


# ------------------------------------------------------------------------------------------------- problems


def weigh_rows(weights: Array, rows: PyTree, *, by_label: bool) -> Array:
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
        weighted = weigh_rows(jnp.asarray(self.weights), rows, by_label=self.by_label) * compute_losses(
            self.model, x, rows
        )
        return average(weighted, rows) + self.penalty / 2 * square_norm(x)


@struct
class RegularisedRisk(SingleLevel):
    """mean of loss + (penalty / 2) |theta|^2 + coefficient (soft gap of true positive rates in the batch)."""

    groups: int = static()
    coefficient: float = 0.1
    penalty: float = 1e-3
    model: RowModel = static(default=Perceptron())

    def loss(self, x, batch, key):
        rows = batch["train"]
        risk = average(compute_losses(self.model, x, rows), rows) + self.penalty / 2 * square_norm(x)
        return risk + self.coefficient * compute_soft_gap(self.model, x, rows, self.groups)


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

    def start(self) -> PyTree:
        """The variable that gives weights of 1."""
        number = self.groups * (2 if self.by_label else 1)
        return jnp.ones(number) if self.form == "projected" else jnp.zeros(number)

    def weights(self, x: Array) -> Array:
        return x if self.form == "projected" else x.size * jax.nn.softmax(x)

    def upper(self, x, y, batch, key):
        rows = batch["validation"]
        return average(compute_losses(self.model, y, rows), rows) + self.gap * compute_soft_gap(
            self.model, y, rows, self.groups
        )

    def lower(self, x, y, batch, key):
        rows = batch["train"]
        weighted = weigh_rows(self.weights(x), rows, by_label=self.by_label) * compute_losses(self.model, y, rows)
        return average(weighted, rows) + self.penalty / 2 * square_norm(y)

    def project_x(self, x):
        if self.form == "softmax":
            return x
        x = jnp.maximum(x, 0)
        mean = jnp.mean(x)
        return jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1), 1)

    def params_of(self, server, client):
        return self.tree(1, server.y if client.y is None else client.y)


@struct
class GapWeights(GroupWeights):
    """Choose the weights so that the gap of all clients' rows is small too, those for training and for validation.

    The gap of a batch is noise where a client has a handful of positive rows in a group, and no client knows that of
    all rows. Its sum over the groups sum_a |tau_a - tau|, tau the rate of all groups together, is the largest value of
    sum_a lambda_a (tau_a - tau) with |lambda_a| <= 1, and that is a mean of rows: the upper variable has the lambda
    too. They climb along the rates of decisions, while the model sees soft rates (a proxy Lagrangian: Cotter, Jiang and
    Sridharan, "Two-player games for efficient non-convex constrained optimization", ALT 2019, arXiv:1804.06500).
    """

    shares: AnyArray  # [groups]: of a group's positives among all these rows

    def start(self):
        return {"weights": super().start(), "prices": jnp.zeros(self.groups)}

    def weights(self, x: Array) -> Array:
        return super().weights(x["weights"])

    def project_x(self, x):
        return {"weights": super().project_x(x["weights"]), "prices": jnp.clip(x["prices"], -1, 1)}

    def upper(self, x, y, batch, key):
        validation, rows = batch["validation"], batch["known"]
        loss = average(compute_losses(self.model, y, validation), validation)
        logits = self.model(y, rows["inputs"])
        soft = self.compute_deviations(jax.nn.sigmoid(SHARPNESS * logits), rows)
        hard = lax.stop_gradient(self.compute_deviations((logits > 0).astype(logits.dtype), rows))
        # Descent of the whole is ascent of the prices, whose gradient is minus what the decisions say.
        return loss + self.gap * lax.stop_gradient(x["prices"]) @ soft - PRICE_SPEED * x["prices"] @ hard

    def compute_deviations(self, decisions: Array, rows: PyTree) -> Array:
        """tau_a - tau by group; a mean over rows, and over clients."""
        shares = jnp.asarray(self.shares)
        # A half less for everybody changes no difference, and halves the noise of who happens to be in the batch.
        rates = sum_by_group(rows["label"] * (decisions - 0.5), rows, self.groups) / (shares * decisions.size)
        return rates - shares @ rates / shares.sum()


@struct
class GroupMinimax(Minimax):
    """min_theta max_mu sum_a mu_a risk_a(theta), mu on the simplex."""

    groups: int = static()
    penalty: float = 1e-3
    model: RowModel = static(default=Perceptron())

    def value(self, x, alpha, batch, key):
        rows = batch["train"]
        weighted = alpha[rows["group"]] * compute_losses(self.model, x, rows)
        return average(weighted, rows) + self.penalty / 2 * square_norm(x)

    def group_risks(self, x, batch, key):
        rows = batch["train"]
        counts = sum_by_group(jnp.ones_like(rows["label"]), rows, self.groups)
        return sum_by_group(compute_losses(self.model, x, rows), rows, self.groups) / jnp.where(
            counts > 0, counts, 1
        ), counts

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
        return average(compute_losses(self.model, x, rows), rows) + self.penalty / 2 * square_norm(x)

    def constraints(self, x, batch, key):
        return compute_soft_gap(self.model, x, batch["train"], self.groups)[None]


# ------------------------------------------------------------------------------------------------- a limit on the gap


METRIC_LABELS = {"eqopp": (1,), "eqodds": (1, 0), "parity": (None,)}  # of the rows whose rates are compared; None: all


def mark_cells(label: Any, group: Any, groups: int, metric: str) -> Any:
    """Whose decisions a rate counts: [rows of METRIC_LABELS, groups, rows] of zeros and ones."""
    member = jnp.asarray(group)[None] == jnp.arange(groups)[:, None]
    inside = [jnp.ones_like(label, bool) if wanted is None else label == wanted for wanted in METRIC_LABELS[metric]]
    return jnp.stack([member & rows[None] for rows in inside])


@struct
class LimitedGaps(Minimax):
    """Several models side by side, theta [models, ...], each with a limit of its own on the gap:

        min_theta max_(lambda, lambda' >= 0)  error + sum_a (lambda_a - lambda'_a) (rate_a - rate)
                                                    - (limit / 2) sum_a (lambda_a + lambda'_a)

    rate_a is the share of positive decisions among a group's rows (all, or those of a label: `metric`), rate that of
    all groups. Given the multipliers this is a cost-sensitive error of rows: a positive decision costs a row
    1 - 2 label plus its price. The model descends on the logistic loss with |cost| as weight and the cheaper decision
    as label, the multipliers climb along the rates of decisions, and both are means over rows.

    Ref.  Agarwal, Beygelzimer, Dudik, Langford and Wallach, "A reductions approach to fair classification", ICML 2018,
    arXiv:1803.02453, Algorithm 1. There the multipliers take exponentiated steps and every model is trained to its end;
    here both take gradient steps at the same time, and a multiplier is counted in weights of a row of its group.
    """

    shares: AnyArray  # [kinds of rows, groups]: of the rows that a rate is about, among all training rows
    limits: AnyArray  # [models]
    groups: int = static()
    metric: str = static(default="eqopp")
    penalty: float = 1e-3
    highest: float = 5.0  # price
    model: RowModel = static(default=Perceptron())

    def start(self, theta: PyTree) -> tuple[PyTree, Array]:
        """All models at theta, all multipliers zero."""
        number = len(self.limits)
        models = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), theta)
        return models, jnp.zeros((number, 2, *jnp.shape(self.shares)))

    def value(self, x, alpha, batch, key):
        rows = batch["train"]
        inside = mark_cells(rows["label"], rows["group"], self.groups, self.metric).astype(rows["label"].dtype)
        shares = jnp.asarray(self.shares)[..., None]
        whole = shares.sum(1, keepdims=True)
        logits = jax.vmap(self.model, (0, None))(x, rows["inputs"])
        # A multiplier is counted in weights of a row: the price of a cell of few rows would have to be tiny otherwise.
        net = lax.stop_gradient(alpha[:, 0] - alpha[:, 1])
        prices = jnp.einsum("mka,kar->mr", net, inside - shares / whole * inside.sum(1, keepdims=True))
        costs = (1 - 2 * rows["label"])[None] + prices
        cheaper = (costs < 0).astype(logits.dtype)
        risks = jnp.abs(costs) * optax.sigmoid_binary_cross_entropy(logits, cheaper)
        primal = average(risks.sum(0), rows) + self.penalty / 2 * square_norm(x)
        # A half less for everybody changes no difference, and halves the noise of who happens to be in the batch.
        decisions = rows["weight"][None] * ((logits > 0) - 0.5)
        of_rows = inside / shares - inside.sum(1, keepdims=True) / whole
        excess = jnp.einsum("mr,kar->mka", decisions, of_rows) / decisions.shape[1]
        half = jnp.asarray(self.limits)[:, None, None] / 2
        return primal + jnp.vdot(alpha, lax.stop_gradient(jnp.stack([excess - half, -excess - half], 1)))

    def project_alpha(self, alpha):
        return jnp.clip(alpha, 0, self.highest)

    def models(self, server: Any) -> PyTree:
        return self.tree(0, server.x)

    def params_of(self, server, client):
        """The strictest of the models."""
        return jax.tree.map(lambda leaf: leaf[0], self.models(server))
