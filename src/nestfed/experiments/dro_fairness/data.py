"""Adult with noisy protected groups: whoever trains knows each row's group only through a proxy that is often wrong.

Prepared as for "Robust optimization for fairness with noisy protected groups" (Wang et al. 2020): the training and the
test file together, numbers cut into buckets, three groups. The columns of the groups white, black and other are no
features, but the detailed races within other are. The proxy is a feature, too: `append_proxies` appends it, so that it
can be drawn anew at any time.
"""

import dataclasses
import itertools
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from nestfed.core.randomness import draw_priorities, fold
from nestfed.core.settings import UserError
from nestfed.core.types import AnyArray, Array, ArrayLike
from nestfed.data import partition as rules
from nestfed.data.features import Category, Encoder, LevelTotals, read_numbers
from nestfed.data.partition import TEST, TRAIN, VALIDATION
from nestfed.data.sources import load
from nestfed.data.table import Column, is_number, list_columns

GROUPS = ("white", "black", "other")
_VALIDATION_STREAM = 5  # of the seed, beside those of the partition and of federated tables


EDGES = {  # where Adult's numbers are cut; the published outermost edges (-1 and 100000, ...) enclose all values
    "capital-gain": (1, 4000, 10000),
    "capital-loss": (1, 1800, 1950),
    "hours-per-week": (39, 41, 50),
    "education-num": (8, 9, 11),
}


# ------------------------------------------------------------------------------------------------- features


@dataclasses.dataclass(frozen=True)
class Buckets:
    """One 0/1 column per bucket; an edge belongs to the bucket below it, missing values to none."""

    name: str
    edges: tuple[float, ...]  # between the buckets
    mark_missing: bool

    @property
    def numeric(self) -> bool:
        return True

    @classmethod
    def fit(cls, values: Column, rows: np.ndarray) -> Self:
        numbers = read_numbers(values, coded=False)
        missing = np.isnan(numbers)
        known = numbers[rows & ~missing]
        quartiles = np.quantile(known, (0.25, 0.5, 0.75)) if known.size else ()
        edges = np.unique(np.asarray(EDGES.get(str(values.name), quartiles), float)).tolist()
        # Of a column of one value no edge is left, and so no bucket.
        two_sided = lambda edge: (numbers <= edge).any() and (numbers > edge).any()
        return cls(str(values.name), tuple(filter(two_sided, edges)), bool(missing.any()))

    @property
    def names(self) -> list[str]:
        ends = [f"{edge:g}" for edge in self.edges]
        middle = [f"{self.name} {low} to {high}" for low, high in itertools.pairwise(ends)]
        buckets = [f"{self.name} up to {ends[0]}", *middle, f"{self.name} above {ends[-1]}"] if ends else []
        return buckets + [f"{self.name} missing"] * self.mark_missing

    def encode(self, values: Column) -> list[np.ndarray]:
        numbers = read_numbers(values, coded=False)
        missing = np.isnan(numbers)
        bucket = np.where(missing, -1, np.searchsorted(self.edges, numbers, side="left"))
        buckets = [bucket == i for i in range(len(self.edges) + 1)] if self.edges else []
        return buckets + [missing] * self.mark_missing


@dataclasses.dataclass(frozen=True)
class Levels(Category):
    """One 0/1 column per level, also where there are only two."""

    @property
    def first(self) -> int:
        return 1 if len(self.levels) <= 1 else 0


class BucketEncoder(Encoder):
    """Numbers cut into buckets, Adult's columns at the published edges, others (its age) at their quartiles; buckets
    and categories one-hot with a column for every one of them. (The published code leaves the youngest out of all
    buckets; here they are in the first.)"""

    kinds = {"levels": Levels, "edges": Buckets}

    @classmethod
    def of(cls, frame: pd.DataFrame, rows: np.ndarray | None = None) -> Self:
        """Learn the columns of a table; quartiles are those of these rows (of all if None)."""
        rows = np.ones(len(frame), bool) if rows is None else rows
        levels = lambda name, values: Levels.fit(name, LevelTotals.of(values))
        fit = lambda name, values: Buckets.fit(values, rows) if is_number(values) else levels(name, values)
        return cls("bucketed", tuple(fit(name, values) for name, values in list_columns(frame)))


# ------------------------------------------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class NoisyGroups:
    """Rows dealt to clients and split; their true groups are for measuring, and for drawing proxies."""

    inputs: np.ndarray  # float32 [rows, features], without the proxy
    true_group: np.ndarray  # int32 [rows]
    label: np.ndarray  # int32 0/1 [rows]
    part: np.ndarray  # int8 [rows]: TRAIN, VALIDATION, TEST = 0, 1, 2
    client: np.ndarray  # int32 [rows]
    group_names: tuple[str, ...]
    client_names: tuple[str, ...]
    feature_names: tuple[str, ...]

    def count_holdings(self) -> pd.DataFrame:
        """Rows per client, true group, label and part."""
        return rules.count_holdings(
            self.client, self.true_group, self.label, self.part, self.client_names, self.group_names
        )


def deal_noisy_groups(
    *, clients: int = 8, train_fraction: float = 0.8, validation_fraction: float = 0.125, seed: int = 0
) -> NoisyGroups:
    """Adult, all 48,842 rows, in equal random parts for the clients.

    train_fraction       of all rows, of each group alike; the published code takes 0.2
    validation_fraction  of these, set aside for choosing settings: at the defaults a tenth of all rows
    """
    _check_fraction("train_fraction", train_fraction)
    if validation_fraction != 0:
        _check_fraction("validation_fraction", validation_fraction)
    table = load("adult-all")
    race = table.column("race").to_numpy(str)
    group = np.select([race == "White", race == "Black"], [0, 1], 2).astype(np.int32)
    label = table.labels()
    test = rules.split_by_group(group, 1 - train_fraction, seed)
    place = rules.draw_ranks(group[~test], rules.make_generator(seed, _VALIDATION_STREAM))
    aside = np.rint(np.bincount(group[~test]) * validation_fraction).astype(int)
    part = np.full(len(group), TEST, np.int8)
    part[~test] = np.where(place < aside[group[~test]], VALIDATION, TRAIN)
    client, client_names = rules.assign("iid", labels=label, groups=group, clients=clients, seed=seed, strata=part)

    frame = table.frame.reindex(columns=table.features(without=("fnlwgt",)))
    encoder = BucketEncoder.of(frame, part == TRAIN)
    kept = [name not in ("race=White", "race=Black") for name in encoder.names]
    return NoisyGroups(
        inputs=encoder.transform(frame)[:, kept],
        true_group=group,
        label=label,
        part=part,
        client=client,
        group_names=GROUPS,
        client_names=client_names,
        feature_names=tuple(np.array(encoder.names)[kept].tolist()),
    )


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{name}={value} was given; it must be above 0 and below 1.")


def draw_proxies(
    true_group: AnyArray,
    noise: float,
    seed: ArrayLike,
    *,
    epoch: ArrayLike = 0,
    row: AnyArray | None = None,
    groups: int = 3,
) -> Array:
    """A proxy of each row's group, int32: with probability `noise` one of the other groups, all equally likely.

    A row's proxy depends on seed, epoch and its number `row` alone (its place if None): a batch that carries the
    numbers of its rows has the proxies that all rows together would have. All but noise and groups may be traced.
    """
    if not 0 <= noise <= 1:
        raise UserError(f"noise={noise} was given; it is the share of wrong proxies, from 0 to 1.")
    true_group = jnp.asarray(true_group)
    row = jnp.arange(true_group.shape[0]) if row is None else jnp.asarray(row)
    words = draw_priorities(fold(jax.random.key(seed), epoch), row)
    # Words below the last limit move on to another group: by as many as there are limits above the word.
    limits = np.rint(noise * np.arange(1, groups) / (groups - 1) * 2.0**32).clip(max=2.0**32 - 1).astype(np.uint32)
    moves = (words[:, None] < limits[None]).sum(1, dtype="int32")
    return (true_group.astype("int32") + moves) % groups


def append_proxies(inputs: AnyArray, proxy: AnyArray, groups: int = 3) -> Array:
    """Inputs [rows, features] with a 0/1 column for each proxy group appended."""
    return jnp.concatenate([inputs, jax.nn.one_hot(proxy, groups, dtype=inputs.dtype)], axis=-1)
