"""Names of types."""

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

__all__ = ["AnyArray", "Array", "ArrayLike", "PyTree"]

Array = jax.Array  # within a compiled program, or what it returned
AnyArray = jax.Array | np.ndarray  # data on their way into a program; ArrayLike is a Python number too
PyTree = Any  # arrays in tuples, lists, dicts and records; Python's types cannot say more of it
