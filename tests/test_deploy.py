"""Message passing: the same numbers with nodes that only answer; repeated, lost and late messages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, TASKS, regression
from numpy.testing import assert_allclose

from nestfed import Task, simulate, struct
from nestfed.algorithms.fedavg import FedAvg
from nestfed.core.jax_internals import count_programs
from nestfed.core.settings import UserError
from nestfed.verbs import messages
from nestfed.verbs.cost import measure
from nestfed.verbs.messages import (
    START,
    Lost,
    LostClients,
    Member,
    Memory,
    Node,
    ProtocolError,
    Server,
    Ticket,
    remove_rows,
    select_client,
)

RAGGED = (5, 9, 7)
EVERYBODY = {k: Member(1 / 3) for k in range(3)}


def node_of(algorithm, task, position, store=None, **options):
    return Node(algorithm, select_client(task, position), 0, store, **options)


def federation(name, sizes=RAGGED, **options):
    case = CASES[name]
    algorithm, task = case.algorithm(name), TASKS[case.task](sizes)
    nodes = {k: node_of(algorithm, task, k, **options) for k in range(task.clients)}
    return algorithm, task, nodes, Server(algorithm, task, 0)


def deliver_to(nodes):
    return lambda tickets: ((k, nodes[k].receive(ticket)) for k, ticket in tickets.items())


def run(server, nodes, rounds, deliver=None):
    """The position after these rounds; `deliver` hands a ticket to a node."""
    deliver = deliver or (lambda k, ticket: nodes[k].receive(ticket))
    send = lambda tickets: ((k, deliver(k, ticket)) for k, ticket in tickets.items())
    position = server.serve(START, None, EVERYBODY, send)
    for r in range(rounds):
        position = server.serve(r, position, EVERYBODY, send)
    return position


def assert_same(simulated, position):
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-12, atol=1e-12), simulated.server, position.server)


def assert_clients_same(simulated, nodes, position):
    for k, node in nodes.items():
        node.finish(position.standing[k])
        mine = jax.tree.map(lambda a, k=k: a[k], simulated.clients)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-12, atol=1e-12), mine, node.client())


def test_ragged_nodes_hold_their_own_rows_only():
    algorithm, task, nodes, server = federation("fedbioacc")
    assert [len(nodes[k].task.data.columns[1]) for k in nodes] == list(RAGGED)
    hidden = remove_rows(task).data.columns
    assert all(np.isnan(column).all() for column in hidden)
    simulated, position = simulate(algorithm, task, rounds=2, evaluate_every=None), run(server, nodes, 2)
    assert_same(simulated, position)
    assert_clients_same(simulated, nodes, position)


def test_there_is_one_trip_for_every_exchange_and_the_broadcast_goes_once():
    """FedAvg sends what the ledger says, and no more: the answer of a round is the next round's broadcast."""
    for name, at_start in {"fedavg": 1, "feddro": 1, "scaffold": 1, "fednest": 1}.items():
        algorithm, task, nodes, server = federation(name)
        trips, down, up = [], [], []

        def deliver(k, ticket, nodes=nodes, trips=trips, down=down, up=up):
            answer = nodes[k].receive(ticket)
            if k == 0:
                trips.append((ticket.round, ticket.exchange))
                sent = [ticket.server, ticket.answer, None if ticket.since is None else ticket.since.answer]
                down.append((ticket.round, sum(a.nbytes for a in jax.tree.leaves(sent))))
                up.append((ticket.round, sum(a.nbytes for a in answer or [])))
            return answer

        run(server, nodes, 3, deliver)
        price = measure(algorithm, task)
        exchanges = price.round.exchanges
        assert [trip for trip in trips if trip[0] == 1] == [(1, e) for e in range(exchanges)], name
        assert len([trip for trip in trips if trip[0] == START]) == max(at_start, price.start.exchanges)
        assert sum(n for r, n in up if r == 1) == price.round.bytes_up, name
        received = sum(n for r, n in down if r == 1)
        if name == "fedavg":
            assert received == price.round.bytes_down
        assert received <= price.round.bytes_down + price.call_up_bytes, name


def test_messages_delivered_twice_change_nothing():
    algorithm, task, nodes, server = federation("fednest")

    def twice(k, ticket):
        first = nodes[k].receive(ticket)
        second = nodes[k].receive(ticket)
        assert (first is None) == (second is None)
        assert first is None or all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        return first

    assert_same(simulate(algorithm, task, rounds=2, evaluate_every=None), run(server, nodes, 2, twice))


@pytest.mark.parametrize("name", ["scaffold", "fedbioacc", "fednest"])
def test_node_restarted_between_rounds_goes_on_from_its_store(name):
    algorithm, task, nodes, server = federation(name, store=Memory())

    def restarted(k, ticket):
        if ticket.exchange == 0:
            record = {name: [np.array(a) for a in kept] for name, kept in nodes[k].store.load().items()}
            store = Memory()
            store.save(record)
            nodes[k] = node_of(algorithm, task, k, store)
        return nodes[k].receive(ticket)

    for k in nodes:  # each its own store
        nodes[k] = node_of(algorithm, task, k, Memory())
    simulated, position = simulate(algorithm, task, rounds=3, evaluate_every=None), run(server, nodes, 3, restarted)
    assert_same(simulated, position)
    assert_clients_same(simulated, nodes, position)


def test_node_restarted_in_a_round_has_lost_that_round_only():
    algorithm, task, nodes, server = federation("fednest")
    position = run(server, nodes, 1)
    again = []

    def restarted(tickets):
        for k, ticket in tickets.items():
            if k == 1 and ticket.exchange == 2 and not again:
                again.append(k)
                nodes[1] = node_of(algorithm, task, 1, nodes[1].store)
            try:
                yield k, nodes[k].receive(ticket)
            except ProtocolError as error:
                yield k, Lost(str(error))

    with pytest.raises(LostClients, match="client 1: the answer for exchange 2 of round 1 came"):
        server.serve(1, position, EVERYBODY, restarted)
    position = server.serve(1, position, EVERYBODY, restarted)
    assert_same(simulate(algorithm, task, rounds=2, evaluate_every=None), position)


@pytest.mark.parametrize("name", ["scaffold", "fednest", "fedmbo"])
def test_round_that_loses_a_client_is_that_of_a_simulation_which_drops_it(name):
    """It is lost in the last exchange, after the others have been told much; they forget that attempt."""
    algorithm, task, nodes, server = federation(name)
    position = run(server, nodes, 1)
    last = measure(algorithm, task).round.exchanges - 1

    def loses(tickets):
        for k, ticket in tickets.items():
            late = k == 1 and ticket.exchange == last
            yield k, Lost("it is gone") if late else nodes[k].receive(ticket)

    with pytest.raises(LostClients, match="round 1 was not finished: client 1: it is gone"):
        server.serve(1, position, EVERYBODY, loses)
    two = {k: EVERYBODY[k] for k in (0, 2)}
    position = server.serve(1, position, two, deliver_to(nodes))
    position = server.serve(2, position, EVERYBODY, deliver_to(nodes))  # and it is back
    assert_same_as_dropped(algorithm, task, nodes, position)


def assert_same_as_dropped(algorithm, task, nodes, position):
    """As the compiled engine has it, with client 1 left out of round 1 of 3."""
    from nestfed.engine import rounds as engine
    from nestfed.engine.options import Options
    from nestfed.engine.planning import make_inputs, make_plan

    options = Options(rounds=1, evaluate_every=None, dropout=0.5)
    plan, inputs = make_plan(algorithm, task, options), make_inputs(algorithm, task, 0, options)
    everybody = inputs._replace(dropout=jnp.asarray(0.0))
    run, _ = engine.advance(everybody, engine.start(everybody, plan), 0, 1, plan)
    weights = np.array([1.0, 0.0, 1.0]) / 3
    without = everybody._replace(task=dataclasses.replace(everybody.task, weights=weights))
    run, _ = engine.advance(without, run, 1, 1, plan)
    run, _ = engine.advance(everybody, run, 2, 1, plan)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-11, atol=1e-12), run.server, position.server)
    for k, node in nodes.items():
        node.finish(position.standing[k])
        mine = jax.tree.map(lambda a, k=k: a[k], run.clients)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-11, atol=1e-12), mine, node.client())


def test_round_without_members_changes_nothing():
    _, _, nodes, server = federation("fedavg")
    position = run(server, nodes, 0)
    assert server.serve(0, position, {}, deliver_to(nodes)) is position


def test_round_asked_again_starts_from_the_state_before_it():
    """The server lost its newest state and repeats the last round: clients with state of their own go back with it, and
    no further."""
    algorithm, task, nodes, server = federation("fedbio")
    send = deliver_to(nodes)
    begun = run(server, nodes, 1)
    once = server.serve(1, begun, EVERYBODY, send)
    later = server.serve(2, once, EVERYBODY, send)  # here they finish round 1
    again = server.serve(1, begun, EVERYBODY, send)
    assert_same(simulate(algorithm, task, rounds=2, evaluate_every=None), again)
    assert_same(simulate(algorithm, task, rounds=3, evaluate_every=None), later)
    after = server.serve(3, server.serve(2, again, EVERYBODY, send), EVERYBODY, send)
    assert_same(simulate(algorithm, task, rounds=4, evaluate_every=None), after)
    with pytest.raises(ProtocolError, match="go on from round 0, which is not the last one"):
        server.serve(1, begun, EVERYBODY, send)


def test_messages_out_of_turn_are_refused():
    algorithm, task, nodes, server = federation("fedbio")
    position = run(server, nodes, 0)
    fresh = node_of(algorithm, task, 0)
    shared = algorithm.part(position.server, "shared")
    with pytest.raises(ProtocolError, match="has not started"):
        fresh.receive(Ticket(0, 1, 0, None, shared, 1.0, position.standing[0]))
    with pytest.raises(ProtocolError, match="exchange 3 of round 5"):
        fresh.receive(Ticket(5, 1, 3, [np.zeros(4)]))


def spoil(answer, how):
    return {
        "shape": [a[..., None] for a in answer],
        "type": [a.astype(np.float32) for a in answer],
        "count": answer[1:],
        "finite": [a * np.nan for a in answer],
        "nothing": None,
    }[how]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", "it sent arrays of the shapes and types"),
        ("type", "float32"),
        ("count", "were asked for"),
        ("finite", "not finite"),
        ("nothing", "at another place of the round"),
    ],
)
def test_answers_that_do_not_fit_are_named_and_leave_nothing_behind(how, words):
    algorithm, task, nodes, server = federation("fedavg")
    position = run(server, nodes, 1)
    spoilt = lambda tickets: (
        (k, spoil(nodes[k].receive(ticket), how) if k == 2 else nodes[k].receive(ticket))
        for k, ticket in tickets.items()
    )
    with pytest.raises(LostClients, match=words) as lost:
        server.serve(1, position, EVERYBODY, spoilt)
    assert list(lost.value.reasons) == [2]
    assert_same(
        simulate(algorithm, task, rounds=2, evaluate_every=None),
        server.serve(1, position, EVERYBODY, deliver_to(nodes)),
    )


def test_server_traces_once_and_a_round_compiles_nothing():
    for name in ("feddro", "fedmbo"):
        _, _, nodes, server = federation(name)
        position = run(server, nodes, 2)
        programs = messages._attempt, messages._replay_round, messages._answer_gather
        before = [count_programs(one) for one in programs]
        traced = []
        original = messages.outline_round
        messages.outline_round = lambda *a: traced.append(a) or original(*a)
        try:
            for r in (2, 3):
                position = server.serve(r, position, EVERYBODY, deliver_to(nodes))
        finally:
            messages.outline_round = original
        assert [count_programs(one) for one in programs] == before and not traced


class Counting(Memory):
    def __init__(self):
        super().__init__()
        self.writes = 0

    def save(self, record):
        self.writes += 1
        super().save(record)


@pytest.mark.parametrize(("name", "writes"), [("feddro", 0), ("fedavg", 0), ("fedbio", 1), ("scaffold", 1)])
def test_node_writes_once_a_round_and_only_if_it_keeps_anything(name, writes):
    algorithm, task, nodes, server = federation(name)
    for k in nodes:
        nodes[k] = node_of(algorithm, task, k, Counting())
    position = run(server, nodes, 1)
    before = nodes[0].store.writes
    server.serve(1, position, EVERYBODY, deliver_to(nodes))
    assert nodes[0].store.writes - before == writes


@pytest.mark.parametrize("name", ["fedavg", "fedbio"])
def test_metrics_are_exchanges_too(name):
    algorithm, task, nodes, server = federation(name)
    position = run(server, nodes, 2)
    send = lambda tickets: ((k, nodes[k].inspect(ticket)) for k, ticket in tickets.items())
    found = server.evaluate(2, position, {k: 1 / 3 for k in nodes}, send)
    history = simulate(algorithm, task, rounds=2, evaluate_every=2).history
    assert set(found) == set(history) - {"round"}
    for metric, value in found.items():
        assert_allclose(value, history[metric][-1], rtol=1e-11)


def test_metrics_gather_clients_values_only_where_that_is_allowed():
    @struct
    class Looks(Task):
        def metrics(self, server, client, data, fed):
            return {"largest": jnp.max(fed.gather(jnp.max(data.columns[1])))}

    algorithm, plain = FedAvg(lr=0.1), regression()
    task = Looks.create(plain.problem, plain.data, plain.problem.tree(0, plain.params[0]), batch_size=4)
    found = {}
    for allowed in (True, False):
        nodes = {k: node_of(algorithm, task, k, gathers=allowed) for k in range(3)}
        server = Server(algorithm, task, 0, gathers=allowed)
        position = run(server, nodes, 0)
        send = lambda tickets, nodes=nodes: ((k, nodes[k].inspect(ticket)) for k, ticket in tickets.items())
        found[allowed] = server.evaluate(0, position, {k: 1 / 3 for k in nodes}, send)
    assert_allclose(found[True]["largest"], np.max(plain.data.columns[1]))
    history = simulate(algorithm, plain, rounds=1).history
    assert_allclose(found[False]["loss"], history["loss"][0])  # the problem's own
    # Whoever asks: a node that was not told to give values sends what a mean is made of.
    greedy, strict = Server(algorithm, task, 0), {k: node_of(algorithm, task, k, gathers=False) for k in range(3)}
    position, told = run(greedy, strict, 0), {}
    send = lambda tickets: ((k, told.setdefault(k, strict[k].inspect(ticket))) for k, ticket in tickets.items())
    greedy.evaluate(0, position, {k: 1 / 3 for k in strict}, send)
    assert_allclose(np.mean([answer[0] for answer in told.values()]), history["loss"][0])


class Whole:
    """Masks without secrets: whole numbers, whose sums are exact."""

    GRID = 2.0**30

    def __call__(self, leaves, part, occasion):
        assert len(occasion.asked) == 3
        return [np.rint(np.concatenate([np.ravel(a) for a in leaves]) * part * self.GRID).astype(np.int64)]

    def shape(self, shapes):
        return [jax.ShapeDtypeStruct((sum(int(np.prod(a.shape)) for a in shapes),), np.dtype(np.int64))]

    def add(self, total, sent):
        return sent if total is None else [total[0] + sent[0]]

    def reveal(self, total, shapes):
        cuts = np.cumsum([int(np.prod(a.shape)) for a in shapes])[:-1]
        parts = np.split(total[0] / self.GRID, cuts)
        return [part.reshape(a.shape).astype(a.dtype) for part, a in zip(parts, shapes, strict=True)]


def test_masked_means_are_answered_from_sums_alone_and_the_rest_is_refused():
    case = CASES["feddro"]
    algorithm, task = case.algorithm("feddro"), TASKS[case.task](RAGGED)
    nodes = {k: node_of(algorithm, task, k, mask=Whole()) for k in range(3)}
    position = run(Server(algorithm, task, 0, sums=Whole()), nodes, 3)
    simulated = simulate(algorithm, task, rounds=3, evaluate_every=None)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-7), simulated.server, position.server)
    for name, words in {"fedmbo": "gathers"}.items():
        case = CASES[name]
        algorithm, task = case.algorithm(name), TASKS[case.task](RAGGED)
        nodes = {k: node_of(algorithm, task, k, mask=Whole()) for k in range(3)}
        with pytest.raises(UserError, match=f"{words}|means of plain numbers"):
            run(Server(algorithm, task, 0, sums=Whole()), nodes, 1)


def test_server_proves_that_it_needs_nothing_private():
    @struct
    class Peeks(FedAvg):
        def step(self, problem, s, draw, fed):
            s = super().step(problem, s, draw, fed)
            return s._replace(x=s.x + 0.0 * draw(1).batch[1].sum()) if fed.sync else s

    algorithm, task = Peeks(lr=0.1), regression(RAGGED)
    with pytest.raises(UserError, match="cannot be derived from the answers alone"):
        run(Server(algorithm, task, 0), {k: node_of(algorithm, task, k) for k in range(3)}, 1)
