"""What a metrics hook returns for each batch: how it is read, and folded over a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nitro.errors import HookError

_Path = tuple[str, ...]
"""The keys that lead to a metric."""

Mode = Literal["mean", "sum", "max", "min", "concat"]
"""How the values of the batches become one; a mean is a sum of values over one of counts."""

_NAMED_MODES = tuple(mode for mode in get_args(Mode) if mode != "mean")
_FORM_OF: dict[Mode, str] = {
    "mean": "(sum, count)",
    "sum": "(value, None)",
    "max": '("max", value)',
    "min": '("min", value)',
    "concat": '("concat", value)',
}
_FORMS = "(sum, count), whose totals are divided; (value, None), which is summed; or " + ", ".join(
    f'("{mode}", value)' for mode in _NAMED_MODES
)


@partial(
    jax.tree_util.register_dataclass, data_fields=["value", "count"], meta_fields=["path", "mode"]
)
@dataclass(frozen=True)
class Metric:
    """One metric of one batch; a pytree, so that a program can return it.

    Attributes:
        value: A number or an array of them.
        count: What the total is divided by in the end; None unless the mode is `mean`.
        path: The keys that lead to it.
        mode: How the values of the batches become one.
    """

    value: Any
    count: Any
    path: _Path
    mode: Mode

    @property
    def name(self) -> str:
        """The metric as `group/name`."""
        return _joined(self.path)


def read_metrics(
    metrics: Any, *, where: str, rows: int, number: Callable[[Any], Any]
) -> tuple[Metric, ...]:
    """Reads what a metrics hook returned for one batch.

    Args:
        metrics: Values with their modes by name, in groups or not. A mode around a group
            covers what is in it.
        where: The hook and the split, for messages.
        rows: How many samples the batch has.
        number: `host_number`, or `traced_number` inside a trace.

    Raises:
        HookError: Names the metric, and lists the modes.
    """
    return tuple(_Reader(where, rows, number).group(metrics, (), None))


def widened(outputs: Any) -> Any:
    """Outputs for a metrics hook: half floats as float32, which is exact; the rest as it is.

    NumPy adds up float16 and bfloat16 in themselves, where 256 + 1 is 256.
    """
    return jax.tree.map(_widened, outputs)


def _widened(array: Any) -> Any:
    is_half = jnp.issubdtype(array.dtype, np.floating) and array.dtype.itemsize < 4
    return array.astype(np.float32) if is_half else array


def host_number(value: Any) -> np.ndarray | None:
    """A number, or an array of them, in NumPy; None for anything else."""
    if value is None or isinstance(value, str | Mapping):
        return None
    try:
        # A copy: it is folded a batch later, and the hook may fill its buffer again.
        array = np.array(value)
    except (TypeError, ValueError):
        return None
    is_number = array.dtype.kind in "biuf" or jnp.issubdtype(array.dtype, np.floating)
    return array if is_number else None


def traced_number(value: Any) -> jax.Array | None:
    """A number, or an array of them, inside a trace; None for anything else."""
    is_number = isinstance(value, bool | int | float) or hasattr(value, "dtype")
    return jnp.asarray(value) if is_number else None


class _Outer(NamedTuple):
    """The mode around a value or a group, and its count."""

    mode: Mode
    count: Any = None


class _Reader:
    """Reads the metrics of one batch."""

    def __init__(self, where: str, rows: int, number: Callable[[Any], Any]) -> None:
        self._where = where
        self._rows = rows
        self._number = number

    def group(self, metrics: Any, path: _Path, outer: _Outer | None) -> Iterator[Metric]:
        """The metrics of a mapping, `outer` being the mode around it."""
        if not isinstance(metrics, Mapping):
            raise HookError(
                f"{self._where} returned {type(metrics).__name__}.",
                expected='a mapping such as {"acc": (hits.sum(), hits.size)}',
            )
        for key, value in cast("Mapping[Any, Any]", metrics).items():
            yield from self._entry(value, (*path, str(key)), outer)

    def _entry(self, value: Any, path: _Path, outer: _Outer | None) -> Iterator[Metric]:
        if isinstance(value, Mapping):
            yield from self.group(value, path, outer)
            return
        if isinstance(value, tuple):
            inner, value = self._moded(path, cast("tuple[Any, ...]", value))
            if outer is not None:
                raise HookError(
                    f"{self._where} has {_FORM_OF[inner.mode]} for the metric `{_joined(path)}`, and "
                    f"{_FORM_OF[outer.mode]} around the group that it is in.",
                    expected="one mode: around the group, or on what is in it",
                )
            if isinstance(value, Mapping):
                yield from self.group(value, path, inner)
                return
            outer = inner
        if outer is None:
            raise self._malformed(path, value)
        yield self._metric(path, outer, value)

    def _moded(self, path: _Path, pair: tuple[Any, ...]) -> tuple[_Outer, Any]:
        """The mode that a tuple states, and what it is stated of."""
        if len(pair) != 2:
            raise self._malformed(path, pair)
        first, second = pair
        if isinstance(first, str) and first in _NAMED_MODES:
            return _Outer(cast("Mode", first)), second
        if not isinstance(first, str) and second is None:
            return _Outer("sum"), first
        count = self._number(second)
        if isinstance(first, str) or count is None:
            raise self._malformed(path, pair)
        return _Outer("mean", count), first

    def _metric(self, path: _Path, outer: _Outer, value: Any) -> Metric:
        number = self._number(value)
        if number is None:
            raise self._malformed(path, value if outer.count is None else (value, outer.count))
        if outer.mode == "concat" and (number.ndim == 0 or number.shape[0] != self._rows):
            raise HookError(
                f"{self._where} returned the shape {tuple(number.shape)} for the metric "
                f"`{_joined(path)}`, which is concatenated, on a batch of {self._rows}.",
                expected=f"one entry per sample along the batch axis, the first one: ({self._rows}, ...)",
            )
        return Metric(number, outer.count, path, outer.mode)

    def _malformed(self, path: _Path, value: Any) -> HookError:
        name = _joined(path)
        return HookError(
            f"{self._where} returned {value!r} for the metric `{name}`.",
            expected=_FORMS,
            fix=f'write {{"{name}": (total, how_many)}}: the denominator is yours',
        )


class MetricFold:
    """Folds the metrics of the batches of a split into one value each.

    Args:
        where: The hook and the split, for messages.
        is_part: Whether counts may add up to 0, as only a part of the split is folded.
    """

    def __init__(self, *, where: str, is_part: bool = False) -> None:
        self._where = where
        self._is_part = is_part
        self._first: dict[_Path, Metric] | None = None
        self._folds: dict[_Path, _Fold] = {}
        self._pending: tuple[Metric, ...] = ()

    def add(self, metrics: tuple[Metric, ...]) -> None:
        """Adds one batch's metrics.

        Raises:
            HookError: Other metrics than the batch before, or others in mode or shape.
        """
        by_path = {metric.path: metric for metric in metrics}
        if self._first is None:
            self._first = by_path
            self._folds = {path: _Fold(metric.mode) for path, metric in by_path.items()}
        self._check_same(self._first, by_path)
        # Read one batch late, so that the device need not wait for the host.
        self._fold(self._pending)
        self._pending = metrics

    def result(self) -> dict[str, Any]:
        """The reduced metrics, nested as they were returned: plain numbers or arrays.

        Raises:
            HookError: The counts of a metric add up to 0.
        """
        self._fold(self._pending)
        self._pending = ()
        result: dict[str, Any] = {}
        for path, fold in self._folds.items():
            if np.any(np.equal(fold.count, 0)) and not self._is_part:
                raise HookError(
                    f"{self._where}: the counts of the metric `{_joined(path)}` add up to 0.",
                    expected="a denominator above 0",
                )
            with np.errstate(divide="ignore", invalid="ignore"):
                value = fold.result()
            _put(result, path, value.item() if np.ndim(value) == 0 else value)
        return result

    def concatenated(self) -> dict[_Path, int]:
        """The metrics that are concatenated, with their number of samples."""
        folds = self._folds.items()
        return {path: sum(map(len, f.parts)) for path, f in folds if f.mode == "concat"}

    def _fold(self, metrics: tuple[Metric, ...]) -> None:
        for metric in jax.device_get(metrics):
            self._folds[metric.path].add(np.asarray(metric.value), metric.count)

    def _check_same(self, before: dict[_Path, Metric], now: dict[_Path, Metric]) -> None:
        if before.keys() != now.keys():
            raise HookError(
                f"{self._where} returned {_listed(now)}, and {_listed(before)} for the batch before.",
                expected="the same metrics for every batch",
            )
        for path, metric in now.items():
            if metric.mode != before[path].mode:
                raise HookError(
                    f"{self._where} changed the metric `{metric.name}` between "
                    f"{_FORM_OF[before[path].mode]} and {_FORM_OF[metric.mode]}.",
                    expected="one mode for every batch",
                )
            shapes = _folded_shape(before[path]), _folded_shape(metric)
            if shapes[0] != shapes[1]:
                raise HookError(
                    f"{self._where} returned the metric `{metric.name}` with the shape {shapes[1]}, "
                    f"and {shapes[0]} for the batches before"
                    + (" (the batch axis left out)." if metric.mode == "concat" else "."),
                    expected="one shape for every batch",
                )


def _folded_shape(metric: Metric) -> tuple[int, ...]:
    shape: tuple[int, ...] = np.shape(metric.value)
    return shape[1:] if metric.mode == "concat" else shape


class _Fold:
    """What has been folded of one metric."""

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self.count: Any = 0 if mode == "mean" else 1
        self.parts: list[np.ndarray] = []
        self._total: Any = None

    def add(self, value: np.ndarray, count: Any) -> None:
        if self.mode == "concat":
            self.parts.append(value)
            return
        # In float64 whatever the hook computed in, so that the order of batches hardly counts;
        # whole numbers are exact as they are.
        is_whole = value.dtype.kind in "biu" and self.mode != "mean"
        value = value.astype(np.int64 if is_whole else np.float64)
        fold = _FOLDS[self.mode]
        self._total = value if self._total is None else fold(self._total, value)
        if self.mode == "mean":
            self.count = self.count + np.asarray(count, np.float64)

    def result(self) -> Any:
        if self.mode == "concat":
            return np.concatenate(self.parts)
        return self._total / self.count if self.mode == "mean" else self._total


_FOLDS: dict[Mode, Callable[[Any, Any], Any]] = {
    "mean": np.add,
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


def check_finalised(result: Any, fold: MetricFold, *, hook: str, split: str) -> None:
    """Refuses what `finalize_metrics` must not return.

    Args:
        result: What it returned.
        fold: What its argument came from.
        hook: The hook, for messages.
        split: The split.

    Raises:
        HookError: Not a dict; a value that is still on the device; or concatenated values
            that are passed on as they are.
    """
    if not isinstance(result, dict):
        raise HookError(f"`{hook}` returned {type(result).__name__}.", expected="a dict of metrics")
    samples = fold.concatenated()
    for path, value in _flat(cast("dict[str, Any]", result), ()):
        name = _joined(path)
        if isinstance(value, jax.Array):
            raise HookError(
                f"`{hook}` returned a JAX array as `{name}` for the split `{split}`.",
                expected="host values: numbers and NumPy arrays",
                fix="convert it with `float(...)` or `np.asarray(...)`",
            )
        if path in samples and np.ndim(value) > 0 and len(value) == samples[path]:
            raise HookError(
                f"`{hook}` passed on the concatenated metric `{name}` of the split `{split}`, "
                f"{samples[path]} samples, as it is.",
                expected="what follows from it: it would be logged and kept every epoch",
                fix=f'reduce it in `finalize_metrics`, then drop it: `reduced.pop("{path[-1]}")`',
            )


def _flat(metrics: Mapping[str, Any], path: _Path) -> Iterator[tuple[_Path, Any]]:
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _joined(path: _Path) -> str:
    return "/".join(path)


def _listed(paths: Iterable[_Path]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(map(_joined, paths))) or "no metrics"


def _put(tree: dict[str, Any], path: _Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def flat_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a nested mapping, as `outer/inner` → number; whole ones stay whole."""
    numbers = ((_joined(path), host_number(value)) for path, value in _flat(metrics, ()))
    return {
        name: int(n) if n.dtype.kind in "iu" else float(n)
        for name, n in numbers
        if n is not None and n.ndim == 0
    }


def flat_arrays(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a nested mapping, as `outer/inner` → array of at least one axis."""
    numbers = ((_joined(path), host_number(value)) for path, value in _flat(metrics, ()))
    return {name: n for name, n in numbers if n is not None and n.ndim > 0}
