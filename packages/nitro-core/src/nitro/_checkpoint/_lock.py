"""One process at a time writes into a run's directory."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from nitro.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no `flock`; there the lock is not kept
    fcntl = None

LOCK_NAME = "nitro.lock"


class DirectoryLock:
    """A lock on a directory, which the system drops when the process ends, however it ends.

    The file in it says who holds it. It is held by this process's open file alone: a file
    that was left behind, or copied with its directory, locks nothing.

    Args:
        directory: What to lock; made where it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._file: int | None = None

    def acquire(self) -> None:
        """Takes the lock; nothing where it is held already.

        Raises:
            CheckpointError: Another run holds it, or nothing can be written there.
        """
        if self._file is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Again, where the holder before deleted the file after it was opened.
            while self._file is None:
                self._file = self._opened()
            os.ftruncate(self._file, 0)
            os.write(self._file, json.dumps(_me()).encode())
        except OSError as error:
            self.release()
            raise CheckpointError(
                f"The run's directory `{self._path.parent}` cannot be written: {error.strerror}.",
                expected="a directory that log and records can be written to",
                fix="free the disk or change the permissions, or pass another `run_dir=`",
            ) from error

    def release(self) -> None:
        """Gives the lock up; nothing where it is not held."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _opened(self) -> int | None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.exists() and os.path.samestat(os.fstat(file), self._path.stat()):
                return file
        except BlockingIOError as error:
            holder = os.read(file, 4096).decode()
            os.close(file)
            raise self._is_held(holder) from error
        os.close(file)
        return None

    def _is_held(self, holder: str) -> CheckpointError:
        try:
            values = json.loads(holder)
            who = f"process {values['pid']} on {values['host']}"
        except (ValueError, KeyError, TypeError):
            who = "another process"
        return CheckpointError(
            f"The run's directory `{self._path.parent}` is in use: {who} trains into it.",
            expected="one run at a time in a directory",
            fix="wait for it or stop it, or pass another `run_dir=`",
        )


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}
