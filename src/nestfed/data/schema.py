"""What several holders of one kind of table agree on: a file that people read and sign.

A schema names the columns with their kinds, the levels of categories, the label, the groups in their order and the
size of a batch. It holds no statistics: no mean, no count, no extreme value that people have not chosen to write.
It decides what would otherwise be guessed from a file, so that every site makes the same features of its own rows.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tomli_w

from nestfed.core.settings import UserError, suggest

NUMBER, CATEGORY, CONSTANT, LEFT_OUT = "number", "category", "constant", "left out"
KINDS = {
    NUMBER: "numbers",
    CATEGORY: "categories",
    CONSTANT: "the same number in every row, or nothing at all",
    LEFT_OUT: "a column that is no feature",
}
MISSING = "missing"  # the name of the group or category of all missing values
HEADER = """\
# What all sites agree on. It says how a column is read, not what its values are like: no means, no counts.
# kind      number, category, constant (one number in every row: no feature), or left out
# levels    of a category; a value that is not among them is counted and encoded as zeros
# gaps      some values are missing, and a column of its own marks them
# range     of a number, chosen by people and not read off the data: only --features piecewise or minimax-fair needs it
"""


@dataclasses.dataclass(frozen=True)
class ColumnRule:
    """How one column is read."""

    kind: str
    levels: tuple[str, ...] = ()  # of a category
    value: float | None = None  # of a constant; None: it holds nothing at all
    gaps: bool = False
    range: tuple[float, float] | None = None

    @property
    def is_empty(self) -> bool:
        return self.kind == CONSTANT and self.value is None

    @property
    def all_levels(self) -> tuple[str, ...]:
        """With that of the gaps."""
        return tuple(sorted({*self.levels, MISSING} if self.gaps else self.levels))

    def describe(self) -> str:
        if self.is_empty:
            return "empty"
        return f"always {self.value:g}" if self.kind == CONSTANT else f"of the kind {self.kind!r}"


@dataclasses.dataclass(frozen=True)
class Schema:
    """What decides how a table is read."""

    label: str
    columns: Mapping[str, ColumnRule]  # in the order of the features; without the label
    positive: str | float | bool | None = None  # the value of the label that counts as 1
    threshold: float | None = None  # or: 1 if the label exceeds this number
    group: str | None = None  # a column, or several joined by "+"
    groups: tuple[str, ...] = ()  # their names, in the order of their numbers
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if (self.positive is None) == (self.threshold is None):
            raise UserError("a schema needs positive= (the value of the label that counts as 1) or threshold=.")
        if (self.group is None) != (not self.groups):
            raise UserError("a schema with a group= needs the names of the groups in groups=[...], and the reverse.")

    def to_toml(self) -> str:
        """As people read it."""
        head: dict[str, Any] = {"label": self.label}
        for name in ("positive", "threshold", "group", "batch_size"):
            if getattr(self, name) is not None:
                head[name] = getattr(self, name)
        if self.groups:
            head["groups"] = list(self.groups)
        rules = {name: _write_rule(rule) for name, rule in self.columns.items()}
        return HEADER + "\n" + tomli_w.dumps(head | {"columns": rules}, indent=2)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise UserError(f"there is no schema {path}; `nestfed site schema --data my.csv` drafts one.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UserError(f"the schema {path} is not a readable TOML file: {error}.") from None
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Mapping[str, Any], name: str) -> Self:
        """From what a TOML file says."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in content:
            if key not in known:
                raise UserError(f"{name}: there is no entry {key!r} of a schema{suggest(key, known)}")
        if not isinstance(content.get("label"), str) or not isinstance(content.get("columns"), Mapping):
            raise UserError(f"{name}: a schema has a label and a table [columns.NAME] for every column.")
        _check_kinds(name, content, {"group": str, "groups": list, "batch_size": int, "threshold": (int, float)})
        if content.get("batch_size", 1) < 1:
            raise UserError(f"{name}: batch_size={content['batch_size']} must be 1 or more.")
        rules = {column: _read_rule(rule, f"{name}: column {column!r}") for column, rule in content["columns"].items()}
        if content["label"] in rules:
            raise UserError(f"{name}: the label {content['label']!r} is listed among the columns; take it out there.")
        return cls(**{**content, "columns": rules, "groups": tuple(map(str, content.get("groups", ())))})


def _check_kinds(name: str, content: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for key, kind in kinds.items():
        value = content.get(key)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise UserError(f"{name}: {key}={value!r} was given, which is of the wrong kind.")


def _write_rule(rule: ColumnRule) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": rule.kind}
    if rule.kind == CATEGORY:
        said["levels"] = list(rule.levels)
    if rule.value is not None:
        said["value"] = rule.value
    if rule.gaps:
        said["gaps"] = True
    if rule.range is not None:
        said["range"] = list(rule.range)
    return said


def _read_rule(said: Any, where: str) -> ColumnRule:
    known = [field.name for field in dataclasses.fields(ColumnRule)]
    if not isinstance(said, Mapping) or said.get("kind") not in KINDS:
        raise UserError(f"{where} needs a kind: {', '.join(KINDS)}.")
    for key in said:
        if key not in known:
            raise UserError(f"{where}: there is no entry {key!r}{suggest(key, known)}")
    _check_kinds(where, said, {"levels": list, "value": (int, float), "gaps": bool, "range": list})
    if said["kind"] == CATEGORY and not said.get("levels"):
        raise UserError(f"{where} is a category and needs its levels.")
    ends = said.get("range")
    is_end = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if ends is not None and not (len(ends) == 2 and all(map(is_end, ends)) and ends[0] < ends[1]):
        raise UserError(f"{where}: range={ends!r} was given; write two numbers, the smaller one first.")
    return ColumnRule(
        kind=said["kind"],
        levels=tuple(map(str, said.get("levels", ()))),
        value=None if said.get("value") is None else float(said["value"]),
        gaps=said.get("gaps", False),
        range=None if ends is None else (float(ends[0]), float(ends[1])),
    )


# ------------------------------------------------------------------------------------------------- agreement


def merge_schemas(drafts: Mapping[str, Schema]) -> Schema:
    """One schema of several drafts, by the name of each: levels, groups and gaps are joined; where drafts cannot both
    be right, one line says so."""
    (first, model), *others = drafts.items()
    for name, other in others:
        for entry in ("label", "positive", "threshold", "group"):
            mine, theirs = getattr(model, entry), getattr(other, entry)
            if mine != theirs:
                raise UserError(f"{entry} is {mine!r} in {first} and {theirs!r} in {name}; make it the same in both.")
        for has, had, lacks, lacked in ((first, model, name, other), (name, other, first, model)):
            for column in had.columns:
                if column not in lacked.columns:
                    near = suggest(column, lacked.columns, " (nearest: {!r})", "")
                    raise UserError(f"{lacks} has no column {column!r}{near}, but {has} has; sites need the same ones.")
    columns = {
        column: _merge_rules(column, {name: draft.columns[column] for name, draft in drafts.items()})
        for column in model.columns
    }
    sizes = [draft.batch_size for draft in drafts.values() if draft.batch_size is not None]
    return dataclasses.replace(
        model,
        columns=columns,
        groups=tuple(sorted({group for draft in drafts.values() for group in draft.groups})),
        batch_size=max(sizes, default=None),
    )


def _merge_rules(column: str, rules: Mapping[str, ColumnRule]) -> ColumnRule:
    telling = {name: rule for name, rule in rules.items() if not rule.is_empty}
    gaps = any(rule.gaps or rule.is_empty for rule in rules.values())
    if not telling:
        return ColumnRule(CONSTANT)
    as_number = (NUMBER, CONSTANT)
    kind_of = lambda rule: NUMBER if rule.kind in as_number else rule.kind
    first = next(iter(telling))
    for name, rule in telling.items():
        if kind_of(rule) != kind_of(telling[first]):
            raise UserError(
                f"column {column!r} is {telling[first].describe()} in {first} and {rule.describe()} in {name}; agree "
                "on one kind and write it into both."
            )
    ranges = {rule.range for rule in telling.values() if rule.range is not None}
    if len(ranges) > 1:
        raise UserError(f"column {column!r} has the ranges {sorted(ranges)}; agree on one.")
    values = {rule.value for rule in telling.values()}
    kind = telling[first].kind
    if kind in as_number:
        kind = CONSTANT if len(values) == 1 and None not in values else NUMBER
    return ColumnRule(
        kind=kind,
        levels=_join_levels(rule.levels for rule in telling.values()),
        value=values.pop() if kind == CONSTANT else None,
        gaps=gaps and kind != LEFT_OUT,
        range=ranges.pop() if ranges else None,
    )


def _join_levels(several: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({level for levels in several for level in levels}))
