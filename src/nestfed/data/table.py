"""A table whose columns have roles, and what can be said about it before anything is trained."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from nestfed.core.settings import UserError, suggest
from nestfed.data.schema import CATEGORY, CONSTANT, LEFT_OUT, MISSING, NUMBER, ColumnRule, Schema

Column = Any  # pd.Series; pandas is typed too loosely for a checker

MOST_GROUPS = 50
NEAREST = " (nearest: {!r})", ""  # how messages about data suggest a name


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose columns have roles."""

    name: str
    frame: pd.DataFrame  # missing values are NaN; Adult's "?" is a category of its own
    label: str
    positive: Any = None  # the value of the label that counts as 1
    threshold: float | None = None  # or: 1 if the label exceeds this number
    groups: tuple[str, ...] = ()  # what names the sensitive groups ("sex", "sex+race"), the default one first
    client: str | None = None  # the column that names the client, if the data have one
    drop: tuple[str, ...] = ()  # identifiers and the like: never features
    origin: str = ""  # citation, host, licence, in one line
    notes: tuple[str, ...] = ()  # what was changed or left out on reading
    schema: Schema | None = None  # what decides how it is read; None: it was guessed from the table

    @property
    def is_partial(self) -> bool:
        """May other rows lie elsewhere? Then one label or group here is no mistake."""
        return self.schema is not None

    def column(self, name: str) -> Column:
        return self.frame[name]

    def labels(self) -> np.ndarray:
        """The label as 0 and 1, int32 [rows]."""
        values: Column = self.column(self.label)
        missing = int(values.isna().sum())
        if missing:
            raise UserError(
                f"{self.name}: the label {self.label!r} is missing in {missing} of {len(values)} rows; "
                "remove these rows, or choose another label."
            )
        if self.threshold is not None:
            if not is_number(values):
                raise UserError(
                    f"{self.name}: threshold={self.threshold} was given, but the label {self.label!r} holds text "
                    f"({list_values(values.unique())}); name the value that counts as 1 with positive=."
                )
            positive = values.to_numpy(float) > self.threshold
            rule = f"exceeds the threshold {self.threshold:g} (values from {values.min():g} to {values.max():g})"
        else:
            positive = find_equal(values, self.positive)
            rule = f"equals positive={self.positive!r} (values: {list_values(values.unique())})"
        if not self.is_partial and (positive.all() or not positive.any()):
            raise UserError(
                f"{self.name}: the label {self.label!r} {rule} in {'every' if positive.all() else 'no'} row; "
                "a label needs both kinds: choose another positive= or threshold=, or another label."
            )
        return positive.astype(np.int32)

    def group_columns(self, group: str | None = None) -> tuple[str, ...]:
        """The columns behind a group name: a column, or several joined by "+"; None means the default."""
        if group is None:
            if not self.groups:
                raise UserError(
                    f"{self.name}: no group column is named; give group= one of the columns "
                    f"{list_values(self.frame.columns, 40)}, or several joined by '+'."
                )
            group = self.groups[0]
        columns = (group,) if group in self.frame.columns else tuple(group.split("+"))
        for column in columns:
            check_column(self.frame.columns, column, "group", self.name)
        if self.label in columns:
            raise UserError(f"{self.name}: the label {self.label!r} cannot also name the groups; give another column.")
        return columns

    def group_of_rows(self, group: str | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Each row's group, int32 [rows], numbered in order of first appearance, and the names of the groups."""
        columns = self.group_columns(group)
        codes, names = name_groups([self.column(column) for column in columns])
        title = "+".join(columns)
        if self.schema is not None:
            return self._number_groups(codes, names, title, self.schema), self.schema.groups
        if len(names) < 2:
            raise UserError(
                f"{self.name}: {title!r} has one group only ({list_values(names)}); "
                "fairness compares groups: choose a column with at least two values."
            )
        if len(names) > MOST_GROUPS:
            raise UserError(
                f"{self.name}: {title!r} has {len(names)} different values, at most {MOST_GROUPS} groups can be "
                "compared; choose another column, or cut its values into ranges first."
            )
        return codes.astype(np.int32), names

    def _number_groups(self, codes: np.ndarray, names: Sequence[str], title: str, schema: Schema) -> np.ndarray:
        """The groups' numbers as the schema has them."""
        if len(schema.groups) < 2:
            raise UserError(
                f"the schema has one group of {title!r} only ({list_values(schema.groups)}); fairness compares groups: "
                "name two or more."
            )
        unknown = [name for name in names if name not in schema.groups]
        if unknown:
            raise UserError(
                f"{self.name}: {title!r} has the group {list_values(unknown)}, which is not in the schema "
                f"({list_values(schema.groups)}); agree on a schema that has it, or correct these rows."
            )
        return np.array([schema.groups.index(name) for name in names], np.int32)[codes]

    def features(self, without: Sequence[str] = ()) -> list[str]:
        """The columns that may be features, in the table's order."""
        left_out = {self.label, self.client, *self.drop, *without}
        return [column for column in self.frame.columns if column not in left_out]


def describe_columns(table: Table) -> pd.DataFrame:
    """One row per column: name, role, kind, number of missing and of distinct values, examples."""
    group_columns = {column for group in table.groups for column in table.group_columns(group)}

    def role(column: str) -> str:
        if column == table.label:
            return "label"
        if column == table.client:
            return "client"
        if column in table.drop:
            return "dropped"
        return "group" if column in group_columns else "feature"

    rows = [
        {
            "name": column,
            "role": role(column),
            "kind": "number" if is_number(values) else "category",
            "missing": int(values.isna().sum()),
            "distinct": int(values.nunique()),
            "examples": list_values(values.dropna().unique(), 3),
        }
        for column, values in list_columns(table.frame)
    ]
    return pd.DataFrame(rows)


def describe_groups(table: Table) -> pd.DataFrame:
    """Rows and positives of the whole table (first row) and of every group of every group column."""
    labels = table.labels()
    rows = [("", "all rows", len(labels), int(labels.sum()))]
    for group in table.groups:
        codes, names = table.group_of_rows(group)
        sizes, positives = np.bincount(codes), np.bincount(codes, labels).astype(int)
        rows += [(group, name, int(sizes[i]), int(positives[i])) for i, name in enumerate(names)]
    frame = pd.DataFrame(rows, columns=["column", "group", "rows", "positives"])
    return frame.assign(**{"positive rate": frame["positives"] / frame["rows"]})


# ------------------------------------------------------------------------------------------------- schemas


def draft_schema(table: Table, batch_size: int | None = None) -> Schema:
    """What a holder of these rows would propose to the others."""
    group_columns = table.group_columns() if table.groups else ()
    rules = {}
    for name, values in list_columns(table.frame):
        if name in table.drop:
            rules[name] = ColumnRule(LEFT_OUT)
        elif name not in (table.label, table.client):
            rules[name] = _draft_rule(values, is_group=name in group_columns)
    names = name_groups([table.column(column) for column in group_columns])[1] if group_columns else ()
    positive = table.positive
    return Schema(
        label=table.label,
        columns=rules,
        positive=positive.item() if isinstance(positive, np.generic) else positive,
        threshold=table.threshold,
        group="+".join(group_columns) or None,
        groups=tuple(sorted(names)),  # in no order that rows have
        batch_size=batch_size,
    )


def _draft_rule(values: Column, *, is_group: bool) -> ColumnRule:
    if is_number(values) and not is_group:
        numbers = values.to_numpy(np.float64, na_value=np.nan)
        known = np.unique(numbers[np.isfinite(numbers)])
        gaps = not bool(np.isfinite(numbers).all())
        if known.size > 1:
            return ColumnRule(NUMBER, gaps=gaps)
        return ColumnRule(CONSTANT, value=float(known[0]), gaps=gaps) if known.size else ColumnRule(CONSTANT)
    known = values.dropna()
    if known.empty:
        return ColumnRule(CONSTANT)
    return ColumnRule(CATEGORY, levels=tuple(sorted(find_categories(known)[1])), gaps=bool(values.isna().any()))


def apply_schema(table: Table, schema: Schema, decimal_comma: np.ndarray | None = None) -> Table:
    """The table as the schema reads it: its columns in the schema's order, with a note for what does not fit."""
    comma = np.zeros(len(table.frame), bool) if decimal_comma is None else decimal_comma
    wanted = [name for name, rule in schema.columns.items() if rule.kind != LEFT_OUT]
    for name in (schema.label, *wanted):
        if name not in table.frame.columns:
            near = suggest(name, map(str, table.frame.columns), *NEAREST)
            raise UserError(f"{table.name} has no column {name!r}{near}, but the schema has.")
    columns: dict[str, Column] = {}
    notes = list(table.notes)
    for name in wanted:
        columns[name], remark = _read_by_rule(table.column(name), schema.columns[name], comma)
        notes += [f"{name!r}: {remark}"] if remark else []
    for name in (schema.label, table.client):
        if name is not None:
            columns[name] = _strip(table.column(name))
    return dataclasses.replace(
        table,
        frame=pd.DataFrame(columns),
        label=schema.label,
        positive=schema.positive,
        threshold=schema.threshold,
        groups=() if schema.group is None else (schema.group,),
        drop=(),
        notes=tuple(notes),
        schema=schema,
    )


def _strip(values: Column) -> Column:
    if is_number(values):
        return values
    return values.map(lambda value: value.strip() if isinstance(value, str) else value)


def _read_by_rule(values: Column, rule: ColumnRule, decimal_comma: np.ndarray) -> tuple[Column, str]:
    """A column as its rule reads it, and what does not fit, in words."""
    absent = values.isna()
    if rule.kind == CATEGORY:
        text = _strip(values.map(name_value).astype(object).where(~absent, None))
        unknown = ~text.where(~absent, MISSING).isin(rule.all_levels)
        examples = list_values(text[unknown].map(name_value).unique(), 3)
        told = f"{int(unknown.sum())} of {len(text)} values are no level of the schema and count as none ({examples})"
        return text, told if unknown.any() else ""
    numbers = values
    if not is_number(values):
        text = values.astype(str).str.strip()
        numbers = convert_to_numbers(text.where(~decimal_comma, text.str.replace(",", "."))).where(~absent)
    known = np.isfinite(numbers.to_numpy(np.float64, na_value=np.nan))
    odd = ~known & ~absent.to_numpy()
    if odd.any():
        examples = list_values(values[odd].unique(), 3)
        return numbers, f"{int(odd.sum())} of {len(values)} values are no numbers and count as missing ({examples})"
    if not known.all() and not rule.gaps and rule.kind == NUMBER:
        return numbers, f"{int((~known).sum())} of {len(values)} values are missing; the schema has no mark for them"
    return numbers, ""


# ------------------------------------------------------------------------------------------------- values of columns


def list_columns(frame: pd.DataFrame) -> Iterable[tuple[str, Column]]:
    return ((str(name), values) for name, values in frame.items())


def convert_to_numbers(values: Column) -> Column:
    """Numbers where the values can be read as such, NaN elsewhere."""
    return pd.to_numeric(values, errors="coerce")


def is_number(values: Column) -> bool:
    return is_numeric_dtype(values) and not is_bool_dtype(values)


def find_categories(values: Column) -> tuple[np.ndarray, list[str]]:
    """Each row's category as a number, in order of first appearance, and their names; missing is one of them."""
    codes, distinct = pd.factorize(values, use_na_sentinel=False)
    # Different values may have one name (1 and 1.0, or the text "missing" beside missing values).
    merged, names = pd.factorize(np.array([name_value(value) for value in distinct], object))
    return merged[codes], list(names)


def name_groups(columns: Sequence[Column]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Each row's group as a number, in order of first appearance, and the groups' names: values joined by " + "."""
    parts = [find_categories(column) for column in columns]
    joined = pd.MultiIndex.from_arrays([np.asarray(names, object)[codes] for codes, names in parts])
    codes, values = pd.factorize(joined)
    return codes, tuple(" + ".join(value) for value in values)


def name_value(value: Any) -> str:
    """How a value is written: 1.0 and 1 alike, so that a column of whole numbers with gaps keeps its names."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return MISSING
    if isinstance(value, float | np.floating):
        return format(value, ".12g")
    return str(value)


def find_equal(values: Column, value: Any) -> np.ndarray:
    """Which rows hold `value`; a number may be given as text, as the command line does."""
    if is_number(values):
        try:
            return values.to_numpy(float, na_value=np.nan) == float(value)
        except (TypeError, ValueError):
            return np.zeros(len(values), bool)
    if is_bool_dtype(values):
        return values.astype(str).str.lower().to_numpy(object) == str(value).lower()
    return values.map(name_value).to_numpy(object) == name_value(value)


def list_values(values: Iterable[Any], most: int = 10) -> str:
    """A few values in one line."""
    names = [name_value(value) for value in values]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_column(columns: Iterable[str], wanted: str) -> str:
    """A name for a new column: the wanted one, or the next free one like it."""
    taken = set(columns)
    return next(
        name for name in itertools.chain([wanted], (f"{wanted} {i}" for i in itertools.count(2))) if name not in taken
    )


def check_column(columns: Iterable[str], name: str, role: str, table: str) -> None:
    columns = list(columns)
    if name not in columns:
        raise UserError(
            f"{table}: there is no column {name!r} for the {role}{suggest(name, columns, *NEAREST)}; "
            f"the columns are {list_values(columns, 40)}."
        )
