"""Estimators of scikit-learn: its own checks, the same numbers as a run, clients and groups per row, saved models."""

import math
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import nestfed
from nestfed.core.settings import UserError
from nestfed.sklearn import AveragePrecisionClassifier, FairClassifier, PersonalClassifier, RobustClassifier
from nestfed.workbench.stages import set_up
from nestfed.workbench.trained import TabularModel

TINY = {"steps": 20, "evaluations": 1}


class LeastSquares(RobustClassifier):
    """Everything of the estimator but its training, which would compile a program for every shape of the checks."""

    def _train(self, table, request):
        setup = set_up(request.scenario.on_table(table), request.seed_list).first
        fitted = Ridge(1e-3).fit(setup.data.inputs, 8.0 * setup.data.label - 4)
        theta = [{"weight": fitted.coef_[:, None], "bias": np.atleast_1d(fitted.intercept_)}]
        return TabularModel(setup.model, theta, setup.data.encoder), pd.DataFrame()


class FairLeastSquares(FairClassifier, LeastSquares):
    """With groups that the checks do not give."""

    task, _train = "fairness", LeastSquares._train

    def fit(self, X, y, clients=None, groups=None):
        return super().fit(X, y, clients, np.arange(len(np.atleast_1d(np.asarray(y)))) % 2)


TOO_FEW = "Of ten rows dealt to three clients one gets no positive row, and the task needs one of everybody."
EXPECTED = {"FairLeastSquares": {"check_fit2d_1feature": TOO_FEW}}


@parametrize_with_checks(
    [LeastSquares(), FairLeastSquares()], expected_failed_checks=lambda one: EXPECTED.get(type(one).__name__, {})
)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


# ------------------------------------------------------------------------------------------------- tables


@pytest.fixture(scope="module")
def table():
    """Numbers with gaps, categories, and who holds each row; (X, y, clients, groups)."""
    random = np.random.default_rng(0)
    X = pd.DataFrame({"age": random.normal(size=240), "job": random.choice(["cook", "clerk", "smith"], 240)})
    y = np.where(X.age + (X.job == "cook") + 0.3 * random.normal(size=240) > 0.3, "yes", "no")
    X.loc[random.random(240) < 0.05, "age"] = np.nan
    return X, y, random.choice(["north", "south"], 240), random.choice(["f", "m"], 240)


CLASSES = {
    FairClassifier: {"algorithm": "fedavg"},
    RobustClassifier: {},
    AveragePrecisionClassifier: {},
    PersonalClassifier: {"algorithm": "fedavg"},
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.task)
def test_every_task_trains_pickles_and_saves_a_model(kind, table, tmp_path):
    X, y, clients, groups = table
    more = {"groups": groups} if kind is FairClassifier else {}
    estimator = kind(**TINY, **CLASSES[kind], set={"lr": 0.5}).fit(X, y, clients=clients, **more)
    answers = estimator.predict_proba(X)
    assert estimator.classes_.tolist() == ["no", "yes"] and estimator.feature_names_in_.tolist() == ["age", "job"]
    assert estimator.score(X, y) > 0.7
    stages = 2 if kind is AveragePrecisionClassifier else 1  # ranking begins with the model of FedAvg
    assert estimator.history_["round"].tolist() == [0, 4, 4, 8][: 2 * stages]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(estimator)).predict_proba(X), answers)
    again = clone(estimator).fit(X, y, clients=clients, **more)
    np.testing.assert_array_equal(again.predict_proba(X), answers)
    estimator.model_.save(tmp_path / "model.npz")
    if kind is PersonalClassifier:
        loaded = nestfed.ClientModels.load(tmp_path / "model.npz").of("south")
        answers = estimator.predict_proba(X, clients=["south"] * len(X))
    else:
        loaded = nestfed.TabularModel.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(loaded.probability(X), answers[:, 1])
    if kind is RobustClassifier:
        with pytest.raises(UserError, match="diverged"):
            clone(estimator).set_params(set={"lr": 1e30, "clip": math.inf}).fit(X, y, clients=clients)


def test_a_client_has_its_own_model(table):
    X, y, clients, groups = table
    flipped = np.where(clients == "south", np.where(y == "yes", "no", "yes"), y)  # the south wants the opposite
    estimator = PersonalClassifier(**TINY, algorithm="local-only", set={"lr": 0.5}).fit(X, flipped, clients=clients)
    assert np.mean(estimator.predict(X, clients=clients) == flipped) > 0.7
    assert np.mean(estimator.predict(X, clients=np.where(clients == "south", "north", "south")) == flipped) < 0.3
    by_client = [estimator.predict_proba(X, clients=[name] * len(X)) for name in ("north", "south")]
    np.testing.assert_allclose(estimator.predict_proba(X), np.mean(by_client, axis=0), atol=1e-6)
    with pytest.raises(UserError, match="no model of the client 'west'"):
        estimator.predict(X, clients=["west"] * len(X))


def test_it_fits_into_searches_and_pipelines(table):
    X, y, clients, groups = table
    search = GridSearchCV(LeastSquares(), {"penalty": [0.0, 0.1]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.7
    pipe = make_pipeline(FunctionTransformer(), LeastSquares(model="network"))
    assert pipe.set_params(leastsquares__model="logistic").fit(X, y, leastsquares__clients=clients).score(X, y) > 0.7


def test_what_a_model_has_never_seen(table):
    X, y, clients, groups = table
    estimator = LeastSquares().fit(X, y, clients=clients)
    strange = X.head(2).assign(job="pilot", age=[np.nan, 1.0])
    assert np.isfinite(estimator.predict_proba(strange)).all()
    with pytest.raises(ValueError, match="job"):
        estimator.predict(X[["age"]])
    with pytest.raises(UserError, match="the columns job are missing; .* give a table with these columns"):
        estimator.model_.probability(X[["age"]])
    with pytest.raises(UserError, match="column 'age' holds 'old'"):
        estimator.predict(X.astype({"age": object}).fillna("old"))


def test_a_saved_model_opens_without_anything_of_its_training(table, tmp_path):
    """In a process of its own, which says what it has loaded."""
    X, y, clients, groups = table
    LeastSquares().fit(X, y, clients=clients).model_.save(tmp_path / "model.npz")
    X.head(3).to_json(tmp_path / "rows.json", orient="records")
    script = (
        "import sys, pandas as pd, nestfed; model = nestfed.TabularModel.load('model.npz');"
        "loaded = [name for name in sys.modules if name.startswith('nestfed.')];"
        "print(model.probability(pd.read_json('rows.json')).shape, *loaded)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in done.stdout.split() if name.startswith("nestfed.")}
    assert done.stdout.startswith("(3,)") and loaded == {"core", "data", "models", "workbench"}
    assert "scenario" not in done.stdout


def test_mistakes_are_told_in_one_line(table):
    X, y, clients, groups = table
    for message, wrong in {
        "was given no groups": lambda: FairClassifier().fit(X, y),
        "clients of shape .3,. were given for 240 rows": lambda: LeastSquares().fit(X, y, clients=["a"] * 3),
        "Only binary classification": lambda: LeastSquares().fit(X, np.arange(240) % 3),
        "one class only": lambda: LeastSquares().fit(X, ["a"] * 240),
        "several columns of the same name": lambda: LeastSquares().fit(X.set_axis(["a", "a"], axis=1), y),
        "strength=-1.0 was given": lambda: RobustClassifier(strength=-1).fit(X, y),
        "names one client only": lambda: LeastSquares().fit(X, y, clients=["a"] * 240),
    }.items():
        with pytest.raises(UserError, match=message):
            wrong()
    with pytest.raises(TypeError, match="no parameter 'strenght'"):
        RobustClassifier(strenght=1)


def test_a_limit_that_no_model_keeps_warns(table):
    X, y, clients, groups = table
    with pytest.warns(ConvergenceWarning, match="no model was found within the limit; the gap of the nearest one"):
        estimator = FairClassifier(**TINY, limit=0.001).fit(X, y, clients=clients, groups=groups)
    assert estimator.predict_proba(X).shape == (240, 2)


def test_training_that_went_astray_warns(table):
    X, y, clients, groups = table
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RobustClassifier(**TINY, set={"lr": 300.0, "clip": math.inf}, algorithm="ds-feddro").fit(X, y, clients=clients)
    assert any(issubclass(one.category, ConvergenceWarning) and "not a result" in str(one.message) for one in caught)
