"""The backend of `docs/how-to/write-a-backend.md` works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-backend.md"

_DRIVER = """
import sys
from pathlib import Path
import numpy as np
from nitro._plugins import get_backend
from nitro.errors import ConfigError
from nitro.export import ExportProgram, ExportSpec

program = ExportProgram(
    name="sum_v1",
    fn=lambda x, bias, w: (x @ w + bias,),
    inputs=(ExportSpec("x", "float32", (1, 3)),),
    outputs=(ExportSpec("y", "float32", (1, 2)),),
    weights={"w": np.arange(6, dtype=np.float32).reshape(3, 2), "bias": np.ones(2, np.float32)},
    batch_sizes=(1, 4),
    golden=None,
    provenance={},
)
backend, path = get_backend("npz"), Path(sys.argv[1])
backend.write(program, path)
x = np.ones((4, 3), np.float32)
np.testing.assert_array_equal(backend.load(path)(x=x)["y"], x @ program.weights["w"] + 1)
try:
    backend.write(program, path, bogus=1)
except ConfigError:
    print("refused")
"""


def test_documented_backend_is_found_writes_and_loads(tmp_path: Path) -> None:
    site, artifact = tmp_path / "site", tmp_path / "artifact"
    artifact.mkdir()
    _install(site)

    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(artifact)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"


def test_documented_listing_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    done = subprocess.run(
        [sys.executable, "-m", "nitro", "backends"], capture_output=True, text=True, check=True
    )

    listed = next(line for line in done.stdout.splitlines() if line.startswith("npz"))
    (documented,) = re.findall(r"^npz  .*$", _PAGE.read_text(), re.MULTILINE)
    assert listed.split() == documented.split()


def _install(site: Path) -> None:
    """Lays out the page's titled code blocks as an installed distribution."""
    blocks = re.findall(r'^```\w+ title="(.+?)"\n(.+?)^```', _PAGE.read_text(), re.M | re.S)
    files = dict(blocks)
    metadata = site / "nitro_export_npz-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nitro-export-npz\nVersion: 1.0\n"
    )
    (entry_point,) = re.findall(r'^npz = "(.+)"$', files.pop("pyproject.toml"), re.M)
    (metadata / "entry_points.txt").write_text(f"[nitro]\nnpz = {entry_point}\n")
    for name, source in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(source)
