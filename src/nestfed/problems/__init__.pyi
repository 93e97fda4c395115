"""The public names, and where they are."""

from . import adapters as adapters
from . import hypergradients as hypergradients
from . import maml as maml
from . import ranking as ranking
from . import robust as robust
from . import toys as toys
from . import worst_case as worst_case
from .base import ORACLE_KINDS as ORACLE_KINDS
from .base import Problem as Problem
from .base import oracle as oracle
from .bilevel import Bilevel as Bilevel
from .compositional import Compositional as Compositional
from .conditional import Conditional as Conditional
from .constrained import Constrained as Constrained
from .minimax import Minimax as Minimax
from .personalised import GaussianEncoder as GaussianEncoder
from .personalised import Personalised as Personalised
from .single_level import SingleLevel as SingleLevel
