"""Small hand-written programs, and the bundles written from them once for all tests."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_stablehlo import StableHLOBackend

Programs = dict[str, ExportProgram]


def _mlp() -> ExportProgram:
    """A u8 input, a square weight matrix, and a scalar weight; rows are independent."""
    rng = np.random.default_rng(0)
    weights = {
        "dense1.kernel": rng.normal(0, 0.2, (16, 16)).astype(np.float32),
        "dense1.bias": rng.normal(0, 0.2, 16).astype(np.float32),
        "dense2.kernel": rng.normal(0, 0.2, (16, 3)).astype(np.float32),
        "scale": np.float32(1.25).reshape(()),
    }

    def fn(pixels, bias1, kernel1, kernel2, scale):
        x = pixels.astype(jnp.float32) / 16
        hidden = jnp.tanh(x @ kernel1 + bias1)
        return (hidden @ kernel2 * scale,)

    pixels = rng.integers(0, 255, (5, 16), dtype=np.uint8)
    return ExportProgram(
        name="mlp",
        fn=fn,
        inputs=(ExportSpec("pixels", "uint8", (1, 16)),),
        outputs=(ExportSpec("logits", "float32", (1, 3)),),
        weights=weights,
        batch_sizes=(1, 32),
        golden=_golden(fn, weights, {"pixels": pixels}, ("logits",)),
        provenance={"config": {"width": 16}, "git_dirty": True, "run_dir": "/home/me/runs"},
        working_tree_patch=b"diff --git a/x b/x\n",
    )


def _many() -> ExportProgram:
    """Several inputs and outputs, bf16, bool and i32, and a batch axis that is not first."""
    rng = np.random.default_rng(1)
    weights = {
        "projection": rng.normal(0, 0.3, (4, 4)).astype(ml_dtypes.bfloat16),
        "table": rng.normal(0, 1, (10, 4)).astype(np.float32),
        "unused": np.arange(6, dtype=np.int32).reshape(1, 2, 3),
    }

    def fn(tokens, features, projection, table, unused):
        embedded = table[tokens]  # (rows, 6, 4)
        mixed = features @ projection  # (6, rows, 4)
        scores = embedded + jnp.swapaxes(mixed, 0, 1).astype(jnp.float32)
        return jnp.swapaxes(scores, 0, 1), scores.sum((1, 2)) > 0, mixed

    inputs = {
        "tokens": rng.integers(0, 10, (4, 6), dtype=np.int32),
        "features": rng.normal(0, 1, (6, 4, 4)).astype(ml_dtypes.bfloat16),
    }
    return ExportProgram(
        name="many",
        fn=fn,
        inputs=(
            ExportSpec("tokens", "int32", (1, 6)),
            ExportSpec("features", "bfloat16", (6, 1, 4), batch_axis=2),
        ),
        outputs=(
            ExportSpec("scores", "float32", (6, 1, 4), batch_axis=2),
            ExportSpec("accept", "bool", (1,)),
            ExportSpec("mixed", "bfloat16", (6, 1, 4), batch_axis=2),
        ),
        weights=weights,
        batch_sizes=(2, 8),
        golden=_golden(fn, weights, inputs, ("scores", "accept", "mixed")),
        provenance={},
    )


def _golden(
    fn: Callable[..., tuple[jax.Array, ...]],
    weights: dict[str, np.ndarray],
    inputs: dict[str, np.ndarray],
    outputs: tuple[str, ...],
) -> Golden:
    results = jax.jit(fn)(*inputs.values(), *(weights[name] for name in sorted(weights)))
    found = dict(zip(outputs, map(np.asarray, results), strict=True))
    return Golden(inputs=inputs, outputs=found)


@pytest.fixture(scope="session")
def make_programs() -> Callable[[], Programs]:
    """Makes fresh programs, which were never traced, each time it is called."""
    return lambda: {"mlp": _mlp(), "many": _many()}


@pytest.fixture(scope="session")
def programs(make_programs: Callable[[], Programs]) -> Programs:
    """The programs, traced at most once."""
    return make_programs()


@pytest.fixture(scope="session")
def bundles(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundle of each program, written once; read it only."""
    root = tmp_path_factory.mktemp("bundles")
    for name, program in programs.items():
        (root / name).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            StableHLOBackend().write(program, root / name)
    return {name: root / name for name in programs}


@pytest.fixture(scope="session")
def mlp_reference() -> Callable[[ExportProgram, np.ndarray], np.ndarray]:
    """The MLP in NumPy and float64."""

    def reference(program: ExportProgram, pixels: np.ndarray) -> np.ndarray:
        w = {name: np.asarray(value, np.float64) for name, value in program.weights.items()}
        hidden = np.tanh(pixels / 16.0 @ w["dense1.kernel"] + w["dense1.bias"])
        return hidden @ w["dense2.kernel"] * w["scale"]

    return reference


@pytest.fixture
def copy_bundle(bundles: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies a bundle, changes files of it, and by default makes the digests fit again."""

    def copy(
        name: str,
        *,
        edit: Callable[[Path], object] = lambda _: None,
        edit_index: Callable[[dict[str, Any]], object] = lambda _: None,
        redigest: bool = True,
    ) -> Path:
        path = tmp_path / name
        shutil.copytree(bundles[name], path)
        edit(path)
        index_file = path / "nitro.json"
        index = json.loads(index_file.read_text())
        for file in index["files"]:
            if redigest and (path / file).is_file():
                data = (path / file).read_bytes()
                index["files"][file] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size_bytes": len(data),
                }
        edit_index(index)
        index_file.write_text(json.dumps(index))
        return path

    return copy
