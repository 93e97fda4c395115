"""nestfed: federated learning with nested objectives."""

from nestfed import adapters, checks, cost, deploy, diagnostics, hypergradients, problems, tasks
from nestfed.algorithms import ALGORITHMS, make
from nestfed.core import (
    Algorithm,
    ClientRows,
    Fed,
    Local,
    PowerDecay,
    Rows,
    Sample,
    Schedule,
    Scratch,
    Server,
    Shared,
    Task,
    UserError,
    at,
    setting,
    static,
    struct,
)
from nestfed.engine import Run
from nestfed.simulate import Diverged, Interrupted, Result, advance, evaluate, simulate, start
from nestfed.sweep import Sweep, sweep

__version__ = "0.1.0"

__all__ = [
    "adapters",
    "checks",
    "cost",
    "deploy",
    "diagnostics",
    "hypergradients",
    "problems",
    "tasks",
    "ALGORITHMS",
    "Algorithm",
    "ClientRows",
    "Diverged",
    "Fed",
    "Interrupted",
    "Local",
    "PowerDecay",
    "Result",
    "Rows",
    "Run",
    "Sample",
    "Schedule",
    "Scratch",
    "Server",
    "Shared",
    "Sweep",
    "Task",
    "UserError",
    "advance",
    "at",
    "evaluate",
    "make",
    "setting",
    "simulate",
    "start",
    "static",
    "struct",
    "sweep",
]
