"""Produces ahead in a thread: ordered, bounded, and gone when the consumer is."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_POLL_S = 0.1

DEPTH = 2
"""How many items wait at most; one more is being produced meanwhile."""


class _End:
    """The last thing in the queue, with the producer's exception if it had one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterator[T], *, depth: int = DEPTH) -> Generator[T]:
    """Yields the items in order while a thread produces up to `depth` of them ahead.

    The producer's exception is raised here, with its own traceback. Closing the
    generator ends the thread, which finishes the item that it is at and closes `items`.
    """
    ready: queue.Queue[Any] = queue.Queue(depth)
    closing = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(items, ready, closing), name="nitro-prefetch", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closing.set()
        thread.join()


def _produce(items: Iterator[Any], ready: queue.Queue[Any], closing: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not _put(ready, item, closing):
                return
    # Whatever the loader raises belongs to the consumer.
    except BaseException as raised:  # noqa: BLE001
        error = raised
    finally:
        # Here rather than by the collector: a loader's own workers end with its iterator.
        close = getattr(items, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):  # it must not hide why the run ended
                close()
    _put(ready, _End(error), closing)


def _put(ready: queue.Queue[Any], item: Any, closing: threading.Event) -> bool:
    while not closing.is_set():
        try:
            ready.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
