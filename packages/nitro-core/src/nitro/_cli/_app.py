"""The command itself: its options, its exit codes, and how an error is printed."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nitro._version import __version__
from nitro.errors import NitroError, NitroWarning

from ._flags import say_in_flags

_DEBUG = "--debug"
_INTERRUPTED = 130
"""What a shell reports of a process that Ctrl-C ended."""


class _Commands(TyperGroup):
    """The sub-commands; Ctrl-C in any of them ends with the exit code that says so."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)


app = typer.Typer(
    name="nitro",
    cls=_Commands,
    help="Train a Flax model as a declared experiment, then export it for serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits.

    The exit code is 0 when done, 1 after an error, 2 after a usage error, 130 after Ctrl-C
    and 143 after SIGTERM. An error is one message on stderr; `--debug`, anywhere before a
    `--`, adds the traceback.

    Args:
        arguments: The words after `nitro`; None takes those of the process.
    """
    words, debug = _without_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        with _plain_warnings():
            app(words, prog_name="nitro")
    # The last resort of the process: whatever went wrong, the user gets one message.
    except Exception as error:  # noqa: BLE001
        if debug:
            traceback.print_exception(error)
        else:
            print(_message(error), file=sys.stderr)
        sys.exit(1)


@contextmanager
def _plain_warnings() -> Generator[None]:
    """Shows Nitro's warnings as messages: the line that called is one of the command's own."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("always", NitroWarning)
        show = warnings.showwarning

        def show_plainly(message: Any, category: Any, filename: str, *where: Any) -> None:
            if issubclass(category, NitroWarning) and _is_ours(filename):
                print(f"warning: {say_in_flags(str(message))}", file=sys.stderr)
            else:
                show(message, category, filename, *where)

        warnings.showwarning = show_plainly
        yield


def _is_ours(filename: str) -> bool:
    """Whether a line is not the user's: the command's, a library's or the interpreter's."""
    own = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[1])
    return filename.startswith("<") or any(Path(filename).is_relative_to(base) for base in own)


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


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    words = list(arguments)
    options = words[: words.index("--")] if "--" in words else words
    rest = words[len(options) :]
    return [word for word in options if word != _DEBUG] + rest, _DEBUG in options


def _message(error: Exception) -> str:
    if isinstance(error, NitroError):
        return f"error: {say_in_flags(str(error))}"
    # Not raised on purpose, so its words alone may not tell enough.
    return f"error: {type(error).__name__}: {error}\n  fix: `nitro {_DEBUG} ...` shows where"
