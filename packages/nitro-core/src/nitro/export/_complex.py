"""Complex weights as two arrays each: neither bundles nor SavedModels hold complex numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

_PARTS = ("real", "imag")


def is_complex(array: Any) -> bool:
    """Whether an array's elements are complex numbers."""
    return np.dtype(array.dtype).kind == "c"


def part_names(name: str) -> tuple[str, str]:
    """What the real and the imaginary part of a complex weight are called."""
    real, imag = (f"{name}.{part}" for part in _PARTS)
    return real, imag


def split_complex(
    weights: Mapping[str, Any], names: Collection[str] | None = None
) -> dict[str, Any]:
    """Replaces each complex weight `w` by its parts, `w.real` and `w.imag`.

    Args:
        weights: NumPy or JAX arrays by name, of any shape and dtype.
        names: The names that the parts may have, as an artifact lists them; a complex weight
            whose parts are not among them stays as it is. None splits every complex weight.

    Returns:
        The weights in the same order. complex64 gives two float32, complex128 two float64.
    """
    found = dict[str, Any]()
    for name, array in weights.items():
        parts = part_names(name)
        is_known = names is None or (name not in names and set(parts) <= set(names))
        if is_known and hasattr(array, "dtype") and is_complex(array):
            found |= zip(parts, (array.real, array.imag), strict=True)
        else:
            found[name] = array
    return found
