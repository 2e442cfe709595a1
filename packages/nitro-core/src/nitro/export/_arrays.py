"""Named arrays in one file that needs no pickle, for the process that verifies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ._spec import numpy_dtype


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays of any dtype of `ExportSpec`: a JSON line, then the raw bytes."""
    header = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    with path.open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        for array in arrays.values():
            file.write(np.array(array, order="C").tobytes())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote."""
    with path.open("rb") as file:
        arrays: dict[str, np.ndarray] = {}
        for name, dtype_name, shape in json.loads(file.readline()):
            dtype = numpy_dtype(dtype_name)
            size = int(np.prod(shape)) * dtype.itemsize
            arrays[name] = np.frombuffer(file.read(size), dtype).reshape(shape)
        return arrays
