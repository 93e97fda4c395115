"""Every algorithm of the registry passes the public suite; a broken one of each kind fails it with the right words."""

import jax
import pytest
from cases import CASES, TASKS, regression

from nestfed import ALGORITHMS, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.algorithms.fedbio import FedBiOAcc
from nestfed.problems.hypergradients import Dense
from nestfed.verbs.conformance import NonConforming, check_algorithm


def test_every_registered_algorithm_has_a_case():
    assert set(CASES) == set(ALGORITHMS)


def test_no_two_algorithms_have_the_same_tree_structure():
    """Equal structures would let jit run the program of one algorithm for another."""
    algorithms = [case.algorithm(name) for name, case in CASES.items()]
    structures = [jax.tree.structure(algorithm) for algorithm in algorithms]
    alike = [(a, b) for i, a in enumerate(structures) for b in structures[:i] if a == b]
    assert not alike


@pytest.mark.parametrize("name", CASES)
def test_algorithm_conforms(name):
    case = CASES[name]
    check_algorithm(case.algorithm(name), TASKS[case.task]())  # raises where a check fails


# Scaled values go through means, messages, Shared and Scratch fields in a way of their own. (The others that exchange
# inner values do nothing with them that these do not, and a run of the suite takes its time.)
@pytest.mark.parametrize("name", ["feddro"])
def test_algorithm_conforms_with_scaled_inner_values(name):
    check_algorithm(CASES[name].algorithm(name), TASKS["KL"]())


@struct
class LeaksPrivateValue(FedAvg):
    def step(self, problem, s, draw, fed):
        return s._replace(x=s.x - self.lr * problem.gradient(s.x, draw(0)))  # forgot to average


@struct
class ChangesType(FedAvg):
    def step(self, problem, s, draw, fed):
        return s._replace(x=super().step(problem, s, draw, fed).x.astype("float32"))


@struct
class ExchangesInsideLoop(FedAvg):
    def step(self, problem, s, draw, fed):
        descend = lambda j, x: fed.mean(x - self.lr * problem.gradient(x, draw(j)))
        return s._replace(x=jax.lax.fori_loop(0, 3, descend, s.x))


@struct
class DependsOnClientOrder(FedAvg):
    def step(self, problem, s, draw, fed):
        x = s.x - self.lr * problem.gradient(s.x, draw(0))
        return s._replace(x=fed.gather(x)[0] if fed.sync else x)


@struct
class SpreadsAbsentValues(FedAvg):
    def step(self, problem, s, draw, fed):
        x = s.x - self.lr * problem.gradient(s.x, draw(0))
        return s._replace(x=fed.gather(x).mean(0) if fed.sync else x)  # a mean over everybody, present or not


@struct
class MixesUpPoints(FedBiOAcc):
    """Corrects a client's own estimate from where the others have been last."""

    def begin(self, server, client):
        s = super().begin(server, client)
        return s._replace(x_omega=s.x_prev)


def test_an_estimate_at_the_wrong_point_fails_with_the_right_words():
    case = CASES["fedbioacc"]
    broken = MixesUpPoints(local_steps=2, hypergradient=Dense())
    with pytest.raises(NonConforming, match="own point.*an estimate of client . is not what it should be"):
        check_algorithm(broken, TASKS[case.task]())


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (LeaksPrivateValue, "Shared field x .* depends on one client's private values"),
        (ChangesType, "changes the State field x from float64.* to float32"),
        (ExchangesInsideLoop, "inside a loop .* entry in schedule"),
        (DependsOnClientOrder, "order of clients does not matter"),
        (SpreadsAbsentValues, "message passing and simulation"),
    ],
)
def test_broken_algorithm_fails_with_the_right_words(broken, words):
    with pytest.raises(NonConforming, match=words):
        check_algorithm(broken(lr=0.05, local_steps=2), regression())
