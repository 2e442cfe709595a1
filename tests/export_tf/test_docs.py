"""The code of `docs/how-to/export-savedmodel.md` runs as it stands there, in its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec

_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "export-savedmodel.md"


class Digits(nitro.Experiment):
    """The experiment that the page takes for granted."""

    def build_data(self):
        rng = np.random.default_rng(0)
        img = rng.uniform(size=(64, 64)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"img": img, "label": rng.integers(0, 10, 64)}, 32)}

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Linear(64, 10, rngs=rngs)

    def forward(self, model, *, img):
        return model(img)

    def loss(self, logits, *, label):
        return (logits[jnp.arange(len(label)), label] - 1).mean()

    def export_inputs(self):
        return [ExportSpec("img", "uint8", (1, 64))]

    def export_preprocess(self, img):
        return {"img": img.astype(jnp.float32) / 16}

    def export_outputs(self):
        return [ExportSpec("logits")]


@pytest.mark.tf
@pytest.mark.slow
def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    names: dict[str, Any] = {
        "nitro": nitro,
        "keras": keras,
        "run": nitro.Nitro(Digits(), run_dir=tmp_path / "run", progress=False).train(),
        "pixels": rng.integers(0, 16, (40, 64), dtype=np.uint8),
        "labels": rng.integers(0, 10, 40),
    }
    blocks = re.findall(r"^```python\n(.+?)^```", _PAGE.read_text(), re.M | re.S)

    for block in blocks:
        # The page's own sources, run as a reader would.
        exec(block, names)

    assert len(blocks) >= 9
    assert sorted(p.name for p in Path("export_out").iterdir()) == [
        *("digits_v1", "for_2_18", "tuned")
    ]
    assert names["flat"][4:8] == b"TFL3"
