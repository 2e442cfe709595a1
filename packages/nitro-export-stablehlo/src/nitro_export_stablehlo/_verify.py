"""Checks that a bundle still keeps every promise that it was written with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from nitro.errors import BundleError, ExportError
from nitro.export import describe_difference, solve_sizes, take_rows

from ._agreement import check_agreement
from ._artifact import make_artifact, read_signature, read_text
from ._files import FileReader
from ._index import FILE as INDEX_FILE
from ._index import MAX_BYTES as MAX_INDEX_BYTES
from ._index import Index, read_index
from ._io_spec import mlir_type
from ._keys import ProgramKey, fixed_keys
from ._loader import Bundle, load_bundle
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest, read_manifest
from ._programs import read_exported
from ._vet import TIMEOUT_S, find_unsafe_programs
from ._weights import FILE as WEIGHTS_FILE
from ._weights import GOLDEN_FILE, TensorFile, check_values
from ._window import find_window
from ._yaml import MAX_BYTES as MAX_MANIFEST_BYTES

T = TypeVar("T")


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
    """Checks digests, rules, signatures, the golden outputs and the versions of a bundle.

    What wrote the bundle is compared with the installed JAX: a calling convention or a
    StableHLO version that it does not read is a violation. A note tells of what it reads
    without a promise, which JAX gives by the release dates of jaxlib: of a newer jaxlib
    than the installed one, and, by the bundle's age as a hint, of one that may be more than
    six months older.

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
    facts = {} if manifest is None else manifest.provenance
    window = find_window(index, str(facts.get("exported_at")))
    report.violations += window.violations
    weights = report.attempt(lambda: _weights(files, report))
    # Without the weights, no program can be told to take the right arguments.
    unsafe = find_unsafe_programs(path, index, timeout_s=timeout_s) if weights is not None else {}
    report.violations += [f"`{file}`: {problem}" for file, problem in unsafe.items()]
    sound = [
        key
        for key in index.fixed_programs
        if not {key.artifact_file, key.exported_file} & set(unsafe)
    ]
    if weights is not None:
        for key in sound:
            report.attempt(
                lambda key=key, weights=weights: _check_artifact(files, index, weights, key)
            )
    bundle = report.attempt(lambda: load_bundle(path, verify_digests=False))
    if bundle is not None:
        for key in sound:
            report.attempt(lambda key=key, bundle=bundle: _check_golden(files, index, bundle, key))
        report.attempt(lambda: _check_symbolic(files, index, bundle, set(unsafe)))
    report.notes += window.notes
    if index.custom_calls:
        report.notes.append(
            f"The programs call {', '.join(index.custom_calls)}: IREE and GPU servers lack them."
        )
    return report


def check_golden(bundle: Bundle) -> None:
    """Runs each fixed program of a loaded bundle on the golden inputs that the bundle holds.

    Raises:
        BundleError: An output is not what it was when the bundle was exported.
    """
    files = FileReader(bundle.path)
    index = read_index(files.read(INDEX_FILE, limit_bytes=MAX_INDEX_BYTES))
    for key in index.fixed_programs:
        _check_golden(files, index, bundle, key)


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
    listed = {
        key.artifact_file for key in fixed_keys(manifest.batch_sizes, len(manifest.input_shapes))
    }
    for found in sorted(path.glob("model*.mlir")):
        if re.fullmatch(r"model(\.v\d+)?(\.b\d+)?\.mlir", found.name) and found.name not in listed:
            report.violations.append(
                f"`{found.name}` is there, which the server would load; expected: only the "
                f"programs of the sizes in `{MANIFEST_FILE}`"
            )


def _weights(files: FileReader, report: Report) -> Mapping[str, str]:
    """The type of each weight argument, in argument order; reports values that are refused."""
    stored = TensorFile(files.path(WEIGHTS_FILE), file=WEIGHTS_FILE, reverse_axes=True)
    for name in stored:
        report.attempt(lambda name=name: check_values(stored.flat(name), name, file=WEIGHTS_FILE))
        stored.forget_pages()
    return {
        name: mlir_type(stored.shape(name), stored.dtypes[name]) for name in stored.argument_order()
    }


def _check_artifact(
    files: FileReader, index: Index, weights: Mapping[str, str], key: ProgramKey
) -> None:
    assert key.size is not None
    file, values = key.artifact_file, index.values(key.variant)
    signature = read_signature(files.read(file), file=file)
    arguments = {f"input `{spec.name}`": spec.mlir_type(key.size, values) for spec in index.inputs}
    arguments |= {f"weight `{name}`": kind for name, kind in weights.items()}
    results = {f"output `{spec.name}`": spec.mlir_type(key.size, values) for spec in index.outputs}
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
    # A program for several platforms takes one argument more than the server's.
    if len(index.platforms) == 1:
        _check_same_program(files, index, key)


def _check_same_program(files: FileReader, index: Index, key: ProgramKey) -> None:
    """Compares what the server runs with what the loader runs.

    The golden outputs are checked with the loader's program only. Both go through the
    same StableHLO version, so equal programs print equally, whichever JAX reads them.
    """
    ours, servers = key.exported_file, key.artifact_file
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


def _check_golden(files: FileReader, index: Index, bundle: Bundle, key: ProgramKey) -> None:
    """Runs one fixed program on the golden inputs, where those have its sizes."""
    inputs, outputs = _checked_golden(files, index)
    values = dict(solve_sizes(_golden_sizes(index, inputs))[0])
    values.pop(index.batch_symbol, None)
    assert key.size is not None
    if key.variant is None or values == dict(index.values(key.variant)):
        axes = {spec.name: spec.batch_axis0 or 0 for spec in index.inputs}
        filled = {name: take_rows(a, axes[name], 0, key.size) for name, a in inputs.items()}
        _compare(index, bundle(**filled), outputs, f"With {key.size} rows")


def _check_symbolic(files: FileReader, index: Index, bundle: Bundle, unsafe: set[str]) -> None:
    """Runs a symbolic program on the golden inputs, as many rows as they have."""
    inputs, outputs = _checked_golden(files, index)
    rows = next(
        (inputs[s.name].shape[s.batch_axis0] for s in index.inputs if s.batch_axis0 is not None), 1
    )
    for key in index.symbolic_programs:
        if key.exported_file not in unsafe and key.size in (None, rows):
            results = bundle.run_symbolic(**inputs)
            _compare(index, results, outputs, f"Through `{key.exported_file}`")


def _checked_golden(
    files: FileReader, index: Index
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    inputs, outputs = golden_arrays(files)
    for what, found, specs in (
        ("inputs", inputs, index.inputs),
        ("outputs", outputs, index.outputs),
    ):
        if set(found) != {spec.name for spec in specs}:
            raise BundleError(
                f"`{GOLDEN_FILE}` has the {what} {sorted(found)}.",
                expected=f"{[spec.name for spec in specs]}",
            )
        for spec in specs:
            if found[spec.name].ndim != len(spec.shape) or not found[spec.name].size:
                raise BundleError(
                    f"`{GOLDEN_FILE}` has `{spec.name}` of shape {found[spec.name].shape}.",
                    expected=str(spec),
                )
    return inputs, outputs


def _golden_sizes(index: Index, inputs: Mapping[str, np.ndarray]) -> list[tuple[int | str, int]]:
    return [
        (index.batch_symbol if axis0 == spec.batch_axis0 else size, number)
        for spec in index.inputs
        for axis0, (size, number) in enumerate(
            zip(spec.shape, inputs[spec.name].shape, strict=True)
        )
    ]


def _compare(
    index: Index, got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], how: str
) -> None:
    for spec in index.outputs:
        a, b = got[spec.name], wanted[spec.name]
        if spec.batch_axis0 is not None and a.ndim == b.ndim:
            rows = min(a.shape[spec.batch_axis0], b.shape[spec.batch_axis0])
            a, b = (take_rows(array, spec.batch_axis0, 0, rows) for array in (a, b))
        problem = describe_difference(a, b, index.rtol)
        if problem:
            raise BundleError(
                f"{how}, the output `{spec.name}` {problem}.",
                expected=f"the outputs in `{GOLDEN_FILE}`",
            )
