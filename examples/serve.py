"""Digits, from training to an answer over HTTP: by curl's JSON, and by Triton's client.

    uv run --group serve examples/serve.py

Trains the classifier of `digits.py`, exports it, serves the export with `nitro-serve local` in a
process that has no model source, and asks it.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tritonclient.http
from digits import Digits, split_digits

import nitro


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(folder: Path) -> Generator[str]:
    """The address of a server on the bundles of a folder."""
    address = f"127.0.0.1:{free_port()}"
    port, grpc_port = address.rpartition(":")[2], str(free_port())
    ports = ["--http-port", port, "--grpc-port", grpc_port]
    command = [sys.executable, "-m", "nitro_serve", "local", str(folder), *ports]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://{address}/v2/health/ready").close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def ask_with_curl(address: str, pixels: np.ndarray) -> int:
    """The digit that the server sees in one image, through JSON."""
    image = {"name": "img", "datatype": "UINT8", "shape": [1, 64], "data": pixels.tolist()}
    url = f"http://{address}/v2/models/digits_v1/infer"
    command = ["curl", "-sf", url, "-d", json.dumps({"inputs": [image]})]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return int(np.argmax(answer["outputs"][0]["data"]))


def ask_with_triton(address: str, images: np.ndarray) -> np.ndarray:
    """The digits that the server sees in several images, sent as bytes."""
    image = tritonclient.http.InferInput("img", list(images.shape), "UINT8")
    image.set_data_from_numpy(images)
    with tritonclient.http.InferenceServerClient(address) as client:
        return client.infer("digits_v1", [image]).as_numpy("logits").argmax(-1)


def main(max_epochs: int = 20) -> None:
    run = nitro.Nitro(Digits(max_epochs=max_epochs))
    run.train()
    folder = Path("export_out") / "served"
    nitro.export_model(
        run, "stablehlo", dir=folder, name="digits_v1", batch_sizes=(1, 32), overwrite=True
    )
    _, images, _, labels = split_digits()
    with serving(folder) as address:
        if shutil.which("curl"):
            print(f"curl: image 0 shows a {ask_with_curl(address, images[0])}, label {labels[0]}")
        accuracy = (ask_with_triton(address, images) == labels).mean()
        print(f"tritonclient: accuracy {accuracy:.4f}; here {run.validate()['acc']:.4f}")


if __name__ == "__main__":
    main()
