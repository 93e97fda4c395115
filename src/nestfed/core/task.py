"""A task: a problem with data, a starting point and weights."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, TypedDict

import numpy as np

from nestfed.core.algorithm import Fed
from nestfed.core.rows import ClientRows, Rows, read_whole_numbers
from nestfed.core.settings import UserError, static, struct, suggest, validate
from nestfed.core.types import AnyArray, Array, PyTree

Weights = str | Sequence[float] | AnyArray  # "uniform", "samples", or a number for every client


class TaskFields(TypedDict, total=False):
    """What every task has beside its problem, for functions that make one and hand this on to `Task.create`."""

    weights: Weights
    batch_size: int
    local_steps: Sequence[int] | None


@struct
class Task:
    """A problem with data, a starting point and weights. Make one with `create`; subclass to add metrics.

    `params` are flat vectors, one per variable of the problem (`Problem.variables`); the user's own parameter trees
    were flattened by `create`, and the problem's functions see them as trees again.
    """

    problem: Any
    data: Rows
    params: tuple[Array, ...]
    weights: AnyArray  # [clients]; a client of weight zero takes part in nothing
    local_steps: AnyArray | None = None  # [clients]: own numbers of local steps, for algorithms that allow it
    batch_size: int = static(default=1)

    @classmethod
    def create(
        cls,
        problem: Any,
        data: Rows,
        params: PyTree,
        *,
        weights: Weights = "uniform",
        batch_size: int = 1,
        local_steps: Sequence[int] | None = None,
        **fields: Any,
    ) -> Self:
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
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                given = f"there is no option {name!r} of {cls.__name__}"
                raise UserError(f"{given}{suggest(name, known)} Known are {', '.join(known)}.")
        if not isinstance(data, Rows):
            raise UserError(
                f"data of type {type(data).__name__} were given; make them with Rows.from_clients or from_table."
            )
        problem, flat = problem.bind(params)
        of_clients = _check_weights(weights, data)
        task = cls(
            problem=problem.fit_to(data, of_clients),
            data=data,
            params=flat,
            weights=of_clients,
            batch_size=int(batch_size),
            local_steps=None if local_steps is None else _check_local_steps(local_steps, data),
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

    def training_rows(self, data: ClientRows) -> ClientRows:
        """The rows that a client trains on, of all that it holds: what an algorithm may pass over (`fed.rows`)."""
        return data

    def sample(self, data: ClientRows, key: Array) -> PyTree:
        """One batch of one client's data."""
        return self.problem.sample(data, key, self.batch_size)

    def metrics(self, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
        """What a run records, again as a client program; the default is the problem's objective over all rows."""
        return self.problem.metrics(server, client, data, fed)

    def mean_metrics(self, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
        """What a run records where `metrics` would gather clients' values and may not: `fed.mean` alone is allowed."""
        return self.problem.metrics(server, client, data, fed)


def _check_weights(weights: Weights, data: Rows) -> np.ndarray:
    if isinstance(weights, str):
        if weights not in ("uniform", "samples"):
            raise UserError(f"weights={weights!r} was given; use 'uniform', 'samples' or one number per client.")
        raw = np.ones(data.clients) if weights == "uniform" else np.asarray(data.sizes, float)
    else:
        raw = np.asarray(weights)
        if raw.dtype.kind not in "biuf":
            raise UserError(f"weights={weights!r} was given; use 'uniform', 'samples' or one number per client.")
        raw = raw.astype(float)
    if raw.shape != (data.clients,):
        raise UserError(f"weights of shape {raw.shape} were given for {data.clients} clients; give one per client.")
    if not np.isfinite(raw).all() or (raw < 0).any() or raw.sum() == 0:
        raise UserError(f"weights={raw.tolist()} must be finite, not negative, and not all zero.")
    return raw / raw.sum()


def _check_local_steps(steps: Any, data: Rows) -> np.ndarray:
    chosen = read_whole_numbers(steps, data.clients)
    if chosen is None or (chosen < 1).any():
        raise UserError(
            f"local_steps={steps!r} must be one whole number, 1 or more, for each of {data.clients} clients."
        )
    return chosen
