"""Writes Nitro runs as TensorFlow SavedModels, and loads them again.

Importing the package imports neither TensorFlow nor JAX. Users reach the backend by name:
`nitro.export_model(run, "tf", ...)`.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
