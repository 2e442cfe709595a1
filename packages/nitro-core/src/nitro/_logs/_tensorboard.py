"""TensorBoard, through tensorboardX."""

from __future__ import annotations

import copy
import html
import importlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nitro._paths import local_path
from nitro.errors import CheckpointError, ConfigError, MissingPackageError

from ._json_lines import plain
from ._protocol import FinishStatus


class TensorBoardLogger:
    """Writes TensorBoard's event files: scalars as `train/loss`, by optimizer step.

    Parameters go in as text at once, and as hyperparameters with the last metrics of the
    validation when the run ends. A resumed run goes on in the same directory; TensorBoard
    hides the points that were logged after the record.

    Args:
        log_dir: The directory; None means `tensorboard` in the run's directory. Nothing is
            written before the run logs something.

    Raises:
        MissingPackageError: tensorboardX is not installed.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        self._writers: Any = _import_tensorboardx()
        self._events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self.log_dir = None if log_dir is None else local_path(log_dir, name="log_dir")
        self._writer: Any = None
        self._purge_step: int | None = None
        self._files: list[str] = []
        self._step = 0
        self._epoch: int | None = None
        self._params: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def bind(self, run_dir: Path) -> Self:
        """This logger with a directory; called by the handle."""
        if self.log_dir is not None:
            return self
        bound = copy.copy(self)
        bound.log_dir = run_dir / "tensorboard"
        return bound

    @property
    def writer(self) -> Any:
        """The `tensorboardX.SummaryWriter`, for images and all else that it can do."""
        if self._writer is None:
            self._writer = self._open()
        return self._writer

    def metrics(
        self, values: Mapping[str, float], *, context: str, step: int, epoch: int, **_more: Any
    ) -> None:
        """Writes scalars as `context/name`, and `epoch` where it changes."""
        self._write_scalars({name: [value] for name, value in values.items()}, context, step, epoch)

    def metrics_block(
        self,
        columns: Mapping[str, Sequence[float]],
        *,
        context: str,
        first_step: int,
        epoch: int,
        **_more: Any,
    ) -> None:
        """Writes the scalars of several steps, as `metrics` would.

        Args:
            columns: Numbers by name, one for each step.
            context: As in `metrics`.
            first_step: The step of the first row.
            epoch: The epoch of all rows.
        """
        self._write_scalars(columns, context, first_step, epoch)

    def params(self, values: Mapping[str, Any], **_more: Any) -> None:
        """Writes the configuration as a table."""
        self._params = dict(values)
        rows = (f"| {name} | {_one_line(value)} |" for name, value in values.items())
        self.writer.add_text(
            "params", "\n".join(["| name | value |", "|---|---|", *rows]), self._step
        )

    def tags(self, values: Mapping[str, str], **_more: Any) -> None:
        """Writes labels as text."""
        for name, value in values.items():
            self.writer.add_text(f"tags/{name}", str(value), self._step)

    def other(self, name: str, value: Any, **_more: Any) -> None:
        """Writes a named value as preformatted text."""
        text = value if isinstance(value, str) else json.dumps(plain(value), indent=1)
        self.writer.add_text(f"other/{name}", f"<pre>{html.escape(text)}</pre>", self._step)

    def figure(
        self, name: str, figure: Any, *, context: str, step: int, epoch: int, **_more: Any
    ) -> bool:
        """Writes a matplotlib figure as the image `context/name`."""
        del epoch  # the step says when
        self.writer.add_figure(f"{context}/{name}", figure, step, close=False)
        return True

    def confusion(self, matrix: Any, *, step: int, epoch: int, **_more: Any) -> None:
        """Writes a matrix as a table."""
        del epoch  # the step says when
        rows = plain(matrix)
        lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
        self.writer.add_text("confusion", "\n".join(lines), step)

    def finish(self, status: FinishStatus, **_more: Any) -> None:
        """Writes hyperparameters with the last metrics, and the outcome; closes the file."""
        self.writer.add_text("status", status, self._step)
        hparams = {name: _hparam(value) for name, value in self._params.items()}
        summaries = importlib.import_module("tensorboardX.summary")
        # Into this run's own file: `add_hparams` would make a directory beside it.
        for summary in summaries.hparams(hparams, self._last):
            self.writer.file_writer.add_summary(summary)
        self._writer.close()
        self._writer = None

    def run_id(self) -> str | None:
        """None: a directory has no id."""
        return None

    def run_url(self) -> str | None:
        """None: `tensorboard --logdir` shows it."""
        return None

    def logger_state(self) -> Any:
        """The event files of the run, and the step up to which they count."""
        if self._writer is not None:
            self._writer.flush()
        return {"files": list(self._files), "step": self._step}

    def blank_state(self) -> Any:
        """A state without a step: what a run goes on from that starts over."""
        return {"files": [], "step": -1}

    def reattach(self, state: Any) -> None:
        """Goes on in the same directory, and has TensorBoard hide what came after the record.

        Raises:
            CheckpointError: The directory does not hold the files of the run.
        """
        directory = self._directory()
        missing = [name for name in state["files"] if not (directory / name).exists()]
        if missing:
            raise CheckpointError(
                f"The run that is resumed logged to another directory: `{directory}` lacks "
                f"`{missing[0]}`.",
                expected="its own TensorBoard directory, where the curves go on",
                fix="pass `TensorBoardLogger(<that directory>)`, or take the weights only with "
                "`checkpoint=`",
            )
        self._files = list(state["files"])
        self._step = max(state["step"], 0)
        self._purge_step = state["step"] + 1

    def _write_scalars(
        self, columns: Mapping[str, Sequence[float]], context: str, first_step: int, epoch: int
    ) -> None:
        names = [f"{context}/{name}" for name in columns]
        events = [self._new_event(name) for name in names]
        add_event = self.writer.file_writer.add_event
        step = first_step
        for step, row in enumerate(zip(*columns.values(), strict=True), first_step):
            for event, value in zip(events, row, strict=True):
                event.summary.value[0].simple_value = float(value)
                add_event(event, step)
            if epoch != self._epoch:
                self.writer.add_scalar("epoch", epoch, step)
                self._epoch = epoch
        self._step = max(self._step, step)
        if context != "train":
            self._last |= {
                name: column[-1] for name, column in zip(names, columns.values(), strict=True)
            }
            self.writer.flush()

    def _new_event(self, name: str) -> Any:
        """An event of one scalar; its bytes are made when it is added, so it may be filled again."""
        summaries = importlib.import_module("tensorboardX.summary")
        event = self._events.Event(summary=summaries.scalar(name, 0.0))
        # tensorboardX writes `_` for many characters, so that `P@1` and `P:1` would be one curve.
        event.summary.value[0].tag = name
        return event

    def _open(self) -> Any:
        directory = self._directory()
        directory.mkdir(parents=True, exist_ok=True)
        before = {path.name for path in directory.iterdir()}
        writer = self._writers.SummaryWriter(
            str(directory),
            # Its own names count in seconds: a file of the same second would be overwritten. Files
            # are read in the order of their names, so the number comes first.
            filename_suffix=f".{len(before):04}.{secrets.token_hex(4)}",
        )
        events = writer.file_writer.event_writer
        # Else a thread gets them through a pipe, ten at a time, and `flush` does not wait for it:
        # that is slow, and a process that is killed loses what its record tells of.
        events.add_event = events._ev_writer.write_event
        if self._purge_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            writer.file_writer.add_event(self._events.Event(session_log=start), self._purge_step)
            self._purge_step = None
        self._files += sorted(p.name for p in directory.iterdir() if p.name not in before)
        return writer

    def _directory(self) -> Path:
        if self.log_dir is None:
            raise ConfigError(
                "A TensorBoardLogger without a directory is used outside a run.",
                fix='give it one: `TensorBoardLogger("tensorboard")`',
            )
        return self.log_dir


def _import_tensorboardx() -> Any:
    try:
        return importlib.import_module("tensorboardX")
    except ImportError as error:
        raise MissingPackageError(
            "TensorBoardLogger needs tensorboardX, which is not installed.",
            fix='pip install "nitro-core[tensorboard]"',
        ) from error


def _one_line(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _hparam(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
