"""MNIST with everything on: groups, decay, OneCycle, clip, accumulation, early stopping.

    uv run examples/mnist.py PATH/TO/mnist.npz

The file holds `train_img`, `train_label`, `val_img`, ... as uint8, images flattened to 784.
"""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nitro
from nitro import Device, ExportSpec, GraphConst


class MNIST(nitro.Experiment):
    """A perceptron whose rare classes count for more."""

    path: str
    """The data set."""
    width: GraphConst[int] = 128
    """Hidden units."""
    smoothing: Device[float] = 0.05
    """Label smoothing."""
    class_weights: Device[Any] = None
    """How much each class counts; derived from the data."""
    max_epochs: int = 6
    accum: int = 2
    gradient_clip_norm: float = 1.0

    def build_data(self):
        with np.load(self.path) as data:
            arrays = {name: data[name] for name in data.files}
        splits = {
            split: {
                "img": arrays[f"{split}_img"].astype(np.float32) / 255,
                "label": arrays[f"{split}_label"].astype(np.int32),
            }
            for split in ("train", "val", "test")
        }
        return {
            "train": nitro.ArrayLoader(splits["train"], batch_size=50, shuffle=True),
            "val": nitro.ArrayLoader(splits["val"], batch_size=256),
            "test": nitro.ArrayLoader(splits["test"], batch_size=256),
        }

    def derive(self, data):
        counts = np.bincount(data["train"].arrays["label"], minlength=10)
        return {"class_weights": (counts.mean() / counts).astype(np.float32)}

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Sequential(
            nnx.Linear(784, self.width, rngs=rngs), nnx.relu, nnx.Linear(self.width, 10, rngs=rngs)
        )

    def forward(self, model, *, img):
        return {"logits": model(img)}

    def loss(self, outputs, *, label):
        targets = optax.smooth_labels(jax.nn.one_hot(label, 10), self.smoothing)
        losses = optax.softmax_cross_entropy(outputs["logits"], targets)
        return (losses * self.class_weights[label]).mean()

    def metrics(self, outputs, *, label):
        hits = outputs["logits"].argmax(-1) == label
        return {"acc": (hits.sum(), hits.size)}

    def param_group(self, path):
        return "head" if path.startswith("layers.2.") else "default"

    def learning_rate(self, group=None):
        return 1e-3 if group == "head" else 2e-3

    def weight_decay(self, group):
        return 1e-2

    def optimizer(self, group):
        return optax.adam

    def schedules(self):
        return {
            "learning_rate": lambda total: optax.cosine_onecycle_schedule(total, peak_value=4e-3)
        }

    def early_stop(self):
        return nitro.EarlyStop(metric="acc", mode="max", patience=3, min_delta=0.0)

    def export_inputs(self):
        return [ExportSpec("pixels", "uint8", (1, 784))]

    def export_preprocess(self, pixels):
        return {"img": pixels.astype(jnp.float32) / 255}

    def export_outputs(self):
        return [ExportSpec("logits")]


def main(path: str) -> None:
    run = nitro.Nitro(MNIST(path=path), checkpointer=nitro.TopK(metric="acc", mode="max"))
    print(run.binding)
    run.train()
    print(run.history)
    print(f"test accuracy: {run.evaluate('test')['acc']:.4f} ({run.stop_reason})")
    bundle = nitro.export_model(
        run, "stablehlo", dir="export_out", name="mnist_v1", batch_sizes=(1, 32), overwrite=True
    )
    print(f"exported to {bundle}")


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "shared" / "data" / "mnist.npz"
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("NITRO_MNIST", str(default)))
