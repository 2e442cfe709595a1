"""The optimizer's state as the step program needs it: strong arrays with buffers of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._trees import Flat, describe_array, dotted, named_leaves
from nitro.errors import ConfigError


def owned_state(state: Any, params: Flat) -> Any:
    """Makes each leaf a strongly typed array that shares its buffer with no other.

    The step program overwrites its inputs in place. Some states start out as the very
    buffers of the weights, such as the slow weights of a lookahead.

    Raises:
        ConfigError: A leaf that is no array: it would be frozen into the program.
    """
    taken = {pointer for leaf in params.values() for pointer in _buffers(leaf)}

    def owned(path: Any, leaf: Any) -> jax.Array:
        array = _strong(dotted(path), leaf)
        buffers = _buffers(array)
        if not taken.isdisjoint(buffers):
            array = array.copy()
            buffers = _buffers(array)
        taken.update(buffers)
        return array

    return jax.tree_util.tree_map_with_path(owned, state)


def check_same_leaves(before: Any, after: Any, *, what: str) -> None:
    """Refuses an update that changes the shapes, dtypes or structure of what it updates.

    Raises:
        ConfigError: Names the first leaf that differs.
    """
    old, new = named_leaves(before), named_leaves(after)
    differing = [name for name in old if name not in new or not _alike(old[name], new[name])]
    differing += [name for name in new if name not in old]
    if differing:
        name = differing[0]
        then = describe_array(new[name]) if name in new else "gone"
        now = describe_array(old[name]) if name in old else "absent"
        raise ConfigError(
            f"One update turns `{name}` of {what} from {now} into {then}.",
            expected="the same shapes and dtypes at every step: one program takes them all",
            fix="look for a constant of a wider dtype in the optimizer, or for `mu_dtype`",
        )


def _strong(name: str, leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):  # a key has none
        return leaf
    if not isinstance(leaf, bool | int | float | np.generic | np.ndarray | jax.Array):
        raise ConfigError(
            f"`{name}` of the optimizer's state is {leaf!r} ({type(leaf).__name__}).",
            expected="arrays and numbers only: anything else is frozen into the program",
        )
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return jnp.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _buffers(array: jax.Array) -> set[int]:
    if array.size == 0 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return set()
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def _alike(before: Any, after: Any) -> bool:
    return before.shape == after.shape and before.dtype == after.dtype
