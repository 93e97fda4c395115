"""Experiments of the papers, repeated: numbers beside the published ones, and a verdict on every claim."""

import shlex
from collections.abc import Callable
from pathlib import Path

from nestfed.core import UserError
from nestfed.methods import nearest
from nestfed.reproduce import fairness

EXPERIMENTS: dict[str, Callable[..., Path]] = {"fairness": fairness.run}


def reproduce(
    experiment: str, *, out: str | Path | None = None, quick: bool = False, progress: bool | None = None
) -> Path:
    """Repeat an experiment; returns the page with its results. `quick` is a small version that only shows it works."""
    if experiment not in EXPERIMENTS:
        raise UserError(f"there is no experiment {experiment!r}{nearest(experiment, EXPERIMENTS)}")
    folder = Path(out) if out is not None else Path("runs") / f"reproduce-{experiment}"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty; give another folder (--out).")
    folder.mkdir(parents=True, exist_ok=True)
    words = ["nestfed", "reproduce", experiment, *(["--quick"] if quick else []), "--out", str(folder)]
    return EXPERIMENTS[experiment](folder, shlex.join(words), quick=quick, progress=progress)
