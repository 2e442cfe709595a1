"""What a user's type checker says of an experiment, in pyright's default mode."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_EXPERIMENTS = """
from typing import Any

import nitro


class Fields(nitro.Experiment):
    learning_rate: float = 1e-3
    weight_decay: float = 0.1

    def build_data(self) -> dict[str, Any]:
        return {}


class Hooks(nitro.Experiment):
    def learning_rate(self, group: str | None = None) -> float:
        return 2 * super().learning_rate(group)

    def weight_decay(self, group: str) -> float:
        return 0.1


rate: float = Fields(learning_rate=3e-3).learning_rate
run = nitro.Nitro(Fields(), max_epochs=3, sanity_check=False)
"""

_MISTAKES = """
Fields(learning_rates=3e-3)
nitro.Nitro(Fields(), max_epoch=3)
"""


def test_rate_as_a_field_pleases_and_misspelt_keywords_do_not(tmp_path: Path) -> None:
    checker = Path(sys.executable).with_name("basedpyright")
    if not checker.exists() and shutil.which("basedpyright") is None:
        pytest.skip("needs basedpyright, of the group `lint`")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    (tmp_path / "user.py").write_text(_EXPERIMENTS + _MISTAKES)

    command = [str(checker), "--outputjson", "--pythonpath", sys.executable, "user.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )

    told = json.loads(done.stdout)["generalDiagnostics"]
    first = _EXPERIMENTS.count("\n") + 1  # the lines of the two mistakes, counted from 0
    assert [(d["range"]["start"]["line"], d["rule"]) for d in told] == [
        (first, "reportCallIssue"),
        (first + 1, "reportCallIssue"),
    ]
