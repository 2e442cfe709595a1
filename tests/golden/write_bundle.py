"""Writes the golden bundle of the current format: `python tests/golden/write_bundle.py`.

Run it once for each new format number, on the oldest JAX that Nitro supports, and never again:
what is in `bundle-format-<n>` is what servers have on their disks. `test_golden_bundles` loads all
of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import nitro
from nitro import ExportSpec

FORMAT_VERSION = 1
HERE = Path(__file__).parent


class Golden(nitro.Experiment):
    """Bytes in, BatchNorm inside, a renamed output and an echo out."""

    def build_data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x.sum(1)}, 4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Linear(3, 5, rngs=rngs),
            nnx.BatchNorm(5, rngs=rngs),
            nnx.relu,
            nnx.Linear(5, 2, rngs=rngs),
        )

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return ((outputs[:, 0] - y) ** 2).mean()

    def export_inputs(self) -> Any:
        return [ExportSpec("raw", "uint8", (1, 3))]

    def export_preprocess(self, raw: Any) -> Any:
        return {"x": raw.astype(jnp.float32) / 255 - 0.5}

    def export_outputs(self) -> Any:
        return [ExportSpec("scores"), ExportSpec("sent", source="raw")]


def write(target: Path) -> None:
    """Writes the bundle, a request, and the answer that NumPy computes in float64."""
    run = nitro.Nitro(
        Golden(), run_dir=Path("run"), max_epochs=3, logger=None, checkpointer=None, progress=False
    ).train()
    nitro.export_model(
        run,
        "stablehlo",
        dir=target.parent,
        name=target.name,
        batch_sizes=(1, 4),
        dynamic_batch=True,
        vjp_order=1,
    )
    raw = np.random.default_rng(1).integers(0, 256, (7, 3), dtype=np.uint8)
    np.savez(target.parent / "expected.npz", raw=raw, scores=answer(run.model, raw))


def answer(model: Any, raw: np.ndarray) -> np.ndarray:
    first, norm, _, last = model.layers
    w = {
        name: np.asarray(variable[...], np.float64)
        for name, variable in {
            "k1": first.kernel,
            "b1": first.bias,
            "k2": last.kernel,
            "b2": last.bias,
            "mean": norm.mean,
            "var": norm.var,
            "scale": norm.scale,
            "bias": norm.bias,
        }.items()
    }
    hidden = (raw / 255 - 0.5) @ w["k1"] + w["b1"]
    hidden = (hidden - w["mean"]) / np.sqrt(w["var"] + norm.epsilon) * w["scale"] + w["bias"]
    return np.maximum(hidden, 0) @ w["k2"] + w["b2"]


def main() -> None:
    from elsewhere import write_elsewhere

    # The provenance names the run's directory.
    target = HERE / f"bundle-format-{FORMAT_VERSION}"
    write_elsewhere(Path(__file__), made="out", argument="out/golden", target=target)


if __name__ == "__main__":
    main()
