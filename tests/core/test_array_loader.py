from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from nitro import ArrayLoader
from nitro.errors import DataError


def _samples(loader: ArrayLoader) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


def test_epoch_holds_every_sample_once_in_order() -> None:
    loader = ArrayLoader({"x": np.arange(7)}, 3)

    assert len(loader) == 3
    assert _samples(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_fields_stay_together_when_shuffled() -> None:
    loader = ArrayLoader({"x": np.arange(20), "y": np.arange(20) * 10}, 3, shuffle=True)

    batches = list(loader)

    assert sorted(np.concatenate([batch["x"] for batch in batches])) == list(range(20))
    assert all((batch["y"] == batch["x"] * 10).all() for batch in batches)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    def epochs(seed: int) -> list[Any]:
        loader = ArrayLoader({"x": np.arange(20)}, 5, shuffle=True, seed=seed)
        return [_samples(loader), _samples(loader)]

    first, second = epochs(seed=1)

    assert first != second
    assert epochs(seed=1) == [first, second]
    assert epochs(seed=2) != [first, second]


def test_ragged_last_batch_can_be_dropped_and_is_counted() -> None:
    loader = ArrayLoader({"x": np.arange(7)}, 3, drop_last=True)

    assert _samples(loader) == [[0, 1, 2], [3, 4, 5]]
    assert loader.num_dropped == 1


def test_position_restored_in_mid_epoch_gives_the_same_rest() -> None:
    loader = ArrayLoader({"x": np.arange(20)}, 4, shuffle=True, seed=1)
    list(loader)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.get_state()
    rest = [batch["x"].tolist() for batch in batches]

    other = ArrayLoader({"x": np.arange(20)}, 4, shuffle=True, seed=1)
    other.set_state(state)

    assert state == {"epoch": 1, "batch": 2}
    assert _samples(other) == rest
    assert _samples(other) == _samples(loader)


def test_position_after_an_epoch_is_the_next_epoch() -> None:
    loader = ArrayLoader({"x": np.arange(4)}, 2)
    list(loader)

    assert loader.get_state() == {"epoch": 1, "batch": 0}


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({}, {}, "got no arrays"),
        (np.arange(3), {}, r"got ndarray[\s\S]*ArrayLoader\({"),
        ({"x": np.float32(3)}, {}, r"`x` .* the shape \(\)"),
        ({"x": np.zeros((0, 2))}, {}, r"`x` .* the shape \(0, 2\)"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, {}, "disagree.*'x': 3, 'y': 4"),
        ({"x": np.zeros(3)}, {"batch_size": 0}, r"`batch_size` is 0[\s\S]*at least 1"),
        ({"x": np.zeros(3)}, {"batch_size": 2.0}, r"`batch_size` is 2\.0"),
        ({"x": np.ma.masked_array([1, 2], [True, False])}, {}, r"`x` .* masked[\s\S]*filled"),
        ({"x": np.zeros(3)}, {"seed": -1}, r"`seed` is -1[\s\S]*at least 0"),
        ({"x": np.zeros(3)}, {"batch_size": 4, "drop_last": True}, r"no batch[\s\S]*at most 3"),
    ],
)
def test_loader_that_cannot_work_says_why(arrays: Any, options: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ArrayLoader(arrays, **{"batch_size": 2, **options})


class Picked(ArrayLoader):
    """Picks the samples that it is told to."""

    picks: Any = ()

    def order(self, epoch: int) -> Any:
        del epoch
        return self.picks


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize(
    ("picks", "words"),
    [
        (np.arange(8) + 1, r"`Picked\.order\(0\)` returned the index 8[\s\S]*0 to 7"),
        (np.arange(8) - 9, r"returned the index -9[\s\S]*-8 to -1"),
        (np.arange(4), r"returned 4 indices for 2 batches of 4[\s\S]*`__len__`"),
        (np.arange(16) % 8, "returned 16 indices for 2 batches of 4"),
        (np.arange(8.0), r"returned float64\(8,\)[\s\S]*integers"),
        (np.ones(8, bool), r"returned bool\(8,\)"),
    ],
)
def test_order_that_no_batch_can_be_cut_from_is_refused(
    plane: Any, make_run: Any, points: Any, device: bool, picks: Any, words: str
) -> None:
    loader = Picked(points(8, seed=0), 4, device=device)
    loader.picks = picks

    with pytest.raises(DataError, match=words):
        make_run(plane(), data={"train": loader}, logger=None, checkpointer=None).train()


def test_order_may_draw_samples_again(plane: Any, make_run: Any, points: Any) -> None:
    class Oversampled(Picked):
        picks: ClassVar = [0, 0, 1, -1, 2, 2, 2, 3, 7, 6, 5, 4]

        def __len__(self) -> int:
            return 3

    arrays = points(8, seed=0)
    on_device, on_host = (
        make_run(plane(), data={"train": Oversampled(arrays, 4, device=device)}, checkpointer=None)
        for device in (True, False)
    )
    rows = np.array(Oversampled.picks).reshape(3, 4)
    by_hand = make_run(
        plane(),
        data={"train": [{k: v[r] for k, v in arrays.items()} for r in rows]},
        checkpointer=None,
    )

    losses = [run.train().history["loss"] for run in (on_device, on_host, by_hand)]

    assert losses[0] == losses[1] == losses[2]


def test_run_lends_its_seed_to_a_loader_without_one(plane: Any, make_run: Any) -> None:
    first, same, other = (make_run(plane(), seed=s, logger=None).train() for s in (1, 1, 2))

    assert first.history["loss"] == same.history["loss"]
    assert first.history["loss"] != other.history["loss"]


def test_data_frame_is_fields_of_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.5, 2.5, 3.5], "b": [0, 1, 0], "c": [True, False, True]})

    loader = ArrayLoader(frame, 2)
    named = ArrayLoader({"x": frame[["a", "b"]], "y": frame["b"]}, 2)

    assert [batch["a"].tolist() for batch in loader] == [[1.5, 2.5], [3.5]]
    assert next(iter(named))["x"].tolist() == [[1.5, 0.0], [2.5, 1.0]]
    assert next(iter(named))["y"].tolist() == [0, 1]


@pytest.mark.parametrize("as_field", [True, False])
@pytest.mark.parametrize(
    ("column", "dtype", "conversion"),
    [
        (["u", "v"], "object", lambda df: df["a"].astype("category").cat.codes),
        (["u", "v"], "category", lambda df: df["a"].cat.codes),
        ([1, None], "Int64", lambda df: df["a"].fillna(0).to_numpy("float32")),
        (["2020-01-01", "2021-01-01"], "datetime64[ns]", lambda df: [0, 366]),
    ],
)
def test_column_without_plain_numbers_is_refused_with_the_conversion(
    column: Any, dtype: str, conversion: Any, as_field: bool
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": pandas.Series(column, dtype=dtype), "b": [1.0, 2.0]})

    with pytest.raises(DataError, match=r"column `a` has the dtype") as error:
        ArrayLoader({"x": frame} if as_field else frame, 2)

    fixed = eval(error.value.fix.split("`")[1], {"df": frame})
    assert np.asarray(fixed).tolist() == np.asarray(conversion(frame)).tolist()
    assert len(ArrayLoader({"a": fixed}, 2)) == 1
