"""Diagnostics against closed forms, finite differences and numpy; T1 to T6 and T12 are entries of the specification."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from numpy.testing import assert_allclose

from nestfed import Rows, Task, UserError, evaluate, make, simulate, struct
from nestfed.problems import Bilevel, Compositional, SingleLevel
from nestfed.problems.hypergradients import Dense, Neumann
from nestfed.problems.robust import KL, ChiSquare, CVaR
from nestfed.problems.toys import Line, counterexample, quadratics, scalar_bilevel
from nestfed.verbs import diagnostics as d

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


@struct
class Spread(Compositional):
    """A composition of all parts: two inner values, an outer function of the batch, and an extra loss."""

    def inner(self, x, batch, key):
        inputs, targets = batch
        error = inputs @ x - targets
        return jnp.stack([jnp.mean(error), jnp.mean(error**2)])

    def outer(self, y, batch, key):
        return y[1] * jnp.cos(y[0]) + y[0] * jnp.mean(batch[1])

    def extra(self, x, batch, key):
        return jnp.mean(jnp.sin(batch[0] @ x))


def square_losses(x, batch, key):
    inputs, targets = batch
    return 0.5 * (inputs @ x - targets) ** 2


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
    at_zero = d.evaluate_at(task, d.hypergradients)
    assert_allclose(at_zero["gradient"], gradient, rtol=1e-12)
    assert_allclose(at_zero["gradients"], gradients, rtol=1e-12)
    assert_allclose(at_zero["lower_solutions"], lower_solutions, atol=1e-12)
    assert_allclose(d.evaluate_at(task, d.hypergradients, x=solution)["gradient"], [0], atol=1e-12)


def test_lipschitz_quotient_of_a_quadratic_value_function_is_its_curvature():
    for x in (0.0, 80 / 59):  # at the solution the gradient gives no direction
        quotient = d.evaluate_at(scalar_bilevel(), d.lipschitz_quotient, x=x)["lipschitz_quotient"]
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
    found = d.evaluate_at(task, together(d.hypergradients, lambda *client: {"neumann": neumann(*client)["gradient"]}))
    assert_allclose(found["lower_solutions"], [[0.57142857, 1.71428571]], atol=1e-8)
    assert_allclose(found["gradient"], [0.8755102, -0.75306122], atol=1e-8)
    assert_allclose(found["neumann"], [0.84497829, -0.70094171], atol=1e-8)


@pytest.mark.parametrize(("scope", "start"), [("local", [8.0, -6.0]), ("global", [2.0, -1.0])])
def test_hypergradient_on_rows_agrees_with_finite_differences(scope, start):
    task = ragged(RobustRidge(scope=scope), (jnp.zeros(2), jnp.zeros(2)))
    x = np.array([-2.0, -3.0])
    exact = d.evaluate_at(task, d.gradients, x=x, y=np.array(start))
    assert exact["lower_residuals"].max() < 1e-12
    assert_allclose(d.compute_finite_differences(task, x=x), exact["gradient"], atol=1e-9)

    def lower_gradient(y, inputs, targets):
        rest = inputs @ y - targets
        return np.exp(x) * y + (rest / np.sqrt(1 + rest**2)) @ inputs / len(targets)

    clients = zip(exact["lower_solutions"], ragged_rows(), strict=True)
    residuals = np.array([lower_gradient(y, *rows) for y, rows in clients])
    assert_allclose(residuals if scope == "local" else residuals.mean(0, keepdims=True), 0, atol=1e-12)


def test_single_level_on_rows_is_the_weighted_least_squares_of_numpy():
    task, x = ragged(LeastSquares(), jnp.zeros(2), weights="samples"), np.array([0.4, -0.7])
    found = d.evaluate_at(task, together(d.single_level, d.gradients), x=x)
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
    found = d.evaluate_at(task, d.single_level, x=0.8)
    assert_allclose(found["gradient_norm2"], 0, atol=1e-24)
    assert_allclose(found["gradient_diameter"], 1.6)


@pytest.mark.parametrize("scope", ["global", "local"])
def test_a_composition_on_rows_is_that_of_numpy_and_of_finite_differences(scope):
    task, x = ragged(Spread(scope=scope), jnp.zeros(2), weights="samples"), np.array([0.4, -0.7])
    weights = np.array(SIZES) / sum(SIZES)
    found = d.evaluate_at(task, together(d.compositional, d.gradients), x=x)
    errors = [a @ x - b for a, b in ragged_rows()]
    own = np.array([[error.mean(), (error**2).mean()] for error in errors])
    inner = np.tile(weights @ own, (3, 1)) if scope == "global" else own
    outer = inner[:, 1] * np.cos(inner[:, 0]) + inner[:, 0] * [b.mean() for _, b in ragged_rows()]
    extra = [np.sin(a @ x).mean() for a, _ in ragged_rows()]
    assert_allclose(found["objective"], weights @ (outer + extra), rtol=1e-13)
    assert_allclose(d.compute_finite_differences(task, x=x), found["gradient"], atol=1e-9)
    assert_allclose(found["gradient_norm2"], np.sum(found["gradient"] ** 2), rtol=1e-13)
    assert_allclose(weights @ found["gradients"], found["gradient"], rtol=1e-13)
    distances = np.linalg.norm(found["gradients"] - found["gradient"], axis=1)
    assert_allclose(found["gradient_deviation"], distances.max(), rtol=1e-13)
    if scope == "global":
        assert_allclose(found["inner_deviation"], np.linalg.norm(own - inner, axis=1).max(), rtol=1e-13)
    else:
        assert "inner_deviation" not in found


def test_the_counterexample_has_another_gradient_for_each_scope():
    slope = lambda y: y / np.sqrt(y**2 + 4)
    found = d.evaluate_at(counterexample(), together(d.compositional, d.gradients))
    assert_allclose(found["gradients"][:, 0], np.array([4, -2]) * slope(0.5), rtol=1e-14)
    assert_allclose(found["inner_deviation"], 2.5)  # -2 and 3 around 0.5
    local = Task.create(Line(scope="local"), counterexample().data, 0.5)
    assert_allclose(d.evaluate_at(local, d.gradients)["gradients"][:, 0], [4 * slope(-2), -2 * slope(3)], rtol=1e-14)
    # T1e: the root of the local scope's gradient
    assert_allclose(d.evaluate_at(local, d.objective, x=1.1686673)["gradient_norm2"], 0, atol=1e-13)


def test_robust_losses_that_overflow_plain_numbers_have_exact_gradients():
    """Exponents of some thousand; the largest weight allowed is far below what is needed, and must not matter here."""
    problem = KL(losses=square_losses, price=0.002, largest_weight=0.1)
    task, x = ragged(problem, jnp.zeros(2), weights="samples"), np.array([0.4, -0.7])
    inputs, targets = (np.concatenate(column) for column in zip(*ragged_rows(), strict=True))
    losses = 0.5 * (inputs @ x - targets) ** 2
    weights = scipy.special.softmax(losses / 0.002)
    found = d.evaluate_at(task, together(d.compositional, d.gradients, d.worst_case), x=x)
    assert (losses / 0.002).max() > 750
    mean_log = lambda z: scipy.special.logsumexp(z / 0.002) - np.log(len(z))
    assert_allclose(found["objective"], 0.002 * mean_log(losses), rtol=1e-12)
    assert_allclose(found["gradient"], weights @ (inputs * (inputs @ x - targets)[:, None]), rtol=1e-12)
    assert_allclose(found["effective_share"], 1 / (losses.size * np.sum(weights**2)), rtol=1e-10)
    own = [mean_log(0.5 * (a @ x - b) ** 2) for a, b in ragged_rows()]
    assert_allclose(found["inner_log_deviation"], np.abs(own - mean_log(losses)).max(), rtol=1e-12)
    assert "potential" not in found


# T6: the weights of losses 0, 1, 2. With price 0.5 the first is negative.
@pytest.mark.parametrize(
    ("price", "share", "negative"), [(2, 1 / (1 + 1 / 6), 0), (1, 1 / (1 + 2 / 3), 0), (0.5, 3 / 11, 1 / 3)]
)
def test_chi_square_weights_are_those_of_T6(price, share, negative):
    constant = lambda x, batch, key: batch + 0 * x
    data = Rows.from_clients([np.array([2.0]), np.array([0.0, 1.0])])
    task = Task.create(ChiSquare(losses=constant, price=price), data, jnp.zeros(()), weights="samples")
    found = d.evaluate_at(task, d.worst_case)
    assert_allclose([found["effective_share"], found["negative_share"]], [share, negative], rtol=1e-13)


def test_cvar_looks_at_the_tail():
    constant = lambda x, batch, key: batch + 0 * x
    problem = CVaR(losses=constant, tail=0.25, width=1e-3)
    task = Task.create(
        problem, Rows.from_clients([np.arange(5.0), np.arange(5.0, 8.0)]), problem.start(jnp.zeros(()), 5.5)
    )
    weighted = Task.create(problem, task.data, problem.start(jnp.zeros(()), 5.5), weights="samples")
    found = d.evaluate_at(weighted, d.worst_case)  # 6 and 7 of eight rows
    assert_allclose([found["effective_share"], found["tail_mass"]], [0.25, 1], rtol=1e-9)
    # With clients of equal weight the same two rows are a third of all mass.
    assert_allclose(d.evaluate_at(task, d.worst_case)["tail_mass"], (1 / 3) / 0.25, rtol=1e-9)


# ------------------------------------------------------------------------------------------------- in a run


@pytest.mark.parametrize("order", ["consistent", "printed"])
def test_the_order_of_feddro_shows_in_its_two_inner_errors(order):
    """T1c with beta = 0. The printed order follows mean_k g_k(x_k) and misses the jump of the average."""
    algorithm = make("feddro", lr=0.04, beta=0.0, order=order, local_steps=2)
    result = simulate(algorithm, counterexample(), rounds=2, metrics=d.compositional, unsynced=True)
    history = result.history
    gap = 0.0 if order == "consistent" else 0.48239765 - 0.32397651
    assert_allclose(history["inner_error"][1], gap**2, atol=1e-8)
    assert_allclose(history["inner_error_local"][1], 0, atol=1e-30)
    assert_allclose(history["inner_error_local"][2], gap**2, atol=1e-8)  # what the first round left
    assert_allclose(history["potential"], history["objective"] + history["inner_error"], rtol=1e-15)
    x = history["x"]
    assert_allclose(history["objective"], np.sqrt(x**2 + 4), rtol=1e-15)
    assert_allclose(history["gradient_norm2"], x**2 / (x**2 + 4), rtol=1e-13)
    # One step from 0.5 with the common slope: the clients part by 6 of the slope.
    assert_allclose(history["consensus_x"][1], (0.04 * 3 * 0.5 / np.sqrt(4.25)) ** 2, rtol=1e-12)


def test_inner_errors_of_ds_feddro_are_those_of_its_trace():
    algorithm = make("ds-feddro", lr=0.04, beta=0.1, local_steps=2)
    history = simulate(algorithm, counterexample(), rounds=1, metrics=d.compositional, unsynced=True).history
    slope = 0.5 / np.sqrt(4.25)
    x = 0.5 - 0.04 * slope * np.array([4, -2])  # after the first step
    inner = np.array([4, -2]) * x + np.array([-4, 4])
    assert_allclose(history["inner_error_local"][1], (0.9 * 0.5 + 0.1 * inner.mean() - inner.mean()) ** 2, rtol=1e-12)
    assert_allclose(history["inner_error"][1], (0.47504494 - 0.49496443) ** 2, rtol=1e-5)


def test_a_scaled_estimate_is_reported_by_its_logarithm():
    task = ragged(KL(losses=square_losses), jnp.zeros(2), weights="samples")
    result = simulate(
        make("feddro", lr=0.01, beta=1.0), task, rounds=3, metrics=d.compositional, unsynced=True, evaluate_every=None
    )
    found = {name: values[-1] for name, values in result.history.items()}
    log_mean = [np.exp(0.5 * (a @ np.asarray(result.server.x) - b) ** 2).sum() for a, b in ragged_rows()]
    exact = np.log(sum(log_mean) / sum(SIZES))
    assert_allclose(found["inner_log_error"], (float(result.server.y.log()[0]) - exact) ** 2, rtol=1e-9)
    assert found["inner_log_error_local"] > 0 and "inner_error" not in found


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
        d.evaluate_at(quadratics(), d.consensus)
    with pytest.raises(UserError, match="alpha was given; the variables are x"):
        d.evaluate_at(quadratics(), d.objective, alpha=1.0)
    with pytest.raises(UserError, match="this one is compositional"):
        d.evaluate_at(counterexample(), d.curvature)
    with pytest.raises(UserError, match="of KL, ChiSquare and CVaR problems; Line was given"):
        d.evaluate_at(counterexample(), d.worst_case)


# ------------------------------------------------------------------------------------------------- curvature


@jax.jit
def extremes(matrix):
    return d.find_extreme_eigenvalues(lambda v: matrix @ v, matrix[0], jax.random.key(0))


# The largest matrix has more dimensions than Lanczos has steps. Of multiple eigenvalues a Krylov space sees one.
@pytest.mark.parametrize("spectrum", [np.linspace(-1, 3, 5), np.array([-1.0, 2, 2, 2, 2]), np.linspace(-1, 3, 60) ** 3])
def test_lanczos_finds_the_extremes_that_numpy_finds(spectrum):
    vectors, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(spectrum.size, spectrum.size)))
    matrix = vectors * spectrum @ vectors.T
    assert_allclose(extremes(matrix), np.linalg.eigvalsh(matrix)[[0, -1]], rtol=1e-10)


def test_curvature_is_that_of_the_dense_hessians():
    values = d.evaluate_at(ragged(LeastSquares(), jnp.zeros(2)), d.curvature)
    spectra = [np.linalg.eigvalsh(a.T @ a / len(a)) for a, _ in ragged_rows()]
    assert_allclose(values["smallest_curvature"], np.min(spectra), rtol=1e-9)
    assert_allclose(values["largest_curvature"], np.max(spectra), rtol=1e-9)
    lower = d.evaluate_at(scalar_bilevel(), d.curvature)
    assert_allclose([lower["smallest_curvature"], lower["largest_curvature"]], [1, 3], rtol=1e-12)


# ------------------------------------------------------------------------------------------------- estimators


def test_bias_of_a_neumann_series_is_its_closed_form():
    task, x, terms, lr = scalar_bilevel(), jnp.array([0.5]), 3, 0.2
    exact = d.evaluate_at(task, d.hypergradients, x=x)
    for client, (A, t) in enumerate([(1, 1), (3, 3)]):
        y = jnp.asarray(exact["lower_solutions"][client])
        neumann = lambda problem, draw: Neumann(terms=terms, lr=lr)(problem, [(x, y)], draw)[0]
        error = d.measure_estimator_error(task, neumann, exact["gradients"][client], client=client, repeats=2)
        assert_allclose(error.bias, (1 - lr * A) ** (terms + 1) / A * abs(y[0] - t), rtol=1e-10)
        assert_allclose([error.bias_error, error.variance], 0, atol=1e-12)


def test_a_stochastic_gradient_has_no_bias_and_the_variance_of_its_rows():
    task, x, client = ragged(LeastSquares(), jnp.zeros(2), batch_size=4), jnp.array([0.4, -0.7]), 1
    inputs, targets = ragged_rows()[client]
    rows = inputs * (inputs @ np.asarray(x) - targets)[:, None]
    variance = np.sum((rows - rows.mean(0)) ** 2) / len(rows) / 4
    gradient = lambda problem, draw: problem.gradient(x, draw(0))
    error = d.measure_estimator_error(task, gradient, rows.mean(0), client=client, repeats=4000)
    assert_allclose(error.variance, variance, rtol=0.1)
    assert_allclose(error.bias_error, np.sqrt(variance / 4000), rtol=0.05)
    assert error.bias < 3 * error.bias_error


@pytest.mark.parametrize("batch", [1, 4])
def test_the_bias_of_a_plug_in_falls_with_the_batch(batch):
    """Chi-square: f(mean of a batch) is off by Var / (2 price batch) on average, in closed form."""
    task, x = ragged(ChiSquare(losses=square_losses, price=0.5), jnp.zeros(2), batch_size=batch), jnp.array([0.4, -0.7])
    losses = np.asarray(square_losses(np.asarray(x), ragged_rows()[1], None))
    exact = -(losses.mean() ** 2) / (2 * 0.5)
    plug_in = lambda problem, draw: problem.outer_flat(problem.inner_value(x, draw(0)), draw(0))
    error = d.measure_estimator_error(task, plug_in, exact, client=1, repeats=20000)
    expected = losses.var() / (2 * 0.5 * batch)
    assert abs(error.bias - expected) < 3 * error.bias_error
    assert error.bias > 10 * error.bias_error


def test_the_bias_of_kl_plugged_into_one_batch_is_about_inverse_to_its_size():
    """To first order the logarithm of a batch mean is off by -Var(g) / (2 g^2 batch)."""
    x, price = jnp.array([0.4, -0.7]), 2.0
    z = np.asarray(square_losses(np.asarray(x), ragged_rows()[1], None)) / price
    exact, relative = price * np.log(np.exp(z).mean()), np.exp(z).var() / np.exp(z).mean() ** 2
    plug_in = lambda problem, draw: problem.outer_flat(problem.inner_value(x, draw(0)), draw(0))
    biases = []
    for batch in (8, 32):
        task = ragged(KL(losses=square_losses, price=price), jnp.zeros(2), batch_size=batch)
        error = d.measure_estimator_error(task, plug_in, exact, client=1, repeats=20000)
        assert_allclose(error.bias, price * relative / (2 * batch), atol=3 * error.bias_error, rtol=1 / batch)
        biases.append(error.bias)
    assert_allclose(biases[0] / biases[1], 4, rtol=0.3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_variance_of_the_estimate_of_feddro_as_a_function_of_beta(beta):
    """(1 - beta) (y - g(x; Z)) + g(x'; Z): one batch at two points cancels noise, the more the smaller beta is."""
    task, client = ragged(ChiSquare(losses=square_losses), jnp.zeros(2), batch_size=2), 1
    before, after = jnp.array([0.4, -0.7]), jnp.array([0.42, -0.69])
    old, new = (np.asarray(square_losses(np.asarray(x), ragged_rows()[client], None)) for x in (before, after))

    def estimate(problem, draw):
        y, inner = old.mean(), lambda x: problem.inner_value(x, draw(0))
        return (1 - beta) * (y - inner(before)) + inner(after)

    error = d.measure_estimator_error(task, estimate, new.mean(), client=client, repeats=4000)
    assert error.bias < 3 * error.bias_error
    assert_allclose(error.variance, np.var(new - (1 - beta) * old) / 2, rtol=0.1)
