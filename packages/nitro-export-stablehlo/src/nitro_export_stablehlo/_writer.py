"""Writes an `ExportProgram` as a bundle."""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import numpy as np
from jax.extend.mlir.dialects import stablehlo

from nitro.errors import ExportError

from ._artifact import Signature, make_artifact
from ._dtypes import BY_TOKEN, find_dtype, has_nan
from ._files import FileWriter
from ._index import FILE as INDEX_FILE
from ._index import Cost, Index, artifact_file, exported_file
from ._io_spec import IOSpec, mlir_type
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest
from ._weights import FILE as WEIGHTS_FILE
from ._weights import GOLDEN_FILE, write_tensors
from ._x64 import x64_for

if TYPE_CHECKING:
    from nitro.export import ExportProgram

PATCH_FILE = "working_tree.patch"

_MAX_PATCH_BYTES = 20 * 1024 * 1024


def write_bundle(program: ExportProgram, root: Path, *, stablehlo_version: str) -> None:
    """Writes every file of a bundle into the empty directory `root`.

    All checks that need no lowering come first, so that a refusal is quick.

    Raises:
        ExportError: Something that a bundle cannot promise.
    """
    inputs = tuple(IOSpec.from_export(spec) for spec in program.inputs)
    outputs = tuple(IOSpec.from_export(spec) for spec in program.outputs)
    weights = {name: program.weights[name] for name in program.weight_names}
    _check_weights(weights)
    files = FileWriter(root)
    exports = dict[int, jax.export.Exported]()
    calls = set[str]()
    with x64_for([*(spec.numpy_dtype for spec in (*inputs, *outputs)), *_dtypes(weights)]):
        for size in program.batch_sizes:
            exported = exports[size] = program.exported(size)
            artifact, signature = make_artifact(exported, stablehlo_version)
            _check_signature(signature, size, inputs, outputs, weights)
            files.write(artifact_file(size), artifact)
            files.write(exported_file(size), bytes(exported.serialize()))
            calls.update(signature.custom_calls)
        costs = {size: _cost(exported) for size, exported in exports.items()}
    _warn_of_custom_calls(calls)
    with files.open(WEIGHTS_FILE) as sink:
        order = {"argument_order": json.dumps(list(weights))} if weights else None
        write_tensors(sink, weights, reverse_axes=True, metadata=order)
    with files.open(GOLDEN_FILE) as sink:
        write_tensors(sink, _golden(program), reverse_axes=False)
    first = exports[program.batch_sizes[0]]
    versions = {**_versions(), "stablehlo_target": stablehlo_version}
    provenance = _provenance(program, versions, sorted(calls))
    if program.working_tree_patch is not None and PATCH_FILE in provenance.values():
        files.write(PATCH_FILE, program.working_tree_patch)
    manifest = Manifest(
        name=program.name,
        inputs=inputs,
        outputs=outputs,
        batch_sizes=program.batch_sizes,
        provenance=provenance,
    )
    files.write(MANIFEST_FILE, manifest.to_yaml())
    index = Index(
        name=program.name,
        inputs=inputs,
        outputs=outputs,
        batch_sizes=program.batch_sizes,
        costs=costs,
        platforms=tuple(first.platforms),
        calling_convention_version=first.calling_convention_version,
        versions=versions,
        custom_calls=tuple(sorted(calls)),
        files=files.digests,
    )
    files.write(INDEX_FILE, index.to_json())


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
    inputs: tuple[IOSpec, ...],
    outputs: tuple[IOSpec, ...],
    weights: Mapping[str, Any],
) -> None:
    """Compares what was lowered with what is promised; the server never would."""
    wanted = {f"the input `{spec.name}`": spec.mlir_type(size) for spec in inputs}
    for name, weight in weights.items():
        dtype = find_dtype(weight.dtype)
        assert dtype is not None
        wanted[f"the weight `{name}`"] = mlir_type(weight.shape, dtype)
    promised = {f"the output `{spec.name}`": spec.mlir_type(size) for spec in outputs}
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
    with jax.default_device(jax.devices("cpu")[0]):
        counts = jax.jit(exported.call).lower(*exported.in_avals).cost_analysis()
    flops = counts.get("flops", 0.0) if isinstance(counts, Mapping) else 0.0
    avals = (*exported.in_avals, *exported.out_avals)
    return Cost(
        # XLA counts -1 where it cannot tell.
        flops=max(0.0, float(flops)),
        size_bytes=sum(aval.size * aval.dtype.itemsize for aval in avals),
    )


def _golden(program: ExportProgram) -> dict[str, np.ndarray]:
    inputs = {f"inputs.{name}": array for name, array in program.golden.inputs.items()}
    outputs = {f"outputs.{name}": array for name, array in program.golden.outputs.items()}
    return {**inputs, **outputs}


def _versions() -> dict[str, str]:
    installed = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {**installed, "stablehlo": stablehlo.get_current_version()}


def _provenance(
    program: ExportProgram, versions: Mapping[str, str], calls: list[str]
) -> dict[str, Any]:
    provenance: dict[str, Any] = {
        "source_framework": "jax",
        "converter": "nitro-export-stablehlo",
        "jax_version": versions["jax"],
        "stablehlo_version": versions["stablehlo_target"],
        "batch_sizes": list(program.batch_sizes),
        **({"custom_calls": calls} if calls else {}),
        "exported_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **program.provenance,
    }
    provenance.pop("git_diff", None)
    patch = program.working_tree_patch
    if patch is not None and len(patch) <= _MAX_PATCH_BYTES:
        provenance["git_diff_file"] = PATCH_FILE
    else:
        provenance.pop("git_diff_file", None)
    return provenance


def _warn_of_custom_calls(calls: set[str]) -> None:
    if calls:
        warnings.warn(
            f"The program calls {', '.join(sorted(calls))}, which only a runtime with these "
            "targets can run: JAX on a CPU can, IREE and GPU servers cannot.",
            stacklevel=5,
        )
