"""What a run has been through: one row per finished epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from nitro.errors import ConfigError, did_you_mean

HISTORY_KEYS = ("epoch", "step", "loss")
"""What every row holds: the counts, and the mean train loss."""


class History:
    """The finished epochs: epoch, step, mean train loss, and the validation's metrics.

    Index by an epoch's number for its row, or by a name for a column.
    """

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = rows or []

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in order of appearance."""
        names: dict[str, None] = dict.fromkeys(HISTORY_KEYS)
        for row in self.rows:
            names |= dict.fromkeys(row)
        return list(names)

    def append(self, row: dict[str, Any]) -> None:
        """Adds a finished epoch."""
        self.rows.append(row)

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns by name; None where an epoch lacks a value."""
        return {name: [row.get(name) for row in self.rows] for name in self.columns}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | str) -> dict[str, Any] | list[Any]:
        """A row by epoch (from 1), or a column by name.

        Raises:
            ConfigError: No such epoch or column; says what there is.
        """
        if isinstance(key, str):
            if key not in self.columns:
                raise ConfigError(
                    f"The history has no column `{key}`.",
                    expected=did_you_mean(key, self.columns),
                )
            return [row.get(key) for row in self.rows]
        for row in self.rows:
            if row["epoch"] == key:
                return row
        held = (
            f"epochs {self.rows[0]['epoch']} to {self.rows[-1]['epoch']}" if self.rows else "none"
        )
        raise ConfigError(f"The history has no epoch {key}.", expected=f"what it holds: {held}")

    def __repr__(self) -> str:
        lines = ["  ".join(f"{name:>10}" for name in self.columns)]
        lines += [
            "  ".join(f"{_shown(row.get(name)):>10}" for name in self.columns) for row in self.rows
        ]
        return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "-" if value is None else str(value)
