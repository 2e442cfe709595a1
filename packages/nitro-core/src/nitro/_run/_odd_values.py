"""Which fields of a batch hold what is not finite, in the words of a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from nitro._trees import named_leaves

_MANY = 5


def odd_fields(fields: Any, *, samples: np.ndarray | None = None) -> str:
    """The fields with rows that are not finite, and the rows; empty where all is finite.

    Args:
        fields: Batch fields by name, batch axis first.
        samples: What each row is in the arrays of its loader, where that is known.
    """
    return "; ".join(_described(fields, samples))


def _described(fields: Any, samples: np.ndarray | None) -> Iterator[str]:
    for name, leaf in named_leaves(fields).items():
        array = np.asarray(leaf)
        if not jnp.issubdtype(array.dtype, np.inexact):
            continue
        is_odd = ~np.isfinite(array.astype(np.complex128))
        rows = np.flatnonzero(is_odd.reshape(len(array), -1).any(1))
        if len(rows):
            kind = "NaN" if np.isnan(array).any() else "infinity"
            where, shown = ("rows", rows) if samples is None else ("samples", samples[rows])
            listed = ", ".join(map(str, shown[:_MANY])) + (", ..." if len(shown) > _MANY else "")
            yield f"`{name}` holds {kind} in {len(rows)} of {len(array)} {where}, from 0: {listed}"
