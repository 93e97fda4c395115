"""Gradients that are shortened: how it is done, and what methods have in common whose papers do not ask for it."""

from collections.abc import Sequence

import jax.numpy as jnp

from nestfed.core.algorithm import Algorithm, Fed
from nestfed.core.settings import setting, struct
from nestfed.core.types import Array, ArrayLike


def clip_together(parts: Sequence[Array], limit: ArrayLike) -> tuple[tuple[Array, ...], Array]:
    """(the vectors, shortened together where their common norm is above `limit`; 1.0 if it was)."""
    norm = jnp.sqrt(sum(jnp.vdot(a, a) for a in parts))
    over = norm > limit
    factor = jnp.where(over, limit / jnp.where(over, norm, 1), 1)
    return tuple(a * factor.astype(a.dtype) for a in parts), over.astype(float)


@struct
class MayClip(Algorithm):
    """A method whose paper takes steps of any length; `clip` bounds the gradient of a client's step."""

    clip: float | None = setting(
        "largest norm of a step's gradient; longer ones are shortened. None: as in the paper", default=None, above=0
    )

    def shorten(self, gradient: Array, fed: Fed) -> Array:
        """Return the gradient, shortened where its norm is above `clip`, and note how often it was."""
        if self.clip is None:
            return gradient
        (gradient,), over = clip_together((gradient,), self.clip)
        fed.note("clipped_share", over)
        return gradient
