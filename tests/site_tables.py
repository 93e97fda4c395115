"""Small tables cut into the files of sites, for tests of what they have in common and of what leaves them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from nestfed.data import read_table
from nestfed.data.schema import Schema, merge_schemas
from nestfed.data.table import draft_schema

SITES = ("a", "b", "c")
ROLES = {"group": "sex", "label": "ill", "positive": "yes"}


def people(rows: int, seed: int) -> pd.DataFrame:
    """At uneven sites, one of which has one label only, and another a single town."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": random.normal(50, 20, rows).round(1),
            "income": np.where(random.random(rows) < 0.2, np.nan, np.exp(random.normal(9, 3, rows))),
            "town": random.choice(list("pqrst"), rows),
            "smokes": random.choice(["no", "yes", None], rows),
            "sex": random.choice(["m", "f"], rows),
            "visits": random.integers(0, 3, rows),
        }
    )
    site = np.sort(np.r_[np.repeat(range(3), 12), random.choice(3, rows - 36, p=[0.2, 0.1, 0.7])])
    frame["ill"] = np.where(random.random(rows) < 0.1 + 0.4 * (site == 2), "yes", "no")
    frame.loc[site == 1, "ill"] = "no"
    frame.loc[site == 0, "town"] = "p"
    return frame.assign(site=np.array(SITES)[site])


def draft(frame: pd.DataFrame, folder: Path, name: str, **roles) -> Schema:
    frame.to_csv(folder / f"{name}.csv", index=False)
    return draft_schema(
        read_table(folder / f"{name}.csv", alone=False, **{"label": "ill", "positive": "yes"} | roles), 4
    )


def cut(frame: pd.DataFrame, folder: Path, *, ranges: Mapping[str, tuple] | None = None, **roles) -> None:
    """A file for every value of `site`, in order, the schema that they agree on, and all rows in one file."""
    frame.to_csv(folder / "joined.csv", index=False)
    own = {name: frame[frame["site"] == name].drop(columns="site") for name in SITES}
    merged = merge_schemas({name: draft(rows, folder, name, **ROLES | roles) for name, rows in own.items()})
    for name, range in (ranges or {}).items():
        rule = dataclasses.replace(merged.columns[name], range=range)
        merged = dataclasses.replace(merged, columns={**merged.columns, name: rule})
    (folder / "schema.toml").write_text(merged.to_toml())
