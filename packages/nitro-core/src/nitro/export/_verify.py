"""Loads a written artifact in a fresh process and compares it with `predict`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nitro.errors import ExportError

from ._arrays import read_arrays, write_arrays
from ._program import ExportProgram
from ._spec import ExportSpec

RTOL = 1e-5
ATOL = 1e-5
_HALF_TOLERANCE = 2e-2
"""For float16 and bfloat16, whose spacing at 1 is 1e-3 and 8e-3."""


def verify_artifact(program: ExportProgram, backend: str, path: Path) -> None:
    """Runs the artifact at every compiled size and beside them, against the golden rows.

    Raises:
        ExportError: It does not load without the model's source, or its outputs differ.
    """
    sizes = _sizes(program.batch_sizes)
    with tempfile.TemporaryDirectory(prefix="nitro-verify-") as name:
        folder = Path(name)
        for index, rows in enumerate(sizes):
            request = _tiled(program.golden.inputs, program.inputs, rows)
            write_arrays(folder / f"in_{index}.arrays", request)
        _run_isolated(backend, path, folder)
        for index, rows in enumerate(sizes):
            expected = _tiled(program.golden.outputs, program.outputs, rows)
            _compare(expected, read_arrays(folder / f"out_{index}.arrays"), rows)


def _sizes(batch_sizes: Sequence[int]) -> list[int]:
    return sorted({1, 3, *batch_sizes})


def _run_isolated(backend: str, path: Path, folder: Path) -> None:
    # -I: neither the current folder nor PYTHONPATH can lend the model's source.
    command = [sys.executable, "-I", "-m", "nitro.export._check", backend, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise ExportError(
            f"The artifact at `{path}` does not run in a fresh process:\n{done.stderr.strip()}",
            expected="it to load and run without the model's source",
        )


def _tiled(
    arrays: Mapping[str, np.ndarray], specs: Sequence[ExportSpec], rows: int
) -> dict[str, np.ndarray]:
    """The golden rows, repeated or cut to `rows` along each batch axis."""
    tiled: dict[str, np.ndarray] = {}
    for spec in specs:
        axis0 = spec.batch_axis - 1
        array = arrays[spec.name]
        tiled[spec.name] = np.take(array, np.arange(rows) % array.shape[axis0], axis=axis0)
    return tiled


def _compare(expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], rows: int) -> None:
    for name, wanted in expected.items():
        problem = _difference(wanted, got.get(name))
        if problem:
            raise ExportError(
                f"The output `{name}` of the written artifact, for {rows} rows, {problem}.",
                expected=f"what `predict` returns, to rtol {RTOL} and atol {ATOL}",
                fix="check that `forward` treats each row on its own; `verify=False` skips this",
            )


def _difference(wanted: np.ndarray, got: np.ndarray | None) -> str:
    if got is None:
        return "is missing"
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"is {got.dtype}{got.shape} instead of {wanted.dtype}{wanted.shape}"
    if wanted.dtype.kind in "biu":
        return "" if np.array_equal(wanted, got) else "differs"
    half = _HALF_TOLERANCE if wanted.dtype.itemsize < 4 else 0
    a, b = wanted.astype(np.float64), got.astype(np.float64)
    if np.allclose(a, b, rtol=RTOL + half, atol=ATOL + half, equal_nan=True):
        return ""
    return f"differs by {np.nanmax(np.abs(a - b)):.3g}"
