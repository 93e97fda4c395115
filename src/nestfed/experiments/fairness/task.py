"""The task `fairness` with what this experiment adds: a variant of a method, and a slip in the data's preparation."""

import dataclasses
import functools
from typing import ClassVar

from nestfed.data import Table
from nestfed.experiments.fairness.data import add_slip
from nestfed.workbench.scenario import Method
from nestfed.workbench.scenarios.fairness import Fairness

# FedBiOAcc with a momentum that forgets, and inner steps that match its shrinking factor alpha_t: not in the paper.
FORGETFUL = "fedbioacc-c50"


@dataclasses.dataclass(frozen=True)
class Reproduced(Fairness):
    """The task with the variant beside the paper's methods."""

    methods: ClassVar[dict[str, Method]] = Fairness.methods | {
        FORGETFUL: dataclasses.replace(Fairness.methods["fedbioacc"], title="FedBiOAcc, c = 50")
    }


@dataclasses.dataclass(frozen=True)
class Slipped(Reproduced):
    """The same with a slip in the preparation of the data."""

    @functools.cached_property
    def table(self) -> Table:
        table = super().table
        return add_slip(table, table.group_columns(self.options.group))
