"""The shipped example: shrunk, and as it stands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nitro

_EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, with the current folder out of the way."""
    pytest.importorskip("sklearn", reason="needs scikit-learn: uv sync")
    pytest.importorskip("nitro_export_stablehlo")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("digits", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shrunk_example_serves_what_it_validates(digits: Any, tmp_path: Path) -> None:
    run = nitro.Nitro(digits.Digits(width=16, max_epochs=2), checkpointer=None).train()

    bundle = nitro.export_model(run, "stablehlo", dir=tmp_path, name="v1", batch_sizes=(1, 32))

    assert digits.serve(bundle) == pytest.approx(run.validate()["acc"])


@pytest.mark.slow
def test_example_reaches_its_accuracy_on_both_sides(
    digits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    digits.main()

    here, served = map(float, re.findall(r"accuracy.*?(\d\.\d+)", capsys.readouterr().out))
    assert here == served
    assert here >= 0.95
