"""What an exported model costs: to write, to store, to load and to run.

    uv run --group tf benchmarks/export.py [--width 512] [--seconds 2] [--onnx-python PATH]

One forward pass (bytes in, a perceptron with two hidden layers, logits out) in each form:

- `bundle`: Nitro's StableHLO bundle, through its Python loader.
- `savedmodel`: Nitro's TensorFlow SavedModel, through `tf.saved_model.load`.
- `jax_export`: `jax.export` by hand: a program for each batch size, weights in an .npz.
- `onnx`: ONNX Runtime on the `jax2onnx` conversion of the same function and weights.

Each form is written by one fresh process and read by another, in turns; every number is the
median over the rounds. `jax2onnx` needs an older Orbax than Nitro: it gets an environment of
its own, made by uv when `--onnx-python` names none. `--onnx-python ''` leaves it out.
"""

import argparse
import itertools
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

SIZES = (1, 32)
FEATURES = 784
CLASSES = 10

Predict = Callable[[np.ndarray], np.ndarray]


def network(pixels: Any, *weights: Any) -> Any:
    """The forward pass in plain JAX: kernels and biases in turn, ReLU in between."""
    import jax
    import jax.numpy as jnp

    hidden = pixels.astype(jnp.float32) / 255
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    for kernel, bias in layers[:-1]:
        hidden = jax.nn.relu(hidden @ kernel + bias)
    kernel, bias = layers[-1]
    return hidden @ kernel + bias


def make_weights(width: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = [FEATURES, width, width, CLASSES]
    weights: list[np.ndarray] = []
    for rows, columns in itertools.pairwise(sizes):
        weights.append(rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32))
        weights.append(rng.normal(0, 0.1, columns).astype(np.float32))
    return weights


def pixels_of(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, FEATURES), dtype=np.uint8)


# Writing: each takes the folder to write into, and returns what writes.


def make_run(width: int, folder: Path) -> Any:
    import jax.numpy as jnp
    from flax import nnx

    import nitro

    class Perceptron(nitro.Experiment):
        def build_data(self):
            rows = {"img": np.zeros((4, FEATURES), np.float32), "label": np.zeros(4, np.int32)}
            return {"train": nitro.ArrayLoader(rows, batch_size=4)}

        def build_model(self, rngs):
            model = nnx.Sequential(
                nnx.Linear(FEATURES, width, rngs=rngs),
                nnx.relu,
                nnx.Linear(width, width, rngs=rngs),
                nnx.relu,
                nnx.Linear(width, CLASSES, rngs=rngs),
            )
            linear = [layer for layer in model.layers if isinstance(layer, nnx.Linear)]
            weights = iter(make_weights(width))
            for layer in linear:
                layer.kernel[...] = jnp.asarray(next(weights))
                layer.bias[...] = jnp.asarray(next(weights))
            return model

        def forward(self, model, *, img):
            return model(img)

        def loss(self, logits, *, label):
            return (logits[:, 0] - label).mean()

        def export_inputs(self):
            return [nitro.ExportSpec("pixels", "uint8", (1, FEATURES))]

        def export_preprocess(self, pixels):
            return {"img": pixels.astype(jnp.float32) / 255}

        def export_outputs(self):
            return [nitro.ExportSpec("logits")]

    return nitro.Nitro(Perceptron(), run_dir=folder, checkpointer=None, progress=False)


def nitro_writer(backend: str, **options: Any) -> Callable[[int, Path], Callable[[], None]]:
    def prepare(width: int, folder: Path) -> Callable[[], None]:
        import nitro

        run = make_run(width, folder / "run")

        def write() -> None:
            nitro.export_model(
                run,
                backend,
                dir=folder,
                name="model",
                batch_sizes=SIZES,
                overwrite=True,
                verify=False,
                **options,
            )

        return write

    return prepare


def prepare_jax_export(width: int, folder: Path) -> Callable[[], None]:
    import jax
    import jax.export

    weights = make_weights(width)

    def write() -> None:
        (folder / "model").mkdir(exist_ok=True)
        for rows in SIZES:
            avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (pixels_of(rows), *weights)]
            exported = jax.export.export(jax.jit(network))(*avals)
            (folder / "model" / f"b{rows}.jax").write_bytes(exported.serialize())
        np.savez(folder / "model" / "weights.npz", *weights)

    return write


def prepare_onnx(width: int, folder: Path) -> Callable[[], None]:
    import jax
    from jax2onnx import to_onnx

    weights = make_weights(width)

    def write() -> None:
        (folder / "model").mkdir(exist_ok=True)
        for rows in SIZES:
            model = to_onnx(
                lambda pixels: network(pixels, *weights),
                inputs=[jax.ShapeDtypeStruct((rows, FEATURES), np.uint8)],
                model_name="perceptron",
            )
            (folder / "model" / f"b{rows}.onnx").write_bytes(model.SerializeToString())

    return write


# Reading: each takes the artifact and returns what predicts.


def load_bundle(path: Path) -> Predict:
    from nitro_export_stablehlo import load_bundle

    bundle = load_bundle(path)
    return lambda pixels: np.asarray(bundle(pixels=pixels)["logits"])


def load_savedmodel(path: Path) -> Predict:
    import tensorflow as tf

    model = tf.saved_model.load(str(path))
    signatures = {rows: model.signatures[f"serving_b{rows}"] for rows in SIZES}
    return lambda pixels: signatures[len(pixels)](pixels=tf.constant(pixels))["logits"].numpy()


def load_jax_export(path: Path) -> Predict:
    import jax
    import jax.export

    with np.load(path / "weights.npz") as stored:
        weights = [jax.device_put(array) for array in stored.values()]
    programs = {
        rows: jax.jit(jax.export.deserialize((path / f"b{rows}.jax").read_bytes()).call)
        for rows in SIZES
    }
    return lambda pixels: np.asarray(programs[len(pixels)](pixels, *weights))


def load_onnx(path: Path) -> Predict:
    import onnxruntime

    sessions = {rows: onnxruntime.InferenceSession(path / f"b{rows}.onnx") for rows in SIZES}
    (name,) = {session.get_inputs()[0].name for session in sessions.values()}
    return lambda pixels: sessions[len(pixels)].run(None, {name: pixels})[0]


FORMS: dict[str, tuple[Callable[[int, Path], Callable[[], None]], Callable[[Path], Predict]]] = {
    "bundle": (nitro_writer("stablehlo"), load_bundle),
    "savedmodel": (nitro_writer("tf"), load_savedmodel),
    "jax_export": (prepare_jax_export, load_jax_export),
    "onnx": (prepare_onnx, load_onnx),
}


# The parts that run in processes of their own.


def write_form(form: str, width: int, folder: Path) -> dict[str, float]:
    """Writes twice: the first time imports and traces everything."""
    write = FORMS[form][0](width, folder)
    seconds: list[float] = []
    for _ in range(2):
        begin = time.perf_counter()
        write()
        seconds.append(time.perf_counter() - begin)
    files = [path for path in (folder / "model").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {"write_first_s": seconds[0], "write_again_s": seconds[1], "bytes": size}


def read_form(form: str, width: int, folder: Path, seconds: float) -> dict[str, float]:
    begin = time.perf_counter()
    predict = FORMS[form][1](folder / "model")
    outputs = {1: predict(pixels_of(1))}
    found = {"load_to_first_s": time.perf_counter() - begin}
    for rows in SIZES:
        pixels = pixels_of(rows)
        outputs[rows] = predict(pixels)
        laps: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(laps) < 20:
            begin = time.perf_counter()
            predict(pixels)
            laps.append(time.perf_counter() - begin)
        found[f"latency_b{rows}_us"] = statistics.median(laps) * 1e6
    weights = [weight.astype(np.float64) for weight in make_weights(width)]
    for rows, got in outputs.items():
        hidden = pixels_of(rows) / 255
        for kernel, bias in zip(weights[:-2:2], weights[1:-1:2], strict=True):
            hidden = np.maximum(hidden @ kernel + bias, 0)
        np.testing.assert_allclose(got, hidden @ weights[-2] + weights[-1], rtol=1e-4, atol=1e-4)
    return found


def run_part(python: str, part: str, form: str, folder: Path, options: Any) -> dict[str, float]:
    command = [python, __file__, "--part", part, "--form", form, "--folder", str(folder)]
    command += ["--width", str(options.width), "--seconds", str(options.seconds)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{form}: {part} failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_onnx_python(folder: Path) -> str:
    python = folder / "onnx" / "bin" / "python"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run(["uv", "venv", "-q", "-p", version, str(folder / "onnx")], check=True)
    packages = ["jax2onnx>=0.17", "onnxruntime>=1.20"]
    subprocess.run(["uv", "pip", "install", "-q", "-p", str(python), *packages], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--onnx-python", help="of an environment with jax2onnx and onnxruntime")
    parser.add_argument("--part", choices=["write", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "write":
        print(json.dumps(write_form(options.form, options.width, options.folder)))
    elif options.part == "read":
        found = read_form(options.form, options.width, options.folder, options.seconds)
        print(json.dumps(found))
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, Path(folder))


def compare(options: Any, folder: Path) -> None:
    pythons = dict.fromkeys(FORMS, sys.executable)
    pythons["onnx"] = (
        make_onnx_python(folder) if options.onnx_python is None else options.onnx_python
    )
    pythons = {form: python for form, python in pythons.items() if python}
    rounds: dict[str, list[dict[str, float]]] = {form: [] for form in pythons}
    for turn in range(options.rounds):
        for form, python in pythons.items():
            place = folder / f"{form}_{turn}"
            place.mkdir()
            written = run_part(python, "write", form, place, options)
            read = run_part(python, "read", form, place, options)
            rounds[form].append({**written, **read})
    print(f"width {options.width}, {os.cpu_count()} cores, {options.rounds} rounds")
    medians = {
        form: {key: statistics.median(r[key] for r in found) for key in found[0]}
        for form, found in rounds.items()
    }
    for form, numbers in medians.items():
        rounded = {key: float(f"{number:.4g}") for key, number in numbers.items()}
        print(json.dumps({"form": form, **rounded}))
    for form in ("bundle", "savedmodel"):
        for other in medians:
            if other != form:
                ratios = {k: round(n / medians[other][k], 2) for k, n in medians[form].items()}
                print(f"  {form} / {other}: {json.dumps(ratios)}")


if __name__ == "__main__":
    main()
