"""Parameters as flat vectors, and the rows of all clients as one pool."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nestfed.core.randomness import draw_indices
from nestfed.core.scaled import Scaled, is_scaled, sum_masked
from nestfed.core.settings import UserError, static, struct
from nestfed.core.types import AnyArray, Array, ArrayLike, PyTree


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


@struct
class ClientRows:
    """One client's data: its own rows of a pool, and constants such as class priors.

    In simulation the pool holds everybody's rows and this view reaches only rows offset .. offset + size; at a real
    site the pool is the site's own.
    """

    columns: PyTree  # every leaf [rows of the pool, ...], or None if the client has constants only
    id: Array  # the client's, of `Rows.ids`
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
        return _take_all_rows(self.columns, self.offset, self.size, positions), positions < self.size

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

        def add_block(b: Any, total: PyTree) -> PyTree:
            mean = function(self.as_batch(self.take(b * block + positions)))
            return each(lambda s, m: s + block * m, total, mean)

        blocks = self.size // block
        zeros = each(nothing, jax.eval_shape(one_row, self.size * 0))
        total = lax.fori_loop(jnp.zeros_like(blocks), blocks, add_block, zeros)
        rest = blocks * block + positions
        values = jax.vmap(one_row)(jnp.minimum(rest, self.size - 1))
        size = lambda s: self.size.astype(jax.tree.leaves(s)[0].dtype)
        return each(lambda s, v: (s + sum_masked(v, rest < self.size)) / size(s), total, values)

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

        def one_block(b: Any) -> PyTree:
            mine = b * block + positions
            rows = _take_all_rows(self.columns, self.offset, self.size, mine)
            return function(self.as_batch(rows), jnp.where(mine < self.size, 1 / self.size.astype(float), 0.0))

        first, blocks = one_block(0), -(-self.largest // block)
        add = lambda b, total: jax.tree.map(jnp.add, total, one_block(b))
        return first if blocks == 1 else lax.fori_loop(1, blocks, add, first)


@functools.partial(jax.jit, static_argnames=("count",))
def _draw_rows(columns: PyTree, offset: Array, size: Array, key: Array, count: int) -> PyTree:
    # Under jit for its name, by which `cost.measure` counts samples. In bounds by construction; the promise spares a
    # comparison per element.
    rows = offset + draw_indices(key, count, size)
    return jax.tree.map(lambda column: column.at[rows].get(mode="promise_in_bounds"), columns)


@jax.jit
def _take_all_rows(columns: PyTree, offset: Array, size: Array, positions: Array) -> PyTree:
    # Under jit for its name, as above.
    return jax.tree.map(lambda column: jnp.asarray(column)[offset + jnp.minimum(positions, size - 1)], columns)


@struct
class Rows:
    """All clients' rows as one pool `[rows, ...]`, each client's rows side by side; nothing is padded or copied.

    `ids` name the clients in all random draws: a client keeps its numbers when others join or leave.
    """

    columns: PyTree
    offsets: AnyArray  # [clients]
    sizes: AnyArray  # [clients]
    ids: AnyArray  # [clients]
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
            number = _find_common_length(jax.tree.leaves(constants), "constants")
            if number == 0:
                raise UserError("constants without an entry were given; a federation has at least one client.")
            _check_finite(constants, np.ones(number, int), "constants")
            empty = np.zeros(number, np.int32)
            return cls(
                columns=None,
                offsets=empty,
                sizes=empty + 1,
                ids=_check_ids(ids, number),
                constants=constants,
                largest=1,
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
        sizes = [_find_common_length(jax.tree.leaves(client), f"client {i}") for i, client in enumerate(clients)]
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
        return cls._build(columns, np.asarray(sizes), constants, ids)

    @classmethod
    def from_table(cls, columns: PyTree, client: AnyArray, *, constants: PyTree = None) -> "Rows":
        """Build the pool from columns of one table and the client number 0, 1, ... of every row."""
        client = np.asarray(client)
        rows = _find_common_length([*jax.tree.leaves(columns), client], "the table")
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
        return cls._build(jax.tree.map(lambda c: np.asarray(c)[order], columns), sizes, constants, None)

    @classmethod
    def _build(cls, columns: PyTree, sizes: np.ndarray, constants: PyTree, ids: Sequence[int] | None) -> "Rows":
        offsets = np.cumsum(sizes) - sizes
        _check_finite(columns, sizes, "data")
        _check_precision(columns, "data")
        if constants is not None and _find_common_length(jax.tree.leaves(constants), "constants") != sizes.size:
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
            ids=_check_ids(ids, sizes.size),
            constants=constants,
            largest=largest,
        )

    @property
    def clients(self) -> int:
        return self.sizes.shape[0]

    def client(self, position: ArrayLike) -> ClientRows:
        """The view of the client at this position; it may be a traced number."""
        mine = lambda tree: jax.tree.map(lambda a: jnp.asarray(a)[position], tree)
        return ClientRows(
            columns=self.columns,
            id=mine(self.ids),
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

    def reorder(self, order: Sequence[int]) -> "Rows":
        """The same clients at other positions; they keep their ids, so nobody's numbers change."""
        mine = lambda tree: jax.tree.map(lambda a: np.asarray(a)[np.asarray(order)], tree)
        return dataclasses.replace(
            self, offsets=mine(self.offsets), sizes=mine(self.sizes), ids=mine(self.ids), constants=mine(self.constants)
        )


def _check_finite(columns: PyTree, sizes: np.ndarray, what: str) -> None:
    """Refuse what is no number, NaN and infinity, naming column, client and row; clients' rows lie side by side."""
    offsets = np.cumsum(sizes) - sizes
    for path, column in jax.tree_util.tree_leaves_with_path(columns):
        where = f"column {jax.tree_util.keystr(path) or '(the only one)'}"
        kind = np.asarray(column).dtype
        if kind.kind in "OSUMm":
            raise UserError(f"the {what} hold no numbers in {where}, but {kind}; encode them as numbers first.")
        if not jnp.issubdtype(kind, jnp.floating):
            continue
        finite = np.isfinite(np.asarray(column, float)).reshape(len(column), -1).all(1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            client = int(np.searchsorted(offsets, row, side="right")) - 1
            raise UserError(
                f"the {what} hold a NaN or infinite value in {where}, client {client}, row {row - offsets[client]}; "
                "fill in or remove such rows first."
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


def read_whole_numbers(values: Any, number: int) -> np.ndarray | None:
    """`number` whole numbers of 32 bits, or None if the values are not that."""
    array = np.asarray(values)
    fits = np.issubdtype(array.dtype, np.integer) and array.shape == (number,) and np.all(abs(array) < 2**31)
    return array.astype(np.int32) if fits else None


def _find_common_length(leaves: Sequence[Any], where: str) -> int:
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        shapes = ", ".join(str(np.shape(leaf)) for leaf in leaves)
        raise UserError(f"the columns of {where} have the shapes {shapes}; they must have equally many rows.")
    return int(lengths.pop() or 0)


def _check_ids(ids: Sequence[int] | None, number: int) -> np.ndarray:
    chosen = read_whole_numbers(range(number) if ids is None else ids, number)
    if chosen is None or np.unique(chosen).size != number:
        raise UserError(f"ids={ids!r} must be {number} different whole numbers, one per client.")
    return chosen
