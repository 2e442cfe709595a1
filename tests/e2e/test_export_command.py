"""`nitro train`, then `nitro export` by the run's directory alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nitro import _cli

loader = pytest.importorskip("nitro_export_stablehlo")

_SOURCE = """
import numpy as np
from flax import nnx

import nitro
from nitro import ExportSpec


class Line(nitro.Experiment):
    width: nitro.GraphConst[int] = 2

    def build_data(self):
        x = np.linspace(0, 1, 12, dtype=np.float32)[:, None]
        return {"train": nitro.ArrayLoader({"x": x, "y": 2 * x[:, 0]}, 4)}

    def build_model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(1, self.width, rngs=rngs), nnx.Linear(self.width, 1, rngs=rngs)
        )

    def forward(self, model, *, x):
        return model(x)[:, 0]

    def loss(self, out, *, y):
        return ((out - y) ** 2).mean()

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 1))]

    def export_outputs(self):
        return [ExportSpec("out")]
"""


def test_run_is_exported_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("line.py").write_text(_SOURCE)

    def run(*words: str) -> tuple[Any, str, str]:
        try:
            _cli.main(words)
        except SystemExit as exit_:
            captured = capsys.readouterr()
            return exit_.code, captured.out, captured.err
        raise AssertionError

    try:
        assert run("train", "line.py:Line", "--set", "width=3", "--run-dir", "r")[0] == 0
        code, out, err = run("export", "r", "--to", "stablehlo", "--name", "line_v1")
        again = run("export", "r", "--to", "stablehlo", "--name", "line_v1")
        unknown = run("export", "r", "--to", "stablehl")
    finally:
        sys.modules.pop("line", None)

    assert code == 0, err
    assert Path(out.strip()) == tmp_path / "export_out" / "line_v1"
    bundle = loader.load_bundle(out.strip())
    assert bundle(x=np.ones((1, 1), np.float32))["out"].shape == (1,)
    assert again[0] == 1
    assert "line_v1" in again[2]
    assert "stablehlo" in unknown[2]
