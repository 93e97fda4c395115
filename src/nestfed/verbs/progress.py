"""The progress bar of a run: rounds per second, current metrics, time left."""

import sys
from typing import Any

import numpy as np


class Progress:
    """Show a bar on standard error if `show` says so; `None` means: if a person is looking."""

    def __init__(self, title: str, total: int, done: int, show: bool | None):
        self._bar = None
        if sys.stderr.isatty() if show is None else show:
            from rich import console, progress  # slow to import, and often nobody is looking

            columns = [
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[speed]}"),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[values]}"),
            ]
            self._bar = progress.Progress(*columns, console=console.Console(stderr=True))
            self._task = self._bar.add_task(title, total=total, completed=done, speed="compiling", values="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, rounds_per_second: float, values: dict[str, Any]) -> None:
        if self._bar:
            speed = f"{rounds_per_second:,.1f} rounds/s"
            shown = "  ".join(f"{name} {float(v):.4g}" for name, v in values.items() if np.ndim(v) == 0)
            self._bar.update(self._task, completed=done, speed=speed, values=shown)
