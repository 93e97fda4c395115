"""From columns to numbers.

Recipes
  standard            numbers standardised, their missing values filled with the median and marked by a column of their
                      own; categories one-hot (a two-valued one gives one column), missing being a category
  minimax-fair        as "Minimax group fairness" (Diana et al. 2021) prepares its data: categories one-hot as above,
                      coded attributes (A11, A410) replaced by their last digit, and every column divided by the power
                      of ten that brings its largest absolute value into [1, 10)
  minimax-fair-raw    the same without the division
In all of them constant columns are left out, and a category not seen in `fit` gives zeros.
"""

import dataclasses
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError, suggest
from nestfed.data.table import NEAREST, Column, categories, columns_of, is_number, to_number

RECIPES = ("standard", "minimax-fair", "minimax-fair-raw")


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
    def fit(cls, values: Column, recipe: str, rows: np.ndarray, *, coded: bool = False) -> Self:
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
        marked = bool(missing.any() and not missing.all())
        return cls(str(values.name), centre, scale or 1.0, fill, constant, marked, coded)

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
class Category:
    """One 0/1 column per level; two levels need only one column, of the second."""

    name: str
    levels: tuple[str, ...]

    @property
    def numeric(self) -> bool:
        return False

    @classmethod
    def fit(cls, values: Column) -> Self:
        return cls(str(values.name), tuple(sorted(categories(values)[1])))

    @property
    def first(self) -> int:
        """The first level with a column of its own."""
        return 1 if len(self.levels) <= 2 else 0

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
    columns: tuple[Feature, ...]

    kinds: ClassVar[dict[str, type]] = {"levels": Category, "centre": Number}  # by a field that no other has

    def __post_init__(self) -> None:
        if not self.names:
            raise UserError(
                f"no feature is left of the columns {', '.join(column.name for column in self.columns) or '(none)'}: "
                "each holds one value only; give a table with at least one column that varies."
            )

    @classmethod
    def fit(cls, frame: pd.DataFrame, recipe: str = "standard", *, rows: np.ndarray | None = None) -> "Encoder":
        """Learn the columns of `frame`.

        rows   mask of the rows that means, deviations and medians are taken from (all if None). Which categories and
               gaps there are is taken from all rows, so that every split of a table has the same features.
        """
        if recipe not in RECIPES:
            raise UserError(
                f"unknown recipe {recipe!r}{suggest(recipe, RECIPES, *NEAREST)}; the recipes are {', '.join(RECIPES)}."
            )
        rows = np.ones(len(frame), bool) if rows is None else rows
        columns = []
        for _, values in columns_of(frame):
            coded = recipe.startswith("minimax-fair") and not is_number(values) and is_coded(values)
            number = coded or is_number(values)
            columns.append(Number.fit(values, recipe, rows, coded=coded) if number else Category.fit(values))
        return cls(recipe, tuple(columns))

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


def is_coded(values: Column) -> bool:
    """Attribute codes of the German Credit file, such as A11 and A410."""
    return bool(values.dropna().astype(str).str.fullmatch(r"A\d{2,}").all())


def read_numbers(values: Column, coded: bool) -> np.ndarray:
    """float64; what is not a finite number is NaN."""
    if coded:
        values = values.astype(object).where(values.isna(), values.astype(str).str[-1])
    numbers = to_number(values).to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isfinite(numbers), numbers, np.nan)
