from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

import nitro
from nitro import GraphConst
from nitro.errors import ConfigError


def test_keyword_beats_the_experiment_and_that_the_default(plane: Any, tmp_path: Path) -> None:
    class Configured(plane):
        seed: int = 5
        max_epochs: int = 4

        @property
        def run_dir(self) -> Path:
            return tmp_path / f"seed{self.seed}"

    run = nitro.Nitro(Configured(), max_epochs=2)

    assert run.run_dir == tmp_path / "seed5"
    assert "max_epochs = 2 (keyword)" in run.binding
    assert "seed = 5 (experiment)" in run.binding
    assert "accum = 1 (default)" in run.binding


def test_option_may_be_a_method(plane: Any, make_run: Any) -> None:
    class Configured(plane):
        def max_epochs(self) -> int:
            return 7

    assert "max_epochs = 7 (experiment)" in make_run(Configured()).binding


def test_four_hooks_and_no_option_train_with_defaults(
    plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    run = nitro.Nitro(plane()).train()

    assert (run.epoch, run.step) == (1, 4)
    assert run.history[1].keys() == {"epoch", "step", "loss", "val_loss"}
    assert Path("runs/Plane/metrics.jsonl").exists()
    assert len([*Path("runs/Plane/checkpoints").glob("epoch0001-step00000004*")]) == 1


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("seed", -1, "at least 0"),
        ("seed", 1.5, "at least 0"),
        ("max_epochs", 0, "at least 1"),
        ("max_epochs", True, "at least 1"),
        ("accum", 0, "at least 1"),
        ("run_dir", 3, "a path"),
        ("check_divergence", "yes", "True or False"),
        ("progress", 1, "True, False"),
        ("n_devices", 2, "one device"),
        ("checkpointer", "best", r"nitro\.TopK"),
        ("logger", 3, "lacks metrics, params, tags, .*reattach"),
    ],
)
def test_option_that_cannot_be_used_is_named(
    plane: Any, make_run: Any, option: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?i){option}[\s\S]*{words}"):
        make_run(plane(), **{option: value})


def test_run_option_marked_structural_is_refused(plane: Any, make_run: Any) -> None:
    class Marked(plane):
        max_epochs: GraphConst[int | None] = 3

    with pytest.raises(
        ConfigError, match=r"marks max_epochs as GraphConst[\s\S]*`max_epochs: int \| None` without"
    ):
        make_run(Marked())


def test_metric_that_no_hook_emits_is_refused_at_setup(plane: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"ranks by `acc`.*no `metrics` hook[\s\S]*`val_loss`"):
        make_run(plane(), checkpointer=nitro.TopK(metric="acc"))


def test_binding_report_lists_splits_fields_and_dropped_samples(plane: Any, make_run: Any) -> None:
    report = make_run(plane()).binding

    assert "split `train`: 4 batches of 5, 22 samples; 2 dropped" in report
    assert "split `val`: 3 batches of 5, 13 samples\n" in report
    assert "Plane.forward: x\n" in report
    assert "Plane.loss: y" in report


def test_device_field_that_is_no_number_is_refused(plane: Any, make_run: Any) -> None:
    class Named(plane):
        name: nitro.Device[str] = "a"

    with pytest.raises(ConfigError, match=r"Device field `Named\.name` is 'a'[\s\S]*unmarked"):
        make_run(Named())


def test_class_variable_may_set_an_option(plane: Any, make_run: Any) -> None:
    class Configured(plane):
        max_epochs: ClassVar[int] = 3

    assert "max_epochs = 3 (experiment)" in make_run(Configured()).binding


def test_handle_shows_where_it_stands(trained_plane: nitro.Nitro) -> None:
    assert repr(trained_plane).startswith("Nitro(Plane: done, epoch 6, step 24, 5 parameters, ")
    assert trained_plane.experiment.fields() == {}


def test_field_that_is_an_option_is_reported_once(plane: Any, make_run: Any) -> None:
    class Lasting(plane):
        max_epochs: int = 5
        width: int = 3

    report = str(make_run(Lasting(), max_epochs=2).binding)

    assert report.count("max_epochs = ") == 1
    assert "max_epochs = 2 (keyword)" in report
    assert "width = 3" in report
