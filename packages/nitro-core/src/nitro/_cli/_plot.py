"""`nitro plot`: draws the curves of runs into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nitro._journal import plot_history, read_run_file


def plot(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="The file; its suffix says the format. [RUN/history.png]")
    ] = None,
) -> None:
    """Draw a run's curves into a file, and print its path."""
    run = read_run_file(run_dir)
    path = out or run_dir / "history.png"
    plot_history(run.to_history(), title=f"{run.experiment} ({run_dir})", path=path)
    print(path)
