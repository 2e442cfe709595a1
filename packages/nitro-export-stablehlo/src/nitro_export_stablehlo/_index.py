"""`nitro.json`: what the Python loader needs, and the digest of every other file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from nitro.errors import BundleError, did_you_mean

from ._dtypes import BY_TOKEN
from ._files import FileDigest, check_name
from ._io_spec import VARIABLE, IOSpec
from ._json import is_size, read_json
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


def artifact_file(size: int) -> str:
    """The portable artifact compiled for `size` rows, which the server reads."""
    return f"model.b{size}.mlir"


def exported_file(size: int) -> str:
    """The serialized `jax.export.Exported` for `size` rows, which the loader reads."""
    return f"jax/model.b{size}.jax_export"


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
class Index:
    """The contents of `nitro.json`.

    Attributes:
        name: The model's name.
        inputs: The inputs in wire order, which is argument order.
        outputs: The outputs in result order.
        batch_sizes: The sizes that have a program, ascending.
        costs: The cost of each size's program.
        platforms: Those that the programs were lowered for.
        calling_convention_version: Of the serialized exports.
        versions: The versions of jax, jaxlib and stablehlo that wrote the bundle, and the
            StableHLO version that the artifacts were written for.
        custom_calls: The targets that a runtime must have.
        files: The digest of every other file.
    """

    name: str
    inputs: tuple[IOSpec, ...]
    outputs: tuple[IOSpec, ...]
    batch_sizes: tuple[int, ...]
    costs: Mapping[int, Cost]
    platforms: tuple[str, ...]
    calling_convention_version: int
    versions: Mapping[str, str]
    custom_calls: tuple[str, ...]
    files: Mapping[str, FileDigest]

    def to_json(self) -> bytes:
        """Writes the file; equal values give equal bytes."""
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "inputs": [_entry(spec) for spec in self.inputs],
            "outputs": [_entry(spec) for spec in self.outputs],
            "batch_sizes": self.batch_sizes,
            "costs": {str(size): asdict(cost) for size, cost in self.costs.items()},
            "platforms": self.platforms,
            "calling_convention_version": self.calling_convention_version,
            "versions": dict(sorted(self.versions.items())),
            "custom_calls": self.custom_calls,
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return (json.dumps(document, indent=1) + "\n").encode("ascii")


def read_index(data: bytes) -> Index:
    """Reads and checks `nitro.json`.

    Raises:
        BundleError: Another format, or a key that breaks a rule; names the key.
    """
    document = read_json(data, file=FILE)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BundleError(f"`{FILE}` is of another format.", expected=f'"format": "{FORMAT}"')
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise BundleError(
            f"`{FILE}` has the format version {version!r}.",
            expected=f"{FORMAT_VERSION}, which this loader reads",
            fix="install the nitro-export-stablehlo that is as new as the bundle",
        )
    sizes = _batch_sizes(document)
    index = Index(
        name=_typed(document, "name", str),
        inputs=_specs(document, "inputs"),
        outputs=_specs(document, "outputs"),
        batch_sizes=sizes,
        costs=_costs(document, sizes),
        platforms=tuple(_strings(document, "platforms")),
        calling_convention_version=_typed(document, "calling_convention_version", int),
        versions=_string_map(document, "versions"),
        custom_calls=tuple(_strings(document, "custom_calls")),
        files=_files(document),
    )
    needed = [MANIFEST_FILE, WEIGHTS_FILE, GOLDEN_FILE]
    needed += [make(size) for size in sizes for make in (artifact_file, exported_file)]
    for name in needed:
        if name not in index.files:
            _refuse("files", f"without `{name}`", "a digest of every file of the bundle")
    return index


def _entry(spec: IOSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": spec.token,
        "shape": spec.shape,
        "batch_axis0": spec.batch_axis0,
    }


def _batch_sizes(document: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = _typed(document, "batch_sizes", list)
    whole = all(is_size(size, least=1) for size in sizes)
    if not sizes or not whole or sizes != sorted(set(sizes)):
        _refuse("batch_sizes", repr(sizes), "distinct sizes above 0, ascending")
    return tuple(sizes)


def _specs(document: Mapping[str, Any], key: str) -> tuple[IOSpec, ...]:
    entries = _typed(document, key, list)
    specs = tuple(_spec(entry, f"{key}[{i}]") for i, entry in enumerate(entries))
    if len({spec.name for spec in specs}) != len(specs):
        _refuse(key, "a list with one name twice", "distinct names")
    return specs


def _spec(entry: Any, key: str) -> IOSpec:
    if not isinstance(entry, dict) or set(entry) != {"name", "dtype", "shape", "batch_axis0"}:
        _refuse(key, repr(entry), "name, dtype, shape and batch_axis0")
    name, token = _typed(entry, "name", str, key), _typed(entry, "dtype", str, key)
    shape, batch_axis0 = _typed(entry, "shape", list, key), entry["batch_axis0"]
    if token not in BY_TOKEN:
        _refuse(f"{key}.dtype", repr(token), did_you_mean(token, BY_TOKEN))
    if batch_axis0 is not None and not (is_size(batch_axis0) and batch_axis0 < len(shape)):
        _refuse(f"{key}.batch_axis0", repr(batch_axis0), f"an axis from 0 to {len(shape) - 1}")
    for axis0, size in enumerate(shape):
        fits = size == VARIABLE if axis0 == batch_axis0 else is_size(size, least=1)
        if not fits or isinstance(size, bool):
            _refuse(f"{key}.shape", repr(shape), "sizes above 0, and -1 at the batch axis")
    return IOSpec(name=name, token=token, shape=tuple(shape), batch_axis0=batch_axis0)


def _costs(document: Mapping[str, Any], sizes: tuple[int, ...]) -> dict[int, Cost]:
    entries = _typed(document, "costs", dict)
    if set(entries) != {str(size) for size in sizes}:
        _refuse("costs", repr(entries), "an entry for each of the batch sizes")
    costs = dict[int, Cost]()
    for size in sizes:
        entry = entries[str(size)]
        if not isinstance(entry, dict) or set(entry) != {"flops", "size_bytes"}:
            _refuse(f"costs.{size}", repr(entry), "flops and size_bytes")
        flops, size_bytes = entry["flops"], entry["size_bytes"]
        is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
        if not is_number or not math.isfinite(flops) or flops < 0 or not is_size(size_bytes):
            _refuse(f"costs.{size}", repr(entry), "finite numbers, not below 0")
        costs[size] = Cost(flops=float(flops), size_bytes=size_bytes)
    return costs


def _files(document: Mapping[str, Any]) -> dict[str, FileDigest]:
    files = dict[str, FileDigest]()
    for name, entry in _typed(document, "files", dict).items():
        check_name(name)
        if name == FILE:
            _refuse("files", f"with `{FILE}` itself", "the other files of the bundle")
        if not isinstance(entry, dict) or set(entry) != {"sha256", "size_bytes"}:
            _refuse(f"files.{name}", repr(entry), "sha256 and size_bytes")
        sha256, size_bytes = entry["sha256"], entry["size_bytes"]
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            _refuse(f"files.{name}.sha256", repr(sha256), "64 hexadecimal digits")
        if not is_size(size_bytes):
            _refuse(f"files.{name}.size_bytes", repr(size_bytes), "a number of bytes")
        files[name] = FileDigest(sha256=sha256, size_bytes=size_bytes)
    return files


def _strings(document: Mapping[str, Any], key: str) -> list[str]:
    values = _typed(document, key, list)
    if not all(isinstance(value, str) for value in values):
        _refuse(key, repr(values), "a list of strings")
    return values


def _string_map(document: Mapping[str, Any], key: str) -> dict[str, str]:
    values = _typed(document, key, dict)
    if not all(isinstance(value, str) for value in values.values()):
        _refuse(key, repr(values), "an object of strings")
    return values


_KINDS = {str: "a string", int: "an integer", list: "a list", dict: "an object"}


def _typed(document: Mapping[str, Any], key: str, kind: type[Any], parent: str = "") -> Any:
    path = f"{parent}.{key}" if parent else key
    if key not in document:
        _refuse(path, "missing", _KINDS[kind])
    value = document[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        _refuse(path, repr(value), _KINDS[kind])
    return value


def _refuse(key: str, found: str, expected: str) -> NoReturn:
    found = found if len(found) <= 80 else found[:77] + "..."
    raise BundleError(f"In `{FILE}`, `{key}` is {found}.", expected=expected)
