"""A least-squares GAN that learns a ring in the plane: `train_step` in plain NNX.

    uv run examples/gan.py

Each network has an optimizer of its own, with a rate that follows a curve of its own.
"""

import itertools

import jax
import numpy as np
import optax
from flax import nnx

import nitro
from nitro import Device, GraphConst

RADIUS, SPREAD = 2.0, 0.1


def sample_ring(count: int, seed: int) -> np.ndarray:
    """Points of the target distribution, even around the ring: float32 (count, 2)."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, count)
    radius = rng.normal(RADIUS, SPREAD, count)
    return (radius * np.stack([np.cos(angle), np.sin(angle)])).T.astype(np.float32)


def mlp(sizes: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Sequential:
    layers = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nnx.Linear(inner, outer, rngs=rngs), nnx.leaky_relu]
    return nnx.Sequential(*layers[:-1])


class Pair(nnx.Module):
    """A generator and its critic."""

    def __init__(self, noise: int, width: int, rngs: nnx.Rngs):
        self.gen = mlp((noise, width, width, 2), rngs)
        self.disc = mlp((2, width, width, 1), rngs)


class Ring(nitro.Experiment):
    """Learns the ring; the critic's target for generated points is 0, for real ones 1."""

    noise: GraphConst[int] = 2
    width: GraphConst[int] = 64
    real_target: Device[float] = 1.0
    """One-sided label smoothing: may be swept without a compile."""
    num_samples: int = 25_600
    max_epochs: int = 30

    def build_data(self):
        rng = np.random.default_rng(1)
        noise = rng.normal(size=(self.num_samples, self.noise)).astype(np.float32)
        train = {"x": sample_ring(self.num_samples, seed=0), "z": noise}
        return {"train": nitro.ArrayLoader(train, batch_size=256, shuffle=True)}

    def build_model(self, rngs: nnx.Rngs):
        return Pair(self.noise, self.width, rngs)

    def forward(self, model, *, z):
        return {"point": model.gen(z)}

    def build_optimizers(self, model):
        adam = optax.inject_hyperparams(optax.adam)
        return {
            "gen": nnx.Optimizer(model.gen, adam(learning_rate=1e-3, b1=0.5), wrt=nnx.Param),
            "disc": nnx.Optimizer(model.disc, adam(learning_rate=2e-3, b1=0.5), wrt=nnx.Param),
        }

    def schedules(self):
        return {
            "opt.gen.learning_rate": lambda total: optax.cosine_decay_schedule(1e-3, total),
            "opt.disc.learning_rate": lambda total: optax.linear_schedule(2e-3, 2e-4, total),
        }

    def train_step(self, model, optimizers, *, x, z):
        def disc_loss(disc):
            real, fake = disc(x), disc(jax.lax.stop_gradient(model.gen(z)))
            return ((real - self.real_target) ** 2).mean() + (fake**2).mean()

        def gen_loss(gen):
            return ((model.disc(gen(z)) - self.real_target) ** 2).mean()

        d_loss, d_grads = nnx.value_and_grad(disc_loss)(model.disc)
        optimizers["disc"].update(model.disc, d_grads)
        g_loss, g_grads = nnx.value_and_grad(gen_loss)(model.gen)
        optimizers["gen"].update(model.gen, g_grads)
        return d_loss + g_loss, {"d_loss": d_loss, "g_loss": g_loss}


def describe(points: np.ndarray) -> tuple[float, np.ndarray]:
    """The share of points within 0.3 of the ring, and the share in each of eight sectors."""
    radius = np.linalg.norm(points, axis=-1)
    sector = np.floor((np.arctan2(points[:, 1], points[:, 0]) / np.pi + 1) * 4).astype(int) % 8
    shares = np.bincount(sector, minlength=8) / len(points)
    return float((np.abs(radius - RADIUS) < 3 * SPREAD).mean()), shares


def main() -> None:
    run = nitro.Nitro(Ring())
    run.train()
    noise = np.random.default_rng(2).normal(size=(4096, 2)).astype(np.float32)
    near, shares = describe(run.predict({"z": noise})["point"])
    print(f"{near:.1%} of the generated points lie on the ring")
    print("share of each of eight sectors:", np.round(shares, 2))


if __name__ == "__main__":
    main()
