"""How far a run is and how fast, in numbers and in words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_SPEED_WINDOW_S = 10.0


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
    ended: str = ""
    _finished_epochs: int = 0
    _started: float = 0.0
    _first_step: int = 0
    _idle_s: float = 0.0
    _idle_since: float | None = None
    _samples: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def begin(self, *, total_steps: int, done_steps: int, max_epochs: int) -> None:
        """Starts at `done_steps`; neither they nor the time before count for the speed."""
        self.total_steps, self.max_epochs = total_steps, max_epochs
        self.step = self._first_step = done_steps
        self._finished_epochs = done_steps * max_epochs // max(total_steps, 1)
        self.epoch = min(self._finished_epochs + 1, max_epochs)
        self._started = 0.0
        self._samples.clear()

    def advance(self, *, step: int, epoch: int, loss: float, data_wait_frac: float) -> None:
        """Moves on."""
        self.step, self.epoch, self.loss = step, epoch, loss
        self.data_wait_frac = data_wait_frac
        now = self._stepping_s()
        self._samples.append((now, step))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SPEED_WINDOW_S:
            self._samples.popleft()

    def end(self, reason: str) -> None:
        """Ends, with the word for how."""
        self.ended, self.note = reason, ""

    def finish_epoch(self, epoch: int) -> None:
        """Counts a finished epoch."""
        self._finished_epochs = epoch

    @property
    def ending_line(self) -> str:
        """How and where the run ended."""
        where = f"epoch {self._finished_epochs}/{self.max_epochs}, step {self.step}"
        return f"{self.ended or 'ended'} after {where}"

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
        if self.ended:
            yield self.ended
        elif self.phase not in ("training", ""):
            yield self.phase
        if self.note:
            yield self.note
        if self.loss is not None:
            yield f"loss {self.loss:.4g}"
        if not self.ended and (left_s := self.left_s) is not None:
            yield f"{_duration(left_s)} left"
        if (speed := self.steps_per_s) is not None:
            yield f"{speed:.3g} steps/s" if speed < 1000 else f"{speed:,.0f} steps/s"
        if self.loss is not None:
            yield f"data wait {self.data_wait_frac:.0%}"


def epoch_line(at: Advance, epoch: int, metrics: Mapping[str, float]) -> str:
    """What a finished epoch was like, in one line."""
    shown = metrics_line(metrics)
    speed = f"  {at.steps_per_s:.3g} steps/s" if at.steps_per_s else ""
    return f"epoch {epoch}/{at.max_epochs}  step {at.step}  {shown}{speed}"


def metrics_line(metrics: Mapping[str, float]) -> str:
    """The metrics by name."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
