"""Traces that reuse nothing which JAX remembers of older ones, and leave nothing behind."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from ._identity import TraceDigest, digest_trace

_scope = jax.make_user_context(default_value=None)


class TraceScope:
    """A context for one program, in which JAX finds no trace that it made outside of it.

    JAX remembers what it traced of a function under `jit`, `scan`, `cond`, `checkpoint` and
    the like by the function object. What such a function reads may have changed since: a
    global, an environment variable, a file.
    """

    def __init__(self) -> None:
        self._mark = object()
        weakref.finalize(self, _forget, self._mark)

    @contextmanager
    def entered(self) -> Generator[None]:
        """Traces inside find those that were made in this scope, and no other."""
        with _scope(self._mark):
            yield

    def forget(self) -> None:
        """Drops the traces that JAX keeps of this scope; they are made anew if need be."""
        _forget(self._mark)


def _forget(mark: object) -> None:
    # JAX keeps a trace for as long as the function lives, which for one of its own is for
    # ever: about half a megabyte for each scope. No public call drops them by context; where
    # another JAX calls its cache otherwise, they stay.
    try:
        cache: Any = importlib.import_module("jax._src.interpreters.partial_eval").trace_to_jaxpr
        entries: list[Any] = cache.cache_keys()
        for reference, context, *_ in entries:
            function = reference()
            if function is not None and any(value is mark for value in context):
                cache.evict_weakref(function)
    except (AttributeError, ImportError, TypeError, ValueError):
        return


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedProgram:
    """A program that was traced, and how to go on with it.

    Attributes:
        jaxpr: The closed jaxpr, to look into.
        digest: What identifies it.
        outputs: The tree of what it returns, by shape and dtype.
        reads: The structural fields that the hooks read.
        lower: Lowers it; called where the store has no program for it.
    """

    jaxpr: Any
    digest: TraceDigest
    outputs: Any
    reads: frozenset[str]
    lower: Callable[[], Any]


def trace_program(
    make: Callable[[set[str]], Callable[..., Any]],
    arguments: Sequence[Any],
    scope: TraceScope | None = None,
) -> TracedProgram:
    """Traces a function once, from the code as it is now.

    Args:
        make: Called with a set that collects the structural fields which the trace reads;
            returns the function, which may be jitted.
        arguments: Its positional arguments, abstract or concrete.
        scope: Where to trace it; None for a scope of its own, which is forgotten at once.
    """
    reads: set[str] = set()
    function: Any = make(reads)
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function, keep_unused=True)
    with (scope or TraceScope()).entered():
        traced = jitted.trace(*arguments)
    return TracedProgram(
        jaxpr=traced.jaxpr,
        digest=digest_trace(traced.jaxpr, lambda: module_bytes(traced.lower())),
        outputs=traced.out_info,
        reads=frozenset(reads),
        lower=traced.lower,
    )


def module_bytes(lowered: Any) -> bytes:
    """The lowered module without locations."""
    text: str = lowered.as_text(debug_info=False)
    return text.encode()
