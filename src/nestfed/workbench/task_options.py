"""What a user may ask for: the options of every run, and those of each task.

Each option stands here once. Its field gives the flag and its help, the key of a TOML file, the keyword of
`nestfed.run`, the check, and the way back to a file or a command line (`fields.py`). What a task does with its options
is in `scenarios/`. Nothing here imports JAX or pandas: help must come at once.
"""

import dataclasses
import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nestfed.core.settings import UserError, suggest
from nestfed.workbench.fields import OptionSet, flatten, list_options, option

TASK, DATA, TRAINING, PRIVACY, CLUSTER = "Task", "Data", "Training", "Privacy", "Several processes"  # headings of help
DELTA = 1e-5  # of a guarantee
NEIGHBOURS = "replace"  # of a guarantee
LARGE_TABLE = 5000  # rows; a table of more of them has larger batches
BATCH_SIZES = (32, 128)  # of a small table and of a large one
UNEVEN = "dirichlet:0.5"  # clients that differ
TRACKERS = ("mlflow", "tensorboard", "wandb")  # that a run can tell of itself
MODELS = ("logistic", "network", "tabular")
FEATURES = {"tabular": "piecewise"}  # the usual recipe of a model, where it is not the standard one
PATH_MARKS = "./\\*?["  # no data set by name has one of these


def lower_all(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.lower() for name in names)


def locate(data: str) -> str:
    """A file, a folder/ or a pattern by its whole path: the run can go on from any folder."""
    is_folder = os.path.isdir(data) and is_path(data)  # pathlib raises where a name is too long for a file
    return str(Path(data).resolve()) if is_folder or os.path.isfile(data) or glob.has_magic(data) else data


def is_path(data: str) -> bool:
    """Is it the user's own, and no data set by name?"""
    return any(mark in data for mark in PATH_MARKS)


# ------------------------------------------------------------------------------------------------- every run


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonOptions(OptionSet):
    """What every run has, whatever its task."""

    algorithm: tuple[str, ...] | None = option(
        "a method of the task", panel=TRAINING, short="-a", usual=lambda task: ", ".join(task.usual), convert=lower_all
    )
    set: Mapping[str, Any] | None = option(
        "a setting of the methods: lr=0.1 for all, fedbio.lower_lr=1 for one, model.lr=0.5 for a later stage",
        panel=TRAINING,
        convert=flatten,
    )
    seeds: int | tuple[int, ...] = option("number of seeds, or a list such as 0,3,7", panel=TRAINING, default=1)
    rounds: int | None = option(
        "rounds of every stage", panel=TRAINING, usual="as many as the local steps need", at_least=1
    )
    cohort: int | float | None = option(
        "clients per round: a number, or a fraction such as 0.1", panel=TRAINING, usual="all"
    )
    sampling: str = option(
        "how a cohort is drawn",
        panel=TRAINING,
        default="weights",
        choices=("weights", "uniform", "poisson"),
        more="weights: chances go with weights; uniform: all alike; poisson: each client by a coin of its own.",
    )
    dropout: float = option("probability that a chosen client fails", panel=TRAINING, default=0.0, at_least=0, below=1)
    evaluations: int = option("about so many evaluations per stage", panel=TRAINING, default=100, at_least=1)
    output: str | None = option(
        "which iterate counts",
        panel=TRAINING,
        choices=("last", "average", "random", "best"),
        more="best is by validation data.",
        usual="the one that the method's paper returns",
    )
    tune: bool | None = option(
        "choose step sizes first, by validation rows; what is set is left alone",
        panel=TRAINING,
        usual="where it takes less than about a minute of two cores",
    )
    privacy: str | None = option(
        "differential privacy, and who is trusted",
        panel=PRIVACY,
        choices=("local", "central"),
        usual="none",
        more="local: nobody; central: the server.",
    )
    clip: float | None = option("largest norm of an upload", panel=PRIVACY, above=0)
    noise_multiplier: float | None = option(
        "noise / sensitivity of an exchange",
        panel=PRIVACY,
        above=0,
        more="The sensitivity is 2 x clip where a client's data may be replaced, so this is half of what Opacus calls "
        "so; with neighbours add-or-remove it is clip, and the same.",
    )
    neighbours: str | None = option(
        "what is hidden",
        panel=PRIVACY,
        choices=("replace", "add-or-remove"),
        usual=NEIGHBOURS,
        more="replace: what a client holds; add-or-remove: that it is there.",
    )
    noise_seed: int | None = option(
        "repeatable noise, for tests", panel=PRIVACY, usual="noise that nobody can know", more="It protects nobody."
    )
    delta: float | None = option("delta of the guarantee", panel=PRIVACY, usual=f"{DELTA:g}", above=0, at_most=1)
    epsilon_budget: float | None = option("end before a round that would spend more", panel=PRIVACY, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions(OptionSet):
    """In which processes a run goes. They are of a command, not of a run: its numbers and files are the same."""

    processes: int | None = option(
        "in how many processes",
        panel=CLUSTER,
        at_least=1,
        usual="one, or all that srun or mpirun started",
        more="Alone: all of them on this machine.",
    )
    coordinator: str | None = option("host:port of process 0, where each is started by hand", panel=CLUSTER)
    process_id: int | None = option("the number of this process, from 0", panel=CLUSTER, at_least=0)


# ------------------------------------------------------------------------------------------------- tasks on tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabularOptions(OptionSet):
    """What every task on a table has: where the rows come from, and how the model is trained."""

    name: ClassVar[str]
    description: ClassVar[str]  # what the task trains, in a line
    usual: ClassVar[tuple[str, ...]]  # the methods of a run that names none
    usual_partition: ClassVar[str] = UNEVEN  # of a table whose rows have no clients yet
    usual_averaging: ClassVar[str] = "uniform"

    data: str = option(
        "a data set (`nestfed list data`), or your CSV or Parquet file",
        panel=DATA,
        default="adult",
        convert=locate,
        more="One file per client: their folder, sites/, or a pattern in quotes, 'sites/*.csv'.",
    )
    schema: str | None = option(
        "a file that says what the columns are, in place of guesses",
        panel=DATA,
        usual="none",
        convert=locate,
        more="`nestfed site schema` drafts one. It has the label and the groups too, and a client's rows may then have "
        "one label only.",
    )
    label: str | None = option("column to predict", panel=DATA, usual="that of the data set; your file needs one")
    positive: str | None = option("value of the label that counts as 1", panel=DATA, usual="found where it is clear")
    threshold: float | None = option(
        "the label counts as 1 above this number, in place of a positive value", panel=DATA
    )
    group: str | None = option(
        "column of groups that are judged one by one; sex+race joins two", panel=DATA, usual="none"
    )
    clients: str | None = option(
        "number of clients, or the column that names them",
        panel=DATA,
        usual="3, those of the data set, or one per file",
    )
    partition: str | None = option(
        "how rows are dealt to clients: iid, dirichlet:0.5, shards:2, classes:1, ratios:2:6",
        panel=DATA,
        usual=lambda task: f"{task.usual_partition}, or by the column of the clients",
    )
    features: str | None = option(
        "how columns become inputs: standard, piecewise, minimax-fair, minimax-fair-raw",
        panel=DATA,
        usual="standard, or piecewise for the model tabular",
    )
    keep_group: bool = option("the group column is a feature too", panel=DATA, default=False)
    drop: tuple[str, ...] = option("a column that is no feature", panel=DATA, default=())
    test_fraction: float = option("share of test rows", panel=DATA, default=0.3, above=0, at_most=0.9)
    model: str = option("the model", panel=TRAINING, default="logistic", choices=MODELS)
    penalty: float = option(
        "strength of the penalty, mu in (mu / 2) |theta|^2", panel=TRAINING, default=1e-3, at_least=0
    )
    batch_size: int | None = option(
        "rows per batch",
        panel=TRAINING,
        at_least=1,
        usual=f"{BATCH_SIZES[1]}, or {BATCH_SIZES[0]} for a table of at most {LARGE_TABLE} rows",
    )
    averaging: str | None = option(
        "weights of the clients",
        panel=TRAINING,
        choices=("uniform", "samples"),
        usual=lambda task: task.usual_averaging,
    )
    steps: int = option("local steps of every stage", panel=TRAINING, default=2000, at_least=1)

    @property
    def client_column(self) -> str | None:
        return None if self.clients is None or self.clients.isdecimal() else self.clients

    @property
    def client_number(self) -> int | None:
        return int(self.clients) if self.clients is not None and self.clients.isdecimal() else None

    @property
    def path(self) -> str | None:
        """The user's own file or files, or None for a data set by name."""
        return self.data if is_path(self.data) else None

    @property
    def client_weights(self) -> str:
        """What clients are weighted by."""
        return self.averaging or self.usual_averaging

    @property
    def recipe(self) -> str:
        """How columns become inputs."""
        return self.features or FEATURES.get(self.model, "standard")

    def batch_rows(self, rows: int) -> int:
        """Rows per batch, of a table with so many rows."""
        return self.batch_size or BATCH_SIZES[rows > LARGE_TABLE]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FairnessOptions(TabularOptions):
    """Options of the task "fairness"."""

    name: ClassVar[str] = "fairness"
    description: ClassVar[str] = "a classifier with equal true positive rates in all groups (bilevel group weights)"
    usual: ClassVar[tuple[str, ...]] = ("fedavg", "fedbio")
    usual_partition: ClassVar[str] = "iid"
    usual_averaging: ClassVar[str] = "samples"  # a gap is counted in everybody's rows

    group: str | None = option(
        "column of the sensitive groups; sex+race joins two",
        panel=DATA,
        usual="that of the data set; your file needs one",
    )
    objective: str = option(
        "what FedBiO's weights are for",
        panel=TASK,
        default="gap",
        choices=("gap", "paper"),
        more="gap: the loss on validation rows and the gap of true positive rates of all clients' rows; paper: the "
        "loss of every client on its group-balanced validation set.",
    )
    weigh: str | None = option(
        "what FedBiO weighs",
        panel=TASK,
        choices=("group", "group+label"),
        usual="group+label, or group with the objective paper",
    )
    weight_form: str = option(
        "how FedBiO's variable gives weights", panel=TASK, default="projected", choices=("projected", "softmax")
    )
    gap: float | None = option(
        "weight of the true positive rate gap in FedBiO's upper loss",
        panel=TASK,
        at_least=0,
        usual="1, or 0 with the objective paper",
    )
    limit: float | None = option(
        "find a model whose gap is at most this, and show what every limit costs",
        panel=TASK,
        above=0,
        below=1,
        usual="none",
        more="Adds the method `limited`, and puts aside 40 % of the rows to judge by.",
    )
    metric: str = option(
        "the gap that the limit is about",
        panel=TASK,
        default="eqopp",
        choices=("eqopp", "eqodds", "parity"),
        more="eqopp: of true positive rates; eqodds: of these or of false positive rates; parity: of shares of "
        "positive decisions.",
    )
    confidence: float = option(
        "confidence that the gap is within the limit", panel=TASK, default=0.95, at_least=0.5, below=1
    )
    group_at_prediction: bool = option(
        "the limited model may ask for a person's group",
        panel=TASK,
        default=False,
        more="Thresholds by group are tried then; where the group is protected, using it is often unlawful.",
    )
    regulariser: float = option("coefficient of FedReg", panel=TASK, default=0.1, at_least=0)
    full_batch: bool = option("FedMinMax sees all rows in a step", panel=TASK, default=True)

    @property
    def client_weights(self) -> str:
        return self.averaging or ("uniform" if self.objective == "paper" else self.usual_averaging)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobustOptions(TabularOptions):
    """Options of the task "robust"."""

    name: ClassVar[str] = "robust"
    description: ClassVar[str] = "a classifier for the worst rows, clients and groups (distributionally robust)"
    usual: ClassVar[tuple[str, ...]] = ("fedavg", "feddro", "ds-feddro")
    usual_averaging: ClassVar[str] = "samples"  # the objective is about rows, whoever holds them

    divergence: str = option(
        "what the adversary pays, or may do",
        panel=TASK,
        default="kl",
        choices=("kl", "chi-square", "cvar"),
        more="cvar: the worst rows alone count.",
    )
    strength: float = option(
        "how cautious the model is, near 0 like FedAvg",
        panel=TASK,
        default=1.0,
        above=0,
        more="Moving weight to bad rows costs 1 / strength; cvar counts the worst 1 / (1 + strength) of rows.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuprcOptions(TabularOptions):
    """Options of the task "auprc"."""

    name: ClassVar[str] = "auprc"
    description: ClassVar[str] = "a classifier that puts rare positives first (area under the precision-recall curve)"
    usual: ClassVar[tuple[str, ...]] = ("fedavg", "coda-plus", "fcsg-m")
    usual_averaging: ClassVar[str] = "samples"  # every positive counts the same, whoever holds it

    margin: float = option(
        "how far positives should lie above negatives, in probability", panel=TASK, default=0.3, above=0
    )
    batch_positives: int | None = option("positives per batch", panel=TASK, usual="half of its rows", at_least=1)
    warm_start: bool = option(
        "methods for average precision begin with FedAvg's model",
        panel=TASK,
        default=True,
        more="Their own stage is then called rank: rank.lr=1. The iterate that is best on validation rows counts, if "
        "it is clearly better than FedAvg's model.",
    )
    recall: float = option("at which recall precision is reported", panel=TASK, default=0.8, above=0, at_most=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalOptions(TabularOptions):
    """Options of the task "personal"."""

    name: ClassVar[str] = "personal"
    description: ClassVar[str] = "a classifier for every client, judged on that client's own rows"
    usual: ClassVar[tuple[str, ...]] = ("local-only", "fedavg", "fedavg-tuned", "fedrep", "fedreco")

    model: str = option("the model", panel=TRAINING, default="network", choices=MODELS)


TASKS: dict[str, type[TabularOptions]] = {
    record.name: record for record in (FairnessOptions, RobustOptions, AuprcOptions, PersonalOptions)
}
USUAL_TASK = FairnessOptions.name


def refuse(name: str, task: str) -> UserError:
    """What is wrong with an option of this name, which the task does not have."""
    owners = [other for other, record in TASKS.items() if name in list_options(record)]
    if owners:
        hint = f", only for {', '.join(owners)}; `nestfed run {task} --help` shows those that there are."
    else:
        known = ["task", *list_options(CommonOptions), *list_options(TASKS[task])]
        hint = f"{suggest(name, known)} Known are {', '.join(known)}."
    return UserError(f"there is no setting {name!r} for the task {task}{hint}")


def find_task(name: Any) -> str:
    """The name of a task, checked."""
    if str(name) not in TASKS:
        raise UserError(f"there is no task {str(name)!r}{suggest(str(name), TASKS)} Known are {', '.join(TASKS)}.")
    return str(name)
