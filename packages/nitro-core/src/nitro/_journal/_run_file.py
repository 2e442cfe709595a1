"""The file `run.json`: what a run is and how far it is, readable while it trains."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nitro._paths import local_path
from nitro.errors import CheckpointError, did_you_mean

from ._endings import ending
from ._history import History

RUN_FILE_NAME = "run.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What a run is and how far it is. All values are JSON values.

    Attributes:
        experiment: The class, as `module:Class`.
        file: The source file of the class; None where it has none.
        preset: The preset that the run was built from.
        run_dir: The directory that holds the file, absolute.
        status: "running", "completed", "early_stop", "stopped" or "failed"; a reader may
            also see "interrupted": the process of a running one is gone.
        run: The id of the run, which its checkpoints carry; None in files of before.
        phase: What the run was doing last.
        epoch: Finished epochs.
        step: Finished optimizer steps.
        max_epochs: The horizon.
        loss: The loss of the last step that was read.
        metric: The metric that ranks records.
        mode: Whether "min" or "max" of it is best.
        history: One row per finished epoch.
        config: The fields of the experiment.
        options: The run options.
        binding: The binding report.
        logger: The logger's type, run id and page.
        error: What ended a failed run.
        is_earlier: Whether it was set aside for a later run in its directory.
        started_at: When training started, seconds since 1970.
        updated_at: When this was written.
        pid: The process.
        host: The machine.
    """

    experiment: str
    run_dir: str
    status: str
    max_epochs: int
    started_at: float
    updated_at: float
    pid: int
    host: str
    file: str | None = None
    preset: str | None = None
    run: str | None = None
    phase: str = ""
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    metric: str | None = None
    mode: str = "min"
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    binding: str = ""
    logger: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None
    is_earlier: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The fields and the options that may tell runs apart, by name."""
        options = {n: v for n, v in self.options.items() if n not in ("run_dir", "progress")}
        return {**options, **self.config}

    @property
    def in_words(self) -> str:
        """Its id and where it stands, in a few words."""
        name = "" if self.run is None else f"{self.run}, "
        return f"{name}{self.status} at epoch {self.epoch}/{self.max_epochs}"

    def to_history(self) -> History:
        """The finished epochs."""
        return History(
            self.history, metric=self.metric, mode="max" if self.mode == "max" else "min"
        )


class RunFileWriter:
    """Writes the file of one run again and again; a finished epoch becomes text once."""

    def __init__(self) -> None:
        self._epochs: list[str] = []

    def write(self, run: RunFile) -> None:
        """Replaces the run's file at once, so that a reader never sees half of it.

        Args:
            run: What to write; its history has grown, if anything, since the last time.
        """
        path = Path(run.run_dir) / RUN_FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [one.name for one in dataclasses.fields(run) if one.name != "history"]
        rest = {"format_version": FORMAT_VERSION, **{name: getattr(run, name) for name in names}}
        self._epochs += [
            json.dumps(row, allow_nan=False) for row in run.history[len(self._epochs) :]
        ]
        head = json.dumps(rest, allow_nan=False)[:-1]
        temporary = path.with_suffix(".tmp")
        history = ", ".join(self._epochs)
        temporary.write_text(f'{head}, "history": [{history}]}}\n', encoding="utf-8")
        temporary.replace(path)


def set_run_file_aside(run_dir: Path, *, own: str) -> str | None:
    """Renames the file of an earlier run to `run.1.json` or the next free number.

    Args:
        run_dir: The run's directory.
        own: The run that begins or continues: what was set aside of it is about to be written
            again, and goes.

    Returns:
        The new name; None where there was no file.
    """
    path = run_dir / RUN_FILE_NAME
    if not path.exists():
        return None
    for aside in run_dir.glob("run.[0-9]*.json"):
        if _read(aside).run == own:
            aside.unlink()
    number = next(n for n in itertools.count(1) if not (run_dir / f"run.{n}.json").exists())
    return path.rename(run_dir / f"run.{number}.json").name


def read_run_file(run_dir: str | Path) -> RunFile:
    """Reads the file of a run.

    Args:
        run_dir: The run's directory. Of several runs in one, it is the last one; an earlier
            one has `#<run id>` behind the directory.

    Raises:
        CheckpointError: No run there, a damaged file, or another format version.
    """
    directory, mark, run_id = str(run_dir).rpartition("#")
    if mark and not Path(run_dir).exists():
        return _read_by_id(Path(directory), run_id)
    path = local_path(run_dir, name="run_dir") / RUN_FILE_NAME
    if not path.exists():
        raise _no_run(Path(run_dir))
    return _read(path)


def read_runs(directory: str | Path) -> list[RunFile]:
    """All runs at and below a directory, those that were set aside too, the last one first.

    Raises:
        CheckpointError: A damaged file, or another format version.
    """
    found = [_read(path) for run_dir in find_runs(directory) for path in _files_of(run_dir)]
    return sorted(found, key=lambda run: run.updated_at, reverse=True)


def earlier_runs(run: RunFile) -> list[RunFile]:
    """The other runs of a run's directory, the last one first."""
    others = [one for one in map(_read, _files_of(Path(run.run_dir))) if one.run != run.run]
    return sorted(others, key=lambda one: one.updated_at, reverse=True)


def _files_of(run_dir: Path) -> list[Path]:
    return [run_dir / RUN_FILE_NAME, *sorted(run_dir.glob("run.[0-9]*.json"))]


def _read_by_id(run_dir: Path, run_id: str) -> RunFile:
    there = [_read(path) for path in _files_of(run_dir) if path.exists()]
    for run in there:
        if run.run == run_id:
            return run
    raise CheckpointError(
        f"`{run_dir}` holds no run `{run_id}`.",
        expected=did_you_mean(run_id, [run.run for run in there if run.run]),
        fix=f"`nitro show {run_dir}` names the runs of the directory",
    )


def _read(path: Path) -> RunFile:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("format_version")
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"`{path}` is no description of a run: {type(error).__name__}: {error}.",
            fix="restore or delete the file",
        ) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"`{path}` has format version {version}.",
            expected=f"version {FORMAT_VERSION}, which this Nitro reads",
        )
    content["run_dir"] = str(path.parent.absolute())  # it may have moved since
    content["is_earlier"] = path.name != RUN_FILE_NAME
    try:
        run = RunFile(**content)
    except TypeError as error:
        raise CheckpointError(
            f"`{path}` does not fit its format version: {error}.",
            fix="restore or delete the file",
        ) from error
    run = dataclasses.replace(run, status=ending(run.status))
    is_gone = run.status == "running" and run.host == socket.gethostname() and _is_dead(run.pid)
    return dataclasses.replace(run, status="interrupted") if is_gone else run


def find_runs(directory: str | Path) -> list[Path]:
    """The directories of all runs at or below a directory, sorted."""
    found: list[Path] = []
    directory = local_path(directory, name="directory")
    for root, folders, files in os.walk(directory):
        if RUN_FILE_NAME in files:
            found.append(Path(root))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


def _is_dead(pid: int) -> bool:
    if sys.platform == "win32":
        return False  # signal 0 would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _no_run(run_dir: Path) -> CheckpointError:
    if not run_dir.exists():
        siblings = [p.name for p in find_runs(run_dir.parent)] if run_dir.parent.exists() else []
        return CheckpointError(
            f"There is no run `{run_dir}`.",
            expected=did_you_mean(run_dir.name, siblings) if siblings else "",
            fix="see `nitro runs` for what there is",
        )
    below = [str(path) for path in find_runs(run_dir)]
    return CheckpointError(
        f"`{run_dir}` holds no run.",
        expected="a run's directory, with a `run.json` in it"
        + (f": {did_you_mean('', below)}" if below else ""),
        fix="training writes it, unless `logger` and `checkpointer` are both None",
    )
