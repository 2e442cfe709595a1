"""When a run ends before its horizon by its metrics: early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from nitro.errors import CheckpointError, ConfigError, did_you_mean

StopReason = Literal["completed", "early_stop", "stopped"]


@runtime_checkable
class Stopper(Protocol):
    """Decides after each validation whether to stop.

    A stopper with `get_state` and `set_state` (plain JSON values) resumes where it was.
    """

    def should_stop(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        """Whether to stop after this epoch (counted from 1)."""
        ...


class EarlyStop:
    """Stops when a metric has not improved for some epochs.

    Args:
        metric: The metric to watch.
        mode: Whether `"min"` or `"max"` is better.
        patience: How many epochs without improvement end the run; at least 1.
        min_delta: By how much a value must be better to count as one; in the metric's
            unit, at least 0.

    Raises:
        ConfigError: A value out of its range.
    """

    def __init__(
        self,
        *,
        metric: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        patience: int = 5,
        min_delta: float = 1e-4,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"`EarlyStop(mode={mode!r})`.", expected='"min" or "max"')
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise ConfigError(
                f"`EarlyStop(patience={patience!r})`.", expected="an integer of at least 1"
            )
        if not min_delta >= 0:
            raise ConfigError(
                f"`EarlyStop(min_delta={min_delta!r})`.", expected="a number of at least 0"
            )
        self.metric = metric
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self._best: float | None = None
        self._waited = 0

    def __repr__(self) -> str:
        return (
            f"EarlyStop(metric={self.metric!r}, mode={self.mode!r}, patience={self.patience}, "
            f"min_delta={self.min_delta:g})"
        )

    def should_stop(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        """Whether the metric has now gone `patience` epochs without improvement.

        A value that is not finite is worse than every number.

        Raises:
            CheckpointError: The metric was not emitted; names what was.
        """
        del epoch
        if self.metric not in metrics:
            raise CheckpointError(
                f"Early stopping watches `{self.metric}`, which was not emitted.",
                expected=did_you_mean(self.metric, metrics),
                fix="name an emitted metric: `early_stop=nitro.EarlyStop(metric=...)`",
            )
        value = metrics[self.metric]
        if self._is_better(value):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the metric has gone `patience` epochs without improvement."""
        return self._waited >= self.patience

    def get_state(self) -> dict[str, Any]:
        """The best value so far, and the epochs since."""
        return {"best": self._best, "waited": self._waited}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` returned."""
        self._best, self._waited = state["best"], state["waited"]

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.mode == "min" else value - self._best
        return gain > self.min_delta


def check_stopper(stopper: Any, *, splits: Mapping[str, Any], has_metrics: bool) -> None:
    """Refuses a stopper that could never decide.

    Raises:
        ConfigError: No `should_stop`, no validation split, or a metric without a hook.
    """
    if stopper is None:
        return
    if not isinstance(stopper, Stopper) or isinstance(stopper, type):
        raise ConfigError(
            f"`early_stop` is {stopper!r}.",
            expected="a `nitro.EarlyStop(...)`, or an object with `should_stop(epoch, metrics)`",
        )
    if "train" in splits and "val" not in splits:
        raise ConfigError(
            "`early_stop` is set, but there is no split `val` to watch; there are "
            + ", ".join(f"`{name}`" for name in splits)
            + ".",
            fix="return a split `val` from `build_data`, or drop `early_stop`",
        )
    metric = getattr(stopper, "metric", "val_loss")
    if metric != "val_loss" and not has_metrics:
        raise ConfigError(
            f"`early_stop` watches `{metric}`, but there is no `metrics` hook.",
            expected="the metric `val_loss`, which needs no hook",
            fix=f"add a `metrics` hook that emits `{metric}`",
        )
