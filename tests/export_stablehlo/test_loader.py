"""Predicting from a bundle: any number of rows, clear refusals, one compilation each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from nitro.errors import BundleError
from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_stablehlo import Bundle, StableHLOBackend, load_bundle
from nitro_export_stablehlo._programs import Programs


@pytest.fixture(scope="module")
def mlp(bundles: dict[str, Path]) -> Bundle:
    return load_bundle(bundles["mlp"])


@pytest.fixture(scope="module")
def many(bundles: dict[str, Path]) -> Bundle:
    return load_bundle(bundles["many"])


def _pixels(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 255, (rows, 16), dtype=np.uint8)


# Compiled are 1 and 32: equal to a size, between, above the largest, and none at all.
@pytest.mark.parametrize("rows", [0, 1, 7, 32, 100])
def test_any_number_of_rows_gives_what_numpy_gives(mlp, programs, mlp_reference, rows):
    pixels = _pixels(rows)

    logits = mlp(pixels=pixels)["logits"]

    assert logits.shape == (rows, 3)
    assert logits.dtype == np.float32
    # float32 sums of 16 products, against float64.
    np.testing.assert_allclose(logits, mlp_reference(programs["mlp"], pixels), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 11])
def test_several_inputs_and_outputs_keep_their_own_batch_axes(many, programs, rows):
    rng = np.random.default_rng(rows)
    tokens = rng.integers(0, 10, (rows, 6), dtype=np.int32)
    features = rng.normal(0, 1, (6, rows, 4)).astype(ml_dtypes.bfloat16)
    program = programs["many"]
    weights = [program.weights[name] for name in program.weight_names]
    expected = jax.jit(program.fn)(tokens, features, *weights)

    outputs = many(tokens=tokens, features=features)

    assert list(outputs) == ["scores", "accept", "mixed"]
    for got, wanted in zip(outputs.values(), expected, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        # bfloat16 has 8 bits; XLA may fuse differently for another size.
        np.testing.assert_allclose(
            got.astype(np.float32), np.asarray(wanted, np.float32), atol=3e-2
        )


def test_bundle_shows_its_name_and_edge(mlp):
    assert repr(mlp) == "<Bundle mlp, pixels: u8 (n, 16) → logits: f32 (n, 3)>"


def test_filling_up_repeats_the_last_row(mlp, monkeypatch):
    seen = []
    get = Programs.get

    def spying(self, *sizes):
        program = get(self, *sizes)
        return lambda *args: (seen.append(np.asarray(args[0])), program(*args))[1]

    monkeypatch.setattr(Programs, "get", spying)
    pixels = _pixels(7)

    mlp(pixels=pixels)

    assert [part.shape for part in seen] == [(32, 16)]
    np.testing.assert_array_equal(seen[0][:7], pixels)
    np.testing.assert_array_equal(seen[0][7:], np.repeat(pixels[-1:], 25, axis=0))


def test_an_array_on_the_device_reaches_the_program_itself(mlp, monkeypatch):
    seen = []
    get = Programs.get

    def spying(self, *sizes):
        program = get(self, *sizes)
        return lambda *args: (seen.append(args[0]), program(*args))[1]

    monkeypatch.setattr(Programs, "get", spying)
    pixels = jax.device_put(_pixels(32))

    mlp(pixels=pixels)

    assert seen[0] is pixels


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "The input `pixels` is missing"),
        ({"pixel": _pixels(1)}, r"no input `pixel`[\s\S]*did you mean `pixels`"),
        ({"pixels": _pixels(1), "x": _pixels(1)}, r"no input `x`[\s\S]*`pixels`"),
        ({"pixels": _pixels(1).astype(np.float32)}, r"`pixels` has the dtype float32[\s\S]*uint8"),
        ({"pixels": _pixels(1)[:, :8]}, r"`pixels` has the shape \(1, 8\)[\s\S]*\(rows, 16\)"),
        (
            {"pixels": _pixels(1)[0]},
            r"`pixels` has the shape \(16,\)[\s\S]*one row, pixels=np\.expand_dims\(x, 0\)",
        ),
        ({"pixels": [[1] * 16]}, r"`pixels` is a list[\s\S]*np\.asarray\(\.\.\., np\.uint8\)"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_name(mlp, inputs, words):
    with pytest.raises(BundleError, match=words):
        mlp(**inputs)


def test_inputs_without_names_are_refused_with_the_call_to_write(mlp):
    pixels = np.zeros((1, 16), np.uint8)
    with pytest.raises(BundleError, match=r"called with a dict[\s\S]*bundle\(pixels=\.\.\.\)"):
        mlp({"pixels": pixels})


def test_inputs_that_disagree_about_the_rows_are_refused(many):
    tokens = np.zeros((2, 6), np.int32)
    features = np.zeros((6, 3, 4), ml_dtypes.bfloat16)

    with pytest.raises(BundleError, match="`tokens` has 2, `features` has 3"):
        many(tokens=tokens, features=features)


def test_two_threads_never_compile_the_same_program_twice(bundles, monkeypatch):
    bundle = load_bundle(bundles["mlp"])
    compiled = []
    compile_ = Programs._compile
    monkeypatch.setattr(
        Programs, "_compile", lambda self, *key: (compiled.append(key), compile_(self, *key))[1]
    )
    barrier = threading.Barrier(4)
    failures = []

    def predict():
        barrier.wait()
        try:
            bundle(pixels=_pixels(1))
        except BundleError as error:
            failures.append(error)

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    assert compiled == [(1, ())]


def test_warmup_compiles_every_size_and_nothing_later(bundles, monkeypatch):
    bundle = load_bundle(bundles["mlp"]).warmup()
    monkeypatch.setattr(Programs, "_compile", lambda *_: pytest.fail("compiled again"))

    for rows in (1, 7, 32, 100):
        bundle(pixels=_pixels(rows))


def test_other_weights_share_the_programs(mlp, programs, mlp_reference, monkeypatch):
    mlp.warmup()
    monkeypatch.setattr(Programs, "_compile", lambda *_: pytest.fail("compiled again"))
    # Turned around: a square matrix put in the wrong way round would show.
    changed = {**programs["mlp"].weights}
    changed["dense1.kernel"] = changed["dense1.kernel"].T * 0.5
    pixels = _pixels(5)

    logits = mlp.with_weights(changed)(pixels=pixels)["logits"]

    weights = dict(programs["mlp"].weights)
    program = type(programs["mlp"])(**{**_fields(programs["mlp"]), "weights": changed})
    np.testing.assert_allclose(logits, mlp_reference(program, pixels), atol=1e-6)
    assert weights["dense1.kernel"] is programs["mlp"].weights["dense1.kernel"]


def _fields(program):
    names = [
        "name",
        "fn",
        "inputs",
        "outputs",
        "batch_sizes",
        "golden",
        "provenance",
        "working_tree_patch",
    ]
    return {name: getattr(program, name) for name in names}


def test_weights_stay_when_the_caller_writes_to_the_arrays(mlp, programs, mlp_reference):
    # JAX takes over the memory of arrays that start at a multiple of 64 bytes.
    weights = {name: _aligned(value) for name, value in programs["mlp"].weights.items()}
    bundle = mlp.with_weights(weights)

    for array in weights.values():
        array[...] = 0

    expected = mlp_reference(programs["mlp"], _pixels(32))
    np.testing.assert_allclose(bundle(pixels=_pixels(32))["logits"], expected, atol=1e-6)


def test_weights_stay_when_their_file_ends_early(tmp_path, warm_python):
    weights = {name: np.full(4096, i, np.float32) for i, name in enumerate(("a", "b", "c"))}
    spec = ExportSpec("x", "float32", (1,))
    program = ExportProgram(
        name="sum",
        fn=lambda x, a, b, c: (x + a.sum() + b.sum() + c.sum(),),
        inputs=(spec,),
        outputs=(ExportSpec("y", "float32", (1,)),),
        weights=weights,
        batch_sizes=(1,),
        golden=Golden(inputs={}, outputs={}),
        provenance={},
    )
    StableHLOBackend().write(program, tmp_path)
    # A process of its own: reading past the end of a mapped file kills it.
    code = (
        "import sys, numpy as np; from nitro_export_stablehlo import load_bundle\n"
        "bundle = load_bundle(sys.argv[1])\n"
        "open(sys.argv[1] + '/weights.safetensors', 'wb').close()\n"
        "print(bundle(x=np.ones(1, np.float32))['y'].item())"
    )

    done = warm_python.run("-c", code, tmp_path, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, str(1.0 + 3 * 4096)), done.stderr


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 bytes."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("scale"), "weight `scale` is missing"),
        (
            lambda w: w.update(scales=np.float32(1)),
            r"no weight `scales`[\s\S]*did you mean `scale`",
        ),
        (
            lambda w: w.update({"dense2.kernel": np.zeros((3, 16), np.float32)}),
            r"`dense2.kernel` is float32 of shape \(3, 16\)[\s\S]*\(16, 3\)",
        ),
        (
            lambda w: w.update({"dense1.bias": np.zeros(16, np.float64)}),
            r"`dense1.bias` is float64[\s\S]*float32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(mlp, programs, change, words):
    weights = dict(programs["mlp"].weights)
    change(weights)

    with pytest.raises(BundleError, match=words):
        mlp.with_weights(weights)


def test_the_bundle_says_what_it_takes(mlp):
    assert mlp.name == "mlp"
    assert mlp.batch_sizes == (1, 32)
    assert [str(spec) for spec in mlp.inputs] == ["pixels: u8 (n, 16)"]
    assert [str(spec) for spec in mlp.outputs] == ["logits: f32 (n, 3)"]
    assert mlp.provenance["config"] == {"width": 16}
    assert list(mlp.weights) == ["dense1.bias", "dense1.kernel", "dense2.kernel", "scale"]


def test_a_missing_device_is_refused_with_those_that_fit(bundles):
    with pytest.raises(BundleError, match=r'no device \'tpu\'[\s\S]*device="cpu"'):
        load_bundle(bundles["mlp"], device="tpu")


def test_a_platform_it_was_not_lowered_for_is_refused(copy_bundle: Callable[..., Path]):
    path = copy_bundle("mlp", edit_index=lambda index: index.update(platforms=["tpu"]))

    with pytest.raises(BundleError, match="lowered for tpu"):
        load_bundle(path)


def test_a_path_without_a_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError, match="not there"):
        load_bundle(tmp_path / "nothing")
    with pytest.raises(
        BundleError, match=r"`nitro\.json` cannot be opened[\s\S]*pass the directory that `export_m"
    ):
        load_bundle(tmp_path)
