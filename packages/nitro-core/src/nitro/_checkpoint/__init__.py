"""Records: what is kept of a run, how it is written, and how it is found again."""

from ._arrays import flat_items
from ._find import newest
from ._index import RecordEntry, read_index
from ._lock import DirectoryLock
from ._policy import TopK
from ._records import (
    Record,
    checkpoint_info,
    checkpoints,
    leaf_differences,
    listed,
    open_record,
)
from ._runs import runs
from ._writer import RecordWriter

__all__ = [
    "DirectoryLock",
    "Record",
    "RecordEntry",
    "RecordWriter",
    "TopK",
    "checkpoint_info",
    "checkpoints",
    "flat_items",
    "leaf_differences",
    "listed",
    "newest",
    "open_record",
    "read_index",
    "runs",
]
