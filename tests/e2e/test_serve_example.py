"""The example of serving, shrunk: an answer over HTTP from a process without the model."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_served_model_is_as_good_as_the_trained_one(tmp_path, monkeypatch, capsys):
    # Not kserve, which the server imports: its messages clash with those of tritonclient.
    for package in ("sklearn", "tritonclient.http"):
        pytest.importorskip(package, reason="needs uv sync --group serve")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(_EXAMPLES)
    spec = importlib.util.spec_from_file_location("serve_example", _EXAMPLES / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    module.main(max_epochs=3)
    sys.modules.pop("digits")

    served, here = re.findall(r"accuracy (\d\.\d+); here (\d\.\d+)", capsys.readouterr().out)[0]
    assert served == here
    assert float(here) > 0.3  # three epochs; guessing gives 0.1
