"""Folds what the metrics hook returns for each batch into one value per split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nitro.errors import HookError

_Path = tuple[str, ...]
"""The keys that lead to a metric."""


class MetricSums:
    """Accumulates `(sum, count)` pairs, nested or not, over the batches of a split."""

    def __init__(self, *, hook: str, split: str) -> None:
        self._where = f"`{hook}` on the split `{split}`"
        self._sums: dict[_Path, Any] = {}
        self._counts: dict[_Path, Any] = {}
        self._is_empty = True

    def add(self, metrics: Any) -> None:
        """Adds one batch's metrics.

        Raises:
            HookError: Not a mapping of pairs, or other metrics than the batch before.
        """
        pairs = dict(self._pairs(metrics, ()))
        if not self._is_empty and pairs.keys() != self._sums.keys():
            raise HookError(
                f"{self._where} returned {_listed(pairs)}, and {_listed(self._sums)} for the "
                "batch before.",
                expected="the same metrics for every batch",
            )
        self._is_empty = False
        for path, (total, count) in pairs.items():
            if path in self._counts and (count is None) != (self._counts[path] is None):
                raise HookError(
                    f"{self._where} changed the metric `{_joined(path)}` between (sum, count) and "
                    "(value, None).",
                    expected="one kind for every batch",
                )
            self._sums[path] = self._sums.get(path, 0) + total
            self._counts[path] = None if count is None else self._counts.get(path, 0) + count

    def result(self) -> dict[str, Any]:
        """The reduced metrics, nested as they were returned: plain floats or arrays.

        Raises:
            HookError: The counts of a metric add up to 0.
        """
        result: dict[str, Any] = {}
        for path, total in self._sums.items():
            _put(result, path, self._reduced(path, total))
        return result

    def _reduced(self, path: _Path, total: Any) -> Any:
        count = self._counts[path]
        if count is None:
            value = total
        elif np.any(np.asarray(count) == 0):
            raise HookError(
                f"{self._where}: the counts of the metric `{_joined(path)}` add up to 0.",
                expected="a denominator above 0",
            )
        else:
            value = total / count
        return float(value) if np.ndim(value) == 0 else np.asarray(value)

    def _pairs(self, metrics: Any, group: _Path) -> Any:
        if not isinstance(metrics, Mapping):
            raise HookError(
                f"{self._where} returned {type(metrics).__name__}.",
                expected='a mapping such as {"acc": (hits.sum(), hits.size)}',
            )
        for key, value in metrics.items():
            path = (*group, str(key))
            if isinstance(value, Mapping):
                yield from self._pairs(value, path)
            else:
                yield path, self._checked(path, value)

    def _checked(self, path: _Path, value: Any) -> tuple[Any, Any]:
        total, count = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
        numbers = _number(total), _number(count)
        if numbers[0] is None or (numbers[1] is None and count is not None):
            name = _joined(path)
            raise HookError(
                f"{self._where} returned {value!r} for the metric `{name}`.",
                expected="(sum, count), whose totals are divided, or (value, None), which is summed",
                fix=f'write {{"{name}": (total, how_many)}}: the denominator is yours',
            )
        return numbers


def _number(value: Any) -> np.ndarray | None:
    """A number or an array of numbers, in float64; None for anything else."""
    if value is None or isinstance(value, str):
        return None
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


def _joined(path: _Path) -> str:
    return "/".join(path)


def _listed(paths: Iterable[_Path]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(map(_joined, paths))) or "no metrics"


def _put(tree: dict[str, Any], path: _Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def flat_scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested mapping, as `outer/inner` → float; nothing else."""
    scalars: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            scalars |= flat_scalars(value, f"{prefix}{key}/")
        elif np.ndim(value) == 0 and (number := _number(value)) is not None:
            scalars[f"{prefix}{key}"] = float(number)
    return scalars
