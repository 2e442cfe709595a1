"""The TF package before it can write: it says so, and needs no TensorFlow to say it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nitro.errors import ExportError
from nitro.hooks import ExportBackend
from nitro_export_tf import _plugin


@pytest.fixture
def backend() -> ExportBackend:
    (info,) = _plugin.nitro_export_backends()
    return info.load()


def test_plugin_offers_the_backend_tf(backend: ExportBackend) -> None:
    (info,) = _plugin.nitro_export_backends()

    assert isinstance(backend, ExportBackend)
    assert backend.name == info.name == "tf"


def test_write_refuses_and_leaves_nothing(backend: ExportBackend, tmp_path: Path) -> None:
    program: Any = SimpleNamespace(name="digits_v1")

    with pytest.raises(ExportError, match="`digits_v1` cannot be written") as refusal:
        backend.write(program, tmp_path)

    assert "`stablehlo`" in refusal.value.expected
    assert 'pip install "nitro-core[stablehlo]"' in refusal.value.fix
    assert list(tmp_path.iterdir()) == []


def test_load_refuses(backend: ExportBackend, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has no writer yet"):
        backend.load(tmp_path)


def test_loading_the_backend_imports_no_tensorflow() -> None:
    source = Path(_plugin.__file__).parents[1]
    script = (
        f"import sys; sys.path.insert(0, {str(source)!r}); sys.modules['tensorflow'] = None\n"
        "from nitro_export_tf._plugin import nitro_export_backends\n"
        "nitro_export_backends()[0].load()\n"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
