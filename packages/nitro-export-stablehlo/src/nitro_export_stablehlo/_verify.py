"""Checks that a bundle still keeps every promise that it was written with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np

from nitro.errors import BundleError, ExportError

from ._artifact import make_artifact, read_signature, read_text
from ._files import FileReader
from ._index import FILE as INDEX_FILE
from ._index import MAX_BYTES as MAX_INDEX_BYTES
from ._index import Index, artifact_file, exported_file, read_index
from ._io_spec import mlir_type
from ._loader import Bundle, check_agreement, load_bundle
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest, read_manifest
from ._programs import read_exported
from ._requests import take_rows
from ._vet import TIMEOUT_S, find_unsafe_programs
from ._weights import FILE as WEIGHTS_FILE
from ._weights import GOLDEN_FILE, TensorFile
from ._yaml import MAX_BYTES as MAX_MANIFEST_BYTES

T = TypeVar("T")

_TOLERANCE = 1e-5
_EPSILONS = 8

# JAX promises to read exports for six months; a month is left for a new one.
_EXPORT_READABLE_DAYS = 180
_EXPORT_NEARS_END_DAYS = 150


@dataclass
class Report:
    """What a check found.

    Attributes:
        violations: Broken promises, a line each.
        notes: What may break later, a line each.
    """

    violations: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def attempt(self, check: Callable[[], T]) -> T | None:
        """Runs a check; keeps a `BundleError` as a violation and returns None."""
        try:
            return check()
        except BundleError as error:
            # Two checks may stumble over the same file.
            if (line := one_line(error)) not in self.violations:
                self.violations.append(line)
            return None


def verify_bundle(path: Path, *, timeout_s: float = TIMEOUT_S) -> Report:
    """Checks digests, rules, signatures, the golden outputs and the age of a bundle.

    Goes on after a violation as far as it can, so that one run shows them all. Programs
    are tried in a child process first, for at most `timeout_s` seconds.
    """
    report = Report()
    files = report.attempt(lambda: FileReader(path))
    if files is None:
        return report
    index = report.attempt(lambda: read_index(files.read(INDEX_FILE, limit_bytes=MAX_INDEX_BYTES)))
    if index is None:
        return report
    for name, digest in index.files.items():
        report.attempt(lambda name=name, digest=digest: files.check(name, digest))
    manifest = report.attempt(lambda: _manifest(files, index))
    if manifest is not None:
        _check_place(report, path, manifest)
    weights = report.attempt(lambda: _weights(files))
    # Without the weights, no program can be told to take the right arguments.
    unsafe = (
        find_unsafe_programs(path, index.batch_sizes, timeout_s=timeout_s)
        if weights is not None
        else {}
    )
    report.violations += [f"`{file}`: {problem}" for file, problem in unsafe.items()]
    sound = [
        size
        for size in index.batch_sizes
        if not {artifact_file(size), exported_file(size)} & set(unsafe)
    ]
    if weights is not None:
        for size in sound:
            report.attempt(
                lambda size=size, weights=weights: _check_artifact(files, index, weights, size)
            )
    bundle = report.attempt(lambda: load_bundle(path, verify_digests=False))
    if bundle is not None:
        for size in sound:
            report.attempt(lambda size=size, bundle=bundle: _check_golden(files, bundle, size))
    if manifest is not None:
        _note_age(report, manifest)
    if index.custom_calls:
        report.notes.append(
            f"The programs call {', '.join(index.custom_calls)}: IREE and GPU servers lack them."
        )
    return report


def one_line(error: BundleError) -> str:
    """The parts of an error on one line."""
    parts = [error.problem.rstrip(".")]
    if error.expected:
        parts.append(f"expected: {error.expected}")
    return "; ".join(" ".join(part.split()) for part in parts)


def golden_arrays(files: FileReader) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The reference inputs and outputs, by wire name.

    Raises:
        BundleError: The file is damaged.
    """
    stored = TensorFile(files.path(GOLDEN_FILE), file=GOLDEN_FILE, reverse_axes=False)
    inputs, outputs = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name in stored:
        kind, _, wire_name = name.partition(".")
        if kind not in {"inputs", "outputs"}:
            raise BundleError(
                f"`{GOLDEN_FILE}` holds `{name}`.", expected="names from `inputs.` or `outputs.`"
            )
        (inputs if kind == "inputs" else outputs)[wire_name] = stored[name]
    return inputs, outputs


def _manifest(files: FileReader, index: Index) -> Manifest:
    manifest = read_manifest(
        files.read(MANIFEST_FILE, limit_bytes=MAX_MANIFEST_BYTES),
        has_model_jl="model.jl" in index.files,
    )
    check_agreement(manifest, index)
    return manifest


def _check_place(report: Report, path: Path, manifest: Manifest) -> None:
    directory = path.resolve().name
    if manifest.name != directory:
        report.violations.append(
            f"The directory is called `{directory}`, which clients will send as the model's "
            f"name; expected: `{manifest.name}`, by `{MANIFEST_FILE}`"
        )
    listed = {artifact_file(size) for size in manifest.batch_sizes}
    for found in sorted(path.glob("model*.mlir")):
        if re.fullmatch(r"model(\.v\d+)?(\.b\d+)?\.mlir", found.name) and found.name not in listed:
            report.violations.append(
                f"`{found.name}` is there, which the server would load; expected: only the "
                f"programs of the sizes in `{MANIFEST_FILE}`"
            )


def _weights(files: FileReader) -> Mapping[str, str]:
    """The type of each weight argument, in argument order."""
    stored = TensorFile(files.path(WEIGHTS_FILE), file=WEIGHTS_FILE, reverse_axes=True)
    return {
        name: mlir_type(stored.shape(name), stored.dtypes[name]) for name in stored.argument_order()
    }


def _check_artifact(files: FileReader, index: Index, weights: Mapping[str, str], size: int) -> None:
    file = artifact_file(size)
    signature = read_signature(files.read(file), file=file)
    arguments = {f"input `{spec.name}`": spec.mlir_type(size) for spec in index.inputs}
    arguments |= {f"weight `{name}`": kind for name, kind in weights.items()}
    results = {f"output `{spec.name}`": spec.mlir_type(size) for spec in index.outputs}
    for what, found, wanted in (
        ("arguments", signature.arguments, arguments),
        ("results", signature.results, results),
    ):
        if len(found) != len(wanted):
            raise BundleError(
                f"`{file}` has {len(found)} {what}.", expected=f"{len(wanted)}: {', '.join(wanted)}"
            )
        for got, (name, expected) in zip(found, wanted.items(), strict=True):
            if got != expected:
                raise BundleError(f"In `{file}`, the {name} is {got}.", expected=expected)
    _check_same_program(files, index, size)


def _check_same_program(files: FileReader, index: Index, size: int) -> None:
    """Compares what the server runs with what the loader runs.

    The golden outputs are checked with the loader's program only. Both go through the
    same StableHLO version, so equal programs print equally, whichever JAX reads them.
    """
    ours, servers = exported_file(size), artifact_file(size)
    exported = read_exported(files.read(ours), file=ours)
    try:
        again, _ = make_artifact(exported, index.versions["stablehlo_target"])
    except (ExportError, ValueError, KeyError) as error:
        raise BundleError(
            f"The program in `{ours}` cannot be written again: {error}.",
            expected="a program of the bundle's StableHLO version",
        ) from error
    stored = files.read(servers)
    if again != stored and read_text(again, file=ours) != read_text(stored, file=servers):
        raise BundleError(
            f"`{servers}` and `{ours}` hold different programs.", expected="one program in both"
        )


def _check_golden(files: FileReader, bundle: Bundle, size: int) -> None:
    """Runs the program of one size on the golden inputs."""
    inputs, outputs = golden_arrays(files)
    if set(outputs) != {spec.name for spec in bundle.outputs}:
        raise BundleError(
            f"`{GOLDEN_FILE}` has the outputs {sorted(outputs)}.",
            expected=f"{[spec.name for spec in bundle.outputs]}",
        )
    axes = {spec.name: spec.batch_axis0 or 0 for spec in bundle.inputs}
    filled = {name: take_rows(a, axes.get(name, 0), 0, size) for name, a in inputs.items()}
    results = bundle(**filled)
    for spec in bundle.outputs:
        got, wanted = results[spec.name], outputs[spec.name]
        if spec.batch_axis0 is not None:
            rows = min(size, wanted.shape[spec.batch_axis0])
            got, wanted = (take_rows(a, spec.batch_axis0, 0, rows) for a in (got, wanted))
        problem = _difference(bundle, got, wanted)
        if problem:
            raise BundleError(
                f"With {size} rows, the output `{spec.name}` {problem}.",
                expected=f"the outputs in `{GOLDEN_FILE}`",
            )


def _difference(bundle: Bundle, got: np.ndarray, wanted: np.ndarray) -> str:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"is {got.dtype} of shape {got.shape}, not {wanted.dtype} of {wanted.shape}"
    if got.dtype.kind in "biu":
        changed = int((got != wanted).sum())
        return f"differs in {changed} of {got.size} values" if changed else ""
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "has infinities or NaNs in other places"
    finite = np.isfinite(b)
    furthest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    allowed = tolerance(bundle, got.dtype) * (1.0 + float(np.abs(b[finite]).max(initial=0.0)))
    return f"differs by {furthest:.3g}, more than {allowed:.3g}" if furthest > allowed else ""


def tolerance(bundle: Bundle, output: np.dtype) -> float:
    """How far outputs may move, relative to the largest: by the coarsest dtype involved.

    XLA sums in another order for another batch size or machine.
    """
    import jax.numpy as jnp

    dtypes = {output, *(spec.numpy_dtype for spec in bundle.inputs)}
    dtypes |= {np.dtype(weight.dtype) for weight in bundle.weights.values()}
    epsilons = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(_TOLERANCE, _EPSILONS * max(epsilons, default=0.0))


def _note_age(report: Report, manifest: Manifest) -> None:
    try:
        exported = datetime.fromisoformat(str(manifest.provenance.get("exported_at")))
    except ValueError:
        return
    if exported.tzinfo is None:
        exported = exported.replace(tzinfo=UTC)
    days = (datetime.now(UTC) - exported).days
    if days >= _EXPORT_NEARS_END_DAYS:
        report.notes.append(
            f"The bundle is {days} days old. JAX promises to read its exports for "
            f"{_EXPORT_READABLE_DAYS} days, so load it with the jax that wrote it, or export "
            "again; the .mlir files stay readable for five years."
        )
