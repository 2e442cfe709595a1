"""`nitro train`: trains an experiment from its source."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nitro._journal import find_runs, read_run_file
from nitro.errors import ConfigError

from ._arguments import Sets, Target, parse_sets
from ._outcome import describe_outcome


def train(
    target: Target,
    *,
    preset: Annotated[str | None, typer.Option(help="A preset of the class.")] = None,
    sets: Sets = None,
    max_epochs: Annotated[int | None, typer.Option(help="How many epochs to train.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where log and records go.")] = None,
    seed: Annotated[int | None, typer.Option(help="The root of all random streams.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest record, if there is one.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the whole binding report.")
    ] = False,
) -> None:
    """Train an experiment; Ctrl-C stops it with a record, a second one aborts."""
    from nitro._run import Nitro, load_experiment, session_of

    cls = load_experiment(target)
    fields = parse_sets(sets, cls)
    given = {"max_epochs": max_epochs, "run_dir": run_dir, "seed": seed}
    options: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
    for name in options.keys() & fields.keys():
        raise ConfigError(
            f"`{name}` is given twice: by --set and by --{name.replace('_', '-')}.",
            fix="leave one of them out",
        )
    if resume:
        options["resume"] = "auto"
    if preset is not None:
        run = Nitro.from_preset(cls, preset, **fields, **options)
    else:
        run = Nitro(cls(**fields), **options)
    flags = {"preset": preset, **given, "run_dir": run.run_dir}
    session_of(run).resume_command = _resume_command(target, sets or [], flags)
    # What is read while it trains goes to stderr, the outcome to stdout.
    print(run.binding if verbose else _in_a_line(run), file=sys.stderr)
    with run:
        run.train()
        has_file = bool(find_runs(run.run_dir))
        print(describe_outcome(read_run_file(run.run_dir)) if has_file else repr(run))


def _in_a_line(run: Any) -> str:
    """The binding report's title and weights, and where the run is."""
    title, weights, *_ = run.binding.sections
    return f"{title.title}: {weights.lines[0]}; into {run.run_dir} (-v for the whole report)"


def _resume_command(target: str, sets: list[str], flags: dict[str, Any]) -> str:
    """The command that started the run, as it has to be typed to go on."""
    words = ["nitro", "train", target]
    words += [word for text in sets for word in ("--set", text)]
    for name, value in flags.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--resume"])
