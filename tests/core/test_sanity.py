"""Mistakes of `metrics` and misspelt metrics are told at setup, from one batch of validation."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import ConfigError, HookError


@pytest.fixture
def make_run(make_run: Any) -> Any:
    """Makes a handle with the check that it has by default."""
    return functools.partial(make_run, sanity_check=True)


_QUIET: dict[str, Any] = {"progress": False, "logger": None}


@pytest.fixture
def measured(plane: Any) -> Any:
    class Measured(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": (np.abs(height - y).sum(), y.size)}

    return Measured


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpointer": nitro.TopK(metric="mea")}, r"ranks by `mea`.*\n.*did you mean `mae`"),
        ({"early_stop": nitro.EarlyStop(metric="mea")}, r"watches `mea`.*\n.*did you mean `mae`"),
    ],
)
def test_misspelt_metric_is_told_at_setup(
    measured: Any, make_run: Any, options: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_run(measured(), **options)


def test_mistake_in_a_hook_is_told_at_setup_with_the_way_around(plane: Any, make_run: Any) -> None:
    class Uncounted(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": np.abs(height - y).mean()}

    class Raising(plane):
        def finalize_metrics(self, reduced: Any, split: str) -> Any:
            return {"root": reduced["mse"] ** 0.5}

    with pytest.raises(HookError, match="for the metric `mae`"):
        make_run(Uncounted())
    with pytest.raises(KeyError, match="mse") as failed:
        make_run(Raising())
    assert "first batch of `val`" in failed.value.__notes__[0]
    assert "sanity_check=False" in failed.value.__notes__[0]
    assert make_run(Raising(), sanity_check=False).step == 0


def test_count_of_zero_in_one_batch_is_no_mistake(plane: Any, make_run: Any, points: Any) -> None:
    val = points(10, seed=1)
    val["y"][:5], val["y"][5:] = -1.0, 1.0

    class Positives(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"error": (np.abs(height - y)[y > 0].sum(), (y > 0).sum())}

    data = {
        "train": nitro.ArrayLoader(points(20, seed=0), 5),
        "val": nitro.ArrayLoader(val, 5),
    }
    run = make_run(Positives(), data=data, checkpointer=None, **_QUIET).train()

    by_hand = np.abs(run.predict({"x": val["x"][5:]}) - 1).mean()
    np.testing.assert_allclose(run.history.error, [by_hand], rtol=1e-6)


def test_check_moves_no_random_stream_and_compiles_what_validation_uses(
    images: Any, make_run: Any
) -> None:
    class Drawing(images):
        def metrics(self, outputs: Any, *, label: Any) -> Any:
            chance = np.random.random() + random.random()  # noqa: NPY002 - as users write it
            hits = (outputs["logits"].argmax(-1) == label).sum()
            return {"acc": (hits, label.size), "chance": (chance, None)}

    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    plain = make_run(Drawing(), sanity_check=False, checkpointer=None, **_QUIET).train()
    compiled = nitro.cache_stats()["misses"]
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    checked = make_run(Drawing(), checkpointer=None, **_QUIET).train()

    assert checked.history.rows == plain.history.rows
    assert nitro.cache_stats()["misses"] == compiled


def test_split_without_labels_is_not_checked_and_one_with_them_is(
    measured: Any, make_run: Any, points: Any
) -> None:
    class Named(measured):
        def finalize_metrics(self, reduced: Any, split: str) -> Any:
            return {"mae": reduced["mae" if split == "val" else "mea"]}

    data = {
        "train": nitro.ArrayLoader(points(20, seed=0), 5),
        "val": nitro.ArrayLoader(points(10, seed=1), 5),
        "test": nitro.ArrayLoader(points(10, seed=2), 5),
    }

    with pytest.raises(KeyError, match="mea") as failed:
        make_run(Named(), data=data)

    assert "first batch of `test`" in failed.value.__notes__[0]


def test_handle_that_only_evaluates_is_not_checked(
    measured: Any, make_run: Any, points: Any
) -> None:
    before = nitro.cache_stats()["misses"]

    make_run(measured(), data={"test": nitro.ArrayLoader(points(10, seed=2), 5)})

    assert nitro.cache_stats()["misses"] == before


def test_early_stop_decides_what_is_restored_as_best(measured: Any, make_run: Any) -> None:
    class Turning(measured):
        def build_data(self) -> Any:
            data = super().build_data()
            data["val"].arrays["y"][:] *= -1
            return data

        def learning_rate(self, group: Any = None) -> float:
            return 0.05

    run = make_run(
        Turning(),
        max_epochs=20,
        restore_best=True,
        early_stop=nitro.EarlyStop(metric="mae", patience=2),
        **_QUIET,
    ).train()

    assert run.history[-1]["mae"] > min(run.history.mae)
    assert run.validate()["mae"] == min(run.history.mae)
    assert run.history.metric == "mae"


def test_restore_best_without_a_ranked_metric_is_refused(measured: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"`restore_best=True`[\s\S]*TopK\(metric=\"mae\""):
        make_run(measured(), restore_best=True)
