"""For the tests of plugins and users: a tiny experiment, and what every backend must pass."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
