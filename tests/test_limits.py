"""Where every algorithm ends up when clients weigh differently, few of them are asked and some of these do not answer.

Four clients with weights .1 to .4, two of them asked each round, each failing with probability .2: the mean of the
iterates must be the exact solution. A method that knows no more than the cohort (a function of the cohort's mean, the
cohort's worst client) has another limit; its docstring says so, and the table has that limit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import brentq, minimize, minimize_scalar

from nestfed import ALGORITHMS, Rows, Task, make, simulate, struct
from nestfed.engine.cohorts import choose_cohort, find_chances, make_cohort_rule
from nestfed.problems import Conditional, Constrained, GaussianEncoder, Minimax, Personalised, SingleLevel
from nestfed.problems.hypergradients import Dense
from nestfed.problems.ranking import AveragePrecision
from nestfed.problems.toys import Line, Quadratic, ScalarBilevel

W = np.array([0.1, 0.2, 0.3, 0.4])
COHORT, DROPOUT = 2, 0.2
A, C = np.array([1.0, 4.0, 2.0, 0.5]), np.array([0.0, 1.0, -2.0, 3.0])


def clients(*constants: Any) -> Rows:
    return Rows.from_clients(constants=tuple(jnp.asarray(c) for c in constants))


def mean(values: Any) -> Any:
    return W @ values


@dataclasses.dataclass(frozen=True)
class Limit:
    """A method on a problem, and where it ends up: the means of what `fields` find in the states of all clients."""

    settings: dict[str, Any]
    task: Callable[[], Task]
    solution: dict[str, Any]
    rounds: int = 8000
    tolerance: float = 0.03
    fields: dict[str, Callable] = dataclasses.field(default_factory=lambda: {"x": lambda s, c: s.x[0]})
    says: str = ""  # of a method with another limit: words of its docstring


def run(name: str, limit: Limit) -> dict[str, np.ndarray]:
    """The means over the second half of a run."""

    def metrics(task, server, client, data, fed):
        shown = {key: jnp.asarray(look(server, client)) for key, look in limit.fields.items()}
        return {f"shown {key}": fed.gather(value) for key, value in shown.items()}

    options = {"cohort": COHORT, "dropout": DROPOUT, "progress": False}
    algorithm = make(name, **limit.settings)
    every = max(1, limit.rounds // 1000)
    result = simulate(algorithm, limit.task(), 7, rounds=limit.rounds, evaluate_every=every, metrics=metrics, **options)
    half = len(result.history["round"]) // 2
    return {key: result.history[f"shown {key}"][half:].mean(0) for key in limit.fields}


def present_sets() -> list[tuple[float, np.ndarray]]:
    """(how often, who is there) over many rounds."""
    task = Task.create(Quadratic(), clients(A, C), jnp.zeros(()), weights=W)
    rule = make_cohort_rule(COHORT, "weights", W)
    chances, key, rate = find_chances(task.weights, rule), jax.random.key(0), jnp.asarray(DROPOUT)
    draw = jax.jit(jax.vmap(lambda r: choose_cohort(task, key, r, rule, rate, chances=chances)))
    seats = draw(jnp.arange(40_000))
    there = np.zeros((40_000, 4), bool)
    np.put_along_axis(there, np.asarray(seats.position), np.asarray(seats.weight) > 0, axis=1)
    sets, counts = np.unique(there, axis=0, return_counts=True)
    return [(n / counts.sum(), members) for members, n in zip(sets, counts, strict=True) if members.any()]


def root_over_cohorts(update: Callable[[np.ndarray, float], float], low: float, high: float) -> float:
    """Where what is to be expected of an update is zero; all who are there count alike, they were drawn by weight."""
    sets = present_sets()
    return float(brentq(lambda x: sum(p * update(members, x) for p, members in sets), low, high))


# ------------------------------------------------------------------------------------------------- the problems


def quadratics(**options: Any) -> Task:
    return Task.create(Quadratic(), clients(A, C), jnp.zeros(()), weights=W, **options)


QUADRATIC = mean(A * C) / mean(A)


@struct
class QuadraticRows(SingleLevel):
    def per_row(self, x, batch, key):
        a, c = batch
        return 0.5 * a * (x - c) ** 2


def quadratic_rows() -> Task:
    rows = Rows.from_clients([(np.full(2, a), np.full(2, c)) for a, c in zip(A, C, strict=True)])
    return Task.create(QuadraticRows(), rows, jnp.zeros(()), weights=W, batch_size=2)


LOWER = np.array([1.0, 3.0, 2.0, 1.5])
B, SHIFT, TARGET = np.array([1.0, 1.0, -1.0, 0.5]), np.array([0.0, 2.0, 1.0, -1.0]), np.array([1.0, 3.0, 0.0, 2.0])


def bilevel(scope: str, curvatures: Any = LOWER) -> Task:
    start = (jnp.zeros(()), jnp.zeros(()))
    return Task.create(ScalarBilevel(scope=scope), clients(curvatures, B, SHIFT, TARGET), start, weights=W)


def local_bilevel_solution() -> dict[str, Any]:
    # sum_k w_k [rho x + (B_k / A_k) (y_k(x) - t_k)] = 0 with y_k(x) = (B_k x + c_k) / A_k
    slope = 0.1 + mean((B / LOWER) ** 2)
    x = mean(B / LOWER * (TARGET - SHIFT / LOWER)) / slope
    return {"x": x, "y": (B * x + SHIFT) / LOWER}


def global_bilevel_solution(curvatures: Any = LOWER) -> float:
    a, b, c, t = (float(mean(np.broadcast_to(v, 4))) for v in (curvatures, B, SHIFT, TARGET))
    return (b / a) * (t - c / a) / (0.1 + (b / a) ** 2)


EQUAL = np.full(4, 2.0)  # curvatures: what is left is that a cohort's cross derivatives and gradients belong together


def nested_over_cohorts() -> float:
    """0.1 x + B_S (y - t_S) / 2 is zero on average over cohorts S, at y = (mean B x + mean c) / 2."""
    y = lambda x: (mean(B) * x + mean(SHIFT)) / 2
    return root_over_cohorts(lambda s, x: 0.1 * x + B[s].mean() * (y(x) - TARGET[s].mean()) / 2, -20, 20)


def own_products() -> float:
    """The same with every client's own product."""
    y = lambda x: (mean(B) * x + mean(SHIFT)) / 2
    return float(brentq(lambda x: 0.1 * x + mean(B * (y(x) - TARGET)) / 2, -20, 20))


@struct
class Groups(Minimax):
    """Two groups; client k holds counts[a] rows of group a, all with the loss (x - center[a])^2 / 2."""

    def value(self, x, alpha, batch, key):
        risks, counts = self.group_risks(x, batch, key)
        return jnp.sum(alpha * risks * counts) / counts.sum()

    def group_risks(self, x, batch, key):
        centers, counts = batch
        return 0.5 * (x - centers) ** 2, counts


CENTERS = np.array([[0.0, 2.0], [0.5, 3.0], [-1.0, 2.5], [0.2, 1.0]])
COUNTS = np.array([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [1.0, 1.0]])


def groups() -> Task:
    return Task.create(Groups(), clients(CENTERS, COUNTS), (jnp.zeros(()), jnp.ones(2)), weights=W)


def fairest() -> float:
    share = COUNTS / COUNTS.sum(1, keepdims=True)
    rho = W @ share
    worst = lambda x: float(np.max(W @ (share * 0.5 * (x - CENTERS) ** 2) / rho))
    return float(minimize_scalar(worst, bounds=(-2, 4), method="bounded", options={"xatol": 1e-9}).x)


@struct
class Saddle(Minimax):
    def value(self, x, alpha, batch, key):
        a, c, b, d = batch
        return 0.5 * a * (x - c) ** 2 + alpha * (b * x - d) - 0.5 * alpha**2


SADDLE = A, C, np.array([1.0, 2.0, 0.5, 1.0]), np.array([1.0, 0.0, 0.5, 2.0])


def saddle() -> Task:
    return Task.create(Saddle(), clients(*SADDLE), (jnp.zeros(()), jnp.zeros(())), weights=W)


def saddle_point() -> dict[str, Any]:
    a, ac, b, d = mean(A), mean(A * C), mean(SADDLE[2]), mean(SADDLE[3])
    x, alpha = np.linalg.solve([[a, b], [b, -1.0]], [ac, d])
    return {"x": x, "alpha": alpha}


@struct
class Bounded(Constrained):
    """Quadratics with x <= -1 for all."""

    def objective(self, x, batch, key):
        a, c = batch
        return 0.5 * a * (x - c) ** 2

    def constraints(self, x, batch, key):
        return (x + 1.0)[None]


@struct
class Unbounded(Bounded):
    def constraints(self, x, batch, key):
        return (0 * x - 1.0)[None]


def bounded(problem: Constrained) -> Task:
    return Task.create(problem, clients(A, C), jnp.zeros(()), weights=W)


def worst_of_cohort(members: np.ndarray, x: float) -> float:
    losses = np.where(members, 0.5 * A * (x - C) ** 2, -np.inf)
    worst = int(np.argmax(losses))
    return A[worst] * (x - C[worst])


SLOPES, SHIFTS = np.array([4.0, -2.0, 1.0, 3.0]), np.array([-4.0, 4.0, 1.0, 0.5])
outer_slope = lambda y: y / np.sqrt(y**2 + 4)


@struct
class LineAndSquare(Line):
    def extra(self, x, batch, key):
        return 0.5 * (x - batch[0]) ** 2


def composition(problem: Any) -> Task:
    return Task.create(problem, clients(SLOPES, SHIFTS), jnp.asarray(0.5), weights=W)


COMPOSITION = -mean(SHIFTS) / mean(SLOPES)
OWN_COMPOSITIONS = float(brentq(lambda x: mean(SLOPES * outer_slope(SLOPES * x + SHIFTS)), -5, 5))


def plug_in(members: np.ndarray, x: float) -> float:
    return SLOPES[members].mean() * outer_slope(np.mean((SLOPES * x + SHIFTS)[members]))


@struct
class Plain(Conditional):
    """No noise at all: the inner value is s x, the loss y^2 / 2 - b y."""

    def sample_outer(self, data, key, count):
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *jnp.shape(a))), data.constants)

    def sample_inner(self, data, xi, key, count):
        return jnp.zeros((count, 1))

    def inner(self, x, xi, eta, key):
        return (xi[0] * x)[None] + 0 * eta

    def outer(self, y, xi, key):
        return 0.5 * y[0] ** 2 - xi[1] * y[0]


INNER, LINEAR = np.array([1.0, 2.0, -1.0, 0.5]), np.array([1.0, 1.0, 2.0, -1.0])
CONDITIONAL = mean(INNER * LINEAR) / mean(INNER**2)


def conditional() -> Task:
    return Task.create(Plain(), clients(INNER, LINEAR), jnp.zeros(()), weights=W)


POINTS = (
    np.random.default_rng(3).normal(size=(4, 6, 2)) + np.array([[1.0, 0], [0, 1.0], [-0.5, 0.5], [0.5, -1.0]])[:, None]
)


def ranking() -> Task:
    """Two positives and four negatives at every client, and as many in a batch."""
    data = Rows.from_clients([(points,) for points in POINTS], constants={"positives": np.full(4, 2)})
    problem = AveragePrecision(
        scores=lambda x, batch, key: batch[0] @ x, margin=0.5, positives=2, inner_samples=6, weight_decay=0.05
    )
    return Task.create(problem, data, jnp.zeros(2), batch_size=6, weights=W)


def best_ranking() -> np.ndarray:
    """By minimising the surrogate over all rows, written out: of the six rows of a batch one is the positive itself,
    one is drawn from the two positives and four from the four negatives."""

    def surrogate(x):
        values = []
        for weight, points in zip(W, POINTS, strict=True):
            h = 1 / (1 + np.exp(-points @ x))
            for i in (4, 5):
                loss = np.maximum(0.5 - h[i] + h, 0) ** 2
                above = 0.25 + loss[4:].mean()
                values.append(-weight / 2 * above / (above + loss[:4].sum()))
        return sum(values) + 0.025 * np.sum(x**2)

    return minimize(surrogate, np.zeros(2), tol=1e-10).x


class Scalars:
    """A representation u o and an output v u o; targets t o."""

    def split(self, params):
        return params

    def features(self, u, inputs, key):
        return u * inputs

    def head(self, v, z):
        return v * z

    def loss(self, outputs, labels):
        return 0.5 * jnp.mean((outputs - labels) ** 2)


@struct
class Scalar(Scalars, Personalised):
    """With the squared distance of representations as H."""


@struct
class Classes(Scalars, Personalised):
    """Labels are classes, and stand for the targets 1, 2, 3, 4."""

    def head(self, v, z):
        return jnp.repeat(v * z, 4, axis=1)

    def loss(self, outputs, labels):
        return 0.5 * jnp.mean((outputs[:, 0] - (labels + 1.0)) ** 2)


@struct
class RandomScalar(GaussianEncoder):
    """A representation that is hardly random."""

    def split(self, params):
        return params

    def features(self, u, inputs, key):
        return jnp.concatenate([u * inputs, jnp.full_like(inputs, -12.0)], axis=1)

    def head(self, v, z):
        return jnp.repeat(v * z, 4, axis=1)

    def loss(self, outputs, labels):
        return 0.5 * jnp.mean((outputs[:, 0] - (labels + 1.0)) ** 2)


M, T = np.array([1.0, 3.0, 2.0, 0.5]), np.array([1.0, 3.0, -1.0, 2.0])  # second moments and targets
CLASS_TARGETS = np.array([1.0, 2.0, 3.0, 4.0])
MODEL = mean(M * T) / mean(M)


def personal(problem: Any = None, start: tuple[float, float] = (1.0, 1.0)) -> Task:
    root = np.sqrt(M)[:, None, None]
    data = clients(root, root * T[:, None, None])
    return Task.create(problem or Scalar(), data, tuple(map(jnp.asarray, start)), weights=W)


def classes(problem: Any) -> Task:
    data = clients(np.ones((4, 2, 1)), np.tile(np.arange(4, dtype=np.int32)[:, None], (1, 2)))
    return Task.create(problem, data, (jnp.asarray(1.0), jnp.asarray(1.0)), weights=W)


PRODUCT = {"product": lambda s, c: (s.u if c.u is None else c.u)[0] * (s.v if c.v is None else c.v)[0]}

# ------------------------------------------------------------------------------------------------- the table

SLOW: dict[str, Any] = {"lr": 0.01}
NEST: dict[str, Any] = {"lr": 0.005, "lower_lr": 0.005, "neumann_lr": 0.4, "terms": 20}
SIM = {"lr": 1e-4, "lower_lr": 1e-4, "z_lr": 1e-4, "server_lr": 0.02, "server_lower_lr": 0.05, "server_z_lr": 0.05}
XY = {"x": lambda s, c: s.x[0], "y": lambda s, c: c.y[0]}
single = functools.partial(Limit, task=quadratics, solution={"x": QUADRATIC})
conditional_limit = functools.partial(Limit, task=conditional, solution={"x": CONDITIONAL})
shared = functools.partial(bilevel, "global", EQUAL)
lines = functools.partial(composition, Line())
own_lines = functools.partial(composition, Line(scope="local"))
OVER_COHORTS = "knows only the cohort's"
SERVER_ADAPTS = {"lr": 0.02, "server_lr": 0.002}

LIMITS: dict[str, Callable[[], Limit]] = {
    "fedavg": lambda: single(SLOW),
    "fedprox": lambda: single(SLOW | {"mu": 0.1}),
    "scaffold": lambda: single({"lr": 0.02, "local_steps": 4}),
    "fedopt": lambda: single(SLOW),
    "fedadagrad": lambda: single({"lr": 0.02, "server_lr": 0.05}, tolerance=0.05),
    "fedadam": lambda: single(SERVER_ADAPTS | {"tau": 1.0}, rounds=30_000, tolerance=0.05),
    "fedyogi": lambda: single(SERVER_ADAPTS | {"tau": 1.0}, rounds=60_000, tolerance=0.05),
    "fedbio": lambda: Limit(
        {"lr": 0.02, "lower_lr": 0.2, "hypergradient": Dense()}, functools.partial(bilevel, "local"),
        local_bilevel_solution(), fields=XY,
    ),
    "fedbioacc": lambda: Limit(
        {"c_nu": 50.0, "c_omega": 50.0, "lr": 0.5, "lower_lr": 2.0, "hypergradient": Dense()},
        functools.partial(bilevel, "local"), local_bilevel_solution(), fields=XY, rounds=30_000,
    ),
    "fednest": lambda: Limit(NEST, shared, {"x": nested_over_cohorts()}, 40_000, 0.15, says=OVER_COHORTS),
    "fednest-sgd": lambda: Limit(NEST, shared, {"x": nested_over_cohorts()}, 40_000, 0.15, says=OVER_COHORTS),
    "lfednest": lambda: Limit(NEST, shared, {"x": own_products()}, 40_000, 0.15, says="biased when clients differ"),
    "fedmbo": lambda: Limit(NEST, shared, {"x": nested_over_cohorts()}, 40_000, 0.15, says=OVER_COHORTS),
    "simfbo": lambda: Limit(SIM, functools.partial(bilevel, "global"), {"x": global_bilevel_solution()}, rounds=60_000,
                            tolerance=0.05),
    "shrofbo": lambda: Limit(SIM, functools.partial(bilevel, "global"), {"x": global_bilevel_solution()}, rounds=60_000,
                             tolerance=0.05),
    "fedminmax": lambda: Limit({"lr": 0.02, "weight_lr": 0.02}, groups, {"x": fairest()}),
    "fcfl": lambda: Limit(
        {"lr": 0.01, "stage_one_steps": 10**6, "delta": 1e-3, "floor": 1e-3, "weight_decay": 0.0},
        functools.partial(bounded, Unbounded()), {"x": root_over_cohorts(worst_of_cohort, -1, 2)}, tolerance=0.05,
        says=OVER_COHORTS,
    ),
    "fedavg-co-1": lambda: Limit(SLOW, lines, {"x": OWN_COMPOSITIONS}, says="Case I solves"),
    "fedavg-co-2": lambda: Limit(SLOW, lines, {"x": root_over_cohorts(plug_in, -5, 5)}, says=OVER_COHORTS),
    "feddro": lambda: Limit({"lr": 0.002, "beta": 0.02}, lines, {"x": COMPOSITION}, rounds=20_000, tolerance=0.04),
    "ds-feddro": lambda: Limit({"lr": 0.002, "beta": 0.02}, lines, {"x": COMPOSITION}, rounds=20_000, tolerance=0.04),
    "mbsgd": lambda: Limit(SLOW, lines, {"x": root_over_cohorts(plug_in, -5, 5)}, says=OVER_COHORTS),
    "unconstrained": lambda: Limit(SLOW, functools.partial(composition, LineAndSquare()), {"x": mean(SLOPES)}),
    "scgd": lambda: Limit({"lr": 0.002, "beta": 0.02}, lines, {"x": COMPOSITION}, rounds=20_000, tolerance=0.04),
    "gcivr": lambda: Limit(SLOW | {"local_steps": 1}, lines, {"x": root_over_cohorts(plug_in, -5, 5)},
                           says=OVER_COHORTS),
    "comfedl": lambda: Limit(SLOW, own_lines, {"x": OWN_COMPOSITIONS}),
    "local-scgd": lambda: Limit(SLOW | {"inner_lr": 1.0}, own_lines, {"x": OWN_COMPOSITIONS}),
    "local-scgdm": lambda: Limit(SLOW | {"inner_lr": 1.0, "momentum_lr": 0.1}, own_lines, {"x": OWN_COMPOSITIONS}),
    "local-scgd-own": lambda: Limit(SLOW | {"inner_lr": 0.3}, own_lines, {"x": OWN_COMPOSITIONS}),
    "local-scgdm-own": lambda: Limit(
        SLOW | {"inner_lr": 0.3, "momentum_lr": 0.1}, own_lines, {"x": OWN_COMPOSITIONS}
    ),
    "local-scgd-conditional": lambda: conditional_limit(SLOW | {"inner_lr": 1.0}),
    "local-scgdm-conditional": lambda: conditional_limit(SLOW | {"inner_lr": 1.0, "momentum_lr": 0.1}),
    # A price so high that nobody moves weight: what is left is the weights of clients.
    "fastdro": lambda: Limit(SLOW | {"price": 1e6}, quadratic_rows, {"x": QUADRATIC}, says=OVER_COHORTS),
    "pdsgd": lambda: Limit(
        SLOW | {"penalty": 0.05, "dual_lr": 0.02}, functools.partial(bounded, Bounded()),
        {"x": -1.0, "z": mean(A * (C + 1))}, fields={"x": lambda s, c: s.x[0], "z": lambda s, c: s.z[0]}, rounds=20_000,
        tolerance=0.05,
    ),
    "fcsg": lambda: conditional_limit(SLOW),
    "fcsg-m": lambda: conditional_limit(SLOW | {"beta": 0.1}),
    "acc-fcsg-m": lambda: conditional_limit(SLOW | {"beta": 0.1}),
    "bsgd": lambda: conditional_limit(SLOW),
    "bspiderboost": lambda: conditional_limit(SLOW | {"local_steps": 3, "refresh_batches": 1}, rounds=30_000),
    "coda-plus": lambda: Limit(
        {"lr": 0.01, "gamma": float("inf"), "stage_steps": 10**6}, saddle, saddle_point(),
        fields={"x": lambda s, c: s.x[0], "alpha": lambda s, c: s.alpha[0]},
    ),
    "codasca": lambda: Limit(
        {"lr": 0.01, "gamma": float("inf"), "stage_steps": 10**6, "local_steps": 4}, saddle, saddle_point(),
        fields={"x": lambda s, c: s.x[0], "alpha": lambda s, c: s.alpha[0]},
    ),
    "soap": lambda: Limit({"lr": 0.2, "beta": 0.02}, ranking, {"x": best_ranking()}, fields={"x": lambda s, c: s.x},
                          tolerance=0.06),
    "fedreco": lambda: Limit(
        {"lr": 0.05, "head_steps": 0, "coupling": 1.0, "server_lr": 0.01, "clip": 1e9},
        functools.partial(personal, start=(0.0, 1.0)), {"u0": MODEL, "u": (T + MODEL) / 2},
        fields={"u0": lambda s, c: s.u0[0], "u": lambda s, c: c.u[0]}, tolerance=0.05,
    ),
    "fedreco-pvr": lambda: Limit(
        {"lr": 0.05, "head_steps": 0, "coupling": 1.0, "server_lr": 0.01, "clip": 1e9},
        functools.partial(personal, start=(0.0, 1.0)), {"u0": MODEL, "u": (T + MODEL) / 2},
        fields={"u0": lambda s, c: s.u0[0], "u": lambda s, c: c.u[0]}, tolerance=0.05,
    ),
    "ditto": lambda: Limit(
        {"lr": 0.006, "coupling": 0.0, "clip": 1e9}, personal, {"product": T, "common": MODEL},
        fields=PRODUCT | {"common": lambda s, c: s.u0[0] * s.v0[0]}, tolerance=0.06, rounds=40_000,
    ),
    "fedrep": lambda: Limit({"lr": 0.02, "head_steps": 2, "clip": 1e9}, personal, {"product": T}, fields=PRODUCT),
    "fedbabu": lambda: Limit({"lr": 0.004, "clip": 1e9}, personal, {"product": MODEL}, fields=PRODUCT, rounds=20_000,
                            tolerance=0.05),
    "fedpac": lambda: Limit(
        {"lr": 0.02, "head_steps": 5, "head_lr": 0.2, "coupling": 0.0, "clip": 1e9, "smallest_eigenvalue": 0.0},
        functools.partial(classes, Classes()), {"product": CLASS_TARGETS}, fields=PRODUCT,
    ),
    "fedcr": lambda: Limit(
        {"lr": 0.05, "beta": 0.0, "clip": 1e9}, functools.partial(classes, RandomScalar(draws=2)),
        {"product": CLASS_TARGETS}, fields=PRODUCT,
    ),
    "fedavg-whole": lambda: Limit({"lr": 0.004, "clip": 1e9}, personal, {"product": MODEL}, 20_000, 0.05, PRODUCT),
    "local-only": lambda: Limit({"lr": 0.02, "clip": 1e9}, personal, {"product": T}, fields=PRODUCT),
}  # fmt: skip


def test_every_registered_algorithm_has_a_limit():
    assert set(LIMITS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", LIMITS)
def test_limit_with_unequal_weights_few_clients_and_lost_ones(name):
    limit = LIMITS[name]()
    found = run(name, limit)
    for key, expected in limit.solution.items():
        expected = np.broadcast_to(expected, found[key].shape)
        assert_allclose(found[key], expected, atol=limit.tolerance, err_msg=key)
    if limit.says:
        docstring = __import__(ALGORITHMS[name].__module__, fromlist=["_"]).__doc__
        assert limit.says in " ".join(docstring.split())


def test_chains_of_fedmbo_meet_clients_by_weight():
    """Two clients with weights (.9, .1) and different curvatures, all present: FedNest's limit is exact."""
    constants = tuple(jnp.asarray(v) for v in ((1.0, 3.0), (1.0, 1.0), (0.0, 2.0), (1.0, 3.0)))
    start = (jnp.zeros(()), jnp.zeros(()))
    task = Task.create(ScalarBilevel(scope="global"), Rows.from_clients(constants=constants), start, weights=(0.9, 0.1))
    settings = {"lower_lr": 0.1, "neumann_lr": 1 / 3, "terms": 20, "lower_rounds": 5}
    x = {}
    for name, lr, rounds in (("fednest", 0.1, 2000), ("fedmbo", 0.01, 20_000)):
        options = {"output": "average", "evaluate_every": None, "progress": False}
        x[name] = float(simulate(make(name, lr=lr, **settings), task, 3, rounds=rounds, **options).output.x[0])
    assert_allclose(x["fednest"], 1.0816, atol=0.01)
    assert_allclose(x["fedmbo"], 1.0816, atol=0.06)


def test_a_first_estimate_is_made_in_the_first_round_that_anybody_answers():
    """Nobody answers for some rounds: methods with a running estimate still end where they should."""
    task = Task.create(
        ScalarBilevel(), clients((1.0, 3.0), (1.0, 1.0), (0.0, 2.0), (1.0, 3.0)), (jnp.zeros(()), jnp.zeros(()))
    )
    options = {"dropout": 0.3, "progress": False, "evaluate_every": None}
    nobody_at_first = [
        seed
        for seed in range(200)
        if not choose_cohort(task, jax.random.key(seed), jnp.asarray(0), None, jnp.asarray(0.3)).weight.any()
    ]
    seed = nobody_at_first[0]
    acc = make("fedbioacc", c_nu=50.0, c_omega=50.0, hypergradient=Dense())
    result = simulate(acc, task, seed, rounds=4000, **options)
    assert result.participants[0] == 0
    assert_allclose(result.server.x, [80 / 59], atol=0.02)
    for name in ("fcsg-m", "acc-fcsg-m"):
        algorithm = make(name, lr=1e-6, beta=1e-6)  # an estimate that is made once and never forgotten
        result = simulate(
            algorithm, conditional(), _empty_first_round(conditional()), rounds=3, dropout=0.7, progress=False
        )
        assert result.participants[0] == 0 and result.participants.max() > 0
        assert abs(float(result.server.u[0])) > 0.1, name


def _empty_first_round(task: Task) -> int:
    empty = lambda s, r: not choose_cohort(task, jax.random.key(s), jnp.asarray(r), None, jnp.asarray(0.7)).weight.any()
    return next(seed for seed in range(500) if empty(seed, 0) and not empty(seed, 1))
