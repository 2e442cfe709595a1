"""Runs a pure function once, as a program of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._fingerprint import trace_closure
from ._key import KeyPart, abstract_arguments
from ._run_programs import jax_config
from ._store import ProgramRequest, store

_SLOW_COMPILE_S = 30.0


def run_pure(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a pure function as one compiled program, found by its code and what it closes over.

    Args:
        label: What the function is, for `explain_compiles`.
        function: Takes and returns trees of arrays.
        arguments: Its positional arguments.
    """
    code = trace_closure({label: function})
    request = ProgramRequest(
        role="schedule",
        owner="",
        parts={"code": KeyPart(code.digest, f"{len(code.entries)} entries", code), **jax_config()},
        graph={},
        make=lambda _: function,
        arguments=abstract_arguments(arguments),
        check=lambda _: None,
        slow_compile_s=_SLOW_COMPILE_S,
    )
    return store.get(request)(*arguments)
