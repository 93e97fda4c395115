"""From columns to numbers.

Recipes
  standard            numbers standardised, their missing values filled with the mean and marked by a column of their
                      own; categories one-hot (a two-valued one gives one column), missing being a category
  piecewise           numbers cut into bins: a bin's column is 0 below it, 1 above it and linear within, less the
                      column's mean: the piecewise linear encoding of Gorishniy, Rubachev and Babenko, "On embeddings
                      for numerical features in tabular deep learning", NeurIPS 2022, arXiv:2203.05556; the rest as in
                      standard
  minimax-fair        as "Minimax group fairness" (Diana et al. 2021) prepares its data: categories one-hot as above,
                      coded attributes (A11, A410) replaced by their last digit, and every column divided by the power
                      of ten that brings its largest absolute value into [1, 10)
  minimax-fair-raw    the same without the division
In all of them constant columns are left out, and a category not seen in `fit` gives zeros.

An encoder needs no pooled rows. Every client gives its `Totals`; their sum tells it where to measure its `Spreads`; the
sum of these, with the totals, makes the encoder. Both are sums, unions, least and largest values; with a schema, which
says all but the sums, they are sums alone, and those are exact: `Encoder.fit` goes the same way with a table in one
place and has the same numbers, however its rows are held.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError, suggest
from nestfed.data.schema import CATEGORY, CONSTANT, ColumnRule, Schema
from nestfed.data.sums import Sums, pack_all
from nestfed.data.table import NEAREST, Column, convert_to_numbers, find_categories, is_number, list_columns

RECIPES = ("standard", "piecewise", "minimax-fair", "minimax-fair-raw")
BINS = 16  # of a number with many values
NEED_RANGE = ("piecewise", "minimax-fair")  # of every number, where a schema speaks for the rows
CELLS = 2048  # of the histogram that their edges are taken from
FINEST = 1e9  # the cells tell distances from the mean apart that are so much smaller than the range


# ------------------------------------------------------------------------------------------------- what clients tell


@dataclasses.dataclass(frozen=True)
class NumberTotals:
    """What a client tells of a column of numbers. The extremes, gaps and values are those of all rows, so that every
    split of a table has the same features; the rest is of the rows that count."""

    rows: int  # that count, with gaps
    known: int  # of them
    total: Sums  # of the known ones
    largest: float  # absolute value of the known ones
    least: float
    most: float
    gaps: bool
    values: frozenset[float] | None  # None if there are more than bins have edges
    coded: bool  # text whose last digit is the value

    @classmethod
    def of(cls, values: Column, counted: np.ndarray, *, coded: bool) -> Self:
        numbers = read_numbers(values, coded)
        missing = np.isnan(numbers)
        known, inside = np.unique(numbers[~missing]), numbers[counted & ~missing]
        return cls(
            rows=int(counted.sum()),
            known=inside.size,
            total=Sums.of(inside),
            largest=float(np.abs(inside).max(initial=0.0)),
            least=float(known.min(initial=np.inf)),
            most=float(known.max(initial=-np.inf)),
            gaps=bool(missing.any()),
            values=_list_few_values(frozenset(known[: BINS + 2].tolist())),
            coded=coded,
        )

    def by_rule(self, name: str, rule: ColumnRule, recipe: str) -> "NumberTotals":
        """The same sums, and all else as a schema says it."""
        least, most = (-np.inf, np.inf) if rule.range is None else rule.range
        if rule.range is None and rule.kind not in (CATEGORY, CONSTANT) and recipe in NEED_RANGE:
            raise UserError(
                f"the recipe {recipe!r} needs to know between which values the numbers of {name!r} lie, and no site "
                f"tells its own: agree on range = [low, high] for [columns.{name}] of the schema, or use the recipe "
                f"{RECIPES[0]!r}."
            )
        if rule.kind == CONSTANT:
            least, most = (np.inf, -np.inf) if rule.is_empty else (0.0, 0.0)
        largest = max(abs(least), abs(most)) if np.isfinite(least) else self.largest
        gaps = rule.gaps or rule.is_empty
        return dataclasses.replace(self, least=least, most=most, largest=largest, gaps=gaps, values=None)

    def __add__(self, other: "NumberTotals") -> "NumberTotals":
        return NumberTotals(
            rows=self.rows + other.rows,
            known=self.known + other.known,
            total=self.total + other.total,
            largest=max(self.largest, other.largest),
            least=min(self.least, other.least),
            most=max(self.most, other.most),
            gaps=self.gaps or other.gaps,
            values=None
            if self.values is None or other.values is None
            else _list_few_values(self.values | other.values),
            coded=self.coded,
        )

    @property
    def mean(self) -> float:
        """It stands for missing values too: a median is no sum."""
        return float(self.total.values[0]) / self.known if self.known else 0.0

    @property
    def constant(self) -> bool:
        return not self.least < self.most

    @property
    def marked(self) -> bool:
        """Some values are missing, and not all."""
        return self.gaps and self.least <= self.most


def _list_few_values(values: frozenset[float]) -> frozenset[float] | None:
    return values if len(values) <= BINS + 1 else None


@dataclasses.dataclass(frozen=True)
class LevelTotals:
    """The categories that a client has in a column."""

    levels: frozenset[str]

    @classmethod
    def of(cls, values: Column) -> Self:
        return cls(frozenset(find_categories(values)[1]))

    def __add__(self, other: "LevelTotals") -> "LevelTotals":
        return LevelTotals(self.levels | other.levels)


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a client tells first, column by column."""

    recipe: str
    columns: Mapping[str, NumberTotals | LevelTotals]

    @classmethod
    def of(cls, frame: pd.DataFrame, recipe: str, counted: np.ndarray, schema: Schema | None = None) -> Self:
        """With a schema, only the sums are taken from the rows."""
        columns: dict[str, NumberTotals | LevelTotals] = {}
        for name, values in list_columns(frame):
            rule = None if schema is None else schema.columns[name]
            levels = values if rule is None else pd.Series(rule.levels, dtype=object)
            number = is_number(values) if rule is None else rule.kind != CATEGORY
            coded = recipe.startswith("minimax-fair") and not number and is_coded(levels)
            if number or coded:
                totals = NumberTotals.of(values, counted, coded=coded)
                columns[name] = totals if rule is None else totals.by_rule(name, rule, recipe)
            else:
                columns[name] = LevelTotals.of(values) if rule is None else LevelTotals(frozenset(rule.all_levels))
        return cls(recipe, columns)

    @property
    def numbers(self) -> dict[str, NumberTotals]:
        return {name: known for name, known in self.columns.items() if isinstance(known, NumberTotals)}

    def pack(self) -> np.ndarray:
        """All that is a sum, uint64: what a site tells where a schema says the rest."""
        counts = [Sums.each(np.array([known.rows, known.known], float)) for known in self.numbers.values()]
        return pack_all([*counts, *(known.total for known in self.numbers.values())])

    def with_sums(self, packed: np.ndarray) -> "Totals":
        """The same with the sums of all sites."""
        words = Sums.unpack(packed).words
        number = len(self.numbers)
        counts = Sums(words[: 2 * number]).values.reshape(number, 2).astype(int)
        columns = dict(self.columns)
        for i, (name, known) in enumerate(self.numbers.items()):
            rows, present = counts[i].tolist()
            total = Sums(words[2 * number + i][None])
            columns[name] = dataclasses.replace(known, rows=rows, known=present, total=total)
        return Totals(self.recipe, columns)

    def __add__(self, other: "Totals") -> "Totals":
        columns: dict[str, NumberTotals | LevelTotals] = {}
        for name, mine in self.columns.items():
            theirs = other.columns[name]
            if isinstance(mine, NumberTotals) and isinstance(theirs, NumberTotals):
                columns[name] = mine + theirs
            elif isinstance(mine, LevelTotals) and isinstance(theirs, LevelTotals):
                columns[name] = mine + theirs
            else:
                raise UserError(
                    f"column {name!r} holds numbers at one client and text at another; make it the same everywhere."
                )
        return Totals(self.recipe, columns)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a client's known values of a column lie around the mean of all clients'. The cells of its histogram are
    narrow at the mean and ever wider outwards, so that they suit values of any scale."""

    squares: Sums  # of distances
    counts: np.ndarray  # of the values in every cell; the recipes without bins have no cells
    totals: Sums  # of the values in every cell

    @classmethod
    def of(cls, values: Column, counted: np.ndarray, totals: NumberTotals, *, cells: int) -> Self:
        numbers = read_numbers(values, totals.coded)[counted]
        numbers = numbers[~np.isnan(numbers)]
        away = numbers - totals.mean
        if cells == 0:
            return cls(Sums.of(away**2), np.zeros(0), Sums.each(np.zeros(0)))
        reach = (totals.most - totals.least) or 1.0
        place = np.arcsinh(FINEST * away / reach) / np.arcsinh(FINEST)  # from -1 to 1, within the range
        cell = np.clip((place + 1) / 2 * cells, 0, cells - 1).astype(int)
        counts = np.bincount(cell, minlength=cells).astype(float)
        return cls(Sums.of(away**2), counts, Sums.of(numbers, cell, cells))

    def __add__(self, other: "Spread") -> "Spread":
        return Spread(self.squares + other.squares, self.counts + other.counts, self.totals + other.totals)

    @property
    def values(self) -> np.ndarray:
        """The mean of every cell that is not empty, in rising order."""
        filled = self.counts > 0
        return self.totals.values[filled] / self.counts[filled]

    def edges(self, bins: int = BINS) -> tuple[float, ...]:
        """Of so many bins. Each has the same share of the square roots of the cells' counts: bins are narrow where rows
        are many, and rare values still have bins of their own. With too few cells the last bins are empty."""
        values, mass = self.values, np.sqrt(self.counts[self.counts > 0])
        steps, last = np.arange(bins + 1), max(values.size - 1, 0)
        inner = np.searchsorted(np.cumsum(mass), mass.sum() * steps[1:-1] / bins)
        chosen = np.maximum.accumulate(np.array([0, *inner, last]) - steps) + steps  # no edge twice
        return tuple(values[np.minimum(chosen, last)].tolist()) if values.size else (0.0,) * (bins + 1)


@dataclasses.dataclass(frozen=True)
class Spreads:
    """What a client tells next, of its columns of numbers."""

    columns: Mapping[str, Spread]

    @classmethod
    def of(cls, frame: pd.DataFrame, totals: Totals, counted: np.ndarray) -> Self:
        """`totals` are those of all clients."""
        columns: dict[str, Spread] = {}
        for name, known in totals.columns.items():
            if isinstance(known, NumberTotals):
                columns[name] = Spread.of(
                    frame[name], counted, known, cells=CELLS if totals.recipe == "piecewise" else 0
                )
        return cls(columns)

    def __add__(self, other: "Spreads") -> "Spreads":
        return Spreads({name: mine + other.columns[name] for name, mine in self.columns.items()})

    def pack(self) -> np.ndarray:
        """All of it, uint64."""
        parts = [(one.squares, Sums.each(one.counts), one.totals) for one in self.columns.values()]
        return pack_all([part for one in parts for part in one])

    def with_sums(self, packed: np.ndarray) -> "Spreads":
        """That of all sites."""
        words, columns, start = Sums.unpack(packed).words, {}, 0
        for name, one in self.columns.items():
            cells = one.counts.size
            squares, counts, totals = np.split(words[start : start + 1 + 2 * cells], [1, 1 + cells])
            columns[name] = Spread(Sums(squares), Sums(counts).values, Sums(totals))
            start += 1 + 2 * cells
        return Spreads(columns)


# ------------------------------------------------------------------------------------------------- features


class Feature(Protocol):
    """What an encoder makes of one column of a table."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> list[str]:
        """Of the columns that it makes."""
        ...

    @property
    def numeric(self) -> bool:
        """Does it read numbers? Text would count as missing then."""
        ...

    def encode(self, values: Column) -> list[np.ndarray]:
        """One array per name."""
        ...


@dataclasses.dataclass(frozen=True)
class Number:
    """(value - centre) / scale."""

    name: str
    centre: float
    scale: float
    fill: float  # stands for missing values
    constant: bool  # nothing but the mark of missing values is worth a column
    mark_missing: bool
    coded: bool  # text whose last digit is the value

    @classmethod
    def fit(cls, name: str, recipe: str, totals: NumberTotals, spread: Spread) -> Self:
        centre, scale = 0.0, 1.0
        if recipe == "standard":
            centre, scale = totals.mean, float(np.sqrt(spread.squares.values[0] / max(totals.rows, 1)))
        elif recipe != "minimax-fair-raw" and totals.largest:
            scale = float(10.0 ** np.floor(np.log10(totals.largest)))
        # A column may vary as a whole and be constant in the rows that count: then there is nothing to divide by.
        return cls(name, centre, scale or 1.0, totals.mean, totals.constant, totals.marked, totals.coded)

    @property
    def numeric(self) -> bool:
        return not self.coded

    @property
    def names(self) -> list[str]:
        return [self.name] * (not self.constant) + [f"{self.name} missing"] * self.mark_missing

    def encode(self, values: Column) -> list[np.ndarray]:
        numbers = read_numbers(values, self.coded)
        missing = np.isnan(numbers)
        value = (np.where(missing, self.fill, numbers) - self.centre) / self.scale
        return [value] * (not self.constant) + [missing] * self.mark_missing


@dataclasses.dataclass(frozen=True)
class Bins:
    """One column per bin, 0 for values below it, 1 for those above it and linear within, less its mean."""

    name: str
    edges: tuple[float, ...]
    means: tuple[float, ...]  # of the columns
    fill: float  # stands for missing values
    mark_missing: bool

    @classmethod
    def fit(cls, name: str, totals: NumberTotals, spread: Spread) -> Self:
        edges = spread.edges() if totals.values is None else tuple(sorted(totals.values))
        share = spread.counts[spread.counts > 0] / max(totals.known, 1)
        means = [float(share @ _fill_bin(spread.values, low, high)) for low, high in itertools.pairwise(edges)]
        return cls(name, edges, tuple(means), totals.mean, totals.marked)

    @property
    def numeric(self) -> bool:
        return True

    @property
    def names(self) -> list[str]:
        bins = [f"{self.name} {low:g} to {high:g}" for low, high in itertools.pairwise(self.edges)]
        return bins + [f"{self.name} missing"] * self.mark_missing

    def encode(self, values: Column) -> list[np.ndarray]:
        numbers = read_numbers(values, coded=False)
        missing = np.isnan(numbers)
        numbers = np.where(missing, self.fill, numbers)
        bounds = zip(itertools.pairwise(self.edges), self.means, strict=True)
        return [_fill_bin(numbers, *edges) - mean for edges, mean in bounds] + [missing] * self.mark_missing


def _fill_bin(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """How far every number fills the bin; an empty one has no width, and nothing fills it."""
    return np.clip((numbers - low) / (high - low), 0, 1) if low < high else np.zeros_like(numbers)


@dataclasses.dataclass(frozen=True)
class Category:
    """One 0/1 column per level; two levels need only one column, of the second."""

    name: str
    levels: tuple[str, ...]

    @property
    def numeric(self) -> bool:
        return False

    @classmethod
    def fit(cls, name: str, totals: LevelTotals) -> Self:
        return cls(name, tuple(sorted(totals.levels)))

    @property
    def first(self) -> int:
        """The first level with a column of its own."""
        return 1 if len(self.levels) <= 2 else 0

    @property
    def names(self) -> list[str]:
        return [f"{self.name}={level}" for level in self.levels[self.first :]]

    def encode(self, values: Column) -> list[np.ndarray]:
        codes, names = find_categories(values)
        number = {level: i for i, level in enumerate(self.levels)}
        level = np.array([number.get(name, -1) for name in names], int)[codes]
        return [level == i for i in range(self.first, len(self.levels))]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Fitted once, applied to any table with the same columns."""

    recipe: str
    columns: tuple[Feature, ...]

    kinds: ClassVar[dict[str, type]] = {
        "levels": Category,
        "centre": Number,
        "edges": Bins,
    }  # by a field that no other has

    def __post_init__(self) -> None:
        if not self.names:
            raise UserError(
                f"no feature is left of the columns {', '.join(column.name for column in self.columns) or '(none)'}: "
                "each holds one value only; give a table with at least one column that varies."
            )

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        recipe: str = "standard",
        *,
        rows: np.ndarray | None = None,
        schema: Schema | None = None,
    ) -> "Encoder":
        """Learn the columns of `frame`.

        rows   mask of the rows that means, deviations and bins are taken from (all if None). Which categories and gaps
               there are is taken from all rows, so that every split of a table has the same features.
        schema says what kinds of columns, levels and gaps there are, in place of the rows
        """
        rows = np.ones(len(frame), bool) if rows is None else rows
        totals = Totals.of(frame, check_recipe(recipe), rows, schema)
        return cls.from_sums(totals, Spreads.of(frame, totals, rows))

    @classmethod
    def from_sums(cls, totals: Totals, spreads: Spreads) -> "Encoder":
        """Make the encoder of what all clients told."""
        columns: list[Feature] = []
        for name, known in totals.columns.items():
            if isinstance(known, LevelTotals):
                columns.append(Category.fit(name, known))
            elif totals.recipe == "piecewise":
                columns.append(Bins.fit(name, known, spreads.columns[name]))
            else:
                columns.append(Number.fit(name, totals.recipe, known, spreads.columns[name]))
        return cls(totals.recipe, tuple(columns))

    def to_dict(self) -> dict[str, Any]:
        """Plain text and numbers, for files."""
        columns: Any = self.columns  # records, all of them
        return {"recipe": self.recipe, "columns": [dataclasses.asdict(column) for column in columns]}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        kind = lambda c: next(kind for field, kind in cls.kinds.items() if field in c)
        plain = lambda c: {name: tuple(value) if isinstance(value, list) else value for name, value in c.items()}
        return cls(content["recipe"], tuple(kind(c)(**plain(c)) for c in content["columns"]))

    @property
    def names(self) -> list[str]:
        return [name for column in self.columns for name in column.names]

    def check(self, frame: pd.DataFrame) -> None:
        """Refuse text where the training data had numbers: it would count as missing."""
        for column in self.columns:
            if column.numeric and column.name in frame:
                values: Any = frame[column.name].dropna()
                numbers: Any = pd.to_numeric(values, errors="coerce")
                wrong = values[numbers.isna()]
                if len(wrong):
                    raise UserError(
                        f"column {column.name!r} holds {wrong.iloc[0]!r}, but it was a column of numbers in training; "
                        "give numbers, or leave the value out."
                    )

    def transform(self, frame: pd.DataFrame) -> np.ndarray:
        """float32 [rows, features]"""
        absent = [column.name for column in self.columns if column.name not in frame.columns]
        if absent:
            raise UserError(
                f"the columns {', '.join(absent)} are missing; the features were fitted on "
                f"{', '.join(column.name for column in self.columns)}: give a table with these columns."
            )
        encoded = [part for column in self.columns for part in column.encode(frame[column.name])]
        out = np.empty((len(frame), len(encoded)), np.float32)
        for i, part in enumerate(encoded):
            out[:, i] = part
        return out


def check_recipe(recipe: str) -> str:
    if recipe not in RECIPES:
        raise UserError(
            f"unknown recipe {recipe!r}{suggest(recipe, RECIPES, *NEAREST)}; the recipes are {', '.join(RECIPES)}."
        )
    return recipe


def is_coded(values: Column) -> bool:
    """Attribute codes of the German Credit file, such as A11 and A410."""
    return bool(values.dropna().astype(str).str.fullmatch(r"A\d{2,}").all())


def read_numbers(values: Column, coded: bool) -> np.ndarray:
    """float64; what is not a finite number is NaN."""
    if coded:
        values = values.astype(object).where(values.isna(), values.astype(str).str[-1])
    numbers = convert_to_numbers(values).to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isfinite(numbers), numbers, np.nan)
