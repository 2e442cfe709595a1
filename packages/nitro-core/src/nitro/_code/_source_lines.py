"""Where in the user's code an equation was traced."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._origin import is_library_file

_NITRO = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class SourceLine:
    """One line of user code; its text is `features.py:12 in Digits.forward`."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        function = self.function.rpartition("<locals>.")[2]
        return f"{Path(self.file).name}:{self.number} in {function}"


def user_lines(*equations: Any) -> Iterator[SourceLine]:
    """The user's lines that led to an equation, innermost first.

    Args:
        equations: The equation, then those that it is inside of: its own traceback
            reaches only as far as the innermost call.
    """
    for equation in equations:
        stack = equation.source_info.traceback
        for frame in () if stack is None else stack.frames:
            if frame.file_name.startswith(_NITRO):
                break  # beyond it lies the call of `train`
            if not is_library_file(frame.file_name):
                yield SourceLine(frame.file_name, frame.line_num, frame.function_name)


def _is_library(file: str) -> bool:
    return file.startswith(_NITRO) or is_library_file(file)


def raised_at(error: BaseException) -> SourceLine | None:
    """The innermost user's line that an exception passed through."""
    lines = [
        SourceLine(frame.f_code.co_filename, number, frame.f_code.co_qualname)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not _is_library(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else None
