"""The bytes of a bundle depend on code, data and versions, and on no machine or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROJECT = """
import numpy as np
import optax
from flax import nnx
import nitro
from nitro import Device, ExportSpec, GraphConst


def points(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 8)).astype(np.float32)
    return {"x": x, "label": x[:, :4].argmax(-1)}


class Points(nitro.Experiment):
    width: GraphConst[int] = 8
    scale: Device[float] = 2.0

    def build_data(self):
        return {
            "train": nitro.ArrayLoader(points(64), 16, shuffle=True),
            "val": nitro.ArrayLoader(points(20), 16),
        }

    def build_model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(8, self.width, rngs=rngs),
            nnx.BatchNorm(self.width, rngs=rngs),
            nnx.Dropout(0.2, rngs=rngs),
            nnx.relu,
            nnx.Linear(self.width, 4, rngs=rngs),
        )

    def forward(self, model, *, x):
        return {"logits": self.scale * model(x)}

    def loss(self, outputs, *, label):
        logits = outputs["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 8))]

    def export_outputs(self):
        return [ExportSpec("logits")]


run = nitro.Nitro(Points(), max_epochs=2).train()
nitro.export_model(run, "stablehlo", dir="out", name="v1", batch_sizes=(1, 32))
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, warm_python: Any) -> list[Path]:
    """Two bundles, each trained and exported from a copy of the project of its own."""
    pytest.importorskip("nitro_export_stablehlo")
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "another-folder")]
    for folder, above in zip(folders, ("", "# one line more\n"), strict=True):
        (folder / "project.py").write_text(above + PROJECT)
        warm_python.run("project.py", cwd=folder)
    return [folder / "out" / "v1" for folder in folders]


def _files(bundle: Path) -> dict[str, bytes]:
    paths = (path for path in bundle.rglob("*") if path.is_file())
    return {path.relative_to(bundle).as_posix(): path.read_bytes() for path in paths}


def test_programs_and_weights_have_the_same_bytes(bundles: list[Path]) -> None:
    first, second = map(_files, bundles)

    assert first.keys() == second.keys()
    kinds = {Path(name).suffix for name in first}
    assert {".mlir", ".safetensors"} < kinds
    differing = [name for name in first if first[name] != second[name]]
    # Both hold the provenance, and the digest of what holds it.
    assert set(differing) <= {"manifest.yaml", "nitro.json"}


def test_no_file_but_the_provenance_names_a_path_of_the_machine(bundles: list[Path]) -> None:
    (folder,) = {bundle.parent.parent for bundle in bundles[:1]}
    marks = [str(folder).encode(), b"project.py", b"site-packages", str(Path.home()).encode()]

    naming = {
        name for name, data in _files(bundles[0]).items() if any(mark in data for mark in marks)
    }

    assert naming <= {"manifest.yaml", "nitro.json"}
