"""The experiments' pages that the repository shows follow from the cells it keeps."""

import re
from pathlib import Path

import pandas as pd
import pytest

from nestfed.experiments import EXPERIMENTS, find

KEPT = Path(__file__).parent.parent / "experiments"


def test_every_experiment_is_kept():
    assert {folder.name for folder in KEPT.iterdir()} == set(EXPERIMENTS)
    for name in EXPERIMENTS:
        assert f"nestfed reproduce {name}" in (KEPT / name / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if (KEPT / name / "cells").exists()])
def test_tables_and_claims_follow_from_the_cells(name, tmp_path):
    experiment = find(name)
    trainings = experiment.trainings(KEPT / name, experiment.full, f"nestfed reproduce {name}")
    assert all(trainings.done(cell) for cell in trainings.names())
    page = experiment.make_page(trainings)
    experiment.write_tables(page, tmp_path)
    tables = {path.name for path in (KEPT / name / "tables").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == tables and "claims.csv" in tables
    for table in tables:
        made, kept = (pd.read_csv(folder / table) for folder in (tmp_path, KEPT / name / "tables"))
        pd.testing.assert_frame_equal(made, kept, rtol=1e-6, obj=table)
    verdicts = lambda text: re.findall(r"^\d+\w*\. .*\*\*(.+?)\*\*$", text, re.M)
    shown = (KEPT / name / "README.md").read_text(encoding="utf-8")
    assert verdicts(experiment.render(trainings, page)) == verdicts(shown) != []
    assert set(page.figures) == {path.stem for path in (KEPT / name / "figures").iterdir()}
