"""Named tasks on tables, for the command line and for reports. Each is loaded when it is first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
