"""What a run leaves: one record, and the folder it lies in.

settings.toml      everything that was asked for; `nestfed run settings.toml` repeats a run
about.json         name, command, versions, seeds, data fingerprint, times, what happened
history.parquet    one row per method, seed, stage and evaluation
final.parquet      one row per method and seed: the metrics of the output
slices.parquet     the same for parts of the data: groups, clients
holdings.parquet   who holds what
candidates.parquet      the models among which a method chose, where one did
lines.parquet      lines that the task draws of final models (precision against recall), where it has any
cost.json          the ledger of every method and stage
models/            the final model of every method and seed
tuned.json         what was chosen before training, and from what
checkpoints/       what a killed run resumes from
report.html, figures/, tables/        made from the above by `nestfed report`
"""

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from nestfed.core.settings import UserError
from nestfed.report.metrics import Chart, Metric

FORMAT = "nestfed run 1"


LINE_COLUMNS = ("method", "seed", "slice", "x", "y")


@dataclasses.dataclass(frozen=True)
class Record:
    """Everything a run leaves.

    history    method, seed, stage, round (counted through the stages), bytes (up and down, all clients together),
               oracle_calls (all clients together), samples, and one column per recorded metric (NaN where a stage does
               not have it)
    final      method, seed, status ("finished", "diverged"), above_start (did the training objective end above where it
               began?), and one column per metric
    slices     method, seed, kind ("group", "client"), slice, split ("train", "validation", "test"), metric, value
    holdings   seed, client, group, label, part ("train", "validation", "test"), rows
    candidates method, seed, number, way (how it was made), aim, then gap and accuracy on every part (train_gap, ...),
               bound (of the gap, on validation rows), chosen
    lines      method, seed, slice, x, y: the lines of the chart; x has the same values in all of a slice's lines
    """

    settings: dict[str, Any]
    about: dict[str, Any]  # also: title, baseline (a method), metrics, titles of methods and slices, chart
    history: pd.DataFrame
    final: pd.DataFrame
    slices: pd.DataFrame
    holdings: pd.DataFrame
    cost: dict[str, Any]  # method -> stage -> ledger
    lines: pd.DataFrame = dataclasses.field(default_factory=lambda: pd.DataFrame(columns=pd.Index(LINE_COLUMNS)))
    candidates: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)

    @property
    def metrics(self) -> list[Metric]:
        return [Metric(**metric) for metric in self.about["metrics"]]

    @property
    def chart(self) -> Chart | None:
        """What the lines show, where there are any."""
        return Chart(**self.about["chart"]) if len(self.lines) else None

    @property
    def methods(self) -> list[str]:
        """In the order in which they were asked for."""
        return list(self.about["methods"])

    def title(self, method: str) -> str:
        return self.about["methods"][method]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "settings.toml", tomli_w.dumps(self.settings).encode())
        replace_file(folder / "about.json", json.dumps({"format": FORMAT} | self.about, indent=2).encode())
        replace_file(folder / "cost.json", json.dumps(self.cost, indent=2).encode())
        for name in TABLES:
            replace_file(folder / f"{name}.parquet", getattr(self, name).to_parquet(index=False))
        for name in SOMETIMES:
            if len(table := getattr(self, name)):
                replace_file(folder / f"{name}.parquet", table.to_parquet(index=False))

    @classmethod
    def load(cls, folder: Path) -> "Record":
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give the folder of a finished run.")
        try:
            text = lambda name: (folder / name).read_text(encoding="utf-8")
            about = json.loads(text("about.json"))
            if about.get("format") != FORMAT:
                raise ValueError(f"it has the format {about.get('format')!r}, this version reads {FORMAT!r}")
            return cls(
                settings=tomllib.loads(text("settings.toml")),
                about=about,
                cost=json.loads(text("cost.json")),
                **{name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES},
                **{name: pd.read_parquet(file) for name in SOMETIMES if (file := folder / f"{name}.parquet").exists()},
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} is not the folder of a finished run ({type(error).__name__}: {error}); "
                "`nestfed run --resume` finishes an interrupted one."
            ) from error


TABLES = ("history", "final", "slices", "holdings")
SOMETIMES = ("lines", "candidates")  # tables that not every run has


def replace_file(path: Path, content: bytes) -> None:
    """Write beside, then rename: a kill leaves the old file or the new one."""
    neighbour = path.with_name(f".{path.name}.part")
    neighbour.write_bytes(content)
    os.replace(neighbour, path)
