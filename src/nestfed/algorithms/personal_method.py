"""What the methods for personalised problems have in common: steps on parts of a model, and their clipping.

A client's model is an extractor u and a head v. Every local gradient is shortened to the norm `clip`, over the part (or
parts) that it moves; how often that happened is noted.
"""

import jax
import jax.numpy as jnp

from nestfed.algorithms.clipping import clip_together
from nestfed.core.algorithm import Algorithm, Phase, Sample
from nestfed.core.schedules import at
from nestfed.core.settings import UserError, setting, struct
from nestfed.core.types import Array
from nestfed.problems import Personalised


def count_classes(problem: Personalised, u: Array, v: Array, sample: Sample) -> int:
    """Return the number of classes, from the shape of the outputs."""
    inputs, labels = sample.batch
    outputs = jax.eval_shape(lambda: problem.outputs(u, v, inputs, sample.key))
    if outputs.ndim != 2 or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UserError(
            f"this method needs classes: {type(problem).__name__} gives outputs of shape {outputs.shape} for labels of "
            f"type {labels.dtype}; give outputs [rows, classes] and whole numbers as labels, or choose FedRep."
        )
    return outputs.shape[1]


@struct
class PersonalMethod(Algorithm):
    """A method for personalised problems, whose gradients are clipped."""

    lr: float = setting("eta: step size", above=0)
    clip: float = setting("largest norm of a gradient; longer ones are shortened", default=10.0, above=0)

    family = "personalised"

    def descend(self, s, lr, fed, **gradients: Array):
        """A step of the fields of these names along their gradients, which are shortened together."""
        shortened, over = clip_together(tuple(gradients.values()), self.clip)
        fed.note("clipped_share", over)
        return s._replace(**{name: getattr(s, name) - lr * g for name, g in zip(gradients, shortened, strict=True)})


@struct
class HeadThenBody(PersonalMethod):
    """Lets a client train its head with the extractor fixed, then the extractor with the head fixed, in every round."""

    head_lr: float | None = setting("eta_v: step size of the head; None means lr", default=None, above=0)
    head_steps: int = setting("K_v: steps of the head per round", default=1, at_least=0, static=True)
    local_steps: int = setting("K_u: steps of the extractor per round", default=1, at_least=1, static=True)

    def schedule(self) -> tuple[Phase, ...]:
        return (
            (self.head, self.head_steps, False),
            (self.extractor, self.local_steps - 1, False),
            (self.extractor, 1, True),
        )

    def head(self, problem, s, draw, fed):
        lr = self.lr if self.head_lr is None else self.head_lr
        return self.descend(s, at(lr, fed.t), fed, v=problem.grad_head(s.u, s.v, draw(0)))

    def extractor(self, problem, s, draw, fed):
        s = self.descend(s, at(self.lr, fed.t), fed, u=self.direction(problem, s, draw, fed))
        return self.synchronise(problem, s, draw, fed) if fed.sync else s

    def direction(self, problem, s, draw, fed):
        """Return the gradient along which the extractor goes."""
        return problem.grad_extractor(s.u, s.v, draw(0))

    def synchronise(self, problem, s, draw, fed):
        """Do what follows the round's last step."""
        raise UserError(f"{type(self).__name__} must define synchronise(problem, s, draw, fed).")
