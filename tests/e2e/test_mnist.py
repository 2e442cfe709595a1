"""One epoch on real data, beside what loops written by hand reach."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro

_SHARED = Path(__file__).parents[3] / "shared" / "data" / "mnist.npz"
MNIST = Path(os.environ.get("NITRO_MNIST", _SHARED))


class Mnist(nitro.Experiment):
    """A 784-128-10 perceptron on the pixels as they are stored."""

    def build_data(self) -> Any:
        with np.load(MNIST) as arrays:
            train, val, test = (
                {name: arrays[f"{split}_{name}"] for name in ("img", "label")}
                for split in ("train", "val", "test")
            )
        # The 60,000 images that MNIST calls its training set.
        both = {name: np.concatenate([train[name], val[name]]) for name in train}
        return {
            "train": nitro.ArrayLoader(both, 32, shuffle=True),
            "test": nitro.ArrayLoader(test, 1000),
        }

    def build_model(self, rngs: nnx.Rngs) -> Any:
        layers = nnx.Linear(784, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs)
        return nnx.Sequential(*layers)

    def forward(self, model: Any, *, img: Any) -> Any:
        return model(img.astype(jnp.float32) / 255)

    def loss(self, logits: Any, *, label: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    def metrics(self, logits: Any, *, label: Any) -> Any:
        return {"acc": ((logits.argmax(-1) == label).sum(), label.size)}


@pytest.mark.slow
@pytest.mark.skipif(not MNIST.exists(), reason=f"needs {MNIST}, or NITRO_MNIST=<mnist.npz>")
def test_one_epoch_reaches_what_hand_written_loops_reach(tmp_path: Path) -> None:
    run = nitro.Nitro(Mnist(), seed=0, run_dir=tmp_path).train()

    # Seven runs written by hand gave 0.943 to 0.949; seeds 0 to 3 here 0.942 to 0.946.
    assert run.evaluate("test")["acc"] >= 0.94
    assert run.step == 60_000 // 32
