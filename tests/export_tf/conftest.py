"""Small hand-written programs, and the SavedModels written from them once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_tf import SavedModel, SavedModelBackend, load_saved_model

MakeProgram = Callable[..., ExportProgram]
Write = Callable[..., Path]


def make_program(
    fn: Callable[..., Any],
    inputs: dict[str, np.ndarray],
    outputs: Sequence[str],
    *,
    weights: dict[str, Any] | None = None,
    batch_axes: dict[str, int] | None = None,
    specs: Sequence[ExportSpec] = (),
    output_specs: Sequence[ExportSpec] = (),
    **fields: Any,
) -> ExportProgram:
    """A program whose specs and golden outputs come from running it."""
    weights = weights or {}
    axes = batch_axes or {}
    arguments = [*inputs.values(), *(weights[name] for name in sorted(weights))]
    with jax.enable_x64(any(np.dtype(a.dtype).itemsize == 8 for a in arguments)):
        results = [np.asarray(result) for result in jax.jit(fn)(*arguments)]
    golden = Golden(inputs=inputs, outputs=dict(zip(outputs, results, strict=True)))

    def spec(name: str, array: np.ndarray) -> ExportSpec:
        return ExportSpec(name, array.dtype.name, array.shape, batch_axis=axes.get(name, 1))

    return ExportProgram(
        fn=fn,
        inputs=tuple(specs) or tuple(spec(*item) for item in inputs.items()),
        outputs=tuple(output_specs) or tuple(spec(*item) for item in golden.outputs.items()),
        weights=weights,
        golden=golden,
        **{"name": "model", "batch_sizes": (1,), "dynamic_batch": True, "provenance": {}, **fields},
    )


def make_mlp(**fields: Any) -> ExportProgram:
    """A u8 image through two layers with an exact GELU, which is a composite in StableHLO."""
    rng = np.random.default_rng(0)
    weights = {
        "dense1.kernel": rng.normal(0, 0.2, (16, 16)).astype(np.float32),
        "dense1.bias": rng.normal(0, 0.2, 16).astype(np.float32),
        "dense2.kernel": rng.normal(0, 0.2, (16, 3)).astype(np.float32),
        "scale": np.asarray(1.25, np.float32),
    }

    def fn(pixels, bias1, kernel1, kernel2, scale):
        hidden = jax.nn.gelu(pixels.astype(jnp.float32) / 16 @ kernel1 + bias1, approximate=False)
        logits = hidden @ kernel2 * scale
        return logits, jnp.argmax(logits, -1)

    given = {"pixels": rng.integers(0, 255, (5, 16), dtype=np.uint8)}
    fields = {"name": "mlp", "batch_sizes": (1, 32), **fields}
    return make_program(fn, given, ("logits", "digit"), weights=weights, **fields)


def make_many() -> ExportProgram:
    """Several inputs and outputs, an echo, bf16, bool, an unused weight, a second batch axis."""
    rng = np.random.default_rng(1)
    weights = {
        "projection": rng.normal(0, 0.3, (4, 4)).astype(ml_dtypes.bfloat16),
        "layers[0]/table": rng.normal(0, 1, (10, 4)).astype(np.float32),
        "unused": np.arange(6, dtype=np.int32).reshape(1, 2, 3),
    }

    def fn(tokens, features, table, projection, unused):
        mixed = features @ projection
        scores = jnp.swapaxes(table[tokens], 0, 1) + mixed.astype(jnp.float32)
        return scores, scores.sum((0, 2)) > 0, mixed, tokens

    inputs = {
        "tokens": rng.integers(0, 10, (4, 6), dtype=np.int32),
        "features": rng.normal(0, 1, (6, 4, 4)).astype(ml_dtypes.bfloat16),
    }
    return make_program(
        fn,
        inputs,
        ("scores", "accept", "mixed", "sent"),
        weights=weights,
        batch_axes={"features": 2, "scores": 2, "mixed": 2},
        name="many",
        batch_sizes=(2, 8),
        rtol=0.06,
    )


def _fixed() -> ExportProgram:
    return make_mlp(name="fixed", dynamic_batch=False, batch_sizes=(2, 8))


def _trainable() -> ExportProgram:
    return make_mlp(name="trainable", vjp_order=1)


MODELS: dict[str, tuple[Callable[[], ExportProgram], dict[str, Any]]] = {
    "mlp": (make_mlp, {}),
    "many": (make_many, {}),
    "fixed": (_fixed, {}),
    "trainable": (_trainable, {"trainable": True}),
}


@pytest.fixture(scope="session")
def programs() -> dict[str, ExportProgram]:
    """The programs of `MODELS`."""
    return {name: make() for name, (make, _) in MODELS.items()}


@pytest.fixture(scope="session")
def models(
    programs: dict[str, ExportProgram], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The SavedModel of a program, written when it is first asked for; read it only."""
    root = tmp_path_factory.mktemp("models")

    def model(name: str) -> Path:
        path = root / name
        if not path.exists():
            path.mkdir()
            patch = replace(programs[name], working_tree_patch=b"diff --git a/x b/x\n")
            SavedModelBackend().write(patch, path, **MODELS[name][1])
        return path

    return model


@pytest.fixture(scope="session")
def loaded(models: Callable[[str], Path]) -> Callable[[str], SavedModel]:
    """The SavedModel of a program, loaded once."""
    found = dict[str, SavedModel]()

    def load(name: str) -> SavedModel:
        if name not in found:
            found[name] = load_saved_model(models(name))
        return found[name]

    return load


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a program with the backend and returns the SavedModel."""

    def write(program: ExportProgram, **options: Any) -> Path:
        path = tmp_path / "written"
        path.mkdir(exist_ok=True)
        SavedModelBackend().write(program, path, **options)
        return path

    return write


@pytest.fixture(scope="session")
def mlp() -> MakeProgram:
    """Makes the MLP with other fields: `mlp(vjp_order=1)`."""
    return make_mlp


@pytest.fixture(scope="session")
def program_of() -> MakeProgram:
    """Makes a program from a function: `program_of(fn, inputs, outputs, ...)`."""
    return make_program
