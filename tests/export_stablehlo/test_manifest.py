"""The manifest: what is written, and every rule that is checked on reading."""

from __future__ import annotations

import copy
import json
import re

import numpy as np
import pytest
import yaml

from nitro.errors import BundleError, ExportError
from nitro.export import ExportSpec
from nitro_export_stablehlo import IOSpec
from nitro_export_stablehlo._manifest import Manifest, read_manifest

# Example B of the format's description.
RERANKER = {
    "format_version": "2.0",
    "name": "reranker",
    "executable_inputs": [
        {"name": "token_ids", "dtype": "i32", "shape": "sn", "dims": {"s": 64}},
        {"name": "features", "dtype": "bf16", "shape": "fsn", "dims": {"f": 16, "s": 64}},
    ],
    "executable_outputs": [
        {"name": "scores", "dtype": "f32", "shape": "sn", "dims": {"s": 64}},
        {"name": "accept", "dtype": "bool", "shape": "n"},
    ],
    "batching": {"compiled_batch_sizes": [4]},
}


def _read(document):
    return read_manifest(json.dumps(document).encode())


def test_shapes_are_the_reverse_of_what_jax_sees():
    manifest = _read(RERANKER)

    assert [str(spec) for spec in manifest.inputs] == [
        "token_ids: i32 (n, 64)",
        "features: bf16 (n, 64, 16)",
    ]
    assert manifest.inputs[1].batch_axis0 == 0
    assert manifest.inputs[1].mlir_type(4) == "tensor<4x64x16xbf16>"
    assert [str(spec) for spec in manifest.outputs] == ["scores: f32 (n, 64)", "accept: bool (n)"]


@pytest.mark.parametrize(
    ("spec", "entry"),
    [
        (ExportSpec("x", "uint8", (1, 784)), {"shape": "an", "dims": {"a": 784}}),
        (
            ExportSpec("x", "uint8", (1, 28, 27, 3)),
            {"shape": "acdn", "dims": {"a": 3, "c": 27, "d": 28}},
        ),
        (
            ExportSpec("x", "uint8", (5, 1, 7), batch_axis=2),
            {"shape": "anc", "dims": {"a": 7, "c": 5}},
        ),
        (ExportSpec("x", "uint8", (1,)), {"shape": "n"}),
    ],
)
def test_one_based_axes_become_reversed_letters_and_come_back(spec, entry):
    io_spec = IOSpec.from_export(spec)

    assert io_spec.batch_axis0 == spec.batch_axis - 1
    assert io_spec.to_manifest() == {"name": "x", "dtype": "u8", **entry}
    document = {**RERANKER, "executable_inputs": [io_spec.to_manifest()]}
    assert _read(document).inputs == (io_spec,)


def test_fifty_axes_have_letters_and_fifty_one_do_not():
    letters = IOSpec.from_export(ExportSpec("x", "int8", (1,) * 50)).to_manifest()["shape"]

    assert len(set(letters)) == 50
    assert "b" not in letters
    with pytest.raises(ExportError, match="`x` has 51 axes"):
        IOSpec.from_export(ExportSpec("x", "int8", (1,) * 51))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_a_dtype_that_clients_cannot_send_is_refused_by_name(dtype):
    with pytest.raises(ExportError, match=rf"`x` has the dtype {dtype}[\s\S]*bfloat16"):
        IOSpec.from_export(ExportSpec("x", dtype, (1, 2)))


def test_symbolic_sizes_share_a_letter_and_get_a_variant_each():
    inputs = tuple(
        IOSpec.from_export(spec)
        for spec in (
            ExportSpec("mask", "bool", (1, "time", "time")),
            ExportSpec("x", "int8", ("rows", 4, "time")),
            ExportSpec("pairs", "int8", (1, "2*time")),
        )
    )
    manifest = Manifest(
        name="m",
        inputs=inputs,
        outputs=(IOSpec.from_export(ExportSpec("y", "int8", (1, "time + 1"))),),
        batch_sizes=(1,),
        input_shapes=({"time": 3}, {"time": 5}),
    )

    read = read_manifest(manifest.to_yaml())

    assert [spec.shape for spec in read.inputs] == [(-1, -1, -1), (-1, 4, -1), (-1, -1)]
    assert [sorted(entry.values()) for entry in read.input_shapes] == [[3, 3, 6], [5, 5, 10]]
    letters = [spec["shape"] for spec in yaml.safe_load(manifest.to_yaml())["executable_inputs"]]
    assert letters == ["YZn", "Zan", "Xn"]


def _manifest(provenance):
    spec = IOSpec.from_export(ExportSpec("no", "int8", (1, 2)))
    return Manifest(
        name="m", inputs=(spec,), outputs=(spec,), batch_sizes=(1,), provenance=provenance
    )


def test_every_string_is_quoted_and_everything_comes_back():
    # Each of these is something else than a string to some YAML library, if unquoted.
    strings = [
        "no",
        "1e3",
        "2024-01-01",
        "null",
        "",
        "0x1f",
        "1_000",
        "~",
        "a: b",
        "é\u2028\U0001f600\x07",
    ]
    provenance = {
        "strings": strings,
        "long": "word " * 100,
        "numbers": [1, -2, 0.5, 1e-5, 1e300, float("inf")],
        "rest": {"t": True, "f": False, "n": None, "e": [], "m": {}},
    }

    data = _manifest(provenance).to_yaml()

    assert read_manifest(data).provenance == provenance
    assert yaml.safe_load(data)["provenance"] == provenance
    plain = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data).decode()
    assert not re.search(
        "[a-z]",
        plain.replace("true", "")
        .replace("false", "")
        .replace("null", "")
        .replace("inf", "")
        .replace("e", ""),
    )


def test_equal_objects_are_written_out_twice():
    shared = {"a": 1}

    data = _manifest({"x": shared, "y": shared}).to_yaml()

    assert read_manifest(data).provenance == {"x": {"a": 1}, "y": {"a": 1}}


def test_scalars_of_other_libraries_become_plain_ones():
    class Name(str):
        pass

    provenance = {"acc": np.float64(0.5), Name("name"): Name("digits"), "nested": _nested(61)}

    assert read_manifest(_manifest(provenance).to_yaml()).provenance == provenance


def _nested(levels):
    return {} if levels == 0 else {"a": _nested(levels - 1)}


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        ({"config": {1: "x"}}, "`provenance.config` has the key 1, a int"),
        ({"config": {"x": [object]}}, r"`provenance.config.x\[0\]` is .* a type"),
        ({"log": "x" * 5_000_000}, "leave large values out"),
        ({"dir": "runs/\udce9"}, r"`provenance.dir` is 'runs/\\udce9', which is no text"),
        ({"a": {"\udce9": 1}}, "`a key of provenance.a` is .* no text"),
        ({"n": -(10**20)}, "`provenance.n` is a number of more than 20 digits"),
        (_nested(70), r"`provenance.a.a[\s\S]*levels deep[\s\S]*at most 63"),
    ],
)
def test_provenance_that_yaml_cannot_hold_is_refused_by_key(provenance, words):
    with pytest.raises(ExportError, match=words):
        _manifest(provenance).to_yaml()


def _set(path, value):
    def change(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        document[last] = value

    return change


def _drop(path):
    def change(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        del document[last]

    return change


_IN, _OUT = "executable_inputs", "executable_outputs"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop(["format_version"]), "lacks the key `format_version`"),
        (_set(["format_version"], "1.0"), "`format_version` is '1.0'"),
        (_set(["kind"], "meta"), "`kind` is 'meta'"),
        (_drop([_IN]), f"lacks the key `{_IN}`"),
        (_set([_OUT], None), f"`{_OUT}` is None"),
        (_set([_IN, 0], "x"), rf"`{_IN}\[0\]` is 'x'"),
        (_drop([_IN, 0, "dtype"]), rf"lacks the key `{_IN}\[0\]\.dtype`"),
        (_set([_IN, 0, "name"], 3), rf"`{_IN}\[0\]\.name` is 3"),
        (_set([_IN, 0, "dtype"], "int32"), r"`.*dtype` is 'int32'[\s\S]*did you mean"),
        (_set([_IN, 0, "dtype"], "f8_e5m2"), "a dtype that clients can send"),
        (_set([_IN, 0, "shape"], "ssn"), "distinct ASCII letters"),
        (_set([_IN, 0, "shape"], "s1n"), "distinct ASCII letters"),
        (_set([_IN, 0, "shape"], "sén"), "distinct ASCII letters"),
        (_set([_IN, 0, "shape"], "snb"), "one batch letter"),
        (_set([_IN, 0, "shape"], "s"), "as another input has one"),
        (_set([_IN, 0, "dims"], []), "a mapping from letters"),
        (_set([_IN, 0, "dims"], {}), r"exactly the letters \['s'\]"),
        (_set([_IN, 0, "dims"], {"s": 64, "n": 4}), r"exactly the letters \['s'\]"),
        (_set([_IN, 0, "dims", "s"], 0), r"`.*dims\.s` is 0"),
        (_set([_IN, 0, "dims", "s"], -2), r"`.*dims\.s` is -2"),
        (_set([_IN, 0, "dims", "s"], 2**63), r"`.*dims\.s` is 9223372036854775808"),
        (_set([_IN, 0, "dims", "s"], True), r"`.*dims\.s` is True"),
        (_set([_IN, 0, "dims", "s"], -1), r"`input_shapes` is None.*\n.*\['s'\]"),
        (_set([_OUT, 1, "name"], "scores"), "a name that no other tensor"),
        (_set(["batching"], []), "`batching` is"),
        (_set(["batching", "compiled_batch_sizes"], 4), "a list of integers"),
        (_set(["batching", "compiled_batch_sizes"], [0]), r"sizes\[0\]` is 0"),
        (_set(["batching", "compiled_batch_sizes"], [4, 4]), "each size once, ascending"),
        (_set(["input_shapes"], []), "no input axis is variable"),
        (_set(["client_inputs"], []), "no client lists"),
        (_set(["name"], 3), "`name` is 3"),
    ],
)
def test_a_broken_rule_is_refused_by_its_key(change, words):
    document = copy.deepcopy(RERANKER)
    change(document)

    with pytest.raises(BundleError, match=words):
        _read(document)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([], "at least one entry"),
        ([{"s": 0}], r"input_shapes\[0\]\.s` is 0"),
        ([{"t": 4}], r"sizes for exactly \['s'\]"),
        ([{"s": 4}, {"s": 4}], "an entry that no other equals"),
    ],
)
def test_input_shapes_that_do_not_fit_are_refused(shapes, words):
    document = copy.deepcopy(RERANKER)
    for entry in document[_IN]:
        entry["dims"]["s"] = -1
    document["input_shapes"] = shapes

    with pytest.raises(BundleError, match=words):
        _read(document)


def test_input_shapes_that_fit_are_read():
    document = copy.deepcopy(RERANKER)
    document[_IN][0]["dims"]["s"] = -1
    document["input_shapes"] = [{"s": 32}, {"s": 64}]

    assert _read(document).input_shapes == ({"s": 32}, {"s": 64})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "holds 0 documents"),
        (b"a: 1\n---\nb: 2\n", "holds 2 documents"),
        (b"- 1", "a mapping"),
        (b"a: 1\na: 2\n", "the key 'a' a second time, on line 2"),
        (b'"a": 1\nb: {c: 1, "c": 2}\n', "the key 'c' a second time"),
        (b"1: 2\n", "a key that is not a string"),
        (b"? [a]\n: 2\n", "a key that is not a string"),
        (b"x: !!python/object/apply:os.system ['true']\n", "the tag"),
        (b"x: !local 3\n", "the tag"),
        (b"a: &a [1]\nb: *a\n", "an anchor or alias"),
        (b"x: " + b"[" * 100 + b"]" * 100, "too deep a nesting"),
        (b"x: " + b"{a: " * 500, "too deep a nesting"),
        (b"x: 2024-01-01\n", "unquoted value '2024-01-01'"),
        (b"x: 0o17\n", "unquoted value"),
        (b"x: [1\n", "does not parse"),
        (b'x: "\\ud800"\n', "does not parse|`format_version`"),
        (b"\xff\xfe\x00", "not UTF-8|does not parse"),
        (b"x: \x00\n", "does not parse"),
        (b"x: " + b"1" * 5_000_000, "bytes of YAML"),
    ],
)
def test_yaml_that_is_not_plain_is_refused(text, words):
    with pytest.raises(BundleError, match=words):
        read_manifest(text)


@pytest.mark.parametrize("version", ['"2.0"', "2.0", "2", '"2"'])
def test_the_version_may_be_a_number(version):
    text = json.dumps(RERANKER).replace('"2.0"', version, 1)

    assert read_manifest(text.encode()).name == "reranker"
