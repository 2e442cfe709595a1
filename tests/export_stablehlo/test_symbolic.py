"""Bundles whose sizes a caller chooses: the batch, others, or both."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from nitro.errors import BundleError, ConfigError
from nitro.export import ExportProgram, ExportSpec, Golden
from nitro_export_stablehlo import Bundle, StableHLOBackend, load_bundle
from nitro_export_stablehlo._programs import Programs
from nitro_export_stablehlo._verify import verify_bundle

VARIANTS = [{"time": 6}, {"time": 17}]


def _fn(x, mask, w):
    h = jnp.tanh(x @ w) * mask[..., None]
    return h, h.sum(1), h[:, : h.shape[1] // 2]


def _program(**changes: Any) -> ExportProgram:
    """Sequences of any length with a mask; one output follows half the length."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(3, 4)).astype(np.float32)}
    inputs = _request(5, 6)
    outputs = [np.asarray(a) for a in jax.jit(_fn)(*inputs.values(), weights["w"])]
    fields: dict[str, Any] = {
        "name": "seq",
        "fn": _fn,
        "inputs": (
            ExportSpec("x", "float32", (1, "time", 3)),
            ExportSpec("mask", "float32", (1, "time")),
        ),
        "outputs": (
            ExportSpec("h", "float32", (1, "time", 4)),
            ExportSpec("total", "float32", (1, 4)),
            ExportSpec("half", "float32", (1, "floordiv(time, 2)", 4)),
        ),
        "weights": weights,
        "batch_sizes": (1, 4),
        "golden": Golden(
            inputs=inputs, outputs=dict(zip(("h", "total", "half"), outputs, strict=True))
        ),
        "provenance": {},
    }
    return ExportProgram(**{**fields, **changes})


def _request(rows: int, time: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 * rows + time)
    return {
        "x": rng.normal(size=(rows, time, 3)).astype(np.float32),
        "mask": rng.integers(0, 2, (rows, time)).astype(np.float32),
    }


def _write(folder, program: ExportProgram, **options: Any) -> Bundle:
    path = folder / program.name
    path.mkdir()
    StableHLOBackend().write(program, path, **options)
    return load_bundle(path)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory) -> Bundle:
    """Compiled for batches of 1 and 4, at two lengths."""
    return _write(tmp_path_factory.mktemp("fixed"), _program(), input_shapes=VARIANTS)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory) -> Bundle:
    """The same, and a program for any batch."""
    folder = tmp_path_factory.mktemp("dynamic")
    return _write(folder, _program(dynamic_batch=True), input_shapes=VARIANTS)


def _files(bundle: Bundle) -> set[str]:
    root = bundle.path
    return {str(p.relative_to(root)) for p in root.rglob("*") if "model" in p.name}


def test_each_variant_has_a_program_of_fixed_shapes(fixed):
    fixed_names = {f"model.v{i}.b{n}.mlir" for i in (0, 1) for n in (1, 4)}
    exports = {f"jax/model.v{i}.b{n}.jax_export" for i in (0, 1) for n in (1, 4)}

    assert _files(fixed) == fixed_names | exports | {f"jax/model.b{n}.jax_export" for n in (1, 4)}


def test_a_dynamic_batch_adds_one_symbolic_program(fixed, dynamic):
    both = _files(fixed) & _files(dynamic)

    assert _files(dynamic) - both == {"jax/model.jax_export"}


def test_the_manifest_marks_variable_axes_and_lists_the_variants(fixed):
    manifest = yaml.safe_load((fixed.path / "manifest.yaml").read_text())

    assert [spec["shape"] for spec in manifest["executable_inputs"]] == ["aZn", "Zn"]
    assert manifest["executable_inputs"][0]["dims"] == {"a": 3, "Z": -1}
    assert manifest["executable_outputs"][2]["dims"] == {"a": 4, "Y": -1}
    assert manifest["input_shapes"] == [{"Z": 6}, {"Z": 17}]


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
@pytest.mark.parametrize(("rows", "time"), [(1, 1), (3, 5), (8, 17), (4, 6), (2, 40)])
def test_any_batch_and_any_length_are_served(request, kind, rows, time):
    bundle, inputs = request.getfixturevalue(kind), _request(rows, time)

    got = bundle(**inputs)

    wanted = _fn(inputs["x"], inputs["mask"], bundle.weights["w"])
    for array, expected in zip(got.values(), wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


def test_a_dynamic_batch_compiles_few_sizes_for_many_requests(dynamic, monkeypatch):
    compiled = set()
    compile_ = Programs._compile
    monkeypatch.setattr(
        Programs, "_compile", lambda self, *key: (compiled.add(key), compile_(self, *key))[1]
    )

    for rows in range(1, 40):
        dynamic(**_request(rows, 9))

    assert {size for size, _ in compiled} <= {1, 2, 4, 8, 16, 32, 64}


def test_with_a_constraint_on_the_batch_no_row_is_filled_up(tmp_path):
    program = _program(
        dynamic_batch=True, batch_sizes=(2,), constraints=("b >= 2", "time <= 2*b + 40")
    )
    bundle = _write(tmp_path, program)

    assert bundle(**_request(7, 5))["h"].shape == (7, 5, 4)
    with pytest.raises(BundleError, match="b = 1 breaks the constraint `b >= 2`"):
        bundle(**_request(1, 5))
    with pytest.raises(BundleError, match=r"breaks the constraint `time <= 2\*b \+ 40`"):
        bundle(**_request(2, 45))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(mask=r["mask"][:, :4]), '"time" is 4, and 5 where time = 5'),
        (lambda r: r.update(mask=r["mask"][:2]), '"b" is 2, and 3 where b = 3'),
        (lambda r: r.update(x=r["x"][..., :2]), r"`x` has the shape \(3, 5, 2\)"),
        (lambda r: r.update(x=r["x"][0]), r"`x` has the shape \(5, 3\)[\s\S]*\(rows, time, 3\)"),
        (lambda r: r.update(x=r["x"].astype(np.float64)), "`x` has the dtype float64"),
        (lambda r: r.pop("x"), "The input `x` is missing"),
        (lambda r: r.update(x=r["x"][:, :0], mask=r["mask"][:, :0]), "`time` would be 0"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_before_the_call(fixed, change, words):
    inputs = _request(3, 5)
    change(inputs)

    with pytest.raises(BundleError, match=words):
        fixed(**inputs)


def test_an_expression_is_solved(tmp_path):
    program = dataclasses.replace(
        _program(),
        fn=lambda x, w: (x.reshape(x.shape[0], -1, 6) @ w,),
        inputs=(ExportSpec("x", "float32", (1, "2*k", 3)),),
        outputs=(ExportSpec("y", "float32", (1, "k", 2)),),
        weights={"w": np.ones((6, 2), np.float32)},
        golden=Golden(
            inputs={"x": np.ones((2, 4, 3), np.float32)},
            outputs={"y": np.full((2, 2, 2), 6, np.float32)},
        ),
        dynamic_batch=True,
    )
    bundle = _write(tmp_path, program)

    assert bundle(x=np.ones((3, 10, 3), np.float32))["y"].shape == (3, 5, 2)
    with pytest.raises(BundleError, match=r'"2\*k" cannot be 7'):
        bundle(x=np.ones((3, 7, 3), np.float32))


def test_without_input_shapes_the_golden_sizes_are_compiled(tmp_path):
    bundle = _write(tmp_path, _program())

    assert yaml.safe_load((bundle.path / "manifest.yaml").read_text())["input_shapes"] == [{"Z": 6}]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([], "entries that differ, at least one"),
        ([{"time": 6}, {"time": 6}], "entries that differ"),
        ([{"t": 6}], r"\{'t': 6\}[\s\S]*a size for each of `time`"),
        ([{"time": 0}], "a size for each of"),
        ([{"time": 41}], r"breaks the constraint `time <= 40`"),
    ],
)
def test_input_shapes_that_cannot_be_compiled_are_refused(tmp_path, shapes, words):
    with pytest.raises(ConfigError, match=words):
        _write(tmp_path, _program(constraints=("time <= 40",)), input_shapes=shapes)

    assert not list((tmp_path / "seq").iterdir())


def test_input_shapes_without_a_symbolic_size_are_refused(programs, tmp_path):
    with pytest.raises(ConfigError, match=r"no symbolic size[\s\S]*leave `input_shapes` out"):
        StableHLOBackend().write(programs["mlp"], tmp_path, input_shapes=[{"time": 3}])


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_a_symbolic_bundle_keeps_every_promise(request, kind):
    report = verify_bundle(request.getfixturevalue(kind).path)

    assert report.violations == []


def test_verify_runs_the_symbolic_program_too(dynamic, tmp_path):
    doubling = _program(dynamic_batch=True, fn=lambda x, m, w: tuple(a * 2 for a in _fn(x, m, w)))
    other = _write(tmp_path, doubling, input_shapes=VARIANTS)
    path, file = tmp_path / "honest" / "seq", "jax/model.jax_export"
    shutil.copytree(dynamic.path, path)
    shutil.copy(other.path / file, path / file)
    index, theirs = (json.loads((p / "nitro.json").read_text()) for p in (path, other.path))
    index["files"][file] = theirs["files"][file]
    (path / "nitro.json").write_text(json.dumps(index))

    violations = verify_bundle(path).violations

    assert violations
    assert all(line.startswith(f"Through `{file}`, the output") for line in violations)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda i: i.update(input_shapes=[]), "an entry if sizes are symbolic"),
        (lambda i: i.update(input_shapes=[{"time": 6}, {"t": 2}]), "exactly"),
        (lambda i: i.update(input_shapes=[{"time": -6}]), "sizes by name"),
        (lambda i: i.update(constraints=["os.system >= 1"]), r"constraints\[0\]"),
        (lambda i: i.update(constraints=["z >= 1"]), "names out of"),
        (lambda i: i["outputs"][2]["shape"].__setitem__(1, "floordiv(time, 0)"), "worked out"),
        (lambda i: i["outputs"][2]["shape"].__setitem__(1, "time^8*9^8"), "The results of"),
        (lambda i: i["inputs"][0]["shape"].__setitem__(1, "time*time"), "differ in|exactly"),
        (lambda i: i.update(batch_symbol="time"), "input_shapes"),
        (lambda i: i.update(dynamic_batch=1), "true or false"),
        (lambda i: i.update(rtol=2), "a number from 0 to 1"),
        (lambda i: i.update(verification=[]), "an object, or null"),
    ],
)
def test_a_forged_index_of_symbolic_sizes_is_refused(dynamic, tmp_path, edit, words):
    path = tmp_path / "seq"
    shutil.copytree(dynamic.path, path)
    index = json.loads((path / "nitro.json").read_text())
    edit(index)
    (path / "nitro.json").write_text(json.dumps(index))

    with pytest.raises(BundleError, match=words):
        load_bundle(path)(**_request(3, 5))


def test_an_input_may_have_any_name(tmp_path):
    """Also one that Python's methods and NumPy's functions have for themselves."""
    x = np.ones((4, 5), np.float32)
    program = _program(
        fn=lambda x, mask, w: (x * mask[:, None] + w.sum(),),
        inputs=(ExportSpec("self", "float32", (1, "time")), ExportSpec("file", "float32", (1,))),
        outputs=(ExportSpec("a/b", "float32", (1, "time")),),
        weights={"w": np.ones(3, np.float32)},
        golden=Golden(inputs={"self": x, "file": x[:, 0]}, outputs={"a/b": x + 3}),
    )

    bundle = _write(tmp_path, program)

    np.testing.assert_array_equal(bundle(self=x[:1, :3], file=x[:1, 0])["a/b"], np.full((1, 3), 4))
    assert verify_bundle(bundle.path).violations == []
