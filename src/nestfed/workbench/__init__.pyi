"""The public names, and where they are."""

from .commands import compare as compare
from .commands import describe_data as describe_data
from .commands import report as report
from .commands import run as run
from .commands import sweep as sweep
from .commands import tabulate_costs as tabulate_costs
from .study import Search as Search
from .study import Stopped as Stopped
from .study import Study as Study
