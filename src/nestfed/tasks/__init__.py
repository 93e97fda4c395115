"""Named tasks, for the command line and for reports. `toys` has problems with known answers."""

from nestfed.methods import Kind
from nestfed.tasks import toys
from nestfed.tasks.fairness import Fairness

TASKS: dict[str, type[Kind]] = {kind.name: kind for kind in (Fairness,)}

__all__ = ["TASKS", "toys"]
