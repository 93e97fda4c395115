"""FedPAC: a common extractor aligned by class prototypes, and heads that are mixed among clients that are alike.

Problem   min over u and (v_k) of mean_k [ loss_k(u, v_k) + (coupling / d_z) mean_i |phi(u; o_i) - c_{y_i}|^2 ]; c_y is
the mean representation of class y over all clients, C classes, phi of d_z numbers.

Round at client k, from the u and c received:
  start   with these, over all rows: pi_k(y) shares of the classes; h_k(y) = pi_k(y) (mean phi of class y);
          V_k = [mean |phi|^2 - sum_y |h_k(y)|^2] / n_k
  head_steps times   v_k  <- v_k - head_lr grad_v loss_k(u, v_k)
  local_steps times  u_k  <- u_k - lr grad_u [loss_k(u_k, v_k) + pull towards c]
  end     h'_k is made like h_k, with u_k
Server    u   <- mean_k u_k;   c_y <- mean_k h'_k(y) / mean_k pi_k(y)        up d_u + C d_z + C, down the same
          v_k <- sum_j a_j v_j,  a on the simplex minimises a^T (diag(V) + D_k) a,
                 D_k[j, l] = sum_y <h_k(y) - h_j(y), h_k(y) - h_l(y)>        up d_v + C d_z + 1, down d_v

Why    V is the variance of a client's statistics and D_k the bias of using others': the quadratic program weighs the
       two, so a client with few rows borrows more, and only from clients whose classes look alike.
Ref.   Xu, Tong and Huang, "Personalized federated learning with feature alignment and classifier collaboration", ICLR
       2023, arXiv:2306.11867, and its authors' code (JianXu95/FedPAC).
Departures
  * How much a client counts in u and c is the weight that the task gives it; with weights="samples" these are the
    paper's averages, by rows and by rows of a class.
  * The pull is averaged over the entries of a representation too, as in the code: coupling = 1 is meant for that. There
    is no pull before the first prototypes; a class that still has none is then pulled towards the client's own mean.
  * Eigenvalues of the quadratic form below `smallest_eigenvalue` are dropped and weights below `smallest_weight` are
    set to zero, as in the code; dropped ones keep a millionth of the largest, so that there is one answer. The program
    is solved by a fixed number of interior-point steps, and a client keeps its head where there is no finite answer.
  * Two exchanges, because a mixed head is for one client only and the rest for all; the shares come back with them.
  * The program for the heads sees every client's statistics, so it is a gather. Momentum and weight decay are left out.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from nestfed.algorithms.interior_point import minimise_form_on_simplex
from nestfed.algorithms.personal_method import HeadThenBody, count_classes
from nestfed.core.algorithm import Local, Phase, Sample, Scratch, Shared
from nestfed.core.settings import setting, struct
from nestfed.core.types import Array

DROPPED = 1e-6  # a dropped eigenvalue becomes this share of the largest: the best weights are then unique


class Statistics(NamedTuple):
    """Describes a client's classes, over all its rows."""

    shares: Array  # pi [C]
    sums: Array  # h [C, d_z]: share times mean representation
    squares: Array  # mean |phi|^2
    rows: Array  # the number of rows


class Upload(NamedTuple):
    """Holds what a client sends for the heads; at the server every field has a leading axis of clients."""

    head: Array
    sums: Array
    variance: Array


def weigh_by_class(labels: Array, classes: int, weights: Array, dtype: Any) -> Array:
    """Return [C, rows]: the weight of every row at its class."""
    members = jax.nn.one_hot(labels, classes, axis=0, dtype=dtype)
    return members / labels.size if weights is None else members * weights.astype(dtype)[None]


@struct
class FedPAC(HeadThenBody):
    """Aligns a common extractor by class prototypes and mixes the heads of similar clients by a quadratic program."""

    coupling: float = setting("lambda: strength of the pull towards the prototypes", default=1.0, at_least=0)
    smallest_eigenvalue: float = setting("eigenvalues of the program below it are dropped", default=0.01, at_least=0)
    smallest_weight: float = setting("weights of heads below it are dropped", default=1e-3, at_least=0)

    class State(NamedTuple):
        u: Shared
        v: Local
        prototypes: Shared  # c [C, d_z]
        known: Shared  # [C]: 1.0 where there is a prototype
        own: Scratch  # this client's Statistics at the start of the round

    def init(self, problem, params, draw, fed):
        u, v = params
        classes = count_classes(problem, u, v, draw(0))
        z = jax.eval_shape(lambda: problem.representations(u, draw(0)))
        return self.State(u, v, jnp.zeros((classes, z.shape[1]), z.dtype), jnp.zeros(classes, z.dtype), own=None)

    def begin(self, server, client):
        s = super().begin(server, client)
        # This is filled here already, because a step without an exchange keeps the structure of the State.
        none = jnp.zeros((), s.known.dtype)
        blank = Statistics(jnp.zeros_like(s.known), jnp.zeros_like(s.prototypes), none, none)
        return s._replace(own=blank)

    def schedule(self) -> tuple[Phase, ...]:
        return ((self.describe, 1, False), *super().schedule())

    def describe(self, problem, s, draw, fed):
        return s._replace(own=self.statistics(problem, s, fed))

    def statistics(self, problem, s, fed):
        def of_block(batch, weights):
            z = problem.representations(s.u, Sample(batch, fed.key))
            members = weigh_by_class(batch[1], len(s.known), weights, z.dtype)
            rows = batch[1].size if weights is None else jnp.sum(weights > 0)
            squares = jnp.vdot(members.sum(0), jnp.sum(z**2, axis=1))
            return Statistics(members.sum(1), members @ z, squares, jnp.asarray(rows, z.dtype))

        return fed.rows.pass_over(of_block)

    def direction(self, problem, s, draw, fed):
        own = s.own.sums / jnp.where(s.own.shares > 0, s.own.shares, 1)[:, None]
        targets = jnp.where(s.known[:, None] > 0, s.prototypes, own)
        strength = self.coupling * jnp.max(s.known)  # zero before the first prototypes
        return problem.gradients(s.u, s.v, draw(0), Partial(measure_pull, targets, strength))[0]

    def synchronise(self, problem, s, draw, fed):
        new = self.statistics(problem, s, fed)
        here = fed.server
        u, sums, shares = fed.mean((s.u, new.sums, new.shares), around=(here.u, None, None))
        seen = shares > 0
        prototypes = jnp.where(seen[:, None], sums / jnp.where(seen, shares, 1)[:, None], here.prototypes)
        own = s.own
        variance = jnp.maximum(own.squares - jnp.sum(own.sums**2), 0) / own.rows
        head = fed.gather(
            Upload(s.v, own.sums, variance),
            reply=lambda values, cohort, slot, key: self.mix_heads(values, cohort.present, slot),
        )
        return s._replace(u=u, v=head, prototypes=prototypes, known=jnp.maximum(here.known, seen.astype(s.known.dtype)))

    def mix_heads(self, uploads, present, slot):
        clean = lambda a: jnp.where(present.reshape((-1,) + (1,) * (a.ndim - 1)), a, 0)  # an absent client may send NaN
        uploads = Upload(*map(clean, uploads))
        with jax.default_matmul_precision("highest"):
            weights = self.find_head_weights(uploads.variance, uploads.sums, present, slot)
            return weights @ uploads.head

    def find_head_weights(self, variances, sums, present, slot):
        """Return the shares of everybody's head in that of the client at this slot."""
        gaps = (sums[slot][None] - sums).reshape(len(present), -1)
        on = present.astype(gaps.dtype)
        form = (jnp.diag(variances) + gaps @ gaps.T) * on[:, None] * on[None]
        values, vectors = jnp.linalg.eigh(form)
        nothing = DROPPED * jnp.where(values[-1] > 0, values[-1], 1)
        kept = jnp.where(values >= jnp.maximum(self.smallest_eigenvalue, nothing), values, nothing)
        weights = minimise_form_on_simplex((vectors * kept[None]) @ vectors.T, present)
        weights = jnp.where(weights >= self.smallest_weight, weights, 0)
        alone = (jnp.arange(len(present)) == slot).astype(weights.dtype)
        total = weights.sum()
        return jnp.where(jnp.isfinite(form).all() & (total > 0), weights / jnp.where(total > 0, total, 1), alone)


def measure_pull(prototypes: Array, strength: Array, z: Array, labels: Array) -> Array:
    """Return strength times the mean squared gap to the prototypes of the rows' classes."""
    return strength * jnp.mean((z - prototypes[labels]) ** 2)
