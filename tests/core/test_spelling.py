"""What Nitro would not read is refused where the class is declared, with the name that it has here."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import nitro
from nitro._experiment._options import _OPTIONS, DRIVER_OPTIONS
from nitro._experiment._spelling import OPTION_NAMES
from nitro.errors import ConfigError, ExperimentError


def declare(base: type, name: str, member: Any) -> type:
    """A subclass with a method, or with a field where `member` is a type."""
    if isinstance(member, type):
        return type("Near", (base,), {"__annotations__": {name: member}, name: member()})
    return type("Near", (base,), {name: member})


def method(self: Any, *args: Any) -> Any:
    return self, args


@pytest.mark.parametrize(
    ("name", "member", "meant"),
    [
        ("schedule", method, "`schedules`"),
        ("metric", method, "`metrics`"),
        ("optimiser", method, "`optimizer`"),
        ("finalise_metrics", method, "`finalize_metrics`"),
        ("earlystop", method, "`early_stop`"),
        ("max_epoch", property(method), "`max_epochs`"),
        ("learning_rates", staticmethod(method), "`learning_rate`"),
        ("max_epoch", int, "`max_epochs`"),
        ("grad_accum", int, None),
        ("gradient_clip_norms", float, "`gradient_clip_norm`"),
        ("training_step", method, "`forward` and `loss`"),
        ("validation_step", method, "`metrics`"),
        ("configure_optimizers", method, "`optimizer`, `learning_rate` and `schedules`"),
        ("val_dataloader", method, "`build_data`"),
        ("compute_metrics", method, "`metrics`"),
        ("compute_loss", method, "`loss`"),
        ("on_epoch_end", method, "`run.on_phase"),
        ("on_train_epoch_end", method, "`run.on_phase"),
        ("gradient_clip_val", float, "`gradient_clip_norm`"),
        ("accumulate_grad_batches", int, "`accum`"),
        ("num_train_epochs", int, "`max_epochs`"),
        ("epochs", int, "`max_epochs`"),
        ("lr", float, "`learning_rate`"),
    ],
)
def test_name_that_nitro_would_not_read_is_refused(
    plane: Any, name: str, member: Any, meant: str | None
) -> None:
    if meant is None:
        assert name in declare(plane, name, member)().fields()
        return
    with pytest.raises(ExperimentError) as refused:
        declare(plane, name, member)

    assert f"does not read `Near.{name}` (" in refused.value.problem
    assert meant in refused.value.expected
    assert "rename it" in refused.value.fix


def test_required_hook_that_is_misspelt_is_guessed(plane: Any) -> None:
    body = {name: getattr(plane, name) for name in ("build_data", "build_model", "loss")}

    with pytest.raises(ExperimentError, match="expected: `forward`"):
        type("Misspelt", (nitro.Experiment,), {**body, "foward": plane.forward})


def test_constant_of_a_class_is_refused_like_a_field(plane: Any) -> None:
    with pytest.raises(ExperimentError, match=r"`Near\.max_epoch` \(.*\n.*`max_epochs`"):

        class Near(plane):  # pyright: ignore[reportUnusedClass]
            max_epoch: ClassVar[int] = 3


def test_names_that_mean_something_else_are_left_alone(plane: Any, make_run: Any) -> None:
    class Busy(plane):
        metric: str = "acc"
        checkpoint: str = "base"
        schedule: str = "cosine"
        seeds: int = 3
        epochs: int = 2
        lr: float = 0.01

        @property
        def max_epochs(self) -> int:
            return self.epochs

        def learning_rate(self, group: str | None = None) -> float:
            return self.lr

        def metrics(self, height: Any, *, y: Any) -> Any:
            return self._metric(height, y)

        def _metric(self, height: Any, y: Any) -> Any:
            return {"error": (abs(height - y).sum(), y.size)}

        def export_preprocess(self, x: Any) -> Any:  # close to `export_postprocess`
            return {"x": x}

        def optimizers(self) -> list[str]:
            return ["sgd"]

        def optimizer(self, group: str) -> Any:
            return super().optimizer(group)

    assert make_run(Busy(), checkpointer=None, progress=False).train().epoch == 2


def test_base_may_leave_to_its_subclasses_what_a_name_means(plane: Any) -> None:
    class Base(nitro.Experiment):
        epochs: int = 2

    class Used(Base, plane):
        @property
        def max_epochs(self) -> int:
            return self.epochs

    assert Used().max_epochs == 2
    with pytest.raises(ExperimentError, match=r"`Unused\.epochs`"):
        type("Unused", (Base, plane), {})


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_epoch": 3}, r"no option `max_epoch`\.\n.*did you mean `max_epochs`"),
        ({"epochs": 3}, r"no option `epochs`\.\n.*expected: `max_epochs`"),
        ({"gradient_clip_val": 1.0}, r"expected: `gradient_clip_norm`"),
        ({"width": 3}, r"it is a field of `Wide`[\s\S]*`Nitro\(Wide\(width=\.\.\.\), \.\.\.\)`"),
    ],
)
def test_unknown_keyword_of_the_handle_is_named(plane: Any, keywords: Any, words: str) -> None:
    class Wide(plane):
        width: int = 2

    with pytest.raises(ConfigError, match=words):
        nitro.Nitro(Wide(), **keywords)
    with pytest.raises(ConfigError, match=words):
        nitro.Nitro(experiment=Wide(), **keywords)


def test_list_of_options_is_complete() -> None:
    assert {*_OPTIONS, *DRIVER_OPTIONS} == set(OPTION_NAMES)
