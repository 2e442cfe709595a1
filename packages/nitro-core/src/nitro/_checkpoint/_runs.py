"""What the records of a directory say of the runs that wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ._find import best_of
from ._index import RecordEntry
from ._records import checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The records of one run in a directory.

    Attributes:
        run: The run's id.
        records: How many of its records are on disk.
        epochs: The finished epochs of each, ascending.
        best: Its best record under the metric that ranked it last; None without a score.
        metrics: The metrics that ranked its records, sorted; more than one where the
            checkpointer was changed in between.
        time: When it last wrote, ISO 8601 in UTC.
        parent: The record that it branched from, as "<run>/<name>"; None for a run of its own.
    """

    run: str
    records: int
    epochs: tuple[int, ...]
    best: RecordEntry | None
    metrics: tuple[str, ...]
    time: str
    parent: str | None


def runs(directory: str | Path) -> list[RunSummary]:
    """Lists the runs whose records are in a directory, the one that wrote last first.

    Args:
        directory: A run's directory, or its `checkpoints`.

    Returns:
        One summary for each run; none for a directory without records.

    Raises:
        CheckpointError: The index is damaged, or of another format version.
    """
    by_run: dict[str, list[RecordEntry]] = {}
    for entry in checkpoints(directory):
        by_run.setdefault(entry.run, []).append(entry)
    return sorted(map(_summary, by_run.values()), key=lambda run: run.time, reverse=True)


def _summary(entries: Sequence[RecordEntry]) -> RunSummary:
    return RunSummary(
        run=entries[0].run,
        records=len(entries),
        epochs=tuple(sorted(entry.epoch for entry in entries)),
        best=best_of(entries),
        metrics=tuple(sorted({entry.metric for entry in entries if entry.metric is not None})),
        time=max(entry.time for entry in entries),
        parent=entries[-1].parent,
    )
