"""Message passing: the same numbers with nodes that only answer; repeated, lost and late messages."""

import dataclasses

import numpy as np
import pytest
from cases import CASES, TASKS, regression

from nestfed import simulate, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.core.settings import UserError
from nestfed.verbs.messages import START, Node, ProtocolError, Server, Ticket, remove_rows

RAGGED = (5, 9, 7)


def node_of(algorithm, task, position, store=None):
    own = dataclasses.replace(task, data=task.data.only(position), weights=np.ones(1))
    return Node(algorithm, own, 0, store)


def federation(name, sizes=RAGGED):
    case = CASES[name]
    algorithm, task = case.algorithm(name), TASKS[case.task](sizes)
    nodes = {k: node_of(algorithm, task, k) for k in range(task.clients)}
    return algorithm, task, nodes, Server(algorithm, task, 0)


WEIGHTS = {0: 1.0, 1: 1.0, 2: 1.0}


def run(server, nodes, rounds, deliver=None):
    deliver = deliver or (lambda k, ticket: nodes[k].receive(ticket))

    def send(tickets):
        answers = {k: deliver(k, ticket) for k, ticket in tickets.items()}
        return {k: a for k, a in answers.items() if a != "lost"}

    state = server.serve(START, None, WEIGHTS, 1.0, send)
    for r in range(rounds):
        state = server.serve(r, state, WEIGHTS, 1.0, send)
    return state


def assert_same(simulated, state):
    for a, b in zip(simulated.server, state, strict=True):
        if a is not None and not isinstance(a, tuple):
            assert np.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_ragged_nodes_hold_their_own_rows_only():
    algorithm, task, nodes, server = federation("fedbioacc")
    assert [len(nodes[k].task.data.columns[1]) for k in nodes] == list(RAGGED)
    hidden = remove_rows(task).data.columns
    assert all(np.isnan(column).all() for column in hidden)
    simulated = simulate(algorithm, task, rounds=2, evaluate_every=None)
    assert_same(simulated, run(server, nodes, 2))
    assert np.allclose(simulated.clients.y, [nodes[k].client().y for k in nodes], rtol=1e-12)


def test_messages_delivered_twice_change_nothing():
    algorithm, task, nodes, server = federation("fednest")

    def twice(k, ticket):
        first = nodes[k].receive(ticket)
        second = nodes[k].receive(ticket)
        assert (first is None) == (second is None)
        assert first is None or all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        return first

    assert_same(simulate(algorithm, task, rounds=2, evaluate_every=None), run(server, nodes, 2, twice))


def test_node_restarted_between_messages_goes_on_from_its_store():
    algorithm, task, nodes, server = federation("fednest")

    def restarted(k, ticket):
        stored = {name: [np.array(a) for a in value] for name, value in nodes[k].store.items()}
        nodes[k] = node_of(algorithm, task, k, stored)
        return nodes[k].receive(ticket)

    assert_same(simulate(algorithm, task, rounds=2, evaluate_every=None), run(server, nodes, 2, restarted))


def test_client_lost_in_the_middle_of_a_round_is_left_out_of_the_rest():
    algorithm, task, nodes, server = federation("scaffold")
    before = {}

    def lost(k, ticket):
        if k == 1 and ticket.round == 1 and ticket.exchange == 0:
            before["c_k"] = nodes[1].client().c_k
            return "lost"
        return nodes[k].receive(ticket)

    state = run(server, nodes, 2, lost)
    assert np.all(np.isfinite(state.x))
    assert np.array_equal(nodes[1].client().c_k, before["c_k"])  # its Local fields are those of its last whole round
    everyone = run(Server(algorithm, task, 0), {k: node_of(algorithm, task, k) for k in nodes}, 2)
    assert not np.allclose(state.x, everyone.x)


def test_round_without_answers_changes_nothing():
    algorithm, task, nodes, server = federation("fedavg")
    state = server.serve(START, None, WEIGHTS, 1.0, lambda t: {k: nodes[k].receive(v) for k, v in t.items()})
    assert server.serve(0, state, WEIGHTS, 1.0, lambda tickets: {}) is state


def test_round_asked_again_starts_from_the_state_before_it():
    """The server lost its newest state and repeats the last round: clients with state of their own go back with it."""
    algorithm, task, nodes, server = federation("fedbio")
    send = lambda tickets: {k: nodes[k].receive(t) for k, t in tickets.items()}
    state = server.serve(START, None, WEIGHTS, 1.0, send)
    state = server.serve(0, state, WEIGHTS, 1.0, send)
    once = server.serve(1, state, WEIGHTS, 1.0, send)
    y = [nodes[k].client().y for k in nodes]
    again = server.serve(1, state, WEIGHTS, 1.0, send)
    assert np.array_equal(once.x, again.x)
    assert np.array_equal(y, [nodes[k].client().y for k in nodes])


def test_messages_out_of_turn_are_refused():
    algorithm, task, nodes, _ = federation("fedavg")
    with pytest.raises(ProtocolError, match="has not started"):
        nodes[0].receive(Ticket(0, 0, None, 1.0, None))
    nodes[0].receive(Ticket(START, 0, None, 1.0, None))
    with pytest.raises(ProtocolError, match="exchange 3 of round 5"):
        nodes[0].receive(Ticket(5, 3, None, 1.0, [np.zeros(4)]))


def test_server_proves_that_it_needs_nothing_private():
    @struct
    class Peeks(FedAvg):
        def step(self, problem, s, draw, fed):
            s = super().step(problem, s, draw, fed)
            return s._replace(x=s.x + 0.0 * draw(1).batch[1].sum()) if fed.sync else s

    algorithm, task = Peeks(lr=0.1), regression(RAGGED)
    with pytest.raises(UserError, match="cannot be derived from the answers alone"):
        run(Server(algorithm, task, 0), {k: node_of(algorithm, task, k) for k in range(3)}, 1)
