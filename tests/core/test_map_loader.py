"""Datasets that give samples by index, read in threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import DataError


class Samples:
    """Decodes one sample when it is asked for, and notes in which thread."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self.arrays["y"])

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name)
        return {name: array[index] for name, array in self.arrays.items()}


def test_training_on_samples_is_that_on_their_arrays(
    plane: Any, make_run: Any, points: Any
) -> None:
    arrays = points(22, seed=0)
    samples = Samples(arrays)
    loaders = (
        nitro.MapLoader(samples, 5, shuffle=True),
        nitro.ArrayLoader(arrays, 5, shuffle=True, device=False),
    )

    by_sample, by_array = (
        make_run(
            plane(), data={"train": loader}, checkpointer=None, logger=None, max_epochs=3
        ).train()
        for loader in loaders
    )

    np.testing.assert_array_equal(by_sample.model.kernel[...], by_array.model.kernel[...])
    assert by_sample.evaluate("train") == by_array.evaluate("train")
    assert any(name.startswith("nitro-samples") for name in samples.threads)


def test_order_of_samples_and_draws_does_not_depend_on_the_number_of_threads() -> None:
    def drawn(batch: Any, rng: np.random.Generator) -> Any:
        return {**batch, "draw": rng.random()}

    def batches(workers: int) -> Any:
        dataset = [{"x": np.full(2, i)} for i in range(11)]
        loader = nitro.MapLoader(dataset, 3, shuffle=True, transform=drawn, workers=workers)
        return [(b["x"].tolist(), b["draw"]) for b in loader.batches(2, start=1)]

    assert batches(1) == batches(7)
    assert len(batches(1)) == 3


def test_threads_end_with_the_iteration_that_is_given_up() -> None:
    batches = nitro.MapLoader([{"x": i} for i in range(50)], 2).batches(0)
    next(batches)
    batches.close()

    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("nitro-samples") for name in names)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (3, r"got int[\s\S]*`__len__` and `__getitem__`"),
        ([], "got no samples"),
        ({"x": np.zeros(3)}, r"got a mapping: x[\s\S]*nitro\.ArrayLoader"),
        ([(1, 2)], r"Sample 0 of the list is tuple[\s\S]*name its parts"),
        ([{"x": 1}, {"y": 1}], r"Sample 1 has no field `x`, which sample 0 has"),
        ([{"x": [1]}, {"x": [1, 2]}], r"sample 1 has the shape \(2,\)[\s\S]*pad it"),
    ],
)
def test_dataset_that_gives_no_batch_says_why(dataset: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(nitro.MapLoader(dataset, 2))
