"""What several commands print of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nitro._journal import RunFile


def describe_outcome(run: RunFile) -> str:
    """Where a run stands: its status, its directory, its best and its last epoch."""
    preset = f", preset {run.preset}" if run.preset else ""
    lines = [
        f"{run.experiment}{preset}: {run.status}, epoch {run.epoch}/{run.max_epochs}, "
        f"step {run.step}",
        f"  run: {run.run_dir}" + (f" ({run.run})" if run.run else ""),
    ]
    if run.status == "running":
        lines.append(
            f"  process: {run.pid} on {run.host}, {run.phase}; `kill {run.pid}` stops it with a "
            "record"
        )
    if run.error:
        lines.append("  error: " + run.error.replace("\n", "\n  "))
    history = run.to_history()
    if history.has_best:
        lines.append(f"  best: {_row(history.best)}")
    if run.history:
        lines.append(f"  last: {_row(run.history[-1])}")
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in row.items())


def number(value: Any) -> str:
    """A value as a person reads it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
