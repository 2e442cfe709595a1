"""Watches for memory that grows from epoch to epoch."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import jax

from nitro._programs import in_units
from nitro._trees import describe_array
from nitro.errors import warn

_EPOCHS = 3
"""So many epochs in a row must have grown: a warm-up grows for one or two."""

_MIN_RSS_GROWTH_BYTES = 32 * 2**20
_MIN_RSS_SHARE = 0.02
_NOISE_BYTES = 256 * 2**10
"""What grows in one epoch without anybody's fault: Orbax keeps about 60 KiB for each record,
allocators a little for themselves."""

_MAX_LISTED = 5
_STATM = Path("/proc/self/statm")


class LeakWatch:
    """Looks at the process at every epoch's end, and warns once of steady growth.

    Arrays on the device are counted by shape; what NumPy and Python hold shows in the
    process's resident memory only.
    """

    def __init__(self) -> None:
        self._live: list[Counter[str]] = []
        self._rss: list[int] = []
        self._warned = False

    def epoch_end(self, epoch: int) -> None:
        """Takes stock after an epoch (counted from 1)."""
        if self._warned:
            return
        self._live = [*self._live[-_EPOCHS:], live_arrays()]
        self._rss = _growing([*self._rss, resident_bytes()])
        lines = [*self._grown_arrays(), *self._grown_memory()]
        if lines:
            self._warned = True
            warn(
                f"Memory grew in each of the last {_EPOCHS} epochs, up to epoch {epoch}: "
                + "; ".join(lines)
                + ".\n  fix: look for a hook or a callback that keeps what it gets, such as a list "
                "that metrics append to; keep numbers (`float(x)`), or copies on disk"
            )

    def _grown_arrays(self) -> list[str]:
        """The shapes whose count grew in each of the last epochs, the fastest first."""
        if len(self._live) <= _EPOCHS:
            return []
        first, last = self._live[0], self._live[-1]
        pairs = list(zip(self._live, self._live[1:], strict=False))
        grown = [name for name in last if all(a[name] < b[name] for a, b in pairs)]
        grown.sort(key=lambda name: first[name] - last[name])
        return [f"{name} arrays {first[name]} → {last[name]}" for name in grown[:_MAX_LISTED]]

    def _grown_memory(self) -> list[str]:
        growth = self._rss[-1] - self._rss[0]
        least = max(_MIN_RSS_GROWTH_BYTES, _MIN_RSS_SHARE * self._rss[0])
        if len(self._rss) <= _EPOCHS or growth < least:
            return []
        return [
            f"resident memory by {in_units(growth)} to {in_units(self._rss[-1])} "
            f"in {len(self._rss) - 1} epochs"
        ]


def live_arrays() -> Counter[str]:
    """The arrays that are alive on the devices, counted by dtype and shape."""
    return Counter(describe_array(array) for array in jax.live_arrays())


def resident_bytes() -> int:
    """The process's resident memory; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _growing(values: list[int]) -> list[int]:
    """The values from the last time on that they did not grow."""
    has_grown = len(values) < 2 or values[-1] - values[-2] > _NOISE_BYTES
    return values if has_grown else values[-1:]
