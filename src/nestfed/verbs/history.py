"""What a run records on the host: evaluations by round, who took part, and what steps noted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nestfed.core.settings import UserError

RISE = 0.02  # as a part of where it began: an objective that ends so far above was not made small
NOTED = "noted/"  # prefix of a round's notes in a checkpoint


class Rise(NamedTuple):
    """An objective that ended above its start: the run made it worse."""

    metric: str
    start: float
    end: float

    @property
    def remark(self) -> str:
        return (
            f"the training objective ({self.metric}) ended at {self.end:.4g}, above {self.start:.4g} where it began: "
            "this is not a result, training went astray. Use a smaller step size, or fewer local steps."
        )


def find_rise(history: Mapping[str, np.ndarray], metric: str | None, output: str = "last") -> Rise | None:
    """How much the objective of a run rose, if it did; the output rule "best" may have kept a good state."""
    values = np.asarray(history.get(metric or "", ()), float)
    if values.ndim != 1 or len(values) < 2 or output == "best":
        return None
    start, end = float(values[0]), float(values[-1])
    return Rise(metric or "", start, end) if end > start + RISE * abs(start) else None


def average_notes(noted: np.ndarray, evaluated: Sequence[int]) -> np.ndarray:
    """The mean of what was noted between evaluations: [..., rounds, (sum, number)] -> [..., evaluations]; NaN where
    nothing was."""
    ends = np.asarray(evaluated, int)
    nothing = np.zeros((*noted.shape[:-2], 1, 2))
    totals = np.concatenate([nothing, np.cumsum(noted, axis=-2)], axis=-2)
    since = np.diff(totals[..., ends, :], axis=-2, prepend=nothing)
    with np.errstate(invalid="ignore", divide="ignore"):
        return since[..., 0] / since[..., 1]


def check_select(select: str | None, recorded: Iterable[str]) -> None:
    """Is the metric to choose by among those that are recorded?"""
    if select is not None and select not in (names := list(recorded)):
        raise UserError(f"select={select!r}: there is no metric {select!r}; recorded are {', '.join(names)}.")


class History:
    """Evaluations, participants and notes so far, on the host; `first` is the number of rounds before."""

    def __init__(self, first: int = 0):
        self._first = first
        self._rounds: list[int] = []
        self._values: list[dict[str, np.ndarray]] = []
        self._participants: list[np.ndarray] = []
        self._noted: dict[str, list[np.ndarray]] = {}  # [rounds, (sum, number)] each

    @classmethod
    def restore(cls, arrays: dict[str, np.ndarray]) -> "History":
        """From what `list_arrays` gave."""
        history = cls()
        history._noted = {name.removeprefix(NOTED): [a] for name, a in arrays.items() if name.startswith(NOTED)}
        history._participants = [arrays["participants"]]
        history._rounds = arrays["round"].tolist()
        apart = {"participants", "round", *history._noted, *(NOTED + name for name in history._noted)}
        columns = {name: column for name, column in arrays.items() if name not in apart}
        history._values = [{name: column[i] for name, column in columns.items()} for i in range(len(history._rounds))]
        return history

    def add(self, round: int, values: Mapping[str, Any]) -> None:
        self._rounds.append(round)
        self._values.append({name: np.asarray(v) for name, v in values.items()})

    def extend(
        self,
        rows: dict[str, Any],
        first: int,
        length: int,
        every: int | None,
        more: Callable[[int], dict[str, Any]] = lambda round: {},
    ) -> None:
        """Rows of `length` rounds from round `first` on; `more` knows further columns of a round."""
        self._participants.append(np.asarray(rows["participants"])[:length])
        for name, values in rows["notes"].items():
            self._noted.setdefault(name, []).append(np.asarray(values)[:length])
        metrics = {name: np.asarray(column)[:length] for name, column in rows["metrics"].items()}
        for i in range(length):
            if every and (first + i + 1) % every == 0:
                self.add(first + i + 1, {name: column[i] for name, column in metrics.items()} | more(first + i + 1))

    def has(self, round: int) -> bool:
        return bool(self._rounds) and self._rounds[-1] == round

    def find_latest(self) -> dict[str, np.ndarray]:
        """The last evaluation."""
        return {name: column[-1] for name, column in self.evaluations().items() if name != "round" and len(column)}

    def evaluations(self) -> dict[str, np.ndarray]:
        """The columns of all evaluations; those of notes are means since the evaluation before."""
        names = self._values[0] if self._values else ()
        columns = {"round": np.asarray(self._rounds, int)} | {n: np.stack([v[n] for v in self._values]) for n in names}
        ends = [round - self._first for round in self._rounds]
        return columns | {name: average_notes(noted, ends) for name, noted in self.noted().items()}

    def participants(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self._participants])

    def noted(self) -> dict[str, np.ndarray]:
        """What steps noted: the sum over those who took part and how many numbers that are, round by round."""
        return {name: np.concatenate([np.zeros((0, 2)), *parts]) for name, parts in self._noted.items()}

    def list_arrays(self) -> dict[str, np.ndarray]:
        """All of it, for a checkpoint."""
        noted = {f"{NOTED}{name}": values for name, values in self.noted().items()}
        return self.evaluations() | noted | {"participants": self.participants()}
