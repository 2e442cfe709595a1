"""Says in which promises, programs and weights two bundles differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._files import FileReader
from ._index import FILE as INDEX_FILE
from ._index import MAX_BYTES as MAX_INDEX_BYTES
from ._index import Index, read_index
from ._vet import program_files
from ._weights import FILE as WEIGHTS_FILE
from ._weights import TensorFile


def diff_bundles(old: Path, new: Path) -> Iterator[str]:
    """Yields one line for each difference that can change a prediction.

    Provenance, names and digests of the other files do not count.

    Raises:
        BundleError: One of the bundles is damaged.
    """
    old_files, new_files = FileReader(old), FileReader(new)
    before, after = _index(old_files), _index(new_files)
    for key in (
        "inputs",
        "outputs",
        "batch_sizes",
        "input_shapes",
        "dynamic_batch",
        "constraints",
        "platforms",
        "vjp_order",
        "versions",
        "custom_calls",
    ):
        a, b = getattr(before, key), getattr(after, key)
        if a != b:
            yield f"{key}: {_shown(a)} -> {_shown(b)}"
    for file in sorted(set(program_files(before)) & set(program_files(after))):
        # Exports carry the version of the JAX that wrote them; artifacts do not.
        is_compared = file.endswith(".mlir") or file in _symbolic_files(before)
        if is_compared and before.files[file] != after.files[file]:
            yield f"{file}: another program"
    yield from _diff_weights(_weights(old_files), _weights(new_files))


def _diff_weights(old: TensorFile, new: TensorFile) -> Iterator[str]:
    for name in sorted(set(old) | set(new)):
        if name not in new or name not in old:
            yield f"{name}: only in the {'old' if name in old else 'new'} bundle"
            continue
        a, b = old[name], new[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{name}: {a.dtype} {a.shape} -> {b.dtype} {b.shape}"
        elif a.tobytes() != b.tobytes():
            furthest = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            yield f"{name}: differs by at most {furthest:.3g}"


def _symbolic_files(index: Index) -> set[str]:
    return {key.exported_file for key in index.symbolic_programs}


def _index(files: FileReader) -> Index:
    return read_index(files.read(INDEX_FILE, limit_bytes=MAX_INDEX_BYTES))


def _weights(files: FileReader) -> TensorFile:
    return TensorFile(files.path(WEIGHTS_FILE), file=WEIGHTS_FILE, reverse_axes=True)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if not isinstance(value, tuple | list):
        return str(value)
    return ", ".join(map(str, value)) or "none"
