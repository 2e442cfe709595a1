"""A folder beside the target that is swapped in whole, or never seen."""

from __future__ import annotations

import ctypes
import os
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

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(target: Path) -> Generator[Path]:
    """Yields the path of a folder to make and fill; it is gone when the block ends.

    It lies on the target's file system, under the target's name, and one level deeper: a
    server that watches the parent takes no unfinished folder for an artifact. A janitor
    process removes it even where this process is killed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    outer = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
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
