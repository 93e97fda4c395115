"""Gradient boosted trees from exchanged histograms: average precision by exchanges and by bytes, beside a network's.

    NESTFED_DATA=folder python benchmarks/trees.py [--table default] [--seeds 1] [--trees 100] [--out FOLDER]

A prototype, no method of the library. A tree grows level by level: every client adds up the gradients and the Hessians
of its training rows by node, column and bin, and the mean over clients of these histograms decides all splits of a
level. One level is one exchange; of two siblings only the left one is sent, the other is what is left of their parent.
Bins come from the exchanged statistics of the encoder, and a category is a bin. Settings are those of scikit-learn's
HistGradientBoostingClassifier where it has them (100 trees, step 0.1), with depth 5 in place of 31 leaves.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from models import TABLES, markdown, measure, scenario_of, train

from nestfed.data import TRAIN
from nestfed.data.features import LevelTotals, Spreads, Totals, read_numbers
from nestfed.data.table import find_categories, is_number, list_columns

BYTES = 4  # of a number
DEPTH, RATE = 5, 0.1
LEAST = 1e-3  # mean Hessian of the clients' rows on either side of a split
SMALLEST = 1e-12
AT = (1, 2, 5, 10, 20, 50, 100, 200)  # trees


@dataclasses.dataclass
class Traffic:
    """What a client has sent so far."""

    exchanges: int = 0
    numbers: int = 0

    def mean(self, parts: list[np.ndarray]) -> np.ndarray:
        """The mean over clients, as `fed.mean` gives it."""
        self.exchanges += 1
        self.numbers += parts[0].size
        return np.mean(parts, 0)


def bin_rows(frame: pd.DataFrame, counted: np.ndarray, clients: list[np.ndarray], most: int) -> np.ndarray:
    """Every value's bin, [rows, columns], from what the clients tell of their columns."""
    inside = [np.flatnonzero(client) for client in clients]
    told = [Totals.of(frame.iloc[own], "piecewise", counted[own]) for own in inside]
    totals = sum(told[1:], told[0])
    measured = [Spreads.of(frame.iloc[own], totals, counted[own]) for own in inside]
    spreads = sum(measured[1:], measured[0])
    found = []
    for name, known in totals.columns.items():
        if isinstance(known, LevelTotals):
            codes, names = find_categories(frame[name])
            levels = sorted(known.levels)
            found.append(np.array([levels.index(one) for one in names])[codes])
        else:
            edges = spreads.columns[name].edges(most) if known.values is None else sorted(known.values)
            middles = (np.asarray(edges)[1:] + np.asarray(edges)[:-1]) / 2
            numbers = read_numbers(frame[name], coded=False)
            found.append(np.searchsorted(middles, np.where(np.isnan(numbers), known.mean, numbers)))
    return np.stack(found, 1)


def find_splits(sums: np.ndarray, ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best split of every node from its histograms [nodes, columns, bins, (gradient, Hessian)]: its column (-1 if
    none gains) and which bins go left. Bins of a category are put in the order of their own best answers first."""
    nodes, columns, bins, _ = sums.shape
    gradient, hessian = sums[..., 0], sums[..., 1]
    answer = np.where(hessian > 0, gradient / np.maximum(hessian, SMALLEST), np.inf)
    order = np.where(ordered[None, :, None], np.arange(bins), np.argsort(answer, 2, kind="stable"))
    left = np.take_along_axis(sums, order[..., None], 2).cumsum(2)
    whole = left[:, :, -1:]
    value = lambda s: s[..., 0] ** 2 / np.maximum(s[..., 1], SMALLEST)
    gain = value(left) + value(whole - left) - value(whole)
    gain[(left[..., 1] < LEAST) | ((whole - left)[..., 1] < LEAST)] = 0
    best = gain.reshape(nodes, -1).argmax(1)
    column, last = np.divmod(best, bins)
    chosen = np.take_along_axis(order, column[:, None, None].repeat(bins, 2), 1)[:, 0]
    goes_left = np.zeros((nodes, bins), bool)
    for node in range(nodes):
        goes_left[node, chosen[node, : last[node] + 1]] = True
    gains = gain.reshape(nodes, -1)[np.arange(nodes), best]
    return np.where(gains > 0, column, -1), goes_left


def add_up(statistics: np.ndarray, cells: np.ndarray, number: int) -> np.ndarray:
    """Sums of (gradient, Hessian) by cell, [number, 2]; a row of `cells` names those that a row of the table is in."""
    weights = np.repeat(statistics, cells.shape[1], 0)
    return np.stack([np.bincount(cells.ravel(), column, number) for column in weights.T], 1)


def boost(
    bins: np.ndarray, ordered: np.ndarray, label: np.ndarray, clients: list[np.ndarray], *, trees: int
) -> Iterator[tuple[np.ndarray, Traffic]]:
    """Yield (logits of all rows, traffic) after every tree; `clients` are the numbers of each one's training rows."""
    width, columns, traffic = int(bins.max()) + 1, bins.shape[1], Traffic()
    own_place = np.arange(columns) * width + bins  # of every value in its node's histograms
    positives, rows = traffic.mean([np.array([label[own].sum(), own.size], float) for own in clients])
    logits = np.full(len(label), np.log(positives / (rows - positives)))
    for _ in range(trees):
        probability = 1 / (1 + np.exp(-logits))
        statistics = np.stack([probability - label, probability * (1 - probability)], 1)
        node = np.zeros(len(label), int)
        sums = np.zeros((0, columns, width, 2))
        for level in range(DEPTH):
            sent = max(1, len(sums))  # the root, or the left one of every pair of siblings
            parts = []
            for own in clients:
                own = own[node[own] % 2 == 0]
                cells = (node[own] // 2 * columns * width)[:, None] + own_place[own]
                parts.append(add_up(statistics[own], cells, sent * columns * width))
            left = traffic.mean(parts).reshape(sent, columns, width, 2)
            sums = left if level == 0 else np.stack([left, sums - left], 1).reshape(-1, columns, width, 2)
            column, goes_left = find_splits(sums, ordered)
            here = column[node]
            value = np.take_along_axis(bins, np.maximum(here, 0)[:, None], 1)[:, 0]
            node = 2 * node + ((here >= 0) & ~goes_left[node, value])
        # A leaf needs two numbers only.
        leaves = traffic.mean([add_up(statistics[own], node[own][:, None], 2**DEPTH) for own in clients])
        logits = logits - RATE * (leaves[:, 0] / np.maximum(leaves[:, 1], SMALLEST))[node]
        yield logits, traffic


def run_trees(table: str, seed: int, trees: int, most: int) -> list[dict[str, Any]]:
    scenario = scenario_of(table)
    data = scenario.set_up(seed).data
    frame = scenario.table.frame.reindex(columns=scenario.table.features())
    training = data.part == TRAIN
    members = [data.client == i for i in range(len(data.client_names))]
    bins = bin_rows(frame, training, members, most)
    ordered = np.array([is_number(values) for _, values in list_columns(frame)])
    clients = [np.flatnonzero(own & training) for own in members]
    found = []
    for number, (logits, traffic) in enumerate(boost(bins, ordered, data.label, clients, trees=trees), 1):
        if number in AT:
            sent = {"exchanges": traffic.exchanges, "MB": BYTES * traffic.numbers / 1e6}
            found.append({"model": f"{number} tree{'s' * (number > 1)}", "seed": seed, **sent, **measure(data, logits)})
    return found


def run_network(table: str, model: str, seed: int) -> list[dict[str, Any]]:
    """FedAvg with its defaults, measured on its way."""
    ((_, numbers, stage),) = train("fedavg", model, table, [seed], evaluations=10)
    found, price = [], stage.cost.round
    for rounds, precision in zip(stage.history["round"], stage.history["test_average_precision"], strict=True):
        sent = {"exchanges": price.exchanges * int(rounds), "MB": price.bytes_up * int(rounds) / 1e6}
        found.append({"model": f"FedAvg, {model}", "seed": seed, **sent, "average precision": float(precision)})
    return [*found[:-1], found[-1] | numbers]  # those of the iterate that counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", choices=sorted(TABLES), default="default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--bins", type=int, default=64, help="bins of a number with many values (default 64)")
    parser.add_argument("--models", default="logistic,tabular", help="networks beside them, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        rows += run_trees(given.table, seed, given.trees, given.bins)
        for model in filter(None, given.models.split(",")):
            rows += run_network(given.table, model, seed)
    frame: Any = pd.DataFrame(rows).drop(columns="seed")
    means = frame.groupby(["model", "exchanges"], sort=False).mean().reset_index()
    shown = means.round({"MB": 2, "average precision": 4, "accuracy": 4, "AUROC": 4}).astype(object)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "trees.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    title = f"# Trees from histograms beside networks: {given.table}, test rows, a client's uploads"
    page = "\n".join([title, "", markdown(shown.where(means.notna(), "")), ""])
    (given.out / "trees.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
