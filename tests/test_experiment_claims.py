"""Claims are judged as their page says: by intervals, with a correction, and never on what is missing."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nestfed.experiments.cells import Cell
from nestfed.experiments.claims import Claim, above, below, compare, correct_by_holm, exactly, judge, judge_case, within

SEEDS = pd.Index(range(6))


def case(mean, spread=1.0, **about):
    """Six paired differences with this mean."""
    steps = spread * np.array([-1.0, 1.0, -0.5, 0.5, -0.2, 0.2])
    return compare(pd.Series(mean + steps, SEEDS), pd.Series(0.0, SEEDS), **about)


def judged(**cases):
    """The verdict of a claim with these cases, all said to be above 0."""
    return judge([Claim("1", "text", "what", above(0), cases)])[0]


@pytest.mark.parametrize(
    ("mean", "says", "verdict"),
    [
        (2.0, above(0), "holds"),
        (-2.0, above(0), "refuted"),
        (0.1, above(0), "undecided"),
        (-0.1, above(0), "undecided"),
        (-2.0, below(0), "holds"),
        (0.1, within(1.5), "holds"),
        (1.0, within(1.5), "undecided"),
        (3.0, within(1.5), "refuted"),
        (0.1, within(0.1), "undecided"),
    ],
)
def test_a_case_is_judged_by_where_its_interval_lies(mean, says, verdict):
    found = case(mean)
    low, high = found.found.low, found.found.high
    inside = says.low < low and high < says.high
    outside = high < says.low or low > says.high
    assert verdict == ("holds" if inside else "refuted" if outside else "undecided")
    judgement = judge_case(found, says)
    assert judgement.verdict == verdict and (judgement.p < 0.05) == (verdict != "undecided")


def test_its_p_is_that_of_the_test_against_the_nearest_bound():
    values = case(2.0).found
    steps = 2.0 + np.array([-1.0, 1.0, -0.5, 0.5, -0.2, 0.2])
    assert judge_case(case(2.0), above(1.0)).p == pytest.approx(stats.ttest_1samp(steps, 1.0)[1])
    both = [stats.ttest_1samp(steps, bound)[1] for bound in (-3, 3)]
    assert judge_case(case(2.0), within(3.0)).p == pytest.approx(np.max(both)) and values.n == 6


def test_holm():
    assert correct_by_holm([0.01, np.nan, 0.04, 0.03]) == pytest.approx([0.03, np.nan, 0.06, 0.06], nan_ok=True)
    assert correct_by_holm([0.6, 0.9]) == [1.0, 1.0]


def test_a_claim_holds_where_all_cases_do_and_is_refuted_where_one_is():
    assert judged(a=case(2.0), b=case(3.0)).verdict == "holds"
    assert judged(a=case(2.0), b=case(0.1)).verdict == "undecided"
    against = judged(a=case(2.0), b=case(-2.0), c=case(0.1))
    assert against.verdict == "refuted" and against.telling == "b"
    assert against.p == pytest.approx(3 * judge_case(case(-2.0), above(0)).p)


def test_what_many_claims_would_show_by_chance_is_undecided():
    weak = case(0.9)
    assert judged(a=weak).verdict == "holds"
    many = judge([Claim(str(i), "text", "what", above(0), {"a": weak}) for i in range(20)])
    assert {one.verdict for one in many} == {"undecided"} and many[0].cases["a"].verdict == "holds"


def test_a_seed_that_is_missing_and_a_curve_that_moves_leave_a_case_open():
    lost = compare(pd.Series([2.0, 2.1, np.nan]), pd.Series(0.0, range(3)))
    assert judge_case(lost, above(0))[:2] == ("undecided", "1 of 3 seeds diverged")
    assert judge_case(case(2.0, motion=2.5), above(0)).reason == "not converged"
    assert judge_case(case(2.0, motion=1.5), above(0)).verdict == "holds"
    assert judge_case(case(2.0)._replace(open="nothing to lose"), above(0)).reason == "nothing to lose"
    alone = compare(pd.Series([1.0]), pd.Series([0.0]))
    assert judge_case(alone, above(0)).reason == "one seed has no interval"
    assert judge_case(exactly(0.5), above(0)).verdict == "holds"
    assert judge_case(exactly(0.5), within(0.1)).verdict == "refuted"


def cell(*curves):
    values = np.array([curves], float)
    return Cell(
        settings=[{}],
        seeds=list(range(len(curves))),
        round=np.arange(values.shape[-1]),
        metrics={"accuracy": values},
        diverged=np.full((1, len(curves)), -1),
        cost={},
        seconds=0.0,
        machine="",
    )


def test_motion_is_the_last_slope_kept_up_for_as_long_again():
    line = np.arange(21) / 20
    assert cell(line, line + 0.1).motion("accuracy") == pytest.approx(1.0)
    assert cell(-line).motion("accuracy") == pytest.approx(1.0)
    assert cell(np.minimum(line, 0.5)).motion("accuracy") == pytest.approx(0.0, abs=1e-12)
    assert cell(np.where(line < 0.9, line, 0.9 - line / 10)).motion("accuracy") == 0  # it falls back
    assert cell([0.0, 1.0]).motion("accuracy") == 0  # two points tell nothing


def test_runs_that_stand_still_far_below_the_others_have_collapsed():
    rising, standing = np.arange(11) / 10, np.minimum(np.arange(11) / 10, 0.3)
    assert cell(rising, rising, standing).collapsed("accuracy") == [2]
    assert cell(rising, rising, 0.8 * rising).collapsed("accuracy") == []  # it is slow
    assert cell(standing, standing).collapsed("accuracy") == []  # all have settled there
