"""The named tasks as estimators of scikit-learn.

    FairClassifier(steps=500).fit(X, y, clients=hospital, groups=sex).predict_proba(X)

`clients` and `groups` have an entry per row, as y has. An estimator trains by one method of its task, by the same code
as `nestfed run`; its parameters are the options of the task and of every run, by the same names. X is a DataFrame
(columns of text are categories) or an array of numbers; missing values are welcome. All rows of X are the estimator's:
a fifth of them is kept to validate, as in every run, and none to test.
"""

import inspect
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from nestfed.core.settings import UserError
from nestfed.data.table import Table, name_column
from nestfed.workbench.commands import choose_settings
from nestfed.workbench.fields import list_options
from nestfed.workbench.request import Request
from nestfed.workbench.results import make_history_frame
from nestfed.workbench.scenarios.fair_limit import Choice
from nestfed.workbench.stages import DIVERGED, run_method, set_up
from nestfed.workbench.task_options import TASKS, CommonOptions
from nestfed.workbench.tuning import list_changes

__all__ = ["AveragePrecisionClassifier", "FairClassifier", "PersonalClassifier", "RobustClassifier"]

# Said by the arguments of `fit` and by X itself, or by parameters with the names that scikit-learn has for them; and
# groups are not known when predicting.
ELSEWHERE = {
    "algorithm",
    "data",
    "drop",
    "group",
    "group_at_prediction",
    "keep_group",
    "label",
    "positive",
    "schema",
    "seeds",
    "test_fraction",
    "threshold",
}


NO_LABELS = "no_validation"  # scikit-learn's word for an X without y


class TaskClassifier(ClassifierMixin, BaseEstimator):
    """A method of a named task, as an estimator."""

    task: ClassVar[str]
    method: ClassVar[str]  # the algorithm by which it trains unless another is given

    classes_: np.ndarray
    model_: Any  # TabularModel or ClientModels: save it, load it, use it without scikit-learn
    history_: pd.DataFrame  # a row per evaluation

    def __init_subclass__(cls) -> None:
        """The parameters are the options of the task, each described where all options are."""
        super().__init_subclass__()
        options = list_options(TASKS[cls.task]) | list_options(CommonOptions)
        chosen = {name: option for name, option in options.items() if name not in ELSEWHERE}
        defaults: dict[str, Any] = {"algorithm": cls.method} | {name: o.default for name, o in chosen.items()}
        defaults |= {"partition": "iid", "random_state": 0}  # who is not told who holds the rows deals them evenly
        helps = {name: option.help for name, option in chosen.items()}
        helps |= {"algorithm": "The method.", "random_state": "Decides the split, the start and the batches."}

        def __init__(self: Any, **parameters: Any) -> None:
            for name in parameters.keys() - defaults.keys():
                raise TypeError(f"{cls.__name__} has no parameter {name!r}; it has {', '.join(defaults)}.")
            for name, default in defaults.items():
                setattr(self, name, parameters.get(name, default))

        own = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=value) for n, value in defaults.items()]
        own.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        __init__.__signature__ = inspect.Signature(own)  # what scikit-learn reads the parameters off
        cls.__init__ = __init__
        described = "\n".join(f"    {name}={value!r}: {helps[name]}" for name, value in defaults.items())
        cls.__doc__ = f"{inspect.getdoc(cls)}\n\nParameters\n{described}\n"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any, clients: Iterable[Any] | None = None) -> Self:
        """Train.

        clients    who holds each row; None: the rows are dealt to `clients` clients as `partition` says
        """
        return self._fit(X, y, clients=clients)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the two classes, in the order of `classes_`, for every row: [rows, 2]."""
        frame = self._make_frame(X)
        return _pair_probabilities(self.model_.probability(frame))

    def predict(self, X: Any) -> np.ndarray:
        """The more probable class of every row."""
        return self._decide(self.predict_proba(X))

    def _decide(self, probabilities: np.ndarray) -> np.ndarray:
        return self.classes_[(probabilities[:, 1] > 0.5).astype(int)]

    def _fit(self, X: Any, y: Any, **roles: Iterable[Any] | None) -> Self:
        frame, labels = self._check(X, y)
        given = {role: _read_entries(role, values, len(frame)) for role, values in roles.items() if values is not None}
        names = {role: name_column(frame, role) for role in ("y", *given)}
        frame = frame.assign(**{names["y"]: labels, **{names[role]: values for role, values in given.items()}})
        table = Table(
            name="X",
            frame=frame,
            label=names["y"],
            positive=1,
            groups=(names["groups"],) if "groups" in names else (),
            client=names.get("clients"),
        )
        self.model_, self.history_ = self._train(table, self._make_request(dealt="clients" not in given))
        return self

    def _train(self, table: Table, request: Request) -> tuple[Any, pd.DataFrame]:
        """The final model and its history, as `nestfed run` makes them."""
        scenario, (seed,) = request.scenario.on_table(table), request.seed_list
        name = request.methods[-1]  # with a limit it is the method that keeps it
        trials = set_up(scenario, [seed])
        if chosen := choose_settings(request, trials, progress=False):
            request = request.adopt(list_changes(chosen))
        algorithms = scenario.make_algorithms(name, trials.first, request.changes(name))
        trace = run_method(trials, name, algorithms, seed, request.budget, progress=False)
        if trace.status == DIVERGED:
            raise UserError(f"{scenario.method(name).title} diverged; use smaller step sizes, set={{'lr': ...}}.")
        if trace.rise is not None:
            warnings.warn(trace.rise.remark, ConvergenceWarning, stacklevel=4)
        if isinstance(trace.left, Choice) and not trace.left.within:
            nearest = f"the gap of the nearest one is at most {trace.left.bound:.4f} with the confidence asked for"
            message = f"no model was found within the limit; {nearest}."
            warnings.warn(message, ConvergenceWarning, stacklevel=4)
        return scenario.make_model(trials.first, trace.left), make_history_frame(trials, trace)

    def _make_request(self, *, dealt: bool) -> Request:
        """What a command line would ask for."""
        settings = self.get_params(deep=False)
        state = settings.pop("random_state")
        if not dealt:
            del settings["clients"], settings["partition"]
        whole = isinstance(state, (int, np.integer))
        seed = int(state) if whole else int(check_random_state(state).randint(2**31 - 1))
        return Request.of({**settings, "task": self.task, "seeds": [seed]})

    def _check(self, X: Any, y: Any) -> tuple[pd.DataFrame, np.ndarray]:
        """The columns of X with names, and y as 0 and 1."""
        frame = self._make_frame(X, y)
        y = column_or_1d(y, warn=True)
        check_consistent_length(frame, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) > 2:
            raise UserError(f"Only binary classification is supported. The type of the target is {type_of_target(y)}.")
        if len(self.classes_) < 2:
            raise UserError(f"y has one class only ({self.classes_[0]}); a classifier needs two.")
        return frame, labels

    def _make_frame(self, X: Any, y: Any = NO_LABELS) -> pd.DataFrame:
        """X as a table with names for its columns; with labels where this is to fit."""
        fitting = y is not NO_LABELS
        if not fitting:
            check_is_fitted(self)
        if not isinstance(X, pd.DataFrame):
            if not fitting:
                X = validate_data(self, X, reset=False, ensure_all_finite="allow-nan")
            else:
                X, _ = validate_data(self, X, y, ensure_all_finite="allow-nan", ensure_min_samples=2)
            return pd.DataFrame(X, columns=[f"x{i}" for i in range(X.shape[1])])
        frame = X.set_axis([str(name) for name in X.columns], axis=1)
        if not frame.columns.is_unique:
            raise UserError("X has several columns of the same name; give every column a name of its own.")
        table: Any = X  # scikit-learn's types know arrays alone
        validate_data(self, table, y, reset=fitting, skip_check_array=True)
        return frame.reset_index(drop=True)


def _read_entries(role: str, values: Iterable[Any], rows: int) -> np.ndarray:
    entries = np.asarray(values, object)
    if entries.shape != (rows,):
        raise UserError(f"{role} of shape {entries.shape} were given for {rows} rows; give one entry per row.")
    return entries


def _pair_probabilities(positive: np.ndarray) -> np.ndarray:
    """The probabilities of 0 and 1 from that of 1."""
    positive = np.asarray(positive, float)
    return np.column_stack([1 - positive, positive])


# ------------------------------------------------------------------------------------------------- one per task


class FairClassifier(TaskClassifier):
    """Treats groups alike: equal true positive rates (the task "fairness")."""

    task = "fairness"
    method = "fedbio"

    def fit(self, X: Any, y: Any, clients: Iterable[Any] | None = None, groups: Iterable[Any] | None = None) -> Self:
        """Train.

        clients    who holds each row; None: the rows are dealt to `clients` clients as `partition` says
        groups     the sensitive group of each row. It is no feature unless X has it too
        """
        if groups is None:
            raise UserError("FairClassifier was given no groups; give the group of every row: fit(X, y, groups=...).")
        return self._fit(X, y, clients=clients, groups=groups)


class RobustClassifier(TaskClassifier):
    """Serves the worst rows and clients (the task "robust")."""

    task = "robust"
    method = "ds-feddro"


class AveragePrecisionClassifier(TaskClassifier):
    """Puts rare positives first (the task "auprc")."""

    task = "auprc"
    method = "fcsg-m"


class PersonalClassifier(TaskClassifier):
    """Has a model for every client (the task "personal")."""

    task = "personal"
    method = "fedavg-tuned"

    def predict_proba(self, X: Any, clients: Iterable[Any] | None = None) -> np.ndarray:
        """The probabilities of the two classes for every row, [rows, 2].

        clients    whose model answers for each row; None: the mean of what all clients' models answer
        """
        frame = self._make_frame(X)
        if clients is None:
            return _pair_probabilities(
                np.mean([self.model_.of(name).probability(frame) for name in self.model_.clients], axis=0)
            )
        owners = pd.Series(_read_entries("clients", clients, len(frame))).map(str)
        answers = np.empty(len(frame))
        for name, rows in owners.groupby(owners).groups.items():
            answers[rows] = self.model_.of(str(name)).probability(frame.loc[rows])
        return _pair_probabilities(answers)

    def predict(self, X: Any, clients: Iterable[Any] | None = None) -> np.ndarray:
        """The more probable class of every row; `clients` as for `predict_proba`."""
        return self._decide(self.predict_proba(X, clients))
