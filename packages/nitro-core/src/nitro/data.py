"""Data sources: the loaders, and what a batch is."""

from ._data import ArrayLoader, Batch, MapLoader

__all__ = ["ArrayLoader", "Batch", "MapLoader"]
