"""Sites that agree on a schema have the features, splits and tasks of one table, and tell nothing but sums."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import shared_data
from site_tables import SITES, cut, draft, people

from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.data import Encoder, read_table
from nestfed.data.files import read_by_schema
from nestfed.data.schema import CATEGORY, CONSTANT, LEFT_OUT, NUMBER, ColumnRule, Schema, merge_schemas
from nestfed.data.sums import LARGEST, Sums
from nestfed.workbench.request import Request
from nestfed.workbench.site_setup import Preparation, Prepared, ServerSetup, SiteSetup

FAIR = {"task": "fairness", "batch_size": 4}


# ------------------------------------------------------------------------------------------------- exact sums


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-1e30, 1e30, width=64), max_size=20),
    st.integers(0, 2**32 - 1),
)
def test_sums_do_not_depend_on_who_adds_what(numbers, seed):
    random = np.random.default_rng(seed)
    values, owner = np.array(numbers), random.integers(0, 3, len(numbers))
    order = random.permutation(3)
    parts = [Sums.of(values[owner == k]).pack() for k in order]
    together = Sums.unpack(functools.reduce(np.add, parts))
    np.testing.assert_array_equal(together.words, Sums.of(values).words)
    exact = sum(int(value * 2.0**200) for value in values.tolist()) / 2**200 if len(values) else 0.0
    assert together.values[0] == pytest.approx(exact, rel=1e-15, abs=2.0**-190)


def test_sums_by_place_and_what_is_too_large():
    sums = Sums.of(np.array([1.5, -2.0, 1e-30, 0.25]), np.array([0, 2, 0, 2]), 3)
    assert sums.values.tolist() == [1.5 + 1e-30, 0.0, -1.75]
    for value in (LARGEST, np.nan, np.inf):
        with pytest.raises(UserError, match="too large to be summed"):
            Sums.of(np.array([value]))


# ------------------------------------------------------------------------------------------------- drafts and merging


def test_a_draft_has_names_and_levels_and_no_statistics(tmp_path):
    frame = pd.DataFrame(
        {
            "age": [31.5, np.nan, 47.25, 62.75],
            "same": [7, 7, 7, 7],
            "nothing": [np.nan] * 4,
            "colour": ["red", None, "blue", "red"],
            "row": [1, 2, 3, 4],
            "sex": ["m", "f", "m", "f"],
            "ill": ["yes", "no", "no", "no"],
        }
    )
    drafted = draft(frame, tmp_path, "a", group="sex")
    assert drafted.columns == {
        "age": ColumnRule(NUMBER, gaps=True),
        "same": ColumnRule(CONSTANT, value=7.0),
        "nothing": ColumnRule(CONSTANT),
        "colour": ColumnRule(CATEGORY, levels=("blue", "red"), gaps=True),
        "row": ColumnRule(LEFT_OUT),
        "sex": ColumnRule(CATEGORY, levels=("f", "m")),
    }
    assert (drafted.group, drafted.groups, drafted.batch_size) == ("sex", ("f", "m"), 4)
    (tmp_path / "schema.toml").write_text(drafted.to_toml())
    assert Schema.read(tmp_path / "schema.toml") == drafted
    assert not any(number in drafted.to_toml() for number in ("31.5", "47.25", "62.75", "47.1"))


def test_drafts_are_joined():
    rule = ColumnRule
    one = {"x": rule(CONSTANT, value=1.0), "c": rule(CATEGORY, ("a", "b")), "n": rule(CONSTANT), "k": rule(CONSTANT)}
    two = {"x": rule(CONSTANT, value=2.0), "c": rule(CONSTANT), "n": rule(NUMBER), "k": rule(CONSTANT, value=3.0)}
    make = lambda columns, **more: Schema(label="ill", positive="yes", columns=columns, **more)
    merged = merge_schemas(
        {
            "a.toml": make(one, group="c", groups=("b", "a"), batch_size=32),
            "b.toml": make(two, group="c", groups=("c", "a"), batch_size=128),
        }
    )
    assert merged.columns == {
        "x": rule(NUMBER),
        "c": rule(CATEGORY, ("a", "b"), gaps=True),
        "n": rule(NUMBER, gaps=True),
        "k": rule(CONSTANT, value=3.0, gaps=True),
    }
    assert (merged.groups, merged.batch_size) == (("a", "b", "c"), 128)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"columns": {"x": ColumnRule(CATEGORY, ("1",))}},
            "column 'x' is of the kind 'number' in a and of the kind 'cat",
        ),
        (
            {"columns": {"x": ColumnRule(LEFT_OUT)}},
            "column 'x' is of the kind 'number' in a and of the kind 'left out'",
        ),
        ({"columns": {"y": ColumnRule(NUMBER)}}, "b has no column 'x'"),
        ({"label": "sick"}, "label is 'ill' in a and 'sick' in b"),
        ({"positive": "ja"}, "positive is 'yes' in a and 'ja' in b"),
        ({"columns": {"x": ColumnRule(NUMBER, range=(0, 9))}}, r"column 'x' has the ranges \[\(0, 1\), \(0, 9\)\]"),
    ],
)
def test_drafts_that_cannot_both_be_right(other, message):
    mine = Schema(label="ill", positive="yes", columns={"x": ColumnRule(NUMBER, range=(0, 1))})
    with pytest.raises(UserError, match=message) as refused:
        merge_schemas({"a": mine, "b": dataclasses.replace(mine, **other)})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("labl = 1", "no entry 'labl' of a schema; did you mean 'label'"),
        ("label = 'ill'", "a table \\[columns.NAME\\]"),
        ("label = 'ill'\npositive = 'yes'\n[columns.x]\nkind = 'numbr'", "column 'x' needs a kind: number"),
        ("label = 'ill'\npositive = 'yes'\n[columns.x]\nkind = 'category'", "column 'x' is a category and needs"),
        ("label = 'ill'\npositive = 'yes'\n[columns.x]\nkind = 'number'\nrange = [2, 1]", "two numbers, the smaller"),
        ("label = 'ill'\n[columns.x]\nkind = 'number'", "needs positive= .* or threshold="),
        ("label = 'ill'\npositive = 'yes'\ngroup = 'x'\n[columns.x]\nkind = 'number'", "needs the names of the groups"),
        ("label = 'x'\npositive = 'yes'\n[columns.x]\nkind = 'number'", "the label 'x' is listed among the columns"),
        ("label = ", "not a readable TOML file"),
    ],
)
def test_schemas_that_cannot_be_read(text, message, tmp_path):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        Schema.read(tmp_path / "s.toml")


def test_rows_that_do_not_fit_are_counted(tmp_path):
    rules = {
        "age": ColumnRule(NUMBER),
        "colour": ColumnRule(CATEGORY, ("blue", "red")),
        "sex": ColumnRule(CATEGORY, ("f",)),
    }
    schema = Schema(label="ill", positive="yes", columns=rules, group="sex", groups=("f", "m"))
    frame = pd.DataFrame({"sex": ["f"] * 4, "age": ["1", "x", "3", None], "ill": ["no"] * 4, "more": 1})
    frame["colour"] = ["green", "red", None, "blue"]
    frame.to_csv(tmp_path / "a.csv", index=False)
    table = read_by_schema(tmp_path / "a.csv", schema)
    assert list(table.frame.columns) == ["age", "colour", "sex", "ill"]  # the schema's order, and no more
    assert table.labels().tolist() == [0] * 4  # one label only, and one group
    assert table.group_of_rows() == (pytest.approx(np.zeros(4)), ("f", "m"))
    assert table.notes == (
        "'age': 1 of 4 values are no numbers and count as missing (x)",
        "'colour': 2 of 4 values are no level of the schema and count as none (green, missing)",
    )
    encoder = Encoder.fit(table.frame[["age", "colour"]], schema=schema)
    assert encoder.names == ["age", "colour=red"]
    assert encoder.transform(table.frame)[:, 1].tolist() == [0, 1, 0, 0]
    frame.assign(sex="d").to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(UserError, match="'sex' has the group d, which is not in the schema"):
        read_by_schema(tmp_path / "a.csv", schema)
    frame.drop(columns="colour").to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(UserError, match="a.csv has no column 'colour'"):
        read_by_schema(tmp_path / "a.csv", schema)


def test_drafts_and_agreement_on_the_command_line(call, tmp_path):
    frame = people(60, 4)
    for name in SITES:
        frame[frame["site"] == name].drop(columns="site").to_csv(tmp_path / f"{name}.csv", index=False)
    roles = ["--label", "ill", "--positive", "yes", "--group", "sex"]
    for name in SITES:
        draft = tmp_path / f"{name}.toml"
        code, out, err = call("site", "schema", "--data", tmp_path / f"{name}.csv", *roles, "--out", draft)
        assert (code, out.strip()) == (0, str(draft)) and "Read it before you give it away" in err
    drafts = [tmp_path / f"{name}.toml" for name in SITES]
    agreed = tmp_path / "schema.toml"
    code, out, _ = call("deploy", "schema", *drafts, "--out", agreed)
    assert (code, out.strip()) == (0, str(agreed))
    assert Schema.read(agreed).columns["town"].levels == tuple("pqrst")
    code, _, err = call("deploy", "schema", *drafts, "--out", agreed)
    assert code == 1 and err.startswith("nestfed: ") and "is there already" in err and err.count("\n") == 1
    code, _, err = call("site", "schema", "--data", tmp_path / "b.csv", "--label", "ill", "--out", tmp_path / "d.toml")
    assert code == 1 and "is no in every row here, so which value counts as 1 cannot be told" in err
    (tmp_path / "kit").mkdir()
    code, out, _ = call("site", "key", tmp_path / "kit", "--name", "north")
    assert code == 0 and re.fullmatch(r'north = "[0-9a-f]{64}"\n', out)


# ------------------------------------------------------------------------------------------------- sites and one table


def add_up(parties: list[Preparation]) -> list[np.ndarray]:
    sums: list[np.ndarray] = []
    for _ in range(Preparation.EXCHANGES):
        told = [party.tell(sums) for party in reversed(parties)]
        assert all(words.dtype == np.uint64 and words.shape == told[0].shape for words in told)
        sums.append(functools.reduce(np.add, told))
    return sums


def prepare(said: dict, folder: Path) -> tuple[list[Prepared], Prepared]:
    """(all sites, their server)."""
    agreed, number = folder / "schema.toml", len(SITES)
    own = lambda k: SiteSetup(said, agreed, folder / f"{SITES[k]}.csv", site=k, sites=number, seed=3)
    parties: list[Preparation] = [own(k) for k in range(number)]
    sums = add_up(parties)
    server = ServerSetup(said, agreed, sites=number, seed=3)
    return [party.prepare(sums) for party in parties], server.prepare(sums)


def pooled(said: dict, folder: Path) -> Request:
    return Request.of(
        said | {"data": str(folder / "joined.csv"), "clients": "site", "schema": str(folder / "schema.toml")}
    )


def assert_equal(mine, theirs) -> None:
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def part_of(task: Task, k: int) -> Task:
    """What one client holds of a task on all rows; the size of the largest client is everybody's."""
    own = dataclasses.replace(task.data.only(k), largest=task.data.largest)
    return dataclasses.replace(task, data=own, weights=np.ones(1))


@settings(max_examples=5, deadline=None)
@given(st.integers(40, 90), st.integers(0, 2**32 - 1))
def test_sites_have_the_tasks_of_one_table(tmp_path_factory, rows, seed):
    folder = tmp_path_factory.mktemp("sites")
    cut(people(rows, seed), folder)
    request, method = pooled(FAIR, folder), "fedbio"
    setup = request.scenario.set_up(3)
    whole = request.scenario.method(method).stages[0].task(request.scenario, setup, None)
    sites, server = prepare(FAIR, folder)
    for k, site in enumerate(sites):
        mine, own = site.setup.data, setup.data.client == k
        assert mine.feature_names == setup.data.feature_names and mine.group_names == setup.data.group_names
        np.testing.assert_array_equal(mine.inputs, setup.data.inputs[own])
        np.testing.assert_array_equal(mine.part, setup.data.part[own])
        np.testing.assert_array_equal(mine.group, setup.data.group[own])
        assert_equal(site.task(method), part_of(whole, k))
        assert repr(site.make_algorithms(method, {})) == repr(request.scenario.make_algorithms(method, setup, {}))
    task = server.task(method)
    np.testing.assert_allclose(task.weights, whole.weights, rtol=1e-15)
    np.testing.assert_array_equal(task.data.ids, whole.data.ids)
    assert_equal((task.problem, task.params), (whole.problem, whole.params))
    assert repr(server.make_algorithms(method, {})) == repr(request.scenario.make_algorithms(method, setup, {}))


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"task": "robust", "batch_size": 4}, "feddro"),
        ({"task": "robust", "batch_size": 4, "averaging": "uniform", "features": "piecewise"}, "fastdro"),
        ({"task": "auprc", "batch_size": 4}, "fcsg-m"),
        ({"task": "auprc", "batch_size": 4, "group": "sex"}, "coda-plus"),
        ({"task": "personal", "model": "logistic", "features": "minimax-fair"}, "fedrep"),
        ({**FAIR, "keep_group": True, "averaging": "samples"}, "fedminmax"),
    ],
)
def test_every_task_is_built_at_a_site(said, method, tmp_path):
    ranges = dict.fromkeys(("age", "income", "visits"), (-50.0, 1e5))
    cut(people(120, 1), tmp_path, ranges=ranges)
    request = pooled(said, tmp_path)
    setup = request.scenario.set_up(3)
    whole = request.scenario.method(method).stages[0].task(request.scenario, setup, None)
    sites, server = prepare(said, tmp_path)
    for k, site in enumerate(sites):
        np.testing.assert_array_equal(site.setup.data.inputs, setup.data.inputs[setup.data.client == k])
        assert_equal(site.task(method), part_of(whole, k))
        assert repr(site.make_algorithms(method, {})) == repr(request.scenario.make_algorithms(method, setup, {}))
    np.testing.assert_allclose(server.task(method).weights, whole.weights, rtol=1e-15)


def test_a_later_stage_is_built_from_what_the_one_before_left(tmp_path):
    cut(people(60, 2), tmp_path)
    request = pooled(FAIR, tmp_path)
    setup = request.scenario.set_up(3)
    stages = request.scenario.method("fedbio").stages
    first = stages[0].task(request.scenario, setup, None)
    server = type("Server", (), {"x": first.params[0] + 0.5, "y": first.params[1]})()
    whole = stages[1].task(request.scenario, setup, request.scenario.leave(first, server, None))
    for k, site in enumerate(prepare(FAIR, tmp_path)[0]):
        mine = site.task("fedbio", 1, site.leave(site.task("fedbio"), server, None))
        assert_equal(mine, part_of(whole, k))


def test_what_sites_cannot_do_is_refused(tmp_path):
    cut(people(60, 0), tmp_path)
    for said, message in [
        ({**FAIR, "limit": 0.1}, "no site gives its rows away; leave limit out"),
        ({**FAIR, "features": "piecewise"}, "agree on range = \\[low, high\\] for \\[columns.age\\]"),
        ({**FAIR, "label": "sick"}, "label='sick' was given, but the schema says 'ill'"),
        ({**FAIR, "drop": ["town"]}, "drop=town was given together with a schema"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(said, tmp_path)


def test_adult_at_three_uneven_sites(tmp_path):
    """108 features, where every site alone makes fewer, with gaps in a number that are filled with the common mean."""
    names = ["age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"]
    names += ["race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"]
    official = shared_data() / "adult.data.gz"
    frame = pd.read_csv(official, names=names, skipinitialspace=True, keep_default_na=False)
    frame.loc[frame.index[::7], "hours-per-week"] = np.nan
    site = np.where(frame["race"] == "White", 0, np.where(frame["sex"] == "Male", 1, 2))
    frame = frame.assign(site=np.array(SITES)[site]).iloc[np.argsort(site, kind="stable")]
    cut(frame, tmp_path, label="income", positive=">50K")
    said = {"task": "robust", "batch_size": 8}
    setup = pooled(said, tmp_path).scenario.set_up(3)
    sites, _ = prepare(said, tmp_path)
    assert len(setup.data.feature_names) == 108
    for k, mine in enumerate(sites):
        np.testing.assert_array_equal(mine.setup.data.inputs, setup.data.inputs[setup.data.client == k])
    own = [read_table(tmp_path / f"{name}.csv", label="income") for name in SITES]
    alone = [len(Encoder.fit(table.frame[table.features()]).names) for table in own]
    assert max(alone) < 108
