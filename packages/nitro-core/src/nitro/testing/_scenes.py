"""A tiny experiment that has what makes exports hard, and data for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nitro._data import ArrayLoader
from nitro._experiment import Device, Experiment
from nitro.export import ExportSpec


class _SceneModel(nnx.Module):
    """Convolution, BatchNorm, Dropout and a dense head that also takes the light."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4 + 3, 5, rngs=rngs)

    def __call__(self, img: jax.Array, light: jax.Array) -> jax.Array:
        hidden = self.drop(nnx.relu(self.norm(self.conv(img)))).mean((1, 2))
        return self.head(jnp.concatenate([hidden, light], axis=1))


class Scenes(Experiment):
    """Classifies random images of 6 by 6 pixels under three lights.

    Its exports have a uint8 input, a batch axis that is not the first, several outputs of
    several dtypes, one of them nested and renamed, an echo, model state and Dropout.
    """

    sharpness: Device[float] = 1.5
    """Baked into an export at its current value."""
    max_epochs: int = 1
    """One is enough to move weights and BatchNorm statistics."""

    def build_data(self) -> Mapping[str, Any]:
        """40 images to train on."""
        return {"train": ArrayLoader(make_scenes(40), 8, shuffle=True)}

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model, of a few hundred weights."""
        return _SceneModel(rngs)

    def forward(self, model: Any, *, img: jax.Array, light: jax.Array) -> Mapping[str, Any]:
        """Logits, and what follows from them."""
        logits = model(img, light) * self.sharpness
        best = logits.argmax(-1).astype(jnp.int32)
        return {"logits": logits, "verdict": {"best": best, "sure": logits.max(-1) > 1}}

    def loss(self, outputs: Mapping[str, Any], *, label: jax.Array) -> jax.Array:
        """Cross-entropy."""
        chosen = jax.nn.one_hot(label, 5)
        return -(jax.nn.log_softmax(outputs["logits"]) * chosen).sum(-1).mean()

    def export_inputs(self) -> list[ExportSpec]:
        """Raw pixels, and the light with the batch along its second axis."""
        pixels = ExportSpec("pixels", "uint8", (1, 6, 6, 1))
        return [pixels, ExportSpec("light", "float32", (3, 1), batch_axis=2)]

    def export_preprocess(self, pixels: jax.Array, light: jax.Array) -> Mapping[str, jax.Array]:
        """What training data looks like."""
        return {"img": pixels.astype(jnp.float32) / 255, "light": light.T}

    def export_outputs(self) -> list[ExportSpec]:
        """Logits, a nested leaf under another name, a boolean, and an echo."""
        return [
            ExportSpec("logits", "float32", (1, 5)),
            ExportSpec("best", source="verdict.best"),
            ExportSpec("sure", "bool", source="verdict.sure"),
            ExportSpec("light", source="light", batch_axis=2),
        ]

    def export_provenance(self) -> Mapping[str, Any]:
        """A fact that a test can look for."""
        return {"dataset": "scenes"}


def make_scenes(count: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random batch fields: `img` float32, `light` float32 and `label` int32."""
    rng = np.random.default_rng(seed)
    return {
        "img": rng.uniform(size=(count, 6, 6, 1)).astype(np.float32),
        "light": rng.uniform(size=(count, 3)).astype(np.float32),
        "label": rng.integers(0, 5, count).astype(np.int32),
    }
