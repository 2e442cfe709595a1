"""Our safetensors files, against the safetensors library."""

from __future__ import annotations

import io
import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from nitro.errors import BundleError, ExportError
from nitro_export_stablehlo._dtypes import BY_TOKEN
from nitro_export_stablehlo._weights import TensorFile, write_tensors


def _write(path, tensors, *, reverse_axes=True, metadata=None):
    with path.open("wb") as sink:
        write_tensors(sink, tensors, reverse_axes=reverse_axes, metadata=metadata)
    return path


def _read(path):
    return TensorFile(path, file=path.name, reverse_axes=True)


@pytest.mark.parametrize("token", BY_TOKEN)
def test_every_dtype_comes_back(tmp_path, token):
    rng = np.random.default_rng(0)
    values = (rng.normal(0, 50, (2, 3, 5)) > 0) if token == "bool" else rng.normal(0, 5, (2, 3, 5))
    tensor = np.abs(values).astype(BY_TOKEN[token].numpy)

    stored = _read(_write(tmp_path / "w.safetensors", {"x": tensor, "s": tensor[0, 0, 0]}))

    assert stored["x"].dtype == tensor.dtype
    assert stored["x"].tobytes() == tensor.tobytes()
    assert stored["s"].shape == ()


def test_the_library_reads_the_transposes(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "square": rng.normal(size=(4, 4)).astype(np.float32),
        "cube": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 3), np.float32),
        "half": rng.normal(size=(3, 2)).astype(ml_dtypes.bfloat16),
        "flags": np.array([True, False, True]),
    }

    found = load_file(_write(tmp_path / "w.safetensors", tensors))

    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.T)


def test_the_library_reads_the_metadata(tmp_path):
    order = json.dumps(["b", "a"])
    tensors = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
    path = _write(tmp_path / "w.safetensors", tensors, metadata={"argument_order": order})

    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"argument_order": order}
    assert _read(path).argument_order() == ("b", "a")


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int64)}
    path = tmp_path / "w.safetensors"
    save_file(tensors, path)

    stored = TensorFile(path, file="w", reverse_axes=False)

    assert set(stored) == {"a", "b"}
    np.testing.assert_array_equal(stored["a"], tensors["a"])


def test_a_tensor_larger_than_a_block_is_turned_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("nitro_export_stablehlo._weights._CHUNK_BYTES", 64)
    tensor = np.arange(7 * 5 * 11, dtype=np.float32).reshape(7, 5, 11)

    stored = _read(_write(tmp_path / "w.safetensors", {"x": tensor}))

    np.testing.assert_array_equal(stored["x"], tensor)


def test_writing_needs_no_second_copy_of_the_weights():
    class Nowhere(io.RawIOBase):
        def write(self, data):
            return len(data)

    tensors = {f"w{i}": np.ones((2048, 4096), np.float32) for i in range(3)}
    tracemalloc.start()

    write_tensors(Nowhere(), tensors, reverse_axes=True)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Three tensors of 32 MiB each, turned in blocks of 16 MiB.
    assert peak < 40 * 2**20


def test_each_tensor_is_aligned_to_its_dtype(tmp_path):
    tensors = {"a": np.ones(3, np.uint8), "b": np.ones(3, np.float64), "c": np.ones(3, np.int16)}
    path = _write(tmp_path / "w.safetensors", tensors)

    stored = _read(path)

    assert all(stored[name].flags.aligned for name in stored)


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ExportError, match="`z` has the dtype complex64"):
        write_tensors(io.BytesIO(), {"z": np.zeros(1, np.complex64)}, reverse_axes=True)


def _file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


_X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes"),
        (_file({}, length=2**60), "claims a header of 1152921504606846976 bytes"),
        (_file(b"\xff\xfe"), "does not parse"),
        (_file(b"[" * 5000), "does not parse"),
        (_file([]), "header of list"),
        (_file(b'{"x": 1, "x": 2}'), "the key 'x' is there twice"),
        (_file({"x": {}}), "malformed entry `x`"),
        (_file({"x": _X | {"dtype": "C64"}}, bytes(8)), "dtype 'C64' at `x`"),
        (_file({"x": _X | {"shape": [-2]}}, bytes(8)), r"shape \[-2\] at `x`"),
        (_file({"x": _X | {"shape": [2**62, 4]}}, bytes(8)), "gives `x` 8 bytes"),
        (_file({"x": _X | {"data_offsets": [8, 0]}}, bytes(8)), "gives `x` -8 bytes"),
        (_file({"x": _X | {"data_offsets": [8, 16]}}, bytes(16)), "starts `x` at byte 8"),
        (_file({"x": _X, "y": _X}, bytes(8)), "no gap and no overlap"),
        (_file({"x": _X}, bytes(4)), "holds 4 bytes of tensors"),
        (_file({"x": _X}, bytes(12)), "holds 12 bytes of tensors"),
        (_file({"__metadata__": {"argument_order": 1}}), "`__metadata__` of other things"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, content, words):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)

    with pytest.raises(BundleError, match=words):
        _read(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "lacks `__metadata__.argument_order`"),
        ({"argument_order": "x"}, "does not parse"),
        ({"argument_order": "{}"}, "no list of names"),
        ({"argument_order": '["x", "z"]'}, "names `z`"),
        ({"argument_order": '["x"]'}, "leaves out `y`"),
        ({"argument_order": '["x", "x"]'}, "2 tensors, and 2 names"),
    ],
)
def test_an_argument_order_that_does_not_fit_is_refused(tmp_path, metadata, words):
    tensors = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}
    stored = _read(_write(tmp_path / "w.safetensors", tensors, metadata=metadata))

    with pytest.raises(BundleError, match=words):
        stored.argument_order()
