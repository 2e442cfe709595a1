"""Golden arrays beside an artifact: named as one mapping, or in one `.npz` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nitro.errors import BundleError

from ._io_spec import IOSpec

if TYPE_CHECKING:
    from ._program import Golden

Arrays = dict[str, np.ndarray]


def join_golden(golden: Golden) -> Arrays:
    """Golden arrays as one mapping, `inputs.<name>` and `outputs.<name>`."""
    inputs = {f"inputs.{name}": array for name, array in golden.inputs.items()}
    return inputs | {f"outputs.{name}": array for name, array in golden.outputs.items()}


def split_golden(
    arrays: Mapping[str, Any], inputs: Sequence[IOSpec], outputs: Sequence[IOSpec], *, file: str
) -> tuple[Arrays, Arrays]:
    """The golden inputs and outputs that `join_golden` joined, checked against their specs.

    Raises:
        BundleError: Another set of names, or an array that does not fit; names it and `file`.
    """
    found: dict[str, Arrays] = {"inputs": {}, "outputs": {}}
    for side, specs in (("inputs", inputs), ("outputs", outputs)):
        for spec in specs:
            array = arrays.get(f"{side}.{spec.name}")
            if array is None or array.ndim != len(spec.shape) or not array.size:
                what = "no" if array is None else f"{array.dtype}{array.shape} as"
                raise BundleError(
                    f"`{file}` has {what} `{side}.{spec.name}`.",
                    expected=str(spec),
                    fix="copy the artifact again, whole",
                )
            found[side][spec.name] = array
    known = {f"{side}.{name}" for side, by_name in found.items() for name in by_name}
    for name in sorted(set(arrays) - known):
        raise BundleError(
            f"`{file}` holds `{name}`.",
            expected="an array for each input and output: " + ", ".join(sorted(known)),
        )
    return found["inputs"], found["outputs"]


def write_golden(path: Path, golden: Golden) -> None:
    """Writes golden arrays to an `.npz` file."""
    # Numbers only. NumPy 2.0 would store a keyword `allow_pickle` as an array.
    np.savez(path, **join_golden(golden))  # pyright: ignore[reportArgumentType] - no name is a keyword of NumPy


def read_golden(
    path: Path, inputs: Sequence[IOSpec], outputs: Sequence[IOSpec]
) -> tuple[Arrays, Arrays]:
    """Reads what `write_golden` wrote: inputs and outputs, by wire name.

    Raises:
        BundleError: A damaged file, or arrays that do not fit the specs.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
    # A damaged archive raises whatever the damaged part leads to.
    except Exception as error:
        raise BundleError(
            f"`{path.name}` does not load: {error}.",
            expected="an .npz of plain arrays",
            fix="copy the artifact again, whole",
        ) from error
    for side, specs in (("inputs", inputs), ("outputs", outputs)):
        for spec in specs:
            name = f"{side}.{spec.name}"
            # NumPy's format knows bfloat16 only as two bytes without a meaning.
            if name in arrays and arrays[name].dtype.kind == "V":
                arrays[name] = arrays[name].view(spec.numpy_dtype)
    return split_golden(arrays, inputs, outputs, file=path.name)
