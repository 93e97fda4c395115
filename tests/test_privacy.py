"""Transforms of uploads and differential privacy: what they do, what they guarantee, what they cost."""

import sys
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, TASKS, regression
from dp_accounting.pld.accountant import get_smallest_gaussian_noise
from dp_accounting.pld.common import DifferentialPrivacyParameters
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats

from nestfed import make, simulate, struct, sweep
from nestfed.algorithms.fedavg import FedAvg
from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.rows import Rows
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.problems import SingleLevel
from nestfed.problems.robust import KL
from nestfed.problems.toys import quadratics
from nestfed.report.record import Record
from nestfed.uploads.privacy import CentralDP, LocalDP, list_transforms
from nestfed.uploads.transforms import (
    Clip,
    ClipMean,
    GaussianNoise,
    Quantise,
    ServerNoise,
    Sparsify,
    compute_joint_norm,
)
from nestfed.verbs.conformance import NonConforming, check_algorithm
from nestfed.verbs.cost import find_spending, measure
from nestfed.verbs.messages import deploy
from nestfed.verbs.progress import Progress
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.stages import Budget, StageTrace, Trace

KEY = jax.random.key(3)
vectors = st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=6, max_size=6).map(np.array)
LOCAL = LocalDP(clip=1.0, noise_multiplier=2.0, delta=1e-5)
CENTRAL = CentralDP(clip=1.0, noise_multiplier=2.0, delta=1e-5)


def tree_of(vector):
    return {"a": jnp.asarray(vector[:4]).reshape(2, 2), "b": jnp.asarray(vector[4:])}


def flat(tree):
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])


# ------------------------------------------------------------------------------------------------- transforms


@settings(max_examples=50, deadline=None)
@given(vectors, st.floats(1e-3, 1e4))
def test_a_clip_shortens_the_whole_upload_and_nothing_else(vector, norm):
    tree = tree_of(vector)
    clipped = Clip(norm=norm).apply(tree, KEY)
    length = np.linalg.norm(vector)
    assert compute_joint_norm(clipped) <= norm * (1 + 1e-12)
    expected = vector * min(1, norm / length if length else 1)
    assert_allclose(flat(clipped), expected, rtol=1e-12, atol=1e-300)  # XLA takes the tiniest numbers for zero
    assert bool(Clip(norm=norm).clips(tree)) == (float(compute_joint_norm(tree)) > norm)
    if length < norm * (1 - 1e-12):
        assert (flat(clipped) == vector).all()  # not even a last digit


KEYS = jax.random.split(KEY, 4000)
MANY = {
    name: jax.jit(lambda tree, transform=transform: jax.vmap(lambda key: transform.apply(tree, key))(KEYS))
    for name, transform in {"sparse": Sparsify(fraction=0.5), "two bits": Quantise(bits=2)}.items()
}


@settings(max_examples=10, deadline=None)
@given(vectors)
@pytest.mark.parametrize("name", MANY)
def test_compressed_uploads_are_right_in_the_mean(name, vector):
    sent = np.concatenate([np.reshape(a, (len(KEYS), -1)) for a in jax.tree.leaves(MANY[name](tree_of(vector)))], 1)
    largest = np.abs(vector).max()
    error = np.sqrt(np.abs(vector) * largest / len(KEYS))  # of either: no variance is above |v| x the largest
    assert (np.abs(sent.mean(0) - vector) <= 5 * error + 10 * largest / len(KEYS)).all()
    assert (sent.std(0) <= 1.5 * np.sqrt(np.abs(vector) * largest) + 0.1 * largest).all()


def test_what_compressed_uploads_look_like():
    vector = np.array([0.0, 0.3, -1.0, 0.7, 2.0, 0.0])
    sparse = flat(Sparsify(fraction=0.3).apply(tree_of(vector + 5), KEY))
    assert (sparse[:4] != 0).sum() == 2 and (sparse[4:] != 0).sum() == 1  # 0.3 of 4 and of 2, upwards
    assert_allclose(sparse[sparse != 0], ((vector + 5) * [2, 2, 2, 2, 2, 2])[sparse != 0], rtol=1e-12)
    rounded = flat(Quantise(bits=3).apply(tree_of(vector), KEY))
    assert rounded[0] == rounded[5] == 0
    assert_allclose(rounded[[2, 4]], [-1, 2], rtol=1e-15)
    assert_allclose(rounded[:4] * 3, np.round(rounded[:4] * 3), atol=1e-12)  # three levels on either side


@pytest.mark.parametrize(
    ("uploads", "words"),
    [
        (Clip(norm=0.0), "norm"),
        (Sparsify(fraction=0.0), "fraction"),
        (Quantise(bits=1), "bits"),
        ((LOCAL, CENTRAL), "two guarantees"),
        ((CENTRAL, Quantise(bits=8)), "after CentralDP"),
        ((1.0,), "nestfed.uploads"),
    ],
)
def test_wrong_uploads_are_refused(uploads, words):
    with pytest.raises(UserError, match=words):
        list_transforms(uploads)


# ------------------------------------------------------------------------------------------------- in a run


@struct
class Nothing(SingleLevel):
    """No loss at all."""

    def loss(self, x, batch, key):
        return 0 * jnp.sum(x) + 0 * batch


@struct
class Silent(Algorithm):
    """Uploads zeros twice in a round: what comes back is the noise."""

    family = "single level"

    class State(NamedTuple):
        x: Shared
        y: Shared

    def init(self, problem, params, draw, fed):
        return self.State(*params, fed.mean(jnp.zeros_like(params[0])))

    def step(self, problem, s, draw, fed):
        return self.State(fed.mean(jnp.zeros_like(s.x)), fed.mean(jnp.zeros_like(s.x), around=fed.server.x))


WEIGHTS = np.array([0.5, 0.3, 0.2])
SIZE = 4000


@pytest.mark.parametrize(
    ("uploads", "deviation"),
    [(LOCAL, 4.0 * np.sqrt((WEIGHTS**2).sum())), (CENTRAL, 4.0 * WEIGHTS.max())],
    ids=["local", "central"],
)
def test_noise_has_the_promised_distribution(uploads, deviation):
    task = Task.create(Nothing(), Rows.from_clients(constants=np.zeros(3)), jnp.zeros(SIZE), weights=WEIGHTS)
    options = {"uploads": uploads, "progress": False, "noise_seed": 5}
    one, two = (simulate(Silent(), task, rounds=r, **options) for r in (1, 2))
    x = np.asarray(one.server.x)
    last = two.server.y - x + x / np.linalg.norm(x)  # it sent what is news, -x, clipped to norm 1
    draws = np.stack([x, one.server.y, two.server.x, last]) / deviation
    # One test of all numbers together: several would have to share the level of significance.
    assert stats.kstest(draws.ravel(), "norm").pvalue > 0.001
    assert abs(np.var(draws) - 1) < 5 * np.sqrt(2 / draws.size)
    independent = np.corrcoef(draws) - np.eye(4)
    assert np.abs(independent).max() < 5 / np.sqrt(SIZE)  # exchanges and rounds have noise of their own
    # There is no signal, and the result says so.
    assert (two.history["signal_to_noise"][1:] < 0.3).all()
    assert any("drowns the signal" in note for note in two.remarks)


def test_a_transform_acts_on_what_is_news():
    curvatures, centers, start = (1.0, 4.0, 2.0), (10.0, -1.0, 0.5), 0.0
    task = quadratics(curvatures, centers)
    result = simulate(make("fedavg", lr=0.5), task, rounds=2, uploads=Clip(norm=1.5), progress=False)
    x, clipped = start, []
    for _ in range(2):
        news = [-0.5 * a * (x - c) for a, c in zip(curvatures, centers, strict=True)]
        clipped.append(np.mean([abs(step) > 1.5 for step in news]))
        x += np.mean([np.clip(step, -1.5, 1.5) for step in news])
    assert_allclose(result.server.x, [x], rtol=1e-12)
    assert_allclose(result.history["clipped_uploads"], [np.nan, *clipped])
    # The mean of the steps, clipped.
    steps = [-0.5 * a * (start - c) for a, c in zip(curvatures, centers, strict=True)]
    result = simulate(make("fedavg", lr=0.5), task, rounds=1, uploads=ClipMean(norm=0.1), progress=False)
    assert_allclose(result.server.x, [np.clip(np.mean(steps), -0.1, 0.1)], rtol=1e-12)


def test_a_clipped_mean_hides_nothing_about_the_noise():
    """The ratio of signal and noise is that of the mean before it is clipped."""
    task, noise = regression((5, 9, 7)), GaussianNoise(sigma=0.01)
    free, short = (
        simulate(make("fedavg", lr=0.1), task, rounds=1, uploads=uploads, progress=False, noise_seed=0)
        for uploads in (noise, (noise, ClipMean(norm=1e-3)))
    )
    assert_allclose(short.history["signal_to_noise"], free.history["signal_to_noise"], rtol=1e-12)
    assert np.linalg.norm(short.server.x - task.params[0]) == pytest.approx(1e-3)
    assert np.linalg.norm(free.server.x - task.params[0]) > 1e-2


@struct
class Plain(FedAvg):
    """FedAvg that does not say what its upload lies around."""

    def step(self, problem, s, draw, fed):
        x = s.x - self.lr * problem.gradient(s.x, draw(0))
        return self.State(fed.mean(x) if fed.sync else x)


def test_without_transforms_nothing_changes():
    task = regression((5, 9, 7))
    options = {"rounds": 3, "cohort": 2, "progress": False}
    plain, named = (simulate(cls(lr=0.1, local_steps=2), task, **options) for cls in (Plain, FedAvg))
    assert (plain.server.x == named.server.x).all() and list(plain.history) == list(named.history)
    # And a transform that changes nothing changes nothing but the last digits.
    wide = simulate(FedAvg(lr=0.1, local_steps=2), task, uploads=Clip(norm=1e9), **options)
    assert_allclose(wide.server.x, named.server.x, rtol=1e-12)
    assert_allclose(wide.history["loss"], named.history["loss"], rtol=1e-12)


@struct
class Confused(FedAvg):
    """Names a private value as what everybody knows."""

    def step(self, problem, s, draw, fed):
        x = s.x - self.lr * problem.gradient(s.x, draw(0))
        return self.State(fed.mean(x, around=x / 2))


def test_what_uploads_lie_around_must_be_known_to_everybody():
    with pytest.raises((UserError, NonConforming), match="private"):
        check_algorithm(Confused(lr=0.1), regression())
    with pytest.raises(UserError, match="private"):
        simulate(Confused(lr=0.1), regression(), rounds=1, uploads=Clip(norm=1.0), progress=False)


NOISY = {
    # a gather and a mean
    "fastdro": LocalDP(clip=3.0, noise_multiplier=0.01, delta=1e-5),
    # an exchange at the start, and two fields that lie around broadcast ones
    "fcsg-m": CentralDP(clip=3.0, noise_multiplier=0.01, delta=1e-5),
    # several arrays, compressed
    "scaffold": (Clip(norm=2.0), Sparsify(fraction=0.5), Quantise(bits=6), GaussianNoise(sigma=0.01)),
}


@pytest.mark.parametrize("name", NOISY)
def test_simulation_equals_deployment(name):
    algorithm, task = CASES[name].algorithm(name), TASKS[CASES[name].task]((5, 9, 7))
    options = {"rounds": 2, "cohort": 2, "uploads": NOISY[name], "noise_seed": 3}
    quiet = {"evaluate_every": None, "progress": False}
    together = simulate(algorithm, task, **options, **quiet, client_axis="vmap")
    in_turn = simulate(algorithm, task, **options, **quiet, client_axis="map")
    server, clients, _ = deploy(algorithm, task, **options)
    same = lambda one, other: jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-9, atol=1e-11), one, other)
    same((together.server, together.clients), (server, clients))
    same((together.server, together.clients), (in_turn.server, in_turn.clients))
    for column in {"signal_to_noise", "clipped_uploads"} & set(together.history):
        assert_allclose(together.history[column], in_turn.history[column], rtol=1e-6)


def test_what_cannot_be_protected_is_refused():
    kl = Task.create(
        KL(losses=lambda x, batch, key: (batch[0] @ x - batch[1]) ** 2, price=2.0), regression().data, jnp.zeros(3)
    )
    with pytest.raises(UserError, match="Scaled.*chi-square"):
        simulate(make("feddro", lr=0.1), kl, rounds=1, uploads=LOCAL, progress=False)
    with pytest.raises(UserError, match="fed.gather.*LocalDP"):
        task = TASKS["losses of rows"]()
        simulate(make("fastdro", lr=0.1, levels=1), task, rounds=1, uploads=CENTRAL, progress=False)


def test_metrics_are_exact():
    task = regression()
    options = {"rounds": 1, "progress": False}
    noisy, exact = (simulate(make("fedavg", lr=0.1), task, uploads=u, **options) for u in (LOCAL, ()))
    assert noisy.history["loss"][0] == exact.history["loss"][0]
    assert noisy.history["loss"][1] != exact.history["loss"][1]


def test_a_row_of_a_sweep_is_a_run():
    task, settings_ = regression(), [make("fedavg", lr=lr) for lr in (0.05, 0.1)]
    options = {"rounds": 3, "evaluate_every": 2, "progress": False, "uploads": LOCAL, "noise_seed": 1}
    rows, alone = sweep(settings_, task, [0, 1], **options), simulate(settings_[1], task, 1, **options)
    assert list(rows.history["round"]) == list(alone.history["round"]) == [0, 2, 3]
    for name in ("loss", "signal_to_noise", "clipped_uploads", "epsilon"):
        assert_allclose(rows.history[name][1, 1], alone.history[name], rtol=1e-9)
    assert rows.spending[1].epsilon(3) == alone.spending.epsilon(3)


def test_the_bar_of_a_sweep_shows_what_is_spent(monkeypatch):
    shown = []
    monkeypatch.setattr(Progress, "update", lambda bar, done, speed, values: shown.append((done, values)))
    settings_ = [make("fedavg", lr=0.1, local_steps=steps) for steps in (1, 2)]  # two programs
    rows = sweep(settings_, regression(), rounds=3, progress=False, uploads=LOCAL)
    assert shown[-1] == (6, {"epsilon": rows.spending[1].epsilon(3)})
    assert all(values["epsilon"] > 0 for _, values in shown)


# ------------------------------------------------------------------------------------------------- the ledger


def test_the_ledger_knows_what_compressed_uploads_cost():
    task = regression()
    d, value = task.params[0].size, task.params[0].dtype.itemsize
    up = lambda *uploads: measure(make("fedavg", lr=0.1), task, uploads=uploads).round.bytes_up
    assert up() == up(Clip(norm=1.0)) == up(GaussianNoise(sigma=1.0)) == up(LOCAL) == up(CENTRAL) == d * value == 32
    assert up(Sparsify(fraction=0.5)) == d // 2 * (value + 4)
    assert up(Quantise(bits=4)) == d * 4 // 8 + value
    assert up(Sparsify(fraction=0.5), Quantise(bits=4)) == d // 2 * 4 + d // 2 * 4 // 8 + value
    assert up(Sparsify(fraction=0.5), LOCAL) == d * value  # noise falls on all numbers
    down = measure(make("fedavg", lr=0.1), task, uploads=Quantise(bits=4)).round.bytes_down
    assert down == d * value
    gathers = lambda *uploads: measure(CASES["fedmbo"].algorithm("fedmbo"), TASKS["global bilevel"](), uploads=uploads)
    assert gathers(Quantise(bits=8)).round.bytes_up < gathers().round.bytes_up / 2


# ------------------------------------------------------------------------------------------------- what is spent


def test_noise_of_the_paper():
    printed = {"clip": 10.0, "sensitivity_factor": 1, "mechanism": "paper", "as_printed": True}
    for epsilon, delta, sigma in ((1, 1e-5, 48.4481), (0.5, 1e-5, 96.8961), (10, 1e-5, 4.8448), (1, 1e-3, 37.7648)):
        assert_allclose(LocalDP(epsilon=epsilon, delta=delta, **printed).sigma, sigma, atol=5e-5)
    with pytest.raises(UserError, match="epsilon < 1 only.*analytic Gaussian mechanism"):
        LocalDP(epsilon=1, delta=1e-5, clip=10.0, mechanism="paper")
    # Where the formula holds it is valid and wasteful; the sensitivity is twice the clip.
    paper, exact = (LocalDP(epsilon=0.5, delta=1e-5, clip=10.0, mechanism=m) for m in ("paper", "analytic"))
    assert_allclose(paper.sigma, 2 * 96.8961, atol=1e-4)
    assert exact.sigma < paper.sigma
    # What it says of epsilon = 1 with the clip as sensitivity is not what is spent.
    spent = find_spending(make("fedavg", lr=0.1), regression(), uploads=LocalDP(epsilon=1, delta=1e-5, **printed))
    assert 1 < spent.epsilon(1) < 2


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_analytic_mechanism_gives_the_epsilon_that_was_asked_for(epsilon):
    guarantee = LocalDP(epsilon=epsilon, delta=1e-6, clip=3.0)
    assert_allclose(
        guarantee.sigma, get_smallest_gaussian_noise(DifferentialPrivacyParameters(epsilon, 1e-6), 1, 6.0), rtol=1e-3
    )
    assert_allclose(
        find_spending(make("fedavg", lr=0.1), regression(), uploads=guarantee).epsilon(1), epsilon, rtol=1e-6
    )


def test_composition_agrees_with_the_library():
    delta, rounds = 1e-5, 7
    task, algorithm = TASKS["conditional"](), CASES["fcsg-m"].algorithm("fcsg-m")  # exchanges at the start too
    local = find_spending(algorithm, task, uploads=LOCAL, cohort=2)
    assert (local.start, local.round, local.cohort) == (1, 1, None)  # the server sees who sends
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.0), local.start + rounds * local.round)
    assert_allclose(local.epsilon(rounds), accountant.get_epsilon(delta), rtol=1e-3)

    nested = CASES["mbsgd"].algorithm("mbsgd")  # two exchanges in a round
    many = TASKS["global composition"]((4,) * 50)
    central = find_spending(nested, many, uploads=CENTRAL, cohort=2)
    assert (central.start, central.round, central.cohort) == (0, 2, 2)
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    both = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(50, 2, both), 100)
    assert_allclose(central.epsilon(100), accountant.get_epsilon(delta), rtol=1e-12)
    assert central.epsilon(100) < find_spending(nested, many, uploads=CENTRAL).epsilon(100) / 2  # sampling amplifies
    uneven = Task.create(many.problem, many.data, jnp.zeros(3), weights=np.arange(1, 51), batch_size=4)
    assert find_spending(nested, uneven, uploads=CENTRAL, cohort=2).cohort is None
    # Clients that keep a state: what one of them says depends on who was drawn before, and the proof does not hold.
    keeping = CASES["scaffold"].algorithm("scaffold")
    assert find_spending(keeping, TASKS["single level"]((4,) * 50), uploads=CENTRAL, cohort=2).cohort is None


def test_a_run_stops_where_the_budget_is_spent(tmp_path):
    algorithm, task = make("fedavg", lr=0.1), regression()
    guarantee = lambda budget: LocalDP(clip=1.0, noise_multiplier=4.0, delta=1e-5, budget=budget)
    options = {"rounds": 9, "evaluate_every": 2, "progress": False, "noise_seed": 0}
    file = {"checkpoint": tmp_path / "run.npz", "resume": True}
    short = simulate(algorithm, task, uploads=guarantee(2.0), **options, **file)
    done = int(short.run.round)
    assert 1 < done < 9 and len(short.participants) == done
    assert short.spending.epsilon(done) <= 2.0 < short.spending.epsilon(done + 1)
    assert_allclose(short.history["epsilon"], [short.spending.epsilon(r) for r in short.history["round"]])
    assert short.history["round"][-1] == done and short.history["epsilon"][0] == 0
    assert any(f"stopped after round {done} of 9" in note for note in short.remarks)
    # A larger budget goes on from there, as if nothing had happened.
    longer, whole = (simulate(algorithm, task, uploads=guarantee(99.0), **options, **f) for f in (file, {}))
    assert (longer.server.x == whole.server.x).all() and int(longer.run.round) == 9
    assert not any("stopped" in note for note in longer.remarks)
    assert_allclose(longer.history["epsilon"][-1], whole.history["epsilon"][-1])
    # A second run on the same data adds to the first, and its budget is for both.
    again = LocalDP(clip=1.0, noise_multiplier=4.0, delta=1e-5, earlier=short.spent)
    assert_allclose(
        find_spending(algorithm, task, uploads=again).epsilon(2), short.spending.epsilon(done + 2), rtol=1e-9
    )
    assert sweep([algorithm], task, uploads=guarantee(2.0), **options).history["round"][-1] == done
    with pytest.raises(UserError, match="the first round spends"):
        simulate(algorithm, task, uploads=guarantee(0.01), **options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip": -1.0}, "clip=-1.0.*above 0"),
        ({"delta": 1.0}, "delta=1.0.*between 0 and 1"),
        ({"noise_multiplier": None}, "give one of them"),
        ({"epsilon": 1.0}, "give one of them"),
        ({"sensitivity_factor": 3}, "sensitivity_factor"),
        ({"mechanism": "guess"}, "analytic"),
    ],
)
def test_wrong_guarantees_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        LocalDP(**{"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5} | settings)


def test_without_the_accountant_there_is_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'nestfed\[privacy\]'"):
        simulate(make("fedavg", lr=0.1), regression(), rounds=1, uploads=LOCAL, progress=False)


def test_the_guarantees_are_clips_and_noise():
    clip, noise = LOCAL.transforms
    assert (clip.norm, noise.sigma) == (1.0, 4.0) and isinstance(noise, GaussianNoise)
    clip, noise = CENTRAL.transforms
    assert (clip.norm, noise.scale) == (1.0, 4.0) and isinstance(noise, ServerNoise)


# ------------------------------------------------------------------------------------------------- the command line


def test_a_named_run_with_privacy(call, tmp_path):
    words = [
        "run", "fairness", "--data", "german", "-a", "fedavg", "-a", "fedbio", "--steps", "20", "--evaluations", "4",
        "--privacy", "local", "--clip", "1", "--noise-multiplier", "2", "--epsilon-budget", "4.2", "--noise-seed", "0",
        "--out", "private",
    ]  # fmt: skip
    code, out, err = call(*words)
    assert code == 0, err
    assert "drowns the signal" in out and "would exceed the budget" in out
    record = Record.load(tmp_path / "private")
    spent = record.about["privacy"]
    for method in ("fedavg", "fedbio"):
        rows = record.history[record.history.method == method]
        assert rows["epsilon"].is_monotonic_increasing  # through the stages
        assert_allclose(rows["epsilon"].iloc[-1], spent[method]["epsilon"])
        assert 3.7 < spent[method]["epsilon"] < 3.71  # three rounds of all stages together
    page = (tmp_path / "private" / "report.html").read_text()
    assert f"epsilon {max(s['epsilon'] for s in spent.values()):.3g}" in page
    keys = ("privacy", "clip", "noise_multiplier", "epsilon_budget", "noise_seed")
    said = {key: record.settings[key] for key in keys if key in record.settings}
    assert said == {"privacy": "local", "clip": 1.0, "noise_multiplier": 2.0, "epsilon_budget": 4.2, "noise_seed": 0}
    assert call(*words[:-2], "--clip", "0")[0] == 1
    code, _, err = call("run", "fairness", "--clip", "1")
    assert code == 1 and "privacy local or central" in err


def test_a_named_run_with_poisson_cohorts_and_repeatable_noise(call, tmp_path):
    words = [
        "run", "fairness", "--data", "german", "-a", "fedbio", "--steps", "20", "--clients", "6", "--evaluations", "2",
        "--privacy", "central", "--clip", "1", "--noise-multiplier", "1.5", "--neighbours", "add-or-remove",
        "--cohort", "2", "--sampling", "poisson",
    ]  # fmt: skip
    for out in ("one", "other"):
        code, said, err = call(*words, "--noise-seed", "4", "--out", out)
        assert code == 0, err
        assert "it protects nobody" in said
    one, other = (Record.load(tmp_path / name) for name in ("one", "other"))
    assert (
        one.history.equals(other.history) and one.about["privacy"]["fedbio"]["sampling"] == "2 of 6 clients (Poisson)"
    )
    assert one.about["privacy"]["fedbio"]["neighbours"] == "add-or-remove"
    code, _, err = call("run", tmp_path / "one" / "settings.toml", "--out", "again")  # the file says it all
    assert code == 0 and Record.load(tmp_path / "again").history.equals(one.history), err
    code, _, err = call(*words, "--out", "fresh", "--quiet")
    assert code == 0 and not Record.load(tmp_path / "fresh").history.equals(one.history)
    assert "noise" not in Record.load(tmp_path / "fresh").about["privacy"]["fedbio"]
    for wrong, told in (
        (["--noise-seed", "1"], "noise_seed was given without privacy"),
        (["--neighbours", "replace"], "neighbours was given without privacy"),
        (["--sampling", "poisson"], "sampling='poisson' was given without cohort"),
    ):
        code, _, err = call("run", "fairness", "--data", "german", "--steps", "5", *wrong)
        assert code == 1 and told in err and "Traceback" not in err, err


def test_stages_share_no_noise_even_where_it_is_repeatable():
    budget, scenario = Budget(privacy=CENTRAL, noise_seed=3), Fairness()
    at_first = Trace("fedbio", 0, {})
    stage = StageTrace("weights", 5, {}, np.zeros(5), measure(make("fedavg", lr=0.1), regression()), 3, "last")
    later = at_first.extend(stage, None, "finished", {})
    assert len({budget.options(5, scenario, trace).noise_seed for trace in (at_first, later)}) == 2
