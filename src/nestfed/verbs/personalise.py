"""Clients' own models: what they are worth to each client, fine-tuning, prediction, and clients that come later.

    PersonalTask   records how well every client's model does on that client's own rows, put aside or not
    fine_tune     a model after some steps on a client's rows: FedAvg with fine-tuning, the end of FedBABU
    find_model, predict    a chosen client's model, and what it answers
    adapt          a client that was not there in training learns its own part; the server does not change

The model of a client is (u, v), extractor and head, in the State of every method: the client's own where it has one,
otherwise the server's (`Personalised.model_of`).
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nestfed.algorithms.clipping import clip_together
from nestfed.core.algorithm import Algorithm, Sample
from nestfed.core.randomness import fold_pair
from nestfed.core.rows import ClientRows, Rows
from nestfed.core.settings import UserError, setting, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree, Seed
from nestfed.engine.options import check_positive, make_key
from nestfed.problems import Personalised
from nestfed.verbs.simulation import Result, advance, start

TRAINED = ("head", "all")


def fine_tune(
    problem: Personalised,
    u: Array,
    v: Array,
    rows: ClientRows,
    key: Array,
    *,
    steps: int,
    lr: float,
    what: str = "head",
    batch_size: int = 48,
    clip: float = 10.0,
) -> tuple[Array, Array]:
    """(u, v) after `steps` gradient steps on batches of these rows, of the head alone or of all.

    Flat vectors in, flat vectors out. A pure function: use it in metrics, or under jit with rows of your own.
    """
    if what not in TRAINED:
        raise UserError(f"what={what!r} was given; fine-tune the 'head' or 'all'.")

    def step(j: Any, model: tuple[Array, Array]) -> tuple[Array, Array]:
        u, v = model
        batch = problem.sample(rows, fold_pair(key, j, 0), batch_size)
        sample = Sample(batch, fold_pair(key, j, 1))
        if what == "head":
            (change,), _ = clip_together((problem.grad_head(u, v, sample),), clip)
            return u, v - lr * change
        (change_u, change_v), _ = clip_together(problem.gradients(u, v, sample), clip)
        return u - lr * change_u, v - lr * change_v

    return lax.fori_loop(0, steps, step, (u, v))


# ------------------------------------------------------------------------------------------------- what a run records


@struct
class PersonalTask(Task):
    """A personalised problem whose metrics are about every client's own model on that client's own rows.

    `test` are rows put aside, the same clients in the same order. Recorded, for part "train" and, where there is one,
    "test":

    <part>_loss, <part>_accuracy        means over clients, by the task's weights; accuracy where there are classes
    <part>_accuracy_deviation, _lowest, _worst_decile, _median
                                        of the clients' accuracies; a worst decile of a: 90 % of the clients have more
    tuned_<part>_...                    the same after `fine_tune` on the training rows, if fine_tune_steps > 0
    representation_norm                 mean |phi|: a distance of representations also falls if these shrink
    representation_distance             H, as a mean over rows, and
    center_distance                     |u_k - u_0|, where there is a common extractor u_0

    The methods note besides: clipped_share and server_clipped_share, the part of local gradients, and of the server's
    means, that was shortened.
    """

    test: Rows | None = None
    fine_tune_steps: int = setting("steps of fine-tuning before it is measured", default=0, at_least=0, static=True)
    fine_tune_lr: float = setting("step size of fine-tuning", default=0.01, above=0)
    fine_tune: str = setting("what is fine-tuned", default="head", choices=TRAINED, static=True)
    rows_at_once: int = static(default=256)

    @property
    def minimised(self):
        return "train_loss"

    @classmethod
    def create(cls, problem: Any, data: Rows, params: PyTree, *, test: Rows | None = None, **fields: Any) -> Self:
        if test is not None and not np.array_equal(np.asarray(test.ids), np.asarray(data.ids)):
            raise UserError(
                f"the test rows are of the clients {np.asarray(test.ids).tolist()}, the training rows of "
                f"{np.asarray(data.ids).tolist()}; give the same clients in the same order."
            )
        return super().create(problem, data, params, test=test, **fields)

    def parts(self, data: ClientRows) -> dict[str, ClientRows]:
        """What a client's model is judged by."""
        if self.test is None:
            return {"train": data}
        return {"train": data, "test": self.test.client(jnp.argmax(jnp.asarray(self.test.ids) == data.id))}

    def metrics(self, server, client, data, fed):
        u, v = self.problem.model_of(server, client)
        parts, data = self.parts(data), self.training_rows(data)
        own = {}
        for part, rows in parts.items():
            own |= self._measure_worth(part, u, v, rows, fed.key)
        if self.fine_tune_steps:
            settings: dict[str, Any] = {"lr": self.fine_tune_lr, "what": self.fine_tune, "batch_size": self.batch_size}
            tuned = fine_tune(self.problem, u, v, data, fed.key, steps=self.fine_tune_steps, **settings)
            for part, rows in parts.items():
                own |= self._measure_worth(f"tuned_{part}", *tuned, rows, fed.key)
        own |= self._inside(server, client, u, data, fed.key)
        return self._summarise(fed.gather(own))

    def _measure_worth(self, part: str, u: Array, v: Array, rows: ClientRows, key: Array) -> dict[str, Array]:
        """Loss and accuracy of a model on these rows."""
        problem = self.problem

        def of_block(batch: PyTree, weights: Any) -> dict[str, Array]:
            inputs, labels = batch
            z, head = problem.features(problem.tree(0, u), inputs, key), problem.tree(1, v)
            each = {"loss": jax.vmap(lambda z, label: problem.fit(head, z[None], label[None], key))(z, labels)}
            outputs = problem.answers(head, z, key)
            if outputs.ndim == 2 and jnp.issubdtype(labels.dtype, jnp.integer):
                each["accuracy"] = outputs.argmax(1) == labels
            return {f"{part}_{name}": _average(values, weights) for name, values in each.items()}

        found = rows.pass_over(of_block, rows_at_once=self.rows_at_once)
        return {name: jnp.where(rows.size > 0, value, jnp.nan) for name, value in found.items()}

    def _inside(self, server: Any, client: Any, u: Array, rows: ClientRows, key: Array) -> dict[str, Array]:
        """What the representation and the steps look like."""
        problem, center = self.problem, getattr(server, "u0", None)

        def of_block(batch: PyTree, weights: Any) -> dict[str, Array]:
            inputs, _ = batch
            z = problem.features(problem.tree(0, u), inputs, key)
            each = {"representation_norm": jnp.linalg.norm(z, axis=1)}
            if center is not None:
                common = problem.features(problem.tree(0, center), inputs, key)
                each["representation_distance"] = jax.vmap(lambda a, b: problem.reg(a[None], b[None]))(z, common)
            return {name: _average(values, weights) for name, values in each.items()}

        values = rows.pass_over(of_block, rows_at_once=self.rows_at_once)
        if center is not None:
            values["center_distance"] = jnp.linalg.norm(u - center)
        return values

    def _summarise(self, everyone: dict[str, Array]) -> dict[str, Array]:
        summary = {}
        for name, values in everyone.items():
            # A client without rows in a part has no value there.
            weights = jnp.where(jnp.isnan(values), 0, jnp.asarray(self.weights).astype(values.dtype))
            summary[name] = jnp.vdot(weights, jnp.where(weights > 0, values, 0)) / weights.sum()
            if name.endswith("_accuracy"):
                summary |= {f"{name}_{what}": value for what, value in measure_spread(values, weights > 0).items()}
        return summary


def _average(values: Array, weights: Array | None) -> Array:
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    return jnp.mean(values) if weights is None else jnp.vdot(weights.astype(values.dtype), values)


def measure_spread(values: Array, present: Array) -> dict[str, Array]:
    """How the values of those present differ: deviation, lowest, worst decile and median (linear between values)."""
    number = present.sum()
    ordered = jnp.sort(jnp.where(present, values, jnp.inf))
    mean = jnp.sum(jnp.where(present, values, 0)) / number

    def quantile(level: float) -> Array:
        place = level * (number - 1)
        low = jnp.floor(place).astype("int32")
        high, part = jnp.minimum(low + 1, number - 1), (place - low).astype(values.dtype)
        return (1 - part) * ordered[low] + part * ordered[high]

    deviation = jnp.sqrt(jnp.sum(jnp.where(present, (values - mean) ** 2, 0)) / number)
    return {"deviation": deviation, "lowest": ordered[0], "worst_decile": quantile(0.1), "median": quantile(0.5)}


# ------------------------------------------------------------------------------------------------- after training


def find_model(result: Result, client: int) -> tuple[PyTree, PyTree]:
    """(extractor, head) with which the client of this id predicts, as the user's own parameter trees."""
    ids = np.asarray(result.task.data.ids).tolist()
    if client not in ids:
        raise UserError(
            f"client {client!r} was given; the run has the clients {_list_some(ids)}. A new one learns its model by "
            "`adapt`."
        )
    own = jax.tree.map(lambda a: a[ids.index(client)], result.clients)
    u, v = result.task.problem.model_of(result.output, own)
    return result.task.problem.tree(0, u), result.task.problem.tree(1, v)


def _list_some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:5])) + (f", ... ({len(ids)} in all)" if len(ids) > 5 else "")


def predict(result: Result, client: int, inputs: PyTree, *, seed: Seed = 0) -> Array:
    """What the model of the client of this id answers; the seed matters where the answer is random."""
    (u, v), problem, key = find_model(result, client), result.task.problem, make_key(seed)
    return problem.answers(v, problem.features(u, inputs, key), key)


def adapt(algorithm: Algorithm, task: Task, server: Any, *, rounds: int, seed: Seed = 0) -> Any:
    """The Local fields of a new client after `rounds` rounds against a server that does not change.

    `task` holds the new client's rows and nobody else's, with the problem and the starting point of the training: the
    client begins as everybody began. It runs its own program as if it were the whole federation, and after each round
    everything but its Local fields is put back to `server` (a run's `server` or `output`). Nothing is sent to anybody.
    `task.problem.model_of(server, adapt(...))` is its model.
    """
    check_positive("rounds", rounds)
    if task.clients != 1:
        raise UserError(f"a task of {task.clients} clients was given; give one with the new client's rows alone.")
    run = start(algorithm, task, seed, evaluate_every=None)
    wanted, given = (jax.tree.map(jnp.shape, one) for one in (run.server, server))
    if type(server) is not type(run.server) or wanted != given:
        raise UserError(
            f"the server's state does not fit {type(algorithm).__name__} on this task: its fields have the shapes "
            f"{given}, and {wanted} were expected. Give `server` of a run of the same algorithm, problem and start."
        )
    for round in range(rounds):
        run, _ = advance(algorithm, task, seed, run._replace(server=server), rounds=1, evaluate_every=None)
        if int(run.diverged) >= 0:
            raise UserError(
                f"{type(algorithm).__name__} diverged in round {round} of the new client; use a smaller step size, or "
                "look at its rows."
            )
    return jax.tree.map(lambda a: a[0], run.clients)
