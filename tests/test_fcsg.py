"""FCSG, FCSG-M and Acc-FCSG-M on problems with known answers (T8), their theory settings, BSGD and BSpiderBoost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nestfed import Rows, Task, make, simulate, struct
from nestfed.algorithms.fcsg import FCSG, FCSGM, AccFCSGM
from nestfed.problems import Conditional


@struct
class Line(Conditional):
    """g = (xi + eta) x, f(y) = y^2 / 2 - y, xi drawn from the client's two numbers, eta ~ N(0, noise^2)."""

    noise: float = 0.0

    def sample_outer(self, data, key, count):
        return jax.random.choice(key, data.constants, (count,))

    def sample_inner(self, data, xi, key, count):
        return self.noise * jax.random.normal(key, (count,))

    def inner(self, x, xi, eta, key):
        return ((xi + eta) * x)[None]

    def outer(self, y, xi, key):
        return jnp.sum(0.5 * y**2 - y)


def deterministic():
    """T8c: client gradients x - 1 and 4 x - 2."""
    return Task.create(Line(), Rows.from_clients(constants=jnp.array([[1.0, 1.0], [2.0, 2.0]])), jnp.asarray(0.0))


def noisy(inner_samples):
    """T8a: both clients draw xi from {1, 2}; the solution is 0.6."""
    data = Rows.from_clients(constants=jnp.array([[1.0, 2.0], [1.0, 2.0]]))
    return Task.create(Line(noise=1.0, inner_samples=inner_samples), data, jnp.asarray(0.0), batch_size=8)


def final(algorithm, task, rounds, **options):
    return float(simulate(algorithm, task, rounds=rounds, evaluate_every=None, progress=False, **options).server.x[0])


MOMENTUM = {"lr": 0.1, "beta": 0.5, "local_steps": 2}
CASES = [
    (FCSG(lr=0.1, local_steps=2), (0.255, 0.404175), 0.6144578),
    (FCSGM(**MOMENTUM), (0.2775, 0.46058438), 0.6064114),
    (AccFCSGM(**MOMENTUM), (0.255, 0.4053), 0.6081356),
    (AccFCSGM(**MOMENTUM, prev="mean"), (0.255, 0.40155), 0.6132530),
]


@pytest.mark.parametrize(("algorithm", "first", "limit"), CASES, ids=["fcsg", "fcsg-m", "acc local", "acc mean"])
def test_t8c_traces_and_limits(algorithm, first, limit):
    task = deterministic()
    assert [final(algorithm, task, rounds) for rounds in (1, 2)] == pytest.approx(first, abs=1e-8)
    assert final(algorithm, task, 400) == pytest.approx(limit, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "limit"),
    [
        ("fcsg", {}, 0.6109810),
        ("fcsg-m", {"beta": 0.1}, 0.6032795),
        ("acc-fcsg-m", {"beta": 0.1}, 0.6040147),
        ("acc-fcsg-m", {"beta": 0.1, "prev": "mean"}, 0.6105467),
    ],
)
def test_t8c_small_steps(name, settings, limit):
    assert final(make(name, lr=0.01, local_steps=10, **settings), deterministic(), 600) == pytest.approx(
        limit, abs=1e-6
    )


@pytest.mark.parametrize("name", ["fcsg", "fcsg-m", "acc-fcsg-m", "bsgd", "bspiderboost"])
def test_without_drift_all_reach_the_solution(name):
    settings = {"local_steps": 3, "refresh_batches": 1} if name == "bspiderboost" else {"local_steps": 1}
    assert final(make(name, lr=0.1, **settings), deterministic(), 400) == pytest.approx(0.6, abs=1e-9)


@pytest.mark.parametrize(("inner_samples", "limit"), [(1, 0.4285714), (10, 0.5769231)])
@pytest.mark.parametrize("name", ["fcsg", "acc-fcsg-m"])
def test_t8a_the_bias_is_that_of_the_inner_samples(name, inner_samples, limit):
    momentum = {"beta": 0.1, "first_batches": 32} if "-m" in name else {}
    found = simulate(
        make(name, lr=0.02, local_steps=5, **momentum), noisy(inner_samples), rounds=4000, evaluate_every=20,
        progress=False,
        metrics=lambda task, server, client, data, fed: {"x": server.x[0]},
    )  # fmt: skip
    late = found.history["x"][100:]
    # Values 100 steps apart are nearly independent: three standard errors of their mean.
    assert np.mean(late) == pytest.approx(limit, abs=3 * np.std(late) / len(late) ** 0.5)


def test_first_estimate_is_the_mean_of_its_batches():
    """With beta tiny and one step, u is the first estimate: its spread falls with the number of batches."""
    spread = lambda batches: np.std(
        [final(make("fcsg-m", lr=1.0, beta=1e-9, first_batches=batches), noisy(1), 1, seed=seed) for seed in range(30)]
    )
    # At x = 0 the gradient is -(xi + eta): variance 1/4 + 1 per outer sample, 8 of them at each of 2 clients.
    assert spread(1) == pytest.approx((1.25 / 16) ** 0.5, rel=0.45)
    assert spread(16) == pytest.approx((1.25 / 16 / 16) ** 0.5, rel=0.45)


def test_theory_settings():
    plain = FCSG.theory(clients=4, steps=40000, smoothness=2.0)
    assert plain.lr == pytest.approx(0.01 / 12) and plain.local_steps == round((40000 / 64) ** 0.25)
    momentum = FCSGM.theory(clients=4, steps=40000, smoothness=2.0)
    assert (momentum.lr, momentum.local_steps) == (plain.lr, plain.local_steps)
    assert momentum.beta == pytest.approx(5 * 2.0 * plain.lr)
    # Corollary 4.8: lr = N^(2/3) / (12 S_F T^(1/3)), beta = 5 N^(1/3) / (24 T^(2/3) b), B = T^(1/3) / N^(2/3).
    accelerated = AccFCSGM.theory(clients=8, steps=8**5, smoothness=0.5, batch=2)
    assert accelerated.local_steps == 8 and accelerated.lr == pytest.approx(4 / (12 * 0.5 * 32))
    assert accelerated.beta == pytest.approx(5 * 2 / (24 * 1024 * 2))
    assert accelerated.first_batches == 4
