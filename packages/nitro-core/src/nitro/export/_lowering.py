"""Lowering that keeps the machine out of the artifact."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.export
import numpy as np


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


def wide_types_for(dtypes: Iterable[np.dtype[Any]]) -> AbstractContextManager[Any]:
    """A context in which JAX narrows none of these dtypes to 32 bits."""
    wide = any(dtype.itemsize == 8 for dtype in dtypes)
    return jax.enable_x64(True) if wide else nullcontext()  # noqa: FBT003 - JAX's signature


@contextmanager
def _no_locations() -> Generator[None]:
    before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
