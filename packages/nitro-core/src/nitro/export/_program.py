"""What a backend is handed: one pure function, its flat weights, and the promised specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ._lowering import export_traced
from ._spec import ExportSpec


@dataclass(frozen=True, kw_only=True)
class Golden:
    """Inputs and the outputs that they gave before the export, by wire name.

    Attributes:
        inputs: One array per wire input; all have the same number of rows.
        outputs: What `Nitro.predict` returned for them, renamed as promised.
    """

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ExportProgram:
    """A forward pass ready to be written: `fn(*inputs, *weights)` gives the outputs.

    Attributes:
        name: The artifact's name.
        fn: Pure and traceable. All arguments are positional arrays: the inputs in wire
            order, then the weights in the order of `weight_names`. Returns a tuple of
            arrays in the order of `outputs`.
        inputs: The wire inputs, in wire order; dtype and shape are resolved.
        outputs: The promised outputs; dtype and shape are resolved.
        weights: Parameters and model state, by dotted name; no RNG state.
        batch_sizes: The fixed sizes to compile for, ascending and distinct.
        golden: Reference inputs and outputs.
        provenance: Where the artifact comes from, as JSON values.
        working_tree_patch: `git diff --binary HEAD` of a dirty source tree, else None.
    """

    name: str
    fn: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[ExportSpec, ...]
    outputs: tuple[ExportSpec, ...]
    weights: Mapping[str, jax.Array | np.ndarray]
    batch_sizes: tuple[int, ...]
    golden: Golden
    provenance: Mapping[str, Any]
    working_tree_patch: bytes | None = None
    _exported: dict[int, jax.export.Exported] = field(default_factory=dict, repr=False)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The dotted names in argument order, which is sorted order."""
        return tuple(sorted(self.weights))

    def exported(self, batch: int) -> jax.export.Exported:
        """The program at a fixed batch size, traced once and shared between callers.

        Unused arguments are kept, so the arity is always inputs plus weights.
        """
        if batch not in self._exported:
            self._exported[batch] = export_traced(self.fn, self._arguments(batch))
        return self._exported[batch]

    def _arguments(self, batch: int) -> list[jax.ShapeDtypeStruct]:
        inputs = [jax.ShapeDtypeStruct(s.sizes(batch), s.numpy_dtype) for s in self.inputs]
        weights = [self.weights[name] for name in self.weight_names]
        return inputs + [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
