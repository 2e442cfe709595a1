"""IREE and XLA itself read the artifacts of trained models, and agree with `predict`."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

import nitro
from nitro import ExportSpec

# What XLA and IREE sum in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class _Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 16, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class _Cnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.relu(self.norm(self.conv(x)))
        hidden = nnx.max_pool(hidden, (2, 2), (2, 2))
        return self.head(hidden.mean((1, 2)))


class _Transformer(nnx.Module):
    """One block over the eight rows of an image."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        tokens = self.embed(x[..., 0])
        tokens = tokens + self.attend(self.norm(tokens))
        tokens = tokens + self.drop(nnx.gelu(self.mlp(self.norm(tokens))))
        return self.head(tokens.mean(1))


MODELS = {"mlp": _Mlp, "cnn": _Cnn, "transformer": _Transformer}


class Images(nitro.Experiment):
    """Learns random labels of random images, to move weights and statistics."""

    kind: nitro.GraphConst[str] = "mlp"

    def build_data(self):
        rng = np.random.default_rng(0)
        img = rng.normal(1, 2, (64, 8, 8, 1)).astype(np.float32)
        label = rng.integers(0, 10, 64).astype(np.int32)
        return {"train": nitro.ArrayLoader({"img": img, "label": label}, 16, shuffle=True)}

    def build_model(self, rngs: nnx.Rngs):
        return MODELS[self.kind](rngs)

    def forward(self, model, *, img):
        return {"logits": model(img)}

    def loss(self, outputs, *, label):
        chosen = jax.nn.one_hot(label, 10)
        return -(jax.nn.log_softmax(outputs["logits"]) * chosen).sum(-1).mean()

    def export_inputs(self):
        return [ExportSpec("img", "float32", (1, 8, 8, 1))]

    def export_outputs(self):
        return [ExportSpec("logits", "float32", (1, 10))]


@pytest.fixture(scope="module", params=list(MODELS))
def exported(request, tmp_path_factory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A bundle, four images, and the logits that `predict` gives for them."""
    folder = tmp_path_factory.mktemp(request.param)
    run = nitro.Nitro(
        Images(kind=request.param), run_dir=folder / "run", checkpointer=None, progress=False
    ).train()
    path = nitro.export_model(
        run, "stablehlo", dir=folder / "out", name=request.param, batch_sizes=(4,), verify=False
    )
    img = np.random.default_rng(1).normal(1, 2, (4, 8, 8, 1)).astype(np.float32)
    return path, img, run.predict({"img": img})["logits"]


def _arguments(path: Path, img: np.ndarray) -> list[np.ndarray]:
    """As any third party makes them: read with the library, in argument order, turned back."""
    with safe_open(path / "weights.safetensors", "numpy") as opened:
        order = json.loads(opened.metadata()["argument_order"])
        return [img, *(np.array(opened.get_tensor(name).T, order="C") for name in order)]


def test_xla_runs_the_artifact_itself(exported):
    path, img, logits = exported
    arguments = _arguments(path, img)

    (got,) = _call_artifact((path / "model.b4.mlir").read_bytes(), arguments)

    np.testing.assert_allclose(got, logits, **TOLERANCE)


def _call_artifact(data: bytes, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """Compiles a portable artifact with XLA, without anything of `jax.export`'s format."""
    from jax.extend import mlir
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jaxlib import _jax

    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = mlir.deserialize_portable_artifact(data, context)
        text = str(module)
    device = jax.devices("cpu")[0]
    executable = device.client.compile_and_load(text, _jax.DeviceList((device,)))
    buffers = [jax.device_put(argument, device) for argument in arguments]
    results = executable.execute_sharded(buffers)
    return [np.asarray(shards[0]) for shards in results.disassemble_into_single_device_arrays()]


def test_iree_runs_the_artifact(exported):
    compiler = pytest.importorskip("iree.compiler.tools", reason="IREE is not installed")
    runtime = pytest.importorskip("iree.runtime", reason="IREE is not installed")
    path, img, logits = exported

    binary = compiler.compile_str(
        (path / "model.b4.mlir").read_bytes(),
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=generic"],
    )
    config = runtime.Config("local-sync")
    module = runtime.VmModule.copy_buffer(config.vm_instance, binary)
    result = runtime.load_vm_module(module, config)["main"](*_arguments(path, img))

    np.testing.assert_allclose(result.to_host(), logits, **TOLERANCE)
