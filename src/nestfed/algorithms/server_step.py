"""The server's step of a variable: a plain one, or that of any optax optimiser."""

from typing import Any

import optax

from nestfed.core.types import Array

Optimizer = optax.GradientTransformation
OPTIMIZER: dict[str, Any] = {  # of a setting that takes one
    "description": "the server's step by an optax optimiser, such as optax.sgd(1.0)",
    "default": None,
    "part": Optimizer,
    "static": True,
}


def start_memory(optimizer: Optimizer | None, x: Array) -> Any:
    """Return what the optimiser remembers at the start; a plain step remembers nothing."""
    return None if optimizer is None else optimizer.init(x)


def descend(optimizer: Optimizer | None, lr: Any, x: Array, direction: Array, memory: Any) -> tuple[Array, Any]:
    """Return x after a step against `direction`, and the memory; an optimiser has a step size of its own."""
    if optimizer is None:
        return x - lr * direction, memory
    update, memory = optimizer.update(direction, memory, x)
    moved: Any = optax.apply_updates(x, update)
    return moved, memory
