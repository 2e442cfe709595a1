"""`nitro evaluate`: prints the metrics of a run's best checkpoint."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ._arguments import AsJson, CheckpointName, Sets, Source, open_source
from ._outcome import number


def evaluate(
    target: Source,
    *,
    checkpoint: CheckpointName = None,
    split: Annotated[
        str | None, typer.Option(help="The split to evaluate. [test; val where there is none]")
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Print the metrics of a run's best record on a split."""
    from nitro._run import Nitro, session_of

    experiment, record = open_source(target, checkpoint, sets)
    with Nitro(experiment, checkpoint=record.path, logger=None, checkpointer=None) as run:
        splits = session_of(run).setup.splits
        if split is None:
            split = "test" if "test" in splits or "val" not in splits else "val"
            if split == "val":
                print("There is no split `test`: evaluated on `val`.", file=sys.stderr)
        metrics = run.evaluate(split)
    if as_json:
        from nitro._logs import plain

        print(json.dumps(plain(metrics), allow_nan=False))
        return
    print(f"{record.path}  epoch {record.meta['epoch']}, step {record.meta['step']}, {split}:")
    print("\n".join(f"  {name}  {number(value)}" for name, value in metrics.items()))
