"""Train a Flax model as a declared experiment, then export it for serving.

The public names are listed once, in `__init__.pyi`. Each is imported on first use, so
that `import nitro` is light and brings no JAX along.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
