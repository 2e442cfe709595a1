"""One tensor at the edge of a SavedModel's signatures, in TensorFlow's 0-based axes."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nitro.errors import ExportError

from ._dtypes import SUPPORTED, is_supported, numpy_dtype

if TYPE_CHECKING:
    from nitro.export import ExportSpec

Shape = tuple[int | None, ...]
"""A shape as TensorFlow has it: None where a caller chooses the size."""


@dataclass(frozen=True, kw_only=True)
class IOSpec:
    """A named tensor as a client of the SavedModel sees it: axes from 0.

    Attributes:
        name: The name in the signatures.
        dtype: The name that NumPy (with ml_dtypes) and TensorFlow give its dtype.
        shape: The sizes; None at the batch axis and where a size is symbolic.
        batch_axis0: Which axis counts rows, from 0.
    """

    name: str
    dtype: str
    shape: Shape
    batch_axis0: int

    @classmethod
    def from_export(cls, spec: ExportSpec) -> IOSpec:
        """Translates a promise of the core, whose axes count from 1.

        Raises:
            ExportError: A dtype that TensorFlow has no equivalent for; names the tensor.
        """
        if not is_supported(spec.numpy_dtype):
            raise ExportError(
                f"`{spec.name}` has the dtype {spec.dtype}, which a SavedModel cannot serve.",
                expected="one of " + ", ".join(SUPPORTED),
                fix="cast it in `export_preprocess` or in `forward`, and promise another dtype",
            )
        batch_axis0 = spec.batch_axis - 1
        return cls(
            name=spec.name,
            dtype=spec.numpy_dtype.name,
            shape=tuple(
                None if axis0 == batch_axis0 or isinstance(size, str) else size
                for axis0, size in enumerate(spec.shape or ())
            ),
            batch_axis0=batch_axis0,
        )

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> IOSpec:
        """Reads what `to_json` wrote."""
        return cls(
            name=entry["name"],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            batch_axis0=entry["batch_axis0"],
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of `nitro.json`."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "batch_axis0": self.batch_axis0,
        }

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the arrays that a caller passes or gets."""
        return numpy_dtype(self.dtype)

    def sizes(self, rows: int | None) -> Shape:
        """The shape with `rows` at the batch axis."""
        return tuple(rows if i == self.batch_axis0 else size for i, size in enumerate(self.shape))

    def __str__(self) -> str:
        sizes = ", ".join("None" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype} ({sizes}{',' if len(self.shape) == 1 else ''})"


def check_input_names(specs: tuple[IOSpec, ...]) -> None:
    """Refuses names that no signature can have.

    Raises:
        ExportError: A name that TensorFlow, which calls signatures with keyword
            arguments, would change or refuse.
    """
    for spec in specs:
        # TensorFlow renames an argument that begins with an underscore.
        fits = spec.name.isascii() and spec.name.isidentifier() and spec.name[0] != "_"
        if not fits or keyword.iskeyword(spec.name) or spec.name in {"self", "args", "kwargs"}:
            raise ExportError(
                f"The input `{spec.name}` cannot be an input of a TensorFlow signature, which is "
                "called with keyword arguments.",
                expected="letters, digits and underscores, a letter first, and no word of Python",
                fix="choose another name in `export_inputs`; where a field of the batch has this name, "
                "return it from `export_preprocess`",
            )
