"""Looks into a traced program: its equations, inner ones too, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of inner jaxprs (loops, calls, branches) included."""
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    for equation in inner.eqns:
        yield equation
        for parameter in equation.params.values():
            for nested in jax.tree.leaves(parameter, is_leaf=_is_jaxpr):
                if _is_jaxpr(nested):
                    yield from equations(nested)


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives in a jaxpr."""
    return {equation.primitive.name for equation in equations(jaxpr)}


def matmul_flops(jaxpr: Any) -> float:
    """Floating-point operations of the matrix products and convolutions.

    Bodies of loops count once, so for a program with loops this is a lower bound.
    """
    return float(sum(_flops(equation) for equation in equations(jaxpr)))


def _flops(equation: Any) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        depth = math.prod(shape[axis] for axis in contracted)
        return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(kernel) / out_channels * math.prod(equation.outvars[0].aval.shape)
    return 0.0


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)
