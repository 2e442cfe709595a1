"""The names, shapes and dtypes that an export promises, in 1-based axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nitro.errors import ExportError

from ._dims import Dim, evaluate_size, size_symbols

_EXTENDED = ("bfloat16", "float8_e5m2", "float8_e4m3fn")


@dataclass(frozen=True)
class ExportSpec:
    """Promises one named tensor at the edge of an exported program.

    Attributes:
        name: The name on the wire.
        dtype: A NumPy or ml_dtypes name, such as `"uint8"` or `"bfloat16"`. Required
            for inputs; asserted for outputs where given. One of 64 bits keeps them on
            the wire and in `export_preprocess`; `forward` sees what it does in training,
            where JAX narrows them to 32 unless `JAX_ENABLE_X64` is set.
        shape: The sizes, batch axis included; a number given there is a placeholder, a
            name is what `constraints` call the batch. Elsewhere a string is a symbolic
            size, which callers choose: `"time"`, or an expression such as `"2*k"`.
            Required for inputs; asserted for outputs where given.
        batch_axis: Which axis counts samples, counted from 1.
        axes: A name for each axis, for clients that want to read them.
        source: For outputs, the leaf of what `forward` returns that ships under
            `name`, or the wire input to echo. Defaults to `name`.

    Raises:
        ExportError: A value that cannot be promised; the message names the tensor.
    """

    name: str
    dtype: str | None = None
    shape: tuple[Dim, ...] | None = None
    _: KW_ONLY
    batch_axis: int = 1
    axes: tuple[str, ...] | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise ExportError(
                f"An ExportSpec has the name {self.name!r}.",
                expected="a non-empty string: the tensor's name on the wire",
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", canonical_dtype(self.dtype, of=self.name))
        if self.shape is not None:
            object.__setattr__(self, "shape", _checked_shape(self.shape, self.name))
        self._check_batch_axis()
        self._check_axes()

    def _check_batch_axis(self) -> None:
        axis = self.batch_axis
        if not isinstance(axis, int) or isinstance(axis, bool) or axis < 1:  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise ExportError(
                f"ExportSpec `{self.name}` has batch_axis={axis!r}.",
                expected="an axis counted from 1: in Nitro every axis is 1-based",
                fix="write batch_axis=1 for the first axis (it is the default)",
            )
        if self.shape is not None and axis > len(self.shape):
            raise ExportError(
                f"ExportSpec `{self.name}` has batch_axis={axis}, but its shape "
                f"{self.shape} has {len(self.shape)} axes.",
                expected=f"a batch axis from 1 to {len(self.shape)}"
                if self.shape
                else "at least the batch axis",
                fix="include the batch axis in the shape, e.g. (1, 64) for 64 features",
            )

    def _check_axes(self) -> None:
        if self.axes is None:
            return
        axes = tuple(self.axes)
        object.__setattr__(self, "axes", axes)
        if self.shape is not None and len(axes) != len(self.shape):
            raise ExportError(
                f"ExportSpec `{self.name}` names {len(axes)} axes {axes}, but its shape "
                f"{self.shape} has {len(self.shape)}.",
                expected="one name for each axis",
            )
        if len(set(axes)) != len(axes):
            raise ExportError(
                f"ExportSpec `{self.name}` names an axis twice: {axes}.",
                expected="distinct names",
            )

    @property
    def rank(self) -> int:
        """How many axes the tensor has."""
        assert self.shape is not None
        return len(self.shape)

    @property
    def symbols(self) -> frozenset[str]:
        """The names in the shape, the batch axis left out."""
        return size_symbols(*self.sizes(1))

    def sizes(self, batch: Dim) -> tuple[Dim, ...]:
        """The shape with `batch` at the batch axis; symbolic sizes stay as they are."""
        assert self.shape is not None
        batch_at = self.batch_axis - 1
        return (*self.shape[:batch_at], batch, *self.shape[batch_at + 1 :])

    def fixed_sizes(self, batch: int, values: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with `batch` at the batch axis, and symbolic sizes worked out."""
        return tuple(evaluate_size(size, values) for size in self.sizes(batch))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy (with ml_dtypes) knows it."""
        assert self.dtype is not None
        return numpy_dtype(self.dtype)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a canonical name; ml_dtypes' names included."""
    return np.dtype(getattr(ml_dtypes, name)) if name in _EXTENDED else np.dtype(name)


def canonical_dtype(dtype: object, *, of: str) -> str:
    """The one name of a dtype that a tensor may have at the edge of a program.

    Raises:
        ExportError: Not a boolean, integer or float dtype; names the tensor `of`.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if name in _EXTENDED:
        return name
    try:
        resolved = np.dtype(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue] - refused below
    except TypeError:
        resolved = None
    if resolved is None or (resolved.kind not in "biuf" and resolved.name not in _EXTENDED):
        raise ExportError(
            f"ExportSpec `{of}` has dtype {dtype!r}.",
            expected="bool, an integer or a float dtype, such as uint8, float32 or bfloat16",
        )
    return resolved.name


def _checked_shape(shape: Sequence[Any], name: str) -> tuple[Dim, ...]:
    if isinstance(shape, str | int):
        raise ExportError(
            f"ExportSpec `{name}` has the shape {shape!r}.",
            expected="a tuple of sizes, such as (1, 64)",
        )
    for size in shape:
        is_size = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not ((is_size and size >= 1) or (isinstance(size, str) and size)):
            raise ExportError(
                f"ExportSpec `{name}` has the size {size!r} in its shape {tuple(shape)}.",
                expected="sizes of at least 1, or names of symbolic sizes",
                fix="write 1 at the batch axis: the size there is only a placeholder",
            )
        try:
            size_symbols(size if isinstance(size, str) else int(size))
        except ValueError as error:
            raise ExportError(
                f"ExportSpec `{name}` has the size {size!r} in its shape: {error}.",
                expected='a name or an expression, such as "time", "2*k" or "floordiv(t, 2)"',
            ) from error
    return tuple(size.strip() if isinstance(size, str) else int(size) for size in shape)
