"""Telling whether two things are the same in two processes: numbers, records, and functions with all that they use.

A checkpoint must never resume under another loss, schedule or optimiser. Functions have no value to compare, and their
addresses differ from process to process; what they do is decided by their code, their defaults, the variables that they
close over and the globals that they name, through the user's own modules. All of that is hashed. Objects are what their
class says and what they hold: attributes, slots and items, as pickling would write them down. Code of installed
packages counts by name and version, that of this library's classes by name and content. What cannot be read so is
refused, never guessed.
"""

import collections
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.metadata
import sys
import sysconfig
import types
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

import jax
import numpy as np

from nestfed.core.settings import UserError

_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice}
_RULES = ("jvp", "fwd", "bwd", "nondiff_argnums")  # what jax.custom_jvp and custom_vjp keep beside the function


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
        self.entered: set[tuple[types.ModuleType, str]] = set()  # (a module of the user's, name in it)
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
        if type(value) in _PLAIN:
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
        elif _is_method_in_c(value):
            self.put("method", value.__name__)
            self.part("of", value.__self__)
        elif isinstance(value, types.ModuleType):
            self.module(value, ())
        elif type(value) in (functools.partial, jax.tree_util.Partial):
            self.put("partial")
            self.several([value.func, value.args, value.keywords])
        elif type(value) in (tuple, list):
            self.put(type(value).__name__, len(value))
            self.several(value)
        elif type(value) is dict:
            self.put("dict", len(value))
            for key in sorted(value, key=repr):
                self.part(repr(key), value[key])
        elif type(value) in (set, frozenset):
            self.put(type(value).__name__, *sorted(identify(one, self.path[0]) for one in value))
        elif isinstance(value, (np.dtype, PurePath, jax.tree_util.PyTreeDef)):
            self.words(value)
        elif isinstance(value, enum.Enum):
            self.put("enum", type(value).__qualname__, value.name)
            self.part("value", value.value)
        elif not _is_of_a_library(type(value)):  # whatever module it names: a decorator may have copied a function's
            self.object(value)
        elif hasattr(value, "__wrapped__"):  # jax.jit(f), functools.cache(f), ...
            self.put("wrapped", type(value).__qualname__)
            self.part("the function inside", value.__wrapped__)
            self.several([getattr(value, name, None) for name in _RULES])
        elif isinstance(value, types.BuiltinFunctionType) or _is_named_by_its_module(value):  # in C, or a ufunc
            self.put("library", _find_module(value), value.__name__, _find_version(_find_module(value)))
        elif hasattr(value, "__array__"):
            self.array(np.asarray(value))
        else:
            self.object(value)

    def object(self, value: Any) -> None:
        """Its class and all that it holds. What is derived from the rest and kept (cached properties) is left out."""
        self.part("class", type(value))
        try:
            reduced = _take_apart(value)
        except Exception as error:
            raise self.refuse(value) from error
        if isinstance(reduced, str):  # a name in a module, where another thing may stand
            if getattr(sys.modules.get(_find_module(value)), reduced, None) is not value:
                raise self.refuse(value)
            self.put("named", _find_module(value), reduced)
            return
        maker, arguments, state, items, entries = [*reduced, None, None, None][:5]
        self.several([maker, arguments, list(items or ())])
        self.read(dict(entries or ()))
        for attributes in state if isinstance(state, tuple) else (state,):  # ordinary attributes, and those in slots
            if not isinstance(attributes, dict):
                self.part("state", attributes)
                continue
            for name in sorted(attributes, key=str):
                if not isinstance(getattr(type(value), str(name), None), functools.cached_property):
                    self.part(str(name), attributes[name])

    def refuse(self, value: Any) -> Unidentifiable:
        return Unidentifiable(
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
        # Where its code is at home: a decorator may have given it another's __module__.
        home = _find_top(str(function.__globals__.get("__name__", "")))
        of_library = _is_library(home) or home == "nestfed"
        mark = lambda value: "a mark of the library's" if of_library and type(value) is object else value
        self.put("function")
        self.code(function.__code__, function.__doc__)
        self.part("defaults", [mark(value) for value in function.__defaults__ or ()])
        self.part("keyword defaults", {name: mark(value) for name, value in (function.__kwdefaults__ or {}).items()})
        names = _list_names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.follow(name, mark(_read_cell(cell)), names)
        if of_library:
            return
        self.part("attributes", vars(function))
        for name in sorted(set(_list_globals(function.__code__))):
            if name in _REACHING_ANYTHING and name not in function.__globals__:
                raise Unidentifiable(
                    f"{' > '.join(self.path)} calls {name}(), by which it may reach anything; a checkpoint cannot know "
                    "what. Write the names out, or run without a checkpoint."
                )
            if name in function.__globals__:
                self.follow(name, function.__globals__[name], names)
        for name in sorted(set(_list_imports(function.__code__))):
            try:
                self.follow(name, importlib.import_module(name, function.__globals__.get("__package__")), names)
            except ImportError:
                self.put("not there", name)

    def follow(self, name: str, value: Any, names: Sequence[str]) -> None:
        """What a function reaches by this name; `names` are all that its code mentions."""
        if not isinstance(value, types.ModuleType):
            self.part(name, value)
            return
        self.put(name)
        self.path.append(name)
        self.module(value, names)
        self.path.pop()

    def code(self, code: types.CodeType, doc: str | None = None) -> None:
        self.put("code", code.co_code, code.co_argcount, code.co_kwonlyargcount, code.co_flags, *code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant)
            elif not (doc is not None and constant == doc):
                self.part("constant", constant)

    def kind(self, kind: type) -> None:
        if _is_of_a_library(kind) and not _is_ours(kind):
            self.put("class", kind.__module__, kind.__qualname__, _find_version(kind.__module__))
            return
        self.put("class", kind.__qualname__)
        made_by_python: set[str] = set()
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            made_by_python = _MADE_OF_TUPLES | set(getattr(kind, "_fields", ()))
            self.put(repr(sorted(getattr(kind, "__annotations__", {}).items())))
        elif dataclasses.is_dataclass(kind) and "__dataclass_params__" in vars(kind):
            made_by_python = _MADE_OF_DATACLASSES
            makers = {field.name: field.default_factory for field in dataclasses.fields(kind)}
            self.read({name: maker for name, maker in makers.items() if maker is not dataclasses.MISSING})
        for base in kind.__bases__:
            self.part("base", base)
        if not _is_of_a_library(type(kind)):
            self.part("metaclass", type(kind))
        for name, member in sorted(vars(kind).items()):
            if name not in _NOT_CONTENT | made_by_python and not isinstance(member, _SLOTS):
                self.part(name, _open_member(member))

    def module(self, module: types.ModuleType, names: Sequence[str]) -> None:
        """A module of a package by its version; one of the user's by its file, and by what these names stand for in it
        now, which may have come from other files or have been set by a program."""
        self.put("module", module.__name__)
        if _is_of_a_library(module) or _is_ours(module):
            self.put(_find_version(module.__name__))
            return
        if (module, "") not in self.entered and getattr(module, "__file__", None) is not None:
            self.put(Path(str(module.__file__)).read_bytes())
        self.entered.add((module, ""))
        for name in names:
            if name in vars(module) and (module, name) not in self.entered:
                self.entered.add((module, name))
                self.follow(name, vars(module)[name], names)


_REACHING_ANYTHING = {"eval", "exec", "globals", "__import__"}
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NOT_CONTENT: set[str] = set(
    """
    __module__ __doc__ __dict__ __weakref__ __annotations__ __abstractmethods__ _abc_impl __qualname__
    __firstlineno__ __static_attributes__ __orig_bases__ __parameters__ __slots__ __slotnames__
    """.split()
)
_MADE_OF_DATACLASSES: set[str] = set(
    """
    __dataclass_fields__ __dataclass_params__ __match_args__ __init__ __repr__ __eq__ __hash__ __setattr__
    __delattr__ __replace__ __getstate__ __setstate__
    """.split()
)
_MADE_OF_TUPLES = set(vars(collections.namedtuple("_MADE_OF_TUPLES", ()))) - {"_field_defaults"}


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned to it yet
        return "an empty cell"


def _take_apart(value: Any) -> Any:
    """What pickling would keep of it."""
    if type(value) is object:
        raise TypeError("it has nothing but an address")
    return value.__reduce_ex__(4)


def _open_member(member: Any) -> Any:
    """What a class's method, property and so on holds."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget, member.fset
    if isinstance(member, functools.cached_property):
        return member.func
    return member


def _list_codes(code: types.CodeType) -> Iterable[types.CodeType]:
    """This code and that of all functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_codes(constant)


def _list_names(code: types.CodeType) -> list[str]:
    """Globals, attributes and imports, in a fixed order."""
    return sorted({name for one in _list_codes(code) for name in one.co_names})


def _list_globals(code: types.CodeType) -> Iterable[str]:
    for one in _list_codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield instruction.argval


def _list_imports(code: types.CodeType) -> Iterable[str]:
    """The modules that a function imports itself, with a dot for every level of a relative import."""
    for one in _list_codes(code):
        instructions = list(dis.get_instructions(one))
        for level, instruction in zip(instructions, instructions[2:], strict=False):
            if instruction.opname == "IMPORT_NAME":  # after its level and the names that are wanted of it
                yield "." * int(level.argval or 0) + instruction.argval


def _is_method_in_c(value: Any) -> bool:
    """Does it belong to a value, whose content counts? Functions in C belong to a module."""
    in_c = isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType))
    return in_c and not isinstance(value.__self__, (types.ModuleType, type(None)))


def _is_named_by_its_module(value: Any) -> bool:
    """Is it a function or ufunc of a library, and not one that somebody made with the library's help?"""
    name = getattr(value, "__name__", None)
    if not callable(value) or not isinstance(name, str) or not _is_of_a_library(value):
        return False
    return getattr(sys.modules.get(_find_module(value)), name, None) is value


def _find_module(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", None)
    return module if isinstance(module, str) else ""


def _is_ours(value: Any) -> bool:
    return _find_top(_find_module(value)) == "nestfed"


def _is_of_a_library(value: Any) -> bool:
    """Does it come with Python or with an installed package?"""
    return _is_library(_find_top(_find_module(value)))


@functools.cache
def _is_library(top: str) -> bool:
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:  # part of the interpreter
        return top in sys.builtin_module_names or top in sys.stdlib_module_names
    path = Path(file).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    folders = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))
    return any(path.is_relative_to(Path(folder).resolve()) for folder in folders)


def _find_top(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _find_version(module: str) -> str:
    """Of the package: what it says itself, or what it was installed as."""
    said = getattr(sys.modules.get(_find_top(module)), "__version__", None)
    try:
        return str(said or importlib.metadata.version(_find_top(module)))
    except importlib.metadata.PackageNotFoundError:  # a part of Python, or installed under another name
        return ""
