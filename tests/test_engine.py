"""Simulation: keys by meaning, cohorts, dropout, chunks, devices, sweeps, output rules, scale."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, TASKS, hyper, regression

from nestfed import (
    Algorithm,
    Local,
    Rows,
    Scratch,
    Shared,
    Task,
    UserError,
    advance,
    make,
    setting,
    simulate,
    start,
    struct,
    sweep,
)
from nestfed.engine import rounds
from nestfed.engine.cohorts import choose_cohort, make_cohort_rule
from nestfed.engine.options import Options
from nestfed.engine.planning import make_inputs, make_plan
from nestfed.problems import SingleLevel
from nestfed.verbs.simulation import evaluate

RAGGED = (5, 17, 9, 30, 3)
FEDAVG = make("fedavg", lr=0.05, local_steps=3)


def leaves(result):
    return [np.asarray(a) for a in jax.tree.leaves((result.server, result.clients))]


def assert_same(one, other, exact=False):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert np.array_equal(a, b) if exact else np.allclose(a, b, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------- rows and keys


@struct
class Owner(SingleLevel):
    """Every row is its owner's number; the loss is not used."""

    def loss(self, x, batch, key):
        return jnp.sum(x) + 0.0 * jnp.mean(batch)


@struct
class Witness(Algorithm):
    """Keeps the rows that a client saw in the last step of the round; trains nothing."""

    seen: int = setting("rows per step", default=6, static=True)
    family = "single level"

    class State(NamedTuple):
        x: Shared
        rows: Local

    def init(self, problem, params, draw, fed):
        return self.State(*params, jnp.zeros(self.seen))

    def step(self, problem, s, draw, fed):
        x = fed.mean(s.x) if fed.sync else s.x
        return self.State(x, draw(0).batch)


def witness(sizes, ids=None, **options):
    """(owners' numbers + position within the owner / 1000 of the rows drawn, all metrics) after some rounds."""
    rows = [k + np.arange(n) / 1000 for k, n in zip(ids or range(len(sizes)), sizes, strict=True)]
    task = Task.create(Owner(), Rows.from_clients(rows, ids=ids), jnp.zeros(1), batch_size=6)
    return simulate(Witness(local_steps=2), task, rounds=3, **options)


def test_no_client_reads_another_clients_row():
    sizes = (1, 40, 2, 7, 300)
    result = witness(sizes)
    for k, size in enumerate(sizes):
        rows = np.asarray(result.clients.rows[k])
        assert np.all(np.floor(rows) == k)
        assert np.all(np.round((rows - k) * 1000) < size)


def test_no_client_reads_another_clients_row_in_full_passes():
    @struct
    class Extremes(Task):
        def metrics(self, server, client, data, fed):
            extremes = data.average(lambda batch: jnp.stack([jnp.mean(batch), jnp.mean(batch**2)]))
            return {"each": fed.gather(extremes)}

    sizes = (1, 40, 2, 7, 300)
    rows = Rows.from_clients([np.full(n, float(k)) for k, n in enumerate(sizes)])
    task = Extremes.create(Owner(), rows, jnp.zeros(1), batch_size=6)
    algorithm = Witness(local_steps=1)
    each = np.asarray(evaluate(algorithm, task, start(algorithm, task))["each"])
    assert np.allclose(each, [[k, k**2] for k in range(len(sizes))])


def test_adding_a_client_changes_nobody_elses_numbers():
    before, after = witness((5, 9, 30)), witness((5, 9, 30, 11))
    assert np.array_equal(before.clients.rows, after.clients.rows[:3])


def test_clients_are_known_by_id_not_by_position():
    before, after = witness((5, 9, 30), ids=[10, 11, 12]), witness((30, 5, 9), ids=[12, 10, 11])
    assert np.array_equal(before.clients.rows, np.asarray(after.clients.rows)[[1, 2, 0]])


def test_the_data_order_does_not_depend_on_the_algorithm():
    @struct
    class Other(Witness):
        def step(self, problem, s, draw, fed):
            draw(3)
            x = s.x - 0.1 * problem.gradient(s.x, draw(1))
            return self.State(fed.mean(x) if fed.sync else x, draw(0).batch)

    task = Task.create(Owner(), Rows.from_clients([np.arange(50.0)]), jnp.zeros(1), batch_size=6)
    one, other = (simulate(a, task, rounds=3) for a in (Witness(local_steps=2), Other(local_steps=2)))
    assert np.array_equal(one.clients.rows, other.clients.rows)


def test_a_larger_cohort_contains_the_smaller_one_and_seeds_differ():
    task, key = regression((4,) * 20), jax.random.key(3)
    rule = lambda size: make_cohort_rule(size, "weights", task.weights)
    seats = lambda size, key=key: set(choose_cohort(task, key, jnp.asarray(7), rule(size)).id.tolist())
    assert seats(5) < seats(6) < seats(15)
    assert seats(10) != seats(10, jax.random.key(4))
    drawn = [choose_cohort(task, key, jnp.asarray(r), rule(5)).id for r in range(200)]
    often = np.bincount(np.concatenate(drawn), minlength=20)
    assert often.sum() == 1000 and often.min() > 25 and often.max() < 80  # 50 expected of each


# ------------------------------------------------------------------------------------------------- one run, many ways


@pytest.mark.parametrize(
    ("name", "options"), [("scaffold", {}), ("fedbioacc", {"cohort": 3, "dropout": 0.4})], ids=["full", "partial"]
)
def test_same_numbers_side_by_side_in_turn_in_pieces_and_in_sweeps(name, options):
    case = CASES[name]
    algorithm, task = case.algorithm(name), TASKS[case.task](RAGGED)
    whole = simulate(algorithm, task, 3, rounds=4, evaluate_every=2, **options)
    in_turn = simulate(algorithm, task, 3, rounds=4, evaluate_every=2, client_axis="map", client_chunk=2, **options)
    assert_same(whole, in_turn)

    run, pieces = start(algorithm, task, 3), []
    for length in (1, 3):
        run, history = advance(algorithm, task, 3, run, rounds=length, evaluate_every=2, **options)
        pieces.append(history)
    assert_same(whole, run)
    assert np.array_equal(np.concatenate([p["participants"] for p in pieces]), whole.participants)

    rows = sweep([algorithm], task, [9, 3], rounds=4, evaluate_every=2, progress=False, **options)
    assert_same(whole, jax.tree.map(lambda a: a[1], rows.runs[0]))
    metric = "loss" if name == "scaffold" else "upper"
    assert rows.history["round"].tolist() == whole.history["round"].tolist() == [0, 2, 4]
    assert np.allclose(rows.history[metric][0, 1], whole.history[metric], rtol=1e-12)


@struct
class Remembering(Algorithm):
    """A phase of one step fills a field that was None, a phase of three uses it."""

    lr: float = setting("eta: step size", default=0.1)

    family = "single level"

    class State(NamedTuple):
        x: Shared
        first: Scratch

    def init(self, problem, params, draw, fed):
        return self.State(*params, None)

    def schedule(self):
        return (self.look, 1, False), (self.step, 3, False), (self.average, 1, True)

    def look(self, problem, s, draw, fed):
        return s._replace(first=problem.gradient(s.x, draw(0)))

    def step(self, problem, s, draw, fed):
        return s._replace(x=s.x - self.lr * (s.first + problem.gradient(s.x, draw(0))))

    def average(self, problem, s, draw, fed):
        return s._replace(x=fed.mean(s.x, around=fed.server.x))


def test_many_clients_in_turn_two_abreast_are_those_side_by_side():
    task = regression((*RAGGED, 4, 6, 2, 7))  # nine: the last one has no neighbour
    together, in_turn = (simulate(Remembering(), task, 1, rounds=2, client_axis=axis) for axis in ("vmap", "map"))
    assert_same(together, in_turn)


def test_cohort_and_dropout_leave_absent_clients_untouched():
    task = regression(RAGGED)
    algorithm = make("scaffold", lr=0.05, local_steps=2)
    result = simulate(algorithm, task, 1, rounds=1, cohort=2)
    seats = choose_cohort(task, jax.random.key(1), jnp.asarray(0), make_cohort_rule(2, "weights", task.weights))
    moved = np.any(np.asarray(result.clients.c_k) != 0, axis=1)
    assert sorted(np.flatnonzero(moved)) == sorted(seats.position.tolist())
    assert result.participants.tolist() == [2]


@pytest.mark.parametrize(("cohort", "expected"), [(None, None), (2, 2), (0.4, 2), (1.0, None), (0.01, 1), (1, 1)])
def test_cohort_is_a_number_or_a_fraction(cohort, expected):
    rule = make_cohort_rule(cohort, "uniform", np.ones(5))
    assert (None if rule is None else rule.size) == expected


def test_large_models_run_in_turn_on_a_cpu_and_a_setting_forces_it():
    big = Task.create(Owner(), Rows.from_clients([np.ones(2)] * 3), jnp.zeros(30_000))
    chunk = lambda task, **options: make_plan(FEDAVG, task, Options(**options)).chunk
    assert chunk(regression((4, 4))) is None and chunk(big) == 1
    assert chunk(big, client_axis="vmap") is None and chunk(big, client_axis="map", client_chunk=2) == 2
    wide = regression((4,) * 50, batch_size=2000)  # 64 kB a batch, 3 MB the cohort's
    assert chunk(wide) == 4
    assert make_plan(make("fedavg", lr=0.1, local_steps=1), wide, Options()).chunk is None  # every step exchanges


def test_progress_shows_speed_metrics_and_time_left(capfd):
    simulate(FEDAVG, regression((4, 4)), rounds=5, progress=True)
    shown = capfd.readouterr().err
    assert "FedAvg" in shown and "5/5" in shown and "rounds/s" in shown and "loss" in shown
    simulate(FEDAVG, regression((4, 4)), rounds=5)  # nobody is looking
    assert capfd.readouterr().err == ""


def test_nobody_answers_and_nothing_changes():
    task = regression((4, 4))
    seed = next(
        s
        for s in range(200)
        if not choose_cohort(task, jax.random.key(s), jnp.asarray(0), None, jnp.asarray(0.9)).weight.any()
    )
    result = simulate(FEDAVG, task, seed, rounds=1, dropout=0.9)
    assert result.participants.tolist() == [0]
    assert np.array_equal(result.server.x, start(FEDAVG, task, seed).server.x)


def test_client_of_weight_zero_is_left_out_even_with_nan():
    data = regression((6, 6, 6)).data
    inputs, targets = (np.array(c) for c in data.columns)
    targets[:6] = np.nan
    task = regression((6, 6, 6), weights=[0, 1, 1])
    spoilt = dataclasses.replace(task, data=dataclasses.replace(data, columns=(inputs, targets)))
    clean, dirty = (simulate(FEDAVG, t, rounds=3, evaluate_every=None) for t in (task, spoilt))
    assert np.array_equal(clean.server.x, dirty.server.x)


def test_weights_by_samples_equal_weights_given():
    by_samples = simulate(FEDAVG, regression(RAGGED, weights="samples"), rounds=2, evaluate_every=None)
    given = simulate(FEDAVG, regression(RAGGED, weights=np.array(RAGGED) * 2.0), rounds=2, evaluate_every=None)
    assert_same(by_samples, given)


def test_one_client_with_one_step_is_the_centralised_method():
    """FedAvg, FedProx, SCAFFOLD and FedBiO on one client against a few lines of NumPy."""
    from nestfed.problems import toys

    centre, curvature, lr = 2.0, 3.0, 0.1
    x = 0.0
    for _ in range(5):
        x -= lr * curvature * (x - centre)
    task = toys.quadratics((curvature,), (centre,))
    for name in ("fedavg", "fedprox", "scaffold", "fedopt"):
        assert float(simulate(make(name, lr=lr), task, rounds=5).server.x[0]) == pytest.approx(x, abs=1e-12)

    from nestfed.problems.hypergradients import Dense

    A, B, c, t, rho = 3.0, 1.0, 2.0, 3.0, 0.1
    constants = tuple(jnp.array([v]) for v in (A, B, c, t))
    zero = jnp.asarray(0.0)
    local, globally = (
        toys.ShowX.create(toys.ScalarBilevel(scope=scope), Rows.from_clients(constants=constants), (zero, zero))
        for scope in ("local", "global")
    )
    x = y = 0.0
    for _ in range(5):
        gradient, hyper = A * y - (B * x + c), rho * x + B / A * (y - t)
        x, y = x - 0.1 * hyper, y - 0.2 * gradient
    result = simulate(make("fedbio", lr=0.1, lower_lr=0.2, hypergradient=Dense()), local, rounds=5)
    assert [float(result.server.x[0]), float(result.clients.y[0, 0])] == pytest.approx([x, y], abs=1e-12)

    x = y = z = 0.0
    for _ in range(5):
        x, y, z = x - 0.1 * (rho * x + B * z), y - 0.2 * (A * y - (B * x + c)), z - 0.3 * (A * z - (y - t))
    rates = {"lr": 1.0, "lower_lr": 1.0, "z_lr": 1.0, "server_lr": 0.1, "server_lower_lr": 0.2, "server_z_lr": 0.3}
    state = simulate(make("simfbo", **rates), globally, rounds=5).server
    assert [float(v[0]) for v in state[:3]] == pytest.approx([x, y, z], abs=1e-12)

    x = y = 0.0
    for _ in range(5):
        y -= 0.2 * (A * y - (B * x + c))
        p = sum((1 / 3) * (1 - A / 3) ** i * (y - t) for i in range(3))
        x -= 0.1 * (rho * x + B * p)
    nest = make("fednest", lr=0.1, lower_lr=0.2, neumann_lr=1 / 3, terms=2)
    state = simulate(nest, globally, rounds=5).server
    assert [float(state.x[0]), float(state.y[0])] == pytest.approx([x, y], abs=1e-12)


# ------------------------------------------------------------------------------------------------- output, evaluation


def test_output_rules():
    task = regression((6, 6, 6))
    every = [np.asarray(simulate(FEDAVG, task, rounds=r, evaluate_every=None).server.x) for r in (1, 2, 3, 4)]
    losses = simulate(FEDAVG, task, rounds=4).history["loss"][1:]
    output = lambda rule, **kw: np.asarray(simulate(FEDAVG, task, rounds=4, output=rule, **kw).output.x)
    assert np.array_equal(output("last"), every[-1])
    assert np.allclose(output("average"), np.mean(every, axis=0))
    assert np.array_equal(output("best", select="loss"), every[int(np.argmin(losses))])
    drawn = sweep([FEDAVG], task, range(64), rounds=4, evaluate_every=None, output="random", progress=False)
    final = np.asarray(drawn.runs[0].output.server.x)
    assert len(np.unique(final.round(12), axis=0)) == 64  # every seed has its own data order ...
    chosen = [
        int(np.flatnonzero([np.allclose(final[s], simulate(FEDAVG, task, s, rounds=r, evaluate_every=None).server.x)
                            for r in (1, 2, 3, 4)])[0])
        for s in range(8)
    ]  # fmt: skip
    assert len(set(chosen)) > 1  # ... and the chosen round varies


def test_evaluation_at_start_at_intervals_and_at_the_end():
    result = simulate(FEDAVG, regression((6, 6)), rounds=7, evaluate_every=3)
    assert result.history["round"].tolist() == [0, 3, 6, 7]
    sparse = simulate(FEDAVG, regression((6, 6)), rounds=7, evaluate_every=None)
    assert sparse.history["round"].tolist() == [0, 7]
    assert sparse.history["loss"].tolist() == result.history["loss"][[0, -1]].tolist()


def test_metrics_see_all_rows_of_ragged_clients():
    task = regression(RAGGED, weights="samples")
    inputs, targets = task.data.columns
    expected = np.mean((inputs @ np.zeros(3) - targets) ** 2)
    assert evaluate(FEDAVG, task, start(FEDAVG, task))["loss"] == pytest.approx(expected, rel=1e-12)


def test_private_metric_is_refused():
    private = lambda task, server, client, data, fed: {"size": data.size}
    with pytest.raises(UserError, match="metric depends on one client's values.*fed.mean"):
        simulate(FEDAVG, regression((6, 6)), rounds=1, metrics=private)


def test_result_gives_back_the_users_own_tree():
    params = simulate(FEDAVG, regression((6, 6)), rounds=1).params("x")
    assert params["weights"].shape == (3,) and params["bias"].shape == ()


# ------------------------------------------------------------------------------------------------- sweeps, divergence


def test_sweep_over_floats_structures_and_problem_numbers():
    task = hyper("local", (6, 6, 6))
    settings = [
        make("fedbio", lr=0.05, lower_lr=0.1),
        make("fedbio", lr=0.1, lower_lr=0.1),
        make("fedbio", lr=0.1, lower_lr=0.1, local_steps=2),
        (make("fedbio", lr=0.1, lower_lr=0.1), dataclasses.replace(task.problem, strength=1.0)),
    ]
    result = sweep(settings, task, [0, 1], rounds=3, progress=False)
    assert result.history["upper"].shape == (4, 2, 4)
    changed = dataclasses.replace(task, problem=dataclasses.replace(task.problem, strength=1.0))
    alone = simulate(make("fedbio", lr=0.1, lower_lr=0.1), changed, 1, rounds=3)
    assert np.allclose(result.history["upper"][3, 1], alone.history["upper"], rtol=1e-10)
    alone = simulate(settings[2], task, 1, rounds=3)
    assert np.allclose(result.history["upper"][2, 1], alone.history["upper"], rtol=1e-10)


@pytest.mark.parametrize("lrs", [[0.1], [0.1, 0.05]], ids=["one setting", "two settings"])
@pytest.mark.parametrize("per_seed", [False, True], ids=["one task", "a task per seed"])
def test_a_sweep_of_one_seed_has_all_axes_and_the_numbers_of_a_run(lrs, per_seed):
    task = regression((6, 6, 6))
    settings = [make("fedavg", lr=lr, local_steps=3) for lr in lrs]
    result = sweep(settings, [task] if per_seed else task, [1], rounds=3, progress=False)
    assert result.history["loss"].shape == (len(lrs), 1, 4) and result.participants.shape == (len(lrs), 1, 3)
    alone = simulate(settings[0], task, 1, rounds=3)
    assert np.allclose(result.history["loss"][0, 0], alone.history["loss"], rtol=1e-10)
    assert np.allclose(result.runs[0].server.x[0], alone.server.x, rtol=1e-10)


def test_diverged_setting_is_marked_and_stops_nobody():
    task = regression((6, 6, 6))
    lrs = [0.05, 1e30, 0.1]
    result = sweep([make("fedavg", lr=lr, local_steps=3) for lr in lrs], task, [0, 1], rounds=6, progress=False)
    assert np.all(result.diverged[[0, 2]] == -1) and np.all(result.diverged[1] >= 0)
    assert np.all(np.isfinite(result.history["loss"][[0, 2]]))
    assert np.all(np.isnan(result.history["loss"][1, :, -1]))
    assert np.all(np.isfinite(result.runs[1].server.x))
    alone = simulate(make("fedavg", lr=0.1, local_steps=3), task, 1, rounds=6)
    assert np.allclose(result.history["loss"][2, 1], alone.history["loss"], rtol=1e-10)
    assert result.best("loss") in (0, 2)


# ------------------------------------------------------------------------------------------------- devices and scale


def python(code: str, **environment: str) -> dict:
    """Run a script in a process of its own; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300,
        env=os.environ | environment, cwd=os.path.dirname(__file__),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_of_clients_in_turn_is_that_of_a_chunk():
    """Activations of all clients at once, or of one client at a time: read off the compiled programs."""

    @struct
    class Wide(SingleLevel):
        def loss(self, x, batch, key):
            return jnp.mean(jnp.tanh(batch[:, None] * x["in"][None, :]) @ x["out"])

    clients, hidden, batch = 32, 1000, 50
    rows = Rows.from_clients([np.ones(batch)] * clients)
    task = Task.create(Wide(), rows, {"in": jnp.ones(hidden), "out": jnp.ones(hidden)}, batch_size=batch)

    def megabytes(**options):
        chosen = Options(evaluate_every=None, **options)
        plan, inputs = make_plan(FEDAVG, task, chosen), make_inputs(FEDAVG, task, 0, chosen)
        run = jax.eval_shape(lambda: rounds.start(inputs, plan))
        program = rounds.advance.lower(inputs, run, 0, 1, plan).compile()
        return program.memory_analysis().temp_size_in_bytes / 1e6

    activations = 8 * batch * hidden / 1e6
    states = 8 * clients * 2 * hidden / 1e6
    assert megabytes(client_axis="vmap") > clients * activations
    assert megabytes(client_axis="map", client_chunk=1) < 4 * activations + 6 * states
    assert megabytes(client_axis="map", client_chunk=4) < 4 * 4 * activations + 6 * states


def test_ten_thousand_clients_with_a_cohort_of_a_hundred():
    """Per-client state for all, work for the cohort only: memory stays near the size of the data and the state."""
    code = """
import json, resource, jax, jax.numpy as jnp, numpy as np
from nestfed import Rows, Task, make, simulate, struct
from nestfed import engine
from nestfed.problems import SingleLevel
@struct
class Logistic(SingleLevel):
    def loss(self, x, batch, key):
        inputs, labels = batch
        return jnp.mean(jnp.logaddexp(0.0, -labels * (inputs @ x)))
clients, features = 10_000, 100
random = np.random.default_rng(0)
inputs = random.normal(size=(10 * clients, features)).astype("float32")
labels = np.sign(inputs[:, 0]).astype("float32")
rows = Rows.from_table((inputs, labels), np.repeat(np.arange(clients), 10))
task = Task.create(Logistic(), rows, jnp.zeros(features), batch_size=8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = simulate(make("scaffold", lr=0.1, local_steps=5), task, rounds=50, cohort=100, evaluate_every=50)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"loss": result.history["loss"].tolist(), "megabytes": (after - before) / 1024,
                  "who": result.participants.tolist()}))
"""
    out = python(code)
    assert out["loss"][-1] < 0.9 * out["loss"][0]
    assert out["who"] == [100] * 50
    assert out["megabytes"] < 400  # data 40 MB, state 4 MB; the rest is the compiler
