"""Masks: the server reads sums, exactly, and nothing of one site."""

import itertools
import stat

import jax
import numpy as np
import pytest
from cases import CASES, TASKS
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy import stats

from nestfed import simulate
from nestfed.core.settings import UserError
from nestfed.sites.masks import (
    KEY_FILE,
    LIST_FILE,
    PREPARING,
    MaskedSums,
    SiteMask,
    make_mask_key,
    read_mask,
)
from nestfed.verbs.messages import START, LostClients, Member, Node, Occasion, Server, select_client

RAGGED = (5, 9, 7)
EVERYBODY = {k: Member(1 / 3) for k in range(3)}


def masks(number, run="a run"):
    private = [X25519PrivateKey.generate() for _ in range(number)]
    publics = {k: key.public_key().public_bytes_raw() for k, key in enumerate(private)}
    return [SiteMask(k, key, publics, run) for k, key in enumerate(private)]


def occasion(number, **changes):
    return Occasion(round=3, attempt=7, exchange=1, asked=tuple(range(number)))._replace(**changes)


def shapes_of(leaves):
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def look_uniform(words):
    """Do all bits of these words come and go like those of random ones? Wrong for one pair of samples in a million."""
    octets = np.bincount(words.view(np.uint8), minlength=256)
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).mean(0)
    apart = np.abs(bits - 0.5).max() * 2 * np.sqrt(words.size)
    return stats.chisquare(octets).pvalue > 1e-6 and 64 * 2 * stats.norm.sf(apart) > 1e-6


@pytest.mark.parametrize(("number", "error"), [(3, 3e-10), (10, 9e-10)])
def test_the_sum_is_the_weighted_mean_and_any_order_gives_the_same(number, error):
    random = np.random.default_rng(number)
    leaves = [[random.normal(size=(20, 5)), random.normal(size=300).astype(np.float32)] for _ in range(number)]
    parts = np.arange(1, number + 1) / sum(range(1, number + 1))
    sent = [mask(own, part, occasion(number)) for mask, own, part in zip(masks(number), leaves, parts, strict=True)]
    sums, totals = MaskedSums(), []
    for order in (range(number), reversed(range(number))):
        total = None
        for k in order:
            total = sums.add(total, sent[k])
        totals.append(total)
    assert np.array_equal(totals[0][0], totals[1][0])
    wide = [jax.ShapeDtypeStruct((20, 5), np.float64), jax.ShapeDtypeStruct((300,), np.float64)]
    for i, mean in enumerate(sums.reveal(totals[0], wide)):
        expected = sum(part * own[i].astype(np.float64) for part, own in zip(parts, leaves, strict=True))
        assert np.abs(mean - expected).max() < error
    revealed = sums.reveal(totals[0], shapes_of(leaves[0]))
    assert [leaf.dtype for leaf in revealed] == [np.float64, np.float32]
    assert [one.shape for one in sums.shape(shapes_of(leaves[0]))] == [sent[0][0].shape] == [(400,)]


def test_no_two_exchanges_have_the_same_mask():
    nothing = np.zeros(4, np.uint64)
    of_run, of_other = masks(4), masks(4, "another run")
    of_other[0]._secrets = of_run[0]._secrets  # the same sites later
    alike = occasion(3)
    others = [occasion(3, round=4), occasion(3, attempt=8), occasion(3, exchange=2), occasion(4), alike]
    others.append(occasion(3, round=PREPARING))
    seen = [of_run[0].hide(nothing, one) for one in others] + [of_other[0].hide(nothing, alike)]
    assert all((a != b).any() for a, b in itertools.combinations(seen, 2))
    np.testing.assert_array_equal(of_run[0].hide(nothing, alike), seen[4])  # asked again: the same answer


def test_whole_numbers_of_the_preparation_keep_every_bit():
    words = np.random.default_rng(0).integers(0, 2**64, (3, 50), np.uint64, endpoint=False)
    total = sum(mask.hide(own, occasion(3, round=PREPARING)) for mask, own in zip(masks(3), words, strict=True))
    np.testing.assert_array_equal(total, words.sum(0))


@pytest.mark.parametrize("value", [2.0**30 / 3, -1e30, np.nan, np.inf])
def test_a_number_that_would_wrap_around_is_refused(value):
    mask = masks(3)[0]
    assert mask([np.array([0.99 * 2.0**30 / 3])], 1.0, occasion(3))
    with pytest.raises(UserError, match="among 3 sites it must be below 3.58e\\+08.*Give smaller step sizes"):
        mask([np.array([1.0, value])], 1.0, occasion(3))


def test_the_largest_numbers_that_are_sent_do_not_wrap_around():
    largest = np.nextafter(2.0**30 / 3, 0) * np.array([1, -1])
    sent = [mask([largest], 1.0, occasion(3)) for mask in masks(3)]
    (total,) = MaskedSums().reveal([np.add.reduce([one for (one,) in sent])], shapes_of([largest]))
    np.testing.assert_allclose(total, 3 * largest, rtol=1e-15)


def test_who_may_be_asked():
    mask, *_ = masks(4)
    for asked in ((0, 1), (1, 2, 3), (0, 1, 9)):
        with pytest.raises(UserError, match="it takes 3 or more of those whose public keys are on the list"):
            mask.hide(np.zeros(1, np.uint64), occasion(3, asked=asked))
    with pytest.raises(UserError, match="a sum of two gives each away to the other: it takes 3 sites"):
        masks(2)


def test_keys_are_made_by_sites_and_pinned_by_a_list(tmp_path):
    names = ("north", "south", "west")
    folders = {name: tmp_path / name for name in names}
    for folder in folders.values():
        folder.mkdir()
    publics = {name: make_mask_key(folder) for name, folder in folders.items()}
    assert publics == {name: make_mask_key(folder) for name, folder in folders.items()}  # made once
    for folder in folders.values():
        assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600
        (folder / LIST_FILE).write_text("".join(f'{name} = "{public}"\n' for name, public in publics.items()))
    read = [read_mask(folders[name], name, names, "a run") for name in names]
    total = sum(mask.hide(np.full(2, k, np.uint64), occasion(3)) for k, mask in enumerate(read))
    assert total.tolist() == [3, 3]
    north = folders["north"]
    (north / LIST_FILE).write_text((north / LIST_FILE).read_text().replace(publics["north"], publics["south"]))
    with pytest.raises(UserError, match="has another key for site 1 than the one that this site holds"):
        read_mask(north, "north", names, "a run")
    (north / LIST_FILE).write_text(f'north = "{publics["north"]}"\n')
    with pytest.raises(UserError, match="no public key of 64 hexadecimal digits for the site 'south'"):
        read_mask(north, "north", names, "a run")
    (north / LIST_FILE).unlink()
    with pytest.raises(UserError, match="has no masks.toml, the list of all sites' public keys"):
        read_mask(north, "north", names, "a run")
    (north / KEY_FILE).write_text("no key")
    with pytest.raises(UserError, match="is not a readable key"):
        make_mask_key(north)


# ------------------------------------------------------------------------------------------------- whole runs


def federation(algorithm, task):
    nodes = {k: Node(algorithm, select_client(task, k), 0, mask=mask) for k, mask in enumerate(masks(task.clients))}
    return nodes, Server(algorithm, task, 0, sums=MaskedSums())


def serve(nodes, server, rounds, heard=None):
    """The position after these rounds, and all that the server was sent."""

    def send(tickets):
        for k, ticket in tickets.items():
            answer = nodes[k].receive(ticket)
            if heard is not None:
                heard.append((k, ticket.round, ticket.exchange, answer))
            yield k, answer

    position = server.serve(START, None, EVERYBODY, send)
    for r in range(rounds):
        position = server.serve(r, position, EVERYBODY, send)
    return position


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednest"])
def test_masked_runs_are_those_of_a_simulation(name):
    case = CASES[name]
    algorithm, task = case.algorithm(name), TASKS[case.task](RAGGED)
    simulated = simulate(algorithm, task, rounds=2, evaluate_every=None)
    position = serve(*federation(algorithm, task), 2)
    for a, b in zip(jax.tree.leaves(simulated.server), jax.tree.leaves(position.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "reason"), [("fedmbo", "gathers"), ("KL", "common exponent|plain numbers")])
def test_what_sums_cannot_answer_is_refused_with_the_reason(name, reason):
    """By the sites themselves: a server that asks nevertheless gets nothing."""
    algorithm = CASES[name].algorithm(name) if name in CASES else CASES["feddro"].algorithm("feddro")
    task = TASKS[CASES[name].task if name in CASES else name](RAGGED)
    nodes, server = federation(algorithm, task)
    with pytest.raises(UserError, match=reason):
        serve(nodes, server, 1)


def test_all_that_the_server_hears_is_random_bits_of_one_site():
    """Every upload of every site looks random, although sites hold constants; what one site holds shows in no other
    site's first upload, and its own is as random before as after."""
    case = CASES["scaffold"]
    algorithm = case.algorithm("scaffold")
    task = TASKS[case.task](RAGGED)
    heard: list = []
    nodes, server = federation(algorithm, task)
    serve(nodes, server, 120, heard)
    for k in range(3):
        words = np.concatenate([leaf for own, _, _, answer in heard if own == k for leaf in answer or []])
        assert words.dtype == np.uint64 and words.size > 500
        assert look_uniform(words)
    assert all(answer is None or [leaf.dtype for leaf in answer] == [np.uint64] for *_, answer in heard)
    assert not look_uniform(np.arange(600, dtype=np.uint64))  # what is not hidden is seen


def test_what_one_site_holds_shows_in_its_own_upload_alone():
    sites = masks(3)
    values = [np.full(2000, float(k)) for k in range(3)]
    send = lambda: [mask([own], 1 / 3, occasion(3))[0] for mask, own in zip(sites, values, strict=True)]
    before = send()
    values[1] = np.full(2000, -5.0)
    after = send()
    assert np.array_equal(before[0], after[0]) and np.array_equal(before[2], after[2])
    assert look_uniform(before[1]) and look_uniform(after[1])
    for some in itertools.combinations(before, 2):  # nor does the sum of all but one
        assert look_uniform(np.add(*some))
    assert (sum(before).view(np.int64) == sum(before).view(np.int64)[0]).all()


def test_a_round_that_loses_a_site_is_void():
    case = CASES["fedavg"]
    nodes, server = federation(case.algorithm("fedavg"), TASKS[case.task](RAGGED))
    position = serve(nodes, server, 1)
    lost = lambda tickets: ((k, nodes[k].receive(ticket)) for k, ticket in tickets.items() if k != 1)
    with pytest.raises(LostClients):
        server.serve(1, position, EVERYBODY, lost)
    with pytest.raises(UserError, match="it takes 3 or more"):  # nor do two of them go on
        pair = {k: Member(0.5) for k in (0, 2)}
        server.serve(1, position, pair, lambda tickets: ((k, nodes[k].receive(t)) for k, t in tickets.items()))
