"""Names of types."""

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

__all__ = ["AnyArray", "Array", "ArrayLike", "PyTree", "Seed"]

Array = jax.Array  # within a compiled program, or what it returned
AnyArray = jax.Array | np.ndarray  # data on their way into a program; ArrayLike is a Python number too
Seed = int | np.integer | jax.Array  # a whole number, or a key made by jax.random.key
PyTree = Any  # arrays in tuples, lists, dicts and records; Python's types cannot say more of it
