"""Noise that is drawn once: what a curious server can subtract, in every engine, and the generator itself."""

import dataclasses

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, TASKS, regression
from dp_accounting import NeighboringRelation
from numpy.testing import assert_allclose
from scipy import stats

from nestfed import make, simulate, struct, sweep
from nestfed.core.noise import compute_chacha20_block, convert_to_key, draw_fresh_key, make_repeatable_key
from nestfed.core.rows import Rows
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.problems import SingleLevel
from nestfed.uploads.privacy import CentralDP, LocalDP, Spending
from nestfed.uploads.transforms import GaussianNoise, Quantise
from nestfed.verbs.cost import find_spending
from nestfed.verbs.messages import (
    START,
    Member,
    Memory,
    Node,
    ProtocolError,
    Server,
    Standing,
    Ticket,
    deploy,
    select_client,
)
from nestfed.verbs.simulation import advance, start

SIZE = 2000


@struct
class Nothing(SingleLevel):
    """No loss at all: what comes back is noise."""

    def loss(self, x, batch, key):
        return 0 * jnp.sum(x) + 0 * batch


def silence(clients: int = 3) -> Task:
    return Task.create(Nothing(), Rows.from_clients(constants=np.zeros(clients)), jnp.zeros(SIZE))


LOCAL = LocalDP(clip=1.0, noise_multiplier=1.0, delta=1e-5)
CENTRAL = CentralDP(clip=1.0, noise_multiplier=1.0, delta=1e-5)
PLAIN = GaussianNoise(sigma=1.0)
FEDAVG = make("fedavg", lr=0.1)
QUIET = {"progress": False, "evaluate_every": None}


def unrelated(*draws):
    """No two of these have noise in common: neither the same nor a multiple of it."""
    draws = np.stack([np.ravel(d) for d in draws])
    assert (draws.std(axis=1) > 0).all()
    return np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 5 / np.sqrt(draws.shape[1])


# ------------------------------------------------------------------------------------------------- the generator


def test_blocks_are_those_of_the_standard():
    """RFC 8439, 2.3.2 and the first three of appendix A.1."""
    words = lambda text: np.frombuffer(bytes.fromhex(text), np.uint32)
    key, nonce = bytes(range(32)).hex(), "000000090000004a00000000"
    block = np.asarray(compute_chacha20_block(words(key), jnp.uint32(1), words(nonce)))
    assert block.tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9"
        "cbd083e8a2503c4e"
    )
    zero = np.zeros(8, np.uint32)
    for counter, start_ in ((0, "76b8e0ada0f13d90405d6ae55386bd28"), (1, "9f07e7be5551387a98ba977c732d080d")):
        block = np.asarray(compute_chacha20_block(zero, jnp.uint32(counter), zero[:3]))
        assert block.tobytes().hex().startswith(start_)


def test_keys_work_as_those_of_jax():
    key = convert_to_key(bytes(range(32)))
    normal = np.asarray(jax.random.normal(key, (40_000,)))
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    folded = [np.asarray(jax.random.normal(jax.random.fold_in(key, i), (SIZE,))) for i in range(3)]
    split = [np.asarray(jax.random.normal(k, (SIZE,))) for k in jax.random.split(key, 3)]
    assert unrelated(*folded, *split, normal[:SIZE])
    together = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (SIZE,)))(jnp.arange(3))
    assert np.array_equal(together, folded)
    assert jax.random.bits(key, (5,), "uint8").dtype == np.uint8 and jax.random.uniform(key, (3,), float).shape == (3,)


def test_keys_are_fresh_unless_a_number_is_given():
    run = jax.random.key(0)
    data = lambda key: jax.random.key_data(key).tolist()
    assert data(draw_fresh_key()) != data(draw_fresh_key())
    assert data(make_repeatable_key(3, run)) == data(make_repeatable_key(3, run))
    assert len({tuple(data(make_repeatable_key(n, jax.random.key(r)))) for n in (3, 2**40 + 3) for r in (0, 1)}) == 4
    with pytest.raises(UserError, match="noise_seed='3'.*whole number"):
        simulate(FEDAVG, regression(), rounds=1, uploads=LOCAL, noise_seed="3", progress=False)


# ------------------------------------------------------------------------------------------------- subtract it


@pytest.mark.parametrize("uploads", [LOCAL, CENTRAL, PLAIN], ids=["local", "central", "noise alone"])
@pytest.mark.parametrize("axis", ["vmap", "map"])
def test_two_runs_with_one_seed_share_no_noise(uploads, axis):
    runs = [simulate(FEDAVG, silence(), 5, rounds=1, uploads=uploads, client_axis=axis, **QUIET) for _ in range(2)]
    assert unrelated(*(run.server.x for run in runs))
    earlier = [simulate(FEDAVG, silence(), 5, rounds=1, uploads=LOCAL, noise_seed=1, **QUIET) for _ in range(2)]
    assert np.array_equal(*(run.server.x for run in earlier))  # unless that is asked for, and then it is said
    assert any("noise_seed, which is for tests" in note for note in earlier[0].remarks)
    assert earlier[0].spending.summarise(1)["noise"] == "repeatable: for tests"


def test_rounds_repeated_from_one_state_share_no_noise():
    task, run = silence(), start(FEDAVG, silence(), 0, uploads=LOCAL)
    after = [advance(FEDAVG, task, 0, run, rounds=1, uploads=LOCAL, evaluate_every=None)[0].server.x for _ in range(2)]
    assert unrelated(*after)


def test_a_run_that_goes_on_from_a_file_shares_no_noise(tmp_path):
    options = {"uploads": LOCAL, "checkpoint": tmp_path / "run.npz", "progress": False}
    first = simulate(FEDAVG, silence(), 0, rounds=1, **options).server.x
    saved = (tmp_path / "run.npz").read_bytes()
    ends = []
    for _ in range(2):
        (tmp_path / "run.npz").write_bytes(saved)
        ends.append(simulate(FEDAVG, silence(), 0, rounds=2, resume=True, **options).server.x)
    assert unrelated(first, *(end - first for end in ends))


def test_settings_seeds_and_rounds_of_a_sweep_share_no_noise():
    settings = [make("fedavg", lr=lr) for lr in (0.1, 0.2)]
    runs = sweep(settings, silence(), [3, 4], rounds=1, uploads=LOCAL, **QUIET).runs
    again = sweep(settings, silence(), [3, 4], rounds=1, uploads=LOCAL, **QUIET).runs
    assert unrelated(*(run.server.x[seed] for both in (runs, again) for run in both for seed in (0, 1)))


def test_a_trusted_server_never_repeats_its_noise():
    """The same round with the same answers, asked twice: as after going back to a checkpoint."""
    task = silence()
    nodes = {k: Node(FEDAVG, select_client(task, k), 0, uploads=CENTRAL) for k in range(3)}
    server, members = Server(FEDAVG, task, 0, uploads=CENTRAL), dict.fromkeys(range(3), Member(1 / 3))
    send = lambda tickets: ((k, nodes[k].receive(ticket)) for k, ticket in tickets.items())
    position = server.serve(START, None, members, send)
    assert unrelated(*(server.serve(0, position, members, send).server.x for _ in range(3)))
    assert not np.array_equal(*(deploy(FEDAVG, task, 0, rounds=1, uploads=LOCAL).server.x for _ in range(2)))


# ------------------------------------------------------------------------------------------------- at a node


def node(uploads=LOCAL, secret=b"0123456789abcdef", store=None, algorithm=FEDAVG, task=None):
    task = silence(1) if task is None else task
    return Node(algorithm, task, 0, store, uploads=uploads, secret=secret)


BEGUN = Standing(START, 7, None)


def asked(node, *tickets):
    answers = [node.receive(ticket) for ticket in (Ticket(START, 7, 0), *tickets)]
    return answers[-1]


def call_up(round=0, value=0.0, share=1.0, attempt=1):
    since = BEGUN if round == 0 else Standing(round - 1, 1, None)
    return Ticket(round, attempt, 0, None, FEDAVG.State(np.full(SIZE, value)), share, since)


def test_a_node_needs_a_secret_that_cannot_be_guessed():
    wrong = {None: "secrets.token_bytes", 5: "a int", 2**40 + 5: "16 random bytes", b"short": "5 bytes"}
    for secret, words in wrong.items():
        with pytest.raises(UserError, match=words):
            node(secret=secret)
    node(uploads=CENTRAL, secret=None)  # the server's noise is not the node's
    node(uploads=Quantise(bits=4), secret=None)  # rounding hides nothing


def test_a_node_binds_its_noise_to_all_that_it_was_told():
    same, other_secret = (asked(node(secret=s), call_up())[0] for s in (b"0123456789abcdef", b"0123456789abcdeF"))
    assert np.array_equal(same, asked(node(), call_up())[0])  # a question repeated is answered alike
    moved = asked(node(), call_up(value=2.0))[0] - 2.0
    shared = asked(node(), call_up(share=0.5))[0]
    next_round = node()
    next_round.receive(Ticket(START, 7, 0))
    first = next_round.receive(call_up())[0]
    second = next_round.receive(call_up(round=1))[0]
    assert np.array_equal(first, same)
    another = asked(node(algorithm=make("fedavg", lr=0.2)), call_up())[0]
    rows = Task.create(Nothing(), Rows.from_clients(constants=np.ones(1)), jnp.zeros(SIZE))
    other_rows = asked(node(task=rows), call_up())[0]
    assert unrelated(same, other_secret, moved, shared, second, another, other_rows)


def test_a_node_refuses_a_question_that_differs_from_the_one_it_answered_with_noise():
    speaking = node()
    answer = asked(speaking, call_up())
    assert np.array_equal(speaking.receive(call_up())[0], answer[0])
    assert np.array_equal(speaking.receive(call_up(attempt=2))[0], answer[0])
    with pytest.raises(ProtocolError, match="exchange 0 of round 0 was asked again with other values"):
        speaking.receive(call_up(value=1e-3))
    with pytest.raises(ProtocolError, match="asked again with other values"):
        speaking.receive(call_up(share=0.5))
    # The next round is answered, and after that nobody goes back.
    speaking.receive(call_up(round=1))
    with pytest.raises(ProtocolError, match="asked again with other values"):
        speaking.receive(call_up(value=1.0))


def test_a_node_refuses_other_answers_in_the_middle_of_a_round():
    """Another mean leads to another question: its noise must not be that of the first."""
    algorithm, task = CASES["mbsgd"].algorithm("mbsgd"), TASKS["global composition"]((6,))
    speaking = node(algorithm=algorithm, task=task)
    state = algorithm.State(np.zeros(3))

    def ticket(exchange, answer):
        return Ticket(0, 1, exchange, answer, *((state, 1.0, BEGUN) if exchange == 0 else ()))

    asked(speaking, ticket(0, None))
    one = speaking.receive(ticket(1, [np.array([0.5, 1.0])]))
    speaking.receive(ticket(0, None))  # the round once more, as it was
    assert np.array_equal(speaking.receive(ticket(1, [np.array([0.5, 1.0])]))[0], one[0])
    speaking.receive(ticket(0, None))
    with pytest.raises(ProtocolError, match="exchange 1 of round 0 was asked again with other values"):
        speaking.receive(ticket(1, [np.array([0.5, 1.1])]))


def test_a_node_keeps_its_secret_through_restarts():
    store = Memory()
    answer = asked(node(store=store), call_up())
    again = node(store=store)
    assert np.array_equal(again.receive(call_up())[0], answer[0])
    with pytest.raises(ProtocolError, match="asked again with other values"):
        again.receive(call_up(value=1.0))
    with pytest.raises(UserError, match="another one than this node's store was written with"):
        node(store=store, secret=b"another secret, of 32 bytes or so")


# ------------------------------------------------------------------------------------------------- what is spent


def accountant(relation):
    return dp_accounting.pld.PLDAccountant(relation)


@pytest.mark.parametrize(
    ("clients", "cohort", "multiplier", "rounds", "neighbours", "expected"),
    [
        (1000, 50, 1.1, 200, "replace", 2.644),
        (1000, 50, 1.1, 200, "add-or-remove", 3.962),
        (20, 10, 3.0, 40, "replace", 0),
    ],
)
def test_poisson_cohorts_are_counted_as_tightly_as_the_library_can(
    clients, cohort, multiplier, rounds, neighbours, expected
):
    task = regression((1,) * clients)
    central = CentralDP(clip=1.0, noise_multiplier=multiplier, delta=1e-5, neighbours=neighbours)
    spent = find_spending(FEDAVG, task, uploads=central, cohort=cohort, sampling="poisson")
    assert (spent.cohort, spent.chance) == (cohort, pytest.approx(cohort / clients))
    relation, factor = NeighboringRelation.ADD_OR_REMOVE_ONE, 1
    if neighbours == "replace":
        relation, factor = NeighboringRelation.REPLACE_ONE, 2
    library = accountant(relation)
    library.compose(
        dp_accounting.PoissonSampledDpEvent(cohort / clients, dp_accounting.GaussianDpEvent(factor * multiplier)),
        rounds,
    )
    assert_allclose(spent.epsilon(rounds), library.get_epsilon(1e-5), rtol=1e-6)
    if expected:
        assert_allclose(spent.epsilon(rounds), expected, atol=1e-3)
    # Tighter than a cohort of a fixed size, and that than none.
    replace = dataclasses.replace(central, neighbours="replace")
    fixed = find_spending(FEDAVG, task, uploads=replace, cohort=cohort)
    if neighbours == "replace":
        assert spent.epsilon(rounds) < fixed.epsilon(rounds)
    assert spent.epsilon(0) == 0 and spent.epsilon(1) < spent.epsilon(2) < spent.epsilon(rounds)


@pytest.mark.parametrize(("chance", "expected"), [(0.001, 0.149), (None, 1.587)], ids=["poisson", "fixed size"])
def test_a_small_part_of_many_clients_costs_little(chance, expected):
    """100 of 100,000 clients for 1000 rounds, with delta 1e-6."""
    central = CentralDP(clip=1.0, noise_multiplier=0.8, delta=1e-6)
    assert_allclose(Spending(central, 0, 1, 100_000, cohort=100.0, chance=chance).epsilon(1000), expected, atol=1e-3)


def test_several_exchanges_and_stages_compose():
    """A round with two exchanges on one cohort, a start without sampling, and an earlier run."""
    task, algorithm = TASKS["global composition"]((4,) * 30), CASES["mbsgd"].algorithm("mbsgd")
    central = CentralDP(clip=1.0, noise_multiplier=2.0, delta=1e-6)
    spent = find_spending(algorithm, task, uploads=central, cohort=3, sampling="poisson")
    assert (spent.start, spent.round) == (0, 2)
    later = dataclasses.replace(
        spent, guarantee=dataclasses.replace(central, earlier=((spent, 20), (dataclasses.replace(spent, start=1), 0)))
    )
    library = accountant(NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0 / np.sqrt(2)))
    library.compose(event, 20 + 15).compose(dp_accounting.GaussianDpEvent(4.0))
    assert_allclose(later.epsilon(15), library.get_epsilon(1e-6), rtol=1e-4)


def test_clients_with_a_state_amplify_poisson_cohorts_only():
    """docs/privacy.md has the proof: coins are independent, cohorts of a fixed size are not."""
    task, scaffold = regression((1,) * 40), make("scaffold", lr=0.1)
    by = lambda sampling: find_spending(scaffold, task, uploads=CENTRAL, cohort=4, sampling=sampling)
    assert by("poisson").cohort == 4 and by("weights").cohort is None
    assert by("poisson").epsilon(10) < by("weights").epsilon(10)


def test_unequal_chances_are_counted_for_the_client_that_is_asked_most_often():
    task = regression((1,) * 10, weights=[5, 3, *[1] * 8])
    spent = find_spending(FEDAVG, task, uploads=CENTRAL, cohort=2, sampling="poisson")
    assert spent.chance == pytest.approx(2 * 5 / 16)
    alone = dataclasses.replace(spent, chance=1.0)
    assert_allclose(alone.epsilon(5), Spending(CENTRAL, 0, 1, 10).epsilon(5), rtol=1e-3)


def test_the_convention_of_noise_is_that_of_the_neighbours():
    central = lambda neighbours: CentralDP(clip=3.0, noise_multiplier=1.1, delta=1e-5, neighbours=neighbours)
    replace, add = central("replace"), central("add-or-remove")
    assert_allclose([replace.sigma, add.sigma], [2 * 1.1 * 3, 1.1 * 3])
    for guarantee in (replace, add):
        assert Spending(guarantee, 0, 1, 10).noise_multiplier == pytest.approx(1.1)
    told = CentralDP(clip=3.0, noise_multiplier=1.1, delta=1e-5, sensitivity_factor=1)
    assert told.sigma == pytest.approx(3.3) and Spending(told, 0, 1, 10).noise_multiplier == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("guarantee", "options", "words"),
    [
        ({"neighbours": "add-or-remove"}, {}, "sampling='poisson'"),
        ({"neighbours": "add-or-remove"}, {"cohort": 2}, "sampling='poisson'"),
        ({"neighbours": "others"}, {}, "replace or add-or-remove"),
        (
            {"neighbours": "add-or-remove", "earlier": ((Spending(CENTRAL, 0, 1, 3), 1),)},
            {},
            "same neighbours in all runs",
        ),
    ],
)
def test_what_the_neighbours_do_not_cover_is_refused(guarantee, options, words):
    with pytest.raises(UserError, match=words):
        central = CentralDP(clip=1.0, noise_multiplier=1.0, delta=1e-5, **guarantee)
        simulate(FEDAVG, regression(), rounds=1, uploads=central, progress=False, **options)
    local = LocalDP(clip=1.0, noise_multiplier=1.0, delta=1e-5, neighbours="add-or-remove")
    with pytest.raises(UserError, match="the server sees who uploads"):
        simulate(FEDAVG, regression(), rounds=1, uploads=local, cohort=2, sampling="poisson", progress=False)


def test_nobody_can_compute_who_takes_part_in_a_private_round():
    """Cohorts that amplify a guarantee are not drawn from the seed, which everybody knows."""
    task = regression((4,) * 40)
    who = lambda **options: simulate(make("scaffold", lr=0.1), task, 1, rounds=3, cohort=5, **QUIET, **options)
    moved = lambda result: tuple(np.flatnonzero(np.asarray(result.clients.c_k[:, 0]) != 0))
    assert len({moved(who(uploads=CENTRAL)) for _ in range(4)}) > 1
    assert len({moved(who(uploads=CENTRAL, noise_seed=1)) for _ in range(2)}) == 1
    assert len({moved(who(uploads=PLAIN)) for _ in range(2)}) == 1


def test_a_diverged_round_is_spent():
    wild = make("fedavg", lr=1e200, local_steps=3)
    with pytest.raises(Exception, match="diverged in round") as caught:
        simulate(wild, regression(), rounds=5, uploads=PLAIN_GUARANTEE, progress=False)
    result = caught.value.result
    ((_, rounds),) = result.spent
    assert rounds == int(result.run.diverged) + 1 == int(result.run.round) + 1


PLAIN_GUARANTEE = LocalDP(clip=1e300, noise_multiplier=1.0, delta=1e-5)
