"""Records of every format number there ever was can be opened, restored and resumed."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import nitro
from nitro._run import session_of
from nitro.errors import NitroWarning

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(path.name for path in GOLDEN.glob("record-format-*"))


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_record", GOLDEN / "write_record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=FORMATS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / request.param, tmp_path / "run")


def test_golden_record_is_whole_and_names_no_checkout(golden: Path) -> None:
    index = json.loads((golden / "checkpoints" / "index.json").read_text())
    folders = [path.name for path in (golden / "checkpoints").iterdir() if path.is_dir()]
    texts = [p.read_bytes() for p in golden.rglob("*") if p.is_file() and p.suffix != ".npz"]

    assert [record["name"] for record in index["records"]] == folders
    paths = {path for text in texts for path in re.findall(rb"/[\w.-]+/[\w./-]+", text)}
    assert [path for path in paths if not path.startswith(b"/tmp/nitro-golden/")] == []


def test_old_record_is_listed_and_described(golden: Path) -> None:
    (entry,) = nitro.checkpoints(golden)

    assert (entry.epoch, entry.step, entry.metric, entry.stop_reason) == (
        2,
        6,
        "val_loss",
        "completed",
    )
    assert nitro.checkpoint_info(golden)["config"]["width"] == 3


def test_old_record_gives_its_weights(golden: Path, writer: ModuleType) -> None:
    run = writer.make(golden, checkpoint=golden)

    with np.load(golden / "expected.npz") as expected:
        for name, array in session_of(run).state.params.items():
            np.testing.assert_array_equal(np.asarray(array), expected[name])
        # Another version of XLA may sum in another order.
        assert run.validate()["val_loss"] == pytest.approx(float(expected["val_loss"]), rel=1e-5)


@pytest.mark.parametrize("which", ["auto", "@latest", "@best"])
def test_old_record_goes_on_to_the_values_of_back_then(
    golden: Path, writer: ModuleType, which: str
) -> None:
    resume = which if which == "auto" else f"{golden}{which}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The record .* was written with", NitroWarning)
        run = writer.make(golden, max_epochs=3, resume=resume)
    assert (run.epoch, run.step) == (2, 6)

    assert run.train().epoch == 3
    assert [row["epoch"] for row in run.history] == [1, 2, 3]
    with np.load(golden / "expected.npz") as expected:
        for name, array in writer.params_of(run).items():
            # Another version of XLA may sum in another order.
            np.testing.assert_allclose(array, expected[f"epoch3.{name}"], rtol=1e-5, atol=1e-7)
            assert not np.array_equal(array, expected[name])
    (first, *_, last) = nitro.checkpoints(golden)
    assert first.run == last.run
    lines = [json.loads(line) for line in (golden / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line.get("context") == "train"]
    assert steps == list(range(1, 10))


def test_record_that_described_code_otherwise_goes_on_and_says_so(
    writer: ModuleType, tmp_path: Path
) -> None:
    golden = shutil.copytree(GOLDEN / "record-format-1", tmp_path / "run")

    with pytest.warns(NitroWarning, match="described code otherwise, so that an edit goes unseen"):
        run = writer.make(golden, max_epochs=3, resume=golden)

    assert run.epoch == 2
