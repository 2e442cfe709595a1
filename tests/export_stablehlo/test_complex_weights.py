"""Complex parameters: two arrays each in an artifact, whole for who trains or swaps them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro.errors import BundleError
from nitro_export_stablehlo import load_bundle


class Spectral(nnx.Module):
    """Multiplies the lowest frequencies by learned complex numbers."""

    def __init__(self, rngs: nnx.Rngs):
        real, imag = jax.random.normal(rngs.params(), (2, 5, 3))
        self.filter = nnx.Param(real + 1j * imag)
        self.out = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        waves = jnp.fft.rfft(x.astype(jnp.float32), axis=1)[:, :5, None] * self.filter[...]
        return self.out(jnp.fft.irfft(waves, n=8, axis=1).mean(1))


class Operator(nitro.Experiment):
    def build_data(self):
        x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x[:, :2]}, 8)}

    def build_model(self, rngs):
        return Spectral(rngs)

    def forward(self, model, *, x):
        return {"y": model(x)}

    def loss(self, out, *, y):
        return jnp.square(out["y"] - y).mean()

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 8))]

    def export_outputs(self):
        return [ExportSpec("y")]


def in_numpy(weights: dict[str, Any], x: np.ndarray) -> np.ndarray:
    w = {name: np.asarray(array).astype(np.complex128) for name, array in weights.items()}
    waves = np.fft.rfft(x.astype(np.float64), axis=1)[:, :5, None] * w["filter"]
    means = np.fft.irfft(waves, n=8, axis=1).mean(1)
    return means @ w["out.kernel"].real + w["out.bias"].real


def _params(run: nitro.Nitro) -> dict[str, Any]:
    model = run.model
    return {
        "filter": np.asarray(model.filter[...]),
        "out.kernel": np.asarray(model.out.kernel[...]),
        "out.bias": np.asarray(model.out.bias[...]),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[nitro.Nitro, Path]:
    folder = tmp_path_factory.mktemp("complex")
    options: dict[str, Any] = {"progress": False, "logger": None, "checkpointer": None}
    run = nitro.Nitro(Operator(), run_dir=folder / "run", **options).train()
    path = nitro.export_model(run, "stablehlo", dir=folder, name="m", batch_sizes=(2,), vjp_order=1)
    return run, path


X = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)


def test_a_model_with_complex_parameters_predicts_the_same_from_its_bundle(trained):
    run, path = trained
    bundle = load_bundle(path)

    assert np.allclose(bundle(x=X)["y"], in_numpy(_params(run), X), atol=1e-5)
    assert {n: str(w.dtype) for n, w in bundle.weights.items()} == {
        "filter.imag": "float32",
        "filter.real": "float32",
        "out.bias": "float32",
        "out.kernel": "float32",
    }
    assert bundle.provenance["complex_weights"] == {"filter": ["filter.real", "filter.imag"]}


def test_a_bundle_takes_complex_weights_whole(trained):
    run, path = trained
    bundle = load_bundle(path)
    other = {**_params(run), "filter": _params(run)["filter"] * (2 - 1j)}

    fresh = bundle.with_weights(other)
    applied = bundle.apply({"filter": other["filter"]}, x=X[:2])

    assert np.allclose(fresh(x=X)["y"], in_numpy(other, X), atol=1e-5)
    assert np.allclose(applied["y"], in_numpy(other, X[:2]), atol=1e-5)
    with pytest.raises(BundleError, match=r"no weight `filtre`"):
        bundle.with_weights({**_params(run), "filtre": other["filter"]})


def test_complex_weights_are_swapped_on_disk(trained, tmp_path):
    run, path = trained
    other = {**_params(run), "filter": np.conj(_params(run)["filter"])}
    np.savez(tmp_path / "new.npz", **other)
    command = [sys.executable, "-m", "nitro_export_stablehlo", "swap-weights", str(path)]
    target = tmp_path / "swapped"
    arguments = [str(tmp_path / "new.npz"), "--out", str(target)]

    subprocess.run([*command, *arguments], check=True)

    assert np.allclose(load_bundle(target)(x=X)["y"], in_numpy(other, X), atol=1e-5)


def test_the_gradient_by_both_parts_is_that_of_finite_differences(trained):
    _, path = trained
    bundle = load_bundle(path)
    w, step = bundle.weights, 1e-2

    def total(out):
        return (out["y"] ** 2).sum()

    found = bundle.grad(total)(w, {"x": X[:2]})
    for part in ("filter.real", "filter.imag"):
        nudge = np.zeros((5, 3), np.float32)
        nudge[1, 2] = step
        up, down = (total(bundle.apply({part: w[part] + s * nudge}, x=X[:2])) for s in (1, -1))
        assert np.isclose(found[part][1, 2], (up - down) / (2 * step), atol=1e-3)


@pytest.mark.parametrize(("dtype", "part"), [("bfloat16", "float32"), ("float64", "float64")])
def test_another_dtype_keeps_complex_numbers_that_jax_has(trained, tmp_path, dtype, part):
    run, _ = trained
    path = nitro.export_model(run, "stablehlo", dir=tmp_path, name="m", dtype=dtype)
    bundle = load_bundle(path)

    assert str(bundle.weights["filter.real"].dtype) == part
    assert str(bundle.weights["out.kernel"].dtype) == dtype
    assert np.allclose(bundle(x=X)["y"], in_numpy(_params(run), X), atol=0.1)


def test_a_variable_called_like_a_part_is_refused(tmp_path):
    class Clash(Operator):
        def build_model(self, rngs):
            model = Spectral(rngs)
            model.extra = nnx.Dict(
                {"w": nnx.Param(jnp.ones(2) * 1j), "w.real": nnx.Param(jnp.ones(2))}
            )
            return model

    run = nitro.Nitro(Clash(), run_dir=tmp_path / "run", progress=False)
    with pytest.raises(nitro.errors.ExportError, match=r"a variable `extra\.w\.real`"):
        nitro.export_model(run, "stablehlo", dir=tmp_path, name="m")
