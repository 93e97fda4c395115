"""Who holds what: rows dealt to clients, and the splits into training, validation and test.

Every rule is a table of shares: of each value (a label, a group), the share that each client gets. `deal` cuts the
shuffled rows of each value accordingly. Rows of different strata (training, test) are cut separately by the same
shares, so that a client is tested on the mixture it trains on.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from nestfed.core.settings import UserError, suggest
from nestfed.data.table import NEAREST, Column, find_categories, list_values

TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = ("train", "validation", "test")
RULES = {
    "iid": "iid",
    "dirichlet": "dirichlet:ALPHA",
    "shards": "shards:PER_CLIENT",
    "classes": "classes:PER_CLIENT",
    "column": "column",
    "ratios": "ratios:2:2:6",
}
ATTEMPTS = 200  # redraws of a random rule that left a client without the rows it needs
_SPLIT, _VALIDATION, _DEAL, _PLAIN = 1, 2, 3, 4  # independent streams of one seed

Shares = np.ndarray  # [values, clients]; every row sums to 1


def make_generator(seed: int, stream: int, owner: int = 0) -> np.random.Generator:
    """`owner` is who draws, where several hold rows and each splits its own."""
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise UserError(f"seed={seed!r} was given; a seed is a whole number from 0.")
    return np.random.default_rng([int(seed), stream, int(owner)])


# ------------------------------------------------------------------------------------------------- rules


def deal_iid(rows: int, clients: int, seed: int) -> np.ndarray:
    """Equal random parts."""
    return _deal_by_rule(np.zeros(rows, int), _make_equal_shares(clients), seed)


def deal_dirichlet(labels: np.ndarray, clients: int, alpha: float, seed: int, at_least: int = 1) -> np.ndarray:
    """The rows of each label in shares drawn from Dirichlet(alpha), redrawn until every client has `at_least` rows."""
    values = np.unique(labels, return_inverse=True)[1]
    return _deal_by_rule(values, _make_dirichlet_shares(values, clients, alpha), seed, at_least=at_least)


def deal_shards(labels: np.ndarray, clients: int, per_client: int, seed: int) -> np.ndarray:
    """Rows sorted by label and cut into clients * per_client equal shards, dealt at random."""
    values = np.unique(labels, return_inverse=True)[1]
    return _deal_by_rule(values, _make_shard_shares(values, clients, per_client), seed)


def deal_classes(labels: np.ndarray, clients: int, per_client: int, seed: int) -> np.ndarray:
    """Every client holds exactly `per_client` labels, and equal parts of them with the others who hold them."""
    values = np.unique(labels, return_inverse=True)[1]
    return _deal_by_rule(values, _make_class_shares(values, clients, per_client), seed)


def deal_by_ratios(values: np.ndarray, ratios: Sequence[float], seed: int) -> np.ndarray:
    """The rows of each value cut by the ratios; who gets which share is random for each value."""
    values = np.unique(values, return_inverse=True)[1]
    return _deal_by_rule(values, _make_ratio_shares(values, ratios), seed)


def deal_by_column(values: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """Each row's client as named by a column; clients are numbered in order of first appearance."""
    values = pd.Series(values)
    absent = int(values.isna().sum())
    if absent:
        raise UserError(
            f"the column {values.name!r} names no client in {absent} of {len(values)} rows; "
            "fill these cells in, or remove the rows."
        )
    client, names = find_categories(values)
    if len(names) < 2:
        raise UserError(
            f"the column {values.name!r} names one client only ({list_values(names)}); a federation needs at least "
            "two: choose another column, or deal the rows by partition='iid'."
        )
    return client.astype(np.int32), tuple(names)


def assign(
    spec: str,
    *,
    labels: np.ndarray,
    groups: np.ndarray,
    column: Column | None = None,
    clients: int | None = None,
    seed: int,
    strata: np.ndarray | None = None,
    needed: np.ndarray | None = None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Each row's client and the clients' names, by the words of the command line.

    "iid", "dirichlet:0.5", "shards:2", "classes:2" (both by label), "ratios:2:2:6" (by group), "column". Without
    `clients` there are three, or as many as there are ratios. `strata`: rows of each stratum are dealt separately by
    the same shares. `needed` marks the positive rows to train on: every client must hold one, and random rules
    are redrawn until so.
    """
    word, *arguments = str(spec).split(":")
    if word not in RULES:
        meant = suggest(word, RULES, *NEAREST)
        raise UserError(f"unknown partition {spec!r}{meant}; the partitions are {', '.join(RULES.values())}.")
    numbers = _read_numbers(spec, word, arguments)
    if word == "column":
        if column is None:
            raise UserError(
                "the partition 'column' was asked for, but no column names the clients; name it (clients=), or "
                "choose another partition."
            )
        return deal_by_column(column)
    if word == "ratios":
        if clients is not None and clients != len(numbers):
            raise UserError(
                f"the partition {spec!r} has {len(numbers)} ratios, but clients={clients} was given; "
                "give one ratio per client, or leave the number of clients out."
            )
        clients = len(numbers)
    clients = 3 if clients is None else clients
    label = np.unique(labels, return_inverse=True)[1]
    group = np.unique(groups, return_inverse=True)[1]
    if word == "iid":
        values, rule = np.zeros(len(label), int), _make_equal_shares(clients)
    elif word == "dirichlet":
        values, rule = label, _make_dirichlet_shares(label, clients, numbers[0])
    elif word == "shards":
        values, rule = label, _make_shard_shares(label, clients, int(numbers[0]))
    elif word == "classes":
        values, rule = label, _make_class_shares(label, clients, int(numbers[0]))
    else:
        values, rule = group, _make_ratio_shares(group, numbers)
    client = _deal_by_rule(values, rule, seed, strata=strata, needed=needed)
    return client, tuple(f"client {i + 1}" for i in range(clients))


def _read_numbers(spec: str, word: str, arguments: Sequence[str]) -> list[float]:
    """The numbers after the word, checked."""
    expected = {"iid": 0, "column": 0, "ratios": None}.get(word, 1)
    problem = f"the partition {spec!r} cannot be read; write it as {RULES[word]}, "
    if expected == 0 and arguments:
        raise UserError(problem + "without a number.")
    if expected == 1 and len(arguments) != 1 or expected is None and len(arguments) < 2:
        raise UserError(problem + ("with one number." if expected == 1 else "with one ratio per client."))
    try:
        numbers = [float(argument) for argument in arguments]
    except ValueError:
        raise UserError(problem + "with numbers after the colon.") from None
    if word in ("shards", "classes") and not (numbers[0].is_integer() and numbers[0] >= 1):
        raise UserError(problem + "with a whole number from 1.")
    return numbers


def _check_clients(clients: int) -> None:
    if not isinstance(clients, int | np.integer) or clients < 1:
        raise UserError(f"clients={clients!r} was given; the number of clients is a whole number from 1.")


Rule = Callable[[np.random.Generator], Shares]


def _make_equal_shares(clients: int) -> Rule:
    _check_clients(clients)
    return lambda random: np.full((1, clients), 1 / clients)


def _make_dirichlet_shares(values: np.ndarray, clients: int, alpha: float) -> Rule:
    _check_clients(clients)
    if not (alpha > 0 and np.isfinite(alpha)):
        raise UserError(f"dirichlet: alpha={alpha} was given; it must be a number above 0 (small means uneven).")
    return lambda random: random.dirichlet(np.full(clients, float(alpha)), size=values.max() + 1)


def _make_shard_shares(values: np.ndarray, clients: int, per_client: int) -> Rule:
    _check_clients(clients)
    number = clients * per_client
    if per_client < 1 or number > len(values):
        raise UserError(
            f"shards: {clients} clients with {per_client} shards each need at least {max(number, 1)} rows, "
            f"there are {len(values)}; choose fewer clients or fewer shards (at least 1)."
        )
    shard = np.arange(len(values)) * number // len(values)  # of the rows sorted by value

    def shares(random: np.random.Generator) -> Shares:
        owner = random.permutation(np.arange(number) % clients)
        counts = np.zeros((values.max() + 1, clients))
        np.add.at(counts, (np.sort(values), owner[shard]), 1)
        return counts / counts.sum(1, keepdims=True)

    return shares


def _make_class_shares(values: np.ndarray, clients: int, per_client: int) -> Rule:
    _check_clients(clients)
    number = values.max() + 1
    if not 1 <= per_client <= number or clients * per_client < number:
        raise UserError(
            f"classes: {clients} clients with {per_client} of {number} labels each cannot hold every label once; "
            f"choose between {max(1, -(-number // clients))} and {number} labels per client, or other clients."
        )

    def shares(random: np.random.Generator) -> Shares:
        # Consecutive places of a cyclic order are different labels, and all labels are held equally often within one.
        order = random.permutation(number)
        held = np.zeros((number, clients))
        for place, client in enumerate(random.permutation(clients)):
            held[order[np.arange(place * per_client, (place + 1) * per_client) % number], client] = 1
        holders = held.sum(1).astype(int)
        rows = np.bincount(values)
        if (rows < holders).any():
            scarce = int(np.argmax(holders - rows))
            raise UserError(
                f"classes: label number {scarce} has {rows[scarce]} rows for {holders[scarce]} clients; "
                "choose fewer clients or fewer labels per client."
            )
        return held / held.sum(1, keepdims=True)

    return shares


def _make_ratio_shares(values: np.ndarray, ratios: Sequence[float]) -> Rule:
    shares = np.asarray(ratios, float)
    if not len(shares) or not np.isfinite(shares).all() or (shares <= 0).any():
        raise UserError(f"ratios: {list_values(ratios)} was given; ratios are numbers above 0, one per client.")
    shares = shares / shares.sum()
    return lambda random: np.stack([random.permutation(shares) for _ in range(values.max() + 1)])


def _deal_by_rule(
    values: np.ndarray,
    rule: Rule,
    seed: int,
    *,
    strata: np.ndarray | None = None,
    needed: np.ndarray | None = None,
    at_least: int = 1,
) -> np.ndarray:
    """Deal, and draw again while a client has fewer than `at_least` rows or none of the needed ones."""
    if len(values) == 0:
        raise UserError("there are no rows to deal; give a table with rows.")
    random = make_generator(seed, _DEAL)
    needed = np.ones(len(values), bool) if needed is None else needed
    attempts = 0
    while True:
        shares = rule(random)
        client = deal(values, shares, random, strata)
        rows = np.bincount(client, minlength=shares.shape[1])
        kept = np.bincount(client[needed], minlength=shares.shape[1])
        if rows.min() >= at_least and kept.min() >= 1:
            return client
        attempts += 1
        if attempts == ATTEMPTS:
            break
    poorest = int(np.argmin(np.where(rows < at_least, -1, kept)))
    what = (
        f"{rows[poorest]} rows (at least {at_least} are needed)"
        if rows[poorest] < at_least
        else f"{rows[poorest]} rows, but none with a positive label to train on"
    )
    raise UserError(
        f"client {poorest + 1} of {len(rows)} got {what} in each of {ATTEMPTS} draws from {len(values)} rows; "
        "choose fewer clients, or a more even partition (a larger alpha, 'iid')."
    )


def deal(
    values: np.ndarray, shares: Shares, random: np.random.Generator, strata: np.ndarray | None = None
) -> np.ndarray:
    """Each row's client: the shuffled rows of every value (and stratum) cut at the rounded cumulative shares."""
    client = np.empty(len(values), np.int32)
    strata = np.zeros(len(values), int) if strata is None else np.asarray(strata, int)
    key = values * (strata.max(initial=0) + 1) + strata
    order = random.permutation(len(values))
    order = order[np.argsort(key[order], kind="stable")]
    starts = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])
    for rows in np.split(order, starts[1:]):
        # The small number makes up for sums such as 2.4999999. Halves go up, not to even: equal shares of at least one
        # row each then give everybody a row.
        ends = np.floor(np.cumsum(shares[values[rows[0]]]) * len(rows) + 0.5 + 1e-9).astype(int)
        client[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right")
    return client


# ------------------------------------------------------------------------------------------------- splits


def split_by_group(groups: np.ndarray, fraction: float, seed: int, owner: np.ndarray | None = None) -> np.ndarray:
    """Mask of the test rows: of each group the rounded fraction, so that counts are the same for all seeds.

    owner  the number of who holds a row and splits it; None: all rows are in one hand
    """
    if not 0 <= fraction < 1:
        raise UserError(f"test_fraction={fraction} was given; it must be from 0 to below 1.")
    owner = np.zeros(len(groups), int) if owner is None else owner
    cell = owner * (groups.max(initial=0) + 1) + groups
    number = np.rint(np.bincount(cell) * fraction).astype(int)[cell]
    return _rank_by_owner(cell, owner, seed, _SPLIT) < number


def draw_balanced_validation(
    groups: np.ndarray,
    client: np.ndarray,
    available: np.ndarray,
    seed: int,
    share: float = 0.2,
    at_least: int = 4,
    owner: np.ndarray | None = None,
) -> np.ndarray:
    """Mask of validation rows: per client the same number of `available` rows of every group it has.

    The number is `share` of the client's smallest group, but not less than `at_least`; of a group too small for that,
    half of its rows (rounded down). `owner` is as for `split_by_group`.
    """
    cell = client * (groups.max() + 1) + groups
    sizes = np.bincount(cell[available], minlength=cell.max() + 1)
    smallest = np.full(client.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(smallest, client[available], sizes[cell[available]])
    wanted = np.maximum(at_least, np.floor(share * smallest + 1e-9).astype(int))
    return _draw_validation(cell, available, np.minimum(wanted[client], sizes[cell] // 2), seed, owner)


def draw_proportional_validation(
    groups: np.ndarray,
    client: np.ndarray,
    available: np.ndarray,
    seed: int,
    share: float,
    owner: np.ndarray | None = None,
) -> np.ndarray:
    """Mask of validation rows: the rounded share of every client's `available` rows of every group, so that rates of a
    group are those of the population."""
    cell = client * (groups.max() + 1) + groups
    number = np.rint(share * np.bincount(cell[available], minlength=cell.max() + 1)).astype(int)[cell]
    return _draw_validation(cell, available, number, seed, owner)


def draw_plain_validation(
    client: np.ndarray, available: np.ndarray, number: np.ndarray, seed: int, owner: np.ndarray | None = None
) -> np.ndarray:
    """Mask of so many validation rows per client, whatever their groups."""
    return _draw_validation(client, available, number[client], seed, owner, _PLAIN)


def _draw_validation(
    cell: np.ndarray,
    available: np.ndarray,
    number: np.ndarray,
    seed: int,
    owner: np.ndarray | None,
    stream: int = _VALIDATION,
) -> np.ndarray:
    """So many of the available rows of every cell."""
    owner = np.zeros(len(cell), int) if owner is None else owner
    mask = np.zeros(len(cell), bool)
    mask[available] = _rank_by_owner(cell[available], owner[available], seed, stream) < number[available]
    return mask


def _rank_by_owner(values: np.ndarray, owner: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Ranks that every owner draws for its own rows alone."""
    places = np.empty(len(values), int)
    order = np.argsort(owner, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
        if mine.size:
            places[mine] = draw_ranks(values[mine], make_generator(seed, stream, int(owner[mine[0]])))
    return places


def draw_ranks(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each row's place (from 0) in a random order of the rows with its value."""
    order = random.permutation(len(values))
    order = order[np.argsort(values[order], kind="stable")]
    starts = np.r_[0, np.cumsum(np.bincount(values))[:-1]] if len(values) else np.zeros(0, int)
    places = np.empty(len(values), int)
    places[order] = np.arange(len(values)) - starts[values[order]]
    return places


# ------------------------------------------------------------------------------------------------- who holds what


def count_holdings(
    client: np.ndarray,
    group: np.ndarray,
    label: np.ndarray,
    part: np.ndarray,
    client_names: Sequence[str],
    group_names: Sequence[str],
) -> pd.DataFrame:
    """Rows per client, group, label (0, 1) and part (train, validation, test), where there are any."""
    shape = (len(client_names), len(group_names), 2, len(PARTS))
    rows = np.bincount(np.ravel_multi_index((client, group, label, part), shape), minlength=int(np.prod(shape)))
    c, g, y, p = np.unravel_index(np.flatnonzero(rows), shape)
    return pd.DataFrame(
        {
            "client": np.asarray(client_names, object)[c],
            "group": np.asarray(group_names, object)[g],
            "label": y,
            "part": np.asarray(PARTS, object)[p],
            "rows": rows[rows > 0],
        }
    )
