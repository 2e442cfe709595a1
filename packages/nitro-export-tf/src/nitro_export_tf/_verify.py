"""Runs every signature of a loaded SavedModel against its golden arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nitro.errors import BundleError
from nitro.export import describe_difference

from ._io_spec import IOSpec
from ._signatures import DEFAULT, fixed_signature, tiled

if TYPE_CHECKING:
    from ._loader import SavedModel

Arrays = Mapping[str, np.ndarray]

_ROWS = (1, 3, 32)


def verify_signatures(model: SavedModel, inputs: Arrays, outputs: Arrays, rtol: float) -> None:
    """Compares each signature's outputs with the golden ones, repeated or cut to its rows.

    Args:
        model: The loaded SavedModel.
        inputs: The golden inputs.
        outputs: What `predict` gave for them before the export.
        rtol: How far floats may be, relative to one more than the largest.

    Raises:
        BundleError: An output differs; names it and its signature.
    """
    sizes: dict[str, tuple[int, ...]] = {fixed_signature(n): (n,) for n in model.batch_sizes}
    sizes[DEFAULT] = _ROWS if model.dynamic_batch else (model.batch_sizes[0],)
    for signature in model.signatures:
        for rows in sizes[signature]:
            found = model.run(signature, _tiled(inputs, model.inputs, rows))
            for name, wanted in _tiled(outputs, model.outputs, rows).items():
                problem = describe_difference(found[name], wanted, rtol)
                if problem:
                    raise BundleError(
                        f"The output `{name}` of `{signature}` {problem}, for {rows} rows.",
                        expected="what `predict` gave when it was exported",
                        fix="export again; or use the `tensorflow_version` that "
                        "`assets.extra/provenance.json` names",
                    )


def _tiled(arrays: Arrays, specs: Sequence[IOSpec], rows: int) -> dict[str, np.ndarray]:
    return {spec.name: tiled(arrays[spec.name], spec.batch_axis0, rows) for spec in specs}
