"""What the bundle's loader adds to bare JAX: to each call, and to the first prediction.

    uv run benchmarks/loader.py [--width 512] [--rounds 5]

One perceptron (784 bytes in, two hidden layers, ten logits out), exported once. Then

- per call at batch 1, in one process and in turns: the bundle, and the jitted program of the same
  file on the same weights; NumPy in, NumPy out.
- from the start of loading to the first prediction, each in a fresh process with JAX imported and
  its backend up: the bundle with and without digests, and `jax.export.deserialize` plus reading
  the weights with safetensors. JAX's persistent cache is off.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from export import Predict, make_run, pixels_of


def load_bare(path: Path) -> Predict:
    """What a careful user would write by hand."""
    import jax
    import jax.export
    import safetensors

    exported = jax.export.deserialize(
        bytearray((path / "jax" / "model.b1.jax_export").read_bytes())
    )
    with safetensors.safe_open(path / "weights.safetensors", "numpy") as stored:
        names = json.loads(stored.metadata()["argument_order"])
        # The format stores each as its transpose.
        arrays = [stored.get_tensor(name) for name in names]
    weights = [jax.device_put(array.T) for array in arrays]
    program = jax.jit(exported.call)
    return lambda pixels: np.asarray(program(pixels, *weights)[0])


def load_bundle(path: Path, **options: Any) -> Predict:
    from nitro_export_stablehlo import load_bundle

    bundle = load_bundle(path, **options)
    return lambda pixels: bundle(pixels=pixels)["logits"]


LOADERS: dict[str, Callable[[Path], Predict]] = {
    "bare": load_bare,
    "bundle": lambda path: load_bundle(path, verify_digests=False),
    "bundle, digests": load_bundle,
}


def measure_calls(path: Path, *, blocks: int = 40, calls: int = 250) -> dict[str, float]:
    """Median microseconds of a call, in blocks that take turns."""
    pixels = pixels_of(1)
    predicts = {name: LOADERS[name](path) for name in ("bare", "bundle")}
    np.testing.assert_array_equal(*(predict(pixels) for predict in predicts.values()))
    micros: dict[str, list[float]] = {name: [] for name in predicts}
    for _ in range(blocks):
        for name, predict in predicts.items():
            begin = time.perf_counter()
            for _ in range(calls):
                predict(pixels)
            micros[name].append(1e6 * (time.perf_counter() - begin) / calls)
    return {name: statistics.median(values) for name, values in micros.items()}


def measure_load(path: Path, loader: str) -> float:
    """Seconds to the first prediction."""
    import jax
    import jax.export
    import safetensors

    import nitro_export_stablehlo

    # What all of them import, and the backend.
    assert all((jax.export, safetensors, nitro_export_stablehlo.load_bundle))
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(1)))
    begin = time.perf_counter()
    LOADERS[loader](path)(pixels_of(1))
    return time.perf_counter() - begin


def run_load(path: Path, loader: str) -> float:
    command = [sys.executable, __file__, "--path", str(path), "--loader", loader]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def export(width: int, folder: Path) -> Path:
    import nitro

    run = make_run(width, folder / "run")
    return Path(nitro.export_model(run, "stablehlo", dir=folder, name="model", batch_sizes=(1, 32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loader", choices=LOADERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path is not None:
        print(measure_load(options.path, options.loader))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = export(options.width, Path(folder))
        micros = measure_calls(path)
        seconds: dict[str, list[float]] = {name: [] for name in LOADERS}
        for _ in range(options.rounds):
            for name in LOADERS:
                seconds[name].append(run_load(path, name))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report = {
        "call_us": micros,
        "overhead_us": micros["bundle"] - micros["bare"],
        "load_to_first_s": medians,
        "ratio": {name: value / medians["bare"] for name, value in medians.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
