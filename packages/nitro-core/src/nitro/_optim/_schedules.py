"""Schedules become columns: every value that moves with the step, for the whole horizon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._trees import Flat, describe_tree
from nitro.errors import ConfigError

from ._curves import Evaluate, evaluate_schedule
from ._groups import ParamGroup
from ._schedule_keys import Schedule
from ._table import SMALL_FIELD_SIZE, RowLayout, StepTable, field_size, is_schedulable

_ROUNDING_ULPS = 8
"""How far below 0 a rounding may lie, in float32 ulps of the largest value; 0.4 was seen."""


def make_layout(
    groups: Sequence[ParamGroup], *, clips: bool, device: Flat, schedules: Mapping[str, Schedule]
) -> RowLayout:
    """Gives each value of a row its place."""
    widths = {
        f"opt.{group.name}.{field}": 1
        for group in groups
        for field in ("learning_rate", "weight_decay")
    }
    if clips:
        widths["clip"] = 1
    return RowLayout.make({**widths, **device_widths(device, schedules)})


def device_widths(device: Flat, schedules: Mapping[str, Schedule]) -> dict[str, int]:
    """The columns of the Device fields that have any."""
    widths: dict[str, int] = {}
    for name, value in device.items():
        is_small = 0 < field_size(value) <= SMALL_FIELD_SIZE
        if f"device.{name}" in schedules or (is_small and is_schedulable(value)):
            widths[f"device.{name}"] = field_size(value)
    return widths


def make_table(
    layout: RowLayout,
    *,
    groups: Sequence[ParamGroup],
    clip: float,
    device: Flat,
    schedules: Mapping[str, Schedule],
    num_steps: int,
    evaluate: Evaluate,
) -> StepTable:
    """Evaluates every schedule and fills the table.

    Raises:
        ConfigError: A schedule whose values its target cannot take.
    """
    values: dict[str, Any] = {"clip": clip} if clip else {}
    opt = {
        target: rate_values(schedule, num_steps, evaluate)
        for target, schedule in schedules.items()
        if target.startswith("opt.")
    }
    _refuse_idle(schedules, opt, num_steps)
    for group in groups:
        rate, decay = _group_values(group, opt)
        values[f"opt.{group.name}.learning_rate"] = rate
        # Constants multiply as Python floats and curves in float32: as written by hand.
        values[f"opt.{group.name}.weight_decay"] = rate * decay
    values |= device_values(schedules, device, num_steps, evaluate)
    return fill_table(layout, values, num_steps)


def device_values(
    schedules: Mapping[str, Schedule], device: Flat, num_steps: int, evaluate: Evaluate
) -> dict[str, np.ndarray]:
    """The columns of the scheduled Device fields, by target."""
    return {
        target: _field_values(schedule, device[target.removeprefix("device.")], num_steps, evaluate)
        for target, schedule in schedules.items()
        if target.startswith("device.")
    }


def fill_table(layout: RowLayout, values: Mapping[str, Any], num_steps: int) -> StepTable:
    """The table with these values, constant or (num_steps, ...); NaN where there are none."""
    constant = np.full(layout.width, np.nan, np.float32)
    curves: dict[int, np.ndarray] = {}
    for name, value in values.items():
        start, stop = layout.columns[name]
        if np.ndim(value) == 0:
            constant[start:stop] = value
        else:
            curves[start] = np.reshape(value, (num_steps, stop - start)).astype(np.float32)
    return StepTable(constant, curves, num_steps=num_steps)


def _group_values(group: ParamGroup, opt: Mapping[str, Any]) -> tuple[Any, Any]:
    """A group's rate and decay: from its own curve, else from the common one, else constant."""
    curve = opt.get(f"opt.{group.name}.learning_rate", opt.get("opt.learning_rate"))
    rate = group.learning_rate if curve is None else curve * group.ratio
    decay = opt.get(f"opt.{group.name}.weight_decay", opt.get("opt.weight_decay"))
    return rate, group.weight_decay if decay is None else decay


def _refuse_idle(schedules: Mapping[str, Schedule], opt: Mapping[str, Any], num_steps: int) -> None:
    # optax turns a warm-up of no steps into a rate of 0 for good, and only logs it.
    rate = opt.get("opt.learning_rate")
    if rate is not None and num_steps > 1 and not np.any(rate):
        raise ConfigError(
            f"The schedule `{schedules['opt.learning_rate'].key}` is 0 at each of the {num_steps} "
            "steps: nothing would be learned.",
            expected="a rate above 0 at some step",
            fix="look at the steps given to the schedule: optax holds 0 where there are none",
        )


def rate_values(schedule: Schedule, num_steps: int, evaluate: Evaluate) -> Any:
    """A scheduled hyperparameter: a constant, or float32 (num_steps,)."""
    value = evaluate_schedule(schedule.key, schedule.value, num_steps=num_steps, evaluate=evaluate)
    array = _as_array(schedule, value)
    if array.shape not in ((), (num_steps,)) or array.dtype.kind not in "iuf":
        raise _misfit(schedule, array, "one real number for each step", num_steps)
    array = _without_rounding_below_zero(array)
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise _bad_value(
            schedule, array, np.isfinite(array) & (array >= 0), "0 or more, and finite"
        )
    return array.item() if array.ndim == 0 else array.astype(np.float32)


def _without_rounding_below_zero(values: np.ndarray) -> np.ndarray:
    """The values, with 0 for what lies below it by a rounding of the largest.

    A decay to 0 that is computed as `start + progress * (0 - start)` in float32, as XLA fuses
    it, ends a fraction of an ulp of `start` off.
    """
    if values.dtype.kind != "f" or not np.isfinite(values).all():
        return values
    rounding = _ROUNDING_ULPS * np.finfo(np.float32).eps * np.max(values, initial=0)
    return np.where((values < 0) & (values >= -rounding), values.dtype.type(0), values)


def _field_values(schedule: Schedule, field: Any, num_steps: int, evaluate: Evaluate) -> np.ndarray:
    """The columns of a scheduled Device field, its leaves side by side: (steps, columns)."""
    if not is_schedulable(field):
        raise ConfigError(
            f"The schedule `{schedule.key}` binds to a Device field that holds "
            f"{', '.join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(field)}))}.",
            expected="real numbers: a schedule is a table of float32",
        )
    values = evaluate_schedule(schedule.key, schedule.value, num_steps=num_steps, evaluate=evaluate)
    leaves, treedef = jax.tree.flatten(field)
    given, structure = jax.tree.flatten(values)
    if structure != treedef:
        expected = f"a tree like the field, {describe_tree(field)}"
        raise _misfit(schedule, np.asarray(None), expected, num_steps)
    lead = (num_steps,) if callable(schedule.value) else ()
    columns = [
        _leaf_columns(schedule, _as_array(schedule, value), leaf, lead, num_steps)
        for value, leaf in zip(given, leaves, strict=True)
    ]
    return np.concatenate(columns, axis=1)


def _leaf_columns(
    schedule: Schedule, array: np.ndarray, leaf: Any, lead: tuple[int, ...], num_steps: int
) -> np.ndarray:
    if array.shape != (*lead, *leaf.shape):
        expected = f"the shape of the field, {tuple(leaf.shape)}, at each step"
        raise _misfit(schedule, array, expected, num_steps)
    flat = np.broadcast_to(array.reshape(*lead, -1), (num_steps, leaf.size))
    table = flat.astype(np.float32)
    if np.isnan(table).any():
        raise _bad_value(schedule, flat, ~np.isnan(table), "a number")
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        exact = (table.astype(leaf.dtype) == flat) & (np.abs(table) <= 2.0**24)
        if not exact.all():
            expected = f"whole numbers that {leaf.dtype} holds, up to 2**24: the table is float32"
            raise _bad_value(schedule, flat, exact, expected)
    return table


def _as_array(schedule: Schedule, value: Any) -> np.ndarray:
    array = np.asarray(value)
    is_number = array.dtype.kind in "biuf" or jnp.issubdtype(array.dtype, jnp.floating)
    if not is_number:
        raise ConfigError(
            f"The schedule `{schedule.key}` is {value!r} ({type(value).__name__}).",
            expected="a number, or a factory of the horizon: "
            "`lambda total: optax.cosine_decay_schedule(1e-3, total)`",
        )
    return array.astype(np.float32) if array.dtype.kind not in "biuf" else array


def _misfit(schedule: Schedule, array: np.ndarray, expected: str, num_steps: int) -> ConfigError:
    shape = array.shape[1:] if array.shape[:1] == (num_steps,) else array.shape
    got = "another tree" if array.dtype == object else f"{array.dtype}{shape}"
    return ConfigError(
        f"The schedule `{schedule.key}` gives {got} for `{schedule.target}`.", expected=expected
    )


def _bad_value(
    schedule: Schedule, values: np.ndarray, good: np.ndarray, expected: str
) -> ConfigError:
    at = tuple(np.argwhere(~good)[0])
    where = f" at step {at[0]}, counted from 0" if at else ""
    return ConfigError(f"The schedule `{schedule.key}` is {values[at]}{where}.", expected=expected)
