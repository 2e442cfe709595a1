"""Feeds the step program: batches stacked on the host, or indices into data on the device."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from nitro._data import (
    ArrayLoader,
    Batch,
    check_same_fields,
    checked_batch,
    checked_order,
    index_of_shape,
    num_rows,
    routed_fields,
    shape_examples,
)
from nitro._devices import device_memory_bytes
from nitro._programs import StepPlan
from nitro._trees import Flat
from nitro.errors import DataError, warn

from ._position import open_epoch
from ._prefetch import DEPTH, prefetched
from ._sizes import wrong_width

_RESIDENT_SHARE = 0.1
"""The share of the device's memory that a training split may take without being asked."""


@dataclass(frozen=True)
class FedChunk:
    """What one call of the step program is fed.

    Attributes:
        batches: Stacked batches or indices; see `Chunk`.
        count: How many of their steps count.
        loader_state: Where the source stands behind them, if it can say so.
        shape: Which of the declared shapes they have.
    """

    batches: Any
    count: int
    loader_state: Any = None
    shape: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochCut:
    """Which steps of an epoch to take, and where calls must end.

    Attributes:
        epoch: The epoch, counted from 0.
        first_step: How many of its steps are done already.
        steps_before: Optimizer steps before this epoch.
        every: Calls end at each multiple of so many optimizer steps; None for anywhere.
        loader_state: Where the source stood after `first_step`, if it has to move there.
    """

    epoch: int
    first_step: int = 0
    steps_before: int = 0
    every: int | None = None
    loader_state: Any = None

    def lengths(self, longest: int, num_steps: int) -> Iterator[int]:
        """How many steps each call takes."""
        step = self.first_step
        while step < num_steps:
            count = min(longest, num_steps - step)
            if self.every is not None:
                done = self.steps_before + step
                count = min(count, self.every - done % self.every)
            yield count
            step += count


class Feed(Protocol):
    """Where the step program's batches come from."""

    @property
    def data(self) -> Flat:
        """What lies on the device for the whole run, by field; placed when it is first read."""
        ...

    data_shapes: Flat
    """The shapes and dtypes of `data`, which are known before anything is placed."""

    bytes_per_micro_batch: int
    """What crosses to the device for one micro-batch."""

    chunks_ahead: int
    """How many chunks are held on the host before they are fed."""

    num_shapes: int
    """How many shapes of batches there are, each of which is a program."""

    def example(self, plan: StepPlan, shape: int = 0) -> Any:
        """Batches of one of the shapes that `chunks` yields."""
        ...

    def chunks(self, plan: StepPlan, cut: EpochCut) -> Generator[FedChunk]:
        """The steps of an epoch, cut into calls."""
        ...

    def rows_of(self, batches: Any, index: int) -> tuple[Flat, np.ndarray | None]:
        """All rows of one step of a chunk, and which samples of the arrays they are."""
        ...


def make_feed(
    source: Any, first: Batch, names: tuple[str, ...], *, memory_bytes: int | None = None
) -> Feed:
    """The feed for a training split.

    Args:
        source: The split.
        first: Its first batch.
        names: The fields that a step takes.
        memory_bytes: The device's memory; None asks the device.
    """
    memory_bytes = memory_bytes or device_memory_bytes()
    if isinstance(source, ArrayLoader) and _fits_on_device(source, names, memory_bytes):
        return DeviceFeed(source, names)
    return HostFeed(source, first, names)


def _fits_on_device(source: ArrayLoader, names: tuple[str, ...], memory_bytes: int) -> bool:
    if not source.takes_rows:
        _refuse_on_device(source)
        return False
    if source.device is not None:
        return source.device
    return sum(source.arrays[name].nbytes for name in names) <= _RESIDENT_SHARE * memory_bytes


def _refuse_on_device(source: ArrayLoader) -> None:
    if source.device and source.transform is not None:
        raise DataError(
            f"The split `train` is a {type(source).__name__} with `device=True` and a `transform`.",
            expected="rows of `arrays` as they are, which the step program can gather on the device",
            fix="leave `device=True` out: `transform` makes its batches on the host; or write in "
            "`jax.numpy` what is to run on the device, in `forward`",
        )
    if source.device:
        raise DataError(
            f"The split `train` is a {type(source).__name__} with `device=True`, and the class makes "
            "its batches by itself.",
            expected="rows of `arrays`, which the step program can gather on the device",
            fix="leave `device=True` out, or override `order` instead of `batches` and `__iter__`",
        )


class DeviceFeed:
    """Indices into arrays that lie on the device; the program gathers the rows."""

    def __init__(self, source: ArrayLoader, names: tuple[str, ...]) -> None:
        self._source = source
        num_drawn = len(checked_order(source, 0))
        if len(source) * source.batch_size > num_drawn:
            ragged = num_drawn % source.batch_size
            raise wrong_width(f"batch {len(source)} of `train`", ragged, source.batch_size)
        self._fields = routed_fields(source.arrays, names, where="the arrays of `train`")
        self._placed: Flat | None = None
        self.data_shapes: Flat = {
            name: jax.ShapeDtypeStruct(field.shape, jax.dtypes.canonicalize_dtype(field.dtype))
            for name, field in self._fields.items()
        }
        self.bytes_per_micro_batch = source.batch_size * np.dtype(np.int32).itemsize
        self.chunks_ahead = 0
        self.num_shapes = 1

    @property
    def data(self) -> Flat:
        """See `Feed.data`."""
        if self._placed is None:
            self._placed = {name: jnp.asarray(field) for name, field in self._fields.items()}
        return self._placed

    def example(self, plan: StepPlan, shape: int = 0) -> Any:
        """Indices of the right shape."""
        del shape  # there is one
        return np.zeros((plan.steps_per_call, plan.accum, self._source.batch_size), np.int32)

    def chunks(self, plan: StepPlan, cut: EpochCut) -> Generator[FedChunk]:
        """See `Feed.chunks`."""
        size = self._source.batch_size
        num_steps = len(self._source) // plan.accum
        order = checked_order(self._source, cut.epoch).astype(np.int32)
        steps = order[: num_steps * plan.accum * size].reshape(num_steps, plan.accum, size)
        first = cut.first_step
        for count in cut.lengths(plan.steps_per_call, num_steps):
            yield FedChunk(_padded(steps[first : first + count], plan.steps_per_call), count)
            first += count

    def rows_of(self, batches: Any, index: int) -> tuple[Flat, np.ndarray | None]:
        """See `Feed.rows_of`."""
        samples = batches[index].reshape(-1)
        return jax.tree.map(lambda field: field[samples], self._fields), samples


class HostFeed:
    """Batches of any source, stacked on the host."""

    def __init__(self, source: Any, first: Batch, names: tuple[str, ...]) -> None:
        self.data: Flat = {}
        self.data_shapes: Flat = {}
        self._source = source
        self._length = len(source)
        self._has_told_more = False
        self._names = names
        self._all_names = tuple(first)
        where = "the first batch of `train`"
        self._first = routed_fields(first, names, where=where)
        self._width = num_rows(self._first, where=where)
        self._examples = shape_examples(source, self._first, split="train")
        self.num_shapes = len(self._examples)
        self.bytes_per_micro_batch = max(
            sum(leaf.nbytes for leaf in jax.tree.leaves(example)) for example in self._examples
        )
        # Those that wait, the one that is being made, the batches it is made from, and the one
        # whose results are not read yet.
        self.chunks_ahead = DEPTH + 3

    def example(self, plan: StepPlan, shape: int = 0) -> Any:
        """Batches of the right shapes."""
        lead = (plan.steps_per_call, plan.accum)
        example = self._examples[shape]
        return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (*lead, *leaf.shape)), example)

    def chunks(self, plan: StepPlan, cut: EpochCut) -> Generator[FedChunk]:
        """See `Feed.chunks`: stacked in a thread of their own, a chunk or two ahead."""
        yield from prefetched(self._stacked_chunks(plan, cut))

    def rows_of(self, batches: Any, index: int) -> tuple[Flat, np.ndarray | None]:
        """See `Feed.rows_of`."""
        rows = jax.tree.map(lambda field: field[index].reshape(-1, *field.shape[3:]), batches)
        return rows, None

    def _stacked_chunks(self, plan: StepPlan, cut: EpochCut) -> Iterator[FedChunk]:
        if len(self._source) != self._length:
            raise DataError(
                f"The split `train` has {len(self._source)} batches in epoch {cut.epoch + 1}, and had "
                f"{self._length} when the handle was built.",
                expected="one length: it decides how many steps the schedules have",
                fix="let each epoch draw as many batches",
            )
        num_steps = self._length // plan.accum
        seen = cut.first_step * plan.accum
        opened = open_epoch(self._source, epoch=cut.epoch, start=seen, state=cut.loader_state)
        fields = self._checked_batches(opened.batches, seen)
        for count in cut.lengths(plan.steps_per_call, num_steps):
            # Copied as they are drawn: a loader may fill one buffer again and again.
            chunk, shape = None, 0
            for index in range(count * plan.accum):
                batch = next(fields, None)
                if batch is None:
                    raise self._ended_early(cut.epoch, seen)
                seen += 1
                where = f"batch {seen} of `train`"
                found = index_of_shape(batch, self._examples, where=where)
                if chunk is None:
                    chunk, shape = self._empty_chunk(plan, found), found
                elif found != shape:
                    raise _mixed_shapes(where, plan.accum)
                _copy_into(chunk, divmod(index, plan.accum), batch)
            _repeat_last_step(chunk, count)
            at_end = seen == num_steps * plan.accum
            if at_end:
                # As a `for` loop would: a source that counts its epochs sees this one end.
                self._tell_more(next(opened.batches, None))
            yield FedChunk(chunk, count, opened.position(at_end), shape)

    def _tell_more(self, batch: Any) -> None:
        """Tells once of batches behind the last one that the length promised."""
        if batch is not None and not self._has_told_more:
            self._has_told_more = True
            warn(
                f"The split `train` goes on after the {self._length} batches that its length "
                "promised: an epoch ends there, and the next one starts anew.\n"
                "  fix: let `__len__` count all batches of an epoch, or end `__iter__` after them"
            )

    def _empty_chunk(self, plan: StepPlan, shape: int) -> Any:
        lead = (plan.steps_per_call, plan.accum)
        example = self._examples[shape]
        return jax.tree.map(lambda leaf: np.empty((*lead, *leaf.shape), leaf.dtype), example)

    def _ended_early(self, epoch: int, seen: int) -> DataError:
        return DataError(
            f"The split `train` ended after {seen} batches of epoch {epoch + 1}; its length "
            f"promised {self._length}.",
            expected="as many batches in every epoch as `len()` says",
            fix="return a source that starts again at each `iter()`, not one that goes on",
        )

    def _checked_batches(self, batches: Iterator[Any], start: int) -> Iterator[Flat]:
        for index, item in enumerate(batches, start=start + 1):
            yield self._checked(item, f"batch {index} of `train`")

    def _checked(self, item: Any, where: str) -> Flat:
        batch = checked_batch(item, where=where)
        check_same_fields(batch, self._all_names, where=where)
        fields = routed_fields(batch, self._names, where=where)
        self._check_width(fields, where)
        return fields

    def _check_width(self, fields: Flat, where: str) -> None:
        rows = num_rows(fields, where=where)
        if rows != self._width:
            raise wrong_width(where, rows, self._width)


def _mixed_shapes(where: str, accum: int) -> DataError:
    return DataError(
        f"{where} has another shape than the batch before it, in the same step of {accum}.",
        expected=f"one of the declared shapes for all {accum} micro-batches of a step",
        fix=f"let the loader yield {accum} batches of a shape in a row, or leave `accum` out",
    )


def _copy_into(chunk: Any, place: tuple[int, int], batch: Flat) -> None:
    for stacked, leaf in zip(jax.tree.leaves(chunk), jax.tree.leaves(batch), strict=True):
        stacked[place] = leaf


def _repeat_last_step(chunk: Any, count: int) -> None:
    """Steps beyond the count are never taken, so what they hold does not matter."""
    for stacked in jax.tree.leaves(chunk):
        stacked[count:] = stacked[count - 1]


def _padded(steps: np.ndarray, length: int) -> np.ndarray:
    """Steps beyond the count are never taken, so what they hold does not matter."""
    missing = length - len(steps)
    if not missing:
        return steps
    return np.concatenate([steps, np.broadcast_to(steps[-1:], (missing, *steps.shape[1:]))])
