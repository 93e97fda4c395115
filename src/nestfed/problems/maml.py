"""Meta-learning: a starting point from which one gradient step on a few examples solves a new task (MAML).

Problem   min_x mean_k E_task loss( x - inner_lr grad loss(x; support); query ).

It is conditional: xi is a task with its query rows, eta its support rows, inner(x) the adapted parameters (as many as
x has) and outer the loss on the query. The gradient goes through the adaptation, so it holds a second derivative of
the loss; nothing of the size of x is averaged over tasks.

Ref.   Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017,
       arXiv:1703.03400.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.randomness import fold
from nestfed.core.rows import ClientRows, Rows
from nestfed.core.settings import UserError, setting, static, struct
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.problems import Conditional
from nestfed.problems.base import Functions


@struct
class MAML(Conditional):
    """Subclasses define loss(params, rows, key), a mean over rows, and sample_task(data, key) -> (query, support).

    For several support sets per task (inner_samples), sample_task returns in place of the support whatever it is drawn
    from, and sample_support(source, key) draws one set from it.
    """

    inner_lr: float = setting("lambda: step size of the adaptation", above=0)
    first_order: bool = setting(
        "leave out the second derivative: cheaper, and no longer the gradient of the objective",
        default=False,
        static=True,
    )

    def loss(self, params: PyTree, rows: PyTree, key: Array) -> Array:
        raise self.missing("loss(params, rows, key)")

    def sample_task(self, data: ClientRows, key: Array) -> tuple[PyTree, PyTree]:
        raise self.missing("sample_task(data, key) -> (query, support)")

    def sample_support(self, source: PyTree, key: Array) -> PyTree:
        return source

    def scores(self, params: PyTree, rows: PyTree, key: Array) -> dict[str, Array]:
        """Return what evaluations record of adapted parameters on query rows; override it to add an accuracy."""
        return {"loss": self.loss(params, rows, key)}

    def adapt(self, params: PyTree, rows: PyTree, key: Array) -> PyTree:
        """Return the parameters after one gradient step on support rows."""
        return self._step(params, lambda x: self.loss(x, rows, key))

    def _step(self, params: PyTree, loss: Callable[[PyTree], Array]) -> PyTree:
        gradient = jax.grad(loss)(params)
        if self.first_order:
            gradient = lax.stop_gradient(gradient)
        return jax.tree.map(lambda x, g: x - self.inner_lr * g, params, gradient)

    # As a conditional problem. Keys: 0 for whatever is random in the loss on the support, 1 on the query.

    def sample_outer(self, data, key, count):
        return jax.vmap(lambda i: self.sample_task(data, fold(key, i)))(jnp.arange(count))

    def sample_inner(self, data, xi, key, count):
        _, source = xi
        return jax.vmap(lambda j: self.sample_support(source, fold(key, j)))(jnp.arange(count))

    def inner(self, x, xi, eta, key):
        return self.layouts[0].flatten(self.adapt(x, eta, fold(key, 0)))

    def outer(self, y, xi, key):
        query, _ = xi
        return self.loss(self.layouts[0].unflatten(y), query, fold(key, 1))

    def composite(self, x, xi, etas, key):
        # The mean of adapted parameters is one step along the mean gradient: a single pass, on trees.
        query, _ = xi
        supports = lambda x: jnp.mean(jax.vmap(lambda eta: self.loss(x, eta, fold(key, 0)))(etas))
        return self.loss(self._step(x, supports), query, fold(key, 1))

    def check(self, task):
        if self.inner_samples > 1 and type(self).sample_support is MAML.sample_support:
            raise UserError(
                f"{type(self).__name__}: inner_samples={self.inner_samples} was given, but there is one support set "
                "per task; define sample_support(source, key) to draw several, or leave inner_samples at 1."
            )
        super().check(task)

    def functions(self, params, key) -> Functions:
        yield "loss", 0, lambda batch: self._first_loss(params[0], batch, key)
        yield from super().functions(params, key)

    def _first_loss(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        query, _ = batch[0]
        return self.loss(self.tree(0, x), jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), query), key)


@struct
class MetaTask(Task):
    """Records the scores after adaptation on tasks of data put aside: the same tasks in every evaluation."""

    aside: Rows  # what tasks of evaluations are drawn from: one "client" for each of `parts`
    task_seed: Array  # the seed of these tasks, a whole number
    parts: tuple[str, ...] = static(default=("validation", "test"))
    tasks: int = static(default=600)  # the number of tasks of each part
    at_once: int = static(default=100)  # how many tasks run side by side, which bounds the memory
    steps: int = static(default=3)  # the number of adaptation steps

    def metrics(self, server, client, data, fed):
        scores = self._scores(self.problem.tree(0, server.x))
        recorded = {}
        for (score, values), (part, name) in itertools.product(scores.items(), enumerate(self.parts)):
            recorded[f"{name}_{score}"] = jnp.mean(values[part])
            # Half the 95 % interval of the mean over tasks (not over seeds).
            recorded[f"{name}_{score}_interval"] = 1.96 * jnp.std(values[part], ddof=1) / self.tasks**0.5
        return recorded

    def _scores(self, params: PyTree) -> dict[str, Array]:
        """Return every score of every task, [parts, tasks]; one loop makes them all, since compiling is what costs."""
        problem, tasks = self.problem, jax.random.key(self.task_seed)

        def one(place: Any) -> Any:
            key = fold(tasks, place)  # every part has other tasks, even where parts have the same rows
            query, source = problem.sample_task(self.aside.client(place // self.tasks), fold(key, 0))
            support = problem.sample_support(source, fold(key, 1))
            step = lambda _, x: problem.adapt(x, support, fold(key, 2))
            return problem.scores(lax.fori_loop(0, self.steps, step, params), query, fold(key, 3))

        number = len(self.parts) * self.tasks
        scores = lax.map(one, jnp.arange(number), batch_size=min(self.at_once, number))
        return jax.tree.map(lambda values: values.reshape(len(self.parts), self.tasks), scores)
