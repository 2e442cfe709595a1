"""Tensors under the names that the Open Inference Protocol gives them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nitro_export_stablehlo import IOSpec

NUMPY_BY_KSERVE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The protocol's names of dtypes:
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol."""

KSERVE_BY_NUMPY = {dtype: name for name, dtype in NUMPY_BY_KSERVE.items()}


def kserve_name(spec: IOSpec) -> str:
    """The protocol's name for the dtype of a tensor, such as `"FP32"`."""
    return KSERVE_BY_NUMPY[spec.numpy_dtype]


def wire_shape(spec: IOSpec) -> list[int]:
    """The shape of a tensor for clients: -1 at each axis whose size they choose."""
    return [size if isinstance(size, int) else -1 for size in spec.shape]


def describe(spec: IOSpec) -> dict[str, Any]:
    """A tensor as an entry of the protocol's model metadata."""
    return {"name": spec.name, "datatype": kserve_name(spec), "shape": wire_shape(spec)}
