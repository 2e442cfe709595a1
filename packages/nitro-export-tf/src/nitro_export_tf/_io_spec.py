"""One tensor at the edge of a SavedModel's signatures, in TensorFlow's 0-based axes."""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING, Self

import nitro.export
from nitro.errors import ExportError

from ._dtypes import SUPPORTED, is_supported

if TYPE_CHECKING:
    from nitro.export import ExportSpec

Shape = tuple[int | None, ...]
"""A shape as TensorFlow has it: None where a caller chooses the size."""


class IOSpec(nitro.export.IOSpec):
    """A named tensor as a client of the SavedModel sees it: axes from 0.

    Its attributes are those of `nitro.export.IOSpec`.
    """

    @classmethod
    def from_export(cls, spec: ExportSpec) -> Self:
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
        return super().from_export(spec)

    def signature_shape(self, rows: int | None) -> Shape:
        """The shape in a signature of this number of rows, None where a size is open."""
        return tuple(
            rows if axis0 == self.batch_axis0 else size if isinstance(size, int) else None
            for axis0, size in enumerate(self.shape)
        )


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
