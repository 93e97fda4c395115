"""An algorithm is the program of *one client*. It reaches the others only through the words of `Fed`, above all
`fed.mean(tree)`; the engines give these words their meaning.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TypeVar

from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array, PyTree

Tree = TypeVar("Tree")

Shared = Annotated[Any, "shared"]  # a State field kept by the server; equal on all clients after a synchronisation
Local = Annotated[Any, "local"]  # a State field that stays on the client from round to round and never leaves it
Server = Annotated[Any, "server"]  # a State field of the server alone, such as an optimiser's memory: never sent
Scratch = Annotated[Any, "scratch"]  # a State field that lives within one round: None at its start, dropped at its end


class Sample(NamedTuple):
    """One draw: a batch and the key of whatever is random in evaluating it (dropout, augmentation).

    Passing the same Sample to two oracles evaluates the same batch with the same randomness at two points.
    """

    batch: PyTree
    key: Array


class Cohort(NamedTuple):
    """Who answers an exchange, side by side."""

    ids: Array
    weights: Array  # in means; zero: takes no part

    @property
    def present(self) -> Array:
        return self.weights > 0


def reply_with_all(values: PyTree, cohort: Cohort, slot: Array, key: Array) -> PyTree:
    """The reply to a gather that sends everybody's values to everybody."""
    return values


Reply = Callable[[Any, Cohort, Array, Array], Any]  # (values, cohort, slot, key) -> the answer to one client


class Mean(Protocol):
    """The weighted mean of a tree over the clients taking part.

    `around` is a tree of the same structure that everybody knows (a broadcast value, or what follows from answers; None
    where there is no such value), and the meaning is around + mean(tree - around). It tells which part of an upload is
    news: transforms of uploads act on tree - around. Without them it is ignored.
    """

    def __call__(self, tree: Tree, around: Any = None) -> Tree: ...


class Gather(Protocol):
    """The server lays the cohort's trees side by side and answers this client with reply(values, cohort, slot, key).

    The key is the step's shared one, and `reply` may use nothing else but settings and fields of fed.server as they are
    (where it runs, fed.server has the Server fields too). A visible exception: prefer a mean, which hides who said
    what.
    """

    def __call__(self, tree: Any, reply: Reply = reply_with_all) -> Any: ...


class Note(Protocol):
    """Report a number under a name: how often something happened, how large something was.

    Every engine adds the notes of those who take part up, and the history has their mean (of a switch: how often it was
    on) since the evaluation before. A note is no state and costs no traffic. Those of `init` are not kept.
    """

    def __call__(self, name: str, value: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Fed:
    """All that a client can see of the federation during one step."""

    mean: Mean
    gather: Gather
    note: Note
    sync: bool  # last step of the round? A Python bool: branch on it with a plain `if`
    t: Array  # global step index, for step-size schedules
    step: Array  # index of the step within the round
    server: Any  # Shared fields as broadcast at the start of the round; the others are None
    key: Array  # this client's, for this step
    shared_key: Array  # the same on all clients, for this step
    # This client's weight in the problem / its weight in this round's means: with equal weights, clients taking part /
    # all clients. mean(share z) is the part of the sum over all clients of weight z that those taking part make up.
    share: Array
    rows: Any = None  # this client's own rows (`ClientRows`), for passes over all of them; batches come from draw(j)
    own_steps: Array | None = None  # this client's number of local steps, if the task gives clients different ones
    unsynced: Any = None  # in metrics, if asked for: this client's whole State before the round's last step


Phase = tuple[Callable[..., Any], int, bool]


@struct
class Algorithm:
    """One client's program. Subclasses define State, init and step; everything else has a sensible default."""

    local_steps: int = setting("I: local steps per round", default=1, at_least=1, static=True)

    State: ClassVar[Any]  # a NamedTuple whose fields are annotated Shared, Server, Local or Scratch
    family: ClassVar[str]  # the class of problem it solves: `Problem.family`
    scope: ClassVar[str | None] = None  # "local" or "global" where the family knows both
    uneven_steps: ClassVar[bool] = False  # can clients do different numbers of local steps?
    few_clients: ClassVar[str | None] = None  # why its limit is another one where only some clients take part

    def init(self, problem: Any, params: Any, draw: Callable[[int], Sample], fed: Fed) -> Any:
        raise UserError(f"{type(self).__name__} must define init(problem, params, draw, fed).")

    def step(self, problem: Any, s: Any, draw: Callable[[int], Sample], fed: Fed) -> Any:
        raise UserError(f"{type(self).__name__} must define step(problem, s, draw, fed), or a schedule of its own.")

    def begin(self, server: Any, client: Any) -> Any:
        """The State with which a client starts a round: the broadcast merged with what the client kept."""
        kinds = self.kinds()
        source = lambda name, ours, own: {"local": own, "scratch": None}.get(kinds[name], ours)
        fields = zip(self.State._fields, server, client, strict=True)
        return self.State(**{name: source(name, ours, own) for name, ours, own in fields})

    def estimates(self, problem: Any, s: Any, draw: Callable[[int], Sample]) -> list[tuple[Any, Any, Any]]:
        """For the conformance suite, of a client between two rounds: (an estimate that it keeps, what it estimates at
        the point that it belongs to, is there one yet?). With one local step and batches that are all alike the two
        are equal for recursions that add up differences, however long the client was away."""
        return []

    def schedule(self) -> tuple[Phase, ...]:
        """The phases of a round, in order: (method, repeats, sync). Loops that exchange are phases."""
        return ((self.step, self.local_steps - 1, False), (self.step, 1, True))

    def kinds(self) -> dict[str, str]:
        """Where each field of State lives: "shared", "server", "local" or "scratch"."""
        hints = typing.get_type_hints(self.State, include_extras=True)
        return {name: hints[name].__metadata__[0] for name in self.State._fields}

    def split(self, s: Any) -> tuple[Any, Any]:
        """State -> (server's part, client's part), each a State with None in the other's fields."""
        return self.part(s, "shared", "server"), self.part(s, "local")

    def part(self, s: Any, *chosen: str) -> Any:
        """The State with None in all fields but those of the chosen kinds."""
        kinds = self.kinds()
        return self.State(*(v if kinds[name] in chosen else None for name, v in zip(s._fields, s, strict=True)))
