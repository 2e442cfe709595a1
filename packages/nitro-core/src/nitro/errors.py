"""Every exception that Nitro raises on purpose."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable
from types import FrameType


class NitroError(Exception):
    """Base of all of Nitro's errors: what was wrong, what was expected, what to do.

    Attributes:
        problem: What was wrong, with the offending name and value.
        expected: What would have been accepted; empty where the problem says it.
        fix: The next thing to do; empty where there is only one.
    """

    def __init__(self, problem: str, *, expected: str = "", fix: str = "") -> None:
        self.problem = problem
        self.expected = expected
        self.fix = fix
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self.expected, self.fix)


def _rebuild(cls: type[NitroError], problem: str, expected: str, fix: str) -> NitroError:
    return cls(problem, expected=expected, fix=fix)


class ConfigError(NitroError, ValueError):
    """An option, a field value or an argument that cannot be used."""


class ExperimentError(NitroError, TypeError):
    """An experiment class that is declared wrongly, or lacks a hook."""


class HostFieldError(NitroError):
    """A traced hook read a field that is host-only.

    Not an `AttributeError`: `getattr` with a default and `hasattr` would hide it.
    """


class HookError(NitroError, TypeError):
    """A hook returned something that Nitro cannot use."""


class DataError(NitroError, ValueError):
    """A split, a batch or a batch field that does not fit."""


class ProgramError(NitroError, TypeError):
    """Arguments that do not fit a compiled program, or code that cannot be compiled."""


class MemoryPlanError(NitroError, MemoryError):
    """The memory plan does not fit the device."""


class DivergenceError(NitroError, ArithmeticError):
    """The loss, or a metric that steers the run, is not finite."""


class CheckpointError(NitroError, ValueError):
    """A record that is missing, foreign, damaged, or does not fit the experiment."""


class ExportError(NitroError, ValueError):
    """An export that would not keep its promise."""


class BackendError(NitroError, LookupError):
    """An export backend that is unknown, broken or not installed."""


class BundleError(NitroError, ValueError):
    """An artifact that is damaged, or a request that does not fit it."""


class MissingPackageError(NitroError, ImportError):
    """A package that this feature needs is not installed."""


class NitroWarning(UserWarning):
    """Something that a run can live with, and its user should know."""


class DriftWarning(NitroWarning):
    """Code or configuration moved under a handle, which goes on as it was built."""


def warn(message: str, category: type[NitroWarning] = NitroWarning) -> None:
    """Warns at the line of the user's that led here, however deep the call is.

    Args:
        message: What can be lived with, and how to change it.
        category: The class of the warning.
    """
    frame, level = inspect.currentframe(), 1
    # A context manager written as a generator is left and entered by a line of contextlib.
    inside = {"nitro", "contextlib", _package(frame.f_back) if frame else ""}
    while frame is not None and frame.f_back is not None and _package(frame) in inside:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(frame: FrameType | None) -> str:
    """The top-level package that a frame's code belongs to."""
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Lists the valid names, then the closest one as a guess where there is one."""
    names = sorted(map(str, valid))
    if not names:
        return "no name, as there is none to choose from"
    listed = ", ".join(f"`{n}`" for n in names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"one of {listed}" + (f" (did you mean `{close[0]}`?)" if close else "")
