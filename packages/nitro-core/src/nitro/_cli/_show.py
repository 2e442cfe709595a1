"""`nitro show`: where a run stands, how it was configured, its epochs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from typing import Annotated

import typer

from nitro._journal import RunFile, earlier_runs, read_run_file

from ._arguments import AsJson
from ._outcome import describe_outcome


def show(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show a run: where it stands, how it was configured, its epochs."""
    run = read_run_file(run_dir)
    if as_json:
        print(json.dumps(dataclasses.asdict(run), allow_nan=False))
        return
    # Only a screen is too small for all of it.
    size = shutil.get_terminal_size()
    width, height = (size.columns, size.lines - 4) if sys.stdout.isatty() else (10**6, 10**6)
    table = run.to_history().table(width=width, height=height).to_text()
    print("\n\n".join([describe_outcome(run), *_others(run), run.binding, table]))


def _others(run: RunFile) -> list[str]:
    """The other runs of the directory, and how to see them; nothing without any."""
    others = [f"  {run.run_dir}#{one.run}: {one.in_words}" for one in earlier_runs(run)]
    return [
        "\n".join(["other runs of this directory, as `nitro show` takes them:", *others])
    ] * bool(others)
