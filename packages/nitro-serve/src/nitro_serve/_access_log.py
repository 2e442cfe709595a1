"""The access log: one JSON object a line for each request."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from ._batcher import Timing


class AccessLog:
    """Writes a line for each request, or nothing.

    Keys: `time` (seconds since the epoch), `protocol`, `model`, `version`, `id`, `status`, and
    for an answered request `queue_ms`, `compute_ms` and `rows`, those of its call. What a
    client sent is escaped as JSON escapes it, so no line can be forged.

    Args:
        path: The file to append to; `-` for the standard output; None for no log.
    """

    def __init__(self, path: str | None) -> None:
        self._closing = ExitStack()
        self._file: Any = None
        if path == "-":
            self._file = sys.stdout.buffer
        elif path is not None:
            opened = Path(path).open("ab", buffering=0)  # noqa: SIM115 - closed by `close`
            self._file = self._closing.enter_context(opened)

    def write(
        self,
        *,
        protocol: str,
        model: str,
        version: str,
        status: str,
        request_id: str = "",
        timing: Timing | None = None,
    ) -> None:
        """Writes the line of one request."""
        if self._file is None:
            return
        line: dict[str, object] = {
            "time": round(time.time(), 6),
            "protocol": protocol,
            "model": model,
            "version": version,
            "id": request_id,
            "status": status,
        }
        if timing is not None:
            line["queue_ms"] = round(timing.queue_s * 1e3, 3)
            line["compute_ms"] = round(timing.compute_s * 1e3, 3)
            line["rows"] = timing.rows
        self._file.write(orjson.dumps(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._closing.close()
