"""What one does with an algorithm and a task: simulate, sweep, deploy, measure, diagnose, check."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=("checkpoints", "conformance", "cost", "diagnostics", "messages", "personalise", "simulation", "sweeps"),
)
