"""`nitro-bundle`: what it shows, what it finds, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from nitro.export import ExportSpec
from nitro_export_stablehlo import StableHLOBackend, load_bundle
from nitro_export_stablehlo._cli import main
from nitro_export_stablehlo._verify import verify_bundle


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: its exit code, output and error message."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nitro-bundle", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        # `sys.exit(message)` prints the message and exits with 1, outside of pytest.
        return (1, captured.out, code) if isinstance(code, str) else (code, *captured)

    return run


@pytest.fixture
def quick(monkeypatch):
    """Takes the programs as sound, where the test damages something else."""
    monkeypatch.setattr("nitro_export_stablehlo._verify.find_unsafe_programs", lambda *_, **__: {})


def test_a_whole_bundle_keeps_every_promise(run, bundles):
    code, out, _ = run("verify", bundles["many"])

    assert (code or 0, out) == (0, f"{bundles['many']}: every promise kept\n")


def _flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


@pytest.mark.usefixtures("quick")
def test_each_changed_file_is_one_line(run, copy_bundle):
    def edit(path):
        _flip(path / "weights.safetensors")
        _flip(path / "working_tree.patch")

    code, out, _ = run("verify", copy_bundle("mlp", edit=edit, redigest=False))

    lines = [line for line in out.splitlines() if "has changed since the export" in line]
    assert code == 1
    assert len(lines) == 2
    assert "`weights.safetensors`" in out
    assert "`working_tree.patch`" in out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p: _flip(p / "golden.safetensors"), r"the output `logits` (differs|has)"),
        (
            lambda p: (p / "model.b1.mlir").write_bytes((p / "model.b32.mlir").read_bytes()),
            r"In `model\.b1\.mlir`, the input `pixels` is tensor<32x16xui8>",
        ),
        (
            lambda p: (p / "model.b1.mlir").write_bytes((p / "model.b1.mlir").read_bytes()[:-9]),
            r"`model\.b1\.mlir` is damaged",
        ),
        (lambda p: (p / "model.b8.mlir").touch(), r"`model\.b8\.mlir` is there"),
        (lambda p: (p / "manifest.yaml").write_text("a: [1"), r"`manifest\.yaml` does not parse"),
        (lambda p: (p / "jax" / "model.b1.jax_export").unlink(), "model.b1.jax_export` cannot"),
    ],
)
def test_what_digests_cannot_show_is_found(copy_bundle, edit, words):
    report = verify_bundle(copy_bundle("mlp", edit=edit))

    assert any(re.search(words, line) for line in report.violations), report


@pytest.mark.usefixtures("quick")
def test_another_program_in_one_of_the_two_files_is_found(copy_bundle, programs, tmp_path):
    other = dataclasses.replace(
        programs["mlp"], fn=lambda *a: (programs["mlp"].fn(*a)[0] + 1,), _exported={}
    )
    (tmp_path / "other").mkdir()
    StableHLOBackend().write(other, tmp_path / "other")

    def edit(path):
        stolen = (tmp_path / "other" / "model.b1.mlir").read_bytes()
        (path / "model.b1.mlir").write_bytes(stolen)

    report = verify_bundle(copy_bundle("mlp", edit=edit))

    assert report.violations == [
        "`model.b1.mlir` and `jax/model.b1.jax_export` hold different programs; "
        "expected: one program in both"
    ]


def test_damaged_weights_are_told_once_and_not_blamed_on_the_programs(copy_bundle):
    path = copy_bundle("mlp", edit=lambda p: (p / "weights.safetensors").write_bytes(b"x" * 40))

    violations = verify_bundle(path).violations

    assert len(violations) == 1
    assert "`weights.safetensors` claims a header" in violations[0]


def test_a_platform_that_is_not_here_is_told(copy_bundle):
    path = copy_bundle("mlp", edit_index=lambda index: index.update(platforms=["tpu"]))

    violations = verify_bundle(path).violations

    assert len([line for line in violations if "There is no device 'tpu'" in line]) == 2


@pytest.mark.usefixtures("quick")
def test_a_wrong_directory_name_is_found(copy_bundle):
    path = copy_bundle("mlp")
    path = path.rename(path.parent / "renamed")

    assert "The directory is called `renamed`" in verify_bundle(path).violations[0]


def test_inspect_shows_the_contract(run, bundles):
    code, out, _ = run("inspect", bundles["many"])

    assert (code or 0) == 0
    assert "tokens: i32 (n, 6)" in out
    assert "features: bf16 (6, n, 4)" in out
    assert "projection: bf16 (4, 4)" in out
    assert '"source_framework": "jax"' in out


def test_predict_reads_and_writes_arrays(run, bundles, programs, tmp_path):
    golden = programs["mlp"].golden
    np.savez(tmp_path / "in.npz", **golden.inputs)

    code, out, _ = run(
        "predict", bundles["mlp"], "--inputs", tmp_path / "in.npz", "--out", tmp_path / "out.npz"
    )

    assert (code or 0, out) == (0, "logits: float32 (5, 3)\n")
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_allclose(outputs["logits"], golden.outputs["logits"], atol=1e-6)


def test_predict_keeps_bfloat16_in_safetensors_only(run, bundles, tmp_path):
    code, *_ = run("predict", bundles["many"], "--out", tmp_path / "out.safetensors")
    refused, _, error = run("predict", bundles["many"], "--out", tmp_path / "out.npz")

    assert ((code or 0), refused) == (0, 1)
    assert "cannot hold `mixed`, a bfloat16" in error


@pytest.mark.usefixtures("quick")
def test_swapping_weights_makes_a_whole_bundle(run, bundles, programs, mlp_reference, tmp_path):
    weights = {k: np.asarray(v) * np.float32(0.5) for k, v in programs["mlp"].weights.items()}
    save_file(
        {k: np.array(v, np.float32) for k, v in weights.items()}, tmp_path / "new.safetensors"
    )
    target = tmp_path / "half"

    code, *_ = run("swap-weights", bundles["mlp"], tmp_path / "new.safetensors", "--out", target)

    assert (code or 0) == 0
    assert not verify_bundle(target).violations
    pixels = programs["mlp"].golden.inputs["pixels"]
    wanted = mlp_reference(dataclasses.replace(programs["mlp"], weights=weights), pixels)
    bundle = load_bundle(target)
    np.testing.assert_allclose(bundle(pixels=pixels)["logits"], wanted, atol=1e-6)
    assert bundle.name == "half"
    assert "weights_swapped_at" in bundle.provenance
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "new.safetensors"]
    code, out, _ = run("diff", bundles["mlp"], target)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()] == sorted(weights)


def test_a_bundles_own_weights_are_turned_back(run, bundles, tmp_path):
    stored = bundles["mlp"] / "weights.safetensors"

    run("swap-weights", bundles["mlp"], stored, "--out", tmp_path / "same")

    assert (tmp_path / "same" / "weights.safetensors").read_bytes() == stored.read_bytes()
    assert run("diff", bundles["mlp"], tmp_path / "same")[1] == "no difference\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "{tmp}/nothing"], "is not a bundle"),
        (["inspect", "{tmp}"], "`nitro.json` cannot be opened"),
        (["swap-weights", "{mlp}", "{tmp}/x.npz", "--out", "{tmp}/y"], "is not a file"),
        (["swap-weights", "{mlp}", "{mlp}/weights.safetensors", "--out", "{tmp}"], "exists"),
        (["swap-weights", "{mlp}", "{many}/weights.safetensors", "--out", "{tmp}/y"], "no weight"),
        (["predict", "{mlp}", "--inputs", "{mlp}/nitro.json"], "ends in `.json`"),
        (["predict", "{mlp}", "--out", "{tmp}/no/out.npz"], "in a folder that is there"),
        (["predict", "{mlp}", "--out", "/dev/full/out.npz"], "in a folder that is there"),
        (
            ["swap-weights", "{mlp}", "{mlp}/weights.safetensors", "--out", "/dev/full/y"],
            "/dev/full`:",
        ),
        (["predict", "{mlp}", "--out", "{tmp}/out.txt"], "out.txt` cannot be written"),
    ],
)
def test_an_error_is_one_message(run, bundles, tmp_path, arguments, words):
    places = {"tmp": tmp_path, **bundles}

    code, _, error = run(*(argument.format(**places) for argument in arguments))

    assert code == 1
    assert error.startswith("error: ")
    assert words in error
    assert not list(tmp_path.iterdir())


def test_weights_that_no_loader_takes_are_not_swapped_in(run, bundles, programs, tmp_path):
    weights = {name: np.array(value) for name, value in programs["mlp"].weights.items()}
    weights["dense1.kernel"][3, 2] = np.nan
    np.savez(tmp_path / "new.npz", **weights)

    code, _, error = run(
        "swap-weights", bundles["mlp"], tmp_path / "new.npz", "--out", tmp_path / "y"
    )

    assert code == 1
    assert "the new weights` holds a NaN in `dense1.kernel`" in error
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]


@pytest.mark.usefixtures("quick")
def test_weights_that_no_loader_takes_break_a_promise(copy_bundle):
    def edit(path):
        data = bytearray((path / "weights.safetensors").read_bytes())
        data[-4:] = np.float32(np.nan).tobytes()
        (path / "weights.safetensors").write_bytes(data)

    violations = verify_bundle(copy_bundle("mlp", edit=edit)).violations

    assert "`weights.safetensors` holds a NaN in `scale`" in violations[0]


def test_a_verification_does_not_outlive_its_weights(run, copy_bundle, tmp_path):
    source = copy_bundle("mlp", edit_index=lambda index: index.update(verification={"rtol": 1}))
    stored = source / "weights.safetensors"

    run("swap-weights", source, stored, "--out", tmp_path / "same")

    assert load_bundle(source).verification == {"rtol": 1}
    assert load_bundle(tmp_path / "same").verification is None


def test_an_output_called_as_numpys_argument_needs_safetensors(run, tmp_path, programs):
    program = dataclasses.replace(
        programs["mlp"],
        outputs=(ExportSpec("file", "float32", (1, 3)),),
        golden=dataclasses.replace(
            programs["mlp"].golden, outputs={"file": programs["mlp"].golden.outputs["logits"]}
        ),
    )
    (tmp_path / "mlp").mkdir()
    StableHLOBackend().write(program, tmp_path / "mlp")

    code, _, error = run("predict", tmp_path / "mlp", "--out", tmp_path / "out.npz")
    other, *_ = run("predict", tmp_path / "mlp", "--out", tmp_path / "out.safetensors")

    assert (code, other or 0) == (1, 0)
    assert "`out.npz` cannot hold `file`" in error


def test_debug_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["nitro-bundle", "inspect", str(tmp_path), "--debug"])

    with pytest.raises(ValueError, match=r"nitro\.json"):
        main()


def test_the_index_is_readable_by_anyone(bundles):
    index = json.loads((bundles["many"] / "nitro.json").read_text())

    assert [entry["name"] for entry in index["inputs"]] == ["tokens", "features"]
    assert index["inputs"][1]["batch_axis0"] == 1
    assert index["platforms"] == ["cpu"]
