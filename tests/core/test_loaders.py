"""Any sized iterable of dicts is a split: lists, generators behind a class, Grain, PyTorch."""

from __future__ import annotations

import itertools
import json
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nitro
from nitro._run._prefetch import DEPTH, prefetched
from nitro.errors import ConfigError, DataError, DivergenceError, NitroWarning


class Loader:
    """Yields batches from `draw`, one call per batch, and notes which threads draw."""

    def __init__(self, count: int, draw: Any) -> None:
        self.count = count
        self.draw = draw
        self.drawn = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            self.drawn += 1
            yield self.draw(index)


class OneShot(Loader):
    def __init__(self, points: Any) -> None:
        super().__init__(3, lambda index: points(5, seed=index))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.draw(0)


class Liar(Loader):
    def __init__(self, points: Any) -> None:
        super().__init__(3, points)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class GoesOn(Loader):
    """Hands out one generator for good, so that the second epoch finds it empty."""

    def __init__(self, count: int, draw: Any) -> None:
        super().__init__(count, draw)
        self.generator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        return self.generator


class Shrinks(Loader):
    """Has a batch less once the first epoch, which follows the look at setup, has begun."""

    begun = 0

    def __iter__(self) -> Iterator[Any]:
        batches = [self.draw(index) for index in range(self.count)]
        self.begun += 1
        self.count -= self.begun == 2
        yield from batches


@pytest.fixture
def grain() -> Any:
    """Grain, where it is installed."""
    return pytest.importorskip("grain", reason="needs Grain: `uv sync --group loaders`")


@pytest.fixture
def torch() -> Any:
    """PyTorch, where it is installed; it is in no lock."""
    return pytest.importorskip("torch", reason="needs PyTorch: `pip install torch==2.13.0`")


@pytest.fixture
def make_run(make_run: Any) -> Any:
    """Makes a handle that writes no records, as most loaders here have no position."""

    def make(experiment: Any, **options: Any) -> nitro.Nitro:
        return make_run(experiment, **{"checkpointer": None, **options})

    return make


@pytest.fixture
def losses_on(plane: Any, make_run: Any) -> Any:
    """Trains a plane on splits and returns its handle."""

    def train(data: Any, **options: Any) -> nitro.Nitro:
        return make_run(plane(), data=data, **options).train()

    return train


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def _samples(points: Any, count: int = 40) -> list[dict[str, Any]]:
    arrays = points(count, seed=3)
    return [{"x": arrays["x"][i], "y": arrays["y"][i], "name": f"s{i}"} for i in range(count)]


def test_grain_dataset_trains_like_the_same_batches(
    grain: Any, losses_on: Any, points: Any
) -> None:
    samples = _samples(points)
    dataset = grain.MapDataset.source(samples).shuffle(seed=1).batch(5, drop_remainder=True)
    batches = [jax.tree.map(np.asarray, batch) for batch in dataset]

    run = losses_on({"train": dataset, "val": dataset}, max_epochs=2)

    assert run.step == 16
    assert list(run.history) == list(
        losses_on({"train": batches, "val": batches}, max_epochs=2).history
    )
    assert _threads() == []


def test_grain_dataset_evaluates_its_ragged_end(
    grain: Any, plane: Any, make_run: Any, points: Any
) -> None:
    samples = _samples(points, 13)
    dataset = grain.MapDataset.source(samples).batch(5)

    class Counted(plane):
        def metrics(self, height: Any, *, y: Any, name: Any) -> Any:
            assert str(name[0]).startswith("s")
            return {"n": (y.size, None)}

    assert make_run(Counted(), data={"val": dataset}).validate() == {"n": 13.0}


def test_endless_dataset_is_refused(grain: Any, plane: Any, make_run: Any, points: Any) -> None:
    dataset = grain.MapDataset.source(_samples(points)).repeat().batch(5)

    with pytest.raises(DataError, match=r"it never ends[\s\S]*leave `\.repeat\(\)` out"):
        make_run(plane(), data={"train": dataset})


class Sized:
    """What the message about a loader without a length says to write."""

    def __init__(self, loader: Any, length: int) -> None:
        self.loader = loader
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _grain_iterable(grain: Any, samples: list[Any], kind: str) -> Any:
    if kind == "IterDataset":
        return grain.MapDataset.source(samples).batch(5).to_iter_dataset()
    sampler = grain.samplers.SequentialSampler(len(samples), grain.sharding.NoSharding())
    batch = grain.transforms.Batch(5, drop_remainder=False)
    return grain.DataLoader(data_source=samples, sampler=sampler, operations=[batch])


@pytest.mark.parametrize("kind", ["IterDataset", "DataLoader"])
def test_grain_loader_without_a_length_is_refused(
    grain: Any, plane: Any, make_run: Any, points: Any, kind: str
) -> None:
    loader = _grain_iterable(grain, _samples(points), kind)

    with pytest.raises(DataError, match=rf"{kind}, which has no length[\s\S]*`iter\(loader\)`"):
        make_run(plane(), data={"train": loader})


@pytest.mark.parametrize("kind", ["IterDataset", "DataLoader"])
def test_grain_loader_with_a_length_trains_like_the_same_batches(
    grain: Any, losses_on: Any, points: Any, kind: str
) -> None:
    arrays, samples = points(40, seed=3), _samples(points)
    batches = [{n: a[i : i + 5] for n, a in arrays.items()} for i in range(0, 40, 5)]
    train = Sized(_grain_iterable(grain, samples, kind), 8)
    val = Sized(_grain_iterable(grain, samples[:13], kind), 3)

    run = losses_on({"train": train, "val": val}, max_epochs=2)

    same = [*batches[:2], {n: a[:3] for n, a in batches[2].items()}]
    expected = losses_on({"train": batches, "val": same}, max_epochs=2)
    assert run.step == 16
    assert list(run.history) == list(expected.history)
    assert _threads() == []


def test_torch_loader_works_as_it_is(
    torch: Any, losses_on: Any, plane: Any, make_run: Any, points: Any
) -> None:
    loader = torch.utils.data.DataLoader(_samples(points), batch_size=5, drop_last=True)
    batches = [{"x": b["x"].numpy(), "y": b["y"].numpy(), "name": b["name"]} for b in loader]
    ragged = torch.utils.data.DataLoader(_samples(points, 13), batch_size=5)

    run = losses_on({"train": loader, "val": loader}, max_epochs=2)
    same = losses_on({"train": batches, "val": batches}, max_epochs=2)

    class Counted(plane):
        def metrics(self, height: Any, *, y: Any, name: Any) -> Any:
            assert type(y) is np.ndarray
            assert name[0].startswith("s")
            return {"n": (y.size, None)}

    assert list(run.history) == list(same.history)
    assert make_run(Counted(), data={"val": ragged}).validate() == {"n": 13.0}


@pytest.mark.slow
def test_torch_loader_with_worker_processes(
    torch: Any, losses_on: Any, points: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Starting and ending a process takes longer than eight steps do.
    monkeypatch.setattr("nitro._run._loop._WORTH_TELLING_S", float("inf"))
    loader = torch.utils.data.DataLoader(
        _samples(points),
        batch_size=5,
        num_workers=1,
        drop_last=True,
        multiprocessing_context="spawn",
    )

    assert losses_on({"train": loader}).step == 8


def test_tensor_that_numpy_cannot_read_is_refused(
    torch: Any, plane: Any, make_run: Any, points: Any
) -> None:
    arrays = points(5, seed=0)
    x = torch.tensor(arrays["x"], requires_grad=True)

    with pytest.raises(DataError, match=r"`x` in .* is Tensor .*cannot read[\s\S]*detach"):
        make_run(plane(), data={"train": [{**arrays, "x": x}]})


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("accum", [1, 2])
def test_loader_that_fills_one_buffer_again_trains_like_one_that_does_not(
    losses_on: Any, points: Any, steps_per_call: int, accum: int
) -> None:
    buffer = points(5, seed=0)

    def refill(index: int) -> Any:
        for name, array in points(5, seed=index).items():
            buffer[name][...] = array
        return buffer

    def fresh(index: int) -> Any:
        return points(5, seed=index)

    runs = [
        losses_on(
            {"train": Loader(6, draw), "val": Loader(3, draw)},
            steps_per_call=steps_per_call,
            accum=accum,
        )
        for draw in (refill, fresh)
    ]

    assert list(runs[0].history) == list(runs[1].history)


class Tensor:
    """An array of a library that hands out its memory, as CPU tensors do."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.dtype, self.shape = memory, memory.dtype, memory.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del dtype, copy
        return self.memory


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy in memory that JAX can use as it is."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("kind", ["memmap", "tensor", "subclass"])
@pytest.mark.parametrize("residency", ["host", "device"])
def test_buffer_of_any_kind_may_be_filled_again_in_evaluation(
    plane: Any, make_run: Any, tmp_path: Any, kind: str, residency: str
) -> None:
    class Deep(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            mixed = jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y @ jnp.eye(4)), x)
            return model(x)[:, 0] + 0 * mixed[:, 0]

        def metrics(self, height: Any, *, x: Any) -> Any:
            return {"x": (x, None)}

        def metrics_residency(self, hook: str) -> str:
            return residency if hook == "metrics" else "device"

    batches = np.random.default_rng(0).normal(size=(8, 4096, 4)).astype(np.float32)
    buffer = aligned(batches[0])
    if kind == "memmap":
        buffer = np.memmap(tmp_path / "x", np.float32, "w+", shape=batches[0].shape)

    def refill(index: int) -> Any:
        buffer[...] = batches[index]
        return {"x": Tensor(buffer) if kind == "tensor" else buffer}

    class Refilling(nitro.ArrayLoader):
        def __iter__(self) -> Iterator[Any]:
            return (refill(index) for index in range(8))

    if kind == "subclass":
        source: Any = Refilling({"x": np.concatenate(batches)}, 4096)
    else:
        source = Loader(8, refill)

    got = make_run(Deep(), data={"val": source}).validate()["x"]

    np.testing.assert_allclose(got, batches.sum(0, dtype=np.float64), atol=1e-5)


def test_attribute_named_batches_may_mean_anything(losses_on: Any, points: Any) -> None:
    batches = [points(5, seed=index) for index in range(4)]

    class Listed:
        def __init__(self) -> None:
            self.batches = batches

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    class Named(Listed):
        def __init__(self) -> None:
            pass

        def batches(self) -> Iterator[Any]:
            return iter(batches)

    class Wider(nitro.ArrayLoader):
        def __iter__(self) -> Iterator[Any]:
            return ({**batch, "z": batch["y"]} for batch in super().__iter__())

    wider = Wider({name: np.concatenate([b[name] for b in batches]) for name in "xy"}, 5)
    wanted = losses_on({"train": batches}).history["loss"]

    assert [losses_on({"train": s}).history["loss"] for s in (Listed(), Named(), wider)] == [
        wanted
    ] * 3


@pytest.mark.parametrize("dtype", [">f4", ">f8"])
@pytest.mark.parametrize("kind", ["list", "resident"])
def test_foreign_byte_order_trains_alike(
    losses_on: Any, points: Any, dtype: str, kind: str
) -> None:
    def train(arrays: Any) -> list[float]:
        loader: Any = nitro.ArrayLoader(arrays, 5, device=True) if kind == "resident" else [arrays]
        return losses_on({"train": loader}).history["loss"]

    arrays = points(10, seed=0)

    assert train({**arrays, "x": arrays["x"].astype(dtype)}) == train(arrays)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((5, 4), "m8[s]"), r"dtype timedelta64\[s\]"),
        (np.ma.masked_array(np.zeros((5, 4)), mask=np.eye(5, 4)), r"masked array[\s\S]*`\.filled"),
    ],
)
def test_array_that_jax_cannot_stand_for_is_refused(
    plane: Any, make_run: Any, x: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        make_run(plane()).predict({"x": x})


def test_nested_batch_fields_reach_the_hooks(plane: Any, make_run: Any, points: Any) -> None:
    class Nested(plane):
        def forward(self, model: Any, *, inputs: Any) -> Any:
            return model(inputs["x"])[:, 0] + inputs["more"]["zero"]

        def loss(self, height: Any, *, target: Any) -> Any:
            return super().loss(height, y=target["y"])

        def metrics(self, height: Any, *, inputs: Any) -> Any:
            return {"n": (inputs["x"].shape[0], None)}

    def draw(index: int, rows: int = 5) -> Any:
        arrays = points(rows, seed=index)
        more = {"zero": np.zeros(rows, np.float32)}
        return {"inputs": {"x": arrays["x"], "more": more}, "target": {"y": arrays["y"]}}

    data = {"train": Loader(4, draw), "val": [draw(0), draw(1, rows=3)]}
    run = make_run(Nested(), data=data).train()

    assert (run.step, run.validate()) == (4, {"n": 8.0})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda points: (points(5, seed=0) for _ in range(3)), "generator, which has no length"),
        (OneShot, r"OneShot, an iterator[\s\S]*`yield`"),
        (lambda points: Loader(0, points), "`train` has no batches"),
        (Liar, "has the length 3 and yields no batch"),
    ],
)
def test_source_that_cannot_be_gone_through_is_refused_at_setup(
    plane: Any, make_run: Any, points: Any, source: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        make_run(plane(), data={"train": source(points)})


def test_source_that_goes_on_where_it_was_is_refused_in_its_first_epoch(
    losses_on: Any, plane: Any, make_run: Any, points: Any
) -> None:
    def draw(index: int) -> Any:
        return points(5, seed=index)

    with pytest.raises(DataError, match=r"ended after 3 batches of epoch 1; .* promised 4"):
        losses_on({"train": GoesOn(4, draw)})
    with pytest.raises(DataError, match=r"`val` ended after 3 batches; its length promised 4"):
        make_run(plane(), data={"val": GoesOn(4, draw)}).validate()
    assert _threads() == []


def test_source_without_an_end_is_refused_in_evaluation(
    plane: Any, make_run: Any, points: Any
) -> None:
    class Endless(Loader):
        def __iter__(self) -> Iterator[Any]:
            return (self.draw(index) for index in itertools.count())

    run = make_run(plane(), data={"val": Endless(3, lambda index: points(5, seed=index))})

    with pytest.raises(DataError, match=r"`val` goes on after the 3 batches[\s\S]*`__len__`"):
        run.validate()
    assert _threads() == []


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x: x.astype(np.int32),
            r"`x` of batch 2 of .* is int32\(5, 4\)[\s\S]*float32\(5, 4\)",
        ),
        (lambda x: x[:, None], r"is float32\(5, 1, 4\)[\s\S]*pad what is shorter"),
    ],
)
def test_batch_that_would_need_a_program_of_its_own_is_refused(
    plane: Any, make_run: Any, points: Any, split: str, change: Any, words: str
) -> None:
    class Flat(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return model(x.reshape(-1, 4).astype("float32"))[:, 0]

    first = points(5, seed=0)
    data = {split: [first, {**first, "x": change(first["x"])}]}
    run = make_run(Flat(), data=data, logger=None)

    with pytest.raises(DataError, match=words):
        run.train() if split == "train" else run.validate()


@pytest.mark.parametrize("kind", ["list", "resident"])
def test_integers_that_would_wrap_around_are_refused(
    plane: Any, make_run: Any, points: Any, kind: str
) -> None:
    class Marked(plane):
        def loss(self, height: Any, *, y: Any, id: Any) -> Any:  # noqa: A002 - a batch field
            return super().loss(height, y=y) + 0 * id.sum()

    arrays = {**points(10, seed=0), "id": np.arange(10) + 2**31 - 9}
    train: Any = nitro.ArrayLoader(arrays, 5, device=True) if kind == "resident" else [arrays]

    with pytest.raises(DataError, match=r"`id` in .* is int64 and holds 2147483648[\s\S]*int32"):
        make_run(Marked(), data={"train": train}).train()
    arrays["id"] -= 1
    make_run(Marked(), data={"train": train}, logger=None).train()


def test_source_whose_length_changes_is_refused(losses_on: Any, points: Any) -> None:
    loader = Shrinks(4, lambda index: points(5, seed=index))

    with pytest.raises(DataError, match="has 3 batches in epoch 2, and had 4"):
        losses_on({"train": loader}, max_epochs=2)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda b: {"x": b["x"]}, r"\['x'\]: `y` is gone"),
        (lambda b: {**b, "z": b["y"]}, r"\['x', 'y', 'z'\]: `z` is new"),
        (lambda b: 5, "Nitro found int"),
    ],
)
def test_batch_with_other_fields_is_refused_by_split_and_number(
    plane: Any, make_run: Any, points: Any, split: str, second: Any, words: str
) -> None:
    batch = points(5, seed=0)
    splits = {"train": [batch], "val": [batch], split: [batch, second(batch)]}

    with pytest.raises(DataError, match=rf"batch 2 of `{split}`.*{words}"):
        make_run(plane(), data=splits).train()


def test_field_of_another_structure_is_refused(plane: Any, make_run: Any, points: Any) -> None:
    class Nested(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return model(jax.tree.leaves(x)[0])[:, 0]

    batch = points(5, seed=0)
    batches = [{**batch, "x": {name: batch["x"]}} for name in ("a", "b")]

    with pytest.raises(DataError, match=r"`x` of batch 2 of `train` is b float32\(5, 4\)"):
        make_run(Nested(), data={"train": batches}).train()


@pytest.mark.parametrize(("count", "near"), [(5, "4 or 6"), (1, "2")])
def test_epoch_that_accum_does_not_divide_is_refused(
    plane: Any, make_run: Any, points: Any, count: int, near: str
) -> None:
    with pytest.raises(DataError, match=rf"{count} batches, which `accum=2`[\s\S]*{near} batches"):
        make_run(plane(), data={"train": [points(5, seed=0)] * count}, accum=2)


@pytest.mark.parametrize("split", ["train", "val"])
def test_error_of_a_loader_comes_with_its_own_traceback(
    plane: Any, make_run: Any, points: Any, split: str
) -> None:
    class BrokenDiskError(Exception):
        pass

    def draw(index: int) -> Any:
        if index == 2:
            raise BrokenDiskError("sector 7")
        return points(5, seed=index)

    data = {"train": Loader(2, draw), "val": Loader(2, draw), split: Loader(4, draw)}
    with pytest.raises(BrokenDiskError, match="sector 7") as raised:
        make_run(plane(), data=data).train()

    assert "draw" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert _threads() == []


def test_no_thread_outlives_an_error_of_the_run(plane: Any, make_run: Any, points: Any) -> None:
    def draw(index: int) -> Any:
        batch = points(5, seed=index)
        return {**batch, "y": batch["y"] * (np.nan if index else 1)}

    with pytest.raises(DivergenceError) as raised:
        make_run(plane(), data={"train": Loader(50, draw)}, steps_per_call=1).train()

    # While the exception still holds on to every frame.
    assert raised.value is not None
    assert _threads() == []


def test_no_thread_outlives_a_hook_that_fails(plane: Any, make_run: Any, points: Any) -> None:
    class Failing(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            raise ZeroDivisionError

    loader = Loader(50, lambda index: points(5, seed=index))
    with pytest.raises(ZeroDivisionError) as raised:
        make_run(Failing(), data={"val": loader}).validate()

    assert raised.value is not None
    assert _threads() == []
    assert loader.drawn <= 1 + 1 + DEPTH + 1


def test_no_thread_outlives_a_graceful_stop(plane: Any, make_run: Any, points: Any) -> None:
    loader = Loader(50, lambda index: points(5, seed=index))
    run = make_run(plane(), data={"train": loader}, steps_per_call=1)
    run.on_phase(lambda event: run.request_stop() if event.phase.value == "training" else None)

    run.train()
    run.close()

    assert run.step < 50
    assert _threads() == []


def test_prefetch_is_ordered_bounded_and_in_one_thread() -> None:
    threads: set[str] = set()
    drawn: list[int] = []
    may_draw = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for index in range(100):
            may_draw.acquire()
            threads.add(threading.current_thread().name)
            drawn.append(index)
            yield index

    ahead = prefetched(items(), depth=2)
    may_draw.release(100)
    first = [next(ahead) for _ in range(5)]
    ahead.close()

    assert first == [0, 1, 2, 3, 4]
    assert threads == {"nitro-prefetch"}
    # Five taken, two that wait, one that finds the queue full.
    assert len(drawn) <= 5 + 2 + 1
    assert _threads() == []


def test_prefetch_closes_what_it_draws_from() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    ahead = prefetched(items())
    next(ahead)
    ahead.close()

    assert closed.is_set()


def test_slow_loader_is_told_and_logged(
    plane: Any, make_run: Any, points: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slow by a wait that nothing shortens, as for a disk; long enough to be worth telling.
    pause = threading.Event()

    def draw(index: int) -> Any:
        pause.wait(0.05)
        return points(5, seed=index)

    monkeypatch.setattr("nitro._run._loop._WORTH_TELLING_S", 0.1)
    run = make_run(plane(), data={"train": Loader(12, draw)}, steps_per_call=1, max_epochs=2)
    with pytest.warns(NitroWarning, match=r"waited for data for \d\d% of epoch 1") as told:
        run.train()

    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    shares = [line for line in map(json.loads, lines) if line.get("context") == "data"]
    assert len(told) == 1
    assert [line["epoch"] for line in shares] == [1, 2]
    assert all(0.25 < line["data_wait_frac"] <= 1 for line in shares)


def test_wait_of_less_than_a_second_is_logged_and_not_told(
    plane: Any, make_run: Any, points: Any
) -> None:
    pause = threading.Event()

    def draw(index: int) -> Any:
        pause.wait(0.02)
        return points(5, seed=index)

    run = make_run(plane(), data={"train": Loader(12, draw)}, steps_per_call=1).train()

    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    (share,) = [line for line in map(json.loads, lines) if line.get("context") == "data"]
    assert share["data_wait_frac"] > 0.25


def test_data_of_another_handle_serves_again(plane: Any, make_run: Any) -> None:
    splits = plane().build_data()

    class Never(plane):
        def build_data(self) -> Any:
            raise AssertionError("built again")

    first, second = make_run(Never(), data=splits), make_run(Never(), data=splits)

    assert first.validate() == second.validate()
    with pytest.raises(ConfigError, match="no split `train`"):
        make_run(Never(), data={}).train()


def test_split_is_released_once_when_its_handle_is_closed(
    plane: Any, make_run: Any, points: Any
) -> None:
    class Held(Loader):
        released = 0

        def release(self) -> None:
            self.released += 1
            raise OSError("busy")

    loader = Held(2, lambda index: points(5, seed=index))
    built = type("Built", (plane,), {"build_data": lambda self: {"val": loader}})

    make_run(plane(), data={"val": loader}).close()
    assert loader.released == 0
    run = make_run(built())
    with pytest.warns(NitroWarning, match="`val` could not be released: OSError: busy"):
        run.close()
    run.close()

    assert loader.released == 1


class Longer(Loader):
    """Promises fewer batches than it yields."""

    def __len__(self) -> int:
        return self.count - 1


def test_training_source_that_goes_on_after_its_length_is_told_once(
    plane: Any, make_run: Any, points: Any
) -> None:
    source = Longer(5, lambda index: points(5, seed=index))
    run = make_run(plane(), data={"train": source}, checkpointer=None, max_epochs=2)

    with pytest.warns(NitroWarning, match="`train` goes on after the 4 batches") as told:
        run.train()

    assert run.step == 8
    assert len([w for w in told if "goes on after" in str(w.message)]) == 1


def test_validation_list_is_not_converted_before_it_is_used(
    plane: Any, make_run: Any, points: Any
) -> None:
    """Its batches' sizes are read, but for the first one no array is."""
    read: list[int] = []

    class Array:
        def __init__(self, index: int, array: Any) -> None:
            self.index, self.array = index, array
            self.dtype, self.shape, self.ndim = array.dtype, array.shape, array.ndim

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            del copy
            read.append(self.index)
            return self.array if dtype is None else self.array.astype(dtype)

    def batch(index: int, rows: int) -> Any:
        return {n: Array(index, a) for n, a in points(rows, seed=index).items()}

    val = [batch(index, rows) for index, rows in enumerate((5, 5, 3))]
    run = make_run(plane(), data={"train": [points(5, seed=0)], "val": val}, checkpointer=None)
    run.memory_plan()

    assert set(read) == {0}
    assert run.train().step == 1
    assert set(read) == {0, 1, 2}
