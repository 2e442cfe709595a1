"""The `nitro` command: arguments in, exit code out.

Starting it imports no JAX. A command that needs it imports what it uses in its body.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from ._plugins import Discovery, discover, install_hint
from ._version import __version__
from .errors import NitroError

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


@app.command()
def backends() -> None:
    """List the installed export backends, and the plugins that failed to load."""
    print(_backends_report(discover()))


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
