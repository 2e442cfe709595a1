from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import TopK
from nitro._run import session_of
from nitro.errors import CheckpointError, ConfigError, DivergenceError, NitroWarning


@pytest.fixture
def scripted(plane: Any, make_run: Any) -> Any:
    """Trains a plane whose validation gives the scores of a script, one for each epoch."""

    def train(scores: list[float], **options: Any) -> nitro.Nitro:
        script = iter(scores)

        class Scripted(plane):
            def finalize_metrics(self, reduced: Any, split: str) -> Any:
                return {"score": next(script)}

            def metrics(self, height: Any, *, y: Any) -> Any:
                return {"n": (1, None)}

        return make_run(Scripted(), max_epochs=len(scores), **options).train()

    return train


def _epochs_on_disk(run_dir: Path) -> list[int]:
    folders = (path for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
    return sorted(int(path.name[5:9]) for path in folders)


def _kernel(run: nitro.Nitro) -> np.ndarray:
    return np.asarray(run.model.kernel[...])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("mode", "k", "kept"), [("min", 1, [4, 6]), ("min", 3, [1, 3, 4, 6]), ("max", 2, [2, 5, 6])]
)
def test_newest_and_best_records_stay_on_disk(
    scripted: Any, mode: Any, k: int, kept: list[int]
) -> None:
    run = scripted(
        [0.3, 0.9, 0.2, 0.1, 0.8, 0.5], checkpointer=TopK(k=k, metric="score", mode=mode)
    )

    assert _epochs_on_disk(run.run_dir) == kept


def test_tie_goes_to_the_older_record(scripted: Any) -> None:
    run = scripted([0.1, 0.1, 0.1], checkpointer=TopK(k=1, metric="score"))

    assert _epochs_on_disk(run.run_dir) == [1, 3]


def test_records_can_be_turned_off(plane: Any, make_run: Any) -> None:
    run = make_run(plane(), checkpointer=None).train()

    assert not (run.run_dir / "checkpoints").exists()


def test_record_holds_the_weights_of_its_own_epoch(plane: Any, tmp_path: Path) -> None:
    # Training goes on, and overwrites its state, while a record is still being written.
    long = nitro.Nitro(
        plane(), max_epochs=5, run_dir=tmp_path / "long", checkpointer=TopK(k=5)
    ).train()
    for epoch in (1, 3):
        short = nitro.Nitro(plane(), max_epochs=epoch, run_dir=tmp_path / f"{epoch}").train()
        (record,) = (long.run_dir / "checkpoints").glob(f"epoch{epoch:04d}-*")

        restored = nitro.Nitro(plane(), checkpoint=record, data={})

        np.testing.assert_array_equal(_kernel(restored), _kernel(short))


def test_best_and_latest_are_found_by_name(plane: Any, trained_plane: nitro.Nitro) -> None:
    losses = trained_plane.history["val_loss"]
    data = {"val": plane().build_data()["val"]}

    def restore(which: str) -> float:
        source = f"{trained_plane.run_dir}{which}"
        return nitro.Nitro(plane(), checkpoint=source, data=data).validate()["val_loss"]

    assert restore("@latest") == pytest.approx(losses[-1], rel=1e-6)
    assert restore("@best") == restore("") == pytest.approx(min(losses), rel=1e-6)


def test_best_may_be_the_highest(scripted: Any, plane: Any) -> None:
    run = scripted([0.3, 0.9, 0.2], checkpointer=TopK(metric="score", mode="max"))

    best = nitro.Nitro(plane(), checkpoint=run.run_dir, data={})

    assert "epoch0002-" in best.binding


def test_weights_only_handle_predicts_and_holds_no_optimizer_state(
    plane: Any, trained_plane: nitro.Nitro, points: Any
) -> None:
    x = points(7, seed=3)["x"]

    run = nitro.Nitro(plane(), checkpoint=f"{trained_plane.run_dir}@latest", data={})

    np.testing.assert_array_equal(run.predict({"x": x}), trained_plane.predict({"x": x}))
    assert (run.step, run.epoch) == (0, 0)
    # The evaluation never built one: nothing but the five weights lies on the device for it.
    assert jax.tree.leaves(session_of(run).state.opt_state) == []


def test_model_state_and_rng_keys_are_restored(images: Any, tmp_path: Path) -> None:
    trained = nitro.Nitro(images(), run_dir=tmp_path).train()

    restored = nitro.Nitro(images(), checkpoint=tmp_path, data={})

    expected, got = (nnx.to_pure_dict(nnx.state(run.model)) for run in (trained, restored))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), expected, got)
    assert all(jax.tree.leaves(same))
    assert len(jax.tree.leaves(same)) > 8


def test_training_may_start_from_a_record(
    plane: Any, trained_plane: nitro.Nitro, make_run: Any
) -> None:
    run = make_run(plane(), checkpoint=f"{trained_plane.run_dir}@latest")
    before = _kernel(run)

    run.train()

    np.testing.assert_array_equal(before, _kernel(trained_plane))
    assert (run.epoch, run.step) == (1, 4)
    assert not np.array_equal(_kernel(run), before)


def test_second_run_in_a_folder_keeps_the_records_of_the_first(
    plane: Any, make_run: Any, points: Any
) -> None:
    make_run(plane(), max_epochs=4, checkpointer=TopK(k=1)).train()
    first = _epochs_on_disk(make_run(plane()).run_dir)

    second = make_run(plane(), seed=5).train()

    x = points(3, seed=0)["x"]
    for which in ("@latest", "@best"):
        restored = nitro.Nitro(plane(), checkpoint=f"{second.run_dir}{which}", data={})
        np.testing.assert_array_equal(restored.predict({"x": x}), second.predict({"x": x}))
    assert _epochs_on_disk(second.run_dir) == sorted([1, *first])


def test_run_without_validation_has_a_latest_and_no_best(
    plane: Any, make_run: Any, points: Any
) -> None:
    run = make_run(plane(), data={"train": [points(5, seed=0)]}, max_epochs=3).train()

    assert _epochs_on_disk(run.run_dir) == [3]
    assert "epoch0003" in nitro.Nitro(plane(), checkpoint=run.run_dir, data={}).binding
    with pytest.raises(CheckpointError, match=r"no scored record[\s\S]*run@latest`"):
        nitro.Nitro(plane(), checkpoint=f"{run.run_dir}@best", data={})


def test_record_of_another_layout_names_the_leaves(plane: Any, trained_plane: nitro.Nitro) -> None:
    class Wide(plane):
        def build_model(self, rngs: Any) -> Any:
            model: Any = nnx.Linear(6, 1, rngs=rngs)
            model.scale = nnx.Param(np.ones(1, np.float32))
            return model

    with pytest.raises(
        CheckpointError,
        match=r"`kernel`: float32\(4, 1\) in the record, float32\(6, 1\) now[\s\S]*`scale`: not in "
        r"the record[\s\S]*same structure",
    ):
        nitro.Nitro(Wide(), checkpoint=trained_plane.run_dir, data={})


def test_leaf_that_the_model_lacks_is_named(plane: Any, trained_plane: nitro.Nitro) -> None:
    class Bare(plane):
        def build_model(self, rngs: Any) -> Any:
            return nnx.Linear(4, 1, use_bias=False, rngs=rngs)

    with pytest.raises(CheckpointError, match=r"`bias`: float32\(1,\) in the record, gone now"):
        nitro.Nitro(Bare(), checkpoint=trained_plane.run_dir, data={})


@pytest.mark.parametrize("suffix", ["", "@best", "@latest"])
def test_missing_path_is_refused(plane: Any, tmp_path: Path, suffix: str) -> None:
    with pytest.raises(CheckpointError, match=r"holds no record[\s\S]*nowhere` does not exist"):
        nitro.Nitro(plane(), checkpoint=f"{tmp_path / 'nowhere'}{suffix}", data={})


def test_folder_without_records_is_refused(plane: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(
        CheckpointError, match=rf"`{tmp_path}` holds no record[\s\S]*there is no run in"
    ):
        nitro.Nitro(plane(), checkpoint=tmp_path, data={})


def test_folder_that_only_looks_like_a_record_is_refused(plane: Any, tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()

    with pytest.raises(CheckpointError, match=r"no record that can be read|holds no record"):
        nitro.Nitro(plane(), checkpoint=tmp_path, data={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no index of records"),
        ("[]", "is no index of records"),
        ('{"format_version": 1, "records": 3}', "is no index of records"),
        ('{"format_version": 1, "records": ["a"]}', "is no index of records"),
        ('{"format_version": 1, "records": [{"name": "a"}]}', "is no index.*'run', 'step'"),
        (json.dumps({"format_version": 99, "records": []}), r"format version 99[\s\S]*version 1"),
    ],
)
def test_index_that_cannot_be_read_is_refused(
    plane: Any, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "index.json").write_text(text)

    with pytest.raises(CheckpointError, match=words):
        nitro.Nitro(plane(), checkpoint=tmp_path, data={})


def test_metric_that_was_not_emitted_is_named_with_what_was(scripted: Any) -> None:
    with pytest.raises(CheckpointError, match=r"ranks by `acc`, .*not emitted[\s\S]*`score`"):
        scripted([0.1], checkpointer=TopK(metric="acc"))


def test_default_policy_keeps_the_newest_where_val_loss_is_not_emitted(scripted: Any) -> None:
    with pytest.warns(NitroWarning, match=r"not ranked[\s\S]*emits `score`[\s\S]*TopK\(metric="):
        run = scripted([0.3, 0.1, 0.2])

    kept = nitro.checkpoints(run.run_dir)
    assert [(entry.epoch, entry.score) for entry in kept] == [(3, None)]


@pytest.mark.parametrize("odd", [float("nan"), float("-inf")])
def test_epoch_without_a_finite_metric_is_kept_as_newest_and_never_as_best(
    scripted: Any, tmp_path: Path, odd: float
) -> None:
    policy = TopK(k=1, metric="score")
    words = r"`score` of `val` is [\s\S]*worse than every"
    with pytest.warns(NitroWarning, match=words):
        ended_so = scripted([0.1, odd], checkpointer=policy, run_dir=tmp_path / "a")
    with pytest.warns(NitroWarning, match=words) as told:
        went_on = scripted([0.1, odd, odd, 0.3], checkpointer=policy, run_dir=tmp_path / "b")

    kept = [nitro.checkpoints(run.run_dir) for run in (ended_so, went_on)]
    assert [[(e.epoch, e.score) for e in entries] for entries in kept] == [
        [(1, 0.1), (2, None)],
        [(1, 0.1), (4, 0.3)],
    ]
    assert len(told) == 1
    assert ended_so.history.best["epoch"] == 1


def test_metric_that_is_never_finite_is_an_error_at_the_end(scripted: Any, tmp_path: Path) -> None:
    with (
        pytest.warns(NitroWarning, match="worse than every number"),
        pytest.raises(
            DivergenceError, match=r"`score`, by which .* ranked, is nan, and .* any of 2 epochs"
        ),
    ):
        scripted([float("nan")] * 2, checkpointer=TopK(metric="score"))

    assert [entry.epoch for entry in nitro.checkpoints(tmp_path / "run")] == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"k": 0}, r"`checkpointer=None`"), ({"k": 1.5}, "at least 1"), ({"mode": "best"}, '"min"')],
)
def test_policy_that_keeps_nothing_is_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"TopK\([\s\S]*{words}"):
        TopK(**options)
