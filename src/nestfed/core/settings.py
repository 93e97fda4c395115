"""Records of settings: what an algorithm, a problem or a task is made of, and what is wrong with one.

JAX is imported where a record meets it and no sooner: the command line describes its options with `setting` too, and
its help must not wait for JAX.
"""

import dataclasses
import difflib
import math
import numbers
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict, TypeVar, dataclass_transform


class UserError(ValueError):
    """A mistake in what the user gave: the message says what was given, what was expected and what to do."""

    exit_code: ClassVar[int] = 1  # of a command that ends with it

    def __str__(self) -> str:
        """The message in one line: what was given may hold line breaks."""
        return " ".join(super().__str__().splitlines())


def summarise_error(error: Exception) -> str:
    """What went wrong, to be told within a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def suggest(name: str, known: Iterable[str], text: str = "; did you mean {!r}?", otherwise: str = ".") -> str:
    """The text with the known name that was probably meant, whatever its case; `otherwise` where none is like it."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return text.format(lower[found[0]]) if found else otherwise


class Rules(TypedDict, total=False):
    """What a setting may be, for calls that hand it on to `setting`."""

    above: float | None
    at_least: float | None
    at_most: float | None
    below: float | None
    choices: Sequence[Any] | None
    static: bool


def setting(
    description: str,
    *,
    default: Any = dataclasses.MISSING,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] | None = None,
    part: type | None = None,
    static: bool = False,
) -> Any:
    """A described hyper-parameter with its admissible range.

    Floats are leaves of the program's input: they can be changed and swept without compiling again. `static=True`
    marks what belongs to the program itself (numbers of steps, switches). `part` is the class of a setting that is a
    record of settings itself.
    """
    rules = {"above": above, "at_least": at_least, "at_most": at_most, "below": below, "choices": choices, "part": part}
    return dataclasses.field(default=default, metadata={"description": description, "static": static, "rules": rules})


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that belongs to the program (a change means a new compilation), not to its inputs."""
    return dataclasses.field(default=default, metadata={"static": True})


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting, static))
def struct(cls: type[T]) -> type[T]:
    """A frozen record with keyword arguments that JAX can pass through jit, vmap and scan."""
    import jax

    cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    fixed = [field.name for field in fields if field.metadata.get("static")]
    leaves = [field.name for field in fields if field.name not in fixed]
    values = lambda record, names: tuple(getattr(record, name) for name in names)
    keyed = lambda record: tuple((jax.tree_util.GetAttrKey(name), getattr(record, name)) for name in leaves)
    # Not register_dataclass: with it (jax 0.10) records of different classes have equal tree structures, and jit may
    # run one algorithm's program for another.
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda record: (keyed(record), values(record, fixed)),
        lambda aux, children: cls(**dict(zip(leaves, children, strict=True)), **dict(zip(fixed, aux, strict=True))),
        lambda record: (values(record, leaves), values(record, fixed)),
    )
    return cls


def check_registered(record: Any) -> None:
    """A subclass without @struct looks right and fails deep inside JAX, and so does a field that is no number: say so
    before anything is traced."""
    import jax
    import numpy as np

    if any(leaf is record for leaf in jax.tree.leaves(record)):
        raise UserError(f"{type(record).__name__} is not registered; write @nestfed.struct above the class.")
    hints = typing.get_type_hints(type(record))
    for field in dataclasses.fields(record):
        if field.metadata.get("static"):
            continue
        value = getattr(record, field.name)
        where = f"{type(record).__name__}: the field {field.name}={value!r}"
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, bool) or not isinstance(leaf, (int, float, complex, np.number, np.ndarray, jax.Array)):
                raise UserError(
                    f"{where} holds {leaf!r}, which is no number; what belongs to the program (switches, texts, "
                    f"functions) is declared so: {field.name}: ... = nestfed.static(default=...)."
                )
            if isinstance(leaf, int) and leaf is value and hints.get(field.name) is int:
                raise UserError(
                    f"{where} is a whole number that the program sees as an input, not as a constant. Write "
                    f"{field.name}: int = nestfed.static(default={value}) for a size or a count, or {float(value)} and "
                    "the type float for a number that may change."
                )


def validate(record: Any) -> None:
    """Refuse settings outside their range. Traced values are left alone: they were checked before they were traced."""
    from jax.core import Tracer

    for field in dataclasses.fields(record):
        value, rules = getattr(record, field.name), field.metadata.get("rules")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            validate(value)
        if rules is None or isinstance(value, Tracer) or (callable(value) and rules["part"] is None):
            continue
        if value is None and field.default is None:
            continue
        problem = _find_broken_rule(value, rules, static=field.metadata["static"])
        if problem:
            raise UserError(
                f"{type(record).__name__}: {field.name}={value!r} was given, but {field.name} "
                f"({field.metadata['description']}) must be {problem}."
            )


def _find_broken_rule(value: Any, rules: Mapping[str, Any], *, static: bool) -> str | None:
    if rules["choices"] is not None:
        return find_broken_range(value, rules)
    if rules["part"] is not None:
        part = rules["part"]
        records = [f"{kind.__name__}(...)" for kind in part.__subclasses__() if hasattr(kind, "__dataclass_fields__")]
        wanted = f"a {part.__name__}" + (f": {' or '.join(records)}" if records else "")
        return None if isinstance(value, part) else wanted
    if isinstance(value, str):
        return "a number or a schedule, not text"
    if static and isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "a number or a schedule"
    if static and not isinstance(value, numbers.Integral):
        return "a whole number"
    return find_broken_range(number, rules)


def find_broken_range(value: Any, rules: Mapping[str, Any]) -> str | None:
    """What a value must be that is none of the choices of a setting, or a number outside its range."""
    if rules["choices"] is not None:
        return None if value in rules["choices"] else "one of " + ", ".join(map(repr, rules["choices"]))
    number = float(value)
    if math.isnan(number):
        return "a number, not NaN"
    if rules["above"] is not None and not number > rules["above"]:
        return f"greater than {rules['above']}"
    if rules["at_least"] is not None and not number >= rules["at_least"]:
        return f"at least {rules['at_least']}"
    if rules["at_most"] is not None and not number <= rules["at_most"]:
        return f"at most {rules['at_most']}"
    if rules["below"] is not None and not number < rules["below"]:
        return f"below {rules['below']}"
    return None
