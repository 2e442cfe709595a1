"""Which programs a bundle holds, and the names of their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ProgramKey(NamedTuple):
    """One program of a bundle.

    Attributes:
        size: How many rows it is compiled for; None for any number.
        variant: Which entry of `input_shapes` it is compiled for; None where no size is
            symbolic, or where all such sizes are left open.
    """

    size: int | None
    variant: int | None = None

    @property
    def artifact_file(self) -> str:
        """The portable artifact, which the server reads."""
        return f"model{self._tag}.mlir"

    @property
    def exported_file(self) -> str:
        """The serialized `jax.export.Exported`, which the loader reads."""
        return f"jax/model{self._tag}.jax_export"

    @property
    def _tag(self) -> str:
        variant = "" if self.variant is None else f".v{self.variant}"
        return variant + ("" if self.size is None else f".b{self.size}")


def fixed_keys(batch_sizes: Sequence[int], num_variants: int) -> list[ProgramKey]:
    """The programs of fixed shapes; without variants, `num_variants` is 0."""
    variants = range(num_variants) if num_variants else [None]
    return [ProgramKey(size, variant) for variant in variants for size in batch_sizes]


def symbolic_keys(
    batch_sizes: Sequence[int], num_variants: int, *, dynamic_batch: bool
) -> list[ProgramKey]:
    """The programs that leave sizes open, which only the loader reads."""
    if dynamic_batch:
        return [ProgramKey(None)]
    return [ProgramKey(size) for size in batch_sizes] if num_variants else []
