"""Equal opportunity for groups that are known through noisy proxies only, after "Federated compositional optimization:
the impact of two-sided learning rates on communication efficiency" (Adult).

The wish, for every group j: the true positive rate of the group is at least that of everybody, less a margin. Rates
have no useful derivative, so training looks at losses, and at proxies instead of groups:

    c_j      = loss of the positives with proxy j - loss of the reference - margin       should not be above 0
    penalty  = (1 / sharpness) log[(1 + sum_j exp(sharpness c_j)) / (m + 1)]             a soft max(0, c_1, ..., c_m)
    minimise   mean loss of all rows + penalty

The published code of GCIVR has this penalty with a = gamma = 0.1 (only sharpness = a / gamma = 1 counts), and takes all
rows, negative ones too, as the reference. Whether the wish came true is measured on true groups, with rates.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import logsumexp

from nestfed.core.randomness import draw_words, fold
from nestfed.core.rows import Rows
from nestfed.core.scaled import Scaled
from nestfed.core.settings import UserError, setting, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.data import TRAIN
from nestfed.experiments.dro_fairness.data import NoisyGroups, append_proxies, draw_proxies
from nestfed.models import Perceptron
from nestfed.problems import Compositional
from nestfed.workbench.scenarios.tabular import PARTS

_PROXIES = 1  # what a batch's key is for, beside its rows


# ------------------------------------------------------------------------------------------------- the problem


@struct
class EqualOpportunity(Compositional):
    """Mean loss plus the penalty above. `shares` are p_j: the share of all training rows, over all clients, that are
    positive with proxy j. Whoever trains is told them once; with them the loss of a group is a mean over all rows,

        L_j = mean_i [row i is positive, with proxy j] loss_i / p_j,

    which clients, and batches without such a row, can average. L_0, the loss of the reference, is that of

    reference "rows"        all rows, mean_i loss_i: as published
    reference "positives"   all positives, mean_i [row i is positive] loss_i / (p_1 + ... + p_m): what corresponds to
                            the rate of everybody

    form "vector"   g = (L_0, L_1, ..., L_m), f(y) = penalty: exact, however the rows are dealt to clients and batches
    form "scalar"   g = (1 + sum_j exp(sharpness c_j)) / (m + 1), f(y) = log(y) / sharpness: the exponentials of a
                    client's or a batch's own losses are averaged, which is another, larger function; a literal reading
    """

    model: Perceptron = static()
    shares: Array  # [m]
    margin: float = setting("epsilon: how much lower the rate of a group may be", default=0.05, at_least=0)
    sharpness: float = setting("a / gamma: how closely the penalty follows the largest c_j", default=1.0, above=0)
    form: str = setting("what is averaged over clients", default="vector", choices=("vector", "scalar"), static=True)
    reference: str = setting(
        "what groups are compared with", default="rows", choices=("rows", "positives"), static=True
    )

    def losses(self, x: PyTree, batch: PyTree) -> Array:
        """The logistic loss of every row."""
        return optax.sigmoid_binary_cross_entropy(self.model(x, batch["inputs"]), batch["label"])

    def levels(self, x: PyTree, batch: PyTree) -> Array:
        """(L_0, L_1, ..., L_m) of a batch."""
        loss = self.losses(x, batch)
        groups = self.shares.shape[0]
        positive = jax.nn.one_hot(batch["proxy"], groups, axis=0, dtype=loss.dtype) * batch["label"][None]
        own = positive @ loss / loss.size
        return jnp.concatenate(
            [self.choose_reference(jnp.mean(loss), own.sum() / self.shares.sum())[None], own / self.shares]
        )

    def choose_reference(self, rows: Array, positives: Array) -> Array:
        """L_0 from the mean losses of all rows and of all positives."""
        return rows if self.reference == "rows" else positives

    def exponents(self, levels: Array) -> Array:
        """(0, sharpness c_1, ..., sharpness c_m)."""
        excess = self.sharpness * (levels[1:] - levels[0] - self.margin)
        return jnp.concatenate([jnp.zeros_like(excess[:1]), excess])

    def penalty(self, levels: Array) -> Array:
        return (logsumexp(self.exponents(levels)) - np.log(levels.shape[0])) / self.sharpness

    def inner(self, x, batch, key) -> Any:
        levels = self.levels(x, batch)
        return levels if self.form == "vector" else Scaled.mean_exp(self.exponents(levels))

    def outer(self, y, batch, key):
        return self.penalty(y) if self.form == "vector" else y.log() / self.sharpness

    def extra(self, x, batch, key):
        return jnp.mean(self.losses(x, batch))

    def project_y(self, y):
        # Losses are not negative; one of the m + 1 exponentials is that of 0.
        return jnp.maximum(y, 0) if self.form == "vector" else y.at_least(1 / (self.shares.shape[0] + 1))


# ------------------------------------------------------------------------------------------------- the task


@struct
class NoisyGroupsTask(Task):
    """Clients hold training rows. What is measured are rates of small groups, of everybody's rows together: `pool` has
    the rows of all parts once more, to evaluate and for nothing else.

    Proxies are features. With `resample` every batch draws the proxies of its rows anew from their true groups: a row
    has a new proxy whenever it is looked at, as if proxies were drawn anew in every epoch. Otherwise a row keeps the
    proxy that it has in evaluations. Problems see the proxy and never the true group.
    """

    group_names: tuple[str, ...] = static()
    noise: float = static()
    resample: bool = static()
    pool: PyTree  # inputs [rows, features] with proxies, label [rows], cell [rows]: see `totals`

    def sample(self, data, key):
        rows = data.draw_rows(key, self.batch_size)
        proxy = rows["proxy"]
        if self.resample:
            seed = draw_words(fold(key, _PROXIES), 1)[0]
            proxy = draw_proxies(rows["group"], self.noise, seed, groups=len(self.group_names))
        inputs = append_proxies(rows["inputs"], proxy, len(self.group_names))
        return {"inputs": inputs, "label": rows["label"], "proxy": proxy}

    def metrics(self, server, client, data, fed):
        rates = jax.vmap(self._compute_rates)(*self.totals(self.problem.tree(0, server.x)))
        recorded = {f"{part}_{name}": values[i] for i, part in enumerate(PARTS) for name, values in rates.items()}
        return recorded

    def totals(self, x: PyTree) -> Array:
        """[3, parts, 2, m, m]: rows, rows that the model says yes to, and losses, of every part, label, group and
        proxy."""
        logit, label, groups = self.problem.model(x, self.pool["inputs"]), self.pool["label"], len(self.group_names)
        loss = optax.sigmoid_binary_cross_entropy(logit, label)
        values = jnp.stack([jnp.ones_like(loss), (logit > 0).astype(loss.dtype), loss], axis=1)
        cells = (len(PARTS), 2, groups, groups)
        return jax.ops.segment_sum(values, self.pool["cell"], int(np.prod(cells))).T.reshape(3, *cells)

    def _compute_rates(self, rows: Array, yes: Array, loss: Array) -> dict[str, Array]:
        """Of one part, from its totals [2, m, m]."""
        problem = self.problem
        right = rows[0].sum() - yes[0].sum() + yes[1].sum()
        of_group, of_proxy = (_divide(yes[1].sum(axis), rows[1].sum(axis)) for axis in (1, 0))
        everybody = _divide(yes[1].sum(), rows[1].sum())
        # A group without positives has no rate, and violates nothing.
        violation = lambda rates: jnp.nanmax(everybody - rates) - problem.margin
        mean = _divide(loss.sum(), rows.sum())
        reference = problem.choose_reference(mean, _divide(loss[1].sum(), rows[1].sum()))
        levels = jnp.concatenate([reference[None], _divide(loss[1].sum(0), rows[1].sum(0))])
        return {
            "accuracy": _divide(right, rows.sum()),
            "loss": mean,
            "objective": mean + problem.penalty(levels),
            "violation": violation(of_group),
            "proxy_violation": violation(of_proxy),
            "tpr": everybody,
            **{f"tpr_{name}": of_group[j] for j, name in enumerate(self.group_names)},
        }


def _divide(some: Array, whole: Array) -> Array:
    """NaN where there is nothing."""
    return jnp.where(whole > 0, some / jnp.where(whole > 0, whole, 1), jnp.nan)


def make_noisy_groups_task(
    data: NoisyGroups,
    *,
    noise: float = 0.3,
    resample: bool = True,
    batch_size: int = 16,
    margin: float = 0.05,
    reference: str = "rows",
    seed: int = 0,
) -> NoisyGroupsTask:
    """Logistic regression on these rows; `seed` draws proxies and start."""
    groups = len(data.group_names)
    proxy = np.asarray(draw_proxies(data.true_group, noise, seed, groups=groups))
    training = data.part == TRAIN
    counts = np.bincount(proxy[training & (data.label == 1)], minlength=groups)
    if not counts.all():
        empty = data.group_names[int(counts.argmin())]
        raise UserError(f"no positive training row has the proxy {empty!r}; its constraint needs one. Give more rows.")
    inputs = (
        data.inputs.astype(np.uint8) if np.isin(data.inputs, (0, 1)).all() else data.inputs
    )  # a quarter of the bytes
    label = data.label.astype(np.float32)
    columns = {"inputs": inputs, "label": label, "group": data.true_group, "proxy": proxy}
    mine = {name: column[training] for name, column in columns.items()}
    model = Perceptron()
    shares = (counts / training.sum()).astype(np.float32)
    problem = EqualOpportunity(model=model, shares=shares, margin=margin, reference=reference)
    return NoisyGroupsTask.create(
        problem,
        Rows.from_table(mine, data.client[training]),
        model.init(jax.random.key(seed), inputs.shape[1] + groups),
        batch_size=batch_size,
        weights="samples",  # every training row counts the same
        group_names=data.group_names,
        noise=noise,
        resample=resample,
        pool={
            "inputs": np.asarray(append_proxies(data.inputs, proxy, groups), np.float32),
            "label": label,
            "cell": ((data.part * 2 + data.label) * groups + data.true_group) * groups + proxy,
        },
    )
