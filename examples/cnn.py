"""A convolutional network with BatchNorm and Dropout on handwritten digits.

uv run examples/cnn.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nitro
from nitro import ExportSpec, GraphConst


class CNN(nnx.Module):
    """Two convolutions, each with BatchNorm; Dropout before the head."""

    def __init__(self, channels: int, dropout: float, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, channels, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(channels, rngs=rngs)
        self.conv2 = nnx.Conv(channels, 2 * channels, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * channels, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(2 * channels, 10, rngs=rngs)

    def __call__(self, img):
        x = nnx.relu(self.norm1(self.conv1(img)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x.mean((1, 2))))


class DigitsCNN(nitro.Experiment):
    """Nitro owns the mode: running statistics and dropout need no switch of the user's."""

    channels: GraphConst[int] = 16
    dropout: GraphConst[float] = 0.2
    max_epochs: int = 12

    def build_data(self):
        digits = load_digits()
        img = digits.images.astype(np.float32)[..., None] / 16
        label = digits.target.astype(np.int32)
        train_img, val_img, train_label, val_label = train_test_split(
            img, label, test_size=0.2, stratify=label, random_state=0
        )
        train = {"img": train_img, "label": train_label}
        val = {"img": val_img, "label": val_label}
        return {
            "train": nitro.ArrayLoader(train, batch_size=32, shuffle=True),
            "val": nitro.ArrayLoader(val, batch_size=64),
        }

    def build_model(self, rngs: nnx.Rngs):
        return CNN(self.channels, self.dropout, rngs)

    def forward(self, model, *, img):
        return {"logits": model(img)}

    def loss(self, outputs, *, label):
        return optax.softmax_cross_entropy_with_integer_labels(outputs["logits"], label).mean()

    def metrics(self, outputs, *, label):
        hits = outputs["logits"].argmax(-1) == label
        return {"acc": (hits.sum(), hits.size)}

    def optimizer(self, group):
        return optax.adam

    def learning_rate(self, group=None):
        return 3e-3

    def export_inputs(self):
        return [ExportSpec("img", "uint8", (1, 8, 8, 1))]

    def export_preprocess(self, img):
        return {"img": img.astype(jnp.float32) / 16}

    def export_outputs(self):
        return [ExportSpec("logits")]


def main() -> None:
    run = nitro.Nitro(DigitsCNN(), checkpointer=nitro.TopK(metric="acc", mode="max"))
    run.train()
    print(run.history)
    bundle = nitro.export_model(
        run, "stablehlo", dir="export_out", name="digits_cnn", batch_sizes=(1, 32), overwrite=True
    )
    print(f"exported to {bundle}")


if __name__ == "__main__":
    main()
