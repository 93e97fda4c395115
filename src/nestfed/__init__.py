"""nestfed: federated learning with nested objectives."""

from nestfed import adapters, checks, cost, data, deploy, diagnostics, hypergradients, problems, tasks, workbench
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
from nestfed.workbench import Study, compare, run

__version__ = "0.1.0"

__all__ = [
    "adapters",
    "checks",
    "cost",
    "data",
    "deploy",
    "diagnostics",
    "hypergradients",
    "problems",
    "tasks",
    "workbench",
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
    "Study",
    "Sweep",
    "Task",
    "UserError",
    "advance",
    "at",
    "compare",
    "evaluate",
    "make",
    "run",
    "setting",
    "simulate",
    "start",
    "static",
    "struct",
    "sweep",
]
