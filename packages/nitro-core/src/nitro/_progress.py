"""Shows how far a run is: a bar, one line of a notebook, or plain lines for a log."""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nitro.errors import ConfigError, warn

REPORTER_VERBS = ("begin", "advance", "phase", "note", "epoch_end", "end")

_REDRAW_S = 0.1
_PLAIN_LINE_S = 1.0
_SPEED_WINDOW_S = 10.0
_BAR_WIDTH = 24


class Reporter(Protocol):
    """Shows how far a run is; pass your own as `Nitro(..., progress=reporter)`.

    All verbs are called in the thread that trains and must return quickly. One that
    raises ends the reporter for the run, with a warning. Extra keywords may come with later
    versions.
    """

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int, **more: Any) -> None:
        """Called once, before anything compiles.

        Args:
            total_steps: Optimizer steps of the whole run.
            done_steps: Those that a resumed run has behind it.
            max_epochs: Epochs of the whole run.
            more: What later versions add.
        """
        ...

    def advance(
        self, *, step: int, epoch: int, loss: float, data_wait_frac: float, **more: Any
    ) -> None:
        """Called after each call of the step program, with its last step.

        Args:
            step: Finished optimizer steps.
            epoch: The epoch under way, from 1.
            loss: The loss of the step.
            data_wait_frac: The share of this epoch spent waiting for data, 0 to 1.
            more: What later versions add.
        """
        ...

    def phase(self, name: str, **more: Any) -> None:
        """Called when the run turns to something else: "compiling", "training", ..."""
        ...

    def note(self, text: str, **more: Any) -> None:
        """Called with a user's words; they stand until the next phase."""
        ...

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float], **more: Any) -> None:
        """Called after each epoch, with the mean train loss and what was validated."""
        ...

    def end(self, **more: Any) -> None:
        """Called once, also after an error."""
        ...


@dataclass(kw_only=True)
class Advance:
    """How far a run is, and how fast: what every built-in reporter shows.

    Attributes:
        clock: Gives seconds.
    """

    clock: Callable[[], float] = time.monotonic
    total_steps: int = 0
    max_epochs: int = 0
    step: int = 0
    epoch: int = 0
    loss: float | None = None
    data_wait_frac: float = 0.0
    phase: str = ""
    note: str = ""
    _started: float = 0.0
    _first_step: int = 0
    _idle_s: float = 0.0
    _idle_since: float | None = None
    _samples: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int) -> None:
        """Starts at `done_steps`."""
        self.total_steps, self.max_epochs = total_steps, max_epochs
        self.step = self._first_step = done_steps
        self.epoch = min(done_steps * max_epochs // max(total_steps, 1) + 1, max_epochs)

    def advance(self, *, step: int, epoch: int, loss: float, data_wait_frac: float) -> None:
        """Moves on."""
        self.step, self.epoch, self.loss = step, epoch, loss
        self.data_wait_frac = data_wait_frac
        now = self._stepping_s()
        self._samples.append((now, step))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SPEED_WINDOW_S:
            self._samples.popleft()

    def enter(self, phase: str) -> None:
        """Turns to a phase; the clock of the steps runs in training only."""
        now = self.clock()
        if self.phase == "training":
            self._idle_since = now
        elif phase == "training":
            if self._started == 0.0:
                # From here on: what compiled before says nothing of the time that is left.
                self._started = now
                self._samples.append((self._stepping_s(), self.step))
            elif self._idle_since is not None:
                self._idle_s += now - self._idle_since
                self._idle_since = None
        self.phase, self.note = phase, ""

    @property
    def steps_per_s(self) -> float | None:
        """The speed of the last seconds of stepping; None before there is one."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, validation and records included; None if unknown."""
        done = self.step - self._first_step
        if done <= 0 or self._started == 0.0:
            return None
        return (self.clock() - self._started) / done * (self.total_steps - self.step)

    def _stepping_s(self) -> float:
        return self.clock() - self._idle_s

    def parts(self) -> Iterator[str]:
        """The facts in the order of their worth; a narrow line drops the last ones."""
        yield f"epoch {self.epoch}/{self.max_epochs}"
        yield f"{self.step}/{self.total_steps}"
        if self.phase not in ("training", ""):
            yield self.phase
        if self.note:
            yield self.note
        if self.loss is not None:
            yield f"loss {self.loss:.4g}"
        if (left_s := self.left_s) is not None:
            yield f"{_duration(left_s)} left"
        if (speed := self.steps_per_s) is not None:
            yield f"{speed:.3g} steps/s" if speed < 1000 else f"{speed:,.0f} steps/s"
        if self.loss is not None:
            yield f"data wait {self.data_wait_frac:.0%}"


class BarReporter:
    """A bar on a terminal, redrawn in place, with a line above it for each epoch.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at = Advance()
        self._spinner = Spinner("dots")
        # Only a stream that is the terminal itself is led above the bar: what is sent to a
        # file or a pipe stays there.
        self._live = Live(
            self,
            console=console,
            refresh_per_second=1 / _REDRAW_S,
            redirect_stdout=_is_tty(sys.stdout),
            redirect_stderr=_is_tty(sys.stderr),
        )

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int, **_more: Any) -> None:
        """Draws the bar."""
        self._at.begin(total_steps=total_steps, done_steps=done_steps, max_epochs=max_epochs)
        self._live.start()

    def advance(
        self, *, step: int, epoch: int, loss: float, data_wait_frac: float, **_more: Any
    ) -> None:
        """Moves the bar."""
        self._at.advance(step=step, epoch=epoch, loss=loss, data_wait_frac=data_wait_frac)

    def phase(self, name: str, **_more: Any) -> None:
        """Names the phase beside the bar."""
        self._at.enter(name)

    def note(self, text: str, **_more: Any) -> None:
        """Puts the words beside the phase."""
        self._at.note = text

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float], **_more: Any) -> None:
        """Prints the epoch's metrics above the bar."""
        line = Text(_epoch_line(self._at, epoch, metrics), no_wrap=True, overflow="ellipsis")
        self._console.print(line, highlight=False)

    def end(self, **_more: Any) -> None:
        """Leaves the bar as it stands."""
        if self._live.is_started:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The one line, as wide as the terminal allows."""
        left = options.max_width - _BAR_WIDTH - 4
        shown: list[str] = []
        for part in self._at.parts():
            left -= len(part) + 2
            if left < 0 and shown:
                break
            shown.append(part)
        row = Table.grid(padding=(0, 1))
        is_busy = self._at.phase not in ("training", "done", "failed", "")
        bar = ProgressBar(self._at.total_steps or None, self._at.step, width=_BAR_WIDTH)
        text = Text("  ".join(shown), no_wrap=True, overflow="ellipsis")
        row.add_row(self._spinner if is_busy else " ", bar, text)
        yield row


class NotebookReporter:
    """One line of a notebook, updated in place; no widgets, no control characters.

    Args:
        display: `IPython.display.display`.
        as_html: Makes what it can show: `IPython.display.HTML`.
    """

    def __init__(self, display: Callable[..., Any], as_html: Callable[[str], Any]) -> None:
        self._at = Advance()
        self._display, self._html = display, as_html
        self._shown: Any = None
        self._last_s = -1.0

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int, **_more: Any) -> None:
        """Shows the line."""
        self._at.begin(total_steps=total_steps, done_steps=done_steps, max_epochs=max_epochs)
        self._shown = self._display(self._line(), display_id=True)

    def advance(
        self, *, step: int, epoch: int, loss: float, data_wait_frac: float, **_more: Any
    ) -> None:
        """Updates the line, at most ten times a second."""
        self._at.advance(step=step, epoch=epoch, loss=loss, data_wait_frac=data_wait_frac)
        self._update()

    def phase(self, name: str, **_more: Any) -> None:
        """Names the phase; a lasting one shows at once."""
        self._at.enter(name)
        self._update(now=name in ("compiling", "failed", "done"))

    def note(self, text: str, **_more: Any) -> None:
        """Puts the words beside the phase."""
        self._at.note = text
        self._update()

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float], **_more: Any) -> None:
        """Updates the line: the history shows what the epochs were like."""
        del epoch, metrics
        self._update()

    def end(self, **_more: Any) -> None:
        """Leaves the line as it stands."""
        self._update(now=True)
        self._shown = None

    def _update(self, *, now: bool = False) -> None:
        at_s = self._at.clock()
        if self._shown is not None and (now or at_s - self._last_s >= _REDRAW_S):
            self._last_s = at_s
            self._shown.update(self._line())

    def _line(self) -> Any:
        text = html.escape("  ".join(self._at.parts()))
        share = f'max="{max(self._at.total_steps, 1)}" value="{self._at.step}"'
        return self._html(f"<progress {share}></progress> <code>{text}</code>")


class LineReporter:
    """Plain lines for a log or a pipe: one per epoch, at most one a second.

    The first and the last epoch always have theirs.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._at = Advance()
        self._last_s: float | None = None

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int, **_more: Any) -> None:
        """Says nothing yet."""
        self._at.begin(total_steps=total_steps, done_steps=done_steps, max_epochs=max_epochs)

    def advance(
        self, *, step: int, epoch: int, loss: float, data_wait_frac: float, **_more: Any
    ) -> None:
        """Counts."""
        self._at.advance(step=step, epoch=epoch, loss=loss, data_wait_frac=data_wait_frac)

    def phase(self, name: str, **_more: Any) -> None:
        """Counts."""
        self._at.enter(name)

    def note(self, text: str, **_more: Any) -> None:
        """Notes come and go: a log does without them."""

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float], **_more: Any) -> None:
        """Writes the epoch's line, unless the last one is too fresh."""
        now = self._at.clock()
        is_due = self._last_s is None or now - self._last_s >= _PLAIN_LINE_S
        if is_due or epoch == self._at.max_epochs:
            self._last_s = now
            self._stream.write(_epoch_line(self._at, epoch, metrics) + "\n")
            self._stream.flush()

    def end(self, **_more: Any) -> None:
        """Says nothing."""


class SilentReporter:
    """Shows nothing: what `progress=False` means."""

    def begin(self, **_more: Any) -> None:
        """Does nothing."""

    def advance(self, **_more: Any) -> None:
        """Does nothing."""

    def phase(self, name: str, **_more: Any) -> None:
        """Does nothing."""

    def note(self, text: str, **_more: Any) -> None:
        """Does nothing."""

    def epoch_end(self, **_more: Any) -> None:
        """Does nothing."""

    def end(self, **_more: Any) -> None:
        """Does nothing."""


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


def make_reporter(*, progress: Any) -> Reporter:
    """The reporter for the option `progress`.

    None shows a bar on a terminal, one updating line in a notebook, and plain lines
    elsewhere and where `CI` is set. True draws the bar under `CI`, too. False shows nothing.

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
    is_plain = os.environ.get("TERM") == "dumb" or (bool(os.environ.get("CI")) and not is_wanted)
    # Asked of the stream itself: rich takes a pipe for a terminal where FORCE_COLOR is set.
    if _is_tty(sys.stderr) and not is_plain:
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


def _end_quietly(reporter: Reporter) -> None:
    try:
        reporter.end()
    # It raised before; a terminal should get its cursor back all the same.
    except Exception:  # noqa: BLE001
        return


def _is_tty(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def _epoch_line(at: Advance, epoch: int, metrics: Mapping[str, float]) -> str:
    shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    speed = f"  {at.steps_per_s:.3g} steps/s" if at.steps_per_s else ""
    return f"epoch {epoch}/{at.max_epochs}  step {at.step}  {shown}{speed}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
