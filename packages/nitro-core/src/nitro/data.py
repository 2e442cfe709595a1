"""Data sources: the loader for arrays in memory, and what a batch is."""

from ._data import ArrayLoader, Batch

__all__ = ["ArrayLoader", "Batch"]
