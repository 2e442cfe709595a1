"""Data sources: what a split may be, and the loader for arrays in memory."""

from ._array_loader import ArrayLoader, checked_order, is_read_from_anywhere
from ._batches import (
    Batch,
    check_same_fields,
    check_same_shapes,
    checked_batch,
    checked_splits,
    cut_to_width,
    first_batch,
    host_fields,
    num_rows,
    owned_batch,
    routed_fields,
)

__all__ = [
    "ArrayLoader",
    "Batch",
    "check_same_fields",
    "check_same_shapes",
    "checked_batch",
    "checked_order",
    "checked_splits",
    "cut_to_width",
    "first_batch",
    "host_fields",
    "is_read_from_anywhere",
    "num_rows",
    "owned_batch",
    "routed_fields",
]
