"""The reproduction of fair federated learning: its cells, and the slip in a released preparation of its data."""

import dataclasses
from pathlib import Path

from shared import shared_data

from nestfed.data import Encoder, load
from nestfed.experiments.fairness.data import add_slip
from nestfed.experiments.fairness.page import EXPERIMENT
from nestfed.experiments.fairness.plan import PAPER, Trainings


def features(table, *without):
    """The columns that may be features, encoded as released; those of groups are removed first."""
    slipped = add_slip(table, without)
    return Encoder.fit(slipped.frame[slipped.features(without)], "minimax-fair").names


def test_the_slip_makes_categories_of_numbers():
    adult = load("adult")
    assert len(features(adult, "race")) == 220 and len(features(adult)) == 107
    gains = [name for name in features(adult, "race") if name.startswith("capital-gain=")]
    assert gains == sorted(gains) and len(gains) == adult.frame["capital-gain"].nunique()


def test_the_slip_on_default_credit(monkeypatch):
    monkeypatch.setenv("NESTFED_DATA", str(shared_data()))
    credit = dataclasses.replace(load("default-credit"), drop=())  # the source keeps ID
    assert len(features(credit)) == 33
    slipped = features(credit, "SEX")
    assert len(slipped) == 87
    assert sum(name.startswith("AGE=") for name in slipped) == credit.frame["AGE"].nunique() == 56


def test_every_published_setting_is_a_cell_and_its_dealings_go_together():
    trainings = Trainings(Path(), EXPERIMENT.full)
    settings = [["adult-iid", "adult-non-iid"], ["german-iid", "german-non-iid"], ["adult-non-iid-past-the-paper"]]
    assert trainings.groups() == [*settings, ["constants", "readings-adult", "readings-german"]]
    assert {setting[:2] for group in trainings.settings() for setting in group} == set(PAPER)
