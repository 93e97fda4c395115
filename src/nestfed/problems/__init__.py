"""Problem classes: pure functions on parameter trees that a user writes, and the oracles that an algorithm calls."""

from nestfed.problems.base import ORACLE_KINDS, Problem, oracle
from nestfed.problems.bilevel import Bilevel
from nestfed.problems.compositional import Compositional
from nestfed.problems.conditional import Conditional
from nestfed.problems.constrained import Constrained
from nestfed.problems.minimax import Minimax
from nestfed.problems.personalised import GaussianEncoder, Personalised
from nestfed.problems.single_level import SingleLevel

__all__ = [
    "ORACLE_KINDS",
    "Bilevel",
    "Compositional",
    "Conditional",
    "Constrained",
    "GaussianEncoder",
    "Minimax",
    "Personalised",
    "Problem",
    "SingleLevel",
    "oracle",
]
