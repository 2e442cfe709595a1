"""Programs and fingerprints where code is edited live: notebook cells and reloaded modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import nitro
from nitro.errors import DriftWarning

pytest.importorskip("IPython", reason="needs IPython: uv sync --group notebook")
from IPython.core.interactiveshell import InteractiveShell

FEATURES = "SCALE = {scale}\n\n\ndef scaled(loss):\n    return {body}\n"

EXPERIMENT = """
import numpy as np
from flax import nnx
import nitro
{helper}
class Line(nitro.Experiment):
    slope: nitro.GraphConst[float] = 3.0

    def build_data(self):
        x = np.linspace(-1, 1, 24, dtype=np.float32)[:, None]
        return {{"val": nitro.ArrayLoader({{"x": x, "y": self.slope * x[:, 0]}}, 8)}}

    def build_model(self, rngs):
        return nnx.Linear(1, 1, rngs=rngs)

    def forward(self, model, *, x):
        return model(x)[:, 0]

    def loss(self, height, *, y):
        return {loss}
"""
LOSS = "((height - y) ** 2).mean()"


@pytest.fixture
def shell():
    shell = InteractiveShell.instance()
    yield shell
    shell.reset(new_session=False)
    InteractiveShell.clear_instance()


def run_cell(shell: Any, cell: str) -> None:
    shell.run_cell(cell).raise_error()


def make_run(shell: Any, folder: Path) -> nitro.Nitro:
    shell.user_ns["folder"] = folder
    run_cell(shell, "run = nitro.Nitro(Line(), run_dir=folder, logger=None, checkpointer=None)")
    return shell.user_ns["run"]


def test_a_cell_run_again_unchanged_moves_nothing(shell, tmp_path):
    cell = EXPERIMENT.format(helper="", loss=LOSS)
    run_cell(shell, cell)
    make_run(shell, tmp_path).validate()
    before = nitro.cache_stats()["misses"]

    run_cell(shell, cell)
    make_run(shell, tmp_path).validate()

    assert nitro.cache_stats()["misses"] == before


def test_an_edited_cell_is_told_to_the_old_handle_and_taken_by_a_new_one(shell, tmp_path):
    run_cell(shell, EXPERIMENT.format(helper="", loss=f"1.0 * {LOSS}"))
    old = make_run(shell, tmp_path)
    before = old.validate()["val_loss"]

    run_cell(shell, EXPERIMENT.format(helper="", loss=f"2.0 * {LOSS}"))
    with pytest.warns(DriftWarning, match=r"Line\.loss.*return 1\.0.* → `return 2\.0"):
        kept = old.validate()["val_loss"]

    assert kept == before
    assert make_run(shell, tmp_path).validate()["val_loss"] == pytest.approx(2 * before, rel=1e-6)


def test_a_helper_redefined_in_a_later_cell_recompiles_what_calls_it(shell, tmp_path):
    run_cell(shell, "def scaled(loss):\n    return 1.0 * loss")
    run_cell(shell, EXPERIMENT.format(helper="", loss=f"scaled({LOSS})"))
    before = make_run(shell, tmp_path).validate()["val_loss"]
    misses = nitro.cache_stats()["by_role"]["forward"]["misses"]

    run_cell(shell, "def scaled(loss):\n    return 5.0 * loss")

    assert make_run(shell, tmp_path).validate()["val_loss"] == pytest.approx(5 * before, rel=1e-6)
    assert nitro.cache_stats()["by_role"]["forward"]["misses"] == misses


@pytest.fixture
def features(tmp_path, monkeypatch):
    """A module of the user's, on the path, that tests rewrite."""
    path = tmp_path / "live_features.py"

    def write(scale: float, body: str = "SCALE * loss") -> None:
        path.write_text(FEATURES.format(scale=scale, body=body))
        importlib.invalidate_caches()
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.unlink(missing_ok=True)

    write(1.0)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop("live_features", None)


def test_a_reloaded_module_recompiles_what_calls_it(shell, features, tmp_path):
    helper = "import live_features"
    run_cell(shell, EXPERIMENT.format(helper=helper, loss=f"live_features.scaled({LOSS})"))
    old = make_run(shell, tmp_path)
    before = old.validate()["val_loss"]

    features(3.0)
    importlib.reload(sys.modules["live_features"])

    with pytest.warns(DriftWarning, match=r"SCALE: 1\.0 → 3\.0"):
        assert old.validate()["val_loss"] == before
    assert make_run(shell, tmp_path).validate()["val_loss"] == pytest.approx(3 * before, rel=1e-6)


def test_autoreload_is_followed(shell, features, tmp_path):
    run_cell(shell, "%load_ext autoreload\n%autoreload 2")
    helper = "from live_features import scaled"
    run_cell(shell, EXPERIMENT.format(helper=helper, loss=f"scaled({LOSS})"))
    before = make_run(shell, tmp_path).validate()["val_loss"]

    features(1.0, body="SCALE * loss * 7.0")
    run_cell(shell, "pass")

    assert make_run(shell, tmp_path).validate()["val_loss"] == pytest.approx(7 * before, rel=1e-6)
