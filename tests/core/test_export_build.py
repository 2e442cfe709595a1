"""A program built from a frozen model, which needs no run."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import Device, ExportSpec
from nitro._run import session_of
from nitro.errors import ExportError
from nitro.export._build import build_program
from nitro.export._frozen import FrozenModel, freeze
from nitro.export._request import ExportRequest

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Scaled(nitro.Experiment):
    scale: Device[float] = 2.0

    def build_data(self):
        return {"train": nitro.ArrayLoader({"x": X, "y": X[:, 0].copy()}, 4)}

    def build_model(self, rngs):
        return nnx.Linear(3, 2, rngs=rngs)

    def forward(self, model, *, x):
        return {"y": model(x) * self.scale}

    def loss(self, out, *, y):
        return jnp.square(out["y"][:, 0] - y).mean()

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 3))]

    def export_outputs(self):
        return [ExportSpec("y")]


def _in_numpy(params, x, scale):
    kernel, bias = (np.asarray(params[name], np.float64) for name in ("kernel", "bias"))
    return (x @ kernel + bias) * scale


@pytest.fixture
def model(tmp_path) -> FrozenModel:
    with nitro.Nitro(Scaled(), run_dir=tmp_path, progress=False, logger=None) as run:
        found = freeze(session_of(run))
        run.set_device(scale=5.0)
    params = {name: np.asarray(value) * 3 for name, value in found.params.items()}

    def predict(batch):
        return {"y": _in_numpy(params, batch["x"], 2.0).astype(np.float32)}

    return dataclasses.replace(found, params=params, predict=predict)


def test_a_program_is_built_from_a_frozen_model_without_its_run(model):
    program = build_program(model, ExportRequest(name="m", batch_sizes=(2,)))
    weights = [program.weights[name] for name in program.weight_names]

    (got,) = program.exported(2).call(X[:2], *weights)

    # The Device field has the value that it had when the model was frozen.
    assert np.allclose(got, _in_numpy(model.params, X[:2], 2.0), atol=1e-5)
    assert np.array_equal(program.golden.inputs["x"], X)
    assert program.provenance["experiment"] == "Scaled"


def test_a_request_that_no_caller_can_keep_needs_no_run_to_be_refused(model):
    request = ExportRequest(name="m", batch_sizes=(2,), constraints=("t >= 2",))

    with pytest.raises(ExportError, match="speaks of `t`"):
        build_program(model, request)
