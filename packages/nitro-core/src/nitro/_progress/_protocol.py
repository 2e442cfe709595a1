"""What a progress reporter must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

REPORTER_VERBS = ("begin", "advance", "phase", "note", "epoch_end", "end")


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

    def end(self, *, reason: str | None = None, **more: Any) -> None:
        """Called once, also after an error.

        Args:
            reason: How training ended: "completed", "early_stop", "stopped" or "failed"; None
                where the reporter is switched off before.
            more: What later versions add.
        """
        ...
