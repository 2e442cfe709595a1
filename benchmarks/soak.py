"""A server under everything at once: load, reloads, clients that leave, and malformed requests.

    uv run --group serve benchmarks/soak.py [--requests 100000]

`nitro-serve local` serves one model, whose bundle is replaced every two seconds by one of two others.
Sixteen clients ask and compare each answer with what the version that it names must give; two more
send what is malformed, and hang up in the middle. Prints what was counted, and the server's memory
after a tenth of the requests and at the end. All on 127.0.0.1; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from serving import Server, free_ports, write_bundles

CLIENTS = 16
RELOAD_EVERY_S = 2.0


def make_versions(folder: Path) -> list[Path]:
    """Two bundles of one name with other weights."""
    from nitro_export_stablehlo import load_bundle
    from nitro_export_stablehlo._swap import swap_weights

    (folder / "all").mkdir(parents=True)
    write_bundles(folder / "all")
    first = folder / "all" / "small"
    weights = {name: np.asarray(w) for name, w in load_bundle(first).weights.items()}
    second = folder / "other" / "small"
    second.parent.mkdir()
    swap_weights(first, {name: -array for name, array in weights.items()}, second)
    return [first, second]


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


async def soak(server: Server, served: Path, versions: list[Path], requests: int) -> dict[str, Any]:
    from nitro_export_stablehlo import load_bundle

    bundles = [load_bundle(path) for path in versions]
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 17, (1 + n % 5, 64), dtype=np.uint8) for n in range(64)]
    expected = [[bundle(img=x)["logits"] for x in rows] for bundle in bundles]
    counts = {"right": 0, "wrong": 0, "lost": 0, "reloads": 0, "malformed": 0, "hung up": 0}
    memory: list[float] = []
    url = f"http://{server.http}/v2/models/small/infer"
    done = asyncio.Event()

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        while counts["right"] < requests and not counts["wrong"] + counts["lost"] > 50:
            number += 7
            x = rows[number % len(rows)]
            tensor = {"name": "img", "datatype": "UINT8", "shape": list(x.shape)}
            body = json.dumps({"inputs": [{**tensor, "data": x.ravel().tolist()}]})
            try:
                async with session.post(url, data=body) as response:
                    answer = await response.json()
                    got = np.float32(answer["outputs"][0]["data"]).reshape(len(x), 10)
            except Exception:  # noqa: BLE001 - whatever it is, the answer did not come
                counts["lost"] += 1
                continue
            # Versions count the reloads, which take the two bundles in turn.
            wanted = expected[(int(answer["model_version"]) - 1) % 2][number % len(rows)]
            fits = np.allclose(got, wanted, rtol=1e-4, atol=1e-5)
            counts["right" if fits else "wrong"] += 1
            if counts["right"] == requests // 10:
                memory.append(resident_mb(server.process.pid))
        done.set()

    async def reload(session: aiohttp.ClientSession) -> None:
        while not done.is_set():
            await asyncio.sleep(RELOAD_EVERY_S)
            new = versions[(counts["reloads"] + 1) % 2]
            shutil.rmtree(served / "small")
            shutil.copytree(new, served / "small")
            path = f"http://{server.http}/v2/repository/models/small/load"
            async with session.post(path, data=b"{}") as response:
                assert response.status == 200, await response.text()
            counts["reloads"] += 1

    async def disturb(session: aiohttp.ClientSession) -> None:
        while not done.is_set():
            async with session.post(url, data=b'{"inputs": [{"name": "img"') as response:
                assert response.status == 400
                counts["malformed"] += 1
            host, _, port = server.http.partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v2/models/small/infer HTTP/1.1\r\nContent-Length: 900\r\n\r\n{")
            writer.close()
            counts["hung up"] += 1
            await asyncio.sleep(0.01)

    connector = aiohttp.TCPConnector(limit=CLIENTS + 4)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [ask(session, number) for number in range(CLIENTS)]
        await asyncio.gather(*tasks, reload(session), disturb(session))
    memory.append(resident_mb(server.process.pid))
    return {**counts, "memory MB": [round(mb) for mb in memory]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        versions = make_versions(Path(scratch) / "versions")
        served = Path(scratch) / "served"
        shutil.copytree(versions[0], served / "small")
        http, grpc = free_ports(2)
        ports = ["--http-port", http, "--grpc-port", grpc]
        command = [sys.executable, "-m", "nitro_serve", "local", str(served), "--control", *ports]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(process, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
        url = f"http://{server.http}/v2/health/ready"
        while process.poll() is None:
            try:
                urllib.request.urlopen(url).close()
                break
            except OSError:
                time.sleep(0.1)
        try:
            began = time.perf_counter()
            print(asyncio.run(soak(server, served, versions, given.requests)))
            print(f"{time.perf_counter() - began:.0f} s")
        finally:
            server.end()


if __name__ == "__main__":
    main()
