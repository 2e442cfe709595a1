"""`nitro runs`: lists the runs at and below a directory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nitro._journal import RunFile, Table, read_runs
from nitro.errors import ConfigError

from ._arguments import AsJson
from ._outcome import number


def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]")] = Path("runs"),
    *,
    as_json: AsJson = False,
) -> None:
    """List the runs at and below a directory, the last one first."""
    if not directory.is_dir():
        raise ConfigError(f"There is no directory `{directory}`.", fix="nitro runs DIR")
    found = read_runs(directory)
    if as_json:
        print(json.dumps([_facts(run) for run in found], allow_nan=False))
    elif found:
        print(_runs_table(found, directory).to_text())
    else:
        print(f"There is no run in `{directory}`.")


def _facts(run: RunFile) -> dict[str, Any]:
    left_out = ("binding", "history", "config")
    return {name: v for name, v in dataclasses.asdict(run).items() if name not in left_out}


def _runs_table(found: Sequence[RunFile], directory: Path) -> Table:
    base = directory.absolute()
    rows: list[tuple[str, ...]] = []
    for run in found:
        path = Path(run.run_dir)
        history = run.to_history()
        best = history.best if history.has_best else None
        rows.append(
            (
                str(path.relative_to(base)) if path != base else ".",
                run.experiment + (f" ({run.preset})" if run.preset else ""),
                run.status,
                f"{run.epoch}/{run.max_epochs}",
                f"{run.metric} {number(best[run.metric])}" if best and run.metric else "-",
                _ago(time.time() - run.updated_at),
            )
        )
    return Table(
        columns=("run", "experiment", "status", "epoch", "best", "updated"), rows=tuple(rows)
    )


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
