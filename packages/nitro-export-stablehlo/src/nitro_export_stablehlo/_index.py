"""`nitro.json`: what the Python loader needs, and the digest of every other file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from nitro.errors import BundleError, did_you_mean
from nitro.export import constraint_symbols, size_symbols

from ._dtypes import BY_TOKEN
from ._files import FileDigest, check_name
from ._io_spec import VARIABLE, IOSpec
from ._json import is_size, read_json
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
class Index:
    """The contents of `nitro.json`.

    Attributes:
        name: The model's name.
        inputs: The inputs in wire order, which is argument order.
        outputs: The outputs in result order.
        batch_sizes: The sizes that have a program of their own, ascending.
        costs: The cost of each size's program.
        rtol: How far outputs may be from the golden ones, relative to the largest.
        dynamic_batch: Whether there is a program for any number of rows.
        batch_symbol: What the constraints call the number of rows.
        constraints: What holds for the sizes that a caller chooses.
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
    rtol: float
    dynamic_batch: bool = False
    batch_symbol: str = "b"
    constraints: tuple[str, ...] = ()
    input_shapes: tuple[Mapping[str, int], ...] = ()
    vjp_order: int = 0
    client_inputs: tuple[IOSpec, ...] = ()
    client_outputs: tuple[IOSpec, ...] = ()
    verification: Mapping[str, Any] | None = None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that a caller chooses, besides the rows; sorted."""
        sizes = (size for spec in self.inputs for size in spec.symbolic_sizes)
        return tuple(sorted(size_symbols(*sizes) - {self.batch_symbol}))

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
            "rtol": self.rtol,
            "dynamic_batch": self.dynamic_batch,
            "batch_symbol": self.batch_symbol,
            "constraints": self.constraints,
            "input_shapes": [dict(sorted(values.items())) for values in self.input_shapes],
            "vjp_order": self.vjp_order,
            "client_inputs": [_entry(spec) for spec in self.client_inputs],
            "client_outputs": [_entry(spec) for spec in self.client_outputs],
            "verification": self.verification,
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
        rtol=_rtol(document),
        dynamic_batch=_typed(document, "dynamic_batch", bool),
        batch_symbol=_symbol(document, "batch_symbol"),
        constraints=tuple(_strings(document, "constraints")),
        input_shapes=_input_shapes(document),
        vjp_order=_typed(document, "vjp_order", int),
        client_inputs=_specs(document, "client_inputs"),
        client_outputs=_specs(document, "client_outputs"),
        verification=_verification(document),
    )
    _check_symbols(index)
    needed = [MANIFEST_FILE, WEIGHTS_FILE, GOLDEN_FILE]
    needed += [key.artifact_file for key in index.fixed_programs]
    needed += [key.exported_file for key in (*index.fixed_programs, *index.symbolic_programs)]
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
        is_batch = axis0 == batch_axis0
        fits = size == VARIABLE if is_batch else _is_symbolic(size) or is_size(size, least=1)
        if not fits or isinstance(size, bool):
            _refuse(
                f"{key}.shape",
                repr(shape),
                'sizes above 0 or such as "2*time", and -1 at the batch axis',
            )
    return IOSpec(name=name, token=token, shape=tuple(shape), batch_axis0=batch_axis0)


def _is_symbolic(size: Any) -> bool:
    try:
        return isinstance(size, str) and bool(size_symbols(size))
    except ValueError:
        return False


def _symbol(document: Mapping[str, Any], key: str) -> str:
    name = _typed(document, key, str)
    if not name.isidentifier():
        _refuse(key, repr(name), "a name")
    return name


def _input_shapes(document: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
    entries = _typed(document, "input_shapes", list)
    for i, entry in enumerate(entries):
        whole = isinstance(entry, dict) and all(is_size(n, least=1) for n in entry.values())
        if not whole or entries.index(entry) != i:
            _refuse(f"input_shapes[{i}]", repr(entry), "sizes by name, different in each entry")
    return tuple(entries)


def _check_symbols(index: Index) -> None:
    """Checks that shapes and constraints speak of the same names as `input_shapes`."""
    symbols = set(index.symbols)
    if bool(symbols) != bool(index.input_shapes):
        _refuse("input_shapes", repr(list(index.input_shapes)), "an entry if sizes are symbolic")
    for i, values in enumerate(index.input_shapes):
        if set(values) != symbols:
            _refuse(f"input_shapes[{i}]", repr(values), f"sizes of exactly {sorted(symbols)}")
    known = symbols | {index.batch_symbol}
    for i, constraint in enumerate(index.constraints):
        try:
            unknown = constraint_symbols(constraint) - known
        except ValueError as error:
            _refuse(f"constraints[{i}]", repr(constraint), f"a constraint: {error}")
        if unknown:
            _refuse(f"constraints[{i}]", repr(constraint), f"names out of {sorted(known)}")
    for key, specs in (("inputs", index.inputs), ("outputs", index.outputs)):
        for i, spec in enumerate(specs):
            if size_symbols(*spec.symbolic_sizes) - symbols:
                _refuse(f"{key}[{i}].shape", repr(spec.shape), f"names out of {sorted(symbols)}")
            for variant in range(len(index.input_shapes)):
                _check_fixed(spec, index.values(variant), f"{key}[{i}].shape")


def _check_fixed(spec: IOSpec, values: Mapping[str, int], key: str) -> None:
    try:
        sizes = spec.sizes(1, values)
    except (ArithmeticError, ValueError) as error:
        _refuse(key, repr(spec.shape), f"sizes that can be worked out: {error}")
    if not all(is_size(size) for size in sizes):
        _refuse(key, repr(sizes), "sizes not below 0")


def _rtol(document: Mapping[str, Any]) -> float:
    rtol = document.get("rtol")
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not 0 <= rtol < 1:
        _refuse("rtol", repr(rtol), "a number from 0 to 1")
    return float(rtol)


def _verification(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = document.get("verification")
    if found is not None and not isinstance(found, dict):
        _refuse("verification", repr(found), "an object, or null")
    return found


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


_KINDS = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _typed(document: Mapping[str, Any], key: str, kind: type[Any], parent: str = "") -> Any:
    path = f"{parent}.{key}" if parent else key
    if key not in document:
        _refuse(path, "missing", _KINDS[kind])
    value = document[key]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        _refuse(path, repr(value), _KINDS[kind])
    return value


def _refuse(key: str, found: str, expected: str) -> NoReturn:
    found = found if len(found) <= 80 else found[:77] + "..."
    raise BundleError(f"In `{FILE}`, `{key}` is {found}.", expected=expected)
