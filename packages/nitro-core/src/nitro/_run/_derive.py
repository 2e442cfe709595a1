"""Field values that follow from the data: computed, merged, and kept in records."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from nitro._experiment import DRIVER_OPTIONS, Experiment, field_value
from nitro.errors import HookError, NitroError, warn

from ._restore import Source

_TOO_LATE = (*DRIVER_OPTIONS, "accum", "gradient_clip_norm")


def derive(
    experiment: Experiment, splits: Mapping[str, Any], source: Source
) -> tuple[Experiment, dict[str, Any]]:
    """The experiment with its derived values, and these by field.

    Weights from a record bring the values that they were trained with, and the hook is not
    called; nor is it without data.

    Raises:
        HookError: `derive` returned something else than values for fields.
    """
    if source.record is not None and not source.is_resume:
        values = decode_derived(source.record.meta.get("derived") or {}, source.display)
    elif splits:
        values = _called(experiment, splits)
    else:
        values = {}
    if not values:
        return experiment, {}
    where = f"`{type(experiment).__name__}.derive`"
    try:
        merged = experiment.replace(**values)
    except NitroError as error:
        problem = f"{where} returned a value that does not fit: {error.problem}"
        raise HookError(problem, expected=error.expected, fix=error.fix) from error
    names = [
        name
        for name in experiment.fields()
        if any(name == given or name.startswith(f"{given}.") for given in values)
    ]
    derived = {name: field_value(merged, name) for name in names}
    if source.is_resume and source.record is not None:
        _tell_changes(experiment, source.record.meta.get("derived") or {}, encode_derived(derived))
    return merged, derived


def _tell_changes(experiment: Experiment, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    moved = [name for name in now if name in saved and saved[name] != now[name]]
    if moved:
        warn(
            f"`{type(experiment).__name__}.derive` gives {', '.join(moved)} another value than when "
            "the record was written: the data has changed.\n"
            "  The run goes on with the new value, so it is not the run that was stopped."
        )


def _called(experiment: Experiment, splits: Mapping[str, Any]) -> dict[str, Any]:
    where = f"`{type(experiment).__name__}.derive`"
    values: Any = experiment.derive(splits)
    if not isinstance(values, Mapping):
        raise HookError(
            f"{where} returned {type(values).__name__}.",
            expected='a mapping of fields to values, such as {"class_weights": weights}',
        )
    values = cast("Mapping[str, Any]", values)
    late = [name for name in values if name in _TOO_LATE]
    if late:
        raise HookError(
            f"{where} returned a value for the run option `{late[0]}`.",
            expected="fields: run options are resolved before the data is built",
            fix=f"pass `{late[0]}=` to `Nitro`, or compute it in a property of the experiment",
        )
    return dict(values)


def encode_derived(derived: Mapping[str, Any]) -> dict[str, Any]:
    """Derived values as JSON, exactly: arrays by their bytes."""
    return {name: _encoded(value) for name, value in derived.items()}


def decode_derived(encoded: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Derived values as `encode_derived` was given them; tells of those that it lost."""
    values = {name: _value(item) for name, item in encoded.items()}
    lost = [name for name, value in values.items() if isinstance(value, _Lost)]
    if lost:
        warn(
            f"The weights {where} were trained with derived values of {', '.join(lost)}, which a "
            "record cannot hold; the experiment's own are used.\n"
            "  fix: derive numbers, strings, arrays, or tuples and dicts of them"
        )
    return {name: value for name, value in values.items() if name not in lost}


class _Lost:
    """Stands for a value that a record could not hold."""


def _encoded(value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(item) for item in cast("list[Any]", value)]}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {"dict": {str(name): _encoded(item) for name, item in items.items()}}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        if array.dtype.kind in "biufc" or array.dtype.kind == "V":
            content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            return {"array": content, "dtype": array.dtype.name, "shape": list(array.shape)}
    return {"lost": type(value).__name__}


def _value(item: Mapping[str, Any]) -> Any:
    match item:
        case {"value": value}:
            return value
        case {"tuple": items}:
            return _whole(tuple(_value(one) for one in items))
        case {"list": items}:
            return _whole([_value(one) for one in items])
        case {"dict": items}:
            values = {name: _value(one) for name, one in items.items()}
            return _Lost() if any(isinstance(v, _Lost) for v in values.values()) else values
        case {"array": content, "dtype": dtype, "shape": shape}:
            flat = np.frombuffer(base64.b64decode(content), _dtype(dtype))
            return flat.reshape(shape).copy()
        case _:
            return _Lost()


def _whole(items: Any) -> Any:
    return _Lost() if any(isinstance(item, _Lost) for item in items) else items


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # bfloat16 and the like have no name in NumPy

    return np.dtype(getattr(ml_dtypes, name, name))
