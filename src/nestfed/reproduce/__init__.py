"""Experiments of the papers, repeated: numbers beside the published ones, and a verdict on every claim."""

import shlex
from collections.abc import Callable
from pathlib import Path

from nestfed.core import UserError
from nestfed.methods import nearest
from nestfed.reproduce import auprc, counterexample, fairness, images, invariant, maml, noisy_groups, personal, privacy

EXPERIMENTS: dict[str, Callable[..., Path]] = {
    "fairness": fairness.run,
    "counterexample": counterexample.run,
    "dro-images": images.run,
    "dro-fairness": noisy_groups.run,
    "invariant": invariant.run,
    "maml": maml.run,
    "auprc": auprc.run,
    "personal": personal.run,
    "privacy": privacy.run,
}


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
        raise UserError(f"there is no experiment {experiment!r}{nearest(experiment, EXPERIMENTS)}")
    folder = Path(out) if out is not None else Path("runs") / f"reproduce-{experiment}"
    if not resume and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty; give another folder (--out), or go on in it (--resume).")
    folder.mkdir(parents=True, exist_ok=True)
    words = ["nestfed", "reproduce", experiment, *(["--quick"] if quick else []), "--out", str(folder)]
    return EXPERIMENTS[experiment](folder, shlex.join(words), quick=quick, progress=progress)
