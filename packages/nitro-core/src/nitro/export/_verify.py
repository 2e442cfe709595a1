"""Loads a written artifact in a fresh process and compares it with the model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro.errors import ExportError
from nitro.hooks import LoadedArtifact

from ._arrays import read_arrays, write_arrays
from ._assignments import Assignments
from ._difference import Difference, describe_difference, measure
from ._golden import make_inputs
from ._program import ExportProgram
from ._spec import ExportSpec

_NUM_SYMBOLIC = 3

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What comparing an artifact with its model found.

    Attributes:
        rtol: What was allowed, relative to one more than the largest element.
        sizes: The sizes of each request.
        outputs: The furthest difference of each output.
    """

    rtol: float
    sizes: Sequence[Mapping[str, int]]
    outputs: Mapping[str, Difference]

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return {
            "rtol": self.rtol,
            "sizes": [dict(sizes) for sizes in self.sizes],
            "outputs": {
                name: {"max_abs": found.max_abs, "max_rel": found.max_rel}
                for name, found in self.outputs.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One request and what the model gives for it."""

    sizes: Mapping[str, int]
    inputs: Arrays
    expected: Arrays


def verify_isolated(program: ExportProgram, backend: str, path: Path) -> Verification:
    """Runs the artifact in a process that sees no model source.

    Raises:
        ExportError: It does not load without the model's source, or its outputs differ.
    """

    def answer(cases: Sequence[_Case]) -> list[Arrays]:
        # Beside the artifact: what removes an abandoned one removes this, too.
        with tempfile.TemporaryDirectory(prefix=".verify-", dir=path.parent) as name:
            folder = Path(name)
            for index, case in enumerate(cases):
                write_arrays(folder / f"in_{index}.arrays", case.inputs)
            _run_isolated(backend, path, folder)
            return [read_arrays(folder / f"out_{index}.arrays") for index in range(len(cases))]

    return _verify(program, answer)


def verify_here(
    program: ExportProgram, load: Callable[[Path], LoadedArtifact], path: Path
) -> Verification:
    """Runs the artifact in this process: for a backend that is not installed.

    Raises:
        ExportError: It does not load, or its outputs differ.
    """

    def answer(cases: Sequence[_Case]) -> list[Arrays]:
        loaded = load(path)
        return [
            {name: np.asarray(array) for name, array in loaded(**case.inputs).items()}
            for case in cases
        ]

    return _verify(program, answer)


def _verify(
    program: ExportProgram, answer: Callable[[Sequence[_Case]], Sequence[Arrays]]
) -> Verification:
    cases = list(_cases(program))
    differences: dict[str, list[Difference]] = {spec.name: [] for spec in program.outputs}
    for case, got in zip(cases, answer(cases), strict=True):
        for name, wanted in case.expected.items():
            problem = describe_difference(got.get(name), wanted, program.rtol)
            if problem:
                told = ", ".join(f"{size} = {number}" for size, number in case.sizes.items())
                raise ExportError(
                    f"The output `{name}` of the written artifact {problem}, where {told}.",
                    expected=f"what `predict` returns, to {program.rtol:.2g} of the largest "
                    "element",
                    fix="check that `forward` treats each row on its own; `verify=False` skips "
                    "this",
                )
            differences[name].append(measure(got[name], wanted))
    furthest = {
        name: Difference(
            max_abs=max(d.max_abs for d in found), max_rel=max(d.max_rel for d in found)
        )
        for name, found in differences.items()
    }
    return Verification(rtol=program.rtol, sizes=[case.sizes for case in cases], outputs=furthest)


def _cases(program: ExportProgram) -> Iterator[_Case]:
    """The golden rows at compiled sizes and beside them, then other symbolic sizes."""
    symbol = program.batch_symbol
    assignments = Assignments(program.inputs, program.constraints, (*program.symbols, symbol))
    beside = {1, 3, 7, *program.batch_sizes} if program.dynamic_batch else {1, 3}
    for rows in sorted(beside | set(program.batch_sizes)):
        sizes = {**program.golden_sizes, symbol: rows}
        if assignments.are_allowed(sizes):
            yield _Case(
                sizes=sizes,
                inputs=_tiled(program.golden.inputs, program.inputs, rows),
                expected=_tiled(program.golden.outputs, program.outputs, rows),
            )
    if program.symbols:
        for values in assignments.choose()[:_NUM_SYMBOLIC]:
            rows = values[symbol]
            wire = make_inputs(program.inputs, rows, values)
            yield _Case(sizes=values, inputs=wire, expected=_outputs(program, wire))


def _outputs(program: ExportProgram, wire: Arrays) -> Arrays:
    """What the program's own function gives, traced at these sizes."""
    weights = [program.weights[name] for name in program.weight_names]
    with program.wide_types():
        arguments = [jnp.asarray(wire[spec.name]) for spec in program.inputs]
        results = jax.jit(program.fn)(*arguments, *weights)
        return {
            spec.name: np.asarray(array)
            for spec, array in zip(program.outputs, results, strict=True)
        }


def _run_isolated(backend: str, path: Path, folder: Path) -> None:
    # -I: neither the current folder nor PYTHONPATH can lend the model's source.
    command = [sys.executable, "-I", "-m", "nitro.export._check", backend, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise ExportError(
            f"The artifact at `{path}` does not run in a fresh process:\n{done.stderr.strip()}",
            expected="it to load and run without the model's source",
        )


def _tiled(arrays: Arrays, specs: Sequence[ExportSpec], rows: int) -> dict[str, np.ndarray]:
    """The golden rows, repeated or cut to `rows` along each batch axis."""
    tiled: dict[str, np.ndarray] = {}
    for spec in specs:
        axis0 = spec.batch_axis - 1
        array = arrays[spec.name]
        tiled[spec.name] = np.take(array, np.arange(rows) % array.shape[axis0], axis=axis0)
    return tiled
