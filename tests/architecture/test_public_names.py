"""The facade: one list of names, each of which is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import nitro

PUBLIC = {
    "ArrayLoader",
    "Device",
    "EarlyStop",
    "Experiment",
    "FROZEN",
    "ExportSpec",
    "GraphConst",
    "Host",
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "MapLoader",
    "MultiLogger",
    "Nitro",
    "Phase",
    "PhaseEvent",
    "Reporter",
    "TensorBoardLogger",
    "TopK",
    "Weights",
    "__version__",
    "cache_clear",
    "cache_stats",
    "checkpoint_info",
    "checkpoints",
    "data",
    "default_no_decay",
    "errors",
    "explain_compiles",
    "export",
    "check_export",
    "export_model",
    "hooks",
    "on_phase",
    "runs",
    "setup_devices",
    "testing",
}


def test_public_names_are_those_promised() -> None:
    assert set(nitro.__all__) == PUBLIC
    assert set(dir(nitro)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_resolves(name: str) -> None:
    assert hasattr(nitro, name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        nitro.Trainer  # noqa: B018


def test_everything_can_be_imported_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import nitro"],
        env={**os.environ, "EAGER_IMPORT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
