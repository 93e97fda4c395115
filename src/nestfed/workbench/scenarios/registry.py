"""All scenarios by their names."""

from typing import Any

from nestfed.workbench.scenario import Scenario
from nestfed.workbench.scenarios.auprc import Auprc
from nestfed.workbench.scenarios.fairness import Fairness
from nestfed.workbench.scenarios.personal import Personal
from nestfed.workbench.scenarios.robustness import Robust

SCENARIOS: dict[str, type[Scenario[Any]]] = {
    scenario.options.name: scenario for scenario in (Fairness, Robust, Auprc, Personal)
}
