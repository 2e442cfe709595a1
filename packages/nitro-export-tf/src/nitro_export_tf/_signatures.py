"""The names of the signatures, and how rows are cut to fit them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

DEFAULT = "serving_default"
"""The signature that clients get who name none."""


def fixed_signature(rows: int) -> str:
    """The signature that takes exactly `rows` rows."""
    return f"serving_b{rows}"


def tiled(array: np.ndarray, axis0: int, rows: int) -> np.ndarray:
    """The rows of an array, repeated or cut to `rows`."""
    return np.take(array, np.arange(rows) % array.shape[axis0], axis=axis0)


def cut(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cuts rows into pieces for fixed sizes: where each begins, its size, and its rows.

    The largest size that is full, while there is one; then the smallest that holds the
    rest, filled up.
    """
    begin = 0
    while begin < rows:
        left = rows - begin
        full = [size for size in sizes if size <= left]
        size = max(full) if full else min(sizes)
        yield begin, size, min(size, left)
        begin += size
