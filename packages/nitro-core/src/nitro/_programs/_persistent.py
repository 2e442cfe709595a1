"""Counts what JAX's persistent compilation cache does for our programs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax.monitoring

_HIT = "/jax/compilation_cache/cache_hits"
_MISS = "/jax/compilation_cache/cache_misses"


@dataclass
class CacheUse:
    """What happened during one compile.

    Attributes:
        hits: Programs that were read from the cache.
        misses: Programs that were compiled and written to it; none where it is off.
    """

    hits: int = 0
    misses: int = 0


class _Watching(threading.local):
    use: CacheUse | None = None


_watching = _Watching()


@contextmanager
def watch_cache() -> Generator[CacheUse]:
    """Counts the events of this thread while the context is open."""
    _listen()
    _watching.use = use = CacheUse()
    try:
        yield use
    finally:
        _watching.use = None


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_on_event)


def _on_event(event: str, **_: Any) -> None:
    use = _watching.use
    if use is not None and event == _HIT:
        use.hits += 1
    elif use is not None and event == _MISS:
        use.misses += 1
