"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter(Protocol):
    """Shows how far a run is."""

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int) -> None:
        """Called once before the first step."""
        ...

    def advance(self, *, step: int, epoch: int, loss: float) -> None:
        """Called after each call of the step program, with its last step."""
        ...

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Called after each epoch, with what was validated."""
        ...

    def end(self) -> None:
        """Called once, also after an error."""
        ...


class BarReporter:
    """A bar with epoch, step, loss and time left, and one line per finished epoch."""

    def __init__(self, console: Console) -> None:
        self._max_epochs = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
        )

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int) -> None:
        """Draws the bar."""
        self._max_epochs = max_epochs
        self._task = self._bar.add_task(
            "training", total=total_steps, completed=done_steps, loss="-"
        )
        self._bar.start()

    def advance(self, *, step: int, epoch: int, loss: float) -> None:
        """Moves the bar."""
        self._bar.update(
            self._task,
            completed=step,
            description=f"epoch {epoch}/{self._max_epochs}",
            loss=f"{loss:.4f}",
        )

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Prints the epoch's metrics above the bar."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._bar.console.print(f"epoch {epoch}/{self._max_epochs}  {shown}", highlight=False)

    def end(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.stop()


class SilentReporter:
    """Shows nothing: for logs, pipes and notebooks without a terminal."""

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int) -> None:
        """Does nothing."""

    def advance(self, *, step: int, epoch: int, loss: float) -> None:
        """Does nothing."""

    def epoch_end(self, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""


def make_reporter(*, progress: bool | None) -> Reporter:
    """The reporter for an option: None draws a bar on terminals only."""
    console = Console(stderr=True)
    wanted = console.is_terminal if progress is None else progress
    return BarReporter(console) if wanted else SilentReporter()
