"""What is written: the files, their bytes, and what is refused before anything is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nitro.errors import ConfigError, ExportError, MissingPackageError
from nitro.export import ExportSpec, Golden
from nitro.hooks import ExportBackend
from nitro_export_stablehlo import StableHLOBackend, load_bundle

PROVENANCE = {"manifest.yaml", "working_tree.patch", "nitro.json"}


def _files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_it_is_a_backend():
    assert isinstance(StableHLOBackend(), ExportBackend)


def test_a_bundle_has_these_files(bundles):
    assert set(_files(bundles["mlp"])) == {
        "golden.safetensors",
        "jax/model.b1.jax_export",
        "jax/model.b32.jax_export",
        "manifest.yaml",
        "model.b1.mlir",
        "model.b32.mlir",
        "nitro.json",
        "weights.safetensors",
        "working_tree.patch",
    }


def test_every_file_has_its_digest(bundles):
    files = _files(bundles["mlp"])
    index = json.loads(files.pop("nitro.json"))

    for name, data in files.items():
        assert index["files"][name] == {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_bytes": len(data),
        }


def test_two_exports_of_one_program_have_the_same_bytes(bundles, make_programs, tmp_path):
    for name, program in make_programs().items():
        (tmp_path / name).mkdir()
        StableHLOBackend().write(program, tmp_path / name)

        again, before = _files(tmp_path / name), _files(bundles[name])

        assert set(again) == set(before)
        for file in set(again) - PROVENANCE:
            assert again[file] == before[file], file


def test_only_the_provenance_holds_a_path(bundles):
    index = json.loads((bundles["mlp"] / "nitro.json").read_text())
    roots = [str(Path(__file__).parents[2]), sys.prefix, str(Path.home()), "conftest"]

    for file, data in _files(bundles["mlp"]).items():
        if file not in {"manifest.yaml", "working_tree.patch"}:
            assert not [root for root in roots if root.encode() in data], file
    assert "exported_at" not in index


def test_the_patch_is_kept_byte_for_byte(bundles, programs):
    patch = (bundles["mlp"] / "working_tree.patch").read_bytes()

    assert patch == programs["mlp"].working_tree_patch
    assert load_bundle(bundles["mlp"]).provenance["git_diff_file"] == "working_tree.patch"
    assert not (bundles["many"] / "working_tree.patch").exists()


def test_the_provenance_says_what_wrote_it(bundles):
    provenance = load_bundle(bundles["many"]).provenance

    assert provenance["source_framework"] == "jax"
    assert provenance["jax_version"] == jax.__version__
    assert provenance["stablehlo_version"] == "1.13.0"
    assert provenance["exported_at"].endswith("Z")


def test_another_version_can_be_chosen(programs, tmp_path):
    StableHLOBackend().write(programs["mlp"], tmp_path, stablehlo_version="1.8.0")

    assert b"StableHLO_v1.8.0" in (tmp_path / "model.b1.mlir").read_bytes()[:32]


def test_an_unknown_option_is_refused_before_anything_is_written(programs, tmp_path):
    with pytest.raises(ConfigError, match=r"no option `stablehlo`[\s\S]*`stablehlo_version`"):
        StableHLOBackend().write(programs["mlp"], tmp_path, stablehlo="1.13.0")

    assert not list(tmp_path.iterdir())


def test_missing_flatbuffers_is_one_clear_error(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "nitro_export_stablehlo._flatbuffers.importlib.util.find_spec", lambda _: None
    )

    with pytest.raises(MissingPackageError, match=r"`flatbuffers`[\s\S]*pip install flatbuffers"):
        StableHLOBackend().write(programs["mlp"], tmp_path)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"outputs": (ExportSpec("logits", "float32", (1, 4)),)},
            r"the output `logits` is tensor<1x3xf32>[\s\S]*tensor<1x4xf32>",
        ),
        (
            {"outputs": (ExportSpec("logits", "float16", (1, 3)),)},
            r"the output `logits` is tensor<1x3xf32>[\s\S]*tensor<1x3xf16>",
        ),
        (
            {
                "outputs": (
                    ExportSpec("logits", "float32", (1, 3)),
                    ExportSpec("more", "float32", (1, 3)),
                )
            },
            r"has 1 results[\s\S]*2: ",
        ),
        (
            {"inputs": (ExportSpec("pixels", "float8_e5m2", (1, 16)),)},
            "`pixels` has the dtype float8_e5m2",
        ),
    ],
)
def test_a_promise_that_the_program_does_not_keep_is_refused(programs, tmp_path, changes, words):
    program = dataclasses.replace(programs["mlp"], **changes, _exported={})

    with pytest.raises(ExportError, match=words):
        StableHLOBackend().write(program, tmp_path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.full((16, 16), np.nan, np.float32), "`dense1.kernel` holds a NaN"),
        (np.zeros((16, 16), np.complex64), "`dense1.kernel` has the dtype complex64"),
    ],
)
def test_a_weight_that_a_bundle_cannot_hold_is_refused_by_name(programs, tmp_path, value, words):
    weights = {**programs["mlp"].weights, "dense1.kernel": value}
    program = dataclasses.replace(programs["mlp"], weights=weights, _exported={})

    with pytest.raises(ExportError, match=words):
        StableHLOBackend().write(program, tmp_path)

    assert not list(tmp_path.iterdir())


def test_lapack_calls_are_recorded_and_warned_of(programs, tmp_path):
    inputs = {"x": np.eye(3, dtype=np.float32)[None] * 4}
    program = dataclasses.replace(
        programs["mlp"],
        fn=lambda x: (jnp.linalg.cholesky(x),),
        inputs=(ExportSpec("x", "float32", (1, 3, 3)),),
        outputs=(ExportSpec("y", "float32", (1, 3, 3)),),
        weights={},
        golden=Golden(inputs=inputs, outputs={"y": inputs["x"] / 2}),
        _exported={},
    )

    with pytest.warns(UserWarning, match="lapack_spotrf_ffi.*IREE and GPU servers cannot"):
        StableHLOBackend().write(program, tmp_path)

    bundle = load_bundle(tmp_path)
    assert bundle.provenance["custom_calls"] == ["lapack_spotrf_ffi"]
    np.testing.assert_allclose(bundle(**inputs)["y"], inputs["x"] / 2)


def test_64_bit_inputs_and_weights_survive(tmp_path, programs):
    table = np.array([1.0, 1e-12, -2.0])

    with jax.enable_x64(True):
        program = dataclasses.replace(
            programs["mlp"],
            fn=lambda i, t: (t[i] + 1, i * 2),
            inputs=(ExportSpec("i", "int64", (1,)),),
            outputs=(ExportSpec("y", "float64", (1,)), ExportSpec("twice", "int64", (1,))),
            weights={"table": table},
            golden=Golden(inputs={}, outputs={}),
            _exported={},
        )
        StableHLOBackend().write(program, tmp_path)
    outputs = load_bundle(tmp_path)(i=np.array([1, 2, 0, 1, 2]))

    np.testing.assert_array_equal(outputs["y"], table[[1, 2, 0, 1, 2]] + 1)
    assert outputs["twice"].dtype == np.int64
