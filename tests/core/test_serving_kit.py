"""What `nitro.export` has for backends: requests, rows, an index and golden arrays."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from nitro.errors import BundleError
from nitro.export import (
    ArtifactIndex,
    Document,
    Golden,
    IOSpec,
    RequestReader,
    cut_rows,
    read_golden,
    read_json,
    run_in_parts,
    write_golden,
)

X = IOSpec(name="x", dtype="float32", shape=(None, "t", 2), batch_axis0=0)
LIGHT = IOSpec(name="light", dtype="bfloat16", shape=(3, None), batch_axis0=1)
INDEX = ArtifactIndex(
    name="m",
    inputs=(X, LIGHT),
    outputs=(LIGHT, X),
    batch_sizes=(2, 5),
    rtol=1e-5,
    constraints=("t >= 2",),
)


def _request(rows: int, t: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    light = rng.normal(size=(3, rows)).astype(ml_dtypes.bfloat16)
    return {"x": rng.normal(size=(rows, t, 2)).astype(np.float32), "light": light}


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 13])
def test_rows_that_are_cut_and_filled_up_come_back_in_order(rows):
    arrays, count, values = INDEX.make_reader().read(_request(max(rows, 1)))
    calls = list[tuple[int, int]]()

    def run(size, parts):
        calls.append((size, len(parts[0])))
        return parts[1] * 2, parts[0] + 1

    # Symbolic readers refuse a request of no rows; an artifact of fixed sizes may get one.
    parts = [a[:rows] if a.ndim == 3 else a[:, :rows] for a in arrays]
    edge = {"inputs": INDEX.inputs, "outputs": INDEX.outputs, "values": dict(values)}
    found = run_in_parts(run, cut_rows(rows, (2, 5)), **edge, arrays=parts, rows=rows)

    assert (count, values) == (max(rows, 1), (("t", 3),))
    assert all(size == given and size in (2, 5) for size, given in calls)
    assert np.array_equal(found["light"], parts[1] * 2)
    assert np.array_equal(found["x"], parts[0] + 1)
    assert found["x"].shape == (rows, 3, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("light"), "The input `light` is missing"),
        (lambda r: r.update(lihgt=r.pop("light")), r"no input `lihgt`[\s\S]*mean `light`"),
        (lambda r: r.update(x=r["x"].tolist()), r"`x` is a list[\s\S]*np\.float32"),
        (lambda r: r.update(x=r["x"][..., :1]), r"shape \(4, 3, 1\)[\s\S]*\(rows, t, 2\)"),
        (lambda r: r.update(light=r["light"][:, :2]), 'do not fit: "b" is 2, and 4 where b = 4'),
        (lambda r: r.update(x=r["x"][:, :1]), "t = 1 breaks the constraint `t >= 2`"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_name(change, words):
    request = _request(4)
    change(request)

    with pytest.raises(BundleError, match=words):
        INDEX.make_reader().read(request)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [("int64", 2**31 - 1, True), ("int64", 2**31, False), ("uint64", 2**32, False)],
)
def test_an_integer_that_is_narrowed_must_fit(dtype, value, fits):
    spec = IOSpec(name="ids", dtype=dtype, shape=(None,), batch_axis0=0)
    reader = RequestReader([spec], narrowed=("ids",))
    request = {"ids": np.array([1, value], dtype)}

    if fits:
        assert reader.read(request)[1] == 2
    else:
        with pytest.raises(BundleError, match=f"`ids` is {dtype} and holds {value}"):
            reader.read(request)


def test_an_index_is_what_it_was_when_it_is_read_again():
    text = json.dumps(INDEX.to_json()).encode()

    assert ArtifactIndex.from_json(read_json(text, file="i.json"), file="i.json") == INDEX


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("name"), r"In `i\.json`, `name` is missing"),
        (lambda d: d["inputs"][1].update(dtype="f33"), r"`inputs\[1\]\.dtype` is 'f33'"),
        (lambda d: d["inputs"][0].update(shape=[None, 0, 2]), r"`inputs\[0\]\.shape`"),
        (lambda d: d.update(batch_sizes=[5, 2]), "`batch_sizes`[^.]*\\.[\\s\\S]*ascending"),
        (lambda d: d.update(constraints=["u >= 2"]), r"`constraints\[0\]`[\s\S]*\['b', 't'\]"),
        (lambda d: d.update(narrowed=["y"]), r"`narrowed\[0\]` is 'y'"),
    ],
)
def test_a_forged_index_is_refused_by_file_and_key(change, words):
    values = INDEX.to_json()
    change(values)

    with pytest.raises(BundleError, match=words):
        ArtifactIndex.from_json(values, file="i.json")


def test_golden_arrays_of_every_dtype_come_back(tmp_path):
    golden = Golden(inputs=_request(4), outputs=_request(6))
    write_golden(tmp_path / "golden.npz", golden)

    inputs, outputs = read_golden(tmp_path / "golden.npz", INDEX.inputs, INDEX.outputs)

    assert inputs["light"].dtype == ml_dtypes.bfloat16
    assert all(np.array_equal(inputs[n], a) for n, a in golden.inputs.items())
    assert all(np.array_equal(outputs[n], a) for n, a in golden.outputs.items())
    other = IOSpec(name="y", dtype="int8", shape=(None,), batch_axis0=0)
    with pytest.raises(BundleError, match=r"`golden\.npz` has no `inputs\.y`"):
        read_golden(tmp_path / "golden.npz", [other], INDEX.outputs)


def test_a_document_names_the_path_of_a_wrong_value():
    document = Document({"a": [{"b": [1, "x"]}]}, file="d.json")

    with pytest.raises(BundleError, match=r"In `d\.json`, `a\[0\]\.b\[1\]` is 'x'"):
        document.children("a")[0].read_list("b", int)


def test_the_kit_imports_no_jax():
    names = "ArtifactIndex, Document, RequestReader, run_in_parts, read_golden"
    script = f"import sys; from nitro.export import {names}; assert 'jax' not in sys.modules"

    subprocess.run([sys.executable, "-c", script], check=True)
