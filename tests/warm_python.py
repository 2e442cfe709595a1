"""An interpreter that has imported JAX and Nitro, and forks a process for each script.

    python -I warm_python.py SOCKET

A script finds what it would find at the start of a process of its own: `__main__`, its
arguments, folder, environment and standard streams, and no JAX backend that has started.
What it does not find is an interpreter without imports: whoever tests those, or flags of
Python, or variables that JAX reads when it is imported, starts one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

_IMPORTS = (
    "numpy",
    "optax",
    "flax.nnx",
    "orbax.checkpoint",
    "nitro",
    "nitro._run",
    "nitro.export",
    "nitro.testing",
    "nitro_export_stablehlo",
)


_LONGEST_REQUEST = 2**17


def main(file: int) -> None:
    """Serves requests until the other end of the socket is closed."""
    for name in _IMPORTS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    with socket.socket(fileno=file) as requests:
        while True:
            data, files, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
            if not data:
                return
            if (process := _fork()) == 0:
                break
            for one in files:
                os.close(one)
            _, status = os.waitpid(process, 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
    _become(json.loads(data), files)


def _fork() -> int:
    with warnings.catch_warnings():
        # JAX and Python warn of threads; no backend has started any here.
        warnings.simplefilter("ignore")
        return os.fork()


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Makes this process what the request describes, and runs its script."""
    for stream, one in enumerate(files):
        os.dup2(one, stream)
        os.close(one)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Where the folder for temporary files is may have been asked before.
    tempfile.tempdir = None
    kind, *words = request["words"]
    if is_isolated := kind == "-I":
        kind, *words = words
    target = words.pop(0) if kind in ("-c", "-m") else kind
    sys.argv = ["-c" if kind == "-c" else target, *words]
    if not is_isolated:
        own = "" if kind in ("-c", "-m") else str(Path(target).parent)
        extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [own, *filter(None, extra)]
    importlib.invalidate_caches()
    if kind == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    name = "<string>" if kind == "-c" else target
    if kind != "-c":
        module.__file__ = target
        target = Path(target).read_text("utf-8")
    exec(compile(target, name, "exec"), vars(module))


if __name__ == "__main__":
    main(int(sys.argv[1]))
