"""The dtypes that a bundle can hold, under each of their names (docs/reference/bundle-format.md §4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, kw_only=True)
class DType:
    """One dtype and its names.

    Attributes:
        token: The name in the manifest, and in `nitro.json`.
        numpy: The dtype of NumPy and JAX.
        safetensors: The name in a safetensors header.
        mlir: The element type in a program's signature.
        on_wire: Whether a client can send it: the f8 types have no KServe name.
        nan_above: For floats, the largest bit pattern without the sign bit that is not
            a NaN; any above it is one.
    """

    token: str
    numpy: np.dtype[Any]
    safetensors: str
    mlir: str
    on_wire: bool = True
    nan_above: int | None = None


def _row(
    token: str,
    scalar: Any,
    mlir: str,
    *,
    safetensors: str | None = None,
    on_wire: bool = True,
    nan_above: int | None = None,
) -> DType:
    return DType(
        token=token,
        numpy=np.dtype(scalar),
        safetensors=safetensors or token.upper(),
        mlir=mlir,
        on_wire=on_wire,
        nan_above=nan_above,
    )


_TABLE = (
    _row("f16", np.float16, "f16", nan_above=0x7C00),
    _row("f32", np.float32, "f32", nan_above=0x7F80_0000),
    _row("f64", np.float64, "f64", nan_above=0x7FF0_0000_0000_0000),
    _row("bf16", ml_dtypes.bfloat16, "bf16", nan_above=0x7F80),
    _row("f8_e5m2", ml_dtypes.float8_e5m2, "f8E5M2", on_wire=False, nan_above=0x7C),
    _row("f8_e4m3", ml_dtypes.float8_e4m3fn, "f8E4M3FN", on_wire=False, nan_above=0x7E),
    _row("i8", np.int8, "i8"),
    _row("i16", np.int16, "i16"),
    _row("i32", np.int32, "i32"),
    _row("i64", np.int64, "i64"),
    _row("u8", np.uint8, "ui8"),
    _row("u16", np.uint16, "ui16"),
    _row("u32", np.uint32, "ui32"),
    _row("u64", np.uint64, "ui64"),
    _row("bool", np.bool_, "i1"),
)

BY_TOKEN = {dtype.token: dtype for dtype in _TABLE}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE}
_BY_NUMPY = {dtype.numpy: dtype for dtype in _TABLE}

_NAN_CHUNK = 1 << 20


def find_dtype(numpy_dtype: Any) -> DType | None:
    """The bundle's dtype for a NumPy one; None where bundles do not have it."""
    return _BY_NUMPY.get(np.dtype(numpy_dtype))


def has_nan(flat: np.ndarray, dtype: DType) -> bool:
    """Whether a one-dimensional array holds a NaN, looking at 1 Mi elements at a time.

    Looks at the bits, which is as quick for the ml_dtypes types as for NumPy's own.
    """
    if dtype.nan_above is None:
        return False
    bits = flat.view(f"u{dtype.numpy.itemsize}")
    no_sign = bits.dtype.type((1 << (8 * dtype.numpy.itemsize - 1)) - 1)
    return any(
        int((bits[at : at + _NAN_CHUNK] & no_sign).max()) > dtype.nan_above
        for at in range(0, len(bits), _NAN_CHUNK)
    )
