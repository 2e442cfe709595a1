"""Exports Nitro runs as TensorFlow SavedModels.

Importing the package imports no TensorFlow. Users reach the backend by name:
`nitro.export_model(run, "tf", ...)`.
"""

from ._version import __version__

__all__ = ["__version__"]
