"""FedMinMax and FCFL: closed forms, the projection and the linear programs against independent answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Groups, groups, limited
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog

from nestfed import Rows, Task, UserError, advance, make, simulate, start, struct
from nestfed.algorithms.fcfl import Upload, find_disparity_share
from nestfed.algorithms.fedminmax import find_nearest_weights
from nestfed.problems import Constrained, Minimax


def trace(algorithm, task, rounds):
    """The server's states after each of the first rounds."""
    run, servers = start(algorithm, task), []
    for _ in range(rounds):
        run, _ = advance(algorithm, task, 0, run, rounds=1, evaluate_every=None)
        servers.append(run.server)
    return servers


# ------------------------------------------------------------------------------------------------- FedMinMax

TARGETS = np.array([0.0, 2.0])


@struct
class Parabolas(Minimax):
    """Group a has the risk (x - t_a)^2 / 2; a client has its counts of the groups, and no risk where it has no row."""

    def value(self, x, alpha, batch, key):
        counts, targets = batch
        return jnp.sum(counts / counts.sum() * alpha * (x - targets) ** 2) / 2

    def group_risks(self, x, batch, key):
        counts, targets = batch
        return jnp.where(counts > 0, (x - targets) ** 2 / 2, jnp.nan), counts


def parabolas(counts, targets=TARGETS) -> Task:
    counts = np.asarray(counts, float)
    data = Rows.from_clients(constants=(counts, np.broadcast_to(targets, counts.shape)))
    start = (jnp.asarray(0.0), jnp.ones(len(targets)))
    return Task.create(Parabolas(), data, start, weights=counts.sum(1))


T15 = ((60, 10), (15, 15))


def test_t15_trace_and_limit():
    algorithm, task = make("fedminmax", lr=0.1), parabolas(T15)
    servers = trace(algorithm, task, 3)
    assert [float(s.x[0]) for s in servers] == pytest.approx([0.05, 0.115, 0.1925], abs=1e-12)
    assert np.stack([s.mu for s in servers]) == pytest.approx(
        np.array([[0.65, 0.35], [0.555, 0.445], [0.4665, 0.5335]]), abs=1e-12
    )
    assert start(algorithm, task).server.rho == pytest.approx([0.75, 0.25], abs=1e-12)
    end = simulate(algorithm, task, rounds=3000, evaluate_every=None, output="average")
    assert float(end.server.x[0]) == pytest.approx(1, abs=1e-2)
    assert end.run.server.mu == pytest.approx([0.5, 0.5], abs=1e-5)
    assert float(end.run.server.x[0]) == pytest.approx(1, abs=1e-5)


@given(
    counts=arrays(int, (3, 2), elements=st.integers(0, 20)).filter(lambda c: (c.sum(0) > 0).all() and c.sum(1).all())
)
@settings(max_examples=15, deadline=None)
def test_how_groups_are_spread_over_clients_does_not_matter(counts):
    """Three clients, some without a row of a group, and one client with everything: the same run."""
    algorithm = make("fedminmax", lr=0.1)
    spread, pooled = (trace(algorithm, parabolas(c), 3)[-1] for c in (counts, counts.sum(0, keepdims=True)))
    for name in ("x", "mu", "alpha"):
        assert getattr(spread, name) == pytest.approx(np.asarray(getattr(pooled, name)), abs=1e-10)


def test_a_group_without_a_row_stays_out():
    task = parabolas(((60, 0, 10), (15, 0, 15)), np.array([0.0, 100.0, 2.0]))
    with_gap = trace(make("fedminmax", lr=0.1), task, 3)
    assert np.stack([s.mu for s in with_gap])[:, [0, 2]] == pytest.approx(
        np.array([[0.65, 0.35], [0.555, 0.445], [0.4665, 0.5335]]), abs=1e-12
    )
    assert all(float(s.mu[1]) == float(s.alpha[1]) == 0 for s in with_gap)


def test_floor_keeps_every_group_in():
    """Group 0 is served perfectly by x = 0 for ever: without a floor its weight falls to zero."""
    task = parabolas(((50, 50),))
    settings = {"lr": 1e-9, "weight_lr": 0.5}
    assert trace(make("fedminmax", **settings), task, 3)[-1].mu == pytest.approx([0, 1], abs=1e-8)
    assert trace(make("fedminmax", **settings, floor=0.2), task, 3)[-1].mu == pytest.approx([0.2, 0.8], abs=1e-8)


def test_the_recorded_value_is_the_weighted_sum_of_group_risks():
    result = simulate(make("fedminmax", lr=0.1), parabolas(T15), rounds=2)
    server = result.server
    expected = server.mu @ (float(server.x[0]) - TARGETS) ** 2 / 2
    assert result.history["value"][-1] == pytest.approx(float(expected), abs=1e-12)


def test_shares_are_those_of_the_batch_unless_the_problem_knows_better():
    @struct
    class Informed(Groups):
        def group_shares(self, batch, key):
            return jnp.array([0.2, 0.8])

    task = groups()
    batch = (np.ones((4, 3)), np.array([1.0, -1.0, 2.0, 3.0]))
    assert task.problem.group_shares(batch, jax.random.key(0)) == pytest.approx([0.75, 0.25])
    data = Rows.from_clients([batch, batch])
    informed = Task.create(Informed(), data, (jnp.zeros(3), jnp.ones(2)), batch_size=2)
    assert start(make("fedminmax", lr=0.1), informed).server.rho == pytest.approx([0.2, 0.8])


def test_mistakes_of_minimax_users_are_explained():
    data = Rows.from_clients([(np.ones((4, 3)), np.ones(4))])
    with pytest.raises(UserError, match="local_steps=2 was given.*at most 1"):
        make("fedminmax", lr=0.1, local_steps=2)

    @struct
    class Single(Groups):
        def value(self, x, alpha, batch, key):
            return alpha.sum()

    three = Task.create(Single(), data, (jnp.zeros(3), jnp.ones(3)))
    with pytest.raises(UserError, match="Single has 2 groups, .* alpha has 3 numbers; give alpha one number per group"):
        simulate(make("fedminmax", lr=0.1), three, rounds=1)

    @struct
    class OneNumber(Groups):
        def group_risks(self, x, batch, key):
            return jnp.mean(batch[1]), jnp.ones(2)

    with pytest.raises(UserError, match="OneNumber.group_risks must return a vector"):
        Task.create(OneNumber(), data, (jnp.zeros(3), jnp.ones(2)))


PROJECT = jax.jit(jax.vmap(find_nearest_weights, in_axes=(0, None, None)))  # once: compiling takes longer than running


@given(
    point=arrays(float, 5, elements=st.floats(-3, 3)),
    known=arrays(bool, 5).filter(np.any),
    floor=st.floats(0, 0.15),
    dtype=st.sampled_from([np.float32, np.float64]),
)
@settings(deadline=None)
def test_nearest_weights_are_the_projection(point, known, floor, dtype):
    """v is the nearest point p of a convex set exactly if <q - p, v - p> <= 0 for all its corners q."""
    p = np.asarray(PROJECT(jnp.asarray(point, dtype)[None], known, floor))[0]
    assert p.dtype == dtype and not p[~known].any()
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    assert p.sum() == pytest.approx(1, abs=tolerance) and (p[known] >= floor - tolerance).all()
    corners = np.where(known, floor, 0) + (1 - floor * known.sum()) * np.eye(5)[known]
    assert ((corners - p) @ np.where(known, point - p, 0) <= 10 * tolerance).all()


# ------------------------------------------------------------------------------------------------- FCFL: directions


def test_t21_two_gradients():
    loss, disparity = jnp.array([1.0, 0.0]), jnp.array([-0.5, 1.0])
    share = find_disparity_share(loss, disparity, jnp.asarray(True))
    assert float(share) == pytest.approx(2 / 3, abs=1e-12)
    assert (1 - share) * loss + share * disparity == pytest.approx([0, 2 / 3], abs=1e-12)


@given(
    loss=arrays(float, 3, elements=st.floats(-2, 2).map(lambda v: round(v, 3))),
    disparity=arrays(float, 3, elements=st.floats(-2, 2).map(lambda v: round(v, 3))),
    excess=st.booleans(),
)
@settings(deadline=None)
def test_the_program_of_stage_one(loss, disparity, excess):
    share = float(find_disparity_share(jnp.asarray(loss), jnp.asarray(disparity), jnp.asarray(excess)))
    g = np.stack([loss, disparity])
    gain = g @ (disparity if excess else loss)
    condition = -(g @ loss)[None] if excess else np.zeros((1, 2))
    best = linprog(-gain, condition, [0.0], np.ones((1, 2)), [1.0], method="highs")
    a = np.array([1 - share, share])
    assert a.min() >= 0 and (condition @ a <= 1e-12).all()
    assert gain @ a == pytest.approx(-best.fun, abs=1e-6)


def answer_of(algorithm, uploads, present, widths=(0.5, 0.5), steps=0):
    server = algorithm.State(x=None, widths=jnp.asarray(widths), steps=jnp.asarray(steps))
    return algorithm.answer(uploads, jnp.asarray(present), server)


ONE = Upload(jnp.array([1.0]), jnp.array([0.3]), jnp.array([[1.0, 0.0]]), jnp.array([[-0.5, 1.0]]))


def test_the_answer_of_the_server_in_both_stages():
    algorithm = make("fcfl", lr=0.1, stage_one_steps=5)
    assert answer_of(algorithm, ONE, [True])[0] == pytest.approx([0, 2 / 3], abs=1e-12)
    within = ONE._replace(disparity=jnp.array([0.1]))  # at the tolerance: the loss alone
    assert answer_of(algorithm, within, [True])[0] == pytest.approx([1, 0], abs=1e-12)
    # Stage 2 maximises the product with grad l = (1, 0): all weight there, unless that would raise the disparity.
    assert answer_of(algorithm, within._replace(disparity=jnp.array([0.09])), [True], steps=5)[0] == pytest.approx(
        [1, 0], abs=1e-9
    )
    # a (1, 0) + (1 - a) (-0.5, 1) has a product with (-0.5, 1) of 1.25 - 1.75 a, which is 0 at a = 5/7.
    assert answer_of(algorithm, ONE, [True], steps=5)[0] == pytest.approx([4 / 7, 2 / 7], abs=1e-9)


@pytest.mark.parametrize("steps", [0, 5])
def test_who_is_absent_does_not_matter_even_with_nan(steps):
    algorithm = make("fcfl", lr=0.1, stage_one_steps=5)
    random = np.random.default_rng(3)
    three = Upload(*(jnp.asarray(random.normal(size=s) + 1) for s in ((3,), (3,), (3, 4), (3, 4))))
    spoilt = jax.tree.map(lambda a: jnp.insert(a, 1, jnp.nan, axis=0), three)
    for mine, other in zip(
        answer_of(algorithm, three, [True] * 3, steps=steps),
        answer_of(algorithm, spoilt, [True, False, True, True], steps=steps),
        strict=True,
    ):
        assert mine == pytest.approx(np.asarray(other), abs=1e-9)


def test_widths_shrink_where_the_gradient_is_small():
    algorithm = make("fcfl", lr=0.1)  # norms: 1 of the loss, sqrt(1.25) of the disparity
    widths = lambda *now: np.asarray(answer_of(algorithm, ONE, [True], widths=now)[1])
    assert widths(0.5, 0.5) == pytest.approx([5e-3, 5e-3])
    assert widths(0.09, 0.5) == pytest.approx([0.09, 5e-3])  # 0.1 * 1 > 0.09
    assert widths(0.11, 0.11) == pytest.approx([1.1e-3, 0.11])  # 0.1 * sqrt(1.25) > 0.11
    small = ONE._replace(loss_gradient=1e-6 * ONE.loss_gradient)
    assert float(answer_of(algorithm, small, [True], widths=(5e-3, 0.05))[1][0]) == pytest.approx(1e-4)


# ------------------------------------------------------------------------------------------------- FCFL: behaviour


@struct
class Pulls(Constrained):
    """l = |x - c|^2 / 2 with the client's own c, and the second coordinate as the disparity."""

    def objective(self, x, batch, key):
        return 0.5 * jnp.sum((x - batch) ** 2)

    def constraints(self, x, batch, key):
        return x[1:]


def pulls(x, centers=((1.0, 1.0), (-1.0, 1.0))) -> Task:
    return Task.create(Pulls(), Rows.from_clients(constants=np.asarray(centers)), jnp.asarray(x))


@pytest.mark.parametrize(
    ("tolerance", "x", "answer"),
    [
        (0.25, (0.6, -0.5), (0.0, 0.25)),
        (0.25, (-0.9, 0.2), (0.0, 0.25)),
        (2.0, (0.6, -0.5), (0.0, 1.0)),
        (2.0, (-0.3, 1.8), (0.0, 1.0)),
    ],
)
def test_stage_one_finds_the_smallest_worst_loss_within_the_tolerance(tolerance, x, answer):
    """max_k l_k is least at (0, 1), and at (0, 0.25) among the points with a disparity of at most 0.25."""
    lr = 0.01
    algorithm = make("fcfl", lr=lr, tolerance=tolerance, shrink=1.0, weight_decay=0.0)
    end = simulate(algorithm, pulls(x), rounds=800, evaluate_every=None)
    assert end.server.x == pytest.approx(answer, abs=lr)


def test_stage_one_lowers_a_disparity_as_far_as_the_worst_loss_lets_it():
    """Above the tolerance the direction is level with the smooth maximum M of the losses. From (-0.4, 0.9) that leads
    to the point (0, x_2) of the same M, where M = (1 + (x_2 - 1)^2) / 2 + log(2) / 2 and both gradients oppose."""
    algorithm = make("fcfl", lr=0.01, tolerance=0.25, shrink=1.0, weight_decay=0.0)
    end = simulate(algorithm, pulls((-0.4, 0.9)), rounds=800, evaluate_every=None)
    maximum = np.log(np.exp([1.4**2 + 0.1**2, 0.6**2 + 0.1**2]).sum()) / 2
    assert end.server.x == pytest.approx([0, 1 - np.sqrt(2 * maximum - np.log(2) - 1)], abs=0.01)


def test_stage_two_improves_every_client_until_none_can_without_another():
    """From (2, 3) both losses fall, step by step, until x lies between the two centers, where they oppose."""
    algorithm = make("fcfl", lr=0.02, stage_one_steps=0, tolerance=10.0, weight_decay=0.0)
    path = np.stack([np.array([2.0, 3.0]), *(s.x for s in trace(algorithm, pulls((2.0, 3.0)), 500))])
    losses = 0.5 * ((path[:, None] - np.array([[1.0, 1.0], [-1.0, 1.0]])) ** 2).sum(-1)
    moved = (np.diff(path, axis=0) ** 2).sum(1)
    assert (np.diff(losses, axis=0) <= 0.5 * moved[:, None] + 1e-9).all()  # to first order none rises
    assert path[-1, 1] == pytest.approx(1, abs=1e-3) and abs(path[-1, 0]) <= 1 + 1e-3


def test_stage_two_does_not_raise_a_disparity_above_the_tolerance():
    """At the start the disparity is 0.5, above 0.25, and both losses would like to raise it."""
    algorithm = make("fcfl", lr=0.02, stage_one_steps=0, tolerance=0.25, weight_decay=0.0)
    path = np.stack([s.x for s in trace(algorithm, pulls((0.4, 0.5)), 100)])
    assert (path[:, 1] <= 0.5 + 1e-6).all()


def test_the_stages_follow_each_other():
    """Three steps of stage 1, then stage 2: the path is that of stage 1 up to there, and then the one-step answer of
    stage 2 from the same state."""
    one, both = (make("fcfl", lr=0.02, stage_one_steps=n) for n in (100, 3))
    task = pulls((0.6, 0.5))
    first, mixed = trace(one, task, 4), trace(both, task, 4)
    assert all(np.array_equal(a.x, b.x) for a, b in zip(first[:3], mixed[:3], strict=True))
    assert not np.allclose(first[3].x, mixed[3].x)
    from_there = pulls(np.asarray(mixed[2].x))
    alone = make("fcfl", lr=0.02, stage_one_steps=0, delta=float(mixed[2].widths[0]))
    assert np.array_equal(mixed[2].widths[:1], mixed[2].widths[1:])
    assert trace(alone, from_there, 1)[0].x == pytest.approx(np.asarray(mixed[3].x), abs=1e-12)


def test_weight_decay_pulls_towards_zero():
    plain, decayed = (trace(make("fcfl", lr=0.1, weight_decay=w), pulls((0.6, -0.5)), 1)[0].x for w in (0.0, 0.5))
    assert plain - decayed == pytest.approx(0.1 * 0.5 * np.array([0.6, -0.5]), abs=1e-12)


def test_one_constraint_is_asked_for():
    @struct
    class Two(Pulls):
        def constraints(self, x, batch, key):
            return x

    task = Task.create(Two(), Rows.from_clients(constants=np.zeros((2, 2))), jnp.zeros(2))
    with pytest.raises(UserError, match="FCFL takes one constraint.*Two has 2.*maximum as a vector of length 1"):
        simulate(make("fcfl", lr=0.1), task, rounds=1)


def test_clients_in_turn_reach_stage_two_as_well():
    """The reply reads the server's memory: also where clients run one after the other."""
    algorithm, task = make("fcfl", lr=0.05, stage_one_steps=2), limited()
    together, in_turn = (simulate(algorithm, task, rounds=4, client_axis=axis) for axis in ("vmap", "map"))
    assert together.server.x == pytest.approx(np.asarray(in_turn.server.x), abs=1e-9)
    assert together.server.widths == pytest.approx(np.asarray(in_turn.server.widths), abs=1e-9)
    assert int(together.server.steps) == int(in_turn.server.steps) == 4
