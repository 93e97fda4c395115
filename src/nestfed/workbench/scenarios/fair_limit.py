"""A model whose gap between groups is within a limit: candidates, and how one of them is chosen.

The candidates are the models of `LimitedGaps`, which differ in the limit that they were trained for, and, where a
decision may ask for the group, the plain one of them with thresholds by group. Thresholds follow from histograms of
scores by group and label, the choice from counts by group, and both are sums over clients.

A gap on validation rows is partly chance. `bound_gap` says below which number the gap of all people lies with a given
confidence, and a model is within the limit if this bound is; of those the most accurate on validation rows is chosen.
The confidence is that of one model. The candidates' errors go together, since they differ little and are judged by the
same rows, so that choosing among them costs little of it (docs/fairness.md has the measurement).

Ref.  Hardt, Price and Srebro, "Equality of opportunity in supervised learning", NeurIPS 2016, arXiv:1610.02413
(thresholds by group; here they are not randomised); Newcombe, "Interval estimation for the difference between
independent proportions: comparison of eleven methods", Statistics in Medicine 17, 1998, method 10 (the bound).
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.special import ndtri

from nestfed.core.types import PyTree
from nestfed.data import TRAIN, VALIDATION
from nestfed.data.partition import TEST
from nestfed.workbench.scenarios.fair_problems import LimitedGaps, mark_cells
from nestfed.workbench.scenarios.tabular import PARTS

BINS = 1000  # of a histogram of scores, from 0 to 1
ANCHORS = {1: 1000, 2: 40}  # rates at which a window may begin, by the number of rates that are compared
LARGEST_LOGIT = 30.0  # of a threshold that nobody reaches
NO_LIMIT, TRAINED, THRESHOLDS = "no limit", "primal-dual", "group thresholds"


# ------------------------------------------------------------------------------------------------- counts


class Counts(NamedTuple):
    """Decisions of some models on some rows."""

    hits: np.ndarray  # [models, kinds of rows, groups]: positive decisions
    cases: np.ndarray  # [kinds of rows, groups]: rows
    accuracy: np.ndarray  # [models]

    @property
    def gaps(self) -> np.ndarray:
        """[models]: the largest difference of two groups' rates; groups without a case are left out."""
        known, rates = self.cases > 0, self.hits / np.maximum(self.cases, 1)
        spread = np.where(known, rates, -np.inf).max(-1) - np.where(known, rates, np.inf).min(-1)
        return np.maximum(spread, 0).max(-1)

    def bounds(self, confidence: float) -> np.ndarray:
        """[models]: see `bound_gap`."""
        return np.array([bound_gap(hits, self.cases, confidence) for hits in self.hits])


def count(decisions: np.ndarray, label: np.ndarray, group: np.ndarray, groups: int, metric: str) -> Counts:
    """Of decisions [models, rows]."""
    inside = np.asarray(mark_cells(label, group, groups, metric)).astype(float)
    hits = np.einsum("mr,kar->mka", decisions.astype(float), inside)
    return Counts(hits.round(), inside.sum(-1), (decisions == label).mean(-1))


def bound_gap(hits: np.ndarray, cases: np.ndarray, confidence: float) -> float:
    """An upper confidence bound of the largest difference of two groups' rates, from [kinds of rows, groups] counts.

    Every ordered pair of groups has a one-sided bound of this confidence, by Wilson's limits of both rates. The largest
    of them has the confidence too, without a correction: it is at least the bound of the pair that differs most.
    """
    if (cases == 0).any():
        return 1.0  # nothing is known of a group without a case
    z, rate = ndtri(confidence), hits / cases
    centre = (rate + z**2 / (2 * cases)) / (1 + z**2 / cases)
    reach = z * np.sqrt(rate * (1 - rate) / cases + z**2 / (4 * cases**2)) / (1 + z**2 / cases)
    above, below = centre + reach - rate, rate - (centre - reach)
    pairs = rate[:, :, None] - rate[:, None] + np.hypot(above[:, :, None], below[:, None])
    different = ~np.eye(cases.shape[1], dtype=bool)
    return float(np.clip(pairs[:, different].max(), 0, 1))


# ------------------------------------------------------------------------------------------------- thresholds by group


def count_scores(score: np.ndarray, label: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """[groups, labels, bins]: how many rows have which score; those of clients add up."""
    counts = np.zeros((groups, 2, BINS))
    place = np.clip((np.nan_to_num(score) * BINS).astype(int), 0, BINS - 1)
    np.add.at(counts, (group, label.astype(int), place), 1)
    return counts


def choose_thresholds(counts: np.ndarray, metric: str, limit: float) -> np.ndarray:
    """[groups]: from which bin on a score counts as positive, so that most rows are right while the groups' rates lie
    within a window of this width."""
    above = np.concatenate([counts[..., ::-1].cumsum(-1)[..., ::-1], np.zeros((*counts.shape[:2], 1))], -1)
    right = above[:, 1] + (above[:, 0, :1] - above[:, 0])  # [groups, thresholds]
    picked = {"eqopp": [above[:, 1]], "eqodds": [above[:, 1], above[:, 0]], "parity": [above.sum(1)]}[metric]
    rates = [hits / np.where(hits[:, :1] > 0, hits[:, :1], np.nan) for hits in picked]
    best, chosen = -1.0, np.zeros(len(counts), int)
    for lowest in itertools.product(*(_choose_anchors(rate, ANCHORS[len(rates)]) for rate in rates)):
        # A group without a case has no rate, and none that could be wrong.
        outside = [(rate < low - 1e-12) | (rate > low + limit + 1e-12) for rate, low in zip(rates, lowest, strict=True)]
        allowed = np.where(np.logical_or.reduce(outside), -np.inf, right)
        total = allowed.max(1).sum()
        if total > best:
            best, chosen = total, allowed.argmax(1)
    return chosen


def _choose_anchors(rates: np.ndarray, most: int) -> np.ndarray:
    """Where a window may begin: at a rate that some group can have, or evenly thinned out."""
    known = np.unique(rates[np.isfinite(rates)]) if np.isfinite(rates).any() else np.zeros(1)
    return known if len(known) <= most else known[np.linspace(0, len(known) - 1, most).round().astype(int)]


def compute_logit(place: np.ndarray) -> np.ndarray:
    """The threshold of a logit from which on scores lie in this bin or above."""
    edge = place / BINS
    with np.errstate(divide="ignore"):
        return np.clip(np.log(edge) - np.log1p(-edge), -LARGEST_LOGIT, LARGEST_LOGIT)


# ------------------------------------------------------------------------------------------------- the choice


class Candidate(NamedTuple):
    way: str
    aim: float  # the limit on training rows
    theta: PyTree
    thresholds: np.ndarray | None  # [groups], of logits


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the last stage leaves: the candidates, and which one is the model."""

    problem: LimitedGaps
    server: Any
    candidates: tuple[Candidate, ...]
    table: pd.DataFrame  # see `Record.candidates`
    within: bool  # the chosen one is within the limit

    @property
    def chosen(self) -> Candidate:
        return self.candidates[int(self.table["chosen"].to_numpy().argmax())]

    @property
    def theta(self) -> PyTree:
        return self.chosen.theta

    @property
    def bound(self) -> float:
        return float(self.table.loc[self.table["chosen"], "bound"].iloc[0])


def choose(
    problem: LimitedGaps, server: Any, rows: dict[str, np.ndarray], limit: float, confidence: float, by_group: bool
) -> Choice:
    """The most accurate model within the limit, from all rows with their parts; the nearest where there is none."""
    label, group, part = (np.asarray(rows[name]) for name in ("label", "group", "part"))
    models = [
        jax.tree.map(lambda leaf: np.asarray(leaf[i]), problem.models(server)) for i in range(len(problem.limits))
    ]
    logits = [np.asarray(problem.model(theta, jnp.asarray(rows["inputs"])), float) for theta in models]
    aims = [float(aim) for aim in problem.limits]
    plain = len(models) - 1
    candidates = [
        Candidate(NO_LIMIT if i == plain else TRAINED, aim, theta, None)
        for i, (aim, theta) in enumerate(zip(aims, models, strict=True))
    ]
    if by_group:
        train = part == TRAIN
        score = 1 / (1 + np.exp(-np.clip(logits[plain][train], -LARGEST_LOGIT, LARGEST_LOGIT)))
        counts = count_scores(score, label[train], group[train], problem.groups)
        # Rates that are quite equal may only be those of nobody or everybody: windows lie between the limits.
        for aim in map(np.mean, itertools.pairwise(aims[:plain])):
            thresholds = compute_logit(choose_thresholds(counts, problem.metric, float(aim)))
            candidates.append(Candidate(THRESHOLDS, float(aim), models[plain], thresholds))
            logits.append(logits[plain] - thresholds[group])
    decisions = np.stack(logits) > 0
    of_part = lambda inside: count(decisions[:, inside], label[inside], group[inside], problem.groups, problem.metric)
    judged = {number: of_part(part == number) for number in (TRAIN, VALIDATION, TEST) if (part == number).any()}
    bounds = judged[VALIDATION].bounds(confidence)
    passed = np.flatnonzero(bounds <= limit)
    chosen = passed[judged[VALIDATION].accuracy[passed].argmax()] if len(passed) else bounds.argmin()
    table = pd.DataFrame({"number": range(len(candidates)), "way": [c.way for c in candidates]})
    table["aim"] = [candidate.aim for candidate in candidates]
    for number, counts in judged.items():
        table[f"{PARTS[number]}_gap"], table[f"{PARTS[number]}_accuracy"] = counts.gaps, counts.accuracy
    table["bound"] = bounds
    table["chosen"] = np.arange(len(candidates)) == chosen
    return Choice(problem, server, tuple(candidates), table, bool(len(passed)))


def describe(name: str, seed: int, row: Any, options: Any) -> str:
    """What became of the limit, in a sentence; `row` has the final metrics of a seed."""
    limit = f"at most {options.limit:g} with {100 * options.confidence:g} % confidence"
    wanted = f"{METRIC_TITLES[options.metric]} is {limit}"
    gap, bound = row[f"validation_{options.metric}"], row["gap_bound"]
    accuracy = f"accuracy there {row['validation_accuracy']:.4f}"
    if row["within_limit"]:
        return f"{name}, seed {seed}: the {wanted}; on validation rows it is {gap:.4f} (bound {bound:.4f}), {accuracy}."
    return (
        f"{name}, seed {seed}: of no model it can be said that its {wanted}. The nearest is the one that is saved: on "
        f"validation rows its gap is {gap:.4f}, which bounds it by {bound:.4f}; {accuracy}. More rows of the smallest "
        "group, a larger limit or a lower confidence would help."
    )


METRIC_TITLES = {"eqopp": "EqOpp gap", "eqodds": "equalised odds gap", "parity": "gap of positive decisions"}
