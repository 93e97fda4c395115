"""Names of types."""

from typing import Any

Array = Any  # jax.Array, numpy.ndarray or a Python number
PyTree = Any
