"""A slip in the released preparation of Adult, which one of the readings of the paper repeats."""

import dataclasses
from collections.abc import Sequence

from nestfed.data import Table
from nestfed.data.table import is_number, name_value

DIGITS = 12


def add_slip(table: Table, without: Sequence[str]) -> Table:
    """The table with the columns of numbers as text that the program of "Minimax group fairness" (Diana et al. 2021)
    takes for categories. It looks up whether a column is one by its position in the full table, although the columns
    `without`, those of the groups, were removed before. On Adult without race that is capital-gain: 220 features
    instead of 102."""
    frame = table.frame
    looked_up = zip(table.features(without), table.features(), strict=False)  # the full table has more columns
    slipped = [mine for mine, other in looked_up if is_number(frame[mine]) and not is_number(frame[other])]
    # Zeros in front keep the order of the numbers.
    text = {name: frame[name].map(name_value).str.zfill(DIGITS) for name in slipped}
    return dataclasses.replace(table, frame=frame.assign(**text))
