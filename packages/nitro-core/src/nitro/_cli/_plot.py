"""`nitro plot`: draws the curves of runs into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nitro._journal import plot_histories, plot_history, read_run_file


def plot(
    run_dirs: Annotated[list[str], typer.Argument(metavar="RUN...", help="One run, or several.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file; its suffix says the format. [RUN/history.png; of several runs, "
            "comparison.png]"
        ),
    ] = None,
) -> None:
    """Draw the curves of a run, or of several to compare, into a file, and print its path."""
    runs = {name: read_run_file(name) for name in run_dirs}
    if len(runs) == 1:
        ((name, run),) = runs.items()
        path = out or Path(name.partition("#")[0]) / "history.png"
        plot_history(run.to_history(), title=f"{run.experiment} ({name})", path=path)
    else:
        path = out or Path("comparison.png")
        experiments = dict.fromkeys(run.experiment for run in runs.values())
        histories = {name: run.to_history() for name, run in runs.items()}
        plot_histories(histories, title=", ".join(experiments), path=path)
    print(path)
