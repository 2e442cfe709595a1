"""Damaged and forged bundles: a `BundleError` each, never another exception or a hang."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from nitro.errors import BundleError
from nitro.export import ExportProgram
from nitro_export_stablehlo import Bundle, StableHLOBackend, load_bundle
from nitro_export_stablehlo._index import read_index
from nitro_export_stablehlo._keys import ProgramKey
from nitro_export_stablehlo._vet import find_unsafe_programs

Bundles: TypeAlias = Mapping[str, Path]
Forge: TypeAlias = Callable[..., Path]

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
def forged(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Forge:
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
def _restore(request: pytest.FixtureRequest, bundles: Bundles):
    yield
    if "forged" in request.fixturenames:
        forge = request.getfixturevalue("forged")
        for file in {*OWN, *PROGRAMS}:
            forge(file, (bundles["mlp"] / file).read_bytes(), redigest=False)


@pytest.mark.parametrize("file", ["manifest.yaml", "weights.safetensors", *PROGRAMS])
def test_any_change_is_refused_by_the_digest(bundles: Bundles, forged: Forge, file: str):
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
def test_a_forged_file_is_refused_or_harmless(
    bundles: Bundles, forged: Forge, file: str, block: int
):
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


def test_a_forged_description_does_not_change_the_prediction(bundles: Bundles, forged: Forge):
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


def test_swapped_files_are_refused(bundles: Bundles, forged: Forge):
    swapped = (bundles["mlp"] / PROGRAMS[1]).read_bytes()
    path = forged(PROGRAMS[0], swapped, redigest=True)

    with pytest.raises(BundleError, match=r"arguments of `jax/model\.b1\.jax_export` are"):
        load_bundle(path)(pixels=PIXELS[:1])


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\xff" * 64, b"not a flatbuffer at all"])
def test_what_is_no_export_is_refused(forged: Forge, data: bytes):
    path = forged(PROGRAMS[0], data, redigest=True)

    with pytest.raises(BundleError, match=r"`jax/model\.b1\.jax_export` does not parse"):
        load_bundle(path)(pixels=PIXELS[:1])


def test_a_program_that_hangs_its_reader_is_stopped(bundles: Bundles, forged: Forge):
    # A location that names itself: MLIR's reader follows it for ever.
    data = (bundles["mlp"] / PROGRAMS[0]).read_bytes()
    changed = data.replace(b"\x1d\x1f\x01", b"\x1d\x1d\x01")
    if changed == data:
        pytest.skip("this jaxlib numbers the locations in its bytecode otherwise")
    path = forged(PROGRAMS[0], changed, redigest=True)

    index = read_index((path / "nitro.json").read_bytes())
    unsafe = find_unsafe_programs(path, index, timeout_s=15, files=[PROGRAMS[0]])

    assert list(unsafe) == [PROGRAMS[0]]
    assert "does not end within 15 s" in unsafe[PROGRAMS[0]]


def test_untrusted_bundles_are_tried_before_they_are_loaded(bundles: Bundles, forged: Forge):
    assert load_bundle(bundles["mlp"], untrusted=True)(pixels=PIXELS)["logits"].shape == (3, 3)
    path = forged("model.b1.mlir", b"ML\xefR" + b"\0" * 40, redigest=True)

    with pytest.raises(BundleError, match=r"`model\.b1\.mlir` cannot be used"):
        load_bundle(path, untrusted=True)


def _link(path: Path, name: str) -> None:
    (path / name).rename(path / "elsewhere")
    (path / name).symlink_to(path / "elsewhere")


@pytest.mark.parametrize("name", ["nitro.json", "manifest.yaml", "weights.safetensors", "jax"])
def test_links_are_refused(copy_bundle: Callable[..., Path], name: str):
    path = copy_bundle("mlp")
    _link(path, name)

    with pytest.raises(BundleError, match="is a symbolic link"):
        load_bundle(path)


def test_a_pipe_does_not_hang_the_loader(copy_bundle: Callable[..., Path]):
    path = copy_bundle("mlp")
    (path / "manifest.yaml").unlink()
    os.mkfifo(path / "manifest.yaml")

    with pytest.raises(BundleError, match=r"`manifest\.yaml` is not a regular file"):
        load_bundle(path)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a//b", "a/./b", "a\\b", "C:x", "", "a\0b"]
)
def test_names_that_lead_out_are_refused(copy_bundle: Callable[..., Path], name: str):
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
        (lambda i: i.update(versions={"jax": 1}), r"`versions\.jax` is 1[\s\S]*a string"),
        (lambda i: i.update(calling_convention_version=True), "an integer"),
        (lambda i: i.update(name="other"), "differ in `name`"),
    ],
)
def test_a_forged_index_is_refused_by_its_key(
    copy_bundle: Callable[..., Path], edit: Callable[[dict[str, Any]], object], words: str
):
    with pytest.raises(BundleError, match=words):
        load_bundle(copy_bundle("mlp", edit_index=edit))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, "1" * 5000, "\ud800", "NaN"]
)
def test_json_that_is_not_plain_is_refused(copy_bundle: Callable[..., Path], text: str):
    path = copy_bundle("mlp")
    (path / "nitro.json").write_text(text, errors="surrogatepass")

    with pytest.raises(BundleError, match=r"`nitro\.json`"):
        load_bundle(path)


def test_a_nan_among_the_weights_is_refused(bundles: Bundles, forged: Forge):
    data = bytearray((bundles["mlp"] / "weights.safetensors").read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))

    path = forged("weights.safetensors", bytes(data), redigest=True)

    with pytest.raises(BundleError, match=r"`weights\.safetensors` holds a NaN in `scale`"):
        load_bundle(path)
    load_bundle(path, verify_digests=False)


@pytest.fixture(scope="module")
def many_programs(
    programs: Mapping[str, ExportProgram], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle with a program for each of 20 sizes, so that one child can try many."""
    path = tmp_path_factory.mktemp("many") / "mlp"
    path.mkdir()
    program = dataclasses.replace(
        programs["mlp"], batch_sizes=tuple(range(1, 21)), working_tree_patch=None, _exported={}
    )
    StableHLOBackend().write(program, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_forged_programs_end_no_process_but_a_child(
    many_programs: Path, tmp_path: Path, block: int
):
    path = tmp_path / "mlp"
    shutil.copytree(many_programs, path)
    index = json.loads((path / "nitro.json").read_text())
    files = [file for size in range(1, 21) for file in _files_of(size)]
    for seed, file in enumerate(files, start=block * len(files)):
        data = _mutate((path / file).read_bytes(), seed)
        (path / file).write_bytes(data)
        digest = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        index["files"][file] = digest
    (path / "nitro.json").write_text(json.dumps(index))

    unsafe = find_unsafe_programs(
        path, read_index((path / "nitro.json").read_bytes()), timeout_s=60
    )

    assert len(unsafe) > len(files) // 2
    assert set(unsafe) <= set(files)
    assert all(problem for problem in unsafe.values())


def _files_of(size: int) -> tuple[str, str]:
    key = ProgramKey(size)
    return key.artifact_file, key.exported_file


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_a_hostile_bundle_takes_no_memory_that_it_only_claims(bundles: Bundles, tmp_path: Path):
    code = """
import json, resource, sys
from nitro.errors import BundleError
from nitro_export_stablehlo import load_bundle
import jax, numpy as np
jax.devices()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        load_bundle(path)(pixels=np.zeros((5, 16), np.uint8))
    except BundleError as error:
        print(error.problem)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    header = b'{"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    claims = {
        "weights.safetensors": len(header).to_bytes(8, "little") + header,
        "manifest.yaml": b"a: &a [x, x]\nb: &b [*a, *a]\n" * 1000,
        "nitro.json": b"[" * 2_000_000,
        "golden.safetensors": (2**40).to_bytes(8, "little") + b"{}",
    }
    paths = []
    for file, data in claims.items():
        paths.append(tmp_path / file / "mlp")
        shutil.copytree(bundles["mlp"], paths[-1])
        (paths[-1] / file).write_bytes(data)
        index = json.loads((bundles["mlp"] / "nitro.json").read_text())
        if file != "nitro.json":
            digest = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            index["files"][file] = digest
            (paths[-1] / "nitro.json").write_text(json.dumps(index))

    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
    )

    *problems, grown_kb = done.stdout.splitlines()
    assert len(problems) == 3  # the golden inputs are not read by a load
    # A load compiles a program, which takes some tens of megabytes of its own.
    assert int(grown_kb) < 200_000
