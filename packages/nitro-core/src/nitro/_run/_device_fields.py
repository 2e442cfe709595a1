"""Reads and sets the Device fields of a live handle."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._experiment import Residency, field_names, traced_value
from nitro._trees import describe_array, describe_tree, too_wide
from nitro.errors import ConfigError, did_you_mean

from ._session import Session


def device_field(session: Session, name: str) -> Any:
    """The value of a Device field now, on the host.

    Raises:
        ConfigError: No such Device field.
    """
    _check_is_device(session, name)
    return jax.device_get(session.device[name])


def set_device_fields(session: Session, values: Mapping[str, Any]) -> None:
    """Sets Device fields; all of them or, if one does not fit, none.

    Raises:
        ConfigError: Nothing to set, no such Device field, one that a schedule owns, or a
            value of another structure, shape or kind.
    """
    if not values:
        raise ConfigError("`set_device()` got no fields.", fix="write `set_device(name=value)`")
    new = {name: _checked(session, name, value) for name, value in values.items()}
    session.device.update(new)


def _checked(session: Session, name: str, value: Any) -> Any:
    _check_is_device(session, name)
    optimizer = session.setup.optimizer
    if optimizer is not None and f"device.{name}" in optimizer.schedules:
        raise ConfigError(
            f"`{session.setup.owner}.{name}` is scheduled: the schedule sets it at each step.",
            fix=f"build the handle without a schedule for `{name}` to set it by hand",
        )
    current = session.device[name]
    # What the declared type cannot hold is refused below, in the words of this call.
    with suppress(TypeError, ValueError, OverflowError):
        value = traced_value(value, session.setup.experiment.fields()[name].type)
    if jax.tree.structure(value) != jax.tree.structure(current):
        raise ConfigError(
            f"`set_device({name}=...)` got {describe_tree(value)}.",
            expected=f"{describe_tree(current)}, as the field has",
            fix="a list is a tree, too: pass an array as `np.asarray(...)`",
        )
    return jax.tree.map(lambda old, leaf: _converted(name, old, leaf), current, value)


def _converted(name: str, old: jax.Array, value: Any) -> jax.Array:
    array = np.asarray(value)
    if array.shape != old.shape or not np.can_cast(array.dtype, old.dtype, "same_kind"):
        raise ConfigError(
            f"`set_device({name}=...)` got {describe_array(array)}.",
            expected=f"{describe_array(old)}: another shape or kind would be another program",
            fix="build a new handle for it; programs that still fit are shared",
        )
    lost = too_wide(array)
    if lost is not None:
        raise ConfigError(
            f"`set_device({name}=...)` got {lost}.",
            expected=f"integers that fit {old.dtype}: it would wrap around",
        )
    return jnp.asarray(array.astype(old.dtype))


def _check_is_device(session: Session, name: str) -> None:
    fields, owner = session.setup.experiment.fields(), session.setup.owner
    if name not in fields:
        names = field_names(session.setup.experiment, Residency.DEVICE)
        inside = [field for field in names if field.startswith(f"{name}.")]
        if inside:
            raise ConfigError(
                f"`{owner}.{name}` is a group of fields.",
                expected=f"one of its Device fields: {', '.join(f'`{n}`' for n in inside)}",
                fix=f"write `set_device(**{{'{inside[0]}': ...}})`",
            )
        raise ConfigError(f"`{owner}` has no field `{name}`.", expected=did_you_mean(name, names))
    match fields[name].residency:
        case Residency.DEVICE:
            return
        case Residency.HOST:
            attribute = name.rpartition(".")[2]
            problem, fix = "host-only: no trace sees it", f"mark it `{attribute}: Device[...]`"
        case Residency.GRAPH_CONST:
            problem = "GraphConst: another value is another program"
            keyword = f"**{{'{name}': ...}}" if "." in name else f"{name}=..."
            fix = (
                f"build `Nitro(run.experiment.replace({keyword}), data=...)`; what is compiled and "
                "still fits is shared"
            )
    raise ConfigError(f"`{owner}.{name}` is {problem}.", expected="a Device field", fix=fix)
