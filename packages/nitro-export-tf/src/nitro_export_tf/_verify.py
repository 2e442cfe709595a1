"""Runs every signature of a loaded SavedModel against its golden arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from nitro.errors import BundleError
from nitro.export import describe_difference, read_golden, repeat_rows

from ._assets import GOLDEN_FILE, Index
from ._io_spec import IOSpec
from ._signatures import DEFAULT, fixed_signature

Arrays = Mapping[str, np.ndarray]

_ROWS = (1, 3, 32)


def verify_signatures(run: Callable[[str, Arrays], Arrays], root: Path, index: Index) -> None:
    """Compares each signature's outputs with the golden ones, repeated or cut to its rows.

    Args:
        run: Runs the signature of a name.
        root: The SavedModel, which holds the golden arrays.
        index: Its `nitro.json`.

    Raises:
        BundleError: An output differs; names it and its signature.
    """
    inputs, outputs = read_golden(root / GOLDEN_FILE, index.inputs, index.outputs)
    sizes: dict[str, tuple[int, ...]] = {fixed_signature(n): (n,) for n in index.batch_sizes}
    sizes[DEFAULT] = _ROWS if index.dynamic_batch else (index.batch_sizes[0],)
    for signature in (DEFAULT, *map(fixed_signature, index.batch_sizes)):
        for rows in sizes[signature]:
            found = run(signature, _repeat(inputs, index.inputs, rows))
            for name, wanted in _repeat(outputs, index.outputs, rows).items():
                problem = describe_difference(found[name], wanted, index.rtol)
                if problem:
                    raise BundleError(
                        f"The output `{name}` of `{signature}` {problem}, for {rows} rows.",
                        expected="what `predict` gave when it was exported",
                        fix="export again; or use the `tensorflow_version` that "
                        "`assets.extra/provenance.json` names",
                    )


def _repeat(arrays: Arrays, specs: Sequence[IOSpec], rows: int) -> dict[str, np.ndarray]:
    return {s.name: repeat_rows(arrays[s.name], s.batch_axis0 or 0, rows) for s in specs}
