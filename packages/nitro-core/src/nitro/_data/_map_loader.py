"""Batches of samples that are read one by one, in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nitro.errors import DataError

from ._row_loader import RowLoader, Transform, is_made_by

_BATCHES_AHEAD = 2
"""Batches whose samples are being read while one is used."""


class MapLoader(RowLoader):
    """Batches of a dataset that gives samples by index; they are read in threads.

    Anything with `__len__` and `__getitem__` is such a dataset: files to be decoded, a
    memory-mapped table, a PyTorch or Hugging Face dataset of NumPy samples. The order of an epoch
    depends on the seed and the epoch's number only, so a run resumes exactly inside an epoch.

    Args:
        dataset: `dataset[i]`, i from 0, is one sample: a mapping of fields to arrays or numbers,
            of one shape in all samples. It is called from several threads at once.
        batch_size: Samples in a batch.
        shuffle: Whether each epoch has an order of its own.
        seed: Seeds the order and `transform`; None takes the run's seed (0 outside a run).
        drop_last: Whether to drop a ragged last batch; None drops it in training only.
        transform: Called as `transform(batch, rng)` with each batch, as in `ArrayLoader`.
        workers: Threads that read samples; default 4.

    Raises:
        DataError: No such dataset, an empty one, or numbers that cannot be used.

    Example:
        >>> squares = MapLoader([{"x": i, "y": i * i} for i in range(5)], batch_size=2)
        >>> [batch["y"].tolist() for batch in squares]
        [[0, 1], [4, 9], [16]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool | None = None,
        transform: Transform | None = None,
        workers: int = 4,
    ) -> None:
        self.dataset = dataset
        self.workers = _checked_workers(workers)
        super().__init__(
            _checked_length(dataset),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            transform=transform,
        )

    def __repr__(self) -> str:
        order = ", shuffle=True" if self.shuffle else ""
        return (
            f"{type(self).__name__}({self.num_samples} samples of "
            f"{type(self.dataset).__name__}, batch_size={self.batch_size}{order})"
        )

    def rows(self, rows: np.ndarray) -> dict[str, Any]:
        """The batch of these rows, before `transform`; read in this thread."""
        return _stacked([self._sample(int(row)) for row in rows], rows)

    def in_order(self) -> RowLoader | None:
        """Every sample once, in order, with the same `transform`; None if a subclass cuts itself."""
        if not is_made_by(self, MapLoader):
            return None
        return MapLoader(
            self.dataset,
            self.batch_size,
            seed=self.seed,
            transform=self.transform,
            workers=self.workers,
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The batches of an epoch (counted from 0), from batch `start` on."""
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="nitro-samples")
        waiting: deque[tuple[np.ndarray, list[Future[Any]]]] = deque()
        index = start
        try:
            for rows in self._cut(epoch, start):
                waiting.append((rows, [pool.submit(self._sample, int(row)) for row in rows]))
                if len(waiting) > _BATCHES_AHEAD:
                    yield self._collected(*waiting.popleft(), epoch, index)
                    index += 1
            while waiting:
                yield self._collected(*waiting.popleft(), epoch, index)
                index += 1
        finally:
            pool.shutdown(cancel_futures=True)

    def _collected(
        self, rows: np.ndarray, samples: list[Future[Any]], epoch: int, index: int
    ) -> dict[str, Any]:
        batch = _stacked([sample.result() for sample in samples], rows)
        return self._transformed(batch, epoch, index)

    def _sample(self, row: int) -> Mapping[str, Any]:
        row = row if row >= 0 else row + self.num_samples
        sample = self.dataset[row]
        if not isinstance(sample, Mapping):
            raise DataError(
                f"Sample {row} of the {type(self.dataset).__name__} is {type(sample).__name__}.",
                expected='a mapping of fields, such as {"img": ..., "label": ...}',
                fix='name its parts where they are read: `return {"img": img, "label": label}`',
            )
        return sample


def _stacked(samples: list[Mapping[str, Any]], rows: np.ndarray) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for name in samples[0]:
        lacking = [row for row, one in zip(rows, samples, strict=True) if name not in one]
        if lacking:
            raise DataError(
                f"Sample {lacking[0]} has no field `{name}`, which sample {rows[0]} has.",
                expected="the same fields in all samples",
            )
        leaves = [np.asarray(one[name]) for one in samples]
        odd = [i for i, leaf in enumerate(leaves) if leaf.shape != leaves[0].shape]
        if odd:
            raise DataError(
                f"The field `{name}` of sample {rows[odd[0]]} has the shape "
                f"{leaves[odd[0]].shape}, and that of sample {rows[0]} {leaves[0].shape}.",
                expected="one shape in all samples: they are stacked to a batch",
                fix="crop, resize or pad it where the sample is read",
            )
        batch[name] = np.stack(leaves)
    return batch


def _checked_length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"A MapLoader got {type(dataset).__name__}.",
            expected="a dataset with `__len__` and `__getitem__`",
            fix="a source of whole batches needs no MapLoader: return it as the split",
        )
    if isinstance(dataset, Mapping):
        raise DataError(
            f"A MapLoader got a mapping: {', '.join(map(str, dataset))}.",
            expected="a dataset whose items are samples",
            fix="for arrays in memory: `nitro.ArrayLoader(arrays, batch_size)`",
        )
    if not len(dataset):
        raise DataError("A MapLoader got no samples.", expected="at least one")
    return len(dataset)


def _checked_workers(workers: Any) -> int:
    if isinstance(workers, bool) or not hasattr(workers, "__index__") or workers < 1:
        raise DataError(f"`workers` is {workers!r}.", expected="an integer of at least 1")
    return int(workers)
