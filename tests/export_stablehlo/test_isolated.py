"""A bundle is all that a fresh, isolated interpreter needs; IREE reads it too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

_PREDICT = """
import sys
import numpy as np
from nitro_export_stablehlo import load_bundle

bundle = load_bundle(sys.argv[1])
requests = np.load(sys.argv[2])
np.savez(sys.argv[3], **{name: bundle(pixels=requests[name])["logits"] for name in requests})
training = ("flax", "optax", "orbax", "tensorflow", "safetensors", "nitro._run")
print([name for name in sys.modules if name.startswith(training)])
"""


def test_a_fresh_isolated_process_agrees_with_numpy(bundles, programs, mlp_reference, tmp_path):
    rng = np.random.default_rng(3)
    requests = {
        f"rows{rows}": rng.integers(0, 255, (rows, 16), dtype=np.uint8) for rows in (1, 7, 32, 100)
    }
    np.savez(tmp_path / "in.npz", **requests)

    child = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", _PREDICT, bundles["mlp"], "in.npz", "out.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "[]"
    with np.load(tmp_path / "out.npz") as outputs:
        for name, pixels in requests.items():
            # float32 sums of 16 products, against float64.
            wanted = mlp_reference(programs["mlp"], pixels)
            np.testing.assert_allclose(outputs[name], wanted, atol=1e-6)


def test_the_plugin_imports_no_jax():
    code = (
        "import sys, nitro_export_stablehlo._plugin as p\n"
        "info, = p.nitro_export_backends()\n"
        "print(info.name, 'jax' in sys.modules, 'yaml' in sys.modules)"
    )

    child = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )

    assert child.stdout.split() == ["stablehlo", "False", "False"], child.stderr


def _run_in_iree(artifact: Path, arguments: list[np.ndarray]) -> list[np.ndarray]:
    compiler = pytest.importorskip("iree.compiler.tools", reason="IREE is not installed")
    runtime = pytest.importorskip("iree.runtime", reason="IREE is not installed")
    compiled = compiler.compile_file(
        str(artifact),
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=generic"],
    )
    config = runtime.Config("local-sync")
    module = runtime.VmModule.copy_buffer(config.vm_instance, compiled)
    main = runtime.load_vm_module(module, config)["main"]
    results = main(*arguments)
    results = results if isinstance(results, list | tuple) else [results]
    return [np.asarray(result.to_host()) for result in results]


def _stored_weights(bundle: Path) -> list[np.ndarray]:
    """As any third party reads them: with the library, in argument order, turned back."""
    with safe_open(bundle / "weights.safetensors", "numpy") as opened:
        order = json.loads(opened.metadata()["argument_order"])
        return [np.array(opened.get_tensor(name).T, order="C") for name in order]


# Fails for a square weight that is stored the wrong way round, which no shape can show.
# The u8 input is divided before the product: IREE 3.13 reads u8 wrongly otherwise (JX-32).
@pytest.mark.parametrize("rows", [1, 32])
def test_iree_agrees(bundles, programs, mlp_reference, rows):
    pixels = np.random.default_rng(rows).integers(0, 255, (rows, 16), dtype=np.uint8)

    (logits,) = _run_in_iree(
        bundles["mlp"] / f"model.b{rows}.mlir", [pixels, *_stored_weights(bundles["mlp"])]
    )

    np.testing.assert_allclose(logits, mlp_reference(programs["mlp"], pixels), atol=1e-5)


def test_a_square_weight_the_wrong_way_round_would_show(bundles, programs, mlp_reference):
    pixels = np.random.default_rng(1).integers(0, 255, (1, 16), dtype=np.uint8)
    weights = _stored_weights(bundles["mlp"])
    turned = [np.array(w.T, order="C") if w.shape == (16, 16) else w for w in weights]

    (logits,) = _run_in_iree(bundles["mlp"] / "model.b1.mlir", [pixels, *turned])

    assert np.abs(logits - mlp_reference(programs["mlp"], pixels)).max() > 1e-2


def test_iree_takes_several_inputs_in_wire_order(bundles, programs):
    golden = programs["many"].golden
    tokens = golden.inputs["tokens"][:2]
    # The Python binding of IREE knows no bfloat16: the bytes go in as they are.
    features = np.array(golden.inputs["features"][:, :2])
    runtime = pytest.importorskip("iree.runtime", reason="IREE is not installed")
    config = runtime.Config("local-sync")

    def place(array):
        if array.dtype != ml_dtypes.bfloat16:
            return array
        return config.device.allocator.allocate_buffer_copy(
            memory_type=runtime.MemoryType.DEVICE_LOCAL,
            allowed_usage=runtime.BufferUsage.DEFAULT,
            device=config.device,
            buffer=array.view(np.uint16),
            element_type=runtime.HalElementType.BFLOAT_16,
        )

    arguments = [place(a) for a in (tokens, features, *_stored_weights(bundles["many"]))]

    scores, accept, _ = _run_in_iree(bundles["many"] / "model.b2.mlir", arguments)

    # bfloat16 products have 8 bits.
    np.testing.assert_allclose(scores, golden.outputs["scores"][:, :2], atol=3e-2)
    np.testing.assert_array_equal(accept.astype(bool), golden.outputs["accept"][:2])
