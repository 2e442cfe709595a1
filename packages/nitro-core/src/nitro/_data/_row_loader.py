"""Batches of rows whose order is a function of seed and epoch: what all our loaders share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from nitro._trees import describe_array
from nitro.errors import DataError

Transform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
"""Makes the batch that is used of the one that was cut: `fn(batch, rng)`."""


class RowLoader:
    """Cuts rows into batches; any batch of any epoch can be had again.

    Args:
        num_samples: How many rows there are.
        batch_size: Samples in a batch.
        shuffle: Whether each epoch has an order of its own.
        seed: Seeds the order and `transform`; None takes the run's seed (0 outside a run).
        drop_last: Whether to drop a ragged last batch; None drops it in training only.
        transform: Called with each batch; None for none.

    Raises:
        DataError: A seed below 0, no function, or a batch size that leaves no batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = _checked_batch_size(batch_size)
        self.shuffle = shuffle
        self.seed = _checked_seed(seed)
        self.drop_last = drop_last
        self.transform = _checked_transform(transform)
        self._position = self._next = (0, 0)
        self._check_length()

    def rows(self, rows: np.ndarray) -> dict[str, Any]:
        """The batch of these rows, before `transform`."""
        raise NotImplementedError

    def in_order(self) -> RowLoader | None:
        """Every row once, in order, with the same `transform`: what an evaluation goes through.

        None where a subclass makes its batches in a way of its own.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def num_dropped(self) -> int:
        """Samples that each epoch leaves out."""
        return max(0, self.num_samples - len(self) * self.batch_size)

    def bound(self, *, seed: int, drop_last: bool) -> Self:
        """The same loader with these values where it had none; the data is shared."""
        bound = copy.copy(self)
        bound.seed = seed if self.seed is None else self.seed
        bound.drop_last = drop_last if self.drop_last is None else self.drop_last
        bound._position = bound._next = (0, 0)
        bound._check_length()
        return bound

    def _check_length(self) -> None:
        if len(self) == 0:
            raise DataError(
                f"The {type(self).__name__} of {self.num_samples} samples has batch_size={self.batch_size} "
                "and drop_last=True, which leaves no batch.",
                expected=f"a batch size of at most {self.num_samples}",
            )

    def order(self, epoch: int) -> np.ndarray:
        """The samples of an epoch (counted from 0) in order, as int64 indices.

        A subclass may pick other ones; it overrides `__len__`, too, where that makes another
        number of batches.
        """
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed or 0, epoch]).permutation(self.num_samples)

    def rng(self, epoch: int, index: int) -> np.random.Generator:
        """The generator that `transform` gets for a batch of an epoch, both counted from 0."""
        # A spawn key, because a seed sequence is padded with zeros: batch 0 would draw what
        # `order` drew.
        return np.random.default_rng(
            np.random.SeedSequence(self.seed or 0, spawn_key=(epoch, index))
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The batches of an epoch (counted from 0), from batch `start` on."""
        for index, rows in enumerate(self._cut(epoch, start), start):
            yield self._transformed(self.rows(rows), epoch, index)

    def _cut(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """The rows of each batch."""
        order = checked_order(self, epoch)
        for index in range(start, len(self)):
            yield order[index * self.batch_size : (index + 1) * self.batch_size]

    def _transformed(self, batch: dict[str, Any], epoch: int, index: int) -> dict[str, Any]:
        if self.transform is None:
            return batch
        made: Any = self.transform(batch, self.rng(epoch, index))
        if not isinstance(made, Mapping):
            raise DataError(
                f"`transform` of the {type(self).__name__} returned {type(made).__name__}.",
                expected='the batch, a mapping of fields such as {"img": ..., "label": ...}',
                fix="end it with `return {**batch, ...}`",
            )
        return dict(made)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Goes through one epoch; the next iteration is the next epoch.

        An iteration that is given up is followed by a new epoch, too, unless `set_state`
        moves back into it.
        """
        epoch, start = self._next
        self._next = (epoch + 1, 0)
        self._position = (epoch, start)
        for index, batch in enumerate(self.batches(epoch, start), start + 1):
            self._position = (epoch, index) if index < len(self) else (epoch + 1, 0)
            yield batch

    def get_state(self) -> dict[str, int]:
        """The position: the epoch and batch that come next, both counted from 0."""
        epoch, batch = self._position
        return {"epoch": epoch, "batch": batch}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Moves to a position that `get_state` returned."""
        self._position = self._next = (state["epoch"], state["batch"])


def is_made_by(loader: RowLoader, cls: type[RowLoader]) -> bool:
    """Whether the batches are those that `cls` makes: a subclass changes at most their order."""
    makers = ("rows", "batches", "__iter__")
    return all(getattr(type(loader), name) is getattr(cls, name) for name in makers)


def checked_order(loader: RowLoader, epoch: int) -> np.ndarray:
    """The order of an epoch, which a subclass may give, as it can be picked from.

    Raises:
        DataError: No indices of samples, or not as many as the batches of an epoch take.
    """
    order = np.asarray(loader.order(epoch))
    called = f"`{type(loader).__name__}.order({epoch})`"
    count = loader.num_samples
    if order.ndim != 1 or order.dtype.kind not in "iu":
        raise DataError(
            f"{called} returned {describe_array(order)}.",
            expected="indices of samples: one axis of integers",
        )
    least, most = (len(loader) - 1) * loader.batch_size + 1, (len(loader) + 1) * loader.batch_size
    if not least <= len(order) < most:
        raise DataError(
            f"{called} returned {len(order)} indices for {len(loader)} batches of "
            f"{loader.batch_size}.",
            expected=f"{least} to {most - 1} of them",
            fix="override `__len__` too, where an epoch has more or fewer batches",
        )
    out = order[(order < -count) | (order >= count)]
    if out.size:
        raise DataError(
            f"{called} returned the index {out[0]}.",
            expected=f"one of the {count} samples: 0 to {count - 1}, or -{count} to -1 from the end",
        )
    return order


def _checked_transform(transform: Any) -> Transform | None:
    if transform is None or hasattr(transform, "__call__"):  # noqa: B004 - `callable` narrows to a type that fits nothing
        return transform
    raise DataError(
        f"`transform` is {transform!r}.",
        expected="a function `transform(batch, rng)` that returns the batch, or None",
        fix='write one, such as `lambda batch, rng: {**batch, "x": batch["x"] + rng.normal()}`',
    )


def _checked_seed(seed: Any) -> int | None:
    is_seed = not isinstance(seed, bool) and hasattr(seed, "__index__") and seed >= 0
    if seed is not None and not is_seed:
        raise DataError(f"`seed` is {seed!r}.", expected="an integer of at least 0, or None")
    return None if seed is None else int(seed)


def _checked_batch_size(batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
        raise DataError(f"`batch_size` is {batch_size!r}.", expected="an integer of at least 1")
    return int(batch_size)
