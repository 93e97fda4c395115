"""The user's own table: a CSV or Parquet file, or one per client, read forgivingly, with a note for every change."""

import csv
import dataclasses
import glob
import gzip
import io
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

from nestfed.core.settings import UserError, suggest
from nestfed.data.partition import deal_by_column
from nestfed.data.schema import Schema
from nestfed.data.table import (
    NEAREST,
    Column,
    Table,
    apply_schema,
    check_column,
    convert_to_numbers,
    find_equal,
    is_number,
    list_columns,
    list_values,
    name_column,
    name_value,
)

TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", ".parquet")  # of the files of a folder that count
FILE = "file"  # the column that names a row's file, where there are several
SEPARATORS = ",;\t|"
POSITIVE_WORDS = ("1", "yes", "true", "y")
NUMERIC_SHARE = 0.9  # a text column is numeric if at least this share of its values are numbers
MOST_CATEGORIES = 200


def read_table(
    path: str | Path,
    *,
    label: str,
    group: str | None = None,
    clients: str | None = None,
    positive: Any = None,
    threshold: float | None = None,
    drop: Sequence[str] = (),
    alone: bool = True,
) -> Table:
    """A CSV file (comma, semicolon, tab or |; plain or .gz), a Parquet file, or one such file per client: the path of
    their folder, or a pattern such as sites/*.csv. Several files need the same columns, in any order.

    label      the column to predict. With two values, 1 is true / 1 / yes / y if one of them is that, otherwise the
               rarer one; `positive` names it, and `threshold` makes a label of a number
    group      the column of the sensitive groups, or several joined by "+"; missing values are the group "missing"
    clients    the column that names each row's client; of several files, None means that every file is one, by its name
    drop       columns that must not be features
    alone      False: other rows lie elsewhere, and one label or group here is no mistake

    Text columns of which 90 % are numbers become numbers, the rest of them missing. Row counters, and text columns with
    too many different values to be categories, are dropped. `Table.notes` says so for each.
    """
    raw, decimal_comma = _read_raw(path, label, clients)
    name, frame, clients = raw.name, raw.frame, raw.client
    for column in drop:
        check_column(frame.columns, column, "drop", name)
    if positive is not None and threshold is not None:
        raise UserError(f"{name}: both positive={positive!r} and threshold={threshold} were given; give one of them.")
    groups = () if group is None else (group,)
    table = dataclasses.replace(raw, groups=groups, drop=tuple(drop))
    group_columns = () if group is None else table.group_columns(group)
    roles = [label, *([] if clients is None else [clients]), *group_columns]
    for column, times in Counter([*roles, *drop]).items():
        if times > 1:
            raise UserError(f"{name}: the column {column!r} was given {times} roles; a column has one: choose.")

    # Odd values of the label are to be complained about, not to be lost as missing.
    as_read = {*group_columns, clients, None if threshold is not None else label}
    frame, notes = _convert_numbers(frame, decimal_comma, as_read)
    identifiers = {
        column: why for column in table.features(group_columns) if (why := _explain_identifier(frame[column]))
    }
    notes += [f"{column!r} was left out: {why}" for column, why in identifiers.items()]
    if positive is None and threshold is None:
        positive = _choose_positive(frame[label], label, name, alone)
    table = dataclasses.replace(
        table,
        frame=frame,
        positive=positive,
        threshold=threshold,
        drop=(*drop, *identifiers),
        notes=tuple(notes),
    )
    if alone:  # these three refuse what cannot be used
        table.labels()
        if group is not None:
            table.group_of_rows()
    if clients is not None:
        deal_by_column(frame[clients])
    if not table.features(group_columns):
        dropped = f" (left out: {', '.join(table.drop)})" if table.drop else ""
        raise UserError(f"{name}: no column is left as a feature{dropped}; give a table with more columns.")
    return table


def read_by_schema(path: str | Path, schema: Schema, *, clients: str | None = None) -> Table:
    """As `read_table`, where a schema says what is in the files. Nothing is guessed, and rows with one label or of one
    group are no mistake: others hold the rest."""
    table, decimal_comma = _read_raw(path, schema.label, clients)
    table = apply_schema(table, schema, decimal_comma)
    table.labels()  # missing ones are refused
    if schema.group is not None:
        table.group_of_rows()
    if clients is not None:
        deal_by_column(table.column(clients))
    return table


# ------------------------------------------------------------------------------------------------- reading


def _read_raw(path: str | Path, label: str, clients: str | None) -> tuple[Table, np.ndarray]:
    """The rows as they stand with their label and clients, and which of them may have a decimal comma."""
    files = _find_files(Path(path).expanduser())
    frame, decimal_comma, file_of_row = _read_all(files)
    name = files[0].name if len(files) == 1 else f"{len(files)} files of {_find_common_folder(files).name}"
    check_column(frame.columns, label, "label", name)
    if clients is not None:
        check_column(frame.columns, clients, "clients", name)
    elif len(files) > 1:
        clients = name_column(frame, FILE)
        frame = frame.assign(**{clients: np.array(_name_by_file(files), object)[file_of_row]})
    origin = f"the file {name}" if len(files) == 1 else f"the {name}"
    return Table(name=name, frame=frame, label=label, client=clients, origin=origin), decimal_comma


def _find_files(path: Path) -> list[Path]:
    """The file, or those of a folder or a pattern, in the order of their names."""
    if path.is_file():
        return [path]
    if path.is_dir():
        is_table = lambda file: file.is_file() and file.name.lower().endswith(TABLE_ENDINGS)
        files = sorted(file for file in path.iterdir() if is_table(file) and not file.name.startswith("."))
        folder, problem = path, f"the folder {path} has no CSV or Parquet file"
    elif glob.has_magic(str(path)):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        folder, problem = path.parent, f"no file matches {path}"
    else:
        files, folder, problem = [], path.parent, f"there is no file or folder {path}"
    if not files:
        near = sorted(file.name for file in folder.glob("*.*")) if folder.is_dir() else []
        hint = f"; the folder {folder} holds {list_values(near)}" if near else ""
        raise UserError(f"{problem}{hint}; give the path of a CSV or Parquet file, or a folder of one per client.")
    return files


def _find_common_folder(files: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([file.parent.resolve() for file in files]))


def _name_by_file(files: Sequence[Path]) -> list[str]:
    """A name for every file: its own without the ending, or as much of its path as tells it from the others."""
    folder = _find_common_folder(files)
    whole = [file.resolve().relative_to(folder).as_posix() for file in files]
    without = [re.sub(r"\.\w+(\.gz)?$", "", path) for path in whole]
    shortest = [path.rpartition("/")[2] for path in without]
    return next((names for names in (shortest, without) if len(set(names)) == len(files)), whole)


def _read_all(files: Sequence[Path]) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """The rows of all files, whether a row's numbers may have a decimal comma, and the number of its file."""
    frames, commas = zip(*map(_read, files), strict=True)
    sizes = [len(frame) for frame in frames]
    for file, frame in zip(files, frames, strict=True):
        _check_same_columns(files[0], frames[0].columns, file, frame.columns)
    joined = frames[0]
    if len(files) > 1:
        joined = pd.DataFrame({name: _join([frame[name] for frame in frames]) for name in frames[0].columns})
    return joined, np.repeat(commas, sizes), np.repeat(np.arange(len(files)), sizes)


def _check_same_columns(first: Path, columns: Sequence[str], other: Path, its_columns: Sequence[str]) -> None:
    for has, had, lacks, lacked in ((first, columns, other, its_columns), (other, its_columns, first, columns)):
        for column in had:
            if column not in lacked:
                raise UserError(
                    f"{lacks} has no column {column!r}{suggest(column, lacked, *NEAREST)}, but {has} has; files that "
                    "are read together need the same columns."
                )


def _join(parts: Sequence[Column]) -> Column:
    """A column of several files. A file may hold numbers only where another has text: 1.0 is then written as 1."""
    known = [part for part in parts if part.notna().any()]  # an empty column has no kind
    if any(map(is_number, known)) and not all(map(is_number, known)):
        parts = [part.map(name_value).where(part.notna()) if is_number(part) else part for part in parts]
    return pd.concat(parts, ignore_index=True)


def _read(path: Path) -> tuple[pd.DataFrame, bool]:
    """The frame as it stands, and whether its numbers may have a decimal comma."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}); check its permissions.") from None
    if not content:
        raise UserError(f"{path} is empty; give a CSV file with a line of column names, or a Parquet file.")
    if content[:4] == b"PAR1" or path.suffix == ".parquet":
        frame, decimal_comma = _read_parquet(path, content), False
    else:
        frame, decimal_comma = _read_csv(path, content)
    if frame.empty:
        raise UserError(f"{path.name} has column names but no rows; give a file with data below the first line.")
    return frame, decimal_comma


def _read_parquet(path: Path, content: bytes) -> pd.DataFrame:
    try:
        parquet = pyarrow.parquet.read_table(io.BytesIO(content))
        _check_names(parquet.column_names, path)
        return parquet.to_pandas(ignore_metadata=True)
    except (pyarrow.ArrowException, OSError):
        raise UserError(f"{path} is not a readable Parquet file; write it again, or give a CSV file.") from None


def _read_csv(path: Path, content: bytes) -> tuple[pd.DataFrame, bool]:
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            raise UserError(f"{path} is not a complete gzip file; compress or copy it again.") from None
    text = _decode(path, content)
    names: list[str] = []
    try:
        separator = _find_separator(text)
        header = next(csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True))
        names = [name.strip() or f"column {i + 1}" for i, name in enumerate(header)]
        _check_names(names, path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # lines longer than the header
            frame = pd.read_csv(
                io.StringIO(text),
                sep=separator,
                header=0,
                names=names,
                index_col=False,
                skipinitialspace=True,
                low_memory=False,
            )
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError, csv.Error) as error:
        reason = str(error).strip().rstrip(".").removeprefix("Error tokenizing data. C error: ")
        raise UserError(
            f"{path} cannot be read as a table with the columns {list_values(names)} ({reason}); every line needs as "
            "many cells as the first, and cells that hold the separator need quotation marks."
        ) from None
    return frame, separator == ";"


def _decode(path: Path, content: bytes) -> str:
    control = sum(content[:65536].count(byte) for byte in (*range(9), *range(14, 32)))
    if control > len(content[:65536]) / 100:
        raise UserError(
            f"{path} does not hold text (it starts with {content[:8]!r}); give a CSV or Parquet file: spreadsheets can "
            "be saved as CSV."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if not text.strip():
        raise UserError(f"{path} holds blank lines only; give a CSV file with a line of column names.")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"\A([ \t]*\n)+", "", text)


def _find_separator(text: str) -> str:
    """The one that cuts the first lines into most cells, equally many per line."""
    lines = text[:65536].splitlines()[:20]

    def quality(separator: str) -> tuple[bool, int]:
        cells = [len(row) for row in csv.reader(lines, delimiter=separator, skipinitialspace=True) if row]
        return len(set(cells)) == 1 and cells[0] > 1, cells[0] if cells else 0

    return max(SEPARATORS, key=quality)


def _check_names(names: Sequence[str], path: Path) -> None:
    double = [name for name, times in Counter(names).items() if times > 1]
    if double:
        raise UserError(f"{path} has several columns named {list_values(double)}; give every column a name of its own.")


# ------------------------------------------------------------------------------------------------- kinds of columns


def _convert_numbers(
    frame: pd.DataFrame, decimal_comma: np.ndarray, as_read: set[str | None]
) -> tuple[pd.DataFrame, list[str]]:
    """Text that is nearly all numbers becomes numbers, unless it is to stay as read; other objects become text."""
    notes, columns = [], {}
    for name, values in list_columns(frame):
        if not (is_number(values) or pd.api.types.is_bool_dtype(values)):
            text = values.astype(str).str.strip().where(values.notna())
            numeric = convert_to_numbers(text.where(~decimal_comma, text.str.replace(",", ".")))
            present, parsed = int(text.notna().sum()), int(numeric.notna().sum())
            if name in as_read or parsed < NUMERIC_SHARE * present or parsed == 0:
                values = text
            else:
                values = numeric
                if parsed < present:
                    odd = text[text.notna() & numeric.isna()].unique()
                    notes.append(
                        f"{name!r} is numeric but for {present - parsed} of {present} values ({list_values(odd, 3)}), "
                        "which count as missing"
                    )
        columns[name] = values
    return pd.DataFrame(columns), notes


def _explain_identifier(values: Column) -> str | None:
    """Why a column names its rows rather than describes them, if it does."""
    if is_number(values):
        numbers = values.to_numpy(float, na_value=np.nan)
        counter = len(numbers) > 2 and bool((np.diff(numbers) == 1).all()) and numbers[0] in (0, 1)
        return "it counts the rows" if counter else None
    distinct, most = values.nunique(), min(MOST_CATEGORIES, len(values) / 2)
    return f"{distinct} different values in {len(values)} rows are no categories" if distinct > most else None


def _choose_positive(values: Column, label: str, name: str, alone: bool) -> Any:
    """The value that counts as 1, if the user did not say."""
    distinct = values.dropna().unique()
    if len(distinct) == 1 and not alone:
        raise UserError(
            f"{name}: the label {label!r} is {list_values(distinct)} in every row here, so which value counts as 1 "
            "cannot be told; name it with positive=."
        )
    if len(distinct) < 2:
        raise UserError(
            f"{name}: the label {label!r} is {list_values(distinct) or 'missing'} in every row; there is nothing to "
            "learn: choose another label."
        )
    if len(distinct) > 2:
        advice = "threshold= (1 above that number) or positive= (one of the values)"
        raise UserError(
            f"{name}: the label {label!r} has {len(distinct)} different values ({list_values(distinct)}), two were "
            f"expected; give {advice if is_number(values) else 'positive= (one of the values)'}."
        )
    for value in distinct:
        if str(value).strip().lower() in POSITIVE_WORDS or (is_number(values) and value == 1):
            return value
    return min(distinct, key=lambda value: (int(find_equal(values, value).sum()), str(value)))
