"""Claims of a paper, each with the paired differences over seeds that decide it.

A claim says, of one quantity on one axis, where a difference lies: above a bound, below it, or within a reach of zero.
Every case of it is judged by the 95 % interval of its differences:

    holds       the interval lies where the claim says
    refuted     it lies where the claim says it does not
    undecided   neither, or a seed is missing, or the curves still move so fast that they could change sides

A claim holds where all its cases do, is refuted where one is, and is undecided otherwise; in both directions only as
far as that survives the number of tests. That all cases hold is as sure as the least sure of them; that one of many is
refuted counts as often as there are cases; and Holm's correction is for the number of claims on a page.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from nestfed.report.statistics import CONFIDENCE, Paired, pair

HOLDS, REFUTED, UNDECIDED = "holds", "refuted", "undecided"
ROUNDING = 1e-12  # what is smaller is shown as zero
LEVEL = 1 - CONFIDENCE  # the chance, over a page, of one decision too many


class Range(NamedTuple):
    """Where a claim says that a difference lies."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.low == -self.high:
            return f"within ±{self.high:g}"
        return f"above {self.low:g}" if math.isfinite(self.low) else f"below {self.high:g}"

    @property
    def bounds(self) -> list[float]:
        return [bound for bound in self if math.isfinite(bound)]

    def holds(self, value: float) -> bool:
        return self.low < value < self.high


def above(bound: float) -> Range:
    return Range(low=bound)


def below(bound: float) -> Range:
    return Range(high=bound)


def within(reach: float) -> Range:
    """Alike: what two things that are called equal may differ by."""
    return Range(-reach, reach)


class Case(NamedTuple):
    """One difference that a claim speaks of."""

    found: Paired
    seeds: int = 0  # that were run; fewer pairs than these were lost
    motion: float = 0.0  # how far one of the two curves could still go, see `Cell.motion`
    published: float | None = None  # the paper's figure for it
    remark: str = ""  # what a reader must know of it
    open: str = ""  # why it cannot be judged


def compare(a: pd.Series, b: pd.Series, **about: float | str | None) -> Case:
    """a - b, seed by seed; the other arguments are those of `Case`."""
    return Case(pair(a, b), len(a.index.union(b.index)), **about)  # pyright: ignore[reportArgumentType]


def exactly(value: float, **about: float | str | None) -> Case:
    """A difference without chance."""
    return Case(Paired(value, value, value, 0.0, 1), 1, **about)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is claimed, what is compared, and what came out."""

    number: str
    text: str
    compared: str  # the quantity and its axis
    says: Range
    cases: Mapping[str, Case]
    ours: bool = False  # no claim of the paper's
    reading: str = ""  # how a claim of the paper was made one that can be judged


class Judgement(NamedTuple):
    """What is said of a case."""

    verdict: str
    reason: str  # of what is undecided
    p: float  # that a difference on the other side of the nearest bound would look like this, or farther away


@dataclasses.dataclass(frozen=True)
class Judged:
    """A claim with its verdict and those of its cases."""

    claim: Claim
    verdict: str
    p: float  # of the verdict that its cases suggest, with Holm's correction
    cases: Mapping[str, Judgement]

    @property
    def counts(self) -> dict[str, int]:
        found = collections.Counter(judgement.verdict for judgement in self.cases.values())
        return {verdict: found[verdict] for verdict in (HOLDS, REFUTED, UNDECIDED)}

    @property
    def telling(self) -> str:
        """The case that speaks most against the claim."""
        order = (REFUTED, UNDECIDED, HOLDS)

        def against(name: str) -> tuple[int, float]:
            found, says = self.claim.cases[name].found, self.claim.says
            margins = [found.mean - says.low, says.high - found.mean]
            return order.index(self.cases[name].verdict), min((m for m in margins if not math.isnan(m)), default=0.0)

        return min(self.cases, key=against)


def judge(claims: Sequence[Claim]) -> list[Judged]:
    """All claims of a page."""
    cases = [{name: judge_case(case, claim.says) for name, case in claim.cases.items()} for claim in claims]
    suggested = [_suggest(list(own.values())) for own in cases]
    corrected = correct_by_holm(p for _, p in suggested)
    sure = [verdict if p < LEVEL else UNDECIDED for (verdict, _), p in zip(suggested, corrected, strict=True)]
    return [Judged(*one) for one in zip(claims, sure, corrected, cases, strict=True)]


def judge_case(case: Case, says: Range) -> Judgement:
    """By its interval alone."""
    p, reason = _compute_p(case.found, says), _explain(case, says)
    if not reason and p >= LEVEL:
        reason = "the interval crosses the bound"
    side = HOLDS if says.holds(case.found.mean) else REFUTED
    return Judgement(UNDECIDED if reason else side, reason, p)


def _suggest(cases: Sequence[Judgement]) -> tuple[str, float]:
    """What the cases of a claim say together, and how sure that is."""
    refuting = [case.p for case in cases if case.verdict == REFUTED]
    if refuting:
        return REFUTED, min(1.0, min(refuting) * len(cases))
    if cases and all(case.verdict == HOLDS for case in cases):
        return HOLDS, max(case.p for case in cases)
    return UNDECIDED, math.nan


def _explain(case: Case, says: Range) -> str:
    """Why a case cannot be judged."""
    found = case.found
    if case.open:
        return case.open
    if found.n < case.seeds:
        lost = case.seeds - found.n
        return f"{lost} of {case.seeds} seeds diverged"
    if math.isnan(found.p):
        return "one seed has no interval" if found.n else "nothing to compare"
    if min(abs(found.mean - bound) for bound in says.bounds) < case.motion:
        return "not converged"
    return ""


def _compute_p(found: Paired, says: Range) -> float:
    """Two-sided; for a range with two ends, of both having been tested (TOST) where the mean is inside."""
    if found.n < 2 or math.isnan(found.p):
        return found.p
    against = [compare_to_level(found, bound).p for bound in says.bounds]
    if says.holds(found.mean):
        return max(against)
    return compare_to_level(found, says.low if found.mean <= says.low else says.high).p


def compare_to_level(found: Paired, level: float) -> Paired:
    """The same difference, with the p-value of the test against another level than zero."""
    error = (found.high - found.low) / 2 / stdtrit(found.n - 1, (1 + CONFIDENCE) / 2) if found.n > 1 else math.nan
    if not error > 0:
        return found._replace(p=1.0 if found.mean == level else 0.0) if error == 0 else found
    return found._replace(p=float(2 * stdtr(found.n - 1, -abs(found.mean - level) / error)))


def correct_by_holm(values: Iterable[float]) -> list[float]:
    """p-values corrected for their number; NaN is no test."""
    p = np.asarray(list(values), float)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return corrected.tolist()


# ------------------------------------------------------------------------------------------------- in words


def tabulate_claims(judged: Sequence[Judged]) -> pd.DataFrame:
    """One row per claim and case."""
    return pd.DataFrame(
        [
            {
                "claim": one.claim.number,
                "whose": "ours" if one.claim.ours else "paper",
                "text": one.claim.text,
                "verdict of the claim": one.verdict,
                "p of the claim, Holm": one.p,
                "compared": one.claim.compared,
                "says": str(one.claim.says),
                "case": name,
                "difference": case.found.mean,
                "low": case.found.low,
                "high": case.found.high,
                "published": math.nan if case.published is None else case.published,
                "p": judgement.p,
                "pairs": case.found.n,
                "seeds": case.seeds,
                "verdict": judgement.verdict,
                "reason": judgement.reason,
                "telling": name == one.telling,
            }
            for one in judged
            for name, case, judgement in ((name, one.claim.cases[name], j) for name, j in one.cases.items())
        ]
    )


def format_claims(judged: Sequence[Judged]) -> str:
    """The verdicts as a list, with every case below its claim."""
    lines = []
    for one in judged:
        claim = one.claim
        counts = ", ".join(f"{count} {verdict}" for verdict, count in one.counts.items() if count)
        mine = "(Ours.) " if claim.ours else ""
        sure = (
            f"; p = {one.p:.2g} after Holm"
            if math.isfinite(one.p) and any(c.found.n > 1 for c in claim.cases.values())
            else ""
        )
        lines.append(f"{claim.number}. {mine}{claim.text} **{one.verdict.capitalize()}** (cases: {counts}{sure}).")
        lines.append(
            f"   Compared: {claim.compared}; claimed: {claim.says}.{f' {claim.reading}' * bool(claim.reading)}"
        )
        lines += [
            f"   - {name}: {describe_case(claim.cases[name], judgement)}" for name, judgement in one.cases.items()
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


def describe_case(case: Case, judgement: Judgement) -> str:
    found, text = case.found, f"{case.found.mean if abs(case.found.mean) > ROUNDING else 0:+.4g}"
    if not math.isfinite(found.mean):
        text = "none"
    elif found.n > 1:
        text += " in every seed" if found.low == found.high else f" [{found.low:.4g}, {found.high:.4g}]"
        text += f", p = {judgement.p:.2g}, n = {found.n}"
    if case.published is not None:
        inside = found.low <= case.published <= found.high
        text += f"; the paper's {case.published:+.4g} is {'inside' if inside else 'outside'}"
    reason = f" ({judgement.reason})" if judgement.reason else ""
    return f"{text}: {judgement.verdict}{reason}{f'; {case.remark}' * bool(case.remark)}"
