"""What `nitro-serve repository` writes, and how Triton is started on it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("nitro_serve", reason="needs nitro-serve: uv sync --group serve")
import nitro.testing
from nitro.errors import BundleError, ConfigError, MissingPackageError
from nitro.export import ExportSpec
from nitro_export_stablehlo import load_bundle
from nitro_serve import add_bundle, add_onnx
from nitro_serve._cli import app

BEST = """
import numpy as np

def postprocess(outputs):
    return {"best": outputs["logits"].argmax(-1).astype(np.int32)[:, None]}
"""


def _config(model) -> str:
    return (model / "config.pbtxt").read_text()


def test_a_model_has_its_interface_its_sizes_and_its_bundle(bundles, tmp_path):
    version = add_bundle(bundles / "mlp", tmp_path, max_batch_size=64, queue_delay_us=200)

    assert version == tmp_path / "mlp" / "1"
    assert (version / "model.py").is_file()
    assert load_bundle(version / "mlp").name == "mlp"
    assert _config(tmp_path / "mlp") == (
        'name: "mlp"\n'
        'backend: "python"\n'
        "max_batch_size: 64\n"
        'input [ { name: "pixels" data_type: TYPE_UINT8 dims: [16] } ]\n'
        'output [ { name: "logits" data_type: TYPE_FP32 dims: [3] } ]\n'
        "version_policy { latest { num_versions: 1 } }\n"
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
        "dynamic_batching { preferred_batch_size: [4, 16] max_queue_delay_microseconds: 200 }\n"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp"]


def test_the_configuration_is_read_by_protobuf(bundles, tmp_path):
    text_format = pytest.importorskip("google.protobuf.text_format")
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    add_bundle(bundles / "sideways", tmp_path)

    config = text_format.Parse(_config(tmp_path / "sideways"), messages.ModelConfig())

    # Triton joins along the first axis only, and this bundle's rows are along the second.
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [6, -1, 4]
    assert list(config.output[1].dims) == [-1]
    assert not config.HasField("dynamic_batching")


def test_the_next_bundle_of_a_name_is_the_next_version(bundles, tmp_path, write_bundle):
    add_bundle(bundles / "mlp", tmp_path / "models")
    other = write_bundle(tmp_path / "new", seed=1)

    version = add_bundle(other, tmp_path / "models", serves_all_versions=True)

    assert version.name == "2"
    assert "version_policy { all { } }" in _config(tmp_path / "models" / "mlp")
    weights = [load_bundle(tmp_path / "models" / "mlp" / n / "mlp").weights["first"] for n in "12"]
    assert np.abs(weights[0] - weights[1]).max() > 0.1


def test_a_version_that_clients_could_not_call_is_refused(bundles, tmp_path, make_mlp, write):
    add_bundle(bundles / "mlp", tmp_path / "models")
    program = dataclasses.replace(
        make_mlp(), outputs=(ExportSpec("scores", "float32", (1, 3)),), _exported={}
    )
    golden = dataclasses.replace(
        program.golden, outputs={"scores": program.golden.outputs["logits"]}
    )
    other = write(dataclasses.replace(program, golden=golden), tmp_path / "new")

    with pytest.raises(BundleError, match=r"`scores: f32 \(n, 3\)`.*`logits: f32 \(n, 3\)`"):
        add_bundle(other, tmp_path / "models")

    assert [p.name for p in (tmp_path / "models" / "mlp").iterdir() if p.is_dir()] == ["1"]


def test_post_processing_is_served_where_it_is_asked_for(tmp_path, make_mlp, write):
    best = ExportSpec("best", "int32", (1, 1))
    program = dataclasses.replace(make_mlp(), postprocess=BEST, client_outputs=(best,))
    bundle = write(program, tmp_path)

    add_bundle(bundle, tmp_path / "plain")
    add_bundle(bundle, tmp_path / "post", postprocess=True)

    assert 'name: "logits"' in _config(tmp_path / "plain" / "mlp")
    assert 'output [ { name: "best" data_type: TYPE_INT32 dims: [1] } ]' in _config(
        tmp_path / "post" / "mlp"
    )
    assert 'key: "postprocess"' in _config(tmp_path / "post" / "mlp")


def test_labels_belong_to_an_output(bundles, tmp_path):
    (tmp_path / "classes.txt").write_text("cat\ndog\nbird\n")
    add_bundle(bundles / "mlp", tmp_path / "m", labels={"logits": tmp_path / "classes.txt"})

    assert 'label_filename: "logits.labels.txt"' in _config(tmp_path / "m" / "mlp")
    assert (tmp_path / "m" / "mlp" / "logits.labels.txt").read_text() == "cat\ndog\nbird\n"
    with pytest.raises(ConfigError, match="`scores`, which is not an output of `mlp`"):
        add_bundle(bundles / "mlp", tmp_path / "m", labels={"scores": tmp_path / "classes.txt"})


def test_a_damaged_bundle_is_not_added(tmp_path, write_bundle):
    bundle = write_bundle(tmp_path)
    (bundle / "golden.safetensors").write_bytes(b"x")

    with pytest.raises(BundleError, match="golden"):
        add_bundle(bundle, tmp_path / "models")

    assert not (tmp_path / "models").exists()


def test_an_onnx_model_gets_a_configuration_and_no_code(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs onnx: uv sync --group serve")
    free, fixed = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 4])
        for name in ("x", "y")
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [free], [fixed]
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "relu.onnx")

    version = add_onnx(tmp_path / "relu.onnx", tmp_path / "models", max_batch_size=16)

    assert sorted(p.name for p in version.iterdir()) == ["model.onnx"]
    assert 'backend: "onnxruntime"\nmax_batch_size: 16\n' in _config(version.parent)


def test_what_is_no_onnx_model_is_refused(tmp_path):
    pytest.importorskip("onnx", reason="needs onnx: uv sync --group serve")
    (tmp_path / "x.onnx").write_bytes(b"\xff\xff\xff")

    with pytest.raises(BundleError, match=r"x\.onnx` cannot be read as an ONNX model"):
        add_onnx(tmp_path / "x.onnx", tmp_path / "models")


def test_the_backend_passes_the_conformance_kit():
    assert nitro.testing.check_backend("triton")


def test_a_dry_run_prints_what_would_be_started(bundles, tmp_path):
    pytest.importorskip("pytriton", reason="needs nvidia-pytriton: uv sync --group serve")
    add_bundle(bundles / "mlp", tmp_path)

    result = CliRunner().invoke(app, ["run", str(tmp_path), "--dry-run", "--log-verbose=1"])

    assert result.exit_code == 0
    assert f"--model-repository={tmp_path}" in result.output
    assert "--log-verbose=1" in result.output
    assert "LD_LIBRARY_PATH=" in result.output


def test_without_triton_the_message_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    result = CliRunner().invoke(app, ["run", str(tmp_path), "--dry-run"])

    assert isinstance(result.exception, MissingPackageError)
    assert "pip install --no-deps nvidia-pytriton" in str(result.exception)


def test_a_repository_that_is_not_there_is_named(tmp_path):
    result = CliRunner().invoke(app, ["run", str(tmp_path / "nowhere"), "--dry-run"])

    assert isinstance(result.exception, ConfigError)
    assert "nitro-serve repository BUNDLE --to" in str(result.exception)
