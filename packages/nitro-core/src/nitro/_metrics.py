"""Folds what the metrics hook returns for each batch into one value per split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nitro.errors import HookError


class MetricSums:
    """Accumulates `(sum, count)` pairs, nested or not, over the batches of a split."""

    def __init__(self, *, hook: str, split: str) -> None:
        self._where = f"`{hook}` on the split `{split}`"
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, Any] = {}

    def add(self, metrics: Any) -> None:
        """Adds one batch's metrics.

        Raises:
            HookError: Not a mapping of pairs, or other metrics than the batch before.
        """
        pairs = dict(self._pairs(metrics, ""))
        if self._sums and pairs.keys() != self._sums.keys():
            raise HookError(
                f"{self._where} returned {sorted(pairs)}, and {sorted(self._sums)} for the batch "
                "before.",
                expected="the same metrics for every batch",
            )
        for name, (total, count) in pairs.items():
            if name in self._counts and (count is None) != (self._counts[name] is None):
                raise HookError(
                    f"{self._where} changed the metric `{name}` between (sum, count) and "
                    "(value, None).",
                    expected="one kind for every batch",
                )
            self._sums[name] = self._sums.get(name, 0) + np.asarray(total, np.float64)
            self._counts[name] = None if count is None else self._counts.get(name, 0) + count

    def result(self) -> dict[str, Any]:
        """The reduced metrics, nested as they were returned: plain floats or arrays.

        Raises:
            HookError: The counts of a metric add up to 0.
        """
        result: dict[str, Any] = {}
        for name, total in self._sums.items():
            _put(result, name.split("/"), self._reduced(name, total))
        return result

    def _reduced(self, name: str, total: Any) -> Any:
        count = self._counts[name]
        if count is None:
            value = total
        elif np.any(np.asarray(count) == 0):
            raise HookError(
                f"{self._where}: the counts of the metric `{name}` add up to 0.",
                expected="a denominator above 0",
            )
        else:
            value = total / count
        return float(value) if np.ndim(value) == 0 else np.asarray(value)

    def _pairs(self, metrics: Any, prefix: str) -> Any:
        if not isinstance(metrics, Mapping):
            raise HookError(
                f"{self._where} returned {type(metrics).__name__}.",
                expected='a mapping such as {"acc": (hits.sum(), hits.size)}',
            )
        for key, value in metrics.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                yield from self._pairs(value, f"{name}/")
            else:
                yield name, self._checked(name, value)

    def _checked(self, name: str, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, tuple) or len(value) != 2:
            raise HookError(
                f"{self._where} returned {value!r} for the metric `{name}`.",
                expected="(sum, count), whose totals are divided, or (value, None), which is summed",
                fix=f'write {{"{name}": (total, how_many)}}: the denominator is yours',
            )
        return value


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def flat_scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The scalar metrics of a nested mapping, as `outer/inner` → float."""
    scalars: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            scalars |= flat_scalars(value, f"{prefix}{key}/")
        elif np.ndim(value) == 0:
            scalars[f"{prefix}{key}"] = float(value)
    return scalars
