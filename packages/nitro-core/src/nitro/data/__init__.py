"""Data sources: what a split may be, and the loader for arrays in memory."""

from ._array_loader import ArrayLoader
from ._batches import (
    Batch,
    checked_batch,
    checked_splits,
    cut_to_width,
    first_batch,
    num_rows,
    routed_fields,
)

__all__ = [
    "ArrayLoader",
    "Batch",
    "checked_batch",
    "checked_splits",
    "cut_to_width",
    "first_batch",
    "num_rows",
    "routed_fields",
]
