"""Compares a bundle's two descriptions: `nitro.json` and the server's manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nitro.errors import BundleError
from nitro.export import evaluate_size

from ._index import FILE as INDEX_FILE
from ._index import Index
from ._io_spec import IOSpec
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest


def check_agreement(manifest: Manifest, index: Index) -> None:
    """Compares the two descriptions of one bundle.

    Raises:
        BundleError: They differ; names the key.
    """
    for key, ours, servers in (
        ("name", index.name, manifest.name),
        ("inputs", _anonymous(index.inputs), manifest.inputs),
        ("outputs", _anonymous(index.outputs), manifest.outputs),
        ("batch_sizes", index.batch_sizes, manifest.batch_sizes),
        ("input_shapes", _variable_sizes(index), _variable_sizes_of(manifest)),
    ):
        if ours != servers:
            raise BundleError(
                f"`{INDEX_FILE}` and `{MANIFEST_FILE}` differ in `{key}`.",
                expected=f"{_shown(servers)} in both",
                fix="export the model again: one of them was changed",
            )


def _anonymous(specs: Sequence[IOSpec]) -> tuple[IOSpec, ...]:
    return tuple(spec.anonymous() for spec in specs)


def _variable_sizes(index: Index) -> tuple[tuple[int, ...], ...]:
    """The sizes of each variant, in an order that needs no names."""
    keys = dict.fromkeys(key for spec in index.inputs for _, key in spec.variable_keys())
    return tuple(
        tuple(sorted(evaluate_size(size, values) for size, _ in keys))
        for values in index.input_shapes
    )


def _variable_sizes_of(manifest: Manifest) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(entry.values())) for entry in manifest.input_shapes)


def _shown(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
