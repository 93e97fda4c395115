"""What a run tells while it goes on: to MLflow, TensorBoard, Weights & Biases, or to whatever listens.

A tracker hears four things: that a run begins (its name, folder and settings), every evaluation of every method and
seed soon after it was made, the finished study (final numbers, tables, models, report), and how it all ended.
"""

import contextlib
import importlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestfed.core.settings import UserError
from nestfed.report import tables
from nestfed.report.record import Record
from nestfed.workbench.fields import flatten
from nestfed.workbench.stages import Evaluation, name_series, select_finite
from nestfed.workbench.study import Study
from nestfed.workbench.task_options import TRACKERS

PROJECT = "nestfed"  # where a tracker wants a name for what is not named otherwise
ARTEFACTS = ("settings.toml", "report.html", "figures", "tables", "models")  # of a run's folder


class Tracker:
    """Hears what a run does. Override what you need; an error of yours ends the run."""

    def begin(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Before training; the settings are those of settings.toml, tables with dots: set.lr."""

    def evaluate(self, evaluation: Evaluation) -> None:
        """Soon after every evaluation. A run that is resumed tells those of before again."""

    def finish(self, study: Study) -> None:
        """Once the study and its folder are complete."""

    def close(self, status: str) -> None:
        """Always, at the very end: "finished", "interrupted" or "failed"."""


class Trackers(Tracker):
    """Several as one."""

    def __init__(self, members: Sequence[Tracker]):
        self.members = members

    def begin(self, name, folder, settings):
        for member in self.members:
            member.begin(name, folder, settings)

    def evaluate(self, evaluation):
        for member in self.members:
            member.evaluate(evaluation)

    def finish(self, study):
        for member in self.members:
            member.finish(study)

    def close(self, status):
        for member in self.members:
            member.close(status)


def find_trackers(asked: str | Tracker | Sequence[str | Tracker] | None) -> Trackers:
    """Trackers from names and objects; a package that is missing shows here, before anything is computed."""
    several = [asked] if isinstance(asked, (str, Tracker)) else list(asked or ())
    for one in several:
        if not isinstance(one, Tracker) and one not in NAMED:
            raise UserError(f"track={one!r} was given; use {', '.join(map(repr, TRACKERS))}, or a nestfed.Tracker.")
    return Trackers([one if isinstance(one, Tracker) else NAMED[one]() for one in several])


@contextlib.contextmanager
def follow(trackers: Trackers, name: str, folder: Path, settings: Mapping[str, Any]) -> Iterator[Trackers]:
    """From a run's beginning to its end, however it ends; whoever makes the study tells of it."""
    status = "failed"
    try:
        trackers.begin(name, folder, flatten(settings))
        yield trackers
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        trackers.close(status)


def collect_final_metrics(record: Record) -> dict[str, dict[str, float]]:
    """The numbers of `Record.final` of every method and seed, by series; none of one that diverged."""
    metrics = record.final.drop(columns=["method", "seed", "status", "above_start"]).select_dtypes("number")
    series = map(name_series, record.final["method"], record.final["seed"])
    return {name: select_finite(row) for name, row in zip(series, metrics.to_dict("records"), strict=True)}


def average_metrics(record: Record) -> dict[str, float]:
    """Means over seeds, by method/metric."""
    means: Any = record.final.drop(columns=["seed", "above_start"]).groupby("method").mean(numeric_only=True)
    return select_finite({f"{method}/{name}": value for (name, method), value in means.unstack().items()})


def _need(module: str, package: str, tracker: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"track={tracker!r} needs the package {package}, which cannot be imported ({error}); install it "
            f"(pip install {package}), or leave track out."
        ) from None


# ------------------------------------------------------------------------------------------------- those with a name


class MLflow(Tracker):
    """A run of MLflow with a child for every method and seed, where MLFLOW_TRACKING_URI says."""

    def __init__(self) -> None:
        self.mlflow = _need("mlflow", "mlflow-skinny", "mlflow")
        self.runs: dict[str, str] = {}  # ids by series; the whole run's is ""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        try:
            self.client = self.mlflow.MlflowClient()
            found = self.client.get_experiment_by_name(name)
            self.experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        except (self.mlflow.exceptions.MlflowException, ImportError) as error:
            where = self.mlflow.get_tracking_uri()
            raise UserError(f"track='mlflow': {where} cannot be used (MLFLOW_TRACKING_URI names it): {error}") from None

    def begin(self, name, folder, settings):
        self.name = name
        self._open("", name, settings, {})

    def _open(self, series: str, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        run = self.client.create_run(self.experiment, run_name=name, tags=dict(tags)).info.run_id
        for key, value in params.items():
            self.client.log_param(run, key, value)
        self.runs[series] = run
        return run

    def evaluate(self, evaluation):
        series = evaluation.series
        if series not in self.runs:
            params = {"method": evaluation.method, "seed": evaluation.seed}
            self._open(series, f"{self.name} {series}", params, {"mlflow.parentRunId": self.runs[""]})
        self._log(series, evaluation.metrics, evaluation.round)

    def _log(self, series: str, metrics: Mapping[str, float], step: int) -> None:
        plain = lambda name: re.sub(r"[^\w\-. :/]", "-", name)
        now = int(1000 * time.time())
        entries = [self.mlflow.entities.Metric(plain(key), value, now, step) for key, value in metrics.items()]
        self.client.log_batch(self.runs[series], metrics=entries)

    def finish(self, study):
        for series, final in collect_final_metrics(study.record).items():
            if series in self.runs:  # one that diverged at its start was never evaluated
                self._log(series, {f"final/{name}": value for name, value in final.items()}, 0)
        self._log("", average_metrics(study.record), 0)
        for path in (study.folder / name for name in ARTEFACTS):
            if path.is_dir():
                self.client.log_artifacts(self.runs[""], str(path), path.name)
            elif path.exists():
                self.client.log_artifact(self.runs[""], str(path))

    def close(self, status):
        known = {"finished": "FINISHED", "interrupted": "KILLED"}
        for run in self.runs.values():
            self.client.set_terminated(run, known.get(status, "FAILED"))


class TensorBoard(Tracker):
    """Event files in the run's folder, tensorboard/<method>-seed<seed>: `tensorboard --logdir runs` shows them."""

    def __init__(self) -> None:
        self.writer = _need("tensorboardX", "tensorboardX", "tensorboard").SummaryWriter
        self.writers: dict[str, Any] = {}  # by series; the whole run's is "run"

    def begin(self, name, folder, settings):
        self.folder = folder / "tensorboard"
        shutil.rmtree(self.folder, ignore_errors=True)  # a run that goes on tells everything again
        rows = [f"| {key} | {value} |" for key, value in settings.items()]
        self._open_writer("run").add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *rows]))

    def _open_writer(self, series: str) -> Any:
        if series not in self.writers:
            self.writers[series] = self.writer(str(self.folder / series))
        return self.writers[series]

    def evaluate(self, evaluation):
        for name, value in evaluation.metrics.items():
            self._open_writer(evaluation.series).add_scalar(name, value, evaluation.round)

    def finish(self, study):
        for series, final in collect_final_metrics(study.record).items():
            for name, value in final.items():
                self._open_writer(series).add_scalar(f"final/{name}", value)
        _, shown = tables.tabulate_headline(study.record)
        self._open_writer("run").add_text("result", tables.format_markdown(shown))
        import matplotlib.image  # slow to import, and figures were drawn: it is there

        for path in study.figures:
            pixels = matplotlib.image.imread(path)[..., :3]
            self._open_writer("run").add_image(path.stem, (255 * pixels).astype(np.uint8), dataformats="HWC")

    def close(self, status):
        for writer in self.writers.values():
            writer.close()


class WandB(Tracker):
    """A group of runs of Weights & Biases: one for every method and seed, and one with the final numbers and files."""

    def __init__(self) -> None:
        self.wandb = _need("wandb", "wandb", "wandb")
        self.runs: dict[str, Any] = {}

    def begin(self, name, folder, settings):
        self.name, self.folder, self.settings = name, folder, dict(settings)
        self._open("report", {})  # who is not logged in learns it before training

    def _open(self, series: str, more: Mapping[str, Any]) -> Any:
        self.runs[series] = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=self.name,
            name=f"{self.name} {series}",
            config={**self.settings, **more},
            dir=str(self.folder),
            reinit="create_new",
        )
        return self.runs[series]

    def evaluate(self, evaluation):
        run = self.runs.get(evaluation.series)
        if run is None:
            run = self._open(evaluation.series, {"method": evaluation.method, "seed": evaluation.seed})
            run.define_metric("*", step_metric="round")  # where a stage begins there are two evaluations of a round
        run.log({"round": evaluation.round, **evaluation.metrics})

    def finish(self, study):
        for series, final in collect_final_metrics(study.record).items():
            if series in self.runs:  # as above
                self.runs[series].summary.update({f"final/{name}": value for name, value in final.items()})
        self.runs["report"].summary.update(average_metrics(study.record))
        files = self.wandb.Artifact(re.sub(r"[^\w.-]", "-", self.name), type="nestfed-run")
        for path in (study.folder / name for name in ARTEFACTS):
            if path.is_dir():
                files.add_dir(str(path), name=path.name)
            elif path.exists():
                files.add_file(str(path))
        self.runs["report"].log_artifact(files)

    def close(self, status):
        for run in self.runs.values():
            run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)


NAMED: dict[str, type[Tracker]] = dict(zip(TRACKERS, (MLflow, TensorBoard, WandB), strict=True))
