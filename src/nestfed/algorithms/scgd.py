"""SCGD: one running estimate of the inner function, two time scales; with clients, the pooled method.

Problem   min_x h(x) + f(g(x)),   h = mean_k h_k,  g = mean_k g_k.

Step t at client k (a round is one step), with one batch for everything:
    y  <- (1 - beta_t) y + beta_t mean_k g_k(x)                     m numbers
    x  <- mean_k [x - lr_t (grad h_k(x) + J g_k(x)^T grad f(y))]    d numbers, an exchange of its own

Why    y averages over batches, so the bias of the plug-in estimate goes away, provided that x moves ever more slowly
       than y: lr_t / beta_t must fall to zero. Otherwise y lags behind x.
Ref.   Wang, Fang and Liu, "Stochastic compositional gradient descent: algorithms for minimizing compositions of
       expected-value functions", Mathematical Programming 161, 2017, arXiv:1411.3803.
Departures
  * The paper is centralised and without h. Here clients pool their values and gradients in every step, as a central
    machine would with all batches, at the price of two exchanges.
  * Steps t^(-3/4) and t^(-1/2) count from 1, so the first step takes the batch value. With another beta, y starts as
    the mean of a batch drawn at the start.
"""

from typing import NamedTuple

from nestfed.core.algorithm import Algorithm, Shared
from nestfed.core.schedules import PowerDecay, at
from nestfed.core.settings import setting, struct


@struct
class SCGD(Algorithm):
    """Keeps a running estimate of the inner function; values and gradients are pooled in every step."""

    lr: float | PowerDecay = setting("alpha_t: step size of x", default=PowerDecay(scale=1.0, power=3 / 4), above=0)
    beta: float | PowerDecay = setting(
        "beta_t: step of the estimate towards the batch value",
        default=PowerDecay(scale=1.0, power=1 / 2),
        at_least=0,
        at_most=1,
    )
    local_steps: int = setting("I: every step exchanges", default=1, at_least=1, at_most=1, static=True)

    family = "compositional"
    scope = "global"

    class State(NamedTuple):
        x: Shared
        y: Shared  # estimate of g(x)

    def init(self, problem, params, draw, fed):
        (x,) = params
        return self.State(x, fed.mean(problem.inner_value(x, draw(0))))

    def step(self, problem, s, draw, fed):
        value, pull = problem.inner_vjp(s.x, draw(0))
        beta = at(self.beta, fed.t)
        y = (1 - beta) * s.y + beta * fed.mean(value, around=s.y)
        x = s.x - at(self.lr, fed.t) * problem.composed_gradient(s.x, pull, y, draw(0))
        return self.State(problem.feasible_x(fed.mean(x, around=s.x)), y)
