"""Tries a bundle's programs in a child process, which may hang, crash or grow.

MLIR's bytecode reader trusts its input: a location that refers to itself keeps it busy for
ever, inside a call that nothing in the same process can stop (seen with jaxlib 0.10 and
0.12). So programs of unknown origin are read and compiled in a child with limits first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nitro.errors import BundleError

from ._artifact import read_signature
from ._files import FileReader
from ._index import FILE, MAX_BYTES, Index, read_index
from ._programs import make_programs

TIMEOUT_S = 600.0
_MEMORY_BYTES = 32 * 2**30


def program_files(index: Index) -> list[str]:
    """The files that hold programs."""
    fixed = [
        file for key in index.fixed_programs for file in (key.artifact_file, key.exported_file)
    ]
    return fixed + [key.exported_file for key in index.symbolic_programs]


def find_unsafe_programs(
    root: Path, index: Index, *, timeout_s: float, files: Sequence[str] | None = None
) -> dict[str, str]:
    """Reads and compiles programs in a child process.

    Args:
        root: The bundle.
        index: Its `nitro.json`.
        timeout_s: How long all of it may take.
        files: Which of `program_files`; None means all.

    Returns:
        What went wrong, by file; empty where each program reads and compiles.
    """
    unsafe = dict[str, str]()
    left = program_files(index) if files is None else list(files)
    while left:
        command = [sys.executable, "-I", "-m", __name__, str(root.resolve()), *left]
        try:
            child = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
            output, ending = child.stdout, f"ends the process with the code {child.returncode}"
        except subprocess.TimeoutExpired as error:
            output, ending = error.stdout or b"", f"does not end within {timeout_s:g} s"
        reports = [json.loads(line) for line in output.decode().splitlines() if line[:1] == "{"]
        unsafe |= {report["file"]: report["problem"] for report in reports if report["problem"]}
        done = {report["file"] for report in reports}
        left = [file for file in left if file not in done]
        if left:
            # The child stopped at the next file; the others get another child.
            unsafe[left.pop(0)] = f"it {ending} when it is read"
    return unsafe


def refuse_unsafe_programs(root: Path, index: Index) -> None:
    """Raises for the first program that a child process cannot read and compile.

    Raises:
        BundleError: Names the file.
    """
    for file, problem in find_unsafe_programs(root, index, timeout_s=TIMEOUT_S).items():
        raise BundleError(
            f"`{file}` cannot be used: {problem}.",
            expected="a program that reads and compiles",
            fix="do not load this bundle without `untrusted=True`",
        )


def _run_as_child(root: Path, names: Sequence[str]) -> None:
    _limit_memory()
    files = FileReader(root)
    for name in names:
        problem = ""
        try:
            _try_out(files, name)
        except BundleError as error:
            problem = " ".join(error.problem.split())
        report = json.dumps({"file": name, "problem": problem})
        print(report, flush=True)  # noqa: T201 - the parent reads it


def _try_out(files: FileReader, name: str) -> None:
    index = read_index(files.read(FILE, limit_bytes=MAX_BYTES))
    keys = [*index.fixed_programs, *index.symbolic_programs]
    exported = {key.exported_file: key for key in keys}
    if name in exported:
        make_programs(files, index).try_out(exported[name])
    else:
        read_signature(files.read(name), file=name)


def _limit_memory() -> None:
    """Keeps a program that asks for everything from taking it; not possible on Windows."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    _run_as_child(Path(sys.argv[1]), sys.argv[2:])
