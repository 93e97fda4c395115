"""An option: one described field of a record, and how Python, a TOML file and a command line say it.

Everything about an option follows from its field: `list_options` reads a record's fields, and flags, help, checks,
files and commands are made from what it finds. Nothing here imports JAX or pandas: help must come at once.
"""

import dataclasses
import functools
import numbers
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from nestfed.core.settings import Rules, UserError, find_broken_range, setting

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Mapping: "a table"}


def option(
    description: str,
    *,
    panel: str,
    default: Any = None,
    more: str = "",
    usual: Any = None,
    short: str | None = None,
    convert: Callable[[Any], Any] | None = None,
    **rules: Unpack[Rules],
) -> Any:
    """A `setting` that a user gives by name.

    panel     under which heading help shows it
    more      whole sentences for help, beyond the description
    usual     where the default is None: what happens then, as a value or text, or as a function of the task's record
    short     a second, short flag
    convert   the last step of reading a value
    """
    plain = setting(description, default=default, **rules)
    said = {"panel": panel, "more": more, "usual": usual, "short": short, "convert": convert}
    return dataclasses.field(default=plain.default, metadata={**plain.metadata, **said})


@dataclasses.dataclass(frozen=True)
class Option:
    """One described field of a record of options."""

    name: str
    hint: Any  # its type
    default: Any
    description: str
    panel: str
    more: str
    usual: Any
    short: str | None
    convert: Callable[[Any], Any] | None
    rules: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def off_flag(self) -> str:
        """What turns a switch off."""
        return f"--no-{self.name.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All that a command line may write for it, beside a short one."""
        return (self.flag, self.off_flag) if self.is_switch else (self.flag,)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have, without None."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        return tuple(kind for kind in (typing.get_args(self.hint) if union else (self.hint,)) if kind is not type(None))

    @property
    def is_switch(self) -> bool:
        return self.kinds == (bool,)

    @property
    def entries(self) -> Any:
        """The type of the entries where a value may be a list."""
        return next((typing.get_args(kind)[0] for kind in self.kinds if typing.get_origin(kind) is tuple), None)

    @property
    def help(self) -> str:
        """The description in sentences, with all that a user must know."""
        said = [self.description, self.limits, "may be repeated" if self.is_repeated else ""]
        sentences = [f"{text[0].upper()}{text[1:].rstrip('.')}." for text in said if text]
        return " ".join([*sentences, self.more]).strip()

    @property
    def is_table(self) -> bool:
        return any(typing.get_origin(kind) is Mapping for kind in self.kinds)

    @property
    def is_repeated(self) -> bool:
        """Is the flag given once per entry?"""
        return self.is_table or self.entries is str

    @property
    def limits(self) -> str:
        """The range of a number, in words."""
        words = ("above", "at_least", "at_most", "below")
        said = [f"{word.replace('_', ' ')} {self.rules[word]:g}" for word in words if self.rules.get(word) is not None]
        return " and ".join(said)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.rules["choices"] or ())

    def find_usual(self, task: Any) -> str:
        """What happens where nothing is said, if that is no default."""
        usual = self.usual(task) if callable(self.usual) else self.usual
        return "" if usual is None else str(usual)

    def read(self, value: Any) -> Any:
        """A value as Python or a file says it, checked and converted."""
        if value is None and self.default is None:
            return None
        fitting: Any = next((found for kind in self.kinds if (found := _fit(value, kind)) is not None), None)
        if fitting is None:
            wanted = [WORDS.get(typing.get_origin(kind) or kind, "a list") for kind in self.kinds]
            raise UserError(f"{self.name}={value!r} was given; it must be {' or '.join(wanted)}.")
        ranged = bool(self.choices) or isinstance(fitting, (int, float)) and not isinstance(fitting, bool)
        problem = find_broken_range(fitting, self.rules) if ranged else None
        if problem:
            raise UserError(
                f"{self.name}={fitting!r} was given, but {self.name} ({self.description}) must be {problem}."
            )
        return fitting if self.convert is None else self.convert(fitting)

    def parse(self, said: Any) -> Any:
        """A value as the words of a command line say it, for `read`."""
        if self.is_table:
            return {key: parse_value(value) for key, value in map(parse_pair, said)}
        if self.entries is int and isinstance(said, str):
            words = [word.strip() for word in said.split(",") if word.strip()]
            if not words or not all(word.isdecimal() for word in words):
                raise UserError(
                    f"{self.flag} {said} was given; write a whole number, or a list such as 0,3,7 (of one entry: 7,)."
                )
            return [int(word) for word in words] if "," in said else int(words[0])
        return parse_value(said) if isinstance(said, str) and str not in self.kinds else said

    def words(self, value: Any) -> list[str]:
        """What says the value on a command line."""
        if isinstance(value, bool):
            return [self.flag if value else self.off_flag]
        if self.is_table:
            return [word for key, one in value.items() for word in (self.flag, f"{key}={one}")]
        if self.entries is int and not isinstance(value, int):
            entries = list(value)
            listed = ",".join(map(str, entries))
            return [self.flag, listed + "," * (len(entries) == 1)]  # "7," is a list, "7" a number
        several: Any = value if self.is_repeated else [value]
        return [word for one in several for word in (self.flag, str(one))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionSet:
    """A record of options, which are read and checked when it is made."""

    def __post_init__(self) -> None:
        for name, one in list_options(type(self)).items():
            object.__setattr__(self, name, one.read(getattr(self, name)))


@functools.cache
def list_options(record: type) -> dict[str, Option]:
    """The options of a record by their names, in the order of its fields."""
    hints = typing.get_type_hints(record)
    about = [field.name for field in dataclasses.fields(Option) if field.name not in ("name", "hint", "default")]
    return {
        field.name: Option(field.name, hints[field.name], field.default, **{key: field.metadata[key] for key in about})
        for field in dataclasses.fields(record)
        if "panel" in field.metadata
    }


def _fit(value: Any, kind: Any) -> Any:
    """The value as one of this kind, or None."""
    origin = typing.get_origin(kind) or kind
    if isinstance(value, bool) or origin is bool:
        return value if isinstance(value, bool) and origin is bool else None
    if origin is int:
        return int(value) if isinstance(value, numbers.Integral) else None
    if origin is float:
        return float(value) if isinstance(value, numbers.Real) else None
    if origin is str:
        return str(value) if isinstance(value, (str, numbers.Real, Path)) else None
    if origin is Mapping:
        return value if isinstance(value, Mapping) else None
    (entry, *_) = typing.get_args(kind)
    if isinstance(value, Sequence) and not isinstance(value, str):
        entries = [_fit(one, entry) for one in value]
        return None if None in entries else tuple(entries)
    alone = _fit(value, str) if entry is str else None  # one of what may be several
    return None if alone is None else (alone,)


# ------------------------------------------------------------------------------------------------- files and words


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not a readable TOML file: {error}.") from error


def merge_file(path: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file, over which flags win; one of them is the task."""
    if path is None:
        return dict(flags)
    if not path.endswith(".toml"):
        raise UserError(f"{path!r} was given where a TOML file may stand; a task comes before all options.")
    file, task = read_settings(path), flags["task"]
    if file.get("task", task) != task:
        raise UserError(
            f"{path} is about the task {file['task']!r}, and this command about {task!r}; write the file in place of "
            "the task, before all options."
        )
    both = file.get("set", {})
    if isinstance(both, Mapping):
        both = flatten(both) | flags.get("set", {})
    return {**file, **flags, "set": both}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    dotted = {}
    for key, value in settings.items():
        dotted |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return dotted


def parse_pair(text: str) -> tuple[str, str]:
    """(key, value) of key=value."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UserError(f"{text!r} was given; write key=value, for example lr=0.1.")
    return key.strip(), value.strip()


def parse_value(text: str) -> Any:
    """A number or switch if it reads like one, otherwise the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)
