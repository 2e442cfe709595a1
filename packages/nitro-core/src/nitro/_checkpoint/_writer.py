"""Writes the records of one run, in the background, and drops those that are not kept."""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import shutil
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nitro._trees import Flat
from nitro.errors import CheckpointError

from ._arrays import described, host_copy, savable, without_empty
from ._index import FORMAT_VERSION, TRASH, UNFINISHED, RecordEntry, read_index, write_index
from ._policy import TopK

_MOST_OF_METRIC = 100
"""Characters of the metric in a record's name: a folder's has at most 255 bytes."""

_saving = threading.Lock()
"""Held for each save: Orbax numbers its operations for the whole process, and two that run at
once take each other's signals."""


class _NoThreads(logging.Filter):
    """Drops what Orbax's threads log of an error that the thread which waits raises as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "_SignalingThread" not in record.getMessage()


@contextmanager
def _quiet_threads() -> Generator[None]:
    """Keeps Orbax from printing tracebacks of its own in front of our message."""
    logger, quiet = logging.getLogger("absl"), _NoThreads()
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


class RecordWriter:
    """Writes the records of one run; a save returns as soon as the arrays are copied.

    A thread turns the copy into a record: Orbax's own preparations in the foreground would
    cost the training several times what the copy does. It is kept from save to save, because
    starting one waits for it, and it does not let go of the interpreter at once.

    Args:
        directory: Where the records go. Whoever writes holds the lock of the run.
        policy: Which of them stay.
        run: The id of the run that goes on; None makes a new one.
        parent: The record that a new run branches from, as "<run>/<name>".
    """

    def __init__(
        self, directory: Path, policy: TopK, *, run: str | None = None, parent: str | None = None
    ) -> None:
        self.directory = directory.absolute()
        self.policy = policy
        # From the system's entropy: two runs with one seed are still two runs.
        self.run = run or secrets.token_hex(4)
        self.parent = parent
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._is_tidy = False

    def save(
        self,
        items: Mapping[str, Mapping[str, Any]],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] | None,
        stop_reason: str | None,
        meta: Mapping[str, Any],
    ) -> None:
        """Starts writing a record, if the policy would keep it; waits for the one before it.

        Args:
            items: What to save, one flat mapping of arrays for each item; may be donated as
                soon as the call returns.
            step: Finished optimizer steps.
            epoch: Finished epochs.
            metrics: The validation's scalars; None without a validation.
            stop_reason: Why the run ends here; None if it goes on.
            meta: JSON values that are kept with the record.

        Raises:
            CheckpointError: The ranking metric was not emitted, or the record before this
                one could not be written.
        """
        score = None if metrics is None else self.policy.score(metrics)
        self.wait()
        if not self._is_admitted(score):
            return
        entry = RecordEntry(
            name="",
            run=self.run,
            step=step,
            epoch=epoch,
            metric=None if score is None else self.policy.metric,
            mode=None if score is None else self.policy.mode,
            score=score,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            stop_reason=stop_reason,
            parent=self.parent,
        )
        arrays = host_copy({name: savable(flat) for name, flat in items.items()})
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="nitro-record")
        self._pending = self._executor.submit(self._write, entry, arrays, meta)

    def wait(self) -> None:
        """Waits until the last record is on disk and listed.

        Raises:
            CheckpointError: It could not be written; the records before it are intact.
        """
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.exception()
        if error is not None:
            # Whatever Orbax left half written goes with the next record.
            self._is_tidy = False
            raise CheckpointError(
                f"A record could not be written to `{self.directory}`: {_shortened(error)}",
                expected="a directory that can be written, with room for a record",
                fix="free the disk or mend the directory; the records before this one are "
                'intact, and `Nitro(..., resume="auto")` goes on from the newest',
            ) from error

    def close(self) -> None:
        """Ends what writes in the background; see `wait`."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def best(self) -> Path | None:
        """This run's best record that is on disk, if one has a score."""
        best = next(iter(self.policy.best(self.own())), None)
        return None if best is None else self.directory / best.name

    def own(self) -> list[RecordEntry]:
        """This run's records that are on disk, oldest first."""
        return [entry for entry in read_index(self.directory) if entry.run == self.run]

    def _is_admitted(self, score: float | None) -> bool:
        # The newest stays whatever its score: reading the index would hold up the training.
        return self.policy.keep_latest or self.policy.admits(
            score, read_index(self.directory), run=self.run
        )

    def _write(self, entry: RecordEntry, arrays: dict[str, Flat], meta: Mapping[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._tidy()
        entries = read_index(self.directory)
        twins = [e for e in entries if (e.run, e.step) == (entry.run, entry.step)]
        if entry.score is None and twins:
            # The same moment, which was validated before: it keeps its rank.
            scored = {name: getattr(twins[-1], name) for name in ("metric", "mode", "score")}
            entry = dataclasses.replace(entry, **scored)
        entry = dataclasses.replace(entry, name=self._free_name(entry))
        self._save_with_orbax(entry, arrays, meta)
        self._list([e for e in entries if e not in twins] + [entry], dropped=twins)

    def _save_with_orbax(
        self, entry: RecordEntry, arrays: dict[str, Flat], meta: Mapping[str, Any]
    ) -> None:
        # Here, in the thread that saves: a quarter of a second that no start has to wait for.
        import orbax.checkpoint as ocp

        values = {
            **meta,
            "format_version": FORMAT_VERSION,
            "entry": entry.to_json(),
            "leaves": {name: described(flat) for name, flat in arrays.items()},
        }
        # One tree for all arrays: each item of Orbax's costs files of its own.
        arguments = ocp.args.Composite(
            meta=ocp.args.JsonSave(values),
            arrays=ocp.args.PyTreeSave(without_empty(arrays)),
        )
        with (
            _saving,
            _quiet_threads(),
            ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
        ):
            checkpointer.save(self.directory / entry.name, args=arguments)

    def _list(self, entries: list[RecordEntry], *, dropped: list[RecordEntry]) -> None:
        """Writes the index, then deletes what the policy does not keep."""
        kept = self.policy.kept(entries, run=self.run)
        dropped = dropped + [e for e in entries if e not in kept]
        # Listed before anything is deleted: a kill in between leaves a record too many,
        # never an entry without its record.
        write_index(self.directory, [e for e in entries if e not in dropped])
        for old in dropped:
            # A record that is half deleted must not look like one.
            trash = self.directory / f"{old.name}{TRASH}"
            (self.directory / old.name).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)

    def _tidy(self) -> None:
        """Deletes what a process that was killed has left half written or half deleted."""
        if self._is_tidy:
            return
        for pattern in (f"*{UNFINISHED}*", f"*{TRASH}"):
            for stray in self.directory.glob(pattern):
                shutil.rmtree(stray, ignore_errors=True)
        self._is_tidy = True

    def _free_name(self, entry: RecordEntry) -> str:
        """A readable name; where it is taken, with the run's id and then a count behind it."""
        name = f"epoch{entry.epoch:04d}-step{entry.step:08d}"
        if entry.score is not None:
            metric = re.sub(r"[^A-Za-z0-9_-]+", "-", entry.metric or "")[:_MOST_OF_METRIC]
            name += f"-{metric}={entry.score:.6g}"
        if (self.directory / name).exists():
            name += f"-{self.run}"
        taken, count = name, 2
        while (self.directory / name).exists():
            name, count = f"{taken}-{count}", count + 1
        return name


def _shortened(error: BaseException) -> str:
    """The first line of an error's text: TensorStore's go on for pages."""
    text = str(error).strip().partition("\n")[0]
    return text if len(text) <= 300 else text[:300] + " ..."
