"""A table dealt to clients and split: what the tasks train and evaluate on."""

import dataclasses

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError
from nestfed.data import partition as rules
from nestfed.data.features import Encoder
from nestfed.data.partition import TEST, TRAIN, VALIDATION
from nestfed.data.table import Table

ALL_ROWS = "all rows"  # the name of the one group of a table without groups
_PLAIN_VALIDATION = 4  # a stream of the seed, beside those of the partition


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


def federate(
    table: Table,
    *,
    group: str | None = None,
    partition: str | None = None,
    clients: int | None = None,
    test_fraction: float = 0.3,
    recipe: str = "standard",
    keep_group: bool = False,
    seed: int = 0,
    balanced: bool = True,
    validation_fraction: float | None = None,
    by_group: bool = True,
    positives: bool = True,
) -> Federated:
    """Split, deal and encode a table.

    group          a column, or several joined by "+"; the table's first group column if None
    partition      see `assign`; None: by the table's client column if it has one, otherwise "iid"
    clients        their number; None: three, or as many as there are ratios or names
    test_fraction  cut from each group separately, so that all seeds have the same number of test rows per group
    recipe         see `features`; means and bins are taken from the training rows, as published ones from all rows
    keep_group     keep the group column as a feature
    balanced       the validation rows have equal numbers of each group; False: as many rows, drawn regardless of group
    validation_fraction  in place of both: this share of every client's rows of every group that are no test rows
    by_group       False: splits take no notice of groups, and without `group` all rows are one
    positives      every client needs a positive training row
    """
    label = table.labels()
    if by_group or group is not None:
        group_columns, (groups, group_names) = table.group_columns(group), table.group_of_rows(group)
    else:
        group_columns, groups, group_names = (), np.zeros(len(label), np.int32), (ALL_ROWS,)
    strata = groups if by_group else np.zeros_like(groups)
    test = rules.split_by_group(strata, test_fraction, seed)
    client, client_names = rules.assign(
        partition or ("iid" if table.client is None else "column"),
        labels=label,
        groups=groups,
        column=None if table.client is None else table.column(table.client),
        clients=clients,
        seed=seed,
        strata=test,
        needed=~test & (label == 1) if positives else None,
    )
    if validation_fraction is None:
        validation = rules.draw_balanced_validation(strata, client, ~test, seed)
    else:
        validation = rules.draw_proportional_validation(strata, client, ~test, seed, validation_fraction)
    if not balanced and validation_fraction is None:
        validation = _draw_plain_validation(validation, client, ~test, seed)
    part = np.select([test, validation], [TEST, VALIDATION], TRAIN).astype(np.int8)
    _check_clients(client, part, label if positives else None, client_names)

    columns = table.features(without=() if keep_group else group_columns)
    frame = table.frame.reindex(columns=columns)
    published = recipe.startswith("minimax-fair")
    encoder = Encoder.fit(frame, recipe, rows=None if published else part == TRAIN)
    return Federated(
        inputs=encoder.transform(frame),
        label=label,
        group=groups,
        client=client,
        part=part,
        group_names=group_names,
        client_names=client_names,
        feature_names=tuple(encoder.names),
        encoder=encoder,
    )


def _draw_plain_validation(balanced: np.ndarray, client: np.ndarray, available: np.ndarray, seed: int) -> np.ndarray:
    """As many validation rows per client as the balanced mask has, drawn regardless of the group."""
    number = np.bincount(client[balanced], minlength=client.max() + 1)
    mask = np.zeros(len(client), bool)
    ranks = rules.draw_ranks(client[available], rules.make_generator(seed, _PLAIN_VALIDATION))
    mask[available] = ranks < number[client[available]]
    return mask


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
