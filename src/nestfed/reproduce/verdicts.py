"""Claims of a paper, each with the paired differences that decide it."""

import dataclasses
from collections.abc import Mapping, Sequence

import pandas as pd

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
                "claim": claim.number, "compared": claim.compared, "case": case, "difference": result.mean,
                "low": result.low, "high": result.high, "p": result.p, "seeds": result.n,
            }
            for claim in claims
            for case, result in claim.results.items()
        ]
    )  # fmt: skip


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
