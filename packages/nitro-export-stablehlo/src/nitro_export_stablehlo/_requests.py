"""Checks what a caller passes, and cuts it into the sizes that are compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from nitro.errors import BundleError, did_you_mean
from nitro.export import solve_sizes

from ._io_spec import IOSpec
from ._programs import Values

Array = np.ndarray | jax.Array
_ARRAYS = (np.ndarray, jax.Array)


class RequestReader:
    """Turns named arrays into positional ones, after checking each against its spec."""

    def __init__(
        self, specs: Sequence[IOSpec], *, batch_symbol: str = "b", constraints: Sequence[str] = ()
    ) -> None:
        """Takes the inputs in wire order, and what holds for the sizes that callers choose."""
        self._specs = tuple(specs)
        self._batch_symbol = batch_symbol
        self._constraints = tuple(constraints)
        self._has_symbols = bool(constraints) or any(spec.symbolic_sizes for spec in specs)
        # What the check compares, worked out once: it runs on every call.
        self._fields = [
            (
                spec.name,
                spec.numpy_dtype,
                len(spec.shape),
                spec.batch_axis0,
                spec.shape[: spec.batch_axis0 or 0],
                spec.shape if spec.batch_axis0 is None else spec.shape[spec.batch_axis0 + 1 :],
            )
            for spec in self._specs
        ]

    def read(self, inputs: Mapping[str, Any]) -> tuple[list[Array], int, Values]:
        """Returns the arrays in wire order, their number of rows, and the chosen sizes.

        Raises:
            BundleError: A missing or unknown name, another dtype or shape, inputs that
                disagree about the rows or a size, or a broken constraint.
        """
        if self._has_symbols:
            return self._read_symbolic(inputs)
        if len(inputs) != len(self._fields):
            self._refuse_names(inputs)
        # Few instructions: between two predictions a core forgets them, and each costs more.
        arrays: list[Array] = []
        rows = -1
        for name, dtype, rank, batch_axis0, before, after in self._fields:
            array = inputs.get(name)
            if type(array) is not np.ndarray and not isinstance(array, _ARRAYS):
                self._refuse_type(name, inputs)
            shape, given = array.shape, array.dtype
            start = 0 if batch_axis0 is None else batch_axis0 + 1
            fits = (
                len(shape) == rank
                and (given is dtype or given == dtype)
                and shape[start:] == after
                and (not batch_axis0 or shape[:batch_axis0] == before)
            )
            if not fits:
                self._refuse_array(name, array)
            if batch_axis0 is not None:
                if rows not in (-1, shape[batch_axis0]):
                    self._refuse_rows(inputs)
                rows = shape[batch_axis0]
            arrays.append(array)
        return arrays, rows, ()

    def _read_symbolic(self, inputs: Mapping[str, Any]) -> tuple[list[Array], int, Values]:
        if len(inputs) != len(self._specs):
            self._refuse_names(inputs)
        arrays = list[Array]()
        sizes = list[tuple[int | str, int]]()
        for spec in self._specs:
            array = inputs.get(spec.name)
            if not isinstance(array, np.ndarray | jax.Array):
                self._refuse_type(spec.name, inputs)
            if len(array.shape) != len(spec.shape) or array.dtype != spec.numpy_dtype:
                self._refuse_array(spec.name, array)
            for axis0, (size, number) in enumerate(zip(spec.shape, array.shape, strict=True)):
                if axis0 == spec.batch_axis0:
                    sizes.append((self._batch_symbol, number))
                elif isinstance(size, str):
                    sizes.append((size, number))
                elif size != number:
                    self._refuse_array(spec.name, array)
            arrays.append(array)
        values, problem = solve_sizes(sizes, self._constraints)
        if problem:
            shapes = ", ".join(f"`{n}` {tuple(a.shape)}" for n, a in inputs.items())
            raise BundleError(
                f"The sizes of {shapes} do not fit: {problem}.",
                expected="; ".join(map(str, self._specs))
                + "".join(f", {constraint}" for constraint in self._constraints),
            )
        rows = values.pop(self._batch_symbol, -1)
        return arrays, rows, tuple(sorted(values.items()))

    def _refuse_names(self, inputs: Mapping[str, Any]) -> NoReturn:
        names = [spec.name for spec in self._specs]
        for name in inputs:
            if name not in names:
                raise BundleError(
                    f"The bundle has no input `{name}`.", expected=did_you_mean(name, names)
                )
        missing = next(name for name in names if name not in inputs)
        raise BundleError(
            f"The input `{missing}` is missing.",
            expected=", ".join(f"{name}=..." for name in names),
        )

    def _refuse_type(self, name: str, inputs: Mapping[str, Any]) -> NoReturn:
        if name not in inputs:
            self._refuse_names(inputs)
        spec = next(spec for spec in self._specs if spec.name == name)
        raise BundleError(
            f"The input `{name}` is a {type(inputs[name]).__name__}.",
            expected=f"a NumPy or JAX array: {spec}",
            fix=f"{name}=np.asarray(..., {_numpy_name(spec)})",
        )

    def _refuse_array(self, name: str, array: Array) -> NoReturn:
        spec = next(spec for spec in self._specs if spec.name == name)
        if array.dtype != spec.numpy_dtype:
            raise BundleError(
                f"The input `{name}` has the dtype {array.dtype}.",
                expected=f"{spec.numpy_dtype}; nothing is cast silently",
                fix=f"{name}=x.astype({_numpy_name(spec)}), if no value is lost",
            )
        expected = ", ".join(
            "rows" if axis0 == spec.batch_axis0 else str(size)
            for axis0, size in enumerate(spec.shape)
        )
        lacks_rows = spec.batch_axis0 is not None and array.ndim == len(spec.shape) - 1
        raise BundleError(
            f"The input `{name}` has the shape {tuple(array.shape)}.",
            expected=f"({expected}{',' if len(spec.shape) == 1 else ''}), with any number of rows",
            fix=f"for one row, {name}=np.expand_dims(x, {spec.batch_axis0})" if lacks_rows else "",
        )

    def _refuse_rows(self, inputs: Mapping[str, Any]) -> NoReturn:
        rows = {
            spec.name: inputs[spec.name].shape[spec.batch_axis0]
            for spec in self._specs
            if spec.batch_axis0 is not None and spec.name in inputs
        }
        raise BundleError(
            "The inputs have different numbers of rows: "
            + ", ".join(f"`{name}` has {count}" for name, count in rows.items())
            + ".",
            expected="as many rows in each",
        )


def take_rows(array: Array, axis0: int, begin: int, size: int) -> np.ndarray:
    """Copies out `size` rows from `begin`; past the end, the last row again.

    The last row rather than zeros: what divides by a norm stays finite.
    """
    host = np.asarray(array)
    host = host[(slice(None),) * axis0 + (slice(begin, begin + size),)]
    rows = host.shape[axis0]
    if rows == size:
        return host
    padded = np.empty((*host.shape[:axis0], size, *host.shape[axis0 + 1 :]), host.dtype)
    at = (slice(None),) * axis0
    padded[(*at, slice(rows))] = host
    padded[(*at, slice(rows, None))] = host[(*at, slice(rows - 1, None))]
    return padded


def _numpy_name(spec: IOSpec) -> str:
    name = spec.numpy_dtype.name
    return f"np.{name}" if hasattr(np, name) else f"ml_dtypes.{name}"
