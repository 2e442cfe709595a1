"""SIGKILL at several moments of `export_model`: a whole bundle is under the name, or none."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro_export_stablehlo import load_bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the janitor through /proc"),
]

# Exports `Plain` of this file, and dies at a moment that Python's audit events tell.
_KILLED = """
import importlib.util, os, signal, sys, threading
from pathlib import Path

event, words, whom, out, source = sys.argv[1:]
spec = importlib.util.spec_from_file_location("killed_export", source)
module = importlib.util.module_from_spec(spec)
sys.modules["killed_export"] = module
spec.loader.exec_module(module)

def die():
    print("reached", flush=True)
    if whom == "container":
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

def watch(name, arguments):
    if name == event and words in str(arguments):
        die()

def wait_for_the_new_one(file):
    while not file.exists() or "description: new" not in file.read_text().replace('"', ""):
        pass
    die()

if event == "swapped":
    file = Path(out) / "m" / "manifest.yaml"
    threading.Thread(target=wait_for_the_new_one, args=(file,), daemon=True).start()
else:
    sys.addaudithook(watch)
module.export(Path(out), "new")
"""

_WRITING = ("open", "model.b1.mlir"), ("open", "golden.safetensors"), ("open", "nitro.json")
_VERIFYING = ("subprocess.Popen", "nitro.export._check"), ("open", "out_0.arrays")


class Plain(nitro.Experiment):
    """One linear layer."""

    def build_data(self):
        return {}

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Linear(4, 2, rngs=rngs)

    def loss(self, y: Any, *, label: Any):
        return y.mean()

    def forward(self, model: Any, *, x: Any):
        return model(x)

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 4))]

    def export_outputs(self):
        return [ExportSpec("y")]


def export(out: Path, description: str) -> Path:
    run = nitro.Nitro(Plain(), data={}, logger=None, checkpointer=None)
    return nitro.export_model(
        run, "stablehlo", dir=out, name="m", overwrite=True, description=description
    )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("old"), "old")


def _kill(python: Any, event: str, words: str, whom: str, out: Path) -> None:
    temporary = out.parent / f"{out.name}-temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    script = ("-c", _KILLED, event, words, whom, out, __file__)
    done = python.run(*script, env=environment, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "reached\n"), done.stderr
    assert _names(temporary) == []


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def _visible(folder: Path) -> list[str]:
    return [name for name in _names(folder) if not name.startswith(".")]


def _names_at_rest(folder: Path, wanted: list[str]) -> list[str]:
    """The names, hidden ones too, once the janitor had its time."""
    deadline = time.monotonic() + 30
    while _names(folder) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return _names(folder)


@pytest.mark.parametrize(("event", "words"), [*_WRITING, *_VERIFYING])
def test_a_killed_export_leaves_no_bundle(
    tmp_path: Path, warm_python: Any, event: str, words: str
) -> None:
    _kill(warm_python, event, words, "process", tmp_path)

    assert _visible(tmp_path) == []
    assert _names_at_rest(tmp_path, []) == []


@pytest.mark.parametrize(
    ("event", "words"), [_WRITING[1], _VERIFYING[1], ("ctypes.dlsym", "renameat2")]
)
def test_a_killed_overwrite_leaves_the_old_bundle_whole(
    tmp_path: Path, warm_python: Any, old: Path, event: str, words: str
) -> None:
    shutil.copytree(old, tmp_path / "m")

    _kill(warm_python, event, words, "container", tmp_path)

    assert _contents(tmp_path / "m") == _contents(old)
    assert _visible(tmp_path) == ["m"]
    assert len(_names(tmp_path)) == 2  # the janitor was killed, too
    export(tmp_path, "new")
    assert _names(tmp_path) == ["m"]
    assert 'description": "new"' in (tmp_path / "m" / "manifest.yaml").read_text()


def test_the_new_bundle_is_whole_from_its_first_moment(
    tmp_path: Path, warm_python: Any, old: Path
) -> None:
    shutil.copytree(old, tmp_path / "m")

    _kill(warm_python, "swapped", "", "process", tmp_path)

    assert _names_at_rest(tmp_path, ["m"]) == ["m"]
    assert set(_contents(tmp_path / "m")) == set(_contents(old))
    x = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(load_bundle(tmp_path / "m")(x=x)["y"], load_bundle(old)(x=x)["y"])
