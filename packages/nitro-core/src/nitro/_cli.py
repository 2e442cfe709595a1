"""The `nitro` command: arguments in, exit code out.

Starting it imports no JAX. A command that needs it imports what it uses in its body.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ._journal import RunFile, Table, find_runs, plot_history, read_run_file
from ._plugins import Discovery, discover, install_hint
from ._version import __version__
from .errors import ConfigError, NitroError

_DEBUG = "--debug"

app = typer.Typer(
    name="nitro",
    help="Train a Flax model as a declared experiment, then export it for serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 an error, 2 a usage error.

    An error is one message on stderr; `--debug`, anywhere before a `--`, adds the
    traceback.

    Args:
        arguments: The words after `nitro`; None takes those of the process.
    """
    words, debug = _without_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words, prog_name="nitro")
    # The last resort of the process: whatever went wrong, the user gets one message.
    except Exception as error:  # noqa: BLE001
        if debug:
            traceback.print_exception(error)
        else:
            print(_message(error), file=sys.stderr)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nitro {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    # Both are dealt with before this runs: `version` by its callback, `debug` by `main`.
    del version, debug


_Target = Annotated[
    str, typer.Argument(metavar="FILE:CLASS", help="FILE.py:Class, or package.module:Class.")
]
_Source = Annotated[
    str, typer.Argument(metavar="RUN|FILE:CLASS", help="A run, or a class with --checkpoint.")
]
_Checkpoint = Annotated[
    str | None, typer.Option(help="A run's directory, @best or @latest, or a record's.")
]
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A field's value; model.width=8 for a group."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def train(
    target: _Target,
    *,
    preset: Annotated[str | None, typer.Option(help="A preset of the class.")] = None,
    sets: _Set = None,
    max_epochs: Annotated[int | None, typer.Option(help="How many epochs to train.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where log and records go.")] = None,
    seed: Annotated[int | None, typer.Option(help="The root of all random streams.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest record, if there is one.")
    ] = False,
) -> None:
    """Train an experiment; Ctrl-C stops it with a record, a second one aborts."""
    from ._experiment import parse_override
    from ._run import Nitro, load_experiment

    cls = load_experiment(target)
    fields = _parsed(sets or [], lambda text: parse_override(cls, text))
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
    # What is read while it trains goes to stderr, the outcome to stdout.
    print(run.binding, file=sys.stderr)
    with run:
        run.train()
        print(_outcome(read_run_file(run.run_dir)) if _has_file(run.run_dir) else repr(run))


@app.command()
def evaluate(
    target: _Source,
    *,
    checkpoint: _Checkpoint = None,
    split: Annotated[str, typer.Option(help="The split to evaluate.")] = "test",
    sets: _Set = None,
    as_json: _Json = False,
) -> None:
    """Print the metrics of a run's best record on a split."""
    from ._run import Nitro

    experiment, record = _opened(target, checkpoint, sets)
    with Nitro(experiment, checkpoint=record.path, logger=None, checkpointer=None) as run:
        metrics = run.evaluate(split)
    if as_json:
        from ._logs import plain

        print(json.dumps(plain(metrics), allow_nan=False))
        return
    print(f"{record.path}  epoch {record.meta['epoch']}, step {record.meta['step']}, {split}:")
    print("\n".join(f"  {name}  {_number(value)}" for name, value in metrics.items()))


@app.command()
def export(
    target: _Source,
    *,
    to: Annotated[str, typer.Option(help="The backend; `nitro backends` lists them.")],
    checkpoint: _Checkpoint = None,
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
    sets: _Set = None,
) -> None:
    """Export a run's best record, verified, and print the artifact's path."""
    from ._run import Nitro
    from .export import export_model

    if declared is not None:
        target, checkpoint = declared, checkpoint or target
    experiment, record = _opened(target, checkpoint, sets)
    # No data: what the artifact is compared on is made up, and nothing has to be loaded.
    with Nitro(experiment, checkpoint=record.path, data={}, logger=None, checkpointer=None) as run:
        path = export_model(
            run,
            to,
            dir=directory,
            name=name or type(experiment).__name__.lower(),
            batch_sizes=_sizes(batch_sizes),
            dynamic_batch=dynamic_batch,
            overwrite=overwrite,
        )
    print(path)


@app.command()
def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]")] = Path("runs"),
    *,
    as_json: _Json = False,
) -> None:
    """List the runs at and below a directory, the last one first."""
    if not directory.is_dir():
        raise ConfigError(f"There is no directory `{directory}`.", fix="nitro runs DIR")
    found = [read_run_file(path) for path in find_runs(directory)]
    found.sort(key=lambda run: run.updated_at, reverse=True)
    if as_json:
        print(json.dumps([_facts(run) for run in found], allow_nan=False))
    elif found:
        print(_runs_table(found, directory).to_text())
    else:
        print(f"There is no run in `{directory}`.")


@app.command()
def show(run_dir: _Run, *, as_json: _Json = False) -> None:
    """Show a run: where it stands, how it was configured, its epochs."""
    run = read_run_file(run_dir)
    if as_json:
        print(json.dumps(dataclasses.asdict(run), allow_nan=False))
        return
    # Only a screen is too small for all of it.
    size = shutil.get_terminal_size()
    width, height = (size.columns, size.lines - 4) if sys.stdout.isatty() else (10**6, 10**6)
    table = run.to_history().table(width=width, height=height).to_text()
    print("\n\n".join([_outcome(run), run.binding, table]))


@app.command()
def plot(
    run_dir: _Run,
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


@app.command()
def backends() -> None:
    """List the installed export backends, and the plugins that failed to load."""
    print(_backends_report(discover()))


def _opened(target: str, checkpoint: str | None, sets: list[str] | None) -> tuple[Any, Any]:
    """The experiment and the record that a command names: a run, or a class and a run."""
    from ._experiment import parse_override
    from ._run import build_from_record, class_of_record, load_experiment, open_record

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
    fields = _parsed(sets or [], lambda text: parse_override(cls, text))
    return build_from_record(cls, record, fields), record


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"`--batch-sizes` is {text!r}.", expected="whole numbers with commas between, as 1,32"
        ) from error


def _parsed(sets: Sequence[str], parse: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in sets:
        name, value = parse(text)
        if name in values:
            raise ConfigError(f"`--set {name}` is given twice.", fix="leave one of them out")
        values[name] = value
    return values


def _has_file(run_dir: Path) -> bool:
    return bool(find_runs(run_dir))


def _outcome(run: RunFile) -> str:
    preset = f", preset {run.preset}" if run.preset else ""
    lines = [
        f"{run.experiment}{preset}: {run.status}, epoch {run.epoch}/{run.max_epochs}, "
        f"step {run.step}",
        f"  run: {run.run_dir}",
    ]
    if run.status == "running":
        lines.append(
            f"  process: {run.pid} on {run.host}, {run.phase}; `kill {run.pid}` stops it with a "
            "record"
        )
    if run.error:
        lines.append("  error: " + run.error.replace("\n", "\n  "))
    best = run.to_history().best
    if best is not None:
        lines.append(f"  best: {_row(best)}")
    if run.history:
        lines.append(f"  last: {_row(run.history[-1])}")
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in row.items())


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _facts(run: RunFile) -> dict[str, Any]:
    left_out = ("binding", "history", "config")
    return {name: v for name, v in dataclasses.asdict(run).items() if name not in left_out}


def _runs_table(found: Sequence[RunFile], directory: Path) -> Table:
    base = directory.absolute()
    rows: list[tuple[str, ...]] = []
    for run in found:
        path = Path(run.run_dir)
        best = run.to_history().best
        rows.append(
            (
                str(path.relative_to(base)) if path != base else ".",
                run.experiment + (f" ({run.preset})" if run.preset else ""),
                run.status,
                f"{run.epoch}/{run.max_epochs}",
                f"{run.metric} {_number(best[run.metric])}" if best and run.metric else "-",
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


def _backends_report(discovery: Discovery) -> str:
    lines = _columns(
        [(name, b.info.summary, b.distribution) for name, b in discovery.backends.items()]
    )
    if not discovery.backends and not discovery.failures:
        lines = ["No export backend is installed.", f"  fix: {install_hint('stablehlo')}"]
    for failure in discovery.failures:
        lines += ["", f"`{failure.name}` cannot be used:"]
        lines += [f"  {line}" for line in str(failure.error).splitlines()]
    return "\n".join(lines).lstrip("\n")


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    words = list(arguments)
    options = words[: words.index("--")] if "--" in words else words
    rest = words[len(options) :]
    return [word for word in options if word != _DEBUG] + rest, _DEBUG in options


def _message(error: Exception) -> str:
    if isinstance(error, NitroError):
        return f"error: {error}"
    # Not raised on purpose, so its words alone may not tell enough.
    return f"error: {type(error).__name__}: {error}\n  fix: `nitro {_DEBUG} ...` shows where"
