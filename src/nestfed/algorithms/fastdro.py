"""FastDRO: an adversary weighs the rows of all clients' batches, and the model descends the weighted losses.

Problem   min_x max_p sum_i p_i l_i(x) within what the geometry allows (`worst_case`), over the rows of all clients; a
row's nominal weight is its client's weight / its client's number of rows.

Step at client k (a round is one step):
    losses of the batch's b rows go to the server                               b numbers up
    the server finds the worst weights for the rows of all batches              b numbers down
    x <- mean_k [x - lr (sum_i p_i grad l_i(x) + grad regulariser(x))]          d numbers

Multilevel (`levels` J > 0): level j = 1, 2, ..., J - 1 is drawn with probability 2^-j, and J with the rest; only the
first b / 2^(J - j) rows of each batch count. With p(A) the worst weights among the rows A,
    p = p(first b / 2^J rows) + [p(rows of level j) - p(first half of them) / 2 - p(second half) / 2] / probability of j
has the mean of p(all rows): the bias is that of all b rows.

Why    The worst weights of a batch understate the worst case, and the larger the batch, the less they do. By the
       envelope theorem they may be held fixed in the gradient. A multilevel step has the bias of a large batch and
       usually looks at few rows; the price is heavy tails.
Ref.   Levy, Carmon, Duchi and Sidford, "Large-scale methods for distributionally robust optimization", NeurIPS 2020,
       arXiv:2010.05893, and the authors' code (daniellevy/fast-dro).
Departures
  * The clients work in parallel and take plain steps; the released runs have momentum.
  * Clients may have weights, which their rows share (the paper's rows count alike). Rows of clients that do not answer
    do not count.
  * With few clients the adversary knows only the cohort's rows: the limit is where the mean over cohorts of their worst
    cases is least, which is a milder problem.
  * Shapes of a program are fixed: a multilevel step computes and sends all b losses and gives those beyond its level
    the weight zero. It has the statistics of the method, not its savings.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.randomness import draw_words
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct
from nestfed.problems.worst_case import chi_square, chi_square_ball, cvar, kl_cvar

GEOMETRIES = ("chi-square-penalty", "chi-square-ball", "cvar", "kl-cvar")


@struct
class FastDRO(Algorithm):
    """Descends the losses of the rows of all batches, which an adversary at the server weighs."""

    lr: float = setting("eta: step size", above=0)
    geometry: str = setting("what the adversary may do", default=GEOMETRIES[0], choices=GEOMETRIES, static=True)
    price: float = setting("lambda: price of moving weight (chi-square-penalty, kl-cvar)", default=1.0, above=0)
    radius: float = setting("rho: of the ball (chi-square-ball)", default=0.1, above=0)
    tail: float = setting("alpha: share of rows in the tail (cvar, kl-cvar)", default=0.5, above=0, at_most=1)
    levels: int = setting(
        "J: levels of the multilevel estimate; 0 takes the whole batch", default=0, at_least=0, static=True
    )
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "single level"
    few_clients = (
        "the adversary knows only the cohort's rows: what is minimised is the mean over cohorts of their worst cases, "
        "a milder problem."
    )

    class State(NamedTuple):
        x: Shared

    def init(self, problem, params, draw, fed):
        (x,) = params
        rows = jax.eval_shape(lambda: problem.row_values(x, draw(0))).size
        if rows % 2**self.levels:
            raise UserError(
                f"FastDRO with levels={self.levels} halves a batch {self.levels} times, and batches of "
                f"{type(problem).__name__} have {rows} rows; give the task a batch size divisible by {2**self.levels}."
            )
        return self.State(x)

    def step(self, problem, s, draw, fed):
        losses = problem.row_values(s.x, draw(0))
        reply = lambda losses, cohort, slot, key: self.answer(losses, cohort.weights, key)[slot]
        factors = fed.gather(losses, reply=reply)
        x = s.x - at(self.lr, fed.t) * problem.weighted_gradient(s.x, factors, draw(0))
        return self.State(problem.feasible_x(fed.mean(x, around=s.x)))

    def answer(self, losses, weights, key):
        """Return [clients, b]: the factors of each client's losses that make the mean over clients sum p_i l_i."""
        shares = (weights / weights.sum()).astype(losses.dtype)
        p = self.find_worst_weights(losses, shares, self.level(key) if self.levels else None)
        return p / jnp.where(shares > 0, shares, 1)[:, None]

    def level(self, key):
        """Draw 1, 2, ...: one more than the number of zeros with which a random word begins."""
        return jnp.minimum(1 + lax.clz(draw_words(key, 1)[0]).astype(int), self.levels)

    def find_worst_weights(self, losses, shares, level):
        """Return p [clients, b] for losses [clients, b]; shares [clients] are the clients' nominal weights."""
        rows = losses.shape[1]
        row = jnp.arange(rows)

        def among(chosen):
            nominal = jnp.where(chosen[None], shares[:, None], 0)
            return self.response(losses.reshape(-1), nominal.reshape(-1)).reshape(losses.shape)

        if level is None:
            return among(row >= 0)
        taken = rows >> (self.levels - level)
        first, second = (row < taken // 2, (row >= taken // 2) & (row < taken))
        correction = among(row < taken) - (among(first) + among(second)) / 2
        return among(row < rows >> self.levels) + correction * 2.0 ** jnp.minimum(level, self.levels - 1)

    def response(self, losses, nominal):
        if self.geometry == "chi-square-penalty":
            return chi_square(losses, self.price, nominal)
        if self.geometry == "chi-square-ball":
            return chi_square_ball(losses, self.radius, nominal)
        if self.geometry == "cvar":
            return cvar(losses, self.tail, nominal)
        return kl_cvar(losses, self.price, self.tail, nominal)
