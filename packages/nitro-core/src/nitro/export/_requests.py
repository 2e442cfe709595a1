"""Checks what a caller of an artifact passes, in the same words for every backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from nitro.errors import BundleError, did_you_mean

from ._dims import solve_sizes
from ._io_spec import IOSpec

Values = tuple[tuple[str, int], ...]
"""The sizes that a caller chose by name, sorted."""


class RequestReader:
    """Turns named arrays into positional ones, after checking each against its spec.

    Example:
        >>> spec = IOSpec(name="x", dtype="float32", shape=(None, 4), batch_axis0=0)
        >>> arrays, rows, _ = RequestReader([spec]).read({"x": np.ones((3, 4), np.float32)})
        >>> rows
        3
    """

    def __init__(
        self,
        specs: Sequence[IOSpec],
        *,
        batch_symbol: str = "b",
        constraints: Sequence[str] = (),
        narrowed: Collection[str] = (),
        array_types: tuple[type, ...] = (),
    ) -> None:
        """Works out what each request is compared with.

        Args:
            specs: The inputs in wire order.
            batch_symbol: What constraints call the number of rows.
            constraints: What holds for the sizes that callers choose.
            narrowed: The 64-bit inputs whose values must fit 32 bits:
                `ExportProgram.narrowed`.
            array_types: Other arrays than NumPy's that may be passed, such as `jax.Array`.
        """
        self._specs = tuple(specs)
        self._types = (np.ndarray, *array_types)
        self._narrowed = tuple(spec for spec in self._specs if spec.name in narrowed)
        self._batch_symbol = batch_symbol
        self._constraints = tuple(constraints)
        self._has_symbols = bool(constraints) or any(
            size is None or isinstance(size, str)
            for spec in specs
            for axis0, size in enumerate(spec.shape)
            if axis0 != spec.batch_axis0
        )
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

    def read(self, inputs: Mapping[str, Any]) -> tuple[list[Any], int, Values]:
        """Returns the arrays in wire order, their number of rows, and the chosen sizes.

        Raises:
            BundleError: A missing or unknown name, another dtype or shape, inputs that
                disagree about the rows or a size, a broken constraint, or an integer that the
                program cannot hold.
        """
        found = self._read_symbolic(inputs) if self._has_symbols else self._read_fixed(inputs)
        for spec in self._narrowed:
            _check_range(spec, inputs[spec.name])
        return found

    def _read_fixed(self, inputs: Mapping[str, Any]) -> tuple[list[Any], int, Values]:
        if len(inputs) != len(self._fields):
            self._refuse_names(inputs)
        # Few instructions: between two predictions a core forgets them, and each costs more.
        arrays: list[Any] = []
        rows = -1
        for name, dtype, rank, batch_axis0, before, after in self._fields:
            array: Any = inputs.get(name)
            if type(array) is not np.ndarray and not isinstance(array, self._types):
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

    def _read_symbolic(self, inputs: Mapping[str, Any]) -> tuple[list[Any], int, Values]:
        if len(inputs) != len(self._specs):
            self._refuse_names(inputs)
        arrays = list[Any]()
        sizes = list[tuple[int | str, int]]()
        for spec in self._specs:
            array: Any = inputs.get(spec.name)
            if not isinstance(array, self._types):
                self._refuse_type(spec.name, inputs)
            if len(array.shape) != len(spec.shape) or array.dtype != spec.numpy_dtype:
                self._refuse_array(spec.name, array)
            for axis0, (size, number) in enumerate(zip(spec.shape, array.shape, strict=True)):
                if axis0 == spec.batch_axis0:
                    sizes.append((self._batch_symbol, number))
                elif isinstance(size, str):
                    sizes.append((size, number))
                elif size not in (number, None):
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
                    f"There is no input `{name}`.", expected=did_you_mean(name, names)
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
            expected=f"{_name_types(self._types)}: {spec}",
            fix=f"{name}=np.asarray(..., {_numpy_name(spec)})",
        )

    def _refuse_array(self, name: str, array: Any) -> NoReturn:
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


def _numpy_name(spec: IOSpec) -> str:
    name = spec.numpy_dtype.name
    return f"np.{name}" if hasattr(np, name) else f"ml_dtypes.{name}"


def _name_types(types: Sequence[type]) -> str:
    packages = dict.fromkeys("JAX" if "jax" in t.__module__ else "NumPy" for t in types)
    return f"a {' or '.join(packages)} array"


def _check_range(spec: IOSpec, array: Any) -> None:
    """Refuses an integer that wraps around where the program narrows it to 32 bits.

    Under a transformation of JAX there are no values to look at.
    """
    try:
        host = np.asarray(array)
    except TypeError:
        return
    narrow = np.dtype(np.int32 if host.dtype.kind == "i" else np.uint32)
    lost = host[host != host.astype(narrow)]
    if lost.size:
        raise BundleError(
            f"The input `{spec.name}` is {host.dtype} and holds {int(lost.flat[0])}.",
            expected=f"integers that fit {narrow}, which the program makes of it: they would wrap "
            "around",
            fix="map them to a smaller range before the call; or export the model again with "
            "`JAX_ENABLE_X64=1`, or with an `export_preprocess` that takes them apart",
        )
