"""Robust classification: a model that does not give up the rows, clients and groups that it finds hard.

A mean of losses can be small while a share of the rows is badly wrong. Here an adversary moves weight to the rows with
the largest losses, those of all clients together, and the model minimises the mean loss that is left then (the problems
are in `nestfed.robust`). One number says how far the adversary may go, and for all divergences 0 would be FedAvg:

    kl, chi-square    strength = 1 / price of moving weight, in units of loss
    cvar              tail = 1 / (1 + strength): the share of worst rows that counts; the worse half at 1, a tenth at 9
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.scipy.special import logsumexp

from nestfed.core.rows import Layout
from nestfed.core.settings import setting, static, struct
from nestfed.core.types import Array
from nestfed.data import TRAIN
from nestfed.problems import Compositional, worst_case
from nestfed.problems.robust import KL, ChiSquare, CVaR
from nestfed.report.record import Metric
from nestfed.workbench.scenario import Method, Stage
from nestfed.workbench.scenarios.tabular import (
    AVERAGE_LOSS,
    LOCAL_STEPS,
    PARTS,
    Pool,
    PooledTask,
    RowLosses,
    Tabular,
    TabularSetup,
    TabularTask,
    masked_area_under_roc,
    mean_loss,
    single_level,
)

DECILE = 0.1
UNDECIDED = math.log(2)  # the loss of a model that knows nothing: where the threshold of CVaR starts


# ------------------------------------------------------------------------------------------------- the adversary


@struct
class Divergence:
    """What the adversary may do, and what it reaches."""

    name: str = static()
    strength: float

    @property
    def price(self) -> Any:
        return 1 / self.strength

    @property
    def tail(self) -> Any:
        return 1 / (1 + self.strength)

    def response(self, losses: Array, weights: Array) -> Array:
        """The worst-case weights of rows with these losses and nominal weights."""
        if self.name == "cvar":
            return worst_case.cvar(losses, self.tail, weights)
        rule = worst_case.kl if self.name == "kl" else worst_case.chi_square
        return rule(losses, self.price, weights)

    def value(self, losses: Array, weights: Array) -> Array:
        """The robust objective: the mean loss with the worst-case weights, less what moving to them costs."""
        if self.name == "kl":
            return self.price * logsumexp(losses / self.price, b=weights / weights.sum())
        p = self.response(losses, weights)
        if self.name == "cvar":
            return p @ losses
        return p @ losses - self.price / 2 * (1 / worst_case.effective_sample_size(p, weights) - 1)


# ------------------------------------------------------------------------------------------------- the task


@struct
class RobustTask(PooledTask):
    """Metrics of the pooled rows: the worst rows of all cannot be told from means."""

    divergence: Divergence

    @property
    def minimised(self):
        return "train_robust_objective" if isinstance(self.problem, Compositional) else "train_loss"

    def metrics(self, server, client, data, fed):
        problem, theta = self.problem, self.problem.tree(0, server.x)
        theta = theta["model"] if isinstance(problem, CVaR) else theta
        return measures(self.pool(theta, data, fed), self.divergence, self.clients, self.groups)


@functools.partial(jax.jit, static_argnames=("clients", "groups"))
def measures(pool: Pool, divergence: Divergence, clients: int, groups: int) -> dict[str, Array]:
    """Of every part of the data; NaN for a part without rows."""
    loss = optax.sigmoid_binary_cross_entropy(pool.logit, pool.label.astype(pool.logit.dtype))
    correct = ((pool.logit > 0) == (pool.label == 1)).astype(loss.dtype)

    def of_part(part: Array) -> dict[str, Array]:
        inside = (pool.part == part).astype(loss.dtype)
        mean = lambda values: inside @ values / inside.sum()

        def worst(values: Array, owner: Array, number: int) -> Array:
            """The largest mean of an owner's rows; who has none is left out."""
            total = lambda v: jax.ops.segment_sum(inside * v, owner, number)
            rows = total(jnp.ones_like(values))
            return jnp.max(jnp.where(rows > 0, total(values) / jnp.maximum(rows, 1), -jnp.inf))

        values = {
            "loss": mean(loss),
            "accuracy": mean(correct),
            "robust_objective": divergence.value(loss, inside),
            "worst_decile_loss": worst_case.cvar(loss, DECILE, inside) @ loss,
            "worst_client_loss": worst(loss, pool.client, clients),
            "worst_client_accuracy": -worst(-correct, pool.client, clients),
            "auroc": masked_area_under_roc(pool.logit, pool.label == 1, inside > 0),
        }
        if groups > 1:
            values["worst_group_loss"] = worst(loss, pool.group, groups)
        return jax.tree.map(lambda value: jnp.where(inside.any(), value, jnp.nan), values)

    values = jax.vmap(of_part)(jnp.arange(len(PARTS), dtype=pool.part.dtype))
    return {f"{part}_{name}": value[i] for i, part in enumerate(PARTS) for name, value in values.items()}


# ------------------------------------------------------------------------------------------------- set-up of a seed


@dataclasses.dataclass(frozen=True)
class RobustSetup(TabularSetup):
    """One seed, and the problems on its rows."""

    task_class: ClassVar[type[TabularTask]] = RobustTask

    def task(self, problem, params, *, averaging=None, **fields):
        return super().task(
            problem, params, averaging=averaging, divergence=self.kind.adversary, **self.pooled, **fields
        )

    @property
    def problem(self) -> Compositional:
        """The robust loss of the training rows."""
        kind, adversary = self.kind, self.kind.adversary
        common = {"losses": RowLosses(self.model), "weight_decay": kind.penalty}
        if kind.divergence == "cvar":
            return CVaR(tail=adversary.tail, **common)
        if kind.divergence == "chi-square":
            return ChiSquare(price=adversary.price, **common)
        # Training rows only, of all that a client holds; where clients count alike, rows of small ones weigh more.
        heaviest = np.max(self.train_sizes / self.client_weights(kind.averaging))
        return KL(price=adversary.price, largest_weight=float(heaviest), **common)


# ------------------------------------------------------------------------------------------------- methods


def robust_loss(setup: RobustSetup, before: Any) -> TabularTask:
    problem = setup.problem
    start = problem.start(setup.theta, UNDECIDED) if isinstance(problem, CVaR) else setup.theta
    return setup.task(problem, start)


# Chosen on Adult's validation data: three seeds, 2000 steps, lr 0.03, 0.1, 0.3 and 1, beta 0.1, 0.5 and 0.9 (DS-FedDRO:
# 0.01, 0.1 and 0.5), by the robust objective. At strength 1 the best lr is 0.1 for every divergence; with kl it is 0.03
# at 3 and 0.01 at 10, and larger ones blow up; with chi-square and cvar these are close to the best. FedDRO's beta
# changes the fifth digit, so it keeps its default; DS-FedDRO's own estimates are biased in proportion to beta. FedAvg
# had the same lr: 0.1 has its best loss of the worst client and its best accuracy, and a mean loss within 1 % of its
# best. (By the KL objective, FedAvg would be best hardly trained.)
LR = 0.1


def step_size(setup: RobustSetup) -> float:
    """A strong adversary puts much weight on a single row of a batch: steps must be smaller."""
    return float(f"{LR / max(1.0, setup.kind.strength):.2g}")


def _robust(name: str, title: str, description: str, **settings: Any) -> Method:
    chosen = lambda setup: {"lr": step_size(setup), "local_steps": LOCAL_STEPS, **settings}
    return Method(title, description, (Stage("model", name, robust_loss, chosen),))


def _fastdro(setup: RobustSetup) -> dict[str, Any]:
    adversary, lr = setup.kind.adversary, step_size(setup)
    if setup.kind.divergence == "cvar":
        return {"lr": lr, "geometry": "cvar", "tail": adversary.tail}
    if setup.kind.divergence == "chi-square":
        return {"lr": lr, "geometry": "chi-square-penalty", "price": adversary.price}
    no_cap = 1 / (setup.rows.clients * setup.batch_size)  # one row may take all the weight
    return {"lr": lr, "geometry": "kl-cvar", "price": adversary.price, "tail": no_cap}


METHODS: dict[str, Method] = {
    "fedavg": single_level("fedavg", mean_loss, LR),
    "feddro": _robust("feddro", "FedDRO", "One estimate of the inner mean for all clients, exchanged in every step."),
    "ds-feddro": _robust(
        "ds-feddro", "DS-FedDRO", "Estimates of the inner mean drift within a round; the server corrects them.",
        beta=0.01,
    ),
    "mbsgd": _robust(
        "mbsgd", "MBSGD", "Inner values and gradients of the batches at hand, averaged in every step.", local_steps=1
    ),
    "fastdro": Method(
        "FastDRO", "The server weighs the rows of all batches by their losses; every step exchanges them.",
        (Stage("model", "fastdro", mean_loss, _fastdro),),
    ),
    "fedavg-co-1": _robust(
        "fedavg-co-1", "FedAvg-CO I (control)", "Negative control: every client composes with its own inner mean."
    ),
    "fedavg-co-2": _robust(
        "fedavg-co-2", "FedAvg-CO II (control)", "Negative control: the inner mean is shared once a round only."
    ),
    **{name: single_level(name, mean_loss, LR) for name in AVERAGE_LOSS},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- the kind


@dataclasses.dataclass(frozen=True)
class Robust(Tabular):
    """Options of the task "robust"."""

    # The objective is about rows, whoever holds them: every row counts the same.
    averaging: str = setting("weights of the clients", default="samples", choices=("uniform", "samples"), static=True)
    divergence: str = setting(
        "what the adversary pays or may do", default="kl", choices=("kl", "chi-square", "cvar"), static=True
    )
    strength: float = setting("how cautious the model is, near 0 like FedAvg", default=1.0, above=0)

    name: ClassVar[str] = "robust"
    title: ClassVar[str] = "Robust classification"
    description: ClassVar[str] = "a classifier for the worst rows, clients and groups (distributionally robust)"
    baseline: ClassVar[str] = "fedavg"
    usual: ClassVar[tuple[str, ...]] = ("fedavg", "feddro", "ds-feddro")
    select: ClassVar[str] = "validation_robust_objective"
    aims: ClassVar[tuple[str, ...]] = ("strength",)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("test_worst_decile_loss", "test loss of the worst decile", "lower"),
        Metric("test_worst_client_loss", "test loss of the worst client", "lower"),
        Metric("test_worst_group_loss", "test loss of the worst group", "lower"),
        Metric("test_loss", "test loss", "lower"),
        Metric("test_accuracy", "test accuracy", "higher"),
    )
    methods: ClassVar[dict[str, Method]] = METHODS
    setup_class: ClassVar[type[TabularSetup]] = RobustSetup
    needs_group: ClassVar[bool] = False
    needs_positives: ClassVar[bool] = False
    usual_partition: ClassVar[str] = "dirichlet:0.5"  # clients that differ: otherwise there is no worst one
    rates: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "true positive rate", "false positive rate")

    @property
    def adversary(self) -> Divergence:
        return Divergence(name=self.divergence, strength=self.strength)

    @property
    def headline(self) -> tuple[Metric, ...]:
        return tuple(m for m in self.metrics if self.group is not None or m.name != "test_worst_group_loss")

    def theta(self, setup, server):
        if server.x.size == Layout.of(setup.theta, "theta").size:
            return super().theta(setup, server)
        tree = CVaR(losses=RowLosses(setup.model)).start(setup.theta)
        return Layout.of(tree, "x").unflatten(server.x)["model"]

    def evaluate(self, setup: RobustSetup, server: Any) -> tuple[dict[str, float], pd.DataFrame]:
        data = setup.data
        logits, rows = self.outcomes(setup, server)
        pool = Pool(*map(jnp.asarray, (logits, data.label, data.part, data.group, data.client)))
        final = measures(pool, self.adversary, len(data.client_names), setup.groups)
        train, adversary = jnp.asarray(rows.loss[data.part == TRAIN]), self.adversary
        alike = jnp.ones_like(train)
        p = adversary.response(train, alike)
        final["train_effective_sample_size"] = worst_case.effective_sample_size(p)
        if self.divergence == "chi-square":
            final["train_negative_weights"] = worst_case.negative_share(train, adversary.price)
        slices = [self.slices(rows, by) for by in (("client",) if self.group is None else ("group", "client"))]
        return {name: float(value) for name, value in final.items()}, pd.concat(slices, ignore_index=True)

    def notes(self, setup: TabularSetup) -> list[str]:
        adversary = self.adversary
        meaning = {
            "kl": f"minus price x KL(weights | equal weights); the price is 1 / strength = {adversary.price:.4g}",
            "chi-square": "minus price x (n / 2) |weights - 1 / n|^2, half the chi-square divergence; the price is "
            f"1 / strength = {adversary.price:.4g}",
            "cvar": f"that is, the mean of the worst {100 * adversary.tail:.4g} % of rows: the share is "
            "1 / (1 + strength)",
        }[self.divergence]
        return [
            "The robust objective is the largest mean loss that an adversary reaches by moving weight between all "
            f"clients' rows, {meaning}. The stronger ({self.strength:g} here), the more cautious; "
            "near 0 it is the mean.",
            *super().notes(setup),
        ]

    def warnings(self, final: pd.DataFrame) -> list[str]:
        said = []
        for column, text in DIAGNOSTICS.items():
            if column in final:
                means: Any = final.groupby("method", sort=False)[column].mean()
                by_method = ", ".join(
                    f"{self.methods[str(m)].title} {100 * share:.3g} %" for m, share in means.dropna().items()
                )
                said.append(text.format(by_method))
        return said

    def entries(self, metric: str, setup: TabularSetup) -> list[str]:
        return []  # no metric is a vector


DIAGNOSTICS = {
    "train_effective_sample_size": "Effective sample size of the worst-case weights, as a share of the training rows: "
    "{}. (At 100 % all rows weigh the same; at a small share few rows decide.)",
    "train_negative_weights": "Training rows to which the closed form of chi-square gives a negative weight: {}. Where "
    "there are any, the methods minimise mean + variance / (2 price), which is above the robust objective.",
}
