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
    """The value as the field stores it: converted where structural, else as given.

    Args:
        owner: The experiment's class name.
        field: The field.
        value: What it was given.
        strict: Whether to convert whatever the residency.

    Raises:
        ConfigError: A structural value that its declared type cannot hold exactly.
    """
    if field.residency is not Residency.GRAPH_CONST and not strict:
        return value
    try:
        return _convert(value, field.type)
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
    if isinstance(value, np.generic):
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


def type_name(declared: Any) -> str:
    """A declared type in the words that declare it, for messages."""
    return declared.__name__ if isinstance(declared, type) else str(declared)
