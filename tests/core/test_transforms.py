"""Augmentation: the batch, seed and epoch decide it; evaluations of `train` leave it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import DataError, NitroWarning


def _noisy(batch: Any, rng: np.random.Generator) -> Any:
    noise = rng.normal(size=batch["x"].shape).astype(np.float32)
    return {**batch, "x": batch["x"] + noise}


def _loss(run: nitro.Nitro, batch: Any) -> float:
    """The mean squared error over all rows, in NumPy."""
    kernel, bias = (np.asarray(a[...], np.float64) for a in (run.model.kernel, run.model.bias))
    return float((((batch["x"] @ kernel + bias)[:, 0] - batch["y"]) ** 2).mean())


def test_each_batch_of_each_epoch_has_random_numbers_of_its_own() -> None:
    def drawn(batch: Any, rng: np.random.Generator) -> Any:
        return {"x": batch["x"], "draw": rng.integers(2**60, size=2)}

    loader = nitro.ArrayLoader({"x": np.arange(6)}, 2, shuffle=True, seed=3, transform=drawn)
    draws = [[b["draw"].tolist() for b in loader.batches(epoch)] for epoch in range(3)]
    flat = [tuple(draw) for epoch in draws for draw in epoch]

    assert len(set(flat)) == 9
    assert [b["draw"].tolist() for b in loader.batches(1, start=2)] == draws[1][2:]
    by_hand = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(1, 2)))
    assert by_hand.integers(2**60, size=2).tolist() == draws[1][2]


def test_augmented_run_that_is_resumed_in_mid_epoch_gives_the_same_bits(
    plane: Any, make_run: Any, points: Any, tmp_path: Any
) -> None:
    def run(name: str, **options: Any) -> nitro.Nitro:
        loader = nitro.ArrayLoader(points(40, seed=0), 5, shuffle=True, transform=_noisy)
        options = {"max_epochs": 4, "steps_per_call": 1, **options}
        return make_run(plane(), data={"train": loader}, run_dir=tmp_path / name, **options)

    whole = run("whole").train()
    stopped = run("cut")
    stopped.on_phase(lambda e: e.phase is nitro.Phase.TRAINING and stopped.request_stop())
    stopped.train()
    resumed = run("cut", resume="auto").train()

    assert 0 < stopped.step < 32
    assert resumed.step == whole.step == 32
    np.testing.assert_array_equal(resumed.model.kernel[...], whole.model.kernel[...])


def test_augmented_training_is_that_on_the_batches_made_by_hand(
    plane: Any, make_run: Any, points: Any
) -> None:
    arrays = points(20, seed=0)
    loader = nitro.ArrayLoader(arrays, 5, seed=0, transform=_noisy)
    batches = [
        _noisy(
            {name: array[5 * i : 5 * i + 5] for name, array in arrays.items()},
            np.random.default_rng(np.random.SeedSequence(0, spawn_key=(0, i))),
        )
        for i in range(4)
    ]

    augmented, by_hand = (
        make_run(plane(), data={"train": data}, checkpointer=None, logger=None).train()
        for data in (loader, batches)
    )

    np.testing.assert_array_equal(augmented.model.kernel[...], by_hand.model.kernel[...])


def test_evaluating_train_takes_every_row_once_as_it_is(
    plane: Any, make_run: Any, points: Any
) -> None:
    class Twice(nitro.ArrayLoader):
        def order(self, epoch: int) -> Any:
            return np.random.default_rng(epoch).integers(0, 20, 20)

    class Counted(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"val_loss": (((height - y) ** 2).sum(), y.size), "rows": (y.size, None)}

    arrays = points(23, seed=0)
    loader = Twice(arrays, 5, shuffle=True, transform=_noisy)
    run = make_run(Counted(), data={"train": loader}, checkpointer=None).train()

    first = run.evaluate("train")

    assert first["rows"] == 23
    assert first["val_loss"] == pytest.approx(_loss(run, arrays), rel=1e-5)
    assert run.evaluate("train") == first


def test_transform_that_draws_nothing_stays_in_the_evaluation_of_train(
    plane: Any, make_run: Any, points: Any
) -> None:
    arrays = points(20, seed=0)

    def halved(batch: Any, rng: np.random.Generator) -> Any:
        del rng
        return {**batch, "x": batch["x"] / 2}

    run = make_run(plane(), data={"train": nitro.ArrayLoader(arrays, 5, transform=halved)})

    loss = _loss(run, {**arrays, "x": arrays["x"] / 2})
    assert run.evaluate("train")["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_evaluation_of_train_tells_what_it_cannot_leave_out(
    plane: Any, make_run: Any, points: Any
) -> None:
    def cropped(batch: Any, rng: np.random.Generator) -> Any:
        start = rng.integers(3)
        return {**batch, "x": batch["x"][:, start : start + 4]}

    arrays = {**points(20, seed=0), "x": np.ones((20, 6), np.float32)}
    run = make_run(plane(), data={"train": nitro.ArrayLoader(arrays, 5, transform=cropped)})

    class Own(nitro.ArrayLoader):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__()))

    other = make_run(plane(), data={"train": Own(points(20, seed=0), 5)})

    with pytest.warns(NitroWarning, match="`train` is evaluated with its `transform`"):
        run.evaluate("train")
    with pytest.warns(NitroWarning, match="`train` is evaluated as its Own yields it"):
        other.evaluate("train")


def test_validation_with_a_transform_does_not_depend_on_how_often_it_ran(
    plane: Any, make_run: Any, points: Any
) -> None:
    val = nitro.ArrayLoader(points(20, seed=1), 5, transform=_noisy)
    run = make_run(plane(), data={"train": [points(5, seed=0)], "val": val})

    assert run.validate() == run.validate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transform": 3}, r"`transform` is 3[\s\S]*transform\(batch, rng\)"),
        ({"transform": lambda batch, rng: None}, r"`transform` .* NoneType[\s\S]*`return"),
        ({"transform": _noisy, "device": True}, r"and a `transform`[\s\S]*leave `device=True`"),
    ],
)
def test_transform_that_cannot_be_used_is_refused(
    plane: Any, make_run: Any, points: Any, options: Any, words: str
) -> None:
    def train() -> None:
        loader = nitro.ArrayLoader(points(20, seed=0), 5, **options)
        make_run(plane(), data={"train": loader}, checkpointer=None).train()

    with pytest.raises(DataError, match=words):
        train()
