"""Serves Nitro's bundles over the Open Inference Protocol, on engines that others maintain."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
