"""What raises in the middle of a run leaves a checkpoint, and going on from it loses nothing."""

from __future__ import annotations

import json
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import DataError, DivergenceError, NitroWarning


class Failing:
    """A list of batches that raises at one of them, until it is mended."""

    def __init__(self, batches: list[Any], at: int) -> None:
        self.batches, self.at = batches, at

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for index, batch in enumerate(self.batches):
            if index == self.at:
                raise OSError("the disk is gone")
            yield batch


class Moving(Failing):
    """The same, which can say and take a position."""

    def __init__(self, batches: list[Any], at: int) -> None:
        super().__init__(batches, at)
        self.epoch = self.start = 0

    def get_state(self) -> Any:
        return {"next": self.start}

    def set_state(self, state: Any) -> None:
        self.start = state["next"]

    def __iter__(self) -> Any:
        for index in range(self.start, len(self.batches)):
            if index == self.at:
                raise OSError("the disk is gone")
            self.start = (index + 1) % len(self.batches)
            yield self.batches[index]


@pytest.fixture
def batches(points: Any) -> list[Any]:
    rows = points(30, seed=0)
    return [{k: v[i : i + 5] for k, v in rows.items()} for i in range(0, 30, 5)]


def notes_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error))


def test_error_in_mid_epoch_leaves_the_last_step_and_a_resume_has_the_same_bits(
    plane: Any, batches: Any, tmp_path: Path
) -> None:
    whole = nitro.Nitro(
        plane(), data={"train": batches}, max_epochs=3, run_dir=tmp_path / "a", progress=False
    ).train()
    common: dict[str, Any] = {"max_epochs": 3, "run_dir": tmp_path / "b", "progress": False}
    broken = nitro.Nitro(plane(), data={"train": Moving(batches, at=4)}, steps_per_call=1, **common)

    with pytest.raises(OSError, match="the disk is gone") as failed:
        broken.train()

    saved = nitro.checkpoints(tmp_path / "b")
    assert [(entry.step, entry.epoch, entry.score) for entry in saved] == [(4, 0, None)]
    assert f"The state after step 4 is in `{tmp_path / 'b'}" in notes_of(failed.value)
    mended = nitro.Nitro(
        plane(), data={"train": Moving(batches, at=-1)}, resume="auto", **common
    ).train()
    assert mended.history.rows == whole.history.rows
    np.testing.assert_array_equal(mended.model.kernel[...], whole.model.kernel[...])
    lines = [json.loads(line) for line in (tmp_path / "b/metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in lines if r["type"] == "metrics" and r["context"] == "train"]
    assert steps == list(range(1, 19))


@pytest.mark.parametrize("kind", [list, lambda batches: Failing(batches, at=-1)])
def test_failing_metrics_lose_neither_the_epoch_nor_its_row(
    plane: Any, batches: Any, tmp_path: Path, kind: Any
) -> None:
    broken = [False]

    class Measured(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            if broken[0]:
                raise RuntimeError("no license")
            return {"mae": (np.abs(height - y).sum(), y.size)}

    def run(place: str, **options: Any) -> nitro.Nitro:
        data = {"train": kind(batches), "val": batches[:2]}
        return nitro.Nitro(
            Measured(),
            data=data,
            max_epochs=2,
            run_dir=tmp_path / place,
            progress=False,
            checkpointer=nitro.TopK(metric="mae"),
            **options,
        )

    with pytest.warns(NitroWarning) if kind is not list else nullcontext():
        whole = run("a").train()
        first = run("b")
        first.on_phase(lambda event: broken.__setitem__(0, event.epoch == 1))
        with pytest.raises(RuntimeError, match="no license"):
            first.train()
        assert [set(row) for row in first.history] == [{"epoch", "step", "loss"}]
        assert first.history.loss == whole.history.loss[:1]
        assert [entry.step for entry in nitro.checkpoints(tmp_path / "b")] == [6]
        broken[0] = False
        again = run("b", resume="auto").train()
    assert again.history.rows == whole.history.rows
    assert {e.step: e.score for e in nitro.checkpoints(tmp_path / "b")} == {
        e.step: e.score for e in nitro.checkpoints(tmp_path / "a")
    }


def test_handle_whose_validation_failed_may_train_on(plane: Any, make_run: Any) -> None:
    broken = [False]

    class Measured(plane):
        def finalize_metrics(self, reduced: Any, split: str) -> Any:
            if broken[0]:
                raise RuntimeError("no license")
            return reduced

    run = make_run(Measured(), max_epochs=2, progress=False)
    broken[0] = True
    with pytest.raises(RuntimeError):
        run.train()
    broken[0] = False

    run.train()

    expected = make_run(plane(), max_epochs=2, progress=False, checkpointer=None, logger=None)
    assert run.history.rows == expected.train().history.rows


def test_divergence_leaves_no_checkpoint(plane: Any, make_run: Any, tmp_path: Path) -> None:
    class Rising(plane):
        def learning_rate(self, group: Any = None) -> float:
            return 1e30

    with pytest.raises(DivergenceError):
        make_run(Rising(), max_epochs=5, progress=False).train()

    steps = [entry.step for entry in nitro.checkpoints(tmp_path / "run")]
    assert all(step % 4 == 0 for step in steps)


def test_ragged_list_is_told_at_setup(plane: Any, batches: Any, make_run: Any) -> None:
    short = {name: value[:3] for name, value in batches[0].items()}

    with pytest.raises(DataError, match=r"batch 7 of `train` has 3 samples[\s\S]*expected: 5"):
        make_run(plane(), data={"train": [*batches, short]})


def test_failing_first_step_and_failing_disk_hide_nothing(
    plane: Any, batches: Any, make_run: Any, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        make_run(
            plane(), data={"train": Moving(batches, at=1)}, checkpointer=None, progress=False
        ).train()
    assert nitro.checkpoints(tmp_path / "run") == []


def test_loader_that_says_its_samples_is_told_at_setup(
    plane: Any, points: Any, make_run: Any
) -> None:
    class TorchLike:
        """The attributes that PyTorch's `DataLoader` has."""

        batch_size, drop_last = 5, False

        def __init__(self, samples: int) -> None:
            self.dataset = range(samples)

        def __len__(self) -> int:
            return (len(self.dataset) + 4) // 5

        def __iter__(self) -> Any:
            rows = points(len(self.dataset), seed=0)
            for i in range(0, len(self.dataset), 5):
                yield {name: value[i : i + 5] for name, value in rows.items()}

    options = {"checkpointer": None, "progress": False}
    with pytest.raises(DataError, match="batch 5 of `train` has 2 samples"):
        make_run(plane(), data={"train": TorchLike(22)}, **options)

    assert make_run(plane(), data={"train": TorchLike(20)}, **options).train().step == 4
