"""Bad input gets one clear message: what was given, what was expected, what to do."""

import jax.numpy as jnp
import pytest
from cases import hyper, regression

from nestfed import UserError, make, simulate, sweep
from nestfed.problems import toys

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
        (lambda: simulate(FEDAVG, TASK, rounds=0), "rounds=0 .*whole number, 1 or more"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort=12), "cohort=12, but the task has 3 clients; use cohort=None"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort=0), "cohort=0 .*at least one client"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort=1.5), "cohort=1.5 .*between 0 and 1"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, cohort="all"), "cohort='all' .*None for all"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, dropout=1.0), "dropout=1.0 .*below 1"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, evaluate_every=0), "evaluate_every=0"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, output="first"), "output='first' .*last, average, random, best"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, output="best"), "goes with select="),
        (lambda: simulate(FEDAVG, TASK, rounds=1, output="best", select="acc"), "no metric 'acc'.*loss"),
        (lambda: simulate(FEDAVG, TASK, rounds=1, client_axis="loop"), "client_axis='loop' .*'auto', 'vmap' or 'map'"),
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
