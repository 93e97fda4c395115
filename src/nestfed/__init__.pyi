"""The public names, and where they are."""

__version__: str

# The vocabulary
# Named tasks on tables
from . import data as data

# Algorithms and problems
from . import models as models
from . import problems as problems

# Estimators of scikit-learn
from . import sklearn as sklearn

# What happens to uploads
from . import uploads as uploads
from . import workbench as workbench
from .algorithms import ALGORITHMS as ALGORITHMS
from .algorithms import make as make
from .core.algorithm import Algorithm as Algorithm
from .core.algorithm import Fed as Fed
from .core.algorithm import Local as Local
from .core.algorithm import Sample as Sample
from .core.algorithm import Scratch as Scratch
from .core.algorithm import Server as Server
from .core.algorithm import Shared as Shared
from .core.rows import ClientRows as ClientRows
from .core.rows import Rows as Rows
from .core.scaled import Scaled as Scaled
from .core.schedules import PowerDecay as PowerDecay
from .core.schedules import Schedule as Schedule
from .core.schedules import StepDecay as StepDecay
from .core.schedules import at as at
from .core.settings import UserError as UserError
from .core.settings import setting as setting
from .core.settings import static as static
from .core.settings import struct as struct
from .core.task import Task as Task

# Verbs
from .engine.options import Options as Options
from .engine.rounds import Run as Run
from .uploads import CentralDP as CentralDP
from .uploads import LocalDP as LocalDP
from .verbs import diagnostics as diagnostics
from .verbs import personalise as personalise
from .verbs.conformance import check_algorithm as check_algorithm
from .verbs.cost import measure as measure
from .verbs.messages import deploy as deploy
from .verbs.simulation import Diverged as Diverged
from .verbs.simulation import Interrupted as Interrupted
from .verbs.simulation import Result as Result
from .verbs.simulation import advance as advance
from .verbs.simulation import evaluate as evaluate
from .verbs.simulation import simulate as simulate
from .verbs.simulation import start as start
from .verbs.sweeps import Sweep as Sweep
from .verbs.sweeps import sweep as sweep
from .workbench import Study as Study
from .workbench import compare as compare
from .workbench import run as run
from .workbench.tracking import Evaluation as Evaluation
from .workbench.tracking import Tracker as Tracker
from .workbench.trained import ClientModels as ClientModels
from .workbench.trained import TabularModel as TabularModel
