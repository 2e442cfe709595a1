"""Records: what is kept of a run, how it is written, and how it is found again."""

from ._index import RecordEntry, read_index
from ._policy import TopK
from ._records import Record, RecordWriter, find_record, flat_items, open_record

__all__ = [
    "Record",
    "RecordEntry",
    "RecordWriter",
    "TopK",
    "find_record",
    "flat_items",
    "open_record",
    "read_index",
]
