"""Linear and quadratic programs over the simplex, solved within a compiled round by a fixed number of steps.

The server of FCFL asks for weights of gradients, that of FedPAC for weights of heads. Both programs have as many
unknowns as the cohort has clients; solvers on the host would end the compiled round, and methods of first order do not
reach rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import lu_factor, lu_solve

from nestfed.core.types import Array

LINEAR_STEPS = 30  # measured on 900 programs of 1 to 21 gradients, some degenerate: 25 steps reach rounding
QUADRATIC_STEPS = 40  # measured on programs of 50 clients: the conditions of a minimum then hold to rounding


class Point(NamedTuple):
    """The unknowns of the optimality conditions."""

    a: Array  # weights
    z: Array  # reduced costs of the weights
    s: Array  # slacks of the conditions
    y: Array  # prices of the conditions
    top: Array  # price of the sum


def maximise_on_simplex(gain: Array, matrix: Array, present: Array) -> Array:
    """Maximise gain @ a  s.t.  matrix @ a >= 0 up to an allowance, a >= 0, sum a = 1, over present entries and rows.

    Entries must be about 1 at most, and the program feasible. Weights that are not present are zero.
    """
    gain, matrix = jnp.where(present, gain, 0), jnp.where(present[:, None] & present[None], matrix, 0)
    return _solve(gain, None, matrix, present, LINEAR_STEPS)


def minimise_form_on_simplex(form: Array, present: Array) -> Array:
    """Minimise a^T form a over the simplex, zero where not present; `form` is positive definite there."""
    on = present.astype(form.dtype)
    form = form * on[:, None] * on[None]
    form = form / jnp.max(jnp.diag(form))
    return _solve(jnp.zeros_like(on), form, jnp.zeros((0, on.size), form.dtype), present, QUADRATIC_STEPS)


def _solve(gain: Array, form: Array | None, matrix: Array, present: Array, steps: int) -> Array:
    """Minimise a^T form a / 2 - gain @ a over the simplex  s.t.  matrix @ a >= 0 up to an allowance.

    This is Mehrotra's predictor-corrector method; without a form the weights and the prices take steps of their own
    length. The conditions, if there are any, belong to the entries. An absent one stands still at a = z = s = y = 1.
    """
    epsilon = jnp.finfo(gain.dtype).eps
    # Gradients that balance each other leave no interior; with less than this, rounding would decide.
    allowance = epsilon**0.7
    on = present.astype(gain.dtype)
    of_rows = on if len(matrix) else jnp.zeros(0, gain.dtype)
    size, rows = gain.size, len(matrix)
    pairs = on.sum() + of_rows.sum()
    curve = (lambda a: 0 * a) if form is None else (lambda a: form @ a)

    def newton(_: Array, point: Point) -> Point:
        a, z, s, y, top = point
        slope = on * (top + curve(a) - gain - matrix.T @ y - z)
        excess = of_rows * (matrix @ a + allowance - s)
        remainder = 1 - on @ a
        gap = (on @ (a * z) + of_rows @ (s * y)) / pairs
        # Rows are scaled by a and y: nothing blows up near the solution, as it does in the normal equations.
        curved = jnp.diag(z) if form is None else a[:, None] * form + jnp.diag(z)
        factors = lu_factor(
            jnp.block(
                [
                    [curved, -a[:, None] * matrix.T, (on * a)[:, None]],
                    [y[:, None] * matrix, jnp.diag(s), jnp.zeros((rows, 1), gain.dtype)],
                    [on[None], jnp.zeros((1, rows + 1), gain.dtype)],
                ]
            )
        )

        def move(az: Array, sy: Array) -> Point:
            """Return the Newton step towards feasibility and towards these changes of the products a z and s y."""
            right = jnp.concatenate([on * (az - a * slope), of_rows * (sy - y * excess), remainder[None]])
            da, dy, dtop = jnp.split(lu_solve(factors, right), [size, size + rows])
            dz = on * (curve(da) + dtop) - matrix.T @ dy + slope
            return Point(da, dz, matrix @ da + excess, dy, dtop[0])

        def lengths(d: Point) -> tuple[Array, Array]:
            """Return the longest steps of (weights and slacks, reduced costs and prices)."""
            if form is None:
                return find_longest_step((a, s), (d.a, d.s)), find_longest_step((z, y), (d.z, d.y))
            both = find_longest_step((a, s, z, y), (d.a, d.s, d.z, d.y))
            return both, both

        d = move(-a * z, -s * y)
        p, q = lengths(d)
        left = on @ ((a + p * d.a) * (z + q * d.z)) + of_rows @ ((s + p * d.s) * (y + q * d.y))
        aim = (left / pairs / gap) ** 3 * gap
        d = move(aim - a * z - d.a * d.z, aim - s * y - d.s * d.y)
        p, q = (0.99 * length for length in lengths(d))
        new = Point(a + p * d.a, z + q * d.z, s + p * d.s, y + q * d.y, top + q * d.top)
        useful = jnp.isfinite(jnp.concatenate([jnp.ravel(v) for v in new])).all() & (gap > 0.1 * epsilon)
        return jax.tree.map(lambda after, before: jnp.where(useful, after, before), new, point)

    even = jnp.where(present, 1 / on.sum(), 1)
    top = jnp.max(jnp.where(present, gain, -jnp.inf)) + (1 if form is None else 0)
    one, ones = jnp.ones(size, gain.dtype), jnp.ones(rows, gain.dtype)
    start = Point(even, one, ones, ones, top)
    return jnp.where(present, lax.fori_loop(0, steps, newton, start).a, 0)


def find_longest_step(values: tuple[Array, ...], changes: tuple[Array, ...]) -> Array:
    """Return the longest step, at most 1, that keeps all values nonnegative."""
    v, d = jnp.concatenate(values), jnp.concatenate(changes)
    return jnp.min(jnp.where(d < 0, -v / jnp.where(d < 0, d, -1), 1), initial=1)
