"""Named tasks on tables, from a request to a report: what the command line does, in Python.

The public names are in the stub beside this file; each is loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
