"""Named tasks, for the command line and for reports. `toys` has problems with known answers."""

from nestfed.methods import Kind
from nestfed.tasks import toys
from nestfed.tasks.auprc import Auprc
from nestfed.tasks.fairness import Fairness
from nestfed.tasks.personal_table import ClientModels, Personal
from nestfed.tasks.robust import Robust
from nestfed.tasks.tabular import TabularModel

TASKS: dict[str, type[Kind]] = {kind.name: kind for kind in (Fairness, Robust, Auprc, Personal)}

__all__ = ["TASKS", "ClientModels", "TabularModel", "toys"]
