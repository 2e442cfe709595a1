"""A bundle in a process that has no model source gives what `predict` gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec

ROWS = (1, 7, 32, 100)

CLIENT = """
import sys
import numpy as np
from nitro_export_stablehlo import load_bundle

bundle, requests, answers = sys.argv[1:]
loaded = load_bundle(bundle)
with np.load(requests) as file:
    np.savez(answers, **{name: loaded(x=file[name])["logits"] for name in file})
heavy = {"flax", "optax", "orbax", "nitro._run", "nitro._experiment"} & set(sys.modules)
assert not heavy, heavy
"""


class Square(nitro.Experiment):
    """A perceptron with a square matrix: no shape tells it from its transpose."""

    shape = staticmethod(lambda: (16,))

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(160, *self.shape())).astype(np.float32)
        arrays = {"x": x, "label": rng.integers(0, 3, 160)}
        return {"train": nitro.ArrayLoader(arrays, 16, shuffle=True)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        layers = nnx.Linear(16, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 3, rngs=rngs)
        return nnx.Sequential(*layers)

    def forward(self, model: Any, *, x: Any) -> Any:
        return {"logits": model(x)}

    def loss(self, outputs: Any, *, label: Any) -> Any:
        logits = outputs["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    def export_inputs(self) -> Any:
        return [ExportSpec("x", "float32", (1, *self.shape()))]

    def export_outputs(self) -> Any:
        return [ExportSpec("logits", "float32", (1, 3))]


class Convolution(Square):
    """A convolution with BatchNorm and Dropout."""

    shape = staticmethod(lambda: (6, 6, 2))

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Conv(2, 4, (3, 3), rngs=rngs),
            nnx.BatchNorm(4, rngs=rngs),
            nnx.relu,
            nnx.Dropout(0.3, rngs=rngs),
            lambda hidden: hidden.reshape(hidden.shape[0], -1),
            nnx.Linear(6 * 6 * 4, 3, rngs=rngs),
        )


@pytest.mark.parametrize("experiment", [Square, Convolution])
def test_isolated_process_predicts_the_same_at_every_size(experiment: Any, tmp_path: Path) -> None:
    pytest.importorskip("nitro_export_stablehlo")
    run = nitro.Nitro(experiment(), max_epochs=3, run_dir=tmp_path / "run").train()
    bundle = nitro.export_model(run, "stablehlo", dir=tmp_path, name="v1", batch_sizes=(1, 32))
    rng = np.random.default_rng(1)
    shape = experiment.shape()
    requests = {f"n{n}": rng.normal(size=(n, *shape)).astype(np.float32) for n in ROWS}
    np.savez(tmp_path / "requests.npz", **requests)

    # -I: no current folder, no PYTHONPATH: nothing but site-packages can be imported.
    words = [str(bundle), str(tmp_path / "requests.npz"), str(tmp_path / "answers.npz")]
    subprocess.run([sys.executable, "-I", "-c", CLIENT, *words], cwd=tmp_path, check=True)

    with np.load(tmp_path / "answers.npz") as answers:
        for name, x in requests.items():
            expected = run.predict({"x": x})["logits"]
            # Other batch sizes are other programs, whose sums may be ordered differently.
            np.testing.assert_allclose(answers[name], expected, rtol=0, atol=1e-6)
