"""Exact quantities to judge a run by: objective, gradient, drift, errors of estimates, constants of the theory.

A diagnostic is a client program (task, server, client, data, fed) -> dict, just as a task's metrics are. Give it to a
run, to the end of a run, or to a point of your own:

    simulate(algorithm, task, rounds=100, metrics=diagnostics.bilevel, unsynced=True)
    evaluate(algorithm, task, result.run, metrics=diagnostics.curvature)
    measure(task, diagnostics.hypergradients, x=x, y=y)

    objective              objective and squared gradient norm, for every family in PARTS
    single_level, bilevel  the same, differences between clients, and errors of what the algorithm keeps
    gradients              exact gradient, of all and per client; `hypergradients` also by any estimator of problems.py
    consensus              how far the clients' copies of shared variables drift apart within a round
    curvature, lipschitz_quotient     strong convexity and smoothness at the point
    finite_differences, estimator_error     from Python: checks of a gradient and of a stochastic estimate

All are over each client's whole data. They are meant for small problems (some hundred numbers in x and y) in float64:
lower problems are solved by Newton's method with dense matrices, as if y were free of constraints.
"""

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.random import fold_in, normal

from nestfed import engine
from nestfed.border import as_key, check_positive
from nestfed.core import Algorithm, Array, PyTree, Sample, Task, UserError
from nestfed.hypergradients import Dense
from nestfed.program import Call, Seat, draws, seated

TOLERANCE = 1e-13  # of a lower gradient's norm, where the rounding allows it
NEWTON_EXCHANGES = 10  # an exchange cannot sit in a loop: one global lower problem gets a fixed number of trial points
LANCZOS_STEPS = 50  # exact up to this dimension, estimates from inside the spectrum beyond it
MATRICES_AT_ONCE = 16  # rows whose second derivatives are held in memory together
EXACT = Dense()


def norm2(v: Array) -> Array:
    return jnp.vdot(v, v)


# ------------------------------------------------------------------------------------------------- the exact problem


class Part(NamedTuple):
    """A client's part of the exact problem at x: means over the clients are the objective and its gradient."""

    value: Array
    gradient: Array
    lower: Any = None  # bilevel: the lower problem solved, a Lower


class Lower(NamedTuple):
    """A solved lower problem: the client's own, or the common one."""

    y: Array  # y(x)
    z: Array  # (d2g/dy2)^-1 df_k/dy
    residual: Array  # norm of dg/dy: says whether Newton's method got there


def _single_level_part(problem, x, server, client, data, fed) -> Part:
    value_and_gradient = lambda sample: (problem.value(x, sample), problem.gradient(x, sample))
    return Part(*data.average(lambda batch: value_and_gradient(Sample(batch, fed.key))))


def _bilevel_part(problem, x, server, client, data, fed, estimator: Any = EXACT) -> Part:
    common = fed.mean if problem.scope == "global" else lambda tree: tree
    look = lambda search: search.after(*common(_lower_derivatives(problem, x, search.trial, data, fed.key)))
    search = _Search.start(_lower_variable(server, client))
    if problem.scope == "global":
        for _ in range(NEWTON_EXCHANGES):
            search = look(search)
    else:
        search = lax.while_loop(_Search.unfinished, look, search)
    y = search.y

    value, gradients, mixed = _upper_derivatives(problem, x, y, data, fed.key)
    solved = _Solved(gradients, search.hessian, common(mixed))
    (gradient,) = estimator(solved, [(x, y)], lambda j: Sample(None, fold_in(fed.shared_key, j)))
    z = solved.hessian_solve(x, y, None, gradients[1])
    return Part(value, gradient, Lower(y, z, search.size))


# Under jit only to be traced once: the engine traces a program anew for each of its exchanges.


@jax.jit
def _lower_derivatives(problem, x, y, data, key):
    """(dg/dy, d2g/dy2) over all rows."""
    hessian = jax.hessian(problem.lower_flat, 1)
    both = lambda sample: (problem.grad_lower(x, y, sample), hessian(x, y, sample))
    return data.average(lambda batch: both(Sample(batch, key)), rows_at_once=MATRICES_AT_ONCE)


@jax.jit
def _upper_derivatives(problem, x, y, data, key):
    """(f, (df/dx, df/dy), d2g/dxdy) over all rows."""
    mixed = jax.jacfwd(jax.grad(problem.lower_flat, 0), 1)
    all_of_it = lambda s: (problem.upper_flat(x, y, s), problem.grad_upper(x, y, s), mixed(x, y, s))
    return data.average(lambda batch: all_of_it(Sample(batch, key)), rows_at_once=MATRICES_AT_ONCE)


# To add a family: a function that gives a client's Part at x, exchanging as it needs. Everything else follows.
PARTS: dict[str, Callable[..., Part]] = {"single level": _single_level_part, "bilevel": _bilevel_part}


def _part(task, x, server, client, data, fed) -> Part:
    family = task.problem.family
    if family not in PARTS:
        raise UserError(f"there is no exact objective for {family} problems yet; there is for {', '.join(PARTS)}.")
    return PARTS[family](task.problem, x, server, client, data, fed)


def _lower_variable(server, client):
    return server.y if client.y is None else client.y


@dataclasses.dataclass(frozen=True)
class _Solved:
    """Stands in for the problem in a hypergradient estimator: every batch is the whole data, the point is (x, y(x))."""

    gradients: tuple[Array, Array]  # (df/dx, df/dy)
    hessian: Array
    mixed: Array  # d2g/dxdy

    def grad_upper(self, x, y, sample):
        return self.gradients

    def hessian_vector(self, x, y, sample, v):
        return self.hessian @ v

    def hessian_solve(self, x, y, sample, v):
        return jnp.linalg.solve(self.hessian, v)

    def mixed_vector(self, x, y, sample, v):
        return self.mixed @ v


class _Search(NamedTuple):
    """Newton's method with backtracking on the gradient's norm, told the derivatives at one trial point after another.

    It asks for nothing itself, so that the derivatives may come from a loop or from exchanges, and it keeps the best
    point seen, with its Hessian.
    """

    y: Array
    size: Array  # of the gradient
    hessian: Array
    direction: Array
    step: Array

    @classmethod
    def start(cls, y: Array) -> "_Search":
        one = jnp.ones((), y.dtype)
        return cls(y, one * jnp.inf, jnp.zeros((y.size, y.size), y.dtype), jnp.zeros_like(y), one)

    @property
    def trial(self) -> Array:
        return self.y - self.step * self.direction

    @jax.jit
    def after(self, gradient: Array, hessian: Array) -> "_Search":
        size = jnp.sqrt(norm2(gradient))
        direction = jnp.linalg.solve(hessian, gradient)
        accepted = _Search(self.trial, size, hessian, direction, jnp.minimum(4 * self.step, 1))
        refused = self._replace(step=self.step / 4)
        return jax.tree.map(lambda a, b: jnp.where(size < self.size, a, b), accepted, refused)

    def unfinished(self) -> Array:
        return (self.size > TOLERANCE) & (self.step > 1e-6)  # a step this short: rounding, or no minimum


# ------------------------------------------------------------------------------------------------- programs


def objective(task, server, client, data, fed):
    """Exact objective (the value function h of bilevel problems) and squared norm of its gradient at the server's x."""
    part = _part(task, server.x, server, client, data, fed)
    value, gradient = fed.mean((part.value, part.gradient))
    return {"objective": value, "gradient_norm2": norm2(gradient)}


def single_level(task, server, client, data, fed):
    """`objective`, differences between the clients' gradients, and `consensus` if the run keeps unsynced states.

    gradient_deviation  max_k ||grad_k - grad||;   gradient_diameter: max_{k,j} ||grad_k - grad_j||
    """
    values = _compared(_part(task, server.x, server, client, data, fed), {}, fed)
    return values | (consensus(task, server, client, data, fed) if fed.unsynced is not None else {})


def bilevel(task, server, client, data, fed):
    """What `single_level` reports, for the hypergradient, and how well the algorithm follows the lower level.

    lower_solution_diameter  max_{k,j} ||y_k(x) - y_j(x)||, where every client has a lower problem
    lower_error              mean_k ||y_k - y_k(x)||^2;   z_error: ||z - z(x)||, where the algorithm keeps a z
    lower_residual           mean_k ||dg_k/dy|| at y_k(x): zero to rounding, or Newton's method did not get there
    nu_error, omega_error    see `momentum_errors`
    """
    part = _part(task, server.x, server, client, data, fed)
    own = {"lower_error": norm2(_lower_variable(server, client) - part.lower.y), "lower_residual": part.lower.residual}
    values = _compared(part, {"lower_solution": part.lower.y} if task.problem.scope == "local" else {}, fed)
    errors, z = fed.mean((own, part.lower.z))
    values |= errors
    if getattr(server, "z", None) is not None:
        values |= {"z_error": jnp.sqrt(norm2(server.z - z))}
    if fed.unsynced is not None:
        values |= consensus(task, server, client, data, fed)
        if task.problem.scope == "local" and getattr(server, "nu", None) is not None:
            values |= momentum_errors(task, server, client, data, fed)
    return values


def gradients(task, server, client, data, fed):
    """The exact gradient [d] at the server's x, the clients' parts of it [clients, d] in order of ids, the objective.

    For bilevel problems the gradient is the hypergradient; the lower solutions [clients, d_y] come with it, and their
    residuals, which say whether Newton's method got there (if not, give a better y to start from).
    """
    return _gradients(_part(task, server.x, server, client, data, fed), fed)


def hypergradients(task, server, client, data, fed, estimator=EXACT):
    """`gradients` of a bilevel problem by an estimator of problems.py, on the whole data and at the exact y(x).

    For instance `functools.partial(hypergradients, estimator=Neumann(terms=5, lr=0.1))`, to compare with the default.
    """
    return _gradients(_bilevel_part(task.problem, server.x, server, client, data, fed, estimator), fed)


def consensus(task, server, client, data, fed):
    """mean_k ||v_k - mean v||^2 of every shared vector v just before the last step of the round.

    A client that was absent counts with its state of the last round in which it took part.
    """
    if fed.unsynced is None:
        raise UserError("the consensus error is that of the states before synchronisation: run with unsynced=True.")
    shared = zip(server._fields, server, fed.unsynced, strict=True)
    own = {name: v for name, kept, v in shared if isinstance(kept, jax.Array) and v is not None}
    mean = fed.mean(own)
    errors = fed.mean({name: norm2(v - mean[name]) for name, v in own.items()})
    return {f"consensus_{name}": error for name, error in errors.items()}


def momentum_errors(task, server, client, data, fed):
    """||nu - mean_k grad h_k||^2 and mean_k ||omega_k - dg_k/dy||^2, for methods with local lower problems.

    Momenta are compared with the exact values at the points where they were formed: the clients' own points before the
    last step of the round.
    """
    if fed.unsynced is None:
        raise UserError("momenta belong to the points before the round's last step: run with unsynced=True.")
    x, y = fed.unsynced.x, fed.unsynced.y
    gradient = _bilevel_part(task.problem, x, server, fed.unsynced, data, fed).gradient
    lower_gradient = data.average(lambda batch: task.problem.grad_lower(x, y, Sample(batch, fed.key)))
    gradient, omega_error = fed.mean((gradient, norm2(client.omega - lower_gradient)))
    return {"nu_error": norm2(server.nu - gradient), "omega_error": omega_error}


def curvature(task, server, client, data, fed):
    """The extreme eigenvalues over all clients' Hessians: of the loss in x, or of the lower objective in y.

    They bound those of the average. At the state's point, and so at y itself, not at y(x).
    """
    problem, x = task.problem, server.x
    if problem.family == "bilevel":
        point = _lower_variable(server, client)
        product = lambda sample, v: problem.hessian_vector(x, point, sample, v)
    else:
        point = x
        product = lambda sample, v: jax.jvp(lambda x: problem.gradient(x, sample), (x,), (v,))[1]
    over_all_rows = lambda v: data.average(lambda batch: product(Sample(batch, fed.key), v))
    smallest, largest = extreme_eigenvalues(over_all_rows, point, fed.key)
    largest_of_all = lambda values, cohort, slot, key: [jnp.max(jnp.where(cohort.present, v, -jnp.inf)) for v in values]
    minus_smallest, largest = _agreed([-smallest, largest], largest_of_all, fed)
    return {"smallest_curvature": -minus_smallest, "largest_curvature": largest}


def lipschitz_quotient(task, server, client, data, fed):
    """||grad F(x') - grad F(x)|| / ||x' - x|| for a point x' near x in the direction of the gradient.

    A lower bound of the smoothness of the exact objective (of h, for bilevel problems), where descent feels it.
    """
    gradient_at = lambda x: fed.mean(_part(task, x, server, client, data, fed).gradient)
    gradient = gradient_at(server.x)
    size = jnp.sqrt(norm2(gradient))
    anywhere = jnp.full_like(gradient, gradient.size**-0.5)  # at a stationary point
    direction = jnp.where(size > 0, gradient / jnp.where(size > 0, size, 1), anywhere)
    distance = 1e-3 * (1 + jnp.sqrt(norm2(server.x)))
    change = gradient_at(server.x - distance * direction) - gradient
    return {"lipschitz_quotient": jnp.sqrt(norm2(change)) / distance}


# ------------------------------------------------------------------------------------------------- parts of programs


def _compared(part: Part, vectors: dict[str, Array], fed) -> dict[str, Array]:
    """Objective and gradient norm, and how much the clients' gradients (and these vectors) differ."""
    value, gradient = fed.mean((part.value, part.gradient))

    def reply(values, cohort, slot, key):
        farthest = lambda vectors, v: jnp.sqrt(
            jnp.max(jnp.where(cohort.present, jnp.sum((vectors - v[None]) ** 2, 1), 0))
        )
        diameter = lambda vectors: jnp.max(
            jnp.where(cohort.present, lax.map(lambda v: farthest(vectors, v), vectors), 0)
        )
        deviation = farthest(values["gradient"], jnp.zeros_like(values["gradient"][0]))
        return {"gradient_deviation": deviation} | {f"{name}_diameter": diameter(v) for name, v in values.items()}

    differences = _agreed({"gradient": part.gradient - gradient} | vectors, reply, fed)
    return {"objective": value, "gradient_norm2": norm2(gradient)} | differences


def _gradients(part: Part, fed) -> dict[str, Array]:
    value, gradient = fed.mean((part.value, part.gradient))
    side_by_side = {"gradients": part.gradient}
    if part.lower is not None:
        side_by_side |= {"lower_solutions": part.lower.y, "lower_residuals": part.lower.residual}
    return {"objective": value, "gradient": gradient} | _by_client(side_by_side, fed)


def _agreed(tree: PyTree, reply: Callable, fed) -> PyTree:
    """A gather that gives all clients the same answer; only a mean can prove that to the engine."""
    return fed.mean(fed.gather(tree, reply=reply))


def _by_client(tree: PyTree, fed) -> PyTree:
    """Everybody's values side by side, in order of ids: a cohort may come in any order."""
    ids = _agreed((), lambda values, cohort, slot, key: cohort.ids.astype(float), fed)
    return jax.tree.map(lambda values: values[jnp.argsort(ids)], fed.gather(tree))


def extreme_eigenvalues(product: Callable[[Array], Array], like: Array, key: Array) -> tuple[Array, Array]:
    """Smallest and largest eigenvalue of the symmetric map `product` on vectors like `like`.

    Lanczos with full reorthogonalisation. When the Krylov space is exhausted early, a fresh random vector opens the
    next one, so that multiple eigenvalues and unlucky starts do no harm.
    """
    size, steps = like.size, min(like.size, LANCZOS_STEPS)
    fresh = normal(key, (steps + 1, size), like.dtype)
    unit = lambda v: v / jnp.sqrt(norm2(v))

    def step(j, carry):
        basis, diagonal, beside = carry
        orthogonal = lambda v: v - basis.T @ (basis @ v)
        image = product(basis[j])
        rest = orthogonal(orthogonal(image))
        length = jnp.sqrt(norm2(rest))
        goes_on = length > jnp.sqrt(jnp.finfo(like.dtype).eps) * jnp.sqrt(norm2(image))
        further = jnp.where(goes_on, rest, orthogonal(orthogonal(fresh[j + 1])))
        basis = basis.at[j + 1].set(unit(further))
        return basis, diagonal.at[j].set(jnp.vdot(basis[j], image)), beside.at[j].set(jnp.where(goes_on, length, 0))

    basis = jnp.zeros((steps + 1, size), like.dtype).at[0].set(unit(fresh[0]))
    zeros = jnp.zeros(steps, like.dtype)
    _, diagonal, beside = lax.fori_loop(0, steps, step, (basis, zeros, zeros))
    tridiagonal = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
    values = jnp.linalg.eigvalsh(tridiagonal)
    return values[0], values[-1]


# ------------------------------------------------------------------------------------------------- from Python


def measure(task: Task, program: Callable, *, seed: Any = 0, **point: PyTree) -> dict[str, np.ndarray]:
    """A diagnostic (and the task's own metrics) at a point of your choice, without an algorithm.

    The point is given by the problem's variables, as trees or flat vectors; those left out are the task's start.
    """
    problem = task.problem
    unknown = set(point) - set(problem.variables)
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))} was given; the variables are {', '.join(problem.variables)}.")
    start = zip(problem.variables, problem.layouts, task.params, strict=True)
    server = {name: layout.flatten(point[name]) if name in point else v for name, layout, v in start}
    state = _state(problem.variables)
    run = engine.Run(
        server=state(**server),
        clients=state(*(None for _ in server)),
        output=None,
        unsynced=None,
        round=jnp.asarray(0, jnp.int32),
        diverged=jnp.asarray(-1, jnp.int32),
    )
    values = engine.evaluate(Algorithm(), task, as_key(seed), run, engine.Plan(metrics=program))
    return {name: np.asarray(value) for name, value in values.items()}


@functools.cache
def _state(variables: tuple[str, ...]) -> Any:
    return namedtuple("Point", variables)  # one type per set of variables: another type would compile again


def finite_differences(task: Task, *, step: float = 1e-5, **point: PyTree) -> np.ndarray:
    """The gradient of the exact objective by central differences: 2 d values, lower problems solved anew at each."""
    x = np.asarray(task.problem.layouts[0].flatten(point.pop("x")) if "x" in point else task.params[0])
    value = lambda x: measure(task, gradients, x=x, **point)["objective"]  # compiled already if compared with
    return np.array([(value(x + e) - value(x - e)) / (2 * step) for e in step * np.eye(x.size, dtype=x.dtype)])


@dataclasses.dataclass(frozen=True)
class EstimatorError:
    """How far a random estimate is from the truth."""

    bias: float  # ||mean of the estimates - exact||
    bias_error: float  # standard error of that mean, as a length: a bias below two of these is no evidence of one
    variance: float  # mean squared distance of the estimates from their mean


def estimator_error(
    task: Task,
    estimate: Callable[[Any, Callable[[Any], Sample]], Array],
    exact: Array,
    *,
    client: int = 0,
    repeats: int = 1000,
    seed: Any = 0,
) -> EstimatorError:
    """Bias and variance of `estimate(problem, draw)` at the client of this position, from independent repetitions.

    `draw(0)`, `draw(1)`, ... are independent batches, as in an algorithm's step. For a stochastic gradient and for a
    truncated series, with the exact values from `gradients` or `hypergradients` by `measure`:

        estimator_error(task, lambda problem, draw: problem.gradient(x, draw(0)), exact)
        estimator_error(task, lambda problem, draw: Neumann(terms=5)(problem, [(x, y)], draw)[0], exact)
    """
    check_positive("repeats", repeats)

    @jax.jit
    def sample(task, key):
        at_work = seated(task, Seat(client, task.data.ids[client], 0, 1.0), Call(key, 0, (), 1.0))
        one = lambda repeat: estimate(task.problem, draws(task, at_work, repeat))  # one step after the other
        return lax.map(one, jnp.arange(repeats), batch_size=min(repeats, 64))

    estimates = np.asarray(sample(task, as_key(seed)), np.float64)
    mean = estimates.mean(0)
    variance = float(np.sum((estimates - mean) ** 2) / max(repeats - 1, 1))
    return EstimatorError(float(np.linalg.norm(mean - np.asarray(exact))), float(np.sqrt(variance / repeats)), variance)
