"""The ledger equals the cost table, row by row, and what it cannot know it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BATCH, CASES, TASKS, regression

from nestfed import UserError, make, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.verbs.cost import measure


@pytest.mark.parametrize("name", CASES)
def test_round_costs_what_the_table_says(name):
    case = CASES[name]
    task = TASKS[case.task]()
    d, d_y = (task.params[0].size, task.params[1].size if len(task.params) > 1 else 0)
    cost = measure(case.algorithm(name), task).round
    assert cost.bytes_up == 8 * case.up(d, d_y)
    assert cost.bytes_down == 8 * (case.down or case.up)(d, d_y)
    assert cost.exchanges == case.phases
    assert cost.oracles == case.oracles
    assert cost.samples == BATCH * case.batches


def test_start_is_a_line_of_its_own():
    case = CASES["fedbioacc"]
    task = TASKS[case.task]()
    cost = measure(case.algorithm("fedbioacc"), task)
    assert (cost.start.exchanges, cost.start.bytes_up) == (1, 8 * task.params[0].size)
    assert cost.start.oracles == {"GRAD": 2, "HVP": 3, "MIX": 1}
    assert measure(make("fedbioacc"), task).start.exchanges == 0


def test_server_memory_is_not_broadcast():
    task = regression()
    assert measure(CASES["fedadam"].algorithm("fedadam"), task).call_up_bytes == 8 * task.params[0].size


def test_gather_is_named_and_its_answer_counted_as_sent():
    @struct
    class Gossip(FedAvg):
        def step(self, problem, s, draw, fed):
            everyone = fed.gather(s.x)
            return s._replace(x=jnp.median(everyone, axis=0))

    task = regression()
    cost = measure(Gossip(lr=0.1), task).round
    assert (cost.exchanges, cost.gathers) == (1, 1)
    assert (cost.bytes_up, cost.bytes_down) == (8 * 4, 8 * 4 * task.clients)
    assert measure(Gossip(lr=0.1), task, cohort=2).round.bytes_down == 8 * 4 * 2
    assert measure(CASES["fedmbo"].algorithm("fedmbo"), TASKS["global bilevel"]()).round.gathers == 4


def test_total_bytes_follow_the_participants():
    cost = measure(make("fedavg", lr=0.1), regression())
    assert np.array_equal(cost.totals([3, 0, 2], clients=3)["bytes"], 64 * np.array([0, 3, 3, 5]))


def test_data_dependent_loop_has_no_static_cost():
    @struct
    class Impatient(FedAvg):
        def step(self, problem, s, draw, fed):
            x = jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x / 2, s.x)
            return s._replace(x=fed.mean(x))

    with pytest.raises(UserError, match="depends on the data.*fixed number"):
        measure(Impatient(lr=0.1), regression())
