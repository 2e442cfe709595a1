"""The plugin of `examples/third_party_backend`, as a third party would install and use it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "third_party_backend"
_PAGE = _ROOT / "docs" / "how-to" / "write-a-backend.md"

_DRIVER = """
import sys
import numpy as np
import nitro
from nitro.testing import Scenes, check_backend, make_scenes

if __name__ == "__main__":
    run = nitro.Nitro(Scenes(), run_dir="run", checkpointer=None).train()
    path = nitro.export_model(run, "npz", dir="out", name="scenes_v1", batch_sizes=(1, 8))
    print(path.name, *sorted(file.name for file in path.iterdir()))
    print(len(check_backend("npz")), "checks")
    try:
        nitro.export_model(run, "stablehlo", dir="out", name="x")
    except nitro.errors.BackendError as error:
        print(error.fix)
"""


def _source(title: str) -> str:
    return (_EXAMPLE / title).read_text()


def test_the_page_is_the_plugin() -> None:
    blocks = dict(re.findall(r'^```\w+ title="(.+?)"\n(.+?)^```', _PAGE.read_text(), re.M | re.S))
    blocks.pop("tests/test_backend.py")

    assert blocks == {title: _source(title) for title in blocks}
    assert set(blocks) == {
        "pyproject.toml",
        "src/nitro_export_npz/_plugin.py",
        "src/nitro_export_npz/_backend.py",
    }


def test_the_plugin_has_under_120_lines() -> None:
    files = [_EXAMPLE / "pyproject.toml", *_EXAMPLE.rglob("src/**/*.py")]

    assert sum(len(file.read_text().splitlines()) for file in files) < 120


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own, with the wheels of the core and of the plugin only."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv to build wheels and to make an environment")
    folder = tmp_path_factory.mktemp("third-party")
    for source in (_ROOT / "packages" / "nitro-core", _EXAMPLE):
        _uv("build", "--wheel", f"--out-dir={folder / 'dist'}", str(source))
    _uv("venv", f"--python={sys.executable}", str(folder / "venv"))
    wheels = map(str, (folder / "dist").glob("*.whl"))
    _uv("pip", "install", f"--python={folder / 'venv'}", *wheels)
    return folder


def _uv(*arguments: str) -> None:
    # From the cache where it has everything: tests need no network then.
    for options in (["--offline"], []):
        command = ["uv", *arguments[:1], *arguments[1:], *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    pytest.fail(f"{' '.join(command)}\n{done.stderr}")


@pytest.mark.slow
def test_an_installed_plugin_exports_and_passes_every_check(environment: Path) -> None:
    (environment / "driver.py").write_text(_DRIVER)

    done = subprocess.run(
        [environment / "venv" / "bin" / "python", "-I", "driver.py"],
        cwd=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "scenes_v1 model.npz" in done.stdout
    assert "7 checks" in done.stdout
    assert 'pip install "nitro-core[stablehlo]"' in done.stdout


@pytest.mark.slow
def test_the_listing_is_what_the_page_shows(environment: Path) -> None:
    command = [environment / "venv" / "bin" / "nitro", "backends"]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    (documented,) = re.findall(r"^npz  .*$", _PAGE.read_text(), re.MULTILINE)
    assert done.stdout.split() == documented.split()
