from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import HookError


@pytest.fixture
def run_with(plane: Any, make_run: Any) -> Callable[..., nitro.Nitro]:
    """Makes an untrained plane (13 points to validate, 5 at a time) with these hooks."""

    def make(**hooks: Any) -> nitro.Nitro:
        return make_run(type("Measured", (plane,), hooks)(), checkpointer=None)

    return make


def _errors_of(run: nitro.Nitro) -> np.ndarray:
    """The errors of the plane on the 13 points, in float64."""
    arrays = run.experiment.build_data()["val"].arrays
    kernel, bias = (np.asarray(w[...], np.float64) for w in (run.model.kernel, run.model.bias))
    return (arrays["x"].astype(np.float64) @ kernel + bias)[:, 0] - arrays["y"]


def test_pair_is_the_exact_mean_over_a_ragged_split(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {
            "mae": (np.abs(height - y).sum(), y.size),
            "mse": {"all": (((height - y) ** 2).sum(), y.size)},
        }
    )

    metrics = run.validate()

    errors = _errors_of(run)
    assert metrics["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    assert metrics["mse"]["all"] == pytest.approx((errors**2).mean(), rel=1e-6)


def test_value_without_a_count_is_summed(run_with: Any) -> None:
    run = run_with(metrics=lambda self, height, *, y: {"n": (y.size, None), "batches": (1, None)})

    assert run.validate() == {"n": 13.0, "batches": 3.0}


def test_arrays_are_reduced_entry_by_entry(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {
            "share": (np.array([(y > 0).sum(), (y <= 0).sum()]), np.array([y.size, y.size]))
        }
    )

    share = run.validate()["share"]

    up = (run.experiment.build_data()["val"].arrays["y"] > 0).mean()
    np.testing.assert_allclose(share, [up, 1 - up])


def test_hooks_never_see_padding(run_with: Any) -> None:
    seen: list[tuple[Any, ...]] = []

    def metrics(self: Any, height: Any, *, y: Any) -> Any:
        seen.append((type(height), height.shape, y.shape))
        return {"n": (height.size, None)}

    run_with(metrics=metrics).validate()

    assert seen == [(np.ndarray, (n,), (n,)) for n in (5, 5, 3)]


def test_without_the_hook_val_loss_is_the_mean_over_batches(plane: Any, make_run: Any) -> None:
    run = make_run(plane())

    errors = _errors_of(run)
    batches = [(errors[i : i + 5] ** 2).mean() for i in (0, 5, 10)]

    assert run.validate() == {"val_loss": pytest.approx(np.mean(batches), rel=1e-6)}


def test_name_with_a_slash_stays_as_it_is(run_with: Any) -> None:
    run = run_with(metrics=lambda self, height, *, y: {"top/1": (1, 2), "g": {"a/b": (3, 2)}})

    assert run.validate() == {"top/1": 1.5 / 3, "g": {"a/b": 1.5}}


def test_finalize_runs_once_on_reduced_values_with_the_split(run_with: Any) -> None:
    calls: list[Any] = []

    def finalize(self: Any, reduced: Any, split: str) -> Any:
        calls.append((split, dict(reduced)))
        return {"half": reduced["n"] / 2, "best": "none"}

    run = run_with(
        metrics=lambda self, height, *, y: {"n": (y.size, None)}, finalize_metrics=finalize
    )

    assert run.validate() == {"half": 6.5, "best": "none"}
    assert calls == [("val", {"n": 13.0})]


def test_what_is_no_number_is_returned_but_not_logged(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {"n": (y.size, None)},
        finalize_metrics=lambda self, reduced, split: {
            **reduced,
            "best": "none",
            "none": None,
            "per_class": np.ones(3),
        },
    ).train()

    assert run.history.columns == ["epoch", "step", "loss", "n"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([1, 2], r"returned list[\s\S]*hits\.size"),
        ({"acc": 0.5}, r"returned 0\.5 for the metric `acc`[\s\S]*the denominator is yours"),
        ({"g": {"acc": (1, 2, 3)}}, r"\(1, 2, 3\) for the metric `g/acc`[\s\S]*\(sum, count\)"),
        ({"acc": (None, 2)}, r"\(None, 2\) for the metric `acc`"),
        ({"acc": ("a", 2)}, r"\('a', 2\) for the metric `acc`"),
        ({"acc": (1, "b")}, r"\(1, 'b'\) for the metric `acc`"),
        ({"acc": (1, 0)}, r"counts of the metric `acc` add up to 0"),
    ],
)
def test_metrics_that_are_no_pairs_are_refused(run_with: Any, metrics: Any, words: str) -> None:
    run = run_with(metrics=lambda self, height, *, y: metrics)

    with pytest.raises(HookError, match=rf"`Measured\.metrics` on the split `val`.*{words}"):
        run.validate()


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ({"a": (1, 2)}, {"b": (1, 2)}, "returned `b`, and `a` for the batch before"),
        ({}, {"b": (1, 2)}, "returned `b`, and no metrics for the batch before"),
        ({"a": (1, 2)}, {"a": (1, None)}, r"`a` between \(sum, count\) and \(value, None\)"),
    ],
)
def test_metrics_that_change_between_batches_are_refused(
    run_with: Any, first: Any, later: Any, words: str
) -> None:
    answers = iter([first, later])
    run = run_with(metrics=lambda self, height, *, y: next(answers))

    with pytest.raises(HookError, match=words):
        run.validate()


@pytest.mark.parametrize("name", ["epoch", "step", "loss"])
def test_metric_that_would_overwrite_the_history_is_refused(run_with: Any, name: str) -> None:
    run = run_with(metrics=lambda self, height, *, y: {name: (1, 2)})

    with pytest.raises(HookError, match=rf"metric named `{name}`[\s\S]*`val_{name}`"):
        run.validate()


def test_finalize_that_returns_no_dict_is_refused(run_with: Any) -> None:
    run = run_with(finalize_metrics=lambda self, reduced, split: 0.5)

    with pytest.raises(HookError, match=r"finalize_metrics` returned float[\s\S]*dict of metrics"):
        run.validate()
