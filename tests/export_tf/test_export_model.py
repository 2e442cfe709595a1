"""A whole run exported, and read again by processes that have neither its source nor JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro.testing import Scenes

pytestmark = [pytest.mark.tf, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> nitro.Nitro:
    folder = tmp_path_factory.mktemp("run")
    return nitro.Nitro(Scenes(), run_dir=folder, progress=False, checkpointer=None).train()


@pytest.fixture(scope="module")
def exported(run: nitro.Nitro, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nitro.export_model(
        run,
        "tf",
        dir=tmp_path_factory.mktemp("export"),
        name="scenes_v1",
        batch_sizes=(1, 32),
        platforms=("cpu",),
    )


def test_verified_model_gives_what_predict_gives(exported: Path, run: nitro.Nitro) -> None:
    from nitro_export_tf import load_saved_model

    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 255, (5, 6, 6, 1), dtype=np.uint8)
    light = rng.uniform(size=(3, 5)).astype(np.float32)
    model = load_saved_model(exported)

    outputs = model(pixels=pixels, light=light)

    wanted = run.predict({"img": pixels.astype(np.float32) / 255, "light": light.T})
    np.testing.assert_allclose(outputs["logits"], wanted["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs["best"], wanted["verdict"]["best"])
    np.testing.assert_array_equal(outputs["light"], light)


def test_export_is_complete_and_tells_how_it_was_verified(exported: Path) -> None:
    index = json.loads((exported / "assets.extra" / "nitro.json").read_text())
    provenance = json.loads((exported / "assets.extra" / "provenance.json").read_text())

    assert [path.name for path in exported.parent.iterdir()] == ["scenes_v1"]
    assert {1, 3, 32} <= {sizes["b"] for sizes in index["verification"]["sizes"]}
    assert index["verification"]["outputs"]["logits"]["max_rel"] < 1e-5
    assert provenance["experiment"] == "Scenes"


def test_every_signature_is_verified_in_a_process_without_jax(exported: Path) -> None:
    script = (
        "import sys\n"
        "from nitro_export_tf import load_saved_model\n"
        "load_saved_model(sys.argv[1]).verify()\n"
        "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(exported)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_overwriting_replaces_the_model(exported: Path, run: nitro.Nitro) -> None:
    def export(**options: Any) -> None:
        nitro.export_model(
            run, "tf", dir=exported.parent, name="again", batch_sizes=(2,), verify=False, **options
        )

    export()
    with pytest.raises(nitro.errors.ExportError, match="exists"):
        export()
    export(overwrite=True)

    assert (exported.parent / "again" / "saved_model.pb").is_file()


def test_failed_export_leaves_nothing_behind(exported: Path, run: nitro.Nitro) -> None:
    with pytest.raises(nitro.errors.ConfigError, match="`stablehlo_version` is"):
        nitro.export_model(
            run, "tf", dir=exported.parent, name="broken", verify=False, stablehlo_version="99.0.0"
        )

    assert not list(exported.parent.glob("*broken*"))


def test_trainable_means_parameters_and_not_running_statistics(
    run: nitro.Nitro, tmp_path: Path
) -> None:
    tf = pytest.importorskip("tensorflow")
    path = nitro.export_model(
        run, "tf", dir=tmp_path, name="tuned", vjp_order=1, trainable=True, verify=False
    )

    weights = tf.saved_model.load(str(path)).weights
    frozen = {name for name, variable in weights.items() if not variable.trainable}
    assert frozen == {"norm.mean", "norm.var"}
    assert len(weights) == 8


class Rotation(nitro.Experiment):
    """Multiplies pairs of numbers, taken as complex ones, by a learned complex matrix."""

    def build_data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(16, 3, 2)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x[..., 0].copy()}, 8)}

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        model = nnx.Linear(3, 3, rngs=rngs)
        model.kernel = nnx.Param(model.kernel[...] * (1 + 1j))
        return model

    def forward(self, model: Any, *, x: Any) -> Any:
        waves = jnp.fft.ifft((x[..., 0] + 1j * x[..., 1]) @ model.kernel[...])
        return {"real": waves.real, "size": jnp.abs(waves)}

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return jnp.square(outputs["real"] - y).mean()

    def export_inputs(self) -> list[ExportSpec]:
        return [ExportSpec("x", "float32", (1, 3, 2))]

    def export_outputs(self) -> list[ExportSpec]:
        return [ExportSpec("real"), ExportSpec("size")]


def test_complex_weights_are_two_variables_each_and_give_what_numpy_gives(tmp_path: Path) -> None:
    from nitro_export_tf import load_saved_model

    options: dict[str, Any] = {"progress": False, "logger": None, "checkpointer": None}
    run = nitro.Nitro(Rotation(), run_dir=tmp_path / "run", **options).train()
    path = nitro.export_model(run, "tf", dir=tmp_path, name="m", vjp_order=1)
    model = load_saved_model(path)
    x = np.random.default_rng(1).normal(size=(4, 3, 2)).astype(np.float32)
    kernel = np.asarray(run.model.kernel[...]).astype(np.complex128)

    wanted = np.fft.ifft((x[..., 0] + 1j * x[..., 1]) @ kernel)

    np.testing.assert_allclose(model(x=x)["real"], wanted.real, atol=1e-5)
    np.testing.assert_allclose(model(x=x)["size"], np.abs(wanted), atol=1e-5)
    names = {"kernel": ["kernel.real", "kernel.imag"]}
    assert model.provenance["complex_weights"] == names
