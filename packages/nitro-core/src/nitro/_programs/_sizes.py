"""How many bytes arrays take, and how a person reads it."""

from __future__ import annotations

import math
from typing import Any

import jax

from nitro._trees import is_rng_key


def array_bytes(array: Any) -> int:
    """The bytes of an array, concrete or abstract; of a key array, those of its data."""
    if is_rng_key(array):
        return array_bytes(jax.eval_shape(jax.random.key_data, array))
    return math.prod(array.shape) * array.dtype.itemsize


def tree_bytes(tree: Any) -> int:
    """The bytes of all arrays in a tree."""
    return sum(map(array_bytes, jax.tree.leaves(tree)))


def in_units(size_bytes: float) -> str:
    """A size for messages: `2.3 MiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(size_bytes, 1), 1024)), len(units) - 1)
    return f"{size_bytes / 1024**power:.{min(power, 1)}f} {units[power]}"
