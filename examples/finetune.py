"""Fine-tunes a network on few samples, held close to where it came from (L2-SP).

    uv run examples/finetune.py

A base model learns the digits 0 to 4; a second one takes its weights but for the head, gets
thirty samples of each of the digits 5 to 9, and decays toward the base model's weights instead
of zero. It is served, exported and resumed without the base model.
"""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nitro


def digits(low: int, high: int, per_class: int | None) -> dict[str, dict[str, np.ndarray]]:
    """Images and labels (from 0) of some digits: `train`, with so many each, and `val`."""
    data = load_digits()
    img, label = data.data.astype(np.float32) / 16, data.target.astype(np.int32)
    train, val = [], []
    for digit in range(low, high):
        rows = np.flatnonzero(label == digit)
        cut = per_class or len(rows) * 4 // 5
        train.append(rows[:cut])
        val.append(rows[cut:])
    parts = {"train": np.concatenate(train), "val": np.concatenate(val)}
    return {name: {"img": img[rows], "label": label[rows] - low} for name, rows in parts.items()}


class Base(nitro.Experiment):
    """Learns the digits 0 to 4."""

    max_epochs: int = 30

    def build_data(self):
        return self.loaders(digits(0, 5, per_class=None))

    def loaders(self, arrays):
        return {
            "train": nitro.ArrayLoader(arrays["train"], batch_size=25, shuffle=True),
            "val": nitro.ArrayLoader(arrays["val"], batch_size=64),
        }

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 5, rngs=rngs))

    def forward(self, model, *, img):
        return model(img)

    def loss(self, logits, *, label):
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    def metrics(self, logits, *, label):
        hits = logits.argmax(-1) == label
        return {"acc": (hits.sum(), hits.size)}


class FineTuned(Base):
    """Learns the digits 5 to 9 from thirty samples each."""

    pull: float = 0.1
    """How strongly weights are pulled back to where they started."""
    max_epochs: int = 40

    def build_data(self):
        return self.loaders(digits(5, 10, per_class=30))

    def param_group(self, path):
        return "head" if path.startswith("layers.2.") else "default"

    def learning_rate(self, group=None):
        return 1e-2 if group == "head" else 1e-3

    def weight_decay(self, group):
        return 0.0 if group == "head" else self.pull

    def decay_anchor(self, group):
        return "zero" if group == "head" else "init"


def main() -> None:
    best = nitro.TopK(metric="acc", mode="max")
    base = nitro.Nitro(Base(), checkpointer=best).train()
    print(f"base, digits 0 to 4: {base.validate()['acc']:.3f}")
    # Given here rather than read in `build_model`, which runs for each handle on the fine-tuned
    # model, too; `w0` makes them what the decay anchor `"init"` means.
    weights = nitro.Weights(f"{base.run_dir}@best", skip=("layers.2.*",))
    tuned = nitro.Nitro(FineTuned(), weights=weights, w0="weights", checkpointer=best).train()
    print(f"fine-tuned, digits 5 to 9 from 150 samples: {tuned.validate()['acc']:.3f}")


if __name__ == "__main__":
    main()
