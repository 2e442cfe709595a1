"""What starting up imports, told by `sys.modules` of a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HEAVY = {"flax", "jax", "jaxlib", "optax", "orbax", "tensorflow"}

_RUN_CLI = "import sys; sys.argv = ['nitro', {word!r}]; from nitro.__main__ import main; main()"


def _modules_after(code: str) -> set[str]:
    """The top-level packages and modules imported once `code` has run or exited."""
    script = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps([m.split('.')[0] for m in sys.modules]),"
        " file=sys.stderr))\n" + code
    )
    environment = {name: value for name, value in os.environ.items() if name != "EAGER_IMPORT"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


@pytest.mark.parametrize(
    "code",
    [
        "import nitro",
        "import nitro; nitro.__version__",
        "import nitro.errors, nitro.hooks, nitro._plugins, nitro._cli",
        "from nitro._plugins import discover; discover()",
        _RUN_CLI.format(word="--help"),
        _RUN_CLI.format(word="--version"),
        _RUN_CLI.format(word="backends"),
        f"from nitro._cli import main; main(['runs', {str(Path(__file__).parent)!r}])",
    ],
)
def test_start_up_imports_no_jax(code: str) -> None:
    assert _modules_after(code) & _HEAVY == set()


def test_import_nitro_imports_nothing_that_it_does_not_need() -> None:
    imported = _modules_after("import nitro") - _modules_after("import lazy_loader")

    assert imported == {"nitro"} | imported.intersection(sys.stdlib_module_names)
