"""`nitro.json`: what the Python loader needs, and the digest of every other file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nitro.errors import BundleError
from nitro.export import ArtifactIndex, Document, is_size, read_json

from ._files import FileDigest, check_name
from ._io_spec import IOSpec
from ._keys import ProgramKey, fixed_keys, symbolic_keys
from ._manifest import FILE as MANIFEST_FILE
from ._weights import FILE as WEIGHTS_FILE
from ._weights import GOLDEN_FILE

FILE = "nitro.json"
MAX_BYTES = 4 * 1024 * 1024

FORMAT = "nitro-bundle"
FORMAT_VERSION = 1
"""Raised by a change that older loaders cannot read; date each new one here.

1: November 2026, the first.
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one call of a program takes, so that a loader can plan without measuring.

    Attributes:
        flops: Arithmetic operations, by XLA's count.
        size_bytes: Inputs, weights and outputs: what memory has to move at least.
    """

    flops: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Index(ArtifactIndex):
    """The contents of `nitro.json`: what `ArtifactIndex` says, and what is of bundles alone.

    Attributes:
        costs: The cost of each size's program.
        input_shapes: The symbolic sizes that fixed programs were compiled for, a mapping
            for each variant; empty where no size is symbolic.
        vjp_order: How often the programs can be differentiated.
        client_inputs: What a client sees in front of the programs; empty if the same.
        client_outputs: What a client sees behind the post-processing; empty if the same.
        verification: What the export found when it compared the bundle with the model:
            the sizes tried, and how far each output was off; None where it did not.
        platforms: Those that the programs were lowered for.
        calling_convention_version: Of the serialized exports.
        versions: The versions of jax, jaxlib and stablehlo that wrote the bundle, and the
            StableHLO version that the artifacts were written for.
        custom_calls: The targets that a runtime must have.
        files: The digest of every other file.
    """

    spec_type = IOSpec

    costs: Mapping[int, Cost]
    platforms: tuple[str, ...]
    calling_convention_version: int
    versions: Mapping[str, str]
    custom_calls: tuple[str, ...]
    files: Mapping[str, FileDigest]
    input_shapes: tuple[Mapping[str, int], ...] = ()
    vjp_order: int = 0
    client_inputs: tuple[IOSpec, ...] = ()
    client_outputs: tuple[IOSpec, ...] = ()
    verification: Mapping[str, Any] | None = None

    @property
    def fixed_programs(self) -> list[ProgramKey]:
        """The programs of fixed shapes, which also exist as portable artifacts."""
        return fixed_keys(self.batch_sizes, len(self.input_shapes))

    @property
    def symbolic_programs(self) -> list[ProgramKey]:
        """The programs that leave sizes open."""
        return symbolic_keys(
            self.batch_sizes, len(self.input_shapes), dynamic_batch=self.dynamic_batch
        )

    def values(self, variant: int | None) -> Mapping[str, int]:
        """The symbolic sizes of a variant; none where there are no variants."""
        return {} if variant is None else self.input_shapes[variant]

    def to_bytes(self) -> bytes:
        """Writes the file; equal values give equal bytes."""
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **self.to_json(),
            "costs": {str(size): asdict(cost) for size, cost in self.costs.items()},
            "platforms": self.platforms,
            "calling_convention_version": self.calling_convention_version,
            "versions": dict(sorted(self.versions.items())),
            "custom_calls": self.custom_calls,
            "input_shapes": [dict(sorted(values.items())) for values in self.input_shapes],
            "vjp_order": self.vjp_order,
            "client_inputs": [spec.to_json() for spec in self.client_inputs],
            "client_outputs": [spec.to_json() for spec in self.client_outputs],
            "verification": self.verification,
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return (json.dumps(document, indent=1) + "\n").encode("ascii")


def read_index(data: bytes) -> Index:
    """Reads and checks `nitro.json`.

    Raises:
        BundleError: Another format, or a key that breaks a rule; names the key.
    """
    values = read_json(data, file=FILE)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BundleError(f"`{FILE}` is of another format.", expected=f'"format": "{FORMAT}"')
    document = Document(values, file=FILE)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise BundleError(
            f"`{FILE}` has the format version {version!r}.",
            expected=f"{FORMAT_VERSION}, which this loader reads",
            fix="install the nitro-export-stablehlo that is as new as the bundle",
        )
    fields = Index.read_fields(document)
    index = Index(
        **fields,
        costs=_costs(document, fields["batch_sizes"]),
        platforms=document.read_list("platforms", str),
        calling_convention_version=document.read("calling_convention_version", int),
        versions=document.read_strings("versions"),
        custom_calls=document.read_list("custom_calls", str),
        files=_files(document),
        input_shapes=_input_shapes(document),
        vjp_order=document.read("vjp_order", int),
        client_inputs=Index.read_specs(document, "client_inputs"),
        client_outputs=Index.read_specs(document, "client_outputs"),
        verification=_verification(document),
    )
    _check_variants(index, document)
    index.check_symbols(document)
    _check_sizes(index, document)
    needed = [MANIFEST_FILE, WEIGHTS_FILE, GOLDEN_FILE]
    needed += [key.artifact_file for key in index.fixed_programs]
    needed += [key.exported_file for key in (*index.fixed_programs, *index.symbolic_programs)]
    for name in needed:
        if name not in index.files:
            document.refuse("files", f"without `{name}`", "a digest of every file of the bundle")
    return index


def _input_shapes(document: Document) -> tuple[Mapping[str, int], ...]:
    entries = document.read("input_shapes", list)
    for i, entry in enumerate(entries):
        whole = isinstance(entry, dict) and all(is_size(n, least=1) for n in entry.values())
        if not whole or entries.index(entry) != i:
            document.refuse(
                f"input_shapes[{i}]", repr(entry), "sizes by name, different in each entry"
            )
    return tuple(entries)


def _check_variants(index: Index, document: Document) -> None:
    """Checks that `input_shapes` speaks of the names in the shapes."""
    symbols = set(index.symbols)
    if bool(symbols) != bool(index.input_shapes):
        document.refuse(
            "input_shapes", repr(list(index.input_shapes)), "an entry if sizes are symbolic"
        )
    for i, values in enumerate(index.input_shapes):
        if set(values) != symbols:
            document.refuse(
                f"input_shapes[{i}]", repr(values), f"sizes of exactly {sorted(symbols)}"
            )


def _check_sizes(index: Index, document: Document) -> None:
    """Checks that every symbolic size can be worked out for every variant."""
    for key, specs in (("inputs", index.inputs), ("outputs", index.outputs)):
        for i, spec in enumerate(specs):
            for variant in range(len(index.input_shapes)):
                path = f"{key}[{i}].shape"
                try:
                    sizes = spec.sizes(1, index.values(variant))
                except (ArithmeticError, ValueError) as error:
                    document.refuse(
                        path, repr(spec.shape), f"sizes that can be worked out: {error}"
                    )
                if not all(is_size(size) for size in sizes):
                    document.refuse(path, repr(sizes), "sizes not below 0")


def _verification(document: Document) -> Mapping[str, Any] | None:
    found = document.values.get("verification")
    if found is not None and not isinstance(found, dict):
        document.refuse("verification", repr(found), "an object, or null")
    return found


def _costs(document: Document, sizes: tuple[int, ...]) -> dict[int, Cost]:
    entries = document.child("costs")
    if set(entries.values) != {str(size) for size in sizes}:
        document.refuse("costs", repr(entries.values), "an entry for each of the batch sizes")
    costs = dict[int, Cost]()
    for size in sizes:
        entry = entries.child(str(size))
        entry.require_keys("flops", "size_bytes")
        flops, size_bytes = entry.read("flops", float), entry.values["size_bytes"]
        if not math.isfinite(flops) or flops < 0 or not is_size(size_bytes):
            entry.refuse("", repr(entry.values), "finite numbers, not below 0")
        costs[size] = Cost(flops=float(flops), size_bytes=size_bytes)
    return costs


def _files(document: Document) -> dict[str, FileDigest]:
    files = dict[str, FileDigest]()
    entries = document.child("files")
    for name in entries.values:
        check_name(name)
        if name == FILE:
            document.refuse("files", f"with `{FILE}` itself", "the other files of the bundle")
        entry = entries.child(name)
        entry.require_keys("sha256", "size_bytes")
        sha256, size_bytes = entry.read("sha256", str), entry.values["size_bytes"]
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            entry.refuse("sha256", repr(sha256), "64 hexadecimal digits")
        if not is_size(size_bytes):
            entry.refuse("size_bytes", repr(size_bytes), "a number of bytes")
        files[name] = FileDigest(sha256=sha256, size_bytes=size_bytes)
    return files
