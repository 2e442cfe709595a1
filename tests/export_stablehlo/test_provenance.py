"""What a written bundle says of the run that it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import nitro

_SOURCE = """
import sys
import numpy as np
from flax import nnx
import nitro

class Typed(nitro.Experiment):
    width: nitro.GraphConst[int] = 2

    @classmethod
    def presets(cls):
        return {"small": {"width": 1}}

    def build_data(self):
        data = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}
        return {"train": nitro.ArrayLoader(data, 2)}

    def build_model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(3, self.width, rngs=rngs), nnx.Linear(self.width, 1, rngs=rngs)
        )

    def forward(self, model, *, x):
        return model(x)

    def loss(self, out, *, y):
        return ((out[:, 0] - y) ** 2).mean()

    def export_inputs(self):
        return [nitro.ExportSpec("x", "float32", (1, 3))]

    def export_outputs(self):
        return [nitro.ExportSpec("out")]
"""


@pytest.fixture
def typed() -> Any:
    names: dict[str, Any] = {"__name__": __name__}
    exec(_SOURCE, names)
    return names["Typed"]


def _facts(run: nitro.Nitro, folder: Path) -> dict[str, Any]:
    path = nitro.export_model(run, "stablehlo", dir=folder, name="m", verify=False, overwrite=True)
    return yaml.safe_load((path / "manifest.yaml").read_text())["provenance"]


def test_the_preset_is_named(typed: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"logger": None, "run_dir": tmp_path / "run", "progress": False}
    with nitro.Nitro.from_preset(typed, "small", **options) as run:
        before = _facts(run, tmp_path)
        run.train()
        trained = _facts(run, tmp_path)
    with nitro.Nitro(typed(), data={}, logger=None, checkpointer=None) as run:
        plain = _facts(run, tmp_path)
    record = f"{tmp_path / 'run'}@latest"
    with nitro.Nitro(typed(width=1), checkpoint=record, data={}, logger=None) as run:
        restored = _facts(run, tmp_path)

    assert (before["preset"], before["step"]) == ("small", 0)
    assert (trained["preset"], trained["step"]) == ("small", 2)
    assert trained["config"]["width"] == 1
    assert "preset" not in plain
    # The handle was built without, the weights were not.
    assert (restored["preset"], restored["step"]) == ("small", 2)
    assert restored["run_dir"] == str(tmp_path / "run")


def test_a_class_without_a_file_is_exported(tmp_path: Path, warm_python: Any) -> None:
    code = (
        _SOURCE
        + """
with nitro.Nitro(Typed(), data={}, logger=None, checkpointer=None) as run:
    nitro.export_model(run, "stablehlo", dir=sys.argv[1], name="m", verify=False)
"""
    )

    warm_python.run("-c", code, tmp_path)

    facts = yaml.safe_load((tmp_path / "m" / "manifest.yaml").read_text())["provenance"]
    assert facts["experiment"] == "Typed"
    assert "git_commit" not in facts


def _bytes(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_two_exports_of_one_state_are_equal_to_the_byte_at_a_given_time(
    typed, tmp_path, monkeypatch
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    with nitro.Nitro(typed(), run_dir=tmp_path / "run", progress=False).train() as run:
        paths = [
            nitro.export_model(run, "stablehlo", dir=tmp_path / folder, name="m")
            for folder in ("a", "b")
        ]
    first, second = map(_bytes, paths)

    assert first == second
    assert len(first) > 5
    facts = yaml.safe_load((paths[0] / "manifest.yaml").read_text())["provenance"]
    assert facts["exported_at"] == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize("text", ["yesterday", "", "1e99", "9" * 30])
def test_a_time_that_is_no_number_of_seconds_is_refused(typed, tmp_path, monkeypatch, text):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    run = nitro.Nitro(typed(), run_dir=tmp_path / "run", progress=False)

    with pytest.raises(nitro.errors.ConfigError, match="whole seconds since 1970"):
        _facts(run, tmp_path)
