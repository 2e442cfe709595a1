"""What other libraries would raise or print on their own, in Nitro's words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nitro.errors import BundleError
from nitro_export_stablehlo import load_bundle

_SCRIPT = """
import resource, sys
import numpy as np
from flax import nnx
import nitro

class Wide(nitro.Experiment):
    def build_data(self):
        data = {"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.float32)}
        return {"train": nitro.ArrayLoader(data, 4)}

    def build_model(self, rngs):
        return nnx.Linear(4, 20_000, rngs=rngs)

    def forward(self, model, *, x):
        return model(x)[:, 0]

    def loss(self, out, *, y):
        return ((out - y) ** 2).mean()

    def export_inputs(self):
        return [nitro.ExportSpec("x", "float32", (1, 4))]

    def export_outputs(self):
        return [nitro.ExportSpec("out")]

run = nitro.Nitro(Wide(), run_dir=sys.argv[1], progress=False, logger=None, checkpointer=CHECK)
ACT
"""

_LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))"
"""As on a full disk, a write fails in the middle of a file; for root, too."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")


def _run(folder: Path, check: str, *actions: str) -> subprocess.CompletedProcess[str]:
    script = _SCRIPT.replace("CHECK", check).replace("ACT", "\n".join(actions))
    command = [sys.executable, "-c", script, str(folder / "run")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_a_disk_that_is_full_during_an_export_is_told_and_nothing_is_left(tmp_path):
    export = 'nitro.export_model(run, "stablehlo", dir="out", name="m", verify=False)'
    done = _run(tmp_path, "None", "run.train()", _LIMIT, export)

    last = done.stderr[done.stderr.rindex("nitro.errors.ExportError") :]
    assert "out/m` cannot be written: File too large" in last
    assert "choose another `dir`" in last
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_that_cannot_be_written_is_told_once_without_tracebacks_of_threads(tmp_path):
    done = _run(tmp_path, "nitro.TopK()", _LIMIT, "run.train()")

    assert "nitro.errors.CheckpointError" in done.stderr
    assert "_SignalingThread" not in done.stderr
    assert "ERROR:absl" not in done.stderr


def test_mapping_over_a_bundle_is_refused_with_what_works(bundles, programs):
    bundle = load_bundle(bundles["mlp"])
    pixels = np.random.default_rng(0).integers(0, 255, (3, 1, 16), dtype=np.uint8)

    def call(row):
        return bundle.apply(pixels=row)["logits"]

    with pytest.raises(BundleError, match=r"jax\.vmap[\s\S]*all rows in one call[\s\S]*lax\.map"):
        jax.vmap(call)(jnp.asarray(pixels))
    mapped = jax.lax.map(call, jnp.asarray(pixels))
    assert np.allclose(mapped[:, 0], bundle(pixels=pixels[:, 0])["logits"], atol=1e-5)
