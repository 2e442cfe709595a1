"""What several commands take, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nitro.errors import ConfigError

Target = Annotated[
    str, typer.Argument(metavar="FILE:CLASS", help="FILE.py:Class, or package.module:Class.")
]
Source = Annotated[
    str, typer.Argument(metavar="RUN|FILE:CLASS", help="A run, or a class with --checkpoint.")
]
CheckpointName = Annotated[
    str | None, typer.Option(help="A run's directory, @best or @latest, or a record's.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A field's value; model.width=8 for a group."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def parse_sets(sets: Sequence[str] | None, cls: Any) -> dict[str, Any]:
    """The field values that `--set` gives.

    Raises:
        ConfigError: No such field, a value that does not fit, or a field that is set twice.
    """
    from nitro._experiment import parse_override

    values: dict[str, Any] = {}
    for text in sets or []:
        name, value = parse_override(cls, text)
        if name in values:
            raise ConfigError(f"`--set {name}` is given twice.", fix="leave one of them out")
        values[name] = value
    return values


def open_source(target: str, checkpoint: str | None, sets: Sequence[str] | None) -> tuple[Any, Any]:
    """The experiment and the record that a command names: a run, or a class and a run.

    Raises:
        ConfigError: A class without weights, or a run beside `--checkpoint`.
        CheckpointError: No such run, or a class that is gone.
    """
    from nitro._run import build_from_record, class_of_record, load_experiment, open_record

    if checkpoint is None and (target.endswith(".py") or ".py:" in target):
        raise ConfigError(
            f"`{target}` is an experiment without weights.",
            expected="a run, or `--checkpoint RUN` beside the class",
            fix=f"add `--checkpoint RUN` to `{target}`",
        )
    if checkpoint is not None and Path(target).is_dir():
        raise ConfigError(
            f"`{target}` is a directory, and `--checkpoint` is `{checkpoint}`.",
            expected="a class beside `--checkpoint`, or a run alone",
            fix=f"name the record alone: `{checkpoint}`",
        )
    record = open_record(checkpoint or target)
    cls = class_of_record(record) if checkpoint is None else load_experiment(target)
    return build_from_record(cls, record, parse_sets(sets, cls)), record
