"""A table dealt to clients and split: what the tasks train and evaluate on."""

import dataclasses
from typing import TypedDict, Unpack

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError
from nestfed.data import partition as rules
from nestfed.data.features import Encoder, check_recipe
from nestfed.data.partition import TEST, TRAIN, VALIDATION
from nestfed.data.schema import Schema
from nestfed.data.table import Table

ALL_ROWS = "all rows"  # the name of the one group of a table without groups


@dataclasses.dataclass(frozen=True)
class Federated:
    """A table dealt to clients and split: every row has a client and a part."""

    inputs: np.ndarray  # float32 [rows, features]
    label: np.ndarray  # int32 0/1 [rows]
    group: np.ndarray  # int32 [rows]
    client: np.ndarray  # int32 [rows]
    part: np.ndarray  # int8 [rows]: TRAIN, VALIDATION, TEST = 0, 1, 2
    group_names: tuple[str, ...]
    client_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    encoder: Encoder

    def count_holdings(self) -> pd.DataFrame:
        """Rows per client, group, label and part."""
        return rules.count_holdings(self.client, self.group, self.label, self.part, self.client_names, self.group_names)


@dataclasses.dataclass(frozen=True)
class Dealt:
    """A table dealt to clients and split, before its columns are numbers."""

    frame: pd.DataFrame  # the columns that become features
    recipe: str
    label: np.ndarray
    group: np.ndarray
    client: np.ndarray
    part: np.ndarray
    group_names: tuple[str, ...]
    client_names: tuple[str, ...]
    schema: Schema | None

    @property
    def counted(self) -> np.ndarray:
        """The rows that means and bins are taken from: those to train on; published recipes take all."""
        return np.ones(len(self.part), bool) if self.recipe.startswith("minimax-fair") else self.part == TRAIN

    def fit(self) -> Encoder:
        return Encoder.fit(self.frame, self.recipe, rows=self.counted, schema=self.schema)

    def encode(self, encoder: Encoder) -> Federated:
        return Federated(
            inputs=encoder.transform(self.frame),
            label=self.label,
            group=self.group,
            client=self.client,
            part=self.part,
            group_names=self.group_names,
            client_names=self.client_names,
            feature_names=tuple(encoder.names),
            encoder=encoder,
        )


class Dealing(TypedDict, total=False):
    """The arguments of `deal_table`."""

    group: str | None
    partition: str | None
    clients: int | None
    only: int | None
    test_fraction: float
    recipe: str
    keep_group: bool
    seed: int
    balanced: bool
    validation_fraction: float | None
    by_group: bool
    positives: bool


def federate(table: Table, **how: Unpack[Dealing]) -> Federated:
    """Split, deal and encode a table, as `deal_table` says."""
    dealt = deal_table(table, **how)
    return dealt.encode(dealt.fit())


def deal_table(
    table: Table,
    *,
    group: str | None = None,
    partition: str | None = None,
    clients: int | None = None,
    only: int | None = None,
    test_fraction: float = 0.3,
    recipe: str = "standard",
    keep_group: bool = False,
    seed: int = 0,
    balanced: bool = True,
    validation_fraction: float | None = None,
    by_group: bool = True,
    positives: bool = True,
) -> Dealt:
    """Split and deal a table.

    Clients that a column names split their own rows: each draws from the seed, its number and these rows alone, as it
    would where nobody else sees them. Rows that are dealt are split before.

    group          a column, or several joined by "+"; the table's first group column if None
    partition      see `assign`; None: by the table's client column if it has one, otherwise "iid"
    clients        their number; None: three, or as many as there are ratios or names
    only           all rows are of one client, which has this number among others that are elsewhere
    test_fraction  cut from each group separately, so that all seeds have the same number of test rows per group
    recipe         see `features`; means and bins are taken from the training rows, as published ones from all rows
    keep_group     keep the group column as a feature
    balanced       the validation rows have equal numbers of each group; False: as many rows, drawn regardless of group
    validation_fraction  in place of both: this share of every client's rows of every group that are no test rows
    by_group       False: splits take no notice of groups, and without `group` all rows are one
    positives      every client needs a positive training row, unless a schema says that sites differ
    """
    label = table.labels()
    if by_group or group is not None:
        group_columns, (groups, group_names) = table.group_columns(group), table.group_of_rows(group)
    else:
        group_columns, groups, group_names = (), np.zeros(len(label), np.int32), (ALL_ROWS,)
    strata = groups if by_group else np.zeros_like(groups)
    rule = partition or ("iid" if table.client is None else "column")
    owner, given = None, None
    if only is not None:
        given = np.zeros(len(label), np.int32), (table.name,)
        owner = np.full(len(label), only)
    elif rule == "column" and table.client is not None:
        given = rules.deal_by_column(table.column(table.client))
        owner = given[0]
    test = rules.split_by_group(strata, test_fraction, seed, owner)
    needed = positives and (given is None or not table.is_partial)
    client, client_names = given or rules.assign(
        rule,
        labels=label,
        groups=groups,
        clients=clients,
        seed=seed,
        strata=test,
        needed=~test & (label == 1) if needed else None,
    )
    if validation_fraction is None:
        validation = rules.draw_balanced_validation(strata, client, ~test, seed, owner=owner)
    else:
        validation = rules.draw_proportional_validation(strata, client, ~test, seed, validation_fraction, owner)
    if not balanced and validation_fraction is None:
        number = np.bincount(client[validation], minlength=client.max() + 1)
        validation = rules.draw_plain_validation(client, ~test, number, seed, owner)
    part = np.select([test, validation], [TEST, VALIDATION], TRAIN).astype(np.int8)
    _check_clients(client, part, label if needed else None, client_names)
    frame = table.frame.reindex(columns=table.features(without=() if keep_group else group_columns))
    return Dealt(frame, check_recipe(recipe), label, groups, client, part, group_names, client_names, table.schema)


def _check_clients(client: np.ndarray, part: np.ndarray, label: np.ndarray | None, names: tuple[str, ...]) -> None:
    """Every client can train and validate; given the labels, on positive rows too."""
    count = lambda mask: np.bincount(client[mask], minlength=len(names))
    rows, training = count(np.ones(len(client), bool)), count(part == TRAIN)
    problems = [
        (training, "no training rows"),
        (count(part == VALIDATION), "too few rows for a validation set (two of one group are needed)"),
    ]
    if label is not None:
        positive = count((part == TRAIN) & (label == 1))
        problems.insert(1, (positive, "no row with a positive label among its training rows"))
    for counts, problem in problems:
        if (counts == 0).any():
            worst = int(np.argmin(counts))
            others = int((counts == 0).sum()) - 1
            more = f" (and {others} other client{'s' * (others > 1)})" if others else ""
            raise UserError(
                f"{names[worst]!r}{more} has {problem}: {rows[worst]} rows, of which {training[worst]} for training; "
                "merge it with another client or leave it out, choose fewer clients, or a more even partition."
            )
