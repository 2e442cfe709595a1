"""One tensor at the edge of a bundle's programs, in the format's 0-based network axes."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import nitro.export
from nitro.errors import ExportError, did_you_mean
from nitro.export import Document

from ._dtypes import BY_TOKEN, DType, find_dtype

if TYPE_CHECKING:
    from nitro.export import ExportSpec

BATCH_LETTERS = "nb"
_LETTERS = "".join(c for c in string.ascii_letters if c not in BATCH_LETTERS)

VARIABLE = -1
"""The size of an axis that is not fixed: the batch axis, or a variable one."""

Letters = Mapping[tuple[str, int], str]
"""The manifest's letter for a symbolic size, and for which of its uses in one tensor."""


_NO_VALUES: Mapping[str, int] = {}
_NO_LETTERS: Letters = {}


@dataclass(frozen=True, kw_only=True)
class IOSpec(nitro.export.IOSpec):
    """A named tensor as a client and the program see it: row-major, axes from 0.

    Attributes:
        name: The name on the wire.
        dtype: The name of its dtype in NumPy, such as `"float32"`; `token` is the format's.
        shape: The sizes; -1 at the batch axis, and what the size depends on, such as
            `"time"` or `"2*time"`, at an axis whose size a caller chooses. Read from a
            manifest, which has no such names, -1 there too.
        batch_axis0: Which axis counts rows, from 0; None where none does.
    """

    open_size = VARIABLE

    @classmethod
    def from_export(cls, spec: ExportSpec) -> Self:
        """Translates a promise of the core, whose axes count from 1.

        Raises:
            ExportError: A dtype that cannot go over the wire, or more axes than the
                format has letters for; the message names the tensor.
        """
        if spec.rank > len(_LETTERS):
            raise ExportError(
                f"`{spec.name}` has {spec.rank} axes.",
                expected=f"at most {len(_LETTERS)}: the format has a letter for each axis",
            )
        _check_wire(spec)
        return super().from_export(spec)

    @classmethod
    def read_dtype(cls, document: Document) -> str:
        """The dtype of an entry, which has the format's name of it.

        Raises:
            BundleError: A name that the format does not have.
        """
        token = document.read("dtype", str)
        if token not in BY_TOKEN:
            document.refuse("dtype", repr(token), did_you_mean(token, BY_TOKEN))
        return BY_TOKEN[token].numpy.name

    def to_json(self) -> dict[str, Any]:
        """The entry of `nitro.json`."""
        return {**super().to_json(), "dtype": self.token}

    @property
    def token(self) -> str:
        """The dtype's name in the format, such as `"f32"`."""
        return self.row.token

    @property
    def row(self) -> DType:
        """The row of the format's dtype table."""
        found = find_dtype(self.numpy_dtype)
        assert found is not None
        return found

    def mlir_type(self, rows: int, values: Mapping[str, int] = _NO_VALUES) -> str:
        """The type that a program compiled for these sizes gives this tensor."""
        return mlir_type(self.sizes(rows, values), self.row)

    def anonymous(self) -> IOSpec:
        """As a manifest has it: -1 at each axis that is not fixed."""
        shape = tuple(VARIABLE if isinstance(size, str) else size for size in self.shape)
        return replace(self, shape=shape)

    def variable_keys(self) -> Iterator[tuple[int, tuple[str, int]]]:
        """Each symbolic axis, with its key among the manifest's letters."""
        uses = Counter[str]()
        for axis0, size in enumerate(self.shape):
            if isinstance(size, str):
                yield axis0, (size, uses[size])
                uses[size] += 1

    def to_manifest(self, letters: Letters = _NO_LETTERS) -> dict[str, Any]:
        """The manifest's entry: a letter for each axis, in reversed order.

        Letters carry no meaning in the format; here they run from `a` in that order, but
        for symbolic sizes, which have the same ones in all tensors.
        """
        variable = {axis0: letters[key] for axis0, key in self.variable_keys()}
        free = (letter for letter in _LETTERS if letter not in letters.values())
        shape, dims = "", dict[str, int]()
        for axis0 in reversed(range(len(self.shape))):
            if axis0 == self.batch_axis0:
                shape += BATCH_LETTERS[0]
                continue
            size = self.shape[axis0]
            letter = variable.get(axis0) or next(free)
            shape += letter
            dims[letter] = size if isinstance(size, int) else VARIABLE
        entry: dict[str, Any] = {"name": self.name, "dtype": self.token, "shape": shape}
        return {**entry, "dims": dims} if dims else entry

    def __str__(self) -> str:
        sizes = ("n" if i == self.batch_axis0 else str(s) for i, s in enumerate(self.shape))
        return f"{self.name}: {self.token} ({', '.join(sizes)})"


def mlir_type(shape: tuple[int, ...], dtype: DType) -> str:
    """A static ranked tensor type, as MLIR prints it."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype.mlir}>"


def _check_wire(spec: ExportSpec) -> None:
    found = find_dtype(spec.numpy_dtype)
    if found is None or not found.on_wire:
        raise ExportError(
            f"`{spec.name}` has the dtype {spec.dtype}, which a bundle's clients cannot send "
            "or receive.",
            expected="one of " + ", ".join(str(d.numpy) for d in BY_TOKEN.values() if d.on_wire),
            fix="cast it in `export_preprocess` or in `forward`, and promise what the wire has",
        )


def variable_letters(specs: Iterable[IOSpec]) -> dict[tuple[str, int], str]:
    """A letter of the manifest for each symbolic size; the first letters are left free."""
    keys = dict.fromkeys(key for spec in specs for _, key in spec.variable_keys())
    return dict(zip(keys, reversed(_LETTERS), strict=False))
