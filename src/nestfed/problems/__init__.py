"""Problem classes: pure functions on parameter trees that a user writes, and the oracles that an algorithm calls.

The public names are in the stub beside this file; each is loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
