"""`nitro export`: writes an artifact of a run's best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nitro.errors import ConfigError

from ._arguments import CheckpointName, Sets, Source, open_source


def export(
    target: Source,
    *,
    to: Annotated[str, typer.Option(help="The backend; `nitro backends` lists them.")],
    checkpoint: CheckpointName = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="The folder that the artifact goes into.")
    ] = Path("export_out"),
    name: Annotated[
        str | None, typer.Option(help="The artifact's name. [the class's, in lower case]")
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,N", help="The batch sizes to compile for, such as 1,32.")
    ] = "1",
    declared: Annotated[
        str | None,
        typer.Option("--experiment", metavar="FILE:CLASS", help="The class, if the run's moved."),
    ] = None,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Also write a program for any batch size.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an artifact of this name.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Export a run's best record, verified, and print the artifact's path."""
    from nitro._run import Nitro
    from nitro.export import export_model

    if declared is not None:
        target, checkpoint = declared, checkpoint or target
    experiment, record = open_source(target, checkpoint, sets)
    # No data: what the artifact is compared on is made up, and nothing has to be loaded.
    with Nitro(experiment, checkpoint=record.path, data={}, logger=None, checkpointer=None) as run:
        path = export_model(
            run,
            to,
            dir=directory,
            name=name or type(experiment).__name__.lower(),
            batch_sizes=_parse_sizes(batch_sizes),
            dynamic_batch=dynamic_batch,
            overwrite=overwrite,
        )
    print(path)


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"`--batch-sizes` is {text!r}.", expected="whole numbers with commas between, as 1,32"
        ) from error
