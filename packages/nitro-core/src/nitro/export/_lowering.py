"""Lowering that keeps the machine out of the artifact."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.export
import numpy as np

from ._dims import Dim

_CONFIG_LOCK = threading.RLock()


def export_traced(
    fn: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    platforms: Sequence[str],
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
    calling_convention_version: int | None = None,
) -> jax.export.Exported:
    """Exports `fn` at these positional arguments, unused ones kept.

    The bytes depend on the code, the arguments and the versions only: source paths and
    line numbers stay out (JAX writes them into its modules by default).
    """
    version = calling_convention_version or jax.config.jax_export_calling_convention_version  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    with (
        _configured("jax_traceback_in_locations_limit", 0),
        _configured("jax_export_calling_convention_version", version),
    ):
        jitted = jax.jit(fn, keep_unused=True)
        export = jax.export.export(jitted, platforms=platforms, disabled_checks=disabled_checks)
        return export(*arguments)


def make_scope(constraints: Sequence[str]) -> jax.export.SymbolicScope:
    """The one scope that all symbolic sizes of a trace must share."""
    return jax.export.SymbolicScope(list(constraints))


def make_argument(
    sizes: Sequence[Dim], dtype: np.dtype[Any], scope: jax.export.SymbolicScope
) -> jax.ShapeDtypeStruct:
    """An abstract argument; sizes that are strings become symbolic in `scope`."""
    if all(isinstance(size, int) for size in sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)
    text = ", ".join(map(str, sizes))
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"({text},)", scope=scope), dtype)


def wide_types_for(dtypes: Iterable[np.dtype[Any]]) -> AbstractContextManager[Any]:
    """A context in which JAX narrows none of these dtypes to 32 bits."""
    wide = any(dtype.itemsize == 8 for dtype in dtypes)
    return jax.enable_x64(True) if wide else nullcontext()  # noqa: FBT003 - JAX's signature


@contextmanager
def _configured(name: str, value: int) -> Generator[None]:
    # The options are the process's: a second thread would restore what the first one set.
    with _CONFIG_LOCK:
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            yield
        finally:
            jax.config.update(name, before)
