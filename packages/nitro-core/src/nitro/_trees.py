"""Named leaves: dotted paths for messages, weights and records."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Flat = dict[str, Any]
"""Arrays by dotted name."""


def dotted(path: tuple[Any, ...]) -> str:
    """A key path as `layers.0.kernel`."""
    return ".".join(_part(entry) for entry in path)


def variable_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a variable of an NNX state, without its own `.value`."""
    is_variable = isinstance(path[-1], jax.tree_util.GetAttrKey)
    return dotted(path[:-1] if is_variable else path)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by dotted path, in the tree's own order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {dotted(path): leaf for path, leaf in leaves}


def jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """What JAX makes of a dtype, in the machine's byte order; None where it makes nothing."""
    native = dtype.newbyteorder("=")
    is_number = native.kind == "b" or jax.numpy.issubdtype(native, np.number)
    # NumPy has numbers that JAX lacks: durations, and floats of more than 64 bits.
    widest = {"m": 0, "f": 8, "c": 16}.get(native.kind, native.itemsize)
    return (
        jax.dtypes.canonicalize_dtype(native) if is_number and native.itemsize <= widest else None
    )


def too_wide(array: np.ndarray) -> int | None:
    """An integer of the array that the dtype which JAX computes in cannot hold; None if it can."""
    narrow = jax_dtype(array.dtype)
    if array.dtype.kind not in "iu" or narrow is None or narrow == array.dtype:
        return None
    lost = array[array != array.astype(narrow)]
    return int(lost[0]) if lost.size else None


def is_rng_key(array: Any) -> bool:
    """Whether an array holds typed random keys, which have no NumPy dtype."""
    return jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)


def rng_key_impl(keys: Any) -> str:
    """The generator of random keys, or of their shape and dtype, by its name."""
    found: list[Any] = []

    def look(traced: Any) -> Any:
        found.append(jax.random.key_impl(traced))
        return traced

    jax.eval_shape(look, keys)
    return str(found[0])


def describe_array(value: Any) -> str:
    """`float32(64, 128)`, for messages."""
    return f"{value.dtype}{tuple(value.shape)}"


def describe_tree(tree: Any) -> str:
    """`float32(64,)` for one array; `a tuple of 2 leaves: 0, 1` for a tree, for messages."""
    if jax.tree_util.all_leaves([tree]):
        return describe_array(np.asarray(tree))
    names = list(named_leaves(tree))
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"a {type(tree).__name__} of {len(names)} leaves: {shown}"


def _part(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
