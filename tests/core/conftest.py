"""Tiny experiments that most tests of the core start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec


class Plane(nitro.Experiment):
    """Fits a plane through points: the four required hooks and no field."""

    def build_data(self):
        return {
            "train": nitro.ArrayLoader(make_points(22, seed=0), 5, shuffle=True),
            "val": nitro.ArrayLoader(make_points(13, seed=1), 5),
        }

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Linear(4, 1, rngs=rngs)

    def forward(self, model, *, x):
        return model(x)[:, 0]

    def loss(self, height, *, y):
        return ((height - y) ** 2).mean()

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 4))]

    def export_outputs(self):
        return [ExportSpec("height")]


class Net(nnx.Module):
    """A convolution with BatchNorm and Dropout behind it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, img):
        hidden = nnx.relu(self.norm(self.conv(img)))
        return self.head(self.drop(hidden).mean((1, 2)))


class Images(nitro.Experiment):
    """Classifies small random images with state in the model: BatchNorm and Dropout."""

    def build_data(self):
        return {
            "train": nitro.ArrayLoader(make_images(40, seed=0), 8, shuffle=True),
            "val": nitro.ArrayLoader(make_images(19, seed=1), 8),
        }

    def build_model(self, rngs: nnx.Rngs):
        return Net(rngs)

    def forward(self, model, *, img):
        return {"logits": model(img)}

    def loss(self, outputs, *, label):
        entropies = optax.softmax_cross_entropy_with_integer_labels(outputs["logits"], label)
        return entropies.mean()

    def export_inputs(self):
        return [ExportSpec("img", "float32", (1, 6, 6, 1))]

    def export_outputs(self):
        return [ExportSpec("logits")]


def make_points(count: int, *, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1, -2, 3, 0.5]) + 1).astype(np.float32)}


def make_images(count: int, *, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    img = rng.normal(1, 1, size=(count, 6, 6, 1)).astype(np.float32)
    return {"img": img, "label": rng.integers(0, 3, count)}


@pytest.fixture(scope="session")
def plane() -> type[Plane]:
    """The smallest experiment: 4 numbers in, 1 out; 22 points to train on, 13 to validate."""
    return Plane


@pytest.fixture(scope="session")
def images() -> type[Images]:
    """A classifier with BatchNorm and Dropout; 40 images to train on, 19 to validate."""
    return Images


@pytest.fixture(scope="session")
def points() -> Callable[..., dict[str, np.ndarray]]:
    """Makes points: `points(count, seed=...)`."""
    return make_points


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., nitro.Nitro]:
    """Makes a handle that writes below the test's own folder.

    Without the check of one batch at setup: many hooks here count their calls, or are wrong so
    that a later call tells it.
    """

    def make(experiment: Any, **options: Any) -> nitro.Nitro:
        common = {"run_dir": tmp_path / "run", "sanity_check": False}
        return nitro.Nitro(experiment, **{**common, **options})

    return make


@pytest.fixture(scope="session")
def trained_plane(tmp_path_factory: pytest.TempPathFactory) -> nitro.Nitro:
    """A plane trained for 6 epochs, keeping the 2 best records; read it only."""
    return nitro.Nitro(
        Plane(),
        max_epochs=6,
        run_dir=tmp_path_factory.mktemp("plane"),
        checkpointer=nitro.TopK(k=2),
    ).train()
