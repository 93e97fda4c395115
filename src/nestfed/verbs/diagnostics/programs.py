"""Diagnostics as client programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.random import normal

from nestfed.core.algorithm import Cohort, Fed, Sample
from nestfed.core.rows import ClientRows
from nestfed.core.scaled import is_scaled
from nestfed.core.settings import UserError
from nestfed.core.task import Task
from nestfed.core.types import Array, PyTree
from nestfed.problems.robust import WeighsRows
from nestfed.verbs.diagnostics.exact import (
    EXACT,
    Part,
    compute_bilevel_part,
    compute_inner_values,
    compute_part,
    find_lower_variable,
    square_norm,
)

LANCZOS_STEPS = 50  # exact up to this dimension, estimates from inside the spectrum beyond it


def objective(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """Exact objective (the value function h of bilevel problems) and squared norm of its gradient at the server's x."""
    part = compute_part(task, server.x, server, client, data, fed)
    value, gradient = fed.mean((part.value, part.gradient))
    return {"objective": value, "gradient_norm2": square_norm(gradient)}


def single_level(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """`objective`, differences between the clients' gradients, and `consensus` if the run keeps unsynced states.

    gradient_deviation  max_k ||grad_k - grad||;   gradient_diameter: max_{k,j} ||grad_k - grad_j||
    """
    values = _compare(compute_part(task, server.x, server, client, data, fed), {}, fed)
    return values | (consensus(task, server, client, data, fed) if fed.unsynced is not None else {})


def bilevel(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """What `single_level` reports, for the hypergradient, and how well the algorithm follows the lower level.

    lower_solution_diameter  max_{k,j} ||y_k(x) - y_j(x)||, where every client has a lower problem
    lower_error              mean_k ||y_k - y_k(x)||^2;   z_error: ||z - z(x)||, where the algorithm keeps a z
    lower_residual           mean_k ||dg_k/dy|| at y_k(x): zero to rounding, or Newton's method did not get there
    nu_error, omega_error    see `momentum_errors`
    """
    part = compute_part(task, server.x, server, client, data, fed)
    own = {
        "lower_error": square_norm(find_lower_variable(server, client) - part.lower.y),
        "lower_residual": part.lower.residual,
    }
    values = _compare(part, {"lower_solution": part.lower.y} if task.problem.scope == "local" else {}, fed)
    errors, z = fed.mean((own, part.lower.z))
    values |= errors
    if getattr(server, "z", None) is not None:
        values |= {"z_error": jnp.sqrt(square_norm(server.z - z))}
    if fed.unsynced is not None:
        values |= consensus(task, server, client, data, fed)
        if task.problem.scope == "local" and getattr(server, "nu", None) is not None:
            values |= momentum_errors(task, server, client, data, fed)
    return values


def compositional(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """What `single_level` reports, for the composition, and how well the algorithm follows the inner function.

    inner_deviation    max_k ||g_k(x) - g(x)||, where the inner function is the average over clients
    inner_error        ||y - g(x)||^2 of the server's estimate y
    inner_error_local  ||mean_k y_k - mean_k g_k(x_k)||^2 before the round's last step, if the run keeps unsynced
                       states. Right there and wrong for the averaged x: an estimate that misses the jump of the average
    potential          objective + inner_error: the potential of FedDRO's proof, at points where all x_k are x

    Scaled values may be beyond all plain numbers: for these the errors are differences of logarithms, and their names
    are inner_log_deviation, inner_log_error and inner_log_error_local. There is no potential then.
    """
    problem = task.problem
    part = compute_part(task, server.x, server, client, data, fed)
    common = problem.scope == "global"
    name = "inner_log" if is_scaled(part.inner.y) else "inner"
    centred = {name: _subtract(part.inner.own, part.inner.y)} if common else {}
    values = _compare(part, {}, fed, **centred)
    follows = common and getattr(server, "y", None) is not None
    if follows:
        values[f"{name}_error"] = square_norm(_subtract(server.y, part.inner.y))
        if name == "inner":
            values["potential"] = values["objective"] + values["inner_error"]
    if fed.unsynced is not None:
        values |= consensus(task, server, client, data, fed)
        if follows:
            y, inner = fed.mean((fed.unsynced.y, compute_inner_values(problem, fed.unsynced.x, data, fed.key)))
            values[f"{name}_error_local"] = square_norm(_subtract(y, inner))
    return values


def worst_case(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """Tell what share of the rows a robust objective (`nestfed.problems.robust`) looks at, at the server's x.

    effective_share  (mean w)^2 / mean w^2 of the rows' weights w: 1 if all count alike; times the number of rows it is
                     the effective sample size
    negative_share   chi-square: the share of rows whose weight is negative. Above zero the closed form is no longer the
                     value of the worst case
    tail_mass        CVaR: the mass of the weights, which is 1 where the threshold is the best one
    """
    problem, x = task.problem, task.problem.tree(0, server.x)
    if not isinstance(problem, WeighsRows):
        raise UserError(
            f"worst-case weights are of KL, ChiSquare and CVaR problems; {type(problem).__name__} was given."
        )
    return problem.describe_weights(x, lambda function: fed.mean(data.average(function)), fed.key)


def gradients(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """The exact gradient [d] at the server's x, the clients' parts of it [clients, d] in order of ids, the objective.

    For bilevel problems the gradient is the hypergradient; the lower solutions [clients, d_y] come with it, and their
    residuals, which say whether Newton's method got there (if not, give a better y to start from).
    """
    return _gather_gradients(compute_part(task, server.x, server, client, data, fed), fed)


def hypergradients(
    task: Task, server: Any, client: Any, data: ClientRows, fed: Fed, estimator: Callable[..., Any] = EXACT
) -> dict[str, Array]:
    """`gradients` of a bilevel problem by any hypergradient estimator, on the whole data and at the exact y(x).

    For instance `functools.partial(hypergradients, estimator=Neumann(terms=5, lr=0.1))`, to compare with the default.
    """
    return _gather_gradients(compute_bilevel_part(task.problem, server.x, server, client, data, fed, estimator), fed)


def consensus(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """mean_k ||v_k - mean v||^2 of every shared vector v just before the last step of the round.

    A client that was absent counts with its state of the last round in which it took part.
    """
    if fed.unsynced is None:
        raise UserError("the consensus error is that of the states before synchronisation: run with unsynced=True.")
    shared = zip(server._fields, server, fed.unsynced, strict=True)
    own = {name: v for name, kept, v in shared if isinstance(kept, jax.Array) and kept.ndim and v is not None}
    mean = fed.mean(own)
    errors = fed.mean({name: square_norm(v - mean[name]) for name, v in own.items()})
    return {f"consensus_{name}": error for name, error in errors.items()}


def momentum_errors(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """||nu - mean_k grad h_k||^2 and mean_k ||omega_k - dg_k/dy||^2, for methods with local lower problems.

    Momenta are compared with the exact values at the points where they were formed: the clients' own points before the
    last step of the round.
    """
    if fed.unsynced is None:
        raise UserError("momenta belong to the points before the round's last step: run with unsynced=True.")
    x, y = fed.unsynced.x, fed.unsynced.y
    gradient = compute_bilevel_part(task.problem, x, server, fed.unsynced, data, fed).gradient
    lower_gradient = data.average(lambda batch: task.problem.grad_lower(x, y, Sample(batch, fed.key)))
    gradient, omega_error = fed.mean((gradient, square_norm(client.omega - lower_gradient)))
    return {"nu_error": square_norm(server.nu - gradient), "omega_error": omega_error}


def curvature(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """The extreme eigenvalues over all clients' Hessians: of the loss in x, or of the lower objective in y.

    They bound those of the average. At the state's point, and so at y itself, not at y(x).
    """
    problem, x = task.problem, server.x
    if problem.family not in ("single level", "bilevel"):
        raise UserError(f"curvature is of single level and bilevel problems; this one is {problem.family}.")
    if problem.family == "bilevel":
        point = find_lower_variable(server, client)
        product = lambda sample, v: problem.hessian_vector(x, point, sample, v)
    else:
        point = x
        product = lambda sample, v: jax.jvp(lambda x: problem.gradient(x, sample), (x,), (v,))[1]
    over_all_rows = lambda v: data.average(lambda batch: product(Sample(batch, fed.key), v))
    smallest, largest = find_extreme_eigenvalues(over_all_rows, point, fed.key)
    largest_of_all = lambda values, cohort, slot, key: [jnp.max(jnp.where(cohort.present, v, -jnp.inf)) for v in values]
    minus_smallest, largest = _agree([-smallest, largest], largest_of_all, fed)
    return {"smallest_curvature": -minus_smallest, "largest_curvature": largest}


def lipschitz_quotient(task: Task, server: Any, client: Any, data: ClientRows, fed: Fed) -> dict[str, Array]:
    """||grad F(x') - grad F(x)|| / ||x' - x|| for a point x' near x in the direction of the gradient.

    A lower bound of the smoothness of the exact objective (of h, for bilevel problems), where descent feels it.
    """
    gradient_at = lambda x: fed.mean(compute_part(task, x, server, client, data, fed).gradient)
    gradient = gradient_at(server.x)
    size = jnp.sqrt(square_norm(gradient))
    anywhere = jnp.full_like(gradient, gradient.size**-0.5)  # at a stationary point
    direction = jnp.where(size > 0, gradient / jnp.where(size > 0, size, 1), anywhere)
    distance = 1e-3 * (1 + jnp.sqrt(square_norm(server.x)))
    change = gradient_at(server.x - distance * direction) - gradient
    return {"lipschitz_quotient": jnp.sqrt(square_norm(change)) / distance}


# ------------------------------------------------------------------------------------------------- parts of programs


def _compare(part: Part, vectors: dict[str, Array], fed: Fed, **centred: Array) -> dict[str, Array]:
    """Objective and gradient norm, and how much the clients' gradients and other vectors differ: the largest distance
    from the mean of `centred` ones (given as differences to it), the largest distance of two clients of `vectors`."""
    value, gradient = fed.mean((part.value, part.gradient))
    centred = {"gradient": part.gradient - gradient} | centred

    def reply(values: Any, cohort: Cohort, slot: Array, key: Array) -> dict[str, Array]:
        centred, vectors = values
        farthest = lambda vectors, v: jnp.sqrt(
            jnp.max(jnp.where(cohort.present, jnp.sum((vectors - v[None]) ** 2, 1), 0))
        )
        diameter = lambda vectors: jnp.max(
            jnp.where(cohort.present, lax.map(lambda v: farthest(vectors, v), vectors), 0)
        )
        deviations = {f"{name}_deviation": farthest(v, jnp.zeros_like(v[0])) for name, v in centred.items()}
        return deviations | {f"{name}_diameter": diameter(v) for name, v in vectors.items()}

    differences = _agree((centred, {"gradient": part.gradient - gradient} | vectors), reply, fed)
    return {"objective": value, "gradient_norm2": square_norm(gradient)} | differences


def _subtract(y: Any, of: Any) -> Array:
    """Of two inner values; of Scaled ones, that of their logarithms."""
    return y.log() - of.log() if is_scaled(y) else y - of


def _gather_gradients(part: Part, fed: Fed) -> dict[str, Array]:
    value, gradient = fed.mean((part.value, part.gradient))
    side_by_side = {"gradients": part.gradient}
    if part.lower is not None:
        side_by_side |= {"lower_solutions": part.lower.y, "lower_residuals": part.lower.residual}
    return {"objective": value, "gradient": gradient} | _gather_by_client(side_by_side, fed)


def _agree(tree: PyTree, reply: Callable, fed: Fed) -> PyTree:
    """A gather that gives all clients the same answer; only a mean can prove that to the engine."""
    return fed.mean(fed.gather(tree, reply=reply))


def _gather_by_client(tree: PyTree, fed: Fed) -> PyTree:
    """Everybody's values side by side, in order of ids: a cohort may come in any order."""
    ids = _agree((), lambda values, cohort, slot, key: cohort.ids.astype(float), fed)
    return jax.tree.map(lambda values: values[jnp.argsort(ids)], fed.gather(tree))


def find_extreme_eigenvalues(product: Callable[[Array], Array], like: Array, key: Array) -> tuple[Array, Array]:
    """Smallest and largest eigenvalue of the symmetric map `product` on vectors like `like`.

    Lanczos with full reorthogonalisation. When the Krylov space is exhausted early, a fresh random vector opens the
    next one, so that multiple eigenvalues and unlucky starts do no harm.
    """
    size, steps = like.size, min(like.size, LANCZOS_STEPS)
    fresh = normal(key, (steps + 1, size), like.dtype)
    unit = lambda v: v / jnp.sqrt(square_norm(v))

    def step(j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        basis, diagonal, beside = carry
        orthogonal = lambda v: v - basis.T @ (basis @ v)
        image = product(basis[j])
        rest = orthogonal(orthogonal(image))
        length = jnp.sqrt(square_norm(rest))
        goes_on = length > jnp.sqrt(jnp.finfo(like.dtype).eps) * jnp.sqrt(square_norm(image))
        further = jnp.where(goes_on, rest, orthogonal(orthogonal(fresh[j + 1])))
        basis = basis.at[j + 1].set(unit(further))
        return basis, diagonal.at[j].set(jnp.vdot(basis[j], image)), beside.at[j].set(jnp.where(goes_on, length, 0))

    basis = jnp.zeros((steps + 1, size), like.dtype).at[0].set(unit(fresh[0]))
    zeros = jnp.zeros(steps, like.dtype)
    _, diagonal, beside = lax.fori_loop(0, steps, step, (basis, zeros, zeros))
    tridiagonal = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
    values = jnp.linalg.eigvalsh(tridiagonal)
    return values[0], values[-1]
