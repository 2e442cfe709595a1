"""Derivatives, platforms, versions, foreign calls, and what ships beside the programs."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import yaml

from nitro.errors import BundleError, ConfigError
from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_stablehlo import StableHLOBackend, load_bundle
from nitro_export_stablehlo._programs import read_exported
from nitro_export_stablehlo._verify import verify_bundle

LETTERS = """
import numpy as np

def postprocess(outputs):
    return {"label": np.array(list("abc"))[outputs["logits"].argmax(-1)]}
"""


def _write(folder: Path, program: ExportProgram, **options: Any):
    path = folder / program.name
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of custom calls
        StableHLOBackend().write(program, path, **options)
    return load_bundle(path)


def _mse(outputs, wanted):
    return ((outputs["logits"] - wanted) ** 2).mean()


@pytest.mark.parametrize("rows", [32, 7])
def test_fifty_steps_from_the_artifact_alone_match_the_original(programs, tmp_path, rows):
    program = dataclasses.replace(programs["mlp"], vjp_order=1, dynamic_batch=True, _exported={})
    bundle = _write(tmp_path, program)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (rows, 16), dtype=np.uint8)
    wanted = rng.normal(size=(rows, 3)).astype(np.float32)
    names = program.weight_names

    def original(weights):
        (logits,) = program.fn(pixels, *(weights[name] for name in names))
        return _mse({"logits": logits}, wanted)

    ours, theirs = jax.jit(bundle.grad(_mse)), jax.jit(jax.grad(original))
    a = b = {name: jnp.asarray(value) for name, value in program.weights.items()}
    for _ in range(50):
        a = jax.tree.map(lambda w, g: w - 0.1 * g, a, ours(a, {"pixels": pixels}, wanted))
        b = jax.tree.map(lambda w, g: w - 0.1 * g, b, theirs(b))

    for name in names:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5)
        assert not np.allclose(a[name], program.weights[name], atol=1e-3)


def test_some_weights_can_be_trained_and_the_others_stay(programs, tmp_path):
    bundle = _write(tmp_path, dataclasses.replace(programs["mlp"], vjp_order=1, _exported={}))
    pixels, wanted = np.ones((1, 16), np.uint8), np.zeros((1, 3), np.float32)

    grads = bundle.grad(_mse)({"scale": bundle.weights["scale"]}, {"pixels": pixels}, wanted)

    assert list(grads) == ["scale"]
    tuned = bundle.apply({"scale": jnp.zeros(())}, pixels=pixels)
    np.testing.assert_array_equal(tuned["logits"], wanted)


def test_a_bundle_without_a_derivative_says_how_to_get_one(bundles):
    bundle = load_bundle(bundles["mlp"])

    with pytest.raises(BundleError, match=r"without a derivative[\s\S]*vjp_order=1"):
        bundle.grad(_mse)
    with pytest.raises(BundleError, match=r"has 5 rows|have 5 rows"):
        bundle.apply(pixels=np.ones((5, 16), np.uint8))


def test_apply_composes_with_jit(bundles):
    bundle = load_bundle(bundles["mlp"])
    pixels = np.arange(16, dtype=np.uint8)[None]

    fused = jax.jit(lambda x: bundle.apply(pixels=x)["logits"].argmax(-1))(pixels)

    assert fused == bundle(pixels=pixels)["logits"].argmax(-1)


def test_several_platforms_are_lowered_without_their_hardware(programs, tmp_path):
    program = dataclasses.replace(programs["mlp"], platforms=("cpu", "cuda", "tpu"), _exported={})
    bundle = _write(tmp_path, program)
    pixels = np.ones((3, 16), np.uint8)

    alone = load_bundle(_write(tmp_path / "one", programs["mlp"]).path)

    np.testing.assert_allclose(bundle(pixels=pixels)["logits"], alone(pixels=pixels)["logits"])
    # Readers outside JAX get a program for the first platform, without a platform argument.
    server = (bundle.path / "model.b1.mlir").read_bytes()
    assert server == (alone.path / "model.b1.mlir").read_bytes()
    assert verify_bundle(bundle.path).violations == []


def test_another_platform_refuses_to_load_here(programs, tmp_path):
    program = dataclasses.replace(programs["mlp"], platforms=("cuda",), _exported={})
    path = tmp_path / "mlp"
    path.mkdir()
    StableHLOBackend().write(program, path)

    with pytest.raises(BundleError, match=r"lowered for cuda[\s\S]*device of platform cuda"):
        load_bundle(path)


@pytest.mark.parametrize("version", [9, 10])
def test_an_older_calling_convention_can_be_written(programs, tmp_path, version):
    program = dataclasses.replace(programs["mlp"], _exported={})
    bundle = _write(tmp_path, program, calling_convention_version=version)

    data = (bundle.path / "jax/model.b1.jax_export").read_bytes()
    assert read_exported(data, file="x").calling_convention_version == version
    assert bundle(pixels=np.ones((1, 16), np.uint8))["logits"].shape == (1, 3)


def test_a_calling_convention_that_jax_cannot_write_is_refused(programs, tmp_path):
    with pytest.raises(ConfigError, match=r"`calling_convention_version` is 3[\s\S]*from 9 to"):
        StableHLOBackend().write(programs["mlp"], tmp_path, calling_convention_version=3)


def _one(fn, spec, weights, output, **changes):
    x = np.ones(spec.fixed_sizes(4, {}), spec.numpy_dtype)
    (result,) = jax.jit(fn)(x, *(weights[n] for n in sorted(weights)))
    return ExportProgram(
        name="one",
        fn=fn,
        inputs=(spec,),
        outputs=(output,),
        weights=weights,
        batch_sizes=(1, 4),
        golden=Golden(inputs={spec.name: x}, outputs={output.name: np.asarray(result)}),
        provenance={},
        **changes,
    )


def test_a_foreign_call_is_let_through_by_name(tmp_path):
    # Known to JAX, but not among the targets that it promises to keep.
    def fn(x):
        return (jax.ffi.ffi_call("nobody_knows_it", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),)

    program = ExportProgram(
        name="foreign",
        fn=fn,
        inputs=(ExportSpec("x", "float32", (1, 2)),),
        outputs=(ExportSpec("y", "float32", (1, 2)),),
        weights={},
        batch_sizes=(1,),
        golden=Golden(inputs={"x": np.ones((1, 2), np.float32)}, outputs={}),
        provenance={},
        platforms=("cuda",),
        custom_calls=("nobody_knows_it",),
    )
    path = tmp_path / "foreign"
    path.mkdir()

    with pytest.warns(UserWarning, match="calls nobody_knows_it, which only a runtime"):
        StableHLOBackend().write(program, path)

    manifest = yaml.safe_load((path / "manifest.yaml").read_text())
    assert manifest["provenance"]["custom_calls"] == ["nobody_knows_it"]


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["uint8", "bool", "int64", "bfloat16", "float32"])
def test_every_dtype_and_rank_comes_back(tmp_path, rank, dtype):
    spec = ExportSpec("x", dtype, (1, 2, 3, 2, 1)[:rank])
    output = ExportSpec("y", dtype, spec.shape)
    with jax.enable_x64(dtype == "int64"):
        program = _one(lambda x: (x[::-1][::-1],), spec, {}, output, dynamic_batch=rank == 2)
    bundle = _write(tmp_path, program)
    sizes = spec.fixed_sizes(3, {})
    x = np.arange(np.prod(sizes)).reshape(sizes).astype(spec.numpy_dtype)

    got = bundle(x=x)["y"]

    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, x)


def test_weights_in_bfloat16_are_stored_so_and_allow_for_its_rounding(tmp_path):
    weights = {"w": np.random.default_rng(0).normal(size=(8, 3)).astype(ml_dtypes.bfloat16)}
    spec, output = ExportSpec("x", "float32", (1, 8)), ExportSpec("y", "float32", (1, 3))
    program = _one(
        lambda x, w: ((x.astype(w.dtype) @ w).astype(np.float32),), spec, weights, output, rtol=0.06
    )
    bundle = _write(tmp_path, program)

    assert bundle.weights["w"].dtype == ml_dtypes.bfloat16
    assert verify_bundle(bundle.path).violations == []


def _told(programs, **changes):
    label = ExportSpec("label", "uint8", (1, 1), axes=("batch", "characters"))
    changes = {"postprocess": LETTERS, "client_outputs": (label,), **changes}
    return dataclasses.replace(programs["mlp"], **changes)


def test_the_postprocess_runs_only_when_it_is_asked_for(programs, tmp_path):
    marker = tmp_path / "ran"
    source = f"open({str(marker)!r}, 'w').close()\n" + LETTERS
    bundle = _write(tmp_path, _told(programs, postprocess=source))

    outputs = bundle(pixels=np.ones((2, 16), np.uint8))
    assert not marker.exists()
    labels = bundle.load_postprocess()(outputs)["label"]

    assert marker.exists()
    assert set(labels) <= set("abc")
    assert [spec.name for spec in bundle.client_outputs] == ["label"]
    assert [spec.name for spec in bundle.outputs] == ["logits"]


def test_a_changed_postprocess_is_not_run(programs, tmp_path):
    bundle = _write(tmp_path, _told(programs))
    with (bundle.path / "postprocess.py").open("a") as file:
        file.write("\nraise SystemExit\n")

    with pytest.raises(BundleError, match=r"`postprocess\.py` has changed since the export"):
        bundle.load_postprocess()


def test_a_bundle_without_a_postprocess_says_so(bundles):
    with pytest.raises(BundleError, match="an `export_postprocess` hook"):
        load_bundle(bundles["mlp"]).load_postprocess()


def test_client_lists_are_for_the_server_only_beside_a_model_jl(programs, tmp_path):
    julia = 'register_model("mlp"; postprocess = identity)'

    alone = _write(tmp_path / "a", _told(programs))
    beside = _write(tmp_path / "b", _told(programs), model_jl=julia, description="Digits.")

    manifests = [yaml.safe_load((b.path / "manifest.yaml").read_text()) for b in (alone, beside)]
    assert "client_outputs" not in manifests[0]
    assert [spec["name"] for spec in manifests[1]["client_outputs"]] == ["label"]
    assert manifests[1]["description"] == "Digits."
    assert (beside.path / "model.jl").read_text() == julia
    assert verify_bundle(beside.path).violations == []


def test_julia_code_that_registers_no_model_is_refused(programs, tmp_path):
    with pytest.raises(ConfigError, match=r"never calls `register_model`"):
        StableHLOBackend().write(programs["mlp"], tmp_path, model_jl="x = 1")
    with pytest.raises(ConfigError, match=r"nope\.jl`, which is no file"):
        StableHLOBackend().write(programs["mlp"], tmp_path, model_jl=tmp_path / "nope.jl")
    with pytest.raises(ConfigError, match="`description` is 3"):
        StableHLOBackend().write(programs["mlp"], tmp_path, description=3)  # pyright: ignore[reportArgumentType] - what is tested


def test_the_differences_of_the_export_are_kept(programs, tmp_path):
    bundle = _write(tmp_path, programs["mlp"])
    found = {"rtol": 1e-5, "outputs": {"logits": {"max_abs": 1e-7, "max_rel": 1e-7}}}

    StableHLOBackend().record_verification(bundle.path, found)

    assert bundle.verification is None
    assert load_bundle(bundle.path).verification == found
