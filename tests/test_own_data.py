"""The user's own file: what is accepted, what is noted, and what is refused with one clear sentence."""

import gzip
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestfed.core.settings import UserError
from nestfed.data import describe_columns, describe_groups, federate, read_table

ROWS = 24


def people(**changes) -> pd.DataFrame:
    i = np.arange(ROWS)
    frame = pd.DataFrame(
        {
            "age": 20 + (7 * i) % 31,
            "sex": np.where(i % 2, "male", "female"),
            "town": np.where(i % 3, "Köln", "Århus"),
            "paid": np.where(i % 4, "no", "yes"),
        }
    )
    return frame.assign(**changes)


def write(path, frame, separator=",", encoding="utf-8"):
    path.write_bytes(frame.to_csv(index=False, sep=separator).encode(encoding))
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_separators_and_encodings(separator, encoding, tmp_path):
    path = write(tmp_path / "people.csv", people(), separator, encoding)
    table = read_table(path, label="paid", group="sex", clients="town")
    pd.testing.assert_frame_equal(table.frame, people(), check_dtype=False)
    assert table.positive == "yes"
    assert table.labels().sum() == 6
    assert federate(table, test_fraction=0.25).client_names == ("Århus", "Köln")


def test_compressed_and_parquet_files_give_the_same_table(tmp_path):
    plain = read_table(write(tmp_path / "a.csv", people()), label="paid").frame
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    people().astype({"town": "category"}).to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv.gz", "a.parquet"):
        pd.testing.assert_frame_equal(read_table(tmp_path / name, label="paid").frame, plain, check_dtype=False)


def test_quoted_cells_blank_lines_and_spaces(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text('\n"town", "paid" ,n\n"Rome, Italy", yes,1\n\n"a ""b""",no,2\n"Rome, Italy",no,5\n')
    table = read_table(path, label="paid")
    assert table.frame["town"].tolist() == ["Rome, Italy", 'a "b"', "Rome, Italy"]
    assert table.labels().tolist() == [1, 0, 0]


def test_decimal_commas(tmp_path):
    path = write(tmp_path / "p.csv", people(income=[f"{i},5" for i in range(ROWS)]), ";")
    assert read_table(path, label="paid").frame["income"].tolist() == [i + 0.5 for i in range(ROWS)]


def test_a_little_garbage_among_numbers_is_missing_and_noted(tmp_path):
    income = [str(100 + (i * 7) % 13) for i in range(ROWS)]
    income[3], income[5] = "abc", "n/a"
    table = read_table(write(tmp_path / "p.csv", people(income=income)), label="paid")
    assert np.flatnonzero(table.frame["income"].isna()).tolist() == [3, 5]
    assert table.notes == ("'income' is numeric but for 1 of 23 values (abc), which count as missing",)
    assert "income missing" in federate(table, group="sex", clients=2).feature_names
    much = [value if i % 4 else "abc" for i, value in enumerate(["1", "2", "3"] * 8)]
    table = read_table(write(tmp_path / "p.csv", people(income=much)), label="paid")
    assert set(table.frame["income"]) == {"1", "2", "3", "abc"}


def test_identifiers_are_left_out_and_noted(tmp_path):
    frame = people(name=[f"person {i}" for i in range(ROWS)], row=range(ROWS))
    table = read_table(write(tmp_path / "p.csv", frame), label="paid", drop=["town"])
    assert table.drop == ("town", "name", "row")
    assert table.notes == (
        "'name' was left out: 24 different values in 24 rows are no categories",
        "'row' was left out: it counts the rows",
    )
    assert describe_columns(table)["role"].tolist() == ["feature", "feature", "dropped", "label", "dropped", "dropped"]


@pytest.mark.parametrize(
    ("values", "positive"),
    [
        (["yes", "no", "no"], "yes"),
        (["No", "YES", "YES"], "YES"),
        ([True, False, True], True),
        ([0, 1, 1], 1),
        ([2, 1, 1], 1),
        (["Y", "N", "Y"], "Y"),
        ([2, 3, 3], 2),  # the rarer one
        (["good", "bad", "good"], "bad"),
        ([0.0, 1.0, 1.0], 1.0),
    ],
)
def test_which_value_counts_as_one(values, positive, tmp_path):
    frame = people(paid=values * (ROWS // 3))
    write(tmp_path / "p.csv", frame)
    frame.to_parquet(tmp_path / "p.parquet")
    for name in ("p.csv", "p.parquet"):
        table = read_table(tmp_path / name, label="paid")
        assert table.positive == positive
        assert table.labels().mean() == pytest.approx(np.mean([value == positive for value in values]))


def test_labels_of_several_values(tmp_path):
    path = write(tmp_path / "p.csv", people(grade=np.arange(ROWS) % 4, level=["low", "middle", "high"] * 8))
    assert read_table(path, label="grade", positive="3").labels().mean() == 0.25  # text, as the command line gives it
    assert read_table(path, label="grade", threshold=0.5).labels().mean() == 0.75
    assert read_table(path, label="level", positive="high").labels().sum() == 8
    with pytest.raises(UserError, match=r"'grade' has 4 different values \(0, 1, 2, 3\).*threshold= .*or positive="):
        read_table(path, label="grade")
    with pytest.raises(UserError, match=r"'level' has 3 different values \(low, middle, high\).*give positive="):
        read_table(path, label="level")
    with pytest.raises(UserError, match="threshold=1 was given, but the label 'level' holds text"):
        read_table(path, label="level", threshold=1)
    with pytest.raises(UserError, match="exceeds the threshold 9 .values from 0 to 3. in no row"):
        read_table(path, label="grade", threshold=9)
    with pytest.raises(UserError, match="equals positive='x' .values: low, middle, high. in no row"):
        read_table(path, label="level", positive="x")
    with pytest.raises(UserError, match="both positive='high' and threshold=1 were given"):
        read_table(path, label="level", positive="high", threshold=1)


def test_odd_labels_are_complained_about(tmp_path):
    values = ["0", "1"] * 12
    values[5] = "oops"
    path = write(tmp_path / "p.csv", people(paid=values))
    with pytest.raises(UserError, match=r"3 different values \(0, 1, oops\)"):
        read_table(path, label="paid")


def test_missing_groups_are_a_group(tmp_path):
    sex = [None if i < 6 else "m" for i in range(ROWS)]
    table = read_table(write(tmp_path / "p.csv", people(sex=sex)), label="paid", group="sex")
    assert describe_groups(table)[["group", "rows"]].to_numpy().tolist() == [
        ["all rows", 24],
        ["missing", 6],
        ["m", 18],
    ]
    joined = read_table(write(tmp_path / "p.csv", people()), label="paid", group="sex+town")
    assert describe_groups(joined)["group"].tolist()[1:] == [
        *("female + Århus", "male + Köln", "female + Köln", "male + Århus"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n  \n", "holds blank lines only"),
        ("a.csv", b"paid,sex\n", "has column names but no rows"),
        ("a.csv", bytes(range(256)) * 20, "does not hold text .*saved as CSV"),
        ("a.xlsx", b"PK\x03\x04" + bytes(range(200)), "does not hold text"),
        ("a.parquet", b"paid,sex\n1,2\n", "is not a readable Parquet file"),
        ("a.parquet", b"PAR1" + b"\0" * 50, "is not a readable Parquet file"),
        ("a.csv.gz", gzip.compress(b"paid,sex\n1,2\n", mtime=0)[:-6], "is not a complete gzip file"),
        ("a.csv", b"paid,sex,paid\nyes,m,no\n", "several columns named paid"),
        ("a.csv", b"paid,sex\nyes,m\nno,m,3,4\n", "cannot be read as a table with the columns paid, sex .*line 3"),
        ("a.csv", b"paid,sex\nyes,m,2\nno,m,3\n", "cannot be read as a table with the columns paid, sex"),
        ("a.csv", b'paid,sex\n"yes,m\nno,m\n', "cannot be read as a table"),
        ("a.csv", b"pay,sex\nyes,m\nno,f\n", "no column 'paid' for the label.*the columns are pay, sex"),
        ("a.csv", b"Paid,sex\nyes,m\nno,f\n", "nearest: 'Paid'"),
        ("a.csv", b"paid,n\nyes,1\nyes,2\n", "the label 'paid' is yes in every row"),
        ("a.csv", b"paid,n\n,1\n,2\n", "the label 'paid' is missing in every row"),
        ("a.csv", b"paid,n\nyes,1\n,2\nno,2\n", "the label 'paid' is missing in 1 of 3 rows; remove these rows"),
        ("a.csv", b"paid\nyes\nno\n", "no column is left as a feature"),
    ],
)
def test_files_that_cannot_be_used(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        read_table(tmp_path / name, label="paid")
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"group": "sax"}, "no column 'sax' for the group .nearest: 'sex'.*the columns are age, sex, town, paid, one"),
        ({"group": "sex+wage"}, "no column 'wage' for the group .nearest: 'age'"),
        ({"clients": "city"}, "no column 'city' for the clients"),
        ({"drop": ["name"]}, "no column 'name' for the drop"),
        ({"group": "one"}, "'one' has one group only .1."),
        ({"clients": "one"}, "'one' names one client only .1."),
        ({"group": "paid"}, "the label 'paid' cannot also name the groups"),
        ({"group": "sex", "clients": "sex"}, "the column 'sex' was given 2 roles"),
        ({"drop": ["paid"]}, "the column 'paid' was given 2 roles"),
        ({"clients": "gaps"}, "'gaps' names no client in 12 of 24 rows"),
    ],
)
def test_roles_that_cannot_be(roles, message, tmp_path):
    frame = people(one=1, gaps=[None, "a"] * 12)
    with pytest.raises(UserError, match=message):
        read_table(write(tmp_path / "p.csv", frame), label="paid", **roles)


def test_paths_that_are_no_files(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.md").write_text("none")
    write(tmp_path / "people.csv", people())
    with pytest.raises(UserError, match="folder .*empty has no CSV or Parquet file; the folder .*holds notes.md"):
        read_table(tmp_path / "empty", label="paid")
    with pytest.raises(UserError, match=r"no file matches .*\*.tsv; the folder .* holds people.csv"):
        read_table(tmp_path / "*.tsv", label="paid")
    with pytest.raises(UserError, match="no file or folder .*peple.csv; the folder .* holds people.csv"):
        read_table(tmp_path / "peple.csv", label="paid")
    with pytest.raises(UserError, match="there is no file or folder"):
        read_table(tmp_path / "nowhere" / "people.csv", label="paid")


def test_columns_that_only_parquet_has(tmp_path):
    frame = people(
        day=pd.date_range("2024-01-01", periods=ROWS),
        lists=[[i % 2] for i in range(ROWS)],
        whole=pd.array([None, *range(5, ROWS + 4)], dtype="Int64"),
        flag=pd.array([None, True, False] * 8, dtype="boolean"),
    )
    frame.to_parquet(tmp_path / "p.parquet")
    table = read_table(tmp_path / "p.parquet", label="paid", group="sex")
    assert table.drop == ("day",)
    federated = federate(table, clients=2)
    assert np.isfinite(federated.inputs).all()
    assert {"whole missing", "lists=[1]", "flag=missing"} <= set(federated.feature_names)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text("a,;\t\"\n\r1.é 0yesno'", max_size=200).map(str.encode)))
def test_any_bytes_give_a_table_or_one_sentence(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(content)
    label = content.decode("latin-1").split(",")[0].strip()
    try:
        table = read_table(path, label=label)
    except UserError as error:
        assert "\n" not in str(error) and re.search(r"\w .*[.?]$", str(error))  # one sentence or two, in one line
    else:
        assert set(table.labels()) == {0, 1}


# ------------------------------------------------------------------------------------------------- what people have


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
@pytest.mark.parametrize("compressed", [False, True])
def test_ends_of_lines(newline, compressed, tmp_path):
    content = people().to_csv(index=False, lineterminator=newline).encode()
    path = tmp_path / ("people.csv.gz" if compressed else "people.csv")
    path.write_bytes(gzip.compress(content) if compressed else content)
    pd.testing.assert_frame_equal(read_table(path, label="paid").frame, people(), check_dtype=False)


def test_a_table_with_every_kind_of_column_can_be_trained_on(tmp_path):
    i = np.arange(2000)
    frame = pd.DataFrame(
        {
            "größe in cm": np.where(i % 10, 150 + i % 50, np.nan),
            "odd": np.where(i % 7, i % 5, np.inf),
            "constant": 1,
            "nothing": np.nan,
            "day": pd.date_range("2020-01-01", periods=len(i)).astype(str),
            "month": pd.Series(pd.date_range("2020-01-01", periods=12).astype(str)).take(i % 12).to_numpy(),
            "trade": [f"trade {k}" for k in i % 150],
            "street": [f"street {k}" for k in i % 500],
            "smokes": np.where(i % 3, "no", "yes"),
            "ill": np.where((i * 7) % 5, "no", "yes"),
        }
    )
    table = read_table(write(tmp_path / "p.csv", frame), label="ill")
    assert table.drop == ("day", "street") and [note.split()[0] for note in table.notes] == ["'day'", "'street'"]
    federated = federate(table, clients=3, by_group=False)
    assert np.isfinite(federated.inputs).all() and federated.inputs.std(0).min() > 0
    names = set(federated.feature_names)
    assert names >= {"größe in cm", "größe in cm missing", "odd missing", "smokes=yes", "trade=trade 149"}
    assert not names & {"constant", "nothing"} and "month=2020-01-12" in names
    spreadsheet = pd.DataFrame({"ill": ["yes", "no"]}).to_csv(index=False).encode("utf-16")
    (tmp_path / "p.csv").write_bytes(spreadsheet)
    with pytest.raises(UserError, match="does not hold text .*can be saved as CSV"):
        read_table(tmp_path / "p.csv", label="ill")


# ------------------------------------------------------------------------------------------------- a file per client


@pytest.fixture
def sites(tmp_path):
    """Three files of one table, each as another program writes it."""
    folder = tmp_path / "sites"
    folder.mkdir()
    frame = people(income=[i + 0.5 for i in range(ROWS)], code=np.arange(ROWS) % 3)
    write(
        folder / "berlin.csv", frame[:8].assign(income=frame.income[:8].map(lambda v: f"{v:,}".replace(".", ","))), ";"
    )
    letters = frame[8:16].assign(code=["x", "1"] * 4)
    (folder / "st.paul.csv.gz").write_bytes(gzip.compress(letters[letters.columns[::-1]].to_csv(index=False).encode()))
    frame[16:].assign(code=[None, 1, 2, 2, 1, 2, 1, 2]).to_parquet(folder / "oslo.parquet")  # whole numbers, with a gap
    (folder / "README").write_text("not a table")
    (folder / ".~lock.berlin.csv").write_text("nor this")
    return folder


@pytest.mark.parametrize("path", ["sites", "sites/*.*"])
def test_every_file_is_a_client(path, sites):
    table = read_table(sites.parent / path, label="paid")
    assert table.name == "3 files of sites" and table.client == "file"
    assert table.frame["file"].tolist() == ["berlin"] * 8 + ["oslo"] * 8 + ["st.paul"] * 8
    assert sorted(table.frame["income"]) == [i + 0.5 for i in range(ROWS)]  # with decimal commas, and with points
    assert table.frame["code"].value_counts().to_dict() == {"1": 10, "2": 6, "0": 3, "x": 4}
    federated = federate(table, test_fraction=0.25, by_group=False, positives=False)
    assert federated.client_names == ("berlin", "oslo", "st.paul")
    assert not any("file" in name for name in federated.feature_names)


def test_clients_may_be_a_column_of_several_files(sites):
    table = read_table(sites, label="paid", clients="town")
    assert table.client == "town" and "file" not in table.frame


def test_names_of_clients_tell_files_apart(tmp_path):
    for name in ("north/data.csv", "south/data.csv", "south/data.csv.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = people(file=1).to_csv(index=False).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    table = read_table(tmp_path / "*" / "data.csv", label="paid")
    assert table.client == "file 2"  # "file" is a column of theirs
    assert list(dict.fromkeys(table.frame["file 2"])) == ["north/data", "south/data"]
    table = read_table(tmp_path / "**" / "data.*", label="paid")
    names = ["north/data.csv", "south/data.csv", "south/data.csv.gz"]
    assert list(dict.fromkeys(table.frame["file 2"])) == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.rename(columns={"age": "Age"}), "b.csv has no column 'age' .nearest: 'Age'., but .*a.csv has"),
        (lambda f: f.assign(wage=1), "a.csv has no column 'wage' .nearest: 'age'., but .*b.csv has"),
        (lambda f: f[:0], "b.csv has column names but no rows"),
    ],
)
def test_files_that_do_not_agree(change, message, tmp_path):
    write(tmp_path / "a.csv", people())
    write(tmp_path / "b.csv", change(people()))
    with pytest.raises(UserError, match=message):
        read_table(tmp_path, label="paid")


def test_one_file_in_a_folder_is_no_federation_by_itself(tmp_path):
    write(tmp_path / "a.csv", people())
    assert read_table(tmp_path, label="paid").client is None
