"""Batches cut from arrays in memory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from nitro._trees import describe_array
from nitro.errors import DataError


class ArrayLoader:
    """Cuts arrays in memory into batches; a split that Nitro knows everything about.

    The order of an epoch depends on the seed and the epoch's number only, so any epoch
    can be replayed from any batch.

    Args:
        arrays: One array per batch field, all with as many samples along axis 1. They must
            not change while a run uses them, which may have copied them to the device.
        batch_size: Samples in a batch.
        shuffle: Whether each epoch has an order of its own.
        seed: Seeds the order; None takes the run's seed (0 outside a run).
        drop_last: Whether to drop a ragged last batch; None drops it in training only.
        device: Whether training keeps the arrays on the device and picks each batch
            there; None does so where they are small against its memory.

    Raises:
        DataError: Arrays that are empty or disagree on the number of samples, a seed below
            0, or a batch size that leaves no batch.

    Example:
        >>> loader = ArrayLoader({"x": np.arange(5)}, batch_size=2)
        >>> [batch["x"].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
        >>> loader
        ArrayLoader(5 samples of x, batch_size=2)
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool | None = None,
        device: bool | None = None,
    ) -> None:
        self.arrays = _checked_arrays(arrays)
        self.num_samples = _common_length(self.arrays)
        self.batch_size = _checked_batch_size(batch_size)
        self.shuffle = shuffle
        self.seed = _checked_seed(seed)
        self.drop_last = drop_last
        self.device = device
        self._position = self._next = (0, 0)
        self._check_length()

    def __repr__(self) -> str:
        fields = ", ".join(self.arrays)
        order = ", shuffle=True" if self.shuffle else ""
        return (
            f"{type(self).__name__}({self.num_samples} samples of {fields}, "
            f"batch_size={self.batch_size}{order})"
        )

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def num_dropped(self) -> int:
        """Samples that each epoch leaves out."""
        return max(0, self.num_samples - len(self) * self.batch_size)

    def bound(self, *, seed: int, drop_last: bool) -> Self:
        """The same loader with these values where it had none; the arrays are shared."""
        bound = copy.copy(self)
        bound.seed = seed if self.seed is None else self.seed
        bound.drop_last = drop_last if self.drop_last is None else self.drop_last
        bound._position = bound._next = (0, 0)
        bound._check_length()
        return bound

    @property
    def takes_rows(self) -> bool:
        """Whether its batches are rows of `arrays` as `order` says: no subclass makes others."""
        return all(
            getattr(type(self), name) is getattr(ArrayLoader, name)
            for name in ("batches", "__iter__")
        )

    def _check_length(self) -> None:
        if len(self) == 0:
            raise DataError(
                f"An ArrayLoader of {self.num_samples} samples has batch_size={self.batch_size} "
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

    def batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """The batches of an epoch (counted from 0), from batch `start` on."""
        order = checked_order(self, epoch)
        for index in range(start, len(self)):
            rows = order[index * self.batch_size : (index + 1) * self.batch_size]
            yield {name: array[rows] for name, array in self.arrays.items()}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
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


def is_read_from_anywhere(source: Any) -> bool:
    """Whether `source.batches(epoch, start)` gives what iterating over it gives."""
    if isinstance(source, ArrayLoader):
        return type(source).__iter__ is ArrayLoader.__iter__
    try:
        inspect.signature(source.batches).bind(0, 0)
    # No `batches`; or one with another meaning, which may be no function at all.
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def checked_order(loader: ArrayLoader, epoch: int) -> np.ndarray:
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


def _checked_arrays(arrays: Any) -> dict[str, np.ndarray]:
    if not isinstance(arrays, Mapping):
        raise DataError(
            f"An ArrayLoader got {type(arrays).__name__}.",
            expected="one array per batch field",
            fix='name it: `ArrayLoader({"x": array}, batch_size=...)`',
        )
    for name, array in arrays.items():
        if isinstance(array, np.ma.MaskedArray):
            raise DataError(
                f"The array `{name}` of an ArrayLoader is masked.",
                expected="plain arrays: a batch has no mask",
                fix="fill it with `.filled(value)`, and pass the mask as an array of its own",
            )
    return {name: np.asarray(array) for name, array in arrays.items()}


def _checked_seed(seed: Any) -> int | None:
    is_seed = not isinstance(seed, bool) and hasattr(seed, "__index__") and seed >= 0
    if seed is not None and not is_seed:
        raise DataError(f"`seed` is {seed!r}.", expected="an integer of at least 0, or None")
    return None if seed is None else int(seed)


def _checked_batch_size(batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
        raise DataError(f"`batch_size` is {batch_size!r}.", expected="an integer of at least 1")
    return int(batch_size)


def _common_length(arrays: Mapping[str, np.ndarray]) -> int:
    if not arrays:
        raise DataError("An ArrayLoader got no arrays.", expected="one array per batch field")
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] == 0:
            raise DataError(
                f"The array `{name}` of an ArrayLoader has the shape {array.shape}.",
                expected="at least one sample along axis 1",
            )
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"The arrays of an ArrayLoader disagree on the number of samples: {lengths}.",
            expected="one number of samples along axis 1 of every array",
        )
    return next(iter(lengths.values()))
