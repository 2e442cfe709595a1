"""Traced scalars that promote nothing, as if they were Python numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


def call_weakly(
    function: Callable[..., Any], scalars: Mapping[str, jax.Array], *arguments: Any
) -> Any:
    """Calls a pure function with scalars that are traced, yet typed as Python numbers are.

    A float32 rate would lift a bfloat16 update to float32, which the same recipe with a
    number in the rate's place does not. JAX calls that number weakly typed, and has no
    public cast to it: so the function is traced with weak types, and its equations, which
    hold every conversion by then, are applied to the scalars as they are.

    Args:
        function: Called as `function(scalars, *arguments)`; any trees of arrays.
        scalars: float32 (), by name.
        arguments: Trees of arrays.
    """
    weak = {
        name: jax.ShapeDtypeStruct(scalar.shape, scalar.dtype, weak_type=True)
        for name, scalar in scalars.items()
    }
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(weak, *arguments)
    leaves = jaxpr_as_fun(jaxpr)(*jax.tree.leaves((dict(scalars), *arguments)))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
