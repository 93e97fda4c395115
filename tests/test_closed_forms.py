"""The closed-form cases of the specification: traces to 1e-8, limits to 1e-5, Monte-Carlo values to three
standard errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nestfed import Rows, Sample, advance, make, simulate, start, sweep
from nestfed.problems import toys
from nestfed.problems.hypergradients import Dense, Neumann

TRACE, LIMIT = 1e-8, 1e-5


def limit(algorithm, task, rounds):
    """x after many rounds, without recording anything on the way."""
    return float(simulate(algorithm, task, rounds=rounds, evaluate_every=None).server.x[0])


def trace(algorithm, task, rounds):
    """The runs after each of the first rounds."""
    run, runs = start(algorithm, task), []
    for _ in range(rounds):
        run, _ = advance(algorithm, task, 0, run, rounds=1, evaluate_every=None)
        runs.append(run)
    return runs


# ------------------------------------------------------------------------------------------------- T12 generic methods

GENERIC = {"lr": 0.1, "local_steps": 5}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("fedavg", {}, 0.6925023), ("fedprox", {"mu": 1.0}, 0.6974693), ("scaffold", {}, 0.8)],
)
def test_t12_limits(name, settings, expected):
    assert limit(make(name, **GENERIC, **settings), toys.quadratics(), 300) == pytest.approx(expected, abs=LIMIT)


def test_t12_fedavg_limit_is_its_closed_form():
    a, c, lr, steps = np.array([1.0, 4.0]), np.array([0.0, 1.0]), 0.1, 5
    weight = 1 - (1 - lr * a) ** steps
    closed = (weight * c).sum() / weight.sum()
    assert limit(make("fedavg", **GENERIC), toys.quadratics(), 300) == pytest.approx(closed, abs=TRACE)


def test_t12_scaffold_trace_and_control_variates():
    runs = trace(make("scaffold", **GENERIC), toys.quadratics(), 3)
    assert [float(r.server.x[0]) for r in runs] == pytest.approx([0.46112, 0.69770914, 0.78530541], abs=TRACE)
    final = simulate(make("scaffold", **GENERIC), toys.quadratics(), rounds=300, evaluate_every=None)
    assert final.clients.c_k[:, 0] == pytest.approx([0.8, -0.8], abs=LIMIT)


@pytest.mark.parametrize(
    ("name", "v0", "expected"),
    [
        ("fedadam", 0.0, 0.0978774), ("fedyogi", 0.0, 0.0978774), ("fedadam", None, 0.0978551),
        ("fedyogi", None, 0.0978549),
    ],
)  # fmt: skip
def test_t12_one_server_step(name, v0, expected):
    algorithm = make(name, **GENERIC, server_lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3, v0=v0)
    assert limit(algorithm, toys.quadratics(), 1) == pytest.approx(expected, abs=5e-8)


def test_t12_adagrad_server_step_by_hand():
    delta, tau = 0.46112, 1e-3
    expected = 0.1 * 0.1 * delta / (np.sqrt(tau**2 + delta**2) + tau)
    assert limit(make("fedadagrad", **GENERIC, server_lr=0.1), toys.quadratics(), 1) == pytest.approx(
        expected, abs=TRACE
    )


# ------------------------------------------------------------------------------------------------- T2 local lower level


@pytest.mark.parametrize(
    ("lr", "steps", "estimator", "expected"),
    [
        (0.1, 1, Dense(), 1.3559322), (0.1, 5, Dense(), 1.4180808), (0.01, 5, Dense(), 1.3625494),
        (0.1, 20, Dense(), 1.6172115), (0.1, 1, Neumann(terms=3, lr=0.2), 1.5002967),
        (0.1, 1, Neumann(terms=10, lr=0.2), 1.3808652),
    ],
)  # fmt: skip
def test_t2c_fedbio_limits(lr, steps, estimator, expected):
    algorithm = make("fedbio", lr=lr, lower_lr=0.2, local_steps=steps, hypergradient=estimator)
    assert limit(algorithm, toys.scalar_bilevel(), 4000) == pytest.approx(expected, abs=LIMIT)


def test_t2d_fedbio_trace():
    """Steps 1..6 with I = 2: x of both clients before each synchronisation, x after it, y after every step."""
    algorithm = make("fedbio", lr=0.1, lower_lr=0.2, local_steps=2, hypergradient=Dense())
    result = [
        simulate(algorithm, toys.scalar_bilevel(), rounds=r, evaluate_every=None, unsynced=True) for r in (1, 2, 3)
    ]
    between = [r.run.unsynced for r in result]  # before the last step of rounds 1, 2, 3: after steps 1, 3, 5
    assert np.ravel([u.x[:, 0] for u in between]) == pytest.approx(
        [0.1, 0.1, 0.28841, 0.27107667, 0.44929211, 0.43533757], abs=TRACE
    )
    assert [float(r.server.x[0]) for r in result] == pytest.approx([0.19233333, 0.36304812, 0.51751816], abs=TRACE)
    y = np.stack([a for u, r in zip(between, result, strict=True) for a in (u.y[:, 0], r.clients.y[:, 0])])
    assert y[:, 0] == pytest.approx([0, 0.02, 0.05446667, 0.10125533, 0.15361389, 0.21274953], abs=TRACE)
    assert y[:, 1] == pytest.approx([0.4, 0.58, 0.67046667, 0.722402, 0.76157042, 0.79169568], abs=TRACE)


ACC = {"lr": 1.0, "lower_lr": 1.0, "delta": 0.1, "u": 1.0, "sigma2": 1.0, "c_nu": 1.0, "c_omega": 1.0}


def test_t2e_fedbioacc_trace():
    algorithm = make("fedbioacc", **ACC, local_steps=2, hypergradient=Dense())
    result = [simulate(algorithm, toys.scalar_bilevel(), rounds=r, evaluate_every=None, unsynced=True) for r in (1, 2)]
    between = [r.run.unsynced for r in result]
    assert np.ravel([u.x[:, 0] for u in between]) == pytest.approx(
        [0.07937005, 0.07937005, 0.20639041, 0.20438693], abs=TRACE
    )
    assert [float(r.server.x[0]) for r in result] == pytest.approx([0.14632145, 0.25879629], abs=TRACE)
    assert np.ravel([u.nu[:, 0] for u in between]) == pytest.approx([-1, -1, -0.95353515, -0.92173192], abs=TRACE)
    assert [float(r.server.nu[0]) for r in result] == pytest.approx([-0.96560631, -0.91325755], abs=TRACE)
    y = np.stack([a for u, r in zip(between, result, strict=True) for a in (u.y[:, 0], r.clients.y[:, 0])])
    assert y[:, 1] == pytest.approx([0.15874011, 0.2698963, 0.35409887, 0.42088872], abs=TRACE)
    assert y[:, 0] == pytest.approx([0, 0.00550321, 0.01437421, 0.02560338], abs=TRACE)


@pytest.mark.parametrize(("steps", "expected"), [(1, 1.3559322), (2, 1.3576868), (5, 1.3623476)])
def test_t2e_fedbioacc_limits(steps, expected):
    algorithm = make("fedbioacc", **ACC, local_steps=steps, hypergradient=Dense())
    assert limit(algorithm, toys.scalar_bilevel(), 100_000 // steps) == pytest.approx(expected, abs=LIMIT)


@pytest.mark.parametrize("average_prev", [True, False])
def test_fedbioacc_step_by_step_with_either_previous_point(average_prev):
    """Against the recursion written out, client by client; three local steps, so that clients drift apart."""
    task, rounds = toys.scalar_bilevel(), 4
    problem, key = task.problem, jax.random.key(0)
    samples = [Sample(task.sample(task.data.client(k), key), key) for k in range(2)]
    psi = lambda k, x, y: problem.grad_lower(x, y, samples[k])
    phi = lambda k, x, y: Dense()(problem, [(x, y)], lambda j: samples[k])[0]
    alpha = lambda t: (1 + (t + 1)) ** (-1 / 3)
    x, y, nu, omega, old = (list(both) for both in zip(*[(*task.params, None, None, None)] * 2, strict=True))
    for t in range(3 * rounds):
        for k in range(2):
            nu_now, omega_now = phi(k, x[k], y[k]), psi(k, x[k], y[k])
            if old[k] is not None:
                keep = 1 - 0.5 * alpha(t - 1) ** 2
                nu_now = nu_now + keep * (nu[k] - phi(k, *old[k][:2]))
                omega_now = omega_now + keep * (omega[k] - psi(k, *old[k][:2]))
            nu[k], omega[k] = nu_now, omega_now
        own = list(x)
        if t % 3 == 2:
            x, nu = [sum(x) / 2] * 2, [sum(nu) / 2] * 2
        old = [((x if average_prev else own)[k], y[k]) for k in range(2)]
        x = [x[k] - 0.2 * alpha(t) * nu[k] for k in range(2)]
        y = [y[k] - 0.3 * alpha(t) * omega[k] for k in range(2)]
    settings = {"lr": 0.2, "lower_lr": 0.3, "delta": 1.0, "u": 1.0, "sigma2": 1.0, "c_nu": 0.5, "c_omega": 0.5}
    algorithm = make("fedbioacc", **settings, local_steps=3, average_prev=average_prev, hypergradient=Dense())
    result = simulate(algorithm, task, rounds=rounds, evaluate_every=None)
    assert np.asarray(result.server.x) == pytest.approx(np.asarray(x[0]), abs=1e-12)
    assert np.asarray(result.clients.y) == pytest.approx(np.stack(y), abs=1e-12)


def test_t2f_memory_of_the_recursion():
    algorithm = make("fedbioacc", **ACC)
    alpha = np.asarray(algorithm.alpha(np.arange(2000)))
    assert alpha[[0, 1999]] == pytest.approx([0.0793701, 0.0079357], abs=1e-7)
    kept = np.prod(1 - np.asarray(jax.vmap(lambda t: algorithm.forgetting_rate(1.0, t, True))(jnp.arange(1, 2000))))
    assert kept == pytest.approx(0.70918, abs=1e-5)


def test_t2f_first_batch_and_forgetting_decide_the_error():
    """RMSE of x over 40 seeds with gradient noise 0.5, I = 5, T = 2000, for three settings of the table."""
    task = noisy_bilevel(noise=0.5)
    settings = [
        make("fedbioacc", **ACC, local_steps=5, hypergradient=Dense()),
        make("fedbioacc", **ACC | {"c_nu": 16.0, "c_omega": 16.0}, local_steps=5, hypergradient=Dense()),
        make("fedbioacc", **ACC, local_steps=5, hypergradient=Dense(), first_batch_multiplier=256),
    ]
    runs = sweep(settings, task, range(40), rounds=400, evaluate_every=None, progress=False)
    error = np.stack([np.asarray(run.server.x)[:, 0] - 80 / 59 for run in runs.runs])
    squared = error**2
    rmse = np.sqrt(squared.mean(1))
    tolerance = 3 * squared.std(1) / np.sqrt(40) / (2 * rmse)  # three standard errors of the root
    published = np.array([0.581, 0.0165, 0.0416])
    assert np.all(np.abs(rmse - published) < tolerance + 3 * published / np.sqrt(80)), rmse
    assert rmse[0] > 10 * rmse[2] > 10 * rmse[1]


def noisy_bilevel(noise: float):
    """The T2 problem whose c and t are noisy rows: their means are exact, a draw of one row has this noise."""
    rows = []
    for A, B, c, t in zip((1.0, 3.0), (1.0, 1.0), (0.0, 2.0), (1.0, 3.0), strict=True):
        wave = np.concatenate([np.full(50, noise), np.full(50, -noise)])
        still = np.ones(100)
        order = np.random.default_rng(int(A)).permutation(100)
        rows.append((A * still, B * still, c + wave, t + wave[order]))

    from nestfed.core.settings import struct

    @struct
    class Noisy(toys.ScalarBilevel):
        def lower(self, x, y, batch, key):
            return super().lower(x, y, tuple(column.mean() for column in batch), key)

        def upper(self, x, y, batch, key):
            return super().upper(x, y, tuple(column.mean() for column in batch), key)

    start = (jnp.asarray(0.0), jnp.asarray(0.0))
    return toys.ShowX.create(Noisy(), Rows.from_clients(rows), start, batch_size=1)


# ---------------------------------------------------------------------------------------------- T3 global lower level


@pytest.mark.parametrize(("terms", "expected"), [(1, 2.0689655), (5, 2.1420165), (20, 2.1428571)])
def test_t3a_fednest_limits(terms, expected):
    algorithm = make("fednest", lr=0.1, lower_lr=0.2, neumann_lr=1 / 3, terms=terms)
    assert limit(algorithm, toys.scalar_bilevel("global"), 2000) == pytest.approx(expected, abs=LIMIT)
    f = 1 - (1 / 3) ** (terms + 1)
    assert f * 0.75 / (0.1 + 0.25 * f) == pytest.approx(expected, abs=LIMIT)


def test_t3a_fednest_random_truncation_has_the_mean_of_the_sum():
    algorithm = make("fednest", lr=0.02, lower_lr=0.2, neumann_lr=1 / 3, terms=5, truncation="random", lower_rounds=2)
    runs = sweep([algorithm], toys.scalar_bilevel("global"), range(24), rounds=4000, evaluate_every=10, progress=False)
    means = runs.history["x"][0, :, 200:].mean(1)
    f = 1 - (1 / 3) ** 5
    assert abs(means.mean() - f * 0.75 / (0.1 + 0.25 * f)) < 3 * means.std(ddof=1) / np.sqrt(24) + 0.01


SERVER = {"server_lr": 0.05, "server_lower_lr": 0.1, "server_z_lr": 0.1}


def test_t3b_simfbo_limit_and_first_states():
    algorithm = make("simfbo", lr=0.05, lower_lr=0.1, z_lr=0.1, **SERVER)
    task = toys.scalar_bilevel("global")
    states = [[float(v[0]) for v in run.server[:3]] for run in trace(algorithm, task, 2)]
    assert np.array(states) == pytest.approx(np.array([[0, 0.1, -0.2], [0.01, 0.18, -0.35]]), abs=TRACE)
    end = simulate(algorithm, task, rounds=4000, evaluate_every=None).server
    assert [float(v[0]) for v in end[:3]] == pytest.approx([2.1428571, 1.5714286, -0.2142857], abs=LIMIT)


def test_simfbo_with_an_optimiser_on_the_server():
    rates, task = {"lr": 0.05, "lower_lr": 0.1, "z_lr": 0.1, **SERVER}, toys.scalar_bilevel("global")
    plain = trace(make("simfbo", **rates), task, 3)
    same = trace(make("simfbo", **rates, optimizer=optax.sgd(SERVER["server_lr"])), task, 3)
    for one, other in zip(plain, same, strict=True):
        assert np.array(other.server[:3]) == pytest.approx(np.array(one.server[:3]), abs=1e-15)
    momentum = make("simfbo", **rates, optimizer=optax.sgd(0.02, momentum=0.6))
    assert abs(trace(momentum, task, 3)[-1].server.x - plain[-1].server.x) > 1e-4
    end = simulate(momentum, task, rounds=4000, evaluate_every=None).server
    assert [float(v[0]) for v in end[:3]] == pytest.approx([2.1428571, 1.5714286, -0.2142857], abs=LIMIT)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 1.9382644), (1e-3, 2.1426276)])
def test_t3b_local_steps_of_simfbo_shift_the_limit(rate, expected):
    local = (
        {"lr": 0.05, "lower_lr": 0.1, "z_lr": 0.1} if rate == 1.0 else dict.fromkeys(("lr", "lower_lr", "z_lr"), 1e-4)
    )
    algorithm = make("simfbo", **local, **SERVER, local_steps=4)
    assert limit(algorithm, toys.scalar_bilevel("global"), 4000) == pytest.approx(expected, abs=LIMIT)


def test_t3b_shrofbo_with_uneven_steps():
    algorithm = make("shrofbo", lr=1e-4, lower_lr=1e-4, z_lr=1e-4, **SERVER, local_steps=8)
    task = toys.scalar_bilevel("global", local_steps=[1, 8])
    assert limit(algorithm, task, 4000) == pytest.approx(2.1425893, abs=LIMIT)


def test_t3c_fedmbo_mean_limit():
    algorithm = make("fedmbo", lr=0.01, lower_lr=0.1, neumann_lr=1 / 3, terms=5, lower_rounds=5, local_steps=2)
    runs = sweep([algorithm], toys.scalar_bilevel("global"), range(24), rounds=6000, evaluate_every=20, progress=False)
    means = runs.history["x"][0, :, 150:].mean(1)
    assert abs(means.mean() - 2.1403302) < 3 * means.std(ddof=1) / np.sqrt(24)


def test_lfednest_is_biased_where_fednest_is_not():
    settings = {"lr": 0.1, "lower_lr": 0.2, "neumann_lr": 1 / 3, "terms": 20}
    task = toys.scalar_bilevel("global")
    # Inverses are not averaged: mean_k 1/A_k = 2/3 in place of 1 / mean A = 1/2, with the residuals of each client.
    closed = limit(make("lfednest", **settings), task, 2000)
    assert abs(closed - 15 / 7) > 0.1
    assert limit(make("fednest-sgd", **settings), task, 2000) == pytest.approx(15 / 7, abs=LIMIT)
