"""Bad input gets one clear message: what was given, what was expected, what to do."""

import dataclasses
import re
import typing

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import hyper, regression

from nestfed import Options, Rows, Schedule, Task, UserError, deploy, make, measure, simulate, start, struct, sweep
from nestfed.engine.options import Changes
from nestfed.problems import SingleLevel, toys


@struct
class Misspelt(SingleLevel):
    def loss(self, x, batch, key):
        return no_such_name(x)  # noqa: F821


TASK = regression((4, 4, 4))
FEDAVG = make("fedavg", lr=0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make("fedavgg", lr=0.1), "no algorithm 'fedavgg'; did you mean 'fedavg'"),
        (lambda: make("fedavg", lrr=0.1), "no setting 'lrr'; did you mean 'lr'"),
        (lambda: make("fedavg"), "needs lr"),
        (lambda: make("fedbio", lr=0.1, lower_lr=0.1, **{"hypergradient.term": 3}), "did you mean 'terms'"),
        (lambda: make("fedavg", lr=-0.1), "lr=-0.1 .*local step size.* greater than 0"),
        (lambda: make("fedavg", lr="fast"), "lr='fast' .*a number or a schedule"),
        (lambda: make("fedavg", lr=float("nan")), "not NaN"),
        (lambda: make("fedavg", lr=0.1, local_steps=0), "local_steps=0 .*at least 1"),
        (lambda: make("fedavg", lr=0.1, local_steps=2.5), "local_steps=2.5 .*whole number"),
        (lambda: make("fedadam", lr=0.1, beta1=1.5), "beta1=1.5 .*at most 1"),
        (lambda: make("fednest", lr=0.1, lower_lr=0.1, truncation="all"), "truncation='all' .*'sum', 'random'"),
        (lambda: simulate(FEDAVG, TASK, rounds=0), "rounds=0 .*at least 1"),
        (lambda: simulate(FEDAVG, TASK, rounds="ten"), "rounds='ten' .*not text"),
        (lambda: simulate(FEDAVG, TASK), "number of rounds is missing; give rounds="),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohorts=2), "no option 'cohorts'; did you mean 'cohort'"),
        (
            lambda: sweep([FEDAVG], TASK, [0], rounds=1, evaluate=2),
            "no option 'evaluate'; did you mean 'evaluate_every'",
        ),
        (lambda: deploy(FEDAVG, TASK, rounds=1, samplings="poisson"), "no option 'samplings'; did you mean 'sampling'"),
        (lambda: start(FEDAVG, TASK, unsinced=True), "no option 'unsinced'; did you mean 'unsynced'"),
        (
            lambda: Task.create(TASK.problem, TASK.data, jnp.zeros(()), batchsize=3),
            "no option 'batchsize' of Task; did you mean 'batch_size'",
        ),
        (lambda: measure(FEDAVG, TASK, upload=()), "no option 'upload'; did you mean 'uploads'"),
        (lambda: simulate(FEDAVG, TASK, 0, {"rounds": 1}), r"options=.*give a nestfed.Options\(...\)"),
        (lambda: sweep([FEDAVG], TASK, [0], rounds=1, checkpoint="a.npz"), "a sweep keeps no checkpoint"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort=12), "cohort=12, but the task has 3 clients; use cohort=None"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort=0), "cohort=0 .*at least one client"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort=1.5), "cohort=1.5 .*between 0 and 1"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort="all"), "cohort='all' .*None for all"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, dropout=1.0), "dropout=1.0 .*below 1"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, evaluate_every=0), "evaluate_every=0"),
        (
            lambda: simulate(FEDAVG, TASK, rounds=1, output="first"),
            "output='first' .*'last', 'average', 'random', 'best'",
        ),
        (lambda: simulate(FEDAVG, TASK, rounds=1, output="best"), "goes with select="),
        (lambda: simulate(FEDAVG, TASK, rounds=1, output="best", select="acc"), "no metric 'acc'.*loss"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, client_axis="loop"), "client_axis='loop' .*'auto', 'vmap', 'map'"),
        (lambda: simulate(FEDAVG, TASK, "seven", rounds=1), "seed='seven' .*whole number or a key"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, checkpoint_every=5), "without checkpoint"),
        (lambda: simulate(FEDAVG, hyper("local"), rounds=1), "FedAvg solves single level problems.*Hyper is bilevel"),
        (
            lambda: simulate(make("fednest", lr=0.1, lower_lr=0.1), hyper("local"), rounds=1),
            "scope 'global'; the task's problem has scope 'local'",
        ),
        (
            lambda: simulate(make("fedbio", lr=0.1, lower_lr=0.1), toys.scalar_bilevel(local_steps=[1, 2]), rounds=1),
            "same number of local steps",
        ),
        (lambda: sweep([], TASK, rounds=1), "at least one setting"),
        (lambda: sweep(FEDAVG, TASK, [0], rounds=1), "settings=FedAvg.* was given to a sweep; give a list"),
        (lambda: sweep([FEDAVG], TASK, 3, rounds=1), "seeds=3 was given to a sweep; give a list"),
        (lambda: simulate(FEDAVG, TASK.problem, rounds=1), "a Regression was given as the task; make one with"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, metrics={"a": 1}), "metrics={'a': 1} was given; give a function"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, uploads=3), "uploads holds 3; give transforms"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, uploads="clip"), "uploads holds 'clip'; give transforms"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, checkpoint=3), "checkpoint=3 was given; give the path"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, unsynced="yes"), "unsynced='yes' was given; it must be True or"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, progress="no"), "progress='no' was given; it must be True, False or"),
        (
            lambda: make("fedopt", lr=0.1, optimizer="sgd"),
            "optimizer='sgd' .*as optax.sgd.*GradientTransformation",
        ),
        (
            lambda: make("fedreco", lr=0.1, optimizer=optax.sgd),
            "optimizer=<function .*must be a Gradient",
        ),
        (lambda: Schedule(function=0.1), "Schedule: function=0.1 was given; give a function of the step"),
        (lambda: Rows.from_clients([(np.array(["a", "b"]),)]), "hold no numbers in column .0., but <U1; encode them"),
        (
            lambda: Task.create(TASK.problem, TASK.data, jnp.zeros(3), weights=["a", "b", "c"]),
            "weights=.*'uniform', 'samples' or one number per client",
        ),
        (
            lambda: Task.create(Misspelt(), TASK.data, jnp.zeros(3)),
            "shapes .*: NameError: name 'no_such_name' is",
        ),
        (lambda: sweep([FEDAVG], TASK, [0], rounds=1, progress=False).best("accuracy"), "no metric 'accuracy'"),
    ],
)
def test_message(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_traced_settings_are_not_checked_twice():
    """A schedule in place of a number is fine, and settings may be arrays."""
    from nestfed import PowerDecay, Schedule

    for lr in (PowerDecay(scale=0.1), Schedule(function=lambda t: 0.1 / (1 + t)), jnp.asarray(0.1)):
        simulate(make("fedavg", lr=lr, local_steps=2), TASK, rounds=2)


def test_options_are_one_record_whichever_way_they_are_given():
    """Whole, by name, or whole with changes by name; and the names that calls may give are its fields."""
    options = Options(rounds=3, cohort=2, dropout=0.2)
    whole, named = simulate(FEDAVG, TASK, 1, options), simulate(FEDAVG, TASK, 1, rounds=3, cohort=2, dropout=0.2)
    changed = simulate(FEDAVG, TASK, 1, Options(rounds=9, cohort=2), rounds=3, dropout=0.2)
    assert (whole.server.x == named.server.x).all() and (whole.server.x == changed.server.x).all()
    assert options == Options(rounds=3, cohort=2, dropout=0.2) and options != Options(rounds=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.rounds = 4
    fields = typing.get_type_hints(Options)
    assert typing.get_type_hints(Changes) == fields and list(Changes.__annotations__) == list(fields)
    documented = re.findall(r"^    (\w+) {2,}", Options.__doc__, re.M)
    assert set(documented) <= set(fields)
    assert set(fields) - set(documented) == {
        "select",
        "client_chunk",
        "checkpoint_every",
        "resume",
        "title",
    }  # beside another
