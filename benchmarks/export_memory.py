"""How much memory an export takes beyond the weights that it writes.

    python benchmarks/export_memory.py            # 3 GB of random values
    python benchmarks/export_memory.py --gb 0.5

Prints one JSON line, and fails where the peak is above the weights plus 300 MB plus the
largest batch, beyond what the process held before the weights were made.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_stablehlo import StableHLOBackend, load_bundle

ALLOWED_BYTES = 300_000_000
WIDTH = 4096


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_program(size_bytes: int) -> ExportProgram:
    """A tower of square matrices, made on the device so that no second copy exists."""
    count = max(1, round(size_bytes / (WIDTH * WIDTH * 4)))
    make = jax.jit(lambda key: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5)
    weights = {f"layer{i:03}": make(jax.random.key(i)) for i in range(count)}

    def fn(x, *layers):
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return (x,)

    x = np.ones((1, WIDTH), np.float32)
    (y,) = jax.jit(fn)(x, *(weights[name] for name in sorted(weights)))
    spec = ExportSpec("x", "float32", (1, WIDTH))
    return ExportProgram(
        name="tower",
        fn=fn,
        inputs=(spec,),
        outputs=(ExportSpec("y", "float32", (1, WIDTH)),),
        weights=weights,
        batch_sizes=(1,),
        golden=Golden(inputs={"x": x}, outputs={"y": np.asarray(y)}),
        provenance={},
    )


def measure(size_bytes: int, folder: Path) -> dict[str, float]:
    """Exports and loads; all sizes in bytes."""
    before = peak_bytes()
    program = make_program(size_bytes)
    weights = sum(w.nbytes for w in program.weights.values())
    path = folder / "tower"
    path.mkdir()
    began = time.perf_counter()
    StableHLOBackend().write(program, path)
    seconds = time.perf_counter() - began
    exported = peak_bytes()
    golden = program.golden
    del program
    bundle = load_bundle(path)
    np.testing.assert_allclose(bundle(**golden.inputs)["y"], golden.outputs["y"], rtol=1e-5)
    return {
        "weights": weights,
        "before": before,
        "export_peak": exported,
        "export_overhead": exported - before - weights,
        "export_s": round(seconds, 2),
        "load_peak": peak_bytes(),
        "load_overhead": peak_bytes() - before - weights,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3.0)
    size_bytes = int(parser.parse_args().gb * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(size_bytes, Path(folder))
    print(json.dumps(found))
    if found["export_overhead"] > ALLOWED_BYTES:
        raise SystemExit(f"an export may take {ALLOWED_BYTES:,} bytes beyond the weights")


if __name__ == "__main__":
    main()
