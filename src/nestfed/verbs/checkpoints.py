"""Checkpoints: one file with all of a run, written atomically, and checked before it is believed."""

import contextlib
import io
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from nestfed.core.identity import identify
from nestfed.core.settings import UserError
from nestfed.core.types import PyTree
from nestfed.engine import processes
from nestfed.engine.options import Options
from nestfed.engine.steps import Inputs

FORMAT = "nestfed checkpoint 3"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # byte code differs between these


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the file is left as it is."""


WORDS = {  # of parts that are known by a hash, for whoever resumes with another one
    "task": "the task differs: its data, starting point, problem, or a function or constant that the problem uses",
    "functions": "a function that the algorithm holds (a schedule, an optimiser) differs, or the algorithm's own code",
    "metrics": "the metrics= function differs",
    "transforms": "the code of a transform in uploads= differs",
}


SHAPING = ("cohort", "sampling", "dropout", "evaluate_every", "output", "select", "unsynced")  # of the options


def identify_run(inputs: Inputs, options: Options) -> dict[str, str]:
    """What a checkpoint must have in common with the run that resumes it, part by part."""
    algorithm, key, uploads = inputs.algorithm, inputs.key, inputs.uploads
    parts = {
        "algorithm": _strip_addresses(repr(algorithm)),
        "functions": identify(algorithm, type(algorithm).__name__),
        "task": identify(jax.tree.map(_convert_for_device, inputs.task), "the task"),
        "metrics": identify(options.metrics, "metrics"),
        "seed": f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}",
        "precision": str(jax.numpy.result_type(float)),
        **{name: repr(getattr(options, name)) for name in SHAPING},
    }
    if uploads:
        parts |= {"uploads": _strip_addresses(repr(uploads)), "transforms": identify(uploads, "uploads")}
    if any(transform.noisy for transform in uploads):  # a run is for tests as a whole, or not at all
        parts["noise_seed"] = repr(options.noise_seed)
    return parts


def _convert_for_device(leaf: Any) -> Any:
    """As one device would hold it: on several of them a task stays on the host, where a number may be Python's."""
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def describe_run(inputs: Inputs, options: Options) -> dict[str, str]:
    """What several processes of one run must have in common: all that a checkpoint must, and how they go on."""
    names = ("rounds", "checkpoint_every", "noise_seed", "client_axis", "client_chunk", "resume")
    steering = {name: repr(getattr(options, name)) for name in names}
    return identify_run(inputs, options) | steering | {"checkpoint": repr(options.checkpoint is not None)}


def _strip_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # they differ between processes, and identify() tells what they name


def save(path: Path, identity: dict[str, str], run: PyTree, history: dict[str, np.ndarray]) -> None:
    """A kill leaves the old file or the new one."""
    arrays = {f"run/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(run))}
    arrays |= {f"history/{name}": np.asarray(column) for name, column in history.items()}
    about = {"format": FORMAT, "python": PYTHON, "identity": identity}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, buffer.getbuffer())


def write_durably(path: Path, content: bytes | memoryview, mode: int | None = None) -> None:
    """Write a neighbour file, flush it to the disk, then rename: a kill leaves the old file or the new one."""
    neighbour = path.with_name(f".{path.name}.part")  # one name: what a killed run left is overwritten by the next save
    with neighbour.open("wb") as file:
        if mode is not None:
            os.chmod(neighbour, mode)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(neighbour, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _open(path: Path) -> BinaryIO:
    if not processes.are_several():
        return path.open("rb")
    content = None
    if processes.is_first():
        with contextlib.suppress(OSError):  # what is missing is no complete checkpoint, in all processes
            content = path.read_bytes()
    return io.BytesIO(processes.share_content(content) or b"")


def load(path: Path, identity: dict[str, str], like: PyTree) -> tuple[PyTree, dict[str, np.ndarray]]:
    """(run, history) of a checkpoint of this very run; anything else is one clear error. With several processes the
    first one reads the file."""
    try:
        with _open(path) as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete nestfed checkpoint ({type(error).__name__}: {error}). It was left as it is; "
            "move it away to start afresh, or give another checkpoint path."
        ) from error
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} has the format {about.get('format')!r}; this version reads {FORMAT!r}.")
    theirs = about["identity"]
    different = [name for name in identity | theirs if identity.get(name) != theirs.get(name)]
    if different:
        shown = [name for name in different if name not in WORDS or different == [name]] or different
        details = "; ".join(
            WORDS.get(name) or f"{name}: {theirs.get(name)} in the file, {identity.get(name)} now" for name in shown
        )
        if about.get("python") != PYTHON:
            details += f"; the file was written by Python {about.get('python')}, whose code differs from {PYTHON}'s"
        raise CheckpointError(
            f"{path} belongs to another run ({details}). It was left as it is; give another checkpoint path, or the "
            "settings of that run."
        )
    leaves, structure = jax.tree.flatten(like)
    stored = [arrays.get(f"run/{i}") for i in range(len(leaves))]
    for mine, old in zip(leaves, stored, strict=True):
        if old is None or old.shape != mine.shape or old.dtype != mine.dtype:
            raise CheckpointError(f"{path} holds a state of another shape; it was left as it is.")
    history = {name.removeprefix("history/"): a for name, a in arrays.items() if name.startswith("history/")}
    return jax.tree.unflatten(structure, [jax.numpy.asarray(a) for a in stored]), history
