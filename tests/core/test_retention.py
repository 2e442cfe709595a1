"""Which records stay: without the newest, over a whole directory, and under another metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro
from nitro import TopK
from nitro.errors import ConfigError, NitroWarning


@pytest.fixture
def scripted(plane: Any, make_run: Any) -> Any:
    """Builds a handle whose validation gives the scores of a script, one for each epoch."""

    def build(scores: list[float], **options: Any) -> nitro.Nitro:
        script = iter(scores)

        class Scripted(plane):
            def metrics(self, height: Any, *, y: Any) -> Any:
                return {"n": (1, None)}

            def finalize_metrics(self, reduced: Any, split: str) -> Any:
                return {"score": next(script), "other": 0.5}

        options = {"max_epochs": len(scores), **options}
        return make_run(Scripted(), **options)

    return build


def _scores(run_dir: Path) -> list[tuple[int, float | None]]:
    return sorted((entry.epoch, entry.score) for entry in nitro.checkpoints(run_dir))


# Without the newest --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "k", "kept"),
    [("min", 1, [(3, 0.2)]), ("min", 2, [(3, 0.2), (6, 0.2)]), ("max", 1, [(1, 0.5)])],
)
def test_only_the_best_stay_without_the_newest(
    scripted: Any, mode: Any, k: int, kept: list[tuple[int, float]]
) -> None:
    policy = TopK(k=k, metric="score", mode=mode, keep_latest=False)
    with pytest.warns(NitroWarning, match=f"among the best {k} by `score`.*goes on from one"):
        run = scripted([0.5, 0.3, 0.2, 0.3, 0.3, 0.2], checkpointer=policy)
    run.train()

    assert _scores(run.run_dir) == kept


def test_epoch_that_cannot_enter_is_not_written(scripted: Any) -> None:
    with pytest.warns(NitroWarning, match="keep_latest=False"):
        run = scripted([0.3, 0.5, 0.3], checkpointer=TopK(k=1, metric="score", keep_latest=False))
    index = run.run_dir / "checkpoints" / "index.json"
    written: list[int] = []
    # The record before is listed when the next save begins: each inode is one write.
    run.on_phase(lambda _: written.append(index.stat().st_ino) if index.exists() else None)

    run.train()
    run.close()

    assert len({*written, index.stat().st_ino}) == 1
    assert _scores(run.run_dir) == [(1, 0.3)]


@pytest.mark.filterwarnings("ignore:`TopK:nitro.errors.NitroWarning")
def test_run_goes_on_from_the_best_with_the_same_bits(scripted: Any, tmp_path: Path) -> None:
    policy = TopK(k=1, metric="score", keep_latest=False)
    scores = [0.5, 0.2, 0.4, 0.3]
    whole = scripted(scores, run_dir=tmp_path / "whole", checkpointer=policy).train()
    part = scripted(scores, run_dir=tmp_path / "part", checkpointer=policy)
    part.on_phase(
        lambda e: e.run.request_stop() if (e.phase.value, e.epoch) == ("training", 3) else None
    )
    part.train()

    resumed = scripted(
        scores[2:], max_epochs=4, run_dir=part.run_dir, checkpointer=policy, resume="auto"
    )
    assert resumed.epoch == 2
    resumed.train()

    np.testing.assert_array_equal(
        resumed.model.kernel[...],
        whole.model.kernel[...],
    )
    assert resumed.history.rows == whole.history.rows


def test_what_would_never_be_kept_is_refused(plane: Any, make_run: Any, points: Any) -> None:
    policy = TopK(keep_latest=False)
    with pytest.raises(ConfigError, match="no split `val`"):
        make_run(plane(), data={"train": [points(5, seed=0)]}, checkpointer=policy)
    with pytest.raises(ConfigError, match="`checkpoint_every_steps` is 3"):
        make_run(plane(), checkpoint_every_steps=3, checkpointer=policy)
    with pytest.warns(NitroWarning, match="keep_latest=False"):
        run = make_run(plane(), checkpointer=policy)
    with pytest.raises(ConfigError, match="A record on request has no score"):
        run.checkpoint()


def test_metric_that_nothing_scores_is_told(scripted: Any, points: Any) -> None:
    with pytest.warns(NitroWarning, match=r"ranks by `score`, and there is no split `val`"):
        scripted([0.1], checkpointer=TopK(metric="score"), data={"train": [points(5, seed=0)]})


# Over a whole directory ----------------------------------------------------------------------


def test_whole_directory_may_be_ranked(scripted: Any) -> None:
    first = scripted([0.2, 0.5, 0.4], checkpointer=TopK(k=2, metric="score")).train()
    assert _scores(first.run_dir) == [(1, 0.2), (3, 0.4)]

    policy = TopK(k=2, metric="score", scope="dir")
    with pytest.warns(NitroWarning, match="may delete 2 records of 1 other runs"):
        second = scripted([0.3, 0.9], checkpointer=policy)
    assert _scores(first.run_dir) == [(1, 0.2), (3, 0.4)]
    second.train()

    # The best two of both runs, and the newest of the one that wrote.
    assert _scores(first.run_dir) == [(1, 0.2), (1, 0.3), (2, 0.9)]


def test_records_of_other_runs_stay_by_default(scripted: Any) -> None:
    first = scripted([0.2, 0.5], checkpointer=TopK(k=1, metric="score")).train()
    scripted([0.1], checkpointer=TopK(k=1, metric="score")).train()

    assert _scores(first.run_dir) == [(1, 0.1), (1, 0.2), (2, 0.5)]


def test_unknown_scope_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scope='all'.*\n.*\"run\" or \"dir\""):
        TopK(scope="all")  # pyright: ignore[reportArgumentType]


# Under another metric ------------------------------------------------------------------------


def test_records_of_another_metric_are_counted_and_stay(scripted: Any) -> None:
    run = scripted([0.2, 0.5], checkpointer=TopK(k=2, metric="score")).train()
    before = _scores(run.run_dir)

    policy = TopK(k=1, metric="other")
    with pytest.warns(NitroWarning, match=r"than by `other` \(min\): 2 by `score` \(min\)"):
        resumed = scripted([0.1, 0.1], max_epochs=4, checkpointer=policy, resume="auto")
    resumed.train()

    assert _scores(run.run_dir) == [*before, (3, 0.5), (4, 0.5)]


# Runs in a directory -------------------------------------------------------------------------


def test_runs_of_a_directory_are_summed_up(scripted: Any, tmp_path: Path) -> None:
    assert nitro.runs(tmp_path / "nothing") == []
    first = scripted([0.2, 0.5, 0.4], checkpointer=TopK(k=1, metric="score")).train()
    second = scripted(
        [0.1], max_epochs=2, resume=f"{first.run_dir}@best", checkpointer=TopK(metric="score")
    ).train()

    newer, older = nitro.runs(first.run_dir)

    assert (newer.run, older.run) == (second.run_id, first.run_id)
    assert (newer.records, newer.epochs) == (1, (2,))
    assert (older.records, older.epochs, older.metrics) == (2, (1, 3), ("score",))
    assert older.best is not None
    assert (older.best.epoch, older.best.score) == (1, 0.2)
    assert (older.parent, newer.parent) == (None, f"{first.run_id}/{older.best.name}")
    assert newer.time > older.time
