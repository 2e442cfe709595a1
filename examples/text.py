"""A small transformer that learns to predict the next character of this project's license.

uv run examples/text.py
"""

from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import nitro
from nitro import Device, GraphConst

TEXT = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))


def encode(text: str) -> np.ndarray:
    """Characters as their places in `LETTERS`: int32."""
    places = {letter: place for place, letter in enumerate(LETTERS)}
    return np.array([places[letter] for letter in text], np.int32)


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, width: int, depth: int, heads: int, time: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(len(LETTERS), width, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (time, width)))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class NextCharacter(nitro.Experiment):
    """Predicts each next character from those before it."""

    width: GraphConst[int] = 64
    depth: GraphConst[int] = 2
    heads: GraphConst[int] = 4
    time: GraphConst[int] = 64
    """Characters in a window."""
    confidence: Device[float] = 0.0
    """Penalty on over-confident predictions."""
    max_epochs: int = 4

    def build_data(self):
        tokens = encode(TEXT)
        starts = np.arange(0, len(tokens) - self.time - 1, 4)
        windows = tokens[starts[:, None] + np.arange(self.time + 1)]
        arrays = {"tokens": windows[:, :-1], "following": windows[:, 1:]}
        held_out = {name: array[::10] for name, array in arrays.items()}
        return {
            "train": nitro.ArrayLoader(arrays, batch_size=32, shuffle=True),
            "val": nitro.ArrayLoader(held_out, batch_size=32),
        }

    def build_model(self, rngs: nnx.Rngs):
        return Transformer(self.width, self.depth, self.heads, self.time, rngs)

    def forward(self, model, *, tokens):
        return {"logits": model(tokens)}

    def loss(self, outputs, *, following):
        logits = outputs["logits"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, following)
        return (entropy + self.confidence * jax.nn.logsumexp(logits, axis=-1) ** 2).mean()

    def optimizer(self, group):
        return optax.adam

    def weight_decay(self, group):
        return 1e-3

    def schedules(self):
        return {
            "learning_rate": lambda total: optax.warmup_cosine_decay_schedule(
                0.0, 3e-3, total // 10, total
            ),
            "confidence": lambda total: optax.linear_schedule(1e-3, 0.0, total),
        }


def complete(run: nitro.Nitro, prompt: str, count: int) -> str:
    """The prompt, and the most likely characters after it."""
    time = run.experiment.time
    tokens = encode(prompt)[-time:]
    for _ in range(count):
        window = np.zeros((1, time), np.int32)
        kept = tokens[-time:]
        window[0, : len(kept)] = kept
        logits = run.predict({"tokens": window})["logits"][0, len(kept) - 1]
        tokens = np.append(tokens, np.int32(logits.argmax()))
    return "".join(LETTERS[token] for token in tokens)


def main() -> None:
    run = nitro.Nitro(NextCharacter())
    run.train()
    print(run.history)
    print(complete(run, "Licensor shall ", 60))


if __name__ == "__main__":
    main()
