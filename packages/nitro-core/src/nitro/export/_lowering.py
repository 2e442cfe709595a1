"""Lowering that keeps the machine out of the artifact."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.export


def export_traced(
    fn: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]
) -> jax.export.Exported:
    """Exports `fn` at these positional arguments, for the CPU, unused ones kept.

    The bytes depend on the code, the arguments and the versions only: source paths and
    line numbers stay out (JAX writes them into its modules by default).
    """
    with _no_locations():
        jitted = jax.jit(fn, keep_unused=True)
        return jax.export.export(jitted, platforms=["cpu"])(*arguments)


@contextmanager
def _no_locations() -> Generator[None]:
    before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
