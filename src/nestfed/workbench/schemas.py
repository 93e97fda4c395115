"""Schemas as people make them: drafted at every site from its own file, and merged by one of them."""

from collections.abc import Sequence
from pathlib import Path

from nestfed.core.settings import UserError
from nestfed.data import read_table
from nestfed.data.schema import CATEGORY, Schema, merge_schemas
from nestfed.data.table import draft_schema
from nestfed.workbench.task_options import TabularOptions


def write_draft(
    data: str | Path,
    out: Path,
    *,
    label: str,
    group: str | None = None,
    positive: str | None = None,
    threshold: float | None = None,
    drop: Sequence[str] = (),
) -> list[str]:
    """Draft a schema from a file of one's own; what whoever drafted it must know, line by line."""
    _check_free(out)
    table = read_table(data, label=label, group=group, positive=positive, threshold=threshold, drop=drop, alone=False)
    schema = draft_schema(table, TabularOptions().batch_rows(len(table.frame)))
    out.write_text(schema.to_toml(), encoding="utf-8")
    return [*table.notes, *describe_schema(schema)]


def write_agreement(drafts: Sequence[Path], out: Path) -> list[str]:
    """Merge drafts into the schema of all sites."""
    _check_free(out)
    if len({str(path) for path in drafts}) < max(2, len(drafts)):
        raise UserError("several different drafts are merged: give one per site.")
    schema = merge_schemas({str(path): Schema.read(path) for path in drafts})
    if len(schema.groups) == 1:
        raise UserError(
            f"all drafts have the one group {schema.groups[0]!r} of {schema.group!r} only; groups are compared: choose "
            "another column, or draft without a group."
        )
    out.write_text(schema.to_toml(), encoding="utf-8")
    return describe_schema(schema)


def describe_schema(schema: Schema) -> list[str]:
    """What leaves the building with it."""
    levels = {name: len(rule.levels) for name, rule in schema.columns.items() if rule.kind == CATEGORY}
    names = ", ".join(f"{name} ({number})" for name, number in levels.items())
    return [
        f"{len(schema.columns)} columns; the values of these are listed, as levels: {names or 'none'}.",
        "Read it before you give it away: it has names and values of columns, and no statistics.",
    ]


def _check_free(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} is there already; name another file with --out, or remove it.")
