"""The table of a run: what is traced and may change with the step, one row for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._trees import Flat

SMALL_FIELD_SIZE = 16
"""A Device field of at most this many numbers always has columns, so that a schedule for it
compiles nothing. A larger one has them only while it is scheduled."""


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """What lies where in a row.

    Attributes:
        columns: First and last column (exclusive) by name: `opt.<group>.learning_rate`,
            `opt.<group>.weight_decay`, `clip`, `device.<field>`.
        width: The number of columns.
    """

    columns: Mapping[str, tuple[int, int]]
    width: int

    @classmethod
    def make(cls, widths: Mapping[str, int]) -> RowLayout:
        """Lays columns side by side in the order of the names."""
        columns: dict[str, tuple[int, int]] = {}
        start = 0
        for name, width in widths.items():
            columns[name] = (start, start + width)
            start += width
        return cls(columns=columns, width=start)

    def scalars(self, row: Any) -> dict[str, Any]:
        """The hyperparameters in a row by name, each float32 ()."""
        return {
            name: row[start]
            for name, (start, _) in self.columns.items()
            if not name.startswith("device.")
        }

    def device_fields(self, row: Any, device: Flat) -> Flat:
        """The Device fields at a row: the scheduled ones come out of it. For a trace.

        A column of a field that is not scheduled holds NaN, and the field stays as it is.
        """

        def selected(name: str, value: Any) -> Any:
            if f"device.{name}" not in self.columns:
                return value
            given = self.field_at(row, name, value)
            is_constant = jnp.isnan(row[self.columns[f"device.{name}"][0]])
            return jax.tree.map(lambda old, new: jnp.where(is_constant, old, new), value, given)

        return {name: selected(name, value) for name, value in device.items()}

    def field_at(self, row: Any, name: str, like: Any) -> Any:
        """A Device field out of its columns, in its own shapes and dtypes.

        Args:
            row: A row, of NumPy or traced.
            name: The field.
            like: The field's value: a tree of arrays.
        """
        start, _ = self.columns[f"device.{name}"]
        leaves, treedef = jax.tree.flatten(like)
        parts: list[Any] = []
        for leaf in leaves:
            parts.append(row[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
            start += leaf.size
        return jax.tree.unflatten(treedef, parts)


class StepTable:
    """The rows of all steps; only the columns that change are held for every step.

    Args:
        constant: float32 (columns,): the row of a run without schedules.
        curves: float32 (steps, n) by first column: what changes.
        num_steps: The horizon.
    """

    def __init__(
        self, constant: np.ndarray, curves: Mapping[int, np.ndarray], *, num_steps: int
    ) -> None:
        self._constant = constant
        self._curves = dict(curves)
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """The rows of some steps, counted from 0: float32 (len(steps), columns).

        Steps past the horizon, which are never taken, get the row of the last one.
        """
        steps = np.minimum(np.asarray(steps), max(self._num_steps - 1, 0))
        rows = np.tile(self._constant, (len(steps), 1))
        for start, curve in self._curves.items():
            rows[:, start : start + curve.shape[1]] = curve[steps]
        return rows


def device_at(
    layout: RowLayout, table: StepTable, scheduled: Sequence[str], device: Flat, step: int
) -> Flat:
    """The Device fields after `step` finished steps, for what runs between two steps.

    Evaluation after step n sees what step n saw; before the first step, what it will see.
    """
    # On NumPy: eager JAX operations would compile, in the middle of a run.
    row = table[[max(step - 1, 0)]][0]
    fields = {name: layout.field_at(row, name, device[name]) for name in scheduled}
    return {**device, **jax.tree.map(jnp.asarray, fields)}


def is_schedulable(value: Any) -> bool:
    """Whether a Device field (a tree of arrays) can be a part of a float32 row."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    leaves = jax.tree.leaves(value)
    return all(any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds) for leaf in leaves)


def field_size(value: Any) -> int:
    """How many columns a Device field takes."""
    return sum(leaf.size for leaf in jax.tree.leaves(value))
