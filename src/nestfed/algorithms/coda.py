"""CODA+ and CODASCA: saddle points in stages, for the area under the ROC curve.

Problem   min_x max_alpha mean_k F_k(x, alpha), concave in alpha; x = (model, a, b) where F is `AreaUnderRoc`'s.

Stage s = 0, 1, ... has `stage_steps` growth^s steps, of size lr_s = lr / shrink^s, around its reference x_ref.
Step at client k, on one batch; both lines use the point before the step:
    x_k      <- x_k - lr_s (grad_x F_k(x_k, alpha_k) - c_k + c + (x_k - x_ref) / gamma)
    alpha_k  <- alpha_k + lr_s (grad_alpha F_k(x_k, alpha_k) - e_k + e)
    CODA+ has no c, c_k, e and e_k; in CODASCA they are control variates.
Last step of a round, I local steps, from the broadcast (x, alpha):
    CODASCA   c_k <- c_k - c + (x - x_k) / (I lr_s),  e_k <- e_k - e + (alpha_k - alpha) / (I lr_s)
              c <- c + mean_k share_k (change of c_k),  e likewise; share_k as in `scaffold`
    (x, alpha) <- mean_k (x_k, alpha_k)                       d + 1 numbers (the model's and 3); CODASCA: twice that
Last round of a stage, instead:
    (x, alpha) <- mean_k (mean over the stage's steps of (x_k, alpha_k)),   x_ref <- x

Why    The proximal term makes a stage a strongly convex problem, and the average of its points is close to the
       solution; steps that shrink as stages grow then give a rate that does not depend on the number of local steps.
       The last round of a stage needs the average of its points instead of the last point, so a client keeps a running
       sum and sends the average: that costs no traffic. CODASCA corrects both variables as SCAFFOLD does: without noise
       its fixed point is the common saddle point for any number of local steps, where CODA+ stops at a point between
       the clients' own saddle points.
Ref.   Yuan, Guo, Xu, Ying and Yang, "Federated deep AUC maximization for heterogeneous data with a constant
       communication complexity", ICML 2021, arXiv:2102.04635.
Departures
  * A stage ends with the first round in which its steps are done, so every stage has whole rounds.
  * The dual variable may have a step size of its own, `dual_lr`, which shrinks likewise.
  * With partial participation a client averages over those steps of a stage that it took.
  * In CODASCA every stage ends as in CODA+. The server's step size is 1, and lr must be constant within a round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nestfed.core.algorithm import Algorithm, Local, Shared
from nestfed.core.schedules import at
from nestfed.core.settings import setting, struct


@struct
class ProximalStages(Algorithm):
    """Holds what the two methods have in common: stages with a fixed reference and smaller steps in each."""

    lr: float = setting("eta: step size of the first stage", above=0)
    dual_lr: float | None = setting("step size of alpha in the first stage; none: lr", default=None, above=0)
    gamma: float = setting("(1 / 2 gamma) |x - reference|^2 is added; inf: nothing", default=500.0, above=0)
    stage_steps: int = setting("T_0: steps of the first stage", default=4000, at_least=1, static=True)
    growth: float = setting("factor by which stages grow", default=3.0, at_least=1)
    shrink: float = setting("what step sizes are divided by after a stage", default=3.0, at_least=1)

    family = "minimax"

    def local_step(self, problem, s, draw, fed, corrections=None):
        """Take a step of (x, alpha) and add the new point to the client's sums."""
        gradients = problem.gradients(s.x, s.alpha, draw(0))
        if corrections is not None:
            gradients = jax.tree.map(jnp.add, gradients, corrections)
        lr, dual_lr = self.rates(s, fed)
        x = problem.feasible_x(s.x - lr * (gradients[0] + (s.x - s.reference) / self.gamma))
        alpha = problem.feasible_alpha(s.alpha + dual_lr * gradients[1])
        going_on = s.own_stage == s.stage  # otherwise the sums are those of a stage that is over
        total = jax.tree.map(lambda old, new: jnp.where(going_on, old, 0) + new, s.total, (x, alpha))
        return s._replace(x=x, alpha=alpha, total=total, steps=jnp.where(going_on, s.steps, 0) + 1, own_stage=s.stage)

    def rates(self, s, fed):
        """Return the step sizes of x and alpha."""
        shrunk = lambda rate: (at(rate, fed.t) / self.shrink**s.stage).astype(s.x.dtype)
        lr = shrunk(self.lr)
        return lr, lr if self.dual_lr is None else shrunk(self.dual_lr)

    def is_last_round(self, s, fed):
        """Tell whether this is the stage's last round."""
        return fed.t + 1 - s.began >= self.stage_steps * self.growth**s.stage

    def message(self, s, fed):
        """Return what a client sends: its point, or its average point where the stage ends."""
        average = lambda point, total: jnp.where(self.is_last_round(s, fed), total / s.steps.astype(point.dtype), point)
        return jax.tree.map(average, (s.x, s.alpha), s.total)

    def synchronise(self, problem, s, fed, answer):
        """Return the common state that follows from the mean of the messages."""
        x, alpha, ends = problem.feasible_x(answer[0]), problem.feasible_alpha(answer[1]), self.is_last_round(s, fed)
        return s._replace(
            x=x,
            alpha=alpha,
            reference=jnp.where(ends, x, s.reference),
            stage=s.stage + ends.astype(s.stage.dtype),
            began=jnp.where(ends, fed.t + 1, s.began).astype(s.began.dtype),
        )


@struct
class CODAPlus(ProximalStages):
    """Descends and ascends locally around a reference point, in stages that restart from averages."""

    class State(NamedTuple):
        x: Shared
        alpha: Shared
        reference: Shared  # x at the start of the stage
        stage: Shared  # the number of the stage
        began: Shared  # the step index at the start of the stage
        total: Local  # the sum of (x_k, alpha_k) over the client's steps in the stage `own_stage`
        steps: Local  # the number of these steps
        own_stage: Local  # the stage of the client's last step

    def init(self, problem, params, draw, fed):
        x, alpha = params
        zero, nothing = jnp.zeros((), jnp.int32), (jnp.zeros_like(x), jnp.zeros_like(alpha))
        return self.State(
            x=x, alpha=alpha, reference=x, stage=zero, began=zero, total=nothing, steps=zero, own_stage=zero
        )

    def step(self, problem, s, draw, fed):
        s = self.local_step(problem, s, draw, fed)
        if not fed.sync:
            return s
        return self.synchronise(
            problem, s, fed, fed.mean(self.message(s, fed), around=(fed.server.x, fed.server.alpha))
        )


@struct
class CODASCA(ProximalStages):
    """Runs CODA+ with control variates against the drift of local steps."""

    class State(NamedTuple):
        x: Shared
        alpha: Shared
        reference: Shared
        stage: Shared
        began: Shared
        total: Local
        steps: Local
        own_stage: Local
        common: Shared  # (c, e): the server's control variates
        own: Local  # (c_k, e_k): the client's control variates

    def init(self, problem, params, draw, fed):
        x, alpha = params
        zero, nothing = jnp.zeros((), jnp.int32), (jnp.zeros_like(x), jnp.zeros_like(alpha))
        return self.State(
            x=x,
            alpha=alpha,
            reference=x,
            stage=zero,
            began=zero,
            total=nothing,
            steps=zero,
            own_stage=zero,
            common=nothing,
            own=nothing,
        )

    def step(self, problem, s, draw, fed):
        s = self.local_step(problem, s, draw, fed, jax.tree.map(jnp.subtract, s.common, s.own))
        if not fed.sync:
            return s
        lr, dual_lr = self.rates(s, fed)
        moved = (
            (fed.server.x - s.x) / (self.local_steps * lr),
            (s.alpha - fed.server.alpha) / (self.local_steps * dual_lr),
        )
        change = jax.tree.map(jnp.subtract, moved, s.common)
        share = jax.tree.map(lambda c: fed.share.astype(c.dtype) * c, change)
        answer, mean_change = fed.mean((self.message(s, fed), share), around=((fed.server.x, fed.server.alpha), None))
        return self.synchronise(problem, s, fed, answer)._replace(
            common=jax.tree.map(jnp.add, s.common, mean_change), own=jax.tree.map(jnp.add, s.own, change)
        )
