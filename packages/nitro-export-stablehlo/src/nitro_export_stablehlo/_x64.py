"""Turns on JAX's 64-bit types for programs that have them at their edge, and only then."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

_WIDE = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64)))


def x64_for(dtypes: Iterable[np.dtype[Any]]) -> AbstractContextManager[Any]:
    """A context in which JAX does not narrow these dtypes to 32 bits."""
    return jax.enable_x64(True) if _WIDE.intersection(dtypes) else nullcontext()  # noqa: FBT003 - JAX's signature
