"""The built-in reporters: a bar, one line of a notebook, plain lines, and none."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ._advance import Advance, epoch_line, metrics_line

_REDRAW_S = 0.1
_PLAIN_LINE_S = 1.0
_BAR_WIDTH = 24


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
            redirect_stdout=is_tty(sys.stdout),
            redirect_stderr=is_tty(sys.stderr),
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
        self._at.finish_epoch(epoch)
        line = Text(epoch_line(self._at, epoch, metrics), no_wrap=True, overflow="ellipsis")
        self._console.print(line, highlight=False)

    def end(self, *, reason: str | None = None, **_more: Any) -> None:
        """Leaves the bar as it stands, with how the run ended in the place of the time left."""
        self._at.end(reason or "")
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
        self._metrics: dict[str, float] = {}
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
        """Shows what was validated last."""
        self._at.finish_epoch(epoch)
        self._metrics = {name: value for name, value in metrics.items() if name != "loss"}
        self._update()

    def end(self, *, reason: str | None = None, **_more: Any) -> None:
        """Leaves the line as it stands, with how the run ended."""
        self._at.end(reason or "")
        self._update(now=True)
        self._shown = None

    def _update(self, *, now: bool = False) -> None:
        at_s = self._at.clock()
        if self._shown is not None and (now or at_s - self._last_s >= _REDRAW_S):
            self._last_s = at_s
            self._shown.update(self._line())

    def _line(self) -> Any:
        validated = [metrics_line(self._metrics)] if self._metrics else []
        text = html.escape("  ".join([*self._at.parts(), *validated]))
        share = f'max="{max(self._at.total_steps, 1)}" value="{self._at.step}"'
        return self._html(f"<progress {share}></progress> <code>{text}</code>")


class LineReporter:
    """Plain lines for a log or a pipe: one per epoch, at most one a second.

    The first epoch always has its line, and the last line is that of the last epoch, with how
    the run ended.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._at = Advance()
        self._last_s: float | None = None
        self._held: str | None = None

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
        self._at.finish_epoch(epoch)
        now = self._at.clock()
        line = epoch_line(self._at, epoch, metrics)
        is_due = self._last_s is None or now - self._last_s >= _PLAIN_LINE_S
        # The horizon's line is held until it is known how the run ended there.
        self._held = line if not is_due or epoch == self._at.max_epochs else None
        if self._held is None:
            self._last_s = now
            self._write(line)

    def end(self, *, reason: str | None = None, **_more: Any) -> None:
        """Writes the last epoch's line, if it was held, and how the run ended."""
        self._at.end(reason or "")
        held, self._held = self._held, None
        if held is not None and reason in ("completed", "early_stop"):
            self._write(f"{held}  {reason}")
            return
        if held is not None:
            self._write(held)
        if reason is not None:
            self._write(self._at.ending_line)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


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


def is_tty(stream: Any) -> bool:
    """Whether a stream is a terminal itself."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False
