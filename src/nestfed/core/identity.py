"""Telling whether two things are the same in two processes: numbers, records, and functions with all that they use.

A checkpoint must never resume under another loss, schedule or optimiser. Functions have no value to compare, and their
addresses differ from process to process; what they do is decided by their code, their defaults, the variables that they
close over and the globals that they name. All of that is hashed. Code of installed packages counts by name and version,
that of this library's classes by name and content. What cannot be read so is refused, never guessed.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import jax
import numpy as np

from nestfed.core.settings import UserError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice)


class Unidentifiable(UserError):
    """Something that cannot be told apart from another thing of its kind."""


def identify(value: Any, name: str = "it") -> str:
    """A hash of everything that decides what this value is or does; `name` is what to call it in an error."""
    reader = _Reader(name)
    reader.read(value)
    return reader.digest.hexdigest()


class _Reader:
    """One pass over a value and all that hangs on it."""

    def __init__(self, name: str):
        self.digest = hashlib.sha256()
        self.path = [name]  # how the present part was reached
        self.met: dict[int, int] = {}
        self.kept: list[Any] = []  # an address names a thing only while it lives

    def put(self, *parts: Any) -> None:
        for part in parts:
            content = part if isinstance(part, bytes) else str(part).encode()
            self.digest.update(len(content).to_bytes(8, "big") + content)

    def part(self, name: str, value: Any) -> None:
        """Something that belongs to what is being read."""
        self.put(name)
        self.path.append(name)
        self.read(value)
        self.path.pop()

    def read(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.put(type(value).__name__, repr(value))
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
            self.array(value)
        elif id(value) in self.met:  # a function that calls itself, or the same thing twice
            self.put("met before", self.met[id(value)])
        else:
            self.met[id(value)] = len(self.met)
            self.kept.append(value)
            self.structure(value)

    def array(self, value: Any) -> None:
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            self.put("key", jax.random.key_impl(value))
            value = jax.random.key_data(value)
        array = np.asarray(value)
        self.put("array", array.dtype.str if array.dtype.names is None else array.dtype, array.shape)
        if array.dtype.hasobject:
            self.several(array.ravel().tolist())
        else:
            self.put(np.ascontiguousarray(array).tobytes())

    def several(self, values: Iterable[Any]) -> None:
        for i, value in enumerate(values):
            self.part(f"[{i}]", value)

    def structure(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, type):
            self.kind(value)
        elif isinstance(value, types.MethodType):
            self.put("method")
            self.part("of", value.__self__)
            self.part(value.__func__.__name__, value.__func__)
        elif isinstance(value, types.ModuleType):
            self.module(value)
        elif isinstance(value, (functools.partial, jax.tree_util.Partial)):
            self.put("partial")
            self.several([value.func, value.args, value.keywords])
        elif isinstance(value, (tuple, list)):
            self.put(type(value).__name__, len(value))
            self.several(value)
        elif isinstance(value, dict):
            self.put("dict", len(value))
            for key in sorted(value, key=repr):
                self.part(repr(key), value[key])
        elif isinstance(value, (set, frozenset)):
            self.put(type(value).__name__, *sorted(identify(one, self.path[0]) for one in value))
        elif isinstance(value, (np.dtype, PurePath, jax.tree_util.PyTreeDef)):
            self.words(value)
        elif isinstance(value, enum.Enum):
            self.put("enum", type(value).__qualname__, value.name)
        elif hasattr(value, "__wrapped__"):  # jax.jit(f), functools.cache(f), ...
            self.put("wrapped", type(value).__qualname__)
            self.part("the function inside", value.__wrapped__)
        elif _is_of_a_library(value) and callable(value) and hasattr(value, "__name__"):  # in C, or a ufunc
            self.put("library", _module_of(value), value.__name__, _version(_module_of(value)))
        elif hasattr(value, "__array__"):
            self.array(np.asarray(value))
        elif dataclasses.is_dataclass(value):
            self.part("class", type(value))
            for field in dataclasses.fields(value):
                self.part(field.name, getattr(value, field.name))
        elif hasattr(value, "__dict__") and not isinstance(value, types.GeneratorType):
            self.part("class", type(value))
            for name in sorted(vars(value)):
                self.part(name, vars(value)[name])
        else:
            raise Unidentifiable(
                f"{' > '.join(self.path)} is a {type(value).__name__}, which cannot be told apart from another one: a "
                "checkpoint could resume with something else. Use functions, arrays and records (nestfed.struct) in "
                "its place, or run without a checkpoint."
            )

    def words(self, value: Any) -> None:
        text = str(value)
        if " at 0x" in text:
            raise Unidentifiable(
                f"{' > '.join(self.path)}: {text} has no name of its own; a checkpoint cannot know it."
            )
        self.put(type(value).__name__, text)

    def function(self, function: types.FunctionType) -> None:
        self.put("function")
        self.code(function.__code__, function.__doc__)
        self.part("defaults", function.__defaults__)
        self.part("keyword defaults", function.__kwdefaults__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.part(name, _contents(cell))
        if _is_of_a_library(function) or _is_ours(function):
            return
        for name in sorted(set(_globals_of(function.__code__))):
            if name in function.__globals__:
                self.part(name, function.__globals__[name])

    def code(self, code: types.CodeType, doc: str | None = None) -> None:
        self.put("code", code.co_code, code.co_argcount, code.co_kwonlyargcount, code.co_flags, *code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant)
            elif not (doc is not None and constant == doc):
                self.part("constant", constant)

    def kind(self, kind: type) -> None:
        if _is_of_a_library(kind) and not _is_ours(kind):
            self.put("class", kind.__module__, kind.__qualname__, _version(kind.__module__))
            return
        self.put("class", kind.__qualname__)
        if hasattr(kind, "_fields"):  # a named tuple
            self.put(repr(sorted(getattr(kind, "__annotations__", {}).items())))
            return
        for base in kind.__bases__:
            self.part("base", base)
        for name, member in sorted(vars(kind).items()):
            if name not in _NOT_CONTENT and not isinstance(member, _SLOTS):
                self.part(name, _inside(member))

    def module(self, module: types.ModuleType) -> None:
        self.put("module", module.__name__)
        if _is_of_a_library(module) or _is_ours(module):
            self.put(_version(module.__name__))
        elif module.__file__ is not None:
            self.put(Path(module.__file__).read_bytes())


_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NOT_CONTENT = {
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__dataclass_fields__",
    "__dataclass_params__", "__match_args__", "__abstractmethods__", "_abc_impl", "__qualname__", "__firstlineno__",
    "__static_attributes__", "__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__",
    "__orig_bases__", "__parameters__",
}  # fmt: skip


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned to it yet
        return "an empty cell"


def _inside(member: Any) -> Any:
    """What a class's method, property and so on holds."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget, member.fset
    if isinstance(member, functools.cached_property):
        return member.func
    return member


def _globals_of(code: types.CodeType) -> Iterable[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _module_of(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", None)
    return module if isinstance(module, str) else ""


def _is_ours(value: Any) -> bool:
    return _top(_module_of(value)) == "nestfed"


def _is_of_a_library(value: Any) -> bool:
    """Does it come with Python or with an installed package?"""
    return _is_library(_top(_module_of(value)))


@functools.cache
def _is_library(top: str) -> bool:
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return False
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(Path(file).resolve().is_relative_to(Path(folder).resolve()) for folder in folders if folder)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(_top(module)), "__version__", ""))
