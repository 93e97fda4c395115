"""Exact quantities to judge a run by: objective, gradient, drift, errors of estimates, constants of the theory.

A diagnostic is a client program (task, server, client, data, fed) -> dict, just as a task's metrics are. Give it to a
run, to the end of a run, or to a point of your own:

    simulate(algorithm, task, rounds=100, metrics=diagnostics.bilevel, unsynced=True)
    evaluate(algorithm, task, result.run, metrics=diagnostics.curvature)
    evaluate_at(task, diagnostics.hypergradients, x=x, y=y)

    objective              objective and squared gradient norm, for every family in PARTS
    single_level, bilevel, compositional
                           the same, differences between clients, and errors of what the algorithm keeps
    worst_case             what share of the rows a robust objective looks at
    gradients              exact gradient, of all and per client; `hypergradients` also by any estimator
    consensus              how far the clients' copies of shared variables drift apart within a round
    curvature, lipschitz_quotient     strong convexity and smoothness at the point
    compute_finite_differences, measure_estimator_error
                           from Python: checks of a gradient and of a stochastic estimate

All are over each client's whole data. They are meant for small problems (some hundred numbers in x and y) in float64:
lower problems are solved by Newton's method with dense matrices, as if y were free of constraints.
"""

from nestfed.verbs.diagnostics.exact import PARTS, Lower, Part
from nestfed.verbs.diagnostics.points import (
    EstimatorError,
    compute_finite_differences,
    evaluate_at,
    measure_estimator_error,
)
from nestfed.verbs.diagnostics.programs import (
    bilevel,
    compositional,
    consensus,
    curvature,
    find_extreme_eigenvalues,
    gradients,
    hypergradients,
    lipschitz_quotient,
    momentum_errors,
    objective,
    single_level,
    worst_case,
)

__all__ = [
    "PARTS",
    "EstimatorError",
    "Lower",
    "Part",
    "bilevel",
    "compositional",
    "consensus",
    "curvature",
    "measure_estimator_error",
    "find_extreme_eigenvalues",
    "compute_finite_differences",
    "gradients",
    "hypergradients",
    "lipschitz_quotient",
    "evaluate_at",
    "momentum_errors",
    "objective",
    "single_level",
    "worst_case",
]
