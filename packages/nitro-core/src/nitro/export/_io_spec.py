"""One tensor at the edge of an artifact, as those see it who serve it: axes from 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from nitro.errors import ExportError, did_you_mean

from ._dims import evaluate_size, size_symbols
from ._documents import Document, is_size
from ._spec import ExportSpec, canonical_dtype, numpy_dtype

_NO_VALUES: Mapping[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class IOSpec:
    """A named tensor as a client and the program see it: row-major, axes from 0.

    A backend may derive its own from it, with the words of its format.

    Attributes:
        name: The name on the wire.
        dtype: The name that NumPy (with ml_dtypes) gives its dtype, such as `"bfloat16"`.
        shape: The sizes; None at the batch axis, and what the size depends on, such as
            `"time"` or `"2*time"`, at an axis whose size a caller chooses.
        batch_axis0: Which axis counts rows, from 0; None where none does.
    """

    open_size: ClassVar[int | None] = None
    """What stands at the batch axis in `shape`."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    batch_axis0: int | None

    @classmethod
    def from_export(cls, spec: ExportSpec) -> Self:
        """Translates a promise of `export_inputs` or `export_outputs`, whose axes count from 1."""
        axis0 = spec.batch_axis - 1
        sizes = spec.sizes(1)
        return cls(
            name=spec.name,
            dtype=spec.numpy_dtype.name,
            shape=(*sizes[:axis0], cls.open_size, *sizes[axis0 + 1 :]),
            batch_axis0=axis0,
        )

    @classmethod
    def read(cls, document: Document) -> Self:
        """Reads what `to_json` gave.

        Raises:
            BundleError: A key that breaks a rule; names it.
        """
        document.require_keys("name", "dtype", "shape", "batch_axis0")
        name, dtype = document.read("name", str), cls.read_dtype(document)
        shape, axis0 = document.read("shape", list), document.values["batch_axis0"]
        if axis0 is not None and not (is_size(axis0) and axis0 < len(shape)):
            document.refuse("batch_axis0", repr(axis0), f"an axis from 0 to {len(shape) - 1}")
        for i, size in enumerate(shape):
            is_open = size == cls.open_size and not isinstance(size, bool)
            # The first SavedModels have no names for the sizes that a caller chooses.
            fits = is_open if i == axis0 else _is_promised(size) or (is_open and size is None)
            if not fits:
                document.refuse(
                    "shape",
                    repr(shape),
                    'sizes above 0 or such as "2*time", and '
                    f"{'null' if cls.open_size is None else cls.open_size} at the batch axis",
                )
        return cls(name=name, dtype=dtype, shape=tuple(shape), batch_axis0=axis0)

    @classmethod
    def read_dtype(cls, document: Document) -> str:
        """The dtype of an entry, by NumPy's name.

        Raises:
            BundleError: A name that the format does not have.
        """
        name = document.read("dtype", str)
        try:
            return canonical_dtype(name, of="")
        except ExportError:
            document.refuse(
                "dtype", repr(name), did_you_mean(name, ("float32", "bfloat16", "int32"))
            )

    def to_json(self) -> dict[str, Any]:
        """The entry of an index."""
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

    @property
    def symbolic_sizes(self) -> tuple[str, ...]:
        """What a caller chooses besides the rows, in axis order."""
        return tuple(size for size in self.shape if isinstance(size, str))

    def sizes(self, rows: int, values: Mapping[str, int] = _NO_VALUES) -> tuple[int, ...]:
        """The shape with `rows` at the batch axis, and symbolic sizes worked out."""
        return tuple(
            rows if axis0 == self.batch_axis0 or size is None else evaluate_size(size, values)
            for axis0, size in enumerate(self.shape)
        )

    def __str__(self) -> str:
        sizes = ["n" if i == self.batch_axis0 else str(s) for i, s in enumerate(self.shape)]
        return f"{self.name}: {self.dtype} ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _is_promised(size: Any) -> bool:
    try:
        return is_size(size, least=1) or (isinstance(size, str) and bool(size_symbols(size)))
    except ValueError:
        return False
