"""The dtypes that a SavedModel's programs, variables and clients can hold."""

from __future__ import annotations

from typing import Any

import numpy as np

_SUPPORTED = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
"""The names that NumPy and TensorFlow agree on."""

SUPPORTED: tuple[str, ...] = (*_SUPPORTED, "bfloat16")
"""What may be an input, an output or a variable.

Complex numbers are no dtypes of Nitro's wire. TensorFlow has the f8 types, but neither its
checkpoints nor its servers' clients know all of them.
"""


def is_supported(dtype: np.dtype[Any]) -> bool:
    """Whether TensorFlow has an equivalent that can be saved and served."""
    return dtype.name in SUPPORTED
