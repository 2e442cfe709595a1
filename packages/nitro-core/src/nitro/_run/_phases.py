"""What a handle can be doing, and who is told when that changes."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nitro.errors import warn

if TYPE_CHECKING:
    from ._handle import Nitro


class Phase(enum.Enum):
    """What a handle is doing."""

    READY = "ready"
    COMPILING = "compiling"
    TRAINING = "training"
    EVALUATING = "evaluating"
    PREDICTING = "predicting"
    CHECKPOINTING = "checkpointing"
    EXPORTING = "exporting"
    DONE = "done"
    FAILED = "failed"
    IDLE = "idle"
    """Control is back with the caller; published after each call, never a handle's phase."""


@dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    """One change of phase.

    Attributes:
        phase: The phase that begins.
        before: The phase that ends.
        run: The handle.
        step: Finished optimizer steps.
        epoch: Finished epochs.
        metrics: What was validated, on the way out of EVALUATING; else empty.
        split: The split that is evaluated, on the way into EVALUATING and out of it; else None.
        by_user: Whether that evaluation was asked for by a call of `evaluate` or `validate`,
            and is not the one after an epoch of training.
    """

    phase: Phase
    before: Phase
    run: Nitro
    step: int
    epoch: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None
    by_user: bool = False


Monitor = Callable[[PhaseEvent], object]
_process_monitors: list[Monitor] = []


def on_phase(callback: Monitor) -> Callable[[], None]:
    """Has `callback` called at each change of phase of every handle.

    A monitor that raises is warned about once per handle, and disturbs nothing. One that
    evaluates, predicts or exports is not told of the phases which that goes through.

    Args:
        callback: Gets a `PhaseEvent`; called in the thread that trains.

    Returns:
        A function that ends the subscription; calling it again does nothing.
    """
    return subscribe(_process_monitors, callback)


def subscribe(monitors: list[Monitor], callback: Monitor) -> Callable[[], None]:
    """Adds a monitor to a list; returns what takes it off again."""
    monitors.append(callback)

    def unsubscribe() -> None:
        if callback in monitors:
            monitors.remove(callback)

    return unsubscribe


class Monitors:
    """The monitors of one handle: the process's first, then its own, in order."""

    def __init__(self) -> None:
        self.own: list[Monitor] = []
        self._failed: list[Monitor] = []
        self._called: list[tuple[int, Monitor]] = []

    def publish(self, event: PhaseEvent) -> None:
        """Tells every monitor of a change, but for one that causes it while it is called."""
        thread = threading.get_ident()
        for monitor in (*_process_monitors, *self.own):
            if any(t == thread and called is monitor for t, called in self._called):
                continue
            call = (thread, monitor)
            self._called.append(call)
            try:
                monitor(event)
            # Whatever a monitor does, the run goes on.
            except Exception as error:  # noqa: BLE001
                self._warn_once(monitor, error)
            finally:
                self._called.remove(call)

    def _warn_once(self, monitor: Monitor, error: Exception) -> None:
        # By identity: a monitor with a content of its own may have no hash.
        if not any(failed is monitor for failed in self._failed):
            self._failed.append(monitor)
            warn(
                f"The monitor {getattr(monitor, '__qualname__', monitor)!r} raised "
                f"{type(error).__name__}: {error}. It stays registered; the run goes on."
            )
