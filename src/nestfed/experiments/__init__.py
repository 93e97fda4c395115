"""Experiments of the papers, repeated: numbers beside the published ones, and a verdict on every claim."""

import importlib
import shlex
from pathlib import Path

from nestfed.core.settings import UserError, suggest

EXPERIMENTS = (
    "fairness", "counterexample", "dro-images", "dro-fairness", "invariant", "maml", "auprc", "personal", "privacy"
)  # fmt: skip


def reproduce(
    experiment: str,
    *,
    out: str | Path | None = None,
    quick: bool = False,
    resume: bool = False,
    progress: bool | None = None,
) -> Path:
    """Repeat an experiment; returns the page with its results.

    quick    a small version that only shows that it works
    resume   go on in a folder that is there: trainings that were kept as cells are not done again
    """
    if experiment not in EXPERIMENTS:
        hint = f"{suggest(experiment, EXPERIMENTS)} Known are {', '.join(EXPERIMENTS)}."
        raise UserError(f"there is no experiment {experiment!r}{hint}")
    folder = Path(out) if out is not None else Path("runs") / f"reproduce-{experiment}"
    if not resume and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty; give another folder (--out), or go on in it (--resume).")
    folder.mkdir(parents=True, exist_ok=True)
    words = ["nestfed", "reproduce", experiment, *(["--quick"] if quick else []), "--out", str(folder)]
    plan = importlib.import_module(f"nestfed.experiments.{experiment.replace('-', '_')}.plan")
    return plan.run(folder, shlex.join(words), quick=quick, progress=progress)
