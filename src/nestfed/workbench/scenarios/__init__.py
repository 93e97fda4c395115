"""Named tasks on tables, for the command line and for reports."""

from nestfed.workbench.scenario import Kind
from nestfed.workbench.scenarios.auprc import Auprc
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.scenarios.personal import ClientModels, Personal
from nestfed.workbench.scenarios.robust import Robust
from nestfed.workbench.scenarios.tabular import TabularModel

TASKS: dict[str, type[Kind]] = {kind.name: kind for kind in (Fairness, Robust, Auprc, Personal)}

__all__ = ["TASKS", "ClientModels", "TabularModel"]
