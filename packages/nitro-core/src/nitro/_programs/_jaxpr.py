"""Looks into a traced program: its equations, inner ones too, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of inner jaxprs (loops, calls, branches) included."""
    for inner in jaxprs(jaxpr):
        yield from inner.jaxpr.eqns


class InnerJaxpr(NamedTuple):
    """A jaxpr, or one inside it.

    Attributes:
        jaxpr: The jaxpr, open.
        arrays: The arrays that it holds, one for each of its constant variables.
        calls: The equations that it is the body of, innermost first.
    """

    jaxpr: Any
    arrays: Sequence[Any]
    calls: tuple[Any, ...]


def jaxprs(jaxpr: Any, calls: tuple[Any, ...] = ()) -> Iterator[InnerJaxpr]:
    """A jaxpr and all inner ones."""
    is_closed = hasattr(jaxpr, "jaxpr")
    opened, arrays = (jaxpr.jaxpr, jaxpr.consts) if is_closed else (jaxpr, ())
    yield InnerJaxpr(opened, arrays, calls)
    for equation in opened.eqns:
        for body in bodies(equation):
            yield from jaxprs(body, (equation, *calls))


def bodies(equation: Any) -> list[Any]:
    """The jaxprs inside a loop, call or branch."""
    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
    return [parameter for parameter in parameters if _is_jaxpr(parameter)]


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
