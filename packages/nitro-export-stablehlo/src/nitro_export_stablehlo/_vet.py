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
from typing import Any

from nitro.errors import BundleError

from ._artifact import read_signature
from ._files import FileReader
from ._index import FILE, MAX_BYTES, artifact_file, exported_file, read_index
from ._programs import make_programs

TIMEOUT_S = 600.0
_MEMORY_BYTES = 32 * 2**30


def find_unsafe_programs(root: Path, sizes: Sequence[int], *, timeout_s: float) -> dict[str, str]:
    """Reads and compiles the programs of some sizes in a child process.

    Args:
        root: The bundle.
        sizes: Which programs.
        timeout_s: How long all of it may take.

    Returns:
        What went wrong, by file; empty where each program reads and compiles.
    """
    unsafe = dict[str, str]()
    left = list(sizes)
    while left:
        command = [sys.executable, "-I", "-m", __name__, str(root.resolve()), *map(str, left)]
        try:
            child = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
            output, ending = child.stdout, f"ends the process with the code {child.returncode}"
        except subprocess.TimeoutExpired as error:
            output, ending = error.stdout or b"", f"does not end within {timeout_s:g} s"
        reports = [json.loads(line) for line in output.decode().splitlines() if line[:1] == "{"]
        unsafe |= {report["file"]: report["problem"] for report in reports if report["problem"]}
        done = {report["size"] for report in reports if report["done"]}
        if done >= set(left):
            break
        # The child stopped at the file that it named last; the others get another child.
        nothing: dict[str, Any] = {"file": artifact_file(left[0]), "size": left[0]}
        last = reports[-1] if reports else nothing
        unsafe[last["file"]] = f"it {ending} when it is read"
        left = [size for size in left if size not in done and size != last["size"]]
    return unsafe


def refuse_unsafe_programs(root: Path, sizes: Sequence[int]) -> None:
    """Raises for the first program that a child process cannot read and compile.

    Raises:
        BundleError: Names the file.
    """
    for file, problem in find_unsafe_programs(root, sizes, timeout_s=TIMEOUT_S).items():
        raise BundleError(
            f"`{file}` cannot be used: {problem}.",
            expected="a program that reads and compiles",
            fix="do not load this bundle without `untrusted=True`",
        )


def _run_as_child(root: Path, sizes: Sequence[int]) -> None:
    _limit_memory()
    files = FileReader(root)
    index = read_index(files.read(FILE, limit_bytes=MAX_BYTES))

    def report(size: int, file: str, problem: str = "", *, done: bool = False) -> None:
        print(  # noqa: T201 - the parent reads it
            json.dumps({"size": size, "file": file, "problem": problem, "done": done}), flush=True
        )

    try:
        programs = make_programs(files, index)
    except BundleError as error:
        for size in sizes:
            report(size, exported_file(size), " ".join(error.problem.split()), done=True)
        return
    for size in sizes:
        artifact = artifact_file(size)
        checks: list[tuple[str, Any]] = [
            (
                artifact,
                lambda artifact=artifact: read_signature(files.read(artifact), file=artifact),
            ),
            (exported_file(size), lambda size=size: programs.get(size)),
        ]
        for file, check in checks:
            report(size, file)
            try:
                check()
            except BundleError as error:
                report(size, file, " ".join(error.problem.split()))
        report(size, artifact, done=True)


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
    _run_as_child(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
