"""What a task reports: the numbers of its headline table, and the lines that it draws of final models."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number of the headline table."""

    name: str  # the column of `final` and, where it is recorded over time, of `history`
    title: str  # "test accuracy"
    better: str  # "higher" or "lower"
    digits: int = 4


@dataclasses.dataclass(frozen=True)
class Chart:
    """What the lines of a task's final models show, on axes from 0 to 1."""

    name: str  # "precision-recall": also of its files
    title: str
    x: str
    y: str
    caption: str
