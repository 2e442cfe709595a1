"""A mean that a record can hold in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RunningMean:
    """A weighted mean that can be put down and taken up again without a change of bits."""

    def __init__(self) -> None:
        self._total = 0.0
        self._count: float = 0

    def add(self, value: float, weight: float = 1) -> None:
        """Adds a value that counts `weight` times."""
        self._total += value * weight
        self._count += weight

    def take(self) -> float:
        """The mean so far; starts anew."""
        mean = self._total / self._count if self._count else float("nan")
        self.set_state({"total": 0.0, "count": 0})
        return mean

    def get_state(self) -> dict[str, Any]:
        """What was added so far, as JSON values."""
        return {"total": self._total, "count": self._count}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` returned."""
        self._total, self._count = float(state["total"]), state["count"]
