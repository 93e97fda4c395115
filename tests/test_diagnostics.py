"""Diagnostics against closed forms, finite differences and numpy; T2, T3, T4, T12 are entries of the specification."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from nestfed import Rows, Task, UserError, evaluate, make, simulate, struct
from nestfed import diagnostics as d
from nestfed.hypergradients import Dense, Neumann
from nestfed.problems import Bilevel, SingleLevel
from nestfed.tasks.toys import quadratics, scalar_bilevel

SIZES = (2, 5, 3)  # ragged, and not in order of size: results must come back in the order of the clients


@struct
class LeastSquares(SingleLevel):
    def loss(self, x, batch, key):
        inputs, targets = batch
        return 0.5 * jnp.mean((inputs @ x - targets) ** 2)


@struct
class RobustRidge(Bilevel):
    """A lower problem on which plain Newton steps from afar diverge: x are the logarithms of ridge weights."""

    def lower(self, x, y, batch, key):
        inputs, targets = batch
        return jnp.mean(jnp.sqrt(1 + (inputs @ y - targets) ** 2)) + 0.5 * jnp.sum(jnp.exp(x) * y**2)

    def upper(self, x, y, batch, key):
        inputs, targets = batch
        return 0.5 * jnp.mean((inputs @ y - targets) ** 2) + 0.05 * jnp.sum(x**2)


def ragged_rows():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 2)) + n / 5, np.sign(rng.normal(size=n))) for n in SIZES]


def ragged(problem, params, **options):
    return Task.create(problem, Rows.from_clients(ragged_rows()), params, **options)


def together(*programs):
    """Several diagnostics as one: compiling takes most of the time of these tests."""
    return lambda *client: {name: value for program in programs for name, value in program(*client).items()}


# ------------------------------------------------------------------------------------------------- exact values


# T2a and T3: x of the solution; at zero the gradient of all and per client, and the lower solutions
@pytest.mark.parametrize(
    ("scope", "solution", "gradient", "gradients", "lower_solutions"),
    [
        ("local", 80 / 59, [-8 / 9], [[-1], [-7 / 9]], [[0], [2 / 3]]),
        ("global", 15 / 7, [-0.75], [[-0.25], [-1.25]], [[0.5], [0.5]]),
    ],
)
def test_scalar_bilevel_has_its_closed_forms(scope, solution, gradient, gradients, lower_solutions):
    task = scalar_bilevel(scope)
    at_zero = d.measure(task, d.hypergradients)
    assert_allclose(at_zero["gradient"], gradient, rtol=1e-12)
    assert_allclose(at_zero["gradients"], gradients, rtol=1e-12)
    assert_allclose(at_zero["lower_solutions"], lower_solutions, atol=1e-12)
    assert_allclose(d.measure(task, d.hypergradients, x=solution)["gradient"], [0], atol=1e-12)


def test_lipschitz_quotient_of_a_quadratic_value_function_is_its_curvature():
    for x in (0.0, 80 / 59):  # at the solution the gradient gives no direction
        quotient = d.measure(scalar_bilevel(), d.lipschitz_quotient, x=x)["lipschitz_quotient"]
        assert_allclose(quotient, 5 / 9 + 0.1, rtol=1e-9)


def test_vector_bilevel_and_its_neumann_versions_are_those_of_T4():
    @struct
    class Vector(Bilevel):
        def lower(self, x, y, batch, key):
            A, B, c, _ = batch
            return 0.5 * y @ A @ y - y @ (B @ x + c)

        def upper(self, x, y, batch, key):
            return 0.5 * jnp.sum((y - batch[3]) ** 2) + 0.05 * jnp.sum(x**2)

    constants = ([[2, 0.5], [0.5, 1]], [[1.0, 0], [1, -1]], [1.0, 0], [0.0, 1])
    data = Rows.from_clients(constants=tuple(jnp.array([c]) for c in constants))
    task = Task.create(Vector(), data, (jnp.array([1.0, -1.0]), jnp.zeros(2)))
    neumann = functools.partial(d.hypergradients, estimator=Neumann(terms=5, lr=0.4))
    found = d.measure(task, together(d.hypergradients, lambda *client: {"neumann": neumann(*client)["gradient"]}))
    assert_allclose(found["lower_solutions"], [[0.57142857, 1.71428571]], atol=1e-8)
    assert_allclose(found["gradient"], [0.8755102, -0.75306122], atol=1e-8)
    assert_allclose(found["neumann"], [0.84497829, -0.70094171], atol=1e-8)


@pytest.mark.parametrize(("scope", "start"), [("local", [8.0, -6.0]), ("global", [2.0, -1.0])])
def test_hypergradient_on_rows_agrees_with_finite_differences(scope, start):
    task = ragged(RobustRidge(scope=scope), (jnp.zeros(2), jnp.zeros(2)))
    x = np.array([-2.0, -3.0])
    exact = d.measure(task, d.gradients, x=x, y=np.array(start))
    assert exact["lower_residuals"].max() < 1e-12
    assert_allclose(d.finite_differences(task, x=x), exact["gradient"], atol=1e-9)

    def lower_gradient(y, inputs, targets):
        rest = inputs @ y - targets
        return np.exp(x) * y + (rest / np.sqrt(1 + rest**2)) @ inputs / len(targets)

    clients = zip(exact["lower_solutions"], ragged_rows(), strict=True)
    residuals = np.array([lower_gradient(y, *rows) for y, rows in clients])
    assert_allclose(residuals if scope == "local" else residuals.mean(0, keepdims=True), 0, atol=1e-12)


def test_single_level_on_rows_is_the_weighted_least_squares_of_numpy():
    task, x = ragged(LeastSquares(), jnp.zeros(2), weights="samples"), np.array([0.4, -0.7])
    found = d.measure(task, together(d.single_level, d.gradients), x=x)
    gradients = np.array([a.T @ (a @ x - b) / len(b) for a, b in ragged_rows()])
    weights = np.array(SIZES) / sum(SIZES)
    gradient = weights @ gradients
    assert_allclose(found["objective"], sum(np.sum((a @ x - b) ** 2) for a, b in ragged_rows()) / 2 / sum(SIZES))
    assert_allclose(found["gradient_norm2"], gradient @ gradient)
    assert_allclose(found["gradient_deviation"], np.linalg.norm(gradients - gradient, axis=1).max())
    distances = np.linalg.norm(gradients[:, None] - gradients[None], axis=2)
    assert_allclose(found["gradient_diameter"], distances.max())
    assert_allclose(found["gradient"], gradient)
    assert_allclose(found["gradients"], gradients)


def test_a_client_of_weight_zero_does_not_count():
    task = quadratics((1.0, 4.0, 9.0), (0.0, 1.0, 50.0), weights=(1, 1, 0))
    found = d.measure(task, d.single_level, x=0.8)
    assert_allclose(found["gradient_norm2"], 0, atol=1e-24)
    assert_allclose(found["gradient_diameter"], 1.6)


# ------------------------------------------------------------------------------------------------- in a run


def test_a_run_of_fedavg_reports_the_exact_gradient_and_the_drift_of_T12():
    result = simulate(
        make("fedavg", lr=0.1, local_steps=5), quadratics(), rounds=60, metrics=d.single_level, unsynced=True
    )
    history, x = result.history, result.server.x[0]
    assert_allclose(history["gradient_norm2"][0], 4)  # mean of 1 (0 - 0) and 4 (0 - 1), squared
    assert_allclose(history["objective"][0], 1)
    assert_allclose(x, 0.6925023, atol=1e-7)
    assert_allclose(history["gradient_norm2"][-1], (2.5 * (x - 0.8)) ** 2, rtol=1e-12)
    drifted = np.array([x * 0.9**4, 1 + (x - 1) * 0.6**4])  # four steps from the fixed point
    assert_allclose(history["consensus_x"][-1], drifted.var(), rtol=1e-6)
    assert history["consensus_x"][0] == 0


def test_the_end_of_a_run_of_fedbioacc_shows_errors_of_both_momenta():
    algorithm, task = make("fedbioacc", hypergradient=Dense(), local_steps=2), scalar_bilevel()

    def after(rounds):
        run = simulate(algorithm, task, rounds=rounds, unsynced=True).run
        return evaluate(algorithm, task, run, metrics=d.bilevel)

    # T2e: x_k and nu_k after three steps; nu, y_k and x after four, which is two rounds.
    x, nu = np.array([0.20639041, 0.20438693]), np.array([-0.95353515, -0.92173192])
    nu_after, y_after, x_after = -0.91325755, np.array([0.02560338, 0.42088872]), 0.25879629
    hypergradients = np.array([x[0] - 1, (x[1] + 2) / 9 - 1]) + 0.1 * x
    solutions = np.array([x_after, (x_after + 2) / 3])
    found = after(2)
    assert_allclose(found["consensus_x"], x.var(), rtol=1e-4)
    assert_allclose(found["consensus_nu"], nu.var(), rtol=1e-4)
    assert_allclose(found["nu_error"], (nu_after - hypergradients.mean()) ** 2, rtol=1e-5)
    assert_allclose(found["lower_error"], np.mean((y_after - solutions) ** 2), rtol=1e-5)
    assert_allclose(found["lower_solution_diameter"], np.ptp(solutions), rtol=1e-6)
    assert_allclose(found["gradient_norm2"], ((5 / 9 + 0.1) * x_after - 8 / 9) ** 2, rtol=1e-6)
    assert found["lower_residual"] < 1e-12

    # Without noise omega is exact until a correction is made at the averaged x instead of the client's own: in the
    # first step of the third round. Each of that round's two steps forgets a little of the difference.
    assert_allclose(found["omega_error"], 0, atol=1e-30)
    kept = np.prod([1 - (0.1 / (1 + step) ** (1 / 3)) ** 2 for step in (4, 5)])
    assert_allclose(after(3)["omega_error"], kept**2 * x.var(), rtol=1e-4)


def test_the_end_of_a_run_of_simfbo_shows_the_error_of_z():
    rates = {"lr": 0.05, "lower_lr": 0.1, "z_lr": 0.1, "server_lr": 0.05, "server_lower_lr": 0.1, "server_z_lr": 0.1}
    result = simulate(make("simfbo", **rates), scalar_bilevel("global"), rounds=2)
    measured = evaluate(result.algorithm, result.task, result.run, metrics=d.bilevel)
    x, y, z = 0.01, 0.18, -0.35  # T3b
    solution = (x + 1) / 2
    assert_allclose(measured["z_error"], abs(z - (solution - 2) / 2), rtol=1e-10)
    assert_allclose(measured["lower_error"], (y - solution) ** 2, rtol=1e-10)
    assert_allclose(measured["gradient_norm2"], (0.35 * x - 0.75) ** 2, rtol=1e-10)
    assert "lower_solution_diameter" not in measured


def test_what_a_diagnostic_cannot_do_is_said():
    with pytest.raises(UserError, match="unsynced=True"):
        d.measure(quadratics(), d.consensus)
    with pytest.raises(UserError, match="alpha was given; the variables are x"):
        d.measure(quadratics(), d.objective, alpha=1.0)


# ------------------------------------------------------------------------------------------------- curvature


@jax.jit
def extremes(matrix):
    return d.extreme_eigenvalues(lambda v: matrix @ v, matrix[0], jax.random.key(0))


# The largest matrix has more dimensions than Lanczos has steps. Of multiple eigenvalues a Krylov space sees one.
@pytest.mark.parametrize("spectrum", [np.linspace(-1, 3, 5), np.array([-1.0, 2, 2, 2, 2]), np.linspace(-1, 3, 60) ** 3])
def test_lanczos_finds_the_extremes_that_numpy_finds(spectrum):
    vectors, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(spectrum.size, spectrum.size)))
    matrix = vectors * spectrum @ vectors.T
    assert_allclose(extremes(matrix), np.linalg.eigvalsh(matrix)[[0, -1]], rtol=1e-10)


def test_curvature_is_that_of_the_dense_hessians():
    values = d.measure(ragged(LeastSquares(), jnp.zeros(2)), d.curvature)
    spectra = [np.linalg.eigvalsh(a.T @ a / len(a)) for a, _ in ragged_rows()]
    assert_allclose(values["smallest_curvature"], np.min(spectra), rtol=1e-9)
    assert_allclose(values["largest_curvature"], np.max(spectra), rtol=1e-9)
    lower = d.measure(scalar_bilevel(), d.curvature)
    assert_allclose([lower["smallest_curvature"], lower["largest_curvature"]], [1, 3], rtol=1e-12)


# ------------------------------------------------------------------------------------------------- estimators


def test_bias_of_a_neumann_series_is_its_closed_form():
    task, x, terms, lr = scalar_bilevel(), jnp.array([0.5]), 3, 0.2
    exact = d.measure(task, d.hypergradients, x=x)
    for client, (A, t) in enumerate([(1, 1), (3, 3)]):
        y = jnp.asarray(exact["lower_solutions"][client])
        neumann = lambda problem, draw: Neumann(terms=terms, lr=lr)(problem, [(x, y)], draw)[0]
        error = d.estimator_error(task, neumann, exact["gradients"][client], client=client, repeats=2)
        assert_allclose(error.bias, (1 - lr * A) ** (terms + 1) / A * abs(y[0] - t), rtol=1e-10)
        assert_allclose([error.bias_error, error.variance], 0, atol=1e-12)


def test_a_stochastic_gradient_has_no_bias_and_the_variance_of_its_rows():
    task, x, client = ragged(LeastSquares(), jnp.zeros(2), batch_size=4), jnp.array([0.4, -0.7]), 1
    inputs, targets = ragged_rows()[client]
    rows = inputs * (inputs @ np.asarray(x) - targets)[:, None]
    variance = np.sum((rows - rows.mean(0)) ** 2) / len(rows) / 4
    gradient = lambda problem, draw: problem.gradient(x, draw(0))
    error = d.estimator_error(task, gradient, rows.mean(0), client=client, repeats=4000)
    assert_allclose(error.variance, variance, rtol=0.1)
    assert_allclose(error.bias_error, np.sqrt(variance / 4000), rtol=0.05)
    assert error.bias < 3 * error.bias_error
