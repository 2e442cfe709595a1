"""Runs a pure function once, as a program of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nitro._code import read_words

from ._key import abstract_arguments, environment
from ._store import ProgramRequest, store
from ._tracing import trace_program

_SLOW_COMPILE_S = 30.0


def run_pure(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a pure function as one compiled program, found by what it computes.

    Args:
        label: What the function is, for `explain_compiles`.
        function: Takes and returns trees of arrays.
        arguments: Its positional arguments.
    """
    request = ProgramRequest(
        role="schedule",
        owner="",
        traced=trace_program(lambda _: function, arguments),
        parts=environment(),
        code=read_words({label: function}).without_values(),
        graph={},
        arguments=abstract_arguments(arguments),
        check=lambda _: None,
        slow_compile_s=_SLOW_COMPILE_S,
    )
    return store.get(request)(*arguments)
