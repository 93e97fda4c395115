"""P7, constrained: a loss under limits."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Sample
from nestfed.core.settings import struct
from nestfed.core.types import Array, PyTree
from nestfed.problems.base import Functions, Problem, oracle


@struct
class Constrained(Problem):
    """min_x mean_k objective_k(x)  s.t.  mean_k constraints_k(x) <= 0.

    Subclasses define objective(x, batch, key) and constraints(x, batch, key) -> vector; `constraint(x, j, batch, key)`
    may be overridden where one entry is cheaper than all.
    """

    family: ClassVar[str] = "constrained"

    def objective(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("objective(x, batch, key)")

    def constraints(self, x: PyTree, batch: PyTree, key: Array) -> Array:
        raise self.missing("constraints(x, batch, key)")

    def constraint(self, x: PyTree, j: Array, batch: PyTree, key: Array) -> Array:
        return self.constraints(x, batch, key)[j]

    @oracle("GRAD")
    def grad_objective(self, x: Array, sample: Sample) -> tuple[Array, Array]:
        """Return (value, gradient) of the objective."""
        return jax.value_and_grad(lambda x: self.objective(self.tree(0, x), sample.batch, sample.key))(x)

    @oracle("VAL")
    def constraint_values(self, x: Array, sample: Sample) -> Array:
        return self.constraints(self.tree(0, x), sample.batch, sample.key)

    @oracle("VAL")
    def constraint_value(self, x: Array, j: Any, sample: Sample) -> Array:
        return self.constraint(self.tree(0, x), j, sample.batch, sample.key)

    @oracle("GRAD")
    def grad_constraint(self, x: Array, j: Any, sample: Sample) -> tuple[Array, Array]:
        """Return (value, gradient) of constraint j."""
        return jax.value_and_grad(lambda x: self.constraint(self.tree(0, x), j, sample.batch, sample.key))(x)

    def functions(self, params, key) -> Functions:
        x = self.tree(0, params[0])
        yield "objective", 0, lambda batch: self.objective(x, batch, key)
        yield "constraints", 1, lambda batch: self.constraints(x, batch, key)

    def metrics(self, server, client, data, fed):
        x = self.tree(0, server.x)
        both = lambda batch: (self.objective(x, batch, fed.key), self.constraints(x, batch, fed.key))
        objective, constraints = fed.mean(data.average(both))
        return {"objective": objective, "violation": jnp.maximum(constraints, 0).max()}
