"""Writes an `ExportProgram` as a bundle."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import numpy as np
from jax.extend.mlir.dialects import stablehlo

from nitro.errors import ConfigError, ExportError, warn
from nitro.export import export_time, is_size, join_golden, solve_sizes

from ._artifact import Signature, make_artifact
from ._dtypes import BY_TOKEN, find_dtype, has_nan
from ._files import FileWriter
from ._index import FILE as INDEX_FILE
from ._index import Cost, Index, read_index
from ._io_spec import IOSpec, mlir_type
from ._keys import fixed_keys, symbolic_keys
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest
from ._weights import FILE as WEIGHTS_FILE
from ._weights import GOLDEN_FILE, write_tensors
from ._x64 import x64_for

if TYPE_CHECKING:
    from nitro.export import ExportProgram

PATCH_FILE = "working_tree.patch"
POSTPROCESS_FILE = "postprocess.py"
MODEL_JL_FILE = "model.jl"


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options of the backend.

    Attributes:
        stablehlo_version: The oldest reader that must understand the artifacts.
        calling_convention_version: Of the serialized exports; None for JAX's default.
        input_shapes: The symbolic sizes to compile fixed programs for, a mapping for
            each variant; None takes those of the golden inputs.
        model_jl: Julia code for the server, or None.
        description: Free text for the manifest.
    """

    stablehlo_version: str
    calling_convention_version: int | None = None
    input_shapes: Sequence[Mapping[str, int]] | None = None
    model_jl: str | None = None
    description: str = ""


def write_bundle(program: ExportProgram, root: Path, options: WriteOptions) -> None:
    """Writes every file of a bundle into the empty directory `root`.

    All checks that need no lowering come first, so that a refusal is quick.

    Raises:
        ExportError: Something that a bundle cannot promise.
    """
    shared = Index.fields_of(program)
    inputs, outputs = shared["inputs"], shared["outputs"]
    client_inputs = tuple(IOSpec.from_export(spec) for spec in program.client_inputs)
    client_outputs = tuple(IOSpec.from_export(spec) for spec in program.client_outputs)
    variants = checked_variants(program, options.input_shapes)
    weights = {name: program.weights[name] for name in program.weight_names}
    _check_weights(weights)
    files = FileWriter(root)
    with x64_for([*(spec.numpy_dtype for spec in (*inputs, *outputs)), *_dtypes(weights)]):
        written = _write_programs(files, program, options, variants, (inputs, outputs))
    _warn_of_custom_calls(written.custom_calls)
    _write_arrays(files, weights, join_golden(program.golden))
    _write_code(files, program, options)
    versions = {**_versions(), "stablehlo_target": options.stablehlo_version}
    calls = tuple(sorted(written.custom_calls))
    provenance = _provenance(program, versions, calls, variants)
    if program.working_tree_patch is not None and PATCH_FILE in provenance.values():
        files.write(PATCH_FILE, program.working_tree_patch)
    manifest = Manifest(
        name=program.name,
        description=options.description,
        inputs=inputs,
        outputs=outputs,
        batch_sizes=program.batch_sizes,
        input_shapes=variants,
        # The server reads them only beside a model.jl.
        client_inputs=client_inputs if options.model_jl is not None else (),
        client_outputs=client_outputs if options.model_jl is not None else (),
        provenance=provenance,
    )
    files.write(MANIFEST_FILE, manifest.to_yaml())
    index = Index(
        **shared,
        costs=written.costs,
        platforms=program.platforms,
        calling_convention_version=written.calling_convention_version,
        versions=versions,
        custom_calls=calls,
        files=files.digests,
        input_shapes=variants,
        vjp_order=program.vjp_order,
        client_inputs=client_inputs,
        client_outputs=client_outputs,
    )
    files.write(INDEX_FILE, index.to_bytes())


def _write_arrays(
    files: FileWriter, weights: Mapping[str, Any], golden: Mapping[str, np.ndarray]
) -> None:
    with files.open(WEIGHTS_FILE) as sink:
        order = {"argument_order": json.dumps(list(weights))} if weights else None
        write_tensors(sink, weights, reverse_axes=True, metadata=order)
    with files.open(GOLDEN_FILE) as sink:
        write_tensors(sink, golden, reverse_axes=False)


def _write_code(files: FileWriter, program: ExportProgram, options: WriteOptions) -> None:
    """Writes the modules that run around the program, those that there are."""
    for name, text in (
        (POSTPROCESS_FILE, program.postprocess),
        (MODEL_JL_FILE, options.model_jl),
    ):
        if text is not None:
            files.write(name, text.encode("utf-8"))


def write_verification(root: Path, verification: Mapping[str, Any]) -> None:
    """Puts the facts into `nitro.json`, which has no digest of itself."""
    file = root / INDEX_FILE
    index = replace(read_index(file.read_bytes()), verification=verification)
    file.write_bytes(index.to_bytes())


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What writing the programs found out about them."""

    custom_calls: frozenset[str]
    costs: Mapping[int, Cost]
    calling_convention_version: int


def _write_programs(
    files: FileWriter,
    program: ExportProgram,
    options: WriteOptions,
    variants: Sequence[Mapping[str, int]],
    specs: tuple[tuple[IOSpec, ...], tuple[IOSpec, ...]],
) -> _Written:
    """Writes the fixed programs for the server and the loader, and the symbolic ones."""
    calls = set[str]()
    costs = dict[int, Cost]()
    version = options.calling_convention_version
    exported: Any = None
    for key in fixed_keys(program.batch_sizes, len(variants)):
        assert key.size is not None
        values = {} if key.variant is None else variants[key.variant]
        # Readers outside JAX know no platform argument.
        single = program.exported(key.size, sizes=values, platforms=program.platforms[:1])
        artifact, signature = make_artifact(single, options.stablehlo_version)
        _check_signature(signature, key.size, values, *specs, program.weights)
        calls.update(signature.custom_calls)
        files.write(key.artifact_file, artifact)
        exported = program.exported(key.size, sizes=values, calling_convention_version=version)
        files.write(key.exported_file, _serialized(exported, program.vjp_order))
        if key.size not in costs:
            costs[key.size] = _cost(single)
    for key in symbolic_keys(
        program.batch_sizes, len(variants), dynamic_batch=program.dynamic_batch
    ):
        exported = program.exported(key.size, calling_convention_version=version)
        files.write(key.exported_file, _serialized(exported, program.vjp_order))
    return _Written(
        custom_calls=frozenset(calls),
        costs=costs,
        calling_convention_version=exported.calling_convention_version,
    )


def _serialized(exported: jax.export.Exported, vjp_order: int) -> bytes:
    return bytes(exported.serialize(vjp_order=vjp_order))


def checked_variants(
    program: ExportProgram, given: Sequence[Mapping[str, int]] | None
) -> tuple[dict[str, int], ...]:
    """The symbolic sizes to compile fixed programs for.

    Raises:
        ConfigError: Entries that do not name each symbol, or break a constraint.
    """
    symbols = program.symbols
    if given is None:
        return (program.golden_sizes,) if symbols else ()
    if not symbols:
        raise ConfigError(
            f"`input_shapes` is {given!r}, and `export_inputs` has no symbolic size.",
            expected='a name in a shape, such as `(1, "time", 8)`',
            fix="leave `input_shapes` out",
        )
    variants = tuple(dict(entry) for entry in given)
    for entry in variants:
        whole = all(is_size(number, least=1) for number in entry.values())
        if set(entry) != set(symbols) or not whole:
            raise ConfigError(
                f"`input_shapes` has the entry {entry!r}.",
                expected="a size for each of " + ", ".join(f"`{name}`" for name in symbols),
            )
        for size in program.batch_sizes:
            pairs = [(name, number) for name, number in entry.items()]
            _, problem = solve_sizes([*pairs, (program.batch_symbol, size)], program.constraints)
            if problem:
                raise ConfigError(
                    f"`input_shapes` has the entry {entry!r}: {problem}.",
                    expected="sizes that keep the constraints of the export",
                )
    if not variants or any(variants.count(entry) > 1 for entry in variants):
        raise ConfigError(
            f"`input_shapes` is {list(variants)!r}.", expected="entries that differ, at least one"
        )
    return variants


def _dtypes(weights: Mapping[str, Any]) -> list[np.dtype[Any]]:
    return [np.dtype(weight.dtype) for weight in weights.values()]


def _check_weights(weights: Mapping[str, Any]) -> None:
    for name, weight in weights.items():
        dtype = find_dtype(weight.dtype)
        if dtype is None:
            raise ExportError(
                f"The weight `{name}` has the dtype {weight.dtype}.",
                expected="one of " + ", ".join(str(row.numpy) for row in BY_TOKEN.values()),
                fix="store it in a dtype that bundles have, and convert it inside `forward`",
            )
        if dtype.nan_above is not None and has_nan(np.asarray(weight).reshape(-1), dtype):
            raise ExportError(
                f"The weight `{name}` holds a NaN, so every prediction would be one.",
                expected="weights of a run that did not diverge",
                fix='export a record from before, such as `checkpoint="runs/x@best"`',
            )


def _check_signature(
    signature: Signature,
    size: int,
    values: Mapping[str, int],
    inputs: tuple[IOSpec, ...],
    outputs: tuple[IOSpec, ...],
    weights: Mapping[str, Any],
) -> None:
    """Compares what was lowered with what is promised; the server never would."""
    wanted = {f"the input `{spec.name}`": spec.mlir_type(size, values) for spec in inputs}
    for name in sorted(weights):
        weight = weights[name]
        dtype = find_dtype(weight.dtype)
        assert dtype is not None
        wanted[f"the weight `{name}`"] = mlir_type(weight.shape, dtype)
    promised = {f"the output `{spec.name}`": spec.mlir_type(size, values) for spec in outputs}
    for kind, found, specs in (
        ("arguments", signature.arguments, wanted),
        ("results", signature.results, promised),
    ):
        if len(found) != len(specs):
            raise ExportError(
                f"The program for {size} rows has {len(found)} {kind}.",
                expected=f"{len(specs)}: {', '.join(specs)}",
            )
        for got, (what, expected) in zip(found, specs.items(), strict=True):
            if got != expected:
                raise ExportError(
                    f"In the program for {size} rows, {what} is {got}.",
                    expected=f"{expected}, as promised",
                    fix="promise the dtype and shape that `forward` gives, or change `forward`",
                )


def _cost(exported: jax.export.Exported) -> Cost:
    counts = None
    # Counted by XLA for the CPU, which is always there.
    if "cpu" in exported.platforms:
        with jax.default_device(jax.devices("cpu")[0]):
            counts = jax.jit(exported.call).lower(*exported.in_avals).cost_analysis()
    flops = counts.get("flops", 0.0) if isinstance(counts, Mapping) else 0.0
    avals = (*exported.in_avals, *exported.out_avals)
    return Cost(
        # XLA counts -1 where it cannot tell.
        flops=max(0.0, float(flops)),
        size_bytes=sum(aval.size * aval.dtype.itemsize for aval in avals),
    )


def _versions() -> dict[str, str]:
    installed = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {**installed, "stablehlo": stablehlo.get_current_version()}


def _provenance(
    program: ExportProgram,
    versions: Mapping[str, str],
    calls: Sequence[str],
    variants: Sequence[Mapping[str, int]],
) -> dict[str, Any]:
    provenance: dict[str, Any] = {
        "source_framework": "jax",
        "converter": "nitro-export-stablehlo",
        "jax_version": versions["jax"],
        "stablehlo_version": versions["stablehlo_target"],
        "batch_sizes": list(program.batch_sizes),
        "platforms": list(program.platforms),
        **({"input_shapes": [dict(values) for values in variants]} if variants else {}),
        **({"constraints": list(program.constraints)} if program.constraints else {}),
        **({"custom_calls": list(calls)} if calls else {}),
        **({"narrowed_inputs": list(program.narrowed)} if program.narrowed else {}),
        "exported_at": export_time(),
        **program.provenance,
    }
    provenance.pop("git_diff", None)
    if program.working_tree_patch is not None:
        provenance["git_diff_file"] = PATCH_FILE
    else:
        provenance.pop("git_diff_file", None)
    return provenance


def _warn_of_custom_calls(calls: Collection[str]) -> None:
    if calls:
        warn(
            f"The program calls {', '.join(sorted(calls))}, which only a runtime with these "
            "targets can run: JAX on a CPU can, IREE and GPU servers cannot."
        )
