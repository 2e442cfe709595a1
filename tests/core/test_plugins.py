"""Plugins as users have them: real distributions, found in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nitro import _plugins
from nitro.errors import BackendError

Install = Callable[..., None]
Ask = Callable[..., Any]

_GOOD = """
from nitro.hooks import BackendInfo, hookimpl

class Backend:
    name = {name!r}
    def write(self, program, path, **options): ...
    def load(self, path): ...

@hookimpl
def nitro_export_backends():
    return [BackendInfo(name={name!r}, summary="A toy.", load=Backend)]
"""

_DRIVER = """
import json, sys
from nitro import _plugins
from nitro.errors import NitroError

def ask(name):
    try:
        return _plugins.get_backend(name).name
    except NitroError as error:
        return {"error": str(error), "cause": type(error.__cause__).__name__}

found = _plugins.discover()
print(json.dumps({
    "backends": {name: backend.distribution for name, backend in found.backends.items()},
    "failures": {failure.name: failure.distributions for failure in found.failures},
    "asked": {name: ask(name) for name in sys.argv[1:]},
    "heavy": sorted({"jax", "flax", "optax", "orbax", "numpy"} & set(sys.modules)),
}))
"""


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Installs a package with one module and one entry point into `tmp_path`."""

    def write(source: str, *, package: str, entry_point: str, version: str = "1.0") -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        (metadata / "entry_points.txt").write_text(f"[nitro]\n{entry_point} = {module}\n")

    return write


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Runs discovery where the packages of `install` are found, and asks for backends."""

    def run(*names: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", _DRIVER, *names],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_installed_backend_is_found_and_loaded(install: Install, ask: Ask) -> None:
    install(_GOOD.format(name="toy"), package="nitro-toy", entry_point="toy", version="2.1")

    answer = ask("toy")

    assert answer["backends"]["toy"] == "nitro-toy 2.1"
    assert answer["asked"]["toy"] == "toy"


def test_discovery_imports_no_heavy_library(install: Install, ask: Ask) -> None:
    install(_GOOD.format(name="toy"), package="nitro-toy", entry_point="toy")

    assert ask()["heavy"] == []


@pytest.mark.parametrize(
    ("source", "message", "cause"),
    [
        pytest.param(
            "import package_that_is_absent",
            "Plugin `bad` of nitro-bad 1.0 cannot be imported: ModuleNotFoundError: "
            "No module named 'package_that_is_absent'",
            "ModuleNotFoundError",
            id="raises on import",
        ),
        pytest.param(
            "raise SystemExit(3)",
            "Plugin `bad` of nitro-bad 1.0 cannot be imported: SystemExit: 3",
            "SystemExit",
            id="exits on import",
        ),
        pytest.param(
            _GOOD.format(name="bad").replace("nitro_export_backends", "nitro_export_backend"),
            "implements a hook that Nitro does not have: `nitro_export_backend`.\n"
            "  expected: one of `nitro_export_backends` (did you mean `nitro_export_backends`?)",
            "PluginValidationError",
            id="misspelt hook",
        ),
        pytest.param(
            _GOOD.format(name="bad").replace("backends()", "backends(registry)"),
            "implements a hook with a signature that this version of Nitro does not have",
            "PluginValidationError",
            id="old signature",
        ),
        pytest.param(
            _GOOD.format(name="bad").replace("@hookimpl", ""),
            "implements no hook of Nitro.\n  expected: one of `nitro_export_backends`\n"
            "  fix: mark `nitro_export_backends` with `@nitro.hooks.hookimpl`",
            "NoneType",
            id="unmarked hook",
        ),
        pytest.param(
            "",
            "fix: point the entry point at the module that holds the hooks",
            "NoneType",
            id="no hook",
        ),
        pytest.param(
            _GOOD.format(name="bad").replace("return [", "1 / 0; return ["),
            "failed to list its backends: ZeroDivisionError: division by zero",
            "ZeroDivisionError",
            id="hook raises",
        ),
        pytest.param(
            _GOOD.format(name="bad").replace("return [", "return ['bad'] or ["),
            "returned 'bad' from `nitro_export_backends`.\n"
            "  expected: an iterable of `nitro.hooks.BackendInfo`",
            "NoneType",
            id="hook returns something else",
        ),
        pytest.param(
            _GOOD.format(name="bad")
            .replace("return [", "return (")
            .replace("=Backend)]", "=Backend))"),
            "failed to list its backends: TypeError: 'BackendInfo' object is not iterable\n"
            "  expected: an iterable of `nitro.hooks.BackendInfo`",
            "TypeError",
            id="hook returns one record",
        ),
    ],
)
def test_broken_plugin_is_reported_by_name_and_stops_nobody(
    install: Install, ask: Ask, source: str, message: str, cause: str
) -> None:
    install(source, package="nitro-bad", entry_point="bad")
    install(_GOOD.format(name="toy"), package="nitro-toy", entry_point="toy")

    answer = ask("toy", "bad")

    assert answer["asked"]["toy"] == "toy"
    assert answer["failures"]["bad"] == ["nitro-bad 1.0"]
    assert message in answer["asked"]["bad"]["error"]
    assert answer["asked"]["bad"]["cause"] == cause


def test_two_backends_of_one_name_are_refused_naming_both_packages(
    install: Install, ask: Ask
) -> None:
    install(_GOOD.format(name="toy"), package="nitro-toy", entry_point="toy")
    install(_GOOD.format(name="toy"), package="other-toy", entry_point="other", version="3")

    answer = ask("toy")

    assert "toy" not in answer["backends"]
    assert answer["failures"]["toy"] == ["nitro-toy 1.0", "other-toy 3"]
    assert (
        "offered 2 times: by nitro-toy 1.0 and by other-toy 3." in (answer["asked"]["toy"]["error"])
    )


def test_unknown_backend_lists_what_is_installed_and_what_is_broken(
    install: Install, ask: Ask
) -> None:
    install(_GOOD.format(name="toy"), package="nitro-toy", entry_point="toy")
    install("import package_that_is_absent", package="nitro-bad", entry_point="bad")

    error = ask("tpy")["asked"]["tpy"]["error"]

    assert "There is no export backend `tpy`." in error
    assert "These plugins failed to load: `bad` (nitro-bad 1.0)." in error
    assert "(did you mean `toy`?)" in error


def test_backend_whose_library_is_missing_names_the_cause(install: Install, ask: Ask) -> None:
    source = _GOOD.format(name="toy") + "\ndef Backend(): import package_that_is_absent\n"
    install(source, package="nitro-toy", entry_point="toy")

    answer = ask("toy")

    assert "toy" in answer["backends"]
    assert (
        "`toy` of nitro-toy 1.0 cannot be loaded: ModuleNotFoundError"
        in (answer["asked"]["toy"]["error"])
    )
    assert answer["asked"]["toy"]["cause"] == "ModuleNotFoundError"


def test_backend_that_breaks_the_protocol_is_refused(install: Install, ask: Ask) -> None:
    source = _GOOD.format(name="toy").replace("def load", "def read")
    install(source, package="nitro-toy", entry_point="toy")

    error = ask("toy")["asked"]["toy"]["error"]

    assert "expected: an object with `write`, `load` and the name 'toy'" in error


@pytest.mark.parametrize("name", _plugins.OFFICIAL_EXTRAS)
def test_official_backend_that_is_absent_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    _plugins.discover.cache_clear()

    with pytest.raises(BackendError, match=rf'pip install "nitro-core\[{name}\]"'):
        _plugins.get_backend(name)

    _plugins.discover.cache_clear()


def test_backend_installed_after_the_first_look_is_found(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match="no export backend `late`"):
        _plugins.get_backend("late")

    install(_GOOD.format(name="late"), package="nitro-late", entry_point="late")

    assert _plugins.get_backend("late").name == "late"
    monkeypatch.undo()
    _plugins.discover.cache_clear()
