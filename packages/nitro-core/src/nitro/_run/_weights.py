"""Weights that are handed over: another handle's, a module's, or arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from nitro._checkpoint import leaf_differences, listed
from nitro._trees import Flat, describe_array, is_rng_key, named_leaves
from nitro.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Arrays by dotted name.

    Attributes:
        arrays: Parameters, and all, some or none of the model's other variables.
        display: Where they come from, in words.
    """

    arrays: Flat
    display: str

    def fitted(self, params: Flat, model_state: Flat) -> tuple[Flat, Flat]:
        """Copies with the model's dtypes; variables that are not there stay as built.

        Raises:
            ConfigError: Lists the names that are missing, unknown, or of another shape.
        """
        lines = leaf_differences(
            self._described(model_state),
            _words(params),
            converts=True,
            found="given",
            now="in the model",
            gone="not in the model",
        )
        present = {n: model_state[n] for n in model_state if n in self.arrays}
        lines += [
            f"`{name}`: {describe_array(self.arrays[name])} given, {describe_array(leaf)} in the model"
            for name, leaf in present.items()
            if not is_rng_key(leaf) and np.shape(self.arrays[name]) != leaf.shape
        ]
        if lines:
            raise ConfigError(
                f"The weights, {self.display}, do not fit the model:\n{listed(lines)}",
                expected="an array for each parameter, by dotted name or nested",
                fix="rename or reshape them; `nnx.state(run.model, nnx.Param)` shows the names",
            )
        state = {**model_state, **self._taken(present)}
        return self._taken(params), state

    def _described(self, model_state: Flat) -> dict[str, str]:
        return _words({n: a for n, a in self.arrays.items() if n not in model_state})

    def _taken(self, like: Flat) -> Flat:
        return {name: _converted(self.arrays[name], leaf) for name, leaf in like.items()}


def read_weights(weights: Any) -> Weights:
    """Handed-over weights as arrays by name.

    Args:
        weights: Another handle, a module, an `nnx.State`, or a mapping, flat or nested.

    Raises:
        ConfigError: Anything else.
    """
    session = getattr(weights, "_session", None)
    if session is not None:
        state, setup = session.state, session.setup
        return Weights(
            arrays={**state.params, **state.model_state},
            display=f"taken from {setup.owner} at epoch {session.epoch} ({setup.options.run_dir})",
        )
    kind = type(weights).__name__
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights)
    if isinstance(weights, nnx.State):
        weights = nnx.to_pure_dict(weights)
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"`weights` is {weights!r} ({kind}).",
            expected="another handle, a module, a mapping of arrays by name, or a record's path",
        )
    return Weights(arrays=named_leaves(dict(weights)), display=f"given as {kind}")


def anchor_weights(w0: Any, *, built: Flat, started: Flat, has_source: bool) -> Flat:
    """The weights that a decay toward `"init"` means.

    Args:
        w0: `"build_model"`, `"weights"`, or what `read_weights` takes.
        built: The weights as `build_model` made them.
        started: The weights that training starts from.
        has_source: Whether those come from somewhere else.

    Raises:
        ConfigError: Another value, `"weights"` without any, or arrays that do not fit.
    """
    if isinstance(w0, str) and w0 == "build_model":
        return built
    if isinstance(w0, str) and w0 == "weights":
        if not has_source:
            raise ConfigError(
                '`w0="weights"`, but the handle takes its weights from `build_model`.',
                fix="pass `weights=` or `checkpoint=`, or leave `w0` out",
            )
        return started
    if isinstance(w0, str) or w0 is None:
        raise ConfigError(
            f"`w0` is {w0!r}.", expected='"build_model", "weights", or a tree of arrays by name'
        )
    return read_weights(w0).fitted(built, {})[0]


def _words(flat: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe_array(_arraylike(leaf)) for name, leaf in flat.items()}


def _arraylike(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _converted(value: Any, like: Any) -> Any:
    # Copies, by way of the host: the step program overwrites its state, the source keeps its
    # own, and what is spread over a mesh or on another device comes to where the model is.
    if is_rng_key(like):
        data = jax.random.key_data(value) if is_rng_key(_arraylike(value)) else value
        placed = jax.device_put(np.array(data), like.sharding)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
    return jax.device_put(np.array(value).astype(like.dtype), like.sharding)
