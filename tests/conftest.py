"""Strictness for all tests: float64, no silent rank promotion, and a compilation cache shared by the workers."""

import os
from pathlib import Path

# Compilation dominates these tests: half of it is optimisation that tiny shapes do not need.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax  # noqa: E402

CACHE = Path(__file__).parent.parent / ".cache" / "jax"
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", os.environ.get("NESTFED_TEST_CACHE", str(CACHE)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
