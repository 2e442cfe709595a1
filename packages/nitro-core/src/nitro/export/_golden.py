"""Reference inputs: the caller's, else real rows of the data, else generated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nitro._experiment import has_hook
from nitro.errors import ExportError

from ._dims import solve_sizes
from ._frozen import FrozenModel
from ._program import batch_symbol
from ._shapes import ShapeProbe
from ._spec import ExportSpec

NUM_ROWS = 4
_SEED = 20
_USUAL_SIZE = 8


def golden_inputs(
    model: FrozenModel,
    inputs: Sequence[ExportSpec],
    probe: ShapeProbe,
    given: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Some rows for each wire input, the same ones in every export.

    Raises:
        ExportError: The given rows do not fit the specs; names the input.
    """
    if given is not None:
        return _checked(given, inputs, probe)
    symbol = batch_symbol(inputs)
    rows = next(n for n in range(NUM_ROWS, 10_000) if probe.is_allowed({symbol: n}))
    real = _real_rows(model, inputs, rows)
    if real is not None and not _problem(real, inputs, probe):
        return real
    values = _usual_sizes(probe, symbol, rows)
    return make_inputs(inputs, values.pop(symbol), values)


def _usual_sizes(probe: ShapeProbe, symbol: str, rows: int) -> dict[str, int]:
    """The probed sizes that are nearest to what a small request has."""
    found = sorted(probe.assignments(), key=lambda v: sum(abs(n - _USUAL_SIZE) for n in v.values()))
    usual = next((v for v in found if probe.is_allowed({**v, symbol: rows})), None)
    return {symbol: rows, **found[0]} if usual is None else {**usual, symbol: rows}


def make_inputs(
    inputs: Sequence[ExportSpec], rows: int, values: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Generated arrays of a number of rows; `values` are the symbolic sizes."""
    generator = np.random.default_rng(_SEED)
    sizes = {**values, batch_symbol(inputs): rows}
    return {
        spec.name: _generated(generator, spec.fixed_sizes(rows, sizes), spec.numpy_dtype)
        for spec in inputs
    }


def _real_rows(
    model: FrozenModel, inputs: Sequence[ExportSpec], rows: int
) -> dict[str, np.ndarray] | None:
    if has_hook(model.experiment, "export_preprocess"):
        return None
    found: dict[str, np.ndarray] = {}
    for spec in inputs:
        field = np.asarray(model.first.get(spec.name))
        if field.ndim != spec.rank or len(field) < rows or field.dtype != spec.numpy_dtype:
            return None
        found[spec.name] = np.moveaxis(field[:rows], 0, spec.batch_axis - 1).copy()
    return found


def _generated(
    generator: np.random.Generator, sizes: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray:
    if dtype.kind == "b":
        return generator.integers(0, 2, sizes).astype(bool)
    if dtype == np.uint8:
        return generator.integers(0, 256, sizes, dtype=np.uint8)
    # Small numbers stay valid where integers are indices into a table.
    if dtype.kind in "iu":
        return generator.integers(0, 4, sizes).astype(dtype)
    return generator.standard_normal(sizes).astype(dtype)


def _checked(
    given: Mapping[str, Any], inputs: Sequence[ExportSpec], probe: ShapeProbe
) -> dict[str, np.ndarray]:
    names = [spec.name for spec in inputs]
    if sorted(given) != sorted(names):
        raise ExportError(
            f"`golden` has {', '.join(f'`{name}`' for name in sorted(given)) or 'nothing'}.",
            expected="an array for each wire input: " + ", ".join(f"`{n}`" for n in names),
        )
    arrays = {name: np.asarray(given[name]) for name in names}
    problem = _problem(arrays, inputs, probe)
    if problem:
        raise ExportError(
            f"`golden` does not fit `export_inputs`: {problem}.",
            expected="; ".join(f"`{s.name}`: {s.dtype}{s.shape}" for s in inputs),
        )
    return arrays


def _problem(
    arrays: Mapping[str, np.ndarray], inputs: Sequence[ExportSpec], probe: ShapeProbe
) -> str:
    symbol = batch_symbol(inputs)
    sizes = list[tuple[Any, int]]()
    for spec in inputs:
        array = arrays[spec.name]
        if array.ndim != spec.rank or array.dtype != spec.numpy_dtype:
            return f"`{spec.name}` is {array.dtype}{array.shape}"
        sizes += zip(spec.sizes(symbol), array.shape, strict=True)
    return solve_sizes(sizes, probe.constraints)[1]
