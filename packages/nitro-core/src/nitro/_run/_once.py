"""What an evaluation of the training split goes through: every row once, not augmented."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from nitro._data import Batch, RowLoader, check_same_shapes, routed_fields
from nitro.errors import DataError, warn

from ._setup import Setup


def source_to_evaluate(setup: Setup, split: str, names: tuple[str, ...]) -> Any:
    """The source that an evaluation of a split goes through.

    Of `train` that is every row once, in order, without a `transform` that draws from its
    generator, as far as the source can say so; what it cannot is told. Other splits are taken
    as they are.

    Args:
        setup: The handle's setup.
        split: The split.
        names: The batch fields that the evaluation takes to the device.
    """
    source = setup.splits[split]
    if split != "train" or isinstance(source, Sequence):
        return source
    once = source.in_order() if isinstance(source, RowLoader) else None
    if once is None:
        warn(
            f"`train` is evaluated as its {type(source).__name__} yields it: rows that it leaves "
            "out, draws again or augments count like that.\n"
            "  fix: evaluate a split of its own for it, whose loader goes through the rows as they "
            "are"
        )
        return source
    return _without_augmentation(once, setup.first[split], names)


def _without_augmentation(once: RowLoader, first: Batch, names: tuple[str, ...]) -> RowLoader:
    if once.transform is None or not _draws(once):
        return once
    plain = copy.copy(once)
    plain.transform = None
    batch = plain.rows(np.arange(1))
    try:
        if set(batch) != set(first):
            raise DataError("Other fields.")
        where = "the first row of `train`"
        fields = routed_fields(batch, names, where=where)
        check_same_shapes(fields, routed_fields(first, names, where=where), where=where)
    except DataError:
        warn(
            "`train` is evaluated with its `transform`, as in epoch 1: without it the batches have "
            "other fields, dtypes or shapes.\n"
            "  fix: evaluate a split of its own for it, with a `transform` that draws nothing"
        )
        return once
    return plain


def _draws(loader: RowLoader) -> bool:
    """Whether the transform of the first row draws from its generator: it augments."""
    rng = loader.rng(0, 0)
    before = rng.bit_generator.state
    assert loader.transform is not None
    loader.transform(loader.rows(np.arange(1)), rng)
    seeds: Any = rng.bit_generator.seed_seq
    return rng.bit_generator.state != before or seeds.n_children_spawned > 0
