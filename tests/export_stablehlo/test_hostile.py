"""Damaged and forged bundles: a `BundleError` each, never another exception or a hang."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from nitro.errors import BundleError
from nitro_export_stablehlo import Bundle, load_bundle
from nitro_export_stablehlo._vet import find_unsafe_programs

PIXELS = np.arange(48, dtype=np.uint8).reshape(3, 16)

# Files that our own readers parse. MLIR and flatbuffers, which trust their input, read the
# programs: those are refused by their digest, or tried in a child process.
OWN = ["manifest.yaml", "weights.safetensors", "nitro.json"]
PROGRAMS = ["jax/model.b1.jax_export", "jax/model.b32.jax_export", "model.b1.mlir"]


def _mutate(data: bytes, seed: int) -> bytes:
    """Flips, cuts, overwrites, fills, inserts or doubles some bytes."""
    rng = random.Random(seed)
    at, size = rng.randrange(len(data)), rng.randrange(1, 24)
    noise = bytes(rng.randrange(256) for _ in range(size))
    return [
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + noise + data[at + size :],
        lambda: data[:at] + b"\xff" * 8 + data[at + 8 :],
        lambda: data[:at] + noise + data[at:],
        lambda: data[:at] + data[at : at + size] * 2 + data[at + size :],
        lambda: data[:at] + data[at + size :],
    ][seed % 7]()


@pytest.fixture(scope="module")
def forged(bundles, tmp_path_factory):
    """One copy of the MLP's bundle; restores what a test changes in it."""
    path = tmp_path_factory.mktemp("forged") / "mlp"
    shutil.copytree(bundles["mlp"], path)

    def forge(file: str, data: bytes, *, redigest: bool) -> Path:
        for name in (file, "nitro.json"):
            shutil.copy(bundles["mlp"] / name, path / name)
        (path / file).write_bytes(data)
        if redigest and file != "nitro.json":
            index = json.loads((path / "nitro.json").read_text())
            digest = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            index["files"][file] = digest
            (path / "nitro.json").write_text(json.dumps(index))
        return path

    return forge


@pytest.fixture(autouse=True)
def _restore(request, bundles):
    yield
    if "forged" in request.fixturenames:
        forge = request.getfixturevalue("forged")
        for file in {*OWN, *PROGRAMS}:
            forge(file, (bundles["mlp"] / file).read_bytes(), redigest=False)


@pytest.mark.parametrize("file", ["manifest.yaml", "weights.safetensors", *PROGRAMS])
def test_any_change_is_refused_by_the_digest(bundles, forged, file):
    data = (bundles["mlp"] / file).read_bytes()
    for seed in range(35):
        changed = _mutate(data, seed)
        if changed == data:
            continue
        path = forged(file, changed, redigest=False)

        with pytest.raises(BundleError, match=f"`{file}` has changed since the export"):
            load_bundle(path)


def _try_to_load(path: Path) -> tuple[Bundle | None, str]:
    try:
        return load_bundle(path), ""
    except BundleError as error:
        return None, error.problem


@pytest.mark.parametrize("file", OWN)
@pytest.mark.parametrize("block", range(4))
def test_a_forged_file_is_refused_or_harmless(bundles, forged, file, block):
    refused = 0
    for seed in range(block * 35, (block + 1) * 35):
        path = forged(file, _mutate((bundles["mlp"] / file).read_bytes(), seed), redigest=True)
        bundle, message = _try_to_load(path)
        if bundle is None:
            assert "`" in message  # It names a file or a key.
            refused += 1
        else:
            # Another description of the same model, or other weights of the same shapes.
            assert [str(spec) for spec in bundle.inputs] == ["pixels: u8 (n, 16)"]
            assert {w.shape for w in bundle.weights.values()} == {(16,), (16, 16), (16, 3), ()}

    assert refused > 10


def test_a_forged_description_does_not_change_the_prediction(bundles, forged):
    wanted = load_bundle(bundles["mlp"])(pixels=PIXELS)["logits"]
    survived = 0
    for seed in range(60):
        data = _mutate((bundles["mlp"] / "manifest.yaml").read_bytes(), seed)
        bundle, _ = _try_to_load(forged("manifest.yaml", data, redigest=True))
        if bundle is not None:
            np.testing.assert_array_equal(bundle(pixels=PIXELS)["logits"], wanted)
            survived += 1

    # Changes inside the provenance.
    assert survived


def test_swapped_files_are_refused(bundles, forged):
    swapped = (bundles["mlp"] / PROGRAMS[1]).read_bytes()
    path = forged(PROGRAMS[0], swapped, redigest=True)

    with pytest.raises(BundleError, match=r"arguments of `jax/model\.b1\.jax_export` are"):
        load_bundle(path)(pixels=PIXELS[:1])


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\xff" * 64, b"not a flatbuffer at all"])
def test_what_is_no_export_is_refused(forged, data):
    path = forged(PROGRAMS[0], data, redigest=True)

    with pytest.raises(BundleError, match=r"`jax/model\.b1\.jax_export` does not parse"):
        load_bundle(path)(pixels=PIXELS[:1])


def test_a_program_that_hangs_its_reader_is_stopped(bundles, forged):
    # A location that names itself: MLIR's reader follows it for ever.
    data = (bundles["mlp"] / PROGRAMS[0]).read_bytes()
    changed = data.replace(b"\x1d\x1f\x01", b"\x1d\x1d\x01")
    assert changed != data
    path = forged(PROGRAMS[0], changed, redigest=True)

    unsafe = find_unsafe_programs(path, [1], timeout_s=8)

    assert list(unsafe) == [PROGRAMS[0]]
    assert "does not end within 8 s" in unsafe[PROGRAMS[0]]


def test_untrusted_bundles_are_tried_before_they_are_loaded(bundles, forged):
    assert load_bundle(bundles["mlp"], untrusted=True)(pixels=PIXELS)["logits"].shape == (3, 3)
    path = forged("model.b1.mlir", b"ML\xefR" + b"\0" * 40, redigest=True)

    with pytest.raises(BundleError, match=r"`model\.b1\.mlir` cannot be used"):
        load_bundle(path, untrusted=True)


def _link(path: Path, name: str) -> None:
    (path / name).rename(path / "elsewhere")
    (path / name).symlink_to(path / "elsewhere")


@pytest.mark.parametrize("name", ["nitro.json", "manifest.yaml", "weights.safetensors", "jax"])
def test_links_are_refused(copy_bundle, name):
    path = copy_bundle("mlp")
    _link(path, name)

    with pytest.raises(BundleError, match="is a symbolic link"):
        load_bundle(path)


def test_a_pipe_does_not_hang_the_loader(copy_bundle):
    path = copy_bundle("mlp")
    (path / "manifest.yaml").unlink()
    os.mkfifo(path / "manifest.yaml")

    with pytest.raises(BundleError, match=r"`manifest\.yaml` is not a regular file"):
        load_bundle(path)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a//b", "a/./b", "a\\b", "C:x", "", "a\0b"]
)
def test_names_that_lead_out_are_refused(copy_bundle, name):
    digest = {"sha256": "0" * 64, "size_bytes": 1}
    path = copy_bundle("mlp", edit_index=lambda index: index["files"].update({name: digest}))

    with pytest.raises(BundleError, match="relative path inside the bundle"):
        load_bundle(path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda i: i.update(format="zip"), "another format"),
        (lambda i: i.update(format_version=2), r"format version 2[\s\S]*as new as the bundle"),
        (lambda i: i.pop("inputs"), "`inputs` is missing"),
        (lambda i: i.update(inputs=i["inputs"] * 2), "one name twice"),
        (lambda i: i["inputs"][0].update(dtype="f8"), r"inputs\[0\]\.dtype` is 'f8'"),
        (lambda i: i["inputs"][0].update(batch_axis0=2), "an axis from 0 to 1"),
        (lambda i: i["inputs"][0].update(shape=[-1, -1]), "-1 at the batch axis"),
        (lambda i: i["inputs"][0].update(shape=[-1, 2**60]), "differ in `inputs`"),
        (lambda i: i["inputs"][0].update(shape=[-1, 8]), "differ in `inputs`"),
        (lambda i: i["outputs"][0].update(name="x"), "differ in `outputs`"),
        (lambda i: i.update(batch_sizes=[32, 1]), "ascending"),
        (lambda i: i.update(batch_sizes=[]), "distinct sizes above 0"),
        (lambda i: i.update(batch_sizes=[1, 2**62]), "an entry for each of the batch sizes"),
        (lambda i: i.update(costs={}), "an entry for each"),
        (lambda i: i["costs"]["1"].update(flops=-1), "finite numbers"),
        (lambda i: i["costs"]["1"].update(flops=float("inf")), "Infinity is not JSON"),
        (lambda i: i["files"].pop("model.b1.mlir"), r"without `model\.b1\.mlir`"),
        (lambda i: i["files"]["manifest.yaml"].update(sha256="x"), "64 hexadecimal digits"),
        (lambda i: i["files"]["manifest.yaml"].update(size_bytes=-1), "a number of bytes"),
        (lambda i: i.update(platforms="cpu"), "a list"),
        (lambda i: i.update(versions={"jax": 1}), "an object of strings"),
        (lambda i: i.update(calling_convention_version=True), "an integer"),
        (lambda i: i.update(name="other"), "differ in `name`"),
    ],
)
def test_a_forged_index_is_refused_by_its_key(copy_bundle, edit, words):
    with pytest.raises(BundleError, match=words):
        load_bundle(copy_bundle("mlp", edit_index=edit))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, "1" * 5000, "\ud800", "NaN"]
)
def test_json_that_is_not_plain_is_refused(copy_bundle, text):
    path = copy_bundle("mlp")
    (path / "nitro.json").write_text(text, errors="surrogatepass")

    with pytest.raises(BundleError, match=r"`nitro\.json`"):
        load_bundle(path)


def test_a_nan_among_the_weights_is_refused(bundles, forged):
    data = bytearray((bundles["mlp"] / "weights.safetensors").read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))

    path = forged("weights.safetensors", bytes(data), redigest=True)

    with pytest.raises(BundleError, match=r"`weights\.safetensors` holds a NaN in `scale`"):
        load_bundle(path)
    load_bundle(path, verify_digests=False)
