"""The baselines of the compositional family and the adversary's best responses, against closed forms."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TASKS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import brentq
from scipy.special import logsumexp

from nestfed import PowerDecay, Rows, Task, UserError, advance, make, simulate, start, struct
from nestfed.algorithms.fastdro import FastDRO
from nestfed.problems import Compositional, Constrained, SingleLevel, worst_case
from nestfed.problems.robust import KL, MeanLoss
from nestfed.problems.toys import counterexample


def states(algorithm, task, rounds):
    """The server's states after each of the first rounds."""
    run, servers = start(algorithm, task), []
    for _ in range(rounds):
        run, _ = advance(algorithm, task, 0, run, rounds=1, evaluate_every=None)
        servers.append(run.server)
    return servers


def last_x(algorithm, task, rounds):
    return float(simulate(algorithm, task, rounds=rounds, evaluate_every=None).server.x[0])


# ------------------------------------------------------------------------------------------------- best responses

T6 = jnp.array([0.0, 1.0, 2.0])


def penalty_value(p, losses, price):
    p, losses = np.asarray(p), np.asarray(losses)
    return p @ losses - price * p.size / 2 * np.sum((p - 1 / p.size) ** 2)


def kl_value(p, losses, price):
    p, losses = np.asarray(p), np.asarray(losses)
    inside = p > 0
    return p @ losses - price * np.sum(p[inside] * np.log(p.size * p[inside]))


@pytest.mark.parametrize(
    ("price", "weights", "value"),
    [(2.0, (1 / 6, 1 / 3, 1 / 2), 7 / 6), (1.0, (0, 1 / 3, 2 / 3), 4 / 3), (0.5, (0, 1 / 6, 5 / 6), 1.5416666667)],
)
def test_t6_chi_square_penalty(price, weights, value):
    p = worst_case.chi_square(T6, price)
    assert p == pytest.approx(weights, abs=1e-12)
    assert penalty_value(p, T6, price) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("price", "weights", "value"),
    [
        (1.0, (0.09003057, 0.24472847, 0.66524096), 1.3089937),
        (2.0, (0.18632372, 0.30719589, 0.50648039), 1.1633148),
    ],
)
def test_t6_kl(price, weights, value):
    p = worst_case.kl(T6, price)
    assert p == pytest.approx(weights, abs=1e-8)
    assert kl_value(p, T6, price) == pytest.approx(value, abs=5e-8)
    assert worst_case.kl_cvar(T6, price, 1e-3) == pytest.approx(np.asarray(p), abs=1e-12)  # a cap that nobody reaches


def test_t21_ball_and_tail():
    p = worst_case.chi_square_ball(T6, 0.1)
    assert p == pytest.approx((0.1507592, 1 / 3, 0.5159075), abs=1e-7)
    assert p @ T6 == pytest.approx(1 + math.sqrt(2 * 0.1 * 2 / 3), abs=1e-12) == pytest.approx(1.3651484, abs=1e-7)
    assert worst_case.cvar(T6, 0.5) == pytest.approx((0, 1 / 3, 2 / 3), abs=1e-12)
    assert worst_case.cvar(T6, 0.5) @ T6 == pytest.approx(1.6666667, abs=1e-7)


def test_ball_that_holds_all_of_the_simplex_gives_the_worst_row():
    assert worst_case.chi_square_ball(T6, 1.0).tolist() == [0, 0, 1]
    assert worst_case.chi_square_ball(jnp.array([3.0, 1.0, 3.0]), 5.0).tolist() == [0.5, 0, 0.5]


# Losses on a grid: differences below the resolution of the degenerate rule would only test that rule.
grids = st.integers(2, 5).flatmap(lambda n: arrays(float, n, elements=st.integers(0, 40).map(lambda i: i / 8)))
positive = st.floats(0.05, 20)
shares = st.floats(0.05, 1)
GEOMETRIES = {
    "chi-square": lambda v, a, b, w=None: worst_case.chi_square(v, a, w),
    "ball": lambda v, a, b, w=None: worst_case.chi_square_ball(v, a, w),
    "cvar": lambda v, a, b, w=None: worst_case.cvar(v, b, w),
    "kl": lambda v, a, b, w=None: worst_case.kl(v, a, w),
    "kl-cvar": lambda v, a, b, w=None: worst_case.kl_cvar(v, a, b, w),
}
respond = {name: jax.jit(function) for name, function in GEOMETRIES.items()}


@pytest.mark.parametrize("name", GEOMETRIES)
@given(losses=grids, a=positive, b=shares)
@settings(deadline=None, max_examples=40)
def test_responses_are_weights_and_no_better_than_the_mean(name, losses, a, b):
    p = np.asarray(respond[name](losses, a, b))
    assert p.min() >= 0
    assert p.sum() == pytest.approx(1, abs=1e-9)
    assert p @ losses >= losses.mean() - 1e-9
    assert all(p[i] >= p[j] - 1e-9 for i in range(p.size) for j in range(p.size) if losses[i] >= losses[j])


@pytest.mark.parametrize("name", GEOMETRIES)
@given(losses=grids, a=positive, b=shares)
@settings(deadline=None, max_examples=20)
def test_nominal_weight_two_is_two_rows_and_zero_is_none(name, losses, a, b):
    """The first row counts twice; a row of weight zero changes nothing, not even with NaN."""
    doubled = np.asarray(respond[name](np.append(losses, losses[0]), a, b))
    weights = np.append(np.ones(losses.size), 0.0)
    weights[0] = 2
    weighted = np.asarray(respond[name](np.append(losses, np.nan), a, b, weights))
    assert weighted[-1] == 0
    assert weighted[0] == pytest.approx(doubled[0] + doubled[-1], abs=1e-9)
    assert weighted[1:-1] == pytest.approx(doubled[1:-1], abs=1e-9)


@given(losses=grids, price=positive)
@settings(deadline=None, max_examples=40)
def test_chi_square_penalty_is_the_best_of_all_supports(losses, price):
    n, best = losses.size, -np.inf
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            inside = losses[list(chosen)]
            p = 1 / size + (inside - inside.mean()) / (price * n)
            if p.min() >= 0:
                best = max(best, penalty_value(np.bincount(chosen, p, n), losses, price))
    p = respond["chi-square"](losses, price, 1.0)
    assert penalty_value(p, losses, price) == pytest.approx(best, abs=1e-9)
    everyone_counts = worst_case.negative_share(losses, price) == 0
    closed = losses.mean() + losses.var() / (2 * price)
    assert (best == pytest.approx(closed, abs=1e-9)) if everyone_counts else (best < closed)


@given(losses=grids, radius=st.floats(0.01, 3))
@settings(deadline=None, max_examples=40)
def test_ball_is_the_best_of_all_supports(losses, radius):
    n, best = losses.size, losses.mean()
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            inside = losses[list(chosen)]
            room = 2 * radius / n + 1 / n - 1 / size  # of |p - 1 / size|^2 within the support
            length = np.linalg.norm(inside - inside.mean())
            if room >= 0:
                p = 1 / size + math.sqrt(room) * (inside - inside.mean()) / (length or 1)
                best = max(best, p @ inside) if p.min() >= -1e-12 else best
    p = np.asarray(respond["ball"](losses, radius, 1.0))
    assert p @ losses == pytest.approx(best, abs=1e-8)
    assert n / 2 * np.sum((p - 1 / n) ** 2) <= radius + 1e-8


@given(losses=grids, price=positive, tail=shares)
@settings(deadline=None, max_examples=40)
def test_values_of_tails_and_exponentials(losses, price, tail):
    p = np.asarray(respond["cvar"](losses, price, tail))
    dual = min(c + np.maximum(losses - c, 0).mean() / tail for c in losses)
    assert p @ losses == pytest.approx(dual, abs=1e-9)
    assert p.max() <= 1 / (tail * p.size) + 1e-9

    p = respond["kl"](losses, price, tail)
    assert kl_value(p, losses, price) == pytest.approx(
        price * (logsumexp(losses / price) - math.log(losses.size)), abs=1e-9
    )

    # With a cap some of the largest losses are at it and the others share the rest exponentially.
    ordered, cap, best = -np.sort(-losses), 1 / (tail * losses.size), -np.inf
    for capped in range(losses.size + 1):
        rest = 1 - capped * cap
        others = np.exp((ordered[capped:] - ordered[0]) / price)
        if rest < -1e-12 or (others.size == 0 and rest > 1e-12):
            continue
        candidate = np.append(np.full(capped, cap), max(rest, 0) * others / max(others.sum(), 1e-300))
        if candidate.max() <= cap + 1e-12:
            best = max(best, kl_value(candidate, ordered, price))
    assert kl_value(respond["kl-cvar"](losses, price, tail), losses, price) == pytest.approx(best, abs=1e-8)


def test_alike_losses_are_not_told_apart():
    nearly = jnp.array([1000.0, 1000.001, 1000.002])
    for name in ("chi-square", "ball", "kl-cvar"):
        assert respond[name](nearly, 1e-4, 0.5).tolist() == [1 / 3] * 3
        assert respond[name](jnp.zeros(4), 1.0, 0.5).tolist() == [1 / 4] * 4
    assert worst_case.cvar(nearly, 1 / 3) == pytest.approx((0, 0, 1), abs=1e-12)


def test_effective_sample_size_and_negative_share():
    assert worst_case.effective_sample_size(jnp.full(5, 0.2)) == pytest.approx(1)
    assert worst_case.effective_sample_size(jnp.array([1.0, 0, 0, 0])) == pytest.approx(1 / 4)
    nominal = jnp.array([3.0, 1.0, 0.0])
    assert worst_case.effective_sample_size(jnp.array([0.75, 0.25, 0.0]), nominal) == pytest.approx(1)
    assert worst_case.negative_share(T6, 0.5) == pytest.approx(1 / 3)
    assert worst_case.negative_share(T6, 1.0) == 0
    assert worst_case.negative_share(T6, 0.5, jnp.array([2.0, 1.0, 1.0])) == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------- where runs end

LOCAL_TARGET = 1.1686673  # T1e: of the mean of the clients' own compositions


@pytest.mark.parametrize(
    ("name", "options", "scope", "target"),
    [
        ("mbsgd", {}, "global", 0.0),
        ("mbsgd", {"plugin": "local"}, "global", LOCAL_TARGET),
        ("scgd", {"beta": 0.5}, "global", 0.0),
        ("gcivr", {"local_steps": 3}, "global", 0.0),
        ("comfedl", {}, "local", LOCAL_TARGET),
        ("local-scgd", {"inner_lr": 1.0}, "local", LOCAL_TARGET),
        ("local-scgd-own", {"inner_lr": 0.3}, "local", LOCAL_TARGET),
        ("local-scgdm", {"inner_lr": 1.0, "momentum_lr": 0.3}, "local", LOCAL_TARGET),
        ("local-scgdm-own", {"inner_lr": 0.3}, "local", LOCAL_TARGET),
    ],
)
def test_t1e_limits(name, options, scope, target):
    x = last_x(make(name, lr=0.04, **options), counterexample(scope=scope), 3000)
    assert x == pytest.approx(target, abs=1e-7)


def test_scgd_with_its_published_steps_reaches_the_solution():
    assert last_x(make("scgd"), counterexample(), 3000) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7])
def test_averaging_inner_estimates_moves_local_scgd_to_a_mixed_problem(rate):
    slope = lambda y: y / math.sqrt(y**2 + 4)
    own = lambda x, value: slope((1 - rate) * x + rate * value)
    limit = brentq(lambda x: 4 * own(x, 4 * x - 4) - 2 * own(x, 4 - 2 * x), 0, 2)
    for name in ("local-scgd", "local-scgdm"):
        x = last_x(make(name, lr=0.04, inner_lr=rate), counterexample(scope="local"), 5000)
        assert x == pytest.approx(limit, abs=1e-6)


def test_local_scgd_steps_by_hand():
    """Client k has g_k = a_k x + c_k; the second round starts from the means of u and m."""
    slopes, shifts, rate, momentum, lr = np.array([4.0, -2.0]), np.array([-4.0, 4.0]), 0.3, 0.6, 0.04
    derivative = lambda y: y / np.sqrt(y**2 + 4)
    x = 0.5
    u = np.full(2, np.mean(slopes * x + shifts))
    m = np.full(2, np.mean(slopes * derivative(slopes * x + shifts)))
    servers = states(make("local-scgdm", lr=lr, inner_lr=rate, momentum_lr=momentum), counterexample(scope="local"), 2)
    for server in servers:
        u = (1 - rate) * u + rate * (slopes * x + shifts)
        m = (1 - momentum) * m + momentum * slopes * derivative(u)
        x, u, m = np.mean(x - lr * m), np.full(2, u.mean()), np.full(2, m.mean())
        assert (server.x[0], server.u[0], server.m[0]) == pytest.approx((x, u[0], m[0]), abs=1e-12)


def test_drifting_clients_average_at_the_end_of_a_round():
    """ComFedL with two local steps is FedAvg-CO case I with two: T1a's first rounds."""
    trace = [float(s.x[0]) for s in states(make("comfedl", lr=0.04, local_steps=2), counterexample(scope="local"), 3)]
    assert trace == pytest.approx([0.67161175, 0.8135438, 0.92219202], abs=1e-8)


def test_methods_refuse_the_other_scope():
    with pytest.raises(UserError, match="scope 'local'.*another solution"):
        simulate(make("comfedl", lr=0.1), counterexample(), rounds=1)
    with pytest.raises(UserError, match="scope 'global'"):
        simulate(make("gcivr", lr=0.1), counterexample(scope="local"), rounds=1)


@pytest.mark.parametrize("name", ["mbsgd", "unconstrained", "scgd", "fastdro", "pdsgd"])
def test_methods_that_exchange_in_every_step_take_one_step_a_round(name):
    with pytest.raises(UserError, match="every step exchanges.*at most 1"):
        make(name, lr=0.1, local_steps=2)


# ------------------------------------------------------------------------------------------------- exact steps on KL

ROWS, INPUTS = 4, np.random.default_rng(3).normal(size=(3, 4, 2))
TARGETS = np.random.default_rng(4).normal(size=(3, 4)) + np.arange(3.0)[:, None]
WEIGHTS = np.array([0.2, 0.3, 0.5])


def squares(x, batch, key):
    inputs, targets = batch
    return (inputs @ x - targets) ** 2


def full_batches(problem, weights: Any = WEIGHTS, clients=(0, 1, 2)) -> Task:
    """Every batch is all rows of a client, so runs are deterministic."""
    clients = list(clients)
    data = Rows.from_clients(constants=(jnp.asarray(INPUTS[clients]), jnp.asarray(TARGETS[clients])))
    return Task.create(problem, data, jnp.array([0.3, -0.2]), weights=weights)


def all_losses(x):
    return jnp.stack([squares(x, (jnp.asarray(a), jnp.asarray(b)), None) for a, b in zip(INPUTS, TARGETS, strict=True)])


def kl_objective(x, price=0.7, decay=0.1):
    logs = jax.nn.logsumexp(all_losses(x) / price, axis=1, b=1 / ROWS)
    return price * jax.nn.logsumexp(logs, b=jnp.asarray(WEIGHTS)) + decay / 2 * jnp.sum(x**2)


@pytest.mark.parametrize("name", ["mbsgd", "scgd", "gcivr"])
def test_full_batches_are_gradient_descent_on_the_robust_loss(name):
    """Weights of clients included, with Scaled inner values; GCIVR's recursion is exact then."""
    options = {"scgd": {"beta": 1.0}, "gcivr": {"local_steps": 4, "refresh_batches": 2}}.get(name, {})
    task = full_batches(KL(losses=squares, price=0.7, weight_decay=0.1))
    x, rounds = task.params[0], 1 if name == "gcivr" else 4
    for _ in range(4):
        x = x - 0.02 * jax.grad(kl_objective)(x)
    assert states(make(name, lr=0.02, **options), task, rounds)[-1].x == pytest.approx(np.asarray(x), abs=1e-12)


def test_gcivr_keeps_the_noise_of_the_first_step_and_adds_none():
    """g = x + noise: batches differ by constants only, so within an epoch all estimates have the first one's error."""

    @struct
    class Shifted(Compositional):
        def inner(self, x, batch, key):
            return x + jnp.mean(batch)

        def outer(self, y, batch, key):
            return 0.5 * jnp.sum(y**2)

    noise = np.random.default_rng(0).normal(size=(2, 50))
    data = Rows.from_clients([noise[0], noise[1]])
    task = Task.create(Shifted(), data, jnp.asarray(1.0), batch_size=2)
    after = lambda steps: last_x(make("gcivr", lr=0.1, local_steps=steps, refresh_batches=1), task, 1)
    x = after(1)
    error = (1 - x) / 0.1 - 1  # of the estimate of g
    assert abs(error) > 1e-3
    for _ in range(3):
        x -= 0.1 * (x + error)
    assert after(4) == pytest.approx(x, abs=1e-12)


def test_gcivr_counts_estimates_outside_the_domain():
    """g = x E row >= 0, and batches of one row, -1 or 3."""

    @struct
    class Half(Compositional):
        def inner(self, x, batch, key):
            return x * jnp.mean(batch)

        def outer(self, y, batch, key):
            return jnp.sqrt(y + 1)

        def project_y(self, y):
            return jnp.maximum(y, 0)

    task = Task.create(Half(), Rows.from_clients([np.array([-1.0, 3.0])]), jnp.asarray(1.0), batch_size=1)
    result = simulate(make("gcivr", lr=0.01, local_steps=2, refresh_batches=1), task, rounds=10)
    shares = result.history["projected_share"][1:]
    assert 0 < shares.mean() < 1 and result.noted["projected_share"].sum(0)[1] == 20


def test_gcivr_refuses_an_outer_function_of_the_batch():
    @struct
    class OwnOuter(Compositional):
        def inner(self, x, batch, key):
            return x * batch

        def outer(self, y, batch, key):
            return (y - batch) ** 2

    task = Task.create(OwnOuter(), Rows.from_clients(constants=jnp.array([1.0, 2.0])), jnp.asarray(1.0))
    with pytest.raises(UserError, match="same for all clients.*OwnOuter.outer uses the batch"):
        simulate(make("gcivr", lr=0.1), task, rounds=1)


# ------------------------------------------------------------------------------------------------- unconstrained


def test_unconstrained_is_averaging_on_the_extra_alone():
    @struct
    class ExtraOnly(SingleLevel):
        def loss(self, x, batch, key):
            return jnp.mean(squares(x, batch, key))

    task = TASKS["global composition"]()
    alone = Task.create(ExtraOnly(), task.data, jnp.zeros(3), batch_size=task.batch_size)
    one = states(make("unconstrained", lr=0.05), task, 5)[-1].x
    assert one == pytest.approx(np.asarray(states(make("fedavg", lr=0.05), alone, 5)[-1].x), abs=1e-12)


def test_unconstrained_needs_an_extra():
    with pytest.raises(UserError, match="Line has none; define extra"):
        simulate(make("unconstrained", lr=0.1), counterexample(), rounds=1)


# ------------------------------------------------------------------------------------------------- FastDRO


def pooled(x, geometry, weights=WEIGHTS):
    """The robust loss of all rows, with weights that are not differentiated."""
    losses = all_losses(x)
    nominal = jnp.repeat(jnp.asarray(weights), ROWS)
    p = {
        "chi-square-penalty": lambda v: worst_case.chi_square(v, 1.3, nominal),
        "chi-square-ball": lambda v: worst_case.chi_square_ball(v, 0.4, nominal),
        "cvar": lambda v: worst_case.cvar(v, 0.3, nominal),
        "kl-cvar": lambda v: worst_case.kl_cvar(v, 1.3, 0.3, nominal),
    }[geometry](jax.lax.stop_gradient(losses.reshape(-1)))
    return p @ losses.reshape(-1) + 0.05 * jnp.sum(x**2)


FAST = {"lr": 0.05, "price": 1.3, "radius": 0.4, "tail": 0.3}


@pytest.mark.parametrize("geometry", ["chi-square-penalty", "chi-square-ball", "cvar", "kl-cvar"])
def test_fastdro_descends_the_robust_loss_of_all_rows(geometry):
    task = full_batches(MeanLoss(losses=squares, weight_decay=0.1))
    x = task.params[0]
    for server in states(make("fastdro", geometry=geometry, **FAST), task, 3):
        x = x - 0.05 * jax.grad(pooled)(x, geometry)
        assert server.x == pytest.approx(np.asarray(x), abs=1e-10)


def test_fastdro_gradient_is_that_of_the_closed_form():
    """Large price: no weight is zero, and the value is mean + Var / (2 price) of the weighted rows."""
    price, task = 50.0, full_batches(MeanLoss(losses=squares))

    def closed(x):
        mean = lambda values: jnp.asarray(WEIGHTS) @ values.mean(1)
        losses = all_losses(x)
        return mean(losses) + (mean(losses**2) - mean(losses) ** 2) / (2 * price)

    expected = task.params[0] - 0.05 * jax.grad(closed)(task.params[0])
    assert states(make("fastdro", lr=0.05, price=price), task, 1)[0].x == pytest.approx(np.asarray(expected), abs=1e-12)


def test_rows_of_an_absent_client_count_nothing():
    problem, algorithm = MeanLoss(losses=squares), make("fastdro", geometry="cvar", **FAST)
    without = states(algorithm, full_batches(problem, weights=[0.3, 0.5], clients=(1, 2)), 3)[-1].x
    absent = states(algorithm, full_batches(problem, weights=[0, 0.3, 0.5]), 3)[-1].x
    assert absent == pytest.approx(np.asarray(without), abs=1e-12)


def test_multilevel_estimate_has_the_mean_of_the_whole_batch():
    """Exactly: all batches of 2 clients x 4 rows from two equally likely losses, and all levels with their chances."""
    algorithm, shares = FastDRO(lr=0.1, price=0.8, levels=2), jnp.array([0.3, 0.7])
    whole = FastDRO(lr=0.1, price=0.8)
    # The statistic is sum p_i phi(l_i) for a function phi of the row, as a gradient is.
    batches = jnp.array(list(itertools.product([0.0, 2.0], repeat=8))).reshape(-1, 2, 4)
    statistic = lambda p, losses: jnp.sum(p * jnp.cos(3 * losses + 1))
    at_level = lambda j: jax.vmap(lambda v: statistic(algorithm.find_worst_weights(v, shares, jnp.asarray(j)), v))(
        batches
    )
    full = jax.vmap(lambda v: statistic(whole.find_worst_weights(v, shares, None), v))(batches)
    one_row = lambda v: jnp.zeros((2, 4)).at[:, 0].set(worst_case.chi_square(v[:, 0], 0.8, shares))
    smallest = jax.vmap(lambda v: statistic(one_row(v), v))(batches)
    assert 0.5 * at_level(1).mean() + 0.5 * at_level(2).mean() == pytest.approx(float(full.mean()), abs=1e-12)
    assert abs(smallest.mean() - full.mean()) > 1e-3  # what a batch of that size alone would give


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_levels_have_their_chances(levels):
    """The chances by which `find_worst_weights` divides: 2^-j, and for the last level what is left."""
    keys = jax.vmap(jax.random.key)(jnp.arange(4000))
    found = jax.vmap(FastDRO(lr=0.1, levels=levels).level)(keys)
    for j in range(1, levels + 1):
        chance = 0.5 ** min(j, levels - 1)
        error = math.sqrt(chance * (1 - chance) / 4000)
        assert float(jnp.mean(found == j)) == pytest.approx(chance, abs=3 * error + 1e-12)


def test_level_comes_from_the_key_of_the_step():
    algorithm = FastDRO(lr=0.1, levels=2)
    losses, weights = jnp.array([[5.0, 0.0, 1.0, 3.0]]), jnp.ones(1)
    keys = jax.vmap(jax.random.key)(jnp.arange(8))
    levels = jax.vmap(algorithm.level)(keys)
    assert set(levels.tolist()) == {1, 2}
    answers = jax.vmap(lambda key: algorithm.answer(losses, weights, key))(keys)
    expected = jax.vmap(lambda level: algorithm.find_worst_weights(losses, weights, level))(levels)
    assert jnp.abs(answers - expected).max() < 1e-12


def test_fastdro_says_what_it_needs():
    task = TASKS["losses of rows"]()
    with pytest.raises(UserError, match="levels=3 halves a batch 3 times.*have 4 rows.*divisible by 8"):
        simulate(make("fastdro", lr=0.1, levels=3), task, rounds=1)
    with pytest.raises(UserError, match="per_row"):
        simulate(make("fastdro", lr=0.1), TASKS["single level"](), rounds=1)


# ------------------------------------------------------------------------------------------------- PDSGD


@struct
class Capped(Constrained):
    """(x - 2)^2, and x at most the mean of the clients' caps; others, x <= 5 and so on, do not bind."""

    def objective(self, x, batch, key):
        return jnp.sum((x - 2.0) ** 2)

    def constraints(self, x, batch, key):
        return x - batch


def capped(*caps) -> Task:
    caps = jnp.asarray(caps)
    return Task.create(Capped(), Rows.from_clients(constants=caps), jnp.zeros(()))


PD = {"lr": 0.05, "penalty": 0.1, "dual_lr": 0.1}


def test_t16():
    server = simulate(make("pdsgd", **PD), capped([1.0]), rounds=2000, evaluate_every=None).server
    assert (server.x[0], server.z[0]) == pytest.approx((1, 2), abs=1e-8)


def test_constraints_of_different_clients_count_by_their_mean():
    server = simulate(make("pdsgd", **PD), capped([0.5], [1.5]), rounds=2000, evaluate_every=None).server
    assert (server.x[0], server.z[0]) == pytest.approx((1, 2), abs=1e-8)


def test_first_steps_by_hand():
    """One constraint: x from the old z, z from the old x, and never below zero."""
    x, z = 0.0, 0.0
    for server in states(make("pdsgd", **PD), capped([1.0]), 30):
        x, z = x - 0.05 * (2 * (x - 2) + max(0.1 * (x - 1) + z, 0)), z + 0.1 * max(-z / 0.1, x - 1)
        assert (server.x[0], server.z[0]) == pytest.approx((x, z), abs=1e-12)
        assert server.z[0] >= 0


def test_random_constraints_all_have_their_turn_and_only_the_binding_one_a_multiplier():
    """z / J estimates the multipliers (2, 0, 0); steps that fall, and the average over the run."""
    fall = lambda scale: PowerDecay(scale=scale, power=0.5)
    algorithm = make("pdsgd", lr=fall(0.3), penalty=fall(0.5), dual_lr=fall(0.5))
    result = simulate(algorithm, capped([1.0, 5.0, 6.0]), rounds=20000, evaluate_every=None, output="average")
    assert result.output.x[0] == pytest.approx(1, abs=0.05)
    assert result.server.z / 3 == pytest.approx((2, 0, 0), abs=0.2)
