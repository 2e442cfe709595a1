"""Cuts the rows of a request into the sizes that an artifact is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ._io_spec import IOSpec

_NO_VALUES: Mapping[str, int] = {}


def take_rows(array: Any, axis0: int, begin: int, size: int) -> np.ndarray:
    """Copies out `size` rows from `begin`; past the end, the last row again.

    The last row rather than zeros: what divides by a norm stays finite.

    Args:
        array: An array of any dtype with at least one row after `begin`.
        axis0: Which axis counts rows, from 0.
        begin: The first row.
        size: How many rows.
    """
    host = np.asarray(array)
    host = host[(slice(None),) * axis0 + (slice(begin, begin + size),)]
    rows = host.shape[axis0]
    if rows == size:
        return host
    padded = np.empty((*host.shape[:axis0], size, *host.shape[axis0 + 1 :]), host.dtype)
    at = (slice(None),) * axis0
    padded[(*at, slice(rows))] = host
    padded[(*at, slice(rows, None))] = host[(*at, slice(rows - 1, None))]
    return padded


def repeat_rows(array: np.ndarray, axis0: int, rows: int) -> np.ndarray:
    """The rows of an array, repeated from the first one or cut, so that there are `rows`."""
    return np.take(array, np.arange(rows) % array.shape[axis0], axis=axis0)


def cut_rows(rows: int, sizes: Sequence[int]) -> list[int]:
    """Compiled sizes, to be called one after the other, that cover a number of rows.

    The largest size that is full, while there is one; then the smallest that holds the rest.

    Example:
        >>> cut_rows(70, (1, 32))
        [32, 32, 1, 1, 1, 1, 1, 1]
        >>> cut_rows(3, (8, 32))
        [8]
    """
    plan = list[int]()
    while rows > 0:
        plan.append(max((size for size in sizes if size <= rows), default=min(sizes)))
        rows -= plan[-1]
    return plan


def run_in_parts(
    run: Callable[[int, list[np.ndarray]], Iterable[Any]],
    plan: Sequence[int],
    *,
    inputs: Sequence[IOSpec],
    outputs: Sequence[IOSpec],
    arrays: Sequence[Any],
    rows: int,
    values: Mapping[str, int] = _NO_VALUES,
) -> dict[str, np.ndarray]:
    """Runs the rows of a request in pieces of compiled sizes, and puts the results together.

    Args:
        run: `run(size, arrays)` gives an array for each output; those may still be computed,
            as JAX's are, since a result is fetched when the next piece is on its way.
        plan: The sizes, as `cut_rows` gives them; the last piece is filled up.
        inputs: The specs of `arrays`, each with a batch axis.
        outputs: The specs of what `run` gives, each with a batch axis.
        arrays: The request in wire order, as `RequestReader` gives it.
        rows: How many there are; for none, nothing runs.
        values: The symbolic sizes that the caller chose, as `RequestReader` found them.

    Returns:
        The outputs by name, with `rows` rows.
    """
    if rows == 0:
        return {spec.name: np.empty(spec.sizes(0, values), spec.numpy_dtype) for spec in outputs}
    filled = dict[str, np.ndarray]()
    begin = 0
    pending: tuple[int, Iterable[Any]] | None = None
    for size in plan:
        part = [
            take_rows(array, spec.batch_axis0 or 0, begin, size)
            for array, spec in zip(arrays, inputs, strict=True)
        ]
        running = (begin, run(size, part))
        # Fetching waits for the device, so the next call is on its way before that.
        if pending is not None:
            _fetch(*pending, filled, outputs, rows)
        pending = running
        begin += size
    if pending is not None:
        _fetch(*pending, filled, outputs, rows)
    return filled


def _fetch(
    begin: int,
    results: Iterable[Any],
    filled: dict[str, np.ndarray],
    outputs: Sequence[IOSpec],
    rows: int,
) -> None:
    for spec, result in zip(outputs, results, strict=True):
        axis0 = spec.batch_axis0 or 0
        host = np.asarray(result)
        if spec.name not in filled:
            shape = (*host.shape[:axis0], rows, *host.shape[axis0 + 1 :])
            filled[spec.name] = np.empty(shape, host.dtype)
        at = (slice(None),) * axis0
        target = filled[spec.name][(*at, slice(begin, None))]
        count = min(host.shape[axis0], target.shape[axis0])
        target[(*at, slice(count))] = host[(*at, slice(count))]
