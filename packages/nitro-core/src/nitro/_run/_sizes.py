"""Whether all batches of training have one size, as far as that can be told without reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import jax

from nitro._data import Batch, num_rows, routed_fields
from nitro._programs import TracedHooks
from nitro.errors import DataError

from ._splits import train_names


def check_sizes(hooks: TracedHooks, splits: Mapping[str, Any], first: Mapping[str, Batch]) -> None:
    """Refuses a training split whose batches differ, where that shows before the first step.

    That is so of a list of batches, whose shapes are read, and of a loader that says how many
    samples it cuts into batches of which size, as PyTorch's does.

    Raises:
        DataError: Names the batch and both sizes.
    """
    if "train" not in splits:
        return
    source, batch = splits["train"], first["train"]
    names = train_names(hooks, batch)
    where = "the first batch of `train`"
    width = num_rows(routed_fields(batch, names, where=where), where=where)
    sizes = _listed(source, names) if isinstance(source, list | tuple) else _last_of(source)
    for index, rows in sizes.items():
        if rows != width:
            raise wrong_width(f"batch {index} of `train`", rows, width)


def wrong_width(where: str, rows: int, width: int) -> DataError:
    """The refusal of a batch of training that has another number of samples."""
    return DataError(
        f"{where} has {rows} samples.",
        expected=f"{width}, as the first batch: one program, one batch size",
        fix="let the training loader drop its last partial batch (`drop_last=True`), or leave the "
        "batch out of the list",
    )


def _listed(batches: list[Any] | tuple[Any, ...], names: tuple[str, ...]) -> dict[int, int]:
    """The samples of each batch by its number, of those whose shapes can be read."""
    sizes: dict[int, int] = {}
    for index, batch in enumerate(batches, start=1):
        fields = [batch[name] for name in names if isinstance(batch, Mapping) and name in batch]
        shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(fields)]
        # Another misfit is told as such when the batch is drawn.
        extents = {shape[0] for shape in shapes if shape}
        if len(extents) == 1:
            sizes[index] = extents.pop()
    return sizes


def _last_of(source: Any) -> dict[int, int]:
    """The samples of the last batch of a loader with PyTorch's attributes, if it is a short one."""
    size, dataset = getattr(source, "batch_size", None), getattr(source, "dataset", None)
    drops_last = bool(getattr(source, "drop_last", True))
    if drops_last or not isinstance(size, int) or size < 1 or not isinstance(dataset, Sized):
        return {}
    samples = len(dataset)
    batches, ragged = len(source), samples % size
    # A sampler may draw other samples than the data set has; then it decides.
    is_whole = batches == -(-samples // size)
    return {batches: ragged} if ragged and is_whole and batches > 1 else {}
