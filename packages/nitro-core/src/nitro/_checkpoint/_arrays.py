"""The arrays of a record: as one tree on the host, and in a template's dtypes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from nitro._state import TrainState
from nitro._trees import Flat, describe_array, is_rng_key, named_leaves, rng_key_impl


def flat_items(state: TrainState) -> dict[str, Flat]:
    """A state as one flat mapping of arrays for each item; RNG keys as their data."""
    return {
        "params": savable(state.params),
        "model_state": savable(state.model_state),
        "opt_state": savable(named_leaves(state.opt_state)),
    }


def savable(flat: Mapping[str, Any]) -> Flat:
    """The same arrays, or shapes and dtypes; RNG keys as their data."""
    return {n: _key_data(v) if is_rng_key(v) else v for n, v in flat.items()}


def _key_data(keys: Any) -> Any:
    is_array = isinstance(keys, jax.Array)
    return jax.random.key_data(keys) if is_array else jax.eval_shape(jax.random.key_data, keys)


def host_copy(items: Mapping[str, Mapping[str, Any]]) -> dict[str, Flat]:
    """Copies on the host, which stay as they are when the device's buffers are donated."""
    # Of everything at once: the transfers overlap. On the CPU it yields views, so copy.
    on_host: Any = jax.device_get(items)
    return {
        name: {key: np.array(value) for key, value in flat.items()}
        for name, flat in on_host.items()
    }


def without_empty(items: Mapping[str, Mapping[str, Any]]) -> dict[str, Flat]:
    """What can be stored: Orbax takes neither arrays without elements nor empty items."""
    full = {name: {k: v for k, v in flat.items() if v.size} for name, flat in items.items()}
    return {name: flat for name, flat in full.items() if flat}


def described(flat: Mapping[str, Any]) -> dict[str, str]:
    """Each array's dtype and shape, in words."""
    return {name: describe_array(array) for name, array in flat.items()}


def placed(value: np.ndarray, like: Any) -> Any:
    """A stored array with the dtype, the sharding and the kind of key of another one."""
    if not is_rng_key(like):
        return jax.device_put(value.astype(like.dtype, copy=False), _sharding(like))
    data = jax.device_put(value, _sharding(like))
    return jax.random.wrap_key_data(data, impl=rng_key_impl(like))


def restore_args(item: str, names: Iterable[str]) -> Any:
    """What makes Orbax read these leaves of an item, as NumPy arrays, and no other."""
    import orbax.checkpoint as ocp  # a handle that restores nothing does without it

    names = list(names)
    return ocp.args.PyTreeRestore(
        item={item: dict.fromkeys(names, 0)},
        restore_args={item: dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))},
        partial_restore=True,
    )


def _sharding(like: Any) -> Any:
    return like.sharding if isinstance(like, jax.Array) else None
