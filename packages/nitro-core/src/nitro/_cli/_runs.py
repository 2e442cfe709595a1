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
    """What a program wants of a run: all but the report and the single epochs."""
    history = run.to_history()
    last = run.history[-1] if run.history else {}
    facts = dataclasses.asdict(run)
    for left_out in ("binding", "history"):
        del facts[left_out]
    best = history.best if history.has_best else None
    return {
        **facts,
        # The loss of the last step is one batch's: that of the epoch compares.
        "loss": last.get("loss"),
        "step_loss": run.loss,
        "best": None
        if best is None or run.metric is None
        else {"value": best[run.metric], "epoch": best["epoch"]},
        "last": last,
    }


def _runs_table(found: Sequence[RunFile], directory: Path) -> Table:
    base = directory.absolute()
    differing = differing_settings(found)
    rows = [
        (
            _name(run, base),
            run.experiment + (f" ({run.preset})" if run.preset else ""),
            run.status,
            f"{run.epoch}/{run.max_epochs}",
            *(number(run.settings.get(name, "-")) for name in differing),
            *_scores(run),
            _ago(time.time() - run.updated_at),
        )
        for run in found
    ]
    columns = ("run", "experiment", "status", "epoch", *differing, "metric", "best", "last")
    return Table(columns=(*columns, "updated"), rows=tuple(rows), aligned_left=(1, 2))


def _name(run: RunFile, base: Path) -> str:
    path = Path(run.run_dir)
    name = str(path.relative_to(base)) if path != base else "."
    return f"{name}#{run.run}" if run.is_earlier else name


def _scores(run: RunFile) -> tuple[str, str, str]:
    """The metric that ranks, its best value with the epoch, and its last one."""
    history = run.to_history()
    if not history.has_best or run.metric is None:
        return run.metric or "-", "-", "-"
    best = history.best
    last = run.history[-1].get(run.metric, "-")
    return run.metric, f"{number(best[run.metric])} (epoch {best['epoch']})", number(last)


def differing_settings(found: Sequence[RunFile]) -> list[str]:
    """The fields and options that are not the same in all runs, in the order of the runs'."""
    names = dict.fromkeys(name for run in found for name in run.settings)
    values = {name: {json.dumps(run.settings.get(name)) for run in found} for name in names}
    # The column `epoch` shows the horizon already.
    return [name for name in names if len(values[name]) > 1 and name != "max_epochs"]


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
