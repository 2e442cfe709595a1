"""64-bit integers on the wire of a model that computes in 32 bits, as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro.errors import BundleError, DataError
from nitro_export_stablehlo import Bundle, load_bundle

TOO_LARGE = 2**32 + 1


class Tokens(nitro.Experiment):
    def build_data(self):
        ids = np.arange(64, dtype=np.int32).reshape(16, 4)
        return {"train": nitro.ArrayLoader({"x": ids, "y": np.zeros(16, np.float32)}, 8)}

    def build_model(self, rngs):
        return nnx.Embed(64, 3, rngs=rngs)

    def forward(self, model, *, x):
        return {"out": model(x).mean((1, 2))}

    def loss(self, out, *, y):
        return jnp.square(out["out"] - y).mean()

    def export_inputs(self):
        return [ExportSpec("x", "int64", (1, 4))]

    def export_outputs(self):
        return [ExportSpec("out")]


class Moved(Tokens):
    def export_preprocess(self, words):
        return {"x": jnp.flip(words.reshape(-1, 2, 2), 2).reshape(-1, 4)}


class Hashed(Tokens):
    def export_preprocess(self, words):
        return {"x": words % 64}


def _bundle(cls: type[nitro.Experiment], folder: Path, **options: Any) -> Bundle:
    options = {"progress": False, "logger": None, "checkpointer": None, **options}
    run = nitro.Nitro(cls(), run_dir=folder / "run", **options)
    return load_bundle(nitro.export_model(run, "stablehlo", dir=folder, name="m", batch_sizes=(2,)))


@pytest.mark.parametrize("cls", [Tokens, Moved])
@pytest.mark.parametrize("value", [TOO_LARGE, -(2**31) - 1])
def test_an_integer_that_would_wrap_around_is_refused_as_training_refuses_it(tmp_path, cls, value):
    bundle = _bundle(cls, tmp_path)
    ids = np.array([[1, 2, 3, value]])

    with pytest.raises(BundleError, match=rf"`x` is int64 and holds {value}\.[\s\S]*fit int32"):
        bundle(x=ids)
    data = {"train": [{"x": ids, "y": np.zeros(1, np.float32)}]}
    with pytest.raises(DataError, match=f"is int64 and holds {value}"):
        nitro.Nitro(Tokens(), data=data, run_dir=tmp_path / "b", progress=False)
    with jax.enable_x64(True), pytest.raises(BundleError, match=f"holds {value}"):
        bundle(x=jnp.asarray(ids))


def test_integers_that_fit_are_looked_up_as_they_are(tmp_path):
    bundle = _bundle(Tokens, tmp_path)
    table = np.asarray(bundle.weights["embedding"], np.float64)
    ids = np.array([[1, 2, 3, 63], [0, 0, 5, 6], [7, 7, 7, 7]])

    assert np.allclose(bundle(x=ids)["out"], table[ids].mean((1, 2)), atol=1e-6)
    traced = jax.jit(lambda x: bundle.apply(x=x)["out"])
    with jax.enable_x64(True):
        assert np.allclose(traced(ids[:2]), table[ids[:2]].mean((1, 2)), atol=1e-6)


def test_a_preprocess_that_computes_in_64_bits_takes_every_value(tmp_path):
    bundle = _bundle(Hashed, tmp_path)
    table = np.asarray(bundle.weights["embedding"], np.float64)
    ids = np.array([[TOO_LARGE, 2**40 + 7, 3, 2**62 + 5]])

    assert np.allclose(bundle(x=ids)["out"], table[ids % 64].mean((1, 2)), atol=1e-6)


def test_what_a_run_in_64_bits_exports_takes_every_value(tmp_path):
    with jax.enable_x64(True):
        bundle = _bundle(Tokens, tmp_path)

    assert bundle(x=np.array([[TOO_LARGE, 2, 3, 4]]))["out"].shape == (1,)
