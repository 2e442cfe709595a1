"""What the packages promise in their metadata, read from the sources."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from nitro._plugins import OFFICIAL_EXTRAS

_ROOT = Path(__file__).parents[2]
_PACKAGES = sorted(path.parent for path in _ROOT.glob("packages/*/pyproject.toml"))


def _project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def _source(package: Path) -> Path:
    (source,) = (package / "src").iterdir()
    return source


@pytest.fixture(params=_PACKAGES, ids=lambda path: path.name)
def package(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_package_is_typed_licensed_and_described(package: Path) -> None:
    assert (_source(package) / "py.typed").is_file()
    assert (package / "LICENSE").read_text() == (_ROOT / "LICENSE").read_text()
    assert len((package / "README.md").read_text().splitlines()) > 5


def test_packages_agree_on_python_license_and_version(package: Path) -> None:
    core = _ROOT / "packages" / "nitro-core"

    for field in ("requires-python", "license"):
        assert _project(package)[field] == _project(core)[field]
    assert (_source(package) / "_version.py").read_text() == (
        _source(core) / "_version.py"
    ).read_text()


def test_entry_points_name_modules_that_exist(package: Path) -> None:
    project = _project(package)
    targets = [
        *project.get("scripts", {}).values(),
        *project.get("entry-points", {}).get("nitro", {}).values(),
    ]

    for target in targets:
        module = target.partition(":")[0].replace(".", "/")
        assert (package / "src" / f"{module}.py").is_file(), target


def test_extras_are_the_official_backends() -> None:
    extras = _project(_ROOT / "packages" / "nitro-core")["optional-dependencies"]

    backends = {name: [f"nitro-export-{name}"] for name in OFFICIAL_EXTRAS}
    assert {name: extras[name] for name in OFFICIAL_EXTRAS} == backends
    assert set(extras) - set(backends) == {"mlflow", "plot", "serve", "tensorboard"}
