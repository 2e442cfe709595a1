"""One tensor at the edge of a bundle's programs, in the format's 0-based network axes."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nitro.errors import ExportError

from ._dtypes import BY_TOKEN, DType, find_dtype

if TYPE_CHECKING:
    from nitro.export import ExportSpec

BATCH_LETTERS = "nb"
_LETTERS = "".join(c for c in string.ascii_letters if c not in BATCH_LETTERS)

VARIABLE = -1
"""The size of an axis that is not fixed: the batch axis, or a variable one."""


@dataclass(frozen=True, kw_only=True)
class IOSpec:
    """A named tensor as a client and the program see it: row-major, axes from 0.

    Attributes:
        name: The name on the wire.
        token: The dtype's name in the format, such as `"f32"`.
        shape: The sizes; -1 at the batch axis and at a variable axis.
        batch_axis0: Which axis counts rows, from 0; None where none does.
    """

    name: str
    token: str
    shape: tuple[int, ...]
    batch_axis0: int | None

    @classmethod
    def from_export(cls, spec: ExportSpec) -> IOSpec:
        """Translates a promise of the core, whose axes count from 1.

        Raises:
            ExportError: A dtype that cannot go over the wire, a symbolic size, or more
                axes than the format has letters for; the message names the tensor.
        """
        batch_axis0 = spec.batch_axis - 1
        return cls(
            name=spec.name,
            token=_wire_dtype(spec).token,
            shape=tuple(
                VARIABLE if axis0 == batch_axis0 else size
                for axis0, size in enumerate(_fixed_sizes(spec))
            ),
            batch_axis0=batch_axis0,
        )

    @property
    def dtype(self) -> DType:
        """The row of the format's dtype table."""
        return BY_TOKEN[self.token]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy and JAX know it."""
        return self.dtype.numpy

    def sizes(self, rows: int) -> tuple[int, ...]:
        """The shape with `rows` at the batch axis."""
        return tuple(
            rows if axis0 == self.batch_axis0 else size for axis0, size in enumerate(self.shape)
        )

    def mlir_type(self, rows: int) -> str:
        """The type that a program compiled for `rows` gives this tensor."""
        return mlir_type(self.sizes(rows), self.dtype)

    def to_manifest(self) -> dict[str, Any]:
        """The manifest's entry: a letter for each axis, in reversed order.

        Letters carry no meaning in the format; here they run from `a` in that order.
        """
        letters = iter(_LETTERS)
        shape, dims = "", dict[str, int]()
        for axis0 in reversed(range(len(self.shape))):
            if axis0 == self.batch_axis0:
                shape += BATCH_LETTERS[0]
            else:
                letter = next(letters)
                shape += letter
                dims[letter] = self.shape[axis0]
        entry: dict[str, Any] = {"name": self.name, "dtype": self.token, "shape": shape}
        return {**entry, "dims": dims} if dims else entry

    def __str__(self) -> str:
        sizes = ("n" if i == self.batch_axis0 else str(s) for i, s in enumerate(self.shape))
        return f"{self.name}: {self.token} ({', '.join(sizes)})"


def mlir_type(shape: tuple[int, ...], dtype: DType) -> str:
    """A static ranked tensor type, as MLIR prints it."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype.mlir}>"


def _wire_dtype(spec: ExportSpec) -> DType:
    found = find_dtype(spec.numpy_dtype)
    if found is None or not found.on_wire:
        raise ExportError(
            f"`{spec.name}` has the dtype {spec.dtype}, which a bundle's clients cannot send "
            "or receive.",
            expected="one of " + ", ".join(str(d.numpy) for d in BY_TOKEN.values() if d.on_wire),
            fix="cast it in `export_preprocess` or in `forward`, and promise what the wire has",
        )
    return found


def _fixed_sizes(spec: ExportSpec) -> list[int]:
    assert spec.shape is not None
    if spec.rank > len(_LETTERS):
        raise ExportError(
            f"`{spec.name}` has {spec.rank} axes.",
            expected=f"at most {len(_LETTERS)}: the format has a letter for each axis",
        )
    sizes = list[int]()
    for axis, size in enumerate(spec.shape, start=1):
        if isinstance(size, int):
            sizes.append(size)
        elif axis == spec.batch_axis:
            sizes.append(VARIABLE)
        else:
            raise ExportError(
                f"`{spec.name}` has the symbolic size {size!r} at axis {axis}.",
                expected="a fixed size at every axis but the batch axis: each program of a "
                "bundle is compiled for fixed shapes",
                fix="write the size as an integer, and export once for each size",
            )
    return sizes
