"""`nitro train`, then `nitro export` by the run's directory, each option by its effect."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from nitro import _cli

loader = pytest.importorskip("nitro_export_stablehlo")

_SOURCE = """
import numpy as np
from flax import nnx

import nitro
from nitro import Device, ExportSpec, GraphConst


class Line(nitro.Experiment):
    width: GraphConst[int] = 2
    gain: Device[float] = 1.0
    max_epochs: int = 2

    @classmethod
    def presets(cls):
        return {"wide": {"width": 3}}

    def build_data(self):
        x = np.linspace(0, 1, 12, dtype=np.float32)[:, None]
        # What improves on one of them is worse on the other: the first record is the best.
        train, val = {"x": x, "y": 2 * x[:, 0]}, {"x": x, "y": -2 * x[:, 0]}
        return {"train": nitro.ArrayLoader(train, 4), "val": nitro.ArrayLoader(val, 4)}

    def build_model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(1, self.width, rngs=rngs), nnx.Linear(self.width, 1, rngs=rngs)
        )

    def forward(self, model, *, x):
        return self.gain * model(x)[:, 0]

    def loss(self, out, *, y):
        return ((out - y) ** 2).mean()

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 1))]

    def export_outputs(self):
        return [ExportSpec("out")]
"""

_X = np.linspace(-1, 1, 5, dtype=np.float32)[:, None]

Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_python: Any) -> Path:
    """A folder with `line.py` and the run `r` of two epochs, made in another process."""
    folder = tmp_path_factory.mktemp("line")
    (folder / "line.py").write_text(_SOURCE)
    words = ["train", "line.py:Line", "--preset", "wide", "--run-dir", "r", "--seed", "5"]
    warm_python.run("-m", "nitro", *words, cwd=folder)
    return folder


@pytest.fixture
def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generator[Run]:
    """Runs `nitro export ...` in that folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def export(*words: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as exit_:
            _cli.main(["export", *map(str, words)])
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    yield export
    for name in ("line", "moved"):
        sys.modules.pop(name, None)


def _predicted(path: Path, gain: float = 1.0) -> np.ndarray[Any, Any]:
    """What the bundle's weights give, in NumPy; a bundle stores them transposed."""
    w = {name: array.T for name, array in load_file(path / "weights.safetensors").items()}
    hidden = _X @ w["layers.0.kernel"] + w["layers.0.bias"]
    return gain * (hidden @ w["layers.1.kernel"] + w["layers.1.bias"])[:, 0]


def _index(path: Path) -> dict[str, Any]:
    return json.loads((path / "nitro.json").read_text())


def test_a_run_is_exported_by_its_directory_alone(folder: Path, warm_python: Any) -> None:
    words = ["r", "--to", "stablehlo", "--batch-sizes", "1,32", "--name", "digits_v1"]

    done = warm_python.run("-m", "nitro", "export", *words, cwd=folder)

    path = folder / "export_out" / "digits_v1"
    assert done.stdout == f"{path}\n"
    assert sorted(p.name for p in path.glob("*.mlir")) == ["model.b1.mlir", "model.b32.mlir"]
    assert _index(path)["batch_sizes"] == [1, 32]
    bundle = loader.load_bundle(path)
    assert bundle.provenance["experiment"] == "Line"
    assert bundle.provenance["config"]["width"] == 3
    np.testing.assert_allclose(bundle(x=_X)["out"], _predicted(path), atol=1e-5)


def test_the_name_is_the_classs_by_default(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("r", "--to", "stablehlo", "--dir", tmp_path / "deep" / "out")

    assert code == 0, err
    assert out == f"{tmp_path / 'deep' / 'out' / 'line'}\n"
    assert sorted(p.name for p in (tmp_path / "deep" / "out").iterdir()) == ["line"]


def test_a_class_that_moved_is_named(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text(_SOURCE.replace("class Line", "class Moved"))
    words = ["--experiment", f"{tmp_path / 'moved.py'}:Moved", "--dir", tmp_path / "out"]

    code, out, err = run("r", "--to", "stablehlo", *words)

    assert code == 0, err
    bundle = loader.load_bundle(out.strip())
    assert bundle.provenance["experiment"] == "Moved"
    np.testing.assert_allclose(bundle(x=_X)["out"], _predicted(tmp_path / "out/moved"), atol=1e-5)


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize(
    "words",
    [
        ["line.py:Line", "--checkpoint", "{record}"],
        ["line.py:Line", "--checkpoint", "r@{which}"],
        ["r", "--experiment", "line.py:Line", "--checkpoint", "{record}"],
        ["{record}"],
    ],
)
def test_a_record_is_chosen(
    run: Run, folder: Path, tmp_path: Path, words: list[str], epoch: int
) -> None:
    (record,) = (folder / "r" / "checkpoints").glob(f"epoch{epoch:04}-*")
    places = {"record": record, "which": ["best", "latest"][epoch - 1]}
    filled = [word.format(**places) for word in words]

    code, out, err = run(*filled, "--to", "stablehlo", "--dir", tmp_path)

    assert code == 0, err
    facts = loader.load_bundle(out.strip()).provenance
    assert (facts["epoch"], facts["step"], facts["seed"]) == (epoch, 3 * epoch, 5)
    assert facts["preset"] == "wide"
    assert facts["run_dir"] == str(folder / "r")
    assert record.name.endswith(f"val_loss={facts['metrics']['val_loss']:.6g}")


def test_a_program_for_any_batch_size_is_asked_for(run: Run, tmp_path: Path) -> None:
    run("r", "--to", "stablehlo", "--dir", tmp_path, "--name", "fixed")
    code, _, err = run(
        "r", "--to", "stablehlo", "--dir", tmp_path, "--name", "any", "--dynamic-batch"
    )

    assert code == 0, err
    assert [_index(tmp_path / name)["dynamic_batch"] for name in ("fixed", "any")] == [False, True]
    outputs = loader.load_bundle(tmp_path / "any").run_symbolic(x=_X)
    np.testing.assert_allclose(outputs["out"], _predicted(tmp_path / "any"), atol=1e-5)


def test_a_device_field_is_set(run: Run, tmp_path: Path) -> None:
    code, out, err = run("r", "--to", "stablehlo", "--dir", tmp_path, "--set", "gain=3")

    assert code == 0, err
    bundle = loader.load_bundle(out.strip())
    assert bundle.provenance["config"]["gain"] == 3.0
    np.testing.assert_allclose(bundle(x=_X)["out"], _predicted(tmp_path / "line", 3.0), atol=1e-5)


def test_only_overwrite_replaces_an_artifact(run: Run, tmp_path: Path) -> None:
    words = ["r", "--to", "stablehlo", "--dir", tmp_path]
    run(*words)
    before = (tmp_path / "line" / "nitro.json").read_bytes()

    refused, _, message = run(*words, "--batch-sizes", "2")
    untouched = (tmp_path / "line" / "nitro.json").read_bytes()
    code, _, err = run(*words, "--batch-sizes", "2", "--overwrite")

    assert refused == 1
    assert f"`{tmp_path / 'line'}` exists" in message
    assert untouched == before
    assert code == 0, err
    assert _index(tmp_path / "line")["batch_sizes"] == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["line"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-sizes", "0"], r"error: `batch_sizes` is [0]."),
        (["--batch-sizes", "1,-2"], r"error: `batch_sizes` is [1, -2]."),
        (["--batch-sizes", "x"], "error: `--batch-sizes` is 'x'."),
        (["--batch-sizes", ""], "error: `--batch-sizes` is ''."),
        (["--batch-sizes", "1,,2"], "error: `--batch-sizes` is '1,,2'."),
        (["--to", "stablehl"], "did you mean `stablehlo`?"),
        (["--name", "a/b"], "error: `name` is 'a/b'."),
        (["--set", "widht=3"], "did you mean `width`?"),
        (["--set", "gain=much"], "error: `gain=much` does not fit"),
        (["--checkpoint", "r@latest"], "`r` is a directory, and `--checkpoint` is `r@latest`"),
        (["--experiment", "line.py:Line", "--checkpoint", "nowhere"], "`nowhere`"),
        (["--experiment", "line.py:Lin"], "did you mean `Line`?"),
        (["--experiment", "gone.py:Line"], "gone.py"),
    ],
)
def test_a_bad_value_is_one_message(
    run: Run, folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    before = sorted(folder.rglob("*"))

    code, out, err = run("r", "--to", "stablehlo", "--dir", tmp_path / "out", *words)

    assert code == 1
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert [p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts] == [
        p for p in before if "__pycache__" not in p.parts
    ]


def test_a_missing_backend_option_is_a_usage_error(run: Run) -> None:
    code, _, err = run("r")

    assert code == 2
    assert "--to" in err
