"""Batches cut from arrays in memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from nitro.errors import DataError

from ._frames import columns_of, plain_column
from ._row_loader import RowLoader, Transform, is_made_by


class ArrayLoader(RowLoader):
    """Cuts arrays in memory into batches; a split that Nitro knows everything about.

    The order of an epoch depends on the seed and the epoch's number only, so any epoch
    can be replayed from any batch.

    Args:
        arrays: One array per batch field, all with as many samples along the first axis; or a
            DataFrame, whose columns are fields. They must not change while a run uses them,
            which may have copied them to the device.
        batch_size: Samples in a batch.
        shuffle: Whether each epoch has an order of its own.
        seed: Seeds the order and `transform`; None takes the run's seed (0 outside a run).
        drop_last: Whether to drop a ragged last batch; None drops it in training only.
        device: Whether training keeps the arrays on the device and picks each batch
            there; None does so where they are small against its memory.
        transform: Called as `transform(batch, rng)` with each batch; returns the batch that is
            used. `rng` is a NumPy generator of seed, epoch and batch: an exact resume draws the
            same. The batches are then made on the host, in a thread.

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
        transform: Transform | None = None,
    ) -> None:
        self.arrays = _checked_arrays(arrays)
        self.device = device
        super().__init__(
            _common_length(self.arrays),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            transform=transform,
        )

    def __repr__(self) -> str:
        fields = ", ".join(self.arrays)
        order = ", shuffle=True" if self.shuffle else ""
        return (
            f"{type(self).__name__}({self.num_samples} samples of {fields}, "
            f"batch_size={self.batch_size}{order})"
        )

    @property
    def takes_rows(self) -> bool:
        """Whether its batches are rows of `arrays` as `order` says, and nothing changes them."""
        return self.transform is None and is_made_by(self, ArrayLoader)

    def rows(self, rows: np.ndarray) -> dict[str, Any]:
        """The batch of these rows, before `transform`."""
        return {name: array[rows] for name, array in self.arrays.items()}

    def in_order(self) -> RowLoader | None:
        """Every row once, in order, with the same `transform`; None if a subclass cuts itself."""
        if not is_made_by(self, ArrayLoader):
            return None
        return ArrayLoader(self.arrays, self.batch_size, seed=self.seed, transform=self.transform)


def is_read_from_anywhere(source: Any) -> bool:
    """Whether `source.batches(epoch, start)` gives what iterating over it gives."""
    if isinstance(source, RowLoader):
        return type(source).__iter__ is RowLoader.__iter__
    try:
        inspect.signature(source.batches).bind(0, 0)
    # No `batches`; or one with another meaning, which may be no function at all.
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _checked_arrays(arrays: Any) -> dict[str, np.ndarray]:
    arrays = columns_of(arrays)
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
    return {name: np.asarray(plain_column(name, array)) for name, array in arrays.items()}


def _common_length(arrays: Mapping[str, np.ndarray]) -> int:
    if not arrays:
        raise DataError("An ArrayLoader got no arrays.", expected="one array per batch field")
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] == 0:
            raise DataError(
                f"The array `{name}` of an ArrayLoader has the shape {array.shape}.",
                expected="at least one sample: the batch axis is the first",
            )
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"The arrays of an ArrayLoader disagree on the number of samples: {lengths}.",
            expected="one number of samples in every array, whose batch axis is the first",
        )
    return next(iter(lengths.values()))
