"""Experiments of the papers, repeated: numbers beside the published ones, and a verdict on every claim."""

import importlib
from pathlib import Path
from typing import Any

from nestfed.core.settings import UserError, suggest

# The names on the command line, and what is repeated; a folder here has the same name, with _ for -. Nothing else is
# known before an experiment is asked for: to import one takes JAX and seconds.
EXPERIMENTS = {
    "fairness": "fair classifiers on Adult and German Credit: Table 1 and Figures 1 and 2 of the FedBiO paper",
    "counterexample": "where averaging models goes the wrong way: Theorem D.1 and Figure 7 of the FedDRO paper",
    "dro-images": "imbalanced CIFAR-10 with ResNet20: Figures 1, 2 and 4 of the FedDRO paper (a GPU)",
    "dro-fairness": "Adult with noisy groups: Figures 3, 5 and 6 of the FedDRO paper",
    "invariant": "logistic regression on noisy views of its inputs: Figure 1 of the FCSG paper",
    "maml": "meta-learning on Omniglot and sine waves: Figures 2 and 3 of the FCSG paper (a GPU)",
    "auprc": "rare images of MNIST and CIFAR-10: Table 2 of the FCSG paper (a GPU)",
    "personal": "a model per client on images: the appendix of the FedReCo paper (a GPU)",
    "privacy": "accuracy against privacy, with noise on every upload: FedReCo and FedAvg (a GPU)",
}


def find(name: str) -> Any:
    """The experiment of this name, a `frame.Experiment`."""
    return importlib.import_module(f"nestfed.experiments.{name.replace('-', '_')}.page").EXPERIMENT


def reproduce(
    experiment: str,
    *,
    out: str | Path | None = None,
    quick: bool = False,
    resume: bool = False,
    from_cells: bool = False,
    progress: bool | None = None,
) -> Path:
    """Repeat an experiment; returns the page with its results.

    quick    a small version that only shows that it works
    resume   go on in a folder that is there: trainings that were kept as cells are not done again
    from_cells   write tables, figures, verdicts and page again from the cells in the folder (in a clone of the
             repository those of experiments/, if no other is given): nothing is trained, and no data are needed
    """
    if experiment not in EXPERIMENTS:
        hint = f"{suggest(experiment, EXPERIMENTS)} Known are {', '.join(EXPERIMENTS)}."
        raise UserError(f"there is no experiment {experiment!r}{hint}")
    if from_cells:
        return find(experiment).write_again(Path(out or Path("experiments") / experiment), quick=quick)
    folder = Path(out) if out is not None else Path("runs") / f"reproduce-{experiment}"
    if not resume and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty; give another folder (--out), or go on in it (--resume).")
    folder.mkdir(parents=True, exist_ok=True)
    return find(experiment).run(folder, quick=quick, progress=progress)
