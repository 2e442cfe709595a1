"""Data sources: what a split may be, and the loaders for arrays and for single samples."""

from ._array_loader import ArrayLoader, is_read_from_anywhere
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
from ._map_loader import MapLoader
from ._row_loader import RowLoader, checked_order
from ._sample_shapes import index_of_shape, shape_examples

__all__ = [
    "ArrayLoader",
    "Batch",
    "MapLoader",
    "RowLoader",
    "check_same_fields",
    "check_same_shapes",
    "checked_batch",
    "checked_order",
    "checked_splits",
    "cut_to_width",
    "first_batch",
    "host_fields",
    "index_of_shape",
    "is_read_from_anywhere",
    "num_rows",
    "owned_batch",
    "routed_fields",
    "shape_examples",
]
