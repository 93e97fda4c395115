"""The cost ledger: what one client sends, receives and computes, read off the traced program.

`measure` traces a client's round with exchanges and draws replaced by named marks, and counts the marks: an exchange
with the bytes of its question (up) and of its answer (down), an oracle call with its kind, a draw with its samples. The
body of a loop counts as often as the loop runs. No algorithm keeps a counter, nothing runs, and nobody can forget.

Conventions: an exchange counts its question up and its answer down, whatever it is used for; exchanges of a round
depend on each other, so their number is also the number of phases (latency); transforms of uploads change what goes
up (a sparse upload sends values and places, a quantised one its bits and a scale), not what is answered; oracle calls
are mini-batch calls; a client that missed the last round also receives the Shared fields (`call_up_bytes`); the start
is a line of its own.
"""

import collections
import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from nestfed.core.algorithm import Algorithm, Cohort, Reply
from nestfed.core.jax_internals import drop_unused
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.engine.cohorts import find_chances, find_expected_cohort, make_cohort_rule
from nestfed.engine.contract import Remembered, check_contract, check_match, find_kind
from nestfed.engine.options import Changes, Options, make_options
from nestfed.engine.steps import (
    START,
    Call,
    Exchange,
    convert_to_float,
    make_client,
    make_no_notes,
    make_only_participant,
    run_round,
    take_step,
)
from nestfed.problems import ORACLE_KINDS
from nestfed.uploads.privacy import CentralDP, Guarantee, Spending, find_guarantee, list_transforms
from nestfed.uploads.transforms import Transform, count_upload_bytes

_DRAWS, _MEAN, _QUESTION, _GATHER, _ORACLE = (
    ("_draw_rows", "_take_all_rows"),
    "fed_mean",
    "fed_question",
    "fed_gather",
    "oracle_",
)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """One client's cost of one stretch of work."""

    exchanges: int  # dependent exchanges: also the number of phases
    gathers: int  # how many of them show the server individual values
    bytes_up: int
    bytes_down: int
    oracles: dict[str, int]  # calls by kind: GRAD, VAL, VJP, HVP, MIX, SOLVE
    calls: dict[str, int]  # the same calls by name, such as grad_lower
    samples: int  # rows drawn


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an algorithm costs one client on a task."""

    start: Ledger
    round: Ledger  # for a cohort of so many clients:
    call_up_bytes: int  # the broadcast, for a client that missed the last round
    cohort: int
    down_per_client: int = 0  # more down for every further client of the cohort: gathers that send everybody's values

    def totals(self, participants: Any, clients: int) -> dict[str, np.ndarray]:
        """Bytes (up and down), oracle calls and samples of all clients together, cumulated over rounds; index 0 is the
        start."""
        each = {
            "bytes": lambda ledger: ledger.bytes_up + ledger.bytes_down,
            "oracle_calls": lambda ledger: sum(ledger.oracles.values()),
            "samples": lambda ledger: ledger.samples,
        }
        present = np.asarray(participants, np.int64)
        more = {"bytes": self.down_per_client * (present - self.cohort)}  # a cohort may be of any size
        return {
            name: np.cumsum([clients * amount(self.start), *((amount(self.round) + more.get(name, 0)) * present)])
            for name, amount in each.items()
        }


_MEASURED = Remembered()


def measure(algorithm: Algorithm, task: Task, options: Options | None = None, **changes: Unpack[Changes]) -> Cost:
    """The cost of this algorithm on this task, per client.

    Of the options, `cohort` matters (the expected number of clients) for gathers that send everybody's values, and
    `uploads` for what goes up.
    """
    check_match(algorithm, task)
    chosen = make_options(options, changes)
    expected, transforms = find_expected_cohort(chosen.cohort, task.clients), list_transforms(chosen.uploads)
    size = task.clients if expected is None else max(1, round(expected))
    kind = find_kind(algorithm, task, transforms), size
    return _MEASURED.find(kind, lambda: _measure(algorithm, task, size, transforms))


def _measure(algorithm: Algorithm, task: Task, size: int, transforms: tuple[Transform, ...]) -> Cost:
    place, key, notes = make_only_participant(), jax.random.key(0), make_no_notes(check_contract(algorithm, task))

    def start(key: Array) -> Any:
        call = Call(key, jnp.asarray(-1), None, jnp.ones(()))
        return take_step(algorithm, task, START, None, make_client(task, place, call), call, _mark_exchanges(size))[0]

    def one_round(size: int, key: Array, server: Any, client: Any) -> Any:
        call = Call(key, jnp.asarray(0), server, jnp.ones(()))
        return run_round(algorithm, task, client, place, call, _mark_exchanges(size), notes)[0]

    begun, state = jax.make_jaxpr(start, return_shape=True)(key)
    server, client = algorithm.split(state)
    name = type(algorithm).__name__
    broadcast = jax.tree.leaves(algorithm.part(server, "shared"))
    of_round = lambda size: _read_ledger(
        jax.make_jaxpr(functools.partial(one_round, size))(key, server, client), f"a round of {name}", transforms
    )
    ledger = of_round(size)
    return Cost(
        start=_read_ledger(begun, f"{name}.init", transforms),
        round=ledger,
        call_up_bytes=sum(a.size * a.dtype.itemsize for a in broadcast),
        cohort=size,
        down_per_client=of_round(size + 1).bytes_down - ledger.bytes_down if ledger.gathers else 0,
    )


def find_spending(
    algorithm: Algorithm,
    task: Task,
    options: Options | None = None,
    *,
    weights: np.ndarray | None = None,
    **changes: Unpack[Changes],
) -> Spending | None:
    """What a run spends of privacy, if a guarantee is among the uploads.

    `weights` are those of several tasks that share the count, [tasks, clients]; None: the task's own.
    """
    chosen = make_options(options, changes)
    guarantee: Guarantee | None = find_guarantee(chosen.uploads)
    if guarantee is None:
        return None
    weights = np.atleast_2d(np.asarray(task.weights if weights is None else weights))
    rule = make_cohort_rule(chosen.cohort, chosen.sampling, weights)
    ledger, repeatable = measure(algorithm, task, cohort=chosen.cohort), chosen.noise_seed is not None
    exchanges = ledger.start.exchanges, ledger.round.exchanges
    spent = Spending(guarantee, *exchanges, task.clients, repeatable=repeatable)
    if rule is None or not isinstance(guarantee, CentralDP) or ledger.round.exchanges == 0:
        return spent
    if rule.random_size:
        chance = max(float(np.max(np.asarray(find_chances(own, rule)))) for own in weights)
        return dataclasses.replace(spent, cohort=rule.size, chance=chance)
    # Of a fixed number: that another client is there tells that one is not. The proof is for clients that are drawn
    # alike (with unequal weights the noise tells who took part) and that keep nothing from round to round.
    alike = rule.sampling == "uniform" and np.ptp(weights, axis=1).max() < 1e-12
    stateless = "local" not in algorithm.kinds().values()
    return dataclasses.replace(spent, cohort=rule.size) if alike and stateless else spent


def _mark_exchanges(size: int) -> Exchange:
    """Exchanges that leave a mark in the program: its inputs are the question, its outputs the answer."""

    def fed_mean(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: convert_to_float(a) * 1, tree)  # an output of its own, even if it is not used

    # Apart from the answer: a reply closes over what the server has, and nobody sends that.
    def fed_question(tree: PyTree) -> PyTree:
        return jax.tree.map(jnp.copy, tree)

    def gather(tree: PyTree, reply: Reply, key: Array) -> PyTree:
        def fed_gather(tree: PyTree) -> PyTree:
            values = jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), tree)
            cohort = Cohort(jnp.arange(size), jnp.ones(size))
            return reply(values, cohort, jnp.asarray(0), key)

        return jax.jit(fed_gather)(jax.jit(fed_question)(tree))

    mark = jax.jit(fed_mean)
    return Exchange(lambda tree, treatment: mark(tree), gather)


def _read_ledger(program: Any, where: str, uploads: tuple[Transform, ...]) -> Ledger:
    counts: collections.Counter[str] = collections.Counter()
    _count(program.jaxpr, 1, counts, where, uploads)
    # Draws that nothing uses cost nothing: the compiler drops them too.
    live, _ = drop_unused(program.jaxpr)
    drawn: collections.Counter[str] = collections.Counter()
    _count(live, 1, drawn, where, uploads)
    calls = {name.removeprefix("call "): n for name, n in sorted(counts.items()) if name.startswith("call ")}
    return Ledger(
        exchanges=counts["exchanges"],
        gathers=counts["gathers"],
        bytes_up=counts["up"],
        bytes_down=counts["down"],
        oracles={kind: counts[kind] for kind in ORACLE_KINDS if counts[kind]},
        calls=calls,
        samples=drawn["samples"],
    )


def _count(jaxpr: Any, times: int, counts: collections.Counter, where: str, uploads: tuple[Transform, ...]) -> None:
    """Add the marks of a program that runs `times` times."""
    for equation in jaxpr.eqns:
        name, primitive = str(equation.params.get("name", "")), equation.primitive.name
        if name in (_MEAN, _GATHER):
            counts["exchanges"] += times
            counts["gathers"] += times * (name == _GATHER)
            counts["up"] += times * _count_bytes(equation.invars, uploads) * (name == _MEAN)
            counts["down"] += times * _count_bytes(equation.outvars)
        elif name == _QUESTION:
            counts["up"] += times * _count_bytes(equation.invars, uploads)
        elif name in _DRAWS:
            counts["samples"] += times * equation.outvars[0].aval.shape[0]
        elif name.startswith(_ORACLE):
            kind, _, method = name.removeprefix(_ORACLE).partition("_")
            counts[kind] += times
            counts[f"call {method}"] += times
        elif primitive == "while":
            raise UserError(
                f"{where} has a loop whose number of turns depends on the data, so its cost is not known in advance; "
                "use a fixed number of iterations."
            )
        elif primitive == "cond":
            branches = []
            for branch in equation.params["branches"]:
                branches.append(collections.Counter())
                _count(branch.jaxpr, times, branches[-1], where, uploads)
            for mark in {mark for branch in branches for mark in branch}:
                counts[mark] += max(branch[mark] for branch in branches)
        else:
            turns = equation.params.get("length", 1) if primitive == "scan" else 1
            for inner in equation.params.values():
                if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                    _count(getattr(inner, "jaxpr", inner), times * turns, counts, where, uploads)


def _count_bytes(variables: Any, uploads: tuple[Transform, ...] = ()) -> int:
    return sum(count_upload_bytes(uploads, v.aval.size, v.aval.dtype.itemsize) for v in variables)
