"""How a run goes: everything a user may choose beside the algorithm, the task and the seed, checked once."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.settings import UserError, setting, suggest, validate
from nestfed.core.types import Array, Seed
from nestfed.engine.cohorts import SAMPLINGS
from nestfed.uploads.privacy import Uploads, list_transforms

OUTPUTS = ("last", "average", "random", "best")
CLIENT_AXES = ("auto", "vmap", "map")
Watch = Callable[[int, Mapping[str, np.ndarray]], None]  # (round, metrics)


class Changes(TypedDict, total=False):
    """The fields of `Options`, for calls that give them by name: simulate(algorithm, task, rounds=50, cohort=10)."""

    rounds: int | None
    cohort: int | float | None
    sampling: str
    dropout: float
    evaluate_every: int | None
    metrics: Callable[..., dict[str, Any]] | None
    output: str
    select: str | None
    unsynced: bool
    client_axis: str
    client_chunk: int | None
    uploads: Uploads
    noise_seed: int | None
    checkpoint: str | Path | None
    checkpoint_every: int | None
    resume: bool
    progress: bool | None
    title: str | None
    watch: Watch | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a run goes.

    rounds            how many
    cohort            clients per round: a number, a fraction (0.1), or None for all
    sampling          how they are drawn: "weights" (a client's chance goes with its weight, so that the stated problem
                      is solved), "uniform" (all alike; with unequal weights that is another problem), or "poisson"
                      (each by a coin of its own: `cohort` is the expected number). See `nestfed.engine.cohorts`
    dropout           probability that a chosen client fails to take part in a round
    evaluate_every    rounds between two evaluations, or None; the start and the end are always evaluated
    metrics           more metrics: a client program (task, server, client, data, fed) -> dict (see `diagnostics`)
    output            which iterate `Result.output` is: "last", "average", "random", or "best" by the metric `select`
                      (smallest value; use one computed on validation data)
    unsynced          keep each client's state before the last step of its round, for diagnostics of client drift
    client_axis       "vmap" (clients side by side), "map" (client after client, `client_chunk` at a time), or "auto"
    uploads           what happens to uploads on their way (`nestfed.uploads`): transforms, or a guarantee such as
                      LocalDP. With noise the history has `signal_to_noise` (norm of the mean of the uploads / norm of
                      the noise in it), with a clip `clipped_uploads`, with a guarantee `epsilon`; a run ends before a
                      round that would exceed the guarantee's budget, and says so in `Result.remarks`
    noise_seed        None: noise comes from the operating system's entropy, and no two runs share it. A whole number
                      makes it repeatable, for tests: it then protects nobody, and the result says so
    checkpoint        a file that holds the run from time to time (or every `checkpoint_every` rounds), at the end, and
                      when the run is interrupted or diverges; `resume=True` goes on from it, bit for bit
    progress          show a progress bar; None: if standard error is a terminal; `title` stands beside it
    watch             is called with the round and the metrics of every evaluation soon after it is made (`simulate`);
                      of a run that goes on, with those of before too
    """

    rounds: int | None = setting("how many rounds", default=None, at_least=1, static=True)
    cohort: int | float | None = None
    sampling: str = setting("how a cohort is drawn", default="weights", choices=SAMPLINGS, static=True)
    dropout: float = setting("probability that a client fails in a round", default=0.0, at_least=0, below=1)
    evaluate_every: int | None = 1
    metrics: Callable[..., dict[str, Any]] | None = None
    output: str = setting("which iterate is the result", default="last", choices=OUTPUTS, static=True)
    select: str | None = None
    unsynced: bool = False
    client_axis: str = setting("how clients run", default="auto", choices=CLIENT_AXES, static=True)
    client_chunk: int | None = setting("clients at a time", default=None, at_least=1, static=True)
    uploads: Uploads = ()
    noise_seed: int | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = setting("rounds between two saves", default=None, at_least=1, static=True)
    resume: bool = False
    progress: bool | None = None
    title: str | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        validate(self)
        if self.evaluate_every is not None:
            check_positive("evaluate_every", self.evaluate_every)
        if self.metrics is not None and not callable(self.metrics):
            raise UserError(
                f"metrics={self.metrics!r} was given; give a function (task, server, client, data, fed) -> dict."
            )
        for name in ("unsynced", "resume"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} was given; it must be True or False.")
        if self.progress not in (None, True, False):
            raise UserError(f"progress={self.progress!r} was given; it must be True, False or None.")
        if not isinstance(self.checkpoint, (str, Path, NoneType)):
            raise UserError(f"checkpoint={self.checkpoint!r} was given; give the path of a file.")
        list_transforms(self.uploads)
        if (self.output == "best") != (self.select is not None):
            raise UserError("output='best' goes with select=<name of a metric on validation data>, and only with it.")
        if self.output == "best" and self.evaluate_every is None:
            raise UserError("output='best' needs evaluations to choose by; give evaluate_every a number.")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise UserError("checkpoint_every was given without checkpoint; give the path of a file.")

    @property
    def file(self) -> Path | None:
        """The checkpoint's."""
        return None if self.checkpoint is None else Path(self.checkpoint)

    def need_rounds(self) -> int:
        """The number of rounds, which only some verbs need."""
        if self.rounds is None:
            raise UserError("the number of rounds is missing; give rounds=, for example rounds=100.")
        return self.rounds


NAMES = tuple(field.name for field in dataclasses.fields(Options))


def make_options(options: Options | None, changes: Mapping[str, Any]) -> Options:
    """The options with these changes; a wrong name gets the nearest right one."""
    for name in changes:
        if name not in NAMES:
            hint = suggest(name, NAMES)
            raise UserError(f"there is no option {name!r}{hint} The options of a run are {', '.join(NAMES)}.")
    if options is not None and not isinstance(options, Options):
        raise UserError(f"options={options!r} was given; give a nestfed.Options(...), or options by name.")
    return dataclasses.replace(Options() if options is None else options, **changes)


def make_key(seed: Seed) -> Array:
    """A JAX key from a whole number, or the key itself."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return jax.random.key(int(seed))
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0:
        return seed
    raise UserError(f"seed={seed!r} was given; it must be a whole number or a key made by jax.random.key.")


def check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r} was given; it must be a whole number, 1 or more.")
