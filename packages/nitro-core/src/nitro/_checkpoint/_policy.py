"""Which records are kept: the newest, and the best k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from nitro.errors import CheckpointError, ConfigError

from ._index import RecordEntry


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Keeps the newest record and the best `k` by one metric.

    Records that another metric or mode ranked are not compared with these, and stay.

    Attributes:
        k: How many of the best to keep; at least 1.
        metric: The metric that ranks; `"val_loss"` is there without a metrics hook.
        mode: Whether `"min"` or `"max"` is best.
        keep_latest: Whether the newest record stays whatever its score. Without, only what is
            strictly better than the worst of the best `k` is written at all, and a run that was
            interrupted goes on from one of these.
        scope: Whether the records of this `"run"` are ranked, or those of all runs in the
            directory, `"dir"`: then a run may delete what others wrote there.

    Raises:
        ConfigError: `k` below 1, an unknown mode or scope.
    """

    k: int = 3
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    _: KW_ONLY
    keep_latest: bool = True
    scope: Literal["run", "dir"] = "run"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise ConfigError(
                f"`TopK(k={self.k!r})` keeps no record.",
                expected="an integer of at least 1",
                fix="pass `checkpointer=None` to write no records",
            )
        if self.mode not in ("min", "max"):
            raise ConfigError(f"`TopK(mode={self.mode!r})`.", expected='"min" or "max"')
        if self.scope not in ("run", "dir"):
            raise ConfigError(f"`TopK(scope={self.scope!r})`.", expected='"run" or "dir"')

    def __repr__(self) -> str:
        shown = f"k={self.k}, metric={self.metric!r}, mode={self.mode!r}"
        shown += "" if self.keep_latest else ", keep_latest=False"
        shown += "" if self.scope == "run" else f", scope={self.scope!r}"
        return f"TopK({shown})"

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """The value that ranks a record; None for one that is not finite, which ranks nowhere.

        Raises:
            CheckpointError: The metric was not emitted; names what was.
        """
        if self.metric not in metrics:
            raise CheckpointError(
                f"The checkpointer ranks by `{self.metric}`, which was not emitted.",
                expected="one of " + (", ".join(f"`{name}`" for name in metrics) or "none"),
                fix="name an emitted metric: `checkpointer=nitro.TopK(metric=...)`",
            )
        value = metrics[self.metric]
        return value if math.isfinite(value) else None

    def ranks(self, entry: RecordEntry) -> bool:
        """Whether a record was scored under this metric and mode."""
        return entry.score is not None and (entry.metric, entry.mode) == (self.metric, self.mode)

    def best(self, entries: Sequence[RecordEntry]) -> list[RecordEntry]:
        """The best `k` of the records that this policy ranks, best first; a tie to the older."""
        ranked = [entry for entry in entries if self.ranks(entry)]
        return sorted(ranked, key=lambda e: (self._cost(e.score), e.step))[: self.k]

    def admits(self, score: float | None, entries: Sequence[RecordEntry], *, run: str) -> bool:
        """Whether a new record of `run` would be among the best of a directory with `entries`."""
        best = self.best(self._compared(entries, run))
        is_free = len(best) < self.k
        return score is not None and (is_free or self._cost(score) < self._cost(best[-1].score))

    def kept(self, entries: Sequence[RecordEntry], *, run: str) -> list[RecordEntry]:
        """What stays in a directory after `run` has written: its newest record, and the best.

        What this policy does not rank stays as well, but for records of `run` without a score.
        """
        own = [entry for entry in entries if entry.run == run]
        newest = max(own, key=lambda e: e.step, default=None) if self.keep_latest else None
        compared = self._compared(entries, run)
        best = self.best(compared)
        unscored = [entry for entry in own if entry.score is None]
        pruned = [e for e in (*compared, *unscored) if e is not newest and e not in best]
        return [entry for entry in entries if entry not in pruned]

    def _compared(self, entries: Sequence[RecordEntry], run: str) -> list[RecordEntry]:
        """The records that are ranked together with those of `run`."""
        return [e for e in entries if self.ranks(e) and (self.scope == "dir" or e.run == run)]

    def _cost(self, score: float | None) -> float:
        """What is lowest for the best score."""
        value = math.inf if score is None else score
        return value if self.mode == "min" else -value
