"""What a SavedModel holds, and that every reader gets what the model gives."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nitro.errors import BundleError, ConfigError, ExportError, NitroWarning
from nitro.export import ExportProgram, ExportSpec
from nitro_export_tf import IOSpec, SavedModel, SavedModelBackend, load_saved_model
from nitro_export_tf._tensorflow import installed_target

pytestmark = pytest.mark.tf

Make = Callable[..., ExportProgram]
Write = Callable[..., Path]
Models = Callable[[str], Path]
Loaded = Callable[[str], SavedModel]

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # XLA sums in another order for another size


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


def _reference(program: ExportProgram, *inputs: np.ndarray) -> dict[str, np.ndarray]:
    weights = [program.weights[name] for name in program.weight_names]
    results = jax.jit(program.fn)(*inputs, *weights)
    return {s.name: np.asarray(r) for s, r in zip(program.outputs, results, strict=True)}


def _pixels(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 255, (rows, 16), dtype=np.uint8)


def test_signatures_have_the_promised_names_and_shapes(models: Models, tf: Any) -> None:
    signatures = tf.saved_model.load(str(models("mlp"))).signatures

    assert sorted(signatures) == ["serving_b1", "serving_b32", "serving_default"]
    for name, rows in {"serving_b1": 1, "serving_b32": 32, "serving_default": None}.items():
        (_, inputs) = signatures[name].structured_input_signature
        assert inputs == {"pixels": tf.TensorSpec((rows, 16), tf.uint8, "pixels")}
        assert signatures[name].structured_outputs == {
            "logits": tf.TensorSpec((rows, 3), tf.float32, "logits"),
            "digit": tf.TensorSpec((rows,), tf.int32, "digit"),
        }


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_every_signature_gives_what_the_model_gives(
    rows: int, loaded: Loaded, programs: dict[str, ExportProgram]
) -> None:
    model, pixels = loaded("mlp"), _pixels(rows)
    fitting = [s for s in model.signatures if s in ("serving_default", f"serving_b{rows}")]

    for signature in fitting:
        outputs = model.run(signature, {"pixels": pixels})

        wanted = _reference(programs["mlp"], pixels)
        np.testing.assert_allclose(outputs["logits"], wanted["logits"], **TOLERANCE)
        np.testing.assert_array_equal(outputs["digit"], wanted["digit"])


@pytest.mark.parametrize("name", ["mlp", "many", "fixed", "trainable"])
def test_golden_outputs_come_back_from_every_signature(name: str, loaded: Loaded) -> None:
    loaded(name).verify()


def test_weights_are_named_variables_and_no_constants(
    models: Models, programs: dict[str, ExportProgram], tf: Any
) -> None:
    weights = tf.saved_model.load(str(models("mlp"))).weights
    graph = (models("mlp") / "saved_model.pb").read_bytes()

    assert sorted(weights) == list(programs["mlp"].weight_names)
    for name, variable in weights.items():
        assert variable.name == f"{name}:0"
        assert not variable.trainable
        np.testing.assert_array_equal(variable.numpy(), programs["mlp"].weights[name])
    assert programs["mlp"].weights["dense1.kernel"].tobytes() not in graph


def test_changed_variables_change_the_outputs(models: Models, tf: Any) -> None:
    model = tf.saved_model.load(str(models("mlp")))
    before = model.signatures["serving_default"](pixels=_pixels(3))["logits"]

    model.weights["scale"].assign(2.5)

    after = model.signatures["serving_default"](pixels=_pixels(3))["logits"]
    np.testing.assert_allclose(after, 2 * before, **TOLERANCE)


def test_specs_count_axes_from_0_and_leave_the_batch_open(loaded: Loaded) -> None:
    assert loaded("many").inputs == (
        IOSpec(name="tokens", dtype="int32", shape=(None, 6), batch_axis0=0),
        IOSpec(name="features", dtype="bfloat16", shape=(6, None, 4), batch_axis0=1),
    )
    assert str(loaded("mlp").outputs[1]) == "digit: int32 (n,)"


def test_rows_are_cut_into_fixed_sizes_where_none_fits(
    loaded: Loaded, programs: dict[str, ExportProgram]
) -> None:
    pixels = _pixels(19)

    outputs = loaded("fixed")(pixels=pixels)

    wanted = _reference(programs["fixed"], pixels)
    np.testing.assert_allclose(outputs["logits"], wanted["logits"], **TOLERANCE)
    np.testing.assert_array_equal(outputs["digit"], wanted["digit"])


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ],
)
def test_every_dtype_survives(dtype: str, program_of: Make, write: Write) -> None:
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    x = np.random.default_rng(3).integers(0, 2, (4, 3)).astype(numpy_dtype)
    program = program_of(
        lambda x, w: (x | w if x.dtype == bool else x + w,),
        {"x": x},
        ("y",),
        weights={"w": np.ones(3, numpy_dtype)},
        dynamic_batch=False,
    )

    outputs = load_saved_model(write(program))(x=x)

    assert outputs["y"].dtype == numpy_dtype
    np.testing.assert_array_equal(outputs["y"], program.golden.outputs["y"])


def test_composites_and_other_symbolic_sizes_run(program_of: Make, write: Write) -> None:
    def fn(x):
        return (jax.scipy.special.erf(jnp.sinh(x)), jax.lax.top_k(x.sum(-1), 2)[1])

    x = np.random.default_rng(4).normal(size=(4, 5, 3)).astype(np.float32)
    program = program_of(
        fn,
        {"x": x},
        ("y", "top"),
        specs=[ExportSpec("x", "float32", (1, "time", 3))],
        output_specs=[
            ExportSpec("y", "float32", (1, "time", 3)),
            ExportSpec("top", "int32", (1, 2)),
        ],
        constraints=("time >= 2",),
    )
    model = load_saved_model(write(program))

    assert model.inputs[0].shape == (None, "time", 3)
    for sizes in [(2, 7, 3), (1, 2, 3)]:
        x = np.random.default_rng(5).normal(size=sizes).astype(np.float32)
        outputs, (y, top) = model(x=x), fn(x)
        np.testing.assert_allclose(outputs["y"], y, **TOLERANCE)
        np.testing.assert_array_equal(outputs["top"], top)
    with pytest.raises(BundleError, match="time = 1 breaks the constraint `time >= 2`"):
        model(x=np.ones((1, 1, 3), np.float32))
    with pytest.raises(BundleError, match="`serving_b1` refuses the inputs"):
        model.run("serving_b1", {"x": np.ones((1, 1, 3), np.float32)})


def test_xla_compiles_the_signatures(models: Models, tf: Any) -> None:
    model = tf.saved_model.load(str(models("mlp")))
    signature = model.signatures["serving_default"]
    compiled = tf.function(lambda pixels: signature(pixels=pixels), jit_compile=True)

    outputs = compiled(tf.constant(_pixels(3)))

    np.testing.assert_allclose(
        outputs["logits"], signature(pixels=_pixels(3))["logits"], **TOLERANCE
    )


def test_keras_layer_runs_it(models: Models, loaded: Loaded, tf: Any) -> None:
    keras = pytest.importorskip("keras")
    layer = keras.layers.TFSMLayer(str(models("mlp")), call_endpoint="serving_default")

    outputs = layer(tf.constant(_pixels(3)))

    wanted = loaded("mlp")(pixels=_pixels(3))
    np.testing.assert_allclose(outputs["logits"], wanted["logits"], **TOLERANCE)
    assert len(layer.weights) == 4


def test_keras_layer_takes_several_inputs_as_a_dictionary(
    models: Models, programs: dict[str, ExportProgram], tf: Any
) -> None:
    keras = pytest.importorskip("keras")
    # Keras casts floats to the dtype of the layer.
    layer = keras.layers.TFSMLayer(str(models("many")), call_endpoint="serve", dtype="bfloat16")
    golden = programs["many"].golden

    outputs = layer({name: tf.constant(array) for name, array in golden.inputs.items()})

    np.testing.assert_array_equal(outputs["sent"], golden.outputs["sent"])


def test_saved_model_cli_prints_the_signatures(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorflow.python.tools import saved_model_cli

    for name, sizes in {"serving_default": "(-1, 16)", "serving_b32": "(32, 16)"}.items():
        command = f"saved_model_cli show --dir {models('mlp')} --tag_set serve --signature_def"
        monkeypatch.setattr(sys, "argv", [*command.split(), name])
        with pytest.raises(SystemExit) as ended:
            saved_model_cli.main()

        assert not ended.value.code
        printed = capsys.readouterr().out
        assert "inputs['pixels'] tensor_info:" in printed
        assert f"shape: {sizes}" in printed
        assert "outputs['logits'] tensor_info:" in printed


def test_serving_reads_the_warm_up_requests(models: Models, tf: Any) -> None:
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    file = models("many") / "assets.extra" / "tf_serving_warmup_requests"

    records = [
        prediction_log_pb2.PredictionLog.FromString(record.numpy()).predict_log.request
        for record in tf.data.TFRecordDataset(str(file))
    ]

    assert [record.model_spec.signature_name for record in records] == [
        *("serving_default", "serving_b2", "serving_b8")
    ]
    assert records[0].model_spec.name == "many"
    for record, rows in zip(records, (1, 2, 8), strict=True):
        tensors = {name: tf.make_ndarray(proto) for name, proto in record.inputs.items()}
        assert tensors["tokens"].shape == (rows, 6)
        assert tensors["features"].shape == (6, rows, 4)
        assert tensors["features"].dtype == ml_dtypes.bfloat16


def test_extra_assets_tell_where_it_comes_from(models: Models, tf: Any) -> None:
    extra = models("mlp") / "assets.extra"
    facts = load_saved_model(models("mlp")).provenance

    assert facts["tensorflow_version"] == tf.__version__
    assert facts["stablehlo_version"] == installed_target().stablehlo_version
    assert facts["git_diff_file"] == "assets.extra/working_tree.patch"
    assert (extra / "working_tree.patch").read_bytes() == b"diff --git a/x b/x\n"


def test_postprocess_is_left_out_with_a_warning(mlp: Make, write: Write) -> None:
    program = mlp(postprocess="def postprocess(outputs): return outputs", batch_sizes=(1,))

    with pytest.warns(NitroWarning, match="post-process of `mlp` is left out"):
        path = write(program)

    assert not list(path.rglob("*.py"))


def test_modules_for_several_platforms_run_here(mlp: Make, write: Write) -> None:
    program = mlp(platforms=("cpu", "cuda"))

    load_saved_model(write(program)).verify()


def test_module_for_a_gpu_is_written_without_one(mlp: Make, write: Write) -> None:
    model = load_saved_model(write(mlp(platforms=("cuda",))))

    with pytest.raises(Exception, match="platform CPU is not among the platforms required") as e:
        model(pixels=_pixels(1))

    assert "CUDA" in str(e.value)


def test_older_targets_can_be_written_for(mlp: Make, write: Write) -> None:
    program = mlp(dynamic_batch=False)

    path = write(program, stablehlo_version="1.8.0", call_module_version=8)

    load_saved_model(path).verify()
    versions = json.loads((path / "assets.extra" / "nitro.json").read_text())["versions"]
    assert (versions["stablehlo_version"], versions["call_module_version"]) == ("1.8.0", 8)


@pytest.mark.parametrize(
    ("option", "value"),
    [("stablehlo_version", "99.0.0"), ("stablehlo_version", "new"), ("call_module_version", 99)],
)
def test_version_that_cannot_be_written_is_refused(
    option: str, value: Any, mlp: Make, write: Write
) -> None:
    with pytest.raises(ConfigError, match=f"`{option}` is {value!r}"):
        write(mlp(), **{option: value})


def test_operation_that_the_target_lacks_is_named(program_of: Make, write: Write) -> None:
    program = program_of(lambda x: (jnp.tan(x),), {"x": np.ones((4, 2), np.float32)}, ("y",))

    with pytest.raises(ExportError, match=r"does not fit StableHLO 1.0.0.*operation `tan`"):
        write(program, stablehlo_version="1.0.0")


def test_call_that_tensorflow_lacks_is_named(program_of: Make, write: Write) -> None:
    program = program_of(
        lambda x: (jnp.linalg.cholesky(x),),
        {"x": np.stack([np.eye(3, dtype=np.float32)] * 4)},
        ("y",),
    )

    with pytest.raises(ExportError, match="for any number of rows calls `lapack_spotrf_ffi`"):
        write(program)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pixels": _pixels(2).astype(np.int32)}, r"`pixels` has the dtype int32[\s\S]*uint8"),
        ({"pixels": _pixels(2)[:, :8]}, r"`pixels` has the shape \(2, 8\)[\s\S]*\(rows, 16\)"),
        ({"pixel": _pixels(2)}, "no input `pixel`"),
        ({}, "`pixels` is missing"),
        ({"pixels": _pixels(2).tolist()}, r"`pixels` is a list[\s\S]*np\.asarray"),
    ],
)
def test_loader_refuses_inputs_that_do_not_fit(
    inputs: dict[str, Any], message: str, loaded: Loaded
) -> None:
    with pytest.raises(BundleError, match=message):
        loaded("mlp")(**inputs)


def test_a_request_of_no_rows_has_no_rows_of_answers(loaded: Loaded) -> None:
    for name in ("mlp", "fixed"):
        outputs = loaded(name)(pixels=_pixels(2)[:0])

        assert {n: a.shape for n, a in outputs.items()} == {"logits": (0, 3), "digit": (0,)}


def test_unknown_signature_lists_those_that_exist(loaded: Loaded) -> None:
    with pytest.raises(BundleError, match="no signature `serving_b2`"):
        loaded("mlp").run("serving_b2", {})


@pytest.mark.parametrize("file", ["saved_model.pb", "variables/variables.data-00000-of-00001"])
def test_damage_is_found_before_anything_is_parsed(
    file: str, models: Models, tmp_path: Path
) -> None:
    path = shutil.copytree(models("mlp"), tmp_path / "copy")
    data = bytearray((path / file).read_bytes())
    data[len(data) // 2] ^= 1
    (path / file).write_bytes(data)

    with pytest.raises(BundleError, match=f"`{file}` has changed"):
        load_saved_model(path)


def test_artifact_that_lies_fails_its_own_verification(models: Models, tmp_path: Path) -> None:
    path = shutil.copytree(models("mlp"), tmp_path / "copy")
    with np.load(path / "assets.extra" / "golden.npz") as stored:
        golden = dict(stored)
    golden["outputs.logits"] = golden["outputs.logits"] + 1
    np.savez(path / "assets.extra" / "golden.npz", **golden)
    index = json.loads((path / "assets.extra" / "nitro.json").read_text())
    del index["files"]["assets.extra/golden.npz"]
    (path / "assets.extra" / "nitro.json").write_text(json.dumps(index))

    with pytest.raises(BundleError, match="`logits` of `serving_default` differs"):
        load_saved_model(path).verify()


def test_verification_is_kept_in_the_artifact(models: Models, tmp_path: Path) -> None:
    path = shutil.copytree(models("mlp"), tmp_path / "copy")

    SavedModelBackend().record_verification(path, {"rtol": 1e-5})

    index = json.loads((path / "assets.extra" / "nitro.json").read_text())
    assert index["verification"] == {"rtol": 1e-5}
    assert load_saved_model(path).name == "mlp"


def test_tensorflow_sees_no_gpu_and_jax_goes_on(models: Models, tf: Any) -> None:
    before = jax.devices()

    models("mlp")

    assert tf.config.get_visible_devices("GPU") == []
    assert jax.devices() == before
    assert not jax.config.jax_enable_x64
    assert float(jax.jit(lambda x: x @ x)(jnp.ones(3))) == 3.0


def test_gradients_train_the_variables_as_jax_does(
    models: Models, programs: dict[str, ExportProgram], tf: Any
) -> None:
    program, model = programs["trainable"], tf.saved_model.load(str(models("trainable")))
    pixels, target = _pixels(8), np.random.default_rng(9).normal(size=(8, 3)).astype(np.float32)
    rate = 1e-3
    signature, variables = model.signatures["serving_default"], list(model.weights.values())
    assert all(variable.trainable for variable in variables)

    def loss_of(weights: list[Any]) -> Any:
        return ((program.fn(pixels, *weights)[0] - target) ** 2).mean()

    weights = [jnp.asarray(program.weights[name]) for name in program.weight_names]
    step = jax.jit(lambda w: [a - rate * g for a, g in zip(w, jax.grad(loss_of)(w), strict=True)])
    for _ in range(50):
        weights = step(weights)
        with tf.GradientTape() as tape:
            logits = signature(pixels=tf.constant(pixels))["logits"]
            loss = tf.reduce_mean((logits - target) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(rate * gradient)

    for name, wanted, variable in zip(program.weight_names, weights, variables, strict=True):
        assert np.abs(wanted - program.weights[name]).max() > 1e-4
        np.testing.assert_allclose(variable.numpy(), wanted, **TOLERANCE, err_msg=name)


def test_same_program_gives_the_same_variables_and_modules(
    programs: dict[str, ExportProgram], models: Models, write: Write
) -> None:
    first, again = models("mlp"), write(programs["mlp"])

    for file in ("variables/variables.data-00000-of-00001", "assets.extra/golden.npz"):
        assert (first / file).read_bytes() == (again / file).read_bytes()
    assert _modules(first) == _modules(again)


def _modules(path: Path) -> list[bytes]:
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    found = [n.attr["module"].s for f in functions for n in f.node_def if n.op == "XlaCallModule"]
    assert found
    return sorted(found)


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated:UserWarning")
@pytest.mark.parametrize("signature", ["serving_default", "serving_b32"])
def test_lite_rt_converts_and_runs_it(
    signature: str, program_of: Make, write: Write, tf: Any
) -> None:
    x = np.random.default_rng(6).normal(size=(32, 8, 8, 2)).astype(np.float32)
    kernel = np.random.default_rng(7).normal(size=(3, 3, 2, 4)).astype(np.float32)

    def fn(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        hidden = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
        return (jax.nn.softmax(jax.nn.relu(hidden).mean((1, 2))),)

    program = program_of(fn, {"x": x}, ("y",), weights={"kernel": kernel}, batch_sizes=(1, 32))
    converter = tf.lite.TFLiteConverter.from_saved_model(
        str(write(program)), signature_keys=[signature]
    )

    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()

    outputs = interpreter.get_tensor(result["index"])
    np.testing.assert_allclose(outputs, program.golden.outputs["y"], **TOLERANCE)


def test_lite_rt_cannot_convert_a_reduction_to_an_index_of_any_batch(
    models: Models, tf: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    converter = tf.lite.TFLiteConverter.from_saved_model(
        str(models("mlp")), signature_keys=["serving_default"]
    )

    with pytest.raises(Exception, match=r"failed to legalize operation 'mhlo\.reduce'"):
        converter.convert()


def test_loader_refuses_integers_that_the_program_would_wrap_around(
    program_of: Make, write: Write
) -> None:
    program = program_of(
        lambda ids, key: (ids.astype(jnp.int32) + 1, key + 1),
        {"ids": np.arange(4, dtype=np.int64), "key": np.arange(4, dtype=np.int64)},
        ("next", "after"),
        narrowed=("ids",),
    )
    model = load_saved_model(write(program))
    large = np.array([2**40])

    with pytest.raises(BundleError, match=r"`ids` is int64 and holds 1099511627776"):
        model(ids=large, key=large)
    assert model(ids=np.array([-5]), key=large)["next"] == [-4]
    assert model(ids=np.array([-5]), key=large)["after"] == [2**40 + 1]
    assert model.provenance["narrowed_inputs"] == ["ids"]
