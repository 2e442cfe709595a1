"""Which records are kept: the newest, and the best k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nitro.errors import CheckpointError, ConfigError, DivergenceError

from ._index import RecordEntry


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Keeps the newest record and the best `k` by one metric.

    Attributes:
        k: How many of the best to keep; at least 1.
        metric: The metric that ranks; `"val_loss"` is there without a metrics hook.
        mode: Whether `"min"` or `"max"` is best.

    Raises:
        ConfigError: `k` below 1 or an unknown mode.
    """

    k: int = 3
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise ConfigError(
                f"`TopK(k={self.k!r})` keeps no record.",
                expected="an integer of at least 1",
                fix="pass `checkpointer=None` to write no records",
            )
        if self.mode not in ("min", "max"):
            raise ConfigError(f"`TopK(mode={self.mode!r})`.", expected='"min" or "max"')

    def score(self, metrics: Mapping[str, float]) -> float:
        """The value that ranks a record.

        Raises:
            CheckpointError: The metric was not emitted; names what was.
            DivergenceError: It is not finite.
        """
        if self.metric not in metrics:
            raise CheckpointError(
                f"The checkpointer ranks by `{self.metric}`, which was not emitted.",
                expected="one of " + (", ".join(f"`{name}`" for name in metrics) or "none"),
                fix="name an emitted metric: `checkpointer=nitro.TopK(metric=...)`",
            )
        value = metrics[self.metric]
        if not math.isfinite(value):
            raise DivergenceError(
                f"The metric `{self.metric}`, by which records are ranked, is {value}.",
                expected="a finite number",
            )
        return value

    def best(self, entries: Sequence[RecordEntry]) -> list[RecordEntry]:
        """The best `k` of the scored records, best first; a tie goes to the older."""
        scored = [e for e in entries if e.score is not None and e.metric == self.metric]
        sign = 1 if self.mode == "min" else -1
        return sorted(scored, key=lambda e: (sign * (e.score or 0.0), e.step))[: self.k]

    def kept(self, entries: Sequence[RecordEntry]) -> list[RecordEntry]:
        """What stays of one run's records: the newest and the best `k`."""
        newest = max(entries, key=lambda e: e.step, default=None)
        return [e for e in entries if e is newest or e in self.best(entries)]
