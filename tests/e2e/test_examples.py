"""The shipped examples, shrunk: each one trains, and learns what it is there to show."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import nitro
from nitro_export_stablehlo import load_bundle

EXAMPLES = Path(__file__).parents[2] / "examples"
MNIST = Path(os.environ.get("NITRO_MNIST") or EXAMPLES.parents[1] / "shared" / "data" / "mnist.npz")


@pytest.fixture
def example():
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def train(experiment: Any, folder: Path, **options: Any) -> nitro.Nitro:
    return nitro.Nitro(experiment, run_dir=folder, **options).train()


def test_cnn_learns_and_serves(example, tmp_path):
    cnn = example("cnn")
    policy = nitro.TopK(metric="acc", mode="max")
    run = train(cnn.DigitsCNN(max_epochs=5), tmp_path / "run", checkpointer=policy)

    bundle = load_bundle(nitro.export_model(run, "stablehlo", dir=tmp_path, name="cnn"))

    img = cnn.load_digits().images[:20].astype(np.uint8)[..., None]
    served = bundle(img=img)["logits"]
    here = run.predict({"img": img.astype(np.float32) / 16})["logits"]
    np.testing.assert_allclose(served, here, rtol=1e-4, atol=1e-5)
    assert run.history["acc"][-1] > 0.5


def test_transformer_learns_the_text(example, tmp_path):
    text = example("text")
    run = train(text.NextCharacter(max_epochs=1, width=32, time=32), tmp_path)

    # Guessing evenly costs the logarithm of the number of letters.
    assert run.history["val_loss"][-1] < 0.75 * np.log(len(text.LETTERS))
    assert len(text.complete(run, "Licensor ", 5)) == len("Licensor ") + 5


def test_fine_tuning_stays_nearer_to_its_start_the_stronger_the_pull(example, tmp_path):
    finetune = example("finetune")
    policy = nitro.TopK(metric="acc", mode="max")
    base = train(finetune.Base(max_epochs=4), tmp_path / "base", checkpointer=policy)

    def distance(pull: float) -> float:
        experiment = finetune.FineTuned(pull=pull, max_epochs=10)
        weights = nitro.Weights(f"{base.run_dir}@best", skip=("layers.2.*",))
        options = {"weights": weights, "w0": "weights", "checkpointer": None}
        run = nitro.Nitro(experiment, run_dir=tmp_path / f"pull{pull}", **options)
        start = run.params["layers.0.kernel"]
        return float(np.linalg.norm(run.train().params["layers.0.kernel"] - start))

    free, held = distance(0.0), distance(50.0)

    assert 0 < held < 0.8 * free


def test_gan_generates_points_of_the_ring(example, tmp_path):
    gan = example("gan")
    run = train(gan.Ring(), tmp_path, checkpointer=None)

    noise = np.random.default_rng(2).normal(size=(4096, 2)).astype(np.float32)
    near, shares = gan.describe(run.predict({"z": noise})["point"])

    assert near > 0.9
    # An even spread gives each of the eight sectors an eighth.
    assert shares.min() > 0.08
    assert shares.max() < 0.18


@pytest.mark.skipif(not MNIST.exists(), reason="needs MNIST: set NITRO_MNIST to its .npz file")
def test_mnist_with_everything_on(example, tmp_path):
    mnist = example("mnist")
    policy = nitro.TopK(metric="acc", mode="max")
    run = train(mnist.MNIST(path=str(MNIST), max_epochs=2), tmp_path, checkpointer=policy)

    assert run.evaluate("test")["acc"] >= 0.96
    assert "group `head`" in run.binding
