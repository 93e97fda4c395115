"""Claims of a paper, each with the paired differences that decide it."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from nestfed.report.statistics import Paired


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim, what was compared, and what came out."""

    number: str
    text: str
    compared: str
    results: Mapping[str, Paired]  # case -> paired difference over seeds
    verdict: str
    level: float = 0.0  # what the differences are tested against


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One row per claim and case."""
    return pd.DataFrame(
        [
            {
                "claim": claim.number,
                "compared": claim.compared,
                "case": case,
                "difference": result.mean,
                "low": result.low,
                "high": result.high,
                "p": result.p,
                "seeds": result.n,
            }
            for claim in claims
            for case, result in claim.results.items()
        ]
    )


def markdown_claims(claims: Sequence[Claim]) -> str:
    """The verdicts as a list, with every case below its claim."""
    lines = []
    for claim in claims:
        lines.append(f"{claim.number}. {claim.text} **{claim.verdict[0].upper()}{claim.verdict[1:]}.**")
        lines.append(
            f"   Compared: {claim.compared}; mean over seeds [95 % interval of paired differences], p of the paired "
            f"t-test against {claim.level:g}."
        )
        for case, r in claim.results.items():
            interval = f"[{r.low:.4g}, {r.high:.4g}], p = {r.p:.2g}" if r.n > 1 else f"({r.n} seeds)"
            if r.n > 1 and r.low == r.high:
                interval = "in every seed"
            lines.append(f"   - {case}: {r.mean:+.4g} {interval}")
        lines.append("")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------- in words


def at_level(result: Paired, level: float) -> Paired:
    """The same difference, with the p-value of the test against another level than zero."""
    error = (result.high - result.low) / 2 / stdtrit(result.n - 1, 0.975) if result.n > 1 else np.nan
    if not error > 0:
        return result
    return result._replace(p=float(2 * stdtr(result.n - 1, -abs(result.mean - level) / error)))


def all_below(results: Mapping[str, Paired], level: float, or_equal: bool = False) -> str:
    """Are all differences below the level?"""
    below = [r.mean <= level if or_equal else r.mean < level for r in results.values()]
    clear = [r.high < level or (or_equal and r.high <= level) for r in results.values()]
    return _verdict(below, clear)


def all_above(results: Mapping[str, Paired], level: float) -> str:
    """Are all differences above the level?"""
    return _verdict([r.mean > level for r in results.values()], [r.low > level for r in results.values()])


def all_within(
    results: Mapping[str, Paired], reach: float, counted: str = "{clear} of {n} with the whole 95 % interval"
) -> str:
    """Are all differences smaller than `reach`? `counted` says in how many cases the whole interval is."""
    near = [abs(r.mean) < reach for r in results.values()]
    return _verdict(near, [-reach < r.low and r.high < reach for r in results.values()], counted)


def no_gain(results: Mapping[str, Paired]) -> str:
    """Is no difference clearly above zero?"""
    gained, unknown = sum(r.low > 0 for r in results.values()), sum(not np.isfinite(r.low) for r in results.values())
    if unknown:
        return f"cannot be said (no interval in {unknown} of {len(results)} cases)"
    return f"does not hold ({gained} clear gains)" if gained else f"holds (no clear gain in {len(results)} cases)"


def _verdict(
    true: Sequence[bool], clear: Sequence[bool], counted: str = "{clear} of {n} with a 95 % interval on that side"
) -> str:
    """In words, with the numbers of cases: in the mean, and beyond what seeds explain."""
    n = len(true)
    count = f"{sum(true)} of {n} cases in the mean, {counted.format(clear=sum(clear), n=n)}"
    if all(clear):
        return f"holds ({count})"
    return f"holds in the mean only ({count})" if all(true) else f"does not hold ({count})"
