"""The default logger: one JSON object per line."""

from __future__ import annotations

import copy
import filecmp
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np

from nitro._paths import local_path
from nitro.errors import ConfigError

from ._protocol import FinishStatus

_CARRIERS = ("type", "context", "step", "epoch")
_END_BYTES = 4096


class JSONLinesLogger:
    """Appends one JSON object per line to a file; the lines of one call are written at once.

    Each object has a `type`: metrics, params, tags, other, confusion or finish. A step's
    line is `{"type": "metrics", "context": "train", "step": 1, "epoch": 1, "loss": ...}`.

    Args:
        path: The file; None means `metrics.jsonl` in the run's directory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else local_path(path, name="path")
        self._file: TextIO | None = None

    def bind(self, run_dir: Path) -> Self:
        """This logger with a path; called by the handle."""
        if self.path is not None:
            return self
        bound = copy.copy(self)
        bound.path = run_dir / "metrics.jsonl"
        return bound

    def metrics(
        self, values: Mapping[str, float], *, context: str, step: int, epoch: int, **_more: Any
    ) -> None:
        """Writes one line of scalars.

        Raises:
            ConfigError: A metric has the name of a key that every line carries.
        """
        _refuse_carriers(values, _CARRIERS, what="metric")
        line = {"type": "metrics", "context": context, "step": step, "epoch": epoch, **values}
        self._write(line)

    def metrics_block(
        self,
        columns: Mapping[str, Sequence[float]],
        *,
        context: str,
        first_step: int,
        epoch: int,
        **_more: Any,
    ) -> None:
        """Writes a line of scalars for each of several steps, as `metrics` would.

        Args:
            columns: Finite Python numbers by name, one for each step.
            context: As in `metrics`.
            first_step: The step of the first line.
            epoch: The epoch of all lines.

        Raises:
            ConfigError: A metric has the name of a key that every line carries.
        """
        _refuse_carriers(columns, _CARRIERS, what="metric")
        start = json.dumps({"type": "metrics", "context": context})[:-1] + ', "step": '
        members = [_members(name, column) for name, column in columns.items()]
        self._append(
            "".join(
                f'{start}{step}, "epoch": {epoch}, {", ".join(row)}}}\n'
                for step, row in enumerate(zip(*members, strict=True), first_step)
            )
        )

    def params(self, values: Mapping[str, Any], **_more: Any) -> None:
        """Writes the configuration as one line.

        Raises:
            ConfigError: A field is named `type`, as the key that every line carries.
        """
        _refuse_carriers(values, ("type",), what="field of the experiment")
        self._write({"type": "params", **values})

    def tags(self, values: Mapping[str, str], **_more: Any) -> None:
        """Writes labels as one line.

        Raises:
            ConfigError: A label is named `type`, as the key that every line carries.
        """
        _refuse_carriers(values, ("type",), what="tag")
        self._write({"type": "tags", **values})

    def other(self, name: str, value: Any, **_more: Any) -> None:
        """Writes a named JSON value as one line."""
        self._write({"type": "other", "name": name, "value": value})

    def confusion(self, matrix: Any, *, step: int, epoch: int, **_more: Any) -> None:
        """Writes a matrix as rows."""
        self._write({"type": "confusion", "step": step, "epoch": epoch, "matrix": matrix})

    def finish(self, status: FinishStatus, **_more: Any) -> None:
        """Writes the outcome and closes the file."""
        self._write({"type": "finish", "status": status})
        self.close()

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def run_id(self) -> str | None:
        """None: a file has no id."""
        return None

    def run_url(self) -> str | None:
        """None: a file has no page."""
        return None

    def logger_state(self) -> Any:
        """The file, its length in bytes, to which a resumed run cuts it, and how it ends."""
        if self._file is not None:
            self._file.flush()
        path = self._bound_path()
        size = path.stat().st_size if path.exists() else 0
        return {"bytes": size, "path": str(path.absolute()), "end": _checksum(path, size)}

    def blank_state(self) -> Any:
        """The state of a log without a line: what a run goes on from that starts over."""
        return {"bytes": 0}

    def reattach(self, state: Any) -> None:
        """Cuts the file to the length that a record knew.

        Where it holds something else, as in another directory, it starts with a copy of the
        record's own lines, if they are still where they were or were set aside. What would
        be lost of another run by either is set aside.
        """
        path, size = self._bound_path(), state["bytes"]
        if not _starts_with(path, state):
            elsewhere = [Path(state.get("path", "")), *_asides(path)]
            own = next((one for one in elsewhere if _starts_with(one, state)), None)
            lines = b"" if own is None else own.read_bytes()[:size]
            self.set_aside()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lines)
        elif path.stat().st_size > size:
            if _has_another_start(path, size):
                self.set_aside()
            with path.open("r+b") as file:
                file.truncate(size)

    def set_aside(self) -> None:
        """Copies the file to `metrics.1.jsonl` or the next free number; once for one content.

        Called where lines of another run are about to be cut off.
        """
        path = self._bound_path()
        if not path.exists():
            return
        asides = _asides(path)
        if not any(filecmp.cmp(path, aside, shallow=False) for aside in asides):
            shutil.copy2(path, _aside(path, len(asides) + 1))

    def _bound_path(self) -> Path:
        if self.path is None:
            raise ConfigError(
                "A JSONLinesLogger without a path is used outside a run.",
                fix='give it one: `JSONLinesLogger("log.jsonl")`',
            )
        return self.path

    def _write(self, line: Mapping[str, Any]) -> None:
        self._append(json.dumps(plain(line), allow_nan=False) + "\n")

    def _append(self, lines: str) -> None:
        """Hands whole lines to the operating system, which keeps them though we be killed."""
        if self._file is None:
            path = self._bound_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._file.write(lines)
        self._file.flush()


def _asides(path: Path) -> list[Path]:
    """What was set aside of a file."""
    numbered = (_aside(path, number) for number in itertools.count(1))
    return list(itertools.takewhile(Path.exists, numbered))


def _aside(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}")


def _has_another_start(path: Path, size: int) -> bool:
    """Whether a run began behind the first `size` bytes of a file."""
    with path.open("rb") as file:
        file.seek(size)
        return any(line.startswith(b'{"type": "params"') for line in file)


def _starts_with(path: Path, state: Mapping[str, Any]) -> bool:
    """Whether a file holds at least the lines that a record knew."""
    if not path.is_file() or path.stat().st_size < state["bytes"]:
        return False
    return state.get("end") in (None, _checksum(path, state["bytes"]))


def _checksum(path: Path, size: int) -> str:
    """SHA-256 of the last part of the first `size` bytes of a file."""
    if size == 0:
        return hashlib.sha256().hexdigest()
    with path.open("rb") as file:
        file.seek(max(0, size - _END_BYTES))
        return hashlib.sha256(file.read(size - file.tell())).hexdigest()


def _members(name: str, column: Sequence[float]) -> list[str]:
    """`"name": value` for each value, by one call of the encoder: numbers hold no comma."""
    if not column:
        return []
    key = json.dumps(name)
    numbers = json.dumps(list(column), allow_nan=False)[1:-1].split(", ")
    return [f"{key}: {number}" for number in numbers]


def _refuse_carriers(values: Mapping[str, Any], carriers: Sequence[str], *, what: str) -> None:
    clash = [name for name in carriers if name in values]
    if clash:
        raise ConfigError(
            f"A {what} is named `{clash[0]}`, which every line of the log carries.",
            fix=f"rename it, for example to `{clash[0]}_value`",
        )


def plain(value: Any) -> Any:
    """A value as JSON can hold it: arrays as lists, non-finite floats as null, else text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic) or hasattr(value, "tolist"):
        return plain(np.asarray(value).tolist())
    return str(value)
