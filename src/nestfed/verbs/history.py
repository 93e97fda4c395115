"""What a run records on the host: evaluations by round, and who took part."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

RISE = 0.02  # as a part of where it began: an objective that ends so far above was not made small


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


def rise_of(history: Mapping[str, np.ndarray], metric: str | None, output: str = "last") -> Rise | None:
    """How much the objective of a run rose, if it did; the output rule "best" may have kept a good state."""
    values = np.asarray(history.get(metric or "", ()), float)
    if values.ndim != 1 or len(values) < 2 or output == "best":
        return None
    start, end = float(values[0]), float(values[-1])
    return Rise(metric or "", start, end) if end > start + RISE * abs(start) else None


class History:
    """Evaluations and participants so far, on the host."""

    def __init__(self):
        self._rounds: list[int] = []
        self._values: list[dict[str, np.ndarray]] = []
        self._participants: list[np.ndarray] = []

    @classmethod
    def restored(cls, arrays: dict[str, np.ndarray]) -> "History":
        history = cls()
        history._participants = [arrays.pop("participants")]
        history._rounds = arrays.pop("round").tolist()
        history._values = [{name: column[i] for name, column in arrays.items()} for i in range(len(history._rounds))]
        return history

    def add(self, round: int, values: dict[str, Any]) -> None:
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
        rows = {name: np.asarray(column)[:length] for name, column in rows.items()}
        self._participants.append(rows.pop("participants"))
        for i in range(length):
            if every and (first + i + 1) % every == 0:
                values = {name: column[i] for name, column in rows.items()}
                self.add(first + i + 1, values | more(first + i + 1))

    def has(self, round: int) -> bool:
        return bool(self._rounds) and self._rounds[-1] == round

    def latest(self) -> dict[str, np.ndarray]:
        return self._values[-1] if self._values else {}

    def evaluations(self) -> dict[str, np.ndarray]:
        names = self._values[0] if self._values else ()
        return {"round": np.asarray(self._rounds, int)} | {n: np.stack([v[n] for v in self._values]) for n in names}

    def participants(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self._participants])

    def arrays(self) -> dict[str, np.ndarray]:
        return self.evaluations() | {"participants": self.participants()}
