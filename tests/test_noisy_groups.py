"""Adult with noisy protected groups, and the bucketed features it is prepared with."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from nestfed.core.settings import UserError
from nestfed.data import TEST, TRAIN, VALIDATION, load
from nestfed.experiments.dro_fairness.data import (
    BucketEncoder,
    NoisyGroups,
    append_proxies,
    deal_noisy_groups,
    draw_proxies,
)


@functools.cache
def adult() -> NoisyGroups:
    return deal_noisy_groups()


# ------------------------------------------------------------------------------------------------- features

# As published, with the outermost edges; an interval holds its upper edge.
PUBLISHED = {
    "capital-gain": [-1, 1, 4000, 10000, 100000],
    "capital-loss": [-1, 1, 1800, 1950, 4500],
    "hours-per-week": [0, 39, 41, 50, 100],
    "education-num": [0, 8, 9, 11, 16],
}


def test_adults_buckets_are_the_published_ones():
    frame = load("adult-all").frame.drop(columns=["income", "part", "fnlwgt"])
    training = np.random.default_rng(0).random(len(frame)) < 0.7
    encoder = BucketEncoder.of(frame, training)
    quartiles = np.quantile(frame["age"][training], [0.25, 0.5, 0.75])
    edges = PUBLISHED | {"age": [-np.inf, *quartiles, np.inf]}
    cut = frame.assign(**{name: pd.cut(frame[name], bins, labels=False) for name, bins in edges.items()})
    expected = pd.get_dummies(cut, columns=list(frame.columns))  # column by column, levels in order
    assert len(encoder.names) == expected.shape[1] == 122
    np.testing.assert_array_equal(encoder.transform(frame), expected.to_numpy(np.float32))
    assert encoder.names[:4] == ["age up to 28", "age 28 to 37", "age 37 to 48", "age above 48"]
    assert {"sex=Female", "sex=Male"} <= set(encoder.names)
    assert BucketEncoder.from_dict(json.loads(json.dumps(encoder.to_dict()))) == encoder


def test_buckets_of_other_columns():
    frame = pd.DataFrame(
        {
            "size": [1.0, 2.0, 3.0, 4.0, 5.0, np.nan, 6.0, 7.0],
            "mostly": [0, 0, 0, 0, 0, 0, 0, 9],
            "same": [3] * 8,
            "gaps": [2.0] * 7 + [np.nan],
            "code": ["A11", "A12"] * 4,
        }
    )
    encoder = BucketEncoder.of(frame)
    assert encoder.names == [
        *("size up to 2.5", "size 2.5 to 4", "size 4 to 5.5", "size above 5.5", "size missing"),
        *("mostly up to 0", "mostly above 0", "gaps missing", "code=A11", "code=A12"),
    ]
    encoded = encoder.transform(frame)
    assert encoded[:, :5].argmax(1).tolist() == [0, 0, 1, 1, 2, 4, 3, 3]
    assert (encoded[:, :5].sum(1) == 1).all()
    assert encoded[:, 6].tolist() == [0] * 7 + [1]
    new = encoder.transform(frame.iloc[:2].assign(size=[-100.0, 1e6]))
    assert new[:, :5].argmax(1).tolist() == [0, 3]  # beyond all that was seen: the outermost buckets
    with pytest.raises(UserError, match="column 'size' holds 'big', but it was a column of numbers"):
        encoder.check(frame.assign(size="big"))


def test_quartiles_are_those_of_the_training_rows():
    frame = pd.DataFrame({"size": [1.0, 2.0, 3.0, 100.0, 200.0, 300.0]})
    encoder = BucketEncoder.of(frame, np.arange(6) < 3)
    assert encoder.names == ["size up to 1.5", "size 1.5 to 2", "size 2 to 2.5", "size above 2.5"]


# ------------------------------------------------------------------------------------------------- rows


def test_the_published_numbers():
    data = adult()
    assert data.group_names == ("white", "black", "other")
    counts = np.bincount(data.true_group)
    assert counts.sum() == 48842
    np.testing.assert_allclose(counts / 48842, [0.855, 0.096, 0.049], atol=5e-4)
    rates = np.bincount(data.true_group, data.label) / counts
    np.testing.assert_allclose(rates, [0.254, 0.121, 0.215], atol=5e-4)


def test_features_tell_minorities_but_not_the_three_groups():
    data = adult()
    assert data.inputs.shape == (48842, 120) == (48842, len(data.feature_names))
    assert data.inputs.dtype == np.float32 and set(np.unique(data.inputs)) == {0, 1}
    races = {name: i for i, name in enumerate(data.feature_names) if name.startswith("race=")}
    assert list(races) == ["race=Amer-Indian-Eskimo", "race=Asian-Pac-Islander", "race=Other"]
    np.testing.assert_array_equal(data.inputs[:, list(races.values())].sum(1), data.true_group == 2)
    assert not any(name.startswith("fnlwgt") for name in data.feature_names)


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        ({}, (0.7, 0.1, 0.2)),
        ({"train_fraction": 0.2}, (0.175, 0.025, 0.8)),
        ({"validation_fraction": 0, "clients": 1}, (0.8, 0.0, 0.2)),
    ],
)
def test_parts_and_clients(arguments, shares):
    clients = arguments.get("clients", 8)
    data = deal_noisy_groups(**arguments)
    for group in range(3):
        mine = data.part[data.true_group == group]
        for part, share in zip((TRAIN, VALIDATION, TEST), shares, strict=True):
            assert abs((mine == part).sum() - share * len(mine)) <= 1
    for part, share in zip((TRAIN, VALIDATION, TEST), shares, strict=True):
        sizes = np.bincount(data.client[data.part == part], minlength=clients)
        assert sizes.max() - sizes.min() <= 1
        assert abs(sizes.sum() - share * 48842) <= 3
    assert len(data.client_names) == clients == data.client.max() + 1
    assert data.count_holdings()["rows"].sum() == 48842


def test_seeds_deal_anew():
    one, again, other = deal_noisy_groups(clients=3), deal_noisy_groups(clients=3), deal_noisy_groups(seed=1)
    np.testing.assert_array_equal(one.part, again.part)
    np.testing.assert_array_equal(one.client, again.client)
    np.testing.assert_array_equal(one.part, adult().part)  # the number of clients does not change the split
    assert 0.3 < (one.part != other.part).mean() < 0.6  # 1 - 0.7^2 - 0.1^2 - 0.2^2 = 0.46 if independent
    np.testing.assert_array_equal(np.bincount(one.part), np.bincount(other.part))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_fraction": 1.0}, "train_fraction=1.0 was given"),
        ({"train_fraction": 0}, "train_fraction=0 was given"),
        ({"validation_fraction": 1}, "validation_fraction=1 was given"),
        ({"validation_fraction": -0.1}, "validation_fraction=-0.1 was given"),
        ({"clients": 0}, "clients=0 was given"),
        ({"seed": -1}, "seed=-1 was given"),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(UserError, match=message):
        deal_noisy_groups(**arguments)


# ------------------------------------------------------------------------------------------------- proxies


def test_the_share_of_wrong_proxies():
    true = adult().true_group
    proxy = np.asarray(draw_proxies(true, 0.3, 0))
    assert proxy.dtype == np.int32
    wrong = proxy != true
    # Within four standard deviations of 0.3, in every group alike.
    for group in range(3):
        mine = wrong[true == group]
        assert abs(mine.mean() - 0.3) < 4 * np.sqrt(0.21 / len(mine))
    steps = np.bincount((proxy - true)[wrong] % 3, minlength=3)
    assert steps[0] == 0
    assert chisquare(steps[1:]).pvalue > 1e-3  # both other groups equally often


@pytest.mark.parametrize(("noise", "groups"), [(0.0, 3), (1.0, 3), (0.5, 2), (0.8, 5)])
def test_other_noise_and_other_numbers_of_groups(noise, groups):
    true = np.arange(6000) % groups
    proxy = np.asarray(draw_proxies(true, noise, 7, groups=groups))
    moves = np.bincount((proxy - true) % groups, minlength=groups)
    shares = np.array([1 - noise, *[noise / (groups - 1)] * (groups - 1)])
    assert (np.abs(moves - 6000 * shares) <= 4 * np.sqrt(6000 * shares * (1 - shares))).all()


def test_proxies_are_drawn_anew_by_seed_and_epoch():
    true = np.zeros(2000, int)
    draws = [np.asarray(draw_proxies(true, 0.3, seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)]
    np.testing.assert_array_equal(draws[1], draw_proxies(true, 0.3, 0, epoch=1))
    for i in range(4):
        for j in range(i):
            # Both wrong: 0.09 of the rows if the draws are independent.
            assert abs(((draws[i] > 0) & (draws[j] > 0)).mean() - 0.09) < 0.03


batch_proxies = jax.jit(lambda group, row, epoch: draw_proxies(group, 0.3, 4, epoch=epoch, row=row))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 499), min_size=8, max_size=8), st.integers(0, 5))
def test_a_batch_has_the_proxies_of_its_rows(rows, epoch):
    true = np.arange(500) % 3
    everybody = np.asarray(draw_proxies(true, 0.3, 4, epoch=epoch))
    np.testing.assert_array_equal(batch_proxies(true[rows], np.array(rows), epoch), everybody[rows])


def test_proxies_become_features():
    inputs = np.arange(6, dtype=np.float32).reshape(3, 2)
    extended = jax.jit(append_proxies)(inputs, jnp.array([2, 0, 1]))
    assert extended.dtype == jnp.float32
    np.testing.assert_array_equal(extended, [[0, 1, 0, 0, 1], [2, 3, 1, 0, 0], [4, 5, 0, 1, 0]])


def test_noise_is_a_share():
    for noise in (-0.1, 1.5):
        with pytest.raises(UserError, match=f"noise={noise} was given"):
            draw_proxies(np.zeros(3, int), noise, 0)
