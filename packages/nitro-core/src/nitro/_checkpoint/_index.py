"""The index of a directory of records: small, JSON, readable without opening a record."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nitro.errors import CheckpointError

INDEX_NAME = "index.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """What is known of a record without opening it.

    Attributes:
        name: The record's directory.
        run: The run that wrote it; a directory may hold the records of several.
        step: Finished optimizer steps.
        epoch: Finished epochs.
        metric: The metric that ranks it; None without validation.
        mode: Whether "min" or "max" of it is best.
        score: Its value.
    """

    name: str
    run: str
    step: int
    epoch: int
    metric: str | None
    mode: str | None
    score: float | None


def read_index(directory: Path) -> list[RecordEntry]:
    """The entries of a directory, oldest first; empty where there are none.

    Raises:
        CheckpointError: The index cannot be read, or is of another format version.
    """
    path = directory / INDEX_NAME
    if not path.exists():
        return []
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, records = index["format_version"], index["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"`{path}` is no index of records: {error}.",
            fix="restore the file, or point to a record's own directory",
        ) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"`{path}` has format version {version}.",
            expected=f"version {FORMAT_VERSION}, which this Nitro reads",
        )
    return [RecordEntry(**record) for record in records]


def write_index(directory: Path, entries: Sequence[RecordEntry]) -> None:
    """Replaces the index atomically."""
    path = directory / INDEX_NAME
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "records": [dataclasses.asdict(entry) for entry in entries],
    }
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
