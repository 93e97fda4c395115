"""Several processes of one run, on one machine or on many: what all of them must know alike.

Every process runs the same program and calls the same functions in the same order; JAX carries values between them
(`jax.distributed`). What a process would decide by its own clock, files or signals is decided once for all, here. With
one process these functions do nothing.
"""

import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from nestfed.core.settings import UserError
from nestfed.core.types import Array

HEARTBEAT = 30  # seconds after which a process that says nothing is given up


def join(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Become one of several processes; what is None is found by JAX (SLURM, Open MPI). Before anything else of JAX."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, processes, process_id, heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=120
    )


def are_several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    """The process that writes files and talks to the user."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    if not are_several():
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(content.size)))
    padded = np.zeros(max(1, lengths.max()), np.uint8)
    padded[: content.size] = content
    everywhere = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length].tobytes().decode() for row, length in zip(everywhere, lengths, strict=True)]


def check_alike(describe: Callable[[], Mapping[str, str]], words: Mapping[str, str] | None = None) -> None:
    """Refuse, in all processes and with the same line, what is not the same in all of them. `describe` gives it part by
    part; `words` say what differs where the parts themselves would tell a reader nothing."""
    if not are_several():
        return
    everywhere = [json.loads(text) for text in gather_texts(json.dumps(_list_versions() | dict(describe())))]
    first = everywhere[0]
    for process, theirs in enumerate(everywhere):
        different = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if different:
            told = _tell(different, theirs, first, words or {})
            raise UserError(f"process {process} does not run what process 0 runs ({told}); start all alike.")


def _list_versions() -> dict[str, str]:
    names = ("nestfed", "jax", "jaxlib", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"Python": platform.python_version(), "precision": str(jax.numpy.result_type(float))}


def _tell(different: list[str], theirs: Any, first: Any, words: Mapping[str, str]) -> str:
    """What differs. What words tell is left out where values tell it too: a setting is also a part of the task."""
    values = [
        f"{name}: {theirs.get(name)} there, {first.get(name)} in process 0" for name in different if name not in words
    ]
    return "; ".join(values or [words[name] for name in different])


def ask_first(question: Callable[[], Any]) -> Any:
    """The answer of the first process, which alone computes it; a plain value. What it refuses, all refuse."""
    if not are_several():
        return question()
    told: dict[str, Any] = {}
    if is_first():
        try:
            told = {"answer": question()}
        except UserError as error:
            told = {"refused": str(error)}
    told = json.loads(gather_texts(json.dumps(told))[0])
    if "refused" in told:
        raise UserError(told["refused"])
    return told["answer"]


def share_content(content: bytes | None) -> bytes | None:
    """What the first process has; the others' is not looked at."""
    if not are_several():
        return content
    size = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if content is None else len(content))))
    if size < 0:
        return None
    mine = np.frombuffer(content, np.uint8) if is_first() and content is not None else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(mine)).tobytes()


def share_key(key: Array) -> Array:
    """The random key of the first process."""
    if not are_several():
        return key
    data = multihost_utils.broadcast_one_to_all(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(jax.numpy.asarray(np.asarray(data)), impl=jax.random.key_impl(key))


def decide(length: int, due: bool, stop: bool) -> tuple[int, bool, bool]:
    """(rounds of the next piece and whether to save, as the first process has it; should any process stop?)."""
    if not are_several():
        return length, due, stop
    everywhere = np.asarray(multihost_utils.process_allgather(np.asarray([length, due, stop], np.int32)))
    return int(everywhere[0, 0]), bool(everywhere[0, 1]), bool(everywhere[:, 2].any())
