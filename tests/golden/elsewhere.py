"""Runs a writer of golden files away from this checkout, whose paths they would name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

NEUTRAL = Path("/tmp/nitro-golden")


def write_elsewhere(script: Path, *, made: str, argument: str, target: Path) -> None:
    """Runs `write(Path(argument))` of a script, and keeps the folder `made`, once.

    Args:
        script: The writer's own file.
        made: The folder that it makes.
        argument: What its `write` gets.
        target: Where the folder goes; it is never replaced.
    """
    if target.exists():
        sys.exit(f"{target} is there already; it must stay as it is")
    NEUTRAL.mkdir()
    shutil.copy(script, NEUTRAL)
    code = f"import {script.stem} as w; w.write(w.Path({argument!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=NEUTRAL, check=True)
    shutil.move(NEUTRAL / made, target)
    shutil.rmtree(NEUTRAL)
