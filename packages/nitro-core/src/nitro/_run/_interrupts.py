"""Ctrl-C and SIGTERM while a run trains: a graceful stop, then an exception that ends the program."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from nitro._checkpoint import newest
from nitro.errors import ConfigError

if TYPE_CHECKING:
    from ._session import Session

OnInterrupt = Literal["raise", "return"]

_STDERR = 2
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupt:
    """The signal that asked training to stop, if one did.

    Attributes:
        number: The first signal; None without one.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None

    def error(self) -> BaseException:
        """What ends the program as the signal would have done: exit code 130 or 143."""
        if self.number == signal.SIGTERM:
            return SystemExit(128 + signal.SIGTERM)
        return KeyboardInterrupt()


def check_on_interrupt(value: Any) -> None:
    """Refuses what says nothing of a signal.

    Raises:
        ConfigError: Neither "raise" nor "return".
    """
    if value not in ("raise", "return"):
        raise ConfigError(
            f"`train(on_interrupt={value!r})`.",
            expected='"raise", which ends the program once the checkpoint is safe, or "return"',
            fix='leave it out, or pass `on_interrupt="return"` to go on in the same program',
        )


@contextmanager
def stop_on_signals(request: Callable[[], None]) -> Generator[Interrupt]:
    """Turns the first Ctrl-C or SIGTERM into a request; a second Ctrl-C aborts.

    It is told at once, because the call that is under way may take a while. The handlers of
    before come back afterwards. Outside the main thread, where Python delivers no signals, it
    does nothing.
    """
    taken = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield taken
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if taken.number is not None and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if taken.number is None:
            taken.number = signal.Signals(number)
            _write_now(
                f"\n{_NAMES[taken.number]}: stopping at the next step boundary, with a checkpoint; "
                "Ctrl-C again aborts\n"
            )
        request()

    before = {n: signal.signal(n, on_signal) for n in _NAMES}
    try:
        yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_now(text: str) -> None:
    # Not through a file object, which the signal may have interrupted in a write.
    try:
        os.write(_STDERR, text.encode())
    except OSError:  # no stderr, or one that nobody reads any more
        return


def end_by_signal(session: Session, interrupt: Interrupt, on_interrupt: OnInterrupt) -> None:
    """Says where an interrupted run stands and how it is resumed, then ends the program.

    Raises:
        KeyboardInterrupt: Ctrl-C stopped the run, unless the call should return.
        SystemExit: SIGTERM did; with the code 143.
    """
    if interrupt.number is None:
        return
    if sys.stderr is not None:  # a daemon, or `pythonw`
        sys.stderr.write("\n".join([*_where_it_stands(session, interrupt.number), ""]))
        sys.stderr.flush()
    if on_interrupt == "raise":
        raise interrupt.error()


def _where_it_stands(session: Session, number: signal.Signals) -> list[str]:
    setup = session.setup
    done = f"epoch {session.epoch}/{setup.options.max_epochs}, step {session.step}"
    if session.stop_reason != "stopped":
        return [f"{_NAMES[number]}: the run had ended ({session.stop_reason}) at {done}"]
    lines = [f"{_NAMES[number]}: stopped after {done}"]
    own = [] if session.records is None else session.records.own()
    if session.records is None or not own:
        return [*lines, "  checkpoint: none, so this run cannot be resumed"]
    last = newest(own)
    behind = "" if last.step == session.step else f" (step {last.step})"
    command = session.resume_command or (
        f'nitro.Nitro({setup.owner}(...), run_dir="{setup.options.run_dir}", resume="auto").train()'
    )
    return [
        *lines,
        f"  checkpoint: {session.records.directory / last.name}{behind}",
        f"  resume: {command}",
    ]
