"""Records of every format number there ever was can be opened, restored and resumed."""

from __future__ import annotations

import importlib.util
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


def test_old_record_can_be_resumed(golden: Path, writer: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The record .* was written with", NitroWarning)
        run = writer.make(golden, max_epochs=3, resume="auto")

    assert run.train().epoch == 3
    assert [row["epoch"] for row in run.history] == [1, 2, 3]
    (first, *_, last) = nitro.checkpoints(golden)
    assert first.run == last.run
