"""The report's numbers against closed forms and scipy, its tables read back, its figures and its page as files."""

import csv
import dataclasses
import json
import re
import xml.etree.ElementTree
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.colors import to_hex
from records import METHODS, example
from scipy import stats

from nestfed.core.settings import UserError
from nestfed.report import figures, page, statistics, style, tables, write_report
from nestfed.report.record import Record

HOSTILE = ("<script>alert(1)</script>", "A & B", "Müller 中文", "$x_1$ \\frac 100%", "\"quote'|pipe", "</script>")


def series(*values, seeds=None):
    return pd.Series(values, index=range(len(values)) if seeds is None else seeds, dtype=float)


# ------------------------------------------------------------------------------------------------- paired differences


def test_paired_by_hand():
    result = statistics.pair(series(2, 4, 6), series(1, 2, 3))  # differences 1, 2, 3: mean 2, deviation 1
    reach = 4.302652729911275 / 3**0.5  # the 97.5 % quantile of t with 2 degrees of freedom
    assert (result.mean, result.n) == (2, 3)
    np.testing.assert_allclose([result.low, result.high], [2 - reach, 2 + reach], rtol=1e-9)
    assert result.p == pytest.approx(0.0741799)
    assert not result.clear


@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 2), min_size=2, max_size=12))
def test_paired_is_the_t_test_of_scipy(pairs):
    a, b = np.array(pairs).T
    if np.ptp(a - b) < 1e-6:  # scipy warns of cancellation there
        return
    result, reference = statistics.pair(series(*a), series(*b)), stats.ttest_rel(a, b)
    interval = reference.confidence_interval(0.95)
    np.testing.assert_allclose([result.low, result.high], [interval.low, interval.high], rtol=1e-6, atol=1e-8)
    assert result.p == pytest.approx(reference.pvalue, rel=1e-6, abs=1e-12)
    assert result.clear == (result.p < 0.05)


def test_paired_uses_common_finite_seeds_only():
    a, b = series(1, 2, 3, 9, seeds=[5, 1, 2, 7]), series(0, 0, 0, np.nan, np.inf, seeds=[2, 1, 5, 7, 8])
    assert statistics.pair(a, b) == statistics.pair(series(2, 3, 1), series(0, 0, 0))


def test_paired_with_too_few_seeds_has_no_interval():
    one = statistics.pair(series(3), series(1))
    assert (one.mean, one.n, one.clear) == (2, 1, False)
    assert np.isnan([one.low, one.high, one.p]).all()
    none = statistics.pair(series(3, seeds=[0]), series(1, seeds=[1]))
    assert none.n == 0 and np.isnan(none.mean) and not none.clear


def test_equal_differences_give_an_interval_of_width_zero():
    result = statistics.pair(series(0.3, 0.4, 0.7), series(0.2, 0.3, 0.6))  # equal but for rounding
    assert result.low == result.high == result.mean == pytest.approx(0.1)
    assert (result.p, result.clear) == (0, True)
    assert statistics.pair(series(1, 2), series(1, 2)) == (0, 0, 0, 1, 2)


def test_a_seed_given_twice_is_refused():
    with pytest.raises(UserError, match="seed 4 was given twice"):
        statistics.pair(series(1, 2, seeds=[4, 4]), series(1, 2))


# ------------------------------------------------------------------------------------------------- headline


def small(rows, **about):
    """A record with this final table: (method, seed, status, accuracy)."""
    final = pd.DataFrame(rows, columns=["method", "seed", "status", "accuracy"])
    metrics = [{"name": "accuracy", "title": "test accuracy", "better": "higher", "digits": 2}]
    methods = {name: name.upper() for name in final["method"].unique()}
    about = {"methods": methods, "metrics": metrics, "baseline": "a", "seeds": [0, 1, 2]} | about
    record = example(**about)
    return dataclasses.replace(record, final=final)


def test_headline_leaves_diverged_seeds_out_and_counts_them():
    record = small(
        [("b", 0, "finished", 0.8), ("b", 1, "diverged", np.nan), ("b", 2, "finished", 0.6)]
        + [("a", 0, "finished", 0.5), ("a", 1, "finished", 0.9), ("a", 2, "finished", 0.5)]
    )
    table = statistics.make_headline(record)
    assert list(table.index) == ["b", "a"]
    assert table["failed"].tolist() == [1, 0]
    b, a = (statistics.find_entry(table, method, record.metrics[0]) for method in ("b", "a"))
    assert (b.mean, b.std, b.n) == (pytest.approx(0.7), pytest.approx(0.1), 2)  # ddof 0
    assert b.paired == statistics.pair(series(0.8, 0.6, seeds=[0, 2]), series(0.5, 0.9, 0.5))
    assert b.paired.n == 2
    assert a.paired.n == 0 and np.isnan(a.paired.mean)  # nobody differs from itself


def test_headline_of_nothing_but_failures():
    record = small([("a", 0, "diverged", 0.1), ("a", 1, "interrupted", 0.2)])
    table = statistics.make_headline(record)
    assert table.at["a", "failed"] == 2 and table.at["a", "accuracy n"] == 0
    assert np.isnan(table.at["a", "accuracy mean"])
    assert page.write_sentence(record, table).startswith("No run finished")
    assert "2 of 3 failed" in page.render(record)


def test_a_metric_that_final_lacks_is_empty():
    record = small([("a", 0, "finished", 0.5)])
    record = dataclasses.replace(record, final=record.final.drop(columns="accuracy"))
    assert statistics.make_headline(record).at["a", "accuracy n"] == 0


A = [("a", seed, "finished", value) for seed, value in enumerate((0.50, 0.52, 0.54))]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("b", s, "finished", v) for s, v in enumerate((0.61, 0.62, 0.64))],
         "B has the best test accuracy: 0.62 ± 0.01 over 3 seeds, 0.10 above the baseline A "
         "(95 % interval 0.09 to 0.12)."),
        ([("b", s, "finished", v) for s, v in enumerate((0.70, 0.40, 0.60))],
         "B has the best test accuracy: 0.57 ± 0.12 over 3 seeds, no clear difference to the baseline A "
         "(95 % interval −0.35 to 0.45)."),
        ([("b", 0, "finished", 0.75)],
         "B has the best test accuracy: 0.75 with one seed, 0.25 above the baseline A (one common seed: no interval)."),
        ([("b", 9, "finished", 0.75)],
         "B has the best test accuracy: 0.75 with one seed, without a seed in common with the baseline A."),
        ([("b", s, "finished", v) for s, v in enumerate((0.40, 0.42, 0.44))],
         "The baseline A has the best test accuracy: 0.52 ± 0.02 over 3 seeds; next is B, 0.10 below it "
         "(95 % interval −0.10 to −0.10)."),
        ([], "A has the best test accuracy: 0.52 ± 0.02 over 3 seeds."),
    ],
)  # fmt: skip
def test_the_sentence_says_what_the_numbers_say(rows, expected):
    record = small(A + rows)
    assert page.write_sentence(record, statistics.make_headline(record)) == expected


def make_finals(**values):
    """A record with these accuracies, one per seed, of every method."""
    record = example(methods={name: METHODS.get(name, name) for name in values}, seeds=(0, 1, 2))
    rows = [
        {"method": name, "seed": seed, "status": "finished", "accuracy": value, "gap": 0.1, "loss": 0.5}
        for name, own in values.items()
        for seed, value in enumerate(own)
    ]
    return dataclasses.replace(record, final=pd.DataFrame(rows))


def test_every_method_has_a_plain_sentence_of_what_it_gained():
    record = make_finals(fedavg=[0.80, 0.81, 0.82], fedminmax=[0.83, 0.84, 0.86], twostage=[0.79, 0.83, 0.81])
    better, unclear = (statistics.find_gains(record)[name] for name in ("fedminmax", "twostage"))
    found = statistics.pair(series(0.83, 0.84, 0.86), series(0.80, 0.81, 0.82))
    assert better == (
        f"FedMinMax, test accuracy: better than FedAvg by {found.mean:.4f} (95 % interval {found.low:.4f} to "
        f"{found.high:.4f}, 3 seeds)."
    )
    assert unclear.startswith("FedFair (two stages), test accuracy: no clear gain over FedAvg (0.0000, 95 % interval −")
    assert "fedavg" not in statistics.find_gains(record)  # it is what the others are compared with
    swapped = make_finals(fedavg=[0.83, 0.84, 0.86], fedminmax=[0.80, 0.81, 0.82])
    assert "worse than FedAvg by" in statistics.find_gains(swapped)["fedminmax"]
    both = dataclasses.replace(record, about=record.about | {"references": ["fedavg", "twostage"]})
    assert "better than FedAvg by" in (said := statistics.find_gains(both)["fedminmax"]) and "; " in said
    assert statistics.find_gains(both)["fedavg"].startswith("FedAvg, test accuracy: no clear gain over FedFair")
    for sentence in statistics.find_gains(record).values():
        assert sentence in page.render(record)


def test_one_seed_is_no_clear_gain_and_no_result_none():
    record = make_finals(fedavg=[0.8], fedminmax=[0.9])
    assert (
        "no clear gain over FedAvg (0.1000 in one seed; an interval needs several"
        in (statistics.find_gains(record)["fedminmax"])
    )
    diverged = record.final.assign(status=["finished", "diverged"])
    assert statistics.find_gains(dataclasses.replace(record, final=diverged)) == {
        "fedminmax": "FedMinMax: no seed has a result."
    }


def test_lower_is_better_where_the_metric_says_so():
    record = example()
    table, gap = statistics.make_headline(record), record.metrics[1]
    assert gap.better == "lower"
    assert statistics.find_best(table, gap) == table["gap mean"].idxmin()


# ------------------------------------------------------------------------------------------------- curves and slices


def history(rows):
    frame = pd.DataFrame(rows, columns=["method", "seed", "stage", "round", "loss"])
    return frame.assign(bytes=frame["round"] * 10 + frame["seed"], oracle_calls=frame["round"] * 2, samples=0)


def test_curve_is_mean_and_deviation_by_evaluation():
    curve = statistics.average_curve(
        history(
            [("a", 0, "warm", 0, 4.0), ("a", 0, "warm", 5, 2.0), ("a", 1, "warm", 0, 8.0), ("a", 1, "warm", 5, np.nan)]
            + [("b", 0, "warm", 0, 99.0)]
        ),
        "a",
        "loss",
    )
    assert curve[["round", "bytes", "oracle_calls", "mean", "std", "n"]].values.tolist() == [
        [0, 0.5, 0, 6, 2, 2],
        [5, 50, 10, 2, 0, 1],
    ]


def test_a_stage_without_the_metric_is_left_out_and_the_next_is_marked():
    rows = [("a", 0, "warm", 0, 1.0), ("a", 0, "tune", 1, np.nan), ("a", 0, "end", 2, 3.0), ("a", 0, "end", 3, 2.0)]
    curve = statistics.average_curve(history(rows), "a", "loss")
    assert curve["round"].tolist() == [0, 2, 3]
    assert curve["stage"].tolist() == [0, 2, 2]
    assert statistics.find_stage_changes(curve, "round") == [(0.0, "end")]
    late = statistics.average_curve(history(rows[1:]), "a", "loss")
    assert statistics.find_stage_changes(late, "bytes") == [(20.0, "end")]


def test_diverged_runs_are_not_in_the_curves():
    record = example()
    record.final.loc[(record.final["method"] == "fedavg") & (record.final["seed"] == 1), "status"] = "diverged"
    kept = statistics.select_sound_history(record)
    assert len(kept) == len(record.history) * 8 // 9
    assert set(kept.loc[kept["method"] == "fedavg", "seed"]) == {0, 2}


def test_slices_are_over_finished_seeds():
    record = example()
    record.final.loc[record.final["seed"] == 2, "status"] = "diverged"
    row = statistics.average_slices(record).iloc[0]
    own = record.slices
    for column in ("method", "kind", "slice", "split", "metric"):
        own = own[own[column] == row[column]]
    values = own.loc[own["seed"] != 2, "value"]
    assert (row["mean"], row["std"], row["n"]) == (pytest.approx(values.mean()), pytest.approx(np.std(values)), 2)


# ------------------------------------------------------------------------------------------------- numbers as words


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.12345, 4, "0.1235"), (-0.5, 2, "−0.50"), (-0.00001, 2, "−1e−05"), (0.0, 3, "0.000"), (-0.0, 1, "0.0"),
        (1.5e7, 2, "1.5e+07"), (float("nan"), 2, "–"), (float("-inf"), 2, "−∞"),
    ],
)  # fmt: skip
def test_numbers(value, digits, text):
    assert style.format_number(value, digits) == text


def test_numbers_of_one_interval_share_their_notation():
    assert style.format_numbers([0.0071, 0.00003], 4) == ["0.0071", "0.0000"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (1_234_567, "1.23 MB")]
)
def test_amounts(size, text):
    assert style.format_amount(size, "B") == text


def test_no_two_methods_look_alike():
    drawn = style.choose_looks({f"m{i}": f"Method {i}" for i in range(20)}, "m3").values()
    assert len({(look.colour, look.dash) for look in drawn}) == 20
    assert sum(look.colour == style.BASELINE for look in drawn) == 1


# ------------------------------------------------------------------------------------------------- tables


def test_tables_read_back(tmp_path):
    frame = pd.DataFrame({"group": HOSTILE, "rate": np.linspace(0.1, 1 / 3, len(HOSTILE))})
    paths = tables.write(frame, tmp_path, "t")
    assert [path.name for path in paths] == ["t.csv", "t.md", "t.tex"]
    with paths[0].open(encoding="utf-8", newline="") as file:
        back = [(row["group"], float(row["rate"])) for row in csv.DictReader(file)]
    assert back == list(frame.itertuples(index=False, name=None))  # to the last bit


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.cells = []

    def handle_starttag(self, tag, attrs):
        assert tag in {"table", "thead", "tbody", "tr", "th", "td"}, f"the table contains <{tag}>"
        if tag in {"th", "td"}:
            self.cells.append("")

    def handle_data(self, data):
        if data.strip():
            self.cells[-1] += data


words = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp", "Cf")), max_size=20)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_markdown_says_what_was_given(rows):
    parser = Cells()
    parser.feed(
        MarkdownIt().enable("table").render(tables.format_markdown(pd.DataFrame(rows, columns=["method", "b"])))
    )
    assert parser.cells == ["method", "b", *(" ".join(cell.split()) for row in rows for cell in row)]


@given(words)
def test_latex_leaves_no_command_of_the_users(text):
    (line,) = [line for line in tables.format_latex(pd.DataFrame({"method": [text]})).split("\n")[4:5]]
    known = (
        r"\\text(backslash|asciitilde|asciicircum|less|greater|bar)\{\}|\\[&%$#_{}]|\$\\(pm|infty)\$|\$-\$|\{[\[\]]\}"
    )
    rest = re.sub(known, "", line.removesuffix(r" \\"))
    assert not re.search(r"[\\&%$#_{}~^<>|]", rest)


def test_latex_of_the_headline():
    _, shown = tables.tabulate_headline(small(A + [("b", 0, "finished", 0.75), ("b", 1, "diverged", 0)]))
    assert tables.format_latex(shown).splitlines() == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"method & test accuracy & test accuracy: difference to A & failed \\",
        r"\midrule",
        r"A & 0.52 $\pm$ 0.02 & -- & 0 \\",
        r"B & 0.75 & +0.25 (one seed: no interval) & 1 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_cost_table_has_a_line_for_a_start_that_costs():
    frame, shown = tables.tabulate_cost(example())
    own = frame[frame["method"] == METHODS["twostage"]]
    assert own[["stage", "part", "times", "exchanges", "GRAD", "HVP"]].values.tolist() == [
        ["training", "round", 300, 1, 5, 0],
        ["fine-tuning", "start", 1, 1, 0, 0],
        ["fine-tuning", "round", 300, 3, 2, 3],
    ]
    assert shown["bytes up"].tolist()[-1] == "1.65 kB"


def test_a_group_may_be_called_like_a_column():
    record = example(groups=("client", "rows", "group"), seeds=(0,))
    _, shown = tables.tabulate_holdings(record)
    assert shown["rows"].tolist() == record.holdings.groupby("client", sort=False)["rows"].sum().tolist()


# ------------------------------------------------------------------------------------------------- figures


def test_curves_draw_every_method_in_its_colour_and_mark_stages():
    record = example()
    figure = figures.draw_curves(record.history, "accuracy", "bytes", methods=figures.find_looks(record))
    axes = figure.axes[0]
    drawn = {line.get_label(): to_hex(line.get_color()).upper() for line in axes.lines if line.get_label()[0] != "_"}
    assert drawn == {look.title: look.colour.upper() for look in figures.find_looks(record).values()}
    assert len(axes.collections) == 3  # bands
    assert [text.get_text() for text in axes.texts] == ["fine-tuning"]
    last = statistics.average_curve(record.history, "fedavg", "accuracy").iloc[-1]
    assert axes.lines[0].get_xydata()[-1].tolist() == [last["bytes"], last["mean"]]


def test_one_seed_has_no_band():
    assert not figures.draw_curves(example(seeds=(0,)).history, "loss").axes[0].collections


def test_unknown_requests_say_what_is_known():
    record = example()
    with pytest.raises(UserError, match="recorded are: accuracy, gap, loss"):
        figures.draw_curves(record.history, "speed")
    with pytest.raises(UserError, match="round, bytes, oracle_calls"):
        figures.draw_curves(record.history, "loss", "time")
    with pytest.raises(UserError, match="true_positive_rate group validation"):
        figures.draw_slice_bars(record, "speed")
    with pytest.raises(UserError, match="two metrics"):
        figures.draw_trade_off(small(A))
    with pytest.raises(UserError, match="accuracy, gap, loss"):
        figures.draw_trade_off(record, x="speed")


def test_bars_have_the_means_as_heights():
    record = example()
    axes = figures.draw_slice_bars(record, "accuracy").axes[0]
    table = statistics.select_rows(statistics.average_slices(record), metric="accuracy", kind="group", split="test")
    assert sorted(bar.get_height() for bar in axes.patches) == pytest.approx(sorted(table["mean"]))


def test_many_clients_become_dots():
    axes = figures.draw_slice_bars(example(clients=40), kind="client").axes[0]
    assert not axes.patches
    assert [len(cloud.get_offsets()) for cloud in axes.collections] == [40, 40, 40]


# ------------------------------------------------------------------------------------------------- the whole report


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The report of a record whose names try to break out."""
    record = example(
        groups=HOSTILE, rounds=20, title=HOSTILE[0], task=HOSTILE[1], notes=[HOSTILE[0]], command="nestfed run '<a&b>'"
    )
    folder = tmp_path_factory.mktemp("report")
    return record, write_report(record, folder)


def test_report_writes_page_figures_and_tables(hostile):
    _, path = hostile
    assert path.name == "report.html"
    made = {file.name for file in path.parent.rglob("*") if file.is_file()}
    assert {"headline.csv", "headline.md", "headline.tex", "cost.csv", "holdings.tex", "slices-group.md"} <= made
    stems = {name.removesuffix(".png") for name in made if name.endswith(".png")}
    assert stems == {name.removesuffix(".svg") for name in made if name.endswith(".svg")}
    assert {
        "curves-accuracy-round",
        "curves-gap-bytes",
        "bars-true-positive-rate-group",
        "trade-off",
        "holdings",
    } <= stems
    for file in (path.parent / "figures").iterdir():
        if file.suffix == ".svg":
            assert xml.etree.ElementTree.parse(file).getroot().tag.endswith("svg")
        else:
            assert file.read_bytes().startswith(b"\x89PNG")


class Page(HTMLParser):
    """Elements with their attributes, and the text of those that are shown."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.shown, self._inside = [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in {"script", "style"} else None
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside is None:
            self.shown += data


def test_names_from_files_stay_text(hostile):
    record, path = hostile
    text = path.read_text(encoding="utf-8")
    parsed = Page(text)
    assert len(parsed.scripts) == 2
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on") or name == "src"]
    for name in (*HOSTILE, record.about["command"]):
        assert name in parsed.shown
    data = json.loads(parsed.scripts[0])
    assert next(entry for entry in data["slices"] if entry["kind"] == "group")["names"] == list(HOSTILE)
    assert (
        re.search(r"https?://", text.replace("http://www.w3.org/2000/svg", "")) is None
    )  # the name of SVG, no address


def test_embedded_json_has_no_nan():
    text = page.embed({"a": [float("nan"), np.float32("inf"), 1.23456789, np.int64(3), 2.0], "<": "</script>\u2028"})
    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == {"a": [None, None, 1.2346, 3, 2], "<": "</script>\u2028"}


def test_lines_are_thinned_and_keep_their_ends():
    stage = np.repeat([0, 1], [1234, 4321])
    kept = page._thin(stage, 400)
    assert len(kept) <= 402
    assert {0, 1233, 1234, 5554} <= set(kept.tolist())
    assert page._thin(stage[:7], 400).tolist() == list(range(7))


def test_a_large_report_stays_below_a_megabyte():
    methods = {f"method {i}" if i else "fedavg": f"Method {i}" for i in range(6)}
    record = example(methods=methods, seeds=tuple(range(10)), rounds=600, every=1, clients=50, more_metrics=6)
    assert len(page.render(record).encode()) < 1_000_000


def test_one_seed_and_one_method_make_a_report():
    text = page.render(example(methods={"fedavg": "FedAvg"}, seeds=(4,), rounds=4))
    assert "FedAvg has the best test accuracy" in text
    assert ">best<" not in text and "One seed" in text


def test_a_record_without_slices_holdings_and_cost_makes_a_report(tmp_path):
    full = example(rounds=4, methods={"fedavg": "FedAvg", "b": "B"})
    bare = dataclasses.replace(full, slices=full.slices.iloc[:0], holdings=full.holdings.iloc[:0], cost={})
    parsed = Page(write_report(bare, tmp_path).read_text(encoding="utf-8"))
    sections = {attributes["id"] for tag, attributes in parsed.tags if tag == "section"}
    assert sections == {"results", "curves", "gains", "reproduce"}


def test_a_record_read_from_its_folder_gives_the_same_page(tmp_path):
    record = example(rounds=6)
    record.save(tmp_path)
    assert page.render(Record.load(tmp_path)) == page.render(record)


def test_a_run_stopped_before_its_first_evaluation_makes_a_report(tmp_path):
    full = example(rounds=4)
    empty = {name: getattr(full, name).iloc[:0] for name in ("history", "final", "slices", "holdings")}
    stopped = dataclasses.replace(full, cost={}, about=full.about | {"status": "interrupted"}, **empty)
    parsed = Page(write_report(stopped, tmp_path).read_text(encoding="utf-8"))
    assert "This run is not complete: interrupted." in parsed.shown
    assert "No run finished with a test accuracy" in parsed.shown
    assert not list((tmp_path / "figures").glob("curves*"))
