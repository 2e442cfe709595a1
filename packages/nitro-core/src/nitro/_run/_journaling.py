"""Keeps `run.json` up to date while a run trains."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nitro._experiment import locate
from nitro._journal import RUN_FILE_NAME, RunFile, RunFileWriter, read_run_file
from nitro.errors import warn

from ._binding import binding_report
from ._setup import Setup

if TYPE_CHECKING:
    from ._session import Session

_EVERY_S = 1.0


class RunJournal:
    """Writes the file of a run: when it begins and ends, and once a second in between."""

    def __init__(self) -> None:
        self._started_at = 0.0
        self._written_s = 0.0
        self._file = RunFileWriter()
        self._history: list[dict[str, Any]] = []
        self._fixed: RunFile | None = None
        self._fixed_memory: Any = None
        self._told_unwritable = False

    def was_interrupted(self, session: Session) -> bool:
        """Whether the file in the run's directory tells of a process that died in training."""
        run_dir = session.setup.options.run_dir
        return (run_dir / RUN_FILE_NAME).exists() and (
            read_run_file(run_dir).status == "interrupted"
        )

    def earlier_run(self, session: Session) -> RunFile | None:
        """The run whose file is in the directory, if it is another one than this."""
        run_dir, continues = session.setup.options.run_dir, session.setup.source.run is not None
        if not (run_dir / RUN_FILE_NAME).exists():
            return None
        run = read_run_file(run_dir)
        is_own = run.run == session.run_id or (run.run is None and continues)
        return None if is_own else run

    def begin(self, session: Session) -> None:
        """Writes the file as training begins."""
        self._started_at = time.time()
        self._file, self._history, self._fixed = RunFileWriter(), [], None
        self._try_to_write(session, "running")

    def update(self, session: Session) -> None:
        """Writes the file again, unless it is less than a second old."""
        if time.monotonic() - self._written_s >= _EVERY_S:
            self._try_to_write(session, "running")

    def end(self, session: Session, error: BaseException | None = None) -> None:
        """Writes the file as training ends, with the Device fields as they are then."""
        self._fixed = None
        status = "failed" if error is not None else (session.stop_reason or "completed")
        self._try_to_write(session, status, error)

    def settle(self, session: Session) -> None:
        """Has the file of a run that was over say so, where its horizon has moved since."""
        run_dir = session.setup.options.run_dir
        if not (run_dir / RUN_FILE_NAME).exists():
            return
        run, max_epochs = read_run_file(run_dir), session.setup.options.max_epochs
        status = session.stop_reason or "completed"
        if run.status not in ("running", "failed") and (run.status, run.max_epochs) != (
            status,
            max_epochs,
        ):
            RunFileWriter().write(dataclasses.replace(run, status=status, max_epochs=max_epochs))

    def _try_to_write(
        self, session: Session, status: str, error: BaseException | None = None
    ) -> None:
        """Writes the file; a disk that is full is told once, and stops no training by this."""
        try:
            self._write(session, status, error)
        except OSError as failure:
            self._written_s = time.monotonic()
            if not self._told_unwritable:
                self._told_unwritable = True
                warn(
                    f"`run.json` in `{session.setup.options.run_dir}` cannot be written: "
                    f"{failure.strerror}. Training goes on."
                )

    def _write(self, session: Session, status: str, error: BaseException | None = None) -> None:
        logger = session.setup.logger
        # The memory plan is part of the binding report, and is made after training has begun.
        if self._fixed is None or session.memory is not self._fixed_memory:
            self._fixed, self._fixed_memory = self._describe(session), session.memory
        self._history += session.history.scalar_rows(len(self._history))
        self._file.write(
            dataclasses.replace(
                self._fixed,
                status=status,
                phase=session.phase.value,
                epoch=session.epoch,
                step=session.step,
                loss=_finite(session.last_loss),
                history=self._history,
                logger={
                    "type": type(logger).__name__,
                    "run_id": logger.run_id(),
                    "run_url": logger.run_url(),
                },
                error=None if error is None else f"{type(error).__name__}: {error}",
                updated_at=time.time(),
            )
        )
        self._written_s = time.monotonic()

    def _describe(self, session: Session) -> RunFile:
        """What stays as it is while the run trains."""
        setup = session.setup
        return RunFile(
            experiment=experiment_name(type(setup.experiment)),
            file=source_file(type(setup.experiment)),
            preset=getattr(setup, "preset", None),
            run=session.run_id,
            run_dir=str(setup.options.run_dir.absolute()),
            status="running",
            max_epochs=setup.options.max_epochs,
            metric=session.history.metric,
            mode=session.history.mode,
            config={**session.config(), **session.device_config()},
            options=session.run_options(),
            binding=str(binding_report(session)),
            started_at=self._started_at,
            updated_at=self._started_at,
            pid=os.getpid(),
            host=socket.gethostname(),
        )


class SilentJournal(RunJournal):
    """Writes nothing: for a run that leaves neither a log nor records."""

    def earlier_run(self, session: Session) -> RunFile | None:
        """None: what is in the directory stays as it is."""

    def settle(self, session: Session) -> None:
        """Writes nothing."""

    def _write(self, session: Session, status: str, error: BaseException | None = None) -> None:
        """Writes nothing."""


def experiment_name(experiment: type) -> str:
    """A class as `module:Class`; a script's module by its file's name, not `__main__`."""
    module = experiment.__module__
    file = source_file(experiment)
    if module == "__main__" and file is not None:
        spec: Any = getattr(sys.modules["__main__"], "__spec__", None)
        module = Path(file).stem if spec is None else spec.name
    return f"{module}:{experiment.__qualname__}"


def source_file(experiment: type) -> str | None:
    """The file that a class was written in, absolute; None for one of a prompt or notebook."""
    path = Path(locate(experiment).rpartition(":")[0] or ".")
    return str(path.absolute()) if path.is_file() else None


def make_journal(setup: Setup) -> RunJournal:
    """The journal of a run."""
    leaves_a_trace = setup.checkpointer is not None or not setup.logs_nothing
    return RunJournal() if leaves_a_trace else SilentJournal()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
