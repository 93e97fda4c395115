"""What the verbs return: a finished run or comparison, a finished sweep, and a run that was stopped."""

import base64
import dataclasses
import html
from pathlib import Path
from typing import Any

import pandas as pd

from nestfed.core.settings import UserError
from nestfed.report import page, statistics, tables
from nestfed.report.record import Record
from nestfed.workbench.stages import DIVERGED, FINISHED


@dataclasses.dataclass(frozen=True)
class Study:
    """A finished run: its folder, its tables and its models."""

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r}: {', '.join(self.record.methods)}; seeds {self.record.about['seeds']})"

    def _repr_html_(self) -> str:
        """In a notebook: the result in a sentence, the table of the report, and its figures."""
        _, shown = tables.tabulate_headline(self.record)
        sides = shown.set_index("method").T.to_html(border=0)
        drawn = [figure for figure in self.figures if figure.stem.endswith("-round") or figure.stem == "trade-off"]
        return (
            f"<p>{html.escape(page.write_sentence(self.record, statistics.make_headline(self.record)))}</p>{sides}"
            f"<details><summary>{len(drawn)} figures</summary>{''.join(map(_embed, drawn))}</details>"
            f"<p>More of them, and the whole report: {html.escape(str(self.report))}</p>"
        )

    folder: Path
    record: Record
    models: dict[tuple[str, int], Any]  # by method and seed

    @property
    def history(self) -> pd.DataFrame:
        return self.record.history

    @property
    def final(self) -> pd.DataFrame:
        return self.record.final

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def figures(self) -> list[Path]:
        return sorted((self.folder / "figures").glob("*.png"))

    @property
    def failed(self) -> list[str]:
        """Methods that diverged in every seed."""
        finished = set(self.final.loc[self.final.status == FINISHED, "method"])
        return [method for method in self.record.methods if method not in finished]

    @property
    def status(self) -> str:
        """ "diverged" if a method has no result at all, otherwise "finished"."""
        return DIVERGED if self.failed else FINISHED

    @property
    def warnings(self) -> list[str]:
        """What must not be overlooked: methods without a result, or whose result is none."""
        said, seeds = [], len(self.record.about["seeds"])
        for method, rows in self.final[self.final.above_start].groupby("method", sort=False):
            often = f"in {len(rows)} of {seeds} seeds (training objective)"
            advice = "this is not a result. Use smaller step sizes (--set lr=...)."
            said.append(f"{self.record.title(str(method))} ended above its start {often}: {advice}")
        if "within_limit" in self.final:
            missed: Any = self.final[self.final["within_limit"] == 0]
            for method, rows in missed.groupby("method", sort=False):
                said.append(
                    f"{self.record.title(str(method))} found no model within the limit in {len(rows)} of {seeds} "
                    "seeds; its models are the nearest."
                )
        if self.failed:
            titles = ", ".join(map(self.record.title, self.failed))
            said.append(f"{titles} diverged in every seed; use smaller step sizes (--set lr=...).")
        return said

    def model(self, method: str | None = None, seed: int | None = None) -> Any:
        """The final model of a method (the first one) and a seed (the first one)."""
        method = method or self.record.methods[0]
        seed = int(self.record.about["seeds"][0] if seed is None else seed)
        if (method, seed) not in self.models:
            raise UserError(f"there is no final model of {method!r} and seed {seed}: {sorted(self.models)} are there.")
        return self.models[method, seed]


def _embed(figure: Path) -> str:
    """A PNG within a page."""
    content = base64.b64encode(figure.read_bytes()).decode()
    return f'<img alt="{html.escape(figure.stem)}" style="max-width: 48%" src="data:image/png;base64,{content}">'


@dataclasses.dataclass(frozen=True)
class Search:
    """A finished sweep: every setting and seed, and the choice by validation data."""

    folder: Path
    table: pd.DataFrame  # one row per setting: its values, means over seeds, how many seeds diverged
    best: dict[str, Any]
    command: str  # runs the method with the chosen settings


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; the message says how to go on."""
