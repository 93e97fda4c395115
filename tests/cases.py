"""The table of all algorithms for the tests: one setting of each, a small task of its family, its row of the cost
table.
To add an algorithm, add a row to CASES.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nestfed import Algorithm, Rows, Task, make, struct
from nestfed.problems import (
    Bilevel,
    Compositional,
    Conditional,
    Constrained,
    GaussianEncoder,
    Minimax,
    Personalised,
    SingleLevel,
)
from nestfed.problems.ranking import AveragePrecision
from nestfed.problems.robust import KL, MeanLoss

FEATURES, BATCH = 3, 4
INNER = 2  # entries of an inner value
WIDTH, CLASSES = 2, 3  # of a representation, of labels


@struct
class Regression(SingleLevel):
    """Least squares on a parameter tree of its own."""

    def loss(self, x, batch, key):
        inputs, targets = batch
        return jnp.mean((inputs @ x["weights"] + x["bias"] - targets) ** 2)


@struct
class Hyper(Bilevel):
    """Ridge regression below, with a shift of the parameters as the upper variable."""

    strength: float = 0.3

    def lower(self, x, y, batch, key):
        inputs, targets = batch
        return 0.5 * jnp.mean((inputs @ (y - x["shift"]) - targets) ** 2) + 0.5 * self.strength * jnp.sum(y**2)

    def upper(self, x, y, batch, key):
        inputs, targets = batch
        return jnp.mean(jnp.log(jnp.cosh(inputs @ (y - 0.5 * x["shift"]) - targets))) + 0.05 * jnp.sum(x["shift"] ** 2)


@struct
class Spread(Compositional):
    """Least squares, and a composition of the mean prediction and its mean square."""

    def inner(self, x, batch, key):
        predictions = batch[0] @ x
        return jnp.stack([jnp.mean(predictions), jnp.mean(predictions**2)])

    def outer(self, y, batch, key):
        return jnp.sqrt(1 + jnp.sum(y**2))

    def extra(self, x, batch, key):
        return jnp.mean(squares(x, batch, key))

    def project_y(self, y):
        return y.at[1].max(0)


def squares(x, batch, key):
    inputs, targets = batch
    return (inputs @ x - targets) ** 2


@struct
class Groups(Minimax):
    """Least squares in which rows with positive and with other targets are two groups with weights."""

    def value(self, x, alpha, batch, key):
        inputs, targets = batch
        return jnp.mean(alpha @ self.members(targets) * (inputs @ x - targets) ** 2)

    def group_risks(self, x, batch, key):
        inputs, targets = batch
        members = self.members(targets)
        counts = members.sum(1)
        return members @ (inputs @ x - targets) ** 2 / jnp.maximum(counts, 1), counts

    def members(self, targets):
        return jnp.stack([targets > 0, targets <= 0]).astype(targets.dtype)


@struct
class Limited(Constrained):
    """Least squares with a limit on how far the mean prediction is from zero."""

    def objective(self, x, batch, key):
        inputs, targets = batch
        return jnp.mean((inputs @ x - targets) ** 2)

    def constraints(self, x, batch, key):
        return jnp.sqrt(jnp.mean(batch[0] @ x - 0.5, keepdims=True) ** 2 + 0.01)


@struct
class Corridor(Limited):
    """The mean prediction is limited from both sides, by two constraints."""

    def constraints(self, x, batch, key):
        mean = jnp.mean(batch[0] @ x)
        return jnp.stack([mean - 0.5, -mean - 0.5])


@struct
class Blurred(Conditional):
    """Least squares on inputs that are seen with noise, the prediction averaged over it before it is compared."""

    def sample_inner(self, data, xi, key, count):
        inputs, _ = xi
        return inputs[None] + 0.5 * jax.random.normal(key, (count, inputs.size), inputs.dtype)

    def inner(self, x, xi, eta, key):
        return (eta @ x)[None]

    def outer(self, y, xi, key):
        return jnp.log(jnp.cosh(y[0] - xi[1]))

    def regulariser(self, x):
        return 0.05 * jnp.sum(x**2)


class Sorting:
    """Classes by a linear head on a representation."""

    def split(self, params):
        return params["body"], params["head"]

    def features(self, u, inputs, key):
        return jnp.tanh(inputs @ u["matrix"] + u["bias"][None])

    def head(self, v, z):
        return z @ v

    def loss(self, outputs, labels):
        chosen = jnp.take_along_axis(outputs, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(outputs, 1) - chosen)


@struct
class PlainSorting(Sorting, Personalised):
    """The representation is a function of the input."""


@struct
class RandomSorting(Sorting, GaussianEncoder):
    """The representation is drawn at random."""


def rows(sizes=(8, 8, 8), seed=0, **options: Any) -> Rows:
    random = np.random.default_rng(seed)
    make_client = lambda n: (random.normal(size=(n, FEATURES)) + random.normal(), random.normal(size=n))
    return Rows.from_clients([make_client(n) for n in sizes], **options)


def regression(sizes=(8, 8, 8), **options: Any) -> Task:
    start = {"weights": jnp.zeros(FEATURES), "bias": jnp.zeros(())}
    return Task.create(Regression(), rows(sizes), start, **{"batch_size": BATCH} | options)


def hyper(scope: str, sizes=(8, 8, 8), **options: Any) -> Task:
    start = ({"shift": jnp.zeros(FEATURES)}, jnp.ones(FEATURES))
    return Task.create(Hyper(scope=scope), rows(sizes), start, **{"batch_size": BATCH} | options)


def groups(sizes=(8, 8, 8), **options: Any) -> Task:
    start = (jnp.zeros(FEATURES), jnp.ones(2))
    return Task.create(Groups(), rows(sizes), start, **{"batch_size": BATCH, "weights": "samples"} | options)


def limited(sizes=(8, 8, 8), kind: type[Constrained] = Limited, **options: Any) -> Task:
    return Task.create(kind(), rows(sizes), jnp.ones(FEATURES), **{"batch_size": BATCH} | options)


def on_rows(problem: Any, sizes=(8, 8, 8), **options: Any) -> Task:
    return Task.create(problem, rows(sizes), jnp.zeros(FEATURES), **{"batch_size": BATCH} | options)


def sorted_rows(problem: Any, sizes=(8, 8, 8), **options: Any) -> Task:
    """A client has two of the three classes; rows of a class lie in one direction."""
    random = np.random.default_rng(1)

    def make_client(k, n):
        labels = (k + np.arange(n) % 2) % CLASSES
        return random.normal(size=(n, FEATURES)) + 2 * np.eye(FEATURES)[labels], labels.astype(np.int32)

    width = WIDTH * (2 if isinstance(problem, GaussianEncoder) else 1)
    body = {"matrix": jnp.asarray(random.normal(size=(FEATURES, width))), "bias": jnp.zeros(width)}
    start = {"body": body, "head": jnp.asarray(random.normal(size=(WIDTH, CLASSES)))}
    data = Rows.from_clients([make_client(k, n) for k, n in enumerate(sizes)])
    return Task.create(problem, data, start, **{"batch_size": BATCH} | options)


def linear_scores(x, batch, key):
    inputs, _ = batch
    return inputs @ x


def ranked(sizes=(8, 8, 8), **options: Any) -> Task:
    """The last rows are called positive: another number of them at every client."""
    data = rows(sizes, constants={"positives": np.arange(len(sizes)) + 2})
    problem = AveragePrecision(scores=linear_scores, margin=0.5, positives=2, inner_samples=BATCH, weight_decay=0.1)
    return Task.create(problem, data, jnp.zeros(FEATURES), **{"batch_size": BATCH} | options)


TASKS: dict[str, Callable[..., Task]] = {
    "single level": regression,
    "local bilevel": functools.partial(hyper, "local"),
    "global bilevel": functools.partial(hyper, "global"),
    "minimax": groups,
    "constrained": limited,
    "two constraints": functools.partial(limited, kind=Corridor),
    "global composition": functools.partial(on_rows, Spread(scope="global")),
    "local composition": functools.partial(on_rows, Spread(scope="local")),
    "losses of rows": functools.partial(on_rows, MeanLoss(losses=squares, weight_decay=0.1)),
    "conditional": functools.partial(on_rows, Blurred(inner_samples=2)),
    "average precision": ranked,
    "personalised": functools.partial(sorted_rows, PlainSorting()),
    "random representation": functools.partial(sorted_rows, RandomSorting(draws=3)),
    "KL": functools.partial(on_rows, KL(losses=squares, price=2.0, weight_decay=0.1)),  # inner values are Scaled
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One algorithm: its settings, its kind of task, and section 13's cost of one round for these settings.

    up and down are functions of d and d_y, the sizes of the two variables (numbers of floats; down None: as many as
    up); oracles count calls by kind; batches are draws.
    """

    settings: dict[str, Any]
    task: str
    up: Callable[[int, int], int]
    phases: int
    oracles: dict[str, int]
    batches: int
    down: Callable[[int, int], int] | None = None

    def algorithm(self, name: str) -> Algorithm:
        return make(name, **self.settings)


STEPS = 2  # local steps
Q = 3  # Hessian-vector products
LOWER = 2  # T_in: repetitions of the lower loop
SINGLE: dict[str, Any] = {"lr": 0.05, "local_steps": STEPS}
LOCAL: dict[str, Any] = {"local_steps": STEPS, "hypergradient.terms": Q}
PERSONAL: dict[str, Any] = SINGLE | {"head_steps": STEPS, "clip": 0.5}
NEST: dict[str, Any] = {
    "lr": 0.05, "lower_lr": 0.1, "terms": Q, "lower_rounds": LOWER, "inner_steps": 2, "local_steps": STEPS
}  # fmt: skip
SIM: dict[str, Any] = {
    "lr": 0.02, "lower_lr": 0.1, "z_lr": 0.1, "server_lr": 0.05, "server_lower_lr": 0.1, "server_z_lr": 0.1,
    "local_steps": STEPS,
}  # fmt: skip

CASES: dict[str, Case] = {
    "fedavg": Case(SINGLE, "single level", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "fedprox": Case(SINGLE, "single level", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "scaffold": Case(SINGLE, "single level", lambda d, _: 2 * d, 1, {"GRAD": STEPS}, STEPS),
    "fedopt": Case(SINGLE, "single level", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "fedadagrad": Case(SINGLE, "single level", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "fedadam": Case(SINGLE, "single level", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "fedyogi": Case(SINGLE, "single level", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "fedbio": Case(
        LOCAL | {"lr": 0.05, "lower_lr": 0.1}, "local bilevel", lambda d, _: d, 1,
        {"GRAD": 2 * STEPS, "HVP": Q * STEPS, "MIX": STEPS}, (Q + 3) * STEPS,
    ),
    "fedbioacc": Case(
        LOCAL | {"first_batch_multiplier": 2}, "local bilevel", lambda d, _: 2 * d, 1,
        {"GRAD": 4 * STEPS, "HVP": 2 * Q * STEPS, "MIX": 2 * STEPS}, (Q + 3) * STEPS,
    ),
    "fednest": Case(
        NEST, "global bilevel", lambda d, dy: 2 * dy * LOWER + (Q + 1) * dy + 2 * d, 2 * LOWER + Q + 3,
        {"GRAD": LOWER * (1 + 2 * 2) + 1 + 2 * STEPS, "HVP": Q, "MIX": 1}, LOWER * 3 + 1 + Q + 1 + STEPS,
    ),
    "fednest-sgd": Case(
        NEST, "global bilevel", lambda d, dy: dy * LOWER + (Q + 1) * dy + d, LOWER + Q + 2,
        {"GRAD": LOWER * 2 + 1 + STEPS, "HVP": Q, "MIX": STEPS}, LOWER * 2 + 1 + Q + STEPS,
    ),
    "lfednest": Case(
        NEST, "global bilevel", lambda d, dy: dy * LOWER + d, LOWER + 1,
        {"GRAD": LOWER * 2 + 1 + 2 * STEPS, "HVP": Q, "MIX": 1}, LOWER * 2 + Q + 2 + STEPS,
    ),
    "fedmbo": Case(
        NEST, "global bilevel", lambda d, dy: dy * LOWER + (Q + 1) * dy + 2 * d, LOWER + Q + 3,
        {"GRAD": LOWER + 1 + 2 * STEPS, "HVP": Q, "MIX": 1}, LOWER + 1 + Q + 1 + STEPS,
    ),
    "simfbo": Case(
        SIM, "global bilevel", lambda d, dy: d + 2 * dy, 1,
        {"GRAD": 2 * STEPS, "HVP": STEPS, "MIX": STEPS}, 4 * STEPS,
    ),
    "shrofbo": Case(
        SIM, "global bilevel", lambda d, dy: d + 2 * dy, 1,
        {"GRAD": 2 * STEPS, "HVP": STEPS, "MIX": STEPS}, 4 * STEPS,
    ),
    "fedminmax": Case({"lr": 0.05}, "minimax", lambda d, groups: d + groups, 1, {"GRAD": 1, "VAL": 1}, 1),
    "fcfl": Case(
        {"lr": 0.05, "stage_one_steps": 1}, "constrained", lambda d, _: 2 * d + 2, 1,
        {"GRAD": 2}, 1, down=lambda d, _: d + 2,
    ),
    "fedavg-co-1": Case(
        SINGLE, "global composition", lambda d, _: d, 1, {"GRAD": STEPS, "VJP": STEPS}, STEPS
    ),
    "fedavg-co-2": Case(
        SINGLE, "global composition", lambda d, _: d + INNER, 2, {"GRAD": STEPS, "VJP": STEPS}, STEPS
    ),
    "feddro": Case(
        SINGLE, "global composition", lambda d, _: d + STEPS * INNER, STEPS + 1,
        {"GRAD": STEPS, "VAL": 2 * STEPS, "VJP": STEPS}, 2 * STEPS,
    ),
    "ds-feddro": Case(
        SINGLE, "global composition", lambda d, _: d + INNER, 1,
        {"GRAD": STEPS, "VAL": STEPS, "VJP": STEPS}, 2 * STEPS,
    ),
    "mbsgd": Case({"lr": 0.05}, "global composition", lambda d, _: d + INNER, 2, {"GRAD": 1, "VJP": 1}, 1),
    "unconstrained": Case({"lr": 0.05}, "global composition", lambda d, _: d, 1, {"GRAD": 1}, 1),
    "scgd": Case({"lr": 0.05}, "global composition", lambda d, _: d + INNER, 2, {"GRAD": 1, "VJP": 1}, 1),
    "gcivr": Case(
        SINGLE | {"refresh_batches": Q}, "global composition", lambda d, _: STEPS * (d + INNER * (d + 1)), STEPS,
        {"GRAD": Q + 2, "VJP": (Q + 2) * INNER}, Q + 1,
    ),
    "comfedl": Case(
        SINGLE, "local composition", lambda d, _: d, 1, {"GRAD": STEPS, "VJP": STEPS}, 2 * STEPS
    ),
    "local-scgd": Case(
        SINGLE, "local composition", lambda d, _: d + INNER, 1, {"GRAD": STEPS, "VJP": STEPS}, 2 * STEPS
    ),
    "local-scgdm": Case(
        SINGLE, "local composition", lambda d, _: 2 * d + INNER, 1, {"GRAD": STEPS, "VJP": STEPS}, 2 * STEPS
    ),
    "local-scgd-own": Case(
        SINGLE, "local composition", lambda d, _: d, 1, {"GRAD": STEPS, "VJP": STEPS}, 2 * STEPS
    ),
    "local-scgdm-own": Case(
        SINGLE, "local composition", lambda d, _: 2 * d, 1, {"GRAD": STEPS, "VJP": STEPS}, 2 * STEPS
    ),
    "local-scgd-conditional": Case(SINGLE, "conditional", lambda d, _: d + 1, 1, {"VJP": STEPS}, STEPS),
    "local-scgdm-conditional": Case(SINGLE, "conditional", lambda d, _: 2 * d + 1, 1, {"VJP": STEPS}, STEPS),
    "fastdro": Case(
        {"lr": 0.05, "levels": 1}, "losses of rows", lambda d, _: d + BATCH, 2,
        {"GRAD": 1, "VAL": 1}, 1,
    ),
    "pdsgd": Case({"lr": 0.05}, "two constraints", lambda d, _: d + 1, 1, {"GRAD": 2, "VAL": 1}, 1),
    "fcsg": Case(SINGLE, "conditional", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    "fcsg-m": Case(SINGLE | {"first_batches": 2}, "conditional", lambda d, _: 2 * d, 1, {"GRAD": STEPS}, STEPS),
    "acc-fcsg-m": Case(
        SINGLE | {"first_batches": 2}, "conditional", lambda d, _: 2 * d, 1, {"GRAD": 2 * STEPS}, STEPS
    ),
    "bsgd": Case({"lr": 0.05}, "conditional", lambda d, _: d, 1, {"GRAD": 1}, 1),
    "bspiderboost": Case(
        {"lr": 0.05, "refresh_batches": 3, "local_steps": 2}, "conditional", lambda d, _: 2 * d, 2, {"GRAD": 5}, 4
    ),
    # One stage ends within the first rounds: the message has the same size then.
    "coda-plus": Case(SINGLE | {"stage_steps": 3}, "minimax", lambda d, dual: d + dual, 1, {"GRAD": STEPS}, STEPS),
    "codasca": Case(SINGLE | {"stage_steps": 3}, "minimax", lambda d, dual: 2 * (d + dual), 1, {"GRAD": STEPS}, STEPS),
    "soap": Case(SINGLE, "average precision", lambda d, _: d, 1, {"VJP": STEPS}, STEPS),
    # Clips are in reach of these gradients. A pass over all rows is two batches here.
    "fedreco": Case(
        PERSONAL | {"coupling": 1.0, "server_lr": 0.1}, "personalised", lambda d, _: d, 1,
        {"GRAD": 2 * STEPS + 1}, 2 * STEPS + 1,
    ),
    # The table has a gradient of f and two of H; the first of these comes with the gradient of f.
    "fedreco-pvr": Case(
        PERSONAL | {"coupling": 1.0, "server_lr": 0.1}, "personalised", lambda d, _: d, 1,
        {"GRAD": STEPS + 2 * STEPS + 2}, 2 * STEPS + 2,
    ),
    "ditto": Case(
        SINGLE | {"clip": 0.5}, "personalised", lambda d, head: d + head, 1, {"GRAD": 2 * STEPS}, 2 * STEPS
    ),
    "fedrep": Case(PERSONAL, "personalised", lambda d, _: d, 1, {"GRAD": 2 * STEPS}, 2 * STEPS),
    "fedbabu": Case(SINGLE | {"clip": 0.5}, "personalised", lambda d, _: d, 1, {"GRAD": STEPS}, STEPS),
    # Two exchanges where the table has one, and the shares of the classes come back.
    "fedpac": Case(
        PERSONAL, "personalised", lambda d, head: d + head + 2 * CLASSES * WIDTH + CLASSES + 1, 2,
        {"GRAD": 2 * STEPS, "VAL": 2}, 2 * STEPS + 4, down=lambda d, head: d + head + CLASSES * WIDTH + CLASSES,
    ),
    "fedcr": Case(
        SINGLE | {"clip": 0.5, "memory": 0.9}, "random representation", lambda d, _: d + 2 * CLASSES * WIDTH, 2,
        {"GRAD": STEPS, "VAL": 1}, STEPS + 2,
    ),
    "fedavg-whole": Case(SINGLE, "personalised", lambda d, head: d + head, 1, {"GRAD": STEPS}, STEPS),
    "local-only": Case(SINGLE, "personalised", lambda *_: 0, 0, {"GRAD": STEPS}, STEPS),
}  # fmt: skip
