"""Networks as pairs of functions: `init(key, features)` makes a parameter tree, calling the model gives outputs.

Any such pair serves; these are the ones that the shipped tasks offer.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from nestfed.core import Array, PyTree, UserError


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """Fully connected layers with one output; without a hidden layer it is logistic regression."""

    hidden: tuple[int, ...] = ()

    def init(self, key: Array, features: int) -> PyTree:
        widths = (features, *self.hidden, 1)
        keys = jax.random.split(key, len(widths) - 1)
        layer = lambda key, inputs, outputs: {
            "weight": jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs),
            "bias": jnp.zeros(outputs),
        }
        return [layer(k, *sides) for k, sides in zip(keys, zip(widths, widths[1:], strict=False), strict=True)]

    def __call__(self, params: PyTree, inputs: Array) -> Array:
        """Logits, one per row."""
        *hidden, last = params
        for layer in hidden:
            inputs = jax.nn.relu(inputs @ layer["weight"] + layer["bias"][None])
        return (inputs @ last["weight"])[:, 0] + last["bias"]


MODELS = {"logistic": Perceptron(), "network": Perceptron((64,))}


def model_named(name: str) -> Perceptron:
    if name not in MODELS:
        raise UserError(f"there is no model {name!r}; use one of {', '.join(MODELS)}.")
    return MODELS[name]
