"""A folder beside the target that is swapped in whole, or never seen."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

# Reads until its parent closes the pipe, by leaving the block or by dying in any way.
_JANITOR = """
import shutil, sys
sys.stdin.buffer.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

_SUFFIX = ".partial"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(target: Path) -> Generator[Path]:
    """Yields the path of a folder to make and fill; it is gone when the block ends.

    It lies on the target's file system, under the target's name, and one level deeper: a
    server that watches the parent takes no unfinished folder for an artifact. A janitor
    process removes it even where this process is killed. Where both are killed, as with
    a whole container, the next call for the same target removes it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    outer, lock = _make_locked(target)
    janitor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JANITOR, str(outer)],
        stdin=subprocess.PIPE,
        # Out of reach of the signals that end this process and its group.
        start_new_session=True,
    )
    try:
        yield outer / target.name
    finally:
        janitor.communicate()
        _unlock(lock)


def swap_in(staging: Path, target: Path) -> None:
    """Gives a finished folder its name; an older one under that name goes at the same moment."""
    if not target.exists():
        staging.rename(target)
    elif not _exchange(staging, target):
        # Where the system cannot swap two names, there is a moment without either.
        before = staging.parent / f"{target.name}.before"
        target.rename(before)
        try:
            staging.rename(target)
        except BaseException:
            before.rename(target)
            raise


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step, where Linux and the file system can."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    rename = getattr(library, "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(a), os.fsencode(b)
    return rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _make_locked(target: Path) -> tuple[Path, int | None]:
    """A folder of this process alone, locked for as long as the process lives."""
    while True:
        made = tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent)
        # Before it is locked, another process may take it for abandoned.
        try:
            lock = _lock(Path(made))
        except (BlockingIOError, FileNotFoundError):
            continue
        if Path(made).exists():
            return Path(made), lock
        _unlock(lock)


def _remove_abandoned(target: Path) -> None:
    """Removes the folders for this target whose process is gone: nobody holds their lock."""
    # What `mkdtemp` puts in the middle has no dot, which the rest of a longer name would have.
    name = re.compile(rf"\.{re.escape(target.name)}\.[^.]+{re.escape(_SUFFIX)}")
    for path in list(target.parent.iterdir()):
        if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = _lock(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            _unlock(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder for this process; None where the system or the file system cannot.

    Raises:
        BlockingIOError: Another process holds the lock.
        FileNotFoundError: The folder is gone.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(opened)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return opened


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
