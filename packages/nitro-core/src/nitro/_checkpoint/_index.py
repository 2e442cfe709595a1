"""The index of a directory of records: small, JSON, readable without opening a record."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nitro._journal import ending
from nitro.errors import CheckpointError

INDEX_NAME = "index.json"
META_FILE = Path("meta", "metadata")
"""Where Orbax puts the JSON item `meta` of a record."""

UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a record that Orbax is writing; it renames the directory at the end."""

TRASH = ".nitro-trash"
"""At the end of the name of a record that is being deleted."""

FORMAT_VERSION = 1
"""The number of the record format; `tests/golden` keeps a record of each."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RecordEntry(os.PathLike[str]):
    """What is known of a record without opening it.

    Of a listed one `Nitro(checkpoint=...)` and `Nitro(resume=...)` take the entry itself: it
    stands for the record's directory.

    Attributes:
        name: The record's directory.
        run: The id of the run that wrote it; a directory may hold the records of several.
        step: Finished optimizer steps.
        epoch: Finished epochs.
        metric: The metric that ranks it; None without validation.
        mode: Whether "min" or "max" of it is best.
        score: Its value.
        time: When it was written, ISO 8601 in UTC.
        stop_reason: Why the run ended with it; None if it went on.
        parent: The record that its run branched from, as "<run>/<name>"; None if the run
            did not start from another one's record.
        path: The record's directory, absolute; None in an index, which may be moved.
    """

    name: str
    run: str
    step: int
    epoch: int
    metric: str | None = None
    mode: str | None = None
    score: float | None = None
    time: str = ""
    stop_reason: str | None = None
    parent: str | None = None
    path: Path | None = dataclasses.field(default=None, compare=False)

    def __fspath__(self) -> str:
        return self.name if self.path is None else str(self.path)

    def __repr__(self) -> str:
        score = (
            "no score" if self.score is None else f"{self.metric} {self.score:.6g} ({self.mode})"
        )
        ending = "" if self.stop_reason is None else f", {self.stop_reason}"
        return f"<epoch {self.epoch}, step {self.step}, {score}{ending}, {os.fspath(self)}>"

    def to_json(self) -> dict[str, Any]:
        """The entry as an index keeps it."""
        return {n: v for n, v in dataclasses.asdict(self).items() if n != "path"}


def read_index(directory: Path) -> list[RecordEntry]:
    """The entries of a directory, oldest first; empty where there are none.

    Only records that are there count. One that was finished just before its process was
    killed is not in the index yet; it is found by itself and comes last.

    Raises:
        CheckpointError: The index cannot be read, or is of another format version.
    """
    listed = _listed(directory)
    there = [entry for entry in listed if (directory / entry.name / META_FILE).exists()]
    return there + _unlisted(directory, {entry.name for entry in listed})


def write_index(directory: Path, entries: Sequence[RecordEntry]) -> None:
    """Replaces the index atomically."""
    path = directory / INDEX_NAME
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "records": [entry.to_json() for entry in entries],
    }
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_meta(record: Path) -> dict[str, Any]:
    """The JSON values of a record, read without its arrays.

    Raises:
        CheckpointError: Not a record, or of another format version.
    """
    try:
        meta: Any = json.loads((record / META_FILE).read_text(encoding="utf-8"))
        version = meta["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"`{record}` is no record that can be read: {error}.",
            expected="a directory that a Nitro run wrote",
            fix="`nitro.checkpoints(run_dir)` lists the records of a run",
        ) from error
    check_version(version, f"The record `{record}`", writer=str(meta.get("nitro_version", "")))
    return dict(meta)


def check_version(version: Any, what: str, *, writer: str = "") -> None:
    """Refuses a format version that this Nitro does not read.

    Raises:
        CheckpointError: Names both versions, and the Nitro that wrote it.
    """
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{what} has format version {version}" + (f", of Nitro {writer}." if writer else "."),
            expected=f"version {FORMAT_VERSION}, which this Nitro reads",
            fix="update Nitro to the version that wrote it",
        )


def _listed(directory: Path) -> list[RecordEntry]:
    path = directory / INDEX_NAME
    if not path.exists():
        return []
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, records = index["format_version"], index["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise _no_index(path, error) from error
    check_version(version, f"`{path}`")
    try:
        return [entry_from(record) for record in records]
    except (TypeError, AttributeError) as error:
        raise _no_index(path, error) from error


def _no_index(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"`{path}` is no index of records: {error}.",
        fix="delete the file: it is made again from the records beside it",
    )


def entry_from(values: Mapping[str, Any]) -> RecordEntry:
    """An entry from JSON values; what a later Nitro may have added is left out."""
    known = {field.name for field in dataclasses.fields(RecordEntry)}
    entry = RecordEntry(**{name: value for name, value in values.items() if name in known})
    if entry.stop_reason is None:
        return entry
    return dataclasses.replace(entry, stop_reason=ending(entry.stop_reason))


def _unlisted(directory: Path, listed: set[str]) -> list[RecordEntry]:
    """Finished records that no index names: Orbax renames a directory when it is complete."""
    if not directory.is_dir():
        return []
    found: list[RecordEntry] = []
    for path in directory.iterdir():
        if path.name in listed or UNFINISHED in path.name or path.name.endswith(TRASH):
            continue
        try:
            found.append(entry_from({**read_meta(path)["entry"], "name": path.name}))
        except (CheckpointError, KeyError, TypeError):
            continue  # somebody else's directory
    return sorted(found, key=lambda entry: (entry.time, entry.step))
