"""The reproduction of the counterexample: closed forms (T1), the page and its files, verdicts that can change."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from nestfed.experiments import reproduce
from nestfed.experiments.claims import judge
from nestfed.experiments.counterexample.limits import (
    find_averaging_limit,
    find_ds_limit,
    find_mixed_limit,
    find_printed_limit,
)
from nestfed.experiments.counterexample.page import check_claims, format_digits

KEPT = Path(__file__).parent.parent / "experiments" / "counterexample"
LIMIT = 1e-5


# ------------------------------------------------------------------------------------------------- what must come out


@pytest.mark.parametrize(
    ("name", "steps", "lr", "expected"),
    [
        ("fedavg-co-1", 2, 0.04, 1.1913324), ("fedavg-co-1", 2, 0.1249, 1.2724792), ("fedavg-co-1", 1, 0.0, 1.1686673),
        ("fedavg-co-1", 8, 0.0, 1.1686673), ("fedavg-co-2", 2, 0.04, 1.1174209), ("fedavg-co-2", 2, 0.0454, 1.1261314),
        ("fedavg-co-2", 1, 0.04, 0.0), ("fedavg-co-2", 4, 0.0, 1.1273935), ("fedavg-co-2", 8, 0.0, 1.1504353),
    ],
)  # fmt: skip
def test_limits_of_averaging_are_roots(name, steps, lr, expected):
    assert find_averaging_limit(name, steps, lr) == pytest.approx(expected, abs=1e-7)


def test_limits_of_the_other_methods_are_those_of_the_specification():
    assert find_printed_limit() == pytest.approx(0.45)
    limits = {(0.001, 0.001, 2): 0.0060118, (0.001, 0.001, 8): 0.0413943, (0.04, 0.1, 2): 0.4766517, (0.04, 0.1, 1): 0}
    for settings, expected in limits.items():
        assert find_ds_limit(*settings) == pytest.approx(expected, abs=1e-7)
    assert find_mixed_limit(1.0) == pytest.approx(1.1686673, abs=1e-7)  # nothing is mixed


# ------------------------------------------------------------------------------------------------- the experiment


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return reproduce("counterexample", out=tmp_path_factory.mktemp("out") / "quick", quick=True, progress=False)


def check_tables(folder):
    """Every limit is the expected one, and the averages never come back below their start."""
    read = lambda name: pd.read_csv(folder / "tables" / f"{name}.csv")
    averaging, small, feddro, ds = (read(name) for name in ("fedavg-co", "small-steps", "feddro", "ds-feddro"))
    for table in (averaging, feddro):
        assert_allclose(table.limit, table.expected, atol=LIMIT)
    assert_allclose(small.limit, small.expected, atol=2e-5)  # extrapolated
    assert (averaging.lowest >= 0.5).all() and (averaging.limit > 1).all()
    assert_allclose(ds["limit, local y"], ds.expected, atol=LIMIT)
    assert_allclose(ds["limit, local y, server rates 1.3"], ds.expected, atol=LIMIT)
    settled = ds["limit, broadcast y"].dropna()
    assert_allclose(settled, 0, atol=LIMIT)
    return averaging, feddro, ds


def test_the_quick_version_reaches_every_limit(page):
    averaging, feddro, ds = check_tables(page.parent)
    assert len(averaging) == 6 and len(feddro) == 4 and len(ds) == 2
    row = feddro[(feddro.order == "printed") & (feddro.beta == 0)].iloc[0]
    assert_allclose(row[["x, round 2", "y, round 2", "limit"]].astype(float), [0.47084459, 0.20844594, 0.45], atol=1e-8)


def test_the_page_has_its_figures_and_verdicts(page):
    text = page.read_text()
    assert page.name == "README.md" and "{{" not in text and "nestfed reproduce counterexample --quick" in text
    verdicts = re.findall(r"\*\*(Holds|Refuted|Undecided)\*\*", text)
    assert verdicts == ["Holds", "Holds", "Refuted", "Holds", "Refuted", "Holds", "Holds"]
    linked = re.findall(r"\]\((.*?)\)", text)
    assert len(linked) == 8 and all((page.parent / path).exists() for path in linked)
    for name in ("counterexample", "figure7"):
        assert (page.parent / "figures" / f"{name}.svg").exists()
    paths = pd.read_csv(page.parent / "tables" / "paths.csv")
    ends = paths.groupby("method").x.last()
    assert_allclose(ends[["FedDRO", "DS-FedDRO, broadcast y"]], 0, atol=1e-6)
    assert_allclose(ends[["FedAvg-CO, case I", "FedAvg-CO, case II"]], [1.1913324, 1.1174209], atol=LIMIT)
    assert_allclose(ends["DS-FedDRO, local y"], 0.4766517, atol=LIMIT)


def test_the_kept_results_are_those_of_the_specification():
    """What the repository shows: the full version."""
    averaging, feddro, ds = check_tables(KEPT)
    assert len(averaging) == 10 and len(feddro) == 10 and len(ds) == 8
    first = averaging[(averaging.method == "FedAvg-CO, case II") & (averaging["step size"] == 0.02)].iloc[0]
    rounds = first[["round 1", "round 2", "round 3"]].astype(float)
    assert_allclose(rounds, [0.54057436, 0.57952669, 0.61678893], atol=1e-8)
    assert ds["limit, broadcast y"].isna().sum() == 1  # large steps swing
    others = pd.read_csv(KEPT / "tables" / "others.csv")
    assert_allclose(others.limit, others.expected, atol=LIMIT)
    assert "1.1913324" in (KEPT / "README.md").read_text()


# ------------------------------------------------------------------------------------------------- verdicts


def test_a_verdict_follows_the_numbers():
    names = ("fedavg-co", "small-steps", "feddro", "ds-feddro", "schedules")
    tables = {name: pd.read_csv(KEPT / "tables" / f"{name}.csv") for name in names}

    def verdict(claim, **changed):
        judged = judge(check_claims(*(tables | changed).values()))
        return {one.claim.number: one.verdict for one in judged}[claim]

    averaging, feddro, ds, schedules = (tables[name] for name in ("fedavg-co", "feddro", "ds-feddro", "schedules"))
    assert verdict("1a") == verdict("1b") == verdict("2b") == verdict("3c") == "holds"
    assert verdict("1a", **{"fedavg-co": averaging.assign(lowest=0.4)}) == "refuted"
    assert verdict("1b", **{"fedavg-co": averaging.assign(limit=0.9)}) == "refuted"
    assert verdict("2") == "refuted" and verdict("2", feddro=feddro.assign(limit=0.0)) == "holds"
    assert verdict("2b", feddro=feddro.assign(limit=0.1)) == "refuted"
    assert verdict("3") == "refuted" and verdict("3", **{"ds-feddro": ds.assign(**{"limit, local y": 0.0})}) == "holds"
    rising = schedules.assign(limit=schedules["T"].astype(float))
    assert verdict("3c", schedules=rising) == "refuted"


def test_numbers_below_the_resolution_are_shown_as_zero():
    shown = format_digits(pd.DataFrame({"beta": [0.5], "limit": [-1e-9], "other": [np.nan]}))
    assert shown.iloc[0].tolist() == ["0.5", "0.0000000", "–"]
