"""FedDRO, DS-FedDRO and FedAvg-CO: the counterexample's closed forms (T1), costs, server optimisers, projections.

Traces to 1e-8 and limits to 1e-5, as the specification asks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import brentq

from nestfed import Diverged, PowerDecay, Rows, Sample, Task, make, simulate, struct, sweep
from nestfed.problems import Compositional
from nestfed.problems.robust import KL
from nestfed.problems.toys import Line, counterexample, quadratics
from nestfed.verbs.cost import measure

TRACE, LIMIT = 1e-8, 1e-5
LONG = 30_000  # rounds: at a step size of 0.001 the distance to the limit shrinks by e^-0.001 a round


def runs(name, rounds, changes, **settings):
    """(x, y) at the end of runs with these changes of settings, side by side; y is None for methods without one."""
    algorithms = [make(name, **{"local_steps": 2} | settings | change) for change in changes]
    done = sweep(algorithms, counterexample(), rounds=rounds, evaluate_every=None).runs
    ends = [(float(run.server.x[0, 0]), getattr(run.server, "y", None)) for run in done]
    return [(x, None if y is None else float(y[0, 0])) for x, y in ends]


def places(*given):
    return [x for x, _ in runs(*given[:-1], **given[-1])]


def slope(y):
    return y / np.sqrt(y**2 + 4)


# ------------------------------------------------------------------------------------------------- T1a, T1b FedAvg-CO

RATES = (0.04, 0.02, 0.01, 0.001)
FEDAVG_CO = {
    "fedavg-co-1": [
        (0.67161175, 0.8135438, 0.92219202, 1.1913324), (0.58799067, 0.66936246, 0.74314774, 1.1791643),
        (0.54447909, 0.58741845, 0.62868338, 1.1737281), (0.50448823, 0.5089621, 0.51342148, 1.1691576),
    ],
    "fedavg-co-2": [
        (0.58208714, 0.65775478, 0.72649461, 1.1174209), (0.54057436, 0.57952669, 0.61678893, 1.0858365),
        (0.5201642, 0.53992102, 0.55926172, 1.0704512), (0.50200502, 0.50400594, 0.50600277, 1.0568398),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FEDAVG_CO)
def test_t1ab_fedavg_co_goes_to_the_wrong_point(name):
    algorithms = [make(name, lr=lr, local_steps=2) for lr in RATES]
    expected = np.array(FEDAVG_CO[name])
    assert_allclose(sweep(algorithms, counterexample(), rounds=3).history["x"][:, 0, 1:], expected[:, :3], atol=TRACE)
    x = sweep(algorithms, counterexample(), rounds=LONG, evaluate_every=200).history["x"][:, 0]
    assert_allclose(x[:, -1], expected[:, 3], atol=LIMIT)
    assert (np.diff(x) > -1e-12).all()  # away from the solution, and never back


def test_t1ab_step_sizes_near_and_past_the_bounds_of_the_proof():
    assert places("fedavg-co-1", 3000, [{"lr": 0.1249}], {}) == pytest.approx([1.2724792], abs=LIMIT)
    near = places("fedavg-co-2", 3000, [{"lr": 0.0454}, {"lr": 0.1}], {})
    assert near == pytest.approx([1.1261314, 1.2182836], abs=LIMIT)


@pytest.mark.parametrize(("steps", "expected"), [(2, 1.0553412), (4, 1.1273935), (8, 1.1504353)])
def test_t1b_for_small_steps_the_limit_is_a_root(steps, expected):
    wrong = lambda x: 2 * slope(x) + (steps - 1) * (4 * slope(4 * x - 4) - 2 * slope(4 - 2 * x))
    assert brentq(wrong, 1, 2) == pytest.approx(expected, abs=1e-7)
    coarse, fine = places("fedavg-co-2", LONG, [{"lr": 0.001}, {"lr": 0.0005}], {"local_steps": steps})
    assert 2 * fine - coarse == pytest.approx(expected, abs=LIMIT)  # the error of first order taken out


def test_t1b_t1e_with_one_local_step_case_two_is_gradient_descent_and_case_one_solves_the_local_problem():
    assert places("fedavg-co-2", 3000, [{"lr": 0.04}], {"local_steps": 1}) == pytest.approx([0], abs=1e-15)
    local = brentq(lambda x: 4 * slope(4 * x - 4) - 2 * slope(4 - 2 * x), 1, 2)
    assert places("fedavg-co-1", 3000, [{"lr": 0.04}], {"local_steps": 1}) == pytest.approx([local], abs=1e-12)
    assert local == pytest.approx(1.1686673, abs=1e-7)


# ------------------------------------------------------------------------------------------------- T1c FedDRO

BETAS = (0.0, 0.01, 0.1, 0.5, 1.0)
PRINTED = {  # beta: (x, y) after rounds 2 and 100
    0.0: ((0.47084459, 0.20844594), (0.45, 0.0)),
    0.01: ((0.4708137, 0.2112896), (0.37560555, 0.01788212)),
    0.1: ((0.4705361, 0.23546098), (0.12674138, 0.04169656)),
    0.5: ((0.46931252, 0.31194104), (0.03161375, 0.02090893)),
    1.0: ((0.46781013, 0.33652245), (0.02079242, 0.01473796)),
}


def feddro(rounds, **settings):
    return runs("feddro", rounds, [{"beta": beta} for beta in BETAS], lr=0.04, **settings)


def test_t1c_in_the_consistent_order_feddro_is_exact_for_every_beta():
    for rounds, expected in [(1, 0.48239765), (2, 0.46538919), (100, 0.01293809)]:
        assert_allclose(feddro(rounds), expected, atol=TRACE)  # x and y alike
    assert_allclose(feddro(10_000), 0, atol=LIMIT)


def test_t1c_in_the_printed_order_the_limit_is_right_only_if_the_estimate_forgets():
    assert_allclose(feddro(1, order="printed"), [(0.48239765, 0.32397651)] * 5, atol=TRACE)
    for rounds, column in [(2, 0), (100, 1)]:
        assert_allclose(feddro(rounds, order="printed"), [row[column] for row in PRINTED.values()], atol=TRACE)
    assert_allclose(feddro(10_000, order="printed"), [(0.45, 0)] + [(0, 0)] * 4, atol=LIMIT)


# ------------------------------------------------------------------------------------------------- T1d DS-FedDRO


def test_t1d_traces():
    settings = {"lr": 0.04, "beta": 0.1}
    assert_allclose(runs("ds-feddro", 1, [settings]), [(0.49496443, 0.47504494)], atol=TRACE)
    assert_allclose(runs("ds-feddro", 2, [settings]), [(0.49096715, 0.45518745)], atol=TRACE)
    broadcast = settings | {"inner_eval": "broadcast"}
    assert_allclose(runs("ds-feddro", 1, [broadcast]), [(0.48059715, 0.47186587)], atol=TRACE)
    assert_allclose(runs("ds-feddro", 2, [broadcast]), [(0.46222688, 0.44688791)], atol=TRACE)


LIMITS = {  # (lr, beta, local steps): limit of x with the local y
    (0.001, 0.001, 2): 0.0060118, (0.001, 0.01, 2): 0.0577352, (0.04, 0.1, 2): 0.4766517, (0.04, 0.5, 2): 0.9698416,
    (0.001, 0.001, 4): 0.0179373, (0.001, 0.001, 8): 0.0413943, (0.04, 0.1, 1): 0.0,
}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_t1d_limits_with_the_local_y_and_none_with_the_broadcast_one(steps):
    chosen = {key: x for key, x in LIMITS.items() if key[2] == steps}
    changes = [{"lr": lr, "beta": beta} for lr, beta, _ in chosen]
    assert_allclose(places("ds-feddro", LONG, changes, {"local_steps": steps}), list(chosen.values()), atol=LIMIT)
    settled = [change for change in changes if change["beta"] < 0.5]
    broadcast = places("ds-feddro", LONG, settled, {"local_steps": steps, "inner_eval": "broadcast"})
    assert_allclose(broadcast, 0, atol=LIMIT)
    for (_, beta, _), x in chosen.items():
        if beta <= 0.001:
            assert_allclose(x, 6 * beta * (steps - 1), rtol=0.02)  # the bias in first order


def test_t1d_server_rates_do_not_move_the_limit():
    rates = {"server_lr": 1.3, "server_inner_lr": 1.3}
    assert places("ds-feddro", 10_000, [{"lr": 0.04, "beta": 0.1}], rates) == pytest.approx([0.4766517], abs=LIMIT)


def test_t1d_broadcast_with_large_steps_goes_on_swinging():
    settings = {"lr": 0.04, "beta": 0.5, "local_steps": 8, "inner_eval": "broadcast"}
    run = sweep([make("ds-feddro", **settings)], counterexample(), rounds=4001)
    swing = run.history["x"][0, 0, -10:]
    assert_allclose(np.abs(swing), 0.104, atol=5e-4)
    assert_allclose(swing[1:], -swing[:-1], rtol=1e-9)
    assert_allclose(np.abs(run.runs[0].server.y), 1.711, atol=5e-4)


# ------------------------------------------------------------------------------------------------- costs


def square_losses(x, batch, key):
    inputs, targets = batch
    return 0.5 * (inputs @ x - targets) ** 2


SIZES, FEATURES, BATCH, STEPS = (5, 9, 7), 3, 4, 3


def robust(scale=1.0, start=0.0, **settings):
    random = np.random.default_rng(0)
    client = lambda k, n: (random.normal(size=(n, FEATURES)), scale * (1 + 0.1 * random.normal(size=n)) + k)
    rows = Rows.from_clients([client(k, n) for k, n in enumerate(SIZES)])
    problem = KL(losses=square_losses, **settings)
    return Task.create(problem, rows, jnp.full(FEATURES, start), weights="samples", batch_size=BATCH)


@pytest.mark.parametrize(
    ("name", "settings", "exchanges", "inner_sent", "values", "batches"),
    [
        ("feddro", {}, STEPS + 1, STEPS, 2, 2),
        ("feddro", {"order": "printed"}, STEPS, STEPS, 2, 2),
        ("feddro", {"share_batch": True}, STEPS + 1, STEPS, 1, 1),
        ("ds-feddro", {}, 1, 1, 1, 2),
        ("ds-feddro", {"inner_eval": "broadcast"}, 1, 1, 1, 2),
        ("fedavg-co-1", {}, 1, 0, 0, 1),
        ("fedavg-co-2", {}, 2, 1, 0, 1),
    ],
)
def test_the_ledger_shows_every_exchange(name, settings, exchanges, inner_sent, values, batches):
    """Of a Scaled inner value two numbers go each way: itself and its exponent."""
    for task, inner, gradients in [(counterexample(), 1, 0), (robust(), 2, STEPS)]:
        algorithm = make(name, lr=0.1, local_steps=STEPS, **settings)
        ledger, d = measure(algorithm, task).round, task.params[0].size
        assert (ledger.exchanges, ledger.gathers) == (exchanges, 0)
        assert ledger.bytes_up == ledger.bytes_down == 8 * (d + inner_sent * inner)
        work = {"VJP": STEPS, "VAL": values * STEPS, "GRAD": gradients}
        assert ledger.oracles == {kind: count for kind, count in work.items() if count}
        assert ledger.samples == (0 if task.data.columns is None else batches * STEPS * BATCH)


def test_the_first_estimate_is_over_as_many_batches_as_asked_for():
    cost = measure(make("feddro", lr=0.1, first_batches=7), robust())
    assert (cost.start.samples, cost.start.oracles, cost.start.bytes_up) == (7 * BATCH, {"VAL": 7}, 16)


# ------------------------------------------------------------------------------------------------- the server's side


@struct
class AsComposition(Compositional):
    """A loss inside the identity: the estimate of the inner value has no say."""

    def inner(self, x, batch, key):
        a, c = batch
        return 0.5 * a * (x - c) ** 2

    def outer(self, y, batch, key):
        return y


def test_a_server_optimiser_takes_the_step_that_it_takes_in_fedopt():
    optimizer = optax.adam(0.1)
    task = Task.create(AsComposition(), quadratics().data, jnp.asarray(0.0))
    ds = simulate(make("ds-feddro", lr=0.1, local_steps=3, optimizer=optimizer), task, rounds=5, evaluate_every=None)
    opt = simulate(make("fedopt", lr=0.1, local_steps=3, optimizer=optimizer), quadratics(), rounds=5)
    assert_allclose(ds.server.x, opt.server.x, rtol=1e-13)
    assert abs(float(ds.server.x[0])) > 0.1


def test_plain_gradient_descent_as_the_optimiser_is_the_server_rate():
    settings = {"lr": 0.04, "beta": 0.1}
    given = runs("ds-feddro", 20, [settings | {"optimizer": optax.sgd(0.7)}])
    assert_allclose(given, runs("ds-feddro", 20, [settings | {"server_lr": 0.7}]), rtol=1e-13)


# ------------------------------------------------------------------------------------------------- projections, rates


@struct
class Floor(Line):
    """Lines, and an outer function that is defined from 0.46 on."""

    def project_y(self, y):
        return jnp.maximum(y, 0.46)


SLOPES, SHIFTS = np.array([2.0, 1.8]), np.array([-0.4, 0.0])
FIRST = np.mean(0.5 * SLOPES + SHIFTS)


def floored():
    constants = jnp.asarray(SLOPES), jnp.asarray(SHIFTS)
    return Task.create(Floor(), Rows.from_clients(constants=constants), jnp.asarray(0.5))


def feddro_by_hand(rates, betas, steps):
    """FedDRO's update in its own words, for two clients: (x, y, projections)."""
    x, y, projections = np.array([0.5, 0.5]), FIRST, 0
    for t, (lr, beta) in enumerate(zip(rates, betas, strict=True)):
        new = x - lr * SLOPES * slope(y)
        if (t + 1) % steps == 0:
            new = np.full(2, new.mean())
        estimate = np.mean((1 - beta) * (y - SLOPES * x - SHIFTS) + SLOPES * new + SHIFTS)
        x, y, projections = new, max(estimate, 0.46), projections + (estimate < 0.46)
    return x[0], y, projections


def ds_feddro_by_hand(rates, betas, steps):
    """The same for DS-FedDRO: (x, y, projections at the server, projections per client)."""
    x, y, projections, own = 0.5, FIRST, 0, np.zeros(2)
    for r in range(len(rates) // steps):
        x_k, y_k = np.full(2, x), np.full(2, y)
        for t in range(r * steps, (r + 1) * steps):
            x_k = x_k - rates[t] * SLOPES * slope(y_k)
            estimate = (1 - betas[t]) * y_k + betas[t] * (SLOPES * x_k + SHIFTS)
            own += estimate < 0.46
            y_k = np.maximum(estimate, 0.46)
        x, estimate = x + 0.9 * (x_k.mean() - x), y + 1.4 * (y_k.mean() - y)
        projections, y = projections + (estimate < 0.46), max(estimate, 0.46)
    return x, y, projections, own


ROUNDS, DECAYS = 10, {"lr": PowerDecay(scale=0.08, power=0.4), "beta": PowerDecay(scale=0.9, power=0.3, slope=0.5)}
T = np.arange(2 * ROUNDS)
SCHEDULES = 0.08 / (1 + T) ** 0.4, 0.9 / (1 + 0.5 * T) ** 0.3


def test_feddro_counts_what_it_projects_and_follows_schedules_of_both_rates():
    result = simulate(make("feddro", local_steps=2, **DECAYS), floored(), rounds=ROUNDS, evaluate_every=None)
    x, y, projections = feddro_by_hand(*SCHEDULES, 2)
    assert 2 < projections < 2 * ROUNDS
    assert_allclose([result.server.x[0], result.server.y[0]], [x, y], rtol=1e-12)
    assert_allclose(result.noted["projected_share"].sum(0), (2 * projections, 2 * 2 * ROUNDS))  # both clients say so
    assert_allclose(result.history["projected_share"], [np.nan, projections / (2 * ROUNDS)])


def test_ds_feddro_counts_what_it_projects_and_follows_schedules_of_both_rates():
    algorithm = make("ds-feddro", local_steps=2, server_lr=0.9, server_inner_lr=1.4, **DECAYS)
    result = simulate(algorithm, floored(), rounds=ROUNDS, evaluate_every=None)
    x, y, projections, own = ds_feddro_by_hand(*SCHEDULES, 2)
    assert own.min() < own.max() and projections > 0
    assert_allclose([result.server.x[0], result.server.y[0]], [x, y], rtol=1e-12)
    assert_allclose(result.noted["projected_share"].sum(0), (own.sum(), 2 * 2 * ROUNDS))
    assert_allclose(result.noted["server_projected_share"].sum(0), (2 * projections, 2 * ROUNDS))
    assert_allclose(result.history["projected_share"][-1], own.mean() / (2 * ROUNDS))


def test_an_estimate_inside_the_domain_is_never_counted():
    """Averages of values of at least 1 stay there: every count would be one of rounding."""
    result = simulate(make("ds-feddro", lr=1e-3, beta=0.3, local_steps=2), robust(0.3), rounds=50, evaluate_every=None)
    assert float(result.server.y.plain()[0]) > 1
    assert (result.history["projected_share"][1:] == 0).all()


# ------------------------------------------------------------------------------------------------- long gradients


@pytest.mark.parametrize(
    ("name", "inner"),
    [(name, (0.5, 0.5)) for name in ("feddro", "ds-feddro", "mbsgd", "fedavg-co-2")] + [("fedavg-co-1", (-2.0, 3.0))],
)
def test_a_long_gradient_is_shortened_where_that_is_asked_for(name, inner):
    """Of the counterexample's two clients, the first has the longer gradient."""
    gradients = np.array([4.0, -2.0]) * slope(np.array(inner))
    for clip in (None, 0.5, 100.0):
        result = simulate(make(name, lr=0.04, clip=clip), counterexample(), rounds=1)
        limit = clip or np.inf
        expected = 0.5 - 0.04 * np.clip(gradients, -limit, limit).mean()
        assert_allclose(result.server.x[0], expected, rtol=1e-12)
        if clip is None:
            assert "clipped_share" not in result.history
        else:
            assert result.history["clipped_share"][-1] == pytest.approx(np.mean(np.abs(gradients) > clip))


def logistic_losses(x, batch, key):
    inputs, label = batch
    return jnp.logaddexp(0, inputs @ x) - label * (inputs @ x)


def far_out():
    """Rows of which a few lie very far out; three clients."""
    random = np.random.default_rng(0)
    inputs = random.standard_t(2, size=(3, 300, FEATURES))
    odds = np.exp(3 * np.clip(inputs, -3, 3).sum(2))
    label = (random.random((3, 300)) < odds / (1 + odds)).astype(float)
    rows = Rows.from_clients(list(zip(inputs, label, strict=True)))
    return Task.create(KL(losses=logistic_losses), rows, jnp.zeros(FEATURES), batch_size=16)


@pytest.mark.parametrize(("name", "settings"), [("feddro", {}), ("ds-feddro", {"inner_eval": "broadcast"})])
def test_rows_far_out_spoil_no_model_where_gradients_are_shortened(name, settings):
    algorithms = [make(name, lr=0.1, beta=0.1, local_steps=2, clip=clip, **settings) for clip in (np.inf, 3.0)]
    as_printed, shortened = sweep(algorithms, far_out(), rounds=100, evaluate_every=100).history["objective"][:, 0]
    assert as_printed[0] == pytest.approx(np.log(2))
    assert as_printed[-1] > 10  # a row weighs e^loss
    assert shortened[-1] < 1


# ------------------------------------------------------------------------------------------------- the largest weight


def test_the_number_of_all_rows_as_the_largest_weight_changes_no_exact_gradient():
    for scale in (0.5, 30.0):  # weights about equal; all weight on one row
        free, bound = robust(scale, 0.2), robust(scale, 0.2, largest_weight=float(sum(SIZES)))
        columns = jax.tree.map(jnp.asarray, free.data.columns)
        everything = Sample(columns, jax.random.key(0))
        (x,), gradients = free.params, []
        for problem in (free.problem, bound.problem):
            y = problem.inner_value(x, everything)
            rows = [Sample(jax.tree.map(lambda a: a[i : i + 1], columns), everything.key) for i in range(sum(SIZES))]
            pulls = [(problem.inner_vjp(x, row)[1], row) for row in rows]
            gradients.append([problem.composed_gradient(x, pull, y, row) for pull, row in pulls])
        assert_allclose(gradients[1], gradients[0], rtol=1e-9)


def test_a_row_counts_no_more_than_the_largest_weight():
    """An estimate of 1 where the inner value is above e^800: the step is that of the bound."""
    task = robust(45.0, largest_weight=21.0)
    (x,), problem = task.params, task.problem
    row = Sample(jax.tree.map(lambda a: jnp.asarray(a)[:1], task.data.columns), jax.random.key(0))
    value, pull = problem.inner_vjp(x, row)
    far_too_small = (value - value).at_least(1.0)
    inputs, targets = row.batch
    expected = 21 * (inputs[0] @ x - targets[0]) * inputs[0]
    assert float(value.log()[0]) > 800
    assert_allclose(problem.composed_gradient(x, pull, far_too_small, row), expected, rtol=1e-12)


def test_a_run_that_explodes_without_a_bound_goes_on_with_one():
    algorithm = make("ds-feddro", lr=0.02, beta=0.5, local_steps=2, inner_eval="broadcast")
    with pytest.raises(Diverged):
        simulate(algorithm, robust(45.0, price=0.1, largest_weight=float("inf")), rounds=20, evaluate_every=None)
    for bound in ({}, {"largest_weight": 21.0}):  # the task's own is its exact bound
        result = simulate(algorithm, robust(45.0, price=0.1, **bound), rounds=20, evaluate_every=None)
        assert np.isfinite(result.server.x).all() and np.isfinite(result.history["objective"][-1])
