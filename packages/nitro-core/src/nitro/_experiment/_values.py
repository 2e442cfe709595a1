"""Checks and converts the values that an experiment is constructed with."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any, get_args, get_origin

import numpy as np

from nitro.errors import ConfigError

from ._fields import FieldInfo, Residency


def checked_value(owner: str, field: FieldInfo, value: Any, *, strict: bool = False) -> Any:
    """The value as the field stores it: converted where a trace sees it, else as given.

    Args:
        owner: The experiment's class name.
        field: The field.
        value: What it was given.
        strict: Whether to convert whatever the residency.

    Raises:
        ConfigError: A value that its declared type cannot hold exactly.
    """
    try:
        if strict or field.residency is Residency.GRAPH_CONST:
            value = _convert(value, field.type)
        is_device = field.residency is Residency.DEVICE
        return traced_value(value, field.type) if is_device else value
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"`{owner}.{field.name}` is {value!r} ({type(value).__name__}).",
            expected=f"a value of the declared type {type_name(field.type)}",
        ) from error


def _convert(value: Any, declared: Any) -> Any:
    origin = get_origin(declared)
    if declared is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, get_args(declared))
    if origin is typing.Literal:
        return _convert_literal(value, get_args(declared))
    if declared is None or declared is types.NoneType:
        return _require(value, fits=value is None)
    if (origin or declared) is tuple:
        return _convert_tuple(value, get_args(declared))
    target = origin or declared
    if not isinstance(target, type):
        return value
    if issubclass(target, enum.Enum):
        return value if isinstance(value, target) else _convert_enum(value, target)
    if target in (bool, int, float, complex, str):
        return _convert_scalar(value, target)
    if isinstance(value, target):
        return value
    raise TypeError(value)


def _require(value: Any, *, fits: bool) -> Any:
    if not fits:
        raise TypeError(value)
    return value


def _convert_scalar(value: Any, target: type) -> Any:
    if isinstance(value, np.generic) or (hasattr(value, "dtype") and value.ndim == 0):
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if target in (bool, str):
        return _require(value, fits=isinstance(value, target))
    if target is int:
        return int(_require(value, fits=is_number and value == int(value)))
    if target is float:
        return float(_require(value, fits=is_number))
    return complex(_require(value, fits=is_number or isinstance(value, complex)))


def _convert_union(value: Any, options: tuple[Any, ...]) -> Any:
    exact = [option for option in options if isinstance(option, type) and type(value) is option]
    for option in (*exact, *options):
        try:
            return _convert(value, option)
        except (TypeError, ValueError, OverflowError):
            continue
    raise TypeError(value)


def _convert_literal(value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        if type(option) is type(value) and option == value:
            return option
    raise TypeError(value)


def _convert_tuple(value: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise TypeError(value)
    if not parts:
        return tuple(value)
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_convert(item, parts[0]) for item in value)
    return tuple(_convert(item, part) for item, part in zip(value, parts, strict=True))


def _convert_enum(value: Any, target: type[enum.Enum]) -> enum.Enum:
    if isinstance(value, str) and value in target.__members__:
        return target[value]
    return target(value)


def traced_value(value: Any, declared: Any) -> Any:
    """The value of a Device field: the declared type decides the dtype of numbers.

    Of an array, a declared number is the dtype of its entries. What is declared as no number,
    and no container of numbers, stays as it is given.

    Raises:
        TypeError: The declared number cannot hold it.
        ValueError: Likewise.
    """
    origin, parts = get_origin(declared) or declared, get_args(declared)
    if origin in _NUMBERS:
        is_array = hasattr(value, "dtype") and value.ndim > 0
        return _convert_array(value, origin) if is_array else _convert_scalar(value, origin)
    if origin in (typing.Union, types.UnionType):
        numbers = tuple(option for option in parts if option in _NUMBERS)
        is_number = isinstance(value, int | float | complex | np.generic)
        return _convert_union(value, numbers) if numbers and is_number else value
    if not isinstance(value, tuple | list | dict) or not isinstance(origin, type):
        return value
    return _traced_container(value, origin, parts)


_NUMBERS = (bool, int, float, complex)


def _traced_container(value: Any, origin: type, parts: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        of_values = parts[1] if len(parts) == 2 else Any
        items = typing.cast("dict[Any, Any]", value).items()
        return {key: traced_value(item, of_values) for key, item in items}
    if hasattr(origin, "_fields") and isinstance(value, origin):  # a NamedTuple
        parts = tuple(typing.get_type_hints(origin).values())
    is_of_any_length = parts[1:] == (Ellipsis,) or issubclass(origin, list)
    if is_of_any_length:
        parts = parts[:1] * len(value)
    if len(parts) != len(value):
        return value
    make = getattr(type(value), "_make", type(value))
    return make(map(traced_value, value, parts))


def _convert_array(value: Any, target: type) -> Any:
    """An array of the entries that a declared number has; one that fits is itself."""
    array = np.asarray(value)
    if target is float and array.dtype.kind in "iu":
        return array.astype(np.float64)
    if target is int and array.dtype.kind == "f":
        whole = array.astype(np.int64)
        return _require(whole, fits=bool((whole == array).all()))
    return value


def type_name(declared: Any) -> str:
    """A declared type in the words that declare it, for messages."""
    return declared.__name__ if isinstance(declared, type) else str(declared)
