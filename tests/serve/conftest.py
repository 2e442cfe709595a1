"""Bundles of hand-written programs, and both engines serving them, started once for all tests."""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_stablehlo import StableHLOBackend

_NEEDED = ("kserve", "tritonclient")
_START_S = 120.0

DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "bool": np.bool_,
        "uint8": np.uint8,
        "uint16": np.uint16,
        "uint32": np.uint32,
        "int8": np.int8,
        "int16": np.int16,
        "int32": np.int32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float32": np.float32,
    }.items()
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a server where none is installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    skip = pytest.mark.skip(reason=f"needs {', '.join(missing)}: uv sync --group serve")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


def make_mlp(name: str = "mlp", *, width: int = 16, seed: int = 0, **changes: Any) -> ExportProgram:
    """A u8 input of 16 numbers and 3 logits; compiled for 1, 4 and 16 rows."""
    rng = np.random.default_rng(seed)
    weights = {
        "first": rng.normal(0, 0.3, (16, width)).astype(np.float32),
        "last": rng.normal(0, 0.3, (width, 3)).astype(np.float32),
    }

    def fn(pixels, first, last):
        return (jnp.tanh(pixels.astype(jnp.float32) / 16 @ first) @ last,)

    inputs = {"pixels": rng.integers(0, 255, (3, 16), dtype=np.uint8)}
    fields: dict[str, Any] = {
        "name": name,
        "fn": fn,
        "inputs": (ExportSpec("pixels", "uint8", (1, 16)),),
        "outputs": (ExportSpec("logits", "float32", (1, 3)),),
        "weights": weights,
        "batch_sizes": (1, 4, 16),
        "golden": _golden(fn, weights, inputs, ("logits",)),
        "provenance": {},
    }
    return ExportProgram(**{**fields, **changes})


def make_types() -> ExportProgram:
    """An input and an output of each dtype that the protocol and JAX share."""

    def fn(*arrays):
        return tuple(~array if array.dtype == bool else array + array for array in arrays)

    inputs = {name: np.ones((2, 3), dtype) for name, dtype in DTYPES.items()}
    return ExportProgram(
        name="types",
        fn=fn,
        inputs=tuple(ExportSpec(name, name, (1, 3)) for name in DTYPES),
        outputs=tuple(ExportSpec(f"{name}_out", name, (1, 3)) for name in DTYPES),
        weights={},
        batch_sizes=(1, 4),
        golden=_golden(fn, {}, inputs, tuple(f"{name}_out" for name in DTYPES)),
        provenance={},
    )


def make_sideways() -> ExportProgram:
    """Rows along the second axis of one input, and an output of nothing but rows."""

    def fn(series, scale):
        return series * scale, series.sum((0, 2)) > 0

    inputs = {"series": np.random.default_rng(0).normal(size=(6, 2, 4)).astype(np.float32)}
    weights = {"scale": np.full((), 3, np.float32)}
    return ExportProgram(
        name="sideways",
        fn=fn,
        inputs=(ExportSpec("series", "float32", (6, 1, 4), batch_axis=2),),
        outputs=(
            ExportSpec("scaled", "float32", (6, 1, 4), batch_axis=2),
            ExportSpec("accept", "bool", (1,)),
        ),
        weights=weights,
        batch_sizes=(1, 4),
        golden=_golden(fn, weights, inputs, ("scaled", "accept")),
        provenance={},
    )


def make_open() -> ExportProgram:
    """Sequences of any length."""

    def fn(x, w):
        return (jnp.tanh(x @ w),)

    inputs = {"x": np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)}
    weights = {"w": np.eye(3, 4, dtype=np.float32)}
    return ExportProgram(
        name="open",
        fn=fn,
        inputs=(ExportSpec("x", "float32", (1, "time", 3)),),
        outputs=(ExportSpec("h", "float32", (1, "time", 4)),),
        weights=weights,
        batch_sizes=(1, 4),
        golden=_golden(fn, weights, inputs, ("h",)),
        provenance={},
    )


def _golden(fn: Any, weights: dict[str, Any], inputs: dict[str, Any], names: tuple[str, ...]):
    results = jax.jit(fn)(*inputs.values(), *(weights[name] for name in sorted(weights)))
    return Golden(inputs=inputs, outputs=dict(zip(names, map(np.asarray, results), strict=True)))


def write(program: ExportProgram, folder: Path) -> Path:
    """Writes a bundle under its name into a folder."""
    path = folder / program.name
    path.mkdir(parents=True)
    StableHLOBackend().write(program, path)
    return path


@pytest.fixture(scope="session")
def dtypes() -> dict[str, np.dtype]:
    """The dtypes of the bundle `types`, by name."""
    return DTYPES


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles `mlp`, `types`, `sideways` and `open`; read it only."""
    folder = tmp_path_factory.mktemp("bundles")
    for program in (make_mlp(), make_types(), make_sideways(), make_open()):
        write(program, folder)
    return folder


@pytest.fixture(scope="session", name="make_mlp")
def _make_mlp() -> Callable[..., ExportProgram]:
    """Makes the program of the bundle `mlp`."""
    return make_mlp


@pytest.fixture(scope="session", name="write")
def _write() -> Callable[[ExportProgram, Path], Path]:
    """Writes a program's bundle into a folder."""
    return write


@pytest.fixture(scope="session")
def write_bundle() -> Callable[..., Path]:
    """Writes the MLP into a folder: `write_bundle(folder, seed=1)`."""
    return lambda folder, **changes: write(make_mlp(**changes), folder)


@dataclass
class Engine:
    """A server that runs.

    Attributes:
        name: `"local"` or `"triton"`.
        http: The address of the REST interface.
        grpc: The address of the gRPC interface.
        process: The server's process.
        log: What it has written.
    """

    name: str
    http: str
    grpc: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> Engine:
        """Waits until the server says that it is ready."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5):
                    return self
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"{self.name} did not get ready:\n{self.log.read_text()[-4000:]}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends the server; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start(verb: str, folder: Path, log: Path, *options: str) -> Engine:
    """Starts `nitro-serve local` or `nitro-serve run` on free ports; does not wait for it."""
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}"]
    if verb == "run":
        ports.append(f"--metrics-port={metrics}")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "nitro_serve", verb, str(folder), *ports, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    name = "triton" if verb == "run" else "local"
    return Engine(name, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", process, log)


def why_no_triton() -> str | None:
    """Why Triton cannot run here; None where it can."""
    if importlib.util.find_spec("pytriton") is None:
        return "needs nvidia-pytriton: uv sync --group serve"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return f"Triton's wheel needs glibc 2.35, and this is {libc} {version}"
    return None


@pytest.fixture(scope="session")
def start_local(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Engine]]:
    """Starts `nitro-serve local` on a folder; ends it with the session."""
    engines: list[Engine] = []

    def start_one(folder: Path, *options: str) -> Engine:
        log = tmp_path_factory.mktemp("local") / "log"
        engines.append(start("local", folder, log, *options))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.process.kill()
        engine.process.wait()


@pytest.fixture(scope="session")
def local(bundles: Path, start_local: Callable[..., Engine]) -> Engine:
    """`nitro-serve local` on the bundles."""
    return start_local(bundles, "--control").wait_ready()


@pytest.fixture(scope="session")
def triton(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Triton on a repository of the bundles."""
    reason = why_no_triton()
    if reason:
        pytest.skip(reason)
    from nitro_serve import add_bundle

    folder = tmp_path_factory.mktemp("triton")
    for path in sorted(bundles.iterdir()):
        add_bundle(path, folder / "models")
    engine = start("run", folder / "models", folder / "log", "--control")
    yield engine.wait_ready()
    engine.process.kill()
    engine.process.wait()


@pytest.fixture(params=["local", "triton"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    return request.getfixturevalue(request.param)
