"""Decoupled weight decay: toward zero, the weights as built, or given arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nitro._trees import Flat, describe_array, named_leaves
from nitro.errors import ConfigError


class DecayInputs(NamedTuple):
    """What the decay of the weights reads; traced, so that other values compile nothing.

    Attributes:
        applies: float32 (parameters,): 1 for each parameter that decays, 0 for each that
            is left out. As numbers they cost nothing, and so the choice is in no key.
        toward: The anchor of each parameter of a group that does not decay toward zero.
    """

    applies: Any
    toward: Flat


def decay_pulls(
    params: Mapping[str, Any], *, coefficients: Mapping[str, Any], anchor: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """The term `coefficient * (weight - anchor)` of each parameter, in its own dtype.

    Args:
        params: The weights before the update.
        coefficients: float32 () for each: the decay times the rate, 0 if it is left out.
        anchor: What they decay toward; zero for a parameter that is not there.

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2,
        https://arxiv.org/abs/1711.05101.
    """

    def pull(name: str, weight: Any) -> jax.Array:
        distance = weight - anchor[name] if name in anchor else weight
        return jnp.asarray(coefficients[name], weight.dtype) * distance

    return {name: pull(name, weight) for name, weight in params.items()}


def read_anchor(
    called: str, anchor: Any, *, leaves: Sequence[str], params: Flat, initial: Flat
) -> tuple[str, Flat]:
    """What the `decay_anchor` hook returned for a group: its kind and its arrays.

    Args:
        called: The call, for messages.
        anchor: What it returned.
        leaves: The names of the group's parameters.
        params: All parameters.
        initial: All parameters as `build_model` made them.

    Returns:
        "zero", "init" or "arrays"; and copies of the arrays by parameter, none for zero.

    Raises:
        ConfigError: Anything else, or arrays that do not fit the group.
    """
    if isinstance(anchor, str) and anchor == "zero":
        return "zero", {}
    if isinstance(anchor, str) and anchor == "init":
        # The step program overwrites the buffers of the weights.
        return "init", {name: initial[name].copy() for name in leaves}
    if isinstance(anchor, nnx.State):
        anchor = nnx.to_pure_dict(anchor)
    if not isinstance(anchor, Mapping):
        raise ConfigError(
            f"`{called}` is {anchor!r} ({type(anchor).__name__}).",
            expected='"zero", "init", or a tree of arrays by parameter name',
        )
    given = named_leaves(dict(anchor))
    _check_fit(called, given, leaves=leaves, params=params)
    return "arrays", {
        name: jnp.array(np.asarray(given[name]), params[name].dtype) for name in leaves
    }


def _check_fit(called: str, given: Flat, *, leaves: Sequence[str], params: Flat) -> None:
    unknown = [name for name in given if name not in params]
    missing = [name for name in leaves if name not in given]
    if unknown or missing:
        problem = (
            f"names `{unknown[0]}`, which is no parameter"
            if unknown
            else f"lacks the parameter `{missing[0]}`"
        )
        raise ConfigError(
            f"`{called}` {problem}.",
            expected="an array for each parameter of the group, excluded ones too: "
            + ", ".join(f"`{name}`" for name in leaves),
            fix="return, for example, `nnx.state(pretrained, nnx.Param)`",
        )
    for name in leaves:
        if np.shape(given[name]) != params[name].shape:
            raise ConfigError(
                f"`{called}` has `{name}` of shape {np.shape(given[name])}.",
                expected=f"the shape of the parameter, {describe_array(params[name])}",
            )
