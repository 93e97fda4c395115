"""From columns to numbers.

Recipes
  standard            numbers standardised, their missing values filled with the median and marked by a column of their
                      own; categories one-hot (a two-valued one gives one column), missing being a category
  minimax-fair        as "Minimax group fairness" (Diana et al. 2021) prepares its data: categories one-hot as above,
                      coded attributes (A11, A410) replaced by their last digit, and every column divided by the power
                      of ten that brings its largest absolute value into [1, 10)
  minimax-fair-raw    the same without the division
  minimax-fair-slip   the same, with the slip of the published code: whether a column is a category is looked up by its
                      position in the full table, although the group column was removed before; on Adult without race
                      this one-hot encodes capital-gain (220 columns instead of 102)
  bucketed            as "Robust optimization for fairness with noisy protected groups" (Wang et al. 2020) prepares
                      Adult: numbers cut into buckets, Adult's columns at the published edges, others (its age) at
                      their quartiles; buckets and categories one-hot with a column for every one of them. (Their code
                      leaves the youngest out of all buckets; here they are in the first.)
In all of them constant columns are left out, and a category not seen in `fit` gives zeros.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError, suggest
from nestfed.data.table import NEAREST, Column, categories, columns_of, is_number, to_number

RECIPES = ("standard", "minimax-fair", "minimax-fair-raw", "minimax-fair-slip", "bucketed")
EDGES = {  # where Adult's numbers are cut; the published outermost edges (-1 and 100000, ...) enclose all values
    "capital-gain": (1, 4000, 10000),
    "capital-loss": (1, 1800, 1950),
    "hours-per-week": (39, 41, 50),
    "education-num": (8, 9, 11),
}


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
    def fit(cls, values: Column, recipe: str, rows: np.ndarray, *, coded: bool = False) -> "Number":
        numbers = read_numbers(values, coded)
        missing = np.isnan(numbers)
        constant = len(np.unique(numbers[~missing])) < 2
        known = numbers[rows & ~missing]
        fill = float(np.median(known)) if known.size else 0.0
        filled = np.where(missing, fill, numbers)[rows]
        centre, scale = 0.0, 1.0
        if recipe == "standard":
            centre, scale = float(filled.mean()), float(filled.std())
        elif recipe != "minimax-fair-raw" and filled.any():
            scale = float(10.0 ** np.floor(np.log10(np.abs(filled).max())))
        # A column may vary as a whole and be constant in the rows that count: then there is nothing to divide by.
        return cls(str(values.name), centre, scale or 1.0, fill, constant, bool(missing.any()), coded)

    @property
    def names(self) -> list[str]:
        return [self.name] * (not self.constant) + [f"{self.name} missing"] * self.mark_missing

    def encode(self, values: Column) -> list[np.ndarray]:
        numbers = read_numbers(values, self.coded)
        missing = np.isnan(numbers)
        value = (np.where(missing, self.fill, numbers) - self.centre) / self.scale
        return [value] * (not self.constant) + [missing] * self.mark_missing


@dataclasses.dataclass(frozen=True)
class Buckets:
    """One 0/1 column per bucket; an edge belongs to the bucket below it, missing values to none."""

    name: str
    edges: tuple[float, ...]  # between the buckets
    mark_missing: bool

    @classmethod
    def fit(cls, values: Column, rows: np.ndarray) -> "Buckets":
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
class Category:
    """One 0/1 column per level; two levels need only one column, of the second, unless `all_levels` are wanted."""

    name: str
    levels: tuple[str, ...]
    all_levels: bool = False

    @classmethod
    def fit(cls, values: Column, *, all_levels: bool = False) -> "Category":
        levels = categories(values.sort_values() if is_number(values) else values)[1]
        return cls(str(values.name), tuple(levels if is_number(values) else sorted(levels)), all_levels)

    @property
    def first(self) -> int:
        return 1 if len(self.levels) <= (1 if self.all_levels else 2) else 0

    @property
    def names(self) -> list[str]:
        return [f"{self.name}={level}" for level in self.levels[self.first :]]

    def encode(self, values: Column) -> list[np.ndarray]:
        codes, names = categories(values)
        number = {level: i for i, level in enumerate(self.levels)}
        level = np.array([number.get(name, -1) for name in names], int)[codes]
        return [level == i for i in range(self.first, len(self.levels))]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Fitted once, applied to any table with the same columns."""

    recipe: str
    columns: tuple[Number | Buckets | Category, ...]

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        recipe: str = "standard",
        *,
        rows: np.ndarray | None = None,
        full_table: pd.DataFrame | None = None,
    ) -> "Encoder":
        """Learn the columns of `frame`.

        rows        mask of the rows that means, deviations, medians and quartiles are taken from (all if None). Which
                    categories and gaps there are is taken from all rows, so that every split of a table has the same
                    features.
        full_table  the table before the group column was removed; only "minimax-fair-slip" looks at it
        """
        if recipe not in RECIPES:
            raise UserError(
                f"unknown recipe {recipe!r}{suggest(recipe, RECIPES, *NEAREST)}; the recipes are {', '.join(RECIPES)}."
            )
        text = [not is_number(values) for _, values in columns_of(frame)]
        if recipe == "minimax-fair-slip":
            if full_table is None:
                raise UserError("the recipe 'minimax-fair-slip' looks columns up in the full table; pass full_table=.")
            # zip stops at the shorter: the full table has more columns. Text cannot be a number, whatever is looked up.
            looked_up = [not is_number(values) for _, values in columns_of(full_table)]
            text = [mine or other for mine, other in zip(text, looked_up, strict=False)]
        rows = np.ones(len(frame), bool) if rows is None else rows
        columns = []
        for (_, values), is_text in zip(columns_of(frame), text, strict=True):
            coded = recipe.startswith("minimax-fair") and is_text and is_coded(values)
            if is_text and not coded:
                columns.append(Category.fit(values, all_levels=recipe == "bucketed"))
            elif recipe == "bucketed":
                columns.append(Buckets.fit(values, rows))
            else:
                columns.append(Number.fit(values, recipe, rows, coded=coded))
        encoder = cls(recipe, tuple(columns))
        if not encoder.names:
            raise UserError(
                f"no feature is left of the columns {', '.join(map(str, frame.columns)) or '(none)'}: "
                "each holds one value only; give a table with at least one column that varies."
            )
        return encoder

    def to_dict(self) -> dict[str, Any]:
        """Plain text and numbers, for files."""
        return {"recipe": self.recipe, "columns": [dataclasses.asdict(column) for column in self.columns]}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Encoder":
        kind: Any = lambda c: Category if "levels" in c else Buckets if "edges" in c else Number
        plain = lambda c: {name: tuple(value) if isinstance(value, list) else value for name, value in c.items()}
        return cls(content["recipe"], tuple(kind(c)(**plain(c)) for c in content["columns"]))

    @property
    def names(self) -> list[str]:
        return [name for column in self.columns for name in column.names]

    def check(self, frame: pd.DataFrame) -> None:
        """Refuse text where the training data had numbers: it would count as missing."""
        for column in self.columns:
            number = isinstance(column, Buckets) or isinstance(column, Number) and not column.coded
            if number and column.name in frame:
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


def is_coded(values: Column) -> bool:
    """Attribute codes of the German Credit file, such as A11 and A410."""
    return bool(values.dropna().astype(str).str.fullmatch(r"A\d{2,}").all())


def read_numbers(values: Column, coded: bool) -> np.ndarray:
    """float64; what is not a finite number is NaN."""
    if coded:
        values = values.astype(object).where(values.isna(), values.astype(str).str[-1])
    numbers = to_number(values).to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isfinite(numbers), numbers, np.nan)
