"""What serving adds to a call in the process, and what joining requests gains.

    uv run --group serve benchmarks/serving.py [--seconds 4] [--engines local triton kserve]

Two models of 64 bytes in and ten logits out: `small`, a perceptron of 128 units, and `wide`, three
layers of 2,048. Each engine serves both, with and without joining requests, and is asked over HTTP
and gRPC by Triton's asynchronous client, one row a request, at several concurrencies. `kserve` is
KServe's server around the same bundle with nothing of ours but the call. All on 127.0.0.1, one
engine at a time; the call in the process is timed before each engine and is what ratios refer to.
CPU is that of the server with all its children.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

ROWS = np.random.default_rng(0).integers(0, 17, (1, 64), dtype=np.uint8)
WIDTHS = {"small": (128,), "wide": (2048, 2048, 2048)}
TICKS = os.sysconf("SC_CLK_TCK")

PLAIN_KSERVE = """
import sys
import numpy as np
folder, http, grpc = sys.argv[1:]
sys.argv = sys.argv[:1]
from kserve import InferOutput, InferResponse, Model, ModelServer
from nitro_export_stablehlo import load_bundle

class Plain(Model):
    def load(self):
        self.bundle = load_bundle(f"{folder}/{self.name}").warmup()
        self.ready = True
        return True

    async def predict(self, payload, headers=None, response_headers=None):
        outputs = []
        for name, array in self.bundle(**{i.name: i.as_numpy() for i in payload.inputs}).items():
            outputs.append(InferOutput(name, list(array.shape), "FP32"))
            outputs[-1].set_data_from_numpy(array, binary_data=True)
        return InferResponse(
            payload.id, self.name, outputs, from_grpc=payload.from_grpc,
            requested_outputs=payload.request_outputs, use_binary_outputs=True,
        )

models = [Plain("small"), Plain("wide")]
for model in models:
    model.load()
ModelServer(
    http_port=int(http), grpc_port=int(grpc), enable_latency_logging=False
).start(models)
"""


def write_bundles(folder: Path) -> None:
    """Writes both models, compiled for 1, 4, 8 and 16 rows."""
    from nitro.export import ExportProgram, ExportSpec, Golden
    from nitro_export_stablehlo import StableHLOBackend

    rng = np.random.default_rng(0)
    for name, widths in WIDTHS.items():
        sizes = [64, *widths, 10]
        weights = {
            f"layer{i}": rng.normal(0, a**-0.5, (a, b)).astype(np.float32)
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        }

        def fn(img: Any, *layers: Any) -> tuple[Any]:
            hidden = img.astype(jnp.float32) / 16
            for layer in layers[:-1]:
                hidden = jnp.maximum(hidden @ layer, 0)
            return (hidden @ layers[-1],)

        golden = np.asarray(fn(ROWS, *(weights[key] for key in sorted(weights)))[0])
        program = ExportProgram(
            name=name,
            fn=fn,
            inputs=(ExportSpec("img", "uint8", (1, 64)),),
            outputs=(ExportSpec("logits", "float32", (1, 10)),),
            weights=weights,
            batch_sizes=(1, 4, 8, 16),
            golden=Golden(inputs={"img": ROWS}, outputs={"logits": golden}),
            provenance={},
        )
        (folder / name).mkdir()
        StableHLOBackend().write(program, folder / name)


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Server:
    """An engine that serves both models."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str

    def wait_ready(self) -> None:
        for model in WIDTHS:
            while self.process.poll() is None:
                try:
                    url = f"http://{self.http}/v2/models/{model}/ready"
                    urllib.request.urlopen(url).close()
                    break
                except OSError:
                    time.sleep(0.1)

    def cpu_s(self) -> float:
        """The processor time of the server and of all processes below it."""
        parents: dict[int, tuple[int, int]] = {}
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
            except (OSError, ValueError):
                continue
        found, seen = 0, [self.process.pid]
        while seen:
            pid = seen.pop()
            found += parents.get(pid, (0, 0))[1]
            seen += [child for child, (parent, _) in parents.items() if parent == pid]
        return found / TICKS

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(engine: str, folder: Path, *, joins: bool) -> Server:
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", http, "--grpc-port", grpc]
    if engine == "local":
        flags = [] if joins else ["--no-batching"]
        command = ["-m", "nitro_serve", "local", str(folder), *ports, *flags]
    elif engine == "triton":
        from nitro_serve import add_bundle

        models = folder.parent / ("models" if joins else "models-alone")
        if not models.exists():
            for name in WIDTHS:
                add_bundle(folder / name, models)
                config = models / name / "config.pbtxt"
                if not joins:
                    lines = config.read_text().splitlines(keepends=True)
                    kept = [line for line in lines if not line.startswith("dynamic_batching")]
                    config.write_text("".join(kept))
        command = ["-m", "nitro_serve", "run", str(models), *ports, "--metrics-port", metrics]
    else:
        command = ["-c", PLAIN_KSERVE, str(folder), http, grpc]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
    )
    server = Server(process, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    server.wait_ready()
    return server


async def load(server: Server, protocol: str, model: str, concurrency: int, seconds: float) -> Any:
    """Asks for so many seconds; returns the latencies, after a second of warming up."""
    if protocol == "http":
        import tritonclient.http as module
        import tritonclient.http.aio as aio

        client = aio.InferenceServerClient(server.http, conn_limit=concurrency)
    else:
        import tritonclient.grpc as module
        import tritonclient.grpc.aio as aio

        client = aio.InferenceServerClient(server.grpc)
    latencies: list[float] = []

    async def ask(until: float, kept: list[float]) -> None:
        while (began := time.perf_counter()) < until:
            image = module.InferInput("img", [1, 64], "UINT8")
            image.set_data_from_numpy(ROWS)
            wanted = [module.InferRequestedOutput("logits")]
            answer = await client.infer(model, [image], outputs=wanted)
            assert answer.as_numpy("logits").shape == (1, 10)
            kept.append(time.perf_counter() - began)

    async def ask_all(duration: float, kept: list[float]) -> None:
        until = time.perf_counter() + duration
        await asyncio.gather(*(ask(until, kept) for _ in range(concurrency)))

    await ask_all(1.0, [])
    before = server.cpu_s()
    await ask_all(seconds, latencies)
    cpu_ms = (server.cpu_s() - before) * 1e3 / len(latencies)
    await client.close()
    return latencies, cpu_ms


def time_bare(folder: Path, model: str) -> float:
    """The seconds of a call in this process, one row."""
    from nitro_export_stablehlo import load_bundle

    bundle = load_bundle(folder / model)
    for _ in range(20):
        bundle(img=ROWS)
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        bundle(img=ROWS)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--engines", nargs="*", default=["local", "triton", "kserve"])
    parser.add_argument("--protocols", nargs="*", default=["http", "grpc"])
    parser.add_argument("--concurrencies", nargs="*", type=int, default=[1, 16, 64])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundles"
        folder.mkdir()
        write_bundles(folder)
        print("engine  joins model protocol  at once  requests/s  p50 ms  p99 ms  CPU ms/request")
        for engine in given.engines:
            for joins in (True, False) if engine != "kserve" else (False,):
                for model in WIDTHS:
                    print(f"bare call of {model}: {time_bare(folder, model) * 1e3:.2f} ms")
                server = start(engine, folder, joins=joins)
                try:
                    for model in WIDTHS:
                        for protocol in given.protocols:
                            for concurrency in given.concurrencies:
                                latencies, cpu_ms = asyncio.run(
                                    load(server, protocol, model, concurrency, given.seconds)
                                )
                                p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
                                print(
                                    f"{engine:7} {joins!s:5} {model:5} {protocol:8} "
                                    f"{concurrency:8} {len(latencies) / given.seconds:11.0f} "
                                    f"{p50:7.2f} {p99:7.2f} {cpu_ms:15.2f}",
                                    flush=True,
                                )
                finally:
                    server.end()


if __name__ == "__main__":
    main()
