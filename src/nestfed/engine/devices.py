"""Several devices, of one process or of many: each owns a block of the task's clients, and runs their rounds.

A device has the rows of its clients as a pool of its own, and their Local fields; rows never move. What is a number
per client (weights, ids, sizes) lies on every device, and so does the server's state. Every device therefore draws the
whole cohort, as one device would, and keeps the participants that it owns. Clients reach those of other devices in
exchanges alone: a mean is a sum here and a sum over devices, a gather is laid in the cohort's order. Unequal blocks are
filled with ghosts, which weigh nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nestfed.core.rows import Rows
from nestfed.core.scaled import Scaled, is_scaled
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import AnyArray, Array, PyTree
from nestfed.engine.cohorts import Participant

AXIS = "devices"
COMMON, OWN = PartitionSpec(), PartitionSpec(AXIS)  # the same on all devices; a part of the leading axis on each


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which device owns which clients: a part of the program."""

    mesh: Mesh
    clients: int  # of the task

    @property
    def size(self) -> int:
        """Clients per device, ghosts included."""
        return -(-self.clients // self.mesh.size)

    def bounds(self, device: int) -> tuple[int, int]:
        """The clients of a device: from the first to before the second."""
        return min(device * self.size, self.clients), min((device + 1) * self.size, self.clients)

    # ---------------------------------------------------------------------------------------- between host and devices

    def lay_task(self, task: Task) -> Task:
        """The task with its rows on the devices that own them."""
        return _change_rows(task, self._lay_rows)

    def _lay_rows(self, rows: Rows) -> Rows:
        """Offsets are within the pool of the owner; pools are filled up to the largest one with rows of their own."""
        offsets, sizes = np.asarray(rows.offsets), np.asarray(rows.sizes)
        if rows.columns is None:
            return rows
        bounds = [self.bounds(device) for device in range(self.mesh.size)]
        room = max(int(sizes[first:last].sum()) for first, last in bounds)
        within = np.concatenate([np.cumsum(sizes[first:last]) - sizes[first:last] for first, last in bounds])

        def pool_of(device: int) -> np.ndarray:
            first, last = bounds[device]
            own = [np.arange(o, o + s) for o, s in zip(offsets[first:last], sizes[first:last], strict=True)]
            return np.resize(np.concatenate([*own, offsets[:1]] if first == last else own), room)

        def lay(column: AnyArray) -> Array:
            column = np.asarray(column)
            kind = jax.dtypes.canonicalize_dtype(column.dtype)
            part = lambda index: column[pool_of((index[0].start or 0) // room)].astype(kind)
            return self._put((room * self.mesh.size, *column.shape[1:]), part)

        return dataclasses.replace(
            rows, columns=jax.tree.map(lay, rows.columns), offsets=np.asarray(within, offsets.dtype)
        )

    def lay(self, tree: PyTree) -> PyTree:
        """Leaves [clients, ...] from the host, each client's at its owner."""

        def one(leaf: Any) -> Any:
            leaf = np.asarray(leaf)
            ghosts = np.zeros((self.size * self.mesh.size - self.clients, *leaf.shape[1:]), leaf.dtype)
            whole = np.concatenate([leaf, ghosts])
            return self._put(whole.shape, lambda index: whole[index])

        return jax.tree.map(one, tree)

    def _put(self, shape: tuple[int, ...], part: Callable[[Any], np.ndarray]) -> Array:
        return jax.make_array_from_callback(shape, NamedSharding(self.mesh, OWN), part)

    def collect(self, tree: PyTree) -> PyTree:
        """Leaves [clients, ...] on the host of every process, in the task's order and without ghosts."""

        def one(leaf: Any) -> Any:
            if leaf.is_fully_addressable:
                return np.asarray(leaf)[: self.clients]
            return multihost_utils.process_allgather(leaf, tiled=True)[: self.clients]

        return jax.tree.map(one, tree)

    def shapes(self, tree: PyTree) -> PyTree:
        """What `collect` gives of leaves with these shapes."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((self.clients, *a.shape[1:]), a.dtype), tree)

    # ---------------------------------------------------------------------------------------- within a program

    def run(self, program: Callable, arguments: tuple, where: tuple, results: Any) -> Any:
        """A program of one device on all of them; `where` and `results` say what is COMMON and what is OWN."""
        mapped = jax.shard_map(program, mesh=self.mesh, in_specs=where, out_specs=results, check_vma=False)
        return mapped(*arguments)

    def list_task_places(self, task: Task) -> Task:
        """For `run`: where the parts of a task lie."""
        common = lambda tree: jax.tree.map(lambda _: COMMON, tree)
        own = lambda rows: dataclasses.replace(common(rows), columns=jax.tree.map(lambda _: OWN, rows.columns))
        return _change_rows(task, own, common)

    @property
    def first(self) -> Array:
        """The first client of this device."""
        return lax.axis_index(AXIS) * self.size

    @property
    def real(self) -> Array:
        """Which of this device's clients are none of the ghosts."""
        return self.first + jnp.arange(self.size) < self.clients

    def count(self, positions: Array) -> Array:
        """How many of these clients each device owns."""
        return (positions[:, None] // self.size == jnp.arange(self.mesh.size)[None]).sum(0)

    def take_all_own(self, participants: Participant) -> Participant:
        """Those of all clients that this device owns, ghosts included."""
        position = self.first + jnp.arange(self.size)
        here = jnp.minimum(position, self.clients - 1)
        own: Any = jax.tree.map(lambda a: a[here], participants)
        return own._replace(weight=jnp.where(self.real, own.weight, 0))

    def take_some_own(self, participants: Participant, room: int) -> tuple[Participant, Array, Array]:
        """(those of a cohort that this device owns, filled up to `room` with some that weigh nothing; where their Local
        fields lie on this device, beyond the end for the fillers; how many of these places must be run). One at least:
        the Shared fields that it ends with are this device's too."""
        mine = participants.position // self.size == lax.axis_index(AXIS)
        order = jnp.argsort(~mine, stable=True)[:room]
        here = mine[order]
        own: Any = jax.tree.map(lambda a: a[order], participants)
        known = jnp.minimum(self.first, self.clients - 1)
        index = jnp.where(here, own.position - self.first, self.size)
        own = own._replace(
            position=jnp.where(here, own.position, known).astype(own.position.dtype),
            weight=jnp.where(here, own.weight, 0),
        )
        return own, index, jnp.maximum(here.sum(), 1)


@jax.tree_util.register_static
class RowsElsewhere:
    """In place of the columns of a task's pool, for metrics: no device has everybody's rows."""

    def __getitem__(self, name: Any) -> Any:
        raise UserError(
            "a metric reads task.data.columns, the rows of all clients, but on several devices each has its own "
            "clients' alone: read the client's rows from its `data` (data.take, data.average), and pass what is found "
            "through fed.mean or fed.gather."
        )

    def __iter__(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, such as whether it can be copied
            raise AttributeError(name)
        return self[name]


@dataclasses.dataclass(frozen=True)
class SpreadCohort:
    """All participants of a round, of which this device has some: everything that exchanges need beyond it."""

    blocks: Blocks
    participants: Participant  # the same on all devices
    room: int  # places of each device

    def add(self, tree: PyTree) -> PyTree:
        """The sum over devices, all arrays of a kind in one message; Scaled numbers are brought to one exponent."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_scaled)
        plain = [i for i, leaf in enumerate(leaves) if not is_scaled(leaf)]
        scaled = [i for i, leaf in enumerate(leaves) if is_scaled(leaf)]
        for i, total in zip(
            plain, _exchange_together(lambda a: lax.psum(a, AXIS), [leaves[i] for i in plain]), strict=True
        ):
            leaves[i] = total
        everywhere = _exchange_together(
            _stack_devices, [part for i in scaled for part in (leaves[i].shift, leaves[i].value)]
        )
        for number, i in enumerate(scaled):
            shifts, values = everywhere[2 * number : 2 * number + 2]
            leaves[i] = _add_scaled(shifts, values)
        return jax.tree.unflatten(structure, leaves)

    def gather(self, tree: PyTree) -> PyTree:
        """The values of this device's participants, leaves [room, ...], to those of all in the cohort's order."""
        owner = self.participants.position // self.blocks.size
        of_device = owner[:, None] == jnp.arange(self.blocks.mesh.size)[None]
        rank = jnp.take_along_axis(jnp.cumsum(of_device, 0), owner[:, None], 1)[:, 0] - 1
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [a[owner, rank] for a in _exchange_together(_stack_devices, leaves)])


def _stack_devices(values: Array) -> Array:
    return lax.all_gather(values, AXIS)


def _exchange_together(exchange: Callable[[Array], Array], leaves: list[Array]) -> list[Array]:
    """An exchange of vectors applied to many arrays, all of one kind in a single message: messages are what costs. Axes
    that the exchange puts before the vector's stay."""
    results: dict[int, Array] = {}
    for kind in dict.fromkeys(jnp.result_type(leaf) for leaf in leaves):
        members = [i for i, leaf in enumerate(leaves) if jnp.result_type(leaf) == kind]
        answer = exchange(jnp.concatenate([jnp.ravel(leaves[i]) for i in members]))
        ends = np.cumsum([jnp.size(leaves[i]) for i in members])
        for i, part in zip(members, jnp.split(answer, ends[:-1], axis=-1), strict=True):
            results[i] = part.reshape(*answer.shape[:-1], *jnp.shape(leaves[i]))
    return [results[i] for i in range(len(leaves))]


def _add_scaled(shifts: Array, values: Array) -> Scaled:
    """The sum over the leading axis."""
    shift = jnp.max(shifts)
    factors = jnp.exp(jnp.minimum(shifts - shift, 0))
    return Scaled(shift, jnp.tensordot(factors, values, 1))


def _change_rows(task: Task, change: Callable[[Rows], Rows], rest: Callable[[Any], Any] = lambda a: a) -> Task:
    """The task with other rows: its own, and all that a task of more than one pool has of the same clients."""

    def one(node: Any) -> Any:
        if isinstance(node, Rows) and node.clients == task.clients:
            return change(node)
        return rest(node)

    return jax.tree.map(one, task, is_leaf=lambda node: isinstance(node, Rows))


def find_blocks(task: Task) -> Blocks | None:
    """The blocks of a task's clients on all devices of all processes; None where there is one device."""
    devices = jax.devices()
    if len(devices) == 1:
        return None
    ids = np.asarray(task.data.ids)
    for node in jax.tree.leaves(task, is_leaf=lambda node: isinstance(node, Rows)):
        if isinstance(node, Rows) and node.clients == task.clients and not np.array_equal(np.asarray(node.ids), ids):
            raise UserError(
                "the task has two pools of rows with the same number of clients and other ids; on several devices give "
                "them the same clients in the same order."
            )
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    return Blocks(mesh, task.clients)
