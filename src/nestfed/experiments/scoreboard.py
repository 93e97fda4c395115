"""One table of all claims of the papers, from the verdicts that lie beside the experiments' pages.

python -m nestfed.experiments.scoreboard experiments        # in a clone; writes experiments/README.md
"""

import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from nestfed.experiments import EXPERIMENTS, find
from nestfed.experiments.claims import HOLDS, REFUTED, UNDECIDED
from nestfed.report.statistics import select_rows
from nestfed.report.tables import format_markdown

PAPERS = {
    "FedBiO": "Local stochastic bilevel optimization with momentum-based variance reduction",
    "FedDRO": "Federated compositional optimization: the impact of two-sided learning rates on communication "
    "efficiency",
    "FCSG": "Federated conditional stochastic optimization",
    "FedReCo": "FedReCo, its appendix (the main text was not available)",
}
WORDS = ("claim", "case shown", "verdict", "cases")
HEAD = """\
# What the papers claim, and what came out here

Made from the tables beside the experiments' pages (`python -m nestfed.experiments.scoreboard experiments`).

"""


def read_claims(folder: Path) -> pd.DataFrame:
    """All cases of all claims, with the experiment and the paper."""
    parts = []
    for name in EXPERIMENTS:
        table = pd.read_csv(folder / name / "tables" / "claims.csv", dtype={"claim": str, "case": str})
        parts.append(table.assign(experiment=name, paper=find(name).paper))
    return pd.concat(parts, ignore_index=True)


def write_tables(folder: Path, link: str) -> str:
    """A table per paper, and one of the claims that are ours; `link` leads from an experiment's name to its page."""
    cases = read_claims(folder)
    verdicts = select_rows(cases, whose="paper", telling=True)["verdict of the claim"].tolist()
    said = [
        f"Of {len(verdicts)} claims of four papers {verdicts.count(HOLDS)} hold here, {verdicts.count(REFUTED)} are "
        f"refuted, and {verdicts.count(UNDECIDED)} are undecided: the seeds or the length of our trainings do not "
        "settle them. A claim has several cases; shown is the one that speaks most against it, with its 95 % interval "
        "of paired differences over n seeds. A claim without a figure was printed without a number, or as a picture."
    ]
    for paper, title in PAPERS.items():
        said.append(f"## {title}")
        said.append(_format_table(select_rows(cases, whose="paper", paper=paper), link))
    said.append("## Claims of ours")
    said.append("Added to the papers': variants, contrasts, other readings.")
    said.append(_format_table(select_rows(cases, whose="ours"), link))
    return "\n\n".join(said)


def _format_table(cases: pd.DataFrame, link: str) -> str:
    lines = []
    for _, own in cases.groupby(["experiment", "claim"], sort=False):
        shown: Any = select_rows(own, telling=True).iloc[0]
        experiment = shown["experiment"]
        counts = own["verdict"].value_counts()
        lines.append(
            {
                "claim": f"{shown['text']} ({shown['compared']}: {shown['says']})",
                "case shown": shown["case"],
                "the paper's": _format_number(shown["published"]),
                "ours": _format_number(shown["difference"]),
                "interval": f"{_format_number(shown['low'])} to {_format_number(shown['high'])}"
                if shown["pairs"] > 1
                else "exact",
                "n": int(shown["pairs"]),
                "verdict": shown["verdict of the claim"],
                "cases": ", ".join(f"{counts[v]} {v}" for v in (HOLDS, REFUTED, UNDECIDED) if v in counts),
                "page": f"[{experiment}, {shown['claim']}]({link.format(experiment)})",
            }
        )
    table = pd.DataFrame(lines)
    ends = ["page", "---", *table.pop("page")]  # links are no words to be escaped
    shown = format_markdown(table, names=WORDS).splitlines()
    return "\n".join(f"{line} {end} |" for line, end in zip(shown, ends, strict=True))


def _format_number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.3g}".replace("-", "−") if math.isfinite(value) else "none"


def write(folder: Path) -> Path:
    path = folder / "README.md"
    path.write_text(HEAD + write_tables(folder, "{}/README.md") + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
