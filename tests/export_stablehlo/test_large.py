"""Large weights: what an export adds to memory, and offsets beyond 2 and 4 GB."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors import safe_open

from nitro_export_stablehlo._weights import TensorFile, write_tensors

_NUM_LAYERS = 18
_LAYER_BYTES = 2048 * 2048 * 4

# The peak starts anew before each phase (`clear_refs`), so that what came before it, JAX and
# the weights included, does not count.
_EXPORT_AND_LOAD = """
import ctypes, gc, hashlib, json, sys
from pathlib import Path

import numpy as np
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro_export_stablehlo import load_bundle


class Tower(nitro.Experiment):
    def build_data(self):
        return {}

    def build_model(self, rngs):
        layers = (nnx.Linear(2048, 2048, rngs=rngs) for _ in range(int(sys.argv[2])))
        return nnx.Sequential(*layers)

    def loss(self, y, *, label):
        return y.mean()

    def forward(self, model, *, x):
        return model(x)

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 2048))]

    def export_outputs(self):
        return [ExportSpec("y")]


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def begin():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


run = nitro.Nitro(Tower(), data={}, logger=None, checkpointer=None)
before = begin()
path = nitro.export_model(run, "stablehlo", dir=sys.argv[1], name="tower", batch_sizes=(1, 8))
exported = status("VmHWM") - before
digests = {}
for path_, variable in nnx.to_flat_state(nnx.state(run.model, nnx.Param)):
    data = np.asarray(variable[...]).tobytes()
    digests[".".join(map(str, path_))] = hashlib.sha256(data).hexdigest()
del run, variable, data
before = begin()
bundle = load_bundle(path)
print(json.dumps([exported, status("VmHWM") - before, digests]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_an_export_needs_no_second_copy_of_300_mb(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXPORT_AND_LOAD, str(tmp_path), str(_NUM_LAYERS)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    exported, loaded, digests = json.loads(done.stdout.splitlines()[-1])
    weights_bytes = _NUM_LAYERS * _LAYER_BYTES
    # Tracing and compiling take about 75 MB, whatever the weights.
    assert exported < weights_bytes / 2
    # On the device once; the tensor in turn is in the file's pages, and turned.
    assert weights_bytes < loaded < weights_bytes + 2 * _LAYER_BYTES + 100_000_000
    with safe_open(tmp_path / "tower" / "weights.safetensors", "numpy") as stored:
        assert set(stored.keys()) == set(digests)
        for name, digest in digests.items():
            data = stored.get_tensor(name).T.tobytes()
            assert hashlib.sha256(data).hexdigest() == digest, name


class _Sparse:
    """A file in which large blocks, which are zeros here, are left as holes."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened

    def write(self, data: Any) -> None:
        if len(data) < 2**20:
            self._opened.write(data)
        else:
            self._opened.seek(len(data), 1)


@pytest.mark.slow
def test_offsets_beyond_2_and_4_gb_are_right(tmp_path: Path) -> None:
    # Zeros without memory of their own: 2.5 GiB each.
    hole = np.broadcast_to(np.float32(0), (640, 2**20))
    small = {
        name: np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32)
        for seed, name in enumerate("bd")
    }
    tensors = {"a": hole, "b": small["b"], "c": hole, "d": small["d"]}
    path = tmp_path / "w.safetensors"

    with path.open("wb") as opened:
        write_tensors(_Sparse(opened), tensors, reverse_axes=True)

    assert path.stat().st_size > 5 * 2**30
    assert path.stat().st_blocks * 512 < 2**20  # it is sparse, or the disk would be full
    with path.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    offsets = {name: entry["data_offsets"][0] for name, entry in header.items()}
    assert offsets == {"a": 0, "b": 640 * 2**22, "c": 640 * 2**22 + 60, "d": 2 * 640 * 2**22 + 60}
    ours = TensorFile(path, file="w", reverse_axes=True)
    with safe_open(path, "numpy") as library:
        for name, wanted in small.items():
            np.testing.assert_array_equal(library.get_tensor(name).T, wanted)
            np.testing.assert_array_equal(ours[name], wanted)
        assert library.get_slice("c").get_shape() == [2**20, 640]
    assert ours.shape("c") == (640, 2**20)
    assert not ours["c"][-1, -5:].any()
