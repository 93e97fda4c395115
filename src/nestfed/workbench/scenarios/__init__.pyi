"""The public names, and where they are."""

from .personal import ClientModels as ClientModels
from .registry import SCENARIOS as SCENARIOS
from .tabular import TabularModel as TabularModel
