"""The experiments' pages that the repository shows follow from the cells it keeps: text, tables, figures, verdicts."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from nestfed.core.settings import UserError
from nestfed.experiments import EXPERIMENTS, find, reproduce, scoreboard

KEPT = Path(__file__).parent.parent / "experiments"
LIMIT = 30e6  # bytes of everything that is kept


def test_every_experiment_is_kept_and_all_of_it_is_small():
    assert {folder.name for folder in KEPT.iterdir() if folder.is_dir()} == set(EXPERIMENTS)
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < LIMIT


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_is_written_again_from_its_cells(name, tmp_path, monkeypatch):
    """`--from-cells` changes nothing in a clone: without a file from elsewhere and without a training, text and figures
    come out to the last byte, and tables to the last digit that means something."""
    monkeypatch.delenv("NESTFED_DATA", raising=False)
    monkeypatch.setattr(find(name).trainings, "train", lambda *_: pytest.fail("a cell is missing"))
    kept, folder = KEPT / name, tmp_path / name
    shutil.copytree(kept / "cells", folder / "cells")
    shutil.copy(kept / "settings.toml", folder)
    reproduce(name, out=folder, from_cells=True)
    files = lambda where: {str(path.relative_to(where)) for path in where.rglob("*") if path.is_file()}
    assert files(folder) == files(kept) >= {"tables/claims.csv", "tables/cells.csv", "figures/claims.svg"}
    for path in sorted(files(kept)):
        if path.endswith(".csv"):
            made, shown = (pd.read_csv(where / path) for where in (folder, kept))
            pd.testing.assert_frame_equal(made, shown, rtol=1e-6, obj=path)
        elif not path.endswith(".png"):  # an SVG has the same lines
            assert (folder / path).read_bytes() == (kept / path).read_bytes(), path
    text = (kept / "README.md").read_text(encoding="utf-8")
    assert f"nestfed reproduce {name} --from-cells" in text
    assert "| item | paper | here | why | effect tested |" in text
    assert all((kept / path).exists() for path in re.findall(r"\]\(([a-z].*?)\)", text))


def test_cells_that_are_missing_are_named(tmp_path):
    with pytest.raises(UserError, match="lacks 20 of 20 cells .choose-mnist:fedavg.*are trained"):
        reproduce("auprc", out=tmp_path, from_cells=True)


def test_the_scoreboard_is_made_of_the_verdicts():
    made = scoreboard.HEAD + scoreboard.write_tables(KEPT, "{}/README.md") + "\n"
    assert (KEPT / "README.md").read_text(encoding="utf-8") == made
    cases = scoreboard.read_claims(KEPT)
    claims = cases.drop_duplicates(["experiment", "claim"])
    assert made.count("/README.md) |") == len(claims) == cases["telling"].sum()
    assert set(cases["paper"]) == set(scoreboard.PAPERS)
