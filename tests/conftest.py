"""What all tests share: a compilation cache of their own, and a warm interpreter."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest


class WarmPython:
    """Runs scripts in processes that are forked from an interpreter with all imports done.

    See `warm_python.py` for what a script finds, and for what needs an interpreter of its own.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # One message is one request or answer.
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def _start(self) -> None:
        with self._theirs as theirs:
            script, end = Path(__file__).with_name("warm_python.py"), theirs.fileno()
            command = [sys.executable, "-I", str(script), str(end)]
            self._process = subprocess.Popen(command, pass_fds=[end])

    def run(
        self,
        *words: object,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs what `python *words` would: `-c`, `-m` or a path, with `-I` before it or not."""
        if self._process is None:
            self._start()
        request = {
            "words": [str(word) for word in words],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with Path(os.devnull).open() as nothing:
                files = [nothing.fileno(), out.fileno(), err.fileno()]
                socket.send_fds(self._requests, [json.dumps(request).encode()], files)
            code = int(self._requests.recv(100))
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(
                request["words"], code, out.read().decode(), err.read().decode()
            )
        if check:
            assert code == 0, done.stderr
        return done

    def close(self) -> None:
        """Ends the interpreter."""
        self._requests.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait()


@pytest.fixture(scope="session")
def warm_python(_own_compilation_cache: None) -> Iterator[WarmPython]:
    """An interpreter that every script of the session's tests may share."""
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session", autouse=True)
def _own_compilation_cache(pytestconfig: pytest.Config) -> Iterator[None]:
    """Keeps programs beside pytest's own cache, and out of the user's."""
    before = os.environ.get("NITRO_CACHE_DIR")
    os.environ["NITRO_CACHE_DIR"] = str(pytestconfig.cache.mkdir("xla"))
    yield
    if before is None:
        del os.environ["NITRO_CACHE_DIR"]
    else:
        os.environ["NITRO_CACHE_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def _warm_verification(warm_python: WarmPython) -> Iterator[None]:
    """Has exports of the tests' own process be verified in forks, each without their source.

    What a script or a command of a test exports is verified in a new interpreter.
    """
    if "jax" not in sys.modules:  # tests of what imports no JAX
        yield
        return

    def run(command: list[str], *, cwd: Path, **_options: object) -> Any:
        python, *words = command
        assert python == sys.executable
        return warm_python.run(*words, cwd=cwd, check=False)

    with pytest.MonkeyPatch.context() as patch:
        verify = importlib.import_module("nitro.export._verify")
        patch.setattr(verify, "subprocess", types.SimpleNamespace(run=run))
        yield
