"""What a directory's checkpoints and run files say of the runs that wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nitro._journal import History, RunFile, find_runs, read_runs

from ._find import best_of, records_dir
from ._index import RecordEntry, read_index


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run: its checkpoints, and what its `run.json` says.

    Attributes:
        run: The run's id; empty where a file of before has none.
        run_dir: Its directory, absolute.
        records: How many of its records are on disk.
        epochs: The finished epochs of each, ascending.
        best: Its best record under the metric that ranked it last; None without a score.
        metrics: The metrics that ranked its records, sorted; more than one where the
            checkpointer was changed in between.
        time: When it last wrote, ISO 8601 in UTC.
        parent: The record that it branched from, as "<run>/<name>"; None for a run of its own.
        experiment: The class, as `module:Class`; None where the run left no `run.json`.
        status: "running", "interrupted", "completed", "early_stop", "stopped" or "failed"; None
            likewise.
        config: The fields of the experiment, as JSON values; empty likewise.
        options: The run options, likewise.
        history: The finished epochs; without a row likewise.
    """

    run: str
    run_dir: Path
    records: int
    epochs: tuple[int, ...]
    best: RecordEntry | None
    metrics: tuple[str, ...]
    time: str
    parent: str | None
    experiment: str | None = None
    status: str | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    history: History = dataclasses.field(default_factory=History, repr=False)


def runs(directory: str | Path) -> list[RunSummary]:
    """Lists the runs at and below a directory, as `nitro runs` does, the last one first.

    Args:
        directory: A folder of runs, a run's directory, or its `checkpoints`.

    Returns:
        One summary for each run; none for a directory without any.

    Raises:
        CheckpointError: An index or a run file is damaged, or of another format version.
    """
    start = Path(directory).absolute()
    if start.name == "checkpoints":
        start = start.parent
    folders = {start, *find_runs(start)}
    files = {(Path(one.run_dir), one.run or ""): one for one in read_runs(start)}
    entries: dict[tuple[Path, str], list[RecordEntry]] = {}
    for folder in folders:
        for entry in read_index(records_dir(folder)):
            entries.setdefault((folder, entry.run), []).append(entry)
    found = [
        _summary(folder, run, entries.get((folder, run), []), files.get((folder, run)))
        for folder, run in files.keys() | entries.keys()
    ]
    return sorted(found, key=lambda run: run.time, reverse=True)


def _summary(
    folder: Path, run: str, entries: Sequence[RecordEntry], file: RunFile | None
) -> RunSummary:
    told: dict[str, Any] = {}
    times = [entry.time for entry in entries]
    if file is not None:
        names = ("experiment", "status", "config", "options")
        told = {name: getattr(file, name) for name in names}
        told["history"] = file.to_history()
        written = datetime.fromtimestamp(file.updated_at, UTC)
        times.append(written.isoformat(timespec="milliseconds"))
    return RunSummary(
        run=run,
        run_dir=folder,
        records=len(entries),
        epochs=tuple(sorted(entry.epoch for entry in entries)),
        best=best_of(entries),
        metrics=tuple(sorted({entry.metric for entry in entries if entry.metric is not None})),
        time=max(times),
        parent=entries[-1].parent if entries else None,
        **told,
    )
