"""Train on handwritten digits, export the model, and serve it without its source.

uv run examples/digits.py
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nitro
from nitro import Device, ExportSpec, GraphConst


def split_digits():
    """1,797 grey images of 8x8 pixels, 0 to 16; a fifth of them for validation."""
    digits = load_digits()
    pixels, labels = digits.data.astype(np.uint8), digits.target.astype(np.int32)
    return train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)


class Digits(nitro.Experiment):
    """Classify handwritten digits with a two-layer perceptron."""

    width: GraphConst[int] = 128
    """Hidden units. Structural: baked into the program, part of the compile key."""
    smoothing: Device[float] = 0.05
    """Label smoothing. A traced input: sweep or schedule it without recompiling."""
    max_epochs: int = 60
    """Unmarked, so host-only: invisible to the tracer."""

    def build_data(self):
        train_img, val_img, train_label, val_label = split_digits()
        train = {"img": train_img.astype(np.float32) / 16, "label": train_label}
        val = {"img": val_img.astype(np.float32) / 16, "label": val_label}
        return {
            "train": nitro.ArrayLoader(train, batch_size=32, shuffle=True),
            "val": nitro.ArrayLoader(val, batch_size=32),
        }

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Sequential(
            nnx.Linear(64, self.width, rngs=rngs), nnx.relu, nnx.Linear(self.width, 10, rngs=rngs)
        )

    def forward(self, model, *, img):
        return model(img)

    def loss(self, logits, *, label):
        targets = optax.smooth_labels(jax.nn.one_hot(label, 10), self.smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    def metrics(self, logits, *, label):
        hits = logits.argmax(-1) == label
        return {"acc": (hits.sum(), hits.size)}

    def checkpointer(self):
        return nitro.TopK(metric="acc", mode="max")

    def export_inputs(self):
        return [ExportSpec("img", "uint8", (1, 64))]

    def export_preprocess(self, img):
        return {"img": img.astype(jnp.float32) / 16}

    def export_outputs(self):
        return [ExportSpec("logits")]


CLIENT = """
import sys
import numpy as np
from nitro_export_stablehlo import load_bundle

bundle, requests = sys.argv[1:]
data = np.load(requests)
logits = load_bundle(bundle)(img=data["img"])["logits"]
print((logits.argmax(-1) == data["label"]).mean())
"""


def serve(bundle: Path) -> float:
    """The accuracy that a process without this file gets from the bundle."""
    _, val_img, _, val_label = split_digits()
    requests = bundle.parent / "requests.npz"
    np.savez(requests, img=val_img, label=val_label)
    # -I: isolated, so nothing but installed packages can be imported.
    command = [sys.executable, "-I", "-c", CLIENT, str(bundle), str(requests)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    run = nitro.Nitro(Digits())
    run.train()
    bundle = nitro.export_model(
        run,
        "stablehlo",
        dir="export_out",
        name="digits_v1",
        batch_sizes=(1, 32),
        overwrite=True,
    )
    print(f"accuracy here:            {run.validate()['acc']:.4f}")
    print(f"accuracy from {bundle.name}:  {serve(bundle):.4f}  (python -I, no model source)")


if __name__ == "__main__":
    main()
