"""The vocabulary of the library: settings, states, a client's rows, a task, and what a client sees of the others.

An algorithm is the program of *one client*. It reaches the others only through the words of `Fed`, above all
`fed.mean(tree)`; the engines (`simulate`, `deploy`, `cost`) give these words their meaning. Nothing here knows how
clients are laid out, scheduled or connected.
"""

import dataclasses
import difflib
import functools
import math
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from nestfed.randomness import random_indices
from nestfed.scaled import Scaled, is_scaled, masked_sum

Array = Any  # jax.Array, numpy.ndarray or a Python number
PyTree = Any

Shared = Annotated[Any, "shared"]  # a State field kept by the server; equal on all clients after a synchronisation
Local = Annotated[Any, "local"]  # a State field that stays on the client from round to round and never leaves it
Server = Annotated[Any, "server"]  # a State field of the server alone, such as an optimiser's memory: never sent
Scratch = Annotated[Any, "scratch"]  # a State field that lives within one round: None at its start, dropped at its end


class UserError(ValueError):
    """A mistake in what the user gave: the message says what was given, what was expected and what to do."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, whatever its case."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return lower[found[0]] if found else None


# ------------------------------------------------------------------------------------------------- settings


def setting(
    description: str,
    *,
    default: Any = dataclasses.MISSING,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: Sequence[Any] | None = None,
    part: type | None = None,
    static: bool = False,
) -> Any:
    """A described hyper-parameter with its admissible range.

    Floats are leaves of the program's input: they can be changed and swept without compiling again. `static=True`
    marks what belongs to the program itself (numbers of steps, switches). `part` is the class of a setting that is a
    record of settings itself.
    """
    rules = {"above": above, "at_least": at_least, "at_most": at_most, "choices": choices, "part": part}
    return dataclasses.field(default=default, metadata={"description": description, "static": static, "rules": rules})


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that belongs to the program (a change means a new compilation), not to its inputs."""
    return dataclasses.field(default=default, metadata={"static": True})


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting, static))
def struct(cls: type[T]) -> type[T]:
    """A frozen record with keyword arguments that JAX can pass through jit, vmap and scan."""
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
    at the border."""
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


@struct
class PowerDecay:
    """Step size scale / (offset + slope t)^power; use it in place of a number."""

    scale: float
    power: float = 1 / 3
    offset: float = 1.0
    slope: float = 1.0

    def __call__(self, t):
        return self.scale / (self.offset + self.slope * t) ** self.power


@struct
class StepDecay:
    """Step size `scale`, and factor times that from step `at` on."""

    scale: float
    at: float
    factor: float = 0.1

    def __call__(self, t):
        return self.scale * jnp.where(t < self.at, 1.0, self.factor)


@struct
class Schedule:
    """Any function of the step index (an optax schedule, say) in place of a number: `lr=Schedule(function=...)`."""

    function: Callable[[Array], Array] = static()

    def __call__(self, t):
        return self.function(t)


def at(rate: Any, t: Array) -> Array:
    """The value of a step size at step t, whether it is a number or a schedule."""
    return rate(t) if callable(rate) else rate


def validate(record: Any) -> None:
    """Refuse settings outside their range. Traced values are left alone: they were checked at the border."""
    for field in dataclasses.fields(record):
        value, rules = getattr(record, field.name), field.metadata.get("rules")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            validate(value)
        if rules is None or isinstance(value, Tracer) or (callable(value) and rules["part"] is None):
            continue
        if value is None and field.default is None:
            continue
        problem = _broken_rule(value, rules, static=field.metadata["static"])
        if problem:
            raise UserError(
                f"{type(record).__name__}: {field.name}={value!r} was given, but {field.name} "
                f"({field.metadata['description']}) must be {problem}."
            )


def _broken_rule(value: Any, rules: dict[str, Any], *, static: bool) -> str | None:
    if rules["choices"] is not None:
        return None if value in rules["choices"] else "one of " + ", ".join(map(repr, rules["choices"]))
    if rules["part"] is not None:
        part = rules["part"]
        known = " or ".join(f"{kind.__name__}(...)" for kind in part.__subclasses__())
        return None if isinstance(value, part) else f"a {part.__name__}: {known}"
    if isinstance(value, str):
        return "a number or a schedule, not text"
    if static and isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "a number or a schedule"
    if static and not isinstance(value, (int, np.integer)):
        return "a whole number"
    if math.isnan(number):
        return "a number, not NaN"
    if rules["above"] is not None and not number > rules["above"]:
        return f"greater than {rules['above']}"
    if rules["at_least"] is not None and not number >= rules["at_least"]:
        return f"at least {rules['at_least']}"
    if rules["at_most"] is not None and not number <= rules["at_most"]:
        return f"at most {rules['at_most']}"
    return None


# ------------------------------------------------------------------------------------------------- flat vectors


class Layout(NamedTuple):
    """How a user's parameter tree lies in one flat vector. Hashable, so that it can be part of a program."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtype: str

    @classmethod
    def of(cls, tree: PyTree, name: str) -> "Layout":
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            raise UserError(f"the starting point of {name} is empty; give an array or a tree of arrays.")
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        for array in arrays:
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise UserError(
                    f"the starting point of {name} holds an array of type {array.dtype}; parameters must be floating-"
                    "point numbers (write 0.0 for 0), and constants belong in the problem or in the data."
                )
            if not bool(jnp.isfinite(array).all()):
                raise UserError(f"the starting point of {name} holds a NaN or infinite value; give finite numbers.")
        return cls(structure, tuple(a.shape for a in arrays), str(jnp.result_type(*arrays)))

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def flatten(self, tree: PyTree) -> Array:
        return jnp.concatenate([jnp.ravel(jnp.asarray(leaf, self.dtype)) for leaf in jax.tree.leaves(tree)])

    def unflatten(self, vector: Array) -> PyTree:
        # Not slices: their gradient is a sum of padded vectors, that of a split is one concatenation.
        parts = lax.split(vector, [math.prod(shape) for shape in self.shapes])
        leaves = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


# ------------------------------------------------------------------------------------------------- rows of data


@struct
class ClientRows:
    """One client's data: its own rows of a pool, and constants such as class priors.

    In simulation the pool holds everybody's rows and this view reaches only rows offset .. offset + size; at a real
    site the pool is the site's own.
    """

    columns: PyTree  # every leaf [rows of the pool, ...], or None if the client has constants only
    offset: Array
    size: Array
    constants: PyTree
    largest: int = static()  # rows of the largest client: bounds the shapes of full passes

    def as_batch(self, rows: PyTree) -> PyTree:
        """What a problem's functions see: the rows, the constants, or (rows, constants) if there are both."""
        if self.columns is None:
            return self.constants
        return rows if self.constants is None else (rows, self.constants)

    def take(self, indices: Array) -> PyTree:
        """Rows of this client by their number, 0 .. size - 1."""
        return jax.tree.map(lambda column: jnp.asarray(column)[self.offset + indices], self.columns)

    def draw_rows(self, key: Array, count: int) -> PyTree:
        """`count` of this client's rows, uniformly and with replacement; every leaf [count, ...]."""
        if self.columns is None:
            raise UserError("this client has constants and no rows to draw from.")
        return _draw_rows(self.columns, self.offset, self.size, key, count)

    def draw_each(self, key: Array, count: int) -> PyTree:
        """`count` batches of one row each, side by side: every leaf [count, ...]."""
        if self.columns is None:
            rows = None
        else:
            rows = jax.tree.map(lambda a: a[:, None], self.draw_rows(key, count))
        constants = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *jnp.shape(a))), self.constants)
        return dataclasses.replace(self, constants=constants).as_batch(rows)

    def all_rows(self, count: int) -> tuple[PyTree, Array]:
        """The first rows of this client, as many as `count` allows, and which of the `count` entries they fill; the
        others repeat the last row."""
        positions = jnp.arange(count, dtype=self.offset.dtype)
        return _all_rows(self.columns, self.offset, self.size, positions), positions < self.size

    def draw(self, key: Array, count: int) -> PyTree:
        """A batch of `count` of this client's rows; a client with constants only always gives these."""
        return self.as_batch(None if self.columns is None else self.draw_rows(key, count))

    def average(self, function: Callable[[PyTree], PyTree], *, rows_at_once: int = 256) -> PyTree:
        """The mean of `function` over all of this client's rows.

        `function` maps a batch to its mean over the batch (a loss, a gradient). Full blocks of rows are passed to it
        as they are; the rest row by row, so that the answer is exact for any size and no other client's row is read.
        """
        if self.columns is None:
            return function(self.constants)
        block = min(rows_at_once, self.largest)
        positions = jnp.arange(block, dtype=self.offset.dtype)
        one_row = lambda i: function(self.as_batch(self.take(i[None])))
        each = functools.partial(jax.tree.map, is_leaf=is_scaled)  # Scaled numbers know their own arithmetic
        nothing = lambda a: Scaled.zeros(a) if is_scaled(a) else jnp.zeros(a.shape, a.dtype)

        def add_block(b, total):
            mean = function(self.as_batch(self.take(b * block + positions)))
            return each(lambda s, m: s + block * m, total, mean)

        blocks = self.size // block
        zeros = each(nothing, jax.eval_shape(one_row, self.size * 0))
        total = lax.fori_loop(jnp.zeros_like(blocks), blocks, add_block, zeros)
        rest = blocks * block + positions
        values = jax.vmap(one_row)(jnp.minimum(rest, self.size - 1))
        size = lambda s: self.size.astype(jax.tree.leaves(s)[0].dtype)
        return each(lambda s, v: (s + masked_sum(v, rest < self.size)) / size(s), total, values)

    def pass_over(self, function: Callable[[PyTree, Array | None], PyTree], *, rows_at_once: int = 256) -> PyTree:
        """The sum of function(batch, weights) over blocks that hold each of this client's rows once.

        `weights` are 1 / size, and 0 where an entry merely fills up a block: if `function` returns the sum of weights_i
        value_i, the answer is the mean over all rows. The number of blocks is fixed by the largest client, so the cost
        is known and a round may contain such a pass; `average` fits each client's own size and is for metrics. A client
        with constants only is one block, with None as weights.
        """
        if self.columns is None:
            return function(self.constants, None)
        block = min(rows_at_once, self.largest)
        positions = jnp.arange(block, dtype=self.offset.dtype)

        def one_block(b):
            mine = b * block + positions
            rows = _all_rows(self.columns, self.offset, self.size, mine)
            return function(self.as_batch(rows), jnp.where(mine < self.size, 1 / self.size.astype(float), 0.0))

        first, blocks = one_block(0), -(-self.largest // block)
        add = lambda b, total: jax.tree.map(jnp.add, total, one_block(b))
        return first if blocks == 1 else lax.fori_loop(1, blocks, add, first)


@functools.partial(jax.jit, static_argnames=("count",))
def _draw_rows(columns, offset, size, key, count):  # under jit for its name, by which `cost.measure` counts samples
    # In bounds by construction; the promise spares a comparison per element.
    rows = offset + random_indices(key, count, size)
    return jax.tree.map(lambda column: column.at[rows].get(mode="promise_in_bounds"), columns)


@jax.jit
def _all_rows(columns, offset, size, positions):  # under jit for its name, as above
    return jax.tree.map(lambda column: jnp.asarray(column)[offset + jnp.minimum(positions, size - 1)], columns)


@struct
class Rows:
    """All clients' rows as one pool `[rows, ...]`, each client's rows side by side; nothing is padded or copied.

    `ids` name the clients in all random draws: a client keeps its numbers when others join or leave.
    """

    columns: PyTree
    offsets: Array  # [clients]
    sizes: Array  # [clients]
    ids: Array  # [clients]
    constants: PyTree  # every leaf [clients, ...], or None
    largest: int = static()

    @classmethod
    def from_clients(
        cls, clients: Sequence[PyTree] | None = None, *, constants: PyTree = None, ids: Sequence[int] | None = None
    ) -> "Rows":
        """Build the pool from one tree of arrays per client (ragged sizes are fine), or from constants alone."""
        if clients is None:
            if constants is None:
                raise UserError("no data were given: pass one tree of arrays per client, or constants=.")
            number = _common_length(jax.tree.leaves(constants), "constants")
            if number == 0:
                raise UserError("constants without an entry were given; a federation has at least one client.")
            _check_finite(constants, np.ones(number, int), "constants")
            empty = np.zeros(number, np.int32)
            return cls(
                columns=None, offsets=empty, sizes=empty + 1, ids=_ids(ids, number), constants=constants, largest=1
            )
        clients = list(clients)
        if not clients:
            raise UserError("an empty list of clients was given; a federation has at least one client.")
        structure = jax.tree.structure(clients[0])
        for i, client in enumerate(clients):
            if jax.tree.structure(client) != structure:
                raise UserError(
                    f"client {i} has the columns {jax.tree.structure(client)}, client 0 has {structure}; "
                    "all clients must have the same columns."
                )
        sizes = [_common_length(jax.tree.leaves(client), f"client {i}") for i, client in enumerate(clients)]
        for i, size in enumerate(sizes):
            if size == 0:
                raise UserError(f"client {i} has no rows; leave it out, or give it data.")
        for i, client in enumerate(clients):
            for first, mine in zip(jax.tree.leaves(clients[0]), jax.tree.leaves(client), strict=True):
                if np.shape(first)[1:] != np.shape(mine)[1:]:
                    raise UserError(
                        f"client {i} has rows of shape {np.shape(mine)[1:]}, client 0 of shape {np.shape(first)[1:]}; "
                        "all clients must have the same columns."
                    )
        columns = jax.tree.map(lambda *parts: np.concatenate([np.asarray(p) for p in parts]), *clients)
        return cls._checked(columns, np.asarray(sizes), constants, ids)

    @classmethod
    def from_table(cls, columns: PyTree, client: Array, *, constants: PyTree = None) -> "Rows":
        """Build the pool from columns of one table and the client number 0, 1, ... of every row."""
        client = np.asarray(client)
        rows = _common_length([*jax.tree.leaves(columns), client], "the table")
        if rows == 0:
            raise UserError("the table has no rows.")
        if not np.issubdtype(client.dtype, np.integer) or client.min() < 0:
            wrong = client[0] if not np.issubdtype(client.dtype, np.integer) else client.min()
            raise UserError(
                f"the table names a client {wrong!r}; number the clients 0, 1, 2, ... (numpy.unique does it)."
            )
        sizes = np.bincount(client)
        missing = np.flatnonzero(sizes == 0)
        if missing.size:
            raise UserError(f"client {missing[0]} has no rows; number the clients 0 .. {sizes.size - 1} without a gap.")
        order = np.argsort(client, kind="stable")
        return cls._checked(jax.tree.map(lambda c: np.asarray(c)[order], columns), sizes, constants, None)

    @classmethod
    def _checked(cls, columns: PyTree, sizes: np.ndarray, constants: PyTree, ids: Sequence[int] | None) -> "Rows":
        offsets = np.cumsum(sizes) - sizes
        _check_finite(columns, sizes, "data")
        _check_precision(columns, "data")
        if constants is not None and _common_length(jax.tree.leaves(constants), "constants") != sizes.size:
            raise UserError(f"constants must have one entry for each of the {sizes.size} clients.")
        _check_finite(constants, np.ones(sizes.size, int), "constants")
        _check_precision(constants, "constants")
        # x64 off would truncate int64 silently; int32 numbers two thousand million rows.
        as_index = lambda a: np.asarray(a, np.int32)
        largest = int(sizes.max())
        return cls(
            columns=columns,
            offsets=as_index(offsets),
            sizes=as_index(sizes),
            ids=_ids(ids, sizes.size),
            constants=constants,
            largest=largest,
        )

    @property
    def clients(self) -> int:
        return self.sizes.shape[0]

    def client(self, position: Array) -> ClientRows:
        """The view of the client at this position; it may be a traced number."""
        mine = lambda tree: jax.tree.map(lambda a: jnp.asarray(a)[position], tree)
        return ClientRows(
            columns=self.columns,
            offset=mine(self.offsets),
            size=mine(self.sizes),
            constants=mine(self.constants),
            largest=self.largest,
        )

    def only(self, position: int) -> "Rows":
        """A pool with this client's rows and nobody else's: what a site holds in a deployment."""
        start, size = int(self.offsets[position]), int(self.sizes[position])
        mine = lambda tree: jax.tree.map(lambda a: np.asarray(a)[position : position + 1], tree)
        return Rows(
            columns=jax.tree.map(lambda c: np.asarray(c)[start : start + size], self.columns),
            offsets=np.zeros(1, np.int32),
            sizes=mine(self.sizes),
            ids=mine(self.ids),
            constants=mine(self.constants),
            largest=size,
        )

    def reordered(self, order: Sequence[int]) -> "Rows":
        """The same clients at other positions; they keep their ids, so nobody's numbers change."""
        mine = lambda tree: jax.tree.map(lambda a: np.asarray(a)[np.asarray(order)], tree)
        return dataclasses.replace(
            self, offsets=mine(self.offsets), sizes=mine(self.sizes), ids=mine(self.ids), constants=mine(self.constants)
        )


def _check_finite(columns: PyTree, sizes: np.ndarray, what: str) -> None:
    """Refuse NaN and infinity, naming column, client and row; clients' rows lie side by side."""
    offsets = np.cumsum(sizes) - sizes
    for path, column in jax.tree_util.tree_leaves_with_path(columns):
        if not jnp.issubdtype(np.asarray(column).dtype, jnp.floating):
            continue
        finite = np.isfinite(np.asarray(column, float)).reshape(len(column), -1).all(1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            client = int(np.searchsorted(offsets, row, side="right")) - 1
            raise UserError(
                f"the {what} hold a NaN or infinite value in column {jax.tree_util.keystr(path) or '(the only one)'}, "
                f"client {client}, row {row - offsets[client]}; fill in or remove such rows first."
            )


LOST = 1e-4  # as a part of a column's standard deviation: more than that is no rounding error


def _check_precision(columns: PyTree, what: str) -> None:
    """JAX computes in 32 bits unless it is told otherwise, and says nothing where that loses what a column says."""
    if jax.config.read("jax_enable_x64"):
        return
    for path, column in jax.tree_util.tree_leaves_with_path(columns):
        array = np.asarray(column)
        name = f"column {jax.tree_util.keystr(path) or '(the only one)'} of the {what}"
        if array.dtype == np.float64 and array.size:
            lost = float(np.max(np.abs(array - array.astype(np.float32))))
            if lost > LOST * float(array.std()):
                warnings.warn(
                    f"{name} has values up to {np.abs(array).max():.4g} that differ by {array.std():.2g}: single "
                    f"precision, in which this runs, rounds them by up to {lost:.2g}. Subtract a common value (a mean) "
                    'or call jax.config.update("jax_enable_x64", True) before anything else.',
                    stacklevel=5,
                )
        if array.dtype.kind in "iu" and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
            raise UserError(
                f"{name} holds {array.max()}, which is no number of 32 bits; number such values 0, 1, 2, ... "
                '(numpy.unique does it), or call jax.config.update("jax_enable_x64", True) before anything else.'
            )


def _whole_numbers(values: Any, number: int) -> np.ndarray | None:
    """`number` whole numbers of 32 bits, or None if the values are not that."""
    array = np.asarray(values)
    fits = np.issubdtype(array.dtype, np.integer) and array.shape == (number,) and np.all(abs(array) < 2**31)
    return array.astype(np.int32) if fits else None


def _common_length(leaves: Sequence[Array], where: str) -> int:
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        shapes = ", ".join(str(np.shape(leaf)) for leaf in leaves)
        raise UserError(f"the columns of {where} have the shapes {shapes}; they must have equally many rows.")
    return int(lengths.pop() or 0)


def _ids(ids: Sequence[int] | None, number: int) -> np.ndarray:
    chosen = _whole_numbers(range(number) if ids is None else ids, number)
    if chosen is None or np.unique(chosen).size != number:
        raise UserError(f"ids={ids!r} must be {number} different whole numbers, one per client.")
    return chosen


# ------------------------------------------------------------------------------------------------- the federation


class Sample(NamedTuple):
    """One draw: a batch and the key of whatever is random in evaluating it (dropout, augmentation).

    Passing the same Sample to two oracles evaluates the same batch with the same randomness at two points.
    """

    batch: PyTree
    key: Array


class Cohort(NamedTuple):
    """Who answers an exchange, side by side."""

    ids: Array
    weights: Array  # in means; zero: takes no part

    @property
    def present(self) -> Array:
        return self.weights > 0


def everything(values: PyTree, cohort: Cohort, slot: Array, key: Array) -> PyTree:
    """The reply to a gather that sends everybody's values to everybody."""
    return values


@dataclasses.dataclass(frozen=True)
class Fed:
    """All that a client can see of the federation during one step."""

    # mean(tree, around=None): the weighted mean of a tree over the clients taking part. `around` is a tree of the same
    # structure that everybody knows (a broadcast value, or what follows from answers; None where there is no such
    # value), and the meaning is around + mean(tree - around). It tells which part of an upload is news: transforms of
    # uploads (`privacy`) act on tree - around. Without them it is ignored.
    mean: Callable[..., PyTree]
    # gather(tree, reply=...): the server lays the cohort's trees side by side and answers this client with
    # reply(values, cohort, slot, key); the key is the step's shared one, and reply may use nothing else but settings
    # and fields of fed.server as they are (where it runs, fed.server has the Server fields too).
    # A visible exception: prefer a mean, which hides who said what.
    gather: Callable[..., PyTree]
    sync: bool  # last step of the round? A Python bool: branch on it with a plain `if`
    t: Array  # global step index, for step-size schedules
    step: Array  # index of the step within the round
    server: Any  # Shared fields as broadcast at the start of the round; the others are None
    key: Array  # this client's, for this step
    shared_key: Array  # the same on all clients, for this step
    # This client's weight in the problem / its weight in this round's means: with equal weights, clients taking part /
    # all clients. mean(share z) is the part of the sum over all clients of weight z that those taking part make up.
    share: Array
    rows: Any = None  # this client's own rows (`ClientRows`), for passes over all of them; batches come from draw(j)
    own_steps: Array | None = None  # this client's number of local steps, if the task gives clients different ones
    unsynced: Any = None  # in metrics, if asked for: this client's whole State before the round's last step


Phase = tuple[Callable[..., Any], int, bool]


@struct
class Algorithm:
    """One client's program. Subclasses define State, init and step; everything else has a sensible default."""

    local_steps: int = setting("I: local steps per round", default=1, at_least=1, static=True)

    State: ClassVar[Any]  # a NamedTuple whose fields are annotated Shared, Server, Local or Scratch
    family: ClassVar[str]  # the class of problem it solves: `Problem.family`
    scope: ClassVar[str | None] = None  # "local" or "global" where the family knows both
    uneven_steps: ClassVar[bool] = False  # can clients do different numbers of local steps?
    few_clients: ClassVar[str | None] = None  # why its limit is another one where only some clients take part

    def init(self, problem: Any, params: Any, draw: Callable[[int], Sample], fed: Fed) -> Any:
        raise UserError(f"{type(self).__name__} must define init(problem, params, draw, fed).")

    def step(self, problem: Any, s: Any, draw: Callable[[int], Sample], fed: Fed) -> Any:
        raise UserError(f"{type(self).__name__} must define step(problem, s, draw, fed), or a schedule of its own.")

    def begin(self, server: Any, client: Any) -> Any:
        """The State with which a client starts a round: the broadcast merged with what the client kept."""
        kinds = self.kinds()
        source = lambda name, ours, own: {"local": own, "scratch": None}.get(kinds[name], ours)
        fields = zip(self.State._fields, server, client, strict=True)
        return self.State(**{name: source(name, ours, own) for name, ours, own in fields})

    def estimates(self, problem: Any, s: Any, draw: Callable[[int], Sample]) -> list[tuple[Any, Any, Any]]:
        """For the conformance suite, of a client between two rounds: (an estimate that it keeps, what it estimates at
        the point that it belongs to, is there one yet?). With one local step and batches that are all alike the two
        are equal for recursions that add up differences, however long the client was away."""
        return []

    def schedule(self) -> tuple[Phase, ...]:
        """The phases of a round, in order: (method, repeats, sync). Loops that exchange are phases."""
        return ((self.step, self.local_steps - 1, False), (self.step, 1, True))

    def kinds(self) -> dict[str, str]:
        """Where each field of State lives: "shared", "server", "local" or "scratch"."""
        hints = typing.get_type_hints(self.State, include_extras=True)
        return {name: hints[name].__metadata__[0] for name in self.State._fields}

    def split(self, s: Any) -> tuple[Any, Any]:
        """State -> (server's part, client's part), each a State with None in the other's fields."""
        return self.part(s, "shared", "server"), self.part(s, "local")

    def part(self, s: Any, *chosen: str) -> Any:
        """The State with None in all fields but those of the chosen kinds."""
        kinds = self.kinds()
        return self.State(*(v if kinds[name] in chosen else None for name, v in zip(s._fields, s, strict=True)))


# ------------------------------------------------------------------------------------------------- tasks


@struct
class Task:
    """A problem with data, a starting point and weights. Make one with `create`; subclass to add metrics.

    `params` are flat vectors, one per variable of the problem (`Problem.variables`); the user's own parameter trees
    were flattened by `create`, and the problem's functions see them as trees again.
    """

    problem: Any
    data: Rows
    params: tuple[Array, ...]
    weights: Array  # [clients]; a client of weight zero takes part in nothing
    local_steps: Array | None = None  # [clients]: own numbers of local steps, for algorithms that allow it
    batch_size: int = static(default=1)

    @classmethod
    def create(
        cls,
        problem: Any,
        data: Rows,
        params: PyTree,
        *,
        weights: Any = "uniform",
        batch_size: int = 1,
        local_steps: Sequence[int] | None = None,
        **fields: Any,
    ):
        """Check everything once, flatten the starting point, and return the task.

        `params` is the tree of the only variable, or a tuple with one tree per variable of the problem.
        `weights` is "uniform", "samples" (by numbers of rows) or one number per client.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise UserError(f"batch_size={batch_size!r} was given; it must be a whole number, 1 or more.")
        if isinstance(problem, type) or not hasattr(problem, "bind"):
            given = f"the class {problem.__name__}" if isinstance(problem, type) else f"a {type(problem).__name__}"
            raise UserError(
                f"{given} was given as the problem; give an object of a class of nestfed.problems, such as "
                f"{problem.__name__ if isinstance(problem, type) else 'MyProblem'}()."
            )
        if not isinstance(data, Rows):
            raise UserError(
                f"data of type {type(data).__name__} were given; make them with Rows.from_clients or from_table."
            )
        problem, flat = problem.bind(params)
        of_clients = _weights(weights, data)
        task = cls(
            problem=problem.fitted(data, of_clients),
            data=data,
            params=flat,
            weights=of_clients,
            batch_size=int(batch_size),
            local_steps=None if local_steps is None else _local_steps(local_steps, data),
            **fields,
        )
        validate(task.problem)
        task.problem.check(task)
        return task

    @property
    def clients(self) -> int:
        return self.data.clients

    @property
    def minimised(self) -> str | None:
        """The recorded metric that training makes small, where there is one: a run says so if it ends above its start.
        The default is the problem's own."""
        return self.problem.minimised

    def start(self, data: ClientRows) -> tuple[Array, ...]:
        """Where this client starts. Override it to give clients starting points of their own, from their constants."""
        return self.params

    def training(self, data: ClientRows) -> ClientRows:
        """The rows that a client trains on, of all that it holds: what an algorithm may pass over (`fed.rows`)."""
        return data

    def sample(self, data: ClientRows, key: Array) -> PyTree:
        """One batch of one client's data."""
        return self.problem.sample(data, key, self.batch_size)

    def metrics(self, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
        """What a run records, again as a client program; the default is the problem's objective over all rows."""
        return self.problem.metrics(server, client, data, fed)


def _weights(weights: Any, data: Rows) -> np.ndarray:
    if isinstance(weights, str):
        if weights not in ("uniform", "samples"):
            raise UserError(f"weights={weights!r} was given; use 'uniform', 'samples' or one number per client.")
        raw = np.ones(data.clients) if weights == "uniform" else np.asarray(data.sizes, float)
    else:
        raw = np.asarray(weights, float)
    if raw.shape != (data.clients,):
        raise UserError(f"weights of shape {raw.shape} were given for {data.clients} clients; give one per client.")
    if not np.isfinite(raw).all() or (raw < 0).any() or raw.sum() == 0:
        raise UserError(f"weights={raw.tolist()} must be finite, not negative, and not all zero.")
    return raw / raw.sum()


def _local_steps(steps: Any, data: Rows) -> np.ndarray:
    chosen = _whole_numbers(steps, data.clients)
    if chosen is None or (chosen < 1).any():
        raise UserError(
            f"local_steps={steps!r} must be one whole number, 1 or more, for each of {data.clients} clients."
        )
    return chosen
