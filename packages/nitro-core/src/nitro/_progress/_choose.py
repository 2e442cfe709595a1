"""Chooses the reporter that fits where the output goes, and keeps it from ending a run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from nitro.errors import ConfigError, warn

from ._protocol import REPORTER_VERBS, Reporter
from ._reporters import BarReporter, LineReporter, NotebookReporter, SilentReporter, is_tty


def make_reporter(*, progress: Any) -> Reporter:
    """The reporter for the option `progress`.

    None shows a bar on a terminal, one updating line in a notebook, and plain lines
    elsewhere and where `CI` is set. True draws the bar under `CI`, too. False shows nothing,
    nor does a process without a stderr.

    Raises:
        ConfigError: Another object lacks verbs; lists all of them.
    """
    if progress is False:
        return SilentReporter()
    if progress is not None and progress is not True:
        return GuardedReporter(_checked_reporter(progress))
    return GuardedReporter(_fitting_reporter(is_wanted=progress is True))


def _checked_reporter(reporter: Any) -> Reporter:
    if isinstance(reporter, type):
        raise ConfigError(
            f"`progress` is the class `{reporter.__name__}`.",
            expected=f"None, True, False, or an object with {', '.join(REPORTER_VERBS)}",
            fix=f"make one: `progress={reporter.__name__}()`",
        )
    missing = [verb for verb in REPORTER_VERBS if not callable(getattr(reporter, verb, None))]
    if missing:
        raise ConfigError(
            f"`progress` is a {type(reporter).__name__}, which lacks {', '.join(missing)}.",
            expected=f"None, True, False, or an object with {', '.join(REPORTER_VERBS)}",
        )
    return reporter


def _fitting_reporter(*, is_wanted: bool) -> Reporter:
    notebook = _notebook_display()
    if notebook is not None:
        return NotebookReporter(*notebook)
    if sys.stderr is None:
        return SilentReporter()  # a process of `pythonw`, or a daemon
    is_plain = os.environ.get("TERM") == "dumb" or (bool(os.environ.get("CI")) and not is_wanted)
    # Asked of the stream itself: rich takes a pipe for a terminal where FORCE_COLOR is set.
    if is_tty(sys.stderr) and not is_plain:
        return BarReporter(Console(stderr=True, force_jupyter=False))
    return LineReporter(sys.stderr)


def _notebook_display() -> tuple[Callable[..., Any], Callable[[str], Any]] | None:
    """How to show HTML, if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    shown = importlib.import_module("IPython.display")
    return shown.display, shown.HTML


class GuardedReporter:
    """Passes everything on to a reporter, until it raises: then it is off, with a warning.

    Args:
        reporter: The reporter.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter: Reporter | None = reporter

    def begin(self, **facts: Any) -> None:
        """See `Reporter.begin`."""
        self._call("begin", **facts)

    def advance(self, **facts: Any) -> None:
        """See `Reporter.advance`."""
        self._call("advance", **facts)

    def phase(self, name: str, **facts: Any) -> None:
        """See `Reporter.phase`."""
        self._call("phase", name, **facts)

    def note(self, text: str, **facts: Any) -> None:
        """See `Reporter.note`."""
        self._call("note", text, **facts)

    def epoch_end(self, **facts: Any) -> None:
        """See `Reporter.epoch_end`."""
        self._call("epoch_end", **facts)

    def end(self, **facts: Any) -> None:
        """See `Reporter.end`."""
        self._call("end", **facts)

    def _call(self, verb: str, *values: Any, **facts: Any) -> None:
        reporter = self._reporter
        if reporter is None:
            return
        try:
            getattr(reporter, verb)(*values, **facts)
        # Whatever a reporter does, the run goes on.
        except Exception as error:  # noqa: BLE001
            self._reporter = None
            _end_quietly(reporter)
            warn(
                f"The progress reporter {type(reporter).__name__} raised {type(error).__name__} in "
                f"`{verb}`: {error}. It is switched off; the run goes on."
            )


def _end_quietly(reporter: Reporter) -> None:
    try:
        reporter.end()
    # It raised before; a terminal should get its cursor back all the same.
    except Exception:  # noqa: BLE001
        return
