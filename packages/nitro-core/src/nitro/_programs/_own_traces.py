"""Keeps JAX's own memory of traces from handing out one of other code."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

_code = jax.make_user_context(default_value=None)


def own_traces(code: str) -> AbstractContextManager[None]:
    """A context in which JAX reuses only the traces that it made for the same code.

    JAX remembers what it traced of a function under `jit`, `scan`, `cond`, `checkpoint` and
    the like by the function object. A global that the function reads may have changed since.

    Args:
        code: The digest of the code that is traced.
    """
    return _code(code)
